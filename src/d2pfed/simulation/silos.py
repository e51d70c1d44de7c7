"""The backend of silos whose unit is a record: each draws its own batch; gradients of all are computed together."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.ring import IntVector, RingVector
from d2pfed.round import Batch, Units
from d2pfed.simulation.backend import Encoder, simulated_participant

_PIECES_BYTES = 1 << 26  # of gradients that wait to be added


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
        """Draw every silo's batch, add up its records and encode the sums, half of the silos on another thread."""
        batches = {client: self._batch(encoder, client) for client in clients}
        wanted = [(client, batch.chosen) for client, batch in batches.items()]
        with ThreadPoolExecutor(1) as pool:
            pieces: list[tuple[int, NDArray[np.float32]]] = []
            for client, rows in self.trainer.gradients(params, wanted):
                pieces.append((client, rows))
                if sum(each.nbytes for _, each in pieces) > _PIECES_BYTES:  # of many records, or long ones
                    _add_all(batches, pieces, pool)
                    pieces = []
            _add_all(batches, pieces, pool)
            half = len(clients) // 2
            first = pool.submit(lambda: [batches[client].encode() for client in clients[:half]])
            for client in clients[half:]:
                yield (client,), batches[client].encode()
            yield from (((client,), vector) for client, vector in zip(clients[:half], first.result(), strict=True))

    def close(self) -> None:
        """There is nothing to end."""

    def _batch(self, encoder: Encoder, client: int) -> Batch:
        own = simulated_participant(encoder.plan, client, encoder.entropy, encoder.participations)
        return own.batch(encoder.session, self.trainer.count(client))


def _add_all(
    batches: dict[int, Batch], pieces: list[tuple[int, NDArray[np.float32]]], pool: ThreadPoolExecutor
) -> None:
    """Add gradients to the batches of their silos, those of every other silo on another thread."""

    def add(odd: int) -> None:
        for client, rows in pieces:
            if client % 2 == odd:
                batches[client].add(rows)

    other = pool.submit(add, 1)
    add(0)
    other.result()
