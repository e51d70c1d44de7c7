"""What a client checks before it joins an attempt, or an epoch of standing keys, that it is invited to."""

from d2pfed.accounting import Sampling
from d2pfed.errors import ConfigError, PeerError
from d2pfed.plan import Enrolled, Plan
from d2pfed.round.session import Attempt, AttemptSession, session_of
from d2pfed.round.standing import epoch_of
from d2pfed.secagg import Invitation, Roster, decode_invitation, lattice, standing
from d2pfed.secagg.draws import draw_key, draw_order, require_path
from d2pfed.secagg.heads import Certified
from d2pfed.secagg.wire import MessageKind, kind_of, unframe_unbound

ROSTERS = 4  # that an authority may issue over one population: each has draws of its own


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
        order = _drawn(plan, invited, roster, roster.depth, first_draw)
        cohort = tuple(sorted(order))
    elif invited.draw or invited.block:
        raise PeerError(f"cohorts are not drawn here, got draw {invited.draw}, block {invited.block}")
    else:
        cohort = (
            invited.cohort or ()
        )  # as the server lists it; the guarantee then assumes that it chooses the members
    if len(cohort) < least_cohort:
        raise PeerError(f"a cohort must have at least {least_cohort} clients, got {len(cohort)}")
    attempt = Attempt(invited.run, invited.round, invited.attempt)
    session = session_of(plan, attempt, cohort, roster=roster, draw=invited.draw, block=invited.block, order=order)
    if session.digest != invited.binding:
        raise PeerError(f"run {invited.run} was agreed on with another plan, cohort or roster")
    return session


def _drawn(
    plan: Plan, invited: Invitation, roster: Roster | Certified, depth: int, first_draw: int
) -> tuple[int, ...]:
    """Return the cohort that follows from the draw, in its order, all of the roster being the population."""
    if invited.opening is None:
        raise PeerError("a drawn cohort needs the opening of its draw")
    require_path(roster.root, depth, invited.draw, invited.opening)
    require_draw_by_number(plan, invited, first_draw)
    key = draw_key(roster.digest, invited.draw, invited.opening.seed)
    cohort = draw_order(key, roster.clients, plan.sampling, invited.block)
    require_in_cohort(invited.client, cohort)
    return cohort


def require_planned_number(plan: Plan, invited: Invitation) -> None:
    """Refuse an attempt that the plan does not have: with any number allowed, every draw has its turn."""
    if invited.round >= plan.rounds or invited.attempt >= plan.attempts_per_round:
        raise PeerError(
            f"a plan of {plan.rounds} rounds with {plan.attempts_per_round} attempts each has no round "
            f"{invited.round}, attempt {invited.attempt}"
        )


def require_draw_by_number(plan: Plan, invited: Invitation, first_draw: int) -> None:
    """Refuse a draw that the server has picked: attempts take the draws in turn, under `once` all take the first."""
    steps = invited.round * plan.attempts_per_round + invited.attempt
    due = first_draw if plan.sampling.method is Sampling.ONCE else first_draw + steps
    if invited.draw != due:
        raise PeerError(f"round {invited.round}, attempt {invited.attempt} is of draw {due}, got {invited.draw}")


def require_in_cohort(client: int, cohort: tuple[int, ...]) -> None:
    """Refuse to join a cohort without this client in it."""
    if client not in cohort:
        raise PeerError(f"client {client} is not in the cohort of this draw")


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
