"""Reports for the report's tests, on real plans; and a reader of pages that is stricter than a browser."""

import math
import re
from dataclasses import dataclass, field, replace
from functools import cache
from html.parser import HTMLParser

from d2pfed.accounting import Sampling
from d2pfed.plan import MechanismName, Plan, PlanSummary, PrivacyTarget, calibrate, describe
from d2pfed.runs import End, RoundRecord, RunSummary
from d2pfed.runs.report import RunReport

VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})


@cache
def planned(kind: MechanismName, scheme: Sampling) -> tuple[Plan, PlanSummary]:
    target = PrivacyTarget(
        dimension=40, population=200, cohort_size=20, rounds=12, epsilon=4.0, mechanism=kind, sampling=scheme
    )
    plan = calibrate(target)
    return plan, describe(target, plan)


def records(count: int) -> tuple[RoundRecord, ...]:
    return tuple(
        RoundRecord(
            round=number,
            metrics={"accuracy": 1 - 0.9 / math.sqrt(number), "loss": 2 / number},
            charged=number + number // 4,
            survivors=20,
            attempt=0,
            update_norm=1 + 1 / number,
            upload_bytes=64,
            seconds=0.125,
            clip=1.0,
            fraction_clipped=None,
        )
        for number in range(1, count + 1)
    )


def report(
    rounds: int, kind: MechanismName = MechanismName.CENTERED, scheme: Sampling = Sampling.FIXED
) -> RunReport:
    plan, plan_summary = planned(kind, scheme)
    most = max(plan.rounds, rounds)
    return RunReport(
        title="digits, logistic",
        run="first",
        data="Eight by eight digits.",
        settings=(("local.lr", "0.2"), ("seed", "none")),
        plan=replace(plan, rounds=most, max_attempts=2 * most),
        plan_summary=plan_summary,
        summary=RunSummary(
            directory="runs/first",
            rounds=rounds,
            end=End.COMPLETE,
            stopped="",
            metrics={"accuracy": 0.8123, "loss": 0.5},
            test_metrics={"accuracy": 0.8765, "loss": 0.4},
            guarantees=plan_summary.guarantees,
            so_far=(),
            charged=rounds + rounds // 4,
            max_attempts=2 * most,
            upload_bytes=plan_summary.upload_bytes,
            dimension=40,
            bits=plan_summary.bits,
            repeatable=False,
            tuning="",
        ),
        planned_rounds=most,
        rounds=records(rounds),
        ledger="ledger.sqlite",
    )


def in_the_clear(rounds: int) -> RunReport:
    """Return the report of a run without a plan."""
    private = report(rounds)
    summary = replace(
        private.summary, guarantees=(), charged=rounds, max_attempts=rounds, upload_bytes=160, bits=None
    )
    return replace(private, plan=None, plan_summary=None, summary=summary, ledger=None)


def with_summary(given: RunReport, **changes: object) -> RunReport:
    """Return a report whose summary is changed."""
    return replace(given, summary=replace(given.summary, **changes))


def interrupted(rounds: int) -> RunReport:
    """Return the report of a run that was stopped."""
    return with_summary(report(rounds), test_metrics=None, end=End.INTERRUPTED, stopped="interrupted")


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
