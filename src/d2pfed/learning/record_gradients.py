"""Gradients of single records, many at once, each a function of its record and the model alone, bit for bit.

Records are processed in chunks of one fixed shape, filled up with copies that count for nothing. A trial at the start
compares bits across orders, neighbours and places in a chunk; where they differ, chunks have one record. A record whose
gradient raises counts as zero, and changes no other.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.learning.model import Model, Params, Tensors
from d2pfed.learning.rows import Rows, joined, mapped
from d2pfed.learning.task import Clients
from d2pfed.learning.user_clients import UserClients

Gradients = NDArray[np.float32]  # one row for each record or unit
Index = NDArray[np.int64]
Groups = Sequence[object] | Mapping[Any, object] | Callable[[int], object]

_MOST_ROWS = 512  # of a chunk
_LEAST_ROWS = 8
_CHUNK_BYTES = 1 << 23  # of the gradients of a chunk: they should not leave the cache
_TRIED = 8  # rows that the trial puts in other places

_log = logging.getLogger("d2pfed.learning")  # of whoever holds the records


class _Silo:
    """The rows of a silo, and which unit each belongs to."""

    def __init__(self, rows: Rows, owners: Index | None) -> None:
        self.rows = rows
        self._owners = owners
        if owners is None:
            self.count = len(rows)
            return
        self.count = int(owners.max()) + 1 if len(owners) else 0
        order = np.argsort(owners, kind="stable")
        self._members = np.split(order, np.cumsum(np.bincount(owners, minlength=self.count))[:-1])

    def members(self, chosen: Index) -> Index:
        """Return the rows of chosen units, unit after unit."""
        if self._owners is None or not len(chosen):
            return chosen
        return np.concatenate([self._members[unit] for unit in chosen])

    def owners_of(self, chosen: Index) -> Index:
        """Return the unit of each of these rows."""
        return chosen if self._owners is None else self._owners[self.members(chosen)]


class _Held:
    """What was loaded of the silos: each by itself, and all of them as one table."""

    def __init__(self) -> None:
        self.silos: dict[int, _Silo] = {}
        self.has_told = False  # that a record counts as zero
        self._table: tuple[Rows, Index] | None = None
        self._room = torch.empty(0, 0)

    def room(self, rows: int, dimension: int) -> torch.Tensor:
        """Return a place for the gradients of a chunk, the same for all of one shape."""
        if self._room.shape != (rows, dimension):
            self._room = torch.empty(rows, dimension)
        return self._room

    def table(self, silos: Sequence[_Silo]) -> tuple[Rows, Index]:
        """Return the rows of all silos, one after the other, and where each begins."""
        if self._table is None:
            try:
                rows = joined([silo.rows for silo in silos])
            except (RuntimeError, LookupError, TypeError, ValueError) as error:
                text = str(error).strip().splitlines()[:1]
                raise ConfigError(f"all silos must hold rows of one form: {''.join(text)[:160]}") from error
            starts = np.concatenate([[0], np.cumsum([len(silo.rows) for silo in silos])]).astype(np.int64)
            for silo, start, end in zip(silos, starts.tolist(), starts[1:].tolist(), strict=False):
                silo.rows = rows.between(start, end)  # nothing is held twice
            self._table = rows, starts
        return self._table


@dataclass(frozen=True, slots=True, eq=False)
class RecordTrainer:
    """Computes the gradients of the records of some silos; what a unit sends is its gradient, downhill.

    Attributes:
        model: what is trained.
        silos: who holds the records.
        groups: for each silo the owner of each row, such as a patient: all rows of one owner are one unit, whose
            gradients add up before they are clipped. None: each row is a unit.
        chunk: how many records are processed at once; 0: chosen by `tried`.
        held: what was loaded of the silos so far.
    """

    model: Model
    silos: Clients | UserClients
    groups: Groups | None = field(default=None, repr=False)
    chunk: int = 0
    held: _Held = field(default_factory=_Held, repr=False)

    def __post_init__(self) -> None:
        if self.model.has(torch.nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - no other name
            raise ConfigError(
                "batch norm mixes the records of a batch, so none could be clipped by itself: use GroupNorm instead"
            )

    def tried(self, params: Params, expected: float) -> "RecordTrainer":
        """Return the trainer with chunks in which a record's gradient does not depend on its neighbours or place.

        `expected` is the usual number of records at once: chunks hold nearly all such numbers, as a call costs much.
        """
        if self.silos.population > 1:  # silos that do not fit together are found before anything is charged
            self.held.table([self.silo(each) for each in range(self.silos.population)])
        size = self.chunk or self._chunk(expected)
        rows = next((silo.rows for each in range(self.silos.population) if (silo := self.silo(each)).count), None)
        if rows is None:
            raise ConfigError("some silo must hold records, none does")
        for chunk, count in ((size, size), (1, _TRIED)):
            own = replace(self, chunk=chunk)
            if own._is_place_blind(params, rows.take(np.arange(count) % len(rows))):  # noqa: SLF001 - its own
                return own
        raise ConfigError(
            "a record's gradient must be the same every time, and this module's, loss's or step's is not: it draws "
            "random numbers, or keeps something from one record to the next"
        )

    def _chunk(self, expected: float) -> int:
        most = min(_MOST_ROWS, max(_LEAST_ROWS, _CHUNK_BYTES // (4 * self.model.dimension)))
        likely = expected + 2.5 * math.sqrt(expected)
        return _LEAST_ROWS * math.ceil(likely / math.ceil(likely / most) / _LEAST_ROWS)

    def silo(self, client: int) -> _Silo:
        """Return what a silo holds, loaded once."""
        if client not in self.held.silos:
            found = self.silos.examples(client)
            rows = found if isinstance(found, Rows) else Rows(found.inputs, found.labels)
            self.held.silos[client] = _Silo(rows, self._owners(client, len(rows)))
        return self.held.silos[client]

    def count(self, client: int) -> int:
        """Return how many units a silo holds."""
        return self.silo(client).count

    def count_all(self) -> int:
        """Return how many units all silos hold."""
        return sum(map(self.count, range(self.silos.population)))

    def units(self, params: Params, client: int) -> "SiloUnits":
        """Return a silo's units under a model."""
        return SiloUnits(self, params, client)

    def gradients(self, params: Params, wanted: Sequence[tuple[int, Index]]) -> Iterator[tuple[int, Gradients]]:
        """Yield the vectors of chosen units of some silos, each silo's in their order.

        Records of several silos may share a chunk, as no record's gradient depends on another's.
        """
        for clients, found in self.chunks(params, wanted):
            for client, first, last in _runs(clients):
                yield client, found[first:last].copy()

    def chunks(self, params: Params, wanted: Sequence[tuple[int, Index]]) -> Iterator[tuple[Index, Gradients]]:
        """Yield the vectors of chosen units, chunk by chunk, with the silo of each; the next may take their place."""
        parts = [(client, self.silo(client), chosen) for client, chosen in wanted if len(chosen)]
        if not parts:
            return
        rows = self._taken(parts)
        owners = [silo.owners_of(chosen) for _, silo, chosen in parts]
        clients = np.repeat([client for client, *_ in parts], [len(each) for each in owners])
        gradients, units = self._at(params, self.held), np.concatenate(owners)
        sums = None if self.groups is None else _Sums(self.model.dimension)
        for start in range(0, len(rows), self.chunk):
            own = rows.between(start, start + self.chunk)
            end = start + len(own)
            found = self._each(gradients, own)
            if sums is None:
                yield clients[start:end], found
            elif ended := sums.add(clients[start:end], units[start:end], found, is_last=end == len(rows)):
                yield np.array([client for client, _ in ended]), np.stack([total for _, total in ended])

    def _taken(self, parts: Sequence[tuple[int, _Silo, Index]]) -> Rows:
        """Return the rows of chosen units, out of one table where there are several silos: to take them is faster."""
        if len(parts) == 1:
            return parts[0][1].rows.take(parts[0][1].members(parts[0][2]))
        table, starts = self.held.table([self.silo(client) for client in range(self.silos.population)])
        return table.take(
            np.concatenate([starts[client] + silo.members(chosen) for client, silo, chosen in parts])
        )

    def _at(self, params: Params, held: _Held | None = None) -> Callable[[Rows], Gradients]:
        """Return a function from rows to the gradient of each row's loss, downhill, under a model.

        What it returns is in the same place of what is held every time: fresh memory costs as much as the gradients.
        """
        values, fixed = self.model.unflatten(params), self.model.fixed()

        def gain(trained: Tensors, inputs: Any, labels: Any) -> torch.Tensor:  # noqa: ANN401 - any data
            one = mapped(lambda leaf: leaf.unsqueeze(0), inputs), mapped(lambda leaf: leaf.unsqueeze(0), labels)
            return -self.model.training_losses(trained | fixed, *one).mean()

        def gradients(rows: Rows) -> Gradients:
            axes = (0, 0, None if rows.labels is None else 0)
            # Each record multiplies parameters of its own: a product of the whole chunk treats rows by their place.
            own = {name: value.expand(len(rows), *value.shape) for name, value in values.items()}
            try:
                found = torch.func.vmap(torch.func.grad(gain), in_dims=axes)(own, rows.inputs, rows.labels)
            except RuntimeError as error:
                raise ConfigError(
                    "the module's gradients cannot be taken record by record (dropout, values that steer the program "
                    f"and buffers that change cannot be used there): {str(error).strip().splitlines()[0][:160]}"
                ) from error
            flat = [found[name].reshape(len(rows), -1).float() for name in self.model.names]
            if held is None or flat[0].device.type != "cpu":
                return np.ascontiguousarray(torch.cat(flat, 1).cpu().numpy())
            return torch.cat(flat, 1, out=held.room(len(rows), self.model.dimension)).numpy()

        return gradients

    def _each(self, gradients: Callable[[Rows], Gradients], rows: Rows) -> Gradients:
        """Return the gradient of each row of a chunk; one that raises is not a number, and counts as zero.

        Guarantee: what a row gets does not depend on which others are in the chunk, or raise. A chunk that raises is
        halved until the row is alone, in the same shape, with copies of itself. Proof: theory.md#records.
        Checked: test_learning_records.py::test_a_record_that_raises_counts_as_zero_and_moves_no_other.
        """
        try:
            return gradients(_padded(rows, self.chunk))[: len(rows)]
        except KeyboardInterrupt:  # its owner stops it
            raise
        except BaseException:  # noqa: BLE001 - whatever a user's module or torch raises
            if len(rows) == 1:
                self._tell()
                return np.full((1, self.model.dimension), np.nan, np.float32)
        half = len(rows) // 2
        first = self._each(gradients, rows.between(0, half)).copy()
        return np.concatenate([first, self._each(gradients, rows.between(half, len(rows)))])

    def _tell(self) -> None:
        """Log, once, that a record counts as zero: no result may show it, but its holder should know."""
        if not self.held.has_told:
            _log.warning("the gradient of a record cannot be computed: it counts as zero", exc_info=True)
        self.held.has_told = True

    def _is_place_blind(self, params: Params, rows: Rows) -> bool:
        """Tell whether rows have the same gradients, to the bit, in another order, with others, and in other places."""
        size, plainly = len(rows), self._at(params)
        self._require_computable(plainly, rows)

        def gradients(some: Rows) -> Gradients:
            parts = (some.between(start, start + self.chunk) for start in range(0, len(some), self.chunk))
            return np.concatenate([self._each(plainly, part).copy() for part in parts])

        plain = gradients(rows)
        for order in (np.arange(size)[::-1], np.roll(np.arange(size), 1), np.argsort(np.arange(size) * 7 % size)):
            if not np.array_equal(gradients(rows.take(order)), plain[order], equal_nan=True):
                return False
        for row in range(0, size, max(1, size // _TRIED)):
            if not np.array_equal(gradients(rows.between(row, row + 1))[0], plain[row], equal_nan=True):
                return False
        return True

    def _require_computable(self, gradients: Callable[[Rows], Gradients], rows: Rows) -> None:
        """Refuse a module whose gradient raises for every row: then it is no record's doing."""
        for row in range(len(rows)):
            try:
                gradients(_padded(rows.between(row, row + 1), self.chunk))
            except Exception:
                if row + 1 == len(rows):
                    raise
            else:
                return

    def _owners(self, client: int, rows: int) -> Index | None:
        if self.groups is None:
            return None
        given = self.groups(client) if callable(self.groups) else self._listed(client)
        names = np.asarray(given)
        if names.ndim != 1 or len(names) != rows:
            raise ConfigError(
                f"groups must name the owner of each of silo {client}'s {rows} rows, got {names.shape}"
            )
        try:
            return np.unique(names, return_inverse=True)[1].astype(np.int64)
        except TypeError:
            raise ConfigError(
                f"groups must name owners by numbers or texts, silo {client} has other values"
            ) from None

    def _listed(self, client: int) -> object:
        """Return the owners of a silo's rows: by its place, or where both are mappings by its own key."""
        groups: Any = self.groups
        if not (hasattr(groups, "__len__") and hasattr(groups, "__getitem__")):
            raise ConfigError(f"groups must be a sequence, a mapping or a function, got {type(groups).__name__}")
        if len(groups) != self.silos.population:
            raise ConfigError(f"groups must be given for {self.silos.population} silos, got {len(groups)}")
        if not isinstance(groups, Mapping):
            return groups[client]
        name = self.silos.names[client] if isinstance(self.silos, UserClients) else client
        if name not in groups:
            raise ConfigError(f"groups must have the keys of the silos, and {name!r} is not among them")
        return groups[name]


@dataclass(frozen=True, slots=True, eq=False)
class SiloUnits:
    """A silo's units under a model, as the client half of a round asks for them."""

    trainer: RecordTrainer
    params: Params = field(repr=False)
    client: int

    @property
    def count(self) -> int:
        """How many units there are."""
        return self.trainer.count(self.client)

    def gradients(self, chosen: Index) -> Iterator[Gradients]:
        """Yield the vectors of the chosen units."""
        for _, found in self.trainer.gradients(self.params, [(self.client, chosen)]):
            yield found


class _Sums:
    """Adds up the gradients of each unit's rows, row after row in double precision, wherever chunks end."""

    def __init__(self, dimension: int) -> None:
        self._total = np.zeros(dimension)
        self._key: tuple[int, int] | None = None

    def add(
        self, clients: Index, owners: Index, found: Gradients, *, is_last: bool
    ) -> list[tuple[int, NDArray[np.float32]]]:
        """Take the gradients of some rows; return those of the units that end among them, each with its silo."""
        ended: list[tuple[int, NDArray[np.float32]]] = []
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite counts as zero later
            for client, owner, gradient in zip(clients.tolist(), owners.tolist(), found, strict=True):
                if self._key != (client, owner):
                    self._end(ended)
                    self._key = (client, owner)
                self._total += gradient
            if is_last:
                self._end(ended)
        return ended

    def _end(self, ended: list[tuple[int, NDArray[np.float32]]]) -> None:
        if self._key is not None:
            ended.append((self._key[0], self._total.astype(np.float32)))
        self._key = None
        self._total[:] = 0


def _padded(rows: Rows, size: int) -> Rows:
    """Return the rows filled up to a fixed number with copies of the last: zeros could raise where no row does."""
    if len(rows) == size:
        return rows

    def fill(leaf: torch.Tensor) -> torch.Tensor:
        return torch.cat([leaf, leaf[-1:].expand(size - len(leaf), *leaf.shape[1:])])

    return Rows(mapped(fill, rows.inputs), mapped(fill, rows.labels))


def _runs(clients: Index) -> Iterator[tuple[int, int, int]]:
    """Yield each client with the first and last place of its rows."""
    edges = [0, *(np.flatnonzero(np.diff(clients)) + 1).tolist(), len(clients)]
    for first, last in pairwise(edges):
        yield int(clients[first]), first, last
