"""The Ray backend: a cohort is trained and encoded by workers, each a process, on one machine or many."""

import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError

from d2pfed.errors import ConfigError
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.ring import RingVector
from d2pfed.simulation.backend import Encoder, PartialSums, TrainClients, in_order, pieces

_LEAST_PIECE = 50  # clients, unless workers would be idle: each piece is a call of its own over Ray

_KNOCK_SECONDS = 10.0
_START_SECONDS = 120.0  # for a worker to start, while no other one lives


class RayBackend:
    """Ray actors. The clients that a worker had in hand when it died have dropped out, and another worker replaces it.

    Guarantee: from the same updates the sum is bit for bit that of the in-process backend, since workers run the same
    encoder on the same tree of entropy. Checked: test_ray_backend.py::test_sums_are_those_of_the_in_process_backend.
    """

    def __init__(self, local_training: TrainClients, workers: int, address: str | None) -> None:
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, got {workers}")
        self._joined = not ray.is_initialized()
        if self._joined:
            _join_cluster(workers, address)
        self._count = workers
        self._trainer = ray.put(local_training)
        self._remote = ray.remote(num_cpus=1, max_restarts=0)(_Worker)
        self._workers: list[Any] = []
        self._starting: dict[Any, Any] = {}  # workers by what each says first: a full cluster has no room for them
        self._start_missing()
        try:  # a worker that cannot even start is no dropout: the error comes out here
            ray.get(list(self._starting), timeout=_START_SECONDS)
        except GetTimeoutError as error:
            self.close()
            rule = f"the cluster must have room for {workers} workers within {_START_SECONDS:g} seconds"
            raise ConfigError(f"{rule}: ask for fewer workers") from error
        self._workers, self._starting = list(self._starting.values()), {}

    def close(self) -> None:
        """End the workers, and leave the cluster if this backend has joined it."""
        for worker in (*self._workers, *self._starting.values()):
            ray.kill(worker)
        self._workers, self._starting = [], {}
        if self._joined:
            ray.shutdown()

    def processes(self) -> dict[int, str]:
        """Return the process of each worker, and the node that it is on."""
        return dict(ray.get([worker.whereabouts.remote() for worker in self._workers]))

    def _start_missing(self) -> None:
        """Start as many workers as were lost; they get work once they have started."""
        for _ in range(self._count - len(self._workers) - len(self._starting)):
            worker: Any = self._remote.remote(self._trainer)
            self._starting[worker.whereabouts.remote()] = worker

    def train(self, params: FloatVector, clients: Sequence[int], seed: int) -> Iterator[FloatVector | None]:
        """Train clients on the workers and yield their updates, in their order; None for those lost."""
        return in_order(clients, self._spread(clients, None, params, seed))

    def encode(self, encoder: Encoder, params: FloatVector, clients: Sequence[int], seed: int) -> PartialSums:
        """Train and encode clients on the workers."""
        return self._spread(clients, encoder, params, seed)

    def _spread(
        self, clients: Sequence[int], encoder: Encoder | None, params: FloatVector, seed: int
    ) -> Iterator[tuple[tuple[int, ...], Any]]:
        """Yield each piece of the clients with its answer, as they come; pieces of dead workers are left out."""
        shared, described = ray.put(params), ray.put(encoder)
        queue = deque(pieces(clients, self._count, _LEAST_PIECE))
        self._start_missing()
        idle = list(self._workers)
        waiting: dict[Any, tuple[Any, tuple[int, ...]]] = {}
        answered, ended = not queue, ""
        while waiting or (queue and (idle or self._starting)):
            while queue and idle:
                worker, piece = idle.pop(), queue.popleft()
                waiting[worker.work.remote(described, shared, piece, seed)] = worker, piece
            done, _ = ray.wait([*waiting, *self._starting], timeout=None if waiting else _START_SECONDS)
            if not done:
                ended = f"none has started within {_START_SECONDS:g} seconds"
                break
            worker, piece = waiting.pop(done[0], (None, ()))
            started = self._starting.pop(done[0], None)
            try:
                answer = ray.get(done[0])
            except (RayActorError, ObjectLostError) as error:
                ended = f"the last one ended with {type(error).__name__}"
                if worker is not None:  # one that dies while it starts is replaced in the next round
                    self._workers.remove(worker)
                    self._start_missing()
                continue
            if started is not None:
                self._workers.append(started)
                idle.append(started)
                continue
            idle.append(worker)
            answered = True
            yield piece, answer
        if queue or not answered:
            raise ConfigError(f"no Ray worker is left to train clients: {ended}")


def _join_cluster(workers: int, address: str | None) -> None:
    """Connect to the cluster at HOST:PORT, to the one that `auto` finds, or start one on this machine."""
    if address is None:
        ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False)
        return
    host, _, port = address.partition(":")
    if address != "auto" and not port.isdecimal():
        raise ConfigError(f"a cluster's address must be HOST:PORT or auto, got {address}")
    try:
        if address != "auto":  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), _KNOCK_SECONDS).close()
        ray.init(address=address, log_to_driver=False)
    except (OSError, OverflowError) as error:
        found = "found by auto" if address == "auto" else f"at {address}"
        raise ConfigError(f"there is no Ray cluster {found}: {error}") from error


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
