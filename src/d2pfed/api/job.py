"""A simulated run, of `fit`, `train` and audits: what decides it, its plan, and its clients brought to the driver."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from d2pfed import learning, simulation
from d2pfed.accounting import CohortSampling, Sampling, Unit
from d2pfed.api.complete_target import scope_of
from d2pfed.api.result import add_norms
from d2pfed.api.settings import EarlyStop, Mode, RunOptions
from d2pfed.api.workload import ModelEvaluator, Workload
from d2pfed.deploy.state import may_outlive_rounds
from d2pfed.errors import ConfigError
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.plan import MechanismName, Plan, PrivacyTarget, Protocol, ProtocolChoice, RotationName, calibrate
from d2pfed.plan.plan import TYPES
from d2pfed.round import can_stand
from d2pfed.runs import ArrayShape, Listener, Run, RunSettings, RunSummary, open_run
from d2pfed.runs.json_files import read_text
from d2pfed.simulation.rehearsal import rehearse
from d2pfed.training import Cohorts, SecondMoment, ServerOptimizer

_LATER = canonical.OMITTED_IF_DEFAULT
_KEPT = "Personal layers stay with their clients: the metrics are those of the module with its initial ones."


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What decides a simulated run beside what every run has; module and data have a fingerprint."""

    local: learning.LocalTraining
    cohort_size: int
    loss: str
    fixed: str  # digest of all parameters and buffers that are not trained
    early_stop: EarlyStop | None
    max_weight: float | None = field(default=None, metadata=_LATER)  # None: all weigh alike
    unit: str | None = field(default=None, metadata=_LATER)  # "owner" where rows have one
    personal: tuple[str, ...] | None = field(default=None, metadata=_LATER)  # parameters that clients keep
    dropouts: simulation.Dropouts | None = field(default=None, metadata=_LATER)  # None: nobody is lost
    fidelity: simulation.Fidelity | None = field(default=None, metadata=_LATER)  # None: sums
    task: str | None = field(default=None, metadata=_LATER)  # its name, and the model's, if they have one
    model: str | None = field(default=None, metadata=_LATER)


_TARGET = RunSettings, PrivacyTarget, MechanismName, ProtocolChoice, RotationName, ServerOptimizer, SecondMoment
_LOCAL = learning.LocalTraining, learning.Optimizer, learning.Schedule, learning.Precision
_RUN = ArrayShape, Details, simulation.Dropouts, simulation.Fidelity, EarlyStop, Mode
_TYPES = TYPES | {kind.__name__: kind for kind in (*_TARGET, *_LOCAL, *_RUN)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run over simulated clients that can be carried out, resumed or audited: private by a plan, or in the clear."""

    settings: RunSettings
    plan: Plan | None = field(repr=False)  # None: in the clear
    sampling: CohortSampling
    model: learning.Model
    clients: learning.Clients | learning.UserClients
    evaluator: ModelEvaluator
    validation: learning.Examples | None = field(default=None, repr=False)
    groups: learning.Groups | None = field(default=None, repr=False)
    weights: tuple[float, ...] | None = field(default=None, repr=False)
    own_local: learning.LocalTraining | None = None  # with the user's own functions, which settings only name
    whole: learning.Model | None = None  # with the layers that clients keep, where they keep some
    notes: tuple[str, ...] = ()  # on what was chosen, one line each
    name: str = "run"  # of its directory, by default
    fingerprint: Mapping[str, str] = field(default_factory=dict, repr=False)  # of module, functions and data

    def trainer(self) -> learning.LocalTrainer:
        """Return the local training of its clients, for a backend."""
        return learning.LocalTrainer(self.model, self.clients, self.local)

    @property
    def local(self) -> learning.LocalTraining:
        """How its clients train."""
        return self.own_local or self.details.local

    @property
    def details(self) -> Details:
        """What decides the run beside what every run has."""
        if not isinstance(self.settings.details, Details):
            raise TypeError("the settings are of no simulated run")
        return self.settings.details

    def open(self, path: Path, ledger: Path | None) -> AbstractContextManager[Run]:
        """Open the run in its directory."""
        return open_run(path, self.settings, self.plan, self.model.initial(), ledger=ledger)

    def train(self, run: Run, listen: Listener, backend: simulation.Backend, *, evaluate_every: int) -> RunSummary:
        """Train an open run, after a rehearsal of the protocol if it is new."""
        stop = self.details.early_stop
        if self.plan is None:
            note = partial(add_norms, run.directory.path)
            clear = simulation.ClearFederation(backend, self.cohorts(run), run.name, note_norms=note)
            return run.train(clear, self.evaluator, listen, evaluate_every=evaluate_every, stop=stop)
        if run.state.rounds == 0:  # once, before anybody's data is touched
            _rehearse_once(self.plan.codec.length, self.plan.ring.bits, self.plan.secret)
        if self.plan.protocol is Protocol.STANDING and can_stand(self.plan):
            standing = simulation.StandingFederation(
                plan=self.plan,
                run=run.name,
                backend=backend,
                dropouts=self.details.dropouts or simulation.Dropouts(),
                fidelity=self.details.fidelity or simulation.Fidelity.SUM,
                entropy=self._entropy().child("clients"),
            )
            return run.train(standing, self.evaluator, listen, evaluate_every=evaluate_every, stop=stop)
        private = self.federation(run, backend)
        return run.train(private, self.evaluator, listen, evaluate_every=evaluate_every, stop=stop)

    def federation(self, run: Run, backend: simulation.Backend) -> simulation.SimulatedFederation:
        """Return the clients of a run that has a plan, whose sums are private."""
        if self.plan is None:
            raise ValueError("a run in the clear has no federation")
        return simulation.SimulatedFederation(
            plan=self.plan,
            backend=backend,
            cohorts=self.cohorts(run),
            dropouts=self.details.dropouts or simulation.Dropouts(),
            fidelity=self.details.fidelity or simulation.Fidelity.SUM,
            entropy=self._entropy().child("clients"),
            ledger=run.ledger,
        )

    def cohorts(self, run: Run) -> Cohorts:
        """Return the draws of a run's cohorts.

        Two runs with one seed share their cohorts, for paired comparisons; without a seed they must not, nor a run and
        one that goes on from a copy of it. Only a partition is kept when a run is resumed, or a client might be drawn
        in two rounds.
        """
        sampling = self.sampling if self.plan is None else self.plan.sampling
        if self.settings.seed is None and sampling.method is Sampling.ONCE:
            return Cohorts(sampling, run.directory.identity().cohorts)
        return Cohorts(sampling, self._entropy().child("cohorts", run.name))

    def _entropy(self) -> Entropy:
        seed = self.settings.seed
        return Entropy.system() if seed is None else Entropy.replay(str(seed).encode())


@cache  # which keeps no failure: an installation that is right for a size stays so while the process lives
def _rehearse_once(length: int, bits: int, secret: int | None) -> None:
    rehearse(length, bits, Entropy.system(), secret)


def plan_job(
    work: Workload,
    privacy: PrivacyTarget | Mapping[str, object] | None,
    *,
    rounds: int | None,
    cohort_size: int | None,
    steps: Mapping[str, Any],
    server: ServerOptimizer,
    early_stop: object,
    seed: int | None,
    options: RunOptions,
) -> Job:
    """Return the run of `fit` with its plan, every setting checked; `steps` are lr, epochs and batch_size."""
    model, clients, training = work.model, work.clients, work.training
    scope = scope_of(
        privacy,
        dimension=model.dimension,
        population=clients.population,
        rounds=rounds,
        cohort_size=cohort_size,
        count_units=lambda: learning.RecordTrainer(model, clients, training.groups).count_all(),
        is_main_job=work.is_main_job,
    )
    local = training.local(scope.rounds, **steps)
    if scope.target is not None and scope.target.unit is Unit.RECORD:
        _check_records(local, work)
        server = replace(server, lr=server.lr * local.lr)
    elif training.groups is not None:
        raise ConfigError("groups are for privacy with the unit record")
    if early_stop is not None and not isinstance(early_stop, EarlyStop):
        raise ConfigError(f"early_stop must be an EarlyStop or None, got {type(early_stop).__name__}")
    if early_stop is not None and work.evaluator.validation is None:
        raise ConfigError("early_stop needs validation data, got none")
    known = ("loss", *({"accuracy"} if work.evaluator.metrics is None else work.evaluator.metrics))
    if early_stop is not None and early_stop.metric not in known:
        raise ConfigError(f"early_stop watches {early_stop.metric}, metrics are {', '.join(known)}")
    if options.ledger is not None and seed is not None and scope.target is not None:
        raise ConfigError(
            f"a run on a shared ledger takes its noise from the system, got seed {seed}: what repeats from a seed "
            "protects nobody, and is not to be counted as private"
        )
    if training.weights is not None and scope.target is None:
        raise ConfigError("weights are for private training, and privacy is None")
    weights = work.weights()
    plan = None if scope.target is None else calibrate(scope.target, training.max_weight)
    if work.whole is not None and plan is not None and not may_outlive_rounds(plan):
        raise ConfigError(
            "personal layers would tell in which rounds a client was, and drawn cohorts count on nobody learning that: "
            "choose sampling once or none"
        )
    kept = () if work.whole is None else tuple(each for each in work.whole.names if each not in model.names)
    task_name, model_name = work.names or (None, None)
    settings = RunSettings(
        title=work.title,
        data=work.data,
        target=scope.target,
        rounds=scope.rounds,
        optimizer=server,
        arrays=array_shapes(model),
        seed=seed,
        stop_is_blind=options.stop_is_blind,
        details=Details(
            local=local.described(),
            cohort_size=scope.sampling.cohort_size,
            loss=work.loss,
            fixed=fixed_digest(model),
            early_stop=early_stop,
            max_weight=training.max_weight,
            unit=None if training.groups is None else "owner",
            personal=kept or None,
            dropouts=None if options.dropouts == simulation.Dropouts() else options.dropouts,
            fidelity=None if options.fidelity is simulation.Fidelity.SUM else options.fidelity,
            task=task_name,
            model=model_name,
        ),
    )
    stem = work.title.lower() if task_name is None else task_name.replace(":", "-")
    return Job(
        name=f"{stem}-{digest(canonical.encode(settings), model.initial().tobytes()).hex()[:8]}",
        settings=settings,
        plan=plan,
        sampling=scope.sampling,
        model=model,
        clients=clients,
        evaluator=work.evaluator,
        groups=training.groups,
        weights=weights,
        notes=scope.notes if work.whole is None else (*scope.notes, _KEPT),
        fingerprint=work.fingerprint,
        own_local=local,
        whole=work.whole,
    )


def _check_records(local: learning.LocalTraining, work: Workload) -> None:
    """Refuse what only whole clients can have, where the unit is a record: it gives one gradient."""
    usual = learning.LocalTraining(lr=local.lr)
    for name in (each.name for each in fields(learning.LocalTraining) if each.name != "lr"):
        if getattr(local, name) != getattr(usual, name):
            raise ConfigError(
                f"with the unit record a round is one step over a secret batch (batch_rate), got {name} "
                f"{getattr(local, name)}; the server's momentum and Adam can be used"
            )
    if work.whole is not None or work.training.collate is not None:
        raise ConfigError("personal layers and collate are for the unit client: a record is seen by itself alone")


def array_shapes(model: learning.Model) -> tuple[ArrayShape, ...]:
    """Return the trained arrays of a model, in the order of its flat vector."""
    values = dict(model.module.named_parameters())
    return tuple(ArrayShape(name, tuple(values[name].shape)) for name in model.names)


def fixed_digest(model: learning.Model) -> str:
    """Return the digest of all that is not trained: a run goes on with the same only."""
    parts = [part for name, content in learning.fixed_content(model) for part in (name, content)]
    return digest("d2pfed fixed parameters", *parts).hex()


def read_settings(run: Path) -> tuple[RunSettings, Details]:
    """Return the settings of a private run of `fit` or `train` that can be made again from its directory."""
    file = run / "settings.json"
    text = read_text(file)
    try:
        found = canonical.decode(text, _TYPES, RunSettings)
    except ConfigError as error:
        raise ConfigError(f"{file} is not of a run of `fit` or `d2pfed train`, or damaged: {error}") from error
    details = found.details
    if not isinstance(details, Details) or found.target is None:
        raise ConfigError(f"{run} is not a private run of `fit` or `d2pfed train`, whose clients can be remade")
    local = details.local
    if any(getattr(details, name) is not None for name in ("max_weight", "unit", "personal")):
        raise ConfigError(
            f"the run in {run} has weights, owners of rows or personal layers, which its directory does not have"
        )
    if "own" in (local.optimizer, local.lr_schedule, local.step_schedule):
        raise ConfigError(f"the run in {run} has an optimizer or schedule of its own, which its directory lacks")
    return found, details
