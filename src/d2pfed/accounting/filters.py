"""Privacy filters over plans: what a shared ledger may still admit when plans are chosen from earlier outputs.

A plan is charged wholly when its run begins. Rounds of one kind can be the unit of a budget.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from d2pfed.accounting.amplification import cap_excess, is_amplified, record_pairs, sampled_pairs
from d2pfed.accounting.composition import composed, filtered_epsilon, has_gaussian
from d2pfed.accounting.events import Release, RunReleases, Sampling
from d2pfed.accounting.laws import BinomialSum, Noise
from d2pfed.accounting.losses import (
    COARSE,
    FINE,
    LossPmf,
    PrivacyLossDistribution,
    dominate,
    profile_bounds,
    tilted_epsilon,
)
from d2pfed.accounting.observers import Observer, View, check_releases, runs_epsilon, without_known_noise
from d2pfed.accounting.profiles import DominatingPair, tail_epsilon
from d2pfed.accounting.rdp import check_delta
from d2pfed.errors import ConfigError

_POINTS = 1 << 12  # positive grid points of the reference's losses
_TAIL = 1e-9  # of delta: mass of one round that is moved to infinity
_WIDEST = 1 << 18  # grid points
_MOST_UNITS = 1 << 17  # that one plan may cost

Counts = Mapping[DominatingPair, int]


@dataclass(frozen=True, slots=True)
class ReferenceRound:
    """The discrete losses of one round, whose products are what a budget is counted in."""

    pair: DominatingPair
    step: float
    tail: float

    @staticmethod
    def of(pair: DominatingPair, rounds: int, delta: float) -> "ReferenceRound":
        """Return the unit for budgets of about this number of rounds."""
        tail = max(delta * _TAIL / rounds, 1e-300)
        return ReferenceRound(pair, tail_epsilon(pair.forward, tail) / _POINTS, tail)

    def epsilon(self, fixed: Counts, units: int, delta: float, slack: float) -> float:
        """Return epsilon of fixed releases and a number of units, with the slack of surrogates."""
        counts = dict(fixed)
        counts[self.pair] = counts.get(self.pair, 0) + units
        total = composed(
            (PrivacyLossDistribution(((*_losses(self, pair), 1),), 0.0), count)
            for pair, count in counts.items()
            if count
        )
        apart = math.fsum(count * _losses(self, pair)[0].apart for pair, count in counts.items() if count)
        return PrivacyLossDistribution(total.pmfs, slack).epsilon(delta * math.exp(-apart))

    def units(self, plan: Counts, slack: float) -> int | None:
        """Return about the least number of units whose product plus `slack` is nowhere below the plan's profile.

        Guarantee: both orders, every epsilon. Proof: theory.md#filters. Checked: test_accounting_filters.py.
        """
        needed: int | None = 1
        own = _losses(self, self.pair)
        for order in (0, 1):
            pmfs = [(_losses(self, pair)[order], count) for pair, count in plan.items()]
            needed = None if needed is None else self._least(pmfs, own[order], slack, needed)
        return needed

    def _least(self, plan: Sequence[tuple[LossPmf, int]], own: LossPmf, slack: float, least: int) -> int | None:
        widest = tilted_epsilon(plan, slack) / self.step + 1  # from there on the slack alone is enough
        if widest > _WIDEST:
            return None
        top = math.ceil(widest)
        wanted = profile_bounds(plan, top)[1] - slack

        def covers(units: int) -> bool:
            # The unit is an exact pair, from which these masses are no more than so far apart.
            lower = profile_bounds([(own, units)], top)[0] * math.exp(-units * own.apart)
            return bool(np.all(wanted <= lower))

        low, high = least - 1, least
        while not covers(high):
            low, high = high, 2 * high
            if high > _MOST_UNITS:
                return None
        while high - low > max(1, low // 200):
            middle = (low + high) // 2
            low, high = (low, middle) if covers(middle) else (middle, high)
        return high


@lru_cache(maxsize=64)
def _losses(reference: ReferenceRound, pair: DominatingPair) -> tuple[LossPmf, LossPmf]:
    return dominate(pair.forward, pair.backward, reference.step, reference.tail)


# Shares of delta, fixed before anything is seen, once there is more than what was declared.
_SLACK_SHARE = 0.05  # for caps, and for plans that the reference nearly covers
_BASIC_SHARE = 0.05  # for plans that are added up one by one
_SURROGATE_SLACK = 1e-5  # of all surrogates together
_SMOOTHED = 1 << 16  # releases that share the slack
_MOST_TIMES = 16  # the budget in units is searched up to this multiple of what is charged

CONDITION = "if no plan or stop depended on outputs"  # on which `composed_epsilon` holds: print both, or neither


@dataclass(frozen=True, slots=True)
class PlanCost:
    """All that a run may release: `attempts` times the plan's costliest release."""

    release: Release  # with the least noise that the plan allows; its run, round, attempt and clients do not count
    attempts: int  # charged ones that the run may take, spare ones included (`plan.max_attempts`)
    max_participations: int  # how often one client contributes in the run before it sends zeros

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.max_participations < 1:
            raise ConfigError(
                f"attempts and max_participations must be at least 1, got {self.attempts} and {self.max_participations}"
            )

    @property
    def run(self) -> RunReleases:
        """The plan as an account counts it."""
        return RunReleases(
            self.release.sampling,
            ((self.release.noise, self.attempts),),
            self.max_participations,
            batches=self.release.batches,
        )


@dataclass(frozen=True, slots=True)
class FilterDecision:
    """What a privacy filter decides about some plans."""

    admitted: bool  # whether all of them are within the budget, whatever was chosen from outputs
    composed_epsilon: float  # of exactly these plans; of more than one it holds on the `CONDITION` only
    # What each cost in rounds of the reference, declared ones first; empty without one.
    units: tuple[int, ...] = ()
    budget_units: int = 0  # the budget in the same units; 0 where there is no reference
    reason: str = ""  # why the last plan is refused; empty if it is admitted


@dataclass(frozen=True, slots=True)
class Filter:
    """A privacy filter: a budget that holds whatever plans are chosen from earlier outputs.

    Declared plans were fixed before anything was released; they are composed exactly, in any order, and need not all be
    run. The first plan begun counts as declared where there are none.
    """

    epsilon: float
    delta: float
    observer: Observer
    declared: tuple[PlanCost, ...] = ()

    def charge(self, plans: Sequence[PlanCost]) -> FilterDecision:
        """Return whether the plans, in the order their runs began, are all within the budget.

        A ledger asks with all plans that were begun and the next one before it writes that run's first row. Void
        runs stay charged. The answer depends on the plans alone, so a verifier finds the same.

        Guarantee: if every run began after `admitted`, all releases of all runs, and when each stopped, are
        (epsilon, delta)-private together. Proof: theory.md#filters. Checked: test_accounting_filters.py.
        """
        check_delta(self.delta)
        if not plans:
            return FilterDecision(admitted=True, composed_epsilon=0.0)
        fixed = self.declared or (plans[0],)
        check_releases([plan.release for plan in (*fixed, *plans)])
        unused, later = Counter(fixed), []
        for plan in plans:
            unused[plan] -= 1
            if unused[plan] < 0:  # not fixed beforehand; in their order, so that no cost changes afterwards
                later.append(plan)
        exact = self._composed(plans)
        if not later:
            whole = exact if len(fixed) == len(plans) else self._composed(fixed)
            return self._verdict(whole <= self.epsilon, exact)
        return self._filtered(fixed, later, exact)

    def _filtered(self, fixed: Sequence[PlanCost], later: Sequence[PlanCost], exact: float) -> FilterDecision:
        """Return the answer where something was chosen after outputs: one of two rules must admit all of it."""
        is_released = self.observer.view is View.RELEASED
        amplified = [
            plan.release.batches is not None or (is_released and is_amplified(plan.release.sampling))
            for plan in fixed
        ]
        # Whether a round of the first plan can be the unit of the budget.
        if not (amplified[0] and all(self._parts(plan) is not None for plan in fixed)):
            if any(amplified):
                return self._verdict(self._basic(fixed, later, self.delta), exact)
            delta = (1 - _BASIC_SHARE) * self.delta
            admitted = self._known(fixed, later, delta) or self._basic(fixed, later, self.delta - delta)
            return self._verdict(admitted, exact)
        if (counted := self._counted(fixed, later)) is not None:
            return replace(self._verdict(True, exact), units=counted[0], budget_units=counted[1])  # noqa: FBT003 - an answer
        return self._verdict(self._basic(fixed, later, _BASIC_SHARE * self.delta), exact)

    def _verdict(self, admitted: bool, exact: float) -> FilterDecision:  # noqa: FBT001 - an answer, not an option
        if admitted:  # the budget holds, and so it does for what the grid of the composition rounded up
            return FilterDecision(admitted=True, composed_epsilon=min(exact, self.epsilon))
        budget = f"the budget of epsilon {self.epsilon:g} at delta {self.delta:g} against {self.observer}"
        return FilterDecision(
            admitted=False, composed_epsilon=exact, reason=f"{budget} does not hold this run as well"
        )

    def _composed(self, plans: Sequence[PlanCost]) -> float:
        """Return epsilon of these plans composed; binomial ones and the rest share delta."""
        groups = [
            [plan.run for plan in plans if isinstance(plan.release.noise, BinomialSum) is binomial]
            for binomial in (True, False)
        ]
        groups = [runs for runs in groups if runs]
        adjacency, delta = plans[0].release.adjacency, self.delta / len(groups)
        total = 0.0
        for runs in groups:
            found = runs_epsilon(runs, adjacency, self.observer, delta, COARSE)
            if found is not None and found[0] > self.epsilon:
                found = runs_epsilon(runs, adjacency, self.observer, delta, FINE)
            total += math.inf if found is None else found[0]
        return total

    def _parts(self, plan: PlanCost) -> Counter[DominatingPair] | None:
        """Return the Gaussians that stand for a plan's releases, for the observer; None if there are none."""
        run = without_known_noise(plan.run, self.observer)
        if run is None or not has_gaussian(run.noises[0][0], _SMOOTHED):
            return None
        pairs = sampled_pairs if run.batches is None else record_pairs
        return Counter(pairs([run], plan.release.adjacency, _SMOOTHED))

    def _counted(self, fixed: Sequence[PlanCost], later: Sequence[PlanCost]) -> tuple[tuple[int, ...], int] | None:
        """Return what each plan costs in rounds of the first one, and the budget in these; None if it is too much."""
        counts = [found for plan in fixed if (found := self._parts(plan)) is not None]
        pair = next(iter(counts[0]))
        reference = ReferenceRound.of(pair, fixed[0].attempts, self.delta)
        others = sum(counts, Counter())
        del others[pair]
        units = [each[pair] for each in counts]
        allowed = _SLACK_SHARE * self.delta - math.fsum(_kappa(plan) for plan in fixed)
        surrogates = math.fsum(key.slack * count for each in counts for key, count in each.items())
        for plan in later:
            own = self._parts(plan)
            allowed -= _kappa(plan)
            if own is None or allowed < 0:
                return None
            surrogates += math.fsum(key.slack * count for key, count in own.items())
            if set(own) == {pair}:
                units.append(own[pair])
                continue
            allowed /= 2
            needed = reference.units(own, allowed)
            if needed is None:
                return None
            units.append(needed)
        most = self._most(reference, others, sum(units))
        return (tuple(units), most) if surrogates <= _SURROGATE_SLACK and most else None

    def _most(self, reference: ReferenceRound, others: Counter[DominatingPair], needed: int) -> int:
        """Return how many units the budget holds beside other declared kinds, to one per cent; 0 if too few."""
        surrogates = math.exp(-_SURROGATE_SLACK)
        delta = ((1 - _BASIC_SHARE) * surrogates - _SLACK_SHARE) * self.delta / surrogates

        def fits(units: int) -> bool:
            return reference.epsilon(others, units, delta, _SURROGATE_SLACK) <= self.epsilon

        if not fits(needed):
            return 0
        low, high = needed, 2 * needed
        while high < _MOST_TIMES * needed and fits(high):
            low, high = high, 2 * high
        while high - low > max(1, low // 100):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _known(self, fixed: Sequence[PlanCost], later: Sequence[PlanCost], delta: float) -> bool:
        """Return whether a client that is known to take part in all of it stays within the budget."""
        noises: Counter[Noise] = Counter()
        for plan in (*fixed, *later):
            run = without_known_noise(plan.run, self.observer)
            if run is None:
                return False
            once = plan.release.sampling.method is Sampling.ONCE
            noises[run.noises[0][0]] += 1 if once else min(plan.max_participations, plan.attempts)
        return filtered_epsilon(noises, fixed[0].release.adjacency.radii, delta) <= self.epsilon

    def _basic(self, fixed: Sequence[PlanCost], later: Sequence[PlanCost], delta: float) -> bool:
        """Return whether the plans' own epsilons add up to the budget, each at half the delta of the one before."""
        total, rule = 0.0, replace(self, delta=delta)
        for stage in (fixed, *([plan] for plan in later)):
            rule = replace(rule, delta=rule.delta / 2)
            total += rule._composed(stage)  # noqa: SLF001 - of its own class
        return total <= self.epsilon


def milestones(plan: PlanCost, stops: Sequence[int], observer: Observer, delta: float) -> tuple[float, ...]:
    """Return what a run prints that stops, whatever it saw, by one of these numbers of attempts fixed beforehand.

    Guarantee: the printed epsilon holds at `delta`. Proof: theory.md#filters.
    Checked: test_accounting_games.py::test_milestones_at_their_shares_of_delta_hold_and_at_full_delta_do_not.
    """
    if not stops or any(a >= b for a, b in zip([0, *stops], stops, strict=False)) or stops[-1] > plan.attempts:
        raise ConfigError(f"stops must be increasing and in [1, attempts = {plan.attempts}], got {tuple(stops)}")
    rule = Filter(math.inf, delta / len(stops), observer)
    return tuple(rule.charge([replace(plan, attempts=stop)]).composed_epsilon for stop in stops)


def _kappa(plan: PlanCost) -> float:
    return cap_excess(plan.release.sampling, plan.attempts, plan.max_participations)
