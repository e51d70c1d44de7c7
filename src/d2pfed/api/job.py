"""A simulated training run: from settings to a released model, resumable after every round."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from d2pfed.accounting import CohortSampling, Sampling
from d2pfed.learning import LocalTrainer, LocalTraining, Model, Task, evaluate
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import Plan, PrivacyTarget, calibrate
from d2pfed.runs import ArrayShape, Listener, Run, RunSettings, RunSummary, open_run
from d2pfed.simulation import (
    Backend,
    ClearFederation,
    Dropouts,
    Fidelity,
    InProcess,
    SimulatedFederation,
)
from d2pfed.training import Cohorts, ServerOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that decides a simulated run; the same settings resume it, others are refused."""

    task: str
    data: str  # what the task says of its data
    model: str
    target: PrivacyTarget
    local: LocalTraining
    server: ServerOptimizer
    dropouts: Dropouts
    fidelity: Fidelity
    seed: int | None  # None: the system's entropy; a number repeats the run and protects nobody
    stop_is_blind: bool = False  # whether the run, if it stops early, does so for nothing that it has shown


@dataclass(frozen=True, slots=True)
class _Simulated:
    """What decides a simulated run beside what every run has."""

    task: str
    model: str
    local: LocalTraining
    dropouts: Dropouts
    fidelity: Fidelity


@dataclass(frozen=True, slots=True)
class Job:
    """A run that can be carried out, or resumed."""

    settings: Settings
    task: Task
    model: Model
    plan: Plan | None = field(repr=False)  # None: in the clear

    @staticmethod
    def of(settings: Settings, task: Task, model: Model) -> "Job":
        """Plan a run."""
        return Job(settings, task, model, calibrate(settings.target))

    def trainer(self) -> LocalTrainer:
        """Return the local training of its clients, for a backend."""
        return LocalTrainer(self.model, self.task.clients, self.settings.local)

    def execute(
        self, path: Path, ledger: Path | None, listen: Listener, backend: Backend | None = None
    ) -> RunSummary:
        """Train from where the run is to its end, its budget's end, or the listener's request to stop.

        `ledger` is one that other runs over these clients share, None the run's own. `backend` says where clients are
        trained, None in this process; a run may go on with another backend than it began with. It is closed at the end.
        """
        own, evaluator = backend or InProcess(self.trainer()), TaskEvaluator(self.model, self.task)
        with closing(own), self.open(path, ledger) as run:
            if self.plan is None:
                return run.train_in_the_clear(self.clear_federation(run, own), evaluator, listen)
            return run.train(self._federation(run, self.plan, own), evaluator, listen)

    @contextmanager
    def open(self, path: Path, ledger: Path | None) -> Iterator[Run]:
        """Open the run in its directory."""
        settings = self.settings
        spec = RunSettings(
            title=f"{settings.task}, {settings.model}",
            data=settings.data,
            target=None if self.plan is None else settings.target,
            rounds=settings.target.rounds,
            optimizer=settings.server,
            arrays=array_shapes(self.model),
            seed=settings.seed,
            stop_is_blind=settings.stop_is_blind,
            details=_Simulated(
                settings.task, settings.model, settings.local, settings.dropouts, settings.fidelity
            ),
        )
        with open_run(path, spec, self.plan, self.model.initial(), ledger=ledger) as run:
            yield run

    def _federation(self, run: Run, plan: Plan, backend: Backend) -> SimulatedFederation:
        entropy, settings = self._entropy(), self.settings
        return SimulatedFederation(
            plan=plan,
            backend=backend,
            cohorts=self._cohorts(run, plan.sampling),
            dropouts=settings.dropouts,
            fidelity=settings.fidelity,
            entropy=entropy.child("clients"),
            ledger=run.ledger,
        )

    def clear_federation(self, run: Run, backend: Backend) -> ClearFederation:
        """Return the same clients with nothing private."""
        return ClearFederation(backend, self._cohorts(run, self.settings.target.cohort_sampling), run.name)

    def _cohorts(self, run: Run, sampling: CohortSampling) -> Cohorts:
        """Return the draws of a run's cohorts.

        Two runs with one seed must not share their cohorts, nor a run and one that goes on from a copy of it. Only a
        partition is kept when a run is resumed, or a client might be drawn in two rounds.
        """
        drawing = self._entropy().child("cohorts", run.name)
        if self.settings.seed is None and sampling.method is Sampling.ONCE:
            drawing = run.directory.identity().cohorts
        return Cohorts(sampling, drawing)

    def _entropy(self) -> Entropy:
        seed = self.settings.seed
        return Entropy.system() if seed is None else Entropy.replay(str(seed).encode())


@dataclass(frozen=True, slots=True)
class TaskEvaluator:
    """Measures a model on a task's own data; the test data is opened once, at the end."""

    model: Model
    task: Task

    def validate(self, _rounds: int, params: FloatVector) -> dict[str, float]:
        """Return accuracy and loss on the validation data."""
        found = evaluate(self.model, params, self.task.validation)
        return {"accuracy": found.accuracy, "loss": found.loss}

    def test(self, params: FloatVector) -> dict[str, float]:
        """Return accuracy and loss on the test data."""
        found = evaluate(self.model, params, self.task.test())
        return {"accuracy": found.accuracy, "loss": found.loss}


def array_shapes(model: Model) -> tuple[ArrayShape, ...]:
    """Return the trained arrays of a model, in the order of its flat vector."""
    values = dict(model.module.named_parameters())
    return tuple(ArrayShape(name, tuple(values[name].shape)) for name in model.names)
