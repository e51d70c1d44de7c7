"""A silo's own units, each asked for by itself: what one of them does, or fails to do, reaches no other."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.numerics.ring import IntVector
from d2pfed.round import Units

_TOGETHER = 1 << 21  # numbers of vectors that are in memory at once

_log = logging.getLogger("d2pfed.flower")


@dataclass(frozen=True, slots=True)
class SingleUnits:
    """Units of a user's own making, as a batch of a plan takes them.

    Guarantee: what a unit adds depends on that unit and the model alone, if the user's code keeps nothing from one call
    to the next; one that raises, or gives anything but one vector, counts as zero. Proof: theory.md#records.
    Checked: test_flower_standing.py::test_a_record_that_raises_moves_the_sum_by_itself_alone.
    """

    units: Units = field(repr=False)
    dimension: int

    @property
    def count(self) -> int:
        """How many units there are."""
        return self.units.count

    def gradients(self, chosen: IntVector) -> Iterator[NDArray[np.float32]]:
        """Yield the vectors of the chosen units, a row of zeros for one that has none."""
        first_failure: list[BaseException] = []
        step = max(1, _TOGETHER // self.dimension)
        for start in range(0, len(chosen), step):
            yield np.stack([self._vector(int(unit), first_failure) for unit in chosen[start : start + step]])
        if first_failure:
            with suppress(BaseException):  # a unit may have broken the log, and must not take the others along
                _log.error("units without a vector count as zero; this is the first", exc_info=first_failure[0])

    def _vector(self, unit: int, first_failure: list[BaseException]) -> NDArray[np.float32]:
        try:
            (given,) = islice(self.units.gradients(np.array([unit])), 2)
            found: NDArray[np.floating] = np.asarray(given)
            require_row(found, self.dimension)
            with np.errstate(all="ignore"):  # what is not finite counts as zero later
                row: NDArray[np.float32] = found[0].astype(np.float32)
        except BaseException as error:  # noqa: BLE001 - whatever it was, an exit or an interrupt, it is this unit's alone
            if not first_failure:
                first_failure.append(error)
            return np.zeros(self.dimension, np.float32)
        return row


def require_row(found: NDArray[np.floating], dimension: int) -> None:
    """Refuse what is not one row of so many floating-point numbers."""
    if found.shape != (1, dimension) or not np.issubdtype(found.dtype, np.floating):
        raise ConfigError(
            f"a unit's vector must be a row of {dimension} floats, got {found.dtype} of shape {found.shape}"
        )
