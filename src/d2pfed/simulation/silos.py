"""The backend of silos whose unit is a record: each draws its own batch; gradients of all are computed together."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.ring import IntVector, RingVector
from d2pfed.round import Batches, Units
from d2pfed.simulation.backend import Encoder, simulated_participant


class RecordGradients(Protocol):
    """Computes the vectors of units that silos hold; each depends on its unit and the model alone."""

    def count(self, client: int) -> int:
        """Return how many units a silo holds."""
        ...

    def units(self, params: FloatVector, client: int) -> Units:
        """Return a silo's units under a model."""
        ...

    def chunks(
        self, params: FloatVector, wanted: Sequence[tuple[int, IntVector]]
    ) -> Iterator[tuple[IntVector, NDArray[np.float32]]]:
        """Yield the vectors of chosen units and the silo of each, in their order; the next may take their place."""
        ...


@dataclass(frozen=True, slots=True)
class Silos:
    """Silos in this process.

    Guarantee: bit for bit the vectors that each silo's own participant would send, since they draw and add alike.
    Checked: test_records.py::test_both_fidelities_give_the_same_sum.
    """

    trainer: RecordGradients
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1), repr=False, compare=False)

    def train(self, params: FloatVector, clients: Sequence[int], _seed: int) -> Iterator[Units]:
        """Yield each silo's units, from which its participant draws."""
        return (self.trainer.units(params, client) for client in clients)

    def encode(
        self, encoder: Encoder, params: FloatVector, clients: Sequence[int], _seed: int
    ) -> Iterator[tuple[tuple[int, ...], RingVector]]:
        """Draw every silo's batch, add up its records and encode the sums, half of it on another thread."""
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
            self._add(batches, places[silos], vectors)
        half = len(clients) // 2
        first = self._pool.submit(lambda: [batch.encode() for batch in batches.each[:half]])
        second = [batch.encode() for batch in batches.each[half:]]
        for client, vector in zip(clients, [*first.result(), *second], strict=True):
            yield (client,), vector

    def close(self) -> None:
        """End the other thread."""
        self._pool.shutdown()

    def _add(self, batches: Batches, owners: IntVector, vectors: NDArray[np.float32]) -> None:
        """Add vectors to the batches of their silos, half of them on the other thread; a silo's stay together."""
        half = int(np.searchsorted(owners, owners[len(owners) // 2]))
        other = self._pool.submit(batches.add, owners[:half], vectors[:half])
        batches.add(owners[half:], vectors[half:])
        other.result()
