"""`d2pfed train`: `fit` on a named task, its settings from the command line."""

import sys
from pathlib import Path
from signal import SIGINT
from typing import Annotated, Any

import typer

from d2pfed.accounting import Sampling, Unit
from d2pfed.api import EarlyStop, FitResult, RunOptions, Training, fit
from d2pfed.api.progress import Watcher
from d2pfed.api.workload import MAIN_TASK, made_by
from d2pfed.cli.options import (
    TARGET_DEFAULTS,
    AsJson,
    Config,
    FieldOptions,
    SectionedCommand,
    application,
    option,
    parse_dropouts,
    with_fields,
)
from d2pfed.cli.show import epsilons, headline, out, plain, print_json
from d2pfed.errors import BudgetExceeded, ConfigError
from d2pfed.fields import DATA, PRIVACY, TRAINING
from d2pfed.learning import LocalTraining, use_one_thread
from d2pfed.plan import PrivacyTarget
from d2pfed.training import ServerOptimizer

app = application()

EXHAUSTED = 3  # the exit status of a run that its budget or its attempts have ended

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
LOCAL = FieldOptions(kind=LocalTraining, defaults={"lr": 0.2, "epochs": 5}, left_out=("rounds",))
SERVER = FieldOptions(
    kind=ServerOptimizer, prefix="server_", defaults={"lr": 2.0, "momentum": 0.7, "averaging": 0.8}
)
WEIGHING = FieldOptions(kind=Training, left_out=tuple(each.name for each in LOCAL.fields))
STOP = FieldOptions(
    kind=EarlyStop, prefix="stop_", defaults={"patience": None}, unset={"patience": "the run goes to its end"}
)
RUN = FieldOptions(kind=RunOptions, defaults={"backend": "processes"})


@app.command(cls=SectionedCommand)
@with_fields(TARGET, LOCAL, SERVER, WEIGHING, STOP, RUN)
def train(  # noqa: PLR0917 - one dictionary for each settings class
    wanted: dict[str, Any],
    local: dict[str, Any],
    server: dict[str, Any],
    training: dict[str, Any],
    stop: dict[str, Any],
    run: dict[str, Any],
    *,
    task: Annotated[
        str,
        option(
            "infimnist, digits, mnist-writers, cifar10, shakespeare or MODULE:FUNCTION. Default: infimnist.", DATA
        ),
    ] = MAIN_TASK,
    model: Annotated[
        str | None,
        option(
            "edges, mlp, logistic, cnn, small-cnn, char or MODULE:FUNCTION. Default: the one for the task.",
            TRAINING,
        ),
    ] = None,
    trainable: Annotated[
        str, option("Patterns of trained parameters, with commas between, such as head.*. Default: all.", TRAINING)
    ] = "*",
    weights: Annotated[
        str | None,
        option("examples: clients weigh what they hold, up to --max-weight. Default: all alike.", TRAINING),
    ] = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="Train in the clear: it protects nobody.", rich_help_panel=PRIVACY)
    ] = False,
    lost: Annotated[
        str,
        option("Fraction of clients lost in each simulated round, or four: one before each exchange. Default: 0."),
    ] = "0",
    stop_milestones: Annotated[
        str, option("Charged attempts at which alone the run stops early, with commas between. Default: any.")
    ] = "",
    seed: Annotated[
        int | None,
        option(
            "Repeat a run exactly; anyone who knows the seed can remove the noise. Default: the system's entropy."
        ),
    ] = None,
    baseline: Annotated[Path | None, option("A run that the report shows beside this one. Default: none.")] = None,
    callback: Annotated[
        str | None, option("MODULE:FUNCTION that makes a callback for every round. Default: none.")
    ] = None,
    config: Config = None,  # noqa: ARG001 - its callback has read it
    json: AsJson = False,
) -> None:
    """Train a model privately over simulated clients; the same command resumes an interrupted run."""
    use_one_thread()  # of torch: each core has a worker process
    if wanted["unit"] == Unit.RECORD:  # every silo is asked, and takes one step
        local |= {"epochs": 1, "batch_size": 10, "optimizer": "sgd", "momentum": 0.0}
        wanted |= {"sampling": Sampling.NONE, "cohort_size": None}
        run |= {"backend": "auto"}
    population, rounds, cohort_size = (wanted.pop(each) for each in ("population", "rounds", "cohort_size"))
    try:
        parts = [] if stop["patience"] is None else stop_milestones.split(",")
        milestones = tuple(int(part) for part in parts if part)
    except ValueError:
        raise ConfigError(
            f"stop_milestones must be whole numbers with commas between, got {stop_milestones}"
        ) from None
    heard: Any = None if callback is None else made_by(callback, object)
    if callback is not None and not callable(heard):
        text = f"{callback} must return a function of a round's record and module, got {type(heard).__name__}"
        raise ConfigError(text)
    watcher = Watcher(0, "round")
    try:
        result = fit(
            model,
            task,
            privacy=None if clear else wanted,
            rounds=rounds,
            cohort_size=cohort_size,
            population=population,
            lr=local.pop("lr"),
            epochs=local.pop("epochs"),
            batch_size=local.pop("batch_size"),
            training=training
            | local
            | {"trainable": trainable.split(",") if "," in trainable else trainable, "weights": weights},
            server=server,
            early_stop=None if stop["patience"] is None else EarlyStop(**stop, milestones=milestones),
            resume=True,  # the same command goes on
            seed=seed,
            run=run
            | {
                "dropouts": parse_dropouts(lost),
                "baseline": baseline,
                "progress": watcher,
                "callbacks": () if callback is None else heard,
            },
        )
    except BudgetExceeded as limit:
        if json:
            print_json({"end": "exhausted", "stopped": str(limit)})
        else:
            out().print(f"The run cannot go on: {limit}. The test data stay closed.")
        sys.exit(EXHAUSTED)
    if json:
        print_json(plain(result.summary))
    else:
        _print(result)
    if result.summary.end.value in ("interrupted", "exhausted"):
        sys.exit(EXHAUSTED if result.summary.end.value == "exhausted" else 128 + (watcher.caught or SIGINT))


def _print(result: FitResult) -> None:
    console, summary, plan = out(), result.summary, result.plan_summary
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
                f"validation {100 * summary.metrics.get('accuracy', 0):.2f} %."
            )
    if summary.end.value == "stopped":
        console.print(f"Stopped by its declared rule: {summary.stopped}.")
    bits = "" if summary.bits is None else f" ({summary.bits} bits per coordinate)"
    console.print(f"A vector has {summary.upload_bytes:,} bytes for {summary.dimension:,} parameters{bits}.")
    if plan is not None:
        console.print(plan.why_bytes)
        console.print(
            f"{summary.charged:,} of {summary.max_attempts:,} attempts were charged. The epsilons cover all "
            f"{summary.max_attempts:,}, however the run ends."
        )
        console.print(headline(summary.guarantees, plan.against))
        console.print(epsilons(summary.guarantees))
    else:
        console.print("Trained in the clear: nothing is guaranteed to anybody.")
    if summary.so_far:
        console.print(epsilons(summary.so_far, " so far, as nobody stopped the run for what it has shown"))
    if summary.tuning:
        console.print(f"Tuning: {summary.tuning}.")
    if summary.repeatable:
        console.print("This run repeats from its seed: anyone who knows the seed can remove the noise.")
    console.print(
        f"Plan, ledger, model and metrics are in {summary.directory}; the report is {summary.directory}/report.html.",
        soft_wrap=True,
    )
