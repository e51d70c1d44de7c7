"""Worker processes on this machine, one thread each: clients are trained and encoded side by side."""

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from d2pfed.errors import ConfigError
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.ring import RingVector
from d2pfed.simulation.backend import Encoder, TrainClients

_PIECES = 4  # of a cohort per worker: what a dying worker takes with it is one piece
_LEAST_PIECE = 10  # clients: below it, handing over costs more than it gains


class ProcessBackend:
    """Worker processes that hold the local trainer. Clients that a worker had in hand when it died have dropped out.

    `start` is how they are started: `fork` shares the data that is loaded already, and is safe only while this process
    has no other threads; `forkserver` sends the trainer, which must be picklable.

    Guarantee: from the same updates the sum is bit for bit that of the in-process backend, since workers run the same
    encoder on the same tree of entropy.
    Checked: test_process_backend.py::test_sums_are_those_of_the_in_process_backend.
    """

    def __init__(self, local_training: TrainClients, workers: int | None = None, start: str = "fork") -> None:
        workers = len(os.sched_getaffinity(0)) if workers is None else workers
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, got {workers}")
        context: Any = multiprocessing.get_context(start)  # its type has no processes
        self._workers: dict[Connection, Any] = {}
        for _ in range(workers):
            here, there = context.Pipe()
            inherited = (here, *self._workers) if start == "fork" else ()
            process = context.Process(target=_work, args=(there, inherited, local_training), daemon=True)
            process.start()
            there.close()
            self._workers[here] = process

    def processes(self) -> tuple[int, ...]:
        """Return the process of each worker that lives."""
        return tuple(process.pid for process in self._workers.values())

    def train(self, params: FloatVector, clients: Sequence[int], seed: int) -> Iterator[FloatVector | None]:
        """Train clients on the workers and yield their updates, in their order; None for those lost."""
        found: dict[int, FloatVector] = {}
        for piece, answer in self._spread(clients, _Stage(None, params, seed)):
            found.update(zip(piece, answer, strict=True))
        for client in clients:
            yield found.pop(client, None)

    def encode(
        self, encoder: Encoder, params: FloatVector, clients: Sequence[int], seed: int
    ) -> Iterator[tuple[tuple[int, ...], RingVector]]:
        """Train and encode clients on the workers; each adds up what it has."""
        return self._spread(clients, _Stage(encoder, params, seed))

    def close(self) -> None:
        """End the workers."""
        for connection, process in self._workers.items():
            connection.close()
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
        self._workers = {}

    def _spread(self, clients: Sequence[int], stage: "_Stage") -> Iterator[tuple[tuple[int, ...], Any]]:
        """Yield each piece of the clients with its answer, as they come; pieces of dead workers are left out."""
        queue = deque(_pieces(clients, _PIECES * max(1, len(self._workers))))
        waiting: dict[Connection, tuple[int, ...]] = {}
        for connection in list(self._workers):
            if self._send(connection, stage) and queue and self._send(connection, queue[0]):
                waiting[connection] = queue.popleft()
        while waiting:
            for ready in wait(list(waiting)):
                connection = next(each for each in waiting if each is ready)
                piece = waiting.pop(connection)
                try:
                    answer = connection.recv()
                except (EOFError, OSError):
                    self._lose(connection)
                    continue
                if isinstance(answer, Exception):
                    raise answer  # of the training itself: no dropout
                if queue and self._send(connection, queue[0]):
                    waiting[connection] = queue.popleft()
                yield piece, answer

    def _send(self, connection: Connection, message: object) -> bool:
        try:
            connection.send(message)
        except OSError:
            self._lose(connection)
            return False
        return True

    def _lose(self, connection: Connection) -> None:
        process = self._workers.pop(connection, None)
        connection.close()
        if process is not None:
            process.join(timeout=5)


@dataclass(frozen=True, slots=True)
class _Stage:
    """What the clients of one call have in common; without an encoder they are trained only."""

    encoder: Encoder | None
    params: FloatVector
    seed: int


def _work(connection: Connection, inherited: Sequence[Connection], local_training: TrainClients) -> None:
    """Train, or train and encode, the clients that are sent, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that has started this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    with contextlib.suppress(EOFError, OSError):
        stage = connection.recv()
        while True:
            message = connection.recv()
            if isinstance(message, _Stage):
                stage = message
            else:
                connection.send(_answer(stage, message, local_training))


def _answer(stage: _Stage, clients: tuple[int, ...], local_training: TrainClients) -> object:
    try:
        updates = list(local_training(stage.params, clients, stage.seed))
        if stage.encoder is None:
            return updates
        return stage.encoder.total(list(zip(clients, updates, strict=True)))
    except Exception as error:  # noqa: BLE001 - raised again in the process that has asked
        return error


def _pieces(clients: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Split clients into at most so many pieces of nearly equal size, none of them empty or needlessly small."""
    count = max(1, min(count, len(clients) // _LEAST_PIECE))
    parts = np.array_split(np.asarray(clients, np.int64), count)
    return [tuple(part.tolist()) for part in parts if len(part)]
