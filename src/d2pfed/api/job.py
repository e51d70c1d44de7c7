"""A simulated run: clients, model, settings and plan brought together with the driver; of `fit`, `train` and audits."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path

from d2pfed.accounting import CohortSampling, Sampling
from d2pfed.api.backends import MISTAKES, mistake
from d2pfed.api.result import add_norms
from d2pfed.api.settings import EarlyStop, Mode
from d2pfed.errors import ConfigError, needs_extra
from d2pfed.learning import (
    Clients,
    Examples,
    Groups,
    LocalTrainer,
    LocalTraining,
    Metric,
    Model,
    Optimizer,
    Task,
    UserClients,
    batches_of,
    build_model,
    evaluate,
    fixed_content,
    load_task,
    measure,
    parse_partition,
    user_model,
)
from d2pfed.learning.user_clients import LabeledClients
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.plan import MechanismName, Plan, PrivacyTarget, RotationName, calibrate, decode_plan
from d2pfed.plan.plan import TYPES
from d2pfed.round import can_stand
from d2pfed.runs import ArrayShape, Evaluator, Listener, Run, RunSettings, RunSummary, open_run
from d2pfed.runs.plain import read_text
from d2pfed.simulation import (
    Backend,
    ClearFederation,
    Dropouts,
    Fidelity,
    SerialBackend,
    SimulatedFederation,
    StandingFederation,
)
from d2pfed.simulation.federation import rehearse
from d2pfed.training import Cohorts, SecondMoment, ServerOptimizer

_LATER = canonical.OMITTED_IF_NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that decides a run over a named task; the same settings resume it, others are refused."""

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
    early_stop: EarlyStop | None = field(default=None, metadata=_LATER)
    max_weight: float | None = field(default=None, metadata=_LATER)


@dataclass(frozen=True, slots=True)
class _Simulated:
    """What decides a run over a named task beside what every run has."""

    task: str
    model: str
    local: LocalTraining
    dropouts: Dropouts
    fidelity: Fidelity
    early_stop: EarlyStop | None = field(default=None, metadata=_LATER)
    max_weight: float | None = field(default=None, metadata=_LATER)  # None: all weigh alike


@dataclass(frozen=True, slots=True)
class Details:
    """What decides a run over a user's clients beside what every run has; data and initial parameters are not compared.

    Whether rows are grouped by their owner is: it decides what the printed epsilon protects.
    """

    local: LocalTraining
    cohort_size: int
    loss: str
    fixed: str  # digest of all parameters and buffers that are not trained
    early_stop: EarlyStop | None
    max_weight: float | None = field(default=None, metadata=_LATER)  # None: all weigh alike
    unit: str | None = field(default=None, metadata=_LATER)  # "owner" where rows have one
    dropouts: Dropouts | None = field(default=None, metadata=_LATER)  # None: nobody is lost
    fidelity: Fidelity | None = field(default=None, metadata=_LATER)  # None: sums


_TYPES = TYPES | {
    kind.__name__: kind
    for kind in (
        *(RunSettings, PrivacyTarget, MechanismName, RotationName, ServerOptimizer, SecondMoment, ArrayShape),
        *(_Simulated, Details, LocalTraining, Optimizer, Dropouts, Fidelity, EarlyStop, Mode),
    )
}


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


@dataclass(frozen=True, slots=True, eq=False)
class UserEvaluator:
    """Measures a model on a user's data by a user's metrics; those for the test are opened once, at the end."""

    model: Model
    validation: object = field(repr=False)
    held_out: object = field(repr=False)
    metrics: Mapping[str, Metric]

    def validate(self, _rounds: int, params: FloatVector) -> dict[str, float]:
        """Return the metrics on the validation data; none without such data."""
        return measure(self.model, params, batches_of(self.validation, "validation"), self.metrics)

    def test(self, params: FloatVector) -> dict[str, float]:
        """Return the metrics on the test data; none without such data."""
        held_out = self.held_out() if callable(self.held_out) else self.held_out
        return measure(self.model, params, batches_of(held_out, "test"), self.metrics)

    def rehearse(self, params: FloatVector) -> None:
        """Measure one batch of the validation data, so that a mistake shows before anything is charged."""
        try:
            measure(self.model, params, islice(batches_of(self.validation, "validation"), 1), self.metrics)
        except MISTAKES as error:
            raise mistake("the validation data cannot be measured", error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run over simulated clients that can be carried out, resumed or audited: private by a plan, or in the clear."""

    settings: RunSettings
    plan: Plan | None = field(repr=False)  # None: in the clear
    sampling: CohortSampling
    model: Model
    clients: Clients | UserClients
    evaluator: Evaluator
    validation: Examples | None = field(default=None, repr=False)
    groups: Groups | None = field(default=None, repr=False)
    weights: tuple[float, ...] | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()  # on what was chosen, one line each
    name: str = "run"  # of its directory, by default

    @staticmethod
    def of(settings: Settings, task: Task, model: Model) -> "Job":
        """Plan a run over a named task."""
        return Job.with_plan(settings, task, model, calibrate(settings.target, settings.max_weight))

    @staticmethod
    def with_plan(settings: Settings, task: Task, model: Model, plan: Plan | None) -> "Job":
        """Return a run over a named task by this plan; None: in the clear, by the target's rounds and cohorts."""
        return Job(
            name=f"{settings.task.replace(':', '-')}-{digest(canonical.encode(settings)).hex()[:8]}",
            settings=RunSettings(
                title=f"{settings.task}, {settings.model}",
                data=settings.data,
                target=None if plan is None else settings.target,
                rounds=settings.target.rounds,
                optimizer=settings.server,
                arrays=array_shapes(model),
                seed=settings.seed,
                stop_is_blind=settings.stop_is_blind,
                details=_Simulated(
                    settings.task,
                    settings.model,
                    settings.local,
                    settings.dropouts,
                    settings.fidelity,
                    settings.early_stop,
                    settings.max_weight,
                ),
            ),
            plan=plan,
            sampling=settings.target.cohort_sampling,
            model=model,
            clients=task.clients,
            evaluator=TaskEvaluator(model, task),
            validation=task.validation,
        )

    @staticmethod
    def read(run: Path, task: Callable[[str], object], model: Callable[[str, object, int], object]) -> "Job":
        """Return the job that a run's directory was made by; its plan is the one that the run followed.

        `task` and `model` make what the settings name, or the data and the module of a user. Data of another
        description are refused.
        """
        file = run / "settings.json"
        text = read_text(file)
        try:
            found = canonical.decode(text, _TYPES)
        except ConfigError as error:
            raise ConfigError(f"{file} is not of a run of `fit` or `d2pfed train`, or damaged: {error}") from error
        details = found.details if isinstance(found, RunSettings) else None
        if not isinstance(details, _Simulated | Details) or found.target is None:
            raise ConfigError(
                f"{run} is not a private run of `fit` or `d2pfed train`, whose clients can be made again"
            )
        if details.max_weight is not None or getattr(details, "unit", None) is not None:
            raise ConfigError(f"the run in {run} has weights or owners of rows, which its directory does not have")
        plan, name, network = decode_plan(read_text(run / "plan.json")), "", ""
        if isinstance(details, _Simulated):
            name, network = details.task, details.model
        chosen = task(name)
        made = model(network, chosen, found.seed or 0)
        if isinstance(details, Details):
            made = _same_model(made, found, details)
        elif isinstance(made, Model) and array_shapes(made) != found.arrays:  # not all of it was trained
            made = replace(made, trainable=tuple(array.name for array in found.arrays))
        if not isinstance(made, Model):
            raise ConfigError(f"a model must be a Model of d2pfed.learning, got a {type(made).__name__}")
        clients, validation = _same_clients(chosen, found, made, run)
        return Job(
            settings=found,
            plan=plan,
            sampling=plan.sampling,
            model=made,
            clients=clients,
            evaluator=UserEvaluator(made, None, None, {}),  # what is attacked is never measured
            validation=validation,
        )

    def trainer(self) -> LocalTrainer:
        """Return the local training of its clients, for a backend."""
        return LocalTrainer(self.model, self.clients, self.details.local)

    @property
    def details(self) -> "_Simulated | Details":
        """What decides the run beside what every run has."""
        if not isinstance(self.settings.details, _Simulated | Details):
            raise TypeError("the settings are of no simulated run")
        return self.settings.details

    def execute(
        self,
        path: Path,
        ledger: Path | None,
        listen: Listener,
        backend: Backend | None = None,
        *,
        evaluate_every: int = 1,
    ) -> RunSummary:
        """Train from where the run is to its end, its budget's end, or the listener's request to stop.

        `ledger` is one that other runs over these clients share, None the run's own. `backend` says where clients are
        trained, None in this process; a run may go on with another backend than it began with. It is closed at the end.
        """
        with closing(backend or SerialBackend(self.trainer())) as where, self.open(path, ledger) as run:
            return self.train(run, listen, where, evaluate_every=evaluate_every)

    def train(self, run: Run, listen: Listener, backend: Backend, *, evaluate_every: int) -> RunSummary:
        """Train an open run, after a rehearsal of the protocol if it is new."""
        stop = self.details.early_stop
        if self.plan is None:
            clear = replace(self.clear_federation(run, backend), note_norms=partial(add_norms, run.directory.path))
            return run.train_in_the_clear(clear, self.evaluator, listen, evaluate_every=evaluate_every, stop=stop)
        if run.state.rounds == 0:  # once, before anybody's data is touched
            rehearse(self.plan.codec.length, self.plan.ring.bits, Entropy.system())
        if self.plan.uses_standing_keys and can_stand(self.plan):
            standing = StandingFederation(
                plan=self.plan,
                run=run.name,
                backend=backend,
                dropouts=self.details.dropouts or Dropouts(),
                fidelity=self.details.fidelity or Fidelity.SUM,
                entropy=self._entropy().child("clients"),
            )
            return run.train(standing, self.evaluator, listen, evaluate_every=evaluate_every, stop=stop)
        private = self.federation(run, backend)
        return run.train(private, self.evaluator, listen, evaluate_every=evaluate_every, stop=stop)

    @contextmanager
    def open(self, path: Path, ledger: Path | None) -> Iterator[Run]:
        """Open the run in its directory."""
        with open_run(path, self.settings, self.plan, self.model.initial(), ledger=ledger) as run:
            yield run

    def federation(self, run: Run, backend: Backend) -> SimulatedFederation:
        """Return the clients of a run that has a plan, whose sums are private."""
        if self.plan is None:
            raise ValueError("a run in the clear has no federation")
        return SimulatedFederation(
            plan=self.plan,
            backend=backend,
            cohorts=self._cohorts(run),
            dropouts=self.details.dropouts or Dropouts(),
            fidelity=self.details.fidelity or Fidelity.SUM,
            entropy=self._entropy().child("clients"),
            ledger=run.ledger,
        )

    def clear_federation(self, run: Run, backend: Backend) -> ClearFederation:
        """Return the same clients with nothing private."""
        return ClearFederation(backend, self._cohorts(run), run.name)

    def _cohorts(self, run: Run) -> Cohorts:
        """Return the draws of a run's cohorts.

        Two runs with one seed must not share their cohorts, nor a run and one that goes on from a copy of it. Only a
        partition is kept when a run is resumed, or a client might be drawn in two rounds.
        """
        sampling = self.sampling if self.plan is None else self.plan.sampling
        if self.settings.seed is None and sampling.method is Sampling.ONCE:
            return Cohorts(sampling, run.directory.identity().cohorts)
        return Cohorts(sampling, self._entropy().child("cohorts", run.name))

    def _entropy(self) -> Entropy:
        seed = self.settings.seed
        return Entropy.system() if seed is None else Entropy.replay(str(seed).encode())


def task_named(name: str, population: int | None, partition: str | None, data: Path | None) -> Task:
    """Return the task of that name, or that a user's own function MODULE:FUNCTION makes."""
    if ":" in name:
        made = made_by(name)
        if not isinstance(made, Task):
            raise ConfigError(f"{name} must return a Task of d2pfed.learning, got a {type(made).__name__}")
        return made
    divided = parse_partition(partition) if partition else None
    with needs_extra("train", "mlxtend", "sklearn"):
        return load_task(name, population=population, partition=divided, data_dir=data)


def model_named(name: str, task: Task, seed: int) -> Model:
    """Return the model of that name for a task, or that a user's own function MODULE:FUNCTION makes."""
    if ":" not in name:
        return build_model(name, task, seed=seed)
    made = made_by(name)
    if not isinstance(made, Model):
        raise ConfigError(f"{name} must return a Model of d2pfed.learning, got a {type(made).__name__}")
    return made


def made_by(name: str) -> object:
    """Return what a user's own function makes; `name` is MODULE:FUNCTION, found from the current directory on."""
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(import_module(module), function)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name} must be MODULE:FUNCTION: {error}") from error
    finally:
        sys.path.pop(0)


def array_shapes(model: Model) -> tuple[ArrayShape, ...]:
    """Return the trained arrays of a model, in the order of its flat vector."""
    values = dict(model.module.named_parameters())
    return tuple(ArrayShape(name, tuple(values[name].shape)) for name in model.names)


def fixed_digest(model: Model) -> str:
    """Return the digest of all that is not trained: a run goes on with the same only."""
    parts = [part for name, content in fixed_content(model) for part in (name, content)]
    return digest("d2pfed fixed parameters", *parts).hex()


def _same_model(made: object, settings: RunSettings, details: Details) -> Model:
    """Return the model of a user's run from a module or model that its user has made again."""
    if not isinstance(made, Model):
        if details.loss != "cross_entropy":
            raise ConfigError(f"the run's loss is {details.loss}: return a Model of d2pfed.learning that has it")
        made = user_model(made, trainable=[array.name for array in settings.arrays])
    if array_shapes(made) != settings.arrays or fixed_digest(made) != details.fixed:
        raise ConfigError(
            "the model is not the one that the run has trained: its arrays or fixed parameters differ"
        )
    return made


def _same_clients(
    chosen: object, settings: RunSettings, model: Model, run: Path
) -> tuple[Clients, Examples | None]:
    """Return the clients of a run and its validation data, from a task or from a user's data sets."""
    if isinstance(chosen, Task):
        stated, clients, validation = chosen.description, chosen.clients, chosen.validation
    else:
        own = UserClients.of(chosen, None, model.device)
        rows = own.first()[1]
        if not rows.are_tensors:
            raise ConfigError("an audit needs clients that hold one tensor of inputs and one of labels")
        stated, clients, validation = (
            f"{own.population:,} clients",
            LabeledClients(own, rows.between(0, 0), own.population),
            None,
        )
    if stated != settings.data:
        raise ConfigError(f"the run in {run} was over other data: {settings.data} Got: {stated}")
    return clients, validation
