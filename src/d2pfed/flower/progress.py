"""What a server says while it runs: who is here, survivors, epsilon, seconds. It is seen in `flwr run --stream`."""

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from flwr.app import ArrayRecord

from d2pfed.accounting import SERVER
from d2pfed.plan import Plan, guarantees
from d2pfed.plan.plan import run_guarantee
from d2pfed.runs import RoundRecord

EVERY_SECONDS = 15.0  # while nothing changes, who is missing is said so often

_log = logging.getLogger("d2pfed.flower")

# Called with each round's record and a function that returns the model as it is after the round.
Callback = Callable[[RoundRecord, Callable[[], ArrayRecord]], object]


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
        wait = f"; waiting for {_some(missing)}" if missing else ""
        _log.info("%d of %d clients are here%s", len(present), len(cohort), wait)


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The app's own functions, called after each round."""

    functions: Sequence[Callback]
    model: Callable[[], ArrayRecord]

    def __call__(self, record: RoundRecord) -> bool:
        """Call each; say whether the run goes on."""
        answers = [function(record, self.model) for function in self.functions]
        return all(answer is not False for answer in answers)


@dataclass(frozen=True, slots=True)
class RoundLog:
    """Writes a line per round and one per exchange to the log, and tells whoever else wants to know."""

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


def _some(clients: list[int]) -> str:
    more = f" and {len(clients) - 10} more" if len(clients) > 10 else ""
    return f"{', '.join(str(client) for client in clients[:10])}{more}"
