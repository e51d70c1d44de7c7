"""Lookup tables of cumulative distributions, compiled, with a control flow that depends on neither words nor centers.

A word u finds its value through a bucket. Small and large words are in the tails, where distributions fall fast, so
buckets must be finer there: with v = u, or the complement of u if its top bit is set, the words with equally many
leading zeros of v are an octave, and an octave is cut into 2^m equal buckets, m being such that a bucket meets at most
one entry of each distribution. A draw is then a bucket number, one comparison with that entry, and one of two values.
What remains visible is which cache lines of the table are read, and refinement, in one of about 2^57 draws.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from d2pfed.noise.cumulative import Distribution, cumulative, refine
from d2pfed.numerics.compiled import compiled
from d2pfed.numerics.randomness import Stream
from d2pfed.numerics.ring import IntVector

WORD_BITS = 64

Words = NDArray[np.uint64]

_OCTAVES = 64
# Words per call: they fit a second cache, and fewer calls keep threads from waiting for each other.
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class TableLayout:
    """How words fall into buckets: by half and octave, the first bucket's number and the shift to m bits."""

    starts: Words
    shifts: Words
    least: Words  # the words at both ends of each bucket
    most: Words


@dataclass(frozen=True, slots=True, eq=False)
class LookupTable:
    """Distributions by row: a word is compared with `entries[row, bucket]` and takes one of `values[row, bucket]`.

    Both are views of one table, in which they are neighbors: a draw reads one cache line.
    """

    distributions: tuple[Distribution, ...]
    bits: int
    first: int
    layout: TableLayout
    entries: Words
    values: NDArray[np.int32]

    def draw_into(self, out: IntVector, centers: IntVector | None, stream: Stream) -> None:
        """Draw around each center, in units of one over the number of rows, or around 0. `out` may be `centers`."""
        buffer = np.empty(min(out.size, _BLOCK), np.uint64)
        undecided, zeros = np.empty((buffer.size, 2), np.int64), np.zeros(buffer.size, np.int64)
        pending: list[tuple[int, int, int]] = []
        for start in range(0, out.size, _BLOCK):
            part = out[start : start + _BLOCK]
            near = zeros[: part.size] if centers is None else centers[start : start + _BLOCK]
            words = buffer[: part.size]
            stream.fill(words)
            count = self._look_up(words, near, part, undecided)
            pending += [(start + index, center, int(words[index])) for index, center in undecided[:count].tolist()]
        for index, center, word in pending:
            whole, row = divmod(center, len(self.distributions))
            out[index] = whole + refine(
                self.distributions[row], word >> (WORD_BITS - self.bits), self.bits, stream
            )

    def _look_up(self, words: Words, centers: IntVector, out: IntVector, undecided: IntVector) -> int:
        """Write the values of words; list positions and centers of the undecided ones and return their number."""
        table = self.layout.starts, self.layout.shifts, self.entries, self.values
        row_bits, slack = len(self.distributions).bit_length() - 1, np.uint64(2 * _unit(self.bits))
        return int(_look_up(*table, row_bits, self.first, slack, words, centers, out, undecided))


def tabulate(distributions: Sequence[Distribution], bits: int) -> LookupTable:
    """Build the table of a power of two of distributions for words of `bits` bits, a multiple of eight up to 64."""
    parts = [cumulative(distribution, bits) for distribution in distributions]
    first = min(part.first for part in parts)
    width = max(part.first + len(part.entries) for part in parts) - first
    rows = np.full((len(parts), width), (1 << bits) - 2, np.uint64)  # beyond the last entry nothing is decided
    for row, part in zip(rows, parts, strict=True):
        start = part.first - first
        row[:start] = 0  # nor before the first
        row[start : start + len(part.entries)] = np.array(part.entries, np.uint64)
    rows *= np.uint64(_unit(bits))
    layout = _lay_out(rows, bits)
    cells = np.empty((len(rows), layout.least.size, 2), np.uint64)
    entries, values = cells[..., 0], cells.view(np.int32)[..., 2:]
    for own, steps, row in zip(entries, values, rows, strict=True):
        own[:], steps[:] = _fill(layout, row, bits)
    return LookupTable(tuple(distributions), bits, first, layout, entries, values)


def _unit(bits: int) -> int:
    """Return the distance of neighboring words, which are aligned to the top."""
    return 1 << (WORD_BITS - bits)


def _lay_out(rows: Words, bits: int) -> TableLayout:
    """Cut octaves into the widest buckets that the gaps between entries allow.

    An entry T makes the words in [T, T + slack) undecided, slack being two units. If a bucket meets these and
    holds the next entry T', then T' - T is less than the bucket's width plus slack, and the octave is that of T'.
    Buckets as narrow as a unit hold one word, which is decided or not.
    """
    gaps, ends = np.diff(rows, axis=1), rows[:, 1:]
    least_gaps = np.full(_OCTAVES, 1 << 63, np.uint64)
    folded = np.where(ends >> np.uint64(63), ~ends, ends)[gaps > 0]
    octaves = np.array([WORD_BITS - max(int(word).bit_length(), 1) for word in folded], np.int64)
    np.minimum.at(least_gaps, octaves, gaps[gaps > 0])
    starts = np.zeros(2 * _OCTAVES, np.uint64)
    shifts = np.full(2 * _OCTAVES, WORD_BITS - 1, np.uint64)
    least, most = [], []
    count = 0
    for half in (0, 1):
        for octave in range(1, _OCTAVES):
            size, room = 1 << (63 - octave), int(least_gaps[octave]) - 2 * _unit(bits)
            width = max(1 << room.bit_length() - 1 if room > 0 else 0, _unit(bits))
            buckets = max(2, size // width)
            starts[half * _OCTAVES + octave] = count
            shifts[half * _OCTAVES + octave] = WORD_BITS - (buckets.bit_length() - 1)
            count += buckets
            each = np.uint64(max(size // buckets, 1))
            low = np.uint64(size) + each * np.arange(buckets, dtype=np.uint64)
            high = low + each - np.uint64(1)
            if size == 1:  # the last octave has the words 0 and 1, in its first bucket
                low, high = np.zeros(2, np.uint64), np.ones(2, np.uint64)
            least.append(~high if half else low)
            most.append(~low if half else high)
    return TableLayout(starts, shifts, np.concatenate(least), np.concatenate(most))


def _fill(layout: TableLayout, row: Words, bits: int) -> tuple[Words, NDArray[np.int32]]:
    """Return the entry that each bucket compares with, and how many entries are up to words below and from it on.

    An entry counts if it makes a word of the bucket undecided or divides the bucket. Where there is none, the
    bucket compares with a word so far below that all are decided; where there are several, none is.
    """
    slack = np.uint64(2 * _unit(bits))
    below = np.searchsorted(row, layout.least, side="right")
    upto = np.searchsorted(row, layout.most, side="right")
    before = np.where(layout.least < slack, 0, np.searchsorted(row, layout.least - slack, side="right"))
    none = before == upto
    last = row[upto - 1]
    several = ~none & (row[np.minimum(before, row.size - 1)] != last)
    if np.any((layout.most - layout.least)[several] >= slack):
        raise AssertionError("a bucket is wider than the gap between two entries")
    entries = np.where(none, layout.least - slack, np.where(several, layout.least, last))
    return entries, np.stack([below, upto], axis=1).astype(np.int32)


@intrinsic
def _count_leading_zeros(_context: Any, word: Any) -> Any:  # noqa: ANN401, ARG001 - numba's own types
    """Count the zeros above the highest bit set."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:  # noqa: ANN401 - numba's own types
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


_leading_zeros = cast("Callable[[np.uint64], np.uint64]", _count_leading_zeros)  # as compiled code calls it


@compiled
def _look_up(  # noqa: PLR0917 - compiled code takes arrays, not values that hold them
    starts: Words,
    shifts: Words,
    entries: Words,
    values: NDArray[np.int32],
    row_bits: int,
    first: int,
    slack: np.uint64,
    words: Words,
    centers: IntVector,
    out: IntVector,
    undecided: IntVector,
) -> int:
    """Look words up in the distribution of their center's fraction, and add what is whole of the center."""
    count = 0
    for index in range(words.size):
        word, center = words[index], centers[index]
        half = word >> np.uint64(63)
        folded = word ^ (np.uint64(0) - half)
        zeros = min(_leading_zeros(folded), np.uint64(63))
        octave = half << np.uint64(6) | zeros
        bucket = starts[octave] + (folded << zeros << np.uint64(1) >> shifts[octave])
        row = np.uint64(center & ((1 << row_bits) - 1))
        entry = entries[row, bucket]
        out[index] = first + (center >> row_bits) + values[row, bucket, np.uint64(word >= entry)]
        if word - entry < slack:
            undecided[count, 0], undecided[count, 1] = index, center
            count += 1
    return count
