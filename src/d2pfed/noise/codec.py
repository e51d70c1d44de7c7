"""Clip, rotate and round an update to a fine grid whose norm bound is exact, and read a sum back."""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.fields import check_between, check_positive, check_range
from d2pfed.numerics.compiled import compiled
from d2pfed.numerics.randomness import Stream
from d2pfed.numerics.ring import IntVector
from d2pfed.numerics.rotation import Fold, Hadamard, Rotation, flip, fold, rotate_flipped, seeded_bits

FloatVector = NDArray[np.float32]
Dither = NDArray[np.uint16]
Entries = NDArray[np.int32] | NDArray[np.int64]

_LARGEST_RADIUS = 1 << 24  # in grid units: integers that float32 still represents, squares below 2^48

_LEAST_SQUARE, _MOST_SQUARE = 1e-30, 1e30  # of a vector whose transform neither overflows nor vanishes
_SQUARES = 1 << 12  # squares below 2^50 whose sum fits 63 bits


@dataclass(frozen=True, slots=True)
class Centers:
    """A client's rotated update in fractions of a lattice step, with its norm bound.

    Guarantee: the squared norm of `values` is at most `radius` squared, compared as integers; a Centers that
    exists is within the clip, whatever floating point did before. `radius` and `values` count grid units of
    2^-fraction_bits steps. Checked: test_codec.py::test_no_vector_exceeds_the_bound.
    """

    values: IntVector = field(repr=False)
    radius: int
    fraction_bits: int

    def __post_init__(self) -> None:
        if not 0 < self.radius <= _LARGEST_RADIUS:
            raise ConfigError(f"the grid radius must be in [1, 2^24], got {self.radius}")
        if squared_norm(self.values, self.radius) > self.radius**2:
            raise ConfigError(f"the vector exceeds its bound of {self.radius} grid units")

    @property
    def steps(self) -> Fraction:
        """The norm bound in lattice steps."""
        return Fraction(self.radius, 1 << self.fraction_bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """How a float vector becomes grid integers and a sum of lattice points becomes a mean.

    `clip` bounds an update's L2 norm, `granularity` is the real size of one lattice step, and `box`, if given,
    bounds each rotated coordinate (the paper's g_max), which shrinks differences and never enlarges them.
    """

    rotation: Rotation
    clip: float
    granularity: float
    fraction_bits: int = 8
    box: float | None = None

    def __post_init__(self) -> None:
        check_positive("clip", self.clip)
        check_positive("granularity", self.granularity)
        if self.box is not None and not self.granularity <= self.box < math.inf:
            raise ConfigError(
                f"box must be finite and at least the granularity {self.granularity}, got {self.box}"
            )
        check_range("fraction_bits", self.fraction_bits, 0, 16)
        if not 1 <= self.grid_radius <= _LARGEST_RADIUS:
            raise ConfigError(
                f"clip / granularity must give 1 to 2^24 grid units of 2^-{self.fraction_bits} steps, "
                f"got {self.clip / self.granularity:.6g} steps"
            )

    @property
    def length(self) -> int:
        """How many integers a client sends."""
        return self.rotation.padded

    @property
    def grid_radius(self) -> int:
        """The clip norm in grid units, rounded down."""
        return _grid_radius(self.clip, self.granularity, self.fraction_bits)

    @property
    def radius(self) -> Fraction:
        """The exact bound on a client's norm in lattice steps."""
        return Fraction(self.grid_radius, 1 << self.fraction_bits)

    # A user's function may have set numpy to raise, and one record would then fail its batch.
    @np.errstate(all="ignore")
    def prepare(self, update: NDArray[np.floating], seed: bytes, dither: Dither | None = None) -> Centers:
        """Clip, rotate and round an update to the grid; refuse what is not a finite vector of the right length.

        Folding and rounding can lift the norm above the bound, so the vector shrinks until its integers obey it.
        Rounding to the nearest would swallow a vector that is far shorter than the clip; with a dither it goes up or
        down by chance, right on average.
        """
        require_update(update, self.rotation.dimension)
        # Added to each coordinate before it is rounded down, uniform in (0, 1); none: to the nearest.
        dithers = np.empty(0, np.uint16) if dither is None else dither
        offsets = (dithers + np.float32(0.5)) * np.float32(2**-16)
        vector, scale = moderate(update)
        rotated, radius = self.rotation.forward(vector, seed), self.grid_radius
        square = _square(vector)
        if isinstance(self.rotation, Fold):  # the one rotation that lengthens
            square = max(square, _square(rotated))
        norm = math.sqrt(square) * scale
        factor = min(self._grid_per_unit, self._reach(dither is not None) / norm if norm > 0 else 0.0) * scale
        values, most = np.empty(len(rotated), np.int32), min(self._limit, radius)
        while True:  # shrink until the exact norm is within the radius
            high, low = _round(rotated, factor, most, offsets, values)
            square = radius**2 + 1 if high < 0 else (high << 32) + low
            if square <= radius**2:
                return Centers(values.astype(np.int64), radius, self.fraction_bits)
            factor *= min(radius / math.sqrt(square), 1 - 2**-16)

    def dither(self, stream: Stream) -> Dither:
        """Draw what decides which coordinates are rounded up."""
        drawn = np.empty(self.length, np.uint16)
        stream.fill(drawn)
        return drawn

    @np.errstate(all="ignore")
    def add_prepared(
        self,
        totals: NDArray[np.int64],
        owners: IntVector,
        updates: NDArray[np.float32],
        seed: bytes,
        dithers: NDArray[np.uint16] | None = None,
    ) -> None:
        """Add to the total of its owner what `prepare` makes of each row, as exact integers.

        A row that is not finite counts as zero. `totals` and `dithers` have a row for each owner. All rows of an owner
        are dithered alike, so what a row adds depends on that row alone: without it the total is less by exactly its
        integers. Rounding errors of a row are still right on average.
        Checked: test_records.py::test_a_sum_is_that_of_the_rows_prepared_one_by_one.
        """
        is_fit = updates.ndim == 2 and updates.dtype == np.float32 and owners.shape == updates.shape[:1]
        if not is_fit or totals.ndim != 2 or totals.shape[1] != self.length:
            raise ConfigError(
                f"rows of float32, their owners and totals of {self.length} integers were expected, got "
                f"{updates.dtype} of shape {updates.shape}, {owners.shape} and {totals.shape}"
            )
        if len(owners) and not 0 <= owners.min() <= owners.max() < len(totals):
            raise ConfigError(f"owners must be in [0, {len(totals)}), got {owners.min()} to {owners.max()}")
        if dithers is not None and dithers.shape != totals.shape:
            raise ConfigError(f"dithers must have the shape {totals.shape}, got {dithers.shape}")
        left = np.ones(len(updates), np.bool_)
        if isinstance(self.rotation, Hadamard | Fold):
            reach, shifts, kept = self._reach(dithers is not None), np.empty(0, np.int64), 0
            if isinstance(self.rotation, Fold):
                (shifts, signs), kept = self.rotation.seeded(seed), self.rotation.kept
            else:
                signs = seeded_bits(seed, self.rotation.dimension)
            _add_rows(
                updates,
                owners,
                signs,
                shifts,
                kept,
                (self._grid_per_unit, reach, min(self._limit, self.grid_radius), self.grid_radius),
                np.zeros((0, 0), np.uint16) if dithers is None else dithers,
                totals,
                left,
            )
        for row in np.flatnonzero(left):
            if np.isfinite(updates[row]).all() and updates[row].any():
                own = None if dithers is None else dithers[owners[row]]
                totals[owners[row]] += self.prepare(updates[row].copy(), seed, own).values

    @property
    def _limit(self) -> float:
        return math.inf if self.box is None else math.floor(self.box * self._grid_per_unit)

    def decode(self, total: IntVector, seed: bytes, divisor: float) -> FloatVector:
        """Turn a sum of lattice points into the mean over `divisor` clients or records, rotated back."""
        if total.shape != (self.length,):
            raise ConfigError(f"a sum must have shape ({self.length},), got {total.shape}")
        mean = total * (self.granularity / divisor)
        return self.rotation.inverse(mean.astype(np.float32), seed).astype(np.float32)

    def _reach(self, is_dithered: bool) -> float:  # noqa: FBT001 - private
        """Return the norm to which long vectors are scaled, in grid units, so that rounding seldom lifts it too far."""
        rounding = 1 / 6 if is_dithered else 1 / 12
        room = self.grid_radius**2 - self.length * rounding - 4 * self.grid_radius
        return math.sqrt(max(room, self.grid_radius**2 / 4))

    @property
    def _grid_per_unit(self) -> float:
        return (1 << self.fraction_bits) / self.granularity


@lru_cache  # exact fractions are slow, and every encoding asks for it several times
def _grid_radius(clip: float, granularity: float, fraction_bits: int) -> int:
    return math.floor(Fraction(clip) / Fraction(granularity) * (1 << fraction_bits))


def require_update(update: NDArray[np.floating], dimension: int) -> None:
    """Refuse what is not a vector of this many floating-point numbers."""
    if update.shape != (dimension,):
        raise ConfigError(f"an update must have shape ({dimension},), got {update.shape}")
    if not np.issubdtype(update.dtype, np.floating):
        raise ConfigError(f"an update must be of floating point, got {update.dtype}")


def squared_norm(values: IntVector, radius: int) -> int:
    """Return the exact squared norm, or more than radius squared when some entry alone exceeds the radius."""
    high, low = _exact_square(values)
    return radius**2 + 1 if high < 0 else (high << 32) + low


def moderate(update: NDArray[np.floating]) -> tuple[FloatVector, float]:
    """Return the update as float32 numbers that no transform overflows, and the factor that restores it."""
    if update.dtype == np.float32 and _LEAST_SQUARE < _square(update) < _MOST_SQUARE:
        return update, 1.0
    peak = float(np.max(np.abs(update))) or 1.0
    if not math.isfinite(peak):
        raise ConfigError("an update must be finite, got NaN or infinity")
    return (update / peak).astype(np.float32), peak


@compiled
def _square(vector: FloatVector) -> float:
    """Return the squared norm in double precision, in one order on every machine."""
    whole = len(vector) // 8 * 8
    a = b = c = d = e = f = g = h = 0.0
    for i in range(0, whole, 8):  # eight sums at once, in one instruction or two
        a += np.float64(vector[i]) * np.float64(vector[i])
        b += np.float64(vector[i + 1]) * np.float64(vector[i + 1])
        c += np.float64(vector[i + 2]) * np.float64(vector[i + 2])
        d += np.float64(vector[i + 3]) * np.float64(vector[i + 3])
        e += np.float64(vector[i + 4]) * np.float64(vector[i + 4])
        f += np.float64(vector[i + 5]) * np.float64(vector[i + 5])
        g += np.float64(vector[i + 6]) * np.float64(vector[i + 6])
        h += np.float64(vector[i + 7]) * np.float64(vector[i + 7])
    total = ((a + e) + (b + f)) + ((c + g) + (d + h))
    for i in range(whole, len(vector)):
        total += np.float64(vector[i]) * np.float64(vector[i])
    return total


@compiled
def _exact_square(values: Entries) -> tuple[int, int]:
    """Return the exact sum of squares as high and low parts of 32 bits, or -1 if an entry has more than 25 bits."""
    high = low = 0
    for start in range(0, len(values), _SQUARES):
        part = values[start : start + _SQUARES]
        square = bits = 0
        for i in range(len(part)):
            value = part[i]
            bits |= value ^ (value >> 63)
            square += value * value  # of 64 bits
        if bits >> 25:
            return (-1, 0)
        high += square >> 32
        low += square & 0xFFFFFFFF
    return (high, low)


@compiled
def _round(
    rotated: FloatVector, factor: float, limit: float, offsets: FloatVector, out: NDArray[np.int32]
) -> tuple[int, int]:
    """Round to the grid, no entry beyond the limit: to the nearest, or down after offsets. Return the exact square."""
    if len(offsets):
        for i in range(len(rotated)):
            out[i] = np.int32(np.floor(min(max(rotated[i] * factor, -limit), limit) + offsets[i]))
    else:
        for i in range(len(rotated)):
            out[i] = np.int32(np.rint(min(max(rotated[i] * factor, -limit), limit)))
    return _exact_square(out)


@compiled
def _add_rows(  # noqa: PLR0917 - compiled code takes no keywords
    rows: NDArray[np.float32],
    owners: IntVector,
    signs: NDArray[np.uint8],
    shifts: NDArray[np.int64],  # of a fold's chunks; none: the rotation is Hadamard's
    kept: int,
    scales: tuple[float, float, float, int],
    dithers: NDArray[np.uint16],
    totals: NDArray[np.int64],
    left: NDArray[np.bool_],
) -> None:
    """Rotate, round and add each row whose exact square is within the radius at once; `left` keeps the others."""
    grid_per_unit, reach, limit, radius = scales
    length, last = totals.shape[1], -1
    rotated, values = np.empty(length, np.float32), np.empty(length, np.int32)
    offsets = np.empty(length if len(dithers) else 0, np.float32)
    most = np.int64(radius) * np.int64(radius)
    signed = np.ones(0 if len(shifts) else rows.shape[1], np.float32)
    flip(signed, signs, np.float32(length**-0.5), signed)
    for row in range(len(rows)):
        square, owner = _square(rows[row]), owners[row]
        if not _LEAST_SQUARE < square < _MOST_SQUARE:
            continue
        if owner != last and len(dithers):
            for index in range(length):
                offsets[index] = (np.float32(dithers[owner, index]) + np.float32(0.5)) * np.float32(2**-16)
        last = owner
        if len(shifts):
            fold(rows[row], shifts, signs, kept, rotated)
            square = max(square, _square(rotated))
        else:
            rotate_flipped(rows[row], signed, rotated)
        factor = min(grid_per_unit, reach / math.sqrt(square))
        high, low = _round(rotated, factor, limit, offsets, values)
        # High beyond 2^20 is beyond any radius, and no sum below that overflows.
        if high < 0 or high > (1 << 20) or (high << 32) + low > most:
            continue
        left[row] = False
        for index in range(length):
            totals[owner, index] += values[index]


def stochastic_round(centers: Centers, stream: Stream) -> IntVector:
    """Round each grid value up or down to a lattice point, up with probability its exact fraction."""
    dither = np.empty(len(centers.values), np.uint16)
    stream.fill(dither)
    dither >>= np.uint16(16 - centers.fraction_bits)
    rounded: IntVector = (centers.values + dither) >> centers.fraction_bits
    return rounded


def rounded_square(radius: Fraction, length: int, beta: float) -> int:
    """Return the squared norm that conditional rounding keeps to, in steps: Kairouz, Liu and Steinke 2021, eq. 3."""
    check_between("beta", beta, 0, 1)
    c, root = float(radius), math.sqrt(length)
    likely = c**2 + length / 4 + math.sqrt(2 * math.log(1 / beta)) * (c + root / 2)
    return math.ceil(min((c + root) ** 2, likely))


def rounded_radius(radius: Fraction, length: int, beta: float) -> Fraction:
    """Return the norm bound, in steps, after conditional rounding, rounded up."""
    return Fraction(math.isqrt(rounded_square(radius, length, beta) << 64) + 1, 1 << 32)


def conditional_round(centers: Centers, beta: float, stream: Stream) -> IntVector:
    """Round stochastically, again and again, until the norm is within `rounded_square`.

    Guarantee: the bound always holds; after 64 failures (probability at most beta^64) the vector is rounded towards
    zero, which cannot lengthen it. Checked: test_codec.py::test_conditional_rounding_keeps_its_bound.
    """
    limit = rounded_square(centers.steps, len(centers.values), beta)
    for _ in range(64):
        rounded = stochastic_round(centers, stream)
        if squared_norm(rounded, math.isqrt(limit) + 1) <= limit:  # + 1: an entry beyond that is beyond the limit
            return rounded
    scale = 1 << centers.fraction_bits
    toward_zero: IntVector = np.sign(centers.values) * (np.abs(centers.values) // scale)
    return toward_zero
