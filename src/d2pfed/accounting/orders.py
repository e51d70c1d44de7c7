"""The search for the best Renyi order, on a grid that widens until the best order is inside it."""

from collections.abc import Callable

import numpy as np

from d2pfed.accounting.conversion import Conversion, FloatArray

_DENSE_LIMIT = 4096
_SPARSE_LIMIT = 1 << 40


def dense(top: int) -> FloatArray:
    """Return the integer orders 2..top."""
    return np.arange(2, top + 1, dtype=np.float64)


def sparse(top: int) -> FloatArray:
    """Return about 24 integer orders per octave, from 2 to top."""
    count = 24 * max(1, top.bit_length())
    return np.unique(np.rint(np.geomspace(2, top, count)))


def real(top: int) -> FloatArray:
    """Return real orders from just above 1 to about top, their distance from 1 growing by one per cent a step."""
    return 1 + np.geomspace(1e-5, top, 70 * (17 + top.bit_length()))


def least(
    curve: Callable[[FloatArray], FloatArray], grid: Callable[[int], FloatArray], delta: float, convert: Conversion
) -> tuple[float, float]:
    """Return the least epsilon over the grid's orders, and the order that gives it.

    The grid grows until the best order is below its last one.
    """
    top, limit = 64, _DENSE_LIMIT if grid is dense else _SPARSE_LIMIT
    while True:
        orders = grid(top)
        epsilon = convert(orders, curve(orders), delta)
        best = int(np.argmin(epsilon))
        if best < len(orders) - 1 or top >= limit:
            return float(epsilon[best]), float(orders[best])
        top *= 4
