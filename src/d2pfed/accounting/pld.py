"""Privacy-loss distributions of sampled Gaussians, on grids that err upwards."""

from collections.abc import Sequence
from typing import Protocol

from d2pfed.accounting.cost import LossCost
from d2pfed.accounting.losses import dominate, reach
from d2pfed.accounting.profiles import Profile

COARSE, FINE = 1 << 11, 1 << 14  # positive grid points of one release's losses

_TAIL_SHARE = 1e-6  # of delta: what cutting tails may use up
_SMALLEST_TAIL = 1e-300  # below it profiles leave the range of doubles
_FINEST_STEP = 1e-12


class Part(Protocol):
    """One release by its profiles, and the slack of the surrogate behind them."""

    @property
    def forward(self) -> Profile:
        """The profile of the first world against the second."""
        ...

    @property
    def backward(self) -> Profile | None:
        """The profile of the second world against the first; None if it is the same."""
        ...

    @property
    def slack(self) -> float:
        """What it costs to put a Gaussian in the place of the true noise."""
        ...


def loss_costs(parts: Sequence[tuple[Part, int]], delta: float, points: int) -> list[tuple[LossCost, int]]:
    """Return each part's loss distribution, all on one grid that suits the narrowest as far as it can.

    Guarantee: each dominates its release, in both orders. Proof: theory.md#numerics.
    """
    tail = max(delta * _TAIL_SHARE / sum(count for _, count in parts), _SMALLEST_TAIL)
    widths = [reach(part.forward, tail) for part, _ in parts]
    step = max(min(widths) / points, max(widths) / (16 * points), _FINEST_STEP)
    costs = []
    for part, count in parts:
        forward, backward = dominate(part.forward, part.backward, step, tail)
        costs.append((LossCost(((forward, backward, 1),), part.slack), count))
    return costs
