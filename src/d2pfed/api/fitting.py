"""`fit`: a user's module and clients, or a named task, trained with a guarantee against the server by default."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from d2pfed.api.backends import backend_for, personal_trainer
from d2pfed.api.job import Job, plan_job
from d2pfed.api.progress import Watcher
from d2pfed.api.result import FitResult, read_norms
from d2pfed.api.settings import MOVED, Callback, EarlyStop, RunOptions, Training, settings_of
from d2pfed.api.workload import keep_fingerprint, workload_of
from d2pfed.errors import BudgetExceeded, ConfigError, closest
from d2pfed.fields import check_range
from d2pfed.learning import Losses, Metric, Model, Module, one_thread
from d2pfed.plan import DEFAULT_TARGET, PrivacyTarget, describe, record_terms
from d2pfed.plan.bounds import check_name
from d2pfed.plan.policy import default_refusal
from d2pfed.runs import End, Listener, RoundRecord, Run
from d2pfed.runs.json_files import parse, read_text, to_json
from d2pfed.runs.report import BASELINE, Baseline, read_report
from d2pfed.training import ServerOptimizer


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
    server: ServerOptimizer | Mapping[str, object] | str | None = None,
    early_stop: EarlyStop | None = None,
    directory: str | Path | None = None,
    resume: bool = False,
    seed: int | None = None,
    run: RunOptions | Mapping[str, object] | None = None,
    **unknown: object,
) -> FitResult:
    """Train a module over clients by federated averaging, with secure aggregation and differential privacy.

    The clients are simulated on this machine or a cluster; each round's sum is made by their own encoders. A call
    trains a new run in a new directory, unless it is told to resume one. `d2pfed train` is this call.

    Args:
        module: Any module whose rows of a batch do not mix; it is copied, not changed. For a named task also the name
            of a model, or None for the one that suits the task.
        clients: The data set of each client: a sequence, a mapping, or a function of a client's number (then give
            `population`). A data set is a pair of tensors or arrays, a list of examples, a torch Dataset or a
            DataLoader, of any size, and is loaded when its client is asked. Or the name of a task, such as digits,
            with data of its own.
        privacy: The target; fields that only `fit` knows may be left out. A dictionary changes the default target:
            epsilon 1 against the server, each client in one round, 10 % dropouts and 10 % colluders. None trains in
            the clear.
        rounds: How many rounds; None chooses, where each client is in one round.
        cohort_size: How many clients are asked in a round; None chooses, as above.
        population: How many clients there are, where `clients` is a function or a task.
        validation: A data set to choose by, measured after rounds.
        test: A data set to report on, or a function that opens it; measured once, at the end.
        loss: From outputs and targets to the loss of each example or their mean; None is the cross entropy.
        metrics: Functions of all outputs and all targets, by name; None is the accuracy where loss is a cross entropy.
        lr: The clients' learning rate; where the unit is a record, a factor of the server's.
        epochs: The clients' passes over their data in a round.
        batch_size: The clients' batch size.
        training: Further settings of the clients' training, a `Training` or a dictionary of its fields: optimizer,
            momentum, weight_decay, lr_schedule, step_schedule, max_grad_norm, proximal, precision, trainable, personal,
            forward, step, collate, example_weights, device, weights, max_weight, groups.
        server: How the server moves the model: avgm, adam or yogi, a `ServerOptimizer` or a dictionary of its fields:
            lr, momentum, second_moment (Adam's, or Yogi's by second_rule), lr_decay, averaging.
        early_stop: A rule that ends the run, declared here so that its epsilon is honest.
        directory: Where the run is kept; None is a new one under `runs`. One that holds a run is refused, unless:
        resume: Go on with the run in `directory`, or under `runs` with that of the same name or settings; begin it if
            there is none. Another module, function or data set than it was begun with is refused and named. What was
            found is said first, and in the result's notes: a finished run is not trained again.
        seed: A number fixes a named model's initial parameters, cohorts, order and noise, whatever the run is called;
            anyone who knows it can remove the noise. Not with a shared ledger.
        run: How the run is carried out, a `RunOptions` or a dictionary of its fields: name, ledger, baseline,
            evaluate_every, progress, callbacks, backend, workers, address, dropouts, fidelity, stop_is_blind,
            partition, data.
        unknown: Refused, with the place of parameters that have moved.

    Returns:
        A `FitResult`: the trained module, its metrics, and one guarantee per observer.

    Raises:
        ConfigError: if an argument cannot be used, before anything is charged.
        BudgetExceeded: if the ledger does not allow the run.

    Examples:
        >>> result = fit("logistic", "digits", population=60, rounds=2, cohort_size=20, privacy={"epsilon": 50.0})
        >>> result.summary.rounds
        2
    """
    for name in unknown:
        if name in MOVED:
            raise ConfigError(f"fit has no parameter {name}: it is now {MOVED[name]}")
        known = [each for each in fit.__annotations__ if each not in ("unknown", "return")]
        near = "".join(f" (did you mean {each}?)" for each in closest(name, known))
        raise ConfigError(f"fit has no parameter {name}{near}")
    options = settings_of(RunOptions, run, "run")
    if not isinstance(resume, bool):
        raise ConfigError(f"resume must be True or False, got {resume!r}")
    if directory is not None:
        if not isinstance(directory, (str, Path)):
            raise ConfigError(f"directory must be a path, got {type(directory).__name__}")
        if options.name is not None:
            raise ConfigError(
                f"a run is called as its directory is: give name or directory, got {options.name} and {directory}"
            )
        try:
            is_begun = (Path(directory) / "settings.json").exists()
        except OSError as error:
            raise ConfigError(f"cannot use the run directory {directory}: {error.strerror}") from error
        if is_begun and not resume:
            raise ConfigError(f"{directory} holds a run: resume=True continues it, another directory begins one")
    if seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"seed must be a whole number, got {seed!r}")
        check_range("seed", seed, 0, 2**63 - 1)
    job = plan_job(
        workload_of(
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
        rounds=rounds,
        cohort_size=cohort_size,
        steps={"lr": lr, "epochs": epochs, "batch_size": batch_size},
        server=settings_of(ServerOptimizer, server, "server"),
        early_stop=early_stop,
        seed=seed,
        options=options,
    )
    with one_thread(job.model):
        return _execute(job, None if directory is None else Path(directory), options, resume=resume)


@contextmanager
def _new_directory(name: str) -> Iterator[Path]:
    """Make a directory under `runs` that no other call has; it goes again if nothing is written to it."""
    for number in count(1):
        path = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot use the run directory {path}: {error.strerror}") from error
        break
    try:
        yield path
    finally:
        with suppress(OSError):  # it is not empty
            path.rmdir()


def _execute(job: Job, place: Path | None, options: RunOptions, *, resume: bool) -> FitResult:
    """Try everything once, start what trains the clients, train from where the run is, and say what it came to."""
    name = options.name or job.name
    check_name("a run's", name)
    baseline, given = None, options.baseline
    if isinstance(given, FitResult):
        baseline = Baseline(given.directory.name, given.history)
    elif isinstance(given, (str, Path)):
        other = read_report(Path(given))
        baseline = Baseline(other.run, other.rounds)
    elif given is not None:
        raise ConfigError(f"baseline must be a FitResult or a run's directory, got {type(given).__name__}")
    job.evaluator.rehearse(job.model.initial())
    with ExitStack() as stack:
        path = place or (Path("runs") / name if resume else stack.enter_context(_new_directory(name)))
        backend, line = backend_for(job, options, path)
        stack.enter_context(closing(backend))
        notes = (*job.notes, line)
        is_begun = (path / "settings.json").exists()
        run = stack.enter_context(job.open(path, options.ledger))
        keep_fingerprint(path, job.fingerprint, is_trained=run.state.rounds > 0)
        if baseline is not None:  # where the report finds it
            run.directory.replace(BASELINE, to_json(baseline).encode())
        watch = options.progress
        if not isinstance(watch, Watcher):
            watch = Watcher(0, "round", is_command=False, is_shown=watch)
        if is_begun:
            planned, file = job.settings.rounds, path / "summary.json"
            end = parse(read_text(file), f"{file}").get("end") if file.exists() else None
            if run.state.rounds < planned and end != End.STOPPED:
                found = f"The run in {path} is resumed at round {run.state.rounds + 1} of {planned}."
            else:
                last = datetime.fromtimestamp((path / "checkpoint.safetensors").stat().st_mtime).astimezone()
                found = f"The run in {path} finished on {last:%Y-%m-%d at %H:%M}: nothing was trained."
            notes = (found, *notes)
            watch.say(found, logging.WARNING)
        listen = stack.enter_context(_watched(job, run, watch, notes[is_begun:], options))
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
        personal=None if job.whole is None else partial(personal_trainer(job, path).module, params),
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
def _watched(job: Job, run: Run, watch: Watcher, notes: Sequence[str], options: RunOptions) -> Iterator[Listener]:
    """Print what a person should know beforehand, and yield the listener of rounds: a bar and the user's callbacks."""
    callbacks: tuple[Callback, ...] = tuple(options.callbacks)  # type: ignore[arg-type]
    watch.total, plan, target = job.settings.rounds, job.plan, job.settings.target
    said, sent = [job.settings.data, *notes], 0  # bytes of a client in a round, keys and shares included
    if plan is not None and target is not None:
        found = describe(target, plan)
        sent = sent if found.traffic is None else found.traffic.client.sent
        warnings = (*found.warnings, *filter(None, [default_refusal(target, plan)]))
        said += [
            found.why_signal,
            found.why_compression,
            found.why_bytes,
            *(f"Warning: {each}" for each in warnings),
            *record_terms(plan),
        ]
    for text in said:
        watch.say(text)

    def listen(record: RoundRecord, /) -> bool:
        shown = [f"{name} {value:.4g}" for name, value in record.metrics.items()]
        if plan is not None:
            shown.append(f"{record.charged} of {plan.max_attempts} attempts")
        shown.append(f"{(sent or record.upload_bytes) / 1e3:.1f} kB per client per round")
        watch.show(record.round, "  ".join(shown))
        answers = [callback(record, lambda: job.model.load(run.last_model())) for callback in callbacks]
        return not watch.caught and all(answer is not False for answer in answers)

    with watch:
        yield listen
