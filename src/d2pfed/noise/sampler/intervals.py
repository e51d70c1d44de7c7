"""Intervals in fixed point: integers `lower <= 2^precision * x <= upper` for the weights of a distribution.

Every step rounds the lower end down and the upper end up, and all quantities are positive, so an interval
holds the true value whatever the precision; a low precision only makes it wide.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Weights:
    """Intervals of a distribution's weights from `first` on, up to a factor, and upper bounds of both tails' sums."""

    first: int
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    left_tail: int
    right_tail: int


@dataclass(frozen=True, slots=True)
class Side:
    """The weights on one side of the mode, from it outwards, and an upper bound of the sum of all that follow."""

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    tail: int


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
    result = (
        max(lower - 1, 0),
        upper + 1,
    )  # the terms left out alternate and shrink, so they sum to at most one unit
    for _ in range(halvings):
        result = multiply(result, result, precision)
    return result


def falling_side(ratios: Iterable[Interval], precision: int, tail_bits: int) -> Side | None:
    """Multiply falling ratios until all that follows sums to less than 2^-tail_bits; None if they end first."""
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
    return None


def join(mode: int, left: Side, right: Side, precision: int) -> Weights:
    """Put two sides from a common mode of weight 1 together."""
    one = (1 << precision,)
    return Weights(
        first=mode - len(left.lower),
        lower=left.lower[::-1] + one + right.lower,
        upper=left.upper[::-1] + one + right.upper,
        left_tail=left.tail,
        right_tail=right.tail,
    )
