"""Cumulative distributions in integers with proven error, and refinement of the draws that these cannot decide.

Think of a draw as a uniform real U in [0, 1), its bits taken from the stream as needed, and of the result as
the least k with U < F(k), where F is the exact cumulative distribution. A table holds for each k an integer T_k
with T_k <= 2^bits F(k) <= T_k + 2, proven by integer intervals in `cumulative`. Let u be the first `bits` bits of
U, so that u <= 2^bits U < u + 1. Then

  u < T_k       implies  U < F(k),   since  2^bits U < u + 1 <= T_k <= 2^bits F(k);
  u >= T_k + 2  implies  U >= F(k),  since  2^bits U >= u >= T_k + 2 >= 2^bits F(k).

So u decides unless it is T_k or T_k + 1 for some k. A table begins with T = 0 and ends with T >= 2^bits - 2, so
whatever lies beyond its ends is undecided too. An undecided u is kept, extended by further bits, and compared
with a finer table, until it decides. The result is the one that belongs to U: the distribution is exact, not close. A
draw from 64-bit words and a table of n entries is undecided with probability at most 2 n / 2^64.

Weights are enclosed in fixed point: integers `lower <= 2^precision * x <= upper`. Every step rounds the lower end down
and the upper end up, and all quantities are positive, so an interval holds the true value whatever the precision; a low
precision only makes it wide. All distributions are log-concave: the ratios of neighboring weights fall from the mode
outwards, which `falling_side` relies on.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from itertools import accumulate, repeat
from math import isqrt

from d2pfed.numerics.randomness import Stream

Interval = tuple[int, int]
_GUARD_BITS = 64  # what the intervals lose on the way is far less; if it were not, they are computed again


@dataclass(frozen=True, slots=True)
class Side:
    """The weights on one side of the mode, from it outwards, and an upper bound of the sum of all that follow."""

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    tail: int


@dataclass(frozen=True, slots=True)
class Weights:
    """Intervals of a distribution's weights, up to a factor that makes the mode's 1."""

    mode: int
    left: Side
    right: Side


def ceil_divide(numerator: int, denominator: int) -> int:
    """Divide and round up."""
    return -(-numerator // denominator)


def multiply(left: Interval, right: Interval, precision: int) -> Interval:
    """Enclose the product of two positive numbers."""
    return left[0] * right[0] >> precision, -(-left[1] * right[1] >> precision)


def exp_minus(exponent: Fraction, precision: int) -> Interval:
    """Enclose exp(-exponent), exponent >= 0, by the alternating series of a halved exponent, squared back."""
    halvings = max(0, exponent.numerator.bit_length() - exponent.denominator.bit_length() + 1)
    numerator, denominator = exponent.numerator, exponent.denominator << halvings
    term = (1 << precision, 1 << precision)
    lower = upper = index = 0
    while term[1] > 1:
        even = index % 2 == 0
        lower += term[0] if even else -term[1]
        upper += term[1] if even else -term[0]
        index += 1
        term = term[0] * numerator // (denominator * index), ceil_divide(term[1] * numerator, denominator * index)
    result = max(lower - 1, 0), upper + 1  # the terms left out alternate and shrink: at most one unit in all
    for _ in range(halvings):
        result = multiply(result, result, precision)
    return result


def falling_side(ratios: Iterable[Interval], precision: int, tail_bits: int) -> Side:
    """Multiply falling ratios until all that follows sums to less than 2^-tail_bits; EOFError if they end first."""
    weight = (1 << precision, 1 << precision)
    lower: list[int] = []
    upper: list[int] = []
    for ratio in ratios:
        weight = multiply(weight, ratio, precision)
        room = (1 << precision) - ratio[1]
        if room > 0:  # from here on the weights are below a geometric series
            tail = ceil_divide(weight[1] << precision, room)
            if tail >> (precision - tail_bits) == 0:
                return Side(tuple(lower), tuple(upper), tail)
        lower.append(weight[0])
        upper.append(weight[1])
    raise EOFError("the ratios end before the tail is small")


@dataclass(frozen=True, slots=True)
class GaussianDistribution:
    """P(k) proportional to exp(-(k - center)^2 / (2 sigma^2))."""

    center: Fraction
    variance: Fraction

    def weights(self, precision: int, tail_bits: int) -> Weights:
        """Enclose the weights; their ratio from k to k + 1, exp(-(2 (k - c) + 1) / (2 sigma^2)), is geometric."""
        mode = round(self.center)
        ahead = self.center - mode
        shrink = exp_minus(1 / self.variance, precision)
        sides = []
        for offset in (-ahead, ahead):
            nearest = exp_minus((1 - 2 * offset) / (2 * self.variance), precision)
            ratios = accumulate(repeat(shrink), partial(multiply, precision=precision), initial=nearest)
            sides.append(falling_side(ratios, precision, tail_bits))
        return Weights(mode, sides[0], sides[1])


@dataclass(frozen=True, slots=True)
class SkellamDistribution:
    """The difference of two Poisson variables of equal mean: P(k) proportional to Bessel's I_k(variance)."""

    variance: Fraction

    def weights(self, precision: int, tail_bits: int) -> Weights:
        """Enclose the weights from the ratios of Bessel functions."""
        count = 64 + isqrt(int(self.variance))
        while True:
            ratios = self._ratios(2 * count, precision)[:count]  # the far half's intervals are wide: only a run-up
            try:
                side = falling_side(ratios, precision, tail_bits)
            except EOFError:
                count *= 2
            else:
                return Weights(0, side, side)

    def _ratios(self, count: int, precision: int) -> list[Interval]:
        """Enclose I_(k+1) / I_k downwards from [0, 1] by r_(k-1) = 1 / (2 k / variance + r_k), which contracts."""
        numerator, denominator, one = self.variance.numerator, self.variance.denominator, 1 << precision
        low, high, ratios = 0, one, []
        for k in range(count, 0, -1):
            step = 2 * k * denominator << precision
            least, most = step // numerator + low, ceil_divide(step, numerator) + high
            low, high = one * one // most, min(ceil_divide(one * one, max(least, 1)), one)
            ratios.append((low, high))
        return ratios[::-1]


@dataclass(frozen=True, slots=True)
class BinomialDistribution:
    """The number of heads in fair coin tosses: P(k) proportional to trials! / (k! (trials - k)!)."""

    trials: int

    @property
    def variance(self) -> Fraction:
        """Return a quarter per toss."""
        return Fraction(self.trials, 4)

    def weights(self, precision: int, tail_bits: int) -> Weights:
        """Enclose the weights from their exact ratios."""
        mode = self.trials // 2
        left = falling_side(self._ratios(mode, precision), precision, tail_bits)
        right = falling_side(self._ratios(self.trials - mode, precision), precision, tail_bits)
        return Weights(mode, left, right)

    def _ratios(self, rest: int, precision: int) -> Iterator[Interval]:
        """Yield the ratios outwards on a side with `rest` values left; beyond the last value they are zero."""
        while True:
            step = rest << precision
            yield step // (self.trials - rest + 1), ceil_divide(step, self.trials - rest + 1)
            rest = max(rest - 1, 0)


# Log-concave distributions on the integers with exact parameters; `weights` ends where a tail holds at most
# 2^-tail_bits of the mode's weight.
Distribution = GaussianDistribution | SkellamDistribution | BinomialDistribution


@dataclass(frozen=True, slots=True)
class Cumulative:
    """Integers T_k at `first, first + 1, ...` with T_k <= 2^bits F(k) <= T_k + 2."""

    first: int
    entries: tuple[int, ...]


def cumulative(distribution: Distribution, bits: int) -> Cumulative:
    """Enclose the cumulative distribution in integers, with whatever precision that needs.

    Guarantee: T_k <= 2^bits F(k) <= T_k + 2 for all k of the table; it begins with 0 and ends at 2^bits - 2 or above.
    Checked: here, by exact integers; test_sampler_cumulative.py compares with sums made by another library.
    """
    precision = bits + _GUARD_BITS
    while True:
        entries = _enclose(distribution.weights(precision, bits + _GUARD_BITS // 2), precision, bits)
        if entries is not None:
            return entries
        precision *= 2


def refine(distribution: Distribution, prefix: int, bits: int, stream: Stream) -> int:
    """Decide a draw whose first bits are known and do not decide it, with as many further words as it takes."""
    known = bits
    while True:
        prefix = prefix << bits | int.from_bytes(stream.bytes(bits // 8), "little")
        known += bits
        finer = _finer(distribution, known)
        above = bisect_right(finer.entries, prefix)
        if prefix - finer.entries[above - 1] >= 2:
            return finer.first + above


_finer = lru_cache(maxsize=256)(cumulative)


def _enclose(weights: Weights, precision: int, bits: int) -> Cumulative | None:
    """Turn weights into a table, or None if they are not enclosed tightly enough."""
    left, right, one = weights.left, weights.right, 1 << precision
    left_lower = list(accumulate((*left.lower[::-1], one, *right.lower)))
    left_upper = list(accumulate((*left.upper[::-1], one, *right.upper), initial=left.tail))[1:]
    top = (1 << bits) - 2
    entries = []
    for below, most_below in zip(left_lower, left_upper, strict=True):
        most_above = left_upper[-1] - most_below + right.tail
        above = left_lower[-1] - below
        entry = min((below << bits) // (below + most_above), top)  # top + 2 is as much as any F can be
        if most_below << bits > (entry + 2) * (most_below + above):
            return None
        entries.append(entry)
    if left.tail << bits > 2 * left_lower[-1] or entries[-1] != top:
        return None
    entries.insert(0, 0)  # one step before the first weight, F is at most the left tail
    # Of the zeros the last is kept, and of those that reach the top the first.
    start = bisect_right(entries, 0) - 1
    stop = next(index for index, entry in enumerate(entries) if entry >= top)
    return Cumulative(weights.mode - len(left.lower) - 1 + start, tuple(entries[start : stop + 1]))
