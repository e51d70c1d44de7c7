"""Three readings of a run: its epsilon as published, the same run accounted truthfully, and ours at that epsilon."""

import math
from collections.abc import Sequence

from reproduction.curves import Hue, Line
from reproduction.history import RunHistory
from reproduction.published import EndPoint
from reproduction.result import Cell, Table

NO_BOUND = "void"  # in place of an epsilon
INFINITE = "infinite"  # the same, where the accountant finds no bound
_LARGE = 999.5  # from here on numbers are written out, with commas
_NEAR_GUESSING = 2.0  # points
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
        epsilon_cell(curve.published[-1]) if curve.published else None,
        NO_BOUND if system.as_coded else epsilon_cell(curve.released[-1]) if curve.released else None,
        NO_BOUND if system.as_coded else None if curve.server is None else epsilon_cell(curve.server),
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
    low, high = (f"{value:.1f}" for value in curve.spread)
    if len(curve.repeats) == 1:
        return f"{curve.test:.1f} %"
    return f"{curve.test:.1f} % from every seed" if low == high else f"{curve.test:.1f} % ({low} to {high})"


def guessing(curve: RunHistory) -> str:
    """Say so, in brackets, if the mean is no better than guessing; nothing otherwise."""
    chance = 100 / curve.system.workload.task.classes
    return f" (guessing gives {chance:g} %)" if curve.test <= chance + _NEAR_GUESSING else ""


def spoken_number(value: float) -> str:
    """Return a number as a sentence has it: three significant digits, none of them behind an exponent."""
    if math.isinf(value):
        return INFINITE
    return f"{float(f'{value:.3g}'):,.0f}" if abs(value) >= _LARGE else f"{value:.3g}"


def seeds_of(curves: Sequence[RunHistory], *, ranges: bool = True) -> str:
    """Say what the numbers of a sentence are of; `ranges`: it has the lowest and the highest in brackets."""
    counts = {len(curve.repeats) for curve in curves}
    if counts == {1}:
        return "One seed each: how much another seed would change is not known."
    several = " to ".join(f"{count}" for count in sorted({min(counts), max(counts)}))
    return f"Means of {several} seeds" + ("; in brackets the lowest and the highest." if ranges else ".")


def compared(first: RunHistory, second: RunHistory, name: str) -> str:
    """Say how a system stands to a second, of that name, as far as seeds tell: apart only if no runs overlap."""
    if min(len(first.repeats), len(second.repeats)) == 1:
        return f"not ranked against {name}, for want of seeds"
    (low, high), (other_low, other_high) = first.spread, second.spread
    if low > other_high:
        return f"above {name} in every run"
    return f"below {name} in every run" if high < other_low else f"not told apart from {name}: their runs overlap"


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
            "epsilon_as_published": [epsilon_cell(value) for value in curve.published],
            "epsilon_released": [epsilon_cell(value) for value in curve.released],
            "test_accuracy": [round(value, 3) for value in curve.tests],
        }
        for curve in curves
    }


def epsilon_cell(value: float) -> Cell:
    """Return an epsilon for a table or a record, in which JSON has no infinity."""
    return significant(value) if math.isfinite(value) else INFINITE


def significant(value: float, digits: int = 6) -> float:
    """Return the value to so many significant digits."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else value
