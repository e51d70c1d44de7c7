"""`d2pfed audit`: attack the mechanism, a training run, or a released model, beside what is claimed."""

import math
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from d2pfed.accounting import SERVER, round_up
from d2pfed.api import audit
from d2pfed.api.audit.mechanism import MechanismAudit
from d2pfed.api.audit.membership import LEVELS
from d2pfed.api.job import Job, array_shapes, fixed_digest, read_settings
from d2pfed.api.progress import Watcher
from d2pfed.api.workload import ModelEvaluator, made_by, model_named, task_named
from d2pfed.cli import options
from d2pfed.cli.show import out, print_json
from d2pfed.errors import ConfigError
from d2pfed.fields import DATA, TRAINING, check_range
from d2pfed.learning import Clients, Examples, Model, Task, UserClients, use_one_thread, user_model
from d2pfed.learning.user_clients import LabeledClients
from d2pfed.ledger.files import replace_file
from d2pfed.plan import PrivacyTarget, decode_plan
from d2pfed.runs import RoundRecord, TrainingAudit
from d2pfed.runs.json_files import read_text, to_json
from d2pfed.simulation import Fidelity
from d2pfed.simulation.process_backend import start_workers

REFUTED = 4  # the exit status of an audit whose lower bound is above the claim
MOST_TRIALS = 100_000_000

app = options.application("Attack a guarantee, and print a lower bound on epsilon next to the claim.")

TARGET = options.FieldOptions(
    kind=PrivacyTarget,
    only=(
        *("epsilon", "delta", "cohort_size", "mechanism", "adjacency", "dropouts", "clip"),
        *("rotation", "compression", "bits"),
    ),
    defaults={"epsilon": 4.0, "delta": 1e-5, "cohort_size": 4},
)
RunDirectory = Annotated[Path, typer.Argument(help="The run's directory, such as runs/NAME.")]
OwnTask = Annotated[
    str | None,
    options.option(
        "The task given to `train`; repeat it, as a sign of trust, if it is MODULE:FUNCTION. For a run of `fit`, a "
        "function that returns its clients.",
        DATA,
        "--task",
    ),
]
OwnModel = Annotated[str | None, options.option("Like --task, for the model or module.", TRAINING, "--model")]
Partition = Annotated[
    str | None, options.option("The partition given to `train`. Default: the task's.", DATA, "--partition")
]


@app.command(cls=options.SectionedCommand)
@options.with_fields(TARGET)
def mechanism(
    wanted: dict[str, Any],
    *,
    trials: Annotated[int, options.option("Trials in each of the two worlds. Default: 3000.")] = 3000,
    releases: Annotated[int, options.option("Rounds per trial. Default: 2.")] = 2,
    confidence: Annotated[float, options.option("Joint confidence of the lower bounds. Default: 0.99.")] = 0.99,
    fidelity: Annotated[
        Fidelity, options.option("protocol: all messages; sum: none, six times as fast. Default: protocol.")
    ] = Fidelity.PROTOCOL,
    worlds: Annotated[
        audit.Worlds,
        options.option("neighbours; or same, a control whose bounds must be 0. Default: neighbours."),
    ] = audit.Worlds.NEIGHBORS,
    json: options.AsJson = False,
) -> None:
    """Guess from the sums of whole rounds which of two neighboring worlds produced them, and count the errors."""
    check_range("trials", trials, 1, MOST_TRIALS)
    check_range("releases", releases, 1, 1000)
    target = PrivacyTarget(against=SERVER, **wanted)
    found = audit.audit_mechanism(
        audit.audited_plan(target, releases), trials, confidence=confidence, fidelity=fidelity, worlds=worlds
    )
    _conclude(
        found,
        (
            f"Claimed epsilon {round_up(found.claimed, 4)} at delta {found.delta:g} against the server, for "
            f"{found.releases} releases of {found.mechanism} noise, {found.survivors} of {found.cohort_size} clients."
        ),
        (
            f"At least {_down(found.counted)} by counted errors alone, {_down(found.gaussian)} if the noise is "
            f"Gaussian ({100 * found.gaussian / found.claimed:.0f} % of the claim): {found.trials:,} trials per world, "
            f"{found.errors[0]:,} false alarms and {found.errors[1]:,} misses, confidence {found.confidence:g}."
        ),
        json=json,
    )


@app.command(cls=options.SectionedCommand)
def training(
    run: RunDirectory,
    *,
    canaries: Annotated[
        int, options.option("Clients, or records, to replace with canaries. Default: 1000.")
    ] = 1000,
    confidence: Annotated[float, options.option("Joint confidence of the lower bounds. Default: 0.95.")] = 0.95,
    task: OwnTask = None,
    model: OwnModel = None,
    partition: Partition = None,
    data: options.DataDirectory = None,
    workers: Annotated[int | None, options.option("Worker processes. Default: one per core.")] = None,
    json: options.AsJson = False,
) -> None:
    """Repeat a run of `fit` or `train` with canaries, and guess their secret coins from what its server sees.

    A canary is a client, or a record where records are protected. The bounds are kept in the run's directory as
    audit.json, and its report shows them beside the claim.
    """
    from d2pfed.runs.report import AUDIT, read_report, write_report  # noqa: PLC0415 - the plotter is slow to load

    use_one_thread()
    job = _job(run, (task, model), partition, data)
    with Watcher(job.settings.rounds, "round") as watcher:

        def listen(record: RoundRecord) -> bool:
            watcher.show(record.round, "auditing")
            if watcher.caught:
                sys.exit(128 + watcher.caught)
            return True

        # The bar has a thread of its own, so workers may have to start afresh.
        start = partial(start_workers, workers=workers, prepare=use_one_thread)
        found = audit.audit_training(job, canaries, lambda each: start(each)[0], listen, confidence=confidence)
    replace_file(run / AUDIT, to_json(found).encode(), mode=0o666)
    write_report(read_report(run), run)
    _conclude(
        found,
        (
            f"Epsilon is at least {_down(found.lower)}, or {_down(found.gaussian)} if the noise is Gaussian, with "
            f"confidence {found.confidence:g}; {round_up(found.claimed, 4)} is claimed at delta "
            f"{round_up(found.delta, 3)} against the {found.observer}. {found.correct:,} of {found.guesses:,} guesses "
            f"were right; {found.present:,} of {found.canaries:,} canary {found.unit}s took part."
        ),
        json=json,
    )


@app.command(cls=options.SectionedCommand)
def membership(
    run: RunDirectory,
    *,
    records: Annotated[
        int, options.option("Most records of members, and most of others, to test. Default: 10000.")
    ] = 10_000,
    task: OwnTask = None,
    model: OwnModel = None,
    partition: Partition = None,
    data: options.DataDirectory = None,
    json: options.AsJson = False,
) -> None:
    """Distinguish members' records from others by the loss of the released model; plot the error rates."""
    check_range("records", records, 1, MOST_TRIALS)
    found = audit.attack_membership(run, _job(run, (task, model), partition, data), records)
    plot = audit.write_plot(found, run)
    if json:
        print_json({**found.summary(), "plot": str(plot)})
        return
    console = out()
    console.print(
        f"Area under the curve {found.area:.3f} (0.5: no better than guessing): {found.members:,} records of members, "
        f"{found.others:,} of {found.others_are}."
    )
    for level in LEVELS:
        rate, most = found.at(level)
        console.print(f"At a false positive rate of {level:g}: {rate:.4f} of members, at most {most:.4f} (95 %).")
    console.print(found.shows)
    console.print(f"The plot is {plot}.", soft_wrap=True)


def require_trusted(name: str, given: str | None, option_name: str) -> str:
    """Return what to load, given here or named by a run; code that only the run names comes from its maker."""
    if given is None and not name:
        raise ConfigError(
            f"the run used a user's own clients: name the function that returns them with {option_name}"
        )
    if given is None and ":" in name:
        raise ConfigError(
            f"the run names code to execute, {name[:80]!r}: if you trust it, name it with {option_name}"
        )
    return name if given is None else given


def _job(run: Path, given: tuple[str | None, str | None], partition: str | None, data: Path | None) -> Job:
    """Return the job that a run's directory was made by, its plan the one that the run followed.

    Its task and model are made again by name, or by a user's functions; data of another description are refused.
    """
    (settings, details), plan = read_settings(run), decode_plan(read_text(run / "plan.json"))
    stated = details.task or "", details.model or ""  # none of a user's own
    task = require_trusted(stated[0], given[0], "--task")
    chosen: object  # of a run of `fit`: whatever it can be given
    if not stated[0] and ":" in task:
        chosen = made_by(task, object)
    else:
        chosen = task_named(task, plan.sampling.population, partition, data)
    network = require_trusted(stated[1], given[1], "--model")
    if isinstance(chosen, Task) and stated[1]:
        made: object = model_named(network, chosen, settings.seed or 0)
    else:
        made = made_by(network, object)
    names = tuple(array.name for array in settings.arrays)
    if isinstance(made, Model):
        model = made if made.names == names else replace(made, trainable=names)
    elif details.loss != "cross_entropy":
        raise ConfigError(f"the run's loss is {details.loss}: return a d2pfed.learning.Model with that loss")
    else:
        model = user_model(made, trainable=names)
    if array_shapes(model) != settings.arrays or fixed_digest(model) != details.fixed:
        raise ConfigError("the model is not the one that the run trained: its arrays or fixed parameters differ")
    clients: Clients
    if isinstance(chosen, Task):
        data_stated, clients, validation = chosen.description, chosen.clients, chosen.validation
    else:
        own = UserClients.of(chosen, None, model.device)
        rows = own.first()[1]
        if not isinstance(rows, Examples) or not rows.are_tensors:
            raise ConfigError("an audit needs clients that hold one tensor of inputs and one of labels")
        data_stated, validation = f"{own.population:,} clients", None
        clients = LabeledClients(own, rows.between(0, 0), own.population)
    if data_stated != settings.data:
        raise ConfigError(f"the run in {run} used other data: {settings.data} Got: {data_stated}")
    return Job(
        settings=settings,
        plan=plan,
        sampling=plan.sampling,
        model=model,
        clients=clients,
        evaluator=ModelEvaluator(model, None, None, {}),  # what is attacked is never measured
        validation=validation,
    )


def _down(value: float) -> str:
    """Return a lower bound, rounded down."""
    return f"{math.floor(1000 * value) / 1000:g}"


def _conclude(found: MechanismAudit | TrainingAudit, *lines: str, json: bool) -> None:
    """Print what an audit found, and exit with a status of its own if it refutes the claim."""
    above = "refuted: the lower bound is above it" if found.is_refuted else "not refuted"
    if json:
        print_json(asdict(found) | {"is_refuted": found.is_refuted})
    else:
        for line in (*lines, f"The claim is {above}.", found.shows):
            out().print(line)
    if found.is_refuted:
        sys.exit(REFUTED)
