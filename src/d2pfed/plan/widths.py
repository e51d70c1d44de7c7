"""How wide a plan's noise is, and whether a ring and a sampler hold it."""

import math

from d2pfed.accounting import (
    BatchSampling,
    BinomialSum,
    ContinuousGaussian,
    DiscreteGaussianSum,
    Noise,
    SkellamSum,
)
from d2pfed.noise.codec import Codec
from d2pfed.noise.mechanisms import Centered, Mechanism
from d2pfed.noise.sampler import MAX_TABLE_SIGMA
from d2pfed.numerics.ring import Ring


def wrap_probability(
    codec: Codec, mechanism: Mechanism, ring: Ring, cohort: int, vectors: int | None = None
) -> float:
    """Bound the chance that any coordinate of a sum over the cohort falls outside of [-m/2, m/2).

    After the rotation a coordinate is sub-Gaussian with proxy (cohort radius)^2 / length, a rounding, where there is
    one, adds at most 1/4 a client, and the noise its variance; a union bound over the coordinates does the rest.
    Skellam noise has heavier tails than that, so its own moment generating function takes the Gaussian's place.
    `vectors` is how many clipped vectors are in the sum, where that is not the cohort's size: the records of a batch.
    """
    noise, reach = mechanism.noise(codec, cohort), ring.modulus / 2
    signal = ((vectors or cohort) * float(codec.radius)) ** 2 / codec.length
    rounding = 0 if isinstance(mechanism, Centered) else cohort / 4
    proxy = signal + rounding + variance(noise)
    slope, excess = reach / proxy, 0.0
    if isinstance(noise, SkellamSum):
        slope = min(slope, 1.0)  # Chernoff's bound holds at any slope, and beyond 1 the excess explodes
        excess = variance(noise) * (math.cosh(slope) - 1 - slope**2 / 2)
    return min(1.0, 2 * codec.length * math.exp(min(0.0, slope * (slope * proxy / 2 - reach) + excess)))


def variance(noise: Noise) -> float:
    """Return the variance of a noise per coordinate, in squared steps."""
    match noise:
        case DiscreteGaussianSum():
            return float(noise.sigma**2 * noise.contributors)
        case SkellamSum():
            return float(noise.variance * noise.contributors)
        case BinomialSum():
            return noise.trials * noise.contributors / 4
        case ContinuousGaussian():
            return noise.sigma**2


def noise_width(codec: Codec, mechanism: Mechanism) -> float:
    """Return the standard deviation of one client's own noise, in steps; of the whole noise where one adds it all."""
    return math.sqrt(variance(mechanism.noise(codec, 1)))


def widest(codec: Codec, mechanism: Mechanism) -> int:
    """Return the widest noise that a sampler's table holds: it has a row for each fraction of a step it rounds."""
    rows = 1 << codec.fraction_bits if isinstance(mechanism, Centered) else 1
    return MAX_TABLE_SIGMA // rows


def largest_batch(batches: BatchSampling, records: int) -> int:
    """Return the records of all silos that the ring must hold: a number that is exceeded once in a million rounds."""
    from scipy.stats import binom  # noqa: PLC0415 - slow to load

    return int(binom.isf(1e-6, records, float(batches.rate)))
