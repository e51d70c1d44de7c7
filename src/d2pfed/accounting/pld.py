"""Privacy loss distributions of many releases: one grid for all of them, composed when epsilon is asked for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from d2pfed.accounting.losses import LossPmf, Profile, dominate, tail_epsilon, tilted_epsilon


@dataclass(frozen=True, slots=True, eq=False)
class PrivacyLossDistribution:
    """A composed privacy loss distribution, kept as its factors until epsilon is asked for."""

    pmfs: tuple[
        tuple[LossPmf, LossPmf, int], ...
    ]  # losses of both orders of each release, and how often it occurs
    slack: float  # of all surrogates inside them

    @property
    def count(self) -> int:
        """How many releases there are."""
        return sum(count for _, _, count in self.pmfs)

    def times(self, count: int) -> "PrivacyLossDistribution":
        """Return the cost of so many equal releases."""
        pmfs = tuple((forward, backward, count * times) for forward, backward, times in self.pmfs)
        return PrivacyLossDistribution(pmfs, count * self.slack)

    def __add__(self, other: "PrivacyLossDistribution") -> "PrivacyLossDistribution":
        return PrivacyLossDistribution(self.pmfs + other.pmfs, self.slack + other.slack)

    def epsilon(self, delta: float, kappa: float = 0.0) -> float:
        """Return epsilon at `delta`, of which `kappa` is used up; rounding of the convolution and slack included.

        Guarantee: never below the epsilon of the losses that were put in. Proof: theory.md#numerics.
        """
        left = delta * math.exp(-self.slack) - kappa
        if left <= 0:
            return math.inf
        epsilon = tilted_epsilon([(forward, count) for forward, _, count in self.pmfs], left)
        if any(backward is not forward for forward, backward, _ in self.pmfs):
            epsilon = max(epsilon, tilted_epsilon([(backward, count) for _, backward, count in self.pmfs], left))
        return epsilon + 2 * self.slack


COARSE, FINE = 1 << 11, 1 << 14  # positive grid points of one release's losses

_TAIL_SHARE = 1e-6  # of delta: what cutting tails may use up
_SMALLEST_TAIL = 1e-300  # below it profiles leave the range of doubles
_FINEST_STEP = 1e-12


class DominatingPair(Protocol):
    """A pair of distributions that dominates one release: its profiles, and the slack of the surrogate behind them."""

    @property
    def forward(self) -> Profile:
        """The profile of the first distribution against the second."""
        ...

    @property
    def backward(self) -> Profile | None:
        """The profile of the second distribution against the first; None if it is the same."""
        ...

    @property
    def slack(self) -> float:
        """What it costs to put a Gaussian in the place of the true noise."""
        ...


def loss_distributions(
    pairs: Sequence[tuple[DominatingPair, int]], delta: float, points: int
) -> list[tuple[PrivacyLossDistribution, int]]:
    """Return each pair's loss distribution, all on one grid that suits the narrowest as far as it can.

    Guarantee: each dominates its release, in both orders. Proof: theory.md#numerics.
    """
    tail = max(delta * _TAIL_SHARE / sum(count for _, count in pairs), _SMALLEST_TAIL)
    widths = [tail_epsilon(pair.forward, tail) for pair, _ in pairs]
    step = max(min(widths) / points, max(widths) / (16 * points), _FINEST_STEP)
    costs = []
    for pair, count in pairs:
        forward, backward = dominate(pair.forward, pair.backward, step, tail)
        costs.append((PrivacyLossDistribution(((forward, backward, 1),), pair.slack), count))
    return costs
