"""Early stop: a rule that is declared before the first round, and the epsilon that it leaves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from d2pfed.accounting import Guarantee
from d2pfed.accounting.filters import milestones
from d2pfed.errors import ConfigError
from d2pfed.fields import RUN, about, check_types, documented
from d2pfed.plan import Plan, guarantees
from d2pfed.round import run_plan
from d2pfed.runs import RoundRecord


class Mode(StrEnum):
    """Which values of a metric are better."""

    MIN = "min"
    MAX = "max"


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop:
    """Ends a run once a validation metric has not improved for some evaluations.

    The guarantee of the whole plan holds wherever the run ends. A lower one may be stated only at numbers of attempts
    that were fixed beforehand: `milestones`, at which alone the run then stops; they share delta.
    """

    metric: str = field(default="loss", metadata=about("The validation metric that is watched.", RUN))
    mode: Mode = field(default=Mode.MIN, metadata=about("Which values are better.", RUN))
    patience: int = field(default=5, metadata=about("Evaluations without improvement that end the run.", RUN))
    least_gain: float = field(default=0.0, metadata=about("What counts as an improvement.", RUN))
    milestones: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        if self.patience < 1:
            raise ConfigError(f"patience must be at least 1, got {self.patience}")
        if not (math.isfinite(self.least_gain) and self.least_gain >= 0):
            raise ConfigError(f"least_gain must be finite and at least 0, got {self.least_gain}")
        stops = tuple(self.milestones)
        if list(stops) != sorted(set(stops)) or stops[:1] < (1,) * bool(stops):
            raise ConfigError(f"milestones must be increasing whole numbers from 1 on, got {stops}")
        object.__setattr__(self, "milestones", stops)

    def __call__(self, records: Sequence[RoundRecord]) -> str:
        """Return why a run with these rounds ends here; empty if it goes on."""
        values = [record.metrics[self.metric] for record in records if self.metric in record.metrics]
        if any(record.metrics and self.metric not in record.metrics for record in records):
            raise ConfigError(
                f"early_stop watches {self.metric}, the metrics are {', '.join(records[-1].metrics)}"
            )
        idle = _idle([-value if self.mode is Mode.MAX else value for value in values], self.least_gain)
        if idle < self.patience or (self.milestones and records[-1].charged not in self.milestones):
            return ""
        return f"{self.metric} has not improved for {idle} evaluations"

    def guarantee(self, plan: Plan, charged: int) -> Guarantee | None:
        """Return what a run that stopped after so many charged attempts may state beside its plan's guarantee."""
        if not self.milestones:
            return None
        stops = (*(stop for stop in self.milestones if stop < plan.max_attempts), plan.max_attempts)
        found = milestones(run_plan(plan).cost, stops, plan.against, plan.delta)
        at = next(place for place, stop in enumerate(stops) if stop >= charged)
        whole = next((each for each in guarantees(plan) if each.observer == plan.against), None)
        return None if whole is None else replace(whole, epsilon=found[at], delta=plan.delta)


def _idle(values: Sequence[float], least_gain: float) -> int:
    """Return how many values have passed since the last improvement; one that is not finite is none."""
    best, idle = math.inf, 0
    for value in values:
        if value < best - least_gain:
            best, idle = value, 0
        else:
            idle += 1
    return idle
