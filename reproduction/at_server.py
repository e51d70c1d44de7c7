"""The frontier where it matters most: accuracy and upload at equal epsilon against the server itself.

Each client takes part in one round, so the server's knowledge of the cohorts gives it nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from d2pfed.accounting import SERVER, ContinuousGaussian, Sampling
from d2pfed.learning import LocalTraining
from d2pfed.plan import MechanismName, calibrate, ideal_multiplier
from d2pfed.runs.report.plots import Ink
from d2pfed.training import ServerOptimizer
from reproduction.curves import Hue, style_axes
from reproduction.explicit import local_training, privacy_target, server_optimizer
from reproduction.folds import folded
from reproduction.history import RunHistory
from reproduction.presentation import accuracy_cells, compared, records, seeds_of, spoken
from reproduction.published import INFIMNIST
from reproduction.result import Context, Result, Size, Table
from reproduction.runs import run_systems
from reproduction.systems import System, relative_error
from reproduction.workload import Workload

_EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
_QUICK_EPSILONS = (1.0,)
_ROUNDS, _COHORT, _MODEL = 50, 1000, "edges"
_CLIP = 1.0
_FOLDED = 8  # an eighth of the numbers, 2,048 as in the default job; at epsilon 1 alone
_LOCAL: LocalTraining = local_training(lr=0.2, epochs=3, batch_size=10)
_STEP: ServerOptimizer = server_optimizer(lr=0.8, momentum=0.8, averaging=0.8)
_TRUSTED = "a trusted server, float32"
_NAMES = {
    MechanismName.CENTERED: ("ours (centered)", Hue.OURS),
    MechanismName.SHARED: ("the paper's (shared)", Hue.D2PFED),
    MechanismName.DDGAUSS: ("ddgauss", Hue.FIFTH),
    MechanismName.SKELLAM: ("skellam", Hue.SIXTH),
    MechanismName.BINOMIAL: ("cpSGD (binomial)", Hue.CPSGD),
}


@dataclass(frozen=True, slots=True)
class ServerPoint:
    """One mechanism at one epsilon against the server."""

    label: str
    hue: Hue
    epsilon: float
    history: RunHistory

    @property
    def kilobytes(self) -> float:
        """What a client sends in its one round."""
        return self.history.system.upload_bytes / 1e3


def make(context: Context) -> Result:
    """Return accuracy and upload of each mechanism at equal epsilon against the server."""
    own = replace(INFIMNIST, name="SERVER", cohort_size=_COHORT, rounds=_ROUNDS, model=_MODEL)
    workload = Workload.load(own, replace(context, size=Size.FULL))
    epsilons = _EPSILONS if context.size is Size.FULL else _QUICK_EPSILONS
    return at_server(workload, context, epsilons)


def at_server(workload: Workload, context: Context, epsilons: Sequence[float]) -> Result:
    """Run every mechanism and a trusted server at these epsilons, and the same training without noise or clip."""
    wanted = [(kind, epsilon) for epsilon in epsilons for kind in (*_NAMES, None)]
    systems = [_system(workload, kind, epsilon) for kind, epsilon in wanted]
    compressed = folded(systems[wanted.index((MechanismName.CENTERED, _QUICK_EPSILONS[0]))], _FOLDED)
    clear = replace(systems[0], name="clear", label="not private", work=None)
    *histories, few, plain = run_systems([*systems, compressed, clear], context)
    points = [
        ServerPoint(*(_NAMES[kind] if kind else (_TRUSTED, Hue.PLAIN)), epsilon, history)
        for (kind, epsilon), history in zip(wanted, histories, strict=True)
    ]
    points.append(ServerPoint(few.system.label, Hue.NORM_ONE, _QUICK_EPSILONS[0], few))
    missing = [f"{epsilon:g}" for epsilon in _EPSILONS if epsilon not in epsilons]
    return Result(
        name="at-server",
        title="Accuracy and upload at equal epsilon against the server",
        table=_table(points, plain),
        words=_words(points, plain),
        ran=records_by_epsilon(points, plain),
        reduced=f"no epsilon {', '.join(missing)}" if missing else "",
        draw=partial(_draw, points=points, plain=plain),
    )


def records_by_epsilon(points: Sequence[ServerPoint], plain: RunHistory) -> dict[str, object]:
    """Return what was run; the labels of mechanisms repeat from epsilon to epsilon."""
    found: dict[str, object] = {}
    for point in points:
        for label, record in records([point.history]).items():
            found[f"{label}, epsilon {point.epsilon:g}"] = record
    return found | records([plain])


def _system(workload: Workload, kind: MechanismName | None, epsilon: float) -> System:
    experiment = workload.experiment
    target = replace(
        privacy_target(
            dimension=workload.model.dimension,
            population=experiment.population,
            cohort_size=experiment.cohort_size,
            rounds=experiment.rounds,
            epsilon=epsilon,
            delta=float(experiment.population**-1.1),
            mechanism=kind or MechanismName.CENTERED,
            clip=_CLIP,
        ),
        against=SERVER,
        sampling=Sampling.ONCE,
    )
    noise = ContinuousGaussian(2 * _CLIP * ideal_multiplier(target), _CLIP) if kind is None else calibrate(target)
    return System(
        name=f"{kind or 'gaussian'}-{epsilon:g}",
        label=_NAMES[kind][0] if kind else _TRUSTED,
        workload=workload,
        work=noise,
        target=target,
        local=_LOCAL,
        step=_STEP,
    )


def _table(points: Sequence[ServerPoint], plain: RunHistory) -> Table:
    columns = (
        *("mechanism", "epsilon, server", "bits", "kB sent, once", "error over a trusted server's"),
        *("accuracy", "lowest", "highest", "seeds"),
    )
    rows = tuple(
        (
            point.label,
            point.epsilon,
            point.history.system.bits,
            round(point.kilobytes, 1),
            round(relative_error(point.history.system), 3),
            *accuracy_cells(point.history),
        )
        for point in points
    )
    last = (plain.system.label, None, 32, round(plain.system.upload_bytes / 1e3, 1), None, *accuracy_cells(plain))
    return Table(columns, (*rows, last))


def _words(points: Sequence[ServerPoint], plain: RunHistory) -> tuple[str, ...]:
    one = {point.label: point.history for point in points if point.epsilon == _QUICK_EPSILONS[0]}
    ours, paper, cpsgd, trusted = (
        one[name]
        for name in (
            _NAMES[MechanismName.CENTERED][0],
            _NAMES[MechanismName.SHARED][0],
            _NAMES[MechanismName.BINOMIAL][0],
            _TRUSTED,
        )
    )
    first = (
        f"At epsilon 1 against the server: ours {spoken(ours)} with {ours.system.bits} bits, the paper's common draw "
        f"{spoken(paper)} with {paper.system.bits}, cpSGD {spoken(cpsgd)} with {cpsgd.system.bits}; a trusted server, "
        f"which has the same epsilon towards everyone but itself, {spoken(trusted)} with 32; without privacy "
        f"{spoken(plain)}. Ours is {compared(ours, cpsgd, 'cpSGD')}. {seeds_of([point.history for point in points])}"
    )
    second = (
        "The common draw protects nobody from a client of the cohort; the others do, by the noise that this client did "
        "not draw itself. Cohorts are full here and nobody colludes; the default job plans for a tenth of the clients "
        "dropping out and a tenth colluding."
    )
    epsilons = sorted({point.epsilon for point in points})
    if len(epsilons) == 1:
        return first, second
    own = [point.history for point in points if point.label == _NAMES[MechanismName.CENTERED][0]]
    ends = [point.history.test for point in points]
    third = (
        f"All {len(points)} accuracies lie between {min(ends):.1f} and {max(ends):.1f} %: with cohorts of "
        f"{ours.system.workload.experiment.cohort_size:,} the mechanisms differ by what they send. "
        f"Ours by epsilon {' / '.join(f'{epsilon:g}' for epsilon in epsilons)}: "
        f"{' / '.join(spoken(each) for each in own)}, with {' / '.join(str(each.system.bits) for each in own)} bits."
    )
    return first, third, second


def _draw(figure: Figure, points: Sequence[ServerPoint], plain: RunHistory) -> None:
    """Draw accuracy by epsilon, where there are several, beside what a client sends at epsilon 1."""
    several = len({point.epsilon for point in points}) > 1
    if several:
        left, right = figure.subplots(1, 2, width_ratios=(1.4, 1))
        _draw_accuracies(left, points, plain)
        entries, labels = left.get_legend_handles_labels()
        figure.legend(entries, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=7.5)
    else:
        right = figure.subplots()
    _draw_uploads(right, [point for point in points if point.epsilon == _QUICK_EPSILONS[0]][::-1])


def _draw_accuracies(axes: Axes, points: Sequence[ServerPoint], plain: RunHistory) -> None:
    labels = list(dict.fromkeys(point.label for point in points))
    for place, label in enumerate(labels):
        own = [point for point in points if point.label == label]
        beside = 1 + 0.025 * (place - len(labels) / 2)  # so that bars of equal epsilon do not hide each other
        low, high = zip(*(point.history.spread for point in own), strict=True)
        heights = [point.history.test for point in own]
        errors = [
            [height - end for height, end in zip(heights, low, strict=True)],
            [end - height for height, end in zip(heights, high, strict=True)],
        ]
        axes.errorbar(
            [point.epsilon * beside for point in own],
            heights,
            yerr=errors,
            fmt="o-",
            color=own[0].hue,
            label=label,
            markersize=4,
            capsize=2,
            linewidth=1.2,
        )
    axes.axhline(plain.test, color=Hue.PLAIN, linestyle="-.", linewidth=1.2, label="not private")
    axes.set_xscale("log")
    epsilons = sorted({point.epsilon for point in points})
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("epsilon against the server", color=Ink.TEXT)
    axes.set_ylabel("test accuracy, %", color=Ink.TEXT)
    lowest = min(point.history.spread[0] for point in points)
    axes.set_ylim(max(0.0, 5 * (lowest // 5) - 5), 100)  # a closer look would show chance alone
    axes.set_title("Accuracy", loc="left", fontsize=9.5, color=Ink.TEXT)
    style_axes(axes)


def _draw_uploads(axes: Axes, shown: Sequence[ServerPoint]) -> None:
    axes.barh(range(len(shown)), [point.kilobytes for point in shown], color=[str(point.hue) for point in shown])
    for place, point in enumerate(shown):
        text = f"{point.history.test:.1f} %, {point.history.system.bits} bits"
        axes.text(point.kilobytes + 1, place, text, va="center", fontsize=8.5, color=Ink.TEXT)
    axes.set_yticks(range(len(shown)), [point.label for point in shown], fontsize=8.5, color=Ink.TEXT)
    axes.set_xlim(0, 1.9 * max(point.kilobytes for point in shown))
    axes.set_title("Upload at epsilon 1", loc="left", fontsize=9.5, color=Ink.TEXT)
    axes.set_xlabel("kB that a client sends, once", color=Ink.TEXT)
    style_axes(axes)
    axes.grid(visible=False, axis="y")
