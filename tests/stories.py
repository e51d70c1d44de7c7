"""Stories for the report's tests, on real plans; and a reader of pages that is stricter than a browser."""

import math
import re
from dataclasses import dataclass, field, replace
from functools import cache
from html.parser import HTMLParser

from d2pfed.accounting import Sampling
from d2pfed.plan import MechanismName, Plan, PlanSummary, PrivacyTarget, calibrate, describe
from d2pfed.runs.report import RoundPoint, Story

VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})


@cache
def planned(kind: MechanismName, scheme: Sampling) -> tuple[Plan, PlanSummary]:
    target = PrivacyTarget(
        dimension=40, population=200, cohort_size=20, rounds=12, epsilon=4.0, mechanism=kind, sampling=scheme
    )
    plan = calibrate(target)
    return plan, describe(target, plan)


def points(count: int) -> tuple[RoundPoint, ...]:
    return tuple(
        RoundPoint(
            round=number,
            accuracy=1 - 0.9 / math.sqrt(number),
            loss=2 / number,
            charged=number + number // 4,
            survivors=20,
            attempt=0,
            update_norm=1 + 1 / number,
            upload_bytes=64,
            seconds=0.125,
        )
        for number in range(1, count + 1)
    )


def story(rounds: int, kind: MechanismName = MechanismName.CENTERED, scheme: Sampling = Sampling.FIXED) -> Story:
    plan, explanation = planned(kind, scheme)
    return Story(
        title="digits, logistic",
        run="first",
        data="Eight by eight digits.",
        settings=(("local.lr", "0.2"), ("seed", "none")),
        plan=replace(plan, rounds=max(plan.rounds, rounds), max_attempts=2 * max(plan.rounds, rounds)),
        explanation=explanation,
        so_far=(),
        done=rounds,
        charged=rounds + rounds // 4,
        rounds=points(rounds),
        test_accuracy=0.8765,
        stopped="",
        exhausted=False,
        repeatable=False,
        ledger="ledger.sqlite",
    )


@dataclass
class Page(HTMLParser):
    """What a page holds; a tag that is not closed, or closed twice, is an error."""

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    cells: list[str] = field(default_factory=list)
    path: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    @staticmethod
    def read(html: str) -> "Page":
        page = Page()
        page.feed(html)
        page.close()
        assert not page.path, f"never closed: {page.path}"
        return page

    def handle_starttag(self, tag, attrs):
        assert len(attrs) == len(dict(attrs)), f"an attribute twice in {tag}"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.path.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.path, f"{tag} closed, never opened"
        assert self.path.pop() == tag, f"{tag} closed out of order"

    def handle_data(self, data):
        self.texts.append(data)
        if self.path and self.path[-1] == "td":
            self.cells.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def outside(html: str) -> list[str]:
    """Return everything by which a page would load or run something."""
    page = Page.read(html)
    found = [tag for tag, _ in page.tags if tag in {"script", "link", "img", "iframe", "object", "embed", "base"}]
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            if name in {"src", "srcset", "action", "data"} or name.startswith("on"):
                found.append(f"{tag} {name}")
            if name.endswith("href") and not (value or "").startswith("#"):
                found.append(f"{tag} {name}={value}")
            if re.search(r"https?:|//", value or ""):
                found.append(f"{tag} {name}={value}")
    found += [f"url {target}" for target in re.findall(r"url\(([^)]*)\)", html) if not target.startswith("#")]
    found += re.findall(r"@import|https?:", "".join(page.texts))
    return found
