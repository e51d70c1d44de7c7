"""The in-process engine: a cohort's updates are trained, encoded and added up in this process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from d2pfed.codec import FloatVector
from d2pfed.errors import TooFewClients
from d2pfed.plan import Plan
from d2pfed.randomness import Entropy
from d2pfed.ring import RingVector
from d2pfed.round import Attempt, contribute, place
from d2pfed.simulation.dropouts import Dropouts

Updates = Callable[[Sequence[int]], Iterator[FloatVector]]


@dataclass(frozen=True, slots=True)
class Summed:
    """A ring sum that needs no unmasking, since nothing masked it."""

    survivors: tuple[int, ...]
    total: RingVector = field(repr=False)

    def unmask(self) -> RingVector:
        """Return the sum."""
        return self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Gathers a round with fidelity `sum`: the clients' own encoder, then a ring sum in place of the protocol.

    `taken` counts each client's earlier contributions: at its cap a client sends zero plus its noise.
    """

    plan: Plan
    updates: Updates
    dropouts: Dropouts
    entropy: Entropy
    taken: Mapping[int, int]

    def gather(self, attempt: Attempt, cohort: tuple[int, ...]) -> Summed:
        """Train, encode and add the vectors of those who do not drop out."""
        secret = self.entropy.child("attempt", attempt.run, attempt.round, attempt.number)
        holders = cohort
        for exchange in ("advertise", "share"):
            holders = self.dropouts.left(holders, exchange, secret)
        survivors = self.dropouts.left(holders, "masked", secret)
        if len(self.dropouts.left(survivors, "unmask", secret)) < self.plan.threshold:
            raise TooFewClients(f"threshold is {self.plan.threshold}, fewer of {len(survivors)} helped to unmask")
        total = np.zeros(self.plan.codec.length, np.uint32)
        for client, update in zip(survivors, self.updates(survivors), strict=True):
            own = update if self.taken.get(client, 0) < self.plan.participations else np.zeros_like(update)
            share = place(holders, client, secret.child("group"))
            vector = contribute(self.plan, attempt, own, share, secret.child("client", client))
            self.plan.ring.add_into(total, vector)
        return Summed(survivors, total)
