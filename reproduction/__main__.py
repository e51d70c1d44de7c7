"""`scripts/reproduce`: the paper's figures and tables, made again."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from d2pfed.api.progress import Watcher
from d2pfed.cli import options, run
from d2pfed.cli.show import out, print_json
from d2pfed.errors import ConfigError

if TYPE_CHECKING:
    from reproduction.result import Result

_REPEATS, _QUICK_REPEATS = 3, 1
_RESULTS, _PUBLISHED = Path("reproduced"), Path("reproduction/results")
_BENCHMARKS = Path("docs/benchmarks.md")


def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            help="A figure, table or benchmark (fig1a, writers, ...), all, or page: both pages from their records."
        ),
    ],
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds and points; the plots say so.")] = False,
    only: Annotated[
        str | None, typer.Option(help="Of figure 1 one task alone: infimnist or cifar10. [default: both]")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Seeds that every training run is made from. [default: 3, with --quick 1]")
    ] = None,
    kept: Annotated[
        bool,
        typer.Option("--kept", help="Run nothing: draw from the records that are there, of what seeds they are."),
    ] = False,
    data: options.DataDirectory = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Where results and runs are kept. [default: reproduced]"),
    ] = None,
    json: options.AsJson = False,
) -> None:
    """Reproduce a figure or table of the paper; the same command resumes what was stopped."""
    if name == "page":
        _write_page(folder or _PUBLISHED)
        return
    if only not in (None, "infimnist", "cifar10"):
        raise ConfigError(f"only must be infimnist or cifar10, got {only}")
    # Matplotlib takes a second to load, and no other command needs it.
    from reproduction.catalogue import Entry, select  # noqa: PLC0415
    from reproduction.result import Context, Size, write  # noqa: PLC0415

    entries, results = select(name), folder or _RESULTS
    made, before = [], 0.0
    all_weights = sum(entry.weight for entry in entries.values())
    with Watcher(100, "percent") as watcher:
        for each, entry in entries.items():

            def report(
                what: str, fraction: float, each: str = each, entry: Entry = entry, before: float = before
            ) -> None:
                watcher.show(int(100 * (before + entry.weight * fraction) / all_weights), f"{each}: {what}")
                if watcher.caught:
                    raise SystemExit(128 + watcher.caught)

            size = Size.QUICK if quick else Size.FULL
            count = repeats if repeats is not None else _QUICK_REPEATS if quick else _REPEATS
            context = Context(
                folder=results, data=data, size=size, only=only, repeats=count, kept=kept, report=report
            )
            result = entry.make(context)
            chosen = f"{f' --only {only}' if only else ''}{f' --repeats {repeats}' if repeats else ''}"
            command = f"scripts/reproduce {each}{' --quick' * quick}{chosen}{' --kept' * kept}"
            write(result, results, command, datetime.now(UTC).date().isoformat())
            made.append(result)
            before += entry.weight
    if json:
        print_json({each.name: {"columns": each.table.columns, "rows": each.table.rows} for each in made})
        return
    for result in made:
        _print(result)
    out().print(f"Pictures, tables and records are in {results}.", soft_wrap=True)


def _write_page(folder: Path) -> None:
    from reproduction.page import benchmarks, page  # noqa: PLC0415 - matplotlib, as above

    beside = folder.parent / "benchmarks.md"
    texts = {
        folder.parent / "README.md": page(folder, folder.name),
        _BENCHMARKS if folder == _PUBLISHED else beside: benchmarks(folder),
    }
    for target, text in texts.items():
        if text is not None:
            target.write_text(text)
            out().print(f"Wrote {target}.", soft_wrap=True)


def _print(result: "Result") -> None:
    table = Table(title=result.title, title_justify="left")
    for column in result.table.columns:
        table.add_column(column)
    for row in result.table.rows:
        table.add_row(*(_shown(cell) for cell in row))
    out().print(table)
    for sentence in result.words:
        out().print(sentence)
    if result.reduced:
        out().print(f"Reduced: {result.reduced}.")


def _shown(cell: str | float | None) -> str:
    if cell is None:
        return ""
    return f"{cell:.5g}" if isinstance(cell, float) else str(cell)


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(reproduce)

if __name__ == "__main__":
    run(app, "reproduce")
