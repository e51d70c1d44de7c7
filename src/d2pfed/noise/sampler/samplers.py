"""The samplers: exact distributions with rational parameters, drawn through a lookup table of 64-bit words."""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from d2pfed.errors import ConfigError
from d2pfed.noise.sampler.cumulative import (
    BinomialDistribution,
    Distribution,
    GaussianDistribution,
    SkellamDistribution,
)
from d2pfed.numerics.randomness import Stream
from d2pfed.numerics.ring import IntVector

if TYPE_CHECKING:
    from d2pfed.noise.sampler.lookup import LookupTable

MAX_TABLE_SIGMA = 1 << 16  # standard deviations times rows of a table: about 20 entries for each


@dataclass(frozen=True, slots=True)
class DiscreteGaussian:
    """The discrete Gaussian on the integers, centered at zero."""

    sigma: Fraction

    def __post_init__(self) -> None:
        _require_deviation(self.sigma * self.sigma, 1)

    def draw(self, count: int, stream: Stream) -> IntVector:
        """Draw independently. Guarantee: the distribution is exact (`sampler.cumulative`)."""
        distribution = GaussianDistribution(Fraction(0), self.sigma * self.sigma)
        return _draw(distribution, count, stream)


@dataclass(frozen=True, slots=True)
class CenteredDiscreteGaussian:
    """The discrete Gaussian on the integers around any center of the grid of 2^-fraction_bits."""

    sigma: Fraction
    fraction_bits: int

    def __post_init__(self) -> None:
        if not 0 <= self.fraction_bits <= 16:
            raise ConfigError(f"fraction_bits must be in [0, 16], got {self.fraction_bits}")
        _require_deviation(self.sigma * self.sigma, 1 << self.fraction_bits)

    def draw(self, centers: IntVector, stream: Stream) -> IntVector:
        """Draw k with probability proportional to exp(-(k - c)^2 / (2 sigma^2)), c = center / 2^fraction_bits.

        Guarantee: the distribution is exact (`sampler.cumulative`), and the draws are independent.
        Checked: test_sampler.py::test_the_centered_gaussian_fits_its_distribution.
        """
        draws = np.empty(centers.shape, np.int64)
        self.draw_into(draws, centers, stream)
        return draws

    def draw_into(self, out: IntVector, centers: IntVector, stream: Stream) -> None:
        """Draw as `draw` does into a given vector, which may be that of the centers."""
        if out.shape != centers.shape:  # numpy would stretch a short vector over a long one
            raise ValueError(f"draws and centers must have equal shapes, got {out.shape} and {centers.shape}")
        _centered_table(self).draw_into(out, centers, stream)


@dataclass(frozen=True, slots=True)
class Skellam:
    """The difference of two Poisson variables of equal mean, with the given variance."""

    variance: Fraction

    def __post_init__(self) -> None:
        _require_deviation(self.variance, 1)

    def draw(self, count: int, stream: Stream) -> IntVector:
        """Draw independently. Guarantee: the distribution is exact (`sampler.cumulative`)."""
        return _draw(SkellamDistribution(self.variance), count, stream)


@dataclass(frozen=True, slots=True)
class Binomial:
    """The number of heads in fair coin tosses."""

    trials: int

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ConfigError(f"trials must be at least 1, got {self.trials}")
        _require_deviation(Fraction(self.trials, 4), 1)

    def draw(self, count: int, stream: Stream) -> IntVector:
        """Draw independently. Guarantee: the distribution is exact (`sampler.cumulative`)."""
        return _draw(BinomialDistribution(self.trials), count, stream)


def _draw(distribution: Distribution, count: int, stream: Stream) -> IntVector:
    draws = np.empty(count, np.int64)
    _table(distribution).draw_into(draws, None, stream)
    return draws


@lru_cache(maxsize=16)
def _table(distribution: Distribution) -> "LookupTable":
    return _tabulate((distribution,))


@lru_cache(maxsize=4)
def _centered_table(gaussian: CenteredDiscreteGaussian) -> "LookupTable":
    scale = 1 << gaussian.fraction_bits
    square = gaussian.sigma * gaussian.sigma
    return _tabulate(tuple(GaussianDistribution(Fraction(part, scale), square) for part in range(scale)))


def _tabulate(distributions: tuple[Distribution, ...]) -> "LookupTable":
    from d2pfed.noise.sampler.lookup import WORD_BITS, tabulate  # noqa: PLC0415 - loads the compiler, needed to draw only

    return tabulate(distributions, WORD_BITS)


def _require_deviation(variance: Fraction, rows: int) -> None:
    if variance <= 0:
        raise ConfigError(f"a noise's variance must be positive, got {variance}")
    if variance * rows * rows > MAX_TABLE_SIGMA**2:
        raise ConfigError(
            f"sigma times {rows} rows must be at most {MAX_TABLE_SIGMA}, got the variance {variance}"
        )
