"""The compiled lookup against a plain search, word by word, at every entry and its neighbours."""

from fractions import Fraction

import numpy as np
import pytest

from d2pfed.noise.cumulative import (
    BinomialDistribution,
    GaussianDistribution,
    SkellamDistribution,
    cumulative,
)
from d2pfed.noise.lookup import _fill, tabulate
from d2pfed.numerics.randomness import Entropy

DISTRIBUTIONS = [
    GaussianDistribution(Fraction(0), Fraction(1, 100)),
    GaussianDistribution(Fraction(0), Fraction(4)),
    GaussianDistribution(Fraction(1, 2), Fraction(4)),
    GaussianDistribution(Fraction(0), Fraction(900)),
    GaussianDistribution(Fraction(0), Fraction(3000) ** 2),
    SkellamDistribution(Fraction(1, 100)),
    SkellamDistribution(Fraction(500)),
    BinomialDistribution(1),
    BinomialDistribution(7),
    BinomialDistribution(64),
    BinomialDistribution(10**7),
]


def words_to_try(entries, bits):
    """Return random words, words of all sizes, and the neighbours of every entry."""
    some = Entropy.replay(b"words").stream().words(20_000) >> np.uint64(64 - bits)
    sizes = some >> (np.arange(some.size, dtype=np.uint64) % np.uint64(bits))
    edges = np.array(entries[:: 1 + len(entries) // 5000], np.uint64)
    near = (edges[:, None] + np.arange(-3, 6).astype(np.uint64)).ravel()
    top = np.uint64((1 << bits) - 1)
    return np.concatenate([some, sizes, top - sizes, near]) & top


def plain_search(table, words):
    """Return values and whether they are undecided, by the definition."""
    entries = np.array(table.entries, np.uint64)
    found = np.searchsorted(entries, words, side="right")
    return table.first + found, words - entries[found - 1] < 2


def look_up(table, words, centres=None):
    out, undecided = np.empty(words.size, np.int64), np.empty((words.size, 2), np.int64)
    around = np.zeros(words.size, np.int64) if centres is None else centres
    count = table._look_up(words << np.uint64(64 - table.bits), around, out, undecided)
    marked = np.zeros(words.size, np.bool_)
    marked[undecided[:count, 0]] = True
    return out, marked


def disagreements(table, distribution, words):
    """Count words that the lookup decides though they are undecided, or decides wrongly."""
    values, undecided = plain_search(cumulative(distribution, table.bits), words)
    out, marked = look_up(table, words)
    return int(np.sum(~marked & (undecided | (out != values))))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("bits", [8, 16, 64])
def test_the_lookup_is_the_plain_search(distribution, bits):
    table = tabulate((distribution,), bits)
    words = words_to_try(cumulative(distribution, bits).entries, bits)
    assert disagreements(table, distribution, words) == 0


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_hardly_a_word_is_marked_without_need(distribution):
    table, entries = tabulate((distribution,), 64), cumulative(distribution, 64).entries
    words = words_to_try(entries, 64)
    needless = look_up(table, words)[1] & ~plain_search(cumulative(distribution, 64), words)[1]
    assert np.all(np.minimum(words[needless], ~words[needless]) < 2**16)


@pytest.mark.parametrize("bits", [8, 64])
def test_every_word_is_in_one_bucket_of_its_half_and_octave(bits):
    """Octave 0 has no words: of a word and its complement, one has its top bit clear."""
    layout = tabulate((GaussianDistribution(Fraction(0), Fraction(4)),), bits).layout
    buckets = sorted(set(zip(layout.least.tolist(), layout.most.tolist(), strict=True)))
    assert [least for least, _ in buckets] == [0, *(most + 1 for _, most in buckets[:-1])]
    assert buckets[-1][1] == 2**64 - 1
    assert layout.starts.size == layout.shifts.size == 2 * 64
    for half in range(2):
        for zeros in range(1, 64):
            start, count = int(layout.starts[64 * half + zeros]), 1 << 64 - int(layout.shifts[64 * half + zeros])
            words = np.concatenate([layout.least[start : start + count], layout.most[start : start + count]])
            assert {64 - max((word ^ (2**64 - 1) * half).bit_length(), 1) for word in words.tolist()} == {zeros}


@pytest.mark.parametrize("damage", ["entry", "value"])
def test_the_comparison_sees_a_damaged_table(damage):
    distribution = GaussianDistribution(Fraction(0), Fraction(4))
    table = tabulate((distribution,), 64)
    words = words_to_try(cumulative(distribution, 64).entries, 64)
    bucket = int(np.flatnonzero(table.values[0, :, 0] != table.values[0, :, 1])[3])
    if damage == "entry":
        table.entries[0, bucket] += np.uint64(2)
    else:
        table.values[0, bucket, 1] -= 1
    assert disagreements(table, distribution, words) > 0


def test_buckets_too_wide_for_a_distribution_are_refused():
    wide = tabulate((GaussianDistribution(Fraction(0), Fraction(1)),), 64).layout
    fine = np.array(cumulative(GaussianDistribution(Fraction(0), Fraction(900)), 64).entries, np.uint64)
    with pytest.raises(AssertionError, match="wider"):
        _fill(wide, fine, 64)


@pytest.mark.parametrize(("sigma", "fraction_bits"), [(Fraction(2), 8), (Fraction(1, 3), 3), (Fraction(50), 2)])
def test_the_lookup_around_centres_is_the_plain_search_in_each_row(sigma, fraction_bits):
    scale = 1 << fraction_bits
    distributions = tuple(GaussianDistribution(Fraction(part, scale), sigma**2) for part in range(scale))
    table = tabulate(distributions, 64)
    for part in range(0, scale, max(1, scale // 8)):
        exact = cumulative(distributions[part], 64)
        words = words_to_try(exact.entries, 64)
        values, undecided = plain_search(exact, words)
        for whole in (-(2**40), -1, 0, 3):
            out, marked = look_up(table, words, np.full(words.size, whole * scale + part))
            assert np.array_equal(marked | undecided, marked)
            assert np.array_equal(out[~marked], whole + values[~marked])


def test_draws_may_overwrite_their_centres_and_refinement_still_knows_them():
    distributions = tuple(GaussianDistribution(Fraction(part, 4), Fraction(4)) for part in range(4))
    table = tabulate(distributions, 8)  # so coarse that every tenth draw is refined
    centres = np.arange(-40_000, 40_000)
    apart, together = np.empty_like(centres), centres.copy()
    table.draw_into(apart, centres, Entropy.replay(b"in place").stream())
    table.draw_into(together, together, Entropy.replay(b"in place").stream())
    assert np.array_equal(apart, together)
    assert np.abs(apart - centres / 4).max() < 12


def test_blocks_do_not_change_the_draws():
    table = tabulate((GaussianDistribution(Fraction(0), Fraction(4)),), 64)
    long, short = np.empty(50_000, np.int64), np.empty(100, np.int64)
    table.draw_into(long, None, Entropy.replay(b"blocks").stream())
    table.draw_into(short, None, Entropy.replay(b"blocks").stream())
    assert np.array_equal(long[:100], short)
    empty = np.empty(0, np.int64)
    table.draw_into(empty, None, Entropy.replay(b"blocks").stream())
