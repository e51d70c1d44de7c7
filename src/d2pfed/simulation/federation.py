"""Simulated federations: a cohort is drawn, trained, encoded and added up, or its mean is taken in the clear."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from d2pfed.errors import ConfigError, TooFewClients
from d2pfed.ledger import Ledger
from d2pfed.noise.clipping import with_clip
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.model_bytes import decode_model, encode_model
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import RingVector
from d2pfed.plan import Plan
from d2pfed.round import (
    Attempt,
    AttemptBinding,
    AttemptSession,
    Collected,
    Fidelity,
    InProcess,
    OpenSum,
    Outcome,
    Units,
    gather,
    require_fidelity,
    session_of,
)
from d2pfed.round.aggregation import Machine
from d2pfed.runs import ExchangeRecord
from d2pfed.secagg import Delivery, Roster, crypto, group_seed_of, issue_roster, lattice, require_enough
from d2pfed.secagg.wire import MessageKind, Subset, kind_of, subset_of
from d2pfed.simulation.backend import Backend, Encoder, finite, simulated_participant
from d2pfed.training import Cohorts, shuffle_seed

EXCHANGES = ("advertise", "share", "masked", "unmask")
EXCHANGE_OF = {
    **dict.fromkeys((MessageKind.INVITATION, MessageKind.STANDING_INVITATION), "advertise"),
    **dict.fromkeys((MessageKind.KEY_ADVERTISEMENTS, MessageKind.STANDING_ADVERTS), "share"),
    **dict.fromkeys(
        (MessageKind.MASK_REQUEST, MessageKind.LATTICE_REQUEST, MessageKind.STANDING_REQUEST), "masked"
    ),
}  # all that come later are for unmasking


@dataclass(frozen=True, slots=True)
class Dropouts:
    """Independent losses: the fraction of clients that is lost before each of the four exchanges.

    Where a committee opens sums, only its members notice the first one, and the first three add up for everybody.
    """

    advertise: Fraction = Fraction(0)
    share: Fraction = Fraction(0)
    masked: Fraction = Fraction(0)
    unmask: Fraction = Fraction(0)

    def __post_init__(self) -> None:
        for name in EXCHANGES:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"the dropouts of {name} must be in [0, 1], got {getattr(self, name)}")

    def left(self, clients: Sequence[int], exchange: str, entropy: Entropy) -> tuple[int, ...]:
        """Return the clients that still answer in this exchange: a fair choice, blind to who they are."""
        rate = Fraction(getattr(self, exchange))
        if not rate:
            return tuple(clients)
        coins = entropy.child("dropouts", exchange).stream().below_each(rate.denominator, len(clients))
        keep = np.flatnonzero(coins >= rate.numerator)
        return tuple(clients[int(place)] for place in keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFederation:
    """All clients of a federation on this machine's word (Attempts of round.aggregate).

    The ledger says how many attempts of a run are charged, and so which block of a partition is next; there is none
    where the budget does not allow the run, which then draws nobody.
    """

    plan: Plan
    backend: Backend
    entropy: Entropy  # the root of all clients' randomness
    cohorts: Cohorts | None = None  # draws each attempt's cohort; None where sessions come from elsewhere
    dropouts: Dropouts = field(default_factory=Dropouts)
    fidelity: Fidelity = Fidelity.SUM
    ledger: Ledger | None = None
    clip: float | None = None  # of the round, where the plan's adapts
    # What an audit puts around the vectors of an attempt, to see their sum as the server does.
    watch: Callable[[AttemptSession, Collected], Collected] | None = field(default=None, repr=False)

    def with_clip(self, clip: float) -> "SimulatedFederation":
        """Return the federation in a round with this clip."""
        return replace(self, clip=clip)

    def draw(self, attempt: Attempt) -> tuple[int, ...]:
        """Return the cohort of an attempt."""
        if self.cohorts is None:
            raise ValueError("this federation draws no cohorts")
        block = 0 if self.ledger is None else self.ledger.charged(attempt.run)
        return self.cohorts.draw(attempt.round, attempt.number, block)

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> AttemptSession:
        """Return the session of an attempt."""
        return session_of(self.plan, attempt, cohort)

    def collect(self, session: AttemptSession, model: FloatVector, participations: Mapping[int, int]) -> Collected:
        """Train, encode and add up a cohort's vectors, by messages or by their sum under the protocol's conditions."""
        found = self._collect(session, model, participations)
        return found if self.watch is None else self.watch(session, found)

    def _collect(
        self, session: AttemptSession, model: FloatVector, participations: Mapping[int, int]
    ) -> Collected:
        require_fidelity(self.plan, self.fidelity)
        bits = self.plan.download_bits
        sent = encode_model(model, bits)
        model = decode_model(sent, len(model), bits)  # what clients train from
        if self.fidelity is Fidelity.PROTOCOL:
            transport = self._transport(session, model, sent, participations)
            return gather(session, sent, transport.exchange, task=with_clip(b"", self.clip))
        if isinstance(session, lattice.Session):
            return self._committee_sum(session, model, participations)
        if session.is_signed:
            raise ConfigError(
                "a simulation's server keeps to the protocol: consistency must be assumed, got signed"
            )

        def subset(clients: Sequence[int]) -> Subset:
            return subset_of(len(session.cohort), [session.rank(client) for client in clients])

        present = session.cohort
        for exchange in ("advertise", "share"):
            present = self._left(session, present, exchange)
            require_enough(session, subset(present))
        survivors = self._left(session, present, "masked")
        require_enough(session, subset(survivors))
        group = None
        if session.delivery is Delivery.EVERYONE:
            roots = {client: self.entropy.child("client", client) for client in session.cohort}
            group = group_seed_of(session, roots)
        total, survivors = self._sum(session, model, participations, survivors, group)
        require_enough(session, subset(survivors))
        helping = len(self._left(session, survivors, "unmask"))

        def require_shares() -> None:
            """Refuse the sum if too few are left to open a client's secret."""
            if helping < session.threshold:
                raise TooFewClients(f"{session.threshold} shares must open a secret, got {helping}")

        return OpenSum(survivors, total, require_shares)

    def _committee_sum(
        self, session: lattice.Session, model: FloatVector, participations: Mapping[int, int]
    ) -> OpenSum:
        """Add up the vectors of a cohort whose sums a committee opens, if enough of it are there in time."""
        committee, left = session.committee, self._left_at_each(session)
        there = frozenset(session.members) & left["advertise"]
        require_left("members of the committee must be there", committee.least, there)
        sending = tuple(sorted(left["masked"]))
        total, survivors = self._sum(session, model, participations, sending, None)
        require_left("clients must be left", session.quorum, survivors)
        helping = there & left["unmask"]
        return OpenSum(
            survivors, total, lambda: require_left("members must open a sum", committee.openers, helping)
        )

    def _sum(
        self,
        session: AttemptSession,
        model: FloatVector,
        participations: Mapping[int, int],
        clients: tuple[int, ...],
        group: bytes | None,
    ) -> tuple[RingVector, tuple[int, ...]]:
        """Return the sum of what these clients would mask, and whose vectors are in it."""
        encoder = Encoder(
            plan=self.plan,
            session=session,
            group=group,
            entropy=self.entropy,
            participations={client: participations.get(client, 0) for client in clients},
            clip=self.clip,
        )
        total, arrived = encoded_sum(self.backend, encoder, model, clients)
        return total, tuple(client for client in clients if client in arrived)

    def exchanges(self) -> tuple[ExchangeRecord, ...]:
        """Return nothing: no message travels."""
        return ()

    def _left_at_each(self, session: lattice.Session) -> dict[str, frozenset[int]]:
        """Return who of a cohort is left at each exchange, whether it is asked there or not."""
        left, found = session.cohort, dict[str, frozenset[int]]()
        for exchange in EXCHANGES:
            left = self._left(session, left, exchange)
            found[exchange] = frozenset(left)
        return found

    def _left(self, session: AttemptSession, clients: Sequence[int], exchange: str) -> tuple[int, ...]:
        """Return who is not lost before an exchange."""
        return self.dropouts.left(clients, exchange, self.entropy.child("fate", session.digest))

    def _transport(
        self, session: AttemptSession, model: FloatVector, sent: bytes, participations: Mapping[int, int]
    ) -> InProcess:
        """Return the way to the clients' machines, whose whole cohort is trained when vectors are asked for."""
        updates: dict[int, FloatVector | Units] = {}  # of those who are about to answer
        pairs = crypto.PairSecrets()
        fates = self._left_at_each(session) if isinstance(session, lattice.Session) else None

        def join(client: int) -> Machine:
            own = simulated_participant(self.plan, client, self.entropy, participations)
            return own.join(session, lambda _task, _model: updates.pop(client), agree=pairs.agree, model=sent)

        def left(requests: Mapping[int, bytes]) -> Iterator[int]:
            clients = tuple(requests)
            exchange = EXCHANGE_OF.get(MessageKind(kind_of(requests[clients[0]])), "unmask")
            if fates is None:
                answering = self._left(session, clients, exchange)
            else:
                answering = tuple(client for client in clients if client in fates[exchange])
            if exchange != "masked":
                yield from answering
                return
            trained = self.backend.train(model, answering, shuffle_seed(session.run, session.round))
            for client, update in zip(answering, trained, strict=True):
                if update is not None:
                    updates[client] = finite(update) if isinstance(update, np.ndarray) else update
                    yield client

        return InProcess(join, left)


def require_left(rule: str, least: int, left: Collection[int]) -> None:
    """Refuse to go on with fewer clients than the protocol would."""
    if len(left) < least:
        raise TooFewClients(f"at least {least} {rule}, got {len(left)}", tuple(sorted(left)))


def encoded_sum(
    backend: Backend, encoder: Encoder, model: FloatVector, clients: Sequence[int]
) -> tuple[RingVector, set[int]]:
    """Return the sum of these clients' ring vectors, trained and encoded by a backend, and who is in it."""
    session: AttemptBinding = encoder.session
    total, arrived = np.zeros(session.dimension, np.uint32), set[int]()
    for done, vector in backend.encode(encoder, model, clients, shuffle_seed(session.run, session.round)):
        session.ring.add_into(total, vector)
        arrived.update(done)
    return total, arrived


@dataclass(frozen=True, slots=True)
class ClearFederation:
    """Clients whose updates the server sees: the same cohorts and training, and a mean that is private to nobody."""

    backend: Backend
    cohorts: Cohorts
    run: str  # its name, from which shuffles follow
    note_norms: Callable[[list[float | None]], None] | None = None  # of a round's updates; None: not finite

    def mean(self, number: int, model: FloatVector) -> Outcome:
        """Return the sum of the updates of a round's cohort over its size, as FedAvg has it."""
        cohort = self.cohorts.draw(number, 0, number)
        updates = self.updates(number, model, cohort)
        total = next(updates).astype(np.float64)
        for update in updates:
            total += update
        return Outcome((total / len(cohort)).astype(np.float32), 0, len(cohort))

    def updates(self, number: int, model: FloatVector, cohort: tuple[int, ...]) -> Iterator[FloatVector]:
        """Yield the updates of a round's cohort, without those that were lost."""
        norms: list[float | None] = []
        for update in self.backend.train(model, cohort, shuffle_seed(self.run, number)):
            if isinstance(update, np.ndarray):
                norm = float(np.linalg.norm(update.astype(np.float64)))
                norms.append(norm if np.isfinite(norm) else None)
                yield finite(update)
        if self.note_norms is not None:
            self.note_norms(norms)


def simulated_roster(entropy: Entropy, count: int) -> tuple[dict[int, bytes], Roster]:
    """Return the signing keys of made-up clients, and their roster; without a clock it never expires."""
    secrets = {client: entropy.child("signing key", client).key for client in range(count)}
    keys = {client: crypto.signing_public(secret) for client, secret in secrets.items()}
    authority = crypto.signing_public(entropy.child("authority").key)
    return secrets, issue_roster(keys, authority, serial=1, issued=0, entropy=entropy.child("nonce"))
