"""`scripts/bench`: speed beside peers and the machine's limits, measured in one run."""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from benchmarks import record, tables
from benchmarks.arithmetic import DIMENSIONS, THREADS, SpeedRow, arithmetic
from benchmarks.busy import busy_loops
from benchmarks.deployment import DeploymentRow, Way, bench_deployment, cases
from benchmarks.deployment import goals as deployment_goals
from benchmarks.encode import encode_memory, prepare_encode
from benchmarks.engines_row import EngineRow
from benchmarks.goals import GoalRow, bench_goals
from benchmarks.growth import GrowthRow, measure_growth, plot_growth, plot_rows
from benchmarks.ledger import RELEASES, LedgerRow, bench_ledger
from benchmarks.scales import ALONE, BESIDE_FLOWER, GROWTH, MODEST, SILOS
from benchmarks.secagg import SecAggRow, bench_secagg
from benchmarks.standing import bench_standing
from benchmarks.statistics import CLIENTS, StatisticsRow, bench_statistics
from benchmarks.training_row import TrainingRow
from d2pfed.cli import run
from d2pfed.cli.options import AsJson
from d2pfed.cli.show import err, out, print_json
from d2pfed.errors import ConfigError

bench = typer.Typer(
    help="Measure speed beside peers and the machine's limits.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

PlotFile = Annotated[Path | None, typer.Option(help="Write a plot of how cost grows (PNG or SVG).")]
Busy = Annotated[
    bool, typer.Option("--busy", help="Measure beside two busy loops, as on a machine that others use.")
]
Row = TypeVar("Row", SecAggRow, TrainingRow, LedgerRow, GoalRow, GrowthRow, StatisticsRow, EngineRow)

_MODEST_DIMENSIONS = DIMENSIONS[:2]
_MODEST_CLIENTS = 200
_MODEST_REPEATS = 5


class Sizes(StrEnum):
    """Which rounds of secure aggregation are measured."""

    COMPARED = "compared"  # those to compare with Flower's
    LARGE = "large"
    GROWTH = "growth"  # a series in clients and in dimension
    MODEST = "modest"  # seconds each, as in `all`
    SILOS = "silos"  # twenty silos: the main protocol, and standing keys


_SCALES = {Sizes.COMPARED: BESIDE_FLOWER, Sizes.LARGE: ALONE, Sizes.GROWTH: GROWTH, Sizes.MODEST: MODEST}


@bench.command("all")
def all_command(
    path: Annotated[
        Path,
        typer.Option("--out", show_default=False, help="The JSON file that is written. [default: bench.json]"),
    ] = Path("bench.json"),
    busy: Busy = False,
    json: AsJson = False,
) -> None:
    """Run every benchmark at a modest size.

    Writes one JSON file with date, machine, versions and rows, plots of how cost grows beside it, and prints the
    tables.
    """
    about, measured = record.surroundings() | {"busy_loops": 2 * busy}, dict[str, object]()
    shown, plots = list[Table](), list[Path]()
    with busy_loops(2 * busy):
        for name, measure in _MODEST_RUNS.items():
            err().print(f"{name} ...")
            rows, table = measure()
            measured[name] = {"rows": rows}
            record.write(path, about, measured)
            shown.append(table)
            plots = plot_rows(rows, path) if name == _GROWTH else []
    if json:
        print_json(about | {"benchmarks": measured})
        return
    for table in shown:
        out().print(table)
    out().print(record.line(about), soft_wrap=True, markup=False)
    out().print(f"Wrote {', '.join(map(str, (path, *plots)))}.", soft_wrap=True)


@bench.command("arithmetic")
def arithmetic_command(
    dimension: Annotated[list[int] | None, typer.Option(help="Vector lengths; several may be given.")] = None,
    plot: PlotFile = None,
    json: AsJson = False,
) -> None:
    """Time samplers, rotations, packing, encoding.

    On one thread and on two, beside OpenDP, scipy and the speed of memory.
    """
    dimensions = tuple(dimension or DIMENSIONS)
    rows = arithmetic(dimensions, THREADS, prepare_encode)
    memory = {size: encode_memory(size) for size in dimensions}
    if plot is not None:
        _plot_arithmetic(rows, plot)
    if json:
        print_json({"rows": [tables.as_dict(row) for row in rows], "encode_memory_in_updates": memory})
        return
    out().print(tables.speed_table(rows))
    for length, ratio in memory.items():
        out().print(f"Encoding {length:,} coordinates takes {ratio:.2f} times the memory of the update.")


@bench.command("secagg")
def secagg_command(
    sizes: Annotated[
        Sizes, typer.Option(show_default=False, help="Which rounds are run. [default: compared]")
    ] = Sizes.COMPARED,
    plot: PlotFile = None,
    json: AsJson = False,
) -> None:
    """Time whole rounds of secure aggregation.

    The clients run in another process; Flower's rounds are run beside ours.
    """
    found = bench_standing(SILOS) if sizes is Sizes.SILOS else bench_secagg(_SCALES[sizes])
    rows = _watched(found, _secagg_progress)
    if plot is not None:
        known = [row for row in rows if row.round_seconds is not None]
        by_clients = [(row.clients, row.round_seconds or 0.0) for row in known if row.dimension == 10_000]
        by_length = [(row.dimension, row.round_seconds or 0.0) for row in known if row.clients == 50]
        series = {"in clients (10,000 coordinates)": by_clients, "in coordinates (50 clients)": by_length}
        plot_growth({name: points for name, points in series.items() if points}, "size", "seconds a round", plot)
    if json:
        print_json({"rows": [tables.as_dict(row) for row in rows]})
        return
    out().print(tables.secagg_table(rows))


@bench.command("ledger")
def ledger_command(
    releases: Annotated[list[int] | None, typer.Option(help="Releases held; several may be given.")] = None,
    json: AsJson = False,
) -> None:
    """Time a long ledger.

    Opening it, verifying it, and recording the next attempt.
    """
    rows = _watched(bench_ledger(tuple(releases or RELEASES)), _ledger_progress)
    if json:
        print_json({"rows": [tables.as_dict(row) for row in rows]})
        return
    out().print(tables.ledger_table(rows))


@bench.command("statistics")
def statistics_command(
    clients: Annotated[list[int] | None, typer.Option(help="Clients summed over; several may be given.")] = None,
    json: AsJson = False,
) -> None:
    """Measure the error of private sums.

    Beside that of a trusted server, for as many honest clients as are planned for.
    """
    rows = _watched(bench_statistics(tuple(clients or CLIENTS)), _statistics_progress)
    if json:
        print_json({"rows": [tables.as_dict(row) for row in rows]})
        return
    out().print(tables.statistics_table(rows))


@bench.command("goals")
def goals_command(
    large: Annotated[
        bool,
        typer.Option("--large", help="Also those that take minutes: 1,000,000 coordinates, 100,000 releases."),
    ] = False,
    busy: Busy = False,
    json: AsJson = False,
) -> None:
    """Hold what is measured against the goals."""
    about = record.surroundings() | {"busy_loops": 2 * busy}
    with busy_loops(2 * busy):
        rows = _watched(bench_goals(large=large), _goal_progress)
    if json:
        print_json(about | {"rows": [tables.as_dict(row) for row in rows]})
        return
    out().print(tables.goal_table(rows))
    out().print(record.line(about), soft_wrap=True, markup=False)


@bench.command("engines")
def engines_command(  # noqa: PLR0917 - options of a command
    clients: Annotated[
        list[int] | None,
        typer.Option(show_default=False, help="Clients in the cohort; several may be given. [default: 1000]"),
    ] = None,
    workers: Annotated[int, typer.Option(show_default=False, help="Ray workers. [default: 2]")] = 2,
    address: Annotated[str | None, typer.Option(help="A Ray cluster's address. [default: this machine]")] = None,
    only: Annotated[
        list[str] | None, typer.Option(show_default=False, help="processes, in process, ray. [default: all]")
    ] = None,
    plot: PlotFile = None,
    json: AsJson = False,
) -> None:
    """Time a simulated round by each backend.

    Worker processes, this process, Ray. Over several cohorts: from which size on Ray's workers pay.
    """
    from benchmarks.engines import bench_engines, break_even  # noqa: PLC0415 - torch takes seconds to load

    sizes = tuple(clients or [1000])
    rows = _watched(
        (row for size in sizes for row in bench_engines(size, workers, address, only or ())), _engine_progress
    )
    if plot is not None:
        measured = [(row.engine, row.clients, row.round_seconds) for row in rows if row.round_seconds is not None]
        series = {
            name: [(size, seconds) for each, size, seconds in measured if each == name]
            for name in dict.fromkeys(each for each, _, _ in measured)
        }
        plot_growth(series, "clients in the cohort", "seconds a round", plot)
    pays = {over: break_even(rows, "ray", over) for over in ("in process", "processes")}
    if json:
        print_json({"rows": [tables.as_dict(row) for row in rows], "ray_pays_from": pays})
        return
    out().print(tables.engine_table(rows))
    for over, size in pays.items():
        if len(sizes) > 1:
            out().print(
                f"Ray's workers beat {over}: {'in none' if size is None else f'from {size:,} clients on'}."
            )


@bench.command("training")
def training_command(
    repeats: Annotated[
        int, typer.Option(min=1, max=40, show_default=False, help="Rounds to take the best of. [default: 10]")
    ] = 10,
    plot: PlotFile = None,
    json: AsJson = False,
) -> None:
    """Time whole rounds of private training.

    Beside the same training without privacy, a plain torch loop, Flower's simulation and pfl.
    """
    # Torch takes seconds to load, and the other benchmarks do without it.
    from benchmarks.training import bench_training, measure_growth  # noqa: PLC0415

    rows = _watched(bench_training(repeats), _training_progress)
    if plot is not None:
        grown = list(measure_growth(repeats, (25, 50, 100, 200, 400), (16, 64, 256, 1024)))
        by_clients = [(row.clients, row.seconds) for row in grown if row.what == "growth in clients"]
        by_length = [(row.dimension, row.seconds) for row in grown if row.what == "growth in dimension"]
        series = {
            f"in clients ({grown[0].dimension:,} parameters)": by_clients,
            "in parameters (20 clients)": by_length,
        }
        plot_growth(series, "size", "seconds a round", plot)
        rows += grown
    if json:
        print_json({"rows": [tables.as_dict(row) for row in rows]})
        return
    out().print(tables.training_table(rows))


@bench.command("silos")
def silos_command(
    rounds: Annotated[int, typer.Option(min=2, show_default=False, help="Rounds of each. [default: 500]")] = 500,
    json: AsJson = False,
) -> None:
    """Time rounds over 20 silos with privacy of a record.

    Beside Opacus' DP-SGD and plain SGD on the pooled records, with the same batches.
    """
    from benchmarks.silos import bench_silos  # noqa: PLC0415 - torch and Opacus take seconds to load

    about = record.surroundings()
    rows = list(bench_silos(rounds))
    if json:
        print_json(about | {"rows": [tables.as_dict(row) for row in rows]})
        return
    out().print(tables.silo_table(rows))
    out().print(record.line(about), soft_wrap=True, markup=False)


@bench.command("deployment")
def deployment_command(  # noqa: PLR0917 - options of a command
    clients: Annotated[int, typer.Option(min=3, show_default=False, help="SuperNodes. [default: 5]")] = 5,
    rounds: Annotated[
        int, typer.Option(min=2, show_default=False, help="Rounds; the first does not count. [default: 6]")
    ] = 6,
    silos: Annotated[
        int, typer.Option(min=3, show_default=False, help="Silos with standing keys. [default: 20]")
    ] = 20,
    silo_rounds: Annotated[int, typer.Option(min=2, show_default=False, help="Their rounds. [default: 51]")] = 51,
    only: Annotated[
        list[Way] | None,
        typer.Option(show_default=False, help="Ways to measure; several may be given. [default: all]"),
    ] = None,
    path: Annotated[
        Path | None, typer.Option("--out", show_default=False, help="A JSON file, written after each row.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Time rounds of a real federation over Flower.

    Averaged in the clear with evaluation, private, with standing keys, and with Flower's SecAgg+, by warm nodes;
    SecAgg+ by Flower's own executor; and many silos with standing keys.
    """
    about, rows = record.surroundings(), list[DeploymentRow]()
    chosen = [case for case in cases(clients, rounds, silos, silo_rounds) if not only or case.way in only]

    def found() -> dict[str, object]:
        held = [tables.as_dict(goal) for goal in deployment_goals(rows)]
        return {"rows": [tables.as_dict(row) for row in rows], "goals": held}

    for row in bench_deployment(chosen):
        rows.append(row)
        err().print(_deployment_progress(row), soft_wrap=True, markup=False)
        if path is not None:
            record.write(path, about, {"deployment": found()})
    if json:
        print_json(about | found())
        return
    out().print(tables.deployment_table(rows))
    out().print(tables.deployment_goals_table(deployment_goals(rows)))
    out().print(record.line(about), soft_wrap=True, markup=False)


@bench.command("consortium")
def consortium_command(
    task: Annotated[list[str] | None, typer.Option(help="patients or digits; both unless said.")] = None,
    splits: Annotated[int, typer.Option(min=1, max=100, show_default=False, help="Splits. [default: 10]")] = 10,
    path: Annotated[
        Path, typer.Option("--out", show_default=False, help="Finished rows. [default: consortium.jsonl]")
    ] = Path("consortium.jsonl"),
    json: AsJson = False,
) -> None:
    """Train over 20 unequal silos with privacy of a record.

    Beside DP-SGD on pooled data, in each silo, and training without privacy. Finished rows are not run again.
    """
    from benchmarks.consortium import table  # noqa: PLC0415 - torch and Opacus take seconds to load
    from benchmarks.consortium.data import TASKS  # noqa: PLC0415

    if unknown := set(task or ()) - set(TASKS):
        raise ConfigError(f"task must be one of {', '.join(TASKS)}, got {', '.join(sorted(unknown))}")
    found = table.rows(
        path, task or tuple(TASKS), splits, lambda line: err().print(line, soft_wrap=True, markup=False)
    )
    summed = table.summaries(found)
    if json:
        print_json({"rows": summed})
        return
    print(table.markdown(summed))


def _all_arithmetic() -> tuple[list[dict[str, object]], Table]:
    rows = arithmetic(_MODEST_DIMENSIONS, THREADS, prepare_encode)
    return [tables.as_dict(row) for row in rows], tables.speed_table(rows)


def _all_secagg() -> tuple[list[dict[str, object]], Table]:
    rows = _watched(bench_secagg(MODEST), _secagg_progress)
    return [tables.as_dict(row) for row in rows], tables.secagg_table(rows)


def _all_engines() -> tuple[list[dict[str, object]], Table]:
    from benchmarks.engines import bench_engines  # noqa: PLC0415 - torch takes seconds to load

    rows = list(bench_engines(_MODEST_CLIENTS, 2, None))
    return [tables.as_dict(row) for row in rows], tables.engine_table(rows)


def _all_training() -> tuple[list[dict[str, object]], Table]:
    from benchmarks.training import bench_training  # noqa: PLC0415 - torch takes seconds to load

    rows = _watched(bench_training(_MODEST_REPEATS), _training_progress)
    return [tables.as_dict(row) for row in rows], tables.training_table(rows)


def _all_ledger() -> tuple[list[dict[str, object]], Table]:
    rows = _watched(bench_ledger(RELEASES[:1]), _ledger_progress)
    return [tables.as_dict(row) for row in rows], tables.ledger_table(rows)


def _all_goals() -> tuple[list[dict[str, object]], Table]:
    rows = _watched(bench_goals(), _goal_progress)
    return [tables.as_dict(row) for row in rows], tables.goal_table(rows)


def _all_growth() -> tuple[list[dict[str, object]], Table]:
    rows = _watched(measure_growth(), _growth_progress)
    return [tables.as_dict(row) for row in rows], tables.growth_table(rows)


_GROWTH = "growth"
_MODEST_RUNS = {
    "goals": _all_goals,  # first: its workers are forked before this process has trained anything
    "arithmetic": _all_arithmetic,
    "secagg": _all_secagg,
    "ledger": _all_ledger,
    "engines": _all_engines,
    "training": _all_training,
    _GROWTH: _all_growth,  # last, since its plots are shown at the end
}


def _watched(rows: Iterable[Row], progress: Callable[[Row], str]) -> list[Row]:
    """Return all rows, with a line about each on standard error as soon as it is measured."""
    seen: list[Row] = []
    for row in rows:
        seen.append(row)
        err().print(progress(row), soft_wrap=True, markup=False)
    return seen


def _secagg_progress(row: SecAggRow) -> str:
    result = row.error if row.round_seconds is None else f"{row.round_seconds:.1f} s"
    return f"{row.implementation}: {row.clients} clients, {row.dimension:,} coordinates, {result}"


def _engine_progress(row: EngineRow) -> str:
    result = row.error if row.round_seconds is None else f"{row.round_seconds:.2f} s a round"
    return f"{row.engine}, {row.clients:,} clients: {result}"


def _ledger_progress(row: LedgerRow) -> str:
    return f"{row.what}, {row.releases:,} releases: {row.seconds:.3g} s"


def _statistics_progress(row: StatisticsRow) -> str:
    return f"{row.clients:,} clients, {row.dimension:,} coordinates: {row.measured:.4g} times a trusted server's error"


def _goal_progress(row: GoalRow) -> str:
    return f"{row.what}: {row.error if row.seconds is None else f'{row.seconds:.3g} s'}, goal {row.goal:g} s"


def _growth_progress(row: GrowthRow) -> str:
    return f"{row.what}, {row.size:,} {row.across}: {row.seconds:.3g} s"


def _deployment_progress(row: DeploymentRow) -> str:
    result = row.error if row.seconds is None else f"{row.seconds:.1f} s a round"
    stages = "".join(f", {name} {seconds:.1f}" for name, seconds in row.stages.items())
    return f"{row.what}, {row.executor}, {row.clients} clients: {result}{stages}"


def _training_progress(row: TrainingRow) -> str:
    peer = row.peer_error if row.peer_seconds is None else f"{row.peer_seconds:.3f} s"
    return f"{row.what}: {row.seconds:.3f} s a round; {row.peer}: {peer}"


def _plot_arithmetic(rows: Sequence[SpeedRow], path: Path) -> None:
    names = dict.fromkeys(row.what for row in rows)
    single = [row for row in rows if row.threads == 1]
    seconds = {
        name: sorted({(row.dimension, row.dimension / row.rate) for row in single if row.what == name})
        for name in names
    }
    plot_growth(seconds, "coordinates", "seconds", path)


if __name__ == "__main__":
    run(bench, "bench")
