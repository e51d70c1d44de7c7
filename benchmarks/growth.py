"""Plots of how cost grows, on logarithmic axes, with the slope of a straight line to compare with."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ledger import bench_ledger
from benchmarks.scales import Scale
from benchmarks.secagg import measure
from d2pfed.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

_CLIENTS = (25, 50, 100, 200)
_COORDINATES = (1 << 12, 1 << 14, 1 << 16, 1 << 18)
_WIDTHS = (16, 64, 256, 1024)
_RELEASES = (300, 1_000, 3_000, 10_000)
_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthRow:
    """One point of how cost grows: seconds of the processor for a ledger, else of the clock."""

    what: str
    across: str  # what grows: clients, coordinates or releases
    size: int
    seconds: float


def measure_growth() -> Iterator[GrowthRow]:
    """Yield rounds by clients and by coordinates, of the protocol and of training, and a ledger by releases."""
    for clients in _CLIENTS:
        scale = Scale(clients=clients, dimension=10_000, bits=16, dropouts=clients // 10)
        yield _round("protocol, 10,000 coordinates", "clients", clients, scale)
    for dimension in _COORDINATES:
        scale = Scale(clients=32, dimension=dimension, bits=16, dropouts=3)
        yield _round("protocol, 32 clients", "coordinates", dimension, scale)
    for releases in _RELEASES:
        for row in bench_ledger((releases,)):
            yield GrowthRow(what=row.what, across="releases", size=releases, seconds=row.seconds)
    from benchmarks import training  # noqa: PLC0415 - torch takes seconds to load

    for trained in training.measure_growth(_REPEATS, _CLIENTS, _WIDTHS):
        if trained.what == "growth in clients":
            name, across, size = f"training, {trained.dimension:,} parameters", "clients", trained.clients
        else:
            name, across, size = f"training, {trained.clients} clients", "coordinates", trained.dimension
        yield GrowthRow(what=name, across=across, size=size, seconds=trained.seconds)


def _round(what: str, across: str, size: int, scale: Scale) -> GrowthRow:
    seconds = measure(scale).round_seconds
    return GrowthRow(what=what, across=across, size=size, seconds=seconds or 0.0)


def plot_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write one plot with a panel for each quantity that grows."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        series = panels.setdefault(row["across"], {})
        series.setdefault(row["what"], []).append((row["size"], row["seconds"]))
    figure = _figure(path, max(1, len(panels)))
    for axes, (across, series) in zip(figure.axes, panels.items(), strict=False):
        _draw(axes, series, across, "seconds")
        axes.legend(
            frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(0.0, 1.0)
        )  # above the axes: no line is hidden
    figure.savefig(path)


def plot_growth(series: Mapping[str, Points], across: str, up: str, path: Path) -> None:
    """Write one line a series; a dotted line beside the first shows linear growth."""
    figure = _figure(path, 1)
    _draw(figure.axes[0], series, across, up)
    figure.axes[0].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)


def _figure(path: Path, panels: int) -> "Figure":
    # Benchmarks run without it where no plot is wished.
    from matplotlib.figure import Figure  # noqa: PLC0415

    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"a plot's name must end in .png or .svg, got {path}")
    size = (7.0, 3.6) if panels == 1 else (3.2 * panels, 3.8)  # inches: letters stay legible on a page's width
    figure = Figure(figsize=size, dpi=160, layout="constrained")
    figure.subplots(1, panels)
    return figure


def _draw(axes: "Axes", series: Mapping[str, Points], across: str, up: str) -> None:
    from matplotlib import colormaps  # noqa: PLC0415

    axes.set_prop_cycle(color=colormaps["tab20"](range(20)))
    for name, points in sorted(
        series.items(), key=lambda item: -max(item[1])[1]
    ):  # named in the order of their ends
        xs, ys = zip(*sorted(points), strict=True)
        axes.loglog(xs, ys, marker="o", markersize=4, label=name)
    xs, ys = zip(*sorted(next(iter(series.values()))), strict=True)
    axes.loglog(xs, [ys[0] * x / xs[0] for x in xs], linestyle=":", color="0.5", label="linear")
    if xs[-1] < 100 * xs[0]:  # few powers of ten: the sizes themselves say more
        axes.set_xticks(xs, [f"{x:,}" for x in xs], fontsize=8)
        axes.minorticks_off()
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(visible=True, color="0.9")
