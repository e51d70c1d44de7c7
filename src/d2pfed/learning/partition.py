"""Which client holds which examples: evenly mixed, in shards by class, Dirichlet, or by real owner."""

from dataclasses import dataclass

import numpy as np

from d2pfed.errors import ConfigError
from d2pfed.learning.task import IntVector

Rows = tuple[IntVector, ...]


@dataclass(frozen=True, slots=True)
class Iid:
    """Every client holds a fair sample of everything."""

    def split(self, labels: IntVector, population: int, generator: np.random.Generator) -> Rows:
        """Deal all rows at random; sizes differ by at most one."""
        return _cut(generator.permutation(len(labels)), population)

    def counts(self, client: int, population: int, share: IntVector, size: int, seed: int) -> IntVector:
        """Draw how many of a client's `size` examples fall in each class, classes in proportion to `share`."""
        del population
        return np.random.default_rng([seed, client]).multinomial(size, share / share.sum())


@dataclass(frozen=True, slots=True)
class Shards:
    """Rows sorted by class and cut into contiguous pieces: most clients hold a single class."""

    def split(self, labels: IntVector, population: int, generator: np.random.Generator) -> Rows:
        """Cut the rows, sorted by class and in random order within one, into near-equal pieces."""
        shuffled = generator.permutation(len(labels))
        return _cut(shuffled[np.argsort(labels[shuffled], kind="stable")], population)

    def counts(self, client: int, population: int, share: IntVector, size: int, seed: int) -> IntVector:
        """Count the classes of a client's piece of all `population * size` examples sorted by class."""
        del seed
        ends = np.cumsum(share) * (population * size) // share.sum()
        inside = np.clip(ends, client * size, (client + 1) * size) - client * size
        return np.asarray(np.diff(inside, prepend=0))


@dataclass(frozen=True, slots=True)
class Dirichlet:
    """Every client has its own mix of classes, drawn from a symmetric Dirichlet law; small alpha is uneven."""

    alpha: float

    def __post_init__(self) -> None:
        if not 0 < self.alpha < np.inf:
            raise ConfigError(f"alpha must be positive and finite, got {self.alpha}")

    def split(self, labels: IntVector, population: int, generator: np.random.Generator) -> Rows:
        """Give each client an equal number of rows, by its own mix as far as the classes last.

        Each of a client's places draws a class; a class fills the places that drew it, in random order, until it runs
        out, and the places left over take the rows left over.
        """
        present, classes = np.unique(labels, return_inverse=True)
        mixes = generator.dirichlet(np.full(len(present), self.alpha), population)
        places = np.concatenate([np.full(len(p), k) for k, p in enumerate(_cut(labels, population))])
        draws = generator.random(len(labels))[:, None]
        drawn = (draws > np.cumsum(mixes, axis=1)[places, :-1]).sum(axis=1)
        rows = np.full(len(labels), -1)
        for label in range(len(present)):
            supply = generator.permutation(np.flatnonzero(classes == label))
            waiting = generator.permutation(np.flatnonzero(drawn == label))
            filled = min(len(supply), len(waiting))
            rows[waiting[:filled]] = supply[:filled]
        unfilled = np.flatnonzero(rows < 0)
        rows[unfilled] = generator.permutation(np.setdiff1d(np.arange(len(labels)), rows))
        return _cut(rows, population)

    def counts(self, client: int, population: int, share: IntVector, size: int, seed: int) -> IntVector:
        """Draw a client's mix among the classes there are, then its class counts from that mix."""
        del population
        generator = np.random.default_rng([seed, client])
        counts = np.zeros(len(share), np.int64)
        there = share > 0
        counts[there] = generator.multinomial(size, generator.dirichlet(np.full(there.sum(), self.alpha)))
        return counts


@dataclass(frozen=True, slots=True)
class ByOwner:
    """Every client is a real person of the data: a writer, a speaker."""

    def split(self, owners: IntVector) -> Rows:
        """Give each owner its own rows, in their order; owners by increasing number."""
        order = np.argsort(owners, kind="stable")
        starts = np.flatnonzero(np.diff(owners[order])) + 1
        return tuple(np.split(order, starts))


Partition = Iid | Shards | Dirichlet | ByOwner


def parse_partition(text: str) -> Partition:
    """Read `iid`, `shards`, `dirichlet:ALPHA` or `owner`."""
    name, _, rest = text.partition(":")
    plain: dict[str, Partition] = {"iid": Iid(), "shards": Shards(), "owner": ByOwner()}
    if name in plain and not rest:
        return plain[name]
    if name == "dirichlet":
        try:
            return Dirichlet(float(rest))
        except ValueError as error:
            raise ConfigError(f"dirichlet needs a number, as in dirichlet:0.1, got {text!r}") from error
    raise ConfigError(f"partition must be iid, shards, dirichlet:ALPHA or owner, got {text!r}")


def _cut(rows: IntVector, population: int) -> Rows:
    if not 1 <= population <= len(rows):
        raise ConfigError(f"population must be in [1, {len(rows)}], one example each at least, got {population}")
    return tuple(np.array_split(rows, population))
