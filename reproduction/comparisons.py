"""Benchmarks that others use, each with a guarantee against the server and the same training without privacy."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from d2pfed.accounting import SERVER, Sampling
from d2pfed.learning import LocalTraining, Model, Task
from d2pfed.plan import Plan, RotationName, calibrate, describe
from d2pfed.runs.report.plots import Ink
from d2pfed.training import ServerOptimizer
from reproduction.benchmarks_page import COLUMNS
from reproduction.comparison_tasks import (
    idx_files,
    last_characters,
    linear_on_columns,
    linear_on_edges,
    linear_on_features,
    speakers,
    visits,
    writers,
)
from reproduction.curves import Hue, style_axes
from reproduction.explicit import local_training, privacy_target, server_optimizer
from reproduction.history import RunHistory
from reproduction.presentation import accuracy_cells, records, seeds_of, spoken
from reproduction.published import INFIMNIST
from reproduction.result import Cell, Context, Result, Size, Table
from reproduction.runs import run_systems
from reproduction.systems import System
from reproduction.whole_cifar import whole_cifar
from reproduction.workload import Workload

_CLIP = 1.0
_FILTERS = {Size.FULL: 512, Size.QUICK: 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One task with all settings; a cohort of None is everyone in every round."""

    name: str
    title: str
    load: Callable[[Context], Task]
    model: Callable[[Task, int], Model]
    model_name: str
    epsilon: float
    delta: float | None = None  # None: population^-1.1
    cohort_size: int | None
    rounds: int
    local: LocalTraining
    step: ServerOptimizer
    client_rates: tuple[float, ...] = ()  # the grid, of learning rates of clients and of the server
    server_rates: tuple[float, ...] = ()

    def choices(self, system: System) -> list[System]:
        """Return a system at every point of the grid."""
        return [
            replace(system, local=replace(self.local, lr=client), step=replace(self.step, lr=server))
            for client in self.client_rates
            for server in self.server_rates
        ]


WRITERS = Benchmark(
    name="writers",
    title="MNIST by its real writers, every writer a client",
    load=writers,
    model=linear_on_edges,
    model_name="linear on edges",
    epsilon=8.0,
    cohort_size=None,
    rounds=20,
    local=local_training(lr=0.5, epochs=2, batch_size=10),
    step=server_optimizer(lr=4.0, momentum=0.5, averaging=0.8),
    client_rates=(0.1, 0.5),
    server_rates=(1.0, 2.0, 4.0),
)
SPEAKERS = Benchmark(
    name="speakers",
    title="Shakespeare by speaker, the next character, tested on speakers that were not trained on",
    load=speakers,
    model=last_characters,
    model_name="linear on the last character",
    epsilon=8.0,
    cohort_size=None,
    rounds=20,
    local=local_training(lr=1.0, epochs=1, batch_size=50),
    step=server_optimizer(lr=3.0, momentum=0.5, averaging=0.8),
    client_rates=(1.0, 4.0),
    server_rates=(1.0, 3.0, 6.0),
)
WHOLE_CIFAR = Benchmark(
    name="cifar10-server",
    title="CIFAR-10, whole images, against the server",
    load=lambda context: whole_cifar(context.folder / "features", context.data, _FILTERS[context.size]),
    model=linear_on_features,
    model_name="linear on fixed features of random patches",
    epsilon=8.0,
    delta=1e-5,  # as in `cifar10-honest`
    cohort_size=None,
    rounds=45,
    local=local_training(lr=1.0, batch_size=25),
    step=server_optimizer(lr=0.7, momentum=0.5, lr_decay=0.98),
    client_rates=(0.3, 1.0),
    server_rates=(0.7, 2.0),
)
IDX = Benchmark(
    name="idx28",
    title="28 x 28 images from files in the IDX format",
    load=idx_files,
    model=linear_on_edges,
    model_name="linear on edges",
    epsilon=4.0,
    cohort_size=275,
    rounds=40,
    local=local_training(lr=0.5, epochs=2, batch_size=5),
    step=server_optimizer(lr=8.0, momentum=0.5, averaging=0.8),
    client_rates=(0.1, 0.5),
    server_rates=(1.0, 4.0, 8.0),
)
VISITS = Benchmark(
    name="visits",
    title="Doctor's visits by person, a table of 20,190 person-years",
    load=visits,
    model=linear_on_columns,
    model_name="linear",
    epsilon=2.0,
    cohort_size=None,
    rounds=20,
    local=local_training(lr=0.5, epochs=2, batch_size=5),
    step=server_optimizer(lr=4.0, momentum=0.5, averaging=0.8),
    client_rates=(0.1, 0.5),
    server_rates=(1.0, 4.0, 8.0),
)


def make_writers(context: Context) -> Result:
    """Return accuracy over the writers of MNIST."""
    return compare(WRITERS, context)


def make_speakers(context: Context) -> Result:
    """Return accuracy over the speakers of Shakespeare."""
    return compare(SPEAKERS, context)


def make_cifar(context: Context) -> Result:
    """Return accuracy on whole images of CIFAR-10."""
    return compare(WHOLE_CIFAR, context)


def make_cifar_at_4(context: Context) -> Result:
    """Return accuracy on whole images of CIFAR-10 at epsilon 4."""
    return compare(replace(WHOLE_CIFAR, name="cifar10-server-4", epsilon=4.0), context)


def make_cifar_at_2(context: Context) -> Result:
    """Return accuracy on whole images of CIFAR-10 at epsilon 2."""
    return compare(replace(WHOLE_CIFAR, name="cifar10-server-2", epsilon=2.0), context)


def make_visits(context: Context) -> Result:
    """Return accuracy of doctor's visits by person."""
    return compare(VISITS, context)


def make_idx(context: Context) -> Result:
    """Return accuracy on images from IDX files."""
    return compare(IDX, context)


def compare(benchmark: Benchmark, context: Context) -> Result:
    """Run a benchmark with its guarantee, and without, each at its own best point of one grid."""
    system = system_of(benchmark, benchmark.load(context))
    clear = replace(system, name="clear", label="not private", work=None)
    # One seed chooses, by validation accuracy alone.
    tuning = replace(context, repeats=1)
    best = [
        max(run_systems(benchmark.choices(each), tuning), key=lambda run: run.validation[-1]).system
        for each in (system, clear)
    ]
    private, plain = run_systems(best, context)
    return Result(
        name=benchmark.name,
        title=benchmark.title,
        table=Table(COLUMNS, (_row(benchmark, private, plain),)),
        words=_words(benchmark, private, plain),
        ran=records([private, plain]),
        reduced=_reduced(benchmark, context),
        draw=partial(_draw, private=private, plain=plain),
    )


def _reduced(benchmark: Benchmark, context: Context) -> str:
    few, all_of_them = _FILTERS[Size.QUICK], _FILTERS[Size.FULL]
    shrunk = benchmark.load is WHOLE_CIFAR.load and context.size is Size.QUICK
    return f"{few} filters in place of {all_of_them}" if shrunk else ""


def system_of(benchmark: Benchmark, task: Task) -> System:
    """Return a benchmark with its guarantee."""
    population, model = task.clients.population, benchmark.model(task, 0)
    experiment = replace(
        INFIMNIST,
        name=benchmark.name,
        task=task.name,
        model=benchmark.model_name,
        dimension=model.dimension,
        population=population,
        cohort_size=benchmark.cohort_size or population,
        rounds=benchmark.rounds,
    )
    target = privacy_target(
        dimension=model.dimension,
        population=population,
        cohort_size=experiment.cohort_size,
        rounds=benchmark.rounds,
        epsilon=benchmark.epsilon,
        delta=benchmark.delta or float(population**-1.1),
        clip=_CLIP,
        rotation=RotationName.PHASE,
    )
    if (
        benchmark.cohort_size is not None
    ):  # each client in one round, so that the server learns no more than others
        target = replace(target, against=SERVER, sampling=Sampling.ONCE)
    return System(
        name="private",
        label="private",
        workload=Workload(experiment, task, model, "own", benchmark.local, partial(benchmark.model, task)),
        work=calibrate(target),
        target=target,
        local=benchmark.local,
        step=benchmark.step,
    )


def _row(benchmark: Benchmark, private: RunHistory, plain: RunHistory) -> tuple[Cell, ...]:
    system = private.system
    plan, experiment = system.work, system.workload.experiment
    if not isinstance(plan, Plan):
        raise TypeError("a benchmark's private system has a plan")
    spent = {str(each.observer): each.epsilon for each in describe(system.target, plan).guarantees}
    return (
        benchmark.title,
        experiment.population,
        experiment.cohort_size,
        experiment.rounds,
        1 if benchmark.cohort_size else experiment.rounds,
        experiment.dimension,
        float(f"{system.target.effective_delta:.3g}"),
        *(round(spent[name], 3) for name in ("released", "server", "client", "alone")),
        system.bits,
        round(system.upload_bytes / 1e3, 1),
        *accuracy_cells(private),
        *accuracy_cells(plain)[:3],
    )


def _words(benchmark: Benchmark, private: RunHistory, plain: RunHistory) -> tuple[str, ...]:
    system = private.system
    first = (
        f"{system.workload.task.description} Test accuracy {spoken(private)} at epsilon {benchmark.epsilon:g} against "
        f"the server, {spoken(plain)} without privacy. {seeds_of([private, plain])}"
    )
    rates = " and ".join(
        f"{name} {', '.join(f'{rate:g}' for rate in tried)}"
        for name, tried in (("clients", benchmark.client_rates), ("the server", benchmark.server_rates))
    )
    second = (
        f"Model: {benchmark.model_name}, {system.workload.model.dimension:,} parameters, updates clipped to "
        f"{_CLIP:g}. {_settings(private)} Without privacy, unclipped: {_settings(plain)} Both were chosen by "
        f"validation accuracy with the first seed from the same grid of learning rates ({rates}); that choice is not "
        "accounted. Full cohorts, and nobody colludes."
    )
    return first, second


def _settings(run: RunHistory) -> str:
    local, step = asdict(run.system.local), asdict(run.system.step)
    if not step["second_moment"]:
        step.pop("second_rule")
    client, server = (
        ", ".join(f"{name} {value}" for name, value in each.items() if value) for each in (local, step)
    )
    return f"Clients: {client}. Server: {server}."


def _draw(figure: Figure, private: RunHistory, plain: RunHistory) -> None:
    axes = figure.subplots()
    for curve, hue, label in ((plain, Hue.PLAIN, "not private"), (private, Hue.OURS, "private")):
        low, high = zip(*curve.band, strict=True)
        axes.plot(list(curve.rounds), curve.validation, color=hue, label=f"{label}, validation")
        axes.fill_between(list(curve.rounds), low, high, color=hue, alpha=0.18, linewidth=0)
        axes.plot(len(curve.rounds), curve.test, "o", color=hue, label=f"{label}, test {curve.test:.1f} %")
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.set_xlabel("round", color=Ink.TEXT)
    axes.set_ylabel("accuracy, %", color=Ink.TEXT)
    axes.legend(frameon=False, loc="lower right", fontsize=8)
    style_axes(axes)
