"""What is learned from: examples, the clients that hold them, the task they make up, and how it is dealt out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.numerics.ring import IntVector

Floats = NDArray[np.float32]
RowsByClient = tuple[IntVector, ...]
Tree = Any  # a tensor, None, or a tuple or dictionary of trees: torch has no type for it


def mapped(change: Callable[..., object], *trees: Tree) -> Tree:
    """Return trees of one form as one, each tensor made of theirs."""
    first = trees[0]
    if first is None or isinstance(first, torch.Tensor):
        return None if first is None else change(*trees)
    if isinstance(first, Mapping):
        return {name: mapped(change, *(tree[name] for tree in trees)) for name in first}
    return tuple(mapped(change, *parts) for parts in zip(*trees, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Inputs and their labels, one row per example: class labels, or whatever the loss takes.

    Both are tensors, or trees of tensors where a user's module takes those. Labels are None where the data are no
    pairs, and inputs too where there are no rows: an empty data set does not say what its rows would be.
    """

    inputs: Tree
    labels: Tree = None
    count: int = field(init=False)

    def __post_init__(self) -> None:
        shapes = [tuple(leaf.shape) for leaf in self.leaves]
        if () in shapes or len({shape[0] for shape in shapes}) > 1:
            raise ConfigError(f"inputs and targets must have as many rows, got shapes {shapes}")
        object.__setattr__(self, "count", shapes[0][0] if shapes else 0)

    def __len__(self) -> int:
        return self.count

    def take(self, rows: IntVector) -> "Examples":
        """Return the given rows, copied."""
        index = torch.from_numpy(np.ascontiguousarray(rows, np.int64))
        return self.each(lambda leaf: leaf[index.to(leaf.device)])

    def between(self, start: int, end: int) -> "Examples":
        """Return the rows from `start` to `end`."""
        return self.each(lambda leaf: leaf[start:end])

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Examples":
        """Return the rows with each tensor changed."""
        return Examples(mapped(change, self.inputs), mapped(change, self.labels))

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The tensors of inputs and labels."""
        found: list[torch.Tensor] = []
        mapped(found.append, (self.inputs, self.labels))
        return found

    @property
    def are_tensors(self) -> bool:
        """Whether inputs are one tensor of rows, and labels another one."""
        return isinstance(self.labels, torch.Tensor) and getattr(self.inputs, "ndim", 0) > 1

    def has_classes(self, count: int) -> bool:
        """Tell whether labels are classes below a count."""
        if self.labels.ndim != 1 or self.labels.dtype != torch.int64:
            return False
        return not len(self) or bool(self.labels.min() >= 0 and self.labels.max() < count)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Examples that become tensors batch by batch, so that they may be of unequal length, or batches as they came."""

    items: Sequence[Any] = field(repr=False)
    collate: Callable[[list[Any]], Examples] = field(repr=False)  # from some items to a batch
    count: int  # of examples
    batch_size: int | None = None  # of items; None: as the training has it

    def __len__(self) -> int:
        return self.count

    def take(self, rows: IntVector) -> Examples:
        """Return the batch of some items."""
        return self.collate([self.items[row] for row in rows.tolist()])


def joined(parts: Sequence[Examples]) -> Examples:
    """Return the rows of several batches as one."""
    some = [part for part in parts if len(part)]
    if len(some) < 2:
        return next(iter((*some, *parts)), Examples(None))
    inputs, labels = ([getattr(part, name) for part in some] for name in ("inputs", "labels"))
    return Examples(*(mapped(lambda *leaves: torch.cat(leaves), *trees) for trees in (inputs, labels)))


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


def rows_by_owner(owners: IntVector) -> RowsByClient:
    """Return the rows of each owner, in their order; owners by increasing number."""
    order = np.argsort(owners, kind="stable")
    return tuple(np.split(order, np.flatnonzero(np.diff(owners[order])) + 1))


class PartitionKind(StrEnum):
    """Who holds what."""

    IID = "iid"  # every client a fair sample of everything
    SHARDS = "shards"  # rows sorted by class and cut into contiguous pieces: most clients hold a single class
    DIRICHLET = "dirichlet"  # every client its own mix of classes, by a Dirichlet law; small alpha is uneven
    OWNER = "owner"  # every client is a real person of the data: a writer, a speaker


@dataclass(frozen=True, slots=True)
class Partition:
    """How rows are dealt out to clients; alpha is that of a Dirichlet law."""

    kind: PartitionKind
    alpha: float = 0.0

    def __post_init__(self) -> None:
        if self.kind == PartitionKind.DIRICHLET and not 0 < self.alpha < np.inf:
            raise ConfigError(f"alpha must be positive and finite, got {self.alpha}")

    def split(self, labels: IntVector, population: int, generator: np.random.Generator) -> RowsByClient:
        """Return the rows of each client, by their classes; sizes differ by at most one.

        Under a Dirichlet law each of a client's places draws a class; a class fills the places that drew it, in random
        order, until it runs out, and the places left over take the rows left over.
        """
        if not 1 <= population <= len(labels):
            raise ConfigError(f"population must be in [1, {len(labels)}], an example each, got {population}")
        if self.kind == PartitionKind.DIRICHLET:
            present, classes = np.unique(labels, return_inverse=True)
            mixes = generator.dirichlet(np.full(len(present), self.alpha), population)
            sizes = [len(part) for part in np.array_split(labels, population)]
            places = np.repeat(np.arange(population), sizes)
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
        else:
            rows = generator.permutation(len(labels))
            if self.kind == PartitionKind.SHARDS:
                rows = rows[np.argsort(labels[rows], kind="stable")]
        return tuple(np.array_split(rows, population))

    def counts(self, client: int, population: int, share: IntVector, size: int, seed: int) -> IntVector:
        """Return how many of a client's `size` examples are of each class, where rows are made on demand.

        Shards are a client's piece of all `population * size` examples, classes in proportion to `share`, sorted.
        """
        if self.kind == PartitionKind.SHARDS:
            ends = np.cumsum(share) * (population * size) // share.sum()
            inside = np.clip(ends, client * size, (client + 1) * size) - client * size
            return np.asarray(np.diff(inside, prepend=0))
        generator = np.random.default_rng([seed, client])
        if self.kind == PartitionKind.IID:
            return generator.multinomial(size, share / share.sum())
        counts, there = np.zeros(len(share), np.int64), share > 0
        counts[there] = generator.multinomial(size, generator.dirichlet(np.full(there.sum(), self.alpha)))
        return counts


def parse_partition(text: str) -> Partition:
    """Read `iid`, `shards`, `dirichlet:ALPHA` or `owner`."""
    name, _, rest = text.partition(":")
    if name not in list(PartitionKind) or (rest and name != PartitionKind.DIRICHLET):
        raise ConfigError(f"partition must be iid, shards, dirichlet:ALPHA or owner, got {text!r}")
    try:
        alpha = float(rest) if name == PartitionKind.DIRICHLET else 0.0
    except ValueError as error:
        raise ConfigError(f"dirichlet needs a number, as in dirichlet:0.1, got {text!r}") from error
    return Partition(PartitionKind(name), alpha)
