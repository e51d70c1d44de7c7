"""The codec and the mechanism that give a plan its noise."""

import math
from dataclasses import replace
from fractions import Fraction

from d2pfed.accounting import Observer, Unit
from d2pfed.errors import ConfigError
from d2pfed.noise.codec import Codec
from d2pfed.noise.mechanisms import (
    LEAST_SILO_WIDTH,
    LEAST_WIDTH,
    MOST_WIDTH,
    BinomialNoise,
    Centered,
    DDGauss,
    Mechanism,
    Rounded,
    Shared,
    SkellamNoise,
)
from d2pfed.noise.sampler import MAX_TABLE_SIGMA
from d2pfed.numerics.ring import Ring
from d2pfed.numerics.rotation import Hadamard, RandomPhase
from d2pfed.plan.names import MechanismName, RotationName
from d2pfed.plan.target import PrivacyTarget
from d2pfed.plan.widths import variance, wrap_probability

SAFE_WRAP_PROBABILITY = 1e-2  # per round; a wrapped coordinate costs accuracy, never privacy
ROUNDING_COST = 1.02  # a mechanism that rounds takes as many bits as keep its error within 2 % of not rounding
_FRACTION_BITS = 8
_FINEST_FRACTION_BITS = 12  # a table of 4,096 laws; more would not stay in the cache
_SHORT = 1 << 10  # coordinates: few enough that the finest table costs no time, and a vector at its clip no bias
_GRID_UNITS = 3  # a coordinate's typical size at the clip, so that rounding to the grid costs under 1 % of it


def parts_of(target: PrivacyTarget, steps: float, multiplier: float, contributors: int) -> tuple[Codec, Mechanism]:
    """Return codec and mechanism with which so many clients' noise is `multiplier` times twice a client's radius.

    `steps` is the clip in lattice steps, for a mechanism that rounds.
    """
    if target.mechanism is MechanismName.CENTERED:
        return _centered(target, multiplier, contributors)
    codec = _codec(target, steps, _FRACTION_BITS)
    return codec, _mechanism(target, codec, multiplier, contributors)


def finest(target: PrivacyTarget, multiplier: float) -> float:
    """Return the fewest steps to the clip for which rounding costs little; 1 where nothing is rounded."""
    if target.mechanism is MechanismName.CENTERED:
        return 1.0
    for exponent in range(16 * 8):
        steps = 2 ** (exponent / 8)
        noise = 2 * multiplier * float(Rounded().radius(_codec(target, steps, _FRACTION_BITS)))
        if math.hypot(noise, math.sqrt(target.cohort_size) / 2) <= ROUNDING_COST * 2 * multiplier * steps:
            return steps
    raise ConfigError(
        f"a vector of {target.dimension} coordinates is too long for the mechanism {target.mechanism}"
    )


def finest_within(ring: Ring, target: PrivacyTarget, multiplier: float, contributors: int) -> float:
    """Return the most steps to the clip for which the target's ring still holds the sum."""
    for exponent in range(16 * 8 - 1, -17, -1):
        codec = _codec(target, 2 ** (exponent / 8), _FRACTION_BITS)
        mechanism = _mechanism(target, codec, multiplier, contributors)
        if variance(mechanism.noise(codec, 1)) > MAX_TABLE_SIGMA**2:
            continue
        if wrap_probability(codec, mechanism, ring, target.cohort_size) <= SAFE_WRAP_PROBABILITY:
            return 2 ** (exponent / 8)
    raise ConfigError(f"{ring.bits} bits are too few for {target.mechanism} with {target.cohort_size} clients")


def _centered(target: PrivacyTarget, multiplier: float, contributors: int) -> tuple[Codec, Mechanism]:
    """Return a lattice on which each client's noise is as narrow as it may be, which takes the fewest bits.

    The grid must be fine beside a vector's coordinates, or rounding to it would swallow them; where its table would
    grow too large, the lattice itself becomes finer.
    """
    least = LEAST_WIDTH if target.unit is Unit.CLIENT else LEAST_SILO_WIDTH
    steps = least * math.sqrt(contributors) / (2 * multiplier)
    length = _rotation(target).padded
    wanted = math.ceil(math.log2(_GRID_UNITS * math.sqrt(length) / steps))
    finer = 1 << max(0, wanted - _FINEST_FRACTION_BITS)
    if least * finer > MOST_WIDTH:
        raise too_wide(target.epsilon, target.against, MAX_TABLE_SIGMA >> _FINEST_FRACTION_BITS, least * finer)
    coarsest = _FINEST_FRACTION_BITS if length <= _SHORT else _FRACTION_BITS
    codec = _codec(target, steps * finer, min(max(wanted, coarsest), _FINEST_FRACTION_BITS))
    return codec, Centered(Fraction(least * finer))


def _rotation(target: PrivacyTarget) -> Hadamard | RandomPhase:
    return (
        Hadamard(target.dimension) if target.rotation is RotationName.HADAMARD else RandomPhase(target.dimension)
    )


def _codec(target: PrivacyTarget, steps: float, fraction_bits: int) -> Codec:
    """Return the codec whose clip is `steps` lattice steps, rounded down to the grid."""
    radius = math.floor(steps * (1 << fraction_bits))
    if radius < 1:
        raise ConfigError(f"epsilon {target.epsilon:g} needs noise so wide that the clip is below the grid")
    clip = target.fixed_clip
    granularity = clip * (1 << fraction_bits) / radius
    codec = Codec(
        rotation=_rotation(target),
        clip=clip,
        granularity=granularity,
        fraction_bits=fraction_bits,
    )
    if codec.grid_radius < radius:  # the quotient's last bit fell the wrong way
        codec = replace(codec, granularity=math.nextafter(granularity, 0))
    return codec


def _mechanism(target: PrivacyTarget, codec: Codec, multiplier: float, contributors: int) -> Mechanism:
    total = 2 * multiplier * float(Rounded().radius(codec))
    each = total if target.mechanism is MechanismName.SHARED else total / math.sqrt(contributors)
    if each > MOST_WIDTH / 2:
        raise too_wide(target.epsilon, target.against, MAX_TABLE_SIGMA, each)
    match target.mechanism:
        case MechanismName.SHARED:
            return Shared(_rounded_up(total))
        case MechanismName.DDGAUSS:
            return DDGauss(_rounded_up(each))
        case MechanismName.SKELLAM:
            return SkellamNoise(_rounded_up(total**2 / contributors))
        case MechanismName.BINOMIAL:
            return BinomialNoise(2 * math.ceil(2 * total**2 / contributors))
        case MechanismName.CENTERED:
            raise ConfigError(f"the mechanism {target.mechanism} does not round")


def _rounded_up(value: float) -> Fraction:
    return Fraction(math.ceil(value * 1024), 1024)


def too_wide(epsilon: float, against: Observer, most: int, width: float) -> ConfigError:
    """Return the refusal of noise that no sampler's table holds."""
    return ConfigError(
        f"one client's noise must be at most {most} lattice steps wide, and epsilon {epsilon:g} against "
        f"`{against}` needs about {width:.4g} with this mechanism, cohort and dimension"
    )
