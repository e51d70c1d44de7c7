"""The ring of integers modulo 2^bits: wrap, center, add, and pack into words of exactly `bits` bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import PeerError
from d2pfed.fields import check_range
from d2pfed.numerics.compiled import compiled
from d2pfed.numerics.randomness import Stream

IntVector = NDArray[np.int64]
RingVector = NDArray[np.uint32]
Words = NDArray[np.uint64]

MAX_BITS = 32

_WORD = np.dtype("<u8")
_WHOLE_BYTES = {8: "<u1", 16: "<u2", 32: "<u4"}
_SPARE_WORDS = 3  # that `_pack` touches: one for the rest, up to two for lanes partly empty
_MASK_BLOCK = 1 << 15  # words at a time: a block, its sum and the cipher's input stay in the cache
_MOST_GROUPED = 15  # bits: four values and the rest of a byte are in one word
_BLOCK = 1 << 11  # pairs at a time: a multiple of 32, so that blocks begin at whole words


@dataclass(frozen=True, slots=True)
class Ring:
    """Z_m with m = 2^bits; a ring vector holds the representatives in [0, m) as 32-bit words."""

    bits: int

    def __post_init__(self) -> None:
        check_range("a ring's bits", self.bits, 1, MAX_BITS)

    @property
    def modulus(self) -> int:
        """Return m."""
        return 1 << self.bits

    def wrap(self, values: IntVector) -> RingVector:
        """Reduce integers modulo m."""
        low = values.astype(np.uint32)  # the low 32 bits, of negative numbers too
        low &= self._mask
        return low

    def center(self, values: RingVector) -> IntVector:
        """Return the representatives in [-m/2, m/2)."""
        half = self.modulus >> 1
        return ((values.astype(np.int64) + half) & (self.modulus - 1)) - half

    def add_into(self, total: RingVector, values: RingVector) -> None:
        """Add in place; 32-bit overflow is harmless, since m divides 2^32."""
        if total.shape != values.shape:  # numpy would stretch a short vector over a long one
            raise ValueError(f"ring vectors must have equal shapes, got {total.shape} and {values.shape}")
        total += values
        total &= self._mask

    def packed_bytes(self, count: int) -> int:
        """Return the size of a packed vector."""
        return (count * self.bits + 7) // 8

    def pack(self, values: RingVector) -> bytes:
        """Write the vector as one little-endian bit string, its last byte filled with zeros."""
        if self.bits in _WHOLE_BYTES:
            return values.astype(_WHOLE_BYTES[self.bits]).tobytes()
        even = values if values.size % 2 == 0 else np.append(values, np.uint32(0))
        words = np.empty(values.size * self.bits // 64 + _SPARE_WORDS, _WORD)
        _pack(np.ascontiguousarray(even, "<u4").view(_WORD), self.bits, words)
        return words.view(np.uint8)[: self.packed_bytes(values.size)].tobytes()

    def unpack(self, data: bytes | memoryview, count: int) -> RingVector:
        """Read a vector that a peer packed; exactly one byte string stands for each vector.

        Guarantee: a wrong length or a padding bit that is set raises PeerError.
        Checked: test_ring.py::test_unpack_refuses_a_wrong_length and test_unpack_refuses_padding_bits.
        """
        packed = self._require_packed(data, count)
        if self.bits in _WHOLE_BYTES:
            return packed.view(_WHOLE_BYTES[self.bits]).astype(np.uint32)
        values = np.zeros(count, np.uint32)
        self.add_packed_into(values, data)
        values &= self._mask
        return values

    def add_packed_into(self, total: RingVector, data: bytes | memoryview) -> None:
        """Add a vector that a peer packed, in place; only the low bits of the total count.

        Guarantee: what `unpack` refuses is refused, and leaves the total as it was.
        Checked: test_ring.py::test_a_packed_vector_is_added_as_it_is_unpacked.
        """
        packed, groups = self._require_packed(data, total.size), 0
        if self.bits in _WHOLE_BYTES:
            total += packed.view(_WHOLE_BYTES[self.bits])
            return
        if self.bits <= _MOST_GROUPED:
            inside = (packed.size - self.bits // 2 - 8) // self.bits + 1  # groups whose words end within the data
            groups = max(0, min(inside, total.size // 8))
            words = np.ndarray((max(packed.size - 7, 0),), _WORD, packed, strides=(1,))  # one from each byte on
            _add_groups(words, self.bits, total[: 8 * groups])
        rest = packed[groups * self.bits :]
        padded = np.zeros(rest.size + 7, np.uint8)
        padded[: rest.size] = rest
        _add_each(np.ndarray(rest.shape, _WORD, padded, strides=(1,)), self.bits, total[8 * groups :])

    def _require_packed(self, data: bytes | memoryview, count: int) -> NDArray[np.uint8]:
        """Refuse what is not a packed vector of this many values."""
        packed, used = np.frombuffer(data, np.uint8), count * self.bits % 8
        if packed.size != self.packed_bytes(count):
            raise PeerError(f"a packed vector must have {self.packed_bytes(count)} bytes, got {packed.size}")
        if used and packed[-1] >> used:
            raise PeerError(f"a packed vector's {8 - used} padding bits must be zero")
        return packed

    def uniform(self, stream: Stream, count: int) -> RingVector:
        """Return a uniform vector: the low bits of as many words of `mask_word` as it has coordinates."""
        words = np.empty(count, self.mask_word)
        stream.fill(words)
        values: RingVector = words.astype(np.uint32, copy=False)
        values &= self._mask
        return values

    def add_masks_into(self, total: RingVector, added: Sequence[Stream], subtracted: Sequence[Stream]) -> None:
        """Add and subtract the uniform vectors of streams in place, by blocks of words that overflow harmlessly."""
        buffer = np.empty(min(_MASK_BLOCK, total.size), self.mask_word)
        for start in range(0, total.size, _MASK_BLOCK):
            part = total[start : start + _MASK_BLOCK]
            words, block = part.astype(self.mask_word), buffer[: part.size]
            for stream in added:
                stream.fill(block)
                words += block
            for stream in subtracted:
                stream.fill(block)
                words -= block
            part[:] = words
            part &= self._mask

    @property
    def mask_word(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Return the narrowest word of 1, 2 or 4 bytes that holds a coordinate; only its low bits count in a mask."""
        return np.dtype("<u1" if self.bits <= 8 else "<u2" if self.bits <= 16 else "<u4")

    @property
    def _mask(self) -> np.uint32:
        return np.uint32(self.modulus - 1)


# Values are packed as a tree: two neighbours of b bits are one value of 2 b bits, and so on up to lanes of 33 to
# 64 bits, by loops that the compiler turns into vector code; only the lanes are shifted one by one. `pairs` is a
# ring vector seen as 64-bit words, so that the first step needs no strides.


@compiled
def _pack(pairs: Words, bits: int, words: Words) -> None:
    """Write the lowest bits of all values one after the other; what is left over of the last one is zero."""
    lanes, spare = np.empty(_BLOCK + 1, np.uint64), np.empty(_BLOCK + 1, np.uint64)
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for start in range(0, pairs.size, _BLOCK):
        part, width = pairs[start : start + _BLOCK], 2 * bits
        for index in range(part.size):
            lanes[index] = part[index] & mask | (part[index] >> np.uint64(32) & mask) << np.uint64(bits)
        count = part.size
        while 2 * width <= 64:
            lanes[count] = 0  # the neighbour of an odd one out
            count = (count + 1) // 2
            for index in range(count):
                spare[index] = lanes[2 * index] | lanes[2 * index + 1] << np.uint64(width)
            lanes, spare = spare, lanes
            width *= 2
        position, filled, pending = start // 32 * bits, 0, np.uint64(0)
        for index in range(count):
            pending |= lanes[index] << np.uint64(filled)
            filled += width
            if filled >= 64:
                words[position] = pending
                position += 1
                filled -= 64
                # In two steps: a shift by 64 is undefined.
                pending = lanes[index] >> np.uint64(width - filled - 1) >> np.uint64(1)
        if filled:
            words[position] = pending


@compiled
def _add_each(words: Words, bits: int, total: RingVector) -> None:
    """Add value after value from the word that its byte begins; what is above a value's bits is added too."""
    for index in range(total.size):
        bit = np.uint64(index * bits)
        total[index] += np.uint32(words[bit >> np.uint64(3)] >> (bit & np.uint64(7)))


@compiled
def _add_groups(words: Words, bits: int, total: RingVector) -> None:
    """Add groups of eight values, each as many bytes as a value has bits; what is above a value's bits is added too."""
    first, half = np.uint64(bits), bits // 2
    second, third, odd = first + first, first + first + first, np.uint64(4 * bits % 8)
    for group in range(total.size // 8):
        low, high, start = words[group * bits], words[group * bits + half] >> odd, 8 * group
        total[start] += np.uint32(low)
        total[start + 1] += np.uint32(low >> first)
        total[start + 2] += np.uint32(low >> second)
        total[start + 3] += np.uint32(low >> third)
        total[start + 4] += np.uint32(high)
        total[start + 5] += np.uint32(high >> first)
        total[start + 6] += np.uint32(high >> second)
        total[start + 7] += np.uint32(high >> third)
