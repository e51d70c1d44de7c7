"""What secure aggregation costs: the server in this process, all clients in another, bytes in between."""

import multiprocessing
import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection

import numpy as np

from d2pfed.bench.flower_secagg import measure_flower
from d2pfed.errors import ConfigError
from d2pfed.graph import Risk, choose
from d2pfed.randomness import Entropy, digest
from d2pfed.ring import RingVector
from d2pfed.secagg import Advertising, Client, Consistency, Contribute, Delivery, Session, collect
from d2pfed.wire import ClientId

END = b""


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of one measured round; dropouts happen where they hurt most, after the keys were shared."""

    clients: int
    dimension: int
    bits: int
    dropouts: int

    def session(self) -> Session:
        """Return the session of this size: complete up to 100 clients, sparse beyond."""
        tolerated = max(self.dropouts, self.clients // 10)
        neighbourhood = choose(
            self.clients, Risk(dropouts=tolerated, colluders=self.clients // 10), Consistency.ASSUMED
        )
        return Session(
            run="bench",
            round=0,
            attempt=0,
            plan_digest=digest("bench"),
            cohort=tuple(range(self.clients)),
            dimension=self.dimension,
            bits=self.bits,
            degree=neighbourhood.degree,
            threshold=neighbourhood.threshold,
            quorum=self.clients - tolerated,
            delivery=Delivery.QUORUM,
            consistency=Consistency.ASSUMED,
        )

    @property
    def lost(self) -> frozenset[ClientId]:
        """Return the clients whose vectors get lost, evenly spread."""
        return frozenset(place * self.clients // self.dropouts for place in range(self.dropouts))


BESIDE_FLOWER = (
    Scale(clients=100, dimension=100_000, bits=16, dropouts=0),
    Scale(clients=100, dimension=100_000, bits=16, dropouts=10),
    Scale(clients=32, dimension=996_298, bits=8, dropouts=0),
)
ALONE = (
    Scale(clients=1_000, dimension=100_000, bits=16, dropouts=100),
    Scale(clients=10_000, dimension=10_000, bits=16, dropouts=1_000),
    Scale(clients=20, dimension=1 << 24, bits=16, dropouts=2),
)
GROWTH = (
    *(
        Scale(clients=clients, dimension=10_000, bits=16, dropouts=clients // 10)
        for clients in (20, 50, 100, 200, 500, 2_000)
    ),
    *(Scale(clients=50, dimension=1 << power, bits=16, dropouts=5) for power in (12, 14, 16, 18, 20, 22)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured round; seconds are those of the processor, except for the whole round's."""

    implementation: str
    clients: int
    dimension: int
    bits: int
    neighbours: int
    dropouts: int
    client_seconds: float
    server_seconds: float
    round_seconds: float
    upload_bytes: int
    server_peak_mib: float


def bench_secagg(scales: Iterable[Scale]) -> Iterator[Row]:
    """Measure our rounds, each beside Flower's where it is installed and the scale is one to compare at."""
    has_flower = find_spec("flwr") is not None
    for scale in scales:
        yield measure(scale)
        if has_flower and scale in BESIDE_FLOWER:
            peer = measure_flower(scale.clients, scale.dimension, scale.lost)
            yield Row(
                implementation="flower",
                clients=scale.clients,
                dimension=scale.dimension,
                bits=64,
                neighbours=scale.clients - 1,
                dropouts=scale.dropouts,
                client_seconds=peer.client_seconds,
                server_seconds=peer.server_seconds,
                round_seconds=peer.round_seconds,
                upload_bytes=peer.upload_bytes,
                server_peak_mib=_peak_mib(),
            )


def measure(scale: Scale) -> Row:
    """Run one round and check its sum; the peak is that of this process so far."""
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    clients = spawning.Process(target=serve_clients, args=(scale, there), daemon=True)
    clients.start()
    here.recv_bytes()  # the clients are there
    transport = _Transport(here, scale.lost)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    total, survivors = _run(scale.session(), transport)
    server_seconds, round_seconds = time.process_time() - begun_cpu, time.perf_counter() - begun
    here.send_bytes(END)
    client_seconds = float(here.recv_bytes())
    clients.join()
    session = scale.session()
    expected = sum(survivors) % session.ring.modulus
    if len(survivors) != scale.clients - scale.dropouts or bool((total != expected).any()):
        raise ConfigError(f"the sum of {scale} is wrong: a benchmark of nothing")
    return Row(
        implementation="d2pfed",
        clients=scale.clients,
        dimension=scale.dimension,
        bits=scale.bits,
        neighbours=session.degree,
        dropouts=scale.dropouts,
        client_seconds=client_seconds / scale.clients,
        server_seconds=server_seconds,
        round_seconds=round_seconds,
        upload_bytes=transport.largest_upload,
        server_peak_mib=_peak_mib(),
    )


def serve_clients(scale: Scale, connection: Connection) -> None:
    """Be all the clients of a round: answer each request, then say how long the processor worked."""
    session, root = scale.session(), Entropy.system()
    clients = {
        client: Client(session, client, _constant(session, client), root.child(client))
        for client in session.cohort
    }
    session.ring.uniform(root.stream(), 64)  # compile before the clock runs
    connection.send_bytes(b"ready")
    begun = time.process_time()
    while (name := connection.recv_bytes()) != END:
        connection.send_bytes(clients[int(name)].receive(connection.recv_bytes()))
    connection.send_bytes(str(time.process_time() - begun).encode())


class _Transport:
    """Carries requests to the other process, and loses the answers of the lost clients once keys are shared."""

    def __init__(self, connection: Connection, lost: frozenset[ClientId]) -> None:
        self._connection = connection
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
        for client in asked:
            self._connection.send_bytes(str(client).encode())
            self._connection.send_bytes(outbox[client])
            answer = self._connection.recv_bytes()
            self._sent[client] = self._sent.get(client, 0) + len(answer)
            yield client, answer


def _run(session: Session, transport: _Transport) -> tuple[RingVector, tuple[ClientId, ...]]:
    advertising = Advertising(session)
    collect(advertising, transport.everyone)
    sharing = advertising.close()
    collect(sharing, transport.everyone)
    masking = sharing.close(bytes(4 * session.dimension))
    collect(masking, transport.survivors)
    confirming = masking.close()
    unmasking = confirming.close()
    collect(unmasking, transport.everyone)
    return unmasking.close().vector, confirming.survivors


def _constant(session: Session, client: ClientId) -> Contribute:
    def contribute(model: bytes, group_seed: bytes | None) -> RingVector:  # noqa: ARG001 - a benchmark trains nothing
        return np.full(session.dimension, client % session.ring.modulus, np.uint32)

    return contribute


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
