"""All mechanisms at equal true epsilon: what accuracy and error each reaches, and how many bits it takes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from d2pfed.plan import MechanismName, Plan
from d2pfed.runs.report.plots import Ink
from reproduction.curves import Hue, Line, Panel, XScale, draw_axes, legend, style_axes
from reproduction.history import RunHistory
from reproduction.presentation import accuracy_cells, records, seeds_of, significant
from reproduction.published import INFIMNIST, MARGIN
from reproduction.result import Cell, Context, Result, Size, Table
from reproduction.runs import run_systems
from reproduction.systems import System, central, planned, relative_error, with_smaller_lr
from reproduction.workload import Workload, reductions

_EPSILONS = (0.05, 1.0, 4.0)
_QUICK_EPSILONS = (0.05, 1.0)
_TWO_BYTES = 16
_GREAT = 1.2  # an error over a trusted server's from which on a smaller step is tried too
_HUES = {
    "central Gaussian": Hue.PLAIN,
    MechanismName.CENTERED: Hue.OURS,
    MechanismName.SHARED: Hue.D2PFED,
    MechanismName.DDGAUSS: Hue.FIFTH,
    MechanismName.SKELLAM: Hue.SIXTH,
    MechanismName.BINOMIAL: Hue.CPSGD,
}
_QUICK_KINDS = (MechanismName.CENTERED, MechanismName.SHARED, MechanismName.SKELLAM, MechanismName.BINOMIAL)
_NAMES = {MechanismName.SHARED: "shared (D2P-Fed)", MechanismName.BINOMIAL: "binomial (cpSGD)"}
_ROUNDING = (_NAMES[MechanismName.SHARED], MechanismName.DDGAUSS)  # whose error comes near a trusted server's


@dataclass(frozen=True, slots=True)
class Point:
    """One mechanism at one epsilon: its run, its error beside a trusted server's, and the bits it would need."""

    kind: str
    epsilon: float
    curve: RunHistory
    error: float  # root mean square error of the mean over a trusted server's, at the bits that were run
    least_bits: int  # the fewest at which rounding adds no more than 2 % to the error


def make(context: Context) -> Result:
    """Return the frontier of all mechanisms on INFIMNIST."""
    full = context.size is Size.FULL
    kinds, epsilons = (tuple(MechanismName), _EPSILONS) if full else (_QUICK_KINDS, _QUICK_EPSILONS)
    return frontier(Workload.load(INFIMNIST, context), context, kinds, epsilons)


def frontier(
    workload: Workload, context: Context, kinds: Sequence[MechanismName], epsilons: Sequence[float]
) -> Result:
    """Run each mechanism, cpSGD among them, and a trusted server at each epsilon."""
    wanted = [(epsilon, kind) for epsilon in epsilons for kind in (*kinds, None)]
    systems = [_system(workload, kind, epsilon) for epsilon, kind in wanted]
    # Where a mechanism's noise is great a smaller step may serve better: the better of two counts, by validation.
    second = [
        with_smaller_lr(system, relative_error(system)) for system in systems if relative_error(system) > _GREAT
    ]
    curves = run_systems([*systems, *second], context)
    points = [
        Point(curve.system.label, epsilon, curve, *_error_and_bits(workload, kind, epsilon, curve.system))
        for (epsilon, kind), curve in zip(wanted, _better(curves, len(systems)), strict=True)
    ]
    reduced = reductions(context, INFIMNIST)
    return Result(
        name="frontier",
        title="The frontier: accuracy, epsilon and bits of every mechanism",
        table=_table(points),
        words=_words(points),
        ran=records(curves),
        reduced=f"{reduced}; {len(kinds)} mechanisms of {len(MechanismName)}, {len(epsilons)} epsilons"
        if reduced
        else "",
        draw=partial(_draw, points=points),
    )


def _better(curves: Sequence[RunHistory], first: int) -> list[RunHistory]:
    """Return the first curves, or of those that were run again with another step the better run."""
    again = {curve.system.name: curve for curve in curves[first:]}
    return [
        max(curve, again.get(curve.system.name, curve), key=lambda each: each.validation[-1])
        for curve in curves[:first]
    ]


def _system(workload: Workload, kind: MechanismName | None, epsilon: float) -> System:
    if kind is None:
        return central(workload, epsilon)
    # Ours takes as few bits as serve; the others take the two bytes that they can make use of.
    bits = None if kind is MechanismName.CENTERED else _TWO_BYTES
    return planned(workload, kind, epsilon, bits=bits, label=_NAMES.get(kind, str(kind)))


def _error_and_bits(
    workload: Workload, kind: MechanismName | None, epsilon: float, system: System
) -> tuple[float, int]:
    least = system.bits if kind is None else planned(workload, kind, epsilon).bits
    return relative_error(system), least


def _table(points: Sequence[Point]) -> Table:
    columns = (
        "mechanism",
        "true epsilon, released models",
        "bits run",
        "MB sent",
        "accuracy",
        "lowest",
        "highest",
        "seeds",
        "points above cpSGD",
        "error over a trusted server's",
        "fewest bits for its error within 2 %",
    )
    return Table(columns, tuple(_row(point, _cpsgd(points)) for point in points))


def _row(point: Point, cpsgd: Mapping[float, Point]) -> tuple[Cell, ...]:
    curve = point.curve
    return (
        point.kind,
        significant(curve.released[-1], 4),
        curve.system.bits,
        significant(curve.megabytes[-1], 4),
        *accuracy_cells(curve),
        round(curve.test - cpsgd[point.epsilon].curve.test, 2),
        round(point.error, 3),
        point.least_bits,
    )


def _cpsgd(points: Sequence[Point]) -> dict[float, Point]:
    return {point.epsilon: point for point in points if point.kind == _NAMES[MechanismName.BINOMIAL]}


def _words(points: Sequence[Point]) -> tuple[str, str]:
    cpsgd = _cpsgd(points)
    loose = max(cpsgd.values(), key=lambda point: point.error)
    centered = [point for point in points if point.kind == MechanismName.CENTERED]
    ours, theirs = (_leads(points, kind) for kind in (str(MechanismName.CENTERED), _NAMES[MechanismName.SHARED]))
    shrinks = len(ours) > 1 and ours == sorted(ours, reverse=True) and len(set(ours)) == len(ours)
    first = (
        f"At equal true epsilons of {_listed(cpsgd)}, with {_TWO_BYTES} bits a coordinate for cpSGD and D2P-Fed's "
        f"shared noise and {_span([point.curve.system.bits for point in centered])} for ours, ours is at "
        f"{_signed(ours)} points from cpSGD and shared noise at {_signed(theirs)}; the paper has {MARGIN:+g}, at "
        f"epsilons that are not equal.{' The lead of ours shrinks as epsilon grows.' * shrinks} "
        f"{seeds_of([point.curve for point in points], ranges=False)} Where a mechanism's error is more than "
        f"{_GREAT:g} times a trusted server's, a smaller step of the server was tried too, and the better of both by "
        f"validation accuracy is shown."
    )
    second = (
        f"cpSGD's error is up to {loose.error:.1f} times a trusted server's: its epsilon is bounded by its own theorem "
        f"and advanced composition, and a tighter bound might do with less of the same noise. Independent noise "
        f"around real centres needs {_span([point.least_bits for point in centered])} bits for the error that rounding "
        f"mechanisms reach with {_span([point.least_bits for point in points if point.kind in _ROUNDING])}."
    )
    return first, second


def _span(values: Sequence[int]) -> str:
    return " to ".join(str(value) for value in sorted({min(values), max(values)}))


def _leads(points: Sequence[Point], kind: str) -> list[float]:
    """Return by how many points a mechanism is above cpSGD, by epsilon."""
    cpsgd = _cpsgd(points)
    own = [point for point in points if point.kind == kind]
    return [round(point.curve.test - cpsgd[point.epsilon].curve.test, 1) for point in own]


def _listed(values: Iterable[float]) -> str:
    return " / ".join(f"{value:g}" for value in values)


def _signed(values: Iterable[float]) -> str:
    return " / ".join(f"{value:+.1f}" for value in values)


def _draw(figure: Figure, points: Sequence[Point]) -> None:
    left, right = figure.subplots(1, 2)
    kinds = list(dict.fromkeys(point.kind for point in points))
    lines = tuple(
        Line(
            label=kind,
            hue=_hue(kind),
            xs=[point.epsilon for point in points if point.kind == kind],
            ys=[point.curve.test for point in points if point.kind == kind],
            band=[point.curve.spread for point in points if point.kind == kind],
        )
        for kind in kinds
    )
    panel = Panel(
        title="INFIMNIST, test accuracy",
        xlabel="true epsilon of the released models",
        lines=lines,
        scale=XScale.EPSILON,
    )
    draw_axes(left, panel)
    for line in lines:
        left.plot(line.xs, line.ys, "o", color=line.hue, markersize=5, markeredgecolor="white")
    epsilons = sorted({point.epsilon for point in points})
    left.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    left.set_xlim(min(epsilons) / 1.6, max(epsilons) * 1.6)
    left.set_ylim(max(0, min(point.curve.spread[0] for point in points) - 5), 100)
    legend(figure, [panel])
    _draw_errors(right, points)


def _draw_errors(axes: Axes, points: Sequence[Point]) -> None:
    """Draw how far each mechanism is from a trusted server, by the bits that its error takes."""
    axes.axhline(1.0, color=Hue.PLAIN, linestyle="-.", linewidth=1.4)
    distributed = [point for point in points if isinstance(point.curve.system.work, Plan)]
    kinds = list(dict.fromkeys(point.kind for point in distributed))
    for point in distributed:
        beside = 0.12 * (
            kinds.index(point.kind) - (len(kinds) - 1) / 2
        )  # so that equal ones do not hide each other
        axes.plot(
            point.least_bits + beside,
            point.error,
            "o",
            color=_hue(point.kind),
            markersize=6,
            markeredgecolor="white",
        )
    axes.set_title("error by bits, at all these epsilons", loc="left", fontsize=9.5, color=Ink.TEXT)
    axes.set_xlabel("fewest bits a coordinate", color=Ink.TEXT)
    axes.set_ylabel("error over a trusted server's", color=Ink.TEXT)
    axes.set_ylim(0, 1.1 * max(point.error for point in distributed))
    style_axes(axes)


def _hue(kind: str) -> Hue:
    named = {
        _NAMES.get(key, str(key)) if isinstance(key, MechanismName) else key: hue for key, hue in _HUES.items()
    }
    return named[kind]
