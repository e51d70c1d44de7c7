"""What a shared ledger may still admit: whole plans, charged when their runs begin, whoever chose them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from d2pfed.accounting.observers import RELEASED, Observer, spent, upper_bound
from d2pfed.accounting.release import DiscreteGaussianSum, Release
from d2pfed.accounting.released import is_amplified
from d2pfed.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PlanCost:
    """All that a run may release: `attempts` times the plan's costliest release.

    Attributes:
        release: what one attempt reveals with the least noise that the plan allows (a quorum of survivors); its
            run, round, attempt and participants do not count.
        attempts: how many charged attempts the run may take, spare ones included (`plan.max_attempts`).
        cap: how often one client contributes in the run before it sends zeros (`plan.participations`).
    """

    release: Release
    attempts: int
    cap: int

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.cap < 1:
            raise ConfigError(f"attempts and cap must be at least 1, got {self.attempts} and {self.cap}")


@dataclass(frozen=True, slots=True)
class Charged:
    """What a filter says of some plans.

    Attributes:
        admitted: whether all of them are within the budget, whatever was chosen from outputs.
        units: what each plan was charged, in rounds of the reference; empty where there is no reference.
        of: the budget in the same units; 0 where there is no reference.
        composed: epsilon of exactly these plans composed, which holds only if no plan and no stop depended on
            outputs (print it with these words, or not at all); for a single plan it holds as it is.
        reason: one line on why the last plan is refused; empty if it is admitted.
    """

    admitted: bool
    units: tuple[int, ...]
    of: int
    composed: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Filter:
    """A budget that holds whatever plans are chosen from earlier outputs.

    Attributes:
        epsilon, delta: the budget.
        observer: for whom it holds.
        declared: plans fixed before anything was released; they are composed exactly, in any order, and need not
            all be run. The first plan begun counts as declared where this is empty.
    """

    epsilon: float
    delta: float
    observer: Observer
    declared: tuple[PlanCost, ...] = ()

    def charge(self, plans: Sequence[PlanCost]) -> Charged:
        """Return whether the plans, in the order their runs began, are all within the budget.

        A ledger asks with all plans that were begun and the next one before it writes that run's first row. Void
        runs stay charged. The answer depends on the plans alone, so a verifier finds the same.

        Guarantee: if every run began after `admitted`, all releases of all runs, and when each stopped, are
        (epsilon, delta)-private together. Proof: theory.md#filters. Checked: test_accounting_filters.py.
        """
        if not plans:
            return Charged(admitted=True, units=(), of=0, composed=0.0)
        composed = self._composed(plans)
        first = self.declared or plans[:1]
        kinds = {plan.release for plan in first}
        declared = not (Counter(plans) - Counter(first))
        counted = len(kinds) == 1 and all(plan.release in kinds for plan in plans)
        if not (declared or counted or self._is_gaussian(plans)):
            reason = (
                "a run of another kind than the first, behind sampled cohorts, must be declared with the budget"
            )
            return Charged(admitted=False, units=(), of=0, composed=composed, reason=reason)
        return Charged(admitted=composed <= self.epsilon, units=(), of=0, composed=composed)

    def _composed(self, plans: Sequence[PlanCost]) -> float:
        releases = [
            replace(plan.release, run=f"{number}", round=turn)
            for number, plan in enumerate(plans)
            for turn in range(plan.attempts)
        ]
        cap = max(plan.cap for plan in plans)
        quick = upper_bound(releases, self.observer, delta=self.delta, cap=cap).epsilon
        return (
            quick if quick <= self.epsilon else spent(releases, self.observer, delta=self.delta, cap=cap).epsilon
        )

    def _is_gaussian(self, plans: Sequence[PlanCost]) -> bool:
        amplified = self.observer == RELEASED and any(is_amplified(plan.release.sampling) for plan in plans)
        return not amplified and all(isinstance(plan.release.noise, DiscreteGaussianSum) for plan in plans)
