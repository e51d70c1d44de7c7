"""The Ray backend: a cohort is trained and encoded by workers, each a process, on one machine or many."""

import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError

from d2pfed.errors import ConfigError
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.ring import RingVector
from d2pfed.simulation.backend import Encoder, PartialSums, TrainClients, pieces

_LEAST_PIECE = 50  # clients, unless workers would be idle: each piece is a call of its own over Ray

_KNOCK_SECONDS = 10.0


class RayBackend:
    """Ray actors. The clients that a worker had in hand when it died have dropped out; the rest go on.

    Guarantee: from the same updates the sum is bit for bit that of the in-process backend, since workers run the same
    encoder on the same tree of entropy. Checked: test_ray_backend.py::test_sums_are_those_of_the_in_process_backend.
    """

    def __init__(self, local_training: TrainClients, workers: int, address: str | None) -> None:
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, got {workers}")
        self._started = not ray.is_initialized()
        if self._started and address is None:
            ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
        elif self._started and address is not None:
            host, _, port = address.partition(":")
            if not port.isdecimal():
                raise ConfigError(f"a cluster's address must be HOST:PORT, got {address}")
            try:  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), _KNOCK_SECONDS).close()
            except OSError as error:
                raise ConfigError(f"there is no Ray cluster at {address}: {error}") from error
            ray.init(address=address, log_to_driver=False)
        trainer = ray.put(local_training)
        remote = ray.remote(num_cpus=1, max_restarts=0)(_Worker)
        self._workers: list[Any] = [remote.remote(trainer) for _ in range(workers)]
        self.processes()  # a worker that cannot even start is no dropout: the error comes out here

    def close(self) -> None:
        """End the workers, and leave the cluster if this backend has joined it."""
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []
        if self._started:
            ray.shutdown()

    def processes(self) -> dict[int, str]:
        """Return the process of each worker that lives, and the node that it is on."""
        return dict(ray.get([worker.whereabouts.remote() for worker in self._workers]))

    def train(self, params: FloatVector, clients: Sequence[int], seed: int) -> Iterator[FloatVector | None]:
        """Train clients on the workers and yield their updates, in their order; None for those lost."""
        found: dict[int, FloatVector] = {}
        for piece, answer in self._spread(clients, None, params, seed):
            found.update(zip(piece, answer, strict=True))
        for client in clients:
            yield found.pop(client, None)

    def encode(self, encoder: Encoder, params: FloatVector, clients: Sequence[int], seed: int) -> PartialSums:
        """Train and encode clients on the workers."""
        return self._spread(clients, encoder, params, seed)

    def _spread(
        self, clients: Sequence[int], encoder: Encoder | None, params: FloatVector, seed: int
    ) -> Iterator[tuple[tuple[int, ...], Any]]:
        """Yield each piece of the clients with its answer, as they come; pieces of dead workers are left out."""
        shared, described = ray.put(params), ray.put(encoder)
        queue = deque(pieces(clients, len(self._workers), _LEAST_PIECE))
        idle = list(self._workers)
        waiting: dict[Any, tuple[Any, tuple[int, ...]]] = {}
        while waiting or (queue and idle):
            while queue and idle:
                worker, piece = idle.pop(), queue.popleft()
                waiting[worker.work.remote(described, shared, piece, seed)] = worker, piece
            (done, *_), _ = ray.wait(list(waiting))
            worker, piece = waiting.pop(done)
            try:
                answer = ray.get(done)
            except (RayActorError, ObjectLostError):
                self._workers.remove(worker)
                continue
            idle.append(worker)
            yield piece, answer


class _Worker:
    """One process with the local trainer: trains, encodes and adds up the clients that it is given."""

    def __init__(self, local_training: TrainClients) -> None:
        self._local_training = local_training

    def whereabouts(self) -> tuple[int, str]:
        """Return this process and the node that it is on."""
        return os.getpid(), str(ray.get_runtime_context().get_node_id())

    def work(
        self, encoder: Encoder | None, params: FloatVector, clients: tuple[int, ...], seed: int
    ) -> list[FloatVector] | RingVector:
        """Return the clients' updates, or with an encoder the sum of their ring vectors."""
        updates = list(self._local_training(params, clients, seed))
        return updates if encoder is None else encoder.total(list(zip(clients, updates, strict=True)))
