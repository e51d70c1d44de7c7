"""Canaries: clients, or records of silos, that send what gives them away best, each by a secret coin of its own."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from d2pfed.accounting import Adjacency
from d2pfed.errors import ConfigError
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import IntVector
from d2pfed.plan import Plan
from d2pfed.round import Units
from d2pfed.simulation import TrainClients
from d2pfed.simulation.silos import RecordGradients

_BEYOND = 4.0  # times the clip, or whatever it adapts to: the pipeline has to clip it


@dataclass(frozen=True, slots=True)
class Canaries:
    """Units that send along a coordinate of their own, up or down (or nothing) by a secret coin.

    Attributes:
        clients: who they are, or which silos they are in.
        records: of its silo the record that each takes the place of; 0 where a canary is a client.
        coordinates: of the model, no two the same, along which others send little.
        coins: whether each sends its vector up.
        low: what it sends for the other side of its coin: -1, or 0 where the neighbouring world has nothing.
        length: of what is sent, in real units.
        rate: how often one is in the sum of an attempt that its client is in: 1, or that of a record's secret coin.
    """

    clients: NDArray[np.int64] = field(repr=False)
    records: NDArray[np.int64] = field(repr=False)
    coordinates: NDArray[np.int64] = field(repr=False)
    coins: NDArray[np.bool_] = field(repr=False)
    low: float
    length: float
    rate: float

    @staticmethod
    def draw(
        count: int, plan: Plan, units: Sequence[int], sent: Iterable[NDArray[np.float32]], entropy: Entropy
    ) -> "Canaries":
        """Choose canaries and their coins; each client has so many `units`: 1, or its records.

        `sent` are rows that others would send for the first model: whoever attacks may know them.
        """
        most = min(sum(units), plan.dimension)
        if not 1 <= count <= most:
            raise ConfigError(
                f"canaries must be in [1, {most}]: no two share a {plan.unit} or a parameter, got {count}"
            )
        sizes = np.array(units, np.int64)
        ends = np.cumsum(sizes)
        chosen = entropy.child("clients").stream().subset(int(ends[-1]), count)
        clients = np.searchsorted(ends, chosen, side="right")
        clip = plan.codec.clip if plan.adaptive_clip is None else plan.adaptive_clip.initial
        return Canaries(
            clients=clients,
            records=chosen - (ends - sizes)[clients],
            coordinates=_quietest(sent, plan.dimension, count),
            coins=entropy.child("coins").stream().below_each(2, count) == 1,
            low=-1.0 if plan.adjacency is Adjacency.REPLACE_ONE else 0.0,
            length=_BEYOND * clip,
            rate=1.0 if plan.batches is None else float(plan.batches.rate),
        )

    def update(self, place: int, dimension: int) -> FloatVector:
        """Return what the canary at this place sends for its coin."""
        vector = np.zeros(dimension, np.float32)
        vector[self.coordinates[place]] = self.length * (1.0 if self.coins[place] else self.low)
        return vector

    @property
    def places(self) -> dict[tuple[int, int], int]:
        """The place of each client and record among the canaries."""
        named = zip(self.clients.tolist(), self.records.tolist(), strict=True)
        return {pair: place for place, pair in enumerate(named)}


def _quietest(sent: Iterable[NDArray[np.float32]], dimension: int, count: int) -> NDArray[np.int64]:
    """Return the coordinates along which the least is sent, each row scaled to the same length."""
    energy = np.zeros(dimension)
    for rows in sent:
        squares = np.square(np.atleast_2d(rows), dtype=np.float64)
        energy += (squares / np.maximum(squares.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)).sum(axis=0)
    return np.sort(np.argsort(energy, kind="stable")[:count]).astype(np.int64)


@dataclass(frozen=True, slots=True)
class CanaryTraining:
    """The local training of all clients but the canaries, which send what their coins say."""

    inner: TrainClients
    canaries: Canaries

    def __call__(self, params: FloatVector, clients: Sequence[int], seed: int) -> Iterator[FloatVector]:
        """Yield the updates of these clients, in their order."""
        places = self.canaries.places
        trained = self.inner(params, [client for client in clients if (client, 0) not in places], seed)
        for client in clients:
            place = places.get((client, 0))
            yield next(trained) if place is None else self.canaries.update(place, len(params))


@dataclass(frozen=True, slots=True)
class CanaryRecords:
    """The gradients of all records of some silos but the canaries', which are what their coins say."""

    inner: RecordGradients
    canaries: Canaries

    def count(self, client: int) -> int:
        """Return how many units a silo holds, canaries among them."""
        return self.inner.count(client)

    def units(self, params: FloatVector, client: int) -> Units:
        """Return a silo's units under a model."""
        return _CanaryUnits(self, params, client)

    def chunks(
        self, params: FloatVector, wanted: Sequence[tuple[int, IntVector]]
    ) -> Iterator[tuple[IntVector, NDArray[np.float32]]]:
        """Yield the vectors of chosen units and the silo of each, in their order."""
        places, done = self.canaries.places, 0
        asked = [(client, record) for client, chosen in wanted for record in chosen.tolist()]
        for silos, vectors in self.inner.chunks(params, wanted):
            found = vectors
            for row, pair in enumerate(asked[done : done + len(vectors)]):
                if (place := places.get(pair)) is not None:
                    found = found.copy() if found is vectors else found
                    found[row] = self.canaries.update(place, len(params))
            done += len(vectors)
            yield silos, found


@dataclass(frozen=True, slots=True)
class _CanaryUnits:
    """One silo's units, canaries among them."""

    gradients_of: CanaryRecords
    params: FloatVector = field(repr=False)
    client: int

    @property
    def count(self) -> int:
        """How many units there are."""
        return self.gradients_of.count(self.client)

    def gradients(self, chosen: IntVector) -> Iterator[NDArray[np.float32]]:
        """Yield rows with the vectors of the chosen units."""
        return (vectors for _, vectors in self.gradients_of.chunks(self.params, [(self.client, chosen)]))
