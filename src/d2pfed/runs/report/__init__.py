"""The report of a run: one HTML page that needs nothing else, light or dark, wide or narrow, and its plots as files."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from d2pfed.accounting import Adjacency, Guarantee, Unit, View, is_amplified, round_up
from d2pfed.errors import ConfigError
from d2pfed.ledger.files import replace_file, require_no_link
from d2pfed.numerics import canonical
from d2pfed.plan import record_terms
from d2pfed.runs.records import End, TrainingAudit
from d2pfed.runs.report.content import (
    AUDIT,
    BASELINE,
    Baseline,
    RunReport,
    in_bytes,
    percent,
    read_report,
    shown,
    table,
)
from d2pfed.runs.report.plots import Drawing, Ink, Plot, draw, plots_of

_MODE = 0o666  # as the umask allows: a report is for others to read
MOST_ROWS = 50  # of the table of rounds; the rest is in the metrics
_DARK = {
    Ink.PAPER: "#1b1f24",
    Ink.TEXT: "#e6e9ec",
    Ink.GRID: "#3a424b",
    Ink.MAIN: "#56b4e9",
    Ink.LIMIT: "#f0a050",
    Ink.THIRD: "#4fc9a4",
}


NO_PROTECTION = 20.0  # e^20 is half a billion: such an epsilon is a fact about the mechanism, not a protection

_SIGHT = {
    View.RELEASED: "Whoever sees the released models, and nothing of who took part,",
    View.SERVER: "The server, which sees every sum and knows every cohort,",
    View.CLIENT: "Another client of a cohort, which knows its own part of the noise,",
    View.ALONE: "The server together with all other clients, who tell it their noise,",
}
_OTHER_WORLD = {
    Adjacency.REPLACE_ONE: "anything else in its place",
    Adjacency.ZERO_OUT: "nothing but noise in its place",
}
_SIGHT_OF_SILOS = {
    View.RELEASED: "Whoever sees the released models",
    View.SERVER: "The server, which sees every sum,",
    View.CLIENT: "Another silo, which knows its own part of the noise,",
    View.ALONE: "The server together with all other silos, who tell it their noise,",
}


@dataclass(frozen=True, slots=True)
class GuaranteeText:
    """What one observer can learn, in words."""

    observer: str
    exact: str  # the epsilon as a machine reads it
    epsilon: str
    sentence: str
    scope: str
    so_far: str  # what was charged so far, if the run stopped early and blind to its outputs; else empty


def write_report(report: RunReport, directory: Path) -> Path:
    """Write report.html, and each plot as plots/NAME.png and .svg; return the page's path.

    A crash leaves each file old or new, never a part; equal reports give equal bytes.
    """
    drawn = [(plot, draw(plot)) for plot in plots_of(report)]
    page = render(report, drawn)
    try:
        keep_plots(directory, drawn)
        replace_file(directory / "report.html", page.encode(), mode=_MODE)
    except OSError as error:
        raise ConfigError(f"cannot write the report in {directory}: {error.strerror}") from error
    return directory / "report.html"


def keep_plots(directory: Path, drawn: Sequence[tuple[Plot, Drawing]]) -> Path:
    """Write plots into a run's folder of them, made if there is none, and return it."""
    plots = directory / "plots"
    require_no_link(plots)
    plots.mkdir(exist_ok=True)
    for plot, drawing in drawn:
        replace_file(plots / f"{plot.name}.png", drawing.png, mode=_MODE)
        replace_file(plots / f"{plot.name}.svg", drawing.svg.encode(), mode=_MODE)
    return plots


def render(report: RunReport, drawn: Sequence[tuple[Plot, Drawing]]) -> str:
    """Return the page; equal reports give equal pages."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["marked"] = _marked
    template = environment.from_string(files(__package__).joinpath("page.html.j2").read_text("utf-8"))
    plan, summary, floats = report.plan, report.summary, 4 * report.summary.dimension
    size = f"An update has {summary.dimension:,} parameters, as 32-bit floats {floats:,} bytes."
    if plan is not None:
        size = (
            f"A masked vector has {plan.codec.length:,} coordinates for {summary.dimension:,} parameters, at "
            f"{summary.bits} bits each {summary.upload_bytes:,} bytes; as 32-bit floats it would be {floats:,} bytes, "
            f"{floats / summary.upload_bytes:.3g} times as much."
        )
        if plan.committee is not None:
            members = f"{plan.committee.size} of {plan.cohort_size:,} clients"
            size += f" All speak once, and {members} are asked again to open a sum."
    done, why = summary.rounds, summary.stopped
    after = f"after round {done:,} of {report.planned_rounds:,}"
    states = {
        End.COMPLETE: f"Finished after {done:,} round{'s' * (done != 1)}.",
        End.STOPPED: f"Finished {after}, by its declared rule: {why}.",
        End.INTERRUPTED: f"Stopped {after}: {why or 'rounds are left'}. The same command resumes it; the test data "
        "stay closed until the end.",
        End.EXHAUSTED: f"Ended {after}: {why}. It cannot go on, and the test data stay closed.",
    }
    warnings = [] if report.plan_summary is None else list(report.plan_summary.warnings)
    if plan is None:
        warnings.insert(0, "This run was trained in the clear: it protects nobody.")
    elif summary.repeatable:
        warnings.insert(0, "This run repeats from its seed: anyone who knows the seed can remove the noise.")
    laps = [lap for record in report.rounds for lap in record.exchanges]
    exchanges = []  # with the median of their seconds and the share of those asked that answered
    for name in dict.fromkeys(lap.name for lap in laps):
        own = [lap for lap in laps if lap.name == name]
        asked, answered = sum(lap.asked for lap in own), sum(lap.answered for lap in own)
        exchanges.append((name, f"{median(lap.seconds for lap in own):.2f}", f"{answered:,} of {asked:,}"))
    return template.render(
        report=report,
        light={ink.name.lower(): ink.value for ink in Ink},
        dark={ink.name.lower(): colour for ink, colour in _DARK.items()},
        state=states[summary.end],
        facts=_facts(report),
        guarantees=[guarantee_text(report, item) for item in summary.guarantees],
        meaning="" if plan is None else " ".join(record_terms(plan)) or meaning(plan.adjacency),
        audit="" if report.audit is None else audit_text(report.audit),
        # The guarantee to `released` rests on nobody else knowing who took part.
        amplified=plan is not None and is_amplified(plan.sampling),
        warnings=warnings,
        figures=[(Markup(drawing.inline), plot.caption) for plot, drawing in drawn],  # noqa: S704 - our own drawing, escaped where it was made
        size=size,
        fold=_fold_text(report) if report.is_folded and report.rounds else "",
        rows=_rows(report),
        exchanges=exchanges,
        plan=() if plan is None else table(json.loads(canonical.encode(plan))),
        digest="" if plan is None else plan.digest.hex(),
    )


def _fold_text(report: RunReport) -> str:
    """Return what compression cost, as the released sums show it."""
    found = [report.rho_in(record) for record in report.rounds]
    first, middle, most = (
        f"{100 * (math.sqrt(1 + rho) - 1):.3g}" for rho in (found[0], median(found), max(found))
    )
    length = 0 if report.plan is None else report.plan.codec.length
    return (
        f"Measured: rho, the mean's square over {length:,} times the variance of its noise, was {found[0]:.2g} in the "
        f"first round, {median(found):.2g} in the median and {max(found):.2g} at most, with an error of about "
        f"{math.sqrt(2 / length):.2g}. Compression cost what {first}, {middle} and {most} % more noise would have."
    )


def _facts(report: RunReport) -> list[tuple[str, str, str]]:
    """Return the numbers that a reader wants first, each with its name and a note."""
    summary, plan, tested = report.summary, report.plan, report.summary.test_metrics
    unopened = "test data not opened yet" if tested is None else "no test data was given"
    found, note = (tested, "opened once, at the end") if tested else (summary.metrics, unopened)
    if found:
        name = "accuracy" if "accuracy" in found else next(iter(found))
        facts = [(f"{'Test' if tested else 'Validation'} {name}", shown(name, found[name]), note)]
    else:
        facts = [("Metrics", "none", "no evaluation was given" if report.rounds else "no round is complete")]
    if plan is None:
        facts.append(("Epsilon", "none", "trained in the clear"))
    else:
        # An observer that is not listed has the plan's own guarantee.
        listed = {item.observer: item.epsilon for item in summary.guarantees}
        asked, delta = plan.planned_against, round_up(plan.delta, 3)
        epsilon = round_up(listed.get(asked, plan.epsilon), 4)
        charged = f"{summary.charged:,} of {plan.max_attempts:,}"
        facts += [
            (
                "Epsilon",
                epsilon,
                f"against {asked}, delta {delta}; {plan.epsilon:g} was asked for, of the whole plan",
            ),
            ("Attempts", charged, "charged, of all that epsilon covers"),
        ]
    width = 32 if summary.bits is None else summary.bits
    upload = ("Upload", in_bytes(summary.upload_bytes), "per client per round")
    if report.plan_summary is not None and report.plan_summary.traffic is not None:
        sent = report.plan_summary.traffic.client.sent
        upload = ("Upload", in_bytes(sent), f"per client per round; {summary.upload_bytes:,} bytes are its vector")
    return [*facts, upload, ("Width", f"{width} bits", "per coordinate")]


def _rows(report: RunReport) -> list[dict[str, Sequence[str]]]:
    """Return the table of at most MOST_ROWS rounds, evenly spread; what is secret or unknown is empty."""
    rounds, last, plan = report.rounds, len(report.rounds) - 1, report.plan
    if last >= MOST_ROWS:
        rounds = tuple(rounds[round(number * last / (MOST_ROWS - 1))] for number in range(MOST_ROWS))
    rows = []
    for record in rounds:
        survivors, seconds = record.survivors, record.seconds
        clipping: tuple[str, ...] = ()  # the clip and the fraction clipped, where the clip adapts
        if record.clip is not None and plan is not None and plan.adaptive_clip is not None:
            share = record.fraction_clipped
            clipping = f"{record.clip:.4g}", "" if share is None else percent(share)
        failures: tuple[str, ...] = ()  # with the standard error that the noise adds, where they are counted
        if plan is not None and plan.counts_failures:
            error = plan.failures_error(record.survivors or plan.quorum)
            failures = ("" if record.failures is None else f"{record.failures:.1f} \u00b1 {error:.1f}",)
        metrics = record.metrics
        row = {
            "round": f"{record.round:,}",
            "metrics": [shown(name, metrics[name]) if name in metrics else "" for name in report.metric_names],
            "charged": f"{record.charged:,}",
            "update_norm": f"{record.update_norm:.4g}",
            "clipping": clipping,
            "rho": [f"{report.rho_in(record):.3g}"] if report.is_folded else [],
            "survivors": "" if survivors is None else f"{survivors:,}",
            "failures": failures,
            "seconds": "" if seconds is None else f"{seconds:.2f}",
        }
        rows.append(row)
    return rows


def _marked(text: str) -> Markup:
    """Return a text with what stands between backticks as code."""
    parts = [escape(part) for part in text.split("`")]
    if len(parts) % 2 == 0:
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else part for place, part in enumerate(parts)
    )


def guarantee_text(report: RunReport, item: Guarantee) -> GuaranteeText:
    """Return one observer's guarantee in words: what it sees, what it can learn, and what that rests on."""
    of_records, colluders = item.unit is Unit.RECORD, item.observer.colluders
    if item.observer.view is View.COLLUDING:
        kind, one = "silo" if of_records else "client", colluders == 1
        helpers = f"{colluders} {kind}{'s' * (not one)} that tell{'s' * one}"
        sight = f"The server together with {helpers} it their noise,"
    else:
        sight = (_SIGHT_OF_SILOS if of_records else _SIGHT)[item.observer.view]
    often = {1: "once", 2: "twice"}.get(item.max_participations, f"{item.max_participations:,} times")
    scope = f"cohorts {item.sampling}; each client contributes at most {often}"
    if of_records:
        scope = f"{item.sampling}; each silo sends at most {item.max_participations:,} vectors"
    bound = f"epsilon {round_up(item.epsilon, 4)} at delta {round_up(item.delta, 3)}"
    if not math.isfinite(item.epsilon):
        because = f": {item.reason}" if item.reason else ""
        limit = f"may learn anything about a {item.unit}: epsilon is infinite{because}."
    elif item.epsilon > NO_PROTECTION:
        limit = f"can learn about one {item.unit} what {bound} allows, which is too much to call a protection."
    else:
        factor = round_up(math.exp(item.epsilon), 3)
        limit = f"can learn about one {item.unit} no more than {bound} allows: a factor of {factor}."
    part = {other.observer: other.epsilon for other in report.summary.so_far}.get(item.observer)
    return GuaranteeText(
        observer=str(item.observer),
        exact=repr(item.epsilon),
        epsilon=round_up(item.epsilon, 4),
        sentence=f"{sight} {limit}",
        scope=f"Per {item.unit}, {item.adjacency}; {scope}.",
        so_far="" if part is None else round_up(part, 4),
    )


def audit_text(audit: TrainingAudit) -> str:
    """Return what the canaries of a run showed, beside the claim; lower bounds are rounded down."""
    lower, gaussian = (f"{math.floor(1000 * bound) / 1000:g}" for bound in (audit.lower, audit.gaussian))
    verdict = "which refutes the claim of" if audit.is_refuted else "beside the claimed"
    return (
        f"Audited with canary {audit.unit}s: {audit.correct:,} of {audit.guesses:,} guesses of the {audit.observer} "
        f"were right, so epsilon is at least {lower}, or {gaussian} if the noise is Gaussian, with confidence "
        f"{percent(audit.confidence)}, {verdict} {round_up(audit.claimed, 4)}, at delta {round_up(audit.delta, 3)}. "
        f"{audit.shows}"
    )


def meaning(adjacency: Adjacency) -> str:
    """Return what an epsilon says, for the two worlds that it compares."""
    return (
        "Whatever an observer concludes about a client is at most e^epsilon times as likely, plus delta, with the "
        f"client's own contribution as with {_OTHER_WORLD[adjacency]} ({adjacency}), and the other way round."
    )
