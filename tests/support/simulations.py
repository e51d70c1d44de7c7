"""Simulated rounds out of a test's own updates, draws and collections."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from d2pfed import round as rounds
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import RingVector
from d2pfed.plan import Plan
from d2pfed.round import Attempt, Collected
from d2pfed.secagg import Session
from d2pfed.simulation import Dropouts, Encoder, Fidelity, SimulatedFederation


@dataclass(frozen=True)
class Given:
    """A backend whose updates are given; None stands for a client that was lost."""

    updates: Callable[[Sequence[int]], Iterator[FloatVector | None]]

    def train(self, _params: FloatVector, clients: Sequence[int], _seed: int) -> Iterator[FloatVector | None]:
        yield from self.updates(clients)

    def encode(
        self, encoder: Encoder, _params: FloatVector, clients: Sequence[int], _seed: int
    ) -> Iterator[tuple[tuple[int, ...], RingVector]]:
        for client, update in zip(clients, self.updates(clients), strict=True):
            if update is not None:
                yield (client,), encoder.encode(client, update)

    def close(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Sessions of one plan over given updates."""

    plan: Plan
    updates: Callable[[Sequence[int]], Iterator[FloatVector | None]]
    dropouts: Dropouts = field(default_factory=Dropouts)
    entropy: Entropy
    participations: Mapping[int, int] = field(default_factory=dict)
    model: FloatVector = field(default_factory=lambda: np.zeros(1, np.float32))

    def collect(self, session: Session, fidelity: Fidelity) -> Collected:
        return SimulatedFederation(
            plan=self.plan,
            backend=Given(self.updates),
            dropouts=self.dropouts,
            entropy=self.entropy,
            fidelity=fidelity,
        ).collect(session, self.model, self.participations)


@dataclass(frozen=True)
class Attempting:
    """The attempts of a round by a test's own draw (from an attempt's number) and collection."""

    plan: Plan
    drawn: Callable[[int], tuple[int, ...]]
    collected: Callable[[Session, Mapping[int, int]], Collected]

    def draw(self, attempt: Attempt) -> tuple[int, ...]:
        return self.drawn(attempt.number)

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> Session:
        return rounds.session_of(self.plan, attempt, cohort)

    def collect(self, session: Session, _model: FloatVector, participations: Mapping[int, int]) -> Collected:
        return self.collected(session, participations)


NO_MODEL = np.zeros(0, np.float32)
