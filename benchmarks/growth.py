"""Plots of how cost grows, on logarithmic axes, with the slope of a straight line to compare with."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from d2pfed.errors import ConfigError

Points = Sequence[tuple[float, float]]


def plot_growth(series: Mapping[str, Points], across: str, up: str, path: Path) -> None:
    """Write one line a series; a dotted line beside the first shows linear growth."""
    # Benchmarks run without it where no plot is wished.
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"a plot's name must end in .png or .svg, got {path}")
    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=colormaps["tab20"](range(20)))
    for name, points in sorted(
        series.items(), key=lambda item: -max(item[1])[1]
    ):  # named in the order of their ends
        xs, ys = zip(*sorted(points), strict=True)
        axes.loglog(xs, ys, marker="o", markersize=4, label=name)
    xs, ys = zip(*sorted(next(iter(series.values()))), strict=True)
    axes.loglog(xs, [ys[0] * x / xs[0] for x in xs], linestyle=":", color="0.5", label="linear")
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(visible=True, color="0.9")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)
