"""What a shared ledger may admit: whole plans, whoever chose them from outputs."""

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from d2pfed.accounting import filters, losses
from d2pfed.accounting.events import Adjacency, CohortSampling, Release, Sampling, Unit
from d2pfed.accounting.filters import Filter, PlanCost, ReferenceRound, milestones
from d2pfed.accounting.laws import BinomialSum, ContinuousGaussian, DiscreteGaussianSum, SkellamSum
from d2pfed.accounting.losses import profile_bounds
from d2pfed.accounting.observers import RELEASED, SERVER, account
from d2pfed.accounting.profiles import PairKind, SampledGaussian, gaussian_epsilon
from d2pfed.errors import ConfigError

DELTA = 1e-5
NOISE = DiscreteGaussianSum(Fraction(2), 400, Fraction(14), 51_370)
SKELLAM = SkellamSum(Fraction(4), 400, Fraction(14), Fraction(196), 51_370)
BINOMIAL = BinomialSum(400_000, 100, Fraction(300), Fraction(60_000), Fraction(30), 51_370)
FIXED = CohortSampling(Sampling.FIXED, 100_000, 1000)


def plan(noise=NOISE, attempts=50, max_participations=50, sampling=FIXED, adjacency=Adjacency.REPLACE_ONE):
    release = Release(
        run="",
        round=0,
        attempt=0,
        unit=Unit.CLIENT,
        adjacency=adjacency,
        sampling=sampling,
        noise=noise,
        participants=(),
    )
    return PlanCost(release, attempts, max_participations)


def alone(cost, observer=RELEASED, delta=DELTA):
    return account(
        [cost.release] * cost.attempts, observer, delta=delta, max_participations=cost.max_participations
    ).epsilon


FIRST = plan()
OTHER = plan(replace(NOISE, contributors=300), 30, 30, CohortSampling(Sampling.FIXED, 100_000, 700))


def test_one_plan_is_admitted_at_exactly_its_own_epsilon():
    for cost, observer in (
        (FIRST, RELEASED),
        (FIRST, SERVER),
        (plan(SKELLAM), RELEASED),
        (plan(BINOMIAL), SERVER),
    ):
        own = alone(cost, observer)
        charged = Filter(own, DELTA, observer).charge([cost])
        assert charged.admitted
        assert charged.composed_epsilon <= own
        refused = Filter(own * (1 - 1e-3), DELTA, observer).charge([cost])
        assert not refused.admitted
        assert "budget" in refused.reason


def test_no_plan_costs_nothing():
    charged = Filter(1.0, DELTA, RELEASED).charge([])
    assert charged.admitted
    assert charged.composed_epsilon == 0


def test_repeating_a_plan_costs_its_own_rounds():
    twice = alone(plan(attempts=100, max_participations=100))
    charged = Filter(1.03 * twice, DELTA, RELEASED).charge([FIRST, FIRST])
    assert charged.admitted
    assert charged.units == (50, 50)
    assert charged.budget_units >= 100
    assert not Filter(twice * (1 - 1e-3), DELTA, RELEASED).charge([FIRST, FIRST]).admitted


def test_another_kind_of_plan_costs_dominating_rounds_of_the_first():
    charged = Filter(2.0, DELTA, RELEASED).charge([FIRST, OTHER])
    assert charged.admitted
    exact = charged.composed_epsilon
    assert sum(charged.units) <= charged.budget_units
    assert alone(FIRST) < exact < 2.0
    enough = charged.units[1]
    # In its units the plan is dominated, so as many rounds of the first kind cost at least as much.
    assert alone(plan(attempts=enough, max_participations=enough)) >= alone(OTHER) * (1 - 0.02)


def test_domination_holds_at_every_epsilon_and_one_unit_fewer_is_too_few():
    reference = ReferenceRound.of(SampledGaussian(PairKind.FIXED_SIZE, 0.7, 0.01), 50, DELTA)
    own = filters._losses(reference, reference.pair)
    for other, count in (
        (SampledGaussian(PairKind.FIXED_SIZE, 0.9, 0.007), 30),
        (SampledGaussian(PairKind.POISSON_ZERO_OUT, 0.5, 0.01), 60),
        (SampledGaussian(PairKind.FIXED_SIZE, 0.05, 1.0), 1),
    ):
        slack = 2e-7
        units = reference.units({other: count}, slack)
        pmfs = filters._losses(reference, other)

        def missed(number, pmfs=pmfs, count=count):
            gaps = []
            for order in (0, 1):
                true = profile_bounds([(pmfs[order], count)], 1 << 16)[0]
                gaps.append(float(np.max(true - profile_bounds([(own[order], number)], 1 << 16)[1])))
            return max(gaps)

        assert missed(units) <= slack < missed(units - 1) * (1 + 1e-3)


def test_what_a_plan_was_charged_does_not_change_when_more_plans_come():
    budget = Filter(3.0, DELTA, RELEASED)
    third = replace(OTHER, attempts=20)
    prices = [budget.charge(plans).units for plans in ([FIRST, OTHER], [FIRST, OTHER, third, OTHER])]
    assert prices[1][:2] == prices[0]
    assert prices[1][3] >= prices[1][1]  # less slack is left for it


def test_a_plan_that_no_number_of_rounds_covers_is_added_up():
    """A client that is known to take part has losses that rare rounds never have: only plain addition remains."""
    exposed = plan(replace(NOISE, contributors=4000), 1, 1, CohortSampling(Sampling.NONE, 1000, 1000))
    skellam = plan(SKELLAM, 5, 5)
    for later in (exposed, skellam):
        total = alone(FIRST, delta=0.025 * DELTA) + alone(later, delta=0.0125 * DELTA)
        charged = Filter(1.01 * total, DELTA, RELEASED).charge([FIRST, later])
        assert charged.admitted
        assert not Filter(max(alone(FIRST), alone(later)), DELTA, RELEASED).charge([FIRST, later]).admitted


def test_declared_plans_compose_exactly_in_any_order():
    both = account(
        [FIRST.release] * 50 + [replace(OTHER.release, run="other")] * 30,
        RELEASED,
        delta=DELTA,
        max_participations=50,
    ).epsilon
    budget = Filter(both * (1 + 1e-6), DELTA, RELEASED, (FIRST, OTHER))
    for begun in ([FIRST], [OTHER], [OTHER, FIRST], [FIRST, OTHER]):
        assert budget.charge(begun).admitted
    assert not Filter(both, DELTA, RELEASED).charge([FIRST, OTHER]).admitted
    assert not budget.charge([FIRST, OTHER, FIRST]).admitted
    assert not Filter(both * 0.99, DELTA, RELEASED, (FIRST, OTHER)).charge([FIRST]).admitted
    roomy = Filter(3 * both, DELTA, RELEASED, (FIRST, OTHER)).charge([OTHER, FIRST, FIRST])
    assert roomy.admitted
    assert roomy.units == (50, 0, 50)


def test_squared_ratios_add_where_nothing_is_amplified():
    once = CohortSampling(Sampling.ONCE, 100_000, 1000)
    for cost, ratio in (
        (plan(max_participations=3), np.sqrt(6) * 28 / 40),
        (plan(sampling=once, max_participations=1), np.sqrt(2) * 28 / 40),
    ):
        exact = gaussian_epsilon(DELTA, ratio)
        assert Filter(1.03 * exact, DELTA, SERVER).charge([cost, cost]).admitted
        assert not Filter(exact, DELTA, SERVER).charge([cost, cost]).admitted


def test_noise_of_several_kinds_fits_one_ledger():
    for observer in (SERVER, RELEASED):
        for later in (plan(SKELLAM, max_participations=2), plan(BINOMIAL, 2, 2)):
            charged = Filter(200.0, DELTA, observer).charge([plan(max_participations=2), later])
            assert charged.admitted
            assert charged.composed_epsilon < 200
    first = plan(SKELLAM, 5, 5)
    assert Filter(50.0, DELTA, RELEASED).charge([first, first]).admitted
    assert not Filter(alone(first), DELTA, RELEASED).charge([first, first]).admitted


def test_caps_use_up_the_slack_and_are_added_up():
    """Ten runs whose caps cost a hundredth of delta each are more than a twentieth of it."""
    tight = plan(attempts=50, max_participations=8, sampling=CohortSampling(Sampling.FIXED, 100_000, 1000))
    budget = Filter(1000.0, DELTA, RELEASED)
    few = budget.charge([tight] * 3)
    assert few.units == (50, 50, 50)
    many = budget.charge([tight] * 40)
    assert many.units == ()  # admitted, if at all, by plain addition


def test_noise_that_the_observer_knows_is_never_admitted():
    trusted = plan(ContinuousGaussian(40.0, 14.0))
    assert not Filter(1e6, DELTA, SERVER).charge([trusted]).admitted
    assert not Filter(1e6, DELTA, SERVER).charge([FIRST, trusted]).admitted
    assert Filter(10.0, DELTA, RELEASED).charge([trusted, trusted]).admitted


def test_the_budget_of_two_kinds_is_near_their_product_at_every_delta():
    """A thousandth of what a double resolves beside 1, and less, is compared as well as a millionth."""
    for delta in (1e-6, 3e-8, 1e-12, 1e-30):
        exact = Filter(math.inf, delta, RELEASED).charge([FIRST, OTHER]).composed_epsilon
        charged = Filter(1.2 * exact, delta, RELEASED).charge([FIRST, OTHER])
        assert charged.admitted
        assert charged.units[0] == 50
        # In its units the plan is dominated: as many rounds of the first kind cost at least as much.
        enough = charged.units[1]
        assert alone(plan(attempts=enough, max_participations=enough), delta=delta) >= 0.98 * alone(
            OTHER, delta=delta
        )


def test_masses_that_are_no_pair_of_laws_are_no_unit():
    """A thousandth too much at one loss: it would tell the two worlds apart by itself."""
    reference = ReferenceRound.of(SampledGaussian(PairKind.FIXED_SIZE, 0.7, 0.01), 50, DELTA)
    forward, backward = filters._losses(reference, reference.pair)
    assert forward.apart == backward.apart < 1e-11
    masses = forward.masses.copy()
    more = 1e-3 * masses[-forward.first + 1]
    masses[-forward.first + 1] += more
    masses[-forward.first] -= more
    odd = replace(forward, masses=masses)
    ahead, behind = (losses._Side(each.masses[1 - each.first :], each.infinite, 0.0) for each in (odd, backward))
    assert losses._apart(ahead, behind, odd, backward) > 1e-6


def test_invalid_plans_are_refused():
    with pytest.raises(ConfigError, match="attempts and max_participations"):
        plan(attempts=0)
    with pytest.raises(ConfigError, match="attempts and max_participations"):
        plan(max_participations=0)
    with pytest.raises(ConfigError, match="adjacency"):
        Filter(9.0, DELTA, SERVER).charge([FIRST, plan(adjacency=Adjacency.ZERO_OUT)])
    with pytest.raises(ConfigError, match="delta"):
        Filter(9.0, 0.0, SERVER).charge([FIRST])


def test_a_filter_is_a_value_that_a_verifier_can_ask_again():
    budget = Filter(2.0, DELTA, RELEASED)
    assert budget.charge([FIRST, OTHER]) == Filter(2.0, DELTA, RELEASED).charge([FIRST, OTHER])
    assert Counter([FIRST, FIRST])[FIRST] == 2


def test_milestones_share_delta():
    half, whole = milestones(FIRST, (25, 50), RELEASED, DELTA)
    assert half == pytest.approx(alone(plan(attempts=25, max_participations=50), delta=DELTA / 2), rel=1e-2)
    assert alone(FIRST) < whole == pytest.approx(alone(FIRST, delta=DELTA / 2), rel=1e-2)
    for stops in ((), (0, 5), (5, 5), (25, 51)):
        with pytest.raises(ConfigError, match="stops"):
            milestones(FIRST, stops, RELEASED, DELTA)
