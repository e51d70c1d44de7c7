"""The page: one HTML text that needs nothing else, light or dark, wide or narrow."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from d2pfed.accounting import round_up
from d2pfed.runs.report.panels import Panel
from d2pfed.runs.report.plots import Drawing, Ink
from d2pfed.runs.report.story import RoundPoint, Story
from d2pfed.runs.report.tables import plan_table
from d2pfed.runs.report.wording import Promise, in_bytes, meaning, percent, promise

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
class Row:
    """A round in the table; what is secret or unknown is empty."""

    round: str
    accuracy: str
    loss: str
    charged: str
    update_norm: str
    survivors: str
    seconds: str


def render(story: Story, drawn: Sequence[tuple[Panel, Drawing]]) -> str:
    """Return the page; equal stories give equal pages."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["marked"] = _marked
    template = environment.from_string(files(__package__).joinpath("page.html.j2").read_text("utf-8"))
    return template.render(
        story=story,
        light={ink.name.lower(): ink.value for ink in Ink},
        dark={ink.name.lower(): colour for ink, colour in _DARK.items()},
        state=_state(story),
        facts=_facts(story),
        guarantees=_promises(story),
        meaning=meaning(story.plan.adjacency),
        warnings=_warnings(story),
        figures=[(Markup(drawing.inline), panel.caption) for panel, drawing in drawn],  # noqa: S704 - our own drawing, escaped where it was made
        size=_size(story),
        rows=[_row(story, point) for point in _some(story.rounds)],
        plan=plan_table(story.plan),
        digest=story.plan.digest.hex(),
    )


def _state(story: Story) -> str:
    done, planned = story.done, story.plan.rounds
    if story.exhausted:
        return (
            f"Ended after round {done:,} of {planned:,}: {story.stopped}. It cannot go on, and the test data stay "
            "closed."
        )
    if story.test_accuracy is None:
        return (
            f"Stopped after round {done:,} of {planned:,}: {story.stopped or 'rounds are left'}. "
            "The same command resumes it; the test data stay closed until the end."
        )
    return f"Finished after {done:,} round{'s' * (done != 1)}."


def _facts(story: Story) -> list[Fact]:
    price, against = story.explanation, story.plan.against
    # An observer that nobody is asked about by default has the plan's own promise.
    epsilon = {item.observer: item.epsilon for item in price.guarantees}.get(against, story.plan.epsilon)
    if story.test_accuracy is not None:
        accuracy = Fact("Test accuracy", percent(story.test_accuracy), "opened once, at the end")
    elif story.rounds:
        accuracy = Fact("Validation accuracy", percent(story.rounds[-1].accuracy), "test data not opened yet")
    else:
        accuracy = Fact("Accuracy", "none yet", "no round is complete")
    return [
        accuracy,
        Fact(
            "Epsilon",
            round_up(epsilon, 4),
            f"against {against}, delta {round_up(story.plan.delta, 3)}; the whole plan's",
        ),
        Fact(
            "Attempts", f"{story.charged:,} of {story.plan.max_attempts:,}", "charged, of all that epsilon covers"
        ),
        Fact("Upload", in_bytes(price.upload_bytes), "per client and round"),
        Fact("Width", f"{price.bits} bits", "per coordinate"),
    ]


def _promises(story: Story) -> list[Promise]:
    return [promise(story, item) for item in story.explanation.guarantees]


def _warnings(story: Story) -> list[str]:
    seeded = ["This run repeats from its seed: it protects nobody from whoever knows the seed."]
    return [*(seeded if story.repeatable else []), *story.explanation.warnings]


def _size(story: Story) -> str:
    price, codec = story.explanation, story.plan.codec
    dimension = codec.rotation.dimension
    plain = 4 * dimension
    return (
        f"A masked vector has {codec.length:,} coordinates for {dimension:,} parameters, at {price.bits} bits each "
        f"{price.upload_bytes:,} bytes; as 32-bit floats in clear it would be {plain:,} bytes, "
        f"{plain / price.upload_bytes:.3g} times as much. Keys and shares come on top, whatever the model's size."
    )


def _some(rounds: tuple[RoundPoint, ...]) -> list[RoundPoint]:
    """Return at most MOST_ROWS rounds, evenly spread, the first and the last among them."""
    last = len(rounds) - 1
    if last < MOST_ROWS:
        return list(rounds)
    return [rounds[round(number * last / (MOST_ROWS - 1))] for number in range(MOST_ROWS)]


def _row(story: Story, point: RoundPoint) -> Row:
    survivors, seconds = point.survivors, point.seconds
    if story.secret_sizes:
        survivors = seconds = None  # how long a round took tells how many were in it
    return Row(
        round=f"{point.round:,}",
        accuracy=percent(point.accuracy),
        loss=f"{point.loss:.4f}" if math.isfinite(point.loss) else "not finite",
        charged=f"{point.charged:,}",
        update_norm=f"{point.update_norm:.4g}",
        survivors="" if survivors is None else f"{survivors:,}",
        seconds="" if seconds is None else f"{seconds:.2f}",
    )


def _marked(text: str) -> Markup:
    """Return a text with what stands between backticks as code."""
    parts = [escape(part) for part in text.split("`")]
    if len(parts) % 2 == 0:
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else part for place, part in enumerate(parts)
    )
