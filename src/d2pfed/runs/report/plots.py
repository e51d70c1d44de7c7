"""The plots of a run: lines with their names beside them, in colours that a style sheet can replace."""

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, PercentFormatter

from d2pfed.accounting import round_up
from d2pfed.plan import Plan
from d2pfed.plan.bounds import check_name, is_plain
from d2pfed.runs.records import RoundRecord
from d2pfed.runs.report.content import RunReport, in_bytes, percent, shown, unit_of

MOST_POINTS = 400  # of one line: more than its pixels can show
_MARKED = 40  # with so few points each one is marked
_WIDTH, _HEIGHT = 4.2, 2.75  # inches: small, so that letters stay legible on a phone
_LATE = 10  # rounds that the fraction clipped is averaged over
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
    across: str = "round"  # what the horizontal axis counts
    lines: tuple[Line, ...]
    is_share: bool = False  # heights are from 0 % to 100 %, not from 0 to a little above the highest
    least: float = 0.0  # where both axes begin if they are logarithmic, up to 1; 0: they are not
    caption: str = ""  # what it says

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
        figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=200, facecolor=Ink.PAPER)
        axes = figure.add_axes((0.125, 0.17, 0.595, 0.69), facecolor="none")
        for line in plot.lines:
            if line.xs:
                xs, ys = (line.xs, line.ys) if plot.least else thin(line.xs, line.ys)
                marker, width = ("o", 1.6) if len(xs) <= _MARKED else ("", 1.2)
                drawn = axes.plot(xs, ys, color=line.ink, linewidth=width, marker=marker, markersize=2.6)
                drawn[0].set_clip_on(bool(plot.least))
            else:
                drawn = [axes.axhline(line.ys[0], color=line.ink, clip_on=False)]
            if line.ink in _DASHED:
                drawn[0].set(linewidth=1.1, dashes=(4, 2.5), marker="")
        places = {x for line in plot.lines for x in line.xs}
        counted = all(x == int(x) for x in places)
        highest = max(max(line.ys) for line in plot.lines)
        axes.set_ylim(0, 1.0 if plot.is_share else 1.08 * highest or 1.0)
        axes.set_title(plot.title, loc="left", fontsize=9.5, color=Ink.TEXT, pad=9, parse_math=False)
        axes.set_xlabel(plot.across, color=Ink.TEXT)
        axes.grid(axis="y", color=Ink.GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", length=0, colors=Ink.TEXT)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(Ink.GRID)
        if plot.least:
            axes.set(xscale="log", yscale="log", xlim=(plot.least, 1), ylim=(plot.least, 1))
        else:
            axes.yaxis.set_major_locator(MaxNLocator(5))
            axes.xaxis.set_major_locator(
                MaxNLocator(5, integer=counted) if len(places) > 1 else FixedLocator(sorted(places))
            )
        if plot.is_share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        lowest, top = axes.get_ylim()
        heights = _apart([(line.ys[-1] - lowest) / (top - lowest) for line in plot.lines], 0.085)
        for line, height in zip(plot.lines, heights, strict=True):
            axes.text(1.025, height, line.name, color=line.ink, transform=axes.transAxes, va="center", fontsize=9)
        png, svg = io.BytesIO(), io.BytesIO()
        figure.savefig(png, format="png", metadata={"Software": None})
        figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = svg.getvalue().decode()
    # As a part of a page: its names its own, its colours the style sheet's, no address in it.
    head, rest = text[text.index("<svg") :].rstrip().split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    rest = re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.DOTALL).replace("xlink:href", "href")
    rest = _NAMES.sub(lambda found: found[1] + plot.name + "-", rest)
    for ink in Ink:
        rest = rest.replace(ink.value, f"var(--{ink.name.lower()})")
    label = html.escape(f"{plot.title}, by {plot.across}")
    inline = f'<svg {box[0] if box else ""} role="img" aria-label="{label}">{rest}'
    return Drawing(png.getvalue(), text, inline)


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


def plots_of(report: RunReport) -> list[Plot]:
    """Return the plots that this run allows: none without a round, no survivors where sizes are secret."""
    metrics = [_metric_plot(report, name, number) for number, name in enumerate(report.metric_names, 1)]
    if report.rounds and report.plan is not None:
        upload, attempts = _upload_plot(report, report.plan), _attempts_plot(report, report.plan)
        private = [upload, attempts, *_norm_plots(report, report.plan)]
        metrics = [*metrics[:1], *private, *metrics[1:], _survivors_plot(report, report.plan)]
    return [plot for plot in metrics if plot is not None]


def _numbers(rounds: tuple[RoundRecord, ...]) -> tuple[float, ...]:
    return tuple(float(record.round) for record in rounds)


def _measured(rounds: tuple[RoundRecord, ...], name: str) -> tuple[RoundRecord, ...]:
    """Return the rounds after which the model was evaluated, if all of them have a finite value; else none."""
    found = tuple(record for record in rounds if name in record.metrics)
    return found if all(math.isfinite(record.metrics[name]) for record in found) else ()


def _metric_plot(report: RunReport, name: str, number: int) -> Plot | None:
    rounds = _measured(report.rounds, name)
    if not rounds:
        return None
    values = tuple(record.metrics[name] for record in rounds)
    lines = [Line(shown(name, values[-1]), Ink.MAIN, values, _numbers(rounds))]
    caption = f"From {values[0]:.4g} after the first round to {values[-1]:.4g} after the last."
    if name == "accuracy":
        best = max(rounds, key=lambda record: record.metrics[name])
        caption = (
            f"Best {shown(name, best.metrics[name])}, after round {best.round}; last {shown(name, values[-1])}."
        )
    if report.baseline is not None and (others := _measured(report.baseline.rounds, name)):
        heights = tuple(record.metrics[name] for record in others)
        end = shown(name, heights[-1])
        lines.append(Line(f"baseline {end}", Ink.THIRD, heights, _numbers(others)))
        caption += f" The baseline {report.baseline.name} ends at {end}."
    file = name if is_plain(name) else f"metric-{number}"
    title, is_share = f"Validation {name}", name == "accuracy"
    return Plot(name=file, title=title, lines=tuple(lines), is_share=is_share, caption=caption)


def _attempts_plot(report: RunReport, plan: Plan) -> Plot:
    counts = tuple(float(record.charged) for record in report.rounds)
    most, charged, epsilon = plan.max_attempts, report.summary.charged, round_up(plan.epsilon, 4)
    lines = (
        Line(f"most {most:,}", Ink.LIMIT, (float(most),)),
        Line(f"charged {charged:,}", Ink.MAIN, counts, _numbers(report.rounds)),
    )
    caption = (
        f"Epsilon {epsilon} at delta {round_up(plan.delta, 3)} against {plan.planned_against} covers {most:,} "
        f"attempts, however the run ends; {charged:,} were charged."
    )
    return Plot(name="attempts", title="Attempts charged", lines=lines, caption=caption)


def _upload_plot(report: RunReport, plan: Plan) -> Plot | None:
    name = next(iter(report.metric_names), "")
    rounds = _measured(report.rounds, name)
    if not rounds:
        return None
    heights = tuple(record.metrics[name] for record in rounds)
    share = plan.sampling.cohort_size / plan.sampling.population
    traffic = None if report.plan_summary is None else report.plan_summary.traffic
    each = report.rounds[-1].upload_bytes if traffic is None else traffic.client.sent
    sums = accumulate(each * share for _ in report.rounds)
    by_round = dict(zip(_numbers(report.rounds), sums, strict=True))
    sizes = tuple(by_round[record.round] for record in rounds)
    total, (unit, scale) = sizes[-1], unit_of(sizes[-1])
    most = min(plan.max_participations, report.rounds[-1].charged)
    return Plot(
        name="upload",
        title=f"Validation {name} against upload",
        across=f"{unit} sent by a client, on average",
        lines=(Line(shown(name, heights[-1]), Ink.MAIN, heights, tuple(size / scale for size in sizes)),),
        is_share=name == "accuracy",
        caption=f"A client that takes part in a round sends {each:,} bytes. It is asked in {100 * share:.3g} % of the "
        f"rounds, so {in_bytes(total)} on average so far, and {in_bytes(most * each)} at most.",
    )


def _norm_plots(report: RunReport, plan: Plan) -> list[Plot]:
    """Return noise and signal by round and, where the clip adapts, the clip and the fraction of updates beyond it."""
    numbers, clips = _numbers(report.rounds), tuple(report.clip_in(record) for record in report.rounds)
    norms = tuple(record.update_norm for record in report.rounds)
    noises = tuple(report.noise_in(record) for record in report.rounds)
    signals = tuple(report.signal_in(record) for record in report.rounds)
    fixed, steady = len(set(clips)) == 1, len(set(noises)) == 1
    noise = Plot(
        name="noise",
        title="Norm of the mean update",
        lines=(
            Line(f"clip {clips[-1]:.4g}", Ink.TEXT, clips[:1] if fixed else clips, () if fixed else numbers),
            Line(
                f"noise {noises[-1]:.3g}", Ink.LIMIT, noises[:1] if steady else noises, () if steady else numbers
            ),
            Line(f"measured {norms[-1]:.3g}", Ink.MAIN, norms, numbers),
            Line(f"signal {signals[-1]:.3g}", Ink.THIRD, signals, numbers),
        ),
        caption=f"Measured is the mean with its noise, whose expected norm in the last round is {noises[-1]:.4g}: "
        f"{noises[-1] / clips[-1]:.3g} times the clip, which no client's update exceeds. "
        "Signal is what the noise does not explain.",
    )
    if plan.adaptive_clip is None:
        return [noise]
    shares = tuple(record.fraction_clipped or 0.0 for record in report.rounds)
    wanted, late = 1 - plan.adaptive_clip.quantile, shares[-min(len(shares), _LATE) :]
    moved = Plot(
        name="clip",
        title="Clip",
        lines=(Line(f"clip {clips[-1]:.4g}", Ink.MAIN, clips, numbers),),
        caption=f"From {clips[0]:.4g} in the first round to {clips[-1]:.4g} in the last; it is public.",
    )
    clipped = Plot(
        name="clipped",
        title="Fraction of updates clipped",
        lines=(
            Line(f"target {percent(wanted)}", Ink.LIMIT, (wanted,)),
            Line(f"estimate {percent(shares[-1])}", Ink.MAIN, shares, numbers),
        ),
        is_share=True,
        caption=f"Estimated from one bit per client inside the private sum; {percent(sum(late) / len(late))} on "
        f"average over the last {len(late):,} rounds. A client that was missing or had nothing to send counts as one "
        "half.",
    )
    return [noise, moved, clipped]


def _survivors_plot(report: RunReport, plan: Plan) -> Plot | None:
    counts = [record.survivors for record in report.rounds if record.survivors is not None]
    if len(counts) < len(report.rounds):
        return None
    cohort, quorum = plan.cohort_size, plan.quorum
    lines = [Line(f"cohort {cohort:,}", Ink.TEXT, (float(cohort),))]
    if quorum < cohort:
        lines.append(Line(f"quorum {quorum:,}", Ink.LIMIT, (float(quorum),)))
    lines.append(Line(f"last {counts[-1]:,}", Ink.MAIN, tuple(map(float, counts)), _numbers(report.rounds)))
    again = sum(1 for record in report.rounds if record.attempt)
    retried = f" {again:,} of {len(counts):,} rounds needed more than one attempt." if again else ""
    some = f"Between {min(counts):,} and {max(counts):,} of {cohort:,} clients were in a round's sum"
    present = f"All {cohort:,} clients of every cohort were in its sum" if min(counts) == cohort else some
    caption = f"{present}; a sum over fewer than {quorum:,} is never unmasked.{retried}"
    return Plot(name="survivors", title="Survivors", lines=tuple(lines), caption=caption)
