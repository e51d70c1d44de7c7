"""Discrete privacy losses that dominate a profile, and their composition by one Fourier transform of tilted masses.

Losses are on a grid, and profiles linear in exp(epsilon) between its points. A tilt multiplies each mass by
exp(slope loss) so that the losses near epsilon carry most of it: the transform is then exact to a bound however small
delta is.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from d2pfed.accounting.profiles import DominatingPair, Profile, tail_epsilon
from d2pfed.accounting.rdp import FloatArray

COARSE, FINE = 1 << 11, 1 << 14  # positive grid points of one release's losses
_TAIL_SHARE = 1e-6  # of delta: what cutting tails may use up
_SMALLEST_TAIL = 1e-300  # below it profiles leave the range of doubles
_FINEST_STEP = 1e-12
_PROFILE_GUARD = 1e-10  # relative: more than the rounding of a profile that does not round itself up
_ROUNDING = 2.0**-52
_DECAY = 16.0  # exponent within one block of a sum
_SHORTEST_BLOCK = 64  # of fewer points there would be too many


@dataclass(frozen=True, slots=True, eq=False)
class LossPmf:
    """A discrete privacy loss of one order of a pair: the masses under the pair's first distribution.

    Guarantee: infinite + sum of mass (1 - exp(epsilon - loss))_+ is nowhere below the profile it was made from. The
    masses may add up to a little more than 1.
    """

    step: float  # the distance of grid points
    first: int  # `masses[i]` is the mass at the loss `(first + i) * step`
    masses: FloatArray
    infinite: float  # the mass at an infinite loss
    apart: float = 0.0  # from the masses of an exact pair of laws, each, by its logarithm

    @property
    def values(self) -> FloatArray:
        """The losses."""
        return self.step * np.arange(self.first, self.first + len(self.masses), dtype=np.float64)


def dominate(forward: Profile, backward: Profile | None, step: float, tail: float) -> tuple[LossPmf, LossPmf]:
    """Return the losses of both orders on the grid of multiples of `step`.

    Guarantee: each is nowhere below its profile, at any epsilon of either sign. Proof: theory.md#numerics.
    Checked: test_accounting_pld.py.
    """
    ahead = _positive(forward, step, tail)
    behind = ahead if backward is None else _positive(backward, step, tail)
    # Both orders are raised by the same factor, so that each stays the mirror image of the other.
    factor = 1 + max(ahead.short, behind.short)

    def joined(ahead: _Side, behind: _Side) -> LossPmf:
        positive, infinite = ahead.masses * factor, ahead.infinite * factor
        negative = behind.masses * factor * np.exp(-step * np.arange(1, len(behind.masses) + 1))
        center = max(0.0, 1 - infinite - float(positive.sum()) - float(negative.sum())) + 4 * _ROUNDING
        return LossPmf(step, -len(behind.masses), np.concatenate([negative[::-1], [center], positive]), infinite)

    one = joined(ahead, behind)
    other = one if backward is None else joined(behind, ahead)
    apart = _apart(ahead, behind, one, other)
    one = replace(one, apart=apart)
    return one, one if backward is None else replace(other, apart=apart)


def _apart(ahead: "_Side", behind: "_Side", *made: LossPmf) -> float:
    """Bound how far rounded masses are from those of one exact pair of laws. Proof: theory.md#numerics."""
    step, top = made[0].step, max(len(ahead.masses), len(behind.masses))
    totals = [
        side.infinite - float(side.masses @ np.expm1(-step * np.arange(1.0, len(side.masses) + 1)))
        for side in (ahead, behind)
    ]
    # Both orders must have one total variation; what sums and exponentials round is a few units and the exponent's.
    share = abs(totals[0] - totals[1]) / min(totals) + _ROUNDING * (64 + top * step)
    wrong = max(abs(math.fsum(pmf.masses) + pmf.infinite - 1) for pmf in made) + 2 * share
    center = min(float(pmf.masses[-pmf.first]) for pmf in made)
    return share - math.log1p(-wrong / center) if wrong < center else math.inf


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """Masses at step, 2 step, ..., the mass beyond, and by which share the profile is missed at worst."""

    masses: FloatArray
    infinite: float
    short: float


def _positive(profile: Profile, step: float, tail: float) -> _Side:
    top = max(1, int(np.ceil(tail_epsilon(profile, tail) / step)))
    delta = profile(step * np.arange(top + 1, dtype=np.float64)) * (1 + _PROFILE_GUARD)
    fall = np.diff(delta)
    masses = np.empty(top)
    masses[:-1] = (fall[1:] - np.exp(step) * fall[:-1]) / np.expm1(step)
    masses[-1] = fall[-1] / np.expm1(-step)
    masses = np.maximum(masses, 0.0)
    # Second differences cancel; sums of positive terms do not, and tell by how much they were wrong.
    kept = decayed_sums(masses, step) * np.exp(-step)
    rebuilt = delta[-1] + np.expm1(step) * np.cumsum(kept[::-1])[::-1]
    positive = delta[:-1] > 0
    missing = (delta[:-1] - rebuilt)[positive] / np.maximum(rebuilt[positive], 1e-320)
    return _Side(masses, float(delta[-1]), max(0.0, float(missing.max(initial=0.0))) + 4 * top * _ROUNDING)


def decayed_sums(masses: FloatArray, step: float) -> FloatArray:
    """Return the sums over j >= k of mass_j exp(-(j - k) step), from positive terms alone."""
    block = max(1, int(_DECAY / step))
    if block < _SHORTEST_BLOCK:  # the recursion itself: its rounding dies out as fast as the masses do
        from scipy.signal import lfilter  # noqa: PLC0415 - slow to load, and only huge losses need it

        return np.ascontiguousarray(lfilter([1.0], [1.0, -np.exp(-step)], masses[::-1])[::-1])
    sums, carried = np.empty(len(masses)), 0.0
    for end in range(len(masses), 0, -block):
        start = max(0, end - block)
        decay = np.exp(-step * np.arange(end - start))
        inside = np.cumsum((masses[start:end] * decay)[::-1])[::-1] / decay
        sums[start:end] = inside + carried * np.exp(-step * np.arange(end - start, 0, -1))
        carried = float(sums[start])
    return sums


CountedPmfs = Sequence[tuple[LossPmf, int]]

_UNIT = 2.0**-53
_WIDEST = 1 << 22  # points of a transform
_NEGLIGIBLE = 1e-7  # of delta: what lies above the window may cost
_HALF_WIDTH = 9.0  # of the window, in standard deviations of the tilted pmf
_STEEPEST = 600.0  # exponent of a weight
_FLATTEST = 1e-9  # tilt
_APART = 4.0  # means of tilts that follow each other, in standard deviations
_WRAPPED = 1e-11  # of the tilted mass: what may lie outside a window
_SHARES = tuple(0.6**power for power in range(12))  # of the tilt that would suit a Gaussian


def tilted_epsilon(pmfs: CountedPmfs, delta: float) -> float:
    """Return the least epsilon, not below 0, at which the composed losses have at most `delta`; infinite if unknown.

    Guarantee: never below the epsilon of the profiles that the losses dominate, rounding of the transform
    included. Proof: theory.md#numerics. Checked: test_accounting_pld_composition.py against exact sums.
    """
    total = sum(count for _, count in pmfs)
    infinite = math.fsum(count * losses.infinite for losses, count in pmfs)
    # Masses may add up to a little more than 1, which multiplies along the composition.
    grown = math.fsum(count * math.log(max(1.0, float(losses.masses.sum()))) for losses, count in pmfs)
    left = delta - infinite * math.exp(grown) * (1 + 4 * total * _UNIT)
    if left <= 0:
        return math.inf
    log_pmfs = [_LogPmf.of(losses, count) for losses, count in pmfs]

    def is_below(slope: float) -> bool:
        moments = _tilt(log_pmfs, slope)
        # delta <= c exp(log moment - slope epsilon) with c = slope^slope / (slope + 1)^(slope + 1), whose logarithm
        # less slope times its derivative is -log1p(slope).
        return moments.log - slope * moments.mean - math.log1p(slope) > math.log(left)

    slope = _root(is_below)  # the tilt that gives the least epsilon by moments
    if _tilt(log_pmfs, slope).mean < 0:
        slope = _root(lambda slope: _tilt(log_pmfs, slope).mean < 0)  # under which losses are 0 on average
    step = log_pmfs[0].losses.step
    moments = _tilt(log_pmfs, slope)
    center = round(moments.mean / step)
    deviation = math.sqrt(moments.variance) + step
    half = _HALF_WIDTH * deviation + min(1 / slope, _HALF_WIDTH * deviation)
    if moments.mean < math.log1p(1 / slope):  # epsilon may be 0, which the window must hold
        half = max(half, moments.mean + step)
    while (above := _above(log_pmfs, slope, center * step + half)) > math.log(_NEGLIGIBLE) + math.log(left):
        half *= 1.5
    size = 1 << max(6, math.ceil(math.log2(2 * half / step + 2)))
    if size > _WIDEST:
        return math.inf
    offsets, _, found, relative, rounding = _seen(log_pmfs, slope, center, size)
    # From here on delta is counted in units of the Chernoff bound, which may be as small as delta itself.
    log_unit = moments.log - slope * center * step
    wanted, beyond = math.exp(math.log(left) - log_unit), math.exp(above - log_unit)
    profile = (1 + relative) * found + math.exp(-_STEEPEST)
    profile += rounding + beyond
    return _crossing((center + offsets) * step, profile, wanted)


def _seen(
    log_pmfs: "Sequence[_LogPmf]", slope: float, center: int, size: int
) -> tuple[FloatArray, FloatArray, FloatArray, float, FloatArray]:
    """Return the profile about a grid loss by one transform of tilted masses.

    That is, the offsets from that loss, their weights, the profile in units of the Chernoff bound there, and what
    rounding can do to it: a share of it, and a part that is added.
    """
    masses, error, relative = _convolve(log_pmfs, slope, size)
    step, offsets = log_pmfs[0].losses.step, np.arange(-(size // 2), size // 2)
    inside = np.abs(slope * step * offsets) < _STEEPEST  # weights beyond are not in the range of doubles
    weights = np.exp(-slope * step * offsets[inside])
    found = np.maximum(np.roll(masses, size // 2 - center)[inside], 0.0) * weights
    ahead = step * np.arange(size)  # how far above epsilon a loss lies; what rounding can do is bounded in L2
    rounded = np.expm1(-ahead) * np.exp(-slope * ahead)
    # The sum of mass (1 - exp(loss' - loss))_+ at every grid loss', from sums of positive terms alone.
    kept = np.zeros_like(found)
    kept[:-1] = math.exp(-step) * decayed_sums(found[1:], step)
    profile = np.asarray(math.expm1(step) * np.cumsum(kept[::-1])[::-1], dtype=np.float64)
    return offsets[inside], weights, profile, relative, error * weights * math.sqrt(inner(rounded, rounded))


def inner(left: FloatArray, right: FloatArray) -> float:
    """Return the inner product, not by BLAS: its threads cost many times the sum, and its order is theirs."""
    return float((left * right).sum())


@dataclass(frozen=True, slots=True, eq=False)
class _LogPmf:
    """One kind of loss and how often it occurs; sums are taken of logarithms, as tilts may be steep."""

    losses: LossPmf
    count: int
    values: FloatArray
    squares: FloatArray
    logs: FloatArray

    @staticmethod
    def of(losses: LossPmf, count: int) -> "_LogPmf":
        with np.errstate(divide="ignore"):
            logs = np.log(losses.masses)
        finite = np.isfinite(logs)
        values = losses.values[finite]
        return _LogPmf(losses, count, values, values * values, logs[finite])

    def tilted(self, slope: float) -> "_Moments":
        """Return what the losses of all releases come to under masses proportional to mass exp(slope loss)."""
        exponents = slope * self.values + self.logs
        most = float(exponents.max())
        weights = np.exp(exponents - most)
        total = float(weights.sum())
        mean = inner(weights, self.values) / total
        variance = max(0.0, inner(weights, self.squares) / total - mean * mean)
        return _Moments(self.count * (most + math.log(total)), self.count * mean, self.count * variance)


@dataclass(frozen=True, slots=True)
class _Moments:
    """The logarithm of the mean of exp(slope loss), and mean and variance of the tilted loss."""

    log: float
    mean: float
    variance: float


def _tilt(log_pmfs: Sequence[_LogPmf], slope: float) -> _Moments:
    """Return the moments of the sum of all losses."""
    each = [pmf.tilted(slope) for pmf in log_pmfs]
    return _Moments(*(math.fsum(getattr(one, name) for one in each) for name in ("log", "mean", "variance")))


def _root(is_below: Callable[[float], bool], precision: float = 0.02) -> float:
    low, high = _FLATTEST, 16.0
    while is_below(high) and high < 1 / _FLATTEST:
        low, high = high, 16 * high
    while high > (1 + precision) * low:  # any tilt is valid, and near the best one it matters little which
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return high


def _above(log_pmfs: Sequence[_LogPmf], slope: float, loss: float) -> float:
    """Return the logarithm of a Chernoff bound on the mass at and above a loss."""
    if loss > math.fsum(pmf.count * float(pmf.values[-1]) for pmf in log_pmfs):
        return -math.inf
    here = _tilt(log_pmfs, slope)
    best = slope + (loss - here.mean) / here.variance if here.variance > 0 else slope  # for a Gaussian
    return min(_tilt(log_pmfs, steep).log - steep * loss for steep in (1.2 * slope, (slope + best) / 2, best))


def _convolve(log_pmfs: Sequence[_LogPmf], slope: float, size: int) -> tuple[FloatArray, float, float]:
    """Return the tilted pmf of the sum modulo `size` steps and two bounds on its error. Proof: theory.md#numerics."""
    transform, total, relative, growth, errors = np.ones(size, dtype=np.complex128), 0, 0.0, 0.0, 0.0
    per_transform = 8 * _UNIT * math.log2(size)
    for pmf in log_pmfs:
        exponents = slope * pmf.values + pmf.logs - pmf.tilted(slope).log / pmf.count
        masses = np.exp(exponents)
        index = np.rint(pmf.values / pmf.losses.step).astype(np.int64) % size
        folded: FloatArray = np.bincount(index, weights=masses, minlength=size).astype(np.float64, copy=False)
        norm = math.sqrt(inner(folded, folded))
        largest = np.abs(slope * pmf.values) + np.abs(pmf.logs)
        relative += pmf.count * 8 * _UNIT * (2 * float(largest[exponents > -745].max()) + 8)
        growth += pmf.count * (max(0.0, float(folded.sum()) - 1) + per_transform * math.sqrt(size) * norm)
        errors += pmf.count * (per_transform * norm + 1e-280)
        total += pmf.count
        transform *= _power(np.fft.fft(folded), pmf.count)
    error = math.exp(growth) * (errors + 4 * _UNIT * total + 2 * per_transform)
    return np.fft.ifft(transform).real, error, math.expm1(relative) + 8 * size * _UNIT


def profile_bounds(pmfs: CountedPmfs, top: int) -> tuple[FloatArray, FloatArray]:
    """Return a lower and an upper bound on the profile of composed losses at the grid losses 0 .. top.

    Guarantee: they enclose it. They are close to it relative to itself, however small it is: tilts follow each other
    so that every loss is near the mean of one. Proof: theory.md#numerics.
    Checked: test_accounting_pld_composition.py against exact sums.
    """
    log_pmfs, step = [_LogPmf.of(losses, count) for losses, count in pmfs], pmfs[0][0].step
    grown = math.exp(max(0.0, _tilt(log_pmfs, 0.0).log))
    infinite = math.fsum(count * losses.infinite for losses, count in pmfs) * grown
    lower, upper, slope, goal = np.zeros(top + 1), np.full(top + 1, grown), _FLATTEST, -math.inf
    most = math.fsum(pmf.count * float(pmf.values[-1]) for pmf in log_pmfs)
    while goal < min(top * step, most):
        moments = _tilt(log_pmfs, slope)
        center, half = round(moments.mean / step), _HALF_WIDTH * (math.sqrt(moments.variance) + step)
        if slope == _FLATTEST:
            half = max(half, moments.mean + 2 * step)  # the first of them holds epsilon 0
        while (outside := _outside(log_pmfs, slope, moments, half)) > _WRAPPED:
            half *= 1.5
        size = 1 << max(6, math.ceil(math.log2(2 * half / step + 2)))
        if size <= _WIDEST:
            offsets, weights, found, relative, rounding = _seen(log_pmfs, slope, center, size)
            # What wraps is in the window at a wrong place, and what is above it is missed: either is at most its
            # tilted mass.
            wrong = rounding + outside * weights
            with np.errstate(over="ignore"):
                unit = np.exp(moments.log - slope * center * step)
                low, high = (1 - relative) * found - wrong, (1 + relative) * found + wrong + math.exp(-_STEEPEST)
                low, high = unit * np.maximum(low, 0.0), unit * high
            first = center + int(offsets[0])
            begin, end = max(0, first), min(top + 1, first + len(low))
            if begin < end:
                lower[begin:end] = np.maximum(lower[begin:end], low[begin - first : end - first])
                upper[begin:end] = np.minimum(upper[begin:end], high[begin - first : end - first])
        goal = moments.mean + _APART * (math.sqrt(moments.variance) + step)
        slope = _root(lambda at: _tilt(log_pmfs, at).mean < goal)  # noqa: B023 - it is called at once
    upper = np.minimum.accumulate(upper) + infinite + _SMALLEST_TAIL
    return np.maximum.accumulate(lower[::-1])[::-1], upper


def _outside(log_pmfs: Sequence[_LogPmf], slope: float, moments: _Moments, half: float) -> float:
    """Return a Chernoff bound on the tilted mass that is at least `half` from the mean."""
    total = 0.0
    for side, end in ((-1, 0), (1, -1)):
        edge = moments.mean + side * half
        if side * (math.fsum(pmf.count * float(pmf.values[end]) for pmf in log_pmfs) - edge) < 0:
            continue  # no sum is beyond it
        reach = (edge - moments.mean) / (moments.variance + log_pmfs[0].losses.step ** 2)
        tilts = (slope + share * reach for share in _SHARES)
        exponent = min(_tilt(log_pmfs, to).log - moments.log - (to - slope) * edge for to in tilts)
        total += math.exp(min(0.0, exponent))
    return total


def _power(base: npt.NDArray[np.complex128], count: int) -> npt.NDArray[np.complex128]:
    result = np.ones_like(base)
    while count:
        if count & 1:
            result *= base
        count >>= 1
        if count:
            base = base * base
    return result


def _crossing(losses: FloatArray, profile: FloatArray, wanted: float) -> float:
    """Return where a decreasing profile, linear in exp(loss) between grid points, falls to what is wanted."""
    good = np.flatnonzero(profile <= wanted)
    if not len(good):
        return math.inf
    first = int(good[0])
    if first == 0 or losses[first] <= 0:
        return max(0.0, float(losses[first]))
    before, step = float(profile[first - 1]), float(losses[first] - losses[first - 1])
    share = (before - wanted) / (before - float(profile[first]))
    return max(0.0, float(losses[first - 1]) + math.log1p(share * math.expm1(step))) * (1 + 1e-12)


@dataclass(frozen=True, slots=True, eq=False)
class PrivacyLossDistribution:
    """A composed privacy loss distribution, kept as its factors until epsilon is asked for."""

    # The losses of both orders of each release, and how often it occurs.
    pmfs: tuple[tuple[LossPmf, LossPmf, int], ...]
    slack: float  # of all surrogates inside them

    def times(self, count: int) -> "PrivacyLossDistribution":
        """Return the cost of `count` equal releases."""
        pmfs = tuple((forward, backward, count * times) for forward, backward, times in self.pmfs)
        return PrivacyLossDistribution(pmfs, count * self.slack)

    def __add__(self, other: "PrivacyLossDistribution") -> "PrivacyLossDistribution":
        return PrivacyLossDistribution(self.pmfs + other.pmfs, self.slack + other.slack)

    def epsilon(self, delta: float, kappa: float = 0.0) -> float:
        """Return epsilon at `delta`, of which `kappa` is used up; it errs upwards. Proof: theory.md#numerics."""
        left = delta * math.exp(-self.slack) - kappa
        if left <= 0:
            return math.inf
        epsilon = tilted_epsilon([(forward, count) for forward, _, count in self.pmfs], left)
        if any(backward is not forward for forward, backward, _ in self.pmfs):
            epsilon = max(epsilon, tilted_epsilon([(backward, count) for _, backward, count in self.pmfs], left))
        return epsilon + 2 * self.slack


def loss_distributions(
    pairs: Sequence[tuple[DominatingPair, int]], delta: float, points: int
) -> list[tuple[PrivacyLossDistribution, int]]:
    """Return the loss distributions, which dominate in both orders, on one grid. Proof: theory.md#numerics."""
    tail = max(delta * _TAIL_SHARE / sum(count for _, count in pairs), _SMALLEST_TAIL)
    widths = [tail_epsilon(pair.forward, tail) for pair, _ in pairs]
    step = max(min(widths) / points, max(widths) / (16 * points), _FINEST_STEP)
    costs = []
    for pair, count in pairs:
        forward, backward = dominate(pair.forward, pair.backward, step, tail)
        costs.append((PrivacyLossDistribution(((forward, backward, 1),), pair.slack), count))
    return costs
