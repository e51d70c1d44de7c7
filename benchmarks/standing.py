"""What a round with standing keys costs, beside the main protocol's: the server here, all silos in another process."""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np

from benchmarks.crowd import enrolled
from benchmarks.scales import Scale
from benchmarks.secagg import END, Cost, SecAggRow, Transport, measure, row_of
from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import RingVector
from d2pfed.round import StandingMemory, StandingSteps
from d2pfed.secagg import Roster, collect, standing
from d2pfed.secagg.wire import ClientId, MessageKind, kind_of

ROUNDS = 5  # of which the mean is reported

USED = b"used"  # asks for the processor's seconds so far

_T = TypeVar("_T")


def bench_standing(scales: Iterable[Scale]) -> Iterator[SecAggRow]:
    """Measure the signed main protocol, then the set-up and the rounds of standing keys."""
    for scale in scales:
        yield measure(scale)
        yield from measure_standing(scale)


def epoch_of(scale: Scale) -> standing.Epoch:
    """Return an epoch of this size."""
    session = scale.session()
    return standing.Epoch(
        plan_digest=session.plan_digest,
        run=session.run,
        epoch=0,
        first=0,
        roster_digest=session.roster_digest,
        cohort=session.cohort,
        dimension=session.dimension,
        bits=session.bits,
        quorum=session.quorum,
        colluders=session.colluders,
        rounds=ROUNDS + 1,
        attempts=1,
    )


def measure_standing(scale: Scale) -> tuple[SecAggRow, SecAggRow]:
    """Return the rows of the set-up and of one round, their sums checked; one round before them is not counted."""
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    worker = spawning.Process(target=serve_silos, args=(scale, there), daemon=True)
    worker.start()
    here.recv_bytes()  # the silos are there
    timed, roster = _Timed(here), scale.roster()
    ready, first = timed.run(partial(_set_up, epoch_of(scale), roster))
    model = bytes(4 * scale.dimension)
    expected = sum(ready.members) % ready.epoch.ring.modulus
    costs = []
    for number in range(ROUNDS + 1):
        step = ready.step(number, 0, ready.members)
        total, cost = timed.run(partial(_collect, standing.Collecting(ready.keys, step, b"", model)))
        if bool((total != expected).any()):
            raise ConfigError(f"the sum of {scale} is wrong, so its cost means nothing")
        costs.append(cost)
    here.send_bytes(END)
    worker.join()
    each = _mean(costs[1:], scale.clients)
    set_up = _mean([first], scale.clients)
    return row_of("d2pfed, standing keys, set-up", scale, set_up), row_of("d2pfed, standing keys", scale, each)


@dataclass
class _Timed:
    """Runs exchanges, and says what they took on both sides."""

    connection: Connection
    client_seconds: float = 0.0

    def run(self, work: Callable[[Transport], _T]) -> tuple[_T, Cost]:
        """Return what some exchanges gave, and their cost, with the seconds of all silos together."""
        transport = Transport([self.connection], frozenset())
        begun, begun_cpu = time.perf_counter(), time.process_time()
        result = work(transport)
        server, whole = time.process_time() - begun_cpu, time.perf_counter() - begun
        self.connection.send_bytes(USED)
        seconds = float(self.connection.recv_bytes())
        cost = Cost(seconds - self.client_seconds, server, whole, transport.largest_upload)
        self.client_seconds = seconds
        return result, cost


def _mean(costs: list[Cost], clients: int) -> Cost:
    return Cost(
        float(np.mean([cost.client_seconds for cost in costs])) / clients,
        float(np.mean([cost.server_seconds for cost in costs])),
        float(np.mean([cost.round_seconds for cost in costs])),
        max(cost.upload_bytes for cost in costs),
    )


def _set_up(epoch: standing.Epoch, roster: Roster, transport: Transport) -> standing.ReadyEpoch:
    advertising = standing.Advertising(epoch, roster)
    collect(advertising, transport.everyone)
    agreeing = advertising.close()
    collect(agreeing, transport.everyone)
    return agreeing.close()


def _collect(phase: standing.Collecting, transport: Transport) -> RingVector:
    collect(phase, transport.everyone)
    return phase.close()


@dataclass
class _Machine:
    """One silo."""

    epoch: standing.Epoch
    client: ClientId
    roster: Roster
    store: StandingMemory = field(default_factory=StandingMemory)
    account: StandingSteps = field(default_factory=lambda: StandingSteps(ROUNDS + 1))
    advertised: standing.Advertised | None = None

    def receive(self, request: bytes) -> bytes:
        """Answer a request of any kind."""
        match kind_of(request):
            case MessageKind.STANDING_INVITATION:
                entropy = Entropy.system().child(self.client)
                answer, self.advertised = self._silo().advertise(request, entropy)
                return answer
            case MessageKind.STANDING_ADVERTS if self.advertised is not None:
                ready = self._silo().agree(self.advertised, request)
                self.store.state, self.advertised = ready.state, None
                return ready.answer

        def contribute(step: standing.Step, _task: bytes, _model: bytes) -> RingVector:
            self.account.charge(step)
            return np.full(self.epoch.dimension, self.client % self.epoch.ring.modulus, np.uint32)

        return standing.answer_step(
            self.epoch,
            self.client,
            request,
            store=self.store,
            contribute=contribute,
        )

    def _silo(self) -> standing.Client:
        enrolment, history = enrolled(self.roster, self.client)
        if enrolment is None or history is None:
            raise ConfigError("standing keys are for enrolled silos")
        return standing.Client(
            epoch=self.epoch,
            client=self.client,
            enrolment=enrolment,
            history=history,
            charged=self.account.charged,
        )


def serve_silos(scale: Scale, connection: Connection) -> None:
    """Be all silos: answer each request, and say when asked how long the processor has worked."""
    epoch, roster = epoch_of(scale), scale.roster()
    silos = {client: _Machine(epoch, client, roster) for client in epoch.cohort}
    connection.send_bytes(b"ready")
    begun = time.process_time()
    while (name := connection.recv_bytes()) != END:
        if name == USED:
            connection.send_bytes(str(time.process_time() - begun).encode())
        else:
            connection.send_bytes(silos[int(name)].receive(connection.recv_bytes()))
