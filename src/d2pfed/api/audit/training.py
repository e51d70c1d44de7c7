"""The audit of a training run: canaries, which send what gives them away best, and what the server guesses of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from d2pfed.accounting import SERVER, Adjacency, Unit
from d2pfed.api.audit.bounds import one_run_epsilon, one_run_gaussian_epsilon
from d2pfed.api.job import Job
from d2pfed.errors import ConfigError
from d2pfed.fields import check_between
from d2pfed.learning import RecordTrainer
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import IntVector
from d2pfed.plan import Plan, guarantees
from d2pfed.round import AttemptSession, Collected, rotation_seed
from d2pfed.runs import End, Listener, TrainingAudit
from d2pfed.secagg import Sum
from d2pfed.simulation import Backend, TrainClients
from d2pfed.simulation.backend import RecordGradients, Silos

# Of the canaries that took part: the surest guesses, each number fixed beforehand.
_SHARES = (0.125, 0.25, 0.5, 1.0)
_BEYOND = 4.0  # times the clip, or whatever it adapts to: the pipeline has to clip it
_CLIENTS, _RECORDS = 50, 100  # clients, or records of each silo, that are looked at for quiet coordinates

SHOWS = (
    "This attack can show gross errors, by which this training leaks more about a {unit} than claimed, but not that it "
    "leaks no more: the bound of one run stays well below a tight claim."
)


@dataclass(frozen=True, slots=True)
class Canaries:
    """Units that send along a coordinate of their own, up or down (or nothing) by a secret coin."""

    clients: NDArray[np.int64] = field(repr=False)  # who they are, or which silos they are in
    records: NDArray[np.int64] = field(repr=False)  # of its silo, whose place each takes; 0 where it is a client
    coordinates: NDArray[np.int64] = field(repr=False)  # no two the same, along which others send little
    coins: NDArray[np.bool_] = field(repr=False)  # whether each sends its vector up
    low: float  # what it sends otherwise: -1, or 0 where the neighbouring world has nothing
    length: float  # of what is sent, in real units
    rate: float  # how often one is in a sum that its client is in: 1, or the rate of a record's secret coin

    @staticmethod
    def draw(
        count: int, plan: Plan, units: Sequence[int], sent: Iterable[NDArray[np.float32]], entropy: Entropy
    ) -> "Canaries":
        """Choose canaries and their coins; each client has this number of `units`: 1, or its records.

        `sent` are rows that others would send for the first model: an attacker may know them.
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
        energy = np.zeros(plan.dimension)  # of rows that are scaled to the same length, by coordinate
        for rows in sent:
            squares = np.square(np.atleast_2d(rows), dtype=np.float64)
            tiny = np.finfo(np.float64).tiny
            energy += (squares / np.maximum(squares.sum(axis=1, keepdims=True), tiny)).sum(axis=0)
        return Canaries(
            clients=clients,
            records=chosen - (ends - sizes)[clients],
            coordinates=np.sort(np.argsort(energy, kind="stable")[:count]).astype(np.int64),
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
class WatchedSum:
    """Collected vectors of an attempt, whose sum tells something of each canary when it is opened."""

    session: AttemptSession
    inner: Collected
    plan: Plan
    canaries: Canaries
    scores: NDArray[np.float64] = field(repr=False)  # of each canary, what the sums show along its coordinate
    seen: NDArray[np.bool_] = field(repr=False)

    @property
    def survivors(self) -> tuple[int, ...]:
        """The clients whose vector is in the sum."""
        return self.inner.survivors

    def unmask(self) -> Sum:
        """Open the sum; add what it shows, in units of the clip, to the scores of the canaries that may be in it.

        The middle between the two sides of a coin is subtracted, so that the sign of a score is the guess.
        """
        total, plan, canaries = self.inner.unmask(), self.plan, self.canaries
        found = plan.codec.decode(plan.ring.center(total.vector), rotation_seed(self.session), 1)
        unit = 1.0 if plan.adaptive_clip is not None else plan.codec.clip
        here = np.isin(canaries.clients, self.survivors)
        middle = canaries.rate * (1.0 + canaries.low) / 2
        self.scores[here] += found[canaries.coordinates[here]].astype(np.float64) / unit - middle
        self.seen[here] = True
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
    """Repeat a run with canaries in place of some units, and return what its server could guess of their coins.

    Args:
        job: the run; its model is thrown away.
        count: how many canaries: clients, or records where the plan protects a record.
        start: makes the backend that trains the clients, which is closed at the end; silos need none.
        listen: is called after every round.
        confidence: of the lower bounds together.
        entropy: the root of the choice of canaries and of their coins; None is the system's.
    """
    plan = job.plan
    if plan is None:
        raise ConfigError("a run in the clear claims nothing that an audit could refute")
    check_between("confidence", confidence, 0, 1)
    root = Entropy.system() if entropy is None else entropy
    params, population = job.model.initial(), plan.sampling.population
    if plan.unit is Unit.CLIENT:
        sent = job.trainer()(params, range(0, population, -(-population // _CLIENTS)), 0)
        canaries = Canaries.draw(count, plan, [1] * population, sent, root)
        backend = start(CanaryTraining(job.trainer(), canaries))
    else:
        trainer = RecordTrainer(job.model, job.clients).tried(params, plan.divisor)
        units = [trainer.count(silo) for silo in range(population)]
        looked_at = [(silo, np.arange(min(held, _RECORDS))) for silo, held in enumerate(units)]
        sent = (vectors for _, vectors in trainer.chunks(params, looked_at))
        canaries = Canaries.draw(count, plan, units, sent, root)
        backend = Silos(CanaryRecords(trainer, canaries))
    scores, seen = np.zeros(count), np.zeros(count, np.bool_)
    with closing(backend), TemporaryDirectory() as directory, job.open(Path(directory) / "audit", None) as run:
        watch = partial(WatchedSum, plan=plan, canaries=canaries, scores=scores, seen=seen)
        watched = replace(job.federation(run, backend), watch=watch)
        summary = run.train(watched, job.evaluator, listen, evaluate_every=plan.rounds)
    if summary.end is not End.COMPLETE:
        raise ConfigError(f"the audited run ended early: {summary.stopped}")
    present = int(seen.sum())
    if not present:
        raise ConfigError(f"none of {count} canaries took part in a sum: take more of them")
    alpha = (1 - confidence) / (2 * len(_SHARES))  # two bounds, at each number of guesses
    tries = []
    for share in _SHARES:
        guesses = int(np.ceil(share * present))
        right = guess(scores[seen], canaries.coins[seen], guesses)
        # The server knows who took part, whatever the coins: the others' coins are none that it could guess.
        given = present, guesses, right, plan.delta, alpha
        tries.append((one_run_epsilon(*given), one_run_gaussian_epsilon(*given), guesses, right))
    _, _, guesses, right = max(tries, key=lambda found: max(found[:2]))
    return TrainingAudit(
        observer=str(SERVER),
        claimed=next(item.epsilon for item in guarantees(plan) if item.observer == SERVER),
        delta=plan.delta,
        unit=plan.unit.value,
        lower=max(found[0] for found in tries),
        gaussian=max(found[1] for found in tries),
        confidence=confidence,
        canaries=count,
        present=present,
        guesses=guesses,
        correct=right,
        shows=SHOWS.format(unit=plan.unit),
    )
