"""Worker processes on this machine, one thread each: clients are trained and encoded side by side."""

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

from d2pfed.errors import ConfigError
from d2pfed.noise.codec import FloatVector
from d2pfed.simulation.backend import (
    Backend,
    Encoder,
    PartialSums,
    SerialBackend,
    TrainClients,
    can_fork,
    in_order,
    pieces,
)

_LEAST_PIECE = 10  # clients, unless workers would be idle: below it, handing over costs more than it gains
_GLANCE_SECONDS = 1.0  # between looks at whether workers live: no limit to their work


def start_workers(
    local_training: TrainClients, workers: int | None, prepare: Callable[[], None]
) -> tuple[Backend, str]:
    """Start worker processes by what is safe here; return them, or this process, and a line that says why not fork."""
    if can_fork():
        return ProcessBackend(local_training, workers, "fork", prepare), ""
    try:
        ForkingPickler.dumps(local_training)
    except Exception as error:  # noqa: BLE001 - whatever a user's objects raise
        why = "it has other threads, so it cannot be forked, and its clients cannot be sent to another process"
        here = SerialBackend(local_training)
        return here, f"Clients are trained in this process: {why} ({type(error).__name__})."
    why = "This process has other threads, so its clients are sent to worker processes that start afresh."
    return ProcessBackend(local_training, workers, "forkserver", prepare), why


class ProcessBackend:
    """Worker processes that hold the local trainer. Clients that a worker had in hand when it died have dropped out.

    `start` is how they are started: `fork` shares the data that is loaded already, and is refused if this process has
    other threads; `forkserver` sends the trainer, which must be picklable. Each worker calls `prepare` first.

    Guarantee: from the same updates the sum is bit for bit that of the in-process backend, since workers run the same
    encoder on the same tree of entropy.
    Checked: test_process_backend.py::test_sums_are_those_of_the_in_process_backend.
    """

    def __init__(
        self,
        local_training: TrainClients,
        workers: int | None = None,
        start: str = "fork",
        prepare: Callable[[], None] | None = None,
    ) -> None:
        workers = len(os.sched_getaffinity(0)) if workers is None else workers
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, got {workers}")
        if start == "fork" and not can_fork():
            raise ConfigError(
                "workers must be forked before this process has other threads: start must be forkserver"
            )
        context: Any = multiprocessing.get_context(start)  # its type has no processes
        self._workers: dict[Connection, Any] = {}
        self._waiting: dict[Connection, tuple[int, ...]] = {}  # the piece that a worker has in hand
        self._ended = ""  # how the last worker that was lost has ended
        for _ in range(workers):
            here, there = context.Pipe()
            inherited = (here, *self._workers) if start == "fork" else ()
            process = context.Process(target=_work, args=(there, inherited, prepare, local_training), daemon=True)
            process.start()
            there.close()
            self._workers[here] = process

    def processes(self) -> tuple[int, ...]:
        """Return the process of each worker that lives."""
        return tuple(process.pid for process in self._workers.values())

    def train(self, params: FloatVector, clients: Sequence[int], seed: int) -> Iterator[FloatVector | None]:
        """Train clients on the workers and yield their updates, in their order; None for those lost."""
        return in_order(clients, self._spread(clients, _Stage(None, params, seed)))

    def encode(self, encoder: Encoder, params: FloatVector, clients: Sequence[int], seed: int) -> PartialSums:
        """Train and encode clients on the workers; each adds up what it has."""
        return self._spread(clients, _Stage(encoder, params, seed))

    def close(self) -> None:
        """End the workers."""
        for connection, process in self._workers.items():
            connection.close()
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
        self._workers, self._waiting = {}, {}

    def _spread(self, clients: Sequence[int], stage: "_Stage") -> Iterator[tuple[tuple[int, ...], Any]]:
        """Yield each piece of the clients with its answer, as they come; pieces of dead workers are left out."""
        while self._waiting:  # answers that nobody took, since a round was given up in the middle
            self._answers()
        queue = deque(pieces(clients, len(self._workers), _LEAST_PIECE))
        for connection in list(self._workers):
            if self._send(connection, stage) and queue and self._send(connection, queue[0]):
                self._waiting[connection] = queue.popleft()
        while self._waiting:
            for connection, piece, answer in self._answers():
                if isinstance(answer, Exception):
                    raise answer  # of the training itself: no dropout
                if queue and self._send(connection, queue[0]):
                    self._waiting[connection] = queue.popleft()
                yield piece, answer
        if not self._workers:
            raise ConfigError(f"no worker process is left to train clients: {self._ended}")

    def _answers(self) -> list[tuple[Connection, tuple[int, ...], Any]]:
        """Wait a little for workers to answer or end; return the answers that are there."""
        found: list[tuple[Connection, tuple[int, ...], Any]] = []
        wait(list(self._waiting), _GLANCE_SECONDS)
        for connection in list(self._waiting):
            process = self._workers[connection]
            if not connection.poll() and process.is_alive():
                continue
            piece = self._waiting.pop(connection)
            try:
                if connection.poll():  # else it has ended, and the holder of its end keeps it open
                    found.append((connection, piece, connection.recv()))
                    continue
            except (EOFError, OSError):
                pass
            self._lose(connection)
        return found

    def _send(self, connection: Connection, message: object) -> bool:
        try:
            connection.send(message)
        except OSError:
            self._lose(connection)
            return False
        return True

    def _lose(self, connection: Connection) -> None:
        process = self._workers.pop(connection)
        connection.close()
        process.join(timeout=5)
        if process.is_alive():  # it has closed its end and does not come to its own
            process.kill()
            process.join()
        code = process.exitcode
        self._ended = f"the last one ended {f'by signal {-code}' if code < 0 else f'with status {code}'}"


@dataclass(frozen=True, slots=True)
class _Stage:
    """What the clients of one call have in common; without an encoder they are trained only."""

    encoder: Encoder | None
    params: FloatVector
    seed: int


def _work(
    connection: Connection,
    inherited: Sequence[Connection],
    prepare: Callable[[], None] | None,
    local_training: TrainClients,
) -> None:
    """Train, or train and encode, the clients that are sent, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that has started this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    if prepare is not None:
        prepare()
    with contextlib.suppress(EOFError, OSError):
        stage = connection.recv()
        while True:
            message = connection.recv()
            if isinstance(message, _Stage):
                stage = message
                continue
            answer: object
            try:
                answer = updates = list(local_training(stage.params, message, stage.seed))
                if stage.encoder is not None:
                    answer = stage.encoder.total(list(zip(message, updates, strict=True)))
            except Exception as error:  # noqa: BLE001 - raised again in the process that has asked
                answer = error
            connection.send(answer)
