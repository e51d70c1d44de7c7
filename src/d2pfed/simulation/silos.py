"""The backend of silos whose unit is a record: each draws its own batch; gradients of all are computed together."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.ring import IntVector, RingVector
from d2pfed.round import Batch, Units
from d2pfed.simulation.backend import Encoder, simulated_participant

_WAITING = 40  # pieces of a chunk, each of one silo, that wait to be added


class RecordGradients(Protocol):
    """Computes the vectors of units that silos hold; each depends on its unit and the model alone."""

    def count(self, client: int) -> int:
        """Return how many units a silo holds."""
        ...

    def units(self, params: FloatVector, client: int) -> Units:
        """Return a silo's units under a model."""
        ...

    def gradients(
        self, params: FloatVector, wanted: Sequence[tuple[int, IntVector]]
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield the vectors of chosen units of some silos, each silo's in their order."""
        ...


@dataclass(frozen=True, slots=True)
class Silos:
    """Silos in this process.

    Guarantee: bit for bit the vectors that each silo's own participant would send, since they draw and add alike.
    Checked: test_records.py::test_both_fidelities_give_the_same_sum.
    """

    trainer: RecordGradients

    def train(self, params: FloatVector, clients: Sequence[int], _seed: int) -> Iterator[Units]:
        """Yield each silo's units, from which its participant draws."""
        return (self.trainer.units(params, client) for client in clients)

    def encode(
        self, encoder: Encoder, params: FloatVector, clients: Sequence[int], _seed: int
    ) -> Iterator[tuple[tuple[int, ...], RingVector]]:
        """Draw every silo's batch, add up its records on another thread while the next are computed, and encode."""
        batches = {client: self._batch(encoder, client) for client in clients}
        wanted = [(client, batch.chosen) for client, batch in batches.items()]
        with ThreadPoolExecutor(1) as pool:
            adding: deque[Future[None]] = deque()
            for client, found in self.trainer.gradients(params, wanted):
                adding.append(pool.submit(batches[client].add, found))
                if len(adding) > _WAITING:  # gradients are large
                    adding.popleft().result()
            for each in adding:
                each.result()
            half = len(clients) // 2
            first = [pool.submit(batches[client].encode) for client in clients[:half]]
            for client in clients[half:]:
                yield (client,), batches[client].encode()
            for client, vector in zip(clients[:half], first, strict=True):
                yield (client,), vector.result()

    def close(self) -> None:
        """There is nothing to end."""

    def _batch(self, encoder: Encoder, client: int) -> Batch:
        own = simulated_participant(encoder.plan, client, encoder.entropy, encoder.participations)
        return own.batch(encoder.session, self.trainer.count(client))
