"""The samplers: exact distributions with rational parameters, drawn through a lookup table of 64-bit words.

Guarantee of each: the distribution is exact (`noise.cumulative`), and the draws are independent.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from d2pfed.errors import ConfigError
from d2pfed.fields import check_range
from d2pfed.noise.cumulative import Distribution, GaussianDistribution
from d2pfed.numerics.randomness import Stream
from d2pfed.numerics.ring import IntVector

if TYPE_CHECKING:
    from d2pfed.noise.lookup import LookupTable

MAX_TABLE_SIGMA = 1 << 16  # standard deviations times rows of a table: about 20 entries for each


@dataclass(frozen=True, slots=True)
class DiscreteGaussian:
    """The discrete Gaussian on the integers, centered at zero."""

    sigma: Fraction

    def draw(self, count: int, stream: Stream) -> IntVector:
        """Draw independently."""
        return draw(GaussianDistribution(Fraction(0), self.sigma * self.sigma), count, stream)


@dataclass(frozen=True, slots=True)
class CenteredDiscreteGaussian:
    """The discrete Gaussian on the integers around any center of the grid of 2^-fraction_bits."""

    sigma: Fraction
    fraction_bits: int

    def draw(self, centers: IntVector, stream: Stream) -> IntVector:
        """Draw k with probability proportional to exp(-(k - c)^2 / (2 sigma^2)), c = center / 2^fraction_bits.

        Checked: test_sampler.py::test_the_centered_gaussian_fits_its_distribution.
        """
        draws = np.empty(centers.shape, np.int64)
        _table(self).draw_into(draws, centers, stream)
        return draws


def draw(distribution: Distribution, count: int, stream: Stream) -> IntVector:
    """Draw independently from a distribution."""
    draws = np.empty(count, np.int64)
    _table(distribution).draw_into(draws, None, stream)
    return draws


@lru_cache(maxsize=8)
def _table(wanted: Distribution | CenteredDiscreteGaussian) -> "LookupTable":
    """Return the table of a distribution, or of the discrete Gaussians around every fraction of a step."""
    if isinstance(wanted, CenteredDiscreteGaussian):
        bits, variance = wanted.fraction_bits, wanted.sigma * wanted.sigma
    else:
        bits, variance = 0, wanted.variance
    check_range("fraction_bits", bits, 0, 16)
    rows = 1 << bits
    if not 0 < variance * rows * rows <= MAX_TABLE_SIGMA**2:
        raise ConfigError(
            f"sigma times {rows} rows must be positive and at most {MAX_TABLE_SIGMA}, got the variance {variance}"
        )
    from d2pfed.noise.lookup import WORD_BITS, tabulate  # noqa: PLC0415 - loads the compiler, needed to draw only

    if not isinstance(wanted, CenteredDiscreteGaussian):
        return tabulate((wanted,), WORD_BITS)
    return tabulate([GaussianDistribution(Fraction(part, rows), variance) for part in range(rows)], WORD_BITS)
