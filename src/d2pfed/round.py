"""One private round, client half and server half, whatever carries the bytes."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from d2pfed.accounting import Release, Sampling, is_amplified
from d2pfed.errors import ConfigError, PeerError, TooFewClients
from d2pfed.ledger import RunPlan
from d2pfed.noise.clipping import ClipStep, split_clip
from d2pfed.noise.codec import FloatVector, require_update
from d2pfed.noise.mechanisms import Designated, Share, Shared
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.numerics.ring import RingVector
from d2pfed.plan import Enrolled, Plan, Policy
from d2pfed.secagg import (
    Advertising,
    Client,
    Confirming,
    Delivery,
    Enrolment,
    Exchange,
    History,
    Invitation,
    Position,
    Roster,
    ServerPhase,
    Session,
    Sum,
    collect,
    decode_invitation,
)
from d2pfed.secagg.crypto import Agree
from d2pfed.secagg.crypto import agree as compute_secret
from d2pfed.secagg.draws import Opening, draw_cohort, draw_key, require_path
from d2pfed.secagg.graph import Consistency
from d2pfed.secagg.session import NO_ROSTER

Train = Callable[[bytes, bytes], NDArray[np.floating]]  # from the bytes of task and model to a client's update
LEAST_SECRET_COHORT = 40  # on average: fewer than two clients are then drawn with a chance below 10^-15
_FEWEST = 2  # clients of a cohort that one can hide among
Refused = Callable[[int, PeerError], None]  # hears of each answer that does not count, and why
Remember = Callable[[Mapping[int, Position]], None]  # hears where clients stand

ROSTERS = 4  # that an authority may issue over one population: each has draws of its own


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which aggregation this is: keys, noise and rotation are fresh for each."""

    run: str
    round: int
    number: int


def session_of(
    plan: Plan,
    attempt: Attempt,
    cohort: tuple[int, ...],
    *,
    roster: Roster | None = None,
    draw: int = 0,
    block: int = 0,
) -> Session:
    """Return what the protocol of an attempt is bound to.

    A signed cohort has the planned size, for which its clients have checked quorum and graph. Otherwise one of another
    size is a complete graph: where sizes are secret, and where an earlier attempt left fewer although all must deliver.
    """
    return _session(plan, attempt, cohort, (NO_ROSTER if roster is None else roster.digest, draw, block))


def sketch_of(plan: Plan) -> Session:
    """Return a session of the plan with clients that do not exist, for its sizes alone."""
    roster = digest("sketch") if plan.consistency is Consistency.SIGNED else NO_ROSTER
    return _session(plan, Attempt("sketch", 0, 0), tuple(range(plan.cohort_size)), (roster, 0, 0))


def _session(plan: Plan, attempt: Attempt, cohort: tuple[int, ...], drawn: tuple[bytes, int, int]) -> Session:
    roster_digest, draw, block = drawn
    size, delivery = len(cohort), delivery_of(plan)
    planned = size == plan.cohort_size
    is_signed = plan.consistency is Consistency.SIGNED
    if is_signed or (delivery is Delivery.QUORUM and plan.sampling.method is not Sampling.POISSON):
        require_planned_size(plan, size)
    threshold = plan.threshold if planned else max(size // 2 + 1, plan.colluders + 1)
    quorum = plan.quorum
    if delivery is Delivery.EVERYONE:
        quorum = size
    elif delivery is Delivery.DESIGNATED and not planned:
        quorum = threshold
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
        degree=plan.neighbours if planned else size - 1,
        threshold=threshold,
        quorum=quorum,
        colluders=plan.colluders,
        delivery=delivery,
        consistency=plan.consistency,
    )


def require_planned_size(plan: Plan, size: int) -> None:
    """Refuse a cohort of another size: in a larger one the quorum would be a smaller part, and have two views."""
    if size != plan.cohort_size:
        raise PeerError(f"a cohort must have the planned {plan.cohort_size} clients, got {size}")


def delivery_of(plan: Plan) -> Delivery:
    """Return whose vectors a sum cannot do without, which the noise decides."""
    match plan.mechanism:
        case Shared():
            return Delivery.EVERYONE
        case Designated():
            return Delivery.DESIGNATED
    return Delivery.QUORUM


def rotation_seed(session: Session) -> bytes:
    """Return the public seed of an attempt's rotation: both sides know it, so it travels in no message."""
    return digest("rotation", session.plan_digest, session.run, session.round, session.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """The client half: what one client brings to an attempt. `participations` counts its earlier contributions."""

    plan: Plan
    client: int
    entropy: Entropy
    participations: int

    def encode(
        self,
        session: Session,
        update: NDArray[np.floating],
        group: bytes | None,
        clip: float | None = None,
    ) -> RingVector:
        """Turn an update into the ring vector that is masked and sent: the only encoder there is.

        At its cap a client sends zero and its noise: staying away would tell that it was chosen, and would bias the
        sampling that the guarantee rests on. `clip` is that of the round, where the plan's clip adapts.
        """
        own = update if self.participations < self.plan.max_participations else np.zeros_like(update)
        share = Share(
            rank=session.rank(self.client),
            holders=len(session.cohort),
            designated=session.rank(session.designated),
            group=None if group is None else Entropy(group, self.entropy.is_replayed),
        )
        fresh = self.entropy.child("contribution", session.digest, self.client)
        # A bit may be small beside the grid, so its vector is dithered.
        dither = None if self.plan.adaptive_clip is None else fresh.child("dither").stream()
        centres = self.plan.codec.prepare(self._vector(own, clip), rotation_seed(session), dither)
        return self.plan.ring.wrap(self.plan.mechanism.encode(centres, share, fresh))

    def _vector(self, update: NDArray[np.floating], clip: float | None) -> NDArray[np.floating]:
        """Return the vector that is rotated: the update, or the update in units of the clip and its bit."""
        require_clip(self.plan, clip)
        require_update(update, self.plan.dimension)
        adaptive = self.plan.adaptive_clip
        return update if adaptive is None or clip is None else adaptive.vector(update, clip)

    def join(
        self,
        session: Session,
        train: Train,
        enrolment: Enrolment | None = None,
        history: History | None = None,
        agree: Agree = compute_secret,
    ) -> Client:
        """Return the machine that answers the server's requests in this attempt; `agree` is for simulations."""

        def contribute(task: bytes, model: bytes, group: bytes | None) -> RingVector:
            clip, rest = split_clip(self.plan.adaptive_clip, task)
            return self.encode(session, train(rest, model), group, clip)

        return Client(
            session,
            self.client,
            contribute,
            self.entropy,
            enrolment,
            history,
            agree,
        )


def require_clip(plan: Plan, clip: float | None) -> None:
    """Refuse a round without its clip where the plan's adapts, one out of its limits, and one where it is fixed."""
    if plan.adaptive_clip is None:
        if clip is not None:
            raise ConfigError(f"the plan's clip is fixed, so a round has none of its own, got {clip:g}")
    elif clip is None:
        raise PeerError("the plan's clip adapts (clip=auto), and this round came without its clip")
    else:
        plan.adaptive_clip.require(clip)


def require_fixed_clip(plan: Plan, what: str) -> None:
    """Refuse a plan with an adaptive clip where no clip travels with the model."""
    if plan.adaptive_clip is not None:
        raise ConfigError(
            f"{what} takes a fixed clip only, and the plan's adapts (clip=auto): give it as a number"
        )


def accept(
    plan: Plan, policy: Policy, invitation: bytes, roster: Roster | None = None, first_draw: int = 0
) -> Session:
    """Return the session that an invitation names, if this client's policy allows the plan and the cohort.

    An enrolled client brings its roster, and where cohorts are drawn verifiably the number of the run's first draw. It
    computes the cohort itself. That no draw is used twice, it must check against what it remembers: `session.draw`.
    """
    policy.check(plan, enrolled_in(roster))
    return invited_session(plan, invitation, policy.least_cohort, roster, first_draw)


def invited_session(
    plan: Plan, invitation: bytes, least_cohort: int, roster: Roster | None, first_draw: int
) -> Session:
    """Return the session that an invitation names, for a plan that this client's policy has allowed before."""
    is_drawn = roster is not None and roster.depth is not None
    invited = decode_invitation(invitation, roster.depth if roster is not None else None)
    require_planned_number(plan, invited)
    cohort = _drawn(plan, invited, roster, first_draw) if roster is not None and is_drawn else _listed(invited)
    if len(cohort) < least_cohort:
        raise PeerError(f"a cohort must have at least {least_cohort} clients, got {len(cohort)}")
    attempt = Attempt(invited.run, invited.round, invited.attempt)
    session = session_of(plan, attempt, cohort, roster=roster, draw=invited.draw, block=invited.block)
    if session.digest != invited.binding:
        raise PeerError(f"run {invited.run} was agreed on with another plan, cohort or roster")
    return session


def enrolled_in(roster: Roster | None) -> Enrolled | None:
    """Return what a roster says of the others; four of its kind are expected while a population lasts."""
    if roster is None:
        return None
    return Enrolled(len(roster.keys), 0 if roster.depth is None else ROSTERS << roster.depth)


def _listed(invited: Invitation) -> tuple[int, ...]:
    """Return the cohort as the server lists it; the guarantee then assumes that it may choose the members."""
    if invited.draw or invited.block:
        raise PeerError(f"cohorts are not drawn here, got draw {invited.draw}, block {invited.block}")
    return invited.cohort or ()


def _drawn(plan: Plan, invited: Invitation, roster: Roster, first_draw: int) -> tuple[int, ...]:
    """Return the cohort that follows from the draw, all of the roster being the population."""
    if invited.opening is None or roster.depth is None:
        raise PeerError("a drawn cohort needs the opening of its draw")
    require_path(roster.root, roster.depth, invited.draw, invited.opening)
    require_draw_by_number(plan, invited, first_draw)
    key = draw_key(roster.digest, invited.draw, invited.opening.seed)
    cohort = draw_cohort(key, roster.clients, plan.sampling, invited.block)
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


class Collected(Protocol):
    """Masked vectors of one attempt, summed and not yet opened."""

    @property
    def survivors(self) -> tuple[int, ...]:
        """The clients whose vector is in the sum."""
        ...

    def unmask(self) -> Sum:
        """Open the sum; raises TooFewClients if too few help."""
        ...


@dataclass(frozen=True, slots=True)
class MaskedSum:
    """A sum behind the clients' masks, which the fourth exchange opens."""

    confirming: Confirming
    exchange: Exchange
    refused: Refused

    @property
    def survivors(self) -> tuple[int, ...]:
        """The clients whose masked vector arrived."""
        return self.confirming.survivors

    def unmask(self) -> Sum:
        """Ask the survivors to open the masks."""
        _run(self.confirming, self.exchange, self.refused)
        unmasking = self.confirming.close()
        _run(unmasking, self.exchange, self.refused)
        return unmasking.close()


def ignore(_client: int, _error: PeerError) -> None:
    """Count who answered badly as dropped out, and say no more."""


def forget(_positions: Mapping[int, Position]) -> None:
    """Remember nobody's position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invite:
    """What the server brings to an attempt of enrolled clients.

    Attributes:
        roster: who is enrolled.
        opening: proof of the draw, where cohorts are drawn verifiably.
        remembered: where the server has met each client last.
        remember: takes the positions of all that joined, whatever becomes of the attempt.
        excluded: clients that were found to cheat in this run; they count as dropped out.
    """

    roster: Roster | None = None
    opening: Opening | None = None
    remembered: Mapping[int, Position] = field(default_factory=dict)
    remember: Remember = forget
    excluded: Collection[int] = ()


NOBODY_ENROLLED = Invite()


def gather(
    session: Session,
    model: bytes,
    exchange: Exchange,
    *,
    task: bytes = b"",
    invite: Invite = NOBODY_ENROLLED,
    refused: Refused = ignore,
) -> MaskedSum:
    """Run the first three exchanges of the protocol; raises TooFewClients with those who are left.

    `task` is all that decides what is trained beside the model, `with_clip` puts a round's clip before it; clients
    that were told otherwise add only noise.
    """
    advertising = Advertising(
        session,
        invite.roster,
        opening=invite.opening,
        remembered=invite.remembered,
        excluded=invite.excluded,
    )
    _run(advertising, exchange, refused)
    invite.remember(advertising.positions)
    sharing = advertising.close()
    _run(sharing, exchange, refused)
    masking = sharing.close(task, model)
    _run(masking, exchange, refused)
    return MaskedSum(masking.close(), exchange, refused)


def _run(phase: ServerPhase, exchange: Exchange, refused: Refused) -> None:
    for client, error in collect(phase, exchange).items():
        refused(client, error)


class ReleaseLedger(Protocol):
    """Where an attempt is counted, under the charge of its run, before it can reveal anything."""

    def reserve(self, release: Release) -> object:
        """Count an attempt and the worst that it may release; refuses one that has a row."""
        ...

    def commit(self, release: Release) -> object:
        """Record what unmasking will release."""
        ...

    def void(self, run: str, number: int, attempt: int) -> object:
        """Take back an attempt in which nothing can be unmasked any more."""
        ...

    def require_plan(self, run: str, plan: bytes) -> None:
        """Refuse a plan, by its digest, that is not the one a run was charged for."""
        ...

    def participations(self, run: str, clients: Iterable[int]) -> Mapping[int, int]:
        """Return in how many attempts of a run that were not void each client took part."""
        ...


class Attempts(Protocol):
    """Who takes part in an attempt, and how their vectors come together: all that a transport has to supply."""

    def draw(self, attempt: Attempt) -> tuple[int, ...]:
        """Return the sorted cohort: after a charged attempt a fresh one, after a void one it may be the same again."""
        ...

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> Session:
        """Return the session of an attempt, bound to the plan and, where there is one, to a roster and its draw."""
        ...

    def collect(self, session: Session, model: FloatVector, participations: Mapping[int, int]) -> Collected:
        """Gather a session's vectors, trained from a model; each client has taken part so often before."""
        ...


@runtime_checkable
class ClippedAttempts(Protocol):
    """Attempts that tell their clients the clip of the round, where the plan's adapts."""

    def with_clip(self, clip: float) -> Attempts:
        """Return the attempts of a round with this clip."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round gave: the mean over the planned cohort, in which attempt, and of how many clients.

    `clipping` is None where the clip is fixed.
    """

    mean: FloatVector = field(repr=False)
    attempt: int
    survivors: int
    clipping: ClipStep | None = None


def run_plan(plan: Plan) -> RunPlan:
    """Return what a run of this plan is charged: all attempts that it may take, each with no more than a quorum."""
    if plan.sampling.method is Sampling.POISSON and plan.cohort_size < LEAST_SECRET_COHORT:
        raise ConfigError(
            f"cohorts of secret size must have at least {LEAST_SECRET_COHORT} clients on average, "
            f"got {plan.cohort_size}"
        )
    return RunPlan(
        plan=plan.digest,
        release=plan.release("", 0, 0, (), plan.quorum),
        rounds=plan.rounds,
        max_attempts=plan.max_attempts,
        attempts_per_round=plan.attempts_per_round,
        max_participations=plan.max_participations,
        epsilon=plan.epsilon,
        delta=plan.delta,
        observer=plan.against,
    )


def aggregate(
    plan: Plan,
    first: Attempt,
    model: FloatVector,
    attempts: Attempts,
    ledger: ReleaseLedger,
    *,
    clip: float | None = None,
) -> Outcome:
    """Try a round, from its first attempt on, until one succeeds, each recorded before it can reveal anything.

    Where every vector counts (`shared`, `designated`) and the same clients are drawn again, an attempt goes on with
    those who were left; not so if signed, where cohorts have the planned size. `clip` is that of the round, where the
    plan's clip adapts: a function of earlier outcomes alone.

    Guarantee: the reservation precedes every masked vector and the commitment precedes the request that unmasks; an
    attempt is voided only before that request; a client's earlier contributions are counted for each attempt anew.
    Checked: test_round.py::test_charges_come_before_what_they_pay_for,
    test_never_less.py::test_a_retry_counts_the_attempt_before_it.
    """
    run, number = first.run, first.round
    ledger.require_plan(run, plan.digest)
    attempts = _clipped(plan, attempts, clip)
    left: tuple[int, ...] = ()  # after a void attempt in which every vector counts
    for attempt in (Attempt(run, number, each) for each in range(first.number, plan.attempts_per_round)):
        cohort = attempts.draw(attempt)
        if left and set(left) < set(cohort):
            cohort = left
        cohort, participations, left = *_standing(plan, run, cohort, ledger), ()
        session = attempts.bind(attempt, cohort)
        ledger.reserve(plan.release(run, number, attempt.number, cohort, plan.quorum))
        try:
            collected = attempts.collect(session, model, participations)
        except TooFewClients as lack:
            ledger.void(run, number, attempt.number)
            if _may_shrink(plan) and len(lack.left) > 1:
                left = lack.left
            continue
        survivors = collected.survivors
        ledger.commit(plan.release(run, number, attempt.number, survivors, len(survivors)))
        try:
            total = collected.unmask().vector
        except TooFewClients:
            continue  # charged all the same: some shares may have been opened
        mean = plan.codec.decode(plan.ring.centre(total), rotation_seed(session), plan.cohort_size)
        return _outcome(plan, mean, clip, attempt.number, len(survivors))
    raise TooFewClients(f"round {number} failed in all of its {plan.attempts_per_round} attempts")


def _clipped(plan: Plan, attempts: Attempts, clip: float | None) -> Attempts:
    """Return the attempts with the clip of the round; refuse those that would not tell it to their clients."""
    require_clip(plan, clip)
    if clip is None:
        return attempts
    if isinstance(attempts, ClippedAttempts):
        return attempts.with_clip(clip)
    raise ConfigError(f"{type(attempts).__name__} tells its clients no clip, and the plan's adapts (clip=auto)")


def _outcome(plan: Plan, mean: FloatVector, clip: float | None, attempt: int, survivors: int) -> Outcome:
    """Return a decoded mean in real units, its last coordinate read as the bits' mean over the planned cohort."""
    if plan.adaptive_clip is None or clip is None:
        return Outcome(mean, attempt, survivors)
    clipping = plan.adaptive_clip.step(clip, float(mean[-1]))
    return Outcome(mean[:-1] * np.float32(clip), attempt, survivors, clipping)


def _may_shrink(plan: Plan) -> bool:
    """Say whether an attempt goes on with fewer clients than planned: nobody signed has checked it for them."""
    return delivery_of(plan) is not Delivery.QUORUM and plan.consistency is Consistency.ASSUMED


def _standing(
    plan: Plan, run: str, cohort: tuple[int, ...], ledger: ReleaseLedger
) -> tuple[tuple[int, ...], dict[int, int]]:
    """Return who is asked, and how often each has contributed; whoever is at its cap sends zero and its noise."""
    participations = dict(ledger.participations(run, cohort))
    if plan.sampling.method is Sampling.ONCE and (used := [client for client in cohort if participations[client]]):
        # Zeros would move the model by noise alone; nothing here rests on who was drawn, so it can be said.
        raise ConfigError(f"sampling `once` uses each client once, and client {used[0]} has contributed already")
    if plan.sampling.method is Sampling.POISSON and len(cohort) < _FEWEST:
        # That so few were drawn is a secret, so the round looks like any other: others fill it up with zeros.
        others = (client for client in range(plan.sampling.population) if client not in participations)
        silent = tuple(islice(others, _FEWEST - len(cohort)))
        cohort, participations = (
            tuple(sorted(cohort + silent)),
            participations | dict.fromkeys(silent, plan.max_participations),
        )
    return cohort, participations


def private_sum(
    plan: Plan,
    first: Attempt,
    vectors: Mapping[int, NDArray[np.floating]],
    ledger: ReleaseLedger,
    entropy: Entropy,
) -> FloatVector:
    """Return the private sum of these clients' vectors, through the whole protocol in this process.

    For counts, means, histograms and metrics as well as for updates; over a network, `aggregate` does the same with
    clients that `Participant.join` made elsewhere. The run that `first` names must have begun in the ledger. Its
    clients were not drawn here, so a plan whose guarantee rests on a draw is refused.
    """
    require_fixed_clip(plan, "a private sum")
    if is_amplified(plan.sampling):
        raise ConfigError(
            f"a sum over given clients is of a plan with sampling none or once, or of everyone, got "
            f"{plan.sampling.method}, {plan.cohort_size} of {plan.sampling.population}"
        )
    if not _FEWEST <= len(vectors) <= plan.cohort_size:
        raise ConfigError(f"a sum is over {_FEWEST} clients to the planned {plan.cohort_size}, got {len(vectors)}")
    if not entropy.is_replayed:
        # One root may serve several ledgers, and the same attempt of the same run would have the same noise in each.
        entropy = entropy.child("sum", Entropy.system().key)
    attempts = _GivenVectors(plan, vectors, entropy)
    mean = aggregate(plan, first, np.empty(0, np.float32), attempts, ledger).mean
    return mean * np.float32(plan.cohort_size)


@dataclass(frozen=True, slots=True)
class _GivenVectors:
    """Clients in this process whose vectors are there already."""

    plan: Plan
    vectors: Mapping[int, NDArray[np.floating]] = field(repr=False)
    entropy: Entropy

    def draw(self, _attempt: Attempt) -> tuple[int, ...]:
        """Return everyone."""
        return tuple(sorted(self.vectors))

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> Session:
        """Return the session of an attempt."""
        return session_of(self.plan, attempt, cohort)

    def collect(self, session: Session, _model: FloatVector, participations: Mapping[int, int]) -> MaskedSum:
        """Run the protocol between clients and server in this process."""
        machines = {client: self._join(client, session, participations[client]) for client in session.cohort}
        return gather(
            session, b"", lambda asked: ((client, machines[client].receive(asked[client])) for client in asked)
        )

    def _join(self, client: int, session: Session, participations: int) -> Client:
        participant = Participant(
            plan=self.plan,
            client=client,
            entropy=self.entropy.child("client", client),
            participations=participations,
        )
        return participant.join(session, lambda _task, _model: self.vectors[client])
