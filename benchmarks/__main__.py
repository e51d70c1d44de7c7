"""`scripts/bench`: speed against peers and limits, measured in one run."""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from benchmarks.arithmetic import DIMENSIONS, THREADS, arithmetic
from benchmarks.encode import encode_memory, prepare_encode
from benchmarks.growth import plot_growth
from benchmarks.scales import ALONE, BESIDE_FLOWER, GROWTH
from benchmarks.secagg import bench_secagg
from d2pfed.cli import run
from d2pfed.cli.options import AsJson, on_ray
from d2pfed.cli.show import err, out, print_json

bench = typer.Typer(
    help="Measure speed against peers and limits in one run.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)

PlotFile = Annotated[Path | None, typer.Option(help="Write a plot of how cost grows (PNG or SVG).")]


class Rounds(StrEnum):
    """Which rounds of secure aggregation are measured."""

    BESIDE = "beside"  # those to compare with Flower's
    ALONE = "alone"  # the large ones
    GROWTH = "growth"  # a series in clients and in dimension


@bench.command("arithmetic")
def arithmetic_command(
    dimension: Annotated[list[int] | None, typer.Option(help="Vector lengths; several may be given.")] = None,
    plot: PlotFile = None,
    json: AsJson = False,
) -> None:
    """Time samplers, rotations, packing and a client's whole encoding, on one and two threads."""
    dimensions = tuple(dimension or DIMENSIONS)
    rows = arithmetic(dimensions, THREADS, prepare_encode)
    memory = {size: encode_memory(size) for size in dimensions}
    if plot is not None:
        seconds = {
            what: sorted(
                {(row.dimension, row.dimension / row.rate) for row in rows if (row.what, row.threads) == (what, 1)}
            )
            for what in dict.fromkeys(row.what for row in rows)
        }
        plot_growth(seconds, "coordinates", "seconds", plot)
    if json:
        print_json(
            {
                "rows": [asdict(row) | {"ratio": row.ratio, "met": row.met} for row in rows],
                "encode_memory_in_updates": memory,
            }
        )
        return
    table = Table(title="Millions of coordinates a second")
    for name in ("what", "coordinates", "threads", "rate", "peer", "its rate", "ratio", "goal", "met"):
        table.add_column(name, justify="left" if name in ("what", "peer") else "right")
    for row in rows:
        numbers = (row.peer_rate and row.peer_rate / 1e6, row.ratio, row.goal)
        shown = ["" if number is None else f"{number:.3g}" for number in numbers]
        met = "" if row.met is None else "yes" if row.met else "no"
        size = f"{row.dimension:,}"
        table.add_row(
            row.what, size, str(row.threads), f"{row.rate / 1e6:.4g}", row.peer, *shown[:2], shown[2], met
        )
    out().print(table)
    for length, ratio in memory.items():
        out().print(f"Encoding {length:,} coordinates takes {ratio:.2f} times the memory of the update.")


@bench.command("secagg")
def secagg_command(
    rounds: Annotated[Rounds, typer.Option(help="beside, alone or growth.")] = Rounds.BESIDE,
    plot: PlotFile = None,
    json: AsJson = False,
) -> None:
    """Run whole rounds of secure aggregation, the clients in another process, beside Flower's where installed."""
    scales = {Rounds.BESIDE: BESIDE_FLOWER, Rounds.ALONE: ALONE, Rounds.GROWTH: GROWTH}[rounds]
    rows = []
    for row in bench_secagg(scales):
        rows.append(row)
        err().print(
            f"{row.implementation}: {row.clients} clients, {row.dimension:,} coordinates, {row.round_seconds:.1f} s"
        )
    if plot is not None:
        by_clients = [(row.clients, row.round_seconds) for row in rows if row.dimension == 10_000]
        by_length = [(row.dimension, row.round_seconds) for row in rows if row.clients == 50]
        known = {"in clients (10,000 coordinates)": by_clients, "in coordinates (50 clients)": by_length}
        plot_growth({name: points for name, points in known.items() if points}, "size", "seconds a round", plot)
    if json:
        print_json({"rows": [asdict(row) for row in rows]})
        return
    table = Table(title="One round of secure aggregation; processor seconds, but for the whole round")
    for name in (
        "who",
        "clients",
        "coordinates",
        "bits",
        "neighbours",
        "lost",
        "client",
        "server",
        "round",
        "upload",
        "MiB",
    ):
        table.add_column(name, justify="left" if name == "who" else "right")
    for row in rows:
        sizes = (row.clients, row.dimension, row.bits, row.neighbours, row.dropouts)
        times = (row.client_seconds, row.server_seconds, row.round_seconds)
        table.add_row(
            row.implementation,
            *(f"{size:,}" for size in sizes),
            *(f"{seconds:.3g}" for seconds in times),
            f"{row.upload_bytes:,}",
            f"{row.server_peak_mib:.0f}",
        )
    out().print(table)


@bench.command("engines")
def engines_command(
    clients: Annotated[int, typer.Option(help="Clients in the cohort.")] = 1000,
    workers: Annotated[int, typer.Option(help="Ray workers.")] = 2,
    address: Annotated[str | None, typer.Option(help="A Ray cluster's address. [default: this machine]")] = None,
    json: AsJson = False,
) -> None:
    """Time a simulated round in this process and on Ray workers."""
    from benchmarks.engines import bench_engines  # noqa: PLC0415 - torch takes seconds to load

    rows = list(bench_engines(clients, {f"ray, {workers} workers": on_ray(workers, address)}))
    if json:
        print_json({"rows": [asdict(row) for row in rows]})
        return
    table = Table(title=f"One simulated round of {clients:,} clients; seconds")
    for name in ("engine", "start and first round", "round"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for row in rows:
        table.add_row(row.engine, f"{row.start_seconds:.2f}", f"{row.round_seconds:.2f}")
    out().print(table)


@bench.command("training")
def training_command(
    repeats: Annotated[int, typer.Option(min=1, max=40, help="Rounds to take the best of.")] = 10,
    plot: PlotFile = None,
    json: AsJson = False,
) -> None:
    """Time whole private rounds beside the same training without privacy, a plain loop, Flower and pfl."""
    # Torch takes seconds to load, and the other benchmarks do without it.
    from benchmarks.training import bench_training, measure_growth  # noqa: PLC0415

    rows = []
    for row in bench_training(repeats):
        rows.append(row)
        err().print(
            f"{row.what}: {row.seconds:.3f} s a round; {row.peer}: {row.peer_seconds or float('nan'):.3f} s"
        )
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
        shown = [
            asdict(row) | {"rounds_per_second": row.rounds_per_second, "ratio": row.ratio, "met": row.met}
            for row in rows
        ]
        print_json({"rows": shown})
        return
    table = Table(title="One round of training, seconds by the clock")
    for name in (
        "what",
        "clients",
        "examples",
        "epochs",
        "parameters",
        "seconds",
        "peer",
        "its",
        "ratio",
        "goal",
        "met",
    ):
        table.add_column(name, justify="left" if name in ("what", "peer") else "right")
    for row in rows:
        sizes = [f"{size:,}" for size in (row.clients, row.examples, row.epochs, row.dimension)]
        numbers = ["" if number is None else f"{number:.3g}" for number in (row.peer_seconds, row.ratio, row.goal)]
        met = "" if row.met is None else "yes" if row.met else "no"
        table.add_row(row.what, *sizes, f"{row.seconds:.3g}", row.peer, *numbers, met)
    out().print(table)


if __name__ == "__main__":
    run(bench, "bench")
