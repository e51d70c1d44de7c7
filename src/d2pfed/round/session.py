"""What the protocol of an attempt or an epoch is bound to, and what a client checks before it joins one."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from d2pfed.accounting import Sampling
from d2pfed.errors import ConfigError, PeerError
from d2pfed.noise.mechanisms import Shared
from d2pfed.numerics.randomness import PathPart, digest
from d2pfed.plan import Enrolled, Plan, Protocol, require_standing
from d2pfed.secagg import Delivery, Invitation, Roster, Session, decode_invitation, lattice, standing
from d2pfed.secagg.draws import draw_key, draw_order, require_path
from d2pfed.secagg.heads import Certified, CertifiedRoster
from d2pfed.secagg.pairwise.session import least_threshold
from d2pfed.secagg.roster import NO_ROSTER
from d2pfed.secagg.trust import Consistency
from d2pfed.secagg.wire import MessageKind, kind_of, unframe_unbound

ROSTERS = 4  # that an authority may issue over one population: each has draws of its own


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
    return _session(plan, attempt, cohort, enrolled, draw, block, order or cohort)


def sketch_of(plan: Plan) -> AttemptSession:
    """Return a session of the plan with clients that do not exist, for its sizes alone."""
    roster = digest("sketch") if plan.consistency is Consistency.SIGNED else NO_ROSTER
    cohort = tuple(range(plan.cohort_size))
    return _session(plan, Attempt("sketch", 0, 0), cohort, roster, 0, 0, cohort)


def _session(  # noqa: PLR0917 - what a session is bound to
    plan: Plan,
    attempt: Attempt,
    cohort: tuple[int, ...],
    roster_digest: bytes,
    draw: int,
    block: int,
    order: tuple[int, ...],
) -> AttemptSession:
    size, delivery, is_signed = len(cohort), delivery_of(plan), plan.consistency is Consistency.SIGNED
    if is_signed or delivery is Delivery.QUORUM or plan.protocol is Protocol.LATTICE:
        require_planned_size(plan, size)
    shared: dict[str, Any] = {
        "plan_digest": plan.digest,
        "run": attempt.run,
        "round": attempt.round,
        "attempt": attempt.number,
        "roster_digest": roster_digest,
        "draw": draw,
        "block": block,
        "cohort": cohort,
        "dimension": plan.codec.length,
        "bits": plan.ring.bits,
        "colluders": plan.colluders,
    }
    if plan.protocol is not Protocol.LATTICE:
        return Session(
            **shared,
            threshold=plan.threshold if size == plan.cohort_size else least_threshold(size, plan.colluders),
            quorum=size if delivery is Delivery.EVERYONE else plan.quorum,
            delivery=delivery,
            consistency=plan.consistency,
        )
    if plan.committee is None or plan.secret is None:
        raise ConfigError("a plan of the lattice protocol must have a committee and the length of a secret")
    if is_signed != (roster_digest != NO_ROSTER):
        raise ConfigError(f"consistency must be signed with a roster and assumed without, got {plan.consistency}")
    return lattice.Session(
        **shared,
        members=tuple(sorted(order[: plan.committee.size])),  # the first in this order: nobody has chosen them
        secret=plan.secret,
        committee=plan.committee,
        quorum=plan.quorum,
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
    return _rotation_seed(session.plan_digest, session.run, session.round, session.attempt)


@lru_cache(2)  # all clients of a simulation ask for the same
def _rotation_seed(*names: PathPart) -> bytes:
    return digest("rotation", *names)


def epoch_of(
    plan: Plan, run: str, roster: Roster, silos: tuple[int, ...], *, epoch: int = 0, first: int = 0
) -> standing.Epoch:
    """Return the epoch of a run that begins at a step, between these silos."""
    require_standing(plan, len(roster.clients))
    return standing.Epoch(
        plan_digest=plan.digest,
        run=run,
        epoch=epoch,
        first=first,
        roster_digest=roster.digest,
        cohort=silos,
        dimension=plan.codec.length,
        bits=plan.ring.bits,
        quorum=plan.quorum,
        colluders=plan.colluders,
        rounds=plan.rounds,
        attempts=plan.attempts_per_round,
    )


def enrolled_in(roster: Roster | Certified | None) -> Enrolled | None:
    """Return what a roster says of the others; four of its kind are expected while a population lasts."""
    if roster is None:
        return None
    return Enrolled(len(roster.clients), 0 if roster.depth is None else ROSTERS << roster.depth)


def read_invitation(request: bytes, roster: Roster | Certified | None) -> Invitation:
    """Return the invitation that a client is asked by first: a message of its own, or in a request for its vector."""
    depth = None if roster is None else roster.depth
    if kind_of(request) == MessageKind.LATTICE_REQUEST:
        return lattice.decode_request(request, depth).invitation
    return decode_invitation(request, depth)


def invited_run(request: bytes) -> str:
    """Return the name of the run that an invitation is to, before anything else of it is read or believed."""
    return unframe_unbound(request, kind_of(request))[0].text()


def accept_invitation(
    plan: Plan,
    invitation: bytes,
    least_cohort: int,
    roster: Roster | Certified | None = None,
    first_draw: int = 0,
) -> AttemptSession:
    """Return the session that an invitation names, for a plan that this client's policy has allowed before.

    An enrolled client brings its roster or head, and where cohorts are drawn verifiably the number of the run's first
    draw. It computes the cohort itself, and the committee. That no draw is used twice, it must check against what it
    remembers: `session.draw`.
    """
    invited, order = read_invitation(invitation, roster), tuple[int, ...]()
    require_planned_number(plan, invited)
    if roster is not None and roster.depth is not None:
        if invited.opening is None:
            raise PeerError("a drawn cohort needs the opening of its draw")
        require_path(roster.root, roster.depth, invited.draw, invited.opening)
        require_draw_by_number(plan, invited, first_draw)
        key = draw_key(roster.digest, invited.draw, invited.opening.seed)
        # All of the roster is the population.
        order = draw_order(key, roster.clients, plan.sampling, invited.block)
        if invited.client not in order:
            raise PeerError(f"client {invited.client} is not in the cohort of this draw")
        cohort = tuple(sorted(order))
    elif invited.draw or invited.block:
        raise PeerError(f"cohorts are not drawn here, got draw {invited.draw}, block {invited.block}")
    else:
        cohort = invited.cohort or ()  # as the server lists it; the guarantee then assumes that it chooses them
    if len(cohort) < least_cohort:
        raise PeerError(f"a cohort must have at least {least_cohort} clients, got {len(cohort)}")
    attempt = Attempt(invited.run, invited.round, invited.attempt)
    session = session_of(plan, attempt, cohort, roster=roster, draw=invited.draw, block=invited.block, order=order)
    if session.digest != invited.binding:
        raise PeerError(f"run {invited.run} was agreed on with another plan, cohort or roster")
    return session


def require_planned_number(plan: Plan, invited: Invitation) -> None:
    """Refuse an attempt that the plan does not have: with any number allowed, every draw has its turn."""
    if invited.round >= plan.rounds or invited.attempt >= plan.attempts_per_round:
        raise PeerError(
            f"a plan of {plan.rounds} rounds with {plan.attempts_per_round} attempts each has no round "
            f"{invited.round + 1}, attempt {invited.attempt}"
        )


def require_draw_by_number(plan: Plan, invited: Invitation, first_draw: int) -> None:
    """Refuse a draw that the server has picked: attempts take the draws in turn, under `once` all take the first."""
    steps = invited.round * plan.attempts_per_round + invited.attempt
    due = first_draw if plan.sampling.method is Sampling.ONCE else first_draw + steps
    if invited.draw != due:
        raise PeerError(
            f"round {invited.round + 1}, attempt {invited.attempt} is of draw {due}, got {invited.draw}"
        )


def accept_standing_invitation(plan: Plan, invitation: bytes, roster: Roster) -> standing.Epoch:
    """Return the epoch that an invitation names, recomputed from this silo's own plan and roster."""
    invited = standing.decode_invitation(invitation)
    if len(invited.silos) > plan.cohort_size:
        raise PeerError(f"an epoch has at most the planned {plan.cohort_size} silos, got {len(invited.silos)}")
    try:
        epoch = epoch_of(plan, invited.run, roster, invited.silos, epoch=invited.epoch, first=invited.first)
    except ConfigError as error:
        raise PeerError(str(error)) from None
    if epoch.digest != invited.binding:
        raise PeerError(f"run {invited.run} was agreed on with another plan or roster")
    return epoch
