"""Gradients of single records, many at once, each a function of its record and the model alone, bit for bit.

Records are processed in chunks of one fixed shape, filled up with copies that count for nothing, by a program that
treats all places alike (`record_program`). A trial at the start compares bits across orders, neighbors and places in a
chunk; where they differ, chunks have one record. A record whose gradient raises counts as zero, and changes no other.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.learning.model import Model, Params
from d2pfed.learning.record_program import Program, recorded, single_gradients
from d2pfed.learning.task import Clients, Examples, joined
from d2pfed.learning.user_clients import UserClients
from d2pfed.numerics.ring import IntVector

Gradients = NDArray[np.float32]  # one row for each record or unit
Groups = Sequence[object] | Mapping[Any, object] | Callable[[int], object]

_MOST_ROWS = 512  # of a chunk
_LEAST_ROWS = 8
_WHOLE_ROWS = 32  # a multiple of them fills the processor's registers: torch treats what is left over otherwise
_CHUNK_BYTES = 1 << 23  # of the gradients of a chunk: they should not leave the cache
_TRIED = 8  # rows that the trial puts in other places

_log = logging.getLogger("d2pfed.learning")  # read where the records are


@dataclass(slots=True, eq=False)
class _Silo:
    """The rows of a silo, the unit of each, and the rows of each unit where they are grouped."""

    rows: Examples
    units: IntVector
    by_unit: list[IntVector]
    count: int  # of units


@dataclass(slots=True, eq=False)
class _Held:
    """What was loaded of the silos, each by itself and all of them as one table, and what is used again."""

    silos: dict[int, _Silo] = field(default_factory=dict)
    table: tuple[Examples, IntVector] | None = None  # and where each silo begins
    programs: dict[tuple[object, ...], Program] = field(default_factory=dict)  # by the shape of a chunk
    room: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))  # for the gradients of a chunk
    has_told: bool = False  # that a record counts as zero


@dataclass(frozen=True, slots=True, eq=False)
class RecordTrainer:
    """Computes the gradients of the records of some silos; what a unit sends is its gradient, downhill.

    `groups` has for each silo the owner of each row, such as a patient: all rows of one owner are one unit, whose
    gradients add up before they are clipped. None: each row is a unit.
    """

    model: Model
    silos: Clients
    groups: Groups | None = field(default=None, repr=False)
    chunk: int = 0  # how many records are processed at once; 0: chosen by `tried`
    held: _Held = field(default_factory=_Held, repr=False)

    def __post_init__(self) -> None:
        if self.model.has(torch.nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - no other name
            raise ConfigError(
                "batch norm mixes the records of a batch, so none could be clipped by itself: use GroupNorm instead"
            )

    def tried(self, params: Params, expected: float) -> "RecordTrainer":
        """Return the trainer with chunks in which a record's gradient does not depend on its neighbors or place."""
        if self.silos.population > 1:  # silos that do not fit together are found before anything is charged
            self._table()
        most = min(_MOST_ROWS, max(_LEAST_ROWS, _CHUNK_BYTES // (4 * self.model.dimension)))
        likely = expected + 2.5 * math.sqrt(expected)  # nearly always enough for a batch: a call costs much
        step = _WHOLE_ROWS if most >= _WHOLE_ROWS else _LEAST_ROWS
        size = self.chunk or step * math.ceil(likely / math.ceil(likely / most) / step)
        rows = next((silo.rows for each in range(self.silos.population) if (silo := self._silo(each)).count), None)
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

    def count(self, client: int) -> int:
        """Return how many units a silo holds."""
        return self._silo(client).count

    def count_all(self) -> int:
        """Return how many units all silos hold."""
        return sum(map(self.count, range(self.silos.population)))

    def chunks(
        self, params: Params, wanted: Sequence[tuple[int, IntVector]]
    ) -> Iterator[tuple[IntVector, Gradients]]:
        """Yield the vectors of chosen units, in their order, with the silo of each; the next may take their place."""
        parts = [(client, self._silo(client), chosen) for client, chosen in wanted if len(chosen)]
        if not parts:
            return
        members = [
            chosen if self.groups is None else np.concatenate([silo.by_unit[unit] for unit in chosen])
            for _, silo, chosen in parts
        ]
        if len(parts) == 1:
            rows = parts[0][1].rows.take(members[0])
        else:  # out of one table: to take them is faster
            table, starts = self._table()
            own = [starts[client] + taken for (client, *_), taken in zip(parts, members, strict=True)]
            rows = table.take(np.concatenate(own))
        clients = np.repeat([client for client, *_ in parts], [len(taken) for taken in members])
        gradients, places = self._at(params), range(0, len(rows), self.chunk)
        found = (self._each(gradients, rows.between(start, start + self.chunk)) for start in places)
        if self.groups is None:
            yield from ((clients[at : at + self.chunk], own) for at, own in zip(places, found, strict=True))
            return
        # The gradients of each unit's rows are added up, row after row in double precision, wherever chunks end.
        units = np.concatenate([silo.units[taken] for (_, silo, _), taken in zip(parts, members, strict=True)])
        total, done = np.zeros(self.model.dimension), 0
        for chunk in found:
            ended, sums = [], []
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite counts as zero later
                for gradient in chunk:
                    total += gradient
                    unit, done = (clients[done], units[done]), done + 1
                    if done == len(clients) or (clients[done], units[done]) != unit:
                        ended.append(unit[0])
                        sums.append(total.astype(np.float32))
                        total[:] = 0
            if sums:
                yield np.array(ended), np.stack(sums)

    def _silo(self, client: int) -> _Silo:
        """Return what a silo holds, loaded once."""
        if client not in self.held.silos:
            rows, grouped = self.silos.examples(client), self.groups is not None
            units = self._owners(self.groups, client, len(rows)) if grouped else np.arange(len(rows))
            count, ends = int(units.max(initial=-1)) + 1, np.cumsum(np.bincount(units))
            by_unit = np.split(np.argsort(units, kind="stable"), ends[:-1]) if grouped else []
            self.held.silos[client] = _Silo(rows, units, by_unit, count)
        return self.held.silos[client]

    def _table(self) -> tuple[Examples, IntVector]:
        """Return the rows of all silos, one after the other, and where each begins."""
        if self.held.table is None:
            silos = [self._silo(each) for each in range(self.silos.population)]
            try:
                rows = joined([silo.rows for silo in silos])
            except (RuntimeError, LookupError, TypeError, ValueError) as error:
                text = str(error).strip().splitlines()[:1]
                raise ConfigError(f"all silos must hold rows of one form: {''.join(text)[:160]}") from error
            starts = np.concatenate([[0], np.cumsum([len(silo.rows) for silo in silos])]).astype(np.int64)
            for silo, start, end in zip(silos, starts.tolist(), starts[1:].tolist(), strict=False):
                silo.rows = rows.between(start, end)  # nothing is held twice
            self.held.table = rows, starts
        return self.held.table

    def _owners(self, groups: Any, client: int, rows: int) -> IntVector:  # noqa: ANN401 - whatever a user gives
        """Return the owner of each row of a silo: by its place, or where both are mappings by its own key."""
        if callable(groups):
            names = np.asarray(groups(client))
        elif not (hasattr(groups, "__len__") and hasattr(groups, "__getitem__")):
            raise ConfigError(f"groups must be a sequence, a mapping or a function, got {type(groups).__name__}")
        elif len(groups) != self.silos.population:
            raise ConfigError(f"groups must be given for {self.silos.population} silos, got {len(groups)}")
        else:
            name: object = client
            if isinstance(groups, Mapping) and isinstance(self.silos, UserClients):
                name = self.silos.names[client]
            if isinstance(groups, Mapping) and name not in groups:
                raise ConfigError(f"groups must have the keys of the silos, and {name!r} is not among them")
            names = np.asarray(groups[name])
        if names.ndim != 1 or len(names) != rows:
            raise ConfigError(f"groups must name the owners of silo {client}'s {rows} rows, got {names.shape}")
        try:
            return np.unique(names, return_inverse=True)[1].astype(np.int64)
        except TypeError:
            raise ConfigError(
                f"groups must name owners by numbers or texts, silo {client} has other values"
            ) from None

    def _at(self, params: Params) -> Callable[[Examples], Gradients]:
        """Return a function from rows to the gradient of each row's loss, downhill, which the next call overwrites."""
        values, fixed = self.model.unflatten(params), self.model.fixed()

        def gradients(rows: Examples) -> Gradients:
            shape = tuple((leaf.shape, leaf.dtype) for leaf in rows.leaves)
            try:
                if shape not in self.held.programs:
                    self.held.programs[shape] = recorded(self.model, values, fixed, rows)
                found = self.held.programs[shape](values, fixed, rows)
            except RuntimeError as error:
                raise ConfigError(
                    "the module's gradients cannot be taken record by record (dropout, values that steer the program "
                    f"and buffers that change cannot be used there): {str(error).strip().splitlines()[0][:160]}"
                ) from error
            size = len(rows), self.model.dimension
            if self.held.room.shape != size:  # fresh memory costs as much as gradients
                self.held.room = torch.empty(size)
            return self._flat(found, self.held.room)

        return gradients

    def _flat(self, found: Sequence[torch.Tensor], room: torch.Tensor) -> Gradients:
        """Join the gradients of each row, one after the other, in one table."""
        return torch.cat([part.reshape(len(room), -1).float().cpu() for part in found], 1, out=room).numpy()

    def _each(self, gradients: Callable[[Examples], Gradients], rows: Examples) -> Gradients:
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
                if not self.held.has_told:  # no result may show it, but its holder should know
                    _log.warning("the gradient of a record cannot be computed: it counts as zero", exc_info=True)
                self.held.has_told = True
                return np.full((1, self.model.dimension), np.nan, np.float32)
        half = len(rows) // 2
        first = self._each(gradients, rows.between(0, half)).copy()
        return np.concatenate([first, self._each(gradients, rows.between(half, len(rows)))])

    def _is_place_blind(self, params: Params, rows: Examples) -> bool:
        """Tell whether rows have the same gradients, to the bit, in another order, with others, and in other places."""
        size, gradients = len(rows), self._at(params)
        for row in range(size):
            alone = _padded(rows.between(row, row + 1), self.chunk)
            try:
                gradients(alone)
                break
            except Exception:  # of every row: then it is no record's doing
                if row + 1 == size:
                    raise
        # A program repeats what it has recorded, so a loss that draws or remembers shows in the module's own calls.
        values, fixed = self.model.unflatten(params), self.model.fixed()
        twice = [single_gradients(self.model, values, fixed, alone) for _ in range(2)]
        first, second = (self._flat(each, torch.empty(self.chunk, self.model.dimension)) for each in twice)
        if not np.array_equal(first, second, equal_nan=True):
            return False
        if not np.allclose(gradients(alone), first, rtol=1e-3, atol=1e-5, equal_nan=True):
            return False
        plain = np.arange(size)
        orders = [plain, plain[::-1], np.roll(plain, 1), np.argsort(plain * 7 % size)]
        orders += [plain[row : row + 1] for row in range(0, size, max(1, size // _TRIED))]
        found = []
        for order in orders:
            some = rows.take(order)
            parts = (some.between(start, start + self.chunk) for start in range(0, len(some), self.chunk))
            found.append(np.concatenate([self._each(gradients, part).copy() for part in parts]))
            if not np.array_equal(found[-1], found[0][order], equal_nan=True):
                return False
        return True


def _padded(rows: Examples, size: int) -> Examples:
    """Return the rows filled up to a fixed number with copies of the last: zeros could raise where no row does."""
    if len(rows) == size:
        return rows
    return rows.each(lambda leaf: torch.cat([leaf, leaf[-1:].expand(size - len(leaf), *leaf.shape[1:])]))
