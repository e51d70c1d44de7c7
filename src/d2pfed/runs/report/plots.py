"""The plots: lines with their names beside them, in colours that a style sheet can replace."""

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, PercentFormatter

from d2pfed.plan.bounds import check_name

MOST_POINTS = 400  # of one line: more than its pixels can show
_MARKED = 40  # with so few points each one is marked
_WIDTH, _HEIGHT = 4.2, 2.75  # inches: small, so that letters stay legible on a phone
_NAMES = re.compile(r"\b(id=\"|url\(#|href=\"#)")


class Ink(StrEnum):
    """The colours on a light ground, one for each role; distinguishable without red-green vision."""

    PAPER = "#fffffe"
    TEXT = "#1f2329"
    GRID = "#dde2e7"
    MAIN = "#0072b2"
    LIMIT = "#b34700"
    THIRD = "#00795c"


_DASHED = frozenset({Ink.TEXT, Ink.LIMIT})  # what is expected or allowed, against what was measured


class Scale(StrEnum):
    """What heights are."""

    NUMBERS = "numbers"  # from 0 to a little above the highest
    SHARES = "shares"  # from 0 % to 100 %


@dataclass(frozen=True, slots=True)
class Line:
    """One line: through its points, or across the whole plot at its one height."""

    name: str  # printed at its right end
    ink: Ink
    ys: tuple[float, ...]
    xs: tuple[float, ...] = ()  # none: a limit across the plot


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """What one plot shows."""

    name: str  # of its files
    title: str
    across: str  # what the horizontal axis counts
    lines: tuple[Line, ...]
    scale: Scale = Scale.NUMBERS

    def __post_init__(self) -> None:
        check_name("a plot's", self.name)  # it is also a part of the page, between quotes


@dataclass(frozen=True, slots=True)
class Drawing:
    """A plot as files, and as a part of a page."""

    png: bytes
    svg: str
    inline: str


def draw(plot: Plot) -> Drawing:
    """Draw a plot; equal plots give equal bytes."""
    fixed = {"svg.hashsalt": plot.name, "svg.fonttype": "none", "font.size": 9.0}
    with style.context(["default", fixed]):  # whatever a user's own configuration says
        figure = _figure(plot)
        png, svg = io.BytesIO(), io.BytesIO()
        figure.savefig(png, format="png", metadata={"Software": None})
        figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = svg.getvalue().decode()
    return Drawing(png.getvalue(), text, _inline(plot, text))


def thin(xs: Sequence[float], ys: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return at most MOST_POINTS of the points: the ends, and of each stretch its lowest and its highest."""
    count = len(ys)
    if count <= MOST_POINTS:
        return tuple(xs), tuple(ys)
    stretches = MOST_POINTS // 2 - 1
    kept = {0, count - 1}
    for number in range(stretches):
        stretch = range(count * number // stretches, count * (number + 1) // stretches)
        kept |= {min(stretch, key=ys.__getitem__), max(stretch, key=ys.__getitem__)}
    places = sorted(kept)
    return tuple(xs[place] for place in places), tuple(ys[place] for place in places)


def _figure(plot: Plot) -> Figure:
    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=200, facecolor=Ink.PAPER)
    axes = figure.add_axes((0.125, 0.17, 0.595, 0.69), facecolor="none")
    for line in plot.lines:
        if line.xs:
            xs, ys = thin(line.xs, line.ys)
            marker, width = ("o", 1.6) if len(xs) <= _MARKED else ("", 1.2)
            drawn = axes.plot(
                xs, ys, color=line.ink, linewidth=width, marker=marker, markersize=2.6, clip_on=False
            )
        else:
            drawn = [axes.axhline(line.ys[0], color=line.ink, clip_on=False)]
        if line.ink in _DASHED:
            drawn[0].set(linewidth=1.1, dashes=(4, 2.5), marker="")
    _scale(axes, plot)
    lowest, top = axes.get_ylim()
    heights = _apart([(line.ys[-1] - lowest) / (top - lowest) for line in plot.lines], 0.085)
    for line, height in zip(plot.lines, heights, strict=True):
        axes.text(1.025, height, line.name, color=line.ink, transform=axes.transAxes, va="center", fontsize=9)
    return figure


def _scale(axes: Axes, plot: Plot) -> None:
    places = {x for line in plot.lines for x in line.xs}
    counted = all(x == int(x) for x in places)
    highest = max(max(line.ys) for line in plot.lines)
    axes.set_ylim(0, 1.0 if plot.scale is Scale.SHARES else 1.08 * highest or 1.0)
    axes.set_title(plot.title, loc="left", fontsize=9.5, color=Ink.TEXT, pad=9, parse_math=False)
    axes.set_xlabel(plot.across, color=Ink.TEXT)
    axes.grid(axis="y", color=Ink.GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=Ink.TEXT)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(Ink.GRID)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_locator(
        MaxNLocator(5, integer=counted) if len(places) > 1 else FixedLocator(sorted(places))
    )
    if plot.scale is Scale.SHARES:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Move labels as little as keeps them `gap` apart and the highest within the plot."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = list(heights)
    for below, above in pairwise(order):
        placed[above] = max(placed[above], placed[below] + gap)
    placed[order[-1]] = min(placed[order[-1]], 1.0)
    for above, below in pairwise(reversed(order)):
        placed[below] = min(placed[below], placed[above] - gap)
    return placed


def _inline(plot: Plot, svg: str) -> str:
    """Return the drawing as a part of a page: its names its own, its colours the style sheet's, no address in it."""
    body = svg[svg.index("<svg") :].rstrip()
    head, rest = body.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    rest = re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.DOTALL)
    rest = rest.replace("xlink:href", "href")
    rest = _NAMES.sub(lambda found: found[1] + plot.name + "-", rest)
    for ink in Ink:
        rest = rest.replace(ink.value, f"var(--{ink.name.lower()})")
    label = html.escape(f"{plot.title}, by {plot.across}")
    return f'<svg {box[0] if box else ""} role="img" aria-label="{label}">{rest}'
