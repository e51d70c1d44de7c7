"""Exact sampling by inversion: integer tables of a cumulative law, and refinement of the draws they cannot decide.

Think of a draw as a uniform real U in [0, 1), its bits taken from the stream as needed, and of the result as
the least k with U < F(k), where F is the exact cumulative law. A table holds for each k an integer T_k with T_k
<= 2^bits F(k) <= T_k + 2, proven by integer enclosures in `cumulative`. Let u be the first `bits` bits of U, so
that u <= 2^bits U < u + 1. Then

  u < T_k       implies  U < F(k),   since  2^bits U < u + 1 <= T_k <= 2^bits F(k);
  u >= T_k + 2  implies  U >= F(k),  since  2^bits U >= u >= T_k + 2 >= 2^bits F(k).

So u decides unless it is T_k or T_k + 1 for some k. A table begins with T = 0 and ends with T >= 2^bits - 2, so
whatever lies beyond its ends is undecided too. An undecided u is kept, extended by further bits, and compared
with a finer table, until it decides. The result is the one that belongs to U: the law is exact, not close. A
draw from 64-bit words and a table of n entries is undecided with probability at most 2 n / 2^64.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from d2pfed.randomness import Stream
from d2pfed.sampler.bounds import Weights
from d2pfed.sampler.laws import Law

WORD_BITS = 64

_GUARD_BITS = 64  # what the enclosures lose on the way is far less; if it were not, they are computed again


@dataclass(frozen=True, slots=True)
class Cumulative:
    """Integers T_k at `first, first + 1, ...` with T_k <= 2^bits F(k) <= T_k + 2."""

    first: int
    entries: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Cumulative tables of several laws, one per row, over one common window of a power of two of values."""

    laws: tuple[Law, ...]
    bits: int
    first: int
    rows: NDArray[np.uint64]

    def draw(self, rows: NDArray[np.int64], stream: Stream) -> NDArray[np.int64]:
        """Draw once from the law of each row number given; words come first, refinements after them."""
        words = stream.words(rows.size) >> np.uint64(WORD_BITS - self.bits)
        found = _search(self.rows, rows, words)
        undecided = words - self.rows[rows, found - 1] < 2
        draws = found + self.first
        for index in np.flatnonzero(undecided):
            draws[index] = refine(self.laws[rows[index]], int(words[index]), self.bits, stream)
        return draws


def tabulate(laws: Sequence[Law], bits: int) -> Table:
    """Build the table of some laws for words of `bits` bits, a multiple of eight up to 64."""
    parts = [cumulative(law, bits) for law in laws]
    first = min(part.first for part in parts)
    width = max(part.first + len(part.entries) for part in parts) - first
    rows = np.full((len(parts), 1 << (width - 1).bit_length()), (1 << bits) - 1, np.uint64)
    for row, part in zip(rows, parts, strict=True):
        start = part.first - first
        row[:start] = 0  # as undecided as the first entry, and the right filling as the last
        row[start : start + len(part.entries)] = np.array(part.entries, np.uint64)
    return Table(tuple(laws), bits, first, rows)


def cumulative(law: Law, bits: int) -> Cumulative:
    """Enclose the cumulative law in integers, with whatever precision that needs.

    Guarantee: T_k <= 2^bits F(k) <= T_k + 2 for all k of the table; it begins with 0 and ends at 2^bits - 2 or
    above.
    Checked: here, by exact integers; test_sampler_tables.py compares with sums made by another library.
    """
    precision = bits + _GUARD_BITS
    while True:
        entries = _enclose(law.weights(precision, bits + _GUARD_BITS // 2), bits)
        if entries is not None:
            return entries
        precision *= 2


def refine(law: Law, prefix: int, bits: int, stream: Stream) -> int:
    """Decide a draw whose first bits are known and do not decide it, with as many further words as it takes."""
    known = bits
    while True:
        prefix = prefix << bits | int.from_bytes(stream.bytes(bits // 8), "little")
        known += bits
        finer = _finer(law, known)
        above = bisect_right(finer.entries, prefix)
        if prefix - finer.entries[above - 1] >= 2:
            return finer.first + above


@lru_cache(maxsize=256)
def _finer(law: Law, bits: int) -> Cumulative:
    return cumulative(law, bits)


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
    if weights.left_tail << bits > 2 * left_lower[-1]:
        return None
    return _trim(weights.first - 1, [0, *entries], top)  # one step before the first, F is at most the left tail


def _trim(first: int, entries: list[int], top: int) -> Cumulative | None:
    """Keep the last zero, the first entry that reaches the top, and what is between."""
    if entries[-1] < top:
        return None
    start = bisect_right(entries, 0) - 1
    stop = next(index for index, entry in enumerate(entries) if entry >= top)
    return Cumulative(first + start, tuple(entries[start : stop + 1]))


def _search(table: NDArray[np.uint64], rows: NDArray[np.int64], words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Count the entries of each word's row that do not exceed it, by bisection with a fixed number of steps."""
    found = np.zeros(words.size, np.int64)
    step = table.shape[1]
    while step:
        probe = found + step
        inside = probe <= table.shape[1]
        found = np.where(inside & (table[rows, np.minimum(probe, table.shape[1]) - 1] <= words), probe, found)
        step >>= 1
    return found
