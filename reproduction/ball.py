"""How far quantisation carries a clipped vector: the paper's circle, the proof's bound, and the exact radius."""

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from d2pfed.runs.report.plots import Ink
from reproduction.result import Context, Result, Table

DRAWN_LEVELS = 11  # the paper draws a grid of 0.2 in the unit disc
DRAWN_SQUARE = Fraction(34, 25)  # the radius of its outer circle, squared
ROOTS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 21, 28, 33, 48, 49)  # of dimensions at which k = sqrt(d) + 1 is whole


def attained_square(dimension: int, levels: int) -> Fraction:
    """Return (radius / D)^2 of the farthest point that a vector of norm at most D may be quantised to.

    Levels span [-D, D]. Exact: integers throughout.
    """
    return _square(dimension, levels, (levels - 1) ** 2 - 1)  # the vector lies strictly beyond its lower corner


def approached_square(dimension: int, levels: int) -> Fraction:
    """Return the same for vectors whose norm exceeds D by as little as one likes: the limit of the others in d."""
    return _square(dimension, levels, (levels - 1) ** 2)


def proof_radius(dimension: int, levels: int) -> float:
    """Return radius / D by the formula in the paper's proof: half a step per coordinate."""
    return 1 + math.sqrt(dimension) / (levels - 1)


def minkowski_radius(dimension: int, levels: int) -> float:
    """Return radius / D by the triangle inequality: a whole step per coordinate."""
    return 1 + 2 * math.sqrt(dimension) / (levels - 1)


def reachable(levels: int) -> list[tuple[int, int]]:
    """Return the points of the plane, in half steps, that a vector of norm at most D may be quantised to."""
    edge = levels - 1
    ends = range(-edge, edge + 1, 2)
    return [(x, y) for x in ends for y in ends if _cost(abs(x)) + _cost(abs(y)) < edge**2]


def make(context: Context) -> Result:
    """Draw the quantised disc, and the radius against the dimension for k = sqrt(d) + 1."""
    context.report("the quantised ball", 0.0)
    sides = [(root * root, root + 1) for root in ROOTS]
    rows = [_row(dimension, levels) for dimension, levels in [(2, DRAWN_LEVELS), *sides]]
    return Result(
        name="fig2",
        title="Figure 2: the quantised ball",
        table=Table(
            (
                "dimension",
                "levels",
                "proof's bound / D",
                "attained / D",
                "just above the clip / D",
                "triangle inequality / D",
            ),
            tuple(rows),
        ),
        words=_words(),
        ran={"dimensions": [dimension for dimension, _ in sides], "drawn levels": DRAWN_LEVELS},
        draw=lambda figure: _draw(figure, sides),
    )


@lru_cache  # table, words and drawing ask for the same few
def _square(dimension: int, levels: int, budget: int) -> Fraction:
    """Maximise the squared norm of level vectors whose lower corners' squares sum to at most the budget.

    Unit: half a step, so that levels are integers for odd k and even k alike. A coordinate that costs anything costs
    at least 1, so no more than `budget` of them can: the others are free.
    """
    ends = range((levels - 1) % 2, levels, 2)
    free = max(end**2 for end in ends if _cost(end) == 0)
    paid = [(_cost(end), end**2 - free) for end in ends if 0 < _cost(end) <= budget]
    gained = np.zeros(budget + 1, np.int64)
    for _ in range(min(dimension, budget)):
        before = gained.copy()
        for cost, gain in paid:
            np.maximum(gained[cost:], before[: budget + 1 - cost] + gain, out=gained[cost:])
        if np.array_equal(gained, before):
            break
    return Fraction(dimension * free + int(gained[-1]), (levels - 1) ** 2)


def _cost(end: int) -> int:
    """Return the least square at which a coordinate may be rounded outwards to this level."""
    return max(end - 2, 0) ** 2


def _row(dimension: int, levels: int) -> tuple[int | float, ...]:
    return (
        dimension,
        levels,
        proof_radius(dimension, levels),
        math.sqrt(attained_square(dimension, levels)),
        math.sqrt(approached_square(dimension, levels)),
        minkowski_radius(dimension, levels),
    )


def _words() -> tuple[str, str]:
    odd, even = math.sqrt(attained_square(48**2, 49)), math.sqrt(attained_square(49**2, 50))
    disc = (
        f"The circle that the paper draws (radius {math.sqrt(DRAWN_SQUARE):.3f} D) is exactly right for its grid, and "
        f"lies outside the bound in the proof, {proof_radius(2, DRAWN_LEVELS):.3f} D: rounding moves a coordinate by "
        "up to a whole step, of which the proof counts half."
    )
    growth = (
        f"With k = sqrt(d) + 1 the radius is not 2 D: it rises towards sqrt(7) D for odd k ({odd:.4f} D at d = 2304) "
        f"and towards 3 D for even k ({even:.4f} D at d = 2401), by exact dynamic programming, so that two quantised "
        "vectors can be nearly 5.29 D or 6 D apart, not 4 D. The column *just above the clip* is for vectors that are "
        "longer than D by as little as one likes, as rounding errors in a clip may leave them."
    )
    return disc, growth


def _draw(figure: Figure, sides: list[tuple[int, int]]) -> None:
    disc, growth = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _draw_disc(disc)
    _draw_growth(growth, sides)


def _draw_disc(axes: Axes) -> None:
    half_steps = DRAWN_LEVELS - 1
    points = np.array(reachable(DRAWN_LEVELS)) / half_steps
    outside = np.sum(points**2, axis=1) > 1
    axes.scatter(points[~outside, 0], points[~outside, 1], s=3, color=Ink.GRID)
    axes.scatter(points[outside, 0], points[outside, 1], s=9, color=Ink.LIMIT, zorder=3)
    circles = (
        (1.0, Ink.MAIN, "-", "clip D"),
        (proof_radius(2, DRAWN_LEVELS), Ink.TEXT, ":", "the proof's bound, 1.141 D"),
        (math.sqrt(DRAWN_SQUARE), Ink.LIMIT, "--", "drawn in the paper, 1.166 D: exact"),
        (minkowski_radius(2, DRAWN_LEVELS), Ink.THIRD, "-.", "triangle inequality, 1.283 D"),
    )
    turn = np.linspace(0, 2 * math.pi, 400)
    for radius, ink, dashes, name in circles:
        axes.plot(radius * np.cos(turn), radius * np.sin(turn), color=ink, linestyle=dashes, label=name)
    axes.set(xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal", title="A disc, 11 levels")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False, fontsize=7.5)


def _draw_growth(axes: Axes, sides: list[tuple[int, int]]) -> None:
    for parity, ink, marker, name in ((1, Ink.MAIN, "o", "odd k"), (0, Ink.THIRD, "s", "even k")):
        chosen = [(dimension, levels) for dimension, levels in sides if levels % 2 == parity]
        heights = [math.sqrt(attained_square(*side)) for side in chosen]
        axes.plot([side[0] for side in chosen], heights, color=ink, marker=marker, markersize=4, label=name)
    for height, ink, name in (
        (2, Ink.LIMIT, "the theorem: 2 D"),
        (math.sqrt(7), Ink.MAIN, "√7 D"),
        (3, Ink.THIRD, "3 D"),
    ):
        axes.axhline(height, color=ink, linestyle="--", linewidth=0.9)
        axes.annotate(
            name, (0.98, height), xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points",
            ha="right", color=ink, fontsize=8,
        )  # fmt: skip
    axes.set(
        xscale="log", xlabel="dimension d", ylabel="largest norm after quantisation / D", ylim=(1.3, 3.25),
        title="k = √d + 1 levels",
    )  # fmt: skip
    axes.legend(frameon=False, loc="lower right")
    axes.grid(color=Ink.GRID, linewidth=0.5)
