"""The audit of a training run: canary clients in one run, and what the server guesses of their coins."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from d2pfed.accounting import SERVER, Adjacency, Unit
from d2pfed.api.audit.bounds import check_confidence, one_run_epsilon
from d2pfed.api.audit.mechanism import claimed_epsilon
from d2pfed.api.job import Job, TaskEvaluator
from d2pfed.errors import ConfigError
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import Plan
from d2pfed.round import Attempt, Collected, rotation_seed
from d2pfed.runs import End, ExchangeRecord, Listener, TrainingAudit
from d2pfed.secagg import Session, Sum
from d2pfed.simulation import Backend, SimulatedFederation, TrainClients

_BEYOND = 4.0  # times the clip, or whatever it adapts to: the pipeline has to clip it
_SHARES = (
    0.125,
    0.25,
    0.5,
    1.0,
)  # of the canaries that took part: the surest guesses, each number fixed beforehand

SHOWS = (
    "It can show that this training leaks more about a client than is claimed, as a gross error would make it; it "
    "cannot show that it leaks no more, and one run's bound stays well below a claim that is tight."
)


@dataclass(frozen=True, slots=True)
class Canaries:
    """Clients that send what gives them away best: each its own coordinate, up or down (or nothing) by a secret coin.

    Attributes:
        clients: who they are, one per coordinate.
        coordinates: of the model, no two the same.
        coins: whether each sends its vector up.
        low: what it sends for the other side of its coin: -1, or 0 where the neighbouring world has nothing.
        length: of what is sent, in real units.
    """

    clients: NDArray[np.int64] = field(repr=False)
    coordinates: NDArray[np.int64] = field(repr=False)
    coins: NDArray[np.bool_] = field(repr=False)
    low: float
    length: float

    @staticmethod
    def draw(count: int, plan: Plan, entropy: Entropy) -> "Canaries":
        """Choose canaries of a plan's population, their coordinates and their coins."""
        if plan.unit is not Unit.CLIENT:
            raise ConfigError(f"canaries are clients, and the plan has the unit {plan.unit}: nothing is audited")
        most = min(plan.sampling.population, plan.dimension)
        if not 1 <= count <= most:
            raise ConfigError(
                f"canaries must be in [1, {most}]: no two share a client or a parameter, got {count}"
            )
        clients = entropy.child("clients").stream().subset(plan.sampling.population, count)
        coordinates = entropy.child("coordinates").stream().subset(plan.dimension, count)
        coins = entropy.child("coins").stream().below_each(2, count) == 1
        low = -1.0 if plan.adjacency is Adjacency.REPLACE_ONE else 0.0
        clip = plan.codec.clip if plan.adaptive_clip is None else plan.adaptive_clip.initial
        return Canaries(clients, coordinates, coins, low, _BEYOND * clip)

    def update(self, place: int, dimension: int) -> FloatVector:
        """Return what the canary at this place sends for its coin."""
        vector = np.zeros(dimension, np.float32)
        vector[self.coordinates[place]] = self.length * (1.0 if self.coins[place] else self.low)
        return vector

    @property
    def places(self) -> dict[int, int]:
        """The place of each client among the canaries."""
        return {int(client): place for place, client in enumerate(self.clients)}


@dataclass(frozen=True, slots=True)
class CanaryTraining:
    """The local training of all clients but the canaries, which send what their coins say."""

    inner: TrainClients
    canaries: Canaries

    def __call__(self, params: FloatVector, clients: Sequence[int], seed: int) -> Iterator[FloatVector]:
        """Yield the updates of these clients, in their order."""
        places = self.canaries.places
        trained = self.inner(params, [client for client in clients if client not in places], seed)
        for client in clients:
            yield self.canaries.update(places[client], len(params)) if client in places else next(trained)


@dataclass(slots=True)
class WatchedFederation:
    """A simulated federation whose server keeps, for each canary, what the sums show along its coordinate."""

    inner: SimulatedFederation
    canaries: Canaries
    scores: NDArray[np.float64] = field(repr=False)
    seen: NDArray[np.bool_] = field(repr=False)

    @staticmethod
    def of(inner: SimulatedFederation, canaries: Canaries) -> "WatchedFederation":
        """Watch a federation from its first round on."""
        count = len(canaries.clients)
        return WatchedFederation(inner, canaries, np.zeros(count), np.zeros(count, np.bool_))

    def with_clip(self, clip: float) -> "WatchedFederation":
        """Return the federation in a round with this clip, which adds to the same scores."""
        return replace(self, inner=self.inner.with_clip(clip))

    def draw(self, attempt: Attempt) -> tuple[int, ...]:
        """Return the cohort of an attempt."""
        return self.inner.draw(attempt)

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> Session:
        """Return the session of an attempt."""
        return self.inner.bind(attempt, cohort)

    def collect(self, session: Session, model: FloatVector, participations: Mapping[int, int]) -> Collected:
        """Gather the cohort's vectors."""
        return _Watched(self.inner.collect(session, model, participations), self, session)

    def exchanges(self) -> tuple[ExchangeRecord, ...]:
        """Return nothing: no message travels."""
        return self.inner.exchanges()

    def note(self, session: Session, survivors: Sequence[int], total: Sum) -> None:
        """Add what an opened sum shows, in units of the clip, to the scores of the canaries in it.

        The middle between the two sides of a coin is subtracted, so that the sign of a score is the guess.
        """
        plan, places = self.inner.plan, self.canaries.places
        mean = plan.codec.decode(plan.ring.centre(total.vector), rotation_seed(session), 1)
        unit = 1.0 if plan.adaptive_clip is not None else plan.codec.clip
        for client in survivors:
            if (place := places.get(client)) is not None:
                middle = (1.0 + self.canaries.low) / 2
                self.scores[place] += float(mean[self.canaries.coordinates[place]]) / unit - middle
                self.seen[place] = True


@dataclass(frozen=True, slots=True)
class _Watched:
    """Collected vectors whose sum is noted when it is opened."""

    inner: Collected
    federation: WatchedFederation
    session: Session

    @property
    def survivors(self) -> tuple[int, ...]:
        """The clients whose vector is in the sum."""
        return self.inner.survivors

    def unmask(self) -> Sum:
        """Open the sum, and note what it shows."""
        total = self.inner.unmask()
        self.federation.note(self.session, self.survivors, total)
        return total


def guess(scores: NDArray[np.float64], coins: NDArray[np.bool_], guesses: int) -> int:
    """Return how many of the surest guesses are right: the sign of a score, for those farthest from zero."""
    surest = np.argsort(-np.abs(scores), kind="stable")[:guesses]
    return int(np.sum((scores[surest] > 0) == coins[surest]))


def audit_training(
    job: Job,
    count: int,
    start: Callable[[TrainClients], Backend],
    listen: Listener,
    *,
    confidence: float = 0.95,
    entropy: Entropy | None = None,
) -> TrainingAudit:
    """Repeat a run with canaries in place of some clients, and return what its server could guess of their coins.

    Args:
        job: the run; its model is thrown away.
        count: how many canaries.
        start: makes the backend that trains the clients; it is closed at the end.
        listen: hears of every round.
        confidence: of the lower bound.
        entropy: the root of the choice of canaries and of their coins; None is the system's.
    """
    plan = job.plan
    if plan is None:
        raise ConfigError("a run in the clear claims nothing that an audit could refute")
    check_confidence(confidence)
    canaries = Canaries.draw(count, plan, Entropy.system() if entropy is None else entropy)
    backend = start(CanaryTraining(job.trainer(), canaries))
    with closing(backend), TemporaryDirectory() as directory, job.open(Path(directory) / "audit", None) as run:
        watched = WatchedFederation.of(job.federation(run, backend), canaries)
        summary = run.train(watched, TaskEvaluator(job.model, job.task), listen, evaluate_every=plan.rounds)
        if summary.end is not End.COMPLETE:
            raise ConfigError(f"the audited run ended early: {summary.stopped}")
        return audit_scores(watched, confidence)


def audit_scores(watched: WatchedFederation, confidence: float) -> TrainingAudit:
    """Return the lower bound that the canaries' scores give, beside what the plan claims against the server."""
    plan, seen = watched.inner.plan, watched.seen
    count, present = len(seen), int(seen.sum())
    alpha = (1 - confidence) / len(_SHARES)
    tries = []
    for share in _SHARES:
        guesses = int(np.ceil(share * present))
        right = guess(watched.scores[seen], watched.canaries.coins[seen], guesses)
        # The server knows who took part, whatever the coins: the others' coins are none that it could guess.
        tries.append((one_run_epsilon(present, guesses, right, plan.delta, alpha), guesses, right))
    lower, guesses, right = max(tries)
    return TrainingAudit(
        observer=str(SERVER),
        claimed=claimed_epsilon(plan),
        delta=plan.delta,
        lower=lower,
        confidence=confidence,
        canaries=count,
        present=present,
        guesses=guesses,
        correct=right,
        shows=SHOWS,
    )
