"""The exact discrete Gaussian in rational arithmetic, one draw at a time: slow and short."""

from fractions import Fraction
from math import ceil, isqrt

from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import Stream


def discrete_gaussian(centre: Fraction, sigma_squared: Fraction, stream: Stream) -> int:
    """Draw k with probability proportional to exp(-(k - centre)^2 / (2 sigma^2)), exactly.

    Guarantee: the distribution is exact; only integers and fractions are used. Proof: with t = floor(sigma) + 1, the
    proposal y is geometric outwards from the two integers around the centre c. If the one on its side is at
    distance a, it has the weight exp(-(|y - c| - a) / t), and completing the square shows that the acceptance
    below turns this into the Gaussian's weight (Canonne, Kamath and Steinke 2020, with a centre).
    Checked: test_sampler.py::test_the_reference_fits_its_distribution.
    The running time depends on the draw: see `CenteredDiscreteGaussian` where that matters.
    """
    if sigma_squared <= 0:
        raise ConfigError(f"sigma squared must be positive, got {sigma_squared}")
    scale = isqrt(int(sigma_squared)) + 1
    right = ceil(centre)
    while True:
        distance = _geometric(scale, stream)
        if stream.below(2):
            draw, nearest = right + distance, right - centre
        else:
            draw, nearest = right - 1 - distance, centre - (right - 1)
        excess = abs(draw - centre) - sigma_squared / scale
        if _bernoulli_exp(excess * excess / (2 * sigma_squared) + nearest / scale, stream):
            return draw


def _geometric(scale: int, stream: Stream) -> int:
    """Draw n >= 0 with probability proportional to exp(-n / scale)."""
    while True:
        remainder = stream.below(scale)
        if _bernoulli_exp(Fraction(remainder, scale), stream):
            break
    quotient = 0
    while _bernoulli_exp(Fraction(1), stream):
        quotient += 1
    return quotient * scale + remainder


def _bernoulli_exp(exponent: Fraction, stream: Stream) -> bool:
    """Return True with probability exp(-exponent): one coin per unit, and one for the rest."""
    while exponent > 1:
        if not _bernoulli_exp_of_unit(Fraction(1), stream):
            return False
        exponent -= 1
    return _bernoulli_exp_of_unit(exponent, stream)


def _bernoulli_exp_of_unit(exponent: Fraction, stream: Stream) -> bool:
    """Return True with probability exp(-exponent), exponent in [0, 1], by von Neumann's alternating series."""
    index = 1
    while stream.below(exponent.denominator * index) < exponent.numerator:
        index += 1
    return index % 2 == 1
