"""Amplification under `once`, towards who sees the models only: a client is in one block, and nobody there knows which.

With alpha = exp(epsilon), X and X' the likelihood ratios of a block that moved by the shift and by its opposite, the
profile is weight E[(sum over blocks of (X - alpha X') - (alpha - 1) (1 / weight - blocks))_+]: a sum of independent
numbers, whose laws are replaced by ones on a grid that are nowhere below in convex order.
"""

import math
from dataclasses import dataclass

import numpy as np

from d2pfed.accounting.rdp import FloatArray

_REACH = (-5.0, 7.5)  # of a Gaussian, in deviations; what is below is raised, what is beyond is added
_ROUNDING = 2.0**-50  # of a value of a call function, of each transform's level, and of a factor of a power
_LARGEST = 300.0  # exponent of a likelihood ratio within the range of doubles
_PRECISION = 1e-4  # relative, of epsilon
_SMALLEST = 0.05  # of an epsilon without amplification, that is tried
_FEWEST, _MOST = 8, 1 << 11  # grid points of a block


@dataclass(frozen=True, slots=True)
class HiddenBlocks:
    """Blocks of a random order of all clients, each released once with Gaussian noise.

    Guarantee: dominates replace-one neighbors if one client at least is in no block. Proof: theory.md#once.
    Checked: test_accounting_allocation.py.
    """

    ratio: float  # two radii over sigma
    weight: float  # the chance that a client is in a given block; of all together less than 1
    blocks: int

    def epsilon(self, delta: float, known: float, points: int) -> float:
        """Return epsilon on a grid of this many points, at most `known`: that of someone who knows the block."""
        # What the grid adds grows with exp(epsilon), so a smaller one may be found where `known` is not.
        low, high = 0.0, known
        while math.isfinite(high) and self.delta(high, points) > delta:
            low, high = (0.0, 0.9 * high) if high > _SMALLEST * known else (known, math.inf)
        if not math.isfinite(high):
            return known
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.delta(middle, points) > delta else (low, middle)
        return high

    def delta(self, epsilon: float, points: int) -> float:
        """Return the profile, rounded up."""
        per_block, half = min(points // self.blocks, _MOST), self.ratio * self.ratio / 2
        ends = [self.ratio * reach for reach in _REACH]
        if per_block < _FEWEST or epsilon + half + ends[1] > _LARGEST:
            return 1.0
        alpha = math.exp(epsilon)
        low, high = (math.exp(end - half) - alpha * math.exp(-end - half) for end in ends)
        grid, step = np.linspace(low, high, per_block, retstep=True)
        call = self._call(grid, alpha)
        beyond = max(0.0, float(call[-1]))
        slopes = np.diff(call - beyond) / step
        masses = np.maximum(np.concatenate([[1 + slopes[0]], np.diff(slopes), [-slopes[-1]]]), 0.0)
        length = (per_block - 1) * self.blocks + 1
        size = 1 << math.ceil(math.log2(length))
        law = np.fft.irfft(np.fft.rfft(masses, size) ** self.blocks, size)[:length]
        above = self.blocks * low + step * np.arange(length) - (alpha - 1) * (1 / self.weight - self.blocks)
        excess = np.maximum(above, 0.0)
        # What transforms and a power round, as bounded in N.5: it depends on how far a block's masses are spread.
        level, norm = _ROUNDING * math.log2(size), math.sqrt(float((masses * masses).sum()))
        grown = math.exp(self.blocks * (max(0.0, float(masses.sum()) - 1) + level * math.sqrt(size) * norm))
        wrong = grown * (self.blocks * (level * norm + _ROUNDING) + 2 * level)
        wrong *= math.sqrt(float((excess * excess).sum()))
        each = beyond + _ROUNDING * per_block * per_block * float(call[0] + alpha)
        return self.weight * (float((excess * np.maximum(law, 0.0)).sum()) + wrong + self.blocks * each)

    def _call(self, grid: FloatArray, alpha: float) -> FloatArray:
        """Return the expectation of what X - alpha X' is above each grid point, for one block."""
        from scipy.special import ndtr  # noqa: PLC0415 - slow to load

        raised = grid * math.exp(self.ratio * self.ratio / 2)
        root = np.sqrt(raised * raised + 4 * alpha)
        likelihood = np.where(raised > 0, (raised + root) / 2, 2 * alpha / (root + np.abs(raised)))
        passed = np.log(likelihood) / self.ratio  # the output at which X - alpha X' is on the grid
        return np.asarray(ndtr(self.ratio - passed) - alpha * ndtr(-self.ratio - passed) - grid * ndtr(-passed))
