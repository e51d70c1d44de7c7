"""`d2pfed train`: the main job, from a wish to a trained model, a ledger and a summary."""

import sys
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from d2pfed.accounting import Adjacency, Sampling
from d2pfed.cli import options
from d2pfed.cli.progress import Watcher
from d2pfed.cli.show import epsilons, err, out, plain, print_json
from d2pfed.errors import ConfigError
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import digest
from d2pfed.plan import MechanismName, Plan, PrivacyTarget, RotationName, describe
from d2pfed.plan.bounds import MOST_ATTEMPTS_PER_ROUND, check_range
from d2pfed.simulation import Fidelity
from d2pfed.training import ServerOptimizer

if TYPE_CHECKING:
    from d2pfed.runs import RoundRecord, RunSummary


LONGEST_NAME = 100
EXHAUSTED = 3  # the exit status of a run that its budget or its attempts have ended


class Engine(StrEnum):
    """Where the clients of a simulation are trained and encoded."""

    PROCESS = "process"  # in this process
    RAY = "ray"  # by workers on one machine or many


def train(
    *,
    task: Annotated[
        str, typer.Option(help="infimnist, digits, mnist-writers, cifar10 or shakespeare.")
    ] = "infimnist",
    model: Annotated[
        str | None,
        typer.Option(help="edges, mlp, logistic, cnn, small-cnn or char. [default: what serves the task]"),
    ] = None,
    epsilon: options.Epsilon = 1.0,
    delta: options.Delta = None,
    against: options.Against = "released",
    rounds: options.Rounds = 100,
    population: Annotated[
        int | None, typer.Option(help="Number of clients there are. [default: the task's]")
    ] = None,
    cohort: options.CohortSize = 100,
    mechanism: options.Mechanism = MechanismName.CENTERED,
    sampling: options.SamplingScheme = Sampling.FIXED,
    sizes: options.Sizes = "known",
    adjacency: options.Neighbours = Adjacency.REPLACE_ONE,
    dropouts: options.DropoutRate = 0.0,
    colluders: options.Colluders = 0.0,
    max_participations: options.Participations = None,
    spare: Annotated[
        int | None,
        typer.Option(help="Attempts beyond one a round that epsilon covers: what a kill costs. [default: 10 %]"),
    ] = None,
    clip: options.Clip = 1.0,
    bits: options.Bits = None,
    rotation: options.Rotation = RotationName.HADAMARD,
    partition: Annotated[str | None, typer.Option(help="iid, shards, dirichlet:ALPHA or owner.")] = None,
    optimizer: Annotated[str, typer.Option(help="The clients' optimizer: sgd, adam or rmsprop.")] = "sgd",
    lr: Annotated[float, typer.Option(help="The clients' learning rate.")] = 0.2,
    momentum: Annotated[float, typer.Option(help="The clients' momentum.")] = 0.0,
    epochs: Annotated[int, typer.Option(help="The clients' passes over their data.")] = 3,
    batch: Annotated[int, typer.Option(help="The clients' batch size.")] = 10,
    server_lr: Annotated[float, typer.Option(help="The server's learning rate.")] = 0.8,
    server_momentum: Annotated[float, typer.Option(help="The server's momentum.")] = 0.5,
    server_adam: Annotated[
        float, typer.Option(help="Decay of Adam's second moment at the server; 0: no Adam.")
    ] = 0.0,
    server_lr_decay: Annotated[
        float, typer.Option(help="The server's learning rate shrinks by this factor each round.")
    ] = 1.0,
    averaging: Annotated[float, typer.Option(help="Decay of the running average of models; 0: none.")] = 0.8,
    lost: Annotated[
        str,
        typer.Option(help="Fraction of clients lost in each simulated round, or four: one before each exchange."),
    ] = "0",
    fidelity: Annotated[
        Fidelity, typer.Option(help="Of all rounds but the first, which is `protocol`.")
    ] = Fidelity.SUM,
    seed: Annotated[
        int | None, typer.Option(help="Repeat a run exactly; whoever knows it undoes the noise.")
    ] = None,
    data: options.DataDirectory = None,
    name: Annotated[str | None, typer.Option(help="The run's name. [default: task and a digest]")] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="A ledger that other runs over these clients share: see ledger create.")
    ] = None,
    stop_is_blind: Annotated[
        bool,
        typer.Option(
            "--stop-is-blind", help="Nobody will stop the run for what it has shown: say what was spent."
        ),
    ] = False,
    engine: Annotated[Engine, typer.Option(help="Where clients are trained and encoded.")] = Engine.PROCESS,
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster's address, for --engine ray. [default: this machine]")
    ] = None,
    workers: Annotated[int, typer.Option(help="Ray workers, for --engine ray.")] = 2,
    json: options.AsJson = False,
) -> None:
    """Train a model privately over simulated clients; the same command resumes an interrupted run."""
    # Torch takes seconds to load, and no other command needs it.
    from d2pfed.api import Job, Settings  # noqa: PLC0415
    from d2pfed.learning import (  # noqa: PLC0415
        LocalTraining,
        Optimizer,
        build_model,
        fitting,
        load_task,
        parse_partition,
    )

    if seed is not None:
        check_range("seed", seed, 0, 2**63 - 1)
    if name is not None and (not name.isprintable() or Path(name).name != name or len(name) > LONGEST_NAME):
        raise ConfigError(
            f"a run's name must be one of a folder, of at most {LONGEST_NAME} characters, got {name!r}"
        )
    chosen = load_task(
        task, population=population, partition=parse_partition(partition) if partition else None, data_dir=data
    )
    model = model or fitting(chosen)
    network = build_model(model, chosen, seed=seed or 0)
    target = PrivacyTarget(
        dimension=network.dimension,
        population=chosen.clients.population,
        cohort_size=cohort,
        rounds=rounds,
        epsilon=epsilon,
        delta=delta,
        against=options.observer_named(against),
        mechanism=mechanism,
        sampling=options.scheme_of(sampling, sizes),
        adjacency=adjacency,
        dropouts=dropouts,
        colluders=colluders,
        max_participations=max_participations,
        spare=spare,
        clip=clip,
        bits=bits,
        rotation=rotation,
    )
    # A round that is killed again and again is bounded by the run's attempts, not by its own.
    tries = min(MOST_ATTEMPTS_PER_ROUND, target.attempts_per_round + target.max_attempts - rounds)
    target = replace(target, attempts_per_round=tries)
    settings = Settings(
        task=task,
        data=chosen.description,
        model=model,
        target=target,
        local=LocalTraining(
            optimizer=options.one_of(Optimizer, optimizer),
            lr=lr,
            momentum=momentum,
            epochs=epochs,
            batch_size=batch,
        ),
        server=ServerOptimizer(
            lr=server_lr,
            momentum=server_momentum,
            second_moment=server_adam,
            lr_decay=server_lr_decay,
            averaging=averaging,
        ),
        dropouts=options.dropouts_of(lost),
        fidelity=fidelity,
        seed=seed,
        stop_is_blind=stop_is_blind,
    )
    job = Job.of(settings, chosen, network)
    directory = Path("runs") / (name or f"{task}-{digest(canonical.encode(settings)).hex()[:8]}")
    console = err()
    console.print(chosen.description)
    for warning in describe(target, job.plan).warnings:
        console.print(f"Warning: {warning}")
    backend = options.on_ray(job.trainer(), workers, address) if engine is Engine.RAY else None
    with Watcher(job.plan.rounds, "round") as watcher:
        summary = job.execute(directory, ledger, partial(_listen, watcher, job.plan), backend)
    if json:
        print_json(plain(summary))
    else:
        _print(summary)
    match summary.end.value:
        case "interrupted":
            sys.exit(watcher.exit_status)
        case "exhausted":
            sys.exit(EXHAUSTED)


def _listen(watcher: Watcher, plan: Plan, record: "RoundRecord") -> bool:
    """Show a round on the bar; say whether the run goes on."""
    megabytes = record.round * record.upload_bytes / 1e6
    text = (
        f"accuracy {record.metrics['accuracy']:.3f}  {record.charged} of {plan.max_attempts} attempts  "
        f"{megabytes:.2f} MB per client"
    )
    watcher.show(record.round, text)
    return not watcher.stopping


def _print(summary: "RunSummary") -> None:
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
        f"Each client sent {summary.upload_bytes:,} bytes a round for {summary.dimension:,} parameters "
        f"({summary.bits} bits a coordinate)."
    )
    console.print(
        f"{summary.charged:,} of {summary.max_attempts:,} attempts are charged. The epsilons are those of all of them, "
        "however the run ends."
    )
    console.print(epsilons(summary.guarantees))
    if summary.so_far:
        console.print(epsilons(summary.so_far, " so far, as nobody stopped the run for what it has shown"))
    if summary.repeatable:
        console.print("This run repeats from its seed: it protects nobody from whoever knows the seed.")
    console.print(
        f"Plan, ledger, model and metrics are in {summary.directory}; the report is {summary.directory}/report.html.",
        soft_wrap=True,
    )
