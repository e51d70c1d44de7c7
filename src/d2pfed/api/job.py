"""A simulated training run: from settings to a released model, resumable after every round."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from d2pfed.api.simulated import SimulatedRun, array_shapes
from d2pfed.learning import LocalTrainer, LocalTraining, Model, Task, evaluate
from d2pfed.noise.codec import FloatVector
from d2pfed.plan import Plan, PrivacyTarget, calibrate
from d2pfed.runs import Listener, Run, RunSettings, RunSummary
from d2pfed.simulation import Backend, ClearFederation, Dropouts, Fidelity, InProcess
from d2pfed.training import ServerOptimizer


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
        return self._run.execute(path, ledger, evaluator, lambda _: listen, own)

    @contextmanager
    def open(self, path: Path, ledger: Path | None) -> Iterator[Run]:
        """Open the run in its directory."""
        with self._run.open(path, ledger) as run:
            yield run

    def clear_federation(self, run: Run, backend: Backend) -> ClearFederation:
        """Return the same clients with nothing private."""
        return self._run.clear_federation(run, backend)

    @property
    def _run(self) -> SimulatedRun:
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
        return SimulatedRun(
            settings=spec,
            plan=self.plan,
            sampling=settings.target.cohort_sampling,
            initial=self.model.initial(),
            dropouts=settings.dropouts,
            fidelity=settings.fidelity,
        )


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
