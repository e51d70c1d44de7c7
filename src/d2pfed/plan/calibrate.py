"""From a wish to a plan: the least noise, on the private side, and the fewest bits that carry it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from d2pfed.accounting import RELEASED, ContinuousGaussian, Noise, Observer, Release, Scheme, Spent, Unit, View
from d2pfed.accounting import spent as certified
from d2pfed.accounting import upper_bound as coarse
from d2pfed.codec import Codec
from d2pfed.errors import ConfigError
from d2pfed.graph import SIGNED_COMPLETE_UP_TO, SIGNED_UP_TO, Consistency, Neighbourhood, Risk, choose, complete
from d2pfed.mechanism import (
    LEAST_WIDTH,
    MOST_WIDTH,
    BinomialNoise,
    Centered,
    DDGauss,
    Designated,
    Mechanism,
    Rounded,
    Shared,
    SkellamNoise,
)
from d2pfed.plan.agreement import Plan
from d2pfed.plan.target import Kind, Target, Turn
from d2pfed.plan.widths import largest_cohort, noise_width, variance, widest, wrap_probability
from d2pfed.ring import MAX_BITS, Ring
from d2pfed.rotation import Hadamard, RandomPhase
from d2pfed.sampler import MAX_TABLE_SIGMA

SAFE_WRAP_PROBABILITY = 1e-2  # per round; a wrapped coordinate costs accuracy, never privacy
ROUNDING_COST = 1.02  # a mechanism that rounds takes as many bits as keep its error within 2 % of not rounding
_FRACTION_BITS = 8
_FINEST_FRACTION_BITS = 12  # a table of 4,096 laws; more would not stay in the cache
_GRID_UNITS = 3  # a coordinate's typical size at the clip, so that rounding to the grid costs under 1 % of it
_PRECISION = 5e-4  # relative, of the noise: the last step of the search
_SMALLEST_MULTIPLIER, _LARGEST_MULTIPLIER = 1e-3, 1e6

_HELD_BY_ONE = (Kind.SHARED, Kind.DESIGNATED)

Account = Callable[..., Spent]


def calibrate(target: Target) -> Plan:
    """Find the least noise that keeps the whole run within the wished epsilon, and the bits that carry it.

    Guarantee: `max_attempts` releases with the noise of a quorum, less the colluders and who may be cut off, spend at
    most epsilon against the wished observer. Checked: test_plan.py::test_a_plan_keeps_its_promise.
    """
    if target.mechanism in _HELD_BY_ONE and target.colluders:
        raise ConfigError(
            f"colluders must be 0 with the mechanism {target.mechanism}, where one client can know all of the noise, "
            f"got {target.colluders:g}; centered withstands them"
        )
    _require_honest_majority(target)
    hood = _neighbourhood(target)
    ideal = ideal_multiplier(target)
    draft = _Draft(target, hood, _finest(target, ideal))
    plan = draft.search(ideal)
    if target.bits is not None and target.mechanism is not Kind.CENTERED:
        multiplier = plan.noise_multiplier * target.adjacency.radii / 2 * (1 + 4 * _PRECISION)
        draft = replace(draft, steps=_finest_within(Ring(target.bits), target, multiplier, draft.contributors))
        plan = draft.search(ideal)
    return draft.with_bits(plan)


def _require_honest_majority(target: Target) -> None:
    """Refuse a wish whose quorums may have nobody honest in common, and say what would do."""
    cohort, quorum, colluders = target.cohort, target.quorum, target.cohort_colluders
    if 2 * quorum > cohort + colluders:
        return
    missing = cohort - (cohort + colluders) // 2 - 1
    hints = [f"at most {missing} dropouts"] if missing >= 0 and cohort >= colluders + 2 else []
    hints += [f"at most {2 * quorum - cohort - 1} colluders in a cohort"] if 2 * quorum > cohort else []
    hints += [f"a cohort of {larger}"] if (larger := _larger_cohort(target)) else []
    raise ConfigError(
        f"2 quorum > cohort + colluders must hold, or two quorums may sign different survivors: {cohort - quorum} "
        f"dropouts and {colluders} colluders of {cohort} leave 2 x {quorum} <= {cohort} + {colluders}; "
        f"what would do: {', or '.join(hints) or 'fewer of both'}"
    )


def _larger_cohort(target: Target) -> int | None:
    """Return a larger cohort, in steps of a quarter, in which the same shares of dropouts and colluders are few enough."""
    most = min(target.population // (target.rounds if target.scheme is Scheme.ONCE else 1), SIGNED_UP_TO)
    size = target.cohort
    while (size := size + max(1, size // 4)) <= most:
        larger = replace(target, cohort=size, spare=0, participations=None)
        if 2 * larger.quorum > size + larger.cohort_colluders:
            return size
    return None


def _neighbourhood(target: Target) -> Neighbourhood:
    """Return who holds whose shares: the least that withstands the wished dropouts and colluders."""
    risk = Risk(dropouts=target.cohort - target.quorum, colluders=target.cohort_colluders)
    # Under `shared` everyone contributes to everyone's seed, which needs a channel between any two. A server that
    # chooses dropouts may cut some clients off a sparse graph, and `designated` cannot do without one of them.
    whole = {Kind.SHARED} if target.consistency is Consistency.ASSUMED else {Kind.SHARED, Kind.DESIGNATED}
    if target.mechanism not in whole:
        return choose(target.cohort, risk, target.consistency)
    if target.consistency is Consistency.SIGNED and target.cohort > SIGNED_COMPLETE_UP_TO:
        raise ConfigError(
            f"the mechanism {target.mechanism} under signed consistency takes cohorts of at most "
            f"{SIGNED_COMPLETE_UP_TO}, got {target.cohort}"
        )
    return complete(target.cohort, risk)


def ideal_multiplier(target: Target) -> float:
    """Return sigma over twice the clip for a continuous Gaussian that the observer does not know.

    No mechanism needs less; what each needs more is its price for having no trusted server.
    """
    if target.against.view is not View.RELEASED:
        # Whoever knows the cohorts sees a client as often as its cap lets it contribute, and nothing is amplified.
        target = replace(
            target, scheme=Scheme.NONE, rounds=target.cap, spare=0, participations=None, against=RELEASED
        )

    def within(multiplier: float) -> bool:
        return _account(coarse, target, ContinuousGaussian(2 * multiplier, 1.0)).epsilon <= target.epsilon

    return _least(within, 1.0, target)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A family of plans that differ in their noise; `steps` is the clip in lattice steps, where rounding needs one."""

    target: Target
    hood: Neighbourhood
    steps: float

    @property
    def contributors(self) -> int:
        """How many clients' noise nobody knows, at a quorum: the others may tell theirs, or be kept out of the sum."""
        return self.target.quorum - self.target.cohort_colluders - self.hood.cut_off

    def search(self, start: float) -> Plan:
        """Return the member with the least noise whose certified epsilon keeps the promise."""

        def within(account: Account, multiplier: float) -> bool:
            noise = self.plan(multiplier).contributed
            return noise is not None and _account(account, self.target, noise).epsilon <= self.target.epsilon

        noise = self.plan(start).contributed
        if noise is not None and (reason := _account(coarse, self.target, noise).reason):
            raise ConfigError(f"no plan with the mechanism {self.target.mechanism} keeps any epsilon: {reason}")
        multiplier = _least(lambda multiplier: within(coarse, multiplier), start, self.target)
        while not within(certified, multiplier):
            multiplier *= 1 + _PRECISION
        return self.plan(multiplier)

    def plan(self, multiplier: float) -> Plan:
        """Return the member whose noise is `multiplier` times twice a client's radius."""
        target = self.target
        contributors = self.contributors
        if target.mechanism is Kind.CENTERED:
            codec, mechanism = _centered(target, multiplier, contributors)
        else:
            codec = _codec(target, self.steps, _FRACTION_BITS)
            mechanism = _mechanism(target, codec, multiplier, contributors)
        return Plan(
            unit=Unit.CLIENT,
            adjacency=target.adjacency,
            sampling=target.sampling,
            rounds=target.rounds,
            attempts_per_round=target.attempts_per_round,
            max_attempts=target.max_attempts,
            participations=target.cap,
            epsilon=target.epsilon,
            delta=target.spent_delta,
            against=target.against,
            consistency=target.consistency,
            colluders=target.cohort_colluders,
            quorum=target.quorum,
            threshold=self.hood.threshold,
            neighbours=self.hood.degree,
            cut_off=self.hood.cut_off,
            codec=codec,
            mechanism=mechanism,
            ring=Ring(MAX_BITS),
        )

    def with_bits(self, plan: Plan) -> Plan:
        """Return the plan with the wished ring, or with the least that is unlikely to wrap."""
        _require_drawable(plan)
        fitting = [
            bits
            for bits in range(1, MAX_BITS + 1)
            if replace(plan, ring=Ring(bits)).wrap_probability <= SAFE_WRAP_PROBABILITY
        ]
        if not fitting:
            raise ConfigError(f"a sum over {plan.cohort} clients needs more than {MAX_BITS} bits a coordinate")
        bits = self.target.bits or fitting[0]
        if bits < fitting[0]:
            raise ConfigError(f"bits must be at least {fitting[0]} for this noise and cohort, got {bits}")
        return replace(plan, ring=Ring(bits))


def _require_drawable(plan: Plan) -> None:
    """Refuse noise that is too wide for a sampler's table."""
    width, most = noise_width(plan.codec, plan.mechanism), widest(plan.codec, plan.mechanism)
    if width > most:
        raise _too_wide(plan.epsilon, plan.against, most, width)


def _too_wide(epsilon: float, against: Observer, most: int, width: float) -> ConfigError:
    return ConfigError(
        f"one client's noise must be at most {most} lattice steps wide, and epsilon {epsilon:g} against "
        f"`{against}` needs {width:.4g} with this mechanism, cohort and dimension"
    )


def _account(account: Account, target: Target, noise: Noise) -> Spent:
    """Return what the whole run costs with this noise in every round."""
    release = Release(
        run="",
        round=0,
        attempt=0,
        unit=Unit.CLIENT,
        adjacency=target.adjacency,
        sampling=target.sampling,
        noise=noise,
        participants=(),
    )
    return account([release] * target.max_attempts, target.against, delta=target.spent_delta, cap=target.cap)


def _least(within: Callable[[float], bool], start: float, target: Target) -> float:
    """Return a multiplier that is within the promise, while one smaller by the precision is not."""
    wish = f"epsilon {target.epsilon:g} at delta {target.spent_delta:g} against `{target.against}`"
    low = high = start
    while within(low):
        low, high = low / 2, low
        if low < _SMALLEST_MULTIPLIER:
            raise ConfigError(
                f"{wish} asks for noise below {_SMALLEST_MULTIPLIER:g} times the sensitivity: for none"
            )
    while not within(high):
        low, high = high, high * 2
        if high > _LARGEST_MULTIPLIER:
            raise ConfigError(f"{wish} asks for noise above {_LARGEST_MULTIPLIER:g} times the sensitivity")
    while high > low * (1 + _PRECISION):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if within(middle) else (middle, high)
    return high


def _centered(target: Target, multiplier: float, contributors: int) -> tuple[Codec, Mechanism]:
    """Return a lattice on which each client's noise is as narrow as it may be, which takes the fewest bits.

    The grid must be fine beside a vector's coordinates, or rounding to it would swallow them; where its table would
    grow too large, the lattice itself becomes finer.
    """
    steps = LEAST_WIDTH * math.sqrt(contributors) / (2 * multiplier)
    length = _rotation(target).padded
    wanted = math.ceil(math.log2(_GRID_UNITS * math.sqrt(length) / steps))
    finer = 1 << max(0, wanted - _FINEST_FRACTION_BITS)
    if LEAST_WIDTH * finer > MOST_WIDTH:
        raise _too_wide(
            target.epsilon, target.against, MAX_TABLE_SIGMA >> _FINEST_FRACTION_BITS, LEAST_WIDTH * finer
        )
    codec = _codec(target, steps * finer, min(max(wanted, _FRACTION_BITS), _FINEST_FRACTION_BITS))
    return codec, Centered(Fraction(LEAST_WIDTH * finer))


def _rotation(target: Target) -> Hadamard | RandomPhase:
    return Hadamard(target.dimension) if target.rotation is Turn.HADAMARD else RandomPhase(target.dimension)


def _codec(target: Target, steps: float, fraction_bits: int) -> Codec:
    """Return the codec whose clip is `steps` lattice steps, rounded down to the grid."""
    radius = math.floor(steps * (1 << fraction_bits))
    if radius < 1:
        raise ConfigError(f"epsilon {target.epsilon:g} needs noise so wide that the clip is below the grid")
    granularity = target.clip_norm * (1 << fraction_bits) / radius
    codec = Codec(
        rotation=_rotation(target),
        clip_norm=target.clip_norm,
        granularity=granularity,
        fraction_bits=fraction_bits,
    )
    if codec.grid_radius < radius:  # the quotient's last bit fell the wrong way
        codec = replace(codec, granularity=math.nextafter(granularity, 0))
    return codec


def _mechanism(target: Target, codec: Codec, multiplier: float, contributors: int) -> Mechanism:
    total = 2 * multiplier * float(Rounded().radius(codec))
    each = total if target.mechanism in _HELD_BY_ONE else total / math.sqrt(contributors)
    if each > MOST_WIDTH / 2:
        raise _too_wide(target.epsilon, target.against, MAX_TABLE_SIGMA, each)
    match target.mechanism:
        case Kind.SHARED:
            return Shared(_rounded_up(total))
        case Kind.DESIGNATED:
            return Designated(_rounded_up(total))
        case Kind.DDGAUSS:
            return DDGauss(_rounded_up(each))
        case Kind.SKELLAM:
            return SkellamNoise(_rounded_up(total**2 / contributors))
        case Kind.BINOMIAL:
            return BinomialNoise(2 * math.ceil(2 * total**2 / contributors))
        case Kind.CENTERED:
            raise ConfigError(f"the mechanism {target.mechanism} does not round")


def _rounded_up(value: float) -> Fraction:
    return Fraction(math.ceil(value * 1024), 1024)


def _finest(target: Target, multiplier: float) -> float:
    """Return the fewest steps to the clip for which rounding costs little; 1 where nothing is rounded."""
    if target.mechanism is Kind.CENTERED:
        return 1.0
    for exponent in range(16 * 8):
        steps = 2 ** (exponent / 8)
        noise = 2 * multiplier * float(Rounded().radius(_codec(target, steps, _FRACTION_BITS)))
        if math.hypot(noise, math.sqrt(target.cohort) / 2) <= ROUNDING_COST * 2 * multiplier * steps:
            return steps
    raise ConfigError(
        f"a vector of {target.dimension} coordinates is too long for the mechanism {target.mechanism}"
    )


def _finest_within(ring: Ring, target: Target, multiplier: float, contributors: int) -> float:
    """Return the most steps to the clip for which the wished ring still holds the sum."""
    for exponent in range(16 * 8 - 1, -17, -1):
        codec = _codec(target, 2 ** (exponent / 8), _FRACTION_BITS)
        mechanism = _mechanism(target, codec, multiplier, contributors)
        if variance(mechanism.noise(codec, 1)) > MAX_TABLE_SIGMA**2:
            continue
        if wrap_probability(codec, mechanism, ring, largest_cohort(target.sampling)) <= SAFE_WRAP_PROBABILITY:
            return 2 ** (exponent / 8)
    raise ConfigError(f"{ring.bits} bits are too few for {target.mechanism} with {target.cohort} clients")
