"""Clients as a user has them: a sequence, a mapping or a function of data sets, each loaded when it is asked for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from d2pfed.errors import ConfigError
from d2pfed.learning.rows import Rows, rows_of
from d2pfed.learning.task import Examples, check_client

_MOST_EMPTY = 1000  # clients that are asked in search of one with data

Loader = Callable[[int], object]


@dataclass(frozen=True, slots=True, eq=False)
class UserClients:
    """The population: client k in range(population) holds what `load(k)` returns."""

    load: Loader = field(repr=False)
    population: int
    device: torch.device

    @staticmethod
    def of(clients: object, population: int | None, device: torch.device) -> "UserClients":
        """Take a sequence or mapping of data sets, or a function from a client's number to its data set."""
        load, count = _loader(clients, population)
        if count < 1:
            raise ConfigError(f"clients must be at least 1, got {count}")
        return UserClients(load, count, device)

    @property
    def names(self) -> Sequence[object]:
        """What clients are called, by their number: the keys of a mapping, else the numbers."""
        return self.load.keys if isinstance(self.load, _Keyed) else range(self.population)

    def examples(self, client: int) -> Rows:
        """Return what one client holds, on the device."""
        check_client(client, self.population)
        owner = f"client {client}"
        try:
            held = self.load(client)
        except Exception as error:
            raise ConfigError(f"{owner} cannot be loaded: {type(error).__name__}: {error}") from error
        try:
            return rows_of(held, owner).to(self.device)
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
class LabelledClients:
    """The same clients where each holds rows like these, one tensor of inputs and one of labels."""

    own: UserClients
    like: Examples = field(repr=False)  # of no rows

    @property
    def population(self) -> int:
        """The number of clients."""
        return self.own.population

    def examples(self, client: int) -> Examples:
        """Return what one client holds."""
        rows = self.own.examples(client)
        if not len(rows):
            return self.like
        found = rows.examples()
        if found is None or _kind(found) != _kind(self.like):
            raise ConfigError(f"client {client} must hold {_kind(self.like)}, as other clients do")
        return found


def _kind(examples: Examples) -> str:
    parts = (("inputs", examples.inputs), ("labels", examples.labels))
    return " and ".join(f"{name} of shape {tuple(part.shape[1:])} and type {part.dtype}" for name, part in parts)


@dataclass(frozen=True, slots=True, eq=False)
class _Keyed:
    """The data sets of a mapping, in its order."""

    held: Mapping[Any, object]
    keys: tuple[Any, ...]

    def __call__(self, client: int) -> object:
        """Return what a client holds."""
        return self.held[self.keys[client]]


_SPLIT = "split it, as in [(x[i::100], y[i::100]) for i in range(100)]"


def _loader(clients: object, population: int | None) -> tuple[Loader, int]:
    if isinstance(clients, tuple) and any(isinstance(each, torch.Tensor | np.ndarray) for each in clients):
        raise ConfigError(f"clients must be one data set per client, got one pair of arrays: {_SPLIT}")
    if isinstance(clients, Mapping):
        return _Keyed(clients, tuple(clients)), _agreed(len(clients), population)
    if isinstance(clients, Sequence) and not isinstance(clients, (str, bytes)):
        return clients.__getitem__, _agreed(len(clients), population)
    if callable(clients):
        if population is None:
            raise ConfigError("population must be given where clients is a function")
        if isinstance(population, bool) or not isinstance(population, int):
            raise ConfigError(f"population must be a whole number, got {population!r}")
        return clients, population
    whole = isinstance(clients, torch.Tensor | np.ndarray | Dataset | DataLoader)
    raise ConfigError(
        f"clients must be a sequence, a mapping or a function of data sets, got {type(clients).__name__}"
        f"{f': {_SPLIT}' if whole else ''}"
    )


def _agreed(count: int, population: int | None) -> int:
    if population not in (None, count):
        raise ConfigError(f"population is the number of clients, {count}, got {population}")
    return count
