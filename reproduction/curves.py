"""Drawing curves of accuracy: colour says which system, dashes say which reading of its epsilon."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from d2pfed.runs.report.plots import Ink

_GREY = "#777777"
_LEAST_EPSILON, _LARGEST_EPSILON = 1e-3, 1e7  # what the axis shows at most; the table has the rest
_TICKS = 7  # on an axis of epsilons, at most
_LARGEST_WRITTEN = 1000  # a tick beyond is a power of ten
_SHADE = 0.18  # of a band
_PAPER_SIZE, _TEST_SIZE, _SERVER_SIZE = 12.0, 7.0, 5.5  # points


class Hue(StrEnum):
    """One colour for each system, told apart without red-green vision and in grey by their lightness."""

    D2PFED = Ink.MAIN
    NORM_ONE = "#56b4e9"
    CPSGD = Ink.LIMIT
    OURS = Ink.THIRD
    PLAIN = Ink.TEXT
    CODE = "#e78ac3"
    FIFTH = "#9a4f8e"
    SIXTH = "#8a7a00"


Dash = Literal[
    "-", "--", "-."
]  # a solid line: the true epsilon; dashes: as published; with dots: no epsilon at all


class XScale(StrEnum):
    """How the horizontal axis runs."""

    LINEAR = "linear"
    EPSILON = "log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of accuracies; without xs, one height across the plot."""

    label: str  # in the legend
    hue: Hue
    xs: Sequence[float]
    ys: Sequence[float]
    band: Sequence[tuple[float, float]] = ()  # the lowest and the highest of the seeds, beside ys
    dash: Dash = "-"
    tests: tuple[float, ...] = ()  # accuracy on the test data at the last point, by seed
    server: float | None = None  # epsilon against the server at the end, on an axis of epsilons


@dataclass(frozen=True, slots=True)
class PaperMark:
    """An end point as the paper has it."""

    x: float
    y: float
    hue: Hue


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One set of axes."""

    title: str
    xlabel: str
    lines: tuple[Line, ...]
    marks: tuple[PaperMark, ...] = ()
    scale: XScale = XScale.LINEAR


def draw_panels(figure: Figure, panels: Sequence[Panel]) -> None:
    """Draw the panels side by side under one legend."""
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(grid, panels, strict=True):
        draw_axes(axes, panel)
    legend(figure, panels)


def legend(figure: Figure, panels: Sequence[Panel]) -> None:
    """Name every kind of line once, above the panels."""
    entries: dict[str, Line2D | Patch] = {}
    lines = [line for panel in panels for line in panel.lines]
    for line in lines:
        entries.setdefault(line.label, Line2D([], [], color=line.hue, linestyle=line.dash, linewidth=1.8))
    if any(panel.marks for panel in panels):
        entries["published or recorded end point"] = _sign("*", _PAPER_SIZE)
    if any(line.tests for line in lines):
        entries["test accuracy at the end"] = _sign("o", _TEST_SIZE)
    if any(line.server is not None for line in lines):
        entries["the same at the server's epsilon"] = _sign("D", _SERVER_SIZE)
    if any(len(line.tests) > 1 for line in lines):
        entries["lowest to highest of the seeds"] = Patch(facecolor=_GREY, alpha=_SHADE)
    figure.legend(
        list(entries.values()), list(entries), loc="outside upper center", ncols=3, frameon=False, fontsize=7.5
    )


def _sign(marker: str, size: float) -> Line2D:
    filled = "white" if marker == "D" else _GREY
    return Line2D([], [], marker=marker, linestyle="none", markersize=size, color=_GREY, markerfacecolor=filled)


def draw_axes(axes: Axes, panel: Panel) -> None:
    """Draw one panel."""
    if panel.scale is XScale.EPSILON:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(10, numticks=_TICKS))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
        axes.xaxis.set_minor_locator(NullLocator())
    for line in panel.lines:
        _draw_line(axes, line, _LEAST_EPSILON if panel.scale is XScale.EPSILON else -math.inf)
    for mark in panel.marks:
        axes.plot(mark.x, mark.y, "*", color=mark.hue, markersize=_PAPER_SIZE, markeredgecolor="white", zorder=5)
    if panel.scale is XScale.EPSILON:
        axes.set_xlim(_LEAST_EPSILON, min(2 * axes.get_xlim()[1], _LARGEST_EPSILON))
    elif all(x == int(x) for line in panel.lines for x in line.xs):
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))  # there is no half a round
    axes.set_ylim(0, 100)
    axes.set_title(panel.title, loc="left", fontsize=9.5, color=Ink.TEXT)
    axes.set_xlabel(panel.xlabel, color=Ink.TEXT)
    axes.set_ylabel("accuracy, %", color=Ink.TEXT)
    style_axes(axes)


def _tick(value: float) -> str:
    return f"{value:g}" if value <= _LARGEST_WRITTEN else f"$10^{{{math.log10(value):.0f}}}$"


def style_axes(axes: Axes) -> None:
    """Give axes their quiet grid and edges."""
    axes.grid(color=Ink.GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=Ink.TEXT, pad=5)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("bottom", "left"))
        spine.set_color(Ink.GRID)


def _draw_line(axes: Axes, line: Line, least: float) -> None:
    if not line.xs:
        axes.axhline(line.ys[-1], color=line.hue, linestyle=line.dash, linewidth=1.4)
        if line.band:
            axes.axhspan(*line.band[-1], color=line.hue, alpha=_SHADE, linewidth=0)
        return
    band = line.band or [(y, y) for y in line.ys]
    kept = [each for each in zip(line.xs, line.ys, band, strict=True) if each[0] >= least]
    xs, ys, pairs = zip(*(kept or [(least, line.ys[-1], band[-1])]), strict=True)
    axes.plot(xs, ys, color=line.hue, linestyle=line.dash, linewidth=1.6)
    low, high = zip(*pairs, strict=True)
    axes.fill_between(xs, low, high, color=line.hue, alpha=_SHADE, linewidth=0)
    height = sum(line.tests) / len(line.tests) if line.tests else line.ys[-1]
    if line.tests:
        ends = [[height - min(line.tests)], [max(line.tests) - height]]
        axes.errorbar(
            [xs[-1]],
            [height],
            yerr=ends,
            fmt="o",
            color=line.hue,
            markersize=_TEST_SIZE,
            markeredgecolor="white",
            capsize=3,
            zorder=4,
        )
    if line.server is not None:
        axes.plot(
            line.server, height, "D", color=line.hue, markersize=_SERVER_SIZE, markerfacecolor="white", zorder=4
        )
