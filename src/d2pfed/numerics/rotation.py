"""Random rotations that spread a vector evenly over its coordinates: Hadamard's, and Fourier's of random phases.

Each is orthonormal up to the rounding of floats, is drawn from a public seed, and is flat: for a fixed vector
x, every output coordinate is sub-Gaussian over the seed with variance proxy |x|^2 / padded. A fold is flat as well,
but has fewer coordinates than the vector, so it can lengthen one.

Floats may differ in their last bits between machines, since compilers order sums differently. That costs no
privacy: what is sent is bounded after rounding to the grid, in exact integers, and the server's inverse is
post-processing.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError, shown
from d2pfed.fields import check_range
from d2pfed.numerics.compiled import compiled
from d2pfed.numerics.randomness import KEY_BYTES, Stream

Floats = NDArray[np.floating[Any]]

MAX_DIMENSION = 1 << 30  # coordinates: 4 GB of floats

_BLOCK = 1 << 15  # floats that fit a second cache


@dataclass(frozen=True, slots=True)
class Hadamard:
    """Random signs, then the Walsh-Hadamard transform of the next power of two.

    Flat (Hoeffding): an output is the sum of the coordinates times independent signs, over sqrt(padded).
    """

    dimension: int

    def __post_init__(self) -> None:
        check_range("a rotation's dimension", self.dimension, 1, MAX_DIMENSION)

    @property
    def padded(self) -> int:
        """Return the power of two at or above the dimension."""
        return 1 << (self.dimension - 1).bit_length()

    def forward(self, vector: Floats, seed: bytes) -> NDArray[np.float32]:
        """Pad with zeros and rotate."""
        _require_length(vector, self.dimension)
        values = np.empty(self.padded, np.float32)
        rotate(vector, seeded_bits(seed, self.dimension), np.float32(self.padded**-0.5), values)
        return values

    def inverse(self, values: Floats, seed: bytes) -> Floats:
        """Rotate back and drop the padding; float64 stays float64, all else becomes float32."""
        _require_length(values, self.padded)
        working: Floats = np.array(values, dtype=np.float64 if values.dtype == np.float64 else np.float32)
        _transform(working)
        result = working[: self.dimension]
        flip(result, seeded_bits(seed, self.dimension), working.dtype.type(self.padded**-0.5), result)
        return result


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
        check_range("a rotation's dimension", self.dimension, 1, MAX_DIMENSION)

    @property
    def padded(self) -> int:
        """Return the even length whose half has small prime factors only."""
        return 2 * _fast_length((self.dimension + 1) // 2, (11, 7, 5, 3))

    def forward(self, vector: Floats, seed: bytes) -> NDArray[np.float32]:
        """Pad with zeros and rotate."""
        from scipy.fft import fft  # noqa: PLC0415 - slow to load

        _require_length(vector, self.dimension)
        values = np.zeros(self.padded, np.float32)
        values[: self.dimension] = vector
        _turn(values, seeded_bits(seed, self.padded))
        turned: NDArray[np.float32] = fft(values.view(np.complex64), norm="ortho", overwrite_x=True).view(
            np.float32
        )
        return turned

    def inverse(self, values: Floats, seed: bytes) -> Floats:
        """Rotate back and drop the padding; float64 stays float64, all else becomes float32."""
        from scipy.fft import ifft  # noqa: PLC0415 - slow to load

        _require_length(values, self.padded)
        real, pair = (np.float64, np.complex128) if values.dtype == np.float64 else (np.float32, np.complex64)
        result: Floats = ifft(np.ascontiguousarray(values, dtype=real).view(pair), norm="ortho").view(real)
        turns = seeded_bits(seed, self.padded)
        _turn(result, turns ^ ((turns & np.uint8(0x55)) << np.uint8(1)))  # back: 1 and 3 change places
        return result[: self.dimension]


@dataclass(frozen=True, slots=True)
class Fold:
    """Random signs, sums of many coordinates in each of few, then the Walsh-Hadamard transform: compression.

    The vector is cut into chunks of as many coordinates as there are sums. Each chunk is turned by a random distance
    and added to the others, so that the sums have equally many terms, up to one. The last `kept` coordinates are
    added to nothing. Two coordinates of different chunks meet with a chance of 1 / sums, two of one chunk never.

    Flat as Hadamard's: an output is the sum of the coordinates times independent signs, over sqrt(length). It is not
    orthonormal: a vector in the worst direction becomes longer by sqrt(dimension / length). docs/theory.md, section 19.
    """

    dimension: int
    length: int
    kept: int = 0

    def __post_init__(self) -> None:
        check_range("a rotation's dimension", self.dimension, 1, MAX_DIMENSION)
        if not (2 <= self.length < self.dimension and self.length & (self.length - 1) == 0):
            raise ConfigError(
                f"a fold's length must be a power of two in [2, {self.dimension - 1}], got {shown(self.length)}"
            )
        if not 0 <= self.kept < self.length:
            raise ConfigError(
                f"a fold must keep between 0 and {self.length - 1} coordinates, got {shown(self.kept)}"
            )

    @property
    def padded(self) -> int:
        """Return the number of coordinates after the fold."""
        return self.length

    @property
    def terms(self) -> int:
        """Return how many coordinates are added up in one, at most."""
        return -(-(self.dimension - self.kept) // (self.length - self.kept))

    def seeded(self, seed: bytes) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Return by how much each chunk is turned, and the signs: a chunk, and what is kept, begins with a new byte."""
        sums = self.length - self.kept
        signs = self.terms * ((sums + 7) // 8) + (self.kept + 7) // 8
        expanded = seeded_bits(seed, 8 * (4 * self.terms + signs))
        words = expanded[: 4 * self.terms].view("<u4").astype(np.uint64)
        return (words * np.uint64(sums) >> np.uint64(32)).astype(np.int64), expanded[4 * self.terms :]

    def forward(self, vector: Floats, seed: bytes) -> NDArray[np.float32]:
        """Fold and rotate."""
        _require_length(vector, self.dimension)
        values = np.empty(self.length, np.float32)
        fold(vector, *self.seeded(seed), self.kept, values)
        return values

    def inverse(self, values: Floats, seed: bytes) -> Floats:
        """Apply the transpose, which is right on average over the seed; float64 stays float64, all else float32."""
        return self._spread(values, seed, np.ones(self.length, np.float32))

    def lift(self, values: Floats, seed: bytes) -> Floats:
        """Return the shortest vector whose fold has these values."""
        shifts, sums = self.seeded(seed)[0], self.length - self.kept
        terms = np.ones(self.length, np.float32)
        terms[:sums] = self.terms
        absent = np.arange(self.dimension - self.kept, self.terms * sums)  # from the last chunk
        terms[(absent + shifts[-1]) % sums] -= 1
        return self._spread(values, seed, (1 / terms).astype(np.float32))

    def _spread(self, values: Floats, seed: bytes, weights: NDArray[np.float32]) -> Floats:
        """Rotate back and give each sum, times its weight, to all of its terms."""
        _require_length(values, self.length)
        working: Floats = np.array(values, dtype=np.float64 if values.dtype == np.float64 else np.float32)
        _transform(working)
        working *= weights
        result = np.empty(self.dimension, working.dtype)
        unfold(working, *self.seeded(seed), self.kept, result)
        return result


Rotation = Hadamard | RandomPhase | Fold  # seeded flat maps from `dimension` to `padded` coordinates


@lru_cache
def _fast_length(least: int, primes: tuple[int, ...]) -> int:
    """Return the least number from `least` on with no prime factors but 2 and these: transforms of it are fast."""
    if not primes:
        return 1 << (least - 1).bit_length()
    lengths, power = [], 1
    while power < least:
        lengths.append(power * _fast_length(-(-least // power), primes[1:]))
        power *= primes[0]
    return min([*lengths, power])


# What a client goes through is compiled in large pieces: each return to the interpreter may wait for another thread.
@compiled
def rotate(vector: Floats, bits: NDArray[np.uint8], scale: np.floating[Any], out: Floats) -> None:
    """Flip signs, pad with zeros and transform."""
    flip(vector, bits, scale, out[: vector.size])
    out[vector.size :] = 0
    _transform(out)


@compiled
def rotate_flipped(vector: Floats, signed: Floats, out: Floats) -> None:
    """Do the same as `rotate`, with signs and scale as `flip` gives them to a vector of ones: for many vectors."""
    for index in range(vector.size):
        out[index] = vector[index] * signed[index]
    out[vector.size :] = 0
    _transform(out)


@compiled
def fold(vector: Floats, shifts: NDArray[np.int64], bits: NDArray[np.uint8], kept: int, out: Floats) -> None:
    """Flip signs, turn chunks and add them up, put what is kept behind, and transform."""
    sums, end = out.size - kept, vector.size - kept
    stride, scale = (sums + 7) // 8, out.dtype.type(out.size**-0.5)
    out[:] = 0
    flipped = np.empty(sums, out.dtype)
    for chunk in range(shifts.size):
        start, shift = chunk * sums, shifts[chunk]
        count = min(sums, end - start)
        flip(vector[start : start + count], bits[chunk * stride :], scale, flipped)
        before = min(count, sums - shift)
        end_part, start_part, wrapped = out[shift : shift + before], out[: count - before], flipped[before:count]
        for index in range(before):
            end_part[index] += flipped[index]
        for index in range(count - before):
            start_part[index] += wrapped[index]
    flip(vector[end:], bits[shifts.size * stride :], scale, out[sums:])
    _transform(out)


@compiled
def unfold(values: Floats, shifts: NDArray[np.int64], bits: NDArray[np.uint8], kept: int, out: Floats) -> None:
    """Apply the transpose of `fold` to what was transformed back already."""
    sums, end = values.size - kept, out.size - kept
    stride, scale = (sums + 7) // 8, out.dtype.type(values.size**-0.5)
    turned = np.empty(sums, out.dtype)
    for chunk in range(shifts.size):
        start, shift = chunk * sums, shifts[chunk]
        turned[: sums - shift] = values[shift:sums]
        turned[sums - shift :] = values[:shift]
        part = out[start : min(start + sums, end)]
        flip(turned[: part.size], bits[chunk * stride :], scale, part)
    flip(values[sums:], bits[shifts.size * stride :], scale, out[end:])


@compiled
def flip(vector: Floats, bits: NDArray[np.uint8], scale: np.floating[Any], out: Floats) -> None:
    """Multiply by the scale, and by -1 where the bit is set."""
    whole = vector.size // 8
    for byte in range(whole):
        signs = np.uint32(bits[byte])
        for bit in range(8):
            sign = np.float32(1) - np.float32(np.int32(signs >> np.uint32(bit) & np.uint32(1)) << 1)
            out[8 * byte + bit] = vector[8 * byte + bit] * (sign * scale)
    for index in range(8 * whole, vector.size):
        out[index] = vector[index] * (-scale if bits[whole] >> (index & 7) & 1 else scale)


@compiled
def _turn(values: Floats, turns: NDArray[np.uint8]) -> None:
    """Turn each pair (x, y) in place by two bits: by 0, 1, 2 or 3 quarters, to (x, y), (-y, x), (-x, -y), (y, -x)."""
    for pair in range(values.size // 2):
        turn = turns[pair >> 2] >> ((pair & 3) << 1) & 3
        x, y = values[2 * pair], values[2 * pair + 1]
        odd = turn & 1
        first, second = (y, x) if odd else (x, y)
        values[2 * pair] = -first if odd ^ (turn >> 1) else first
        values[2 * pair + 1] = -second if turn >> 1 else second


@compiled
def _transform(values: Floats) -> None:
    """Apply the Walsh-Hadamard transform in place, without its scale: twice makes `size` times the identity.

    A level adds and subtracts values at one distance. Blocks that fit the second cache go through all their levels;
    as soon as four equal parts are done they go through the next two together, while they are still near.
    """
    block = values.size
    while block > _BLOCK:
        block //= 4
    for start in range(0, values.size, block):
        part = values[start : start + block]
        _levels(part, _first_levels(part))
        end, distance = start + block, block
        while end % (4 * distance) == 0:
            _levels(values[end - 4 * distance : end], distance)
            distance *= 4


@compiled
def _first_levels(values: Floats) -> int:
    """Go through the first six levels, if there are as many, all written out, and return the next distance."""
    if values.size < 64:
        return 1
    for start in range(0, values.size, 64):
        x = values[start : start + 64]
        for i in range(0, 64, 8):
            a, b, c, d = x[i] + x[i + 1], x[i] - x[i + 1], x[i + 2] + x[i + 3], x[i + 2] - x[i + 3]
            e, f, g, h = x[i + 4] + x[i + 5], x[i + 4] - x[i + 5], x[i + 6] + x[i + 7], x[i + 6] - x[i + 7]
            a, c, b, d = a + c, a - c, b + d, b - d
            e, g, f, h = e + g, e - g, f + h, f - h
            x[i], x[i + 1], x[i + 2], x[i + 3] = a + e, b + f, c + g, d + h
            x[i + 4], x[i + 5], x[i + 6], x[i + 7] = a - e, b - f, c - g, d - h
        for i in range(8):
            a, b, c, d = x[i] + x[i + 8], x[i] - x[i + 8], x[i + 16] + x[i + 24], x[i + 16] - x[i + 24]
            e, f, g, h = x[i + 32] + x[i + 40], x[i + 32] - x[i + 40], x[i + 48] + x[i + 56], x[i + 48] - x[i + 56]
            a, c, b, d = a + c, a - c, b + d, b - d
            e, g, f, h = e + g, e - g, f + h, f - h
            x[i], x[i + 8], x[i + 16], x[i + 24] = a + e, b + f, c + g, d + h
            x[i + 32], x[i + 40], x[i + 48], x[i + 56] = a - e, b - f, c - g, d - h
    return 64


@compiled
def _three_levels(x: Floats, distance: int) -> None:
    """Go through three levels of eight parts: each value is loaded a third as often."""
    n = distance
    part_0, part_1, part_2, part_3 = x[:n], x[n : 2 * n], x[2 * n : 3 * n], x[3 * n : 4 * n]
    part_4, part_5, part_6, part_7 = x[4 * n : 5 * n], x[5 * n : 6 * n], x[6 * n : 7 * n], x[7 * n : 8 * n]
    for i in range(n):
        a, b, c, d = part_0[i] + part_1[i], part_0[i] - part_1[i], part_2[i] + part_3[i], part_2[i] - part_3[i]
        e, f, g, h = part_4[i] + part_5[i], part_4[i] - part_5[i], part_6[i] + part_7[i], part_6[i] - part_7[i]
        a, c, b, d = a + c, a - c, b + d, b - d
        e, g, f, h = e + g, e - g, f + h, f - h
        part_0[i], part_1[i], part_2[i], part_3[i] = a + e, b + f, c + g, d + h
        part_4[i], part_5[i], part_6[i], part_7[i] = a - e, b - f, c - g, d - h


@compiled
def _levels(values: Floats, distance: int) -> None:
    """Go through the levels from a distance up, three at a time, so that each value is loaded less often."""
    while 8 * distance <= values.size:
        for start in range(0, values.size, 8 * distance):
            _three_levels(values[start : start + 8 * distance], distance)
        distance *= 8
    if 4 * distance == values.size:
        part_0, part_1 = values[:distance], values[distance : 2 * distance]
        part_2, part_3 = values[2 * distance : 3 * distance], values[3 * distance :]
        for index in range(distance):
            sum_01, difference_01 = part_0[index] + part_1[index], part_0[index] - part_1[index]
            sum_23, difference_23 = part_2[index] + part_3[index], part_2[index] - part_3[index]
            part_0[index], part_2[index] = sum_01 + sum_23, sum_01 - sum_23
            part_1[index], part_3[index] = difference_01 + difference_23, difference_01 - difference_23
    elif 2 * distance == values.size:
        left, right = values[:distance], values[distance:]
        for index in range(distance):
            left[index], right[index] = left[index] + right[index], left[index] - right[index]


@lru_cache(maxsize=2)  # all vectors of an attempt have one rotation; nobody writes into what is returned
def seeded_bits(seed: bytes, bits: int) -> NDArray[np.uint8]:
    """Return this many bits of a seed's stream, eight in a byte: signs of coordinates, or quarter turns of pairs."""
    if len(seed) != KEY_BYTES:
        raise ConfigError(f"a rotation's seed must have {KEY_BYTES} bytes, got {len(seed)}")
    expanded = np.empty((bits + 7) // 8, np.uint8)
    Stream(seed).fill(expanded)
    return expanded


def _require_length(vector: Floats, length: int) -> None:
    if vector.shape != (length,):
        raise ConfigError(f"the rotation takes vectors of {length} coordinates, got the shape {vector.shape}")
