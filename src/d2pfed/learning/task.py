"""What is learned from: examples, the clients that hold them, the task they make up, and how it is dealt out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.numerics.ring import IntVector

Floats = NDArray[np.float32]
RowsByClient = tuple[IntVector, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Inputs and their labels, one of each per row: class labels, or whatever the loss takes."""

    inputs: torch.Tensor
    labels: torch.Tensor

    def __post_init__(self) -> None:
        if self.inputs.ndim < 2:
            raise ConfigError(f"inputs must be rows of at least one number, got shape {tuple(self.inputs.shape)}")
        if not self.labels.ndim or len(self.labels) != len(self.inputs):
            rows, got = len(self.inputs), tuple(self.labels.shape)
            raise ConfigError(f"labels must be one per row of inputs ({rows}), got shape {got}")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: IntVector) -> "Examples":
        """Return the given rows, copied."""
        index = torch.from_numpy(np.ascontiguousarray(rows, np.int64))
        return Examples(self.inputs[index], self.labels[index])

    def has_classes(self, count: int) -> bool:
        """Tell whether labels are classes below a count."""
        if self.labels.ndim != 1 or self.labels.dtype != torch.int64:
            return False
        return not len(self) or bool(self.labels.min() >= 0 and self.labels.max() < count)


class Clients(Protocol):
    """The population: client k in range(population) holds examples(k), the same at every call."""

    @property
    def population(self) -> int:
        """The number of clients."""
        ...

    def examples(self, client: int) -> Examples:
        """Return what one client holds; may be made on demand, may be empty."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StoredClients:
    """Clients that hold disjoint rows of one table in memory; `prepare` turns stored inputs into a model's."""

    table: Examples
    rows: tuple[IntVector, ...] = field(repr=False)
    prepare: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous
    population: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.rows:
            raise ConfigError("population must be at least 1, got 0")
        largest = max((int(rows.max()) for rows in self.rows if len(rows)), default=-1)
        if largest >= len(self.table):
            raise ConfigError(f"rows must be below {len(self.table)}, got {largest}")
        object.__setattr__(self, "population", len(self.rows))

    def examples(self, client: int) -> Examples:
        """Return the rows of one client."""
        check_client(client, self.population)
        own = self.table.take(self.rows[client])
        return Examples(self.prepare(own.inputs), own.labels)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Task:
    """Data to train on, to choose by (validation), and to report on (test, opened once at the end)."""

    name: str
    clients: Clients
    validation: Examples
    test: Callable[[], Examples]
    classes: int
    input_shape: tuple[int, ...]
    description: str

    def __post_init__(self) -> None:
        if self.classes < 2:
            raise ConfigError(f"classes must be at least 2, got {self.classes}")
        got = tuple(self.validation.inputs.shape[1:])
        if got != self.input_shape:
            raise ConfigError(f"validation inputs must have shape {self.input_shape}, got {got}")
        if self.validation.labels.dtype != torch.int64 or self.validation.labels.ndim != 1:
            raise ConfigError(f"class labels must be int64, one per row, got {self.validation.labels.dtype}")


def check_client(client: int, population: int) -> None:
    """Refuse a client outside range(population): a negative index would silently be another client."""
    if not 0 <= client < population:
        raise ConfigError(f"client must be in [0, {population}), got {client}")


@dataclass(frozen=True, slots=True)
class Iid:
    """Every client holds a fair sample of everything."""

    def split(self, labels: IntVector, population: int, generator: np.random.Generator) -> RowsByClient:
        """Deal all rows at random; sizes differ by at most one."""
        return _cut(generator.permutation(len(labels)), population)

    def counts(self, client: int, population: int, share: IntVector, size: int, seed: int) -> IntVector:
        """Draw how many of a client's `size` examples fall in each class, classes in proportion to `share`."""
        del population
        return np.random.default_rng([seed, client]).multinomial(size, share / share.sum())


@dataclass(frozen=True, slots=True)
class Shards:
    """Rows sorted by class and cut into contiguous pieces: most clients hold a single class."""

    def split(self, labels: IntVector, population: int, generator: np.random.Generator) -> RowsByClient:
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

    def split(self, labels: IntVector, population: int, generator: np.random.Generator) -> RowsByClient:
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

    def split(self, owners: IntVector) -> RowsByClient:
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


def _cut(rows: IntVector, population: int) -> RowsByClient:
    if not 1 <= population <= len(rows):
        raise ConfigError(f"population must be in [1, {len(rows)}], one example each at least, got {population}")
    return tuple(np.array_split(rows, population))
