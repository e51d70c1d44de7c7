"""What an operator watches: a run's figures as a Prometheus text file, for node_exporter's textfile collector."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from d2pfed.accounting import SERVER
from d2pfed.flower.progress import charged_epsilon
from d2pfed.ledger.files import replace_file
from d2pfed.plan import Plan, guarantees
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
            yield from self._of_round(last)
        for rule, count in sorted(self.refusals.items()):
            yield "d2pfed_refusals_total", f'{{rule="{rule}"}}', count

    def _of_round(self, last: RoundRecord) -> Iterator[tuple[str, str, float]]:
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
