"""`d2pfed train`: from a privacy target to a trained model, a ledger and a summary."""

import os
import sys
from dataclasses import replace
from enum import StrEnum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from d2pfed.accounting import Sampling, Unit
from d2pfed.cli.options import (
    TARGET_DEFAULTS,
    TRAIN_PACKAGES,
    AsJson,
    Config,
    DataDirectory,
    FieldOptions,
    SectionedCommand,
    Sizes,
    check_sizes,
    option,
    parse_dropouts,
    with_fields,
)
from d2pfed.cli.progress import Watcher
from d2pfed.cli.show import epsilons, err, headline, out, plain, print_json
from d2pfed.errors import ConfigError, needs_extra
from d2pfed.fields import DATA, TRAINING
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import digest
from d2pfed.plan import Plan, PrivacyTarget, calibrate, describe, record_terms
from d2pfed.plan.bounds import MOST_ATTEMPTS_PER_ROUND, check_name, check_range
from d2pfed.plan.policy import default_refusal
from d2pfed.training import ServerOptimizer

with needs_extra("train", *TRAIN_PACKAGES):
    from d2pfed.api import Job, Settings
    from d2pfed.api.arguments import ledger_path
    from d2pfed.api.backends import BackendName, record_backend
    from d2pfed.api.complete_target import split_population, with_records
    from d2pfed.learning import (
        LocalTraining,
        Model,
        RecordTrainer,
        Task,
        build_model,
        fitting,
        load_task,
        parse_partition,
        use_one_thread,
    )
    from d2pfed.simulation import Backend, Fidelity, InProcess, TrainClients, warm_up
    from d2pfed.simulation.process_backend import start_workers

if TYPE_CHECKING:
    from d2pfed.runs import RoundRecord, RunSummary

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_show_locals=False)

Own = TypeVar("Own", Task, Model)

DEFAULT_TASK = "infimnist"
EXHAUSTED = 3  # the exit status of a run that its budget or its attempts have ended


class BackendChoice(StrEnum):
    """Where the clients of a simulation are trained and encoded."""

    PROCESSES = "processes"  # in worker processes of this machine, one per core
    IN_PROCESS = "in-process"
    RAY = "ray"  # by workers on one machine or many


# What serves the default task; the classes' own defaults are those of FedAvg.
TARGET = FieldOptions(
    kind=PrivacyTarget,
    defaults=TARGET_DEFAULTS | dict.fromkeys(("population", "cohort_size", "rounds")),
    unset={
        "population": "the task's",
        "cohort_size": "1,000 for infimnist, else what the population allows",
        "rounds": "50 for infimnist, else what the population allows",
    },
    left_out=("dimension", "draws", "consistency", "attempts_per_round"),
)
DEFAULT_JOB = {"rounds": 50, "cohort_size": 1000, "spare": 5}  # over 100,000 clients, each asked once
LOCAL = FieldOptions(kind=LocalTraining, defaults={"lr": 0.2, "epochs": 5})
SERVER = FieldOptions(
    kind=ServerOptimizer, prefix="server_", defaults={"lr": 2.0, "momentum": 0.7, "averaging": 0.8}
)


@app.command(cls=SectionedCommand)
@with_fields(TARGET, LOCAL, SERVER)
def train(
    wanted: dict[str, Any],
    local: dict[str, Any],
    server: dict[str, Any],
    *,
    task: Annotated[
        str,
        option(
            "infimnist, digits, mnist-writers, cifar10, shakespeare or MODULE:FUNCTION. Default: infimnist.", DATA
        ),
    ] = DEFAULT_TASK,
    model: Annotated[
        str | None,
        option(
            "edges, mlp, logistic, cnn, small-cnn, char or MODULE:FUNCTION. Default: the one for the task.",
            TRAINING,
        ),
    ] = None,
    partition: Annotated[
        str | None, option("iid, shards, dirichlet:ALPHA or owner. Default: the task's.", DATA)
    ] = None,
    data: DataDirectory = None,
    sizes: Sizes = "known",
    lost: Annotated[
        str,
        option("Fraction of clients lost in each simulated round, or four: one before each exchange. Default: 0."),
    ] = "0",
    fidelity: Annotated[
        Fidelity, option("sum, or protocol: every message of every round. Default: sum.")
    ] = Fidelity.SUM,
    seed: Annotated[
        int | None,
        option(
            "Repeat a run exactly; whoever knows the seed can remove the noise. Default: the system's entropy."
        ),
    ] = None,
    name: Annotated[str | None, option("The run's name. Default: the task and a digest of the settings.")] = None,
    ledger: Annotated[
        Path | None,
        option("Ledger shared with other runs over these clients, see `ledger create`. Default: the run's own."),
    ] = None,
    stop_is_blind: Annotated[
        bool,
        typer.Option(
            "--stop-is-blind",
            help="Declare that nobody stops the run because of its outputs, so that the spent part may be reported.",
        ),
    ] = False,
    backend: Annotated[
        BackendChoice, option("Where clients are trained: processes, in-process or ray. Default: processes.")
    ] = BackendChoice.PROCESSES,
    address: Annotated[
        str | None, option("Address of a Ray cluster, for --backend ray. Default: this machine.")
    ] = None,
    workers: Annotated[int | None, option("Worker processes. Default: one per core.")] = None,
    config: Config = None,  # noqa: ARG001 - its callback has read it
    json: AsJson = False,
) -> None:
    """Train a model privately over simulated clients; the same command resumes an interrupted run."""
    _check_run(seed, name)
    ledger = ledger_path(ledger, seed)
    use_one_thread()  # of torch: each core has a worker process
    trained, stepped, losses = LocalTraining(**local), ServerOptimizer(**server), parse_dropouts(lost)
    population = wanted.pop("population")
    chosen = _task(task, population, partition, data)
    model = model or fitting(chosen)
    network = own(model, Model) if ":" in model else build_model(model, chosen, seed=seed or 0)
    if task == DEFAULT_TASK and population is None and wanted["rounds"] is None and wanted["cohort_size"] is None:
        wanted |= DEFAULT_JOB | ({} if wanted["spare"] is None else {"spare": wanted["spare"]})
    silos = RecordTrainer(network, chosen.clients) if wanted["unit"] == Unit.RECORD else None
    if silos is None:
        target = _of_clients(wanted, network.dimension, chosen.clients.population)
    else:
        target = _of_records(wanted, network.dimension, silos)
        trained, stepped = LocalTraining(lr=trained.lr), replace(stepped, lr=stepped.lr * trained.lr)
    check_sizes(target.sampling, sizes)
    # A round that is killed again and again is bounded by the run's attempts, not by its own.
    tries = min(MOST_ATTEMPTS_PER_ROUND, target.attempts_per_round + target.max_attempts - target.rounds)
    target = replace(target, attempts_per_round=tries)
    settings = Settings(
        task=task,
        data=chosen.description,
        model=model,
        target=target,
        local=trained,
        server=stepped,
        dropouts=losses,
        fidelity=fidelity,
        seed=seed,
        stop_is_blind=stop_is_blind,
    )
    agreed = calibrate(target)
    job = Job(settings, chosen, network, agreed)
    directory = Path("runs") / (name or f"{task.replace(':', '-')}-{digest(canonical.encode(settings)).hex()[:8]}")
    console = err()
    summed_up = describe(target, agreed)
    for text in (chosen.description, summed_up.why_signal):
        console.print(text)
    for warning in (*summed_up.warnings, *filter(None, [default_refusal(target, agreed)])):
        console.print(f"Warning: {warning}")
    started, how = _start(job, agreed, silos, (backend, workers, address))
    for text in (*record_terms(agreed), *filter(None, [how])):
        console.print(text)
    with Watcher(agreed.rounds, "round") as watcher:
        summary = job.execute(directory, ledger, partial(_listen, watcher, agreed), started)
    if json:
        print_json(plain(summary))
    else:
        _print(summary, agreed)
    match summary.end.value:
        case "interrupted":
            sys.exit(watcher.exit_status)
        case "exhausted":
            sys.exit(EXHAUSTED)


def _check_run(seed: int | None, name: str | None) -> None:
    """Refuse a seed or a name that a run cannot have."""
    if seed is not None:
        check_range("seed", seed, 0, 2**63 - 1)
    if name is not None:
        check_name("a run's", name)


def _task(name: str, population: int | None, partition: str | None, data: Path | None) -> Task:
    """Return the task of that name, or a user's own."""
    with needs_extra("train", *TRAIN_PACKAGES):
        if ":" in name:
            return own(name, Task)
        divided = parse_partition(partition) if partition else None
        return load_task(name, population=population, partition=divided, data_dir=data)


def _of_clients(wanted: dict[str, Any], dimension: int, population: int) -> PrivacyTarget:
    """Return the target of a run over clients, its rounds and cohorts chosen where they are not given."""
    target = PrivacyTarget(dimension=dimension, population=population, **wanted)
    if None not in (wanted["rounds"], wanted["cohort_size"]):
        return target
    rounds, cohort_size, why = split_population(target, wanted["rounds"], wanted["cohort_size"])
    err().print(why)
    return replace(target, rounds=rounds, cohort_size=cohort_size)


def _of_records(wanted: dict[str, Any], dimension: int, silos: RecordTrainer) -> PrivacyTarget:
    """Return the target of a run over silos, all of which are asked, in which a round is one step."""
    err().print("A round is one step over a secret batch (--batch-rate); --epochs and --batch-size do not count.")
    population = silos.silos.population
    asked = wanted | {"sampling": Sampling.NONE, "cohort_size": population}
    target = PrivacyTarget(dimension=dimension, population=population, **asked)
    return with_records(target, target.rounds, silos.count_all)


def own(name: str, kind: type[Own]) -> Own:
    """Return what a user's own function makes; `name` is MODULE:FUNCTION, found from the current directory on."""
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(import_module(module), function)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name} must be MODULE:FUNCTION: {error}") from error
    finally:
        sys.path.pop(0)
    if not isinstance(made, kind):
        raise ConfigError(f"{name} must return a {kind.__name__} of d2pfed.learning, got a {type(made).__name__}")
    return made


def _start(
    job: Job, plan: Plan, silos: RecordTrainer | None, where: tuple[BackendChoice, int | None, str | None]
) -> tuple[Backend, str]:
    """Start what trains clients or silos, compiled beforehand; a line says how, where that is no matter of course."""
    params = job.model.initial()
    if silos is not None:
        return record_backend(silos, params, BackendName.AUTO, plan.divisor)
    trainer = job.trainer().choose(params, range(job.task.clients.population))
    warm_up(plan, trainer, params)
    backend, workers, address = where
    return start_backend(backend, trainer, workers, address)


def start_backend(
    name: BackendChoice, local_training: TrainClients, workers: int | None, address: str | None
) -> tuple[Backend, str]:
    """Start what trains the clients; return it, and a line if it is not what was asked for."""
    match name:
        case BackendChoice.PROCESSES:
            return start_workers(local_training, workers, use_one_thread)
        case BackendChoice.IN_PROCESS:
            return InProcess(local_training), ""
    with needs_extra("ray", "ray"):
        from d2pfed.simulation.ray_backend import RayBackend  # noqa: PLC0415 - an extra
    return RayBackend(local_training, workers or len(os.sched_getaffinity(0)), address), ""


def _listen(watcher: Watcher, plan: Plan, record: "RoundRecord") -> bool:
    """Show a round on the bar; say whether the run goes on."""
    text = (
        f"accuracy {record.metrics['accuracy']:.3f}  {record.charged} of {plan.max_attempts} attempts  "
        f"{record.upload_bytes / 1e3:.1f} kB per client per round"
    )
    watcher.show(record.round, text)
    return not watcher.stopping


def _print(summary: "RunSummary", plan: Plan) -> None:
    console = out()
    match summary.end.value:
        case "interrupted":
            console.print(f"Stopped after round {summary.rounds}; the same command resumes.")
        case "exhausted":
            console.print(
                f"Ended after round {summary.rounds} and cannot go on: {summary.stopped}. The test data stay closed."
            )
        case _:
            console.print(
                f"Test accuracy {100 * (summary.test_metrics or {}).get('accuracy', 0):.2f} % after "
                f"{summary.rounds} rounds; "
                f"validation {100 * summary.metrics['accuracy']:.2f} %."
            )
    console.print(
        f"Each client sent {summary.upload_bytes:,} bytes per round for {summary.dimension:,} parameters "
        f"({summary.bits} bits per coordinate)."
    )
    console.print(
        f"{summary.charged:,} of {summary.max_attempts:,} attempts are charged. The epsilons are those of all of them, "
        "however the run ends."
    )
    console.print(headline(summary.guarantees, plan.against))
    console.print(epsilons(summary.guarantees))
    if summary.so_far:
        console.print(epsilons(summary.so_far, " so far, as nobody stopped the run for what it has shown"))
    if summary.tuning:
        console.print(f"Tuning: {summary.tuning}.")
    if summary.repeatable:
        console.print("This run repeats from its seed: it protects nobody from whoever knows the seed.")
    console.print(
        f"Plan, ledger, model and metrics are in {summary.directory}; the report is {summary.directory}/report.html.",
        soft_wrap=True,
    )
