"""Which plots a run has, and the sentence under each."""

import math
from dataclasses import dataclass
from itertools import accumulate

from d2pfed.accounting import round_up
from d2pfed.plan import Plan
from d2pfed.plan.bounds import is_plain
from d2pfed.runs.records import RoundRecord
from d2pfed.runs.report.plots import Ink, Line, Plot, Scale
from d2pfed.runs.report.run_report import RunReport
from d2pfed.runs.report.wording import in_bytes, percent, shown, unit_of

_LATE = 10  # rounds that the fraction clipped is averaged over


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot and what it says."""

    plot: Plot
    caption: str


def panels(report: RunReport) -> tuple[Panel, ...]:
    """Return the plots that this run allows: none without a round."""
    if not report.rounds:
        return ()
    metrics = [_metric(report, name, number) for number, name in enumerate(report.metric_names, 1)]
    private = (
        (*_upload(report), _attempts(report, report.plan), _noise(report), *_clipping(report, report.plan))
        if report.plan
        else ()
    )
    survivors = () if report.plan is None else _survivors(report, report.plan)
    found = (*metrics[:1], *private, *metrics[1:], *survivors)
    return tuple(panel for panel in found if panel is not None)


def _numbers(report: RunReport) -> tuple[float, ...]:
    return tuple(float(record.round) for record in report.rounds)


def _measured(rounds: tuple[RoundRecord, ...], name: str) -> tuple[RoundRecord, ...]:
    """Return the rounds after which the model was evaluated, if all of them have a finite value; else none."""
    found = tuple(record for record in rounds if name in record.metrics)
    return found if all(math.isfinite(record.metrics[name]) for record in found) else ()


def _line(rounds: tuple[RoundRecord, ...], name: str, label: str, ink: Ink) -> Line:
    heights = tuple(record.metrics[name] for record in rounds)
    return Line(label, ink, heights, tuple(float(record.round) for record in rounds))


def _metric(report: RunReport, name: str, number: int) -> Panel | None:
    rounds = _measured(report.rounds, name)
    if not rounds:
        return None
    first, last = rounds[0].metrics[name], rounds[-1].metrics[name]
    is_share = name == "accuracy"
    lines = [_line(rounds, name, shown(name, last), Ink.MAIN)]
    beside = ""
    if report.baseline is not None and (others := _measured(report.baseline.rounds, name)):
        end = shown(name, others[-1].metrics[name])
        lines.append(_line(others, name, f"baseline {end}", Ink.THIRD))
        beside = f" The baseline {report.baseline.name} ends at {end}."
    scale = {"scale": Scale.SHARES} if is_share else {}
    file = name if is_plain(name) else f"metric-{number}"
    plot = Plot(name=file, title=f"Validation {name}", across="round", lines=tuple(lines), **scale)
    if is_share:
        best = max(rounds, key=lambda record: record.metrics[name])
        text = f"Best {shown(name, best.metrics[name])}, after round {best.round}; last {shown(name, last)}."
        return Panel(plot, text + beside)
    return Panel(plot, f"From {first:.4g} after the first round to {last:.4g} after the last.{beside}")


def _attempts(report: RunReport, plan: Plan) -> Panel:
    counts = tuple(float(record.charged) for record in report.rounds)
    most, epsilon = plan.max_attempts, round_up(plan.epsilon, 4)
    lines = (
        Line(f"most {most:,}", Ink.LIMIT, (float(most),)),
        Line(f"charged {report.summary.charged:,}", Ink.MAIN, counts, _numbers(report)),
    )
    plot = Plot(name="attempts", title="Attempts charged", across="round", lines=lines)
    return Panel(
        plot,
        f"Epsilon {epsilon} at delta {round_up(plan.delta, 3)} against {plan.against} covers {most:,} "
        f"attempts, however the run ends; {report.summary.charged:,} were charged.",
    )


def _upload(report: RunReport) -> tuple[Panel, ...]:
    if report.plan is None or not report.metric_names:
        return ()
    name = report.metric_names[0]
    rounds = _measured(report.rounds, name)
    if not rounds:
        return ()
    heights = tuple(record.metrics[name] for record in rounds)
    sums = dict(zip(_numbers(report), accumulate(record.upload_bytes for record in report.rounds), strict=True))
    sizes = tuple(sums[record.round] for record in rounds)
    total, (unit, scale) = sizes[-1], unit_of(sizes[-1])
    line = Line(shown(name, heights[-1]), Ink.MAIN, heights, tuple(size / scale for size in sizes))
    plot = Plot(
        name="upload",
        title=f"Validation {name} against upload",
        across=f"{unit} sent by a client in every round",
        lines=(line,),
        **({"scale": Scale.SHARES} if name == "accuracy" else {}),
    )
    share = report.plan.sampling.cohort_size / report.plan.sampling.population
    caption = (
        f"{report.rounds[-1].upload_bytes:,} bytes per round, {in_bytes(total)} for a client in every round so far; "
        f"{in_bytes(total * share)} on average, as a client is asked in {100 * share:.3g} % of the rounds."
    )
    return (Panel(plot, caption),)


def _noise(report: RunReport) -> Panel:
    numbers, clips = _numbers(report), tuple(report.clip_in(record) for record in report.rounds)
    clip, fixed = clips[-1], len(set(clips)) == 1
    norms = tuple(record.update_norm for record in report.rounds)
    noises = tuple(report.noise_in(record) for record in report.rounds)
    signals = tuple(report.signal_in(record) for record in report.rounds)
    steady = len(set(noises)) == 1
    lines = (
        Line(f"clip {clip:.4g}", Ink.TEXT, clips[:1] if fixed else clips, () if fixed else numbers),
        Line(f"noise {noises[-1]:.3g}", Ink.LIMIT, noises[:1] if steady else noises, () if steady else numbers),
        Line(f"measured {norms[-1]:.3g}", Ink.MAIN, norms, numbers),
        Line(f"signal {signals[-1]:.3g}", Ink.THIRD, signals, numbers),
    )
    plot = Plot(name="noise", title="Norm of the mean update", across="round", lines=lines)
    return Panel(
        plot,
        f"Measured is the mean with its noise, whose expected norm in the last round is {noises[-1]:.4g}: "
        f"{noises[-1] / clip:.3g} times the clip, which no client's update exceeds. "
        "Signal is what the noise does not explain.",
    )


def _clipping(report: RunReport, plan: Plan) -> tuple[Panel, ...]:
    """Return the clip and the fraction of updates beyond it by round, where the clip adapts."""
    adaptive = plan.adaptive_clip
    if adaptive is None:
        return ()
    numbers, clips = _numbers(report), tuple(report.clip_in(record) for record in report.rounds)
    shares = tuple(record.fraction_clipped or 0.0 for record in report.rounds)
    wanted = 1 - adaptive.quantile
    moved = Plot(
        name="clip",
        title="Clip",
        across="round",
        lines=(Line(f"clip {clips[-1]:.4g}", Ink.MAIN, clips, numbers),),
    )
    clipped = Plot(
        name="clipped",
        title="Fraction of updates clipped",
        across="round",
        lines=(
            Line(f"target {percent(wanted)}", Ink.LIMIT, (wanted,)),
            Line(f"estimate {percent(shares[-1])}", Ink.MAIN, shares, numbers),
        ),
        scale=Scale.SHARES,
    )
    late = shares[-min(len(shares), _LATE) :]
    return (
        Panel(moved, f"From {clips[0]:.4g} in the first round to {clips[-1]:.4g} in the last; it is public."),
        Panel(
            clipped,
            f"Estimated from one bit per client inside the private sum; {percent(sum(late) / len(late))} on average "
            f"over the last {len(late):,} rounds. A client that was missing or had nothing to send counts as one half.",
        ),
    )


def _survivors(report: RunReport, plan: Plan) -> tuple[Panel, ...]:
    counts = [record.survivors for record in report.rounds if record.survivors is not None]
    if len(counts) < len(report.rounds):
        return ()
    cohort, quorum = plan.cohort_size, plan.quorum
    limits = [Line(f"cohort {cohort:,}", Ink.TEXT, (float(cohort),))]
    if quorum < cohort:
        limits.append(Line(f"quorum {quorum:,}", Ink.LIMIT, (float(quorum),)))
    line = Line(f"last {counts[-1]:,}", Ink.MAIN, tuple(map(float, counts)), _numbers(report))
    plot = Plot(name="survivors", title="Survivors", across="round", lines=(*limits, line))
    again = sum(1 for record in report.rounds if record.attempt)
    retried = f" {again:,} of {len(counts):,} rounds needed more than one attempt." if again else ""
    some = f"Between {min(counts):,} and {max(counts):,} of {cohort:,} clients were in a round's sum"
    present = f"All {cohort:,} clients of every cohort were in its sum" if min(counts) == cohort else some
    caption = f"{present}; a sum over fewer than {quorum:,} is never unmasked.{retried}"
    return (Panel(plot, caption),)
