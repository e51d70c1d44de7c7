"""Random rotations that spread a vector evenly over its coordinates: Hadamard's, and Fourier's of random phases.

Each is orthonormal up to the rounding of floats, is drawn from a public seed, and is flat: for a fixed vector
x, every output coordinate is sub-Gaussian over the seed with variance proxy |x|^2 / padded.

Floats may differ in their last bits between machines, since compilers order sums differently. That costs no
privacy: what is sent is bounded after rounding to the grid, in exact integers, and the server's inverse is
post-processing.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import scipy.fft
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.randomness import KEY_BYTES, Stream

Floats = NDArray[np.floating[Any]]


@runtime_checkable
class Rotation(Protocol):
    """A seeded orthonormal map from `dimension` to `padded` coordinates, and its inverse."""

    @property
    def dimension(self) -> int:
        """Return the length of the vectors that are rotated."""

    @property
    def padded(self) -> int:
        """Return the length of a rotated vector."""

    def forward(self, vector: Floats, seed: bytes) -> NDArray[np.float32]:
        """Pad with zeros and rotate."""

    def inverse(self, values: Floats, seed: bytes) -> Floats:
        """Rotate back and drop the padding; float64 stays float64, all else becomes float32."""


@dataclass(frozen=True, slots=True)
class Hadamard:
    """Random signs, then the Walsh-Hadamard transform of the next power of two.

    Flat (Hoeffding): an output is the sum of the coordinates times independent signs, over sqrt(padded).
    """

    dimension: int

    def __post_init__(self) -> None:
        _require_dimension(self.dimension)

    @property
    def padded(self) -> int:
        """Return the power of two at or above the dimension."""
        return 1 << (self.dimension - 1).bit_length()

    def forward(self, vector: Floats, seed: bytes) -> NDArray[np.float32]:
        """Pad with zeros and rotate."""
        _require_length(vector, self.dimension)
        values = np.zeros(self.padded, np.float32)
        np.multiply(vector, self._signs(seed), out=values[: self.dimension], casting="same_kind")
        _transform(values)
        return values

    def inverse(self, values: Floats, seed: bytes) -> Floats:
        """Rotate back and drop the padding; float64 stays float64, all else becomes float32."""
        _require_length(values, self.padded)
        result = np.array(values, dtype=_working_type(values))
        _transform(result)
        return result[: self.dimension] * self._signs(seed)

    def _signs(self, seed: bytes) -> NDArray[np.float32]:
        bits = np.unpackbits(_seeded_bytes(seed, self.dimension), count=self.dimension, bitorder="little")
        return np.float32(1) - np.float32(2) * bits


@dataclass(frozen=True, slots=True)
class RandomPhase:
    """Random quarter turns of pairs of coordinates, then the unitary Fourier transform; hardly padded.

    Flat, as with phases from the whole circle: for a number z = r exp(i phi) and a uniform quarter turn u, E
    exp(t Re(z u)) = (cosh(t r cos phi) + cosh(t r sin phi)) / 2. Its coefficient of (t r)^(2k), k >= 1, is
    (cos^(2k) phi + sin^(2k) phi) / (2 (2k)!) <= 1 / (2 (2k)!) <= 1 / (4^k k!), which is that of exp((t r)^2 /
    4); turns are independent, so the proxies r^2 / 2 add up. Quarter turns are exact in floats, the same on
    every machine, and cost one bit of the seed's stream per coordinate.
    """

    dimension: int

    def __post_init__(self) -> None:
        _require_dimension(self.dimension)

    @property
    def padded(self) -> int:
        """Return the even length whose half has small prime factors only."""
        return 2 * int(scipy.fft.next_fast_len((self.dimension + 1) // 2))

    def forward(self, vector: Floats, seed: bytes) -> NDArray[np.float32]:
        """Pad with zeros and rotate."""
        _require_length(vector, self.dimension)
        values = np.zeros(self.padded, np.float32)
        values[: self.dimension] = vector
        turned = values.view(np.complex64) * self._turns(seed)
        return _as_floats(scipy.fft.fft(turned, norm="ortho", overwrite_x=True))

    def inverse(self, values: Floats, seed: bytes) -> Floats:
        """Rotate back and drop the padding; float64 stays float64, all else becomes float32."""
        _require_length(values, self.padded)
        working = np.ascontiguousarray(values, dtype=_working_type(values))
        pairs = working.view(np.complex128 if working.dtype == np.float64 else np.complex64)
        turned = scipy.fft.ifft(pairs, norm="ortho")
        turned *= self._turns(seed).conj()
        return _as_floats(turned)[: self.dimension]

    def _turns(self, seed: bytes) -> NDArray[np.complex64]:
        pairs = self.padded // 2
        bits = np.unpackbits(_seeded_bytes(seed, self.padded), count=self.padded, bitorder="little")
        quarter_turns = np.array([1, 1j, -1, -1j], np.complex64)
        return quarter_turns[bits.reshape(pairs, 2) @ np.array([1, 2], np.uint8)]


def _transform(values: Floats) -> None:
    """Apply the orthonormal Walsh-Hadamard transform in place."""
    half = 1
    while half < values.size:
        pairs = values.reshape(-1, 2, half)
        left = pairs[:, 0] + pairs[:, 1]
        np.subtract(pairs[:, 0], pairs[:, 1], out=pairs[:, 1])
        pairs[:, 0] = left
        half *= 2
    values *= values.dtype.type(values.size**-0.5)


def _seeded_bytes(seed: bytes, bits: int) -> NDArray[np.uint8]:
    if len(seed) != KEY_BYTES:
        raise ConfigError(f"a rotation's seed must have {KEY_BYTES} bytes, got {len(seed)}")
    expanded = np.empty((bits + 7) // 8, np.uint8)
    Stream(seed).fill(expanded)
    return expanded


def _working_type(values: Floats) -> type[np.floating[Any]]:
    return np.float64 if values.dtype == np.float64 else np.float32


def _as_floats(pairs: NDArray[np.complexfloating[Any, Any]]) -> Floats:
    return pairs.view(pairs.real.dtype)


def _require_dimension(dimension: int) -> None:
    if dimension < 1:
        raise ConfigError(f"a rotation's dimension must be at least 1, got {dimension}")


def _require_length(vector: Floats, length: int) -> None:
    if vector.shape != (length,):
        raise ConfigError(f"the rotation takes vectors of {length} coordinates, got the shape {vector.shape}")
