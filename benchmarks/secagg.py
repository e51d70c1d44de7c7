"""What secure aggregation costs: the server in this process, all clients in others, bytes in between."""

import multiprocessing
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread

import numpy as np

from benchmarks.crowd import CHECKED, REAL, Answers, Crowd, enrolled
from benchmarks.flower_secagg import FlowerCost, estimate_flower, measure_flower
from benchmarks.peers import attempt
from benchmarks.scales import BESIDE_FLOWER, ESTIMATED_FLOWER, MODEST, Scale
from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg import Advertising, Client, Contribute, ServerPhase, Session, collect, crypto, shamir
from d2pfed.secagg.trust import Consistency
from d2pfed.secagg.wire import ClientId, Outbox

END = b""
_AHEAD = 4  # requests that wait at a process of clients, so that it never waits for the server


@dataclass(frozen=True, slots=True, kw_only=True)
class SecAggRow:
    """One measured round; seconds are those of the processor, except for the whole round's; None: not measured."""

    implementation: str
    clients: int
    dimension: int
    bits: int
    dropouts: int
    client_seconds: float | None
    server_seconds: float | None
    round_seconds: float | None
    upload_bytes: int | None
    server_peak_mib: float | None
    error: str = ""  # one line, where a peer is absent or has failed


def bench_secagg(scales: Iterable[Scale]) -> Iterator[SecAggRow]:
    """Measure our rounds, each beside Flower's where the scale is one to compare at."""
    for scale in scales:
        yield measure_crowd(scale) if scale.is_crowd else measure(scale)
        if scale in (*BESIDE_FLOWER, *MODEST):
            yield _flower("flower", scale, partial(measure_flower, scale.clients, scale.dimension, scale.lost))
        if scale in ESTIMATED_FLOWER:
            estimate = partial(estimate_flower, scale.clients, scale.dimension, scale.dropouts)
            yield _flower("flower, scaled from one client and three secrets", scale, estimate)


def _flower(name: str, scale: Scale, measure_it: Callable[[], FlowerCost]) -> SecAggRow:
    cost, error = attempt(("flwr",), measure_it)
    return row_of(name, scale, cost, error)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one client, the server and the whole round took, and what a client sent."""

    client_seconds: float
    server_seconds: float
    round_seconds: float
    upload_bytes: int


def row_of(implementation: str, scale: Scale, cost: Cost | FlowerCost | None, error: str = "") -> SecAggRow:
    """Return the row of a cost."""
    is_ours = isinstance(cost, Cost)
    return SecAggRow(
        implementation=implementation,
        clients=scale.clients,
        dimension=scale.dimension,
        bits=scale.bits if is_ours else 64,
        dropouts=scale.dropouts,
        client_seconds=None if cost is None else cost.client_seconds,
        server_seconds=None if cost is None else cost.server_seconds,
        round_seconds=None if cost is None else cost.round_seconds,
        upload_bytes=None if cost is None else cost.upload_bytes,
        server_peak_mib=None if cost is None else _peak_mib(),
        error=error,
    )


def measure(scale: Scale, processes: int = 1, agree: crypto.Agree = crypto.agree) -> SecAggRow:
    """Run one round, its clients spread over so many processes, and check its sum; the peak is of this one so far.

    Each client computes its secrets itself, as on a machine of its own, unless `agree` says otherwise.
    """
    spawning = multiprocessing.get_context("spawn")
    workers = []
    for number in range(processes):
        here, there = spawning.Pipe()
        arguments = scale, there, range(number, scale.clients, processes), agree
        worker = spawning.Process(target=serve_clients, args=arguments, daemon=True)
        worker.start()
        workers.append((worker, here))
    for _, here in workers:
        here.recv_bytes()  # the clients are there
    transport = Transport([here for _, here in workers], scale.lost, ahead=_AHEAD)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    total, survivors = _run(scale, transport)
    server_seconds, round_seconds = time.process_time() - begun_cpu, time.perf_counter() - begun
    client_seconds = 0.0
    for worker, here in workers:
        here.send_bytes(END)
        client_seconds += float(here.recv_bytes())
        worker.join()
    expected = sum(survivors) % scale.session().ring.modulus
    if len(survivors) != scale.clients - scale.dropouts or bool((total != expected).any()):
        raise ConfigError(f"the sum of {scale} is wrong, so its cost means nothing")
    each = client_seconds / scale.clients
    return row_of("d2pfed", scale, Cost(each, server_seconds, round_seconds, transport.largest_upload))


def measure_loopback(scale: Scale) -> float:
    """Return the wall-clock seconds of one round whose clients are all in this process, as simulations have them."""
    session, root, agree = scale.session(), Entropy.system(), crypto.PairSecrets().agree
    begun = time.perf_counter()
    clients = {
        client: Client(session, client, _constant(session, client), root.child(client), agree=agree)
        for client in session.cohort
    }
    total, survivors = _run(scale, _Loopback(clients, scale.lost))
    seconds = time.perf_counter() - begun
    if bool((total != sum(survivors) % session.ring.modulus).any()):
        raise ConfigError(f"the sum of {scale} is wrong, so its cost means nothing")
    return seconds


@dataclass(frozen=True, slots=True)
class _Loopback:
    """Carries requests to clients in this process."""

    clients: Mapping[ClientId, Client]
    lost: frozenset[ClientId]

    def everyone(self, outbox: Mapping[ClientId, bytes]) -> Iterator[tuple[ClientId, bytes]]:
        """Ask all that are in the outbox."""
        return ((client, self.clients[client].receive(outbox[client])) for client in outbox)

    def survivors(self, outbox: Mapping[ClientId, bytes]) -> Iterator[tuple[ClientId, bytes]]:
        """Ask all that are in the outbox and not lost."""
        asked = (client for client in outbox if client not in self.lost)
        return ((client, self.clients[client].receive(outbox[client])) for client in asked)


class _Watch:
    """Processor seconds of the server and of one real client in a crowd, and the bytes that the latter sends."""

    def __init__(self, real: Client, client: ClientId) -> None:
        self.server, self.client, self.sent = 0.0, 0.0, 0
        self._real, self._name = real, client

    def exchange(self, phase: ServerPhase, crowd: Callable[[Outbox, bytes], Answers]) -> None:
        """Build every request, hear the real client, then the crowd."""
        requests = phase.outbox
        request = b""
        for client in requests:
            with _counted(self, "server"):
                built = requests[client]
            request = built if client == self._name else request
        if not request:
            return
        with _counted(self, "client"):
            answer = self._real.receive(request)
        self.sent += len(answer)
        for client, data in chain([(self._name, answer)], crowd(requests, answer)):
            with _counted(self, "server"):
                phase.receive(client, data)


@contextmanager
def _counted(watch: _Watch, who: str) -> Iterator[None]:
    begun = time.process_time()
    yield
    setattr(watch, who, getattr(watch, who) + time.process_time() - begun)


def measure_crowd(scale: Scale) -> SecAggRow:
    """Measure the server and one real client in a round whose other clients are played by one helper.

    The sum is checked where the helper has put its masks, in the first coordinates.
    """
    session, roster = scale.session(), scale.roster() if scale.consistency is Consistency.SIGNED else None
    root, begun = Entropy.system(), time.perf_counter()

    def make(client: ClientId, entropy: Entropy) -> Client:
        return Client(session, client, _constant(session, 7), entropy, *enrolled(roster, client))

    crowd = Crowd(session, scale.lost, make, root)
    shamir.split([1], 128, range(1, 129), root.stream())  # compile before the clock runs
    watch = _Watch(make(session.cohort[REAL], root.child("real")), session.cohort[REAL])
    advertising = Advertising(session, roster)
    watch.exchange(advertising, crowd.advertise)
    with _counted(watch, "server"):
        sharing = advertising.close()
    watch.exchange(sharing, crowd.share)
    with _counted(watch, "server"):
        masking = sharing.close(b"", bytes(4 * session.dimension))
    watch.exchange(masking, crowd.mask)
    with _counted(watch, "server"):
        confirming = masking.close()
    watch.exchange(confirming, crowd.confirm)
    with _counted(watch, "server"):
        unmasking = confirming.close()
    watch.exchange(unmasking, crowd.unmask)
    with _counted(watch, "server"):
        total = unmasking.close().vector
    if len(confirming.survivors) != scale.clients - scale.dropouts or bool((total[:CHECKED] != 7).any()):
        raise ConfigError(f"the sum of {scale} is wrong, so its cost means nothing")
    name = f"d2pfed, {scale.consistency.value}, one client and the server measured"
    return row_of(name, scale, Cost(watch.client, watch.server, time.perf_counter() - begun, watch.sent))


def serve_clients(scale: Scale, connection: Connection, served: Sequence[ClientId], agree: crypto.Agree) -> None:
    """Be some clients of a round: answer each request, then say how long the processor worked."""
    session, root = scale.session(), Entropy.system()
    roster = scale.roster() if scale.consistency is Consistency.SIGNED else None
    clients = {
        client: Client(
            session, client, _constant(session, client), root.child(client), *enrolled(roster, client), agree
        )
        for client in served
    }
    connection.send_bytes(b"ready")
    begun = time.process_time()
    requests: SimpleQueue[tuple[bytes, bytes]] = SimpleQueue()
    Thread(target=_listen, args=(connection, requests), daemon=True).start()
    while (asked := requests.get())[0] != END:
        connection.send_bytes(clients[int(asked[0])].receive(asked[1]))
    connection.send_bytes(str(time.process_time() - begun).encode())


def _listen(connection: Connection, requests: "SimpleQueue[tuple[bytes, bytes]]") -> None:
    """Take requests off the connection as they come: whoever sends one is never kept from reading answers."""
    name = b"-"
    while name != END:
        name = connection.recv_bytes()
        requests.put((name, b"" if name == END else connection.recv_bytes()))


class Transport:
    """Carries requests to the other processes, and loses the answers of the lost clients once keys are shared.

    `ahead` is how many requests a process has in hand; more than one needs processes that always listen.
    """

    def __init__(self, connections: Sequence[Connection], lost: frozenset[ClientId], *, ahead: int = 1) -> None:
        self._ahead = ahead
        self._connections = connections
        self._lost = lost
        self._sent: dict[ClientId, int] = {}

    @property
    def largest_upload(self) -> int:
        """Return the most that one client has sent."""
        return max(self._sent.values())

    def everyone(self, outbox: Mapping[ClientId, bytes]) -> Iterator[tuple[ClientId, bytes]]:
        """Ask all that are in the outbox."""
        return self._ask(outbox, list(outbox))

    def survivors(self, outbox: Mapping[ClientId, bytes]) -> Iterator[tuple[ClientId, bytes]]:
        """Ask all that are in the outbox and not lost."""
        return self._ask(outbox, [client for client in outbox if client not in self._lost])

    def _ask(self, outbox: Mapping[ClientId, bytes], asked: list[ClientId]) -> Iterator[tuple[ClientId, bytes]]:
        """Give each process its next request as soon as it has answered one."""
        count = len(self._connections)
        waiting = {
            connection: iter([client for client in asked if client % count == number])
            for number, connection in enumerate(self._connections)
        }
        pending: dict[Connection, deque[ClientId]] = {connection: deque() for connection in waiting}
        for _ in range(self._ahead):
            for connection, clients in pending.items():
                self._send(connection, outbox, waiting[connection], clients)
        while busy := {connection: clients for connection, clients in pending.items() if clients}:
            for ready in wait(list(busy)):
                connection = next(each for each in busy if each is ready)
                client, answer = pending[connection].popleft(), connection.recv_bytes()
                self._send(connection, outbox, waiting[connection], pending[connection])
                self._sent[client] = self._sent.get(client, 0) + len(answer)
                yield client, answer

    @staticmethod
    def _send(
        connection: Connection,
        outbox: Mapping[ClientId, bytes],
        clients: Iterator[ClientId],
        pending: deque[ClientId],
    ) -> None:
        """Send the next request of a process, if there is one."""
        client = next(clients, None)
        if client is not None:
            connection.send_bytes(str(client).encode())
            connection.send_bytes(outbox[client])
            pending.append(client)


def _run(scale: Scale, transport: Transport | _Loopback) -> tuple[RingVector, tuple[ClientId, ...]]:
    session = scale.session()
    advertising = Advertising(session, scale.roster() if scale.consistency is Consistency.SIGNED else None)
    collect(advertising, transport.everyone)
    sharing = advertising.close()
    collect(sharing, transport.everyone)
    masking = sharing.close(b"", bytes(4 * session.dimension))
    collect(masking, transport.survivors)
    confirming = masking.close()
    collect(confirming, transport.everyone)
    unmasking = confirming.close()
    collect(unmasking, transport.everyone)
    return unmasking.close().vector, confirming.survivors


def _constant(session: Session, client: ClientId) -> Contribute:
    def contribute(task: bytes, model: bytes, group_seed: bytes | None) -> RingVector:  # noqa: ARG001 - no training
        return np.full(session.dimension, client % session.ring.modulus, np.uint32)

    return contribute


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
