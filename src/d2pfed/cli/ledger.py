"""`d2pfed ledger`: what was released and what it cost."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from d2pfed.accounting import observer_named, round_up
from d2pfed.accounting.filters import CONDITION
from d2pfed.cli.options import AsJson, SectionedCommand, application, option
from d2pfed.cli.show import delta_as_given, out, print_json
from d2pfed.errors import BudgetExceeded, ConfigError
from d2pfed.fields import PRIVACY
from d2pfed.ledger import Budget, ChargedRun, Ledger, RowKind, read_budget, read_rows, verify
from d2pfed.ledger.budget import decode_body
from d2pfed.plan import decode_plan
from d2pfed.round import run_plan

app = application("Show, verify or create the record of releases.")

File = Annotated[Path, typer.Argument(help="The ledger, or a run's directory.")]


@app.command("show", cls=SectionedCommand)
def show(
    path: File,
    plot: Annotated[Path | None, typer.Option(help="Write a plot of epsilon by run (PNG or SVG).")] = None,
    json: AsJson = False,
) -> None:
    """Print every row: which run was charged, which attempts were reserved, committed or void."""
    file = _file(path)
    rows, budget = read_rows(file), read_budget(file)
    if plot is not None:
        from d2pfed.runs.report.plots import Ink, Line, Plot, draw  # noqa: PLC0415 - slow to load

        charged = tuple(row.epsilon for row in rows if row.kind is RowKind.BEGIN)
        if not charged or plot.suffix not in (".png", ".svg"):
            text = (
                f"a plot needs a run and a file name that ends in .png or .svg, got {len(charged)} runs and {plot}"
            )
            raise ConfigError(text)
        spent = Line(f"charged, {CONDITION}", Ink.MAIN, charged, tuple(map(float, range(1, len(charged) + 1))))
        lines = (Line("budget", Ink.LIMIT, (budget.epsilon,)), spent)
        title = f"Epsilon charged against {budget.observer}"
        drawing = draw(Plot(name="ledger", title=title, across="run", lines=lines))
        plot.write_bytes(drawing.png if plot.suffix == ".png" else drawing.svg.encode())
    told = []
    for row in rows:
        key, release = row.key, row.release if row.kind is RowKind.COMMIT else None
        begun = decode_body(row.body, ChargedRun) if row.kind is RowKind.BEGIN else None
        values: dict[str, object] = {
            "row": row.seq,
            "server": row.epoch,
            "kind": row.kind.value,
            "run": key.run if key else begun.run if begun else None,
            "round": key.round if key else None,
            "attempt": key.attempt if key else None,
            "survivors": len(release.participants) if release else None,
            "max_attempts": begun.plan.max_attempts if begun else None,
            "epsilon": row.epsilon,
        }
        told.append(values)
    if json:
        print_json({"budget": budget, "rows": told, "epsilon_holds": CONDITION})
        return
    from rich.table import Table  # noqa: PLC0415 - slow to load, and JSON needs no table

    table = Table(title=f"Budget: {_budget(budget)}", caption=f"epsilon: of all runs so far, {CONDITION}")
    for name in ("row", "server", "kind", "run", "round", "attempt", "survivors", "epsilon"):
        table.add_column(name, justify="left" if name in ("kind", "run") else "right")
    for row, values in zip(rows, told, strict=True):
        shown = [values[name] for name in ("row", "server", "kind", "run", "round", "attempt", "survivors")]
        table.add_row(*("" if value is None else str(value) for value in shown), round_up(row.epsilon, 5))
    out().print(table)


@app.command("verify", cls=SectionedCommand)
def verify_command(path: File, json: AsJson = False) -> None:
    """Recompute everything from the rows alone: chain, order, servers, attempts, and every epsilon."""
    file = _file(path)
    found = verify(file)
    if json:
        print_json({item.name: getattr(found, item.name) for item in fields(found)} | {"spent_holds": CONDITION})
        return
    units = f" {found.units} of {found.of} units of it are charged." if found.of else ""
    servers = f"{found.servers} server{'s' * (found.servers != 1)}"
    out().print(
        f"{file} is consistent: {found.committed} releases, {found.void} void attempts, {found.unfinished} unfinished "
        f"(counted as released), {servers}. The budget of {_budget(found.budget)} holds even if "
        f"outputs determined later runs.{units} All runs together cost epsilon {round_up(found.spent, 5)}, {CONDITION}."
    )
    for begun in found.runs:
        plan = begun.plan
        out().print(f"Run {begun.run}: {found.charged[begun.run]} of {plan.max_attempts} attempts charged.")


@app.command("create", cls=SectionedCommand)
def create(
    path: Annotated[Path, typer.Argument(help="The file to make.")],
    *,
    epsilon: Annotated[float, option("Bound on what the observer learns about one client.", PRIVACY)],
    delta: Annotated[float, option("Failure probability of the guarantee.", PRIVACY)],
    against: Annotated[
        str,
        option(
            "Observer that epsilon holds against: released, server, client, alone or colluding(c). "
            "Default: released.",
            PRIVACY,
        ),
    ] = "released",
    max_participations: Annotated[int, option("Cap on the contributions of one client. Default: 1.", PRIVACY)] = 1,
    declare: Annotated[
        list[Path] | None,
        typer.Option(help="A plan.json that will be run, fixed before any output is seen; may be repeated."),
    ] = None,
) -> None:
    """Make a ledger for all runs over one population, tuning runs included."""
    from d2pfed.runs.json_files import read_text  # noqa: PLC0415 - slow to load

    declared = tuple(run_plan(decode_plan(read_text(file))) for file in declare or ())
    budget = Budget(epsilon, delta, observer_named(against), max_participations, declared)
    try:
        Ledger.create(path, budget).close()
    except BudgetExceeded as error:
        raise ConfigError(str(error)) from error


def _budget(budget: Budget) -> str:
    return (
        f"epsilon {round_up(budget.epsilon, 6)} at delta {delta_as_given(budget.delta)} against {budget.observer}"
    )


def _file(path: Path) -> Path:
    file = path / "ledger.sqlite" if path.is_dir() else path
    if not file.exists():
        raise ConfigError(f"there is no ledger at {file}")
    return file
