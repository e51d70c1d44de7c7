"""What a server says while it runs: to its log, and to an operator's Prometheus (a file for node_exporter)."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d2pfed.accounting import SERVER
from d2pfed.ledger.files import replace_file
from d2pfed.plan import Plan, guarantees
from d2pfed.plan.plan import run_guarantee
from d2pfed.runs import RoundRecord

FILE = "metrics.prom"  # in the run's directory

_HELP = {
    "d2pfed_updated_seconds": ("gauge", "Unix time when this file was last written: shows whether the run is alive."),
    "d2pfed_rounds_planned": ("gauge", "Rounds of the plan."),
    "d2pfed_rounds_total": ("counter", "Finished rounds."),
    "d2pfed_attempts_charged_total": ("counter", "Attempts that may have been opened."),
    "d2pfed_cohort_clients": ("gauge", "Clients asked in a round."),
    "d2pfed_survivors": ("gauge", "Clients whose vectors are in the last sum."),
    "d2pfed_failures_estimated": ("gauge", "Noisy number of clients, or records, that failed in the last sum."),
    "d2pfed_failures_standard_error": ("gauge", "Standard error of that number by its noise."),
    "d2pfed_round_seconds": ("gauge", "Seconds of the last round."),
    "d2pfed_exchange_seconds": ("gauge", "Seconds of each exchange of the last round."),
    "d2pfed_exchange_answers": ("gauge", "Answers in each exchange of the last round."),
    "d2pfed_epsilon_planned": ("gauge", "Epsilon against the server of the whole run."),
    "d2pfed_epsilon_charged": ("gauge", "Epsilon against the server of the attempts charged so far."),
    "d2pfed_refusals_total": ("counter", "Answers refused since the server started, by rule."),
}  # fmt: skip

_log = logging.getLogger("d2pfed.deploy")

# Called with each round's record and a function that returns the model as it is after the round.
Callback = Callable[[RoundRecord, Callable[[], Any]], object]


@contextmanager
def shown_progress(plan: Plan) -> Iterator[None]:
    """Show the log of this package on standard error, unless the app has set up logging itself; begin with the cost."""
    is_shown = bool(_log.handlers or logging.getLogger().handlers or _log.level)
    handler = logging.StreamHandler(sys.stderr)
    if not is_shown:
        handler.setFormatter(logging.Formatter("d2pfed: %(message)s"))
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)
    told = ", ".join(f"{each.epsilon:.3g} against {each.observer}" for each in guarantees(plan))
    _log.info("%d rounds, delta %g, epsilon of the whole run at most %s", plan.rounds, plan.delta, told)
    try:
        yield
    finally:
        if not is_shown:
            _log.removeHandler(handler)
            _log.setLevel(logging.NOTSET)


@dataclass(slots=True)
class Monitor:
    """Tells of each round: to the log, to the app's functions, and to a file without a word of a client or node."""

    directory: Path
    run: str  # the label of every figure, so that runs on one machine are distinguished
    plan: Plan
    refusals: Counter[str]
    callbacks: Sequence[Callback]
    model: Callable[[], Any]
    last: RoundRecord | None = None

    def __call__(self, record: RoundRecord, /) -> bool:
        """Tell of a round; say whether the run goes on."""
        self.last = record
        seconds = "" if record.seconds is None else f", {record.seconds:.1f} s"
        metrics = "".join(f", {name} {value:.4g}" for name, value in record.metrics.items())
        if record.failures is not None:
            error = self.plan.failures_error(record.survivors or 0)
            count = f"{round(record.failures, 1) + 0.0} {self.plan.unit}s"
            metrics += f", {count} failed (standard error {error:.1f})"
        _log.info(
            "round %d of %d: %s of %d survivors, epsilon %.3g against the server charged so far%s%s",
            *(record.round, self.plan.rounds, record.survivors, self.plan.cohort_size),
            *(self._charged_epsilon(record.charged), seconds, metrics),
        )
        if record.lost:
            _log.warning("round %d is lost, and the model is unchanged: %s", record.round, record.lost)
        for each in record.exchanges:
            _log.info("  %-18s %d of %d in %.1f s", each.name, each.answered, each.asked, each.seconds)
        self.write()
        answers = [function(record, self.model) for function in self.callbacks]
        return all(answer is not False for answer in answers)

    def write(self) -> None:
        """Write the file."""
        plan, last = self.plan, self.last
        planned = next(each.epsilon for each in guarantees(plan) if each.observer == SERVER)
        samples: dict[str, float | dict[str, float] | None] = {
            "d2pfed_updated_seconds": time.time(),
            "d2pfed_rounds_planned": plan.rounds,
            "d2pfed_rounds_total": 0 if last is None else last.round,
            "d2pfed_cohort_clients": plan.cohort_size,
            "d2pfed_epsilon_planned": planned,
        }
        if last is not None:
            samples |= {
                "d2pfed_attempts_charged_total": last.charged,
                "d2pfed_epsilon_charged": self._charged_epsilon(last.charged),
                "d2pfed_survivors": last.survivors,
                "d2pfed_failures_estimated": last.failures,
                "d2pfed_failures_standard_error": None
                if last.failures is None
                else plan.failures_error(last.survivors or 0),
                "d2pfed_round_seconds": last.seconds,
                "d2pfed_exchange_seconds": {f'exchange="{each.name}"': each.seconds for each in last.exchanges},
                "d2pfed_exchange_answers": {f'exchange="{each.name}"': each.answered for each in last.exchanges},
            }
        samples["d2pfed_refusals_total"] = {
            f'rule="{rule}"': self.refusals[rule] for rule in sorted(self.refusals)
        }
        lines, run = [], self.run.encode("unicode_escape").decode().replace('"', "'")
        for name, found in samples.items():
            if found is None or found == {}:
                continue
            kind, text = _HELP[name]
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            each = found if isinstance(found, dict) else {"": found}
            labels = {f'run="{run}"{label and ","}{label}': value for label, value in each.items()}
            lines += [f"{name}{{{label}}} {value:.10g}" for label, value in labels.items()]
        replace_file(self.directory / FILE, ("\n".join(lines) + "\n").encode(), mode=0o644)

    def _charged_epsilon(self, attempts: int) -> float:
        """Return what this many charged attempts cost against the server, at the least noise that the plan allows."""
        least = self.plan.release("", 0, 0, (), self.plan.quorum)
        return run_guarantee(least, attempts, SERVER, self.plan.delta, self.plan.max_participations).epsilon
