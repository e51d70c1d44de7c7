"""Numbers that the paper, its authors' records and independent computations give."""

import pytest

from d2pfed.accounting.amplification import Accountant, epsilon_of
from d2pfed.accounting.binomial import cpsgd_epsilon
from d2pfed.accounting.composition import composed
from d2pfed.accounting.events import Adjacency, CohortSampling, Sampling
from d2pfed.accounting.losses import COARSE, FINE, loss_distributions
from d2pfed.accounting.profiles import PairKind, SampledGaussian, gaussian_epsilon

DIGITS = CohortSampling(Sampling.FIXED, 100_000, 100)
IMAGES = CohortSampling(Sampling.FIXED, 2_000, 10)


def fixed(z, rounds, accountant, sampling=DIGITS, points=FINE):
    return epsilon_of(
        z, sampling, rounds, adjacency=Adjacency.REPLACE_ONE, delta=1e-5, accountant=accountant, points=points
    )


@pytest.mark.parametrize(
    ("z", "rounds", "sampling", "epsilon"),
    [
        (0.5, 1, DIGITS, 3.855468),
        (0.5, 100, DIGITS, 5.620295),
        (0.6, 1, DIGITS, 2.553569),
        (0.6, 100, DIGITS, 2.950479),
        (0.8, 100, DIGITS, 1.513062),
        (1.0, 100, DIGITS, 0.942049),
        (0.75, 1, IMAGES, 2.134870),
        (0.75, 300, IMAGES, 3.183079),
        (0.3, 100, DIGITS, 24.0723),
        (0.15, 100, DIGITS, 3143.72),
    ],
)
def test_the_published_budgets_come_out_to_their_last_digit(z, rounds, sampling, epsilon):
    digits = 6 if epsilon < 20 else 4 if epsilon < 100 else 2
    assert round(fixed(z, rounds, Accountant.WBK_MIRONOV, sampling), digits) == epsilon


def test_a_peer_that_searches_real_orders_is_met_to_its_own_tolerance():
    assert fixed(0.5, 300, Accountant.WBK_MIRONOV, IMAGES) == pytest.approx(12.330785, abs=4e-6)


@pytest.mark.parametrize(("z", "epsilon"), [(0.6, 2.32498), (0.8, 1.12063), (1.0, 0.66494)])
def test_the_tight_conversion_on_the_same_curve(z, epsilon):
    assert round(fixed(z, 100, Accountant.WBK), 5) == epsilon
    assert fixed(z, 100, Accountant.RDP) == fixed(z, 100, Accountant.WBK)


@pytest.mark.parametrize(
    ("z", "rounds", "epsilon"),
    [
        (0.5, 100, 2.1133),
        (0.6, 100, 0.7827),
        (0.8, 100, 0.1448),
        (1.0, 100, 0.0599),
        (1.5, 100, 0.0256),
        (0.5, 2000, 3.7476),
        (0.6, 2000, 1.7164),
        (0.8, 2000, 0.4492),
        (1.0, 2000, 0.2582),
        (1.5, 2000, 0.1291),
    ],
)
def test_the_pld_accountant_gives_the_known_epsilon_for_fixed_size_cohorts(z, rounds, epsilon):
    fine, coarse = (fixed(z, rounds, Accountant.PLD, points=points) for points in (FINE, COARSE))
    assert fine == pytest.approx(epsilon, abs=1.5e-4)
    assert fine <= coarse <= 1.01 * fine


# Brackets of the dominating pair's composition, computed by two-sided rounding of the losses in other code.
@pytest.mark.parametrize(
    ("z", "rounds", "low", "high"),
    [
        (0.5, 100, 2.11299, 2.11364),
        (0.6, 100, 0.78224, 0.78306),
        (0.8, 100, 0.14448, 0.14502),
        (1.0, 100, 0.05962, 0.06025),
        (0.6, 2000, 1.708, 1.725),
        (1.0, 2000, 0.252, 0.264),
        (0.5, 1, 0.33759, 0.33761),
    ],
)
def test_the_value_lies_in_an_independent_bracket(z, rounds, low, high):
    assert low <= fixed(z, rounds, Accountant.PLD) <= high


@pytest.mark.parametrize(
    ("target", "z_by_rounds"),
    [
        (0.5, {100: 0.646, 500: 0.704, 2000: 0.776}),
        (1.0, {100: 0.576, 500: 0.623, 2000: 0.668}),
        (4.0, {100: 0.428, 500: 0.460, 2000: 0.492}),
    ],
)
def test_the_table_of_noise_multipliers(target, z_by_rounds):
    for rounds, z in z_by_rounds.items():
        below, above = (fixed(z + step, rounds, Accountant.PLD) for step in (0.0015, -0.0015))
        assert below < target < above


def test_secret_record_coins_need_less_noise_than_fixed_cohorts():
    def secret(ratio, kind):
        pair = SampledGaussian(kind, ratio, 1e-3)
        return composed(loss_distributions([(pair, 100)], 1e-5, FINE)).epsilon(1e-5)

    assert secret(1 / 1.2, PairKind.POISSON_ZERO_OUT) == pytest.approx(0.0343, abs=1e-4)
    assert 0.0508 <= secret(1 / 1.2, PairKind.POISSON_REPLACE_ONE) <= 0.0528
    assert secret(1 / 0.577, PairKind.POISSON_ZERO_OUT) == pytest.approx(0.985, abs=0.015)
    assert fixed(0.577 / 2, 100, Accountant.PLD) == pytest.approx(12.28, abs=0.03)


def test_exact_gaussian_values():
    assert gaussian_epsilon(1e-5, 1.0) == pytest.approx(4.377178, abs=1e-6)
    assert gaussian_epsilon(1e-5, 2.0) == pytest.approx(9.997256, abs=1e-6)


def test_noise_against_the_server_for_a_cap_on_participations():
    for epsilon, ratio in ((0.5, 0.1422), (1, 0.2681), (2, 0.5016), (4, 0.9249), (8, 1.6660)):
        assert gaussian_epsilon(1e-5, ratio) == pytest.approx(epsilon, rel=1e-3)


@pytest.mark.parametrize(
    ("trials", "levels", "dimension", "rate", "rounds", "epsilon"),
    [
        (3_642_525, 601, 51_370, 0.001, 1, 1.295422059),
        (3_642_525, 601, 51_370, 0.001, 100, 19.612962160),
        (7_285_851, 401, 996_298, 0.005, 1, 1.4930907),
        (7_285_851, 401, 996_298, 0.005, 300, 54.2037717),
        (16_717_215, 601, 51_370, 0.001, 100, 0.599),
    ],
)
def test_cpsgd_as_its_authors_account_for_it(trials, levels, dimension, rate, rounds, epsilon):
    found = cpsgd_epsilon(
        trials=trials,
        levels=levels,
        dimension=dimension,
        rate=rate,
        rounds=rounds,
        delta=1e-5,
        delta_per_round=1e-6,
    )
    digits = len(str(epsilon).split(".")[1])
    assert found == pytest.approx(epsilon, abs=0.51 * 10**-digits)
