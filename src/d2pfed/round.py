"""One private round, client half and server half, whatever carries the bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from d2pfed.accounting import Release
from d2pfed.codec import FloatVector
from d2pfed.errors import TooFewClients
from d2pfed.mechanism import Share
from d2pfed.plan import Plan
from d2pfed.randomness import Entropy, digest
from d2pfed.ring import RingVector


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which aggregation this is: keys, noise and rotation are fresh for each."""

    run: str
    round: int
    number: int


def rotation_seed(plan: Plan, attempt: Attempt) -> bytes:
    """Return the public seed of an attempt's rotation: both sides know it, so it travels in no message."""
    return digest("rotation", plan.digest, attempt.run, attempt.round, attempt.number)


def contribute(
    plan: Plan, attempt: Attempt, update: NDArray[np.floating], share: Share, entropy: Entropy
) -> RingVector:
    """Turn a client's update into the ring vector that it masks and sends: the only encoder there is."""
    centres = plan.codec.prepare(update, rotation_seed(plan, attempt))
    return plan.ring.wrap(plan.mechanism.encode(centres, share, entropy))


def reveal(plan: Plan, attempt: Attempt, total: RingVector) -> FloatVector:
    """Turn an unmasked sum into the mean over the planned cohort."""
    return plan.codec.decode(plan.ring.centre(total), rotation_seed(plan, attempt), plan.cohort)


def place(cohort: Sequence[int], client: int, group: Entropy | None) -> Share:
    """Return a client's place in the cohort; the bearer is a public function of the cohort alone."""
    bearer = int.from_bytes(digest("bearer", *cohort), "little") % len(cohort)
    return Share(cohort.index(client), len(cohort), bearer, group)


class Collected(Protocol):
    """Masked vectors of one attempt, summed and not yet opened."""

    @property
    def survivors(self) -> tuple[int, ...]:
        """The clients whose vector is in the sum."""
        ...

    def unmask(self) -> RingVector:
        """Open the sum; raises TooFewClients if too few help."""
        ...


class Book(Protocol):
    """Where a round is charged before it happens."""

    def reserve(self, run: str, release: Release) -> object:
        """Charge for the worst that this attempt may release."""
        ...

    def commit(self, run: str, release: Release) -> object:
        """Charge for what unmasking will release."""
        ...

    def void(self, run: str, number: int, attempt: int) -> object:
        """Take back the charge of an attempt in which nothing can be unmasked any more."""
        ...

    def next_attempt(self, run: str, number: int) -> int:
        """Return the first attempt at a round that was never begun."""
        ...


Gather = Callable[[Attempt], Collected]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round gave: the mean over the planned cohort, in which attempt, and of how many clients."""

    mean: FloatVector = field(repr=False)
    attempt: int
    survivors: int


def aggregate(plan: Plan, run: str, round_number: int, gather: Gather, book: Book) -> Outcome:
    """Run a round until an attempt succeeds, charging each before it can reveal anything.

    Guarantee: the reservation precedes every masked vector and the commitment precedes the request that unmasks; an
    attempt is voided only before that request. Checked: test_round.py::test_charges_come_before_what_they_pay_for.
    """
    first = book.next_attempt(run, round_number)  # not 0 where an earlier server was interrupted
    for number in range(first, first + plan.attempts):
        attempt = Attempt(run, round_number, number)
        book.reserve(run, plan.release(round_number, number, ()))
        collected = _gathered(gather, attempt)
        if collected is None or len(collected.survivors) < plan.quorum:
            book.void(run, round_number, number)
            continue
        book.commit(run, plan.release(round_number, number, collected.survivors))
        try:
            total = collected.unmask()
        except TooFewClients:
            continue  # charged all the same: some shares may have been opened
        return Outcome(reveal(plan, attempt, total), number, len(collected.survivors))
    raise TooFewClients(f"round {round_number} failed in all of its {plan.attempts} attempts")


def _gathered(gather: Gather, attempt: Attempt) -> Collected | None:
    try:
        return gather(attempt)
    except TooFewClients:
        return None
