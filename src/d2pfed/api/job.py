"""A simulated training run: from settings to a released model, resumable after every round."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from d2pfed.api.simulated import SimulatedRun, array_shapes
from d2pfed.errors import ConfigError
from d2pfed.learning import LocalTrainer, LocalTraining, Model, Optimizer, Task, evaluate
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics import canonical
from d2pfed.plan import MechanismName, Plan, PrivacyTarget, RotationName, calibrate, decode_plan
from d2pfed.plan.plan import TYPES
from d2pfed.runs import ArrayShape, Listener, Run, RunSettings, RunSummary
from d2pfed.runs.plain import read_text
from d2pfed.simulation import Backend, ClearFederation, Dropouts, Fidelity, InProcess, SimulatedFederation
from d2pfed.training import SecondMoment, ServerOptimizer


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

    def federation(self, run: Run, backend: Backend) -> SimulatedFederation:
        """Return the clients of a run that has a plan."""
        if self.plan is None:
            raise ValueError("a run in the clear has no federation")
        return self._run.federation(run, self.plan, backend)

    def clear_federation(self, run: Run, backend: Backend) -> ClearFederation:
        """Return the same clients with nothing private."""
        return self._run.clear_federation(run, backend)

    @staticmethod
    def read(run: Path, task: Callable[[str], Task], model: Callable[[str, Task, int], Model]) -> "Job":
        """Return the job that a run's directory was made by; its plan is the one that the run followed.

        `task` and `model` make what the settings name. Data of another description are refused.
        """
        file = run / "settings.json"
        found = _decoded(read_text(file), f"{file}")
        details = found.details
        if not isinstance(details, _Simulated) or found.target is None:
            raise ConfigError(f"{run} is not a private run of `d2pfed train`, whose clients can be made again")
        chosen = task(details.task)
        if chosen.description != found.data:
            raise ConfigError(f"the run in {run} was over other data: {found.data} Got: {chosen.description}")
        settings = Settings(
            task=details.task,
            data=found.data,
            model=details.model,
            target=found.target,
            local=details.local,
            server=found.optimizer,
            dropouts=details.dropouts,
            fidelity=details.fidelity,
            seed=found.seed,
            stop_is_blind=found.stop_is_blind,
        )
        return Job(
            settings,
            chosen,
            model(details.model, chosen, found.seed or 0),
            decode_plan(read_text(run / "plan.json")),
        )

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


_TYPES = TYPES | {
    kind.__name__: kind
    for kind in (
        *(RunSettings, PrivacyTarget, MechanismName, RotationName, ServerOptimizer, SecondMoment, ArrayShape),
        *(_Simulated, LocalTraining, Optimizer, Dropouts, Fidelity),
    )
}


def _decoded(text: str, where: str) -> RunSettings:
    try:
        found = canonical.decode(text, _TYPES)
    except ConfigError as error:
        raise ConfigError(f"{where} is not of a run of `d2pfed train`, or damaged: {error}") from error
    if not isinstance(found, RunSettings):
        raise ConfigError(f"{where} must hold RunSettings, got a {type(found).__name__}")
    return found


@dataclass(frozen=True, slots=True)
class TaskEvaluator:
    """Measures a model on a task's own data; the test data is opened once, at the end."""

    model: Model
    task: Task

    def validate(self, _rounds: int, params: FloatVector) -> dict[str, float]:
        """Return accuracy and loss on the validation data."""
        return evaluate(self.model, params, self.task.validation)

    def test(self, params: FloatVector) -> dict[str, float]:
        """Return accuracy and loss on the test data."""
        return evaluate(self.model, params, self.task.test())
