"""`scripts/reproduce`: the paper's figures and tables, made again."""

import signal
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from d2pfed.cli import options, run
from d2pfed.cli.show import err, out, print_json
from d2pfed.errors import ConfigError

if TYPE_CHECKING:
    from reproduction.exhibit import Exhibit

_RESULTS, _PUBLISHED = Path("reproduced"), Path("reproduction/results")


def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            help="An exhibit (fig1a, fig3, ...), all, or page: reproduction/README.md from its records."
        ),
    ],
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds and points; the plots say so.")] = False,
    only: Annotated[
        str | None, typer.Option(help="Of figure 1 one task alone: infimnist or cifar10. [default: both]")
    ] = None,
    data: options.DataDirectory = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Where results and runs are kept. [default: reproduced]"),
    ] = None,
    json: options.AsJson = False,
) -> None:
    """Reproduce a figure or table of the paper; the same command carries on what was stopped."""
    if name == "page":
        _write_page(folder or _PUBLISHED)
        return
    if only not in (None, "infimnist", "cifar10"):
        raise ConfigError(f"only must be infimnist or cifar10, got {only}")
    # Matplotlib takes a second to load, and no other command needs it.
    from reproduction.catalogue import chosen  # noqa: PLC0415
    from reproduction.exhibit import Place, Size, write  # noqa: PLC0415

    entries, results = chosen(name), folder or _RESULTS
    made = []
    with _Watcher.start(sum(entry.weight for entry in entries.values())) as watcher:
        for each, entry in entries.items():
            watcher.begin(each, entry.weight)
            size = Size.QUICK if quick else Size.FULL
            exhibit = entry.make(Place(folder=results, data=data, size=size, only=only, listen=watcher))
            command = f"scripts/reproduce {each}{' --quick' * quick}{f' --only {only}' if only else ''}"
            write(exhibit, results, command, datetime.now(UTC).date().isoformat())
            made.append(exhibit)
    if json:
        print_json({each.name: {"columns": each.table.columns, "rows": each.table.rows} for each in made})
        return
    for exhibit in made:
        _print(exhibit)
    out().print(f"Pictures, tables and records are in {results}.", soft_wrap=True)


def _write_page(folder: Path) -> None:
    from reproduction.page import page  # noqa: PLC0415 - matplotlib, as above

    target = folder.parent / "README.md"
    target.write_text(page(folder, folder.name))
    out().print(f"Wrote {target}.", soft_wrap=True)


def _print(exhibit: "Exhibit") -> None:
    table = Table(title=exhibit.title, title_justify="left")
    for column in exhibit.table.columns:
        table.add_column(column)
    for row in exhibit.table.rows:
        table.add_row(*(_shown(cell) for cell in row))
    out().print(table)
    for sentence in exhibit.words:
        out().print(sentence)
    if exhibit.reduced:
        out().print(f"Reduced: {exhibit.reduced}.")


def _shown(cell: str | float | None) -> str:
    if cell is None:
        return ""
    return f"{cell:.5g}" if isinstance(cell, float) else str(cell)


@dataclass
class _Watcher:
    """Shows how far all exhibits are, and turns the first Ctrl-C into a stop after the round."""

    bar: Progress
    name: str = ""
    weight: float = 0.0
    before: float = 0.0
    going: bool = True

    @staticmethod
    def start(total: float) -> "_Watcher":
        columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        bar = Progress(*columns, console=err())
        bar.add_task("", total=total)
        return _Watcher(bar)

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._stop)
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        signal.signal(signal.SIGINT, self._before)

    def begin(self, name: str, weight: float) -> None:
        """Go on to the next exhibit."""
        self.before += self.weight
        self.name, self.weight = name, weight
        self("beginning", 0.0)

    def __call__(self, what: str, fraction: float) -> None:
        done = self.before + self.weight * fraction
        self.bar.update(self.bar.task_ids[0], completed=done, description=f"{self.name}: {what}")
        if not self.going:
            raise KeyboardInterrupt

    def _stop(self, _signal: int, _frame: FrameType | None) -> None:
        self.going = False
        signal.signal(signal.SIGINT, signal.default_int_handler)
        err().print("Stopping after this round; the same command carries on. Ctrl-C again stops at once.")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(reproduce)
    run(app, "reproduce")
