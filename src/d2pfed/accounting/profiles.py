"""Privacy profiles of releases, plain or behind cohorts or coins: delta as a function of epsilon, for epsilon >= 0.

Those of Gaussians are exact up to rounding, which errs upwards; those of other noise follow from its Renyi curve.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from itertools import product

import numpy as np
import numpy.typing as npt

from d2pfed.accounting.laws import Noise
from d2pfed.accounting.rdp import FloatArray, check_delta, sparse_orders

Profile = Callable[[FloatArray], FloatArray]

# Larger than the rounding error of a Gaussian tail in double precision, so that it errs upwards; the error grows with
# the ratio where that is large (epsilon / ratio is then a difference of large numbers), and only there.
_RELATIVE_GUARD = 1e-10
_LARGE_RATIO = 1000.0
_SMALLEST = 1e-300  # below it doubles lose relative accuracy
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)  # exact to rounding over intervals of length up to 2
NARROW = 1.0  # ratios up to this need differences of tails that do not cancel
_FAR = 30.0  # logarithm from which on a hyperbolic sine is half an exponential in double precision
_STEPS = 80  # halvings: from a width of 10^5 to the last bits of a double
_LOG_ROUNDING = 1e-13  # of a logarithm of R, more than its rounding error
_ORDERS = sparse_orders(1 << 20)
_POINTS = 1 << 13
_TAIL = 1e-60  # beyond this a profile from a Renyi curve is taken to be constant
WIDEST = 600.0  # epsilon whose exponential is still in the range of doubles


def relative_guard(ratio: float) -> float:
    """Return the maximum relative error of a profile of Gaussians this many standard deviations apart.

    Guarantee: of values above 1e-300. Proof: theory.md#gaussian. Checked: test_accounting_pld_profiles.py.
    """
    return _RELATIVE_GUARD * (1 + ratio / _LARGE_RATIO)


def mills_drop(start: FloatArray, width: float) -> FloatArray:
    """Return m(start) - m(start + width), m(t) = Phi(-t) / phi(t), by positive terms. Proof: theory.md#gaussian."""
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

    Guarantee: the smallest delta at that epsilon, up to `relative_guard`. Proof: theory.md#gaussian.
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
        low, high = (middle, high) if gaussian_delta(middle, ratio) > wanted else (low, middle)
    return high


class PairKind(StrEnum):
    """Which pair of distributions dominates one sampled release."""

    FIXED_SIZE = "fixed-size"  # a fixed-size cohort; with rate 1 the plain Gaussian
    FIXED_SIZE_ZERO_OUT = "fixed-size-zero-out"  # the same for a client's vector against zero
    POISSON_ZERO_OUT = "poisson-zero-out"  # secret coins of records: a record's vector against zero
    POISSON_REPLACE_ONE = "poisson-replace-one"  # secret coins of records: a record's vector against another


@dataclass(frozen=True, slots=True)
class SampledGaussian:
    """The dominating pair of one Gaussian release behind a sampled cohort, or behind coins of records."""

    kind: PairKind
    ratio: float  # shift over sigma; the shift is two radii for `FIXED_SIZE` unless the rate is 1, else one radius
    rate: float  # the probability that a unit is in the release
    slack: float = 0.0  # the cost of replacing the true noise by a Gaussian
    coins: int = 1  # how many independent coins one person has, behind coins of records

    @property
    def forward(self) -> Profile:
        """The profile of the pair's first distribution against its second, rounded up."""
        if self.coins > 1:
            is_replaced = self.kind is PairKind.POISSON_REPLACE_ONE
            several = several_coins_replace_delta if is_replaced else several_coins_delta
            return partial(several, ratio=self.ratio, rate=self.rate, coins=self.coins)
        others = {
            PairKind.POISSON_REPLACE_ONE: poisson_replace_delta,
            PairKind.FIXED_SIZE_ZERO_OUT: fixed_size_zero_out_delta,
        }
        profile, guard = others.get(self.kind, fixed_size_delta), 1 + relative_guard(self.ratio)
        return lambda epsilon: guard * profile(epsilon, self.ratio, self.rate)

    @property
    def backward(self) -> Profile | None:
        """The profile of the pair's second distribution against its first, rounded up; None if it is the same."""
        if self.kind in (PairKind.FIXED_SIZE, PairKind.POISSON_REPLACE_ONE):
            return None
        if self.coins > 1:
            return partial(several_coins_add_delta, ratio=self.ratio, rate=self.rate, coins=self.coins)
        profile = fixed_size_delta if self.kind is PairKind.FIXED_SIZE_ZERO_OUT else poisson_add_delta
        guard = 1 + relative_guard(self.ratio)
        return lambda epsilon: guard * profile(epsilon, self.ratio, self.rate)


def fixed_size_delta(epsilon: FloatArray, ratio: float, rate: float) -> FloatArray:
    """Return the profile of a Gaussian behind a fixed-size cohort; also of a record against zero behind a coin.

    Guarantee: dominates every pair of replace-one neighbors when `ratio` is that of two radii.
    Proof: theory.md#fixed-size. Checked: test_accounting_oracle.py by exhaustive adaptive optimization.
    """
    # Where epsilon is small so is the base, and must be so to relative accuracy.
    small = np.log1p(np.expm1(np.minimum(epsilon, 1.0)) / rate)
    large = epsilon - math.log(rate) + np.log1p((rate - 1) * np.exp(-np.maximum(epsilon, 1.0)))
    return rate * gaussian_delta(np.where(epsilon < 1, small, large), ratio)


def fixed_size_zero_out_delta(epsilon: FloatArray, ratio: float, rate: float) -> FloatArray:
    """Return the profile of a client's vector against zero behind a fixed-size cohort, where it takes another's place.

    Guarantee: dominates every such pair when `ratio` is that of one radius; the reversed order has `fixed_size_delta`
    at one radius. Proof: theory.md#fixed-size-zero-out. Checked: test_accounting_zero_out.py.
    """
    # The loss is increasing in the output z; it passes epsilon where t = exp(ratio z) solves t^2 - a t - c = 0 with
    # a = exp(epsilon + ratio^2 / 2) and c = (exp(epsilon) - 1) (1 - rate) / rate.
    with np.errstate(divide="ignore"):
        others = np.log((1 - rate) / rate) + epsilon + np.log(-np.expm1(-epsilon))  # ln c
    log_a = epsilon + ratio * ratio / 2
    square = 4 * np.exp(others - 2 * log_a)  # at most (1 - rate) / rate
    z = (log_a + np.log1p(square / (2 * (1 + np.sqrt(1 + square))))) / ratio
    return _gain(z, ratio, rate, epsilon, others)


def _gain(z: FloatArray, ratio: float, rate: float, middle: FloatArray, opposite: FloatArray) -> FloatArray:
    """Return what a Gaussian of this rate has above z, less two below it, weighted by these logarithms."""
    from scipy.special import log_ndtr  # noqa: PLC0415 - slow to load

    if ratio <= NARROW:
        # At z the densities are equal, and tails are densities times Mills ratios.
        near = scaled_density(z, middle) * mills_drop(z - ratio, ratio)
        return rate * (near + scaled_density(z + ratio, opposite) * mills_drop(z - ratio, 2 * ratio))
    own = log_ndtr(ratio - z)
    others = np.logaddexp(middle + log_ndtr(-z), opposite + log_ndtr(-ratio - z))
    return np.asarray(rate * np.exp(own) * np.maximum(-np.expm1(others - own), 0.0), dtype=np.float64)


def poisson_add_delta(epsilon: FloatArray, ratio: float, rate: float) -> FloatArray:
    """Return the mirror image of `fixed_size_delta` at one radius: 0 from -ln(1 - rate). Proof: theory.md#poisson."""
    kept = np.exp(-epsilon)
    # 1 - rate is exact where it is needed.
    left = np.where(kept > 0.5, rate + np.expm1(-epsilon), kept - (1 - rate))
    # It falls to zero within rounding of the last epsilon, so what is left of the rate is rounded up.
    left = np.maximum(left + 2.0**-50 * np.minimum(rate, kept), 0.0)
    inside = left > 0
    base = -np.log(np.where(inside, np.minimum(left / rate, 1.0), 1.0))
    return np.where(inside, np.exp(epsilon) * left * gaussian_delta(base, ratio), 0.0)


def poisson_replace_delta(epsilon: FloatArray, ratio: float, rate: float) -> FloatArray:
    """Return the profile of a record's vector against its opposite under Poisson sampling.

    Guarantee: dominates every pair of vectors of that norm. Proof: theory.md#poisson.
    Checked: test_accounting_rdp.py against quadrature.
    """
    # The loss is increasing in the output z; where it passes epsilon, exp(ratio z - epsilon / 2) = exp(w) with
    # sinh(w) = sinh(epsilon / 2) exp(ratio^2 / 2) (1 - rate) / rate.
    with np.errstate(divide="ignore"):
        others = np.log((1 - rate) / rate) + epsilon + np.log(-np.expm1(-epsilon))
        log_sinh = others - epsilon / 2 - math.log(2) + ratio * ratio / 2
    far = log_sinh > _FAR
    w = np.where(far, log_sinh + math.log(2), np.arcsinh(np.exp(np.where(far, 0.0, log_sinh))))
    z = (epsilon / 2 + w) / ratio
    return _gain(z, ratio, rate, others, epsilon)


# A person with several coins: a binomial mixture of shifted Gaussians against one at zero. With z the output in
# standard deviations, w_j = P[Bin(coins, rate) = j] and l_j(z) = exp(j r z - j^2 r^2 / 2), the likelihood ratio
# R(z) = sum w_j l_j(z) increases. At a threshold z both profiles are sums of positive terms,
#
#     sum_j w_j (Phi(j r - z) - l_j(z) Phi(-z)) at epsilon = ln R(z), and
#     exp(epsilon) sum_j w_j (l_j(z) Phi(z) - Phi(z - j r)) at epsilon = -ln R(z),
#
# so no digits cancel, and a threshold that is a little too low, or too high, gives the profile at a smaller epsilon.
# Against the mirrored mixture the likelihood ratio R(z) / R(-z) increases, and the profile at a threshold z is
#
#     sum_ij w_i w_j l_i(-z) (Phi(j r - z) - exp(e_ij) Phi(-i r - z)) / R(-z), e_ij = ln (l_j(z) / l_i(-z)):
#
# each term is the profile of two Gaussians (i + j) r apart at their own loss at z, so none is negative.


def several_coins_delta(epsilon: FloatArray, ratio: float, rate: float, coins: int) -> FloatArray:
    """Return the profile of the mixture against zero, rounded up.

    Guarantee: dominates every person whose records are within the radius in each of that many silos, if all coins are
    independent. Proof: theory.md#records. Checked: test_accounting_records.py against quadrature and dp-accounting.
    """
    from scipy.special import log_ndtr  # noqa: PLC0415 - slow to load

    wanted = np.asarray(epsilon, np.float64)
    z, _ = _thresholds(
        partial(_log_ratio, ratio=ratio, rate=rate, coins=coins), wanted - _LOG_ROUNDING * (1 + wanted)
    )
    total = np.zeros_like(wanted)
    for heads, weight in _weights(rate, coins):
        shift = heads * ratio
        if shift <= NARROW:
            gain = scaled_density(z - shift, 0.0) * mills_drop(z - shift, shift)
        else:
            own, other = log_ndtr(shift - z), shift * z - shift * shift / 2 + log_ndtr(-z)
            gain = np.exp(own) * -np.expm1(np.minimum(other - own, 0.0))
        total += weight * gain
    return (1 + relative_guard(coins * ratio)) * np.minimum(total, 1.0)


def several_coins_add_delta(epsilon: FloatArray, ratio: float, rate: float, coins: int) -> FloatArray:
    """Return the profile of zero against the mixture, rounded up. Proof: theory.md#records."""
    from scipy.special import log_ndtr  # noqa: PLC0415 - slow to load

    wanted = np.asarray(epsilon, np.float64)
    none = coins * math.log1p(-rate) if rate < 1 else -math.inf  # ln w_0, which R never falls to
    least = -wanted + _LOG_ROUNDING * (1 + wanted)
    inside = least > none
    _, z = _thresholds(partial(_log_ratio, ratio=ratio, rate=rate, coins=coins), np.where(inside, least, 0.0))
    total = np.zeros_like(wanted)
    for heads, weight in _weights(rate, coins):
        shift = heads * ratio
        if shift <= NARROW:
            gain = scaled_density(z - shift, 0.0) * mills_drop(-z, shift)
        else:
            own, other = shift * z - shift * shift / 2 + log_ndtr(z), log_ndtr(z - shift)
            gain = np.exp(own) * -np.expm1(np.minimum(other - own, 0.0))
        total += weight * gain
    found = (1 + relative_guard(coins * ratio)) * np.exp(np.minimum(wanted, 700.0)) * total
    return np.where(inside, np.minimum(found, 1.0), 0.0)


def several_coins_replace_delta(epsilon: FloatArray, ratio: float, rate: float, coins: int) -> FloatArray:
    """Return the profile of the mixture against its mirror image, rounded up.

    Guarantee: dominates every two sets of vectors within the radius that a person may have in that many silos, if all
    coins are independent. Proof: theory.md#records. Checked: test_accounting_records.py against quadrature and games.
    """
    from scipy.special import log_ndtr  # noqa: PLC0415 - slow to load

    wanted = np.asarray(epsilon, np.float64)
    none = coins * math.log1p(-rate) if rate < 1 else 0.0  # ln w_0: how far below 0 a logarithm of R may be

    def log_ratio(z: FloatArray) -> FloatArray:
        return _log_ratio(z, ratio, rate, coins) - _log_ratio(-z, ratio, rate, coins)

    z, _ = _thresholds(log_ratio, wanted - _LOG_ROUNDING * (1 + wanted - 2 * none))
    total, opposite = np.zeros_like(wanted), _log_ratio(-z, ratio, rate, coins)
    weights = [(0, (1 - rate) ** coins), *_weights(rate, coins)]
    for (i, other), (j, own) in product(weights, weights):
        width = (i + j) * ratio
        scale = -i * ratio * z - (i * ratio) ** 2 / 2 - opposite  # of l_i(-z) / R(-z)
        if other * own * width == 0.0:
            continue
        if width <= NARROW:
            total += other * own * scaled_density(z - j * ratio, scale) * mills_drop(z - j * ratio, width)
        else:
            upper, loss = log_ndtr(j * ratio - z), width * z - (j * j - i * i) * ratio**2 / 2
            gain = -np.expm1(np.minimum(loss + log_ndtr(-i * ratio - z) - upper, 0.0))
            total += other * own * np.exp(scale + upper) * gain
    return (1 + relative_guard(2 * coins * ratio)) * np.minimum(total, 1.0)


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


def _thresholds(
    log_ratio: Callable[[FloatArray], FloatArray], wanted: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return outputs just below and just above the one where an increasing log ratio is as wanted."""
    low, high = np.full_like(wanted, -1.0), np.ones_like(wanted)
    for _ in range(64):  # the ratio may change slowly
        over, under = log_ratio(low) > wanted, log_ratio(high) < wanted
        if not (over.any() or under.any()):
            break
        low, high = np.where(over, 2 * low, low), np.where(under, 2 * high, high)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        over = log_ratio(middle) > wanted
        low, high = np.where(over, low, middle), np.where(over, middle, high)
    return low, high


@dataclass(frozen=True, slots=True)
class SampledRdp:
    """The dominating pair of one release behind a fixed-size cohort, with noise of which a Renyi curve is known."""

    noise: Noise
    radii: int  # how many clip radii neighbors are apart: two behind a cohort
    rate: float  # the probability that a client is in the cohort
    slack: float = 0.0  # no Gaussian replaces the noise
    backward: None = None  # the reversed order is the same

    @property
    def forward(self) -> Profile:
        """The profile of the pair's first distribution against its second.

        Guarantee: dominates every pair of replace-one neighbors. Proof: theory.md#renyi-profile.
        Checked: test_accounting_amplification.py.
        """
        ratios, values = _envelope(self.noise, self.radii)

        def profile(epsilon: FloatArray) -> FloatArray:
            base = 1 + np.expm1(np.minimum(epsilon, WIDEST)) / self.rate
            return self.rate * np.interp(base, ratios, values)

        return profile


DominatingPair = SampledGaussian | SampledRdp  # of one release: profiles, and the slack of a surrogate behind them


def rdp_delta(epsilon: FloatArray, noise: Noise, radii: int) -> FloatArray:
    """Return the least delta that the conversion of the noise's Renyi curve gives at any order, for epsilon >= 0."""
    curve = noise.rdp(radii, _ORDERS)
    start = (_ORDERS - 1) * curve + _ORDERS * np.log1p(-1 / _ORDERS) - np.log(_ORDERS - 1)
    exponents = np.full(np.shape(epsilon), min(0.0, math.log(-math.expm1(-curve[0])) / 2))  # total variation
    for constant, order in zip(start.tolist(), _ORDERS.tolist(), strict=True):
        np.minimum(exponents, constant - (order - 1) * epsilon, out=exponents)
    return np.asarray(np.exp(exponents), dtype=np.float64)


def rdp_width(noise: Noise, radii: int) -> float:
    """Return the epsilon from which on the noise's profile is negligible; `WIDEST` if that is out of range."""
    if rdp_delta(np.array([WIDEST]), noise, radii)[0] > _TAIL:
        return WIDEST
    return tail_epsilon(lambda epsilon: rdp_delta(epsilon, noise, radii), _TAIL)


@lru_cache(maxsize=64)
def _envelope(noise: Noise, radii: int) -> tuple[FloatArray, FloatArray]:
    """Return the profile at ratios alpha >= 1: the greatest convex function below what is known on both sides of 1."""
    epsilon = np.linspace(0, rdp_width(noise, radii), _POINTS)
    above, ratio = rdp_delta(epsilon, noise, radii), np.exp(epsilon)
    below = 1 - 1 / ratio + above / ratio  # the reversed order at 1 / alpha
    ratios = np.concatenate([1 / ratio[:0:-1], ratio])
    values = np.concatenate([below[:0:-1], above])
    kept = _hull(ratios.tolist(), values.tolist())
    return ratio, np.interp(ratio, ratios[kept], values[kept])


def _hull(xs: list[float], ys: list[float]) -> list[int]:
    """Return the points of the lower convex hull of points in increasing order."""
    kept: list[int] = []
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (ys[b] - ys[a]) * (x - xs[a]) < (y - ys[a]) * (xs[b] - xs[a]):
                break
            kept.pop()
        kept.append(i)
    return kept


def tail_epsilon(profile: Profile, tail: float) -> float:
    """Return an epsilon at which the profile is at most `tail`, about the least one."""

    def at(epsilon: float) -> float:
        return float(profile(np.array([epsilon]))[0])

    if at(0.0) <= tail:
        return 0.0
    low, high = 0.0, 1.0
    while at(high) > tail:
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) > tail else (low, middle)
    return high
