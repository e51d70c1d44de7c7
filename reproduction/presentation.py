"""Three readings of a run: its epsilon as published, the same run accounted truthfully, and ours at that epsilon."""

import math
from collections.abc import Sequence

from reproduction.curves import Hue, Line
from reproduction.published import EndPoint
from reproduction.result import Cell, Table
from reproduction.runs import RunHistory

COLUMNS = (
    "experiment",
    "system",
    "epsilon as published",
    "true epsilon, released models",
    "true epsilon, server",
    "bits",
    "MB sent",
    "accuracy",
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
        significant(curve.released[-1]) if curve.released else None,
        None if curve.server is None else significant(curve.server),
        system.bits,
        significant(curve.megabytes[-1]),
        round(curve.test, 2),
        None if end is None or end.epsilon is None else significant(end.epsilon),
        None if end is None else end.accuracy,
    )


def published_line(curve: RunHistory, hue: Hue, label: str) -> Line:
    """Return the run under the epsilon that the paper would print."""
    return Line(label=label, hue=hue, xs=curve.published, ys=curve.validation, dash="--", test=curve.test)


def true_line(curve: RunHistory, hue: Hue, label: str) -> Line:
    """Return the run under the epsilon that its released models truly cost."""
    return Line(label=label, hue=hue, xs=curve.released, ys=curve.validation, test=curve.test, server=curve.server)


def level_line(curve: RunHistory, hue: Hue, label: str) -> Line:
    """Return the end of a run without epsilon, as a line across the plot."""
    return Line(label=label, hue=hue, xs=(), ys=(curve.test,), dash="-.")


def records(curves: Sequence[RunHistory]) -> dict[str, object]:
    """Return what was run and every point that is drawn, for the result's JSON."""
    return {
        f"{curve.system.workload.experiment.name}: {curve.system.label}": curve.record
        | {
            "validation_accuracy": [round(value, 3) for value in curve.validation],
            "epsilon_as_published": [significant(value) for value in curve.published],
            "epsilon_released": [significant(value) for value in curve.released],
            "test_accuracy": round(curve.test, 3),
        }
        for curve in curves
    }


def significant(value: float, digits: int = 6) -> float:
    """Return the value to so many significant digits."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else value
