"""The page: one HTML text that needs nothing else, light or dark, wide or narrow."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import median

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from d2pfed.accounting import round_up
from d2pfed.runs.records import End, RoundRecord
from d2pfed.runs.report.panels import Panel
from d2pfed.runs.report.plots import Drawing, Ink
from d2pfed.runs.report.run_report import RunReport
from d2pfed.runs.report.tables import plan_table
from d2pfed.runs.report.wording import audit_text, guarantee_text, in_bytes, meaning_of, percent, shown

MOST_ROWS = 50  # of the table of rounds; the rest is in the metrics
_DARK = {
    Ink.PAPER: "#1b1f24",
    Ink.TEXT: "#e6e9ec",
    Ink.GRID: "#3a424b",
    Ink.MAIN: "#56b4e9",
    Ink.LIMIT: "#f0a050",
    Ink.THIRD: "#4fc9a4",
}


@dataclass(frozen=True, slots=True)
class Fact:
    """A number that a reader wants first."""

    name: str
    value: str
    note: str


@dataclass(frozen=True, slots=True)
class RoundRow:
    """A round in the table; what is secret or unknown is empty."""

    round: str
    metrics: tuple[str, ...]
    charged: str
    update_norm: str
    clipping: tuple[str, ...]  # the clip and the fraction clipped, where the clip adapts
    survivors: str
    seconds: str


def render(report: RunReport, drawn: Sequence[tuple[Panel, Drawing]]) -> str:
    """Return the page; equal reports give equal pages."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["marked"] = _marked
    template = environment.from_string(files(__package__).joinpath("page.html.j2").read_text("utf-8"))
    plan = report.plan
    return template.render(
        report=report,
        light={ink.name.lower(): ink.value for ink in Ink},
        dark={ink.name.lower(): colour for ink, colour in _DARK.items()},
        state=_state(report),
        facts=_facts(report),
        guarantees=[guarantee_text(report, item) for item in report.summary.guarantees],
        meaning="" if plan is None else meaning_of(plan),
        audit="" if report.audit is None else audit_text(report.audit),
        warnings=_warnings(report),
        figures=[(Markup(drawing.inline), panel.caption) for panel, drawing in drawn],  # noqa: S704 - our own drawing, escaped where it was made
        size=_size(report),
        rows=[_row(report, record) for record in _some(report.rounds)],
        exchanges=_exchanges(report),
        plan=() if plan is None else plan_table(plan),
        digest="" if plan is None else plan.digest.hex(),
    )


def _state(report: RunReport) -> str:
    done, planned = report.summary.rounds, report.planned_rounds
    if report.is_exhausted:
        return (
            f"Ended after round {done:,} of {planned:,}: {report.summary.stopped}. It cannot go on, and the test data "
            "stay closed."
        )
    if report.summary.end is End.INTERRUPTED:
        return (
            f"Stopped after round {done:,} of {planned:,}: {report.summary.stopped or 'rounds are left'}. "
            "The same command resumes it; the test data stay closed until the end."
        )
    if report.summary.end is End.STOPPED:
        return f"Finished after round {done:,} of {planned:,}, by its declared rule: {report.summary.stopped}."
    return f"Finished after {done:,} round{'s' * (done != 1)}."


def _facts(report: RunReport) -> list[Fact]:
    facts = [_quality(report)]
    if report.plan is not None:
        against = report.plan.against
        # An observer that is not listed has the plan's own guarantee.
        listed = {item.observer: item.epsilon for item in report.summary.guarantees}
        epsilon = round_up(listed.get(against, report.plan.epsilon), 4)
        delta = round_up(report.plan.delta, 3)
        facts += [
            Fact("Epsilon", epsilon, f"against {against}, delta {delta}; of the whole plan"),
            Fact(
                "Attempts",
                f"{report.summary.charged:,} of {report.plan.max_attempts:,}",
                "charged, of all that epsilon covers",
            ),
        ]
    else:
        facts.append(Fact("Epsilon", "none", "trained in the clear"))
    bits = report.summary.bits
    return [
        *facts,
        Fact("Upload", in_bytes(report.summary.upload_bytes), "per client per round"),
        Fact("Width", f"{32 if bits is None else bits} bits", "per coordinate"),
    ]


def _quality(report: RunReport) -> Fact:
    """Return the first metric, of the test data if they were opened."""
    tested, summary = report.summary.test_metrics, report.summary
    unopened = "test data not opened yet" if tested is None else "no test data was given"
    found, note = (tested, "opened once, at the end") if tested else (summary.metrics, unopened)
    if not found:
        return Fact("Metrics", "none", "no evaluation was given" if report.rounds else "no round is complete")
    name = "accuracy" if "accuracy" in found else next(iter(found))
    return Fact(f"{'Test' if tested else 'Validation'} {name}", shown(name, found[name]), note)


def _warnings(report: RunReport) -> list[str]:
    warnings = [] if report.plan_summary is None else list(report.plan_summary.warnings)
    if report.plan is None:
        warnings.insert(0, "This run was trained in the clear: it protects nobody.")
    elif report.summary.repeatable:
        warnings.insert(0, "This run repeats from its seed: it protects nobody from whoever knows the seed.")
    return warnings


def _size(report: RunReport) -> str:
    plan, summary = report.plan, report.summary
    plain = 4 * summary.dimension
    if plan is None:
        return f"An update has {summary.dimension:,} parameters, as 32-bit floats {plain:,} bytes."
    return (
        f"A masked vector has {plan.codec.length:,} coordinates for {summary.dimension:,} parameters, at "
        f"{summary.bits} bits each {summary.upload_bytes:,} bytes; as 32-bit floats it would be {plain:,} bytes, "
        f"{plain / summary.upload_bytes:.3g} times as much. Keys and shares come on top, whatever the model's size."
    )


def _exchanges(report: RunReport) -> list[tuple[str, str, str]]:
    """Return each exchange with the median of its seconds and the share of those asked that answered."""
    laps = [lap for record in report.rounds for lap in record.exchanges]
    rows = []
    for name in dict.fromkeys(lap.name for lap in laps):
        own = [lap for lap in laps if lap.name == name]
        asked, answered = sum(lap.asked for lap in own), sum(lap.answered for lap in own)
        rows.append((name, f"{median(lap.seconds for lap in own):.2f}", f"{answered:,} of {asked:,}"))
    return rows


def _some(rounds: tuple[RoundRecord, ...]) -> list[RoundRecord]:
    """Return at most MOST_ROWS rounds, evenly spread, the first and the last among them."""
    last = len(rounds) - 1
    if last < MOST_ROWS:
        return list(rounds)
    return [rounds[round(number * last / (MOST_ROWS - 1))] for number in range(MOST_ROWS)]


def _row(report: RunReport, record: RoundRecord) -> RoundRow:
    survivors, seconds = record.survivors, record.seconds
    return RoundRow(
        round=f"{record.round:,}",
        metrics=tuple(
            shown(name, record.metrics[name]) if name in record.metrics else "" for name in report.metric_names
        ),
        charged=f"{record.charged:,}",
        update_norm=f"{record.update_norm:.4g}",
        clipping=_clipping(record),
        survivors="" if survivors is None else f"{survivors:,}",
        seconds="" if seconds is None else f"{seconds:.2f}",
    )


def _clipping(record: RoundRecord) -> tuple[str, ...]:
    if record.clip is None or record.fraction_clipped is None:
        return ()
    return f"{record.clip:.4g}", percent(record.fraction_clipped)


def _marked(text: str) -> Markup:
    """Return a text with what stands between backticks as code."""
    parts = [escape(part) for part in text.split("`")]
    if len(parts) % 2 == 0:
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else part for place, part in enumerate(parts)
    )
