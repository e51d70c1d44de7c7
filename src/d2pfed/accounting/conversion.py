"""From a privacy cost to epsilon at a stated delta: Renyi conversions and the exact Gaussian curve."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from d2pfed.errors import ConfigError

FloatArray = npt.NDArray[np.float64]

# Larger than the rounding error of the Gaussian tail in double precision, so that it errs upwards.
_RELATIVE_GUARD = 1e-10


def check_delta(delta: float) -> None:
    """Raise unless delta is a probability that a guarantee may state."""
    if not 0 < delta < 1:
        raise ConfigError(f"delta must be in (0, 1), got {delta}")


def mironov(orders: FloatArray, renyi: FloatArray, delta: float) -> FloatArray:
    """Return epsilon by Mironov's conversion at each order; the published one, never below `tight`.

    Proof: theory.md#conversions.
    """
    return renyi + math.log(1 / delta) / (orders - 1)


def tight(orders: FloatArray, renyi: FloatArray, delta: float) -> FloatArray:
    """Return epsilon at each order by the conversion of Canonne, Kamath and Steinke, or 0 by total variation.

    Guarantee: (alpha, renyi)-Renyi privacy implies (epsilon, delta)-privacy. Proof: theory.md#conversions.
    """
    epsilon = renyi + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return np.where(-np.expm1(-renyi) <= delta * delta, 0.0, np.maximum(epsilon, 0.0))


Conversion = Callable[[FloatArray, FloatArray, float], FloatArray]


def gaussian_delta(epsilon: npt.ArrayLike, ratio: float) -> FloatArray:
    """Return the exact delta of one Gaussian release whose shift is `ratio` standard deviations.

    Guarantee: the smallest delta at that epsilon. Proof: theory.md#gaussian.
    """
    from scipy.special import log_ndtr  # noqa: PLC0415 - slow to load, and most requests to a client account for nothing

    wanted = np.asarray(epsilon, dtype=np.float64)
    upper = log_ndtr(ratio / 2 - wanted / ratio)
    lower = wanted + log_ndtr(-ratio / 2 - wanted / ratio)
    # The difference of logarithms keeps its relative accuracy where both terms are tiny.
    return np.asarray(np.exp(upper) * -np.expm1(np.minimum(lower - upper, 0.0)), dtype=np.float64)


def gaussian_epsilon(delta: float, ratio: float) -> float:
    """Return the smallest epsilon of a Gaussian release at `delta`, rounded up by about one part in 10^10.

    Guarantee: `gaussian_delta` of the result is at most `delta`. Proof: theory.md#gaussian.
    """
    check_delta(delta)
    wanted = delta * (1 - _RELATIVE_GUARD)
    if ratio == 0 or gaussian_delta(0.0, ratio) <= wanted:
        return 0.0
    low, high = 0.0, ratio * ratio / 2 + ratio * math.sqrt(2 * math.log(1 / wanted))  # a Chernoff bound
    while high - low > _RELATIVE_GUARD * high:
        middle = (low + high) / 2
        if gaussian_delta(middle, ratio) > wanted:
            low = middle
        else:
            high = middle
    return high
