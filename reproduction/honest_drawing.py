"""The drawing beside CIFAR-10's true epsilon: noise against signal, and accuracy by round."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_HOPELESS, _PAPER, _OURS, _QUIET = "#b34700", "#8c8c8c", "#1b6ca8", "#555555"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What is drawn; the first setting is the paper's and the last is ours."""

    bars: tuple[tuple[str, float], ...]  # settings, and their noise in the mean over the clip
    courses: tuple[tuple[str, tuple[float, ...]], ...]  # settings, and their validation accuracy after each round
    test: float | None  # accuracy of our final model
    published: float  # the paper's accuracy

    def draw(self, figure: Figure) -> None:
        """Draw bars of noise above accuracy by round."""
        above, below = figure.subplots(2, 1, height_ratios=(1, 1.6))
        _draw_bars(above, self.bars)
        self._draw_courses(below)

    def _draw_courses(self, axes: Axes) -> None:
        for name, accuracies in self.courses:
            colour = _OURS if name == self.bars[-1][0] else _HOPELESS
            percents = [100 * accuracy for accuracy in accuracies]
            axes.plot(range(1, len(percents) + 1), percents, color=colour, label=f"{name} (validation)")
            if colour == _OURS and self.test is not None:
                axes.plot(len(percents), 100 * self.test, "o", color=colour)
                note = f"test {100 * self.test:.1f} %"
                axes.annotate(
                    note, (len(percents), 100 * self.test), (-6, -15), textcoords="offset points", ha="right"
                )
        claim = f"the paper's {100 * self.published:.1f} %, at a published epsilon that does not hold"
        axes.axhline(100 * self.published, color=_PAPER, linestyle="--", linewidth=1, label=claim)
        axes.set(xlabel="round", ylabel="accuracy, %", ylim=(0, 80))
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 5, 10]))
        axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.38), fontsize=8, frameon=False)
        _tidy(axes)


def _draw_bars(axes: Axes, bars: Sequence[tuple[str, float]]) -> None:
    names, heights = zip(*bars, strict=True)
    colours = [_HOPELESS if height > 1 else _OURS for height in heights]
    drawn = axes.barh(names, heights, color=colours, height=0.65)
    axes.bar_label(drawn, [f"{height:.2g}" for height in heights], padding=3, fontsize=8)
    axes.axvline(1, color=_QUIET, linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(min(0.1, min(heights) / 2), 4 * max(heights))
    axes.invert_yaxis()
    axes.set_xlabel("length of the noise in the mean, in lengths of the longest update", fontsize=8)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
