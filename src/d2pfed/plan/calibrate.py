"""From a privacy target to a plan: the least noise, on the private side, and the fewest bits that carry it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache, partial

from d2pfed.accounting import (
    RELEASED,
    ContinuousGaussian,
    Guarantee,
    Noise,
    Release,
    Sampling,
    Unit,
    View,
    upper_bound,
)
from d2pfed.errors import ConfigError
from d2pfed.fields import check_arguments, check_range
from d2pfed.noise.clipping import AdaptiveClip, Weighting
from d2pfed.noise.mechanisms import Centered, DDGauss, MechanismName, Protocol
from d2pfed.numerics.ring import MAX_BITS, Ring
from d2pfed.numerics.rotation import Fold
from d2pfed.plan import widths
from d2pfed.plan.bounds import MOST_ROUNDS, MOST_SIGNED, cohorts_to_choose, colluding_clients
from d2pfed.plan.plan import Plan, run_guarantee
from d2pfed.plan.target import PrivacyTarget, ProtocolChoice, RotationName
from d2pfed.secagg.lattice import parameters as lattice
from d2pfed.secagg.pairwise.session import MOST_COHORT as MOST_PAIRS
from d2pfed.secagg.pairwise.session import least_threshold
from d2pfed.secagg.trust import Consistency

PRECISION = 5e-4  # relative, of the noise: how far above the least the answer may be
SMALLEST_MULTIPLIER, LARGEST_MULTIPLIER = 1e-3, 1e6


def calibrate(target: PrivacyTarget, max_weight: float | None = None, *, count_failures: bool = False) -> Plan:
    """Find the least noise that keeps the whole run within the target's epsilon, and the bits that carry it.

    Guarantee: `max_attempts` releases with the noise of a quorum, less the colluders, spend at most epsilon against
    the target's observer. Checked: test_plan.py::test_a_plan_keeps_its_guarantee.

    Args:
        target: the privacy target, with dimension, population, cohort size and rounds.
        max_weight: the mean is weighted by private weights of at most this; None: all clients weigh alike.
        count_failures: clients whose training fails say so, in one more coordinate; of records, each record.

    Raises:
        ConfigError: if no noise and no number of bits meets the target.

    Examples:
        >>> target = PrivacyTarget(dimension=1000, population=10_000, cohort_size=500, rounds=10, epsilon=2.0)
        >>> plan = calibrate(target)
        >>> plan.quorum, plan.max_attempts
        (500, 11)
    """
    check_arguments(calibrate, locals())
    if target.missing:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in target.missing)
        raise ConfigError(
            f"a plan needs {', '.join(target.missing)}: state what is missing ({flags} on the command line); `fit` "
            "fills in what it can count"
        )
    if target.mechanism is MechanismName.SHARED and target.colluders:
        raise ConfigError(
            f"colluders must be 0 with the mechanism {target.mechanism}, whose noise every client knows, "
            f"got {target.colluders:g}; centered withstands them"
        )
    if max_weight is not None:
        if target.initial_clip is not None or target.unit is not Unit.CLIENT:
            raise ConfigError(f"weights take a fixed clip and the unit client, got {target.clip}, {target.unit}")
        weighting = Weighting.balanced(max_weight, target.fixed_clip, target.dimension)
        return _widened(target, weighting, count_failures=count_failures)
    if target.initial_clip is not None:
        # The guarantee is that of a fixed clip, the radius that bounds update and bit: docs/theory.md, section 16.
        adaptive = AdaptiveClip.beside(2 * ideal_multiplier(target) / target.cohort_size, target.initial_clip)
        return _widened(target, adaptive, count_failures=count_failures)
    if count_failures:
        return _widened(target, None, count_failures=True)
    ideal = ideal_multiplier(target)
    target = widths.compressed(target, ideal)
    protocol = protocol_of(target)
    draft = _Draft(target, protocol, widths.finest(target, ideal))
    multiplier = draft.search(ideal)
    if target.bits is not None and target.mechanism is not MechanismName.CENTERED:
        noise = draft.noise(multiplier)  # a little wider, as widths are rounded up
        reserve = math.sqrt(noise.sum_variance) / (2 * float(noise.radius)) * (1 + 4 * PRECISION)
        draft = replace(draft, steps=widths.finest_within(Ring(target.bits), target, reserve, draft.contributors))
        multiplier = draft.search(ideal)
    return draft.plan(multiplier)


def _widened(target: PrivacyTarget, part: AdaptiveClip | Weighting | None, *, count_failures: bool) -> Plan:
    """Return the plan of vectors with one or two more coordinates, and the radius that bounds all of them."""
    extra = (part is not None) + count_failures
    # Where they would double a Hadamard transform, the phase rotation takes its place; a fold keeps them apart.
    is_full = (target.dimension + extra - 1).bit_length() > (target.dimension - 1).bit_length()
    rotation = RotationName.PHASE if is_full else target.rotation
    radius = target.fixed_clip if part is None else part.radius if isinstance(part, AdaptiveClip) else 1.0
    # Weights and failures all have one sign, so that the mean of vectors that have them is long.
    mean = target.longest_mean if isinstance(part, AdaptiveClip) and not count_failures else 1.0
    wider = replace(target, dimension=target.dimension + extra, clip=radius, rotation=rotation, longest_mean=mean)
    plan = calibrate(wider)
    codec = plan.codec
    if isinstance(codec.rotation, Fold):
        codec = replace(codec, rotation=replace(codec.rotation, kept=extra))
    return replace(
        plan,
        codec=codec,
        adaptive_clip=part if isinstance(part, AdaptiveClip) else None,
        weighting=part if isinstance(part, Weighting) else None,
        counts_failures=count_failures,
    )


@lru_cache(maxsize=64)  # a summary asks for what the calibration began with
def ideal_multiplier(target: PrivacyTarget) -> float:
    """Return sigma over twice the clip for a continuous Gaussian that the observer does not know.

    No mechanism needs less; the excess of each is the cost of having no trusted server.
    """
    seen = target
    if target.unit is Unit.RECORD:
        seen = replace(target, against=RELEASED)  # coins are secret to all, so it sees what the others see
    elif target.against.view is not View.RELEASED:
        # Whoever knows the cohorts sees a client as often as its cap lets it contribute, and nothing is amplified.
        rounds = min(target.effective_max_participations, MOST_ROUNDS)
        seen = replace(
            target,
            sampling=Sampling.NONE,
            rounds=rounds,
            spare=target.effective_max_participations - rounds,
            max_participations=None,
            against=RELEASED,
        )
    return _least_multiplier(target, lambda at: _account(seen, ContinuousGaussian(2 * at, 1.0)).epsilon, 1.0)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A family of plans that differ in their noise; `steps` is the clip in lattice steps, where rounding needs one."""

    target: PrivacyTarget
    protocol: Protocol | None
    steps: float

    @property
    def contributors(self) -> int:
        """How many clients' noise nobody knows, at a quorum: the others may tell theirs."""
        return self.target.quorum - self.target.cohort_colluders

    def noise(self, multiplier: float) -> Noise:
        """Return the noise that the guarantee rests on, as `Plan.contributed` has it."""
        codec, mechanism = widths.parts_of(self.target, self.steps, multiplier, self.contributors)
        return mechanism.noise(codec, self.contributors)

    def search(self, start: float) -> float:
        """Return the least multiplier whose certified epsilon is within the target."""
        target = self.target

        @cache
        def spent(multiplier: float, *, exact: bool = False) -> Guarantee:
            return _account(target, self.noise(multiplier), exact=exact)

        if reason := spent(start).reason:
            raise ConfigError(f"no plan with the mechanism {target.mechanism} keeps any epsilon: {reason}")
        multiplier = _least_multiplier(target, lambda at: spent(at).epsilon, start)
        step = PRECISION  # doubled each time: where the exact epsilon is above the bound, it may be far above
        while spent(multiplier, exact=True).epsilon > target.epsilon:
            multiplier, step = multiplier * (1 + step), 2 * step
        return multiplier

    def plan(self, multiplier: float) -> Plan:
        """Return the member with this noise, in the target's ring or the least that holds its sums."""
        target, cohort = self.target, self.target.cohort_size
        codec, mechanism = widths.parts_of(target, self.steps, multiplier, self.contributors)
        width, most = widths.noise_width(codec, mechanism)
        if width > most:
            raise widths.too_wide(target, most, width)
        most = lattice.MOST_BITS if self.protocol is Protocol.LATTICE else MAX_BITS
        bits = next((n for n in range(1, most + 1) if widths.holds(target, codec, mechanism, Ring(n))), None)
        if bits is None:
            raise ConfigError(f"a sum over {cohort} clients needs more than {most} bits per coordinate")
        if target.bits is not None and target.bits < bits:
            raise ConfigError(f"bits must be at least {bits} for this noise and cohort, got {target.bits}")
        ring = Ring(target.bits or bits)
        plan = partial(
            Plan,
            unit=target.unit,
            adjacency=target.adjacency,
            sampling=target.cohort_sampling,
            rounds=target.rounds,
            attempts_per_round=target.attempts_per_round,
            max_attempts=target.max_attempts,
            max_participations=target.effective_max_participations,
            epsilon=target.epsilon,
            delta=target.effective_delta,
            against=target.against,
            consistency=target.consistency,
            colluders=target.cohort_colluders,
            quorum=target.quorum,
            codec=codec,
            mechanism=mechanism,
            ring=ring,
            longest_mean=target.longest_mean,
            batches=target.batches,
            records=target.records,
            download_bits=target.download_bits,
        )
        if self.protocol is Protocol.LATTICE and isinstance(mechanism, Centered | DDGauss):
            secret = lattice.secret_length(ring.bits, mechanism.sigma)
            committee = committee_of(target, secret)
            return plan(threshold=committee.openers, committee=committee, secret=secret)
        is_standing = self.protocol is Protocol.STANDING and target.unit is Unit.CLIENT
        threshold = least_threshold(cohort, target.cohort_colluders)
        return plan(threshold=threshold, has_standing_keys=is_standing)


def _account(target: PrivacyTarget, noise: Noise, *, exact: bool = False) -> Guarantee:
    """Return what the whole run costs with this noise in every round, or a bound on a coarser grid, and faster."""
    release = Release(
        run="",
        round=0,
        attempt=0,
        unit=target.unit,
        adjacency=target.adjacency,
        sampling=target.cohort_sampling,
        noise=noise,
        participants=(),
        batches=target.batches,
    )
    against, delta, cap = target.against, target.effective_delta, target.effective_max_participations
    if exact:
        return run_guarantee(release, target.max_attempts, against, delta, cap)
    return upper_bound([release] * target.max_attempts, against, delta=delta, max_participations=cap)


def _least_multiplier(target: PrivacyTarget, epsilon_at: Callable[[float], float], start: float) -> float:
    """Return a multiplier that keeps the target's epsilon, while one smaller by the precision does not."""
    epsilon = target.epsilon
    wanted = f"epsilon {epsilon:g} at delta {target.effective_delta:g} against `{target.against}`"
    low = high = start
    below = above = epsilon_at(start)  # epsilon at either end: that of `low` is larger
    while below <= epsilon:
        low, high, above = low / 2, low, below
        if low < SMALLEST_MULTIPLIER:
            raise ConfigError(f"{wanted} asks for noise below {SMALLEST_MULTIPLIER:g} times the sensitivity: none")
        below = epsilon_at(low)
    while above > epsilon:
        low, high, below = high, high * 2, above
        if high > LARGEST_MULTIPLIER:
            raise ConfigError(f"{wanted} asks for noise above {LARGEST_MULTIPLIER:g} times the sensitivity")
        above = epsilon_at(high)
    probes = 0
    while high > low * (1 + PRECISION):
        # Just above and below a guess by a line through the ends in logarithms, and every third time in the middle.
        middle = math.sqrt(low * high)
        if probes % 3 != 2 and math.isfinite(below) and above > 0:
            share = math.log(below / epsilon) / math.log(below / above)
            aside, inside = 1 + PRECISION / 3, math.sqrt(1 + PRECISION)
            guess = low * (high / low) ** share * (aside if probes % 3 == 0 else 1 / aside)
            middle = min(max(guess, low * inside), high / inside)
        value = epsilon_at(middle)
        if value <= epsilon:
            high, above = middle, value
        else:
            low, below = middle, value
        probes += 1
    return high


def protocol_of(target: PrivacyTarget) -> Protocol | None:
    """Return the protocol that a target's plan runs: the one asked for, or the one with the least upload.

    Silos of records have standing keys. Cohorts of 64 and more speak once, as that takes fewer bytes from there on
    (test_plan_protocol.py). Under the paper's promise, to who sees the models, a server is believed and pair masks
    serve as long as they can. None: no protocol carries so large a cohort with this noise; it can be simulated only.
    """
    cohort, mechanism = target.cohort_size, target.mechanism
    if target.protocol is not ProtocolChoice.AUTO:
        chosen = Protocol(target.protocol.value)
        _require(target, chosen)
        return chosen
    if target.unit is Unit.RECORD:
        _require(target, Protocol.STANDING)
        return Protocol.STANDING
    is_signed = target.consistency is Consistency.SIGNED
    is_deployed = is_signed or target.against != RELEASED
    if cohort > MOST_PAIRS or (is_deployed and cohort >= lattice.LEAST_COHORT):
        try:
            _require(target, Protocol.LATTICE)
        except ConfigError:
            if is_signed and cohort > MOST_PAIRS:
                raise
        else:
            return Protocol.LATTICE
    _require(target, Protocol.PAIRWISE)
    return Protocol.PAIRWISE if cohort <= MOST_PAIRS and Protocol.PAIRWISE in mechanism.runs_in else None


def _require(target: PrivacyTarget, protocol: Protocol) -> None:
    """Refuse a protocol that cannot carry a target, and state the rule; pair masks of any number can be simulated."""
    cohort, asked = target.cohort_size, target.protocol is not ProtocolChoice.AUTO
    if protocol not in target.mechanism.runs_in and (asked or protocol is Protocol.LATTICE):
        raise ConfigError(f"the {protocol} protocol does not carry the mechanism {target.mechanism}")
    if protocol is Protocol.LATTICE:
        if target.unit is Unit.RECORD:
            raise ConfigError("the lattice protocol takes the unit client, got record")
        check_range("bits", target.bits or 1, 1, lattice.MOST_BITS)
        if target.bits is not None and target.mechanism is not MechanismName.CENTERED and not asked:
            raise ConfigError(
                "given bits may make rounded noise too narrow for the lattice protocol: name it, or no bits"
            )
        sent = target.compression if isinstance(target.compression, int) else target.dimension
        check_range("dimension", sent, 1, lattice.MOST_DIMENSION)
        check_range("quorum", target.quorum, target.cohort_colluders + 2, cohort)
        committee_of(target, lattice.LEAST_SECRET)
        return
    _require_honest_majority(target)
    if protocol is Protocol.STANDING:
        if target.sampling is not Sampling.NONE or cohort != target.population:
            raise ConfigError(
                f"standing keys are for all silos in every round, got sampling {target.sampling} and {cohort} of "
                f"{target.population}"
            )
        return
    if target.quorum - target.cohort_colluders < 2 and target.mechanism is not MechanismName.SHARED:
        raise ConfigError(
            f"dropouts and colluders must leave 2 of {cohort} clients, got {cohort - target.quorum} and "
            f"{target.cohort_colluders}"
        )
    if (asked or target.consistency is Consistency.SIGNED) and cohort > MOST_PAIRS:
        raise ConfigError(f"pair masks take cohorts of at most {MOST_PAIRS}, got {cohort}")


def committee_of(target: PrivacyTarget, secret: int) -> lattice.Committee:
    """Return the least committee for a target's dropouts and colluders, over all draws."""
    sampling, cohort = target.cohort_sampling, target.cohort_size
    return lattice.choose_committee(
        cohort,
        Fraction(cohort - target.quorum, cohort),
        secret,
        population=sampling.population,
        colluding=colluding_clients(target.colluders, sampling.population),
        draws=cohorts_to_choose(sampling, target.draws),
    )


def _require_honest_majority(target: PrivacyTarget) -> None:
    """Refuse a target whose quorums may have nobody honest in common, and state what would do."""
    cohort, quorum, colluders = target.cohort_size, target.quorum, target.cohort_colluders
    if 2 * quorum > cohort + colluders:
        return
    missing = cohort - (cohort + colluders) // 2 - 1
    hints = [f"at most {missing} dropouts"] if missing >= 0 and cohort >= colluders + 2 else []
    hints += [f"at most {2 * quorum - cohort - 1} colluders in a cohort"] if 2 * quorum > cohort else []
    # A larger cohort, in steps of a quarter, that has few enough dropouts and colluders at the same shares.
    most = min(target.population // (target.rounds if target.sampling is Sampling.ONCE else 1), MOST_SIGNED)
    size = cohort
    while (size := size + max(1, size // 4)) <= most:
        larger = replace(target, cohort_size=size, spare=0, max_participations=None)
        if 2 * larger.quorum > size + larger.cohort_colluders:
            hints.append(f"a cohort of {size}")
            break
    raise ConfigError(
        f"2 quorum > cohort + colluders must hold, or two quorums may sign different survivors: {cohort - quorum} "
        f"dropouts and {colluders} colluders of {cohort} leave 2 x {quorum} <= {cohort} + {colluders}; "
        f"what would do: {', or '.join(hints) or 'fewer of both'}"
    )
