"""`fit`: a user's module and clients, or a named task, trained with a guarantee against the server by default."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from d2pfed.accounting import Unit
from d2pfed.api.backends import backend_for
from d2pfed.api.complete_target import Scope, scope_of
from d2pfed.api.job import (
    Details,
    Job,
    Settings,
    TaskEvaluator,
    UserEvaluator,
    array_shapes,
    fixed_digest,
    model_named,
    task_named,
)
from d2pfed.api.progress import Watcher
from d2pfed.api.result import FitResult, read_norms
from d2pfed.api.settings import EarlyStop, RunOptions, Training, refuse_unknown, settings_of
from d2pfed.errors import BudgetExceeded, ConfigError
from d2pfed.learning import (
    Clients,
    LocalTraining,
    Losses,
    Metric,
    Model,
    Module,
    RecordTrainer,
    Task,
    UserClients,
    accuracy,
    fitting,
    one_thread,
    user_model,
)
from d2pfed.ledger.files import replace_file
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import digest
from d2pfed.plan import DEFAULT_TARGET, PrivacyTarget, calibrate, describe, record_terms
from d2pfed.plan.bounds import check_name, check_range
from d2pfed.plan.policy import default_refusal
from d2pfed.runs import End, Listener, RoundRecord, Run, RunSettings
from d2pfed.runs.plain import to_json
from d2pfed.runs.report import BASELINE, Baseline, read_report
from d2pfed.simulation import Dropouts, Fidelity
from d2pfed.statistics.records import client_weights, positive
from d2pfed.training import ServerOptimizer

# Called with each round's record and a function that returns the module as it is after the round.
Callback = Callable[[RoundRecord, Callable[[], Module]], object]
MAIN_TASK = "infimnist"


def fit(
    module: Module | Model | str | None,
    clients: Sequence[object] | Mapping[object, object] | Callable[[int], object] | str,
    *,
    privacy: PrivacyTarget | Mapping[str, object] | None = DEFAULT_TARGET,
    rounds: int | None = None,
    cohort_size: int | None = None,
    population: int | None = None,
    validation: object = None,
    test: object = None,
    loss: Losses | None = None,
    metrics: Mapping[str, Metric] | None = None,
    lr: float = 0.1,
    epochs: int = 1,
    batch_size: int = 10,
    training: Training | Mapping[str, object] | None = None,
    server: ServerOptimizer | Mapping[str, object] | None = None,
    early_stop: EarlyStop | None = None,
    callbacks: Sequence[Callback] = (),
    directory: str | Path | None = None,
    seed: int | None = None,
    run: RunOptions | Mapping[str, object] | None = None,
    **unknown: object,
) -> FitResult:
    """Train a module over clients by federated averaging, with secure aggregation and differential privacy.

    The clients are simulated on this machine or a cluster; each round's sum is made by their own encoders. A call with
    the same directory and settings goes on where the run is, or returns what it came to. `d2pfed train` is this call.

    Args:
        module: Any module whose rows of a batch do not mix; it is copied, not changed. For a named task also the name
            of a model, or None for the one that suits the task.
        clients: The data set of each client: a sequence, a mapping, or a function of a client's number (then give
            `population`). A data set is a pair of tensors or arrays, a torch Dataset or a DataLoader, of any size,
            and is loaded when its client is asked. Or the name of a task, such as digits, with data of its own.
        privacy: The target; fields that only `fit` knows may be left out. A dictionary changes the default target:
            epsilon 1 against the server, each client in one round, 10 % dropouts and 10 % colluders. None trains in
            the clear.
        rounds: How many rounds; None chooses, where each client is in one round.
        cohort_size: How many clients are asked in a round; None chooses, as above.
        population: How many clients there are, where `clients` is a function or a task.
        validation: A data set to choose by, measured after rounds.
        test: A data set to report on, opened once at the end.
        loss: From outputs and targets to the loss of each example or their mean; None is the cross entropy.
        metrics: Functions of all outputs and all targets, by name; None is the accuracy where loss is None.
        lr: The clients' learning rate; where the unit is a record, a factor of the server's.
        epochs: The clients' passes over their data in a round.
        batch_size: The clients' batch size.
        training: Further settings of the clients' training, a `Training` or a dictionary of its fields: optimizer,
            momentum, trainable, forward, step, device, weights, max_weight, groups.
        server: How the server moves the model, a `ServerOptimizer` or a dictionary of its fields: lr, momentum,
            second_moment (Adam's, or Yogi's by second_rule), lr_decay, averaging.
        early_stop: A rule that ends the run, declared here so that its epsilon is honest.
        callbacks: Called after each round with its record and a function that returns the current module; one that
            returns False interrupts the run, which the same call resumes.
        directory: Where the run is kept; None is one under `runs` for these settings and this initial module.
        seed: A number repeats the run, and protects nobody from whoever knows it; not with a shared ledger.
        run: How the run is carried out, a `RunOptions` or a dictionary of its fields: ledger, baseline,
            evaluate_every, progress, backend, workers, address, dropouts, fidelity, stop_is_blind, partition, data.
        unknown: Refused, with the place of parameters that have moved.

    Raises:
        ConfigError: if an argument cannot be used, before anything is charged.
        BudgetExceeded: if the ledger does not allow the run.

    Example:
        >>> result = fit("logistic", "digits", population=60, rounds=2, cohort_size=20, privacy={"epsilon": 50.0})
        >>> result.summary.rounds
        2
    """
    refuse_unknown(unknown, [name for name in fit.__annotations__ if name not in ("unknown", "return")])
    options = settings_of(RunOptions, run, "run")
    _check_seed(seed)
    job = _planned(
        _work(
            module,
            clients,
            population=population,
            held_out=(validation, test),
            loss=loss,
            metrics=metrics,
            training=settings_of(Training, training, "training"),
            options=options,
            seed=seed,
        ),
        privacy,
        counts=(rounds, cohort_size),
        steps=(lr, epochs, batch_size),
        server=settings_of(ServerOptimizer, server, "server"),
        early_stop=early_stop,
        seed=seed,
        options=options,
    )
    if directory is None:
        check_name("a run's", job.name)
    elif not isinstance(directory, (str, Path)):
        raise ConfigError(f"directory must be a path, got {type(directory).__name__}")
    path = Path("runs") / job.name if directory is None else Path(directory)
    _keep_baseline(path, options.baseline)
    with one_thread(job.model):
        return _execute(job, path, options, _checked_callbacks(callbacks))


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """What is trained on what: a user's module and clients, or those of a task."""

    model: Model
    clients: Clients | UserClients
    evaluator: TaskEvaluator | UserEvaluator
    training: Training
    title: str
    data: str
    loss: str = "cross_entropy"
    names: tuple[str, str] | None = None  # of task and model, where both can be made again by name
    task: Task | None = field(default=None, repr=False)
    is_main_job: bool = False

    @property
    def validation(self) -> object:
        """The data to choose by."""
        return self.evaluator.validation if isinstance(self.evaluator, UserEvaluator) else self.task


def _work(
    module: object,
    clients: object,
    *,
    population: int | None,
    held_out: tuple[object, object],
    loss: Losses | None,
    metrics: object,
    training: Training,
    options: RunOptions,
    seed: int | None,
) -> _Work:
    """Return what is to be trained, with what is measured; `held_out` are validation and test data."""
    names, task = None, clients if isinstance(clients, Task) else None
    if isinstance(clients, str):
        task = task_named(clients, population, options.partition, options.data)
        if module is None or isinstance(module, str):
            names = clients, module or fitting(task)
    elif options.partition is not None or options.data is not None:
        raise ConfigError("partition and data are those of a named task")
    if task is not None and any(each is not None for each in held_out):
        raise ConfigError("a task has validation and test data of its own: leave them out")
    if names is not None and task is not None:
        if loss is not None or training.forward is not None or training.step is not None:
            raise ConfigError("a named model has its loss: give a module for a loss, forward or step of your own")
        model = model_named(names[1], task, seed or 0)
        module, loss = model.module, None if model.step is not None else model.losses
        training = replace(training, forward=model.forward, step=model.step)
    if names is None or training.trainable != "*" or training.device != "cpu":
        model = user_model(
            module,
            trainable=training.trainable,
            loss=loss,
            forward=training.forward,
            step=training.step,
            device=training.device,
        )
    measured = _checked_metrics(metrics, model)
    if task is None:
        held = UserClients.of(clients, population, model.device)
        return _Work(
            model,
            held,
            UserEvaluator(model, *held_out, measured),
            training,
            type(module).__name__,
            f"{held.population:,} clients",
            _function_name(training.step or loss),
        )
    evaluator: TaskEvaluator | UserEvaluator = TaskEvaluator(model, task)
    if metrics is not None:
        evaluator = UserEvaluator(model, task.validation, task.test, measured)
    return _Work(
        model,
        task.clients,
        evaluator,
        training,
        type(module).__name__ if names is None else f"{names[0]}, {names[1]}",
        task.description,
        _function_name(training.step or loss),
        names,
        task,
        clients == MAIN_TASK and population is None,
    )


def _checked_metrics(metrics: object, model: Model) -> Mapping[str, Metric]:
    """Return the metrics by name: of class labels the accuracy, unless others are given."""
    if metrics is None:
        return {"accuracy": accuracy} if model.is_plain else {}
    if not isinstance(metrics, Mapping) or not all(
        isinstance(name, str) and callable(metric) for name, metric in metrics.items()
    ):
        raise ConfigError(f"metrics must be a dictionary of names and functions, got {type(metrics).__name__}")
    if "loss" in metrics:
        raise ConfigError("metrics has the name loss, which is the loss itself")
    return metrics


def _planned(
    work: _Work,
    privacy: PrivacyTarget | Mapping[str, object] | None,
    *,
    counts: tuple[int | None, int | None],
    steps: tuple[float, int, int],
    server: ServerOptimizer,
    early_stop: object,
    seed: int | None,
    options: RunOptions,
) -> Job:
    """Return the run with its plan, every setting checked.

    `counts` are the rounds and the cohort size, `steps` the clients' learning rate, epochs and batch size.
    """
    model, clients, training = work.model, work.clients, work.training
    scope = scope_of(
        privacy,
        dimension=model.dimension,
        population=clients.population,
        rounds=counts[0],
        cohort_size=counts[1],
        count_units=lambda: RecordTrainer(model, clients, training.groups).count_all(),
        is_main_job=work.is_main_job,
    )
    lr, epochs, batch_size = steps
    local = LocalTraining(
        optimizer=training.optimizer, lr=lr, momentum=training.momentum, epochs=epochs, batch_size=batch_size
    )
    if scope.target is not None and scope.target.unit is Unit.RECORD:
        _require_one_step(local)
        server = replace(server, lr=server.lr * local.lr)
    elif training.groups is not None:
        raise ConfigError("groups are for privacy with the unit record")
    if early_stop is not None and not isinstance(early_stop, EarlyStop):
        raise ConfigError(f"early_stop must be an EarlyStop or None, got {type(early_stop).__name__}")
    if early_stop is not None and work.validation is None:
        raise ConfigError("early_stop needs validation data, got none")
    if options.ledger is not None and seed is not None and scope.target is not None:
        raise ConfigError(
            f"a run on a shared ledger takes its noise from the system, got seed {seed}: what repeats from a seed "
            "protects nobody, and is not to be counted as private"
        )
    weights = _weights(work, scope)
    plan = None if scope.target is None else calibrate(scope.target, training.max_weight)
    if work.names is not None and work.task is not None:
        settings = Settings(
            task=work.names[0],
            data=work.data,
            model=work.names[1],
            target=scope.target or _in_the_clear(scope, model.dimension),
            local=local,
            server=server,
            dropouts=options.dropouts,
            fidelity=options.fidelity,
            seed=seed,
            stop_is_blind=options.stop_is_blind,
            early_stop=early_stop,
            max_weight=training.max_weight,
        )
        named = Job.with_plan(settings, work.task, model, plan)
        return replace(named, evaluator=work.evaluator, groups=training.groups, weights=weights, notes=scope.notes)
    user_settings = RunSettings(
        title=work.title,
        data=work.data,
        target=scope.target,
        rounds=scope.rounds,
        optimizer=server,
        arrays=array_shapes(model),
        seed=seed,
        stop_is_blind=options.stop_is_blind,
        details=Details(
            local,
            scope.sampling.cohort_size,
            work.loss,
            fixed_digest(model),
            early_stop,
            training.max_weight,
            None if training.groups is None else "owner",
            None if options.dropouts == Dropouts() else options.dropouts,
            None if options.fidelity is Fidelity.SUM else options.fidelity,
        ),
    )
    made = digest(canonical.encode(user_settings), model.initial().tobytes()).hex()[:8]
    return Job(
        settings=user_settings,
        name=f"{work.title.lower()}-{made}",
        plan=plan,
        sampling=scope.sampling,
        model=model,
        clients=clients,
        evaluator=work.evaluator,
        groups=training.groups,
        weights=weights,
        notes=scope.notes,
    )


def _in_the_clear(scope: Scope, dimension: int) -> PrivacyTarget:
    """Return the target that says of a run in the clear how it goes over its clients, and nothing else."""
    return PrivacyTarget(
        dimension=dimension,
        population=scope.sampling.population,
        cohort_size=scope.sampling.cohort_size,
        rounds=scope.rounds,
        sampling=scope.sampling.method,
        spare=0,
    )


def _require_one_step(local: LocalTraining) -> None:
    """Refuse local steps where the unit is a record, which takes one gradient of each."""
    usual = LocalTraining(lr=local.lr)
    for name in ("optimizer", "momentum", "epochs", "batch_size"):
        if getattr(local, name) != getattr(usual, name):
            raise ConfigError(
                f"with the unit record a round is one step over a secret batch (batch_rate), got {name} "
                f"{getattr(local, name)}; the server's momentum and Adam can be used"
            )


def _weights(work: _Work, scope: Scope) -> tuple[float, ...] | None:
    """Return the clients' weights; None where all weigh alike."""
    weights = work.training.weights
    if weights is None:
        return None
    if scope.target is None:
        raise ConfigError("weights are for private training, and privacy is None")
    if isinstance(weights, str):
        if weights != "examples":
            raise ConfigError(f"weights must be examples or one number for each client, got {weights!r}")
        weights = [float(len(work.clients.examples(client))) for client in range(work.clients.population)]
    given = client_weights(weights, work.clients.population)
    if not (np.isfinite(given) & (given >= 0)).all():
        raise ConfigError("weights must be finite and at least 0")
    positive("max_weight", work.training.max_weight)
    return tuple(given.tolist())


def _check_seed(seed: object) -> None:
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"seed must be a whole number, got {seed!r}")
    check_range("seed", seed, 0, 2**63 - 1)


def _checked_callbacks(callbacks: object) -> tuple[Callback, ...]:
    given = (callbacks,) if callable(callbacks) else callbacks
    if not isinstance(given, Sequence) or not all(callable(each) for each in given):
        raise ConfigError(f"callbacks must be functions, got {type(callbacks).__name__}")
    return tuple(given)


def _function_name(function: object) -> str:
    """Return the name by which settings know a loss."""
    if function is None:
        return "cross_entropy"
    return str(getattr(function, "__qualname__", type(function).__qualname__))


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


def _execute(job: Job, path: Path, options: RunOptions, callbacks: tuple[Callback, ...]) -> FitResult:
    """Try everything once, start what trains the clients, train from where the run is, and say what it came to."""
    if isinstance(job.evaluator, UserEvaluator):
        job.evaluator.rehearse(job.model.initial())
    backend, line = backend_for(job, options)
    notes = (*job.notes, line)
    with (
        closing(backend),
        job.open(path, options.ledger) as run,
        _watched(job, run, notes, options, callbacks) as listen,
    ):
        summary = job.train(run, listen, backend, evaluate_every=options.evaluate_every)
    if summary.end is End.EXHAUSTED and not summary.charged:
        raise BudgetExceeded(summary.stopped)
    report = read_report(path)
    arrays = load_file(path / "model.safetensors")
    params = np.concatenate([arrays[each.name].reshape(-1) for each in job.settings.arrays])
    quantiles, not_finite = read_norms(path)
    stop = job.details.early_stop if summary.end is End.STOPPED else None
    return FitResult(
        module=job.model.load(params),
        metrics=summary.metrics,
        test_metrics=summary.test_metrics or None,
        guarantees=summary.guarantees,
        stop_guarantee=None if stop is None or job.plan is None else stop.guarantee(job.plan, summary.charged),
        history=report.rounds,
        norm_quantiles=quantiles,
        not_finite=None if job.plan is not None else not_finite,
        directory=path,
        summary=summary,
        plan_summary=report.plan_summary,
        notes=notes,
    )


@contextmanager
def _watched(
    job: Job, run: Run, notes: Sequence[str], options: RunOptions, callbacks: tuple[Callback, ...]
) -> Iterator[Listener]:
    """Print what a person should know beforehand, and yield the listener of rounds: a bar and the user's callbacks."""
    watch = options.progress
    if not isinstance(watch, Watcher):
        watch = Watcher(0, "round", is_command=False, is_shown=watch)
    watch.total, plan, target = job.settings.rounds, job.plan, job.settings.target
    said = [job.settings.data, *notes]
    if plan is not None and target is not None:
        found = describe(target, plan)
        warnings = (*found.warnings, *filter(None, [default_refusal(target, plan)]))
        said += [found.why_signal, *(f"Warning: {each}" for each in warnings), *record_terms(plan)]
    for text in said:
        watch.say(text)

    def listen(record: RoundRecord, /) -> bool:
        shown = [f"{name} {value:.4g}" for name, value in record.metrics.items()]
        if plan is not None:
            shown.append(f"{record.charged} of {plan.max_attempts} attempts")
        shown.append(f"{record.upload_bytes / 1e3:.1f} kB per client per round")
        watch.show(record.round, "  ".join(shown))
        answers = [callback(record, lambda: job.model.load(run.last_model())) for callback in callbacks]
        return not watch.stopping and all(answer is not False for answer in answers)

    with watch:
        yield listen
