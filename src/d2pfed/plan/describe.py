"""What a plan requires and why, in numbers and in sentences."""

import math
from dataclasses import dataclass, replace

from d2pfed.accounting import Adjacency, Guarantee, Observer, Sampling, Unit, round_up
from d2pfed.fields import check_arguments
from d2pfed.noise.mechanisms import Centered, MechanismName, Protocol
from d2pfed.numerics.rotation import Fold
from d2pfed.plan.bounds import colluding_clients
from d2pfed.plan.calibrate import ideal_multiplier
from d2pfed.plan.plan import Plan, guarantees
from d2pfed.plan.target import AUTO, OFF, PrivacyTarget
from d2pfed.plan.traffic import PlanTraffic, traffic_of
from d2pfed.plan.widths import MOST_TERMS, SAFE_WRAP_ENERGY, SAFE_WRAP_PROBABILITY, USUAL_MEAN
from d2pfed.secagg.lattice.parameters import SECURITY_BITS
from d2pfed.secagg.roster import POSITION_BYTES
from d2pfed.secagg.trust import Consistency

# The most that updates add up to over all rounds, over the noise's norm: below 1 the accuracy of a run is hardly above
# chance, below 3 well under that of training in the clear (docs/training.md#what-to-expect).
HOPELESS, WEAK = 1.0, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """Summary of a plan: noise, bits, error, a guarantee for each observer, reasons and warnings.

    Attributes:
        noise_multiplier: sigma over the sensitivity of the stated adjacency.
        sigma: standard deviation of the noise on a sum, in the units of the update.
        bits: bits per coordinate.
        modulus: what coordinates are added modulo.
        upload_bytes: one client's masked vector in one round.
        compression: how many coordinates a client's vector is folded to; None: it is not compressed.
        wrap_probability: bound on the chance that some coordinate of a round's sum leaves the ring's range, while the
            mean is at most as long as the plan takes it to be.
        wrap_energy: bound on the energy of what wraps then, over the noise's.
        relative_error: root mean square error of the mean, over that of an ideal trusted server.
        noise_to_clip: the norm of the noise in a mean, over the clip.
        signal_to_noise: the most that updates add up to over all rounds, over the norm of the noise.
        max_attempts: how many attempts may be charged.
        colluders: how many of a cohort may collude with the server.
        threshold: as in `Plan`.
        protocol: as in `Plan`.
        traffic: what a client sends and receives in an attempt; None if no protocol carries the plan.
        security_bits: of learning with errors, in the lattice protocol.
        against: the observer that the target's epsilon is about, with the colluders that it was planned for.
        guarantees: one epsilon per observer.
        why_noise: why so much noise.
        why_signal: how far updates add up over it.
        why_bits: why this number of bits.
        why_compression: what was chosen, why, and what it costs.
        why_bytes: what an ordinary client sends and receives in all.
        why_protocol: how vectors are added up, and what that rests on.
        why_colluders: why this number of colluders is planned for.
        warnings: what to know before such a run, and what would help.

    Examples:
        >>> target = PrivacyTarget(dimension=1000, population=10_000, cohort_size=500, rounds=10, epsilon=2.0)
        >>> plan = calibrate(target)
        >>> summary = describe(target, plan)
        >>> summary.noise_to_clip < 2 and not summary.warnings
        True
    """

    noise_multiplier: float
    sigma: float
    bits: int
    modulus: int
    upload_bytes: int
    compression: int | None
    wrap_probability: float
    wrap_energy: float
    relative_error: float
    noise_to_clip: float
    signal_to_noise: float
    max_attempts: int
    colluders: int
    threshold: int
    protocol: Protocol | None
    traffic: PlanTraffic | None
    security_bits: int | None
    against: Observer
    guarantees: tuple[Guarantee, ...]
    why_noise: str
    why_signal: str
    why_bits: str
    why_compression: str
    why_bytes: str
    why_protocol: str
    why_colluders: str
    warnings: tuple[str, ...]


def describe(target: PrivacyTarget, plan: Plan) -> PlanSummary:
    """Return what a plan requires and why.

    Args:
        target: the privacy target that was calibrated.
        plan: what `calibrate` made of it.

    Examples:
        >>> target = PrivacyTarget(dimension=1000, population=10_000, cohort_size=500, rounds=10, epsilon=2.0)
        >>> plan = calibrate(target)
        >>> [str(each.observer) for each in describe(target, plan).guarantees]
        ['released', 'server', 'client', 'alone']
    """
    check_arguments(describe, locals())
    # 1 where the clip adapts or clients are weighted, as all is in units of it.
    clip = 1.0 if isinstance(target.clip, str) or plan.weighting is not None else target.clip
    # The root mean square error per coordinate of the mean over a full cohort, rounding included.
    rounding = 0.0 if isinstance(plan.mechanism, Centered) else plan.cohort_size / 4
    noise = plan.noise(plan.cohort_size).sum_variance
    error = math.sqrt(noise + rounding) * plan.codec.granularity / plan.divisor
    spread = error * math.sqrt(plan.dimension)
    ideal = 2 * ideal_multiplier(target) * clip / plan.divisor
    signal = math.sqrt(plan.rounds) * clip / spread
    why_signal = (
        f"Over {plan.rounds} round{'s' * (plan.rounds != 1)}, updates that all agree add up to {signal:.2g} times the "
        f"length of the noise."
    )
    rare, length = round_up(plan.wrap_probability, 2), plan.codec.length
    chance = f"a chance of {rare} that any of {length} coordinates wraps in a round"
    held = f"the signal, with {chance} (at most {SAFE_WRAP_PROBABILITY:g} is allowed)"
    if plan.longest_mean < 1:
        agreeing = round_up(replace(plan, longest_mean=1.0).wrap_energy, 2)
        held = (
            f"a mean of {plan.longest_mean:g} clips: what wraps has at most {round_up(plan.wrap_energy, 2)} of the "
            f"noise's energy ({SAFE_WRAP_ENERGY:g} is allowed; {agreeing} if all updates agree), with {chance}"
        )
    why_bits = (
        f"The sum's noise is {math.sqrt(noise):.4g} lattice steps wide; {plan.ring.bits} bits hold it and {held}."
    )
    missing, more, adaptive = plan.cohort_size - plan.quorum, plan.max_attempts - plan.rounds, plan.adaptive_clip
    reserve = f", even if {missing} of them are missing" if missing else ""
    reserve += f", and {plan.colluders} of them reveal their noise" if plan.colluders else ""
    spare = f" and {more} spare attempt{'s' * (more > 1)}" if more else ""
    why_noise = (
        f"To keep epsilon {round_up(target.epsilon, 6)} against `{plan.against}` over {plan.rounds} rounds{spare}, "
        f"the sum of {plan.cohort_size} {'clients' if plan.unit is Unit.CLIENT else 'silos'} needs noise of "
        f"{plan.sigma / clip:.4g} times the clip{reserve}."
    )
    if adaptive is not None:
        why_noise += (
            f" The clip starts at {adaptive.initial:g} and moves until {100 * adaptive.quantile:g} % of the updates "
            "are within it; the bit that each client adds for this takes "
            f"{100 * (adaptive.radius - 1):.2g} % more noise."
        )
    warnings, everyone = [], plan.records or plan.sampling.population
    if signal < WEAK:
        expected = "little can be learned" if signal < HOPELESS else "expect much less than in the clear"
        helpful = math.ceil(plan.divisor * WEAK / signal)
        larger = f"cohorts of about {helpful}" if plan.records is None else f"batches of about {helpful} records"
        warnings.append(
            f"{why_signal[:-1]}, so {expected}: {larger} would bring it to "
            f"{WEAK:g}; a smaller model or a greater epsilon helps too."
        )
    if plan.delta >= 1 / everyone:
        kind = "population" if plan.records is None else "records"
        warnings.append(
            f"Delta {round_up(plan.delta, 6)} is not below 1 / {kind} = {1 / everyone:g}: "
            f"publishing a random {plan.unit}'s data whole would satisfy it."
        )
    traffic = traffic_of(plan)
    return PlanSummary(
        noise_multiplier=plan.noise_multiplier,
        sigma=plan.sigma,
        bits=plan.ring.bits,
        modulus=plan.ring.modulus,
        upload_bytes=plan.ring.packed_bytes(plan.codec.length),
        compression=plan.codec.length if isinstance(plan.codec.rotation, Fold) else None,
        wrap_probability=plan.wrap_probability,
        wrap_energy=plan.wrap_energy,
        relative_error=error / ideal,
        noise_to_clip=spread / clip,
        signal_to_noise=signal,
        max_attempts=plan.max_attempts,
        colluders=plan.colluders,
        threshold=plan.threshold,
        protocol=plan.protocol,
        traffic=traffic,
        security_bits=None if plan.committee is None else SECURITY_BITS,
        against=plan.planned_against,
        guarantees=guarantees(plan),
        why_noise=why_noise,
        why_signal=why_signal,
        why_bits=why_bits,
        why_compression=_why_compression(target, plan, error / clip),
        why_bytes=_why_bytes(plan, traffic),
        why_protocol=_why_protocol(plan),
        why_colluders=_why_colluders(target, plan),
        warnings=tuple(warnings),
    )


def describe_plan(plan: Plan) -> PlanSummary:
    """Return the same of a plan alone: the share of colluders that it was made for is not in it."""
    implied = PrivacyTarget(
        dimension=plan.dimension,
        population=plan.sampling.population,
        cohort_size=plan.cohort_size,
        rounds=plan.rounds,
        epsilon=plan.epsilon,
        delta=plan.delta,
        against=plan.against,
        mechanism=MechanismName.of(plan.mechanism),
        sampling=plan.sampling.method,
        adjacency=plan.adjacency,
        consistency=plan.consistency,
        max_participations=None if plan.unit is Unit.RECORD else plan.max_participations,
        attempts_per_round=plan.attempts_per_round,
        spare=plan.max_attempts - plan.rounds,
        unit=plan.unit,
        records=plan.records,
        batch_rate=None if plan.batches is None else float(plan.batches.rate),
        max_silos=1 if plan.batches is None else plan.batches.max_silos,
        clip=plan.update_clip if plan.adaptive_clip is None else f"auto({plan.adaptive_clip.initial})",
        compression=plan.codec.length if isinstance(plan.codec.rotation, Fold) else OFF,
        longest_mean=plan.longest_mean,
    )
    return replace(
        describe(implied, plan),
        why_colluders=f"At most {plan.colluders} clients of a cohort are taken to collude.",
    )


def _why_compression(target: PrivacyTarget, plan: Plan, error: float) -> str:
    """Return what a fold costs, for an error per coordinate of the mean over the clip; or why there is none."""
    length, rule = (
        plan.codec.length,
        f"1,024, parameters / {MOST_TERMS} and 1 / (2 s^2) = {1 / (2 * error**2):,.0f}",
    )
    spread = f"s = {error:.3g} clips, the noise in a coordinate of the mean"
    fold = plan.codec.rotation
    if isinstance(fold, Fold):
        rho = float(USUAL_MEAN) / ((length - fold.kept) * error**2)
        chosen = f", the least power of two at or above {rule} ({spread})" if target.compression == AUTO else ""
        cost = round_up(100 * (math.sqrt(1 + rho) - 1), 2)
        return (
            f"Vectors of {plan.dimension:,} parameters are folded to {length:,} coordinates{chosen}. While the square "
            f"of the mean is below {USUAL_MEAN} of the clip's, that costs at most what {cost} % more noise would; "
            "few rounds, little noise and updates that agree make it cost more."
        )
    if target.compression == AUTO:
        return (
            f"Vectors are not compressed: the least power of two at or above {rule} ({spread}) is more than half of "
            f"{plan.dimension:,} parameters."
        )
    return "Vectors are not compressed, as was asked for."


def _why_bytes(plan: Plan, traffic: PlanTraffic | None) -> str:
    """Return what an ordinary client sends and receives in all, per attempt and per run, beside floats in the clear."""
    vector, floats = plan.ring.packed_bytes(plan.codec.length), 4 * plan.dimension
    if traffic is None:
        return f"A client's vector has {vector:,} bytes; as 32-bit floats it would have {floats:,}."
    most, client = plan.max_participations, traffic.client
    clients = "client" if plan.unit is Unit.CLIENT else "silo"
    once, roster = traffic.joining, f" and {traffic.roster:,} of the roster" if traffic.roster else ""
    met = ""
    if plan.protocol is Protocol.PAIRWISE and plan.consistency is Consistency.SIGNED:  # claims about positions
        met = f" Each client of the cohort that it has met before adds {POSITION_BYTES} bytes each way."
    return (
        f"An ordinary {clients} sends {client.sent:,} bytes in an attempt, of which {vector:,} are its vector, and "
        f"receives {client.received:,}, the model among them. Over the run, in at most {most:,} "
        f"attempt{'s' * (most != 1)}, it sends {most * client.sent + once.sent:,} bytes and receives "
        f"{most * client.received + once.received:,}, with the run's announcement{roster}. Federated averaging in "
        f"32-bit floats would take {most * floats:,} bytes each way.{met}"
    )


def _why_protocol(plan: Plan) -> str:
    committee = plan.committee
    if committee is not None:
        spare, size = committee.size - committee.openers, committee.size
        drawn = " (chance 2^-40), fixed before the draw" if plan.sampling.method is not Sampling.NONE else ""
        return (
            f"A committee of {size} clients holds shares of each client's secret of {plan.secret} numbers; "
            f"{committee.openers} of them open a sum that {committee.certificate} have signed. At most "
            f"{committee.colluders} of the {size} members collude{drawn}; learning with errors with {plan.secret} "
            f"numbers, {plan.ring.bits} bits and noise of {float(plan.least_width):.4g} steps is hard (at least "
            f"{SECURITY_BITS} bits, core-SVP); boxes are not post-quantum; {spare + 1} members that refuse, or "
            f"{spare // 2 + 1} that lie, can stop an attempt; members' keys are stored until the first request after "
            "the attempt expires; "
            '"later" positions are by count, which invitations raise.'
        )
    if plan.protocol is None:
        return (
            f"No protocol carries the mechanism {MechanismName.of(plan.mechanism)} in cohorts of "
            f"{plan.cohort_size:,}: the plan runs in simulations of the sum only (fidelity sum)."
        )
    if plan.protocol is Protocol.STANDING:
        return "Silos agree on keys once and keep them for the run; no secret is ever opened, so all must answer."
    text = f"Each client shares its secrets with everyone else; {plan.threshold} shares open one."
    if plan.consistency is Consistency.ASSUMED:
        return f"{text} Consistency is assumed: this holds for a server that does not choose who drops out."
    return f"{text} This holds for any {plan.colluders} colluders, whenever they are chosen."


def _why_colluders(target: PrivacyTarget, plan: Plan) -> str:
    colluding = colluding_clients(target.colluders, target.population)
    if colluding == 0:
        return "No client is assumed to collude with the server."
    among = f"if at most {colluding} of {target.population} clients collude"
    if plan.cohort_size == target.population:
        return f"Everyone is in the cohort: {plan.colluders} colluders, {among}."
    if target.draws == 0 or target.sampling is Sampling.NONE:
        return f"Cohorts not verified: the server may put {plan.colluders} colluders into one, {among}."
    simulated = plan.consistency is Consistency.ASSUMED
    text = (
        f"Cohorts {'assumed to be ' * simulated}verified: {target.draws} draws, at most {plan.colluders} colluders "
        f"in each except with chance 2^-40, {among}"
    )
    if simulated:
        return f"{text}; a simulation verifies no draw."
    return f"{text}, the authority drew its nonce after the server's commitment, and issues few rosters."


def record_terms(plan: Plan) -> tuple[str, ...]:
    """Return what a plan with the unit record promises, to whom, and on which terms; nothing for other plans."""
    if plan.unit is not Unit.RECORD or plan.batches is None:
        return ()
    compared = {
        Adjacency.ADD_REMOVE: "as without it",
        Adjacency.ZERO_OUT: "as with zeros in its place",
        Adjacency.REPLACE_ONE: "as with any other in its place",
    }
    honest, silos = plan.quorum - plan.colluders, plan.batches.max_silos
    person = (
        "A person with records in several silos, or with several records in one silo that are not grouped, has a "
        "larger epsilon than is printed: set max_silos and groups where that can be."
    )
    if silos > 1:
        person = (
            f"The epsilons hold for a person with one record (or group) in each of up to {silos} silos, for all of "
            "them together, if none of these silos is the observer or colludes: a silo sees its own records."
        )
    return (
        (
            f"Whatever an observer concludes about a record is at most e^epsilon times as likely, plus delta, "
            f"with the record {compared[plan.adjacency]} ({plan.adjacency}), and the other way round. A record "
            "is one row of a silo's data, or all rows of one owner there where groups are given."
        ),
        person,
        (
            f"In each of at most {plan.max_attempts:,} attempts every silo draws each record with probability "
            f"{float(plan.batches.rate):.4g} by a secret coin, clips its gradient to {plan.codec.clip:g}, and adds its "
            f"share of the noise; sums are divided by {plan.divisor:.6g}, whatever was drawn. Every vector that was "
            "sent is charged."
        ),
        (
            f"At least {honest} honest silos add their noise to every sum that is opened: {plan.quorum} of "
            f"{plan.cohort_size} must answer, and {plan.colluders} may tell the server all they know. The coins are "
            "secret, so all observers see amplified sums."
        ),
        (
            "It rests on this: coins and noise of honest silos are secret and fresh in every attempt; a record's "
            "gradient depends on that record and the model alone; whether a silo answers does not depend on its "
            "records or coins; secure aggregation shows the sum only. A silo itself, and who runs it, sees its own "
            "records; the silo as a whole is not hidden. How long a silo computes is not covered."
        ),
    )
