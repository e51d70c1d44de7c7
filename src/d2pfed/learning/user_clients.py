"""Clients and data sets as a user has them: each data set is loaded when asked for, and becomes tensors by row."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from d2pfed.errors import ConfigError
from d2pfed.learning.task import Clients, Examples, Parts, Tree, check_client, joined, mapped

Collate = Callable[[list[Any]], Any]  # from some examples to a batch

EVALUATED_ROWS = 1000  # at once, where the data have no batches of their own
_MOST_EMPTY = 1000  # clients that are asked in search of one with data
_SPLIT = "split it, as in [(x[i::100], y[i::100]) for i in range(100)]"


def batches_of(data: object, owner: str, collate: Collate | None = None) -> Iterator[Examples]:
    """Yield the data set of an owner in batches: a pair, a Dataset, a DataLoader, or None for no data."""
    if data is None:
        return
    if isinstance(data, Examples) and data.labels is not None:
        data = data.inputs, data.labels
    is_pair = isinstance(data, tuple) and len(data) == 2 and all(_is_tree(part) for part in data)
    if isinstance(data, list) and len(data) == 2 and collate is None:
        # Two examples, unless both are whole tensors or arrays.
        is_pair = all(getattr(part, "ndim", 0) for part in data)
    if isinstance(data, Examples) or is_pair:
        rows = data if isinstance(data, Examples) else _paired(data)
        for start in range(0, max(len(rows), 1), EVALUATED_ROWS):
            yield rows.between(start, start + EVALUATED_ROWS)
    elif isinstance(data, (DataLoader, IterableDataset)):
        batches = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=EVALUATED_ROWS)
        yield from (_paired(batch) for batch in batches)
    elif _is_listed(data):
        items: Any = data  # a Dataset has a length only by convention
        for start in range(0, len(items), EVALUATED_ROWS):
            chosen = range(start, min(start + EVALUATED_ROWS, len(items)))
            yield _paired((collate or default_collate)([items[at] for at in chosen]))
    else:
        raise ConfigError(
            f"{owner} must hold a pair of tensors or arrays, a torch Dataset or a DataLoader, "
            f"got {type(data).__name__}"
        )


def parts_of(data: object, collate: Collate | None, device: torch.device) -> Parts | None:
    """Return examples that a function of the user's joins, or the batches of a loader that has one; else None."""
    move = lambda leaf: leaf.to(device)  # noqa: E731 - of both
    if isinstance(data, DataLoader) and data.collate_fn is not default_collate:
        batches = [_paired(batch) for batch in data]
        return Parts(batches, lambda some: some[0].each(move), sum(map(len, batches)), 1)
    if collate is None or isinstance(data, (tuple, DataLoader, IterableDataset)) or not _is_listed(data):
        return None
    items: Any = data
    return Parts(items, lambda some: _paired(collate(some)).each(move), len(items))


def _is_listed(data: object) -> bool:
    return isinstance(data, Dataset) or (isinstance(data, Sequence) and not isinstance(data, str))


def _is_tree(value: object) -> bool:
    if isinstance(value, (Mapping, tuple, list)):
        return all(_is_tree(part) for part in (value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype != object)


def _paired(batch: Tree) -> Examples:
    """Return a batch as rows; targets of whole numbers become int64, as torch's losses take classes."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return Examples(_tensors(batch))
    small = (torch.uint8, torch.int8, torch.int16, torch.int32)
    targets = mapped(lambda leaf: leaf.to(torch.int64) if leaf.dtype in small else leaf, _tensors(batch[1]))
    return Examples(_tensors(batch[0]), targets)


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
        found = torch.from_numpy(np.ascontiguousarray(tree, tree.dtype.newbyteorder("=")))
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
    collate: Collate | None = field(default=None, repr=False)

    @staticmethod
    def of(
        clients: object, population: int | None, device: torch.device, collate: Collate | None = None
    ) -> "UserClients":
        """Take a sequence or mapping of data sets, or a function from a client's number to its data set."""
        if population is not None and (isinstance(population, bool) or not isinstance(population, int)):
            raise ConfigError(f"population must be a whole number, got {population!r}")
        if isinstance(clients, tuple) and any(isinstance(each, torch.Tensor | np.ndarray) for each in clients):
            raise ConfigError(f"clients must be one data set per client, got one pair of arrays: {_SPLIT}")
        if isinstance(clients, Sequence | Mapping) and not isinstance(clients, (str, bytes)):
            load, count = clients.__getitem__, len(clients)
            if population not in (None, count):
                raise ConfigError(f"population is the number of clients, {count}, got {population}")
        elif callable(clients):
            if population is None:
                raise ConfigError("population must be given where clients is a function")
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
        return UserClients(load, names, count, device, collate)

    def examples(self, client: int) -> Examples:
        """Return what one client holds, on the device, as rows of one form."""
        rows = self.held(client)
        if isinstance(rows, Parts):
            raise ConfigError(
                f"client {client} must hold rows of one form here, and a collate function may pad one by others: pad "
                "all to one length"
            )
        return rows

    def held(self, client: int) -> Examples | Parts:
        """Return what one client holds, on the device; examples that a function of the user's joins stay apart."""
        check_client(client, self.population)
        owner = f"client {client}"
        with torch.random.fork_rng(devices=[]):  # what shuffles or is drawn is the same at every call
            torch.default_generator.manual_seed(client)
            return self._held(client, owner)

    def _held(self, client: int, owner: str) -> Examples | Parts:
        try:
            held = self.load(self.names[client])
        except Exception as error:
            raise ConfigError(f"{owner} cannot be loaded: {type(error).__name__}: {error}") from error
        try:
            if (parts := parts_of(held, self.collate, self.device)) is not None:
                return parts
            return joined(tuple(batches_of(held, owner))).each(lambda leaf: leaf.to(self.device))
        except (RuntimeError, TypeError, IndexError) as error:  # of rows that do not go together
            line = str(error).strip().partition("\n")[0][:160]
            raise ConfigError(f"{owner} must hold examples of one shape, or training a collate: {line}") from error
        except ConfigError as error:
            text = f"{error}"
            raise ConfigError(text if text.startswith(owner) else f"{owner}: {text}") from error

    def first(self) -> tuple[int, Examples | Parts]:
        """Return the first client that holds data, and its data."""
        for client in range(min(self.population, _MOST_EMPTY)):
            own = self.held(client)
            if len(own):
                return client, own
        raise ConfigError(f"some client must hold data, the first {min(self.population, _MOST_EMPTY)} hold none")


def held_by(clients: Clients | UserClients, client: int) -> Examples | Parts:
    """Return what one client holds, joined or not."""
    return clients.held(client) if isinstance(clients, UserClients) else clients.examples(client)


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
        wanted, got = (
            f"inputs of shape {tuple(each.inputs.shape[1:])} and type {each.inputs.dtype} and "
            f"labels of shape {tuple(each.labels.shape[1:])} and type {each.labels.dtype}"
            for each in (self.like, rows if rows.are_tensors else self.like)
        )
        if not rows.are_tensors or got != wanted:
            raise ConfigError(f"client {client} must hold {wanted}, as other clients do")
        return rows
