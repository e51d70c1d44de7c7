"""The frontier where it matters most: accuracy and upload at equal epsilon against the server itself.

Each client takes part in one round, so the server's knowledge of the cohorts gives it nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from matplotlib.figure import Figure

from d2pfed.accounting import SERVER, ContinuousGaussian, Sampling
from d2pfed.learning import LocalTraining
from d2pfed.plan import MechanismName, calibrate, ideal_multiplier
from d2pfed.runs.report.plots import Ink
from d2pfed.training import ServerOptimizer
from reproduction.curves import Hue, style_axes
from reproduction.explicit import local_training, privacy_target, server_optimizer
from reproduction.presentation import records
from reproduction.published import INFIMNIST
from reproduction.result import Context, Result, Size, Table
from reproduction.runs import RunHistory, run_systems
from reproduction.systems import System, Workload

_EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
_QUICK_EPSILONS = (1.0,)
_ROUNDS, _COHORT, _MODEL = 50, 1000, "edges"
_CLIP = 1.0
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
    wanted = [(kind, epsilon) for epsilon in epsilons for kind in (*_NAMES, None)]
    systems = [_system(workload, kind, epsilon) for kind, epsilon in wanted]
    points = [
        ServerPoint(*(_NAMES[kind] if kind else (_TRUSTED, Hue.PLAIN)), epsilon, history)
        for (kind, epsilon), history in zip(wanted, run_systems(systems, context), strict=True)
    ]
    return Result(
        name="at-server",
        title="Accuracy and upload at equal epsilon against the server",
        table=_table(points),
        words=_words(points),
        ran=records([point.history for point in points]),
        reduced=""
        if context.size is Size.FULL
        else f"epsilon {_QUICK_EPSILONS[0]:g} of {len(_EPSILONS)} epsilons",
        draw=partial(_draw, points=points),
    )


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


def _table(points: Sequence[ServerPoint]) -> Table:
    columns = ("mechanism", "epsilon, server", "bits", "kB sent, once", "accuracy")
    rows = tuple(
        (
            point.label,
            point.epsilon,
            point.history.system.bits,
            round(point.kilobytes, 1),
            round(point.history.test, 2),
        )
        for point in points
    )
    return Table(columns, rows)


def _words(points: Sequence[ServerPoint]) -> tuple[str, ...]:
    one = {point.label: point for point in points if point.epsilon == 1.0}
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
        f"At epsilon 1 against the server, one seed: ours {ours.history.test:.1f} % with {ours.history.system.bits} "
        f"bits, the paper's common draw {paper.history.test:.1f} % with {paper.history.system.bits}, cpSGD "
        f"{cpsgd.history.test:.1f} % with {cpsgd.history.system.bits}; a trusted server, which has the same epsilon "
        f"towards everyone but itself, {trusted.history.test:.1f} % with 32."
    )
    second = (
        "The common draw protects nobody from a client of the cohort; the others do. Cohorts are full here and nobody "
        "colludes: the default job plans for a tenth of each. Accuracies on 1,000 digits differ by half a point by "
        "chance."
    )
    return first, second


def _draw(figure: Figure, points: Sequence[ServerPoint]) -> None:
    """Draw what a client sends at epsilon 1, with the accuracy beside it, which differs by little."""
    shown = [point for point in points if point.epsilon == _QUICK_EPSILONS[0]][::-1]
    axes = figure.subplots()
    axes.barh(range(len(shown)), [point.kilobytes for point in shown], color=[str(point.hue) for point in shown])
    for place, point in enumerate(shown):
        text = f"{point.history.test:.1f} %, {point.history.system.bits} bits"
        axes.text(point.kilobytes + 1, place, text, va="center", fontsize=9.5, color=Ink.TEXT)
    axes.set_yticks(range(len(shown)), [point.label for point in shown], fontsize=9.5, color=Ink.TEXT)
    axes.set_xlim(0, 1.3 * max(point.kilobytes for point in shown))
    axes.set_title(
        "Upload and test accuracy at epsilon 1 against the server", loc="left", fontsize=10, color=Ink.TEXT
    )
    axes.set_xlabel("kB that a client sends, once", color=Ink.TEXT)
    style_axes(axes)
