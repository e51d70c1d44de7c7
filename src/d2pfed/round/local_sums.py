"""A private sum over vectors that are in this process already: the whole protocol, or its sum alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from d2pfed.accounting import is_amplified
from d2pfed.errors import ConfigError
from d2pfed.ledger import Ledger
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import Plan
from d2pfed.round.aggregation import FEWEST, Collected, InProcess, Machine, OpenSum, aggregate, gather
from d2pfed.round.participant import Participant, Update, require_fixed_clip
from d2pfed.round.session import Attempt, AttemptSession, delivery_of, session_of
from d2pfed.secagg import Delivery
from d2pfed.secagg.crypto import PairSecrets


class Fidelity(StrEnum):
    """How much of a federation is simulated; both give the same sum, bit for bit."""

    SUM = "sum"  # the clients' own encoder, then a ring sum in place of the protocol
    PROTOCOL = "protocol"  # every message of secure aggregation


def require_fidelity(plan: Plan, fidelity: Fidelity) -> None:
    """Refuse to send messages of a plan that no protocol carries: only its sum can be simulated."""
    if fidelity is Fidelity.PROTOCOL and plan.protocol is None:
        raise ConfigError(
            f"no protocol adds up vectors of {plan.cohort_size:,} clients with this noise: fidelity must be sum"
        )


def local_sum(
    plan: Plan,
    first: Attempt,
    vectors: Mapping[int, Update],
    ledger: Ledger,
    entropy: Entropy,
    *,
    fidelity: Fidelity = Fidelity.PROTOCOL,
) -> FloatVector:
    """Return the private sum of these clients' vectors, or of their records' where the plan's unit is a record.

    For counts, means, histograms and metrics as well as for updates; over a network, `aggregate` does the same with
    clients that `Participant.join` made elsewhere. The run that `first` names must have begun in the ledger. Its
    clients were not drawn here, so a plan whose guarantee rests on a draw is refused.
    """
    require_fixed_clip(plan, "a private sum")
    require_fidelity(plan, fidelity)
    if is_amplified(plan.sampling):
        raise ConfigError(
            f"a sum over given clients is of a plan with sampling none or once, or of everyone, got "
            f"{plan.sampling.method}, {plan.cohort_size} of {plan.sampling.population}"
        )
    if not FEWEST <= len(vectors) <= plan.cohort_size:
        raise ConfigError(f"a sum is over {FEWEST} clients to the planned {plan.cohort_size}, got {len(vectors)}")
    if not entropy.is_replayed:
        # One root may serve several ledgers, and the same attempt of the same run would have the same noise in each.
        entropy = entropy.child("sum", Entropy.system().key)
    attempts = _LocalVectors(plan, vectors, entropy, fidelity)
    mean = aggregate(plan, first, np.empty(0, np.float32), attempts, ledger).mean
    return mean * np.float32(plan.divisor)


@dataclass(frozen=True, slots=True)
class _LocalVectors:
    """Clients in this process whose vectors are there already (Attempts of round.aggregate)."""

    plan: Plan
    vectors: Mapping[int, Update] = field(repr=False)
    entropy: Entropy
    fidelity: Fidelity

    def draw(self, _attempt: Attempt) -> tuple[int, ...]:
        """Return everyone."""
        return tuple(sorted(self.vectors))

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> AttemptSession:
        """Return the session of an attempt."""
        return session_of(self.plan, attempt, cohort)

    def collect(
        self, session: AttemptSession, _model: FloatVector, participations: Mapping[int, int]
    ) -> Collected:
        """Run the protocol between clients and server in this process, or add up what the clients would mask."""
        own = {
            client: Participant(
                plan=self.plan,
                client=client,
                entropy=self.entropy.child("client", client),
                participations=participations[client],
            )
            for client in session.cohort
        }
        if self.fidelity is Fidelity.SUM and delivery_of(self.plan) is not Delivery.EVERYONE:
            total = np.zeros(session.dimension, np.uint32)
            for client in session.cohort:
                session.ring.add_into(total, own[client].encode(session, self.vectors[client], None))
            return OpenSum(session.cohort, total)
        pairs = PairSecrets()

        def join(client: int) -> Machine:
            return own[client].join(session, lambda _task, _model: self.vectors[client], agree=pairs.agree)

        return gather(session, b"", InProcess(join).exchange)
