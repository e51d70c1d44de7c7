"""What a server says while it runs: to its log, and to an operator's Prometheus (a file for node_exporter)."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from d2pfed.accounting import SERVER
from d2pfed.ledger.files import replace_file
from d2pfed.plan import Plan, guarantees
from d2pfed.plan.plan import run_guarantee
from d2pfed.runs import RoundRecord

FILE = "metrics.prom"  # in the run's directory

_HELP = {
    "d2pfed_updated_seconds": ("gauge", "When this file was last written, since 1970: the health of the run."),
    "d2pfed_rounds_planned": ("gauge", "Rounds of the plan."),
    "d2pfed_rounds_total": ("counter", "Rounds that are done."),
    "d2pfed_attempts_charged_total": ("counter", "Attempts that may have been opened."),
    "d2pfed_cohort_clients": ("gauge", "Clients that a round asks."),
    "d2pfed_survivors": ("gauge", "Clients whose vectors are in the last sum."),
    "d2pfed_round_seconds": ("gauge", "Seconds of the last round."),
    "d2pfed_exchange_seconds": ("gauge", "Seconds of each exchange of the last round."),
    "d2pfed_exchange_answers": ("gauge", "Answers in each exchange of the last round."),
    "d2pfed_epsilon_planned": ("gauge", "Epsilon against the server of the whole run."),
    "d2pfed_epsilon_charged": ("gauge", "Epsilon against the server of the attempts that are charged."),
    "d2pfed_refusals_total": ("counter", "Answers that did not count since the server was started, by rule."),
}  # fmt: skip

EVERY_SECONDS = 15.0  # while nothing changes, who is missing is said so often

_log = logging.getLogger("d2pfed.deploy")

# Called with each round's record and a function that returns the model as it is after the round.
Callback = Callable[[RoundRecord, Callable[[], Any]], object]


@contextmanager
def shown_progress() -> Iterator[None]:
    """Show the log of this package on standard error, unless the app has set up logging itself."""
    if _log.handlers or logging.getLogger().handlers or _log.level:
        yield
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("d2pfed: %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        _log.setLevel(logging.NOTSET)


@dataclass(slots=True)
class Arrivals:
    """Says who of a cohort is here, whenever that changes and every few seconds while the server waits."""

    _said: frozenset[int] = frozenset()
    _at: float = field(default=-EVERY_SECONDS)

    def tell(self, cohort: Collection[int], here: Collection[int]) -> None:
        """Say it, if it is news."""
        present, now = frozenset(here) & frozenset(cohort), time.monotonic()
        missing = sorted(set(cohort) - present)
        if present == self._said and (not missing or now - self._at < EVERY_SECONDS):
            return
        self._said, self._at = present, now
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        wait = f"; waiting for {', '.join(map(str, missing[:10]))}{more}" if missing else ""
        _log.info("%d of %d clients are here%s", len(present), len(cohort), wait)


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The app's own functions, called after each round."""

    functions: Sequence[Callback]
    model: Callable[[], Any]

    def __call__(self, record: RoundRecord) -> bool:
        """Call each; say whether the run goes on."""
        answers = [function(record, self.model) for function in self.functions]
        return all(answer is not False for answer in answers)


@dataclass(frozen=True, slots=True)
class RoundLog:
    """Writes a line per round and one per exchange to the log, and calls the listeners."""

    plan: Plan
    tell: Callable[[RoundRecord], None]
    callbacks: Callbacks

    def __call__(self, record: RoundRecord, /) -> bool:
        """Write the lines of a round; say whether the run goes on."""
        seconds = "" if record.seconds is None else f", {record.seconds:.1f} s"
        metrics = "".join(f", {name} {value:.4g}" for name, value in record.metrics.items())
        _log.info(
            "round %d of %d: %s of %d survivors, epsilon %.3g against the server charged so far%s%s",
            *(record.round, self.plan.rounds, record.survivors, self.plan.cohort_size),
            *(charged_epsilon(self.plan, record.charged), seconds, metrics),
        )
        for each in record.exchanges:
            _log.info("  %-18s %d of %d in %.1f s", each.name, each.answered, each.asked, each.seconds)
        self.tell(record)
        return self.callbacks(record)


def charged_epsilon(plan: Plan, attempts: int) -> float:
    """Return what so many charged attempts cost against the server, at the least noise that the plan allows."""
    least = plan.release("", 0, 0, (), plan.quorum)
    return run_guarantee(least, attempts, SERVER, plan.delta, plan.max_participations).epsilon


def tell_plan(plan: Plan) -> None:
    """Say what the whole run may cost, once, before its first round."""
    told = ", ".join(f"{each.epsilon:.3g} against {each.observer}" for each in guarantees(plan))
    _log.info("%d rounds, delta %g, epsilon of the whole run at most %s", plan.rounds, plan.delta, told)


@dataclass(slots=True)
class Monitor:
    """Keeps the figures of a run in a file that is replaced as a whole.

    Labels are names of exchanges and of our own rules: nothing that a client or node has said is in the file.
    """

    directory: Path
    plan: Plan
    refusals: Counter[str] = field(default_factory=Counter)
    last: RoundRecord | None = None

    def round(self, record: RoundRecord) -> None:
        """Take down a round."""
        self.last = record
        self.write()

    def write(self) -> None:
        """Write the file."""
        lines = []
        told: str | None = None
        for name, labels, value in self._samples():
            if name != told:
                kind, text = _HELP[name]
                lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
                told = name
            lines.append(f"{name}{labels} {value:.10g}")
        replace_file(self.directory / FILE, ("\n".join(lines) + "\n").encode(), mode=0o644)

    def _samples(self) -> Iterator[tuple[str, str, float]]:
        plan, last = self.plan, self.last
        yield "d2pfed_updated_seconds", "", time.time()
        yield "d2pfed_rounds_planned", "", plan.rounds
        yield "d2pfed_rounds_total", "", 0 if last is None else last.round
        yield "d2pfed_cohort_clients", "", plan.cohort_size
        yield (
            "d2pfed_epsilon_planned",
            "",
            next(each.epsilon for each in guarantees(plan) if each.observer == SERVER),
        )
        if last is not None:
            yield "d2pfed_attempts_charged_total", "", last.charged
            yield "d2pfed_epsilon_charged", "", charged_epsilon(self.plan, last.charged)
            if last.survivors is not None:
                yield "d2pfed_survivors", "", last.survivors
            if last.seconds is not None:
                yield "d2pfed_round_seconds", "", last.seconds
            for each in last.exchanges:
                yield "d2pfed_exchange_seconds", f'{{exchange="{each.name}"}}', each.seconds
            for each in last.exchanges:
                yield "d2pfed_exchange_answers", f'{{exchange="{each.name}"}}', each.answered
        for rule, count in sorted(self.refusals.items()):
            yield "d2pfed_refusals_total", f'{{rule="{rule}"}}', count
