"""Filters against closed forms: squared ratios that add, rounds that are counted, halves of delta that are added up."""

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from d2pfed.accounting.amplification import cap_excess
from d2pfed.accounting.composition import filtered_epsilon
from d2pfed.accounting.events import Adjacency, BatchSampling, CohortSampling, Release, Sampling, Unit
from d2pfed.accounting.filters import Filter, PlanCost, ReferenceRound, milestones
from d2pfed.accounting.laws import BinomialSum, DiscreteGaussianSum, SkellamSum
from d2pfed.accounting.losses import LossPmf
from d2pfed.accounting.observers import CLIENT, RELEASED, SERVER, colluding
from d2pfed.accounting.profiles import PairKind, SampledGaussian, gaussian_epsilon
from d2pfed.errors import ConfigError

DELTA = 1e-5
NOISE = DiscreteGaussianSum(Fraction(20), 25, Fraction(50), 2)  # one radius is half a standard deviation
KNOWN = CohortSampling(Sampling.NONE, 30, 30)
FIXED = CohortSampling(Sampling.FIXED, 1000, 100)


def plan(
    noise=NOISE, attempts=4, cap=None, sampling=KNOWN, adjacency=Adjacency.ZERO_OUT, batches=None
) -> PlanCost:
    release = Release(
        run="",
        round=0,
        attempt=0,
        unit=Unit.CLIENT if batches is None else Unit.RECORD,
        adjacency=adjacency,
        sampling=sampling,
        noise=noise,
        participants=(),
        batches=batches,
    )
    return PlanCost(release, attempts, attempts if cap is None else cap)


def one_gaussian(squared: float, share: float = 1.0) -> float:
    return gaussian_epsilon(share * DELTA, math.sqrt(squared))


def costs(wanted: float, plans, observer=SERVER, declared=()) -> bool:
    """Whether a budget of so much admits the plans, and one of a thousandth less does not."""
    admitted = [
        Filter(wanted * factor, DELTA, observer, declared).charge(plans).admitted for factor in (0.9995, 1.0005)
    ]
    return admitted == [False, True]


def test_declared_plans_add_squared_ratios_up_to_their_caps():
    one, two = plan(), plan(attempts=6, cap=3)
    wanted = one_gaussian(0.25 * (4 + 3))
    assert costs(wanted, [one, two], declared=(one, two))
    assert costs(wanted, [one], declared=(one, two))
    assert costs(one_gaussian(0.25 * 8), [one, plan()], declared=(one, one))
    assert costs(one_gaussian(4 * 0.25 * 4), [plan(adjacency=Adjacency.REPLACE_ONE)])


def test_an_answer_names_what_the_plans_cost_together():
    one, two = plan(), plan(attempts=6, cap=3)
    found = Filter(50.0, DELTA, SERVER, (one, two)).charge([one])
    assert found.admitted
    assert found.composed_epsilon == pytest.approx(one_gaussian(0.25 * 4), rel=1e-4)
    assert (found.units, found.budget_units, found.reason) == ((), 0, "")
    refused = Filter(0.5, DELTA, SERVER, (one, two)).charge([one])
    assert not refused.admitted
    assert refused.composed_epsilon == pytest.approx(one_gaussian(0.25 * 4), rel=1e-4)
    assert "epsilon 0.5 at delta 1e-05 against server does not hold this run" in refused.reason
    exact = one_gaussian(0.25 * 4)
    tight = Filter(exact * (1 + 1e-4), DELTA, SERVER).charge([one])
    assert tight.admitted
    assert tight.composed_epsilon <= exact * (1 + 1e-4)


def test_a_plan_chosen_later_is_charged_by_the_gaussian_filter():
    """0.95 of delta for it, of which Gaussians have 0.8; two hundred thousandths for their surrogates."""
    one, two = plan(), plan(replace(NOISE, contributors=36), attempts=6, cap=3)
    squared = 0.25 * 4 + 0.25 * 25 / 36 * 3
    wanted = gaussian_epsilon(0.95 * 0.8 * DELTA * math.exp(-1e-4), math.sqrt(squared)) + 2e-4
    assert costs(wanted, [one, two])
    once = plan(attempts=9, cap=1, sampling=CohortSampling(Sampling.ONCE, 1000, 30))
    squared = 0.25 * 4 + 0.25
    wanted = gaussian_epsilon(0.95 * 0.8 * DELTA * math.exp(-1e-4), math.sqrt(squared)) + 2e-4
    assert costs(wanted, [one, once])


def test_a_budget_of_exactly_what_plans_cost_admits_them():
    one, two = plan(), plan(attempts=6, cap=3)
    exact = filtered_epsilon(Counter({NOISE: 4 + 3}), Adjacency.ZERO_OUT.radii, 0.95 * DELTA)
    assert Filter(exact, DELTA, SERVER).charge([one, two]).admitted
    assert not Filter(math.nextafter(exact, 0), DELTA, SERVER).charge([one, two]).admitted


def test_an_observers_own_noise_does_not_count():
    one, two = plan(), plan(attempts=5)
    for observer, left in ((CLIENT, 24), (colluding(5), 20)):
        squared = 0.25 * 25 / left * 9
        wanted = gaussian_epsilon(0.95 * 0.8 * DELTA * math.exp(-1e-4), math.sqrt(squared)) + 2e-4
        assert costs(wanted, [one, two], observer)
    single = plan(replace(NOISE, sigma=Fraction(100), contributors=1))
    assert not Filter(1e6, DELTA, CLIENT).charge([one, single]).admitted
    assert not Filter(1e6, DELTA, CLIENT).charge([single]).admitted


BINOMIAL = BinomialSum(10**8, 4, Fraction(10), Fraction(40), Fraction(5), 16)


def test_kinds_that_do_not_mix_share_delta_in_halves():
    one, other = plan(), plan(BINOMIAL, attempts=1)
    parts = [Filter(math.inf, DELTA / 2, SERVER).charge([each]).composed_epsilon for each in (one, other)]
    found = Filter(math.inf, DELTA, SERVER, (one, other)).charge([one, other])
    assert found.composed_epsilon == pytest.approx(sum(parts), rel=1e-9)


def test_plans_that_are_added_up_have_halves_of_delta():
    """A first plan that is amplified, and of which no round can be the unit of the budget: Skellam noise."""
    noise = SkellamSum(Fraction(400), 25, Fraction(50), Fraction(2500), 4)
    one, two = plan(noise, 1, 1, FIXED), plan(noise, 2, 2, FIXED)
    own = [
        Filter(math.inf, DELTA / 2 ** (at + 1), RELEASED).charge([each]).composed_epsilon
        for at, each in enumerate((one, two))
    ]
    total = sum(own)
    assert Filter(total * (1 + 1e-6), DELTA, RELEASED).charge([one, two]).admitted
    assert not Filter(total * (1 - 1e-6), DELTA, RELEASED).charge([one, two]).admitted


def test_rounds_of_one_kind_are_counted():
    one, two = plan(sampling=FIXED, attempts=6), plan(sampling=FIXED, attempts=3)
    found = Filter(4.0, DELTA, RELEASED).charge([one, two, two])
    assert found.admitted
    assert found.units == (6, 3, 3)
    most = found.budget_units
    assert most >= 12
    # The budget in rounds is what fits at nine tenths of delta, to one per cent.
    full = plan(sampling=FIXED, attempts=most)
    beyond = plan(sampling=FIXED, attempts=most + max(2, most // 50))
    rule = Filter(math.inf, 0.9 * DELTA, RELEASED)
    assert rule.charge([full]).composed_epsilon <= 4.0 * (1 + 1e-3)
    assert most < 8 * 12
    assert rule.charge([beyond]).composed_epsilon > 4.0
    assert not Filter(4.0, DELTA, RELEASED).charge([one, *[two] * (most // 3)]).admitted


def test_a_budget_is_counted_up_to_sixteen_times_what_is_charged():
    one, two = plan(sampling=FIXED, attempts=1), plan(sampling=FIXED, attempts=2)
    found = Filter(1000.0, DELTA, RELEASED).charge([one, two])
    assert 3 * 8 <= found.budget_units <= 3 * 16


def test_caps_and_other_kinds_use_up_the_slack():
    one = plan(sampling=FIXED, attempts=6)
    other = plan(replace(NOISE, contributors=36), attempts=2, sampling=FIXED)
    found = Filter(8.0, DELTA, RELEASED).charge([one, other])
    assert found.admitted
    assert found.units[0] == 6
    assert 1 <= found.units[1] <= 3  # its rounds have a little more noise
    capped = plan(sampling=FIXED, attempts=6, cap=2)
    assert cap_excess(FIXED, 6, 2) > 0.05 * DELTA
    two = plan(sampling=FIXED, attempts=3)
    assert Filter(8.0, DELTA, RELEASED).charge([one, two]).units == (6, 3)
    assert Filter(8.0, DELTA, RELEASED).charge([one, capped]).units == ()
    assert Filter(8.0, DELTA, RELEASED).charge([capped, two]).units == ()


def test_declared_plans_of_other_kinds_stand_beside_the_units():
    one, other = plan(sampling=FIXED, attempts=6), plan(replace(NOISE, contributors=16), 60, 60, FIXED)
    later = plan(sampling=FIXED, attempts=2)
    beside = Filter(6.0, DELTA, RELEASED, (one, other)).charge([one, later])
    alone = Filter(6.0, DELTA, RELEASED, (one,)).charge([one, later])
    assert (beside.units, alone.units) == ((6, 0, 2), (6, 2))
    assert beside.budget_units < alone.budget_units


def test_records_are_counted_in_rounds_behind_coins():
    batches = BatchSampling(Fraction(1, 4))
    one = plan(adjacency=Adjacency.ADD_REMOVE, batches=batches, attempts=6)
    two = plan(adjacency=Adjacency.ADD_REMOVE, batches=batches, attempts=3)
    assert Filter(8.0, DELTA, SERVER).charge([one, two]).units == (6, 3)


# ---- units of one round


PLAIN = SampledGaussian(PairKind.FIXED_SIZE, 0.5, 1.0)


def test_units_of_a_gaussian_are_its_squared_ratios():
    unit = ReferenceRound.of(PLAIN, 10, DELTA)
    for ratio, needed in ((0.5, 1), (1.0, 4), (1.5, 9)):
        found = unit.units({SampledGaussian(PairKind.FIXED_SIZE, ratio, 1.0): 1}, 1e-7)
        assert needed <= found <= needed + 1
    assert unit.units({SampledGaussian(PairKind.FIXED_SIZE, 0.4, 1.0): 1}, 1e-7) == 1  # no less than a whole one
    assert unit.units({PLAIN: 7}, 1e-7) in (7, 8)
    assert unit.units({PLAIN: 7}, 1e-12) in (7, 8)
    assert unit.units({PLAIN: 7}, 1e-15) is None  # less than the tails that were cut off
    loose = unit.units({SampledGaussian(PairKind.FIXED_SIZE, 1.5, 1.0): 1}, 0.05)
    assert loose < 9


def test_a_plan_may_cost_as_many_units_as_the_limit_and_no_more():
    """Randomised response with odds of exp(1/1000), so many times, in units of one of them."""
    up = 1 / (1 + math.exp(-1e-3))
    one = LossPmf(1e-3, -1, np.array([1 - up, 0.0, up]), 0.0)
    limit, unit = 1 << 17, ReferenceRound(PLAIN, one.step, 0.0)
    for times in (limit // 2 + 1, limit * 97 // 100):
        assert times <= unit._least([(one, times)], one, 1e-6, 1) <= times * 1.01
    assert unit._least([(one, limit * 103 // 100)], one, 1e-6, 1) is None


def test_both_orders_of_a_pair_must_be_covered():
    """Zero against a vector behind a coin: the reversed order needs more units than the other."""
    unit = ReferenceRound.of(SampledGaussian(PairKind.POISSON_ZERO_OUT, 0.5, 0.5), 10, DELTA)
    pair = SampledGaussian(PairKind.POISSON_ZERO_OUT, 0.5, 0.5)
    assert unit.units({pair: 3}, 1e-7) in (3, 4)
    assert unit.units({SampledGaussian(PairKind.FIXED_SIZE, 0.5, 0.5): 3}, 1e-7) > 3


def test_epsilon_of_units_beside_fixed_releases_is_one_gaussians():
    unit = ReferenceRound.of(PLAIN, 10, DELTA)
    fixed = {SampledGaussian(PairKind.FIXED_SIZE, 1.0, 1.0): 2, PLAIN: 3}
    for units, squared in ((0, 2 + 0.75), (5, 2 + 2.0)):
        found = unit.epsilon(fixed, units, DELTA, 0.0)
        exact = gaussian_epsilon(DELTA, math.sqrt(squared))
        assert exact <= found <= exact * 1.002
    slack = unit.epsilon(fixed, 5, DELTA, 0.01)
    assert slack == pytest.approx(gaussian_epsilon(DELTA * math.exp(-0.01), 2.0) + 0.02, rel=2e-3)


def test_the_grid_of_a_unit_holds_all_but_its_tail():
    unit = ReferenceRound.of(PLAIN, 10, DELTA)
    assert unit.tail == pytest.approx(DELTA * 1e-9 / 10, rel=1e-12, abs=0)
    assert PLAIN.forward(np.array([unit.step * (1 << 12)]))[0] <= unit.tail
    assert PLAIN.forward(np.array([unit.step * (1 << 12) * 0.99]))[0] > unit.tail
    assert ReferenceRound.of(PLAIN, 10, 1e-300).tail == 1e-300


# ---- milestones, and what was fixed beforehand


def test_milestones_share_delta_and_are_increasing():
    cost = plan(attempts=9)
    found = milestones(cost, [1, 4, 9], SERVER, DELTA)
    wanted = [gaussian_epsilon(DELTA / 3, 0.5 * math.sqrt(stop)) for stop in (1, 4, 9)]
    assert found == pytest.approx(wanted, rel=1e-4)
    for stops in ([], [0, 3], [3, 3], [4, 2], [1, 10]):
        with pytest.raises(ConfigError, match=r"stops must be increasing and in \[1, attempts = 9\]"):
            milestones(cost, stops, SERVER, DELTA)


def test_each_declared_plan_is_begun_once(monkeypatch):
    one, two, seen = plan(), plan(attempts=5), []
    monkeypatch.setattr(Filter, "_filtered", lambda _self, _fixed, later, _exact: seen.append(later))
    for begun, declared in (([one, two, one], (one,)), ([one, one], (one, one)), ([two], (one, two))):
        Filter(100.0, DELTA, SERVER, declared).charge(begun)
    assert seen == [[two, one]]


def test_a_plan_has_attempts_and_a_cap():
    release = plan().release
    for attempts, cap in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(ConfigError, match="must be at least 1"):
            PlanCost(release, attempts, cap)
    assert PlanCost(release, 1, 1).run.count == 1
    assert plan(attempts=6, cap=3).run.max_participations == 3


def test_a_filter_needs_plans_of_one_account_and_a_delta():
    one = plan()
    with pytest.raises(ConfigError, match="same unit and adjacency"):
        Filter(1.0, DELTA, SERVER).charge([one, plan(adjacency=Adjacency.REPLACE_ONE)])
    for delta in (0.0, 1.0):
        with pytest.raises(ConfigError, match="delta must be in"):
            Filter(1.0, delta, SERVER).charge([one])
    assert Filter(1.0, DELTA, SERVER).charge([]).composed_epsilon == 0
    assert Counter([one, plan()])[one] == 2  # equal plans are the same kind
