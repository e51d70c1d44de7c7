"""Clients and data sets as a user has them: each data set is loaded when asked for, and becomes tensors by row."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from d2pfed.errors import ConfigError
from d2pfed.learning.task import Examples, check_client
from d2pfed.numerics.ring import IntVector

EVALUATED_ROWS = 1000  # at once, where the data have no batches of their own
_MOST_EMPTY = 1000  # clients that are asked in search of one with data
_SPLIT = "split it, as in [(x[i::100], y[i::100]) for i in range(100)]"

Tree = Any  # a tensor, or a tuple or dictionary of trees: torch has no type for it


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Inputs and targets with one row per example; targets are None where the data are no pairs.

    Without rows the inputs may be None: an empty data set does not say what its rows would be.
    """

    inputs: Tree
    labels: Tree = None

    def __post_init__(self) -> None:
        shapes = [tuple(leaf.shape) for leaf in _leaves((self.inputs, self.labels))]
        if () in shapes or len({shape[0] for shape in shapes}) > 1:
            raise ConfigError(f"inputs and targets must have as many rows, got shapes {shapes}")

    def __len__(self) -> int:
        first = next(_leaves((self.inputs, self.labels)), None)
        return 0 if first is None else len(first)

    def take(self, rows: IntVector) -> "Rows":
        """Return the given rows, copied."""
        index = torch.from_numpy(np.ascontiguousarray(rows, np.int64))
        return self.each(lambda leaf: leaf[index.to(leaf.device)])

    def between(self, start: int, end: int) -> "Rows":
        """Return the rows from `start` to `end`."""
        return self.each(lambda leaf: leaf[start:end])

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Rows":
        """Return the rows with each tensor changed."""
        return Rows(mapped(change, self.inputs), mapped(change, self.labels))

    def examples(self) -> Examples | None:
        """Return the rows as one tensor of inputs and one of labels; None if they are something else."""
        inputs, labels = self.inputs, self.labels
        if not isinstance(inputs, torch.Tensor) or not isinstance(labels, torch.Tensor):
            return None
        return Examples(inputs, labels) if inputs.ndim > 1 else None


def mapped(change: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> Tree:
    """Return a tree with each tensor changed."""
    if tree is None or isinstance(tree, torch.Tensor):
        return None if tree is None else change(tree)
    if isinstance(tree, Mapping):
        return {name: mapped(change, part) for name, part in tree.items()}
    return tuple(mapped(change, part) for part in tree)


def concatenated(trees: Sequence[Tree]) -> Tree:
    """Return trees of one form as one, row after row."""
    first = trees[0]
    if first is None or isinstance(first, torch.Tensor):
        return None if first is None else torch.cat(list(trees))
    if isinstance(first, Mapping):
        return {name: concatenated([tree[name] for tree in trees]) for name in first}
    return tuple(concatenated(parts) for parts in zip(*trees, strict=True))


def _leaves(tree: Tree) -> Iterator[torch.Tensor]:
    """Yield the tensors of a tree."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif tree is not None:
        parts: Iterable[Tree] = tree.values() if isinstance(tree, Mapping) else tree
        for part in parts:
            yield from _leaves(part)


def joined(parts: Sequence[Rows]) -> Rows:
    """Return the rows of several batches as one."""
    some = [part for part in parts if len(part)]
    if len(some) > 1:
        return Rows(concatenated([part.inputs for part in some]), concatenated([part.labels for part in some]))
    return next(iter((*some, *parts)), Rows(None))


def batches_of(data: object, owner: str) -> Iterator[Rows]:
    """Yield a data set in batches: a pair, a Dataset, a DataLoader, or None for no data.

    `owner` is who holds it, for the error that refuses it.
    """
    if data is None:
        return
    if isinstance(data, Examples):
        data = data.inputs, data.labels
    is_pair = isinstance(data, tuple) and len(data) == 2 and all(_is_tree(part) for part in data)
    if isinstance(data, list) and len(data) == 2:  # two examples, unless both are whole tensors or arrays
        is_pair = all(getattr(part, "ndim", 0) for part in data)
    if isinstance(data, Rows) or is_pair:
        rows = data if isinstance(data, Rows) else _paired(data)
        for start in range(0, max(len(rows), 1), EVALUATED_ROWS):
            yield rows.between(start, start + EVALUATED_ROWS)
    elif isinstance(data, (DataLoader, IterableDataset)):
        batches = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=EVALUATED_ROWS)
        yield from (_paired(batch) for batch in batches)
    elif isinstance(data, Dataset) or (isinstance(data, Sequence) and not isinstance(data, str)):
        items: Any = data  # a Dataset has a length only by convention
        for start in range(0, len(items), EVALUATED_ROWS):
            chosen = range(start, min(start + EVALUATED_ROWS, len(items)))
            yield _paired(default_collate([items[at] for at in chosen]))
    else:
        raise ConfigError(
            f"{owner} must hold a pair of tensors or arrays, a torch Dataset or a DataLoader, "
            f"got {type(data).__name__}"
        )


def _is_tree(value: object) -> bool:
    if isinstance(value, (Mapping, tuple, list)):
        return all(_is_tree(part) for part in (value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype != object)


def _paired(batch: Tree) -> Rows:
    """Return a batch as rows; targets of whole numbers become int64, as torch's losses take classes."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return Rows(_tensors(batch))
    small = (torch.uint8, torch.int8, torch.int16, torch.int32)
    targets = mapped(lambda leaf: leaf.to(torch.int64) if leaf.dtype in small else leaf, _tensors(batch[1]))
    return Rows(_tensors(batch[0]), targets)


def _tensors(tree: Tree) -> Tree:
    """Return a tree of tensors; arrays of double precision become torch's default, as its modules are."""
    if isinstance(tree, Mapping):
        return {str(name): _tensors(part) for name, part in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(_tensors(part) for part in tree)
    if isinstance(tree, torch.Tensor):
        return tree
    if not isinstance(tree, np.ndarray):
        raise ConfigError(f"a batch must be made of tensors and arrays, got {type(tree).__name__}")
    try:
        found = torch.from_numpy(np.ascontiguousarray(tree))
    except TypeError:
        raise ConfigError(f"arrays must hold numbers, got the type {tree.dtype}") from None
    return found.to(torch.get_default_dtype()) if found.dtype == torch.float64 else found


@dataclass(frozen=True, slots=True, eq=False)
class UserClients:
    """The population: client k in range(population) holds what `load(names[k])` returns."""

    load: Callable[[Any], object] = field(repr=False)
    names: Sequence[Any] = field(repr=False)  # the keys of a mapping, else the numbers
    population: int
    device: torch.device

    @staticmethod
    def of(clients: object, population: int | None, device: torch.device) -> "UserClients":
        """Take a sequence or mapping of data sets, or a function from a client's number to its data set."""
        if isinstance(clients, tuple) and any(isinstance(each, torch.Tensor | np.ndarray) for each in clients):
            raise ConfigError(f"clients must be one data set per client, got one pair of arrays: {_SPLIT}")
        if isinstance(clients, Sequence | Mapping) and not isinstance(clients, (str, bytes)):
            load, count = clients.__getitem__, len(clients)
            if population not in (None, count):
                raise ConfigError(f"population is the number of clients, {count}, got {population}")
        elif callable(clients):
            if population is None:
                raise ConfigError("population must be given where clients is a function")
            if isinstance(population, bool) or not isinstance(population, int):
                raise ConfigError(f"population must be a whole number, got {population!r}")
            load, count = clients, population
        else:
            whole = isinstance(clients, torch.Tensor | np.ndarray | Dataset | DataLoader)
            raise ConfigError(
                f"clients must be a sequence, a mapping or a function of data sets, got {type(clients).__name__}"
                f"{f': {_SPLIT}' if whole else ''}"
            )
        if count < 1:
            raise ConfigError(f"clients must be at least 1, got {count}")
        names = tuple(clients) if isinstance(clients, Mapping) else range(count)
        return UserClients(load, names, count, device)

    def examples(self, client: int) -> Rows:
        """Return what one client holds, on the device."""
        check_client(client, self.population)
        owner = f"client {client}"
        try:
            held = self.load(self.names[client])
        except Exception as error:
            raise ConfigError(f"{owner} cannot be loaded: {type(error).__name__}: {error}") from error
        try:
            return joined(tuple(batches_of(held, owner))).each(lambda leaf: leaf.to(self.device))
        except ConfigError as error:
            text = f"{error}"
            raise ConfigError(text if text.startswith(owner) else f"{owner}: {text}") from error

    def first(self) -> tuple[int, Rows]:
        """Return the first client that holds data, and its data."""
        for client in range(min(self.population, _MOST_EMPTY)):
            own = self.examples(client)
            if len(own):
                return client, own
        raise ConfigError(f"some client must hold data, the first {min(self.population, _MOST_EMPTY)} hold none")


@dataclass(frozen=True, slots=True, eq=False)
class LabeledClients:
    """The same clients where each holds rows like these, one tensor of inputs and one of labels."""

    own: UserClients
    like: Examples = field(repr=False)  # of no rows
    population: int

    def examples(self, client: int) -> Examples:
        """Return what one client holds."""
        rows = self.own.examples(client)
        if not len(rows):
            return self.like
        found = rows.examples()
        wanted, got = (
            f"inputs of shape {tuple(each.inputs.shape[1:])} and type {each.inputs.dtype} and "
            f"labels of shape {tuple(each.labels.shape[1:])} and type {each.labels.dtype}"
            for each in (self.like, found or self.like)
        )
        if found is None or got != wanted:
            raise ConfigError(f"client {client} must hold {wanted}, as other clients do")
        return found
