"""The lattice and the mechanism that give a plan its noise, how wide that is, and whether ring and sampler hold it."""

import math
from dataclasses import replace
from fractions import Fraction

from d2pfed.accounting import BatchSampling, SkellamSum, Unit
from d2pfed.errors import ConfigError
from d2pfed.noise import mechanisms
from d2pfed.noise.codec import Codec
from d2pfed.noise.sampler import MAX_TABLE_SIGMA
from d2pfed.numerics.ring import Ring
from d2pfed.numerics.rotation import Fold, Hadamard, RandomPhase, Rotation
from d2pfed.plan.target import AUTO, OFF, PrivacyTarget, RotationName

SAFE_WRAP_PROBABILITY = 1e-2  # per round; a wrapped coordinate costs accuracy, never privacy
SAFE_WRAP_ENERGY = 1e-2  # over the noise's, where the mean's length has a bound: half a per cent more noise
ROUNDING_COST = 1.02  # a mechanism that rounds takes as many bits as keep its error within 2 % of not rounding
LEAST_FOLD, MOST_TERMS = 1 << 10, 64  # coordinates, and parameters in each, that compression chooses by itself
USUAL_MEAN = Fraction(1, 8)  # of the clip's square: what the mean's is taken to be where compression is chosen
MOST_PADDING = 1.05  # of a Hadamard transform over the dimension, where the rotation is chosen
_FRACTION_BITS = 8
_FINEST_FRACTION_BITS = 12  # a table of 4,096 laws; more would not stay in the cache
_SHORT = 1 << 10  # coordinates: few enough that the finest table costs no time, and a vector at its clip no bias
_GRID_UNITS = 3  # a coordinate's typical size at the clip, so that rounding to the grid costs under 1 % of it


def compressed(target: PrivacyTarget, multiplier: float) -> PrivacyTarget:
    """Return the target with what `auto` stands for beside this noise: a number, or off where that is above d / 2.

    It is the least power of two at or above 1,024, d / 64 and clip^2 / (2 s^2), s being the standard deviation of a
    coordinate of the mean of a full cohort. A mean whose square is an eighth of the clip's then costs as much as noise
    that is larger by at most 12 %: docs/theory.md, section 19.
    """
    if target.compression != AUTO:
        return target
    divisor = float(target.cohort_size)
    if target.batches is not None and target.records is not None:
        divisor = float(target.batches.rate * target.records)
    shares = 1.0
    if target.mechanism is not mechanisms.MechanismName.SHARED:
        # At least one contributor: a target with fewer is refused once its protocol is chosen.
        shares = target.cohort_size / max(1, target.quorum - target.cohort_colluders)
    spread = 2 * multiplier * math.sqrt(shares) / divisor  # over the clip
    least = max(LEAST_FOLD, target.dimension / MOST_TERMS, 1 / (2 * spread**2))
    wanted = 1 << math.ceil(math.log2(least))
    return replace(target, compression=wanted if 2 * wanted <= target.dimension else OFF)


def _rotation(target: PrivacyTarget) -> Rotation:
    if isinstance(target.compression, int):
        return Fold(target.dimension, target.compression)
    plain, phase = Hadamard(target.dimension), RandomPhase(target.dimension)
    if target.rotation is RotationName.AUTO:
        # Rows of records are added up by a kernel, which has no phases.
        is_short = plain.padded <= MOST_PADDING * target.dimension or target.unit is Unit.RECORD
        return plain if is_short else phase
    return plain if target.rotation is RotationName.HADAMARD else phase


def parts_of(
    target: PrivacyTarget, steps: float, multiplier: float, contributors: int
) -> tuple[Codec, mechanisms.Mechanism]:
    """Return codec and mechanism with which this many clients' noise is `multiplier` times twice a client's radius.

    `steps` is the clip in lattice steps, for a mechanism that rounds.
    """
    if target.mechanism.sized is not None:
        codec = _codec(target, steps, _FRACTION_BITS)
        return codec, _mechanism(target, codec, multiplier, contributors)
    # A lattice on which each client's noise is as narrow as it may be, which takes the fewest bits. The grid must be
    # fine beside a vector's coordinates, or rounding to it would swallow them; where its table would grow too large,
    # the lattice itself becomes finer.
    least = mechanisms.LEAST_WIDTH if target.unit is Unit.CLIENT else mechanisms.LEAST_SILO_WIDTH
    steps = least * math.sqrt(contributors) / (2 * multiplier)
    length = _rotation(target).padded
    wanted = math.ceil(math.log2(_GRID_UNITS * math.sqrt(length) / steps))
    finer = 1 << max(0, wanted - _FINEST_FRACTION_BITS)
    if least * finer > mechanisms.MOST_WIDTH:
        raise too_wide(target, MAX_TABLE_SIGMA >> _FINEST_FRACTION_BITS, least * finer)
    coarsest = _FINEST_FRACTION_BITS if length <= _SHORT else _FRACTION_BITS
    codec = _codec(target, steps * finer, min(max(wanted, coarsest), _FINEST_FRACTION_BITS))
    return codec, mechanisms.Centered(Fraction(least * finer))


def finest(target: PrivacyTarget, multiplier: float) -> float:
    """Return the fewest steps to the clip for which rounding costs little; 1 where nothing is rounded.

    The noise of each client is then 2.4 steps wide or more, so that the lattice protocol takes it.
    """
    if target.mechanism.sized is None:
        return 1.0
    for exponent in range(16 * 8):
        steps = 2 ** (exponent / 8)
        noise = 2 * multiplier * float(mechanisms.Rounded().radius(_codec(target, steps, _FRACTION_BITS)))
        if math.hypot(noise, math.sqrt(target.cohort_size) / 2) <= ROUNDING_COST * 2 * multiplier * steps:
            return steps
    raise ConfigError(f"a vector of {target.dimension} coordinates is too long for {target.mechanism}")


def finest_within(ring: Ring, target: PrivacyTarget, multiplier: float, contributors: int) -> float:
    """Return the most steps to the clip for which the target's ring still holds the sum."""
    for exponent in range(16 * 8 - 1, -17, -1):
        codec = _codec(target, 2 ** (exponent / 8), _FRACTION_BITS)
        mechanism = _mechanism(target, codec, multiplier, contributors)
        if mechanism.noise(codec, 1).sum_variance > MAX_TABLE_SIGMA**2:
            continue
        if holds(target, codec, mechanism, ring):
            return 2 ** (exponent / 8)
    raise ConfigError(f"{ring.bits} bits are too few for {target.mechanism} with {target.cohort_size} clients")


def _codec(target: PrivacyTarget, steps: float, fraction_bits: int) -> Codec:
    """Return the codec whose clip is `steps` lattice steps, rounded down to the grid."""
    radius = math.floor(steps * (1 << fraction_bits))
    if radius < 1:
        raise ConfigError(f"epsilon {target.epsilon:g} needs noise so wide that the clip is below the grid")
    clip, rotation = target.fixed_clip, _rotation(target)
    granularity = clip * (1 << fraction_bits) / radius
    codec = Codec(rotation=rotation, clip=clip, granularity=granularity, fraction_bits=fraction_bits)
    if codec.grid_radius < radius:  # the quotient's last bit fell the wrong way
        codec = replace(codec, granularity=math.nextafter(granularity, 0))
    return codec


def _mechanism(target: PrivacyTarget, codec: Codec, multiplier: float, contributors: int) -> mechanisms.Mechanism:
    total = 2 * multiplier * float(mechanisms.Rounded().radius(codec))
    each = total if target.mechanism is mechanisms.MechanismName.SHARED else total / math.sqrt(contributors)
    if each > mechanisms.MOST_WIDTH / 2:
        raise too_wide(target, MAX_TABLE_SIGMA, each)
    if target.mechanism.sized is None:
        raise ConfigError(f"the mechanism {target.mechanism} does not round")
    return target.mechanism.sized(total, contributors)


def too_wide(target: PrivacyTarget, most: int, width: float) -> ConfigError:
    """Return the refusal of noise that no sampler's table holds."""
    return ConfigError(
        f"one client's noise must be at most {most} lattice steps wide, and epsilon {target.epsilon:g} against "
        f"`{target.against}` needs about {width:.4g} with this mechanism, cohort and dimension"
    )


def holds(target: PrivacyTarget, codec: Codec, mechanism: mechanisms.Mechanism, ring: Ring) -> bool:
    """Whether a ring is large enough for a target's sums.

    Either a sum hardly ever wraps, or, where the mean's length has a bound, what wraps has little energy.
    """
    radii = target.longest_mean * summed_vectors(target.cohort_size, target.records, target.batches)
    if wrap_probability(codec, mechanism, ring, target.cohort_size, radii) <= SAFE_WRAP_PROBABILITY:
        return True
    energy = wrap_energy(codec, mechanism, ring, target.cohort_size, radii)
    return target.longest_mean < 1 and energy <= SAFE_WRAP_ENERGY


def wrap_probability(
    codec: Codec, mechanism: mechanisms.Mechanism, ring: Ring, cohort: int, radii: float
) -> float:
    """Bound the chance that any coordinate of a sum over the cohort falls outside of [-m/2, m/2).

    `radii` is how long the sum of the clipped vectors may be, in radii of one: as many as there are, if all agree.
    """
    return min(1.0, 2 * codec.length * _tail(codec, mechanism, ring, cohort, radii))


def wrap_energy(codec: Codec, mechanism: mechanisms.Mechanism, ring: Ring, cohort: int, radii: float) -> float:
    """Bound the expected square of what wrapping adds to a coordinate, over the variance of its noise.

    The error is m j where a coordinate is (j - 1/2) m away, whose chance is at most 2 p^(2j - 1) with the p of j = 1;
    the sum over j is in closed form. Proof: docs/theory.md, section 19.
    """
    p = _tail(codec, mechanism, ring, cohort, radii)
    if p > 0.5:
        return math.inf
    square = 2 * ring.modulus**2 * p * (1 + p**2) / (1 - p**2) ** 2
    return square / mechanism.noise(codec, cohort).sum_variance


def _tail(codec: Codec, mechanism: mechanisms.Mechanism, ring: Ring, cohort: int, radii: float) -> float:
    """Bound the chance that a coordinate of a sum is above m/2, and that it is below -m/2.

    After the rotation a coordinate is sub-Gaussian with proxy |sum|^2 / length, a rounding, where there is one, adds at
    most 1/4 a client, and the noise its variance. Skellam noise has heavier tails than that, so its own moment
    generating function takes the Gaussian's place.
    """
    noise, reach = mechanism.noise(codec, cohort), ring.modulus / 2
    signal = (radii * float(codec.radius)) ** 2 / codec.length
    rounding = 0 if isinstance(mechanism, mechanisms.Centered) else cohort / 4
    proxy = signal + rounding + noise.sum_variance
    slope, excess = reach / proxy, 0.0
    if isinstance(noise, SkellamSum):
        slope = min(slope, 1.0)  # Chernoff's bound holds at any slope, and beyond 1 the excess explodes
        excess = noise.sum_variance * (math.cosh(slope) - 1 - slope**2 / 2)
    return math.exp(min(0.0, slope * (slope * proxy / 2 - reach) + excess))


def summed_vectors(cohort: int, records: int | None, batches: BatchSampling | None) -> int:
    """Return how many clipped vectors are in a sum: the cohort's, or the most records of a batch but once in 10^6."""
    if batches is None or records is None:
        return cohort
    from scipy.stats import binom  # noqa: PLC0415 - slow to load

    return int(binom.isf(1e-6, records, float(batches.rate)))


def noise_width(codec: Codec, mechanism: mechanisms.Mechanism) -> tuple[float, int]:
    """Return the standard deviation of one client's own noise, in steps, and the most that a sampler's table holds.

    Of the whole noise, where one client adds it all. A table has a row for each fraction of a step that it rounds.
    """
    rows = 1 << codec.fraction_bits if isinstance(mechanism, mechanisms.Centered) else 1
    return math.sqrt(mechanism.noise(codec, 1).sum_variance), MAX_TABLE_SIGMA // rows
