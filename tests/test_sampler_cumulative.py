"""The proof obligations of the tables: integers bound the exact distribution, and undecided draws are refined."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from math import comb, floor

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2pfed.noise.cumulative import (
    BinomialDistribution,
    GaussianDistribution,
    Side,
    SkellamDistribution,
    cumulative,
    exp_minus,
    refine,
)
from d2pfed.noise.lookup import tabulate
from d2pfed.numerics.randomness import Entropy
from support.stats import check_fits

DIGITS = 120


def exact_gaussian(distribution, first, count):
    """Sum the exact distribution in another library's arithmetic, far beyond the table on both sides."""
    with mpmath.workdps(DIGITS):
        square = mpmath.mpf(distribution.variance.numerator) / distribution.variance.denominator
        centre = mpmath.mpf(distribution.center.numerator) / distribution.center.denominator
        reach = 60 + 25 * int(mpmath.sqrt(square) + 1)
        weight = [
            mpmath.exp(-((k - centre) ** 2) / (2 * square)) for k in range(first - reach, first + count + reach)
        ]
        return _running(weight, reach, count)


def exact_skellam(distribution, first, count):
    with mpmath.workdps(DIGITS):
        variance = mpmath.mpf(distribution.variance.numerator) / distribution.variance.denominator
        reach = 120 + 10 * int(mpmath.sqrt(variance))
        weight = [mpmath.besseli(abs(k), variance) for k in range(first - reach, first + count + reach)]
        return _running(weight, reach, count)


def exact_binomial(distribution, first, count):
    total = accumulate(comb(distribution.trials, k) if k >= 0 else 0 for k in range(min(first, 0), first + count))
    return [Fraction(sums, 2**distribution.trials) for sums in list(total)[-count:]]


def _running(weight, reach, count):
    total = mpmath.fsum(weight)
    return [mpmath.fsum(weight[: reach + index + 1]) / total for index in range(count)]


CASES = [
    (GaussianDistribution(Fraction(0), Fraction(4)), exact_gaussian),
    (GaussianDistribution(Fraction(77, 256), Fraction(4)), exact_gaussian),
    (GaussianDistribution(Fraction(1, 2), Fraction(4)), exact_gaussian),
    (GaussianDistribution(Fraction(-5, 3), Fraction(1, 7)), exact_gaussian),
    (GaussianDistribution(Fraction(255, 256), Fraction(81)), exact_gaussian),
    (SkellamDistribution(Fraction(1, 3)), exact_skellam),
    (SkellamDistribution(Fraction(10)), exact_skellam),
    (SkellamDistribution(Fraction(1001, 10)), exact_skellam),
    (BinomialDistribution(1), exact_binomial),
    (BinomialDistribution(9), exact_binomial),
    (BinomialDistribution(200), exact_binomial),
    (BinomialDistribution(1001), exact_binomial),
]


@pytest.mark.parametrize(("distribution", "exact"), CASES)
@pytest.mark.parametrize("bits", [8, 16, 64, 128])
def test_table_entries_enclose_the_exact_distribution(distribution, exact, bits):
    table = cumulative(distribution, bits)
    with mpmath.workdps(DIGITS):
        for entry, value in zip(table.entries, exact(distribution, table.first, len(table.entries)), strict=True):
            assert entry <= value * 2**bits <= entry + 2
    assert table.entries[0] == 0
    assert table.entries[-1] >= 2**bits - 2


@pytest.mark.parametrize("variance", [Fraction(1, 3), Fraction(10), Fraction(1001, 10)])
def test_all_bessel_ratios_are_enclosed(variance):
    """The last ones are enclosed widely, since they are computed from nothing."""
    ratios = SkellamDistribution(variance)._ratios(20, 64)
    with mpmath.workdps(DIGITS):
        at = mpmath.mpf(variance.numerator) / variance.denominator
        for k, (lower, upper) in enumerate(ratios):
            assert lower <= mpmath.besseli(k + 1, at) / mpmath.besseli(k, at) * 2**64 <= upper


@pytest.mark.parametrize("distribution", [case[0] for case in CASES])
def test_the_largest_weight_is_one(distribution):
    """What the tails may hold is counted by it; where two are equal, one of them may be rounded up."""
    weights = distribution.weights(64, 20)  # of both sides of the mode, whose own is 1
    assert max(weights.left.upper + weights.right.upper) <= (1 << 64) + 1


@pytest.mark.parametrize("trials", [9, 200, 1001])
@pytest.mark.parametrize("tail_bits", [5, 20])
def test_what_is_left_out_on_either_side_is_at_most_the_tail(trials, tail_bits):
    weights = BinomialDistribution(trials).weights(64, tail_bits)
    largest, left, right = comb(trials, trials // 2), weights.left, weights.right
    for tail, outside in (
        (left.tail, range(weights.mode - len(left.lower))),
        (right.tail, range(weights.mode + len(right.lower) + 1, trials + 1)),
    ):
        exact = Fraction(sum(comb(trials, k) for k in outside), largest)
        assert exact <= Fraction(tail, 1 << 64) < Fraction(1, 1 << tail_bits)


@dataclass(frozen=True)
class Blurred:
    """A distribution that is enclosed too loosely below some precision."""

    distribution: GaussianDistribution
    blur: Callable[[Side], Side]
    side: str

    def weights(self, precision, tail_bits):
        exact = self.distribution.weights(precision, tail_bits)
        return exact if precision > 200 else replace(exact, **{self.side: self.blur(getattr(exact, self.side))})


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "blur",
    [
        lambda side: replace(side, upper=tuple(upper + (upper >> 60) for upper in side.upper)),
        lambda side: replace(side, tail=side.upper[0] << 64),
        lambda side: replace(side, lower=side.lower[-1:] * len(side.lower)),
    ],
)
def test_loose_intervals_are_computed_again_with_more_precision(blur, side):
    distribution = GaussianDistribution(Fraction(1, 3), Fraction(4))
    assert cumulative(Blurred(distribution, blur, side), 64) == cumulative(distribution, 64)


@given(st.fractions(0, 200, max_denominator=10**6), st.integers(8, 300))
def test_the_exponential_is_enclosed(exponent, precision):
    lower, upper = exp_minus(exponent, precision)
    with mpmath.workdps(250):
        exact = mpmath.exp(-mpmath.mpf(exponent.numerator) / exponent.denominator) * mpmath.mpf(2) ** precision
        assert lower <= exact <= upper
    assert upper - lower <= 2**20


@pytest.mark.parametrize(("distribution", "exact"), CASES[:3])
def test_draws_invert_the_exact_distribution_at_the_streams_bits(distribution, exact):
    table = tabulate((distribution,), 64)
    source, twin = (Entropy.replay(b"inversion").stream() for _ in range(2))
    draws = np.empty(2000, np.int64)
    table.draw_into(draws, None, source)
    values = exact(distribution, -40, 80)
    with mpmath.workdps(DIGITS):
        ladder = [int(mpmath.floor(value * 2**64)) for value in values]
    for word, draw in zip(twin.words(2000), draws, strict=True):
        assert int(word) not in ladder
        assert -40 + bisect_right(ladder, int(word)) == draw


def pmf_of(distribution):
    table = cumulative(distribution, 256)
    steps = np.diff([0, *(entry / 2**256 for entry in table.entries)])
    known = dict(enumerate(steps, table.first))
    return lambda values: np.array([known.get(int(value), 0.0) for value in values])


@pytest.mark.parametrize("distribution", [case[0] for case in CASES if case[0] != BinomialDistribution(1)])
def test_draws_from_8_bit_words_still_fit_since_they_are_refined(distribution):
    draws = np.empty(200_000, np.int64)
    tabulate((distribution,), 8).draw_into(draws, None, Entropy.replay(b"refined").stream())
    check_fits(draws, pmf_of(distribution), 1e-6)


def test_the_check_rejects_8_bit_words_without_refinement():
    distribution = GaussianDistribution(Fraction(0), Fraction(4))
    table = cumulative(distribution, 8)
    words = Entropy.replay(b"unrefined").stream().words(200_000) >> np.uint64(56)
    draws = table.first + np.searchsorted(table.entries, words, side="right")
    with pytest.raises(AssertionError, match="chi-square"):
        check_fits(draws, pmf_of(distribution), 1e-6)


def test_words_that_decide_decide_rightly():
    distribution = GaussianDistribution(Fraction(77, 256), Fraction(4))
    coarse, fine = cumulative(distribution, 8), cumulative(distribution, 128)
    for word in range(256):
        above = bisect_right(coarse.entries, word)
        if word - coarse.entries[above - 1] >= 2:
            lowest, highest = word << 120, (word + 1 << 120) - 1
            assert fine.first + bisect_right(fine.entries, lowest) == coarse.first + above
            assert fine.first + bisect_right(fine.entries, highest) == coarse.first + above


@dataclass
class Given:
    """A stream of given bytes that knows how many of them were read."""

    data: bytes
    read: int = 0

    def bytes(self, count):
        self.read += count
        return self.data[self.read - count : self.read]


def test_refinement_reads_no_more_words_than_decide():
    distribution = GaussianDistribution(Fraction(77, 256), Fraction(4))
    table = cumulative(distribution, 16)
    near = {entry + step for entry in table.entries for step in range(-3, 5)}
    for word in sorted(near & set(range(1 << 16))):
        first, second = divmod(word, 256)
        stream = Given(bytes([second]) + bytes(range(100, 116)))
        above = bisect_right(table.entries, word)
        is_decided = word - table.entries[above - 1] >= 2
        drawn = refine(distribution, first, 8, stream)
        assert (stream.read == 1) == is_decided
        assert drawn == table.first + above or not is_decided


def test_refinement_reaches_the_far_tail():
    distribution = GaussianDistribution(Fraction(0), Fraction(4))

    class Zeros:
        """A stream that begins with zeros, as one in 2^64 does."""

        def __init__(self, zeros):
            self.left = zeros

        def bytes(self, count):
            self.left -= 1
            return b"\0" * count if self.left >= 0 else b"\xff" * count

    near, far = refine(distribution, 0, 64, Zeros(0)), refine(distribution, 0, 64, Zeros(1))
    assert far < near < -15
    with mpmath.workdps(60):
        tail = exact_gaussian(distribution, near - 1, 2)
        assert tail[0] <= mpmath.mpf(2) ** -64 <= tail[1] * (1 + mpmath.mpf(2) ** -60)


@pytest.mark.parametrize("part", [0, 1, 128, 255])
def test_a_table_is_as_wide_as_its_words_need(part):
    table = cumulative(GaussianDistribution(Fraction(part, 256), Fraction(4)), 64)
    assert list(table.entries) == sorted(table.entries)
    assert floor(-9.2 * 2) - 1 <= table.first <= floor(-8.8 * 2) + 1
    assert len(table.entries) <= 40
