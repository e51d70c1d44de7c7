"""Which plots a run has, and the sentence under each."""

import math
from dataclasses import dataclass
from itertools import accumulate

from d2pfed.accounting import round_up
from d2pfed.runs.report.plots import Ink, Line, Plot, Scale
from d2pfed.runs.report.story import Story
from d2pfed.runs.report.wording import in_bytes, percent, unit_of


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot and what it says."""

    plot: Plot
    caption: str


def panels(story: Story) -> tuple[Panel, ...]:
    """Return the plots that this run allows: none without a round, no survivors where sizes are secret."""
    if not story.rounds:
        return ()
    found = [_accuracy(story), _attempts(story), _upload(story), _noise(story), _loss(story)]
    survivors = () if story.secret_sizes else _survivors(story)
    return (*(panel for panel in found if panel is not None), *survivors)


def _numbers(story: Story) -> tuple[float, ...]:
    return tuple(float(point.round) for point in story.rounds)


def _accuracy(story: Story) -> Panel:
    heights = tuple(point.accuracy for point in story.rounds)
    line = Line(percent(heights[-1]), Ink.MAIN, heights, _numbers(story))
    plot = Plot(name="accuracy", title="Validation accuracy", across="round", lines=(line,), scale=Scale.SHARES)
    best = max(story.rounds, key=lambda point: point.accuracy)
    return Panel(plot, f"Best {percent(best.accuracy)}, after round {best.round}; last {percent(heights[-1])}.")


def _loss(story: Story) -> Panel | None:
    heights = tuple(point.loss for point in story.rounds)
    if not all(math.isfinite(height) for height in heights):
        return None
    line = Line(f"{heights[-1]:.4g}", Ink.MAIN, heights, _numbers(story))
    plot = Plot(name="loss", title="Validation loss", across="round", lines=(line,))
    return Panel(plot, f"From {heights[0]:.4g} after the first round to {heights[-1]:.4g} after the last.")


def _attempts(story: Story) -> Panel:
    counts = tuple(float(point.charged) for point in story.rounds)
    most, epsilon = story.plan.max_attempts, round_up(story.plan.epsilon, 4)
    lines = (
        Line(f"most {most:,}", Ink.LIMIT, (float(most),)),
        Line(f"charged {story.charged:,}", Ink.MAIN, counts, _numbers(story)),
    )
    plot = Plot(name="attempts", title="Attempts charged", across="round", lines=lines)
    return Panel(
        plot,
        f"Epsilon {epsilon} at delta {round_up(story.plan.delta, 3)} against {story.plan.against} covers {most:,} "
        f"attempts, however the run ends; {story.charged:,} were charged.",
    )


def _upload(story: Story) -> Panel:
    sizes = tuple(accumulate(point.upload_bytes for point in story.rounds))
    total, (unit, scale) = sizes[-1], unit_of(sizes[-1])
    heights = tuple(point.accuracy for point in story.rounds)
    line = Line(percent(heights[-1]), Ink.MAIN, heights, tuple(size / scale for size in sizes))
    plot = Plot(
        name="upload",
        title="Validation accuracy against upload",
        across=f"{unit} sent by a client in every round",
        lines=(line,),
        scale=Scale.SHARES,
    )
    share = story.plan.sampling.cohort_size / story.plan.sampling.population
    return Panel(
        plot,
        f"{story.rounds[-1].upload_bytes:,} bytes a round, {in_bytes(total)} for a client in every round so far; "
        f"{in_bytes(total * share)} on average, as a client is asked in {100 * share:.3g} % of the rounds.",
    )


def _noise(story: Story) -> Panel:
    numbers, clip = _numbers(story), story.plan.codec.clip
    norms = tuple(point.update_norm for point in story.rounds)
    noises = tuple(story.noise_in(point) for point in story.rounds)
    signals = tuple(story.signal_in(point) for point in story.rounds)
    steady = len(set(noises)) == 1
    lines = (
        Line(f"clip {clip:.4g}", Ink.TEXT, (clip,)),
        Line(f"noise {noises[-1]:.3g}", Ink.LIMIT, noises[:1] if steady else noises, () if steady else numbers),
        Line(f"measured {norms[-1]:.3g}", Ink.MAIN, norms, numbers),
        Line(f"signal {signals[-1]:.3g}", Ink.THIRD, signals, numbers),
    )
    plot = Plot(name="noise", title="Norm of the mean update", across="round", lines=lines)
    return Panel(
        plot,
        f"Measured is the mean with its noise, whose expected norm over a full cohort is {story.noise_norm:.4g}: "
        f"{story.explanation.noise_to_clip:.3g} times the clip, which no client's update exceeds. "
        "Signal is what the noise does not explain.",
    )


def _survivors(story: Story) -> tuple[Panel, ...]:
    counts = [point.survivors for point in story.rounds if point.survivors is not None]
    if len(counts) < len(story.rounds):
        return ()
    cohort, quorum = story.plan.cohort_size, story.plan.quorum
    limits = [Line(f"cohort {cohort:,}", Ink.TEXT, (float(cohort),))]
    if quorum < cohort:
        limits.append(Line(f"quorum {quorum:,}", Ink.LIMIT, (float(quorum),)))
    line = Line(f"last {counts[-1]:,}", Ink.MAIN, tuple(map(float, counts)), _numbers(story))
    plot = Plot(name="survivors", title="Survivors", across="round", lines=(*limits, line))
    again = sum(1 for point in story.rounds if point.attempt)
    retried = f" {again:,} of {len(counts):,} rounds needed more than one attempt." if again else ""
    some = f"Between {min(counts):,} and {max(counts):,} of {cohort:,} clients were in a round's sum"
    present = f"All {cohort:,} clients of every cohort were in its sum" if min(counts) == cohort else some
    caption = f"{present}; a sum over fewer than {quorum:,} is never unmasked.{retried}"
    return (Panel(plot, caption),)
