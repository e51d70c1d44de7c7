"""Discrete privacy losses that dominate a profile: on a grid, and linear in exp(epsilon) between its points."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from d2pfed.accounting.rdp import FloatArray

Profile = Callable[[FloatArray], FloatArray]  # delta as a function of epsilon, for epsilon >= 0

_PROFILE_GUARD = 1e-10  # relative: more than the rounding of a profile that does not round itself up
_ROUNDING = 2.0**-52
_DECAY = 16.0  # exponent within one block of a sum
_SHORTEST_BLOCK = 64  # of fewer points there would be too many


@dataclass(frozen=True, slots=True, eq=False)
class LossPmf:
    """A discrete privacy loss of one order of a pair: the masses under the pair's first distribution.

    Attributes:
        step: the distance of grid points.
        first: the index of the first grid point: `masses[i]` is the mass at the loss `(first + i) * step`.
        masses: the masses at the finite losses.
        infinite: the mass at an infinite loss.

    Guarantee: infinite + sum of mass (1 - exp(epsilon - loss))_+ is nowhere below the profile it was made from. The
    masses may add up to a little more than 1.
    """

    step: float
    first: int
    masses: FloatArray
    infinite: float

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
    centre = max(0.0, 1 - infinite - float(positive.sum()) - float(negative.sum())) + 4 * _ROUNDING
    return LossPmf(step, -len(behind.masses), np.concatenate([negative[::-1], [centre], positive]), infinite)


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
