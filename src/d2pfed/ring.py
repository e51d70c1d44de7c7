"""The ring of integers modulo 2^bits: wrap, centre, add, and pack into words of exactly `bits` bits."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError, PeerError
from d2pfed.randomness import Stream

IntVector = NDArray[np.int64]
RingVector = NDArray[np.uint32]

MAX_BITS = 32


@dataclass(frozen=True, slots=True)
class Ring:
    """Z_m with m = 2^bits; a ring vector holds the representatives in [0, m) as 32-bit words."""

    bits: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MAX_BITS:
            raise ConfigError(f"a ring's bits must be in [1, {MAX_BITS}], got {self.bits}")

    @property
    def modulus(self) -> int:
        """Return m."""
        return 1 << self.bits

    def wrap(self, values: IntVector) -> RingVector:
        """Reduce integers modulo m."""
        return (values & (self.modulus - 1)).astype(np.uint32)

    def centre(self, values: RingVector) -> IntVector:
        """Return the representatives in [-m/2, m/2)."""
        half = self.modulus >> 1
        return ((values.astype(np.int64) + half) & (self.modulus - 1)) - half

    def add(self, left: RingVector, right: RingVector) -> RingVector:
        """Return the sum."""
        total = left.copy()
        self.add_into(total, right)
        return total

    def add_into(self, total: RingVector, values: RingVector) -> None:
        """Add in place; 32-bit overflow is harmless, since m divides 2^32."""
        _require_equal_shapes(total, values)
        total += values
        total &= self._mask

    def subtract_into(self, total: RingVector, values: RingVector) -> None:
        """Subtract in place."""
        _require_equal_shapes(total, values)
        total -= values
        total &= self._mask

    def packed_bytes(self, count: int) -> int:
        """Return the size of a packed vector."""
        return (count * self.bits + 7) // 8

    def pack(self, values: RingVector) -> bytes:
        """Write the vector as one little-endian bit string, its last byte filled with zeros."""
        columns = np.ascontiguousarray(values, dtype="<u4").view(np.uint8).reshape(-1, 4)
        bits = np.unpackbits(columns, axis=1, count=self.bits, bitorder="little")
        return np.packbits(bits, bitorder="little").tobytes()

    def unpack(self, data: bytes | memoryview, count: int) -> RingVector:
        """Read a vector that a peer packed; exactly one byte string stands for each vector.

        Guarantee: a wrong length or a padding bit that is set raises PeerError.
        Checked: test_ring.py::test_unpack_refuses_a_wrong_length and test_unpack_refuses_padding_bits.
        """
        packed = np.frombuffer(data, np.uint8)
        if packed.size != self.packed_bytes(count):
            raise PeerError(f"a packed vector must have {self.packed_bytes(count)} bytes, got {packed.size}")
        used = count * self.bits % 8
        if used and packed[-1] >> used:
            raise PeerError(f"a packed vector's {8 - used} padding bits must be zero")
        return self._expand(packed, count)

    def uniform(self, stream: Stream, count: int) -> RingVector:
        """Return a uniform vector, made of `packed_bytes(count)` bytes of the stream."""
        packed = np.empty(self.packed_bytes(count), np.uint8)
        stream.fill(packed)
        return self._expand(packed, count)

    @property
    def _mask(self) -> np.uint32:
        return np.uint32(self.modulus - 1)

    def _expand(self, packed: NDArray[np.uint8], count: int) -> RingVector:
        bits = np.unpackbits(packed, count=count * self.bits, bitorder="little").reshape(count, self.bits)
        columns = np.zeros((count, 4), np.uint8)
        columns[:, : (self.bits + 7) // 8] = np.packbits(bits, axis=1, bitorder="little")
        return columns.view("<u4").reshape(count)


def _require_equal_shapes(left: RingVector, right: RingVector) -> None:
    if left.shape != right.shape:  # numpy would stretch a short vector over a long one
        raise ValueError(f"ring vectors must have equal shapes, got {left.shape} and {right.shape}")
