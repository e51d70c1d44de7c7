"""Defects planted into the filters, one by one: each is caught by a check that the right code passes."""

import inspect
import math
import textwrap
from fractions import Fraction

import numpy as np
import pytest

from d2pfed.accounting import filters, losses
from d2pfed.accounting.amplification import cap_excess
from d2pfed.accounting.events import Adjacency, CohortSampling, Release, Sampling, Unit
from d2pfed.accounting.filters import Filter, PlanCost, ReferenceRound
from d2pfed.accounting.laws import DiscreteGaussianSum
from d2pfed.accounting.losses import decayed_sums, dominate, profile_bounds
from d2pfed.accounting.observers import RELEASED
from d2pfed.accounting.profiles import PairKind, SampledGaussian, tail_epsilon

DELTA = 1e-5
FIXED = CohortSampling(Sampling.FIXED, 100_000, 1000)
BUDGET = Filter(2.0, DELTA, RELEASED)


def plan(attempts=50, max_participations=None, contributors=400):
    release = Release(
        run="",
        round=0,
        attempt=0,
        unit=Unit.CLIENT,
        adjacency=Adjacency.REPLACE_ONE,
        sampling=FIXED,
        noise=DiscreteGaussianSum(Fraction(2), contributors, Fraction(14), 51_370),
        participants=(),
    )
    return PlanCost(release, attempts, attempts if max_participations is None else max_participations)


def caps_of_the_fixed_part_use_up_the_slack(monkeypatch):
    monkeypatch.setattr(Filter, "_most", lambda _self, _reference, _others, needed: needed)
    tight = plan(max_participations=6)
    assert 0.05 * DELTA < cap_excess(FIXED, 50, 6) < DELTA
    assert BUDGET._counted([plan()], [plan()]) == ((50, 50), 100)
    assert BUDGET._counted([tight], [plan()]) is None


def later_plans_share_the_slack(monkeypatch):
    monkeypatch.setattr(Filter, "_most", lambda _self, _reference, _others, needed: needed)
    given = []
    monkeypatch.setattr(ReferenceRound, "units", lambda _self, _plan, slack: given.append(slack) or 1)
    later = [plan(contributors=400 + more) for more in range(1, 6)]
    assert BUDGET._counted([plan()], later) is not None
    assert len(given) == 5
    assert math.fsum(given) <= 0.05 * DELTA


def slack_and_addition_have_their_shares_of_delta(monkeypatch):
    asked, added = [], []

    def epsilon(_self, _fixed, _units, delta, slack):
        asked.append((delta, slack))
        return math.inf

    def basic(_self, _fixed, _later, delta):
        added.append(delta)
        return False

    monkeypatch.setattr(ReferenceRound, "epsilon", epsilon)
    monkeypatch.setattr(Filter, "_basic", basic)
    assert not BUDGET._filtered([plan()], [plan()], 0.0).admitted
    [(delta, surrogates)], [basic_delta] = asked, added
    assert surrogates == 1e-5
    whole = delta + math.exp(surrogates) * 0.05 * DELTA + basic_delta  # e^S (g + slack), and plain addition
    assert whole == pytest.approx(DELTA, rel=1e-12)


def surrogates_beyond_their_slack_have_no_units(monkeypatch):
    monkeypatch.setattr(Filter, "_most", lambda _self, _reference, _others, needed: needed)
    assert BUDGET._counted([plan(200_000)], [plan(200_000)]) is not None
    assert BUDGET._counted([plan(200_000)], [plan(600_000)]) is None


def stages_that_are_added_up_share_delta(monkeypatch):
    deltas = []
    monkeypatch.setattr(Filter, "_composed", lambda self, _plans: deltas.append(self.delta) or 0.0)
    assert BUDGET._basic([plan()], [plan()] * 5, DELTA)
    assert len(deltas) == 6
    assert math.fsum(deltas) <= DELTA


def units_cover_both_orders(_monkeypatch):
    """Zero against a vector, behind a coin, has bounded losses: that order takes more units than the other."""
    reference = ReferenceRound.of(SampledGaussian(PairKind.POISSON_ZERO_OUT, 1.5, 0.1), 20, 1e-3)
    other, slack = SampledGaussian(PairKind.FIXED_SIZE, 0.5, 0.1), 1e-4
    units = reference.units({other: 5}, slack)
    for order in (0, 1):
        own, true = filters._losses(reference, reference.pair)[order], filters._losses(reference, other)[order]
        lower, upper = profile_bounds([(true, 5)], 1 << 14)[0], profile_bounds([(own, units)], 1 << 14)[1]
        assert np.max(lower - upper) <= slack


def domination_is_checked_at_every_grid_point(monkeypatch):
    """The plan stands out at one loss alone, wherever that is, until there are ten units."""
    reference = ReferenceRound(SampledGaussian(PairKind.FIXED_SIZE, 1.0, 0.1), 0.01, 1e-9)
    monkeypatch.setattr(filters, "tilted_epsilon", lambda _parts, _slack: 10.23)
    own = losses.LossPmf(0.01, 0, np.array([1.0]), 0.0)
    for place in (0, 1, 63, 64, 65, 500, 1 << 10):

        def bounds(parts, width, place=place):
            count = parts[0][1]
            values = np.zeros(width + 1)
            values[place] = 10 if count == 0 else count
            return values, values

        monkeypatch.setattr(filters, "profile_bounds", bounds)
        assert reference._least([("plan", 0)], own, 1e-6, 1) == 10


def masses_are_raised_by_what_rounding_lost(monkeypatch):
    """A part in 10^14 for these masses, once the profile's own guard is gone; and a thousandth, if sums lost that."""
    part = SampledGaussian(PairKind.FIXED_SIZE, 1e-2, 0.3)
    step = tail_epsilon(part.forward, 1e-30) / 400
    at = step * np.arange(0, 400, 3)

    def rebuilt():
        found, _ = dominate(part.forward, part.backward, step, 1e-30)
        shares = np.maximum(-np.expm1(at[:, None] - found.values[None, :]), 0.0).astype(np.longdouble)
        return found.infinite + shares @ found.masses.astype(np.longdouble)

    monkeypatch.setattr(losses, "_PROFILE_GUARD", 0.0)
    assert np.all(rebuilt() >= part.forward(at))
    monkeypatch.setattr(losses, "decayed_sums", lambda masses, step: 0.999 * decayed_sums(masses, step))
    assert np.all(rebuilt()[:300] >= 1.0009 * part.forward(at)[:300])


PLANTED = [
    (
        caps_of_the_fixed_part_use_up_the_slack,
        (Filter, "_counted"),
        (" - math.fsum(_kappa(plan) for plan in fixed)", ""),
    ),
    (later_plans_share_the_slack, (Filter, "_counted"), ("allowed /= 2", "pass")),
    (
        slack_and_addition_have_their_shares_of_delta,
        (Filter, "_most"),
        (
            "((1 - _BASIC_SHARE) * surrogates - _SLACK_SHARE) * self.delta / surrogates",
            "(1 - _BASIC_SHARE) * self.delta",
        ),
    ),
    (
        surrogates_beyond_their_slack_have_no_units,
        (Filter, "_counted"),
        ("if surrogates <= _SURROGATE_SLACK and most else", "if most else"),
    ),
    (stages_that_are_added_up_share_delta, (Filter, "_basic"), ("delta=rule.delta / 2", "delta=rule.delta")),
    (units_cover_both_orders, (ReferenceRound, "units"), ("for order in (0, 1):", "for order in (0,):")),
    (
        domination_is_checked_at_every_grid_point,
        (ReferenceRound, "_least"),
        ("wanted <= lower", "(wanted <= lower)[::64]"),
    ),
    (
        masses_are_raised_by_what_rounding_lost,
        (losses, "dominate"),
        ("1 + max(ahead.short, behind.short)", "1.0"),
    ),
]
NAMES = [check.__name__ for check, _, _ in PLANTED]


@pytest.mark.parametrize("check", [check for check, _, _ in PLANTED], ids=NAMES)
def test_the_right_code_passes(check, monkeypatch):
    check(monkeypatch)


@pytest.mark.parametrize(("check", "place", "change"), PLANTED, ids=NAMES)
def test_the_check_rejects_a_planted_defect(check, place, change, monkeypatch):
    owner, name = place
    right = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(right))
    assert source.count(change[0]) == 1
    made = {}
    exec(source.replace(*change), right.__globals__, made)
    monkeypatch.setattr(owner, name, made[name])
    if owner is losses:
        monkeypatch.setitem(globals(), name, made[name])
    with pytest.raises(AssertionError):
        check(monkeypatch)
