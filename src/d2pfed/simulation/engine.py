"""The in-process engine: a cohort is trained, encoded and added up in this process, by either of two fidelities."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

import numpy as np

from d2pfed.errors import ConfigError, TooFewClients
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import RingVector
from d2pfed.plan import Plan
from d2pfed.round import Collected, Masked, Participant, gather
from d2pfed.secagg import Client, Delivery, Session, Sum, group_seed_of, require_enough, with_enough_holders
from d2pfed.secagg.graph import Graph
from d2pfed.secagg.wire import subset_of
from d2pfed.simulation.dropouts import EXCHANGES, Dropouts

Updates = Callable[[Sequence[int]], Iterator[FloatVector | None]]  # of these clients, in their order; None: lost

# Not while the next updates are trained: torch's own threads wait for one another, and so for an encoder between them.
_TOGETHER_BYTES = 1 << 26  # of the updates that two threads share: it bounds memory; to change over costs time


class Fidelity(StrEnum):
    """How much of a federation is simulated; both give the same sum, bit for bit."""

    SUM = "sum"  # the clients' own encoder, then a ring sum in place of the protocol
    PROTOCOL = "protocol"  # every message of secure aggregation


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What it takes to encode the clients of a session, beside their updates."""

    plan: Plan
    session: Session
    group: bytes | None = field(repr=False)
    entropy: Entropy
    participations: Mapping[int, int]

    def contribute(self, client: int, update: FloatVector) -> RingVector:
        """Return a client's ring vector, by the client's own encoder."""
        own = _participant(self.plan, client, self.entropy, self.participations)
        return own.contribute(self.session, update, self.group)


# Yields sums of ring vectors, each with the clients that are in it; who is in none was lost.
Encode = Callable[[Work, Sequence[int]], Iterator[tuple[tuple[int, ...], RingVector]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A federation on this machine's word. `participations` counts each client's earlier contributions."""

    plan: Plan
    model: bytes = field(repr=False)
    updates: Updates
    dropouts: Dropouts
    entropy: Entropy
    participations: Mapping[int, int]
    encode: Encode | None = None  # None: in this process

    def collect(self, session: Session, fidelity: Fidelity) -> Collected:
        """Gather the cohort's vectors; raises TooFewClients where the protocol would."""
        return self._by_protocol(session) if fidelity is Fidelity.PROTOCOL else self._by_sum(session)

    def _participant(self, client: int) -> Participant:
        return _participant(self.plan, client, self.entropy, self.participations)

    def _by_sum(self, session: Session) -> Collected:
        present, graph = session.cohort, _graph(session)
        for exchange in ("advertise", "share"):
            answered = self._left(session, present, exchange)
            ranks = with_enough_holders(
                session, graph, subset_of(len(session.cohort), [session.rank(client) for client in answered])
            )
            present = tuple(session.cohort[rank] for rank in np.flatnonzero(ranks))
        survivors = self._left(session, present, "masked")
        _require_enough(session, survivors)
        work = Work(
            plan=self.plan,
            session=session,
            group=self._group(session),
            entropy=self.entropy,
            participations={client: self.participations.get(client, 0) for client in survivors},
        )
        total, arrived = np.zeros(session.dimension, np.uint32), set[int]()
        for clients, vector in (self.encode or self._encode)(work, survivors):
            session.ring.add_into(total, vector)
            arrived.update(clients)
        survivors = tuple(client for client in survivors if client in arrived)
        _require_enough(session, survivors)
        return Summed(session, present, survivors, self._left(session, survivors, "unmask"), total)

    def _encode(self, work: Work, clients: Sequence[int]) -> Iterator[tuple[tuple[int, ...], RingVector]]:
        """Encode on this thread and another, each adding up its part: in a ring a sum's order does not matter."""

        def encode(pairs: Sequence[tuple[int, FloatVector]]) -> tuple[tuple[int, ...], RingVector]:
            part = np.zeros(work.session.dimension, np.uint32)
            for client, update in pairs:
                work.session.ring.add_into(part, work.contribute(client, update))
            return tuple(client for client, _ in pairs), part

        updates = zip(clients, self.updates(clients), strict=True)
        trained = ((client, update) for client, update in updates if update is not None)
        together = max(2, _TOGETHER_BYTES // (4 * work.session.dimension))
        with ThreadPoolExecutor(1) as pool:
            while pairs := tuple(islice(trained, together)):
                rest = pool.submit(encode, pairs[1::2])
                yield encode(pairs[::2])
                yield rest.result()

    def _by_protocol(self, session: Session) -> Masked:
        return gather(session, self.model, _Loopback(self, session).exchange)

    def _left(self, session: Session, clients: Sequence[int], exchange: str) -> tuple[int, ...]:
        return self.dropouts.left(clients, exchange, self.entropy.child("fate", session.digest))

    def _group(self, session: Session) -> bytes | None:
        if session.delivery is not Delivery.EVERYONE:
            return None
        return group_seed_of(session, {client: self._participant(client).entropy for client in session.cohort})


def _participant(plan: Plan, client: int, entropy: Entropy, participations: Mapping[int, int]) -> Participant:
    return Participant(
        plan=plan,
        client=client,
        entropy=entropy.child("client", client),
        participations=participations.get(client, 0),
    )


def _graph(session: Session) -> Graph:
    """Return the graph, which a simulation must know beforehand: its server keeps to the protocol."""
    if session.fixed_graph is None:
        raise ConfigError("a simulation's server keeps to the protocol: consistency must be assumed, got signed")
    return session.fixed_graph


def _require_enough(session: Session, clients: Sequence[int]) -> None:
    require_enough(session, subset_of(len(session.cohort), [session.rank(client) for client in clients]))


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
        ranks = [self.session.rank(client) for client in self.helpers]
        helping = subset_of(len(self.session.cohort), ranks)
        shares = _graph(self.session).count_holders(helping) + helping  # a client holds one of its own
        for client in self.sharers:
            if shares[self.session.rank(client)] < self.session.threshold:
                raise TooFewClients(f"{self.session.threshold} shares must open a secret of client {client}")
        return Sum(self.total, ())


class _Loopback:
    """A transport inside one process: the clients' machines, and who is lost before which exchange."""

    def __init__(self, simulation: Simulation, session: Session) -> None:
        self._simulation = simulation
        self._session = session
        self._clients: dict[int, Client] = {}
        self._exchanges = iter(EXCHANGES)
        self._update: FloatVector = np.empty(0, np.float32)  # of the client that is about to answer

    def exchange(self, requests: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """Hand each request to its client and yield the answers of those who are not lost."""
        name = next(self._exchanges)
        answering = self._simulation._left(self._session, tuple(requests), name)  # noqa: SLF001 - one module
        for client in self._trained(answering) if name == "masked" else answering:
            yield client, self._machine(client).receive(requests[client])

    def _trained(self, clients: tuple[int, ...]) -> Iterator[int]:
        """Train a whole cohort at once and yield those who were not lost, in the order in which they answer."""
        for client, update in zip(clients, self._simulation.updates(clients), strict=True):
            if update is not None:
                self._update = update
                yield client

    def _machine(self, client: int) -> Client:
        if client not in self._clients:
            participant = self._simulation._participant(client)  # noqa: SLF001 - one module
            self._clients[client] = participant.join(self._session, lambda _task, _model: self._update)
        return self._clients[client]
