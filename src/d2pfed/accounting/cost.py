"""Privacy costs and the one place where they are put together."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


class Cost(Protocol):
    """What can be repeated and put together under adaptive composition."""

    def times(self, count: int) -> Self:
        """Return the cost of so many equal releases."""
        ...

    def __add__(self, other: Self) -> Self: ...


C = TypeVar("C", bound=Cost)


def composed(parts: Iterable[tuple[C, int]]) -> C:
    """Return the cost of all parts together, each as often as stated: the only composition in the package.

    Guarantee: holds when each release was chosen after seeing the earlier ones. Proof: theory.md#composition.
    """
    return reduce(add, (cost.times(count) for cost, count in parts))


@dataclass(frozen=True, slots=True)
class Additive:
    """A cost whose coordinates add: Renyi divergences at fixed orders, or (squared ratio, slack) of Gaussians."""

    values: tuple[float, ...]

    def times(self, count: int) -> "Additive":
        """Return the cost of so many equal releases."""
        return Additive(tuple(count * value for value in self.values))

    def __add__(self, other: "Additive") -> "Additive":
        return Additive(tuple(a + b for a, b in zip(self.values, other.values, strict=True)))


@dataclass(frozen=True, slots=True)
class LossCost:
    """A privacy-loss distribution on a pessimistic grid, and the slack of the surrogates inside it."""

    losses: "PrivacyLossDistribution"
    slack: float
    count: int
    tail: float  # mass that each step may move to infinity

    def times(self, count: int) -> "LossCost":
        """Return the cost of so many equal releases."""
        losses = self.losses.self_compose(count, tail_mass_truncation=self.tail)
        return replace(self, losses=losses, slack=count * self.slack, count=count * self.count)

    def __add__(self, other: "LossCost") -> "LossCost":
        losses = self.losses.compose(other.losses, tail_mass_truncation=self.tail)
        return replace(self, losses=losses, slack=self.slack + other.slack, count=self.count + other.count)

    def epsilon(self, delta: float, kappa: float = 0.0) -> float:
        """Return epsilon at `delta`, of which `kappa` is used up; rounding of the convolution and slack included.

        Guarantee: never below the epsilon of the losses that were put in. Proof: theory.md#numerics.
        """
        left = delta * math.exp(-self.slack) - kappa - self._rounding()
        return float(self.losses.get_epsilon_for_delta(left)) + 2 * self.slack if left > 0 else math.inf

    def _rounding(self) -> float:
        # A transform of n points errs by about log2(n) units in the last place in L2, a power by `count` times as
        # much, and summing n entries multiplies it by at most sqrt(n).
        size = max(pmf.size for pmf in (self.losses._pmf_remove, self.losses._pmf_add))  # noqa: SLF001 - no public size
        return 2 * self.count * math.log2(size + 2) * math.sqrt(size) * 2.0**-53
