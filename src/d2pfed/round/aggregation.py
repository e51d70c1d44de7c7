"""The server half of a round: attempts, each charged before it can reveal anything, until one succeeds."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from d2pfed.accounting import Release, Sampling
from d2pfed.errors import ConfigError, TooFewClients, VoidStep
from d2pfed.ledger import RunPlan
from d2pfed.noise.clipping import ClipStep
from d2pfed.noise.codec import FloatVector
from d2pfed.plan import Plan
from d2pfed.round.gathering import Collected
from d2pfed.round.participant import require_clip
from d2pfed.round.session import Attempt, AttemptBinding, delivery_of, rotation_seed
from d2pfed.secagg import Delivery
from d2pfed.secagg.pairwise.graph import Consistency

FEWEST = 2  # clients of a cohort that one can hide among


B = TypeVar("B", bound=AttemptBinding)


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


class Attempts(Protocol[B]):
    """Who takes part in an attempt, and how their vectors come together: all that a transport has to supply."""

    def draw(self, attempt: Attempt) -> tuple[int, ...]:
        """Return the sorted cohort: after a charged attempt a fresh one, after a void one it may be the same again."""
        ...

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> B:
        """Return the session of an attempt, bound to the plan and, where there is one, to a roster and its draw."""
        ...

    def collect(self, session: B, model: FloatVector, participations: Mapping[int, int]) -> Collected:
        """Gather a session's vectors, trained from a model; each client has taken part so often before."""
        ...


@runtime_checkable
class ClippedAttempts(Protocol[B]):
    """Attempts that tell their clients the clip of the round, where the plan's adapts."""

    def with_clip(self, clip: float) -> Attempts[B]:
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
    ledger: ReleaseLedger,
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
        participations, left = _participations(plan, run, cohort, ledger), ()
        session = attempts.bind(attempt, cohort)
        ledger.reserve(plan.release(run, number, attempt.number, cohort, plan.quorum))
        try:
            collected = attempts.collect(session, model, participations)
        except VoidStep:
            continue  # with standing keys every attempt is charged: late vectors may still complete its sum
        except TooFewClients as lack:
            if not plan.uses_standing_keys:  # where vectors were sent, they stay charged
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
        mean = plan.codec.decode(plan.ring.center(total), rotation_seed(session), plan.divisor)
        return _outcome(plan, mean, clip, attempt.number, len(survivors))
    raise TooFewClients(f"round {number} failed in all of its {plan.attempts_per_round} attempts")


def _clipped(plan: Plan, attempts: Attempts[B], clip: float | None) -> Attempts[B]:
    """Return the attempts with the clip of the round; refuse those that would not tell it to their clients."""
    require_clip(plan, clip)
    if clip is None:
        return attempts
    if isinstance(attempts, ClippedAttempts):
        return attempts.with_clip(clip)
    raise ConfigError(f"{type(attempts).__name__} tells its clients no clip, and the plan's adapts (clip=auto)")


def _outcome(plan: Plan, mean: FloatVector, clip: float | None, attempt: int, survivors: int) -> Outcome:
    """Return a decoded mean in real units, its last coordinate read as the mean of bits or weights, if there is one."""
    if plan.weighting is not None:
        noise = math.sqrt(plan.noise(survivors).sum_variance) * plan.codec.granularity / plan.cohort_size
        return Outcome(plan.weighting.mean(mean, noise), attempt, survivors)
    if plan.adaptive_clip is None or clip is None:
        return Outcome(mean, attempt, survivors)
    clipping = plan.adaptive_clip.step(clip, float(mean[-1]))
    return Outcome(mean[:-1] * np.float32(clip), attempt, survivors, clipping)


def _may_shrink(plan: Plan) -> bool:
    """Say whether an attempt goes on with fewer clients than planned: nobody signed has checked it for them."""
    return delivery_of(plan) is not Delivery.QUORUM and plan.consistency is Consistency.ASSUMED


def _participations(plan: Plan, run: str, cohort: tuple[int, ...], ledger: ReleaseLedger) -> dict[int, int]:
    """Return how often each of a cohort has contributed; a client at its cap sends zero and its noise."""
    participations = dict(ledger.participations(run, cohort))
    if plan.sampling.method is Sampling.ONCE and (used := [client for client in cohort if participations[client]]):
        # Zeros would move the model by noise alone; nothing here rests on who was drawn, so it can be said.
        raise ConfigError(f"sampling `once` uses each client once, and client {used[0]} has contributed already")
    return participations
