"""The privacy profile of one Gaussian release, exact but for rounding, which errs upwards.

A profile is delta as a function of epsilon, for epsilon >= 0.
"""

import math

import numpy as np
import numpy.typing as npt

from d2pfed.accounting.rdp import FloatArray, check_delta

# Larger than the rounding error of a Gaussian tail in double precision, so that it errs upwards; the error grows with
# the ratio where that is large (epsilon / ratio is then a difference of large numbers), and only there.
_RELATIVE_GUARD = 1e-10
_LARGE_RATIO = 1000.0
_SMALLEST = 1e-300  # below it doubles lose relative accuracy
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)  # exact to rounding over intervals of length up to 2
NARROW = 1.0  # ratios up to this need differences of tails that do not cancel


def relative_guard(ratio: float) -> float:
    """Return by which share a profile of Gaussians so many standard deviations apart may be wrong, at most.

    Guarantee: of values above 1e-300. Proof: theory.md#gaussian. Checked: test_accounting_pld_profiles.py.
    """
    return _RELATIVE_GUARD * (1 + ratio / _LARGE_RATIO)


def mills_drop(start: FloatArray, width: float) -> FloatArray:
    """Return m(start) - m(start + width), m(t) = Phi(-t) / phi(t), to full relative accuracy for widths up to 2.

    A sum of positive terms: the integral of -m'(t) = 1 - t m(t). Proof: theory.md#gaussian.
    """
    from scipy.special import erfcx  # noqa: PLC0415 - slow to load, and most requests to a client account for nothing

    total = np.zeros_like(start)
    for node, weight in zip(_NODES.tolist(), _WEIGHTS.tolist(), strict=True):
        at = start + width * (1 + node) / 2
        total += weight * np.maximum(1 - at * (math.sqrt(math.pi / 2) * erfcx(at / math.sqrt(2))), 0.0)
    return total * (width / 2)


def scaled_density(at: FloatArray, exponent: FloatArray | float) -> FloatArray:
    """Return exp(exponent) times the standard normal density, where either may leave the range of doubles."""
    return np.asarray(np.exp(np.asarray(exponent, np.float64) - at * at / 2) / math.sqrt(2 * math.pi))


def gaussian_delta(epsilon: npt.ArrayLike, ratio: float) -> FloatArray:
    """Return the delta of one Gaussian release whose shift is `ratio` standard deviations, for epsilon >= 0.

    Guarantee: the smallest delta at that epsilon, but for `relative_guard`. Proof: theory.md#gaussian.
    """
    from scipy.special import log_ndtr  # noqa: PLC0415 - slow to load

    wanted = np.asarray(epsilon, dtype=np.float64)
    middle = wanted / ratio
    if ratio <= NARROW:
        return scaled_density(middle - ratio / 2, 0.0) * mills_drop(middle - ratio / 2, ratio)
    upper = log_ndtr(ratio / 2 - middle)
    lower = wanted + log_ndtr(-ratio / 2 - middle)
    # The difference of logarithms keeps its relative accuracy where both terms are tiny.
    return np.asarray(np.exp(upper) * -np.expm1(np.minimum(lower - upper, 0.0)), dtype=np.float64)


def gaussian_epsilon(delta: float, ratio: float) -> float:
    """Return the smallest epsilon of a Gaussian release at `delta`, rounded up by about one part in 10^10.

    Guarantee: the true delta of the result is at most `delta`. Proof: theory.md#gaussian.
    """
    check_delta(delta)
    wanted = delta * (1 - relative_guard(ratio))
    low, high = 0.0, ratio * ratio / 2 + ratio * math.sqrt(-2 * math.log(delta))  # a Chernoff bound
    if wanted < _SMALLEST:
        return high
    if ratio == 0 or gaussian_delta(0.0, ratio) <= wanted:
        return 0.0
    while high - low > _RELATIVE_GUARD * high:
        middle = (low + high) / 2
        if gaussian_delta(middle, ratio) > wanted:
            low = middle
        else:
            high = middle
    return high
