"""What the protocol of an attempt is bound to."""

from dataclasses import dataclass

from d2pfed.errors import ConfigError, PeerError
from d2pfed.noise.mechanisms import Shared
from d2pfed.numerics.randomness import digest
from d2pfed.plan import Plan, Protocol
from d2pfed.secagg import Delivery, Roster, Session, lattice, standing
from d2pfed.secagg.heads import Certified, CertifiedRoster
from d2pfed.secagg.pairwise.session import least_threshold
from d2pfed.secagg.roster import NO_ROSTER
from d2pfed.secagg.trust import Consistency


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which aggregation this is: keys, noise and rotation are fresh for each."""

    run: str
    round: int
    number: int


# A session of pair masks or of the lattice protocol, as the plan says: both are of one cohort and one attempt.
AttemptSession = Session | lattice.Session
# What an attempt's vectors are encoded for, and its sum decoded by: a session, or a step with standing keys.
AttemptBinding = AttemptSession | standing.Step


def session_of(
    plan: Plan,
    attempt: Attempt,
    cohort: tuple[int, ...],
    *,
    roster: Roster | Certified | CertifiedRoster | None = None,
    draw: int = 0,
    block: int = 0,
    order: tuple[int, ...] = (),
) -> AttemptSession:
    """Return what the protocol of an attempt is bound to.

    A signed cohort has the planned size, for which its clients have checked quorum and threshold. Otherwise it may have
    another size: where an earlier attempt left fewer although all must deliver. `order` is the cohort as it was drawn,
    for the committee: without one it is taken by identity. In the lattice protocol enrolled clients are named by slots.
    """
    enrolled = NO_ROSTER if roster is None else roster.digest
    if plan.protocol is Protocol.LATTICE and isinstance(roster, Roster):
        raise ConfigError("enrolled clients of the lattice protocol hold the head of a roster, got a whole one")
    return _session(plan, attempt, cohort, order or cohort, enrolled, draw, block)


def sketch_of(plan: Plan) -> AttemptSession:
    """Return a session of the plan with clients that do not exist, for its sizes alone."""
    roster = digest("sketch") if plan.consistency is Consistency.SIGNED else NO_ROSTER
    cohort = tuple(range(plan.cohort_size))
    return _session(plan, Attempt("sketch", 0, 0), cohort, cohort, roster, 0, 0)


def _session(  # noqa: PLR0917 - what a session is bound to
    plan: Plan,
    attempt: Attempt,
    cohort: tuple[int, ...],
    order: tuple[int, ...],
    roster_digest: bytes,
    draw: int,
    block: int,
) -> AttemptSession:
    size, delivery, is_signed = len(cohort), delivery_of(plan), plan.consistency is Consistency.SIGNED
    if is_signed or delivery is Delivery.QUORUM or plan.protocol is Protocol.LATTICE:
        require_planned_size(plan, size)
    if plan.protocol is not Protocol.LATTICE:
        is_planned = size == plan.cohort_size
        return Session(
            plan_digest=plan.digest,
            run=attempt.run,
            round=attempt.round,
            attempt=attempt.number,
            roster_digest=roster_digest,
            draw=draw,
            block=block,
            cohort=cohort,
            dimension=plan.codec.length,
            bits=plan.ring.bits,
            threshold=plan.threshold if is_planned else least_threshold(size, plan.colluders),
            quorum=size if delivery is Delivery.EVERYONE else plan.quorum,
            colluders=plan.colluders,
            delivery=delivery,
            consistency=plan.consistency,
        )
    if plan.committee is None or plan.secret is None:
        raise ConfigError("a plan of the lattice protocol must have a committee and the length of a secret")
    if is_signed != (roster_digest != NO_ROSTER):
        raise ConfigError(f"consistency must be signed with a roster and assumed without, got {plan.consistency}")
    return lattice.Session(
        plan_digest=plan.digest,
        run=attempt.run,
        round=attempt.round,
        attempt=attempt.number,
        roster_digest=roster_digest,
        draw=draw,
        block=block,
        cohort=cohort,
        members=tuple(sorted(order[: plan.committee.size])),  # the first in this order: nobody has chosen them
        dimension=plan.codec.length,
        bits=plan.ring.bits,
        secret=plan.secret,
        committee=plan.committee,
        quorum=plan.quorum,
        colluders=plan.colluders,
        is_by_slot=roster_digest != NO_ROSTER,
    )


def require_planned_size(plan: Plan, size: int) -> None:
    """Refuse a cohort of another size: in a larger one the quorum would be a smaller part, and have two views."""
    if size != plan.cohort_size:
        raise PeerError(f"a cohort must have the planned {plan.cohort_size} clients, got {size}")


def delivery_of(plan: Plan) -> Delivery:
    """Return whose vectors a sum cannot do without, which the noise decides."""
    return Delivery.EVERYONE if isinstance(plan.mechanism, Shared) else Delivery.QUORUM


def rotation_seed(session: AttemptBinding) -> bytes:
    """Return the public seed of an attempt's rotation: both sides know it, so it travels in no message."""
    return digest("rotation", session.plan_digest, session.run, session.round, session.attempt)
