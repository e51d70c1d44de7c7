"""Numbers and guarantees in words; a printed bound is never below the bound."""

import math
from dataclasses import dataclass

from d2pfed.accounting import Adjacency, Guarantee, Unit, View, round_up
from d2pfed.plan import Plan, record_terms
from d2pfed.runs.records import TrainingAudit
from d2pfed.runs.report.run_report import RunReport

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


def percent(share: float) -> str:
    """Return a share as a percentage in two decimals."""
    return f"{100 * share:.2f} %"


def shown(metric: str, value: float) -> str:
    """Return a metric as a reader expects it: an accuracy as a percentage."""
    if not math.isfinite(value):
        return "not finite"
    return percent(value) if metric == "accuracy" else f"{value:.4g}"


def unit_of(size_bytes: float) -> tuple[str, float]:
    """Return the unit that suits a size, and its bytes."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return unit, scale
    return "bytes", 1.0


def in_bytes(size_bytes: float) -> str:
    """Return a size in the unit that suits it."""
    unit, scale = unit_of(size_bytes)
    return f"{size_bytes / scale:.3g} {unit}"


def times(count: int) -> str:
    """Return how often."""
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def guarantee_text(report: RunReport, item: Guarantee) -> GuaranteeText:
    """Return one observer's guarantee in words: what it sees, what it can learn, and what that rests on."""
    part = {other.observer: other.epsilon for other in report.summary.so_far}.get(item.observer)
    return GuaranteeText(
        observer=str(item.observer),
        exact=repr(item.epsilon),
        epsilon=round_up(item.epsilon, 4),
        sentence=f"{_sight(item)} {_limit(item)}",
        scope=_scope(item),
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


def meaning_of(plan: Plan) -> str:
    """Return what the epsilons of a plan say, and for records the terms on which they do."""
    return " ".join(record_terms(plan)) or meaning(plan.adjacency)


def _sight(item: Guarantee) -> str:
    of_silos = item.unit is Unit.RECORD
    if item.observer.view is View.COLLUDING:
        kind = "silo" if of_silos else "client"
        helpers = f"{item.observer.colluders} {kind}{'s' * (item.observer.colluders != 1)}"
        return (
            f"The server together with {helpers} that tell{'s' * (item.observer.colluders == 1)} it their noise,"
        )
    return (_SIGHT_OF_SILOS if of_silos else _SIGHT)[item.observer.view]


def _limit(item: Guarantee) -> str:
    if not math.isfinite(item.epsilon):
        because = f": {item.reason}" if item.reason else ""
        return f"may learn anything about a {item.unit}: epsilon is infinite{because}."
    bound = f"epsilon {round_up(item.epsilon, 4)} at delta {round_up(item.delta, 3)}"
    if item.epsilon > NO_PROTECTION:
        return f"can learn about one {item.unit} what {bound} allows, which is too much to call a protection."
    factor = round_up(math.exp(item.epsilon), 3)
    return f"can learn about one {item.unit} no more than {bound} allows: a factor of {factor}."


def _scope(item: Guarantee) -> str:
    if item.unit is Unit.RECORD:
        return (
            f"Per {item.unit}, {item.adjacency}; {item.sampling}; each silo sends at most "
            f"{item.max_participations:,} vectors."
        )
    parts = [
        f"Per {item.unit}, {item.adjacency}",
        f"cohorts {item.sampling}",
        f"each client contributes at most {times(item.max_participations)}",
    ]
    return "; ".join(parts) + "."
