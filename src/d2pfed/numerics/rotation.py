"""Random rotations that spread a vector evenly over its coordinates: Hadamard's, and Fourier's of random phases.

Each is orthonormal up to the rounding of floats, is drawn from a public seed, and is flat: for a fixed vector
x, every output coordinate is sub-Gaussian over the seed with variance proxy |x|^2 / padded.

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
        _require_dimension(self.dimension)

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
        _require_dimension(self.dimension)

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


Rotation = Hadamard | RandomPhase  # seeded orthonormal maps from `dimension` to `padded` coordinates


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
    """Return so many bits of a seed's stream, eight in a byte: signs of coordinates, or quarter turns of pairs."""
    if len(seed) != KEY_BYTES:
        raise ConfigError(f"a rotation's seed must have {KEY_BYTES} bytes, got {len(seed)}")
    expanded = np.empty((bits + 7) // 8, np.uint8)
    Stream(seed).fill(expanded)
    return expanded


def _require_dimension(dimension: int) -> None:
    if not 1 <= dimension <= MAX_DIMENSION:
        raise ConfigError(f"a rotation's dimension must be in [1, {MAX_DIMENSION}], got {shown(dimension)}")


def _require_length(vector: Floats, length: int) -> None:
    if vector.shape != (length,):
        raise ConfigError(f"the rotation takes vectors of {length} coordinates, got the shape {vector.shape}")
