"""Rounds of one kind as the unit of a budget, and what a plan of another kind costs in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from d2pfed.accounting.conversion import FloatArray
from d2pfed.accounting.cost import LossCost, composed
from d2pfed.accounting.losses import Losses, dominate, reach
from d2pfed.accounting.profiles import SampledGaussian
from d2pfed.accounting.tilted import mass_outside, profile_bounds

_POINTS = 1 << 12  # positive grid points of the reference's losses
_TAIL = 1e-9  # of delta: mass of one round that is moved to infinity
_WIDEST = 1 << 18  # grid points
_MOST_UNITS = 1 << 17  # that one plan may cost
_SMALLEST_SLACK = 1e-12  # below it domination cannot be told from rounding

Counts = Mapping[SampledGaussian, int]


@dataclass(frozen=True, slots=True)
class Reference:
    """The discrete losses of one round, whose products are what a budget is counted in.

    The unit is this discrete pair itself, so nothing is lost when profiles are compared with its products.
    """

    part: SampledGaussian
    step: float
    tail: float

    @staticmethod
    def of(part: SampledGaussian, rounds: int, delta: float) -> "Reference":
        """Return the unit for budgets of about so many rounds."""
        tail = max(delta * _TAIL / rounds, 1e-300)
        return Reference(part, reach(part.forward, tail) / _POINTS, tail)

    def epsilon(self, fixed: Counts, units: int, delta: float, slack: float) -> float:
        """Return epsilon of fixed releases and so many units, with the slack of surrogates."""
        counts = dict(fixed)
        counts[self.part] = counts.get(self.part, 0) + units
        costs = [(LossCost(((*self._losses(part), 1),), 0.0), count) for part, count in counts.items() if count]
        total = composed(costs)
        return LossCost(total.parts, slack).epsilon(delta)

    def units(self, plan: Counts, slack: float) -> int | None:
        """Return a number of units, about the least, whose product plus `slack` is nowhere below the plan's profile.

        None if no reasonable number is enough, or if the slack is too small to tell.

        Guarantee: both orders, every epsilon. Proof: theory.md#filters. Checked: test_accounting_filters.py.
        """
        usable = slack - 1e-14 * (_MOST_UNITS + sum(plan.values()))
        if usable < _SMALLEST_SLACK:
            return None
        needed = 1
        own = self._losses(self.part)
        for order in (0, 1):
            parts = [(self._losses(part)[order], count) for part, count in plan.items()]
            found = self._least(parts, own[order], usable, needed)
            if found is None:
                return None
            needed = found
        return needed

    def _least(self, plan: Sequence[tuple[Losses, int]], own: Losses, slack: float, least: int) -> int | None:
        first = self._width(plan, slack)
        if first is None:
            return None
        uppers: dict[int, FloatArray] = {}

        def covers(units: int) -> bool:
            width = self._width([(own, units)], slack, first)
            if width is None:
                return False
            if width not in uppers:
                uppers[width] = profile_bounds(plan, width)[1]
            lower = np.maximum(profile_bounds([(own, units)], width)[0], 0.0)
            return bool(np.all(uppers[width] <= lower + slack))

        low, high = least - 1, least
        while not covers(high):
            low, high = high, 2 * high
            if high > _MOST_UNITS:
                return None
        while high - low > max(1, low // 200):
            middle = (low + high) // 2
            low, high = (low, middle) if covers(middle) else (middle, high)
        return high

    def _width(self, parts: Sequence[tuple[Losses, int]], slack: float, least: int = 1 << 10) -> int | None:
        """Return a number of grid points on each side of zero that holds all but a small part of the slack."""
        width = least
        while width <= _WIDEST:
            if mass_outside(parts, width) <= slack / 100:
                return width
            width *= 2
        return None

    def _losses(self, part: SampledGaussian) -> tuple[Losses, Losses]:
        return _discrete(part, self.step, self.tail)


@lru_cache(maxsize=64)
def _discrete(part: SampledGaussian, step: float, tail: float) -> tuple[Losses, Losses]:
    return dominate(part.forward, part.backward, step, tail)
