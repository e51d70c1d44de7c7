"""What is learned from: examples, the clients that hold them, and the task they make up."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from d2pfed.errors import ConfigError

IntVector = NDArray[np.int64]


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

    def __post_init__(self) -> None:
        if not self.rows:
            raise ConfigError("population must be at least 1, got 0")
        largest = max((int(rows.max()) for rows in self.rows if len(rows)), default=-1)
        if largest >= len(self.table):
            raise ConfigError(f"rows must be below {len(self.table)}, got {largest}")

    @property
    def population(self) -> int:
        """The number of clients."""
        return len(self.rows)

    def examples(self, client: int) -> Examples:
        """Return the rows of one client."""
        check_client(client, self.population)
        own = self.table.take(self.rows[client])
        return Examples(self.prepare(own.inputs), own.labels)


@dataclass(frozen=True, eq=False)
class ReloadedClients:
    """Clients that are pickled as the function that loads them, so a worker process loads its own data.

    `load` must be a function that can be pickled (or `functools.partial` of one, say of `load_clients`), and must
    find the same data in every process. It is called once per process, when the clients are first asked for.
    """

    load: Callable[[], Clients]

    @property
    def population(self) -> int:
        """The number of clients."""
        return self._loaded.population

    def examples(self, client: int) -> Examples:
        """Return what one client holds."""
        return self._loaded.examples(client)

    @cached_property
    def _loaded(self) -> Clients:
        return self.load()

    def __getstate__(self) -> dict[str, object]:
        return {"load": self.load}


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
