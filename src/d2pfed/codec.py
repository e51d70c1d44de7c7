"""Clip, rotate and round an update to a fine grid whose norm bound is exact, and read a sum back."""

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.randomness import Stream
from d2pfed.ring import IntVector
from d2pfed.rotation import Rotation

FloatVector = NDArray[np.float32]

_LARGEST_RADIUS = 1 << 24  # in grid units: integers that float32 still represents, squares below 2^48
_EXACT_LENGTH = 1 << 14  # so many squares below 2^48 add up in 64 bits


@dataclass(frozen=True, slots=True)
class Centres:
    """A client's rotated update in fractions of a lattice step, with its norm bound.

    Guarantee: the squared norm of `values` is at most `radius` squared, compared as integers; a Centres that
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

    `clip_norm` bounds an update's L2 norm, `granularity` is the real size of one lattice step, and `box`, if given,
    bounds each rotated coordinate (the paper's g_max), which shrinks differences and never enlarges them.
    """

    rotation: Rotation
    clip_norm: float
    granularity: float
    fraction_bits: int = 8
    box: float | None = None

    def __post_init__(self) -> None:
        for name in ("clip_norm", "granularity"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be positive and finite, got {value}")
        if self.box is not None and not self.box >= self.granularity:
            raise ConfigError(f"box must be at least the granularity {self.granularity}, got {self.box}")
        if not 0 <= self.fraction_bits <= 16:
            raise ConfigError(f"fraction_bits must be in [0, 16], got {self.fraction_bits}")
        if not 1 <= self.grid_radius <= _LARGEST_RADIUS:
            raise ConfigError(
                f"clip_norm / granularity must give 1 to 2^24 grid units of 2^-{self.fraction_bits} steps, "
                f"got {self.clip_norm / self.granularity:.6g} steps"
            )

    @property
    def length(self) -> int:
        """How many integers a client sends."""
        return self.rotation.padded

    @property
    def grid_radius(self) -> int:
        """The clip norm in grid units, rounded down."""
        ratio = Fraction(self.clip_norm) / Fraction(self.granularity)
        return math.floor(ratio * (1 << self.fraction_bits))

    @property
    def radius(self) -> Fraction:
        """The exact bound on a client's norm in lattice steps."""
        return Fraction(self.grid_radius, 1 << self.fraction_bits)

    @property
    def largest_step(self) -> int:
        """The bound on each rounded coordinate, in steps."""
        bound = (
            self.radius if self.box is None else min(self.radius, Fraction(self.box) / Fraction(self.granularity))
        )
        return math.ceil(bound)

    def prepare(self, update: NDArray[np.floating], seed: bytes) -> Centres:
        """Clip, rotate and round an update to the grid; refuse what is not a finite vector of the right length.

        Rounding can lift the norm a little above the bound, so the vector shrinks until its integers obey it.
        """
        if update.shape != (self.rotation.dimension,):
            raise ConfigError(f"an update must have shape ({self.rotation.dimension},), got {update.shape}")
        if not np.issubdtype(update.dtype, np.floating):
            raise ConfigError(f"an update must be of floating point, got {update.dtype}")
        peak = float(np.max(np.abs(update)))
        if not math.isfinite(peak):
            raise ConfigError("an update must be finite, got NaN or infinity")
        unit = (update / (peak or 1.0)).astype(np.float32)  # largest entry 1: nothing overflows below
        norm = float(np.linalg.norm(unit)) * peak
        grid = self.rotation.forward(unit, seed)
        grid *= np.float32(min(peak, self.clip_norm * (peak / norm) if norm > 0 else 0.0) * self._grid_per_unit)
        if self.box is not None:
            limit = math.floor(self.box * self._grid_per_unit)
            np.clip(grid, -limit, limit, out=grid)
        return Centres(_round_within(grid, self.grid_radius), self.grid_radius, self.fraction_bits)

    def decode(self, total: IntVector, seed: bytes, divisor: int) -> FloatVector:
        """Turn a sum of lattice points into the mean over `divisor` clients, rotated back."""
        if total.shape != (self.length,):
            raise ConfigError(f"a sum must have shape ({self.length},), got {total.shape}")
        mean = total * (self.granularity / divisor)
        return self.rotation.inverse(mean.astype(np.float32), seed).astype(np.float32)

    @property
    def _grid_per_unit(self) -> float:
        return (1 << self.fraction_bits) / self.granularity


def squared_norm(values: IntVector, radius: int) -> int:
    """Return the exact squared norm, or more than radius squared when some entry alone exceeds the radius."""
    if len(values) and max(-int(values.min()), int(values.max())) > radius:
        return radius**2 + 1  # such an entry decides already, and its square might not fit in 64 bits
    parts = (values[i : i + _EXACT_LENGTH] for i in range(0, len(values), _EXACT_LENGTH))
    return sum(int(np.dot(part, part)) for part in parts)


def _round_within(grid: FloatVector, radius: int) -> IntVector:
    while True:
        values: IntVector = np.rint(grid).astype(np.int64)
        excess = squared_norm(values, radius)
        if excess <= radius**2:
            return values
        grid *= np.float32(min(radius / math.sqrt(excess), 1 - 2**-16))


def stochastic_round(centres: Centres, stream: Stream) -> IntVector:
    """Round each grid value up or down to a lattice point, up with probability its exact fraction."""
    dither = np.empty(len(centres.values), np.uint16)
    stream.fill(dither)
    dither >>= np.uint16(16 - centres.fraction_bits)
    rounded: IntVector = (centres.values + dither) >> centres.fraction_bits
    return rounded


def rounded_square(radius: Fraction, length: int, beta: float) -> int:
    """Return the squared norm, in steps, that conditional rounding keeps to: Kairouz, Liu and Steinke 2021, eq. 3.

    A single stochastic rounding exceeds it with probability at most `beta`.
    """
    if not 0 < beta < 1:
        raise ConfigError(f"beta must be in (0, 1), got {beta}")
    c, root = float(radius), math.sqrt(length)
    likely = c**2 + length / 4 + math.sqrt(2 * math.log(1 / beta)) * (c + root / 2)
    return math.ceil(min((c + root) ** 2, likely))


def rounded_radius(radius: Fraction, length: int, beta: float) -> Fraction:
    """Return the norm bound, in steps, after conditional rounding, rounded up."""
    return Fraction(math.isqrt(rounded_square(radius, length, beta) << 64) + 1, 1 << 32)


def conditional_round(centres: Centres, beta: float, stream: Stream) -> IntVector:
    """Round stochastically, again and again, until the norm is within `rounded_square`.

    Guarantee: the bound always holds; after 64 failures (probability at most beta^64) the vector is rounded towards
    zero, which cannot lengthen it. Checked: test_codec.py::test_conditional_rounding_keeps_its_bound.
    """
    limit = rounded_square(centres.steps, len(centres.values), beta)
    for _ in range(64):
        rounded = stochastic_round(centres, stream)
        if squared_norm(rounded, math.isqrt(limit) + 1) <= limit:  # + 1: an entry beyond that is beyond the limit
            return rounded
    scale = 1 << centres.fraction_bits
    toward_zero: IntVector = np.sign(centres.values) * (np.abs(centres.values) // scale)
    return toward_zero
