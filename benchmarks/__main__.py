"""`scripts/bench`: speed beside peers and the machine's limits, measured in one run."""

import json as json_module
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from benchmarks import record, tables
from benchmarks.arithmetic import DIMENSIONS, THREADS, SpeedRow, arithmetic
from benchmarks.busy import busy_loops
from benchmarks.deployment import DeploymentRow, Way, bench_deployment, cases
from benchmarks.deployment import goals as deployment_goals
from benchmarks.encode import encode_memory, prepare_encode
from benchmarks.engines_row import EngineRow
from benchmarks.goals import GoalRow, bench_goals
from benchmarks.growth import plot_growth
from benchmarks.lattice import ProtocolRow, bench_protocols
from benchmarks.lattice import goals as protocol_goals
from benchmarks.ledger import RELEASES, LedgerRow, bench_ledger
from benchmarks.mean import MeanRow, bench_mean
from benchmarks.parts import BUSY_PARTS, PARTS, Measured, run_part
from benchmarks.scales import ALONE, BESIDE_FLOWER, GROWTH, MODEST, SILOS
from benchmarks.secagg import SecAggRow, bench_secagg
from benchmarks.silos_row import SiloRow
from benchmarks.standing import bench_standing
from benchmarks.statistics import CLIENTS, StatisticsRow, bench_statistics
from benchmarks.tightening import bench_tightening
from benchmarks.traffic import CLIENTS as CLIENTS_OF_PLANS
from benchmarks.traffic import EPSILONS, bench_traffic
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
Row = TypeVar(
    "Row",
    SecAggRow,
    TrainingRow,
    LedgerRow,
    GoalRow,
    StatisticsRow,
    DeploymentRow,
    EngineRow,
    SiloRow,
)


class Sizes(StrEnum):
    """Which rounds of secure aggregation are measured."""

    PROTOCOLS = "protocols"  # the lattice, pair masks and Flower, signed, from 100 to 10,000 clients
    COMPARED = "compared"  # those to compare with Flower's
    LARGE = "large"
    GROWTH = "growth"  # a series in clients and in dimension
    MODEST = "modest"  # seconds each, as in `all`
    SILOS = "silos"  # twenty silos: the main protocol, and standing keys


_SCALES = {Sizes.COMPARED: BESIDE_FLOWER, Sizes.LARGE: ALONE, Sizes.GROWTH: GROWTH, Sizes.MODEST: MODEST}


@bench.command("all")
def all_command(
    path: Annotated[
        Path | None,
        typer.Option(
            "--out",
            show_default=False,
            help="The JSON file that is written. [default: benchmarks/results/idle.json, or busy.json]",
        ),
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(show_default=False, help="Only these parts. [default: all]")
    ] = None,
    busy: Busy = False,
    json: AsJson = False,
) -> None:
    """Run every benchmark at a modest size.

    Writes one JSON file with date, machine, versions and rows, from which `page` makes the tables of the documents. A
    part that fails is recorded with its reason, the others go on, and the command fails at the end. Beside busy loops,
    what takes minutes is left out.
    """
    parts = BUSY_PARTS if busy else PARTS
    chosen = {name: parts[name] for name in _known(part, parts)} if part else parts
    path = path or record.RESULTS / ("busy.json" if busy else "idle.json")
    about, measured = record.surroundings() | {"busy_loops": 2 * busy}, dict[str, Measured]()
    with busy_loops(2 * busy):
        for name, measure in chosen.items():
            err().print(f"{name} ...")
            found = run_part(measure, lambda row: err().print(tables.progress(row), soft_wrap=True, markup=False))
            failure = f", failed: {found.error}" if found.error else ""
            err().print(f"{name}: {found.seconds:.0f} s{failure}", soft_wrap=True, markup=False)
            measured[name] = found
            record.write(path, about, {each: _as_dict(part) for each, part in measured.items()})
    failed = {name: found.error for name, found in measured.items() if found.error}
    if json:
        print_json(about | {"benchmarks": {name: _as_dict(found) for name, found in measured.items()}})
    else:
        for found in measured.values():
            for table in tables.tables_of(found.rows):
                out().print(table)
        for name, found in measured.items():
            out().print(f"{name}: {found.seconds:.0f} s", markup=False)
        out().print(record.line(about), soft_wrap=True, markup=False)
        out().print(f"Wrote {path}. `scripts/bench page` makes docs/performance.md of it.", soft_wrap=True)
    if failed:
        raise ConfigError("; ".join(f"{name} failed: {why}" for name, why in failed.items()))


@bench.command("page")
def page_command(
    results: Annotated[
        Path, typer.Option(show_default=False, help="Where results are. [default: benchmarks/results]")
    ] = record.RESULTS,
    docs: Annotated[
        Path, typer.Option(show_default=False, help="Where the documents are. [default: docs]")
    ] = record.DOCS,
) -> None:
    """Make docs/performance.md and its plot.

    From the results of `all` and of `all --busy`.
    """
    from benchmarks import mean_page, page  # noqa: PLC0415 - what they draw with takes a second to load

    for written in (*page.write(results, docs), *mean_page.write(docs)):
        out().print(f"Wrote {written}.", soft_wrap=True)


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
        Sizes, typer.Option(show_default=False, help="Which rounds are run. [default: protocols]")
    ] = Sizes.PROTOCOLS,
    plot: PlotFile = None,
    path: Annotated[
        Path | None, typer.Option("--out", show_default=False, help="A JSON file for `page`, of protocols only.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Time whole rounds of secure aggregation.

    By protocol: the server, one client and one member are measured, and a helper plays the others. Other sizes: the
    clients run in another process. Flower's rounds are run beside ours.
    """
    if sizes is Sizes.PROTOCOLS:
        _protocols(path, json=json)
        return
    found = bench_standing(SILOS) if sizes is Sizes.SILOS else bench_secagg(_SCALES[sizes])
    rows = _watched(found)
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


def _protocols(path: Path | None, *, json: bool) -> None:
    about, rows = record.surroundings(), list[ProtocolRow]()

    def found() -> dict[str, object]:
        held = [tables.as_dict(goal) for goal in protocol_goals(rows)]
        return {"rows": [tables.as_dict(row) for row in rows], "goals": held}

    for row in bench_protocols():
        rows.append(row)
        err().print(tables.progress(row), soft_wrap=True, markup=False)
        if path is not None:
            record.write(path, about, {"protocols": found()})
    if json:
        print_json(about | found())
        return
    out().print(tables.protocol_table(rows))
    out().print(tables.deployment_goals_table(protocol_goals(rows), "Goals of the lattice protocol"))
    out().print(record.line(about), soft_wrap=True, markup=False)


@bench.command("ledger")
def ledger_command(
    releases: Annotated[list[int] | None, typer.Option(help="Releases held; several may be given.")] = None,
    json: AsJson = False,
) -> None:
    """Time a long ledger.

    Opening it, verifying it, and recording the next attempt.
    """
    rows = _watched(bench_ledger(tuple(releases or RELEASES)))
    if json:
        print_json({"rows": [tables.as_dict(row) for row in rows]})
        return
    out().print(tables.ledger_table(rows))


@bench.command("bytes")
def bytes_command(
    clients: Annotated[list[int] | None, typer.Option(help="Sizes of cohorts; several may be given.")] = None,
    epsilon: Annotated[list[float] | None, typer.Option(help="Epsilons; several may be given.")] = None,
    json: AsJson = False,
) -> None:
    """Count what a client sends and receives.

    In all, by cohort and epsilon, with compression and without, from signed plans of the default job's model.
    """
    rows = list(bench_traffic(tuple(clients or CLIENTS_OF_PLANS), tuple(epsilon or EPSILONS)))
    if json:
        print_json({"rows": [asdict(row) for row in rows]})
        return
    out().print(tables.traffic_table(rows))


@bench.command("statistics")
def statistics_command(
    clients: Annotated[list[int] | None, typer.Option(help="Clients summed over; several may be given.")] = None,
    json: AsJson = False,
) -> None:
    """Measure the error of private sums.

    Beside that of a trusted server, for as many honest clients as are planned for.
    """
    rows = _watched(bench_statistics(tuple(clients or CLIENTS)))
    if json:
        print_json({"rows": [tables.as_dict(row) for row in rows]})
        return
    out().print(tables.statistics_table(rows))


@bench.command("tightening")
def tightening_command(
    path: Annotated[Path | None, typer.Option("--out", show_default=False, help="A JSON file for `page`.")] = None,
    json: AsJson = False,
) -> None:
    """Compare bounds on epsilon with lower bounds.

    By population and epsilon.
    """
    about, rows = record.surroundings(), list[dict[str, object]]()
    for row in bench_tightening():
        rows.append(asdict(row))
        err().print(" ".join(str(value) for value in rows[-1].values()), soft_wrap=True, markup=False)
        if path is not None:
            record.write(path, about, {"tightening": {"rows": rows}})
    if json:
        print_json(about | {"rows": rows})
        return
    out().print(tables.tightening_table(rows))


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
        rows = _watched(bench_goals(large=large))
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
    rows = _watched(row for size in sizes for row in bench_engines(size, workers, address, only or ()))
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

    rows = _watched(bench_training(repeats))
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


@bench.command("models")
def models_command(
    repeats: Annotated[int, typer.Option(min=1, show_default=False, help="Rounds of each. [default: 3]")] = 3,
    rounds: Annotated[
        int, typer.Option(min=2, show_default=False, help="Rounds by record, of each. [default: 20]")
    ] = 20,
    step: Annotated[
        int, typer.Option(min=1, show_default=False, help="Every so many widths of a linear layer. [default: 1]")
    ] = 1,
    path: Annotated[
        Path | None,
        typer.Option("--out", show_default=False, help="A JSON file for `page`, written after each row."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Time rounds of six kinds of networks.

    Of 50 clients, in the clear and private, beside a plain loop of torch in one thread; and by record beside Opacus, of
    a linear layer with 1 to 130 inputs and three of these networks.
    """
    from benchmarks.models import WIDTHS, bench_networks, bench_records  # noqa: PLC0415 - torch takes seconds to load

    about, networks, records = record.surroundings(), list[TrainingRow](), list[SiloRow]()

    def found() -> dict[str, object]:
        return {"networks": list(map(tables.as_dict, networks)), "rows": list(map(tables.as_dict, records))}

    rows: Iterator[TrainingRow | SiloRow] = chain(bench_networks(repeats), bench_records(rounds, WIDTHS[::step]))
    for row in rows:
        if isinstance(row, TrainingRow):
            networks.append(row)
        else:
            records.append(row)
        err().print(tables.progress(row), soft_wrap=True, markup=False)
        if path is not None:
            record.write(path, about, {"models": found()})
    if json:
        print_json(about | found())
        return
    out().print(tables.training_table(networks))
    out().print(tables.silo_table(records))
    out().print(record.line(about), soft_wrap=True, markup=False)


@bench.command("mean")
def mean_command(
    path: Annotated[
        Path | None,
        typer.Option("--out", show_default=False, help="A JSON file for `page`, written after each row."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Measure the error of a private mean against bits.

    Of every mechanism, for 100 to 10,000 clients and vectors of 250 to 65,536 numbers, over that of a trusted server.
    Rows that --out holds are not measured again.
    """
    about, rows, known = record.surroundings(), list[MeanRow](), list[MeanRow]()
    if path is not None and path.exists():
        stored = json_module.loads(path.read_text())["benchmarks"]["mean"]["rows"]
        known = [MeanRow(**{name: value for name, value in row.items() if name != "ratio"}) for row in stored]

    def found() -> dict[str, object]:
        return {"rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}

    for row in bench_mean(known):
        rows.append(row)
        err().print(f"{row.what}: {row}", soft_wrap=True, markup=False)
        if path is not None:
            record.write(path, about, {"mean": found()})
    if json:
        print_json(about | found())
        return
    out().print(tables.mean_table(rows))
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
        err().print(tables.progress(row), soft_wrap=True, markup=False)
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


def _known(names: Iterable[str], parts: Iterable[str]) -> list[str]:
    if unknown := set(names) - set(parts):
        raise ConfigError(f"part must be one of {', '.join(parts)}, got {', '.join(sorted(unknown))}")
    return list(names)


def _as_dict(found: Measured) -> dict[str, object]:
    rows = [tables.as_dict(row) for row in found.rows]
    return {"seconds": found.seconds, "error": found.error, "rows": rows}


def _watched(rows: Iterable[Row]) -> list[Row]:
    """Return all rows, with a line about each on standard error as soon as it is measured."""
    seen: list[Row] = []
    for row in rows:
        seen.append(row)
        err().print(tables.progress(row), soft_wrap=True, markup=False)
    return seen


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
