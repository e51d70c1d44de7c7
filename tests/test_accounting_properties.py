"""What must hold for every argument: monotonicity, agreement of methods, refusals, the best order in its grid."""

import ast
import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from d2pfed import accounting
from d2pfed.accounting.amplification import Accountant, epsilon_of
from d2pfed.accounting.binomial import advanced_composition_epsilon, amplified_epsilon, cpsgd_epsilon
from d2pfed.accounting.composition import AdditiveCost, binomial_cost, composed, gaussian_cost
from d2pfed.accounting.events import Adjacency, CohortSampling, Release, Sampling, Unit
from d2pfed.accounting.laws import BinomialSum, ContinuousGaussian, SkellamSum
from d2pfed.accounting.losses import COARSE, FINE, loss_distributions
from d2pfed.accounting.profiles import PairKind, SampledGaussian, gaussian_epsilon
from d2pfed.accounting.rdp import (
    dense_orders,
    gaussian_moments,
    gaussian_rdp,
    least_epsilon,
    mironov_conversion,
    real_orders,
    sparse_orders,
    tight_conversion,
    without_replacement_rdp,
)
from d2pfed.errors import ConfigError
from support.adjacencies import OF_CLIENTS

FIXED = CohortSampling(Sampling.FIXED, 10_000, 100)


def epsilon(
    z=0.8,
    sampling=FIXED,
    rounds=50,
    adjacency=Adjacency.REPLACE_ONE,
    delta=1e-5,
    accountant=Accountant.PLD,
    points=COARSE,
):
    return epsilon_of(z, sampling, rounds, adjacency=adjacency, delta=delta, accountant=accountant, points=points)


SAMPLED = [
    (accountant, method, adjacency)
    for accountant, method, adjacency in product(Accountant, (Sampling.FIXED, Sampling.NONE), Adjacency)
]


@pytest.mark.parametrize(("accountant", "method", "adjacency"), SAMPLED)
def test_epsilon_moves_the_right_way_with_every_argument(accountant, method, adjacency):
    def at(z=0.8, cohort_size=100, rounds=50, delta=1e-5):
        sampling = CohortSampling(method, 10_000, cohort_size)
        return epsilon(z, sampling, rounds, adjacency, delta, accountant)

    slack = 1 + 2e-3  # two grids may differ by their resolution
    for values, argument in (
        ((0.5, 0.7, 0.9, 1.3, 2.0, 4.0), "z"),
        ((1000, 300, 100, 30, 10), "cohort_size"),
        ((400, 200, 50, 10, 2, 1), "rounds"),
        ((1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3), "delta"),
    ):
        found = [at(**{argument: value}) for value in values]
        assert all(later <= earlier * slack + 1e-9 for earlier, later in pairwise(found)), (argument, found)


def test_tighter_accountants_give_smaller_numbers():
    for z, rounds in product((0.5, 0.7, 1.0, 2.0), (1, 30, 300)):
        found = [
            epsilon(z, rounds=rounds, accountant=accountant)
            for accountant in (Accountant.PLD, Accountant.WBK, Accountant.WBK_MIRONOV)
        ]
        assert found == sorted(found)


def test_the_coarse_grid_is_above_the_fine_one_and_close():
    for z, rounds, population in product((0.5, 0.8, 1.5), (1, 100, 1000), (200, 10_000)):
        sampling = CohortSampling(Sampling.FIXED, population, 100)
        fine, coarse = (epsilon(z, sampling, rounds, points=points) for points in (FINE, COARSE))
        assert fine * (1 - 1e-5) <= coarse <= fine * 1.02 + 1e-6


def coins(kind, ratio, rate, rounds, points, delta=1e-5):
    """Return epsilon of records that are drawn by secret coins."""
    return composed(loss_distributions([(SampledGaussian(kind, ratio, rate), rounds)], delta, points)).epsilon(
        delta
    )


def test_both_grids_agree_behind_secret_coins():
    kinds = (PairKind.POISSON_REPLACE_ONE, PairKind.POISSON_ZERO_OUT)
    for z, rate, kind in product((1.4, 8.0, 120.0), (1e-5, 1e-3), kinds):
        fine, coarse = (coins(kind, 1 / z, rate, 300, points) for points in (FINE, COARSE))
        assert fine * (1 - 1e-3) <= coarse <= 1.1 * fine + 1e-6


def test_secret_coins_with_very_large_noise_cost_nearly_nothing():
    assert coins(PairKind.POISSON_REPLACE_ONE, 5e-7, 1e-3, 5000, COARSE, 0.1) == pytest.approx(0, abs=1e-4)


def test_zero_out_behind_fixed_size_cohorts_is_between_one_radius_and_two():
    for sigma in (1.0, 1.6):
        assert epsilon(sigma) < epsilon(sigma, adjacency=Adjacency.ZERO_OUT) < epsilon(sigma / 2)


def test_a_cohort_of_everyone_is_not_amplified():
    everyone = CohortSampling(Sampling.FIXED, 100, 100)
    for adjacency in OF_CLIENTS:
        plain = gaussian_epsilon(1e-5, math.sqrt(50) / 3)
        assert epsilon(3.0, everyone, adjacency=adjacency) == pytest.approx(plain, rel=1e-12)


def test_a_partition_costs_one_round_however_many_there_are():
    once = CohortSampling(Sampling.ONCE, 10_000, 100)
    assert epsilon(1.5, once, rounds=100) == epsilon(1.5, once, rounds=1) == gaussian_epsilon(1e-5, 1 / 1.5)


def test_the_best_order_is_never_the_last_of_its_grid():
    for z, rate, rounds, convert in product(
        (0.3, 0.8, 2.0, 6.0), (1e-4, 1e-2, 0.3), (1, 1000), (mironov_conversion, tight_conversion)
    ):
        last = []

        def curve(orders, z=z, rate=rate, rounds=rounds, last=last):
            last.append(orders[-1])
            own = gaussian_rdp(np.arange(orders[-1] + 1), 1 / z)
            moments = gaussian_moments(1 / z, int(orders[-1]))
            return rounds * without_replacement_rdp(own, rate, moments)[2:]

        _, order = least_epsilon(curve, dense_orders, 1e-5, convert)
        assert order < last[-1]


def test_real_orders_reach_further_than_any_gaussian_needs():
    for ratio, delta in product((1e-4, 1e-2, 1.0, 30.0, 300.0), (1e-12, 1e-5, 1e-2)):
        value, order = least_epsilon(
            lambda orders, ratio=ratio: gaussian_rdp(orders, ratio), real_orders, delta, tight_conversion
        )
        assert value == 0 or 1 + 2e-5 < order < 2**40
        assert gaussian_epsilon(delta, ratio) <= value * (1 + 1e-9)


def test_sparse_orders_are_integers_that_start_at_two():
    orders = sparse_orders(4096)
    assert orders[0] == 2
    assert orders[-1] == 4096
    assert np.array_equal(orders, np.rint(orders))


def test_equal_releases_compose_alike_one_by_one_and_at_once():
    part = SampledGaussian(PairKind.FIXED_SIZE, 1.2, 0.01, slack=1e-7)
    cost = loss_distributions([(part, 8)], 1e-5, COARSE)[0][0]
    at_once, one_by_one = composed([(cost, 8)]), composed([(cost, 3), (cost, 4), (cost, 1)])
    assert at_once.epsilon(1e-5) == pytest.approx(one_by_one.epsilon(1e-5), rel=1e-4)
    assert at_once.slack == pytest.approx(8e-7)
    assert [sum(count for *_, count in cost.pmfs) for cost in (at_once, one_by_one)] == [8, 8]
    assert composed([(AdditiveCost((1.0, 2.0)), 3), (AdditiveCost((0.5, 0.0)), 2)]).values == (4.0, 6.0)


def test_unlike_releases_cost_between_their_extremes():
    cheap, dear = (SampledGaussian(PairKind.FIXED_SIZE, ratio, 0.01) for ratio in (0.8, 1.6))

    def together(parts):
        return composed(loss_distributions(parts, 1e-5, COARSE)).epsilon(1e-5)

    assert together([(cheap, 40)]) < together([(cheap, 20), (dear, 20)]) < together([(dear, 40)])


def test_a_release_that_rarely_includes_the_client_costs_little():
    part = SampledGaussian(PairKind.FIXED_SIZE, 1.0, 1e-14)
    assert composed(loss_distributions([(part, 10)], 1e-5, COARSE)).epsilon(1e-5) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"z": 0.0}, "noise_multiplier"),
        ({"z": math.inf}, "noise_multiplier"),
        ({"rounds": 0}, "rounds"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
    ],
)
def test_bad_arguments_are_refused_with_the_rule(changed, rule):
    with pytest.raises(ConfigError, match=rule):
        epsilon(**changed)


def test_binomial_helpers_move_the_right_way_and_never_wrap_around():
    assert amplified_epsilon(1.0, 1.0) == pytest.approx(1.0)
    assert amplified_epsilon(1.0, 0.1) < amplified_epsilon(1.0, 0.2) < 1.0
    assert amplified_epsilon(1000.0, 0.5) == pytest.approx(1000 + math.log(0.5))
    assert (
        advanced_composition_epsilon(0.1, 10, 1e-6)
        < advanced_composition_epsilon(0.1, 20, 1e-6)
        < advanced_composition_epsilon(0.1, 20, 1e-9)
    )
    assert advanced_composition_epsilon(400.0, 1, 1e-6) == advanced_composition_epsilon(0.1, 1, 0.0) == math.inf
    with pytest.raises(ConfigError, match="delta_per_round"):
        cpsgd_epsilon(trials=10**6, levels=3, dimension=10, rate=1, rounds=1, delta=1e-6, delta_per_round=1e-5)
    with pytest.raises(ConfigError, match="trials"):
        BinomialSum(0, 1, Fraction(1), Fraction(1), Fraction(1), 1)


def test_invalid_values_are_refused():
    release = Release(
        run="run",
        round=0,
        attempt=0,
        unit=Unit.CLIENT,
        adjacency=Adjacency.ZERO_OUT,
        sampling=FIXED,
        noise=ContinuousGaussian(1.0, 1.0),
        participants=(1, 2),
    )
    for wrong, rule in (
        (lambda: CohortSampling(Sampling.FIXED, 10, 11), "cohort_size"),
        (lambda: ContinuousGaussian(math.inf, 1.0), "sigma"),
        (lambda: SkellamSum(Fraction(0), 1, Fraction(1), Fraction(1), 1), "variance"),
        (lambda: replace(release, attempt=-1), "attempt"),
        (lambda: replace(release, participants=(2, 2)), "increasing"),
        (lambda: replace(release, run=""), "name its run"),
    ):
        with pytest.raises(ConfigError, match=rule):
            wrong()


def test_noise_has_no_cost_under_a_method_that_does_not_apply():
    skellam = SkellamSum(Fraction(4), 10, Fraction(2), Fraction(4), 4)
    binomial = BinomialSum(10_000, 10, Fraction(2), Fraction(4), Fraction(1), 4)
    assert gaussian_cost(skellam, 2, 1).values == (math.inf, math.inf)
    for charge in (lambda: binomial.rdp(2, dense_orders(8)), lambda: binomial_cost(skellam, 2, 1e-6)):
        with pytest.raises(ConfigError, match="own rule"):
            charge()


def test_costs_are_composed_in_one_line_of_the_package():
    """No other function repeats or adds costs: neither library's composition nor a sum over a curve."""
    calls = []
    for path in sorted(Path(accounting.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "times":
                calls.append(path.name)
            if isinstance(node, ast.Attribute) and node.attr in {"compose", "self_compose"}:
                assert path.name == "composition.py"
    assert calls == ["composition.py"]
