"""Discrete privacy losses that dominate a profile, and their composition by one Fourier transform of tilted masses.

Losses are on a grid, and profiles linear in exp(epsilon) between its points. A tilt multiplies each mass by
exp(slope loss) so that the losses near epsilon carry most of it: the transform is then exact to a bound however small
delta is.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from d2pfed.accounting.rdp import FloatArray

Profile = Callable[[FloatArray], FloatArray]  # delta as a function of epsilon, for epsilon >= 0

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
    one = _join(ahead, behind, step, factor)
    return one, one if backward is None else _join(behind, ahead, step, factor)


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


def _join(ahead: _Side, behind: _Side, step: float, factor: float) -> LossPmf:
    positive = ahead.masses * factor
    negative = behind.masses * factor * np.exp(-step * np.arange(1, len(behind.masses) + 1))
    infinite = ahead.infinite * factor
    center = max(0.0, 1 - infinite - float(positive.sum()) - float(negative.sum())) + 4 * _ROUNDING
    return LossPmf(step, -len(behind.masses), np.concatenate([negative[::-1], [center], positive]), infinite)


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


CountedPmfs = Sequence[tuple[LossPmf, int]]

_UNIT = 2.0**-53
_WIDEST = 1 << 22  # points of a transform
_NEGLIGIBLE = 1e-7  # of delta: what lies above the window may cost
_HALF_WIDTH = 9.0  # of the window, in standard deviations of the tilted pmf
_STEEPEST = 600.0  # exponent of a weight
_FLATTEST = 1e-9  # tilt


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
    slope = _slope(log_pmfs, math.log(left))
    if _tilt(log_pmfs, slope).mean < 0:
        slope = _root(lambda slope: _tilt(log_pmfs, slope).mean < 0)  # under which losses are 0 on average
    return _read(log_pmfs, slope, left)


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

    def mirrored(self) -> "_LogPmf":
        """Return the pmf of the opposite losses."""
        return _LogPmf(self.losses, self.count, -self.values[::-1], self.squares[::-1], self.logs[::-1])

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


def _slope(log_pmfs: Sequence[_LogPmf], log_delta: float) -> float:
    """Return the tilt that gives the least epsilon by moments: delta <= c exp(log moment - slope epsilon)."""

    def is_below(slope: float) -> bool:
        moments = _tilt(log_pmfs, slope)
        # c = slope^slope / (slope + 1)^(slope + 1); its logarithm less slope times its derivative is -log1p(slope)
        return moments.log - slope * moments.mean - math.log1p(slope) > log_delta

    return _root(is_below)


def _root(is_below: Callable[[float], bool], precision: float = 0.02) -> float:
    low, high = _FLATTEST, 16.0
    while is_below(high) and high < 1 / _FLATTEST:
        low, high = high, 16 * high
    while high > (1 + precision) * low:  # any tilt is valid, and near the best one it matters little which
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return high


def _read(log_pmfs: Sequence[_LogPmf], slope: float, delta: float) -> float:
    step = log_pmfs[0].losses.step
    moments = _tilt(log_pmfs, slope)
    center = round(moments.mean / step)
    deviation = math.sqrt(moments.variance) + step
    half = _HALF_WIDTH * deviation + min(1 / slope, _HALF_WIDTH * deviation)
    if moments.mean < math.log1p(1 / slope):  # epsilon may be 0, which the window must hold
        half = max(half, moments.mean + step)
    while (above := _above(log_pmfs, slope, center * step + half)) > math.log(_NEGLIGIBLE) + math.log(delta):
        half *= 1.5
    size = 1 << max(6, math.ceil(math.log2(2 * half / step + 2)))
    if size > _WIDEST:
        return math.inf
    masses, error, relative = _convolve(log_pmfs, slope, size)
    # From here on delta is counted in units of the Chernoff bound, which may be as small as delta itself.
    log_unit = moments.log - slope * center * step
    wanted, beyond = math.exp(math.log(delta) - log_unit), math.exp(above - log_unit)
    offsets = np.arange(-(size // 2), size // 2)
    inside = np.abs(slope * step * offsets) < _STEEPEST  # weights beyond are not in the range of doubles
    weights = np.exp(-slope * step * offsets[inside])
    found = np.maximum(np.roll(masses, size // 2 - center)[inside], 0.0) * weights
    profile = (1 + relative) * _profile(found, step) + math.exp(-_STEEPEST)
    ahead = step * np.arange(size)  # how far above epsilon a loss lies; what rounding can do is bounded in L2
    rounded = np.expm1(-ahead) * np.exp(-slope * ahead)
    profile += error * weights * math.sqrt(inner(rounded, rounded)) + beyond
    return _crossing((center + offsets[inside]) * step, profile, wanted)


def _above(log_pmfs: Sequence[_LogPmf], slope: float, loss: float) -> float:
    """Return the logarithm of a Chernoff bound on the mass at and above a loss."""
    if loss > math.fsum(pmf.count * float(pmf.values[-1]) for pmf in log_pmfs):
        return -math.inf
    here = _tilt(log_pmfs, slope)
    best = slope + (loss - here.mean) / here.variance if here.variance > 0 else slope  # for a Gaussian
    return min(_tilt(log_pmfs, steep).log - steep * loss for steep in (1.2 * slope, (slope + best) / 2, best))


def _convolve(log_pmfs: Sequence[_LogPmf], slope: float, size: int) -> tuple[FloatArray, float, float]:
    """Return the tilted pmf of the sum modulo `size` steps, its rounding error in L2, and that of the masses put in.

    Proof of both bounds: theory.md#numerics.
    """
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


def profile_bounds(pmfs: CountedPmfs, width: int) -> tuple[FloatArray, FloatArray]:
    """Return a lower and an upper bound on the profile of composed losses at the grid losses 0 .. width.

    Guarantee: absolute, not relative, so of use only for slacks well above rounding. Proof: theory.md#numerics.
    Checked: test_accounting_pld_composition.py against exact sums.
    """
    log_pmfs = [_LogPmf.of(losses, count) for losses, count in pmfs]
    masses, error, relative = _convolve(log_pmfs, 0.0, 2 * width)
    growth = _tilt(log_pmfs, 0.0).log
    found = np.maximum(np.append(masses[:width], 0.0), 0.0) * math.exp(growth)
    profile = _profile(found, log_pmfs[0].losses.step)
    wrong = relative + error * math.sqrt(width) + mass_outside(pmfs, width)
    return profile - wrong, profile + wrong


def mass_outside(pmfs: CountedPmfs, width: int) -> float:
    """Return a bound on the mass that is infinite or more than so many grid points away from 0."""
    log_pmfs = [_LogPmf.of(losses, count) for losses, count in pmfs]
    growth = max(0.0, _tilt(log_pmfs, 0.0).log)
    infinite = math.fsum(count * losses.infinite for losses, count in pmfs) * math.exp(growth)
    edge = width * log_pmfs[0].losses.step
    return infinite + _tail(log_pmfs, edge) + _tail([pmf.mirrored() for pmf in log_pmfs], edge)


def _tail(log_pmfs: Sequence[_LogPmf], loss: float) -> float:
    """Return the least Chernoff bound on the mass at and above a loss."""
    if loss <= _tilt(log_pmfs, 0.0).mean:
        return 1.0
    slope = _root(lambda slope: _tilt(log_pmfs, slope).mean < loss, 0.2)
    return math.exp(min(0.0, _tilt(log_pmfs, slope).log - slope * loss))


def _power(base: npt.NDArray[np.complex128], count: int) -> npt.NDArray[np.complex128]:
    result = np.ones_like(base)
    while count:
        if count & 1:
            result *= base
        count >>= 1
        if count:
            base = base * base
    return result


def _profile(masses: FloatArray, step: float) -> FloatArray:
    """Return sum of mass (1 - exp(loss' - loss))_+ at every grid loss', from sums of positive terms alone."""
    kept = np.zeros_like(masses)
    kept[:-1] = math.exp(-step) * decayed_sums(masses[1:], step)
    return np.asarray(math.expm1(step) * np.cumsum(kept[::-1])[::-1], dtype=np.float64)


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
