"""A simulated federation: a cohort is drawn, trained, encoded and added up, by either of two fidelities."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from d2pfed.errors import ConfigError, TooFewClients
from d2pfed.ledger import Ledger
from d2pfed.noise.clipping import with_clip
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import RingVector
from d2pfed.plan import Plan
from d2pfed.round import Attempt, Collected, Fidelity, MaskedSum, Units, gather, session_of
from d2pfed.runs import ExchangeRecord
from d2pfed.secagg import Client, Delivery, Session, Sum, group_seed_of, require_enough, with_enough_holders
from d2pfed.secagg.crypto import PairSecrets
from d2pfed.secagg.pairwise.graph import Graph
from d2pfed.secagg.wire import subset_of
from d2pfed.simulation.backend import Backend, Encoder, finite, simulated_participant
from d2pfed.simulation.dropouts import EXCHANGES, Dropouts
from d2pfed.training import Cohorts, shuffle_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFederation:
    """A federation on this machine's word.

    Attributes:
        plan: what all of its clients have agreed on.
        backend: where clients are trained and encoded.
        cohorts: draws each attempt's cohort.
        dropouts: who is lost before which exchange.
        fidelity: how much of the protocol is simulated.
        entropy: the root of all clients' randomness.
        ledger: says how many attempts of a run are charged, and so which block of a partition is next.
        clip: that of the round, where the plan's adapts.
    """

    plan: Plan
    backend: Backend
    cohorts: Cohorts
    dropouts: Dropouts
    fidelity: Fidelity
    entropy: Entropy
    ledger: Ledger | None  # None where the budget does not allow the run, which then draws nobody
    clip: float | None = None

    def with_clip(self, clip: float) -> "SimulatedFederation":
        """Return the federation in a round with this clip."""
        return replace(self, clip=clip)

    def draw(self, attempt: Attempt) -> tuple[int, ...]:
        """Return the cohort of an attempt."""
        block = 0 if self.ledger is None else self.ledger.charged(attempt.run)
        return self.cohorts.draw(attempt.round, attempt.number, block)

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> Session:
        """Return the session of an attempt."""
        return session_of(self.plan, attempt, cohort)

    def collect(self, session: Session, model: FloatVector, participations: Mapping[int, int]) -> Collected:
        """Gather the cohort's vectors; raises TooFewClients where the protocol would."""
        return collect(
            session,
            model,
            participations,
            plan=self.plan,
            backend=self.backend,
            dropouts=self.dropouts,
            entropy=self.entropy,
            fidelity=self.fidelity,
            clip=self.clip,
        )

    def exchanges(self) -> tuple[ExchangeRecord, ...]:
        """Return nothing: no message travels."""
        return ()


def collect(
    session: Session,
    model: FloatVector,
    participations: Mapping[int, int],
    *,
    plan: Plan,
    backend: Backend,
    dropouts: Dropouts,
    entropy: Entropy,
    fidelity: Fidelity,
    clip: float | None = None,
) -> Collected:
    """Gather a session's vectors on this machine; raises TooFewClients where the protocol would."""
    gathering = _Gathering(session, model, participations, plan, backend, dropouts, entropy, clip)
    return gathering.by_protocol() if fidelity is Fidelity.PROTOCOL else gathering.by_sum()


@dataclass(frozen=True, slots=True)
class _Gathering:
    """The vectors of one session."""

    session: Session
    model: FloatVector = field(repr=False)
    participations: Mapping[int, int]
    plan: Plan
    backend: Backend
    dropouts: Dropouts
    entropy: Entropy
    clip: float | None

    def by_sum(self) -> "Summed":
        """Encode the survivors' updates and add them up, by the protocol's conditions and without its messages."""
        session, present, graph = self.session, self.session.cohort, _graph(self.session)
        for exchange in ("advertise", "share"):
            ranks = with_enough_holders(session, graph, _subset(session, self.left(present, exchange)))
            present = tuple(session.cohort[rank] for rank in np.flatnonzero(ranks))
        survivors = self.left(present, "masked")
        require_enough(session, _subset(session, survivors))
        encoder = Encoder(
            plan=self.plan,
            session=session,
            group=self._group(),
            entropy=self.entropy,
            participations={client: self.participations.get(client, 0) for client in survivors},
            clip=self.clip,
        )
        total, arrived = np.zeros(session.dimension, np.uint32), set[int]()
        for clients, vector in self.backend.encode(encoder, self.model, survivors, self.seed):
            session.ring.add_into(total, vector)
            arrived.update(clients)
        survivors = tuple(client for client in survivors if client in arrived)
        require_enough(session, _subset(session, survivors))
        return Summed(session, present, survivors, self.left(survivors, "unmask"), total)

    def by_protocol(self) -> MaskedSum:
        """Send every message between machines in this process."""
        task = with_clip(b"", self.clip)
        return gather(self.session, self.model.tobytes(), _Loopback(self).exchange, task=task)

    @property
    def seed(self) -> int:
        """The seed of the clients' shuffles."""
        return shuffle_seed(self.session.run, self.session.round)

    def left(self, clients: Sequence[int], exchange: str) -> tuple[int, ...]:
        """Return who is not lost before an exchange."""
        return self.dropouts.left(clients, exchange, self.entropy.child("fate", self.session.digest))

    def _group(self) -> bytes | None:
        if self.session.delivery is not Delivery.EVERYONE:
            return None
        roots = {client: self.entropy.child("client", client) for client in self.session.cohort}
        return group_seed_of(self.session, roots)


def _graph(session: Session) -> Graph:
    """Return the graph, which a simulation must know beforehand: its server keeps to the protocol."""
    if session.fixed_graph is None:
        raise ConfigError("a simulation's server keeps to the protocol: consistency must be assumed, got signed")
    return session.fixed_graph


def _subset(session: Session, clients: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return subset_of(len(session.cohort), [session.rank(client) for client in clients])


@dataclass(frozen=True, slots=True)
class Summed:
    """A ring sum that nothing masks, opened under the protocol's conditions."""

    session: Session
    sharers: tuple[int, ...]
    survivors: tuple[int, ...]
    helpers: tuple[int, ...]
    total: RingVector = field(repr=False)

    def unmask(self) -> Sum:
        """Return the sum if enough of each client's holders would have opened its secret."""
        helping = _subset(self.session, self.helpers)
        shares = _graph(self.session).count_holders(helping) + helping  # a client holds one of its own
        for client in self.sharers:
            if shares[self.session.rank(client)] < self.session.threshold:
                raise TooFewClients(f"{self.session.threshold} shares must open a secret of client {client}")
        return Sum(self.total, ())


class _Loopback:
    """A transport inside one process: the clients' machines, and who is lost before which exchange."""

    def __init__(self, gathering: _Gathering) -> None:
        self._gathering = gathering
        self._clients: dict[int, Client] = {}
        self._pairs = PairSecrets()
        self._updates: dict[int, FloatVector | Units] = {}  # of those who are about to answer
        self._exchanges = iter(EXCHANGES)

    def exchange(self, requests: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """Hand each request to its client and yield the answers of those who are not lost."""
        name = next(self._exchanges)
        answering = self._gathering.left(tuple(requests), name)
        for client in self._trained(answering) if name == "masked" else answering:
            yield client, self._machine(client).receive(requests[client])

    def _trained(self, clients: tuple[int, ...]) -> Iterator[int]:
        """Train a whole cohort at once and yield those who were not lost, in the order in which they answer."""
        gathering = self._gathering
        updates = gathering.backend.train(gathering.model, clients, gathering.seed)
        for client, update in zip(clients, updates, strict=True):
            if update is not None:
                self._updates[client] = finite(update) if isinstance(update, np.ndarray) else update
                yield client

    def _machine(self, client: int) -> Client:
        if client not in self._clients:
            given = self._gathering
            participant = simulated_participant(given.plan, client, given.entropy, given.participations)
            self._clients[client] = participant.join(
                given.session, lambda _task, _model: self._updates.pop(client), agree=self._pairs.agree
            )
        return self._clients[client]
