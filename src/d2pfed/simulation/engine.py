"""The in-process engine: a cohort is trained, encoded and added up in this process, by either of two fidelities."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

import numpy as np

from d2pfed.codec import FloatVector
from d2pfed.errors import TooFewClients
from d2pfed.plan import Plan
from d2pfed.randomness import Entropy
from d2pfed.ring import RingVector
from d2pfed.round import Collected, Masked, Participant, gather
from d2pfed.secagg import Client, Delivery, Session, carried, group_seed_of, require_enough
from d2pfed.simulation.dropouts import EXCHANGES, Dropouts
from d2pfed.wire import subset_of

Updates = Callable[[Sequence[int]], Iterator[FloatVector]]  # of these clients, in their order, each its own array

# Not while the next updates are trained: torch's own threads wait for one another, and so for an encoder between them.
_ENCODERS = 2  # threads; the kernels of encoding run side by side
_TOGETHER = 16  # updates that the threads share: they bound memory, and handing over costs little beside them


class Fidelity(StrEnum):
    """How much of a federation is simulated; both give the same sum, bit for bit."""

    SUM = "sum"  # the clients' own encoder, then a ring sum in place of the protocol
    PROTOCOL = "protocol"  # every message of secure aggregation


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A federation in this process. `taken` counts each client's earlier contributions."""

    plan: Plan
    model: bytes = field(repr=False)
    updates: Updates
    dropouts: Dropouts
    entropy: Entropy
    taken: Mapping[int, int]

    def collect(self, session: Session, fidelity: Fidelity) -> Collected:
        """Gather the cohort's vectors; raises TooFewClients where the protocol would."""
        return self._by_protocol(session) if fidelity is Fidelity.PROTOCOL else self._by_sum(session)

    def _participant(self, client: int) -> Participant:
        return Participant(
            plan=self.plan,
            client=client,
            entropy=self.entropy.child("client", client),
            taken=self.taken.get(client, 0),
        )

    def _by_sum(self, session: Session) -> Collected:
        present = session.cohort
        for exchange in ("advertise", "share"):
            answered = self._left(session, present, exchange)
            ranks = carried(session, subset_of(len(session.cohort), [session.rank(client) for client in answered]))
            present = tuple(session.cohort[rank] for rank in np.flatnonzero(ranks))
        survivors = self._left(session, present, "masked")
        require_enough(session, subset_of(len(session.cohort), [session.rank(client) for client in survivors]))
        total = self._sum(session, survivors)
        return Summed(session, present, survivors, self._left(session, survivors, "unmask"), total)

    def _sum(self, session: Session, survivors: Sequence[int]) -> RingVector:
        """Encode and add up on threads: in a ring the order of a sum does not matter."""
        group = self._group(session)

        def encode(pairs: Sequence[tuple[int, FloatVector]]) -> RingVector:
            part = np.zeros(session.dimension, np.uint32)
            for client, update in pairs:
                session.ring.add_into(part, self._participant(client).contribute(session, update, group))
            return part

        total = encode(())
        trained = zip(survivors, self.updates(survivors), strict=True)
        with ThreadPoolExecutor(_ENCODERS) as pool:
            while pairs := tuple(islice(trained, _TOGETHER)):
                for part in pool.map(encode, [pairs[first::_ENCODERS] for first in range(_ENCODERS)]):
                    session.ring.add_into(total, part)
        return total

    def _by_protocol(self, session: Session) -> Masked:
        return gather(session, self.model, _Loopback(self, session).exchange)

    def _left(self, session: Session, clients: Sequence[int], exchange: str) -> tuple[int, ...]:
        return self.dropouts.left(clients, exchange, self.entropy.child("fate", session.digest))

    def _group(self, session: Session) -> bytes | None:
        if session.delivery is not Delivery.EVERYONE:
            return None
        return group_seed_of(session, {client: self._participant(client).entropy for client in session.cohort})


@dataclass(frozen=True, slots=True)
class Summed:
    """A ring sum that nothing masks, opened under the protocol's conditions."""

    session: Session
    sharers: tuple[int, ...]
    survivors: tuple[int, ...]
    helpers: tuple[int, ...]
    total: RingVector = field(repr=False)

    def unmask(self) -> RingVector:
        """Return the sum if enough of each client's holders would have opened its secret."""
        ranks = [self.session.rank(client) for client in self.helpers]
        helping = subset_of(len(self.session.cohort), ranks)
        for client in self.sharers:
            holders = self.session.graph.holders(self.session.rank(client))
            if np.count_nonzero(helping[holders]) < self.session.threshold:
                raise TooFewClients(f"{self.session.threshold} shares must open a secret of client {client}")
        return self.total


class _Loopback:
    """A transport inside one process: the clients' machines, and who is lost before which exchange."""

    def __init__(self, simulation: Simulation, session: Session) -> None:
        self._simulation = simulation
        self._session = session
        self._clients: dict[int, Client] = {}
        self._exchanges = iter(EXCHANGES)
        self._updates: Iterator[FloatVector] = iter(())

    def exchange(self, requests: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """Hand each request to its client and yield the answers of those who are not lost."""
        name = next(self._exchanges)
        answering = self._simulation._left(self._session, tuple(requests), name)  # noqa: SLF001 - one module
        if name == "masked":  # a whole cohort is trained at once, in the order in which it answers
            self._updates = self._simulation.updates(answering)
        for client in answering:
            yield client, self._machine(client).receive(requests[client])

    def _machine(self, client: int) -> Client:
        if client not in self._clients:
            participant = self._simulation._participant(client)  # noqa: SLF001 - one module
            self._clients[client] = participant.join(self._session, lambda _model: next(self._updates))
        return self._clients[client]
