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
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from d2pfed.noise.sampler.distributions import Distribution
from d2pfed.noise.sampler.intervals import Weights
from d2pfed.numerics.randomness import Stream

_GUARD_BITS = 64  # what the intervals lose on the way is far less; if it were not, they are computed again


@dataclass(frozen=True, slots=True)
class Cumulative:
    """Integers T_k at `first, first + 1, ...` with T_k <= 2^bits F(k) <= T_k + 2."""

    first: int
    entries: tuple[int, ...]


def cumulative(distribution: Distribution, bits: int) -> Cumulative:
    """Enclose the cumulative distribution in integers, with whatever precision that needs.

    Guarantee: T_k <= 2^bits F(k) <= T_k + 2 for all k of the table; it begins with 0 and ends at 2^bits - 2 or
    above.
    Checked: here, by exact integers; test_sampler_cumulative.py compares with sums made by another library.
    """
    precision = bits + _GUARD_BITS
    while True:
        entries = _enclose(distribution.weights(precision, bits + _GUARD_BITS // 2), bits)
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


@lru_cache(maxsize=256)
def _finer(distribution: Distribution, bits: int) -> Cumulative:
    return cumulative(distribution, bits)


def _enclose(weights: Weights, bits: int) -> Cumulative | None:
    """Turn weights into a table, or None if they are not enclosed tightly enough."""
    left_lower = list(accumulate(weights.lower))
    left_upper = list(accumulate(weights.upper, initial=weights.left_tail))[1:]
    top = (1 << bits) - 2
    entries = []
    for below, most_below in zip(left_lower, left_upper, strict=True):
        most_above = left_upper[-1] - most_below + weights.right_tail
        above = left_lower[-1] - below
        entry = min((below << bits) // (below + most_above), top)  # top + 2 is as much as any F can be
        if most_below << bits > (entry + 2) * (most_below + above):
            return None
        entries.append(entry)
    covers = weights.left_tail << bits <= 2 * left_lower[-1] and entries[-1] == top
    # one step before the first weight, F is at most the left tail
    return _trim(weights.first - 1, [0, *entries], top) if covers else None


def _trim(first: int, entries: list[int], top: int) -> Cumulative:
    """Keep the last zero, the first entry that reaches the top, and what is between."""
    start = bisect_right(entries, 0) - 1
    stop = next(index for index, entry in enumerate(entries) if entry >= top)
    return Cumulative(first + start, tuple(entries[start : stop + 1]))
