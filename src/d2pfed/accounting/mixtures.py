"""The profile of a person with several coins: a binomial mixture of shifted Gaussians against one at zero.

With z the output in standard deviations, w_j = P[Bin(coins, rate) = j] and l_j(z) = exp(j r z - j^2 r^2 / 2), the
likelihood ratio R(z) = sum w_j l_j(z) increases. At a threshold z both profiles are sums of positive terms,

    sum_j w_j (Phi(j r - z) - l_j(z) Phi(-z)) at epsilon = ln R(z), and
    exp(epsilon) sum_j w_j (l_j(z) Phi(z) - Phi(z - j r)) at epsilon = -ln R(z),

so no digits cancel, and a threshold that is a little too low, or too high, gives the profile at a smaller epsilon.
"""

import math

import numpy as np

from d2pfed.accounting.gaussian import NARROW, mills_drop, relative_guard, scaled_density
from d2pfed.accounting.rdp import FloatArray

_STEPS = 80  # halvings: from a width of 10^5 to the last bits of a double
_LOG_ROUNDING = 1e-13  # of a logarithm of R, more than its rounding error


def several_coins_delta(epsilon: FloatArray, ratio: float, rate: float, coins: int) -> FloatArray:
    """Return the profile of the mixture against zero, rounded up.

    Guarantee: dominates every person whose records are within the radius in each of so many silos, if all coins are
    independent. Proof: theory.md#records. Checked: test_accounting_records.py against quadrature and dp-accounting.
    """
    wanted = np.asarray(epsilon, np.float64)
    low, _ = _thresholds(wanted - _LOG_ROUNDING * (1 + wanted), ratio, rate, coins)
    total = np.zeros_like(wanted)
    for heads, weight in _weights(rate, coins):
        total += weight * _gain(low, heads * ratio)
    return (1 + relative_guard(coins * ratio)) * np.minimum(total, 1.0)


def several_coins_add_delta(epsilon: FloatArray, ratio: float, rate: float, coins: int) -> FloatArray:
    """Return the profile of zero against the mixture, rounded up; 0 from -coins ln(1 - rate) on.

    Guarantee: the mirror image of `several_coins_delta`. Proof: theory.md#records.
    """
    wanted = np.asarray(epsilon, np.float64)
    none = coins * math.log1p(-rate) if rate < 1 else -math.inf  # ln w_0, which R never falls to
    least = -wanted + _LOG_ROUNDING * (1 + wanted)
    inside = least > none
    _, high = _thresholds(np.where(inside, least, 0.0), ratio, rate, coins)
    total = np.zeros_like(wanted)
    for heads, weight in _weights(rate, coins):
        total += weight * _loss(high, heads * ratio)
    found = (1 + relative_guard(coins * ratio)) * np.exp(np.minimum(wanted, 700.0)) * total
    return np.where(inside, np.minimum(found, 1.0), 0.0)


def _weights(rate: float, coins: int) -> list[tuple[int, float]]:
    """Return the chances of one coin or more."""
    return [
        (heads, math.comb(coins, heads) * rate**heads * (1 - rate) ** (coins - heads))
        for heads in range(1, coins + 1)
    ]


def _log_ratio(z: FloatArray, ratio: float, rate: float, coins: int) -> FloatArray:
    terms = [np.full_like(z, coins * math.log1p(-rate) if rate < 1 else -np.inf)]
    for heads, weight in _weights(rate, coins):
        if weight > 0:
            terms.append(math.log(weight) + heads * ratio * z - (heads * ratio) ** 2 / 2)
    return np.asarray(np.logaddexp.reduce(terms, axis=0))


def _thresholds(wanted: FloatArray, ratio: float, rate: float, coins: int) -> tuple[FloatArray, FloatArray]:
    """Return outputs just below and just above the one where ln R is as wanted; -inf below where none is so low."""
    # One term alone bounds R from below, and the largest exponent from above, so both ends enclose the root.
    high = np.maximum(wanted - math.log(coins * rate * (1 - rate) ** (coins - 1) or rate**coins), 0) / ratio
    high = np.maximum(high + coins * ratio, 1.0)
    low = np.minimum(wanted, 0.0) / ratio - 1.0
    for _ in range(64):  # ln R falls to ln w_0, perhaps slowly
        over = _log_ratio(low, ratio, rate, coins) > wanted
        if not over.any():
            break
        low = np.where(over, 2 * low, low)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        over = _log_ratio(middle, ratio, rate, coins) > wanted
        low, high = np.where(over, low, middle), np.where(over, middle, high)
    return low, high


def _gain(z: FloatArray, shift: float) -> FloatArray:
    """Return Phi(shift - z) - exp(shift z - shift^2 / 2) Phi(-z), to relative accuracy."""
    from scipy.special import log_ndtr  # noqa: PLC0415 - slow to load

    if shift <= NARROW:
        return scaled_density(z - shift, 0.0) * mills_drop(z - shift, shift)
    own = log_ndtr(shift - z)
    other = shift * z - shift * shift / 2 + log_ndtr(-z)
    return np.asarray(np.exp(own) * -np.expm1(np.minimum(other - own, 0.0)))


def _loss(z: FloatArray, shift: float) -> FloatArray:
    """Return exp(shift z - shift^2 / 2) Phi(z) - Phi(z - shift), to relative accuracy: the mirror image of `_gain`."""
    from scipy.special import log_ndtr  # noqa: PLC0415 - slow to load

    if shift <= NARROW:
        return scaled_density(z - shift, 0.0) * mills_drop(-z, shift)
    own = shift * z - shift * shift / 2 + log_ndtr(z)
    other = log_ndtr(z - shift)
    return np.asarray(np.exp(own) * -np.expm1(np.minimum(other - own, 0.0)))
