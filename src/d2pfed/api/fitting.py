"""`fit`: a user's own module, trained over a user's own clients, private against the server by default."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from d2pfed.api.backends import MISTAKES, BackendName, backend_named, mistake, start_backend, try_client
from d2pfed.api.filling import DEFAULT_PRIVACY, Scope, scope_of
from d2pfed.api.norms import FILE, NormRecorder, read_norms
from d2pfed.api.result import FitResult
from d2pfed.api.simulated import SimulatedRun, array_shapes
from d2pfed.api.stopping import EarlyStop
from d2pfed.api.watching import Callback, Watch, listener, watching
from d2pfed.errors import BudgetExceeded, ConfigError
from d2pfed.learning import (
    Forward,
    LocalTraining,
    Losses,
    Metric,
    Model,
    Module,
    OwnClients,
    Rows,
    Step,
    accuracy,
    batches_of,
    measure,
    one_thread,
    own_model,
    trainer_for,
)
from d2pfed.ledger.private_files import replace_file
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import digest
from d2pfed.plan import Plan, PrivacyTarget, calibrate
from d2pfed.plan.bounds import check_range
from d2pfed.runs import End, RunSettings, RunSummary
from d2pfed.runs.plain import to_json
from d2pfed.runs.report import BASELINE, Baseline, read_report
from d2pfed.simulation import Backend, Dropouts, Fidelity
from d2pfed.training import ServerOptimizer


def fit(
    module: Module,
    clients: Sequence[object] | Mapping[object, object] | Callable[[int], object],
    *,
    privacy: PrivacyTarget | Mapping[str, object] | None = DEFAULT_PRIVACY,
    rounds: int | None = None,
    cohort_size: int | None = None,
    population: int | None = None,
    validation: object = None,
    test: object = None,
    loss: Losses | None = None,
    metrics: Mapping[str, Metric] | None = None,
    forward: Forward | None = None,
    step: Step | None = None,
    trainable: str | Sequence[str] = "*",
    optimizer: str = "sgd",
    lr: float = 0.1,
    momentum: float = 0.0,
    epochs: int = 1,
    batch_size: int = 10,
    server_lr: float = 1.0,
    server_momentum: float = 0.0,
    server_second_moment: float = 0.0,
    server_lr_decay: float = 1.0,
    server_averaging: float = 0.0,
    device: str = "cpu",
    evaluate_every: int = 1,
    early_stop: EarlyStop | None = None,
    callbacks: Sequence[Callback] = (),
    directory: str | Path | None = None,
    ledger: str | Path | None = None,
    baseline: FitResult | str | Path | None = None,
    backend: str = "auto",
    workers: int | None = None,
    seed: int | None = None,
    progress: bool | None = None,
) -> FitResult:
    """Train a module over clients by federated averaging, with secure aggregation and differential privacy.

    The clients are simulated on this machine; each round's sum is made by their own encoders. A call with the same
    directory and settings goes on where the run is, or returns what it came to.

    Args:
        module: Any module whose rows of a batch do not mix; it is copied, not changed.
        clients: The data set of each client: a sequence, a mapping, or a function of a client's number (then give
            `population`). A data set is a pair of tensors or arrays, a torch Dataset or a DataLoader, of any size,
            and is loaded when its client is asked.
        privacy: The target; fields that only `fit` knows may be left out. A dictionary changes the default target:
            epsilon 1 against the server, each client in one round, 10 % dropouts and 10 % colluders. None trains in
            the clear.
        rounds: How many rounds; None chooses, where each client is in one round.
        cohort_size: How many clients are asked in a round; None chooses, as above.
        population: How many clients there are, where `clients` is a function.
        validation: A data set to choose by, measured after rounds.
        test: A data set to report on, opened once at the end.
        loss: From outputs and targets to the loss of each example or their mean; None is the cross entropy.
        metrics: Functions of all outputs and all targets, by name; None is the accuracy where loss is None.
        forward: From the module and inputs to outputs, where the module is not called with the inputs.
        step: From the module and a batch to its loss, in place of forward and loss.
        trainable: A pattern or patterns of parameter names, such as `head.*`; the others keep their values.
        optimizer: The clients' optimizer: sgd, adam or rmsprop.
        lr: The clients' learning rate.
        momentum: The clients' momentum, for sgd.
        epochs: The clients' passes over their data in a round.
        batch_size: The clients' batch size.
        server_lr: The server's learning rate.
        server_momentum: The server's momentum.
        server_second_moment: Decay of Adam's second moment at the server; 0: no Adam.
        server_lr_decay: Factor by which the server's learning rate shrinks in each round.
        server_averaging: Decay of the running average of models; 0: the last model counts.
        device: cpu, cuda or mps; data and module are moved there.
        evaluate_every: After how many rounds the validation data are measured; after the last one always.
        early_stop: A rule that ends the run, declared here so that its epsilon is honest.
        callbacks: Called after each round with its record and a function that returns the current module; one that
            returns False interrupts the run, which the same call resumes.
        directory: Where the run is kept; None is one under `runs` for these settings and this initial module.
        ledger: A ledger that other runs over these clients share; None is the run's own.
        baseline: A result or a run's directory whose metrics the report shows beside this run's.
        backend: auto, processes or in-process.
        workers: How many worker processes; None is one per core.
        seed: A number repeats the run, and protects nobody from whoever knows it.
        progress: Whether to show a bar on standard error; None shows it in a terminal or notebook.

    Raises:
        ConfigError: if an argument cannot be used, before anything is charged.
        BudgetExceeded: if the ledger does not allow the run.
    """
    model = own_model(module, trainable=trainable, loss=loss, forward=forward, step=step, device=device)
    own = OwnClients.of(clients, population, model.device)
    scope = scope_of(
        privacy,
        dimension=model.dimension,
        population=own.population,
        rounds=rounds,
        cohort_size=cohort_size,
    )
    local = LocalTraining(optimizer=optimizer, lr=lr, momentum=momentum, epochs=epochs, batch_size=batch_size)  # type: ignore[arg-type]
    server = ServerOptimizer(
        lr=server_lr,
        momentum=server_momentum,
        second_moment=server_second_moment,
        lr_decay=server_lr_decay,
        averaging=server_averaging,
    )
    stop = _checked_stop(early_stop, validation)
    details = _Details(local, scope.sampling.cohort_size, _name_of(step or loss), _fixed_digest(model), stop)
    settings = RunSettings(
        title=type(module).__name__,
        data=f"{own.population:,} clients",
        target=scope.target,
        rounds=scope.rounds,
        optimizer=server,
        arrays=array_shapes(model),
        seed=_checked_seed(seed),
        details=details,
    )
    fitting = _Fitting(
        model=model,
        clients=own,
        scope=scope,
        settings=settings,
        details=details,
        evaluator=_OwnEvaluator(model, validation, test, _checked_metrics(metrics, model)),
        evaluate_every=_whole("evaluate_every", evaluate_every, 1),
        callbacks=_checked_callbacks(callbacks),
        path=_directory(directory, settings, model),
    )
    where = backend_named(backend), None if workers is None else _whole("workers", workers, 1)
    shared = _ledger_path(ledger)
    _keep_baseline(fitting.path, baseline)
    with watching(scope.rounds, progress=progress) as watch, one_thread(model):
        return fitting.run(watch, where, shared)


@dataclass(frozen=True, slots=True)
class _Details:
    """What decides a run of `fit` beside what every run has; data and initial parameters are not compared."""

    local: LocalTraining
    cohort_size: int
    loss: str
    fixed: str  # digest of all parameters and buffers that are not trained
    early_stop: EarlyStop | None


@dataclass(frozen=True, slots=True, eq=False)
class _OwnEvaluator:
    """Measures a model on a user's data; those for the test are opened once, at the end."""

    model: Model
    validation: object = field(repr=False)
    held_out: object = field(repr=False)
    metrics: Mapping[str, Metric]

    def validate(self, _rounds: int, params: FloatVector) -> dict[str, float]:
        """Return the metrics on the validation data; none without such data."""
        return measure(self.model, params, batches_of(self.validation, "validation"), self.metrics)

    def test(self, params: FloatVector) -> dict[str, float]:
        """Return the metrics on the test data; none without such data."""
        return measure(self.model, params, batches_of(self.held_out, "test"), self.metrics)

    def rehearse(self, params: FloatVector) -> None:
        """Measure one batch of the validation data, so that a mistake shows before anything is charged."""
        batches: Iterator[Rows] = islice(batches_of(self.validation, "validation"), 1)
        try:
            measure(self.model, params, batches, self.metrics)
        except MISTAKES as error:
            raise mistake("the validation data cannot be measured", error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitting:
    """All that decides a call, checked."""

    model: Model
    clients: OwnClients
    scope: Scope
    settings: RunSettings
    details: _Details
    evaluator: _OwnEvaluator
    evaluate_every: int
    callbacks: tuple[Callback, ...]
    path: Path

    def run(self, watch: Watch, where: tuple[BackendName, int | None], ledger: Path | None) -> FitResult:
        """Train from where the run is, and say what it came to."""
        plan = None if self.scope.target is None else calibrate(self.scope.target)
        initial = self.model.initial()
        self.evaluator.rehearse(initial)
        backend, line = self._backend(initial, where)
        notes = (*self.scope.notes, line)
        for note in notes:
            watch.say(note)
        run = SimulatedRun(
            settings=self.settings,
            plan=plan,
            sampling=self.scope.sampling,
            initial=initial,
            dropouts=Dropouts(),
            fidelity=Fidelity.SUM,
        )
        summary = run.execute(
            self.path,
            ledger,
            self.evaluator,
            lambda opened: listener(opened, self.model, watch, self.callbacks),
            backend if plan is not None else NormRecorder(backend, self.path / FILE),
            evaluate_every=self.evaluate_every,
            stop=self.details.early_stop,
        )
        if summary.end is End.EXHAUSTED and not summary.rounds:
            raise BudgetExceeded(summary.stopped)
        return self._result(summary, plan, notes)

    def _backend(self, params: FloatVector, where: tuple[BackendName, int | None]) -> tuple[Backend, str]:
        client, _ = self.clients.first()
        try:
            trainer = trainer_for(self.model, self.clients, self.details.local)
        except MISTAKES as error:
            raise mistake(f"client {client} cannot be trained", error) from error
        seconds = try_client(trainer, params, client) * self.scope.sampling.cohort_size * self.scope.rounds
        return start_backend(where[0], trainer, (params, client), seconds=seconds, workers=where[1])

    def _result(self, summary: RunSummary, plan: Plan | None, notes: tuple[str, ...]) -> FitResult:
        report = read_report(self.path)
        arrays = load_file(self.path / "model.safetensors")
        params = np.concatenate([arrays[each.name].reshape(-1) for each in self.settings.arrays])
        quantiles, not_finite = read_norms(self.path)
        stop = self.details.early_stop if summary.end is End.STOPPED else None
        return FitResult(
            module=self.model.load(params),
            metrics=summary.metrics,
            test_metrics=summary.test_metrics or None,
            guarantees=summary.guarantees,
            stop_guarantee=None if stop is None or plan is None else stop.guarantee(plan, summary.charged),
            history=report.rounds,
            norm_quantiles=quantiles,
            not_finite=None if plan is not None else not_finite,
            directory=self.path,
            summary=summary,
            plan_summary=report.plan_summary,
            notes=notes,
        )


def _directory(given: object, settings: RunSettings, model: Model) -> Path:
    """Return where a run is kept; by default another place for other settings or another initial module."""
    if given is None:
        name = digest(canonical.encode(settings), model.initial().tobytes()).hex()[:8]
        return Path("runs") / f"{settings.title.lower()}-{name}"
    if not isinstance(given, (str, Path)):
        raise ConfigError(f"directory must be a path, got {type(given).__name__}")
    return Path(given)


def _keep_baseline(path: Path, baseline: object) -> None:
    """Write the rounds of a baseline into a run's directory, where its report finds them."""
    if baseline is None:
        return
    if isinstance(baseline, FitResult):
        found = Baseline(baseline.directory.name, baseline.history)
    elif isinstance(baseline, (str, Path)):
        other = read_report(Path(baseline))
        found = Baseline(other.run, other.rounds)
    else:
        raise ConfigError(f"baseline must be a FitResult or a run's directory, got {type(baseline).__name__}")
    try:
        path.mkdir(parents=True, exist_ok=True)
        replace_file(path / BASELINE, to_json(found).encode(), mode=0o666)
    except OSError as error:
        raise ConfigError(f"cannot use the run directory {path}: {error.strerror}") from error


def _fixed_digest(model: Model) -> str:
    """Return the digest of all that is not trained: a run goes on with the same only."""
    parts = [part for name, value in sorted(model.fixed().items()) for part in (name, _content(value))]
    return digest("d2pfed fixed parameters", *parts).hex()


def _content(value: object) -> bytes:
    return np.asarray(value.detach().cpu().numpy()).tobytes()  # type: ignore[attr-defined]


def _checked_metrics(metrics: object, model: Model) -> dict[str, Metric]:
    if metrics is None:
        return {"accuracy": accuracy} if model.is_plain else {}
    if not isinstance(metrics, Mapping) or not all(
        isinstance(name, str) and callable(metric) for name, metric in metrics.items()
    ):
        raise ConfigError(f"metrics must be a dictionary of names and functions, got {type(metrics).__name__}")
    if "loss" in metrics:
        raise ConfigError("metrics has the name loss, which is the loss itself")
    return dict(metrics)


def _checked_stop(stop: object, validation: object) -> EarlyStop | None:
    if stop is not None and not isinstance(stop, EarlyStop):
        raise ConfigError(f"early_stop must be an EarlyStop or None, got {type(stop).__name__}")
    if stop is not None and validation is None:
        raise ConfigError("early_stop needs validation data, got none")
    return stop


def _checked_callbacks(callbacks: object) -> tuple[Callback, ...]:
    given = (callbacks,) if callable(callbacks) else callbacks
    if not isinstance(given, Sequence) or not all(callable(each) for each in given):
        raise ConfigError(f"callbacks must be functions, got {type(callbacks).__name__}")
    return tuple(given)


def _checked_seed(seed: object) -> int | None:
    return None if seed is None else _whole("seed", seed, 0)


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    check_range(name, value, least, 2**63 - 1)
    return value


def _ledger_path(ledger: object) -> Path | None:
    if ledger is not None and not isinstance(ledger, (str, Path)):
        raise ConfigError(f"ledger must be the path of a ledger's file, got {type(ledger).__name__}")
    return None if ledger is None else Path(ledger)


def _name_of(function: object) -> str:
    if function is None:
        return "cross_entropy"
    return str(getattr(function, "__qualname__", type(function).__qualname__))
