"""The audit of a training run: canaries in one run, and what the server guesses of their coins."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from d2pfed.accounting import SERVER, Unit
from d2pfed.api.audit.bounds import check_confidence, one_run_epsilon, one_run_gaussian_epsilon
from d2pfed.api.audit.canaries import Canaries, CanaryRecords, CanaryTraining
from d2pfed.api.job import Job
from d2pfed.errors import ConfigError
from d2pfed.learning import RecordTrainer
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import Plan, guarantees
from d2pfed.round import Attempt, Collected, rotation_seed
from d2pfed.runs import End, ExchangeRecord, Listener, TrainingAudit
from d2pfed.secagg import Session, Sum
from d2pfed.simulation import Backend, SimulatedFederation, TrainClients
from d2pfed.simulation.silos import Silos

# Of the canaries that took part: the surest guesses, each number fixed beforehand.
_SHARES = (0.125, 0.25, 0.5, 1.0)
_CLIENTS, _RECORDS = 50, 100  # clients, or records of each silo, that are looked at for quiet coordinates

SHOWS = (
    "It can show that this training leaks more about a {unit} than is claimed, as a gross error would make it; it "
    "cannot show that it leaks no more, and one run's bound stays well below a claim that is tight."
)


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
        """Add what an opened sum shows, in units of the clip, to the scores of the canaries that may be in it.

        The middle between the two sides of a coin is subtracted, so that the sign of a score is the guess.
        """
        plan, canaries = self.inner.plan, self.canaries
        found = plan.codec.decode(plan.ring.centre(total.vector), rotation_seed(session), 1)
        unit = 1.0 if plan.adaptive_clip is not None else plan.codec.clip
        here = np.isin(canaries.clients, survivors)
        middle = canaries.rate * (1.0 + canaries.low) / 2
        self.scores[here] += found[canaries.coordinates[here]].astype(np.float64) / unit - middle
        self.seen |= here


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
    """Repeat a run with canaries in place of some units, and return what its server could guess of their coins.

    Args:
        job: the run; its model is thrown away.
        count: how many canaries: clients, or records where the plan protects a record.
        start: makes the backend that trains the clients, which is closed at the end; silos need none.
        listen: hears of every round.
        confidence: of the lower bounds together.
        entropy: the root of the choice of canaries and of their coins; None is the system's.
    """
    plan = job.plan
    if plan is None:
        raise ConfigError("a run in the clear claims nothing that an audit could refute")
    check_confidence(confidence)
    root = Entropy.system() if entropy is None else entropy
    canaries, backend = _with_canaries(job, plan, count, start, root)
    with closing(backend), TemporaryDirectory() as directory, job.open(Path(directory) / "audit", None) as run:
        watched = WatchedFederation.of(job.federation(run, backend), canaries)
        summary = run.train(watched, job.evaluator, listen, evaluate_every=plan.rounds)
        if summary.end is not End.COMPLETE:
            raise ConfigError(f"the audited run ended early: {summary.stopped}")
        return audit_scores(watched, confidence)


def _with_canaries(
    job: Job, plan: Plan, count: int, start: Callable[[TrainClients], Backend], root: Entropy
) -> tuple[Canaries, Backend]:
    """Return the canaries of a run, and its clients or silos with them in their places."""
    params, population = job.model.initial(), plan.sampling.population
    if plan.unit is Unit.CLIENT:
        sent = job.trainer()(params, range(0, population, -(-population // _CLIENTS)), 0)
        canaries = Canaries.draw(count, plan, [1] * population, sent, root)
        return canaries, start(CanaryTraining(job.trainer(), canaries))
    trainer = RecordTrainer(job.model, job.clients).tried(params, plan.divisor)
    units = [trainer.count(silo) for silo in range(population)]
    looked_at = [(silo, np.arange(min(held, _RECORDS))) for silo, held in enumerate(units)]
    sent = (vectors for _, vectors in trainer.chunks(params, looked_at))
    canaries = Canaries.draw(count, plan, units, sent, root)
    return canaries, Silos(CanaryRecords(trainer, canaries))


def audit_scores(watched: WatchedFederation, confidence: float) -> TrainingAudit:
    """Return the lower bounds that the canaries' scores give, beside what the plan claims against the server."""
    plan, seen = watched.inner.plan, watched.seen
    count, present = len(seen), int(seen.sum())
    if not present:
        raise ConfigError(f"none of {count} canaries took part in a sum: take more of them")
    alpha = (1 - confidence) / (2 * len(_SHARES))  # two bounds, at each number of guesses
    tries = []
    for share in _SHARES:
        guesses = int(np.ceil(share * present))
        right = guess(watched.scores[seen], watched.canaries.coins[seen], guesses)
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
