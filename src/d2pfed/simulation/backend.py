"""Backends: where the clients of a simulated cohort, or silos whose unit is a record, are trained and encoded."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.compiled import is_kept
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import IntVector, RingVector
from d2pfed.numerics.rotation import rotate
from d2pfed.plan import Plan
from d2pfed.round import AttemptBinding, Batches, Participant, Units, delivery_of, sketch_of
from d2pfed.secagg import Delivery

# From the model's parameters, some clients and a round's seed to the clients' updates, in their order.
TrainClients = Callable[[FloatVector, Sequence[int], int], Iterator[FloatVector]]
PartialSums = Iterator[tuple[tuple[int, ...], RingVector]]  # who is in a sum, and the sum of their ring vectors

_PIECES = 4  # of a cohort per worker
_THREADS = Path("/proc/self/task")
_ALONE = 1 << 17  # coordinates, up to which handing half of them to another thread costs more than it saves
# Not while the next updates are trained: torch's own threads wait for one another, and so for an encoder between them.
_TOGETHER_BYTES = 1 << 26  # of the updates that two threads share: it bounds memory; to change over costs time


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """What it takes to encode the clients of a session, beside their updates."""

    plan: Plan
    session: AttemptBinding
    group: bytes | None = field(repr=False)
    entropy: Entropy
    participations: Mapping[int, int]
    clip: float | None = None  # of the round, where it adapts

    def encode(self, client: int, update: FloatVector) -> RingVector:
        """Return a client's ring vector, by the client's own encoder; an update that is not finite counts as zero."""
        own = simulated_participant(self.plan, client, self.entropy, self.participations)
        return own.encode(self.session, finite(update), self.group, self.clip)

    def total(self, pairs: Sequence[tuple[int, FloatVector]]) -> RingVector:
        """Return the sum of some clients' ring vectors: in a ring a sum's order does not matter."""
        total = np.zeros(self.session.dimension, np.uint32)
        for client, update in pairs:
            self.session.ring.add_into(total, self.encode(client, update))
        return total


def finite(update: FloatVector) -> FloatVector:
    """Return an update, or zero in place of one that has diverged: saying so would tell about the client's data."""
    return update if np.isfinite(update).all() else np.zeros_like(update)


class Backend(Protocol):
    """Trains, and encodes, the clients of one round after the other."""

    def train(
        self, params: FloatVector, clients: Sequence[int], seed: int
    ) -> Iterator[FloatVector | Units | None]:
        """Yield the updates of these clients, or the units of silos, in their order; None for one that was lost."""
        ...

    def encode(self, encoder: Encoder, params: FloatVector, clients: Sequence[int], seed: int) -> PartialSums:
        """Train clients and yield sums of their vectors; who is in none was lost."""
        ...

    def close(self) -> None:
        """End the workers, if there are any."""
        ...


@dataclass(frozen=True, slots=True)
class SerialBackend:
    """This process."""

    local_training: TrainClients

    def train(self, params: FloatVector, clients: Sequence[int], seed: int) -> Iterator[FloatVector | None]:
        """Yield the updates of these clients, in their order."""
        return self.local_training(params, clients, seed)

    def encode(self, encoder: Encoder, params: FloatVector, clients: Sequence[int], seed: int) -> PartialSums:
        """Encode on this thread and another, each adding up its part."""
        updates = zip(clients, self.local_training(params, clients, seed), strict=True)
        together = max(2, _TOGETHER_BYTES // (4 * encoder.session.dimension))
        with ThreadPoolExecutor(1) as pool:
            while pairs := tuple(islice(updates, together)):
                rest = pool.submit(encoder.total, pairs[1::2])
                yield tuple(client for client, _ in pairs[::2]), encoder.total(pairs[::2])
                yield tuple(client for client, _ in pairs[1::2]), rest.result()

    def close(self) -> None:
        """There is nothing to end."""


class RecordGradients(Protocol):
    """Computes the vectors of units that silos hold; each depends on its unit and the model alone."""

    def count(self, client: int) -> int:
        """Return how many units a silo holds."""
        ...

    def chunks(
        self, params: FloatVector, wanted: Sequence[tuple[int, IntVector]]
    ) -> Iterator[tuple[IntVector, NDArray[np.float32]]]:
        """Yield the vectors of chosen units and the silo of each, in their order; the next may take their place."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SiloUnits:
    """A silo's units under a model, as the client half of a round asks for them (round.Units)."""

    count: int
    gradients: Callable[[IntVector], Iterator[NDArray[np.float32]]] = field(repr=False)  # of chosen units


@dataclass(frozen=True, slots=True)
class Silos:
    """Silos in this process; gradients of all are computed together.

    Guarantee: bit for bit the vectors that each silo's own participant would send, since they draw and add alike.
    Checked: test_records.py::test_both_fidelities_give_the_same_sum.
    """

    trainer: RecordGradients
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1), repr=False, compare=False)

    def train(self, params: FloatVector, clients: Sequence[int], _seed: int) -> Iterator[Units]:
        """Yield each silo's units, from which its participant draws."""

        def of(client: int) -> SiloUnits:
            trainer = self.trainer
            return SiloUnits(
                trainer.count(client), lambda own: (row for _, row in trainer.chunks(params, [(client, own)]))
            )

        return map(of, clients)

    def encode(self, encoder: Encoder, params: FloatVector, clients: Sequence[int], _seed: int) -> PartialSums:
        """Draw every silo's batch, add up its records and encode the sums, half of a large one on another thread."""
        if not clients:
            return
        own = [
            simulated_participant(encoder.plan, client, encoder.entropy, encoder.participations).batch(
                encoder.session, self.trainer.count(client)
            )
            for client in clients
        ]
        batches = Batches.of(own)
        wanted = [(client, batch.chosen) for client, batch in zip(clients, batches.each, strict=True)]
        places = np.zeros(max(clients) + 1, np.int64)
        places[list(clients)] = np.arange(len(clients))
        for silos, vectors in self.trainer.chunks(params, wanted):
            owners = places[silos]
            if vectors.size <= _ALONE:
                batches.add(owners, vectors)
                continue
            half = int(np.searchsorted(owners, owners[len(owners) // 2]))  # a silo's vectors stay together
            other = self._pool.submit(batches.add, owners[:half], vectors[:half])
            batches.add(owners[half:], vectors[half:])
            other.result()
        half = len(clients) if batches.totals.size <= _ALONE else len(clients) // 2
        rest = batches.each[half:]
        later = self._pool.submit(lambda: [batch.encode() for batch in rest]) if rest else None
        encoded = [batch.encode() for batch in batches.each[:half]]
        for client, vector in zip(clients, encoded + ([] if later is None else later.result()), strict=True):
            yield (client,), vector

    def close(self) -> None:
        """End the other thread."""
        self._pool.shutdown()


def simulated_participant(
    plan: Plan, client: int, entropy: Entropy, participations: Mapping[int, int]
) -> Participant:
    """Return the client half of a simulated client, with its own branch of the entropy."""
    return Participant(
        plan=plan,
        client=client,
        entropy=entropy.child("client", client),
        participations=participations.get(client, 0),
    )


def warm_up(plan: Plan, local_training: TrainClients, params: FloatVector) -> None:
    """Train and encode one client for nothing: workers that are forked later find all kernels compiled.

    In the first command after an installation a copy of this process compiles what encodes, and leaves it on the disk,
    while this one compiles what trains.
    """
    helper = None if is_kept(rotate) or not can_fork() else os.fork()
    if helper == 0:
        try:  # whatever the copy fails at, this process does itself
            _encode(plan, np.zeros_like(params))
        finally:
            os._exit(0)  # nothing of what this process would do at its end
    update = finite(next(iter(local_training(params, (0,), 0))))
    if helper is not None:
        os.waitpid(helper, 0)
    _encode(plan, update)


def _encode(plan: Plan, update: FloatVector) -> None:
    """Encode one update, pack it and read it again."""
    session, entropy = sketch_of(plan), Entropy.system()
    group = entropy.key if delivery_of(plan) is Delivery.EVERYONE else None
    clip = None if plan.adaptive_clip is None else plan.adaptive_clip.initial
    encoded = simulated_participant(plan, 0, entropy, {}).encode(session, update, group, clip)
    session.ring.unpack(session.ring.pack(encoded), session.dimension)


def can_fork() -> bool:
    """Tell whether a fork of this process leaves no thread behind.

    A fork copies the calling thread alone. A thread that waits for another one there waits forever: torch's threads
    do, OpenBLAS ends its own at each fork. So a trial fork comes first, then the threads are counted.
    """
    if not _THREADS.is_dir():
        return False
    if (process := os.fork()) == 0:
        os._exit(0)  # the copy of a process that may have threads does nothing else
    os.waitpid(process, 0)
    return len(list(_THREADS.iterdir())) == 1


def in_order(
    clients: Sequence[int], answers: Iterator[tuple[tuple[int, ...], list[FloatVector]]]
) -> Iterator[FloatVector | None]:
    """Yield the updates of pieces, which come as they are done, in the order of the clients; None for those lost."""
    found = {client: update for piece, answer in answers for client, update in zip(piece, answer, strict=True)}
    for client in clients:
        yield found.pop(client, None)


def pieces(clients: Sequence[int], workers: int, least: int) -> list[tuple[int, ...]]:
    """Split clients into pieces of nearly equal size, none of them empty: some for each worker if there are many.

    What a dying worker takes with it is one piece; below `least` clients, handing over costs more than it gains.
    """
    count = max(min(_PIECES * workers, len(clients) // least), min(workers, len(clients)), 1)
    parts = np.array_split(np.asarray(clients, np.int64), count)
    return [tuple(part.tolist()) for part in parts if len(part)]
