"""Privacy costs and the one place where they are put together."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Protocol, Self, TypeVar

from d2pfed.accounting.losses import Losses
from d2pfed.accounting.tilted import tilted_epsilon


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


@dataclass(frozen=True, slots=True, eq=False)
class LossCost:
    """Privacy losses of both orders, how often each kind occurs, and the slack of the surrogates inside them."""

    parts: tuple[tuple[Losses, Losses, int], ...]
    slack: float

    @property
    def count(self) -> int:
        """How many releases there are."""
        return sum(count for _, _, count in self.parts)

    def times(self, count: int) -> "LossCost":
        """Return the cost of so many equal releases."""
        parts = tuple((forward, backward, count * times) for forward, backward, times in self.parts)
        return LossCost(parts, count * self.slack)

    def __add__(self, other: "LossCost") -> "LossCost":
        return LossCost(self.parts + other.parts, self.slack + other.slack)

    def epsilon(self, delta: float, kappa: float = 0.0) -> float:
        """Return epsilon at `delta`, of which `kappa` is used up; rounding of the convolution and slack included.

        Guarantee: never below the epsilon of the losses that were put in. Proof: theory.md#numerics.
        """
        left = delta * math.exp(-self.slack) - kappa
        if left <= 0:
            return math.inf
        epsilon = tilted_epsilon([(forward, count) for forward, _, count in self.parts], left)
        if any(backward is not forward for forward, backward, _ in self.parts):
            epsilon = max(epsilon, tilted_epsilon([(backward, count) for _, backward, count in self.parts], left))
        return epsilon + 2 * self.slack
