"""What `fit` returns, as a person reads it in a terminal or a notebook."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np

from d2pfed.accounting import Guarantee, round_up
from d2pfed.learning import Module
from d2pfed.ledger.files import opened_for_lines
from d2pfed.plan import PlanSummary
from d2pfed.runs import End, RoundRecord, RunSummary

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
NORMS = "norms.jsonl"  # in the directory of a run in the clear: the norms of each round, null for no finite update


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class FitResult:
    """A trained module and what is known about it.

    Attributes:
        module: The trained module, in evaluation mode: a copy, the given one is as it was.
        metrics: On the validation data, after the last round.
        test_metrics: On the test data, opened once at the end; None if there are none or rounds are left.
        guarantees: One epsilon per observer, of the whole plan; none in the clear.
        stop_guarantee: What an early stop at a declared milestone leaves, against the plan's observer; None otherwise.
        history: A record per round.
        norm_quantiles: Of the norms of the clients' updates, by their level; empty in a private run, where they are
            private.
        not_finite: How many updates counted as zero, for being NaN or infinite or as their client's training failed;
            None in a private run, as above.
        directory: Where plan, ledger, named arrays (model.safetensors), metrics and report.html are.
        summary: What the run came to.
        plan_summary: Noise, bits and warnings of the plan; None in the clear.
        notes: What was chosen on the user's behalf, one line each.
        personal: From a client to the module with the layers that it keeps; None where clients keep none.

    Examples:
        >>> result = fit("logistic", "digits", population=60, rounds=2, cohort_size=20, privacy=None)
        >>> len(result.history), sorted(result.test_metrics)
        (2, ['accuracy', 'loss'])
    """

    module: Module
    metrics: dict[str, float]
    test_metrics: dict[str, float] | None
    guarantees: tuple[Guarantee, ...]
    stop_guarantee: Guarantee | None
    history: tuple[RoundRecord, ...]
    norm_quantiles: dict[float, float]
    not_finite: int | None
    directory: Path
    summary: RunSummary
    plan_summary: PlanSummary | None
    notes: tuple[str, ...] = field(default=())
    personal: Callable[[int], Module] | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know before trusting or sharing the module."""
        own = () if self.plan_summary is None else self.plan_summary.warnings
        if self.summary.repeatable and self.guarantees:
            return (*own, "This run repeats from its seed: anyone who knows the seed can remove the noise.")
        return own

    def __repr__(self) -> str:
        title, *lines = self._lines()
        return "\n  ".join([title[1], *(f"{name}: {text}" for name, text in lines)])

    def _repr_html_(self) -> str:
        title, *lines = self._lines()
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in lines)
        return f"<p><strong>{escape(title[1])}</strong></p><table>{rows}</table>"

    def _lines(self) -> list[tuple[str, str]]:
        """Return what a person reads: a title, then names and texts."""
        done, stopped = self.summary.rounds, self.summary.stopped
        ways = {
            End.COMPLETE: "complete",
            End.STOPPED: f"stopped: {stopped}",
            End.INTERRUPTED: "interrupted, resume=True goes on",
            End.EXHAUSTED: f"ended: {stopped}",
        }
        found = [("", f"FitResult after {done:,} round{'s' * (done != 1)}, {ways[self.summary.end]}")]
        for name, values in (("test", self.test_metrics), ("validation", self.metrics)):
            if values:
                found.append((name, ", ".join(f"{metric} {value:.4g}" for metric, value in values.items())))
        asked = None if self.plan_summary is None else self.plan_summary.against
        ordered = sorted(self.guarantees, key=lambda each: each.observer != asked)  # what was asked for first
        claims = [(f"epsilon against {each.observer}", each) for each in ordered]
        if not claims:
            found.append(("epsilon", "none, trained in the clear"))
        if self.stop_guarantee is not None:
            claims.append((f"by the early stop, against {self.stop_guarantee.observer}", self.stop_guarantee))
        for name, each in claims:
            scope = f"{each.unit}, {each.adjacency}, {each.sampling}"
            bound = f"{round_up(each.epsilon, 4)} at delta {round_up(each.delta, 3)} ({scope})"
            found.append((name, f"none: {each.reason}" if each.reason else bound))
        if self.summary.tuning:
            found.append(("tuning", self.summary.tuning))
        if self.norm_quantiles:
            shown = ", ".join(f"{100 * level:g} % {norm:.3g}" for level, norm in self.norm_quantiles.items())
            found.append(("norms of updates", shown))
        if self.not_finite:
            found.append(("updates that were not finite", f"{self.not_finite:,}, counted as zero"))
        found += [("note", note) for note in self.notes]
        found += [("warning", warning) for warning in self.warnings]
        return [*found, ("report", str(self.directory / "report.html"))]


def add_norms(directory: Path, norms: Sequence[float | None]) -> None:
    """Write down the norms of a round's updates, in a run in the clear, whose server sees them anyway."""
    with opened_for_lines(directory / NORMS) as opened:
        opened.write(json.dumps(norms) + "\n")


def read_norms(directory: Path) -> tuple[dict[float, float], int]:
    """Return quantiles of the norms of all rounds, and how many updates were not finite; none of a private run."""
    file = directory / NORMS
    if not file.exists():
        return {}, 0
    every = [norm for line in file.read_text("utf-8").splitlines() for norm in json.loads(line)]
    found = [norm for norm in every if norm is not None]
    quantiles = np.quantile(found, QUANTILES).tolist() if found else []
    return dict(zip(QUANTILES, quantiles, strict=False)), len(every) - len(found)
