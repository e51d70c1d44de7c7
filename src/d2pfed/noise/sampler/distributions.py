"""Intervals around the weights of the sampled distributions, of any precision, from exact rational parameters.

All are log-concave: the ratios of neighbouring weights fall from the mode outwards, which
`intervals.falling_side` relies on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt
from typing import Protocol, cast

from d2pfed.noise.sampler.intervals import (
    Interval,
    Side,
    Weights,
    ceil_divide,
    exp_minus,
    falling_side,
    join,
    multiply,
)


class Distribution(Protocol):
    """A log-concave distribution on the integers with exact parameters; equal distributions are equal keys."""

    def weights(self, precision: int, tail_bits: int) -> Weights:
        """Enclose the weights until each tail holds at most 2^-tail_bits of the mode's weight."""

    def __hash__(self) -> int:
        """Make it a key of a cache."""


@dataclass(frozen=True, slots=True)
class GaussianDistribution:
    """P(k) proportional to exp(-(k - centre)^2 / (2 sigma^2))."""

    centre: Fraction
    sigma_squared: Fraction

    def weights(self, precision: int, tail_bits: int) -> Weights:
        """Enclose the weights; their ratio from k to k + 1, exp(-(2 (k - c) + 1) / (2 sigma^2)), is geometric."""
        mode = round(self.centre)
        ahead = self.centre - mode
        shrink = exp_minus(1 / self.sigma_squared, precision)
        sides = []
        for offset in (-ahead, ahead):
            nearest = exp_minus((1 - 2 * offset) / (2 * self.sigma_squared), precision)
            sides.append(_endless_side(_geometric(nearest, shrink, precision), precision, tail_bits))
        return join(mode, sides[0], sides[1], precision)


@dataclass(frozen=True, slots=True)
class SkellamDistribution:
    """The difference of two Poisson variables of equal mean: P(k) proportional to Bessel's I_k(variance)."""

    variance: Fraction

    def weights(self, precision: int, tail_bits: int) -> Weights:
        """Enclose the weights from the ratios of Bessel functions."""
        count = 64 + isqrt(int(self.variance))
        while True:
            ratios = self._ratios(2 * count, precision)
            side = falling_side(
                ratios[:count], precision, tail_bits
            )  # the far half's intervals are wide: only a run-up
            if side is not None:
                return join(0, side, side, precision)
            count *= 2

    def _ratios(self, count: int, precision: int) -> list[Interval]:
        """Enclose I_(k+1) / I_k downwards from [0, 1] by r_(k-1) = 1 / (2 k / variance + r_k), which contracts."""
        numerator, denominator = self.variance.numerator, self.variance.denominator
        ratio = (0, 1 << precision)
        ratios = []
        for k in range(count, 0, -1):
            step = 2 * k * denominator << precision
            least = step // numerator + ratio[0]
            most = ceil_divide(step, numerator) + ratio[1]
            ratio = (
                (1 << 2 * precision) // most,
                min(ceil_divide(1 << 2 * precision, max(least, 1)), 1 << precision),
            )
            ratios.append(ratio)
        return ratios[::-1]


@dataclass(frozen=True, slots=True)
class BinomialDistribution:
    """The number of heads in fair coin tosses: P(k) proportional to trials! / (k! (trials - k)!)."""

    trials: int

    def weights(self, precision: int, tail_bits: int) -> Weights:
        """Enclose the weights from their exact ratios."""
        mode = self.trials // 2
        left = _endless_side(self._ratios(mode, precision), precision, tail_bits)
        right = _endless_side(self._ratios(self.trials - mode, precision), precision, tail_bits)
        return join(mode, left, right, precision)

    def _ratios(self, rest: int, precision: int) -> Iterator[Interval]:
        """Yield the ratios outwards on a side with `rest` values left; beyond the last value they are zero."""
        while True:
            step = rest << precision
            yield step // (self.trials - rest + 1), ceil_divide(step, self.trials - rest + 1)
            rest = max(rest - 1, 0)


def _geometric(first: Interval, factor: Interval, precision: int) -> Iterator[Interval]:
    while True:
        yield first
        first = multiply(first, factor, precision)


def _endless_side(ratios: Iterator[Interval], precision: int, tail_bits: int) -> Side:
    return cast("Side", falling_side(ratios, precision, tail_bits))  # None is for ratios that end
