"""Three readings of a run: its epsilon as published, the same run accounted truthfully, and ours at that epsilon."""

import math
from collections.abc import Sequence

from reproduction.curves import Hue, Line
from reproduction.history import RunHistory
from reproduction.published import EndPoint
from reproduction.result import Cell, Table

NO_BOUND = "void"  # in place of an epsilon
COLUMNS = (
    "experiment",
    "system",
    "epsilon as published",
    "true epsilon, released models",
    "true epsilon, server",
    "bits",
    "MB sent",
    "accuracy",
    "lowest",
    "highest",
    "seeds",
    "paper's epsilon",
    "paper's accuracy",
)


def table_of(pairs: Sequence[tuple[RunHistory, EndPoint | None]]) -> Table:
    """Return one row a run: all readings of its end, its cost, its test accuracy, and what the paper has."""
    return Table(COLUMNS, tuple(_row(curve, end) for curve, end in pairs))


def _row(curve: RunHistory, end: EndPoint | None) -> tuple[Cell, ...]:
    system = curve.system
    return (
        system.workload.experiment.name,
        system.label,
        significant(curve.published[-1]) if curve.published else None,
        NO_BOUND if system.as_coded else significant(curve.released[-1]) if curve.released else None,
        NO_BOUND if system.as_coded else None if curve.server is None else significant(curve.server),
        system.bits,
        significant(curve.megabytes[-1]),
        *accuracy_cells(curve),
        None if end is None or end.epsilon is None else significant(end.epsilon),
        None if end is None else end.accuracy,
    )


def accuracy_cells(curve: RunHistory) -> tuple[Cell, ...]:
    """Return mean, lowest and highest test accuracy, and how many seeds they are of."""
    low, high = curve.spread
    return round(curve.test, 2), round(low, 2), round(high, 2), len(curve.repeats)


def spoken(curve: RunHistory) -> str:
    """Return the test accuracy as a sentence has it: the mean, and of several seeds the lowest and the highest."""
    low, high = curve.spread
    return f"{curve.test:.1f} %" + (f" ({low:.1f} to {high:.1f})" if len(curve.repeats) > 1 else "")


def seeds_of(curves: Sequence[RunHistory]) -> str:
    """Say what the numbers of a sentence are of."""
    count = min(len(curve.repeats) for curve in curves)
    if count == 1:
        return "One seed each, so that differences of a point or two say nothing."
    return f"Means of {count} seeds; in brackets the lowest and the highest."


def compared(first: RunHistory, second: RunHistory) -> str:
    """Say how two systems stand as far as their seeds tell: above or below only if all runs of one are."""
    if min(len(first.repeats), len(second.repeats)) == 1:
        return "not to be ranked by one seed against"
    (low, high), (other_low, other_high) = first.spread, second.spread
    if low > other_high:
        return "above, in every run,"
    return "below, in every run," if high < other_low else "not told apart by these runs from"


def published_line(curve: RunHistory, hue: Hue, label: str) -> Line:
    """Return the runs under the epsilon that the paper would print."""
    return Line(
        label=label,
        hue=hue,
        xs=curve.published,
        ys=curve.validation,
        band=curve.band,
        dash="--",
        tests=curve.tests,
    )


def true_line(curve: RunHistory, hue: Hue, label: str) -> Line:
    """Return the runs under the epsilon that their released models truly cost."""
    return Line(
        label=label,
        hue=hue,
        xs=curve.released,
        ys=curve.validation,
        band=curve.band,
        tests=curve.tests,
        server=curve.server,
    )


def level_line(curve: RunHistory, hue: Hue, label: str) -> Line:
    """Return the end of runs without epsilon, as a line across the plot."""
    return Line(label=label, hue=hue, xs=(), ys=(curve.test,), band=(curve.spread,), dash="-.")


def records(curves: Sequence[RunHistory]) -> dict[str, object]:
    """Return what was run and every point that is drawn, for the result's JSON."""
    return {
        f"{curve.system.workload.experiment.name}: {curve.system.label}": curve.record
        | {
            "validation_accuracy": [[round(value, 3) for value in each.validation] for each in curve.repeats],
            "epsilon_as_published": [significant(value) for value in curve.published],
            "epsilon_released": [significant(value) for value in curve.released],
            "test_accuracy": [round(value, 3) for value in curve.tests],
        }
        for curve in curves
    }


def significant(value: float, digits: int = 6) -> float:
    """Return the value to so many significant digits."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else value
