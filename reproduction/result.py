"""What every figure and table of the paper comes to here: rows, a drawing, words, and a record of what was run."""

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from textwrap import fill

from matplotlib import style
from matplotlib.figure import Figure

from d2pfed.errors import ConfigError

Cell = str | int | float | None  # None: nothing to say, an empty cell
Draw = Callable[[Figure], None]
Report = Callable[[str, float], None]  # what is being done, and which fraction of the result is done

_SIZE = (7.2, 4.2)  # inches
_MOST_REPEATS = 100
_LETTERS = 110  # of small print that fit in a line


class Size(StrEnum):
    """How much of the paper's evaluation is run."""

    FULL = "full"
    QUICK = "quick"  # fewer rounds and points; every plot says what was reduced


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ConfigError(f"a row must have {len(self.columns)} cells, got {len(row)}")

    def csv(self) -> str:
        """Return the table as comma-separated text."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([self.columns, *self.rows])
        return text.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One figure or table, finished."""

    name: str
    title: str
    table: Table
    words: tuple[str, ...]  # what is seen, also where it differs from the paper
    ran: dict[str, object]  # settings and seeds of every run behind it
    reduced: str = ""  # what was left out to be quick; drawn on the plot
    draw: Draw | None = field(default=None, repr=False)  # None: a table alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Where and how a result is made."""

    folder: Path  # runs are kept in it, so that the same command carries on where it was stopped
    data: Path | None
    size: Size
    only: str | None = None  # the one task that is wanted of a figure over several
    repeats: int = 1  # seeds that every system is run from
    kept: bool = False  # from records alone
    report: Report = field(repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.repeats <= _MOST_REPEATS:
            raise ConfigError(f"repeats must be in [1, {_MOST_REPEATS}], got {self.repeats}")


Make = Callable[[Context], Result]


def write(result: Result, folder: Path, command: str, date: str) -> list[Path]:
    """Write NAME.csv, NAME.json and, of a drawing, NAME.png and NAME.svg; return what was written."""
    record = {
        "name": result.name,
        "title": result.title,
        "command": command,
        "date": date,
        "reduced": result.reduced,
        "words": result.words,
        "ran": result.ran,
        "columns": result.table.columns,
        "rows": result.table.rows,
    }
    files = {"csv": result.table.csv().encode(), "json": (json.dumps(record, indent=1) + "\n").encode()}
    if result.draw is not None:
        files |= _drawn(result, result.draw)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, content in files.items():
        path = folder / f"{result.name}.{kind}"
        path.write_bytes(content)
        written.append(path)
    return written


def _drawn(result: Result, draw: Draw) -> dict[str, bytes]:
    fixed = {"svg.hashsalt": result.name, "svg.fonttype": "none", "font.size": 9.0}
    with style.context(["default", fixed]):  # whatever a user's own configuration says
        figure = Figure(figsize=_SIZE, dpi=150, layout="constrained")
        draw(figure)
        if result.reduced:
            figure.supxlabel(fill(f"Reduced: {result.reduced}", _LETTERS), fontsize=8, color="#b34700")
        png, svg = io.BytesIO(), io.BytesIO()
        figure.savefig(png, format="png", metadata={"Software": None})
        figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return {"png": png.getvalue(), "svg": svg.getvalue()}
