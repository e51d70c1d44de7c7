"""The server half of a round: exchanges over any transport, in attempts, each charged before it can reveal anything."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from d2pfed.accounting import Sampling
from d2pfed.errors import ConfigError, PeerError, TooFewClients, VoidStep
from d2pfed.fields import check_arguments
from d2pfed.ledger import Ledger, RunPlan
from d2pfed.noise import mechanisms
from d2pfed.noise.clipping import ClipStep
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import RingVector
from d2pfed.plan import Plan
from d2pfed.round.participant import require_clip
from d2pfed.round.session import (
    Attempt,
    AttemptBinding,
    AttemptSession,
    delivery_of,
    rotation_seed,
)
from d2pfed.secagg import Delivery, Exchange, Position, Roster, ServerPhase, Sum, collect, lattice
from d2pfed.secagg.draws import Opening
from d2pfed.secagg.heads import CertifiedRoster
from d2pfed.secagg.pairwise.server import Advertising, Confirming, Unmasking
from d2pfed.secagg.trust import Consistency

FEWEST = 2  # clients of a cohort that one can hide among
B = TypeVar("B", bound=AttemptBinding)
P = TypeVar("P", bound=ServerPhase)
Refused = Callable[[int, PeerError], None]  # is told of each answer that does not count, and why
Remember = Callable[[Mapping[int, Position]], None]  # is told where clients stand


class Collected(Protocol):
    """Masked vectors of one attempt, summed and not yet opened."""

    @property
    def survivors(self) -> tuple[int, ...]:
        """The clients whose vector is in the sum."""

    def unmask(self) -> Sum:
        """Open the sum; raises TooFewClients if too few help."""


@dataclass(frozen=True, slots=True)
class MaskedSum:
    """A sum behind the clients' masks: the survivors open those of pairs, a committee those of the lattice."""

    survivors: tuple[int, ...]
    phase: Confirming | lattice.Agreeing
    exchange: Exchange
    refused: Refused
    remember: Remember

    def unmask(self) -> Sum:
        """Ask for signatures of who has survived, and to open the masks; if a sum was spoilt, to find by whom."""
        phase: Confirming | Unmasking | lattice.Agreeing | lattice.Opening | lattice.Tracing | Sum = self.phase
        while not isinstance(phase, Sum):
            run_exchange(phase, self.exchange, self.refused)
            if isinstance(
                phase, lattice.Agreeing
            ):  # the next attempt leaves out who was restored from an older state
                self.remember(phase.claims)
            phase = phase.close()
        return phase


@dataclass(frozen=True, slots=True)
class OpenSum:
    """A sum that needs no unmasking; `require` refuses it where the protocol could not have opened it."""

    survivors: tuple[int, ...]
    vector: RingVector = field(repr=False)
    require: Callable[[], None] = lambda: None

    def unmask(self) -> Sum:
        """Return the sum; raises TooFewClients where too few would have helped."""
        self.require()
        return Sum(self.vector, ())


class Machine(Protocol):
    """The client's side of an attempt, in this process."""

    def receive(self, request: bytes, /) -> bytes | None:
        """Return the answer to a request; None counts as dropped out."""


@dataclass(frozen=True, slots=True)
class InProcess:
    """The transport to clients in this process, whose machines are made when they are first asked."""

    join: Callable[[int], Machine]
    left: Callable[[Mapping[int, bytes]], Iterable[int]] = (
        iter  # from requests to those who answer, in their order
    )
    machines: dict[int, Machine] = field(default_factory=dict)

    def exchange(self, requests: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """Hand each request to its client and yield the answers of those who are left."""
        for client in self.left(requests):
            if client not in self.machines:
                self.machines[client] = self.join(client)
            answer = self.machines[client].receive(requests[client])
            if answer is not None:
                yield client, answer


def ignore(*_told: object) -> None:
    """Remember no position; count clients that answered badly as dropped out, and say no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invite:
    """What the server brings to an attempt of enrolled clients."""

    roster: Roster | CertifiedRoster | None = None  # with certificates in the lattice protocol
    opening: Opening | None = None  # proof of the draw, where cohorts are drawn verifiably
    remembered: Mapping[int, Position] = field(default_factory=dict)  # where the server has met each client last
    remember: Remember = ignore  # takes the positions of all that joined, whatever becomes of the attempt
    excluded: Collection[int] = ()  # clients that were found to cheat in this run: they count as dropped out


NOBODY_ENROLLED = Invite()


def gather(
    session: AttemptSession,
    model: bytes,
    exchange: Exchange,
    *,
    task: bytes = b"",
    invite: Invite = NOBODY_ENROLLED,
    refused: Refused = ignore,
) -> MaskedSum:
    """Run the exchanges of the protocol up to the masked vectors; raises TooFewClients with those who are left.

    `task` is all that decides what is trained beside the model, `with_clip` puts a round's clip before it; clients
    that were told otherwise add only noise. Requests of the lattice protocol name the model by its digest: the
    transport must carry it.
    """
    if isinstance(session, lattice.Session):
        # The committee is asked for its keys and to check them, then everybody for the one message of most clients.
        invitations = lattice.Invitations(
            session=session,
            roster=invite.roster,
            opening=invite.opening,
            remembered=invite.remembered,
            excluded=invite.excluded,
        )
        vouching = run_exchange(lattice.Convening(invitations), exchange, refused).close()
        asking = run_exchange(vouching, exchange, refused).close(task, lattice.model_digest(model))
        contributing = run_exchange(asking, exchange, refused)
        invite.remember(contributing.positions)
        # The server's own randomness: a nonce, and coefficients that no member may foresee. No sum depends on it.
        agreeing = contributing.close(Entropy.system())
        return MaskedSum(agreeing.survivors, agreeing, exchange, refused, invite.remember)
    if isinstance(invite.roster, CertifiedRoster):
        raise ConfigError("certificates are for the lattice protocol, clients of others hold the roster")
    opening, remembered = invite.opening, invite.remembered
    inviting = Advertising(
        session, invite.roster, opening=opening, remembered=remembered, excluded=invite.excluded
    )
    advertising = run_exchange(inviting, exchange, refused)
    invite.remember(advertising.positions)
    masking = run_exchange(advertising.close(), exchange, refused).close(task, model)
    confirming = run_exchange(masking, exchange, refused).close()
    return MaskedSum(confirming.survivors, confirming, exchange, refused, invite.remember)


def run_exchange(phase: P, exchange: Exchange, refused: Refused) -> P:
    """Run one exchange of a phase, tell who answered badly, and return the phase."""
    for client, error in collect(phase, exchange).items():
        refused(client, error)
    return phase


@runtime_checkable
class Attempts(Protocol[B]):
    """Who takes part in an attempt, and how their vectors come together: all that a transport has to supply."""

    def draw(self, attempt: Attempt) -> tuple[int, ...]:
        """Return the sorted cohort: after a charged attempt a fresh one, after a void one it may be the same again.

        Raises ForgottenAttempt where clients have begun the attempt and the ledger does not know it, and LostRound
        where they have gone beyond its round.
        """

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> B:
        """Return the session of an attempt, bound to the plan and, where there is one, to a roster and its draw."""

    def collect(self, session: B, model: FloatVector, participations: Mapping[int, int]) -> Collected:
        """Gather a session's vectors, trained from a model; each client has taken part so often before."""


@runtime_checkable
class ClippedAttempts(Protocol[B]):
    """Attempts that tell their clients the clip of the round, where the plan's adapts."""

    def with_clip(self, clip: float) -> Attempts[B]:
        """Return the attempts of a round with this clip."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round gave: the mean over the planned cohort, in which attempt, and of how many clients.

    `clipping` is None where the clip is fixed, `failures`, the noised number of clients whose training failed, where
    they are not counted.
    """

    mean: FloatVector = field(repr=False)
    attempt: int
    survivors: int
    clipping: ClipStep | None = None
    failures: float | None = None


def run_plan(plan: Plan) -> RunPlan:
    """Return what a run of this plan is charged: all attempts that it may take, each with no more than a quorum."""
    return RunPlan(
        plan=plan.digest,
        release=plan.release("", 0, 0, (), plan.quorum),
        rounds=plan.rounds,
        max_attempts=plan.max_attempts,
        attempts_per_round=plan.attempts_per_round,
        # Records have no cap, so runs of any length may share a budget.
        max_participations=plan.max_participations if plan.batches is None else 1,
        epsilon=plan.epsilon,
        delta=plan.delta,
        observer=plan.against,
    )


def aggregate(
    plan: Plan,
    first: Attempt,
    model: FloatVector,
    attempts: Attempts[B],
    ledger: Ledger,
    *,
    clip: float | None = None,
) -> Outcome:
    """Try a round, from its first attempt on, until one succeeds, each recorded before it can reveal anything.

    Where every vector counts (`shared`) and the same clients are drawn again, an attempt goes on with
    those who were left; not so if signed, where cohorts have the planned size. With standing keys the members are those
    who are there, and an attempt that is void stays charged.

    Args:
        plan: what clients and server have agreed on.
        first: the attempt to begin with.
        model: the parameters that clients start from.
        attempts: draws cohorts, and gathers and opens their sums.
        ledger: where attempts are recorded.
        clip: that of the round, where the plan's clip adapts: a function of earlier outcomes alone.

    Guarantee: the reservation precedes every masked vector and the commitment precedes the request that unmasks; an
    attempt is voided only before that request; a client's earlier contributions are counted again for each attempt.
    Checked: test_round.py::test_charges_come_before_what_they_pay_for,
    test_never_less.py::test_a_retry_counts_the_attempt_before_it.
    """
    check_arguments(aggregate, {"plan": plan, "first": first, "model": model, "attempts": attempts, "clip": clip})
    if not hasattr(ledger, "reserve"):
        raise ConfigError(f"ledger must be a Ledger, got {type(ledger).__name__}")
    run, number = first.run, first.round
    ledger.require_plan(run, plan.digest)
    require_clip(plan, clip)
    if clip is not None:
        if not isinstance(attempts, ClippedAttempts):
            raise ConfigError(
                f"{type(attempts).__name__} tells its clients no clip, and the plan's adapts (clip=auto)"
            )
        attempts = attempts.with_clip(clip)
    may_shrink = delivery_of(plan) is Delivery.EVERYONE and plan.consistency is Consistency.ASSUMED
    left: tuple[int, ...] = ()  # after a void attempt in which every vector counts
    for attempt in (Attempt(run, number, each) for each in range(first.number, plan.attempts_per_round)):
        cohort = attempts.draw(attempt)
        if left and set(left) < set(cohort):
            cohort = left
        participations, left = dict(ledger.participations(run, cohort)), ()
        is_once = plan.sampling.method is Sampling.ONCE
        if is_once and (used := [client for client in cohort if participations[client]]):
            # Zeros would move the model by noise alone; nothing here rests on who was drawn, so it can be said.
            raise ConfigError(
                f"sampling `once` uses each client once, and client {used[0]} has contributed already"
            )
        session = attempts.bind(attempt, cohort)
        ledger.reserve(plan.release(run, number, attempt.number, cohort, plan.quorum))
        try:
            collected = attempts.collect(session, model, participations)
        except VoidStep:
            continue  # with standing keys every attempt is charged: late vectors may still complete its sum
        except TooFewClients as lack:
            if plan.protocol is not mechanisms.Protocol.STANDING:  # where vectors were sent, they stay charged
                ledger.void(run, number, attempt.number)
            # With fewer than planned only where no client has checked the size, and every vector counts.
            if may_shrink and len(lack.left) > 1:
                left = lack.left
            continue
        survivors = collected.survivors
        ledger.commit(plan.release(run, number, attempt.number, survivors, len(survivors)))
        try:
            total = collected.unmask().vector
        except TooFewClients:
            continue  # still charged: some shares may have been opened
        mean = plan.codec.decode(plan.ring.center(total), rotation_seed(session), plan.divisor)
        clipping = failures = None
        if plan.counts_failures:
            failures, mean = float(mean[-1]) * plan.divisor / plan.codec.clip, mean[:-1]
        if plan.weighting is not None:  # the last coordinate is the mean of weights, below the mean of bits
            noise = math.sqrt(plan.noise(len(survivors)).sum_variance) * plan.codec.granularity / plan.cohort_size
            mean = plan.weighting.mean(mean, noise)
        elif plan.adaptive_clip is not None and clip is not None:
            clipping = plan.adaptive_clip.step(clip, float(mean[-1]))
            mean = mean[:-1] * np.float32(clip)
        return Outcome(mean, attempt.number, len(survivors), clipping, failures)
    raise TooFewClients(f"round {number + 1} failed in all of its {plan.attempts_per_round} attempts")
