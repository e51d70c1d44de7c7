"""Renyi curves, conversions, surrogates and binomial noise against formulas in 40 digits, at small cases and edges."""

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
from mpmath import mpf

from d2pfed.accounting import (
    Adjacency,
    BatchSampling,
    CohortSampling,
    Sampling,
    amplification,
    binomial,
    composition,
    rdp,
)
from d2pfed.accounting.composition import (
    TOTAL_SLACK,
    Method,
    filtered_epsilon,
    gaussian_cost,
    smoothing_gap,
    surrogate,
)
from d2pfed.accounting.events import RunReleases
from d2pfed.accounting.laws import BinomialSum, DiscreteGaussianSum, SkellamSum
from d2pfed.accounting.losses import LossPmf, PrivacyLossDistribution
from d2pfed.accounting.profiles import gaussian_epsilon
from d2pfed.errors import ConfigError


@pytest.fixture(autouse=True)
def digits():
    with mpmath.workdps(40):
        yield


def near(value: object, rel: float = 1e-12):
    return pytest.approx(float(value), rel=rel, abs=1e-300)


# ---- conversions and orders


def test_a_delta_is_above_0_and_below_1():
    for delta in (1e-300, 0.5, math.nextafter(1, 0)):
        rdp.check_delta(delta)
    for delta in (0.0, 1.0, -0.5, 1.5, math.nan):
        with pytest.raises(ConfigError, match=r"delta must be in \(0, 1\)"):
            rdp.check_delta(delta)


@pytest.mark.parametrize("delta", [1e-9, 1e-2, 0.3])
def test_both_conversions_are_their_formulas(delta):
    orders, renyi = np.array([2.0, 3.0, 17.0, 1000.0]), np.array([0.3, 0.31, 2.0, 5.0])
    mironov, tight = rdp.mironov_conversion(orders, renyi, delta), rdp.tight_conversion(orders, renyi, delta)
    for at, (order, value) in enumerate(zip(orders.tolist(), renyi.tolist(), strict=True)):
        assert mironov[at] == near(value + mpmath.log(1 / mpf(delta)) / (order - 1))
        wanted = value + mpmath.log(1 - 1 / mpf(order)) - mpmath.log(order * mpf(delta)) / (order - 1)
        assert tight[at] == near(max(wanted, 0))


def test_epsilon_is_zero_up_to_a_total_variation_of_delta():
    """Of order 2 the formula alone would say more; beyond the square of delta it does."""
    delta, orders = 0.01, np.array([1.0001])
    for factor, is_zero in ((0.99, True), (1.05, False)):
        found = rdp.tight_conversion(orders, np.array([-math.log1p(-factor * delta**2)]), delta)[0]
        assert bool(found == 0) is is_zero


def test_orders_are_whole_from_2_on_and_as_many_as_stated():
    assert rdp.dense_orders(5).tolist() == [2, 3, 4, 5]
    for top in (64, 1 << 14, 1 << 40):
        orders = rdp.sparse_orders(top)
        assert (orders[0], orders[-1]) == (2, top)
        assert np.all(orders == np.rint(orders))
        octave = orders[(orders >= top / 2) & (orders < top)]
        if top > 64:
            assert 23 <= len(octave) <= 28
        assert len(rdp.sparse_orders(2)) == 1
        real = rdp.real_orders(top) - 1
        assert (real[0], real[-1]) == (near(1e-5, 1e-8), near(top, 1e-8))
        assert 1.0085 < real[1] / real[0] < 1.0105


def test_the_best_order_is_found_where_it_is_known():
    """Of Mironov's conversion of a Gaussian it is 1 + sqrt(ln(1 / delta) / rho)."""
    delta = 1e-6
    for best in (2, 11, 64, 65, 1001, 4096):
        rho = math.log(1 / delta) / (best - 1) ** 2

        def curve(orders: np.ndarray, rho: float = rho) -> np.ndarray:
            return orders * rho

        found, order = rdp.least_epsilon(curve, rdp.dense_orders, delta, rdp.mironov_conversion)
        assert order == best
        assert found == near(best * rho + math.log(1 / delta) / (best - 1))
    rho = math.log(1 / delta) / 1e18
    found, order = rdp.least_epsilon(lambda a: a * rho, rdp.sparse_orders, delta, rdp.mironov_conversion)
    assert order == pytest.approx(1e9, rel=0.02)
    assert found == pytest.approx(2 * math.sqrt(rho * math.log(1 / delta)), rel=1e-3)
    for grid, last in ((rdp.dense_orders, 4096), (rdp.sparse_orders, 1 << 40)):
        _, order = rdp.least_epsilon(np.zeros_like, grid, delta, rdp.mironov_conversion)
        assert order == last


# ---- lattice Gaussians


def eta(width: float) -> mpf:
    return 2 * mpmath.nsum(lambda m: mpmath.exp(-2 * (mpmath.pi * mpf(width) * m) ** 2), [1, mpmath.inf])


@pytest.mark.parametrize("width", [0.1, 0.2, 0.3, 0.5, 1.0, 2.5])
def test_the_tail_of_theta_is_its_sum_from_above(width):
    exact, found = eta(width), rdp.theta_tail(width)
    assert exact * (1 - mpf(10) ** -14) <= found <= exact * (1 + mpf("2e-4" if width > 0.1 else "0.04"))
    if width >= 0.3:
        assert found == near(exact, 1e-9)


def test_narrower_than_a_tenth_is_a_tenth():
    assert rdp.theta_tail(0.01) == rdp.theta_tail(0.1) > 1
    assert rdp.theta_tail(0.11) < rdp.theta_tail(0.1)


def test_two_sided_is_a_logarithm_and_infinite_from_1_on():
    for tail in (1e-12, 0.3, 0.999):
        assert rdp.two_sided(tail) == near(mpmath.log((1 + mpf(tail)) / (1 - mpf(tail))))
    assert rdp.two_sided(0.0) == 0
    assert rdp.two_sided(1.0) == rdp.two_sided(1.5) == math.inf


def tau(sigma: float, contributors: int) -> mpf:
    terms = [eta(sigma * math.sqrt(k / (k + 1))) for k in range(1, contributors)]
    return mpmath.fsum(mpmath.log((1 + term) / (1 - term)) for term in terms)


@pytest.mark.parametrize("contributors", [1, 2, 5])
@pytest.mark.parametrize("sigma", [0.6, 1.0])
def test_the_gap_of_a_sum_and_its_curve_are_those_of_the_theorem(sigma, contributors):
    gap = tau(sigma, contributors)
    assert rdp.sum_gap(sigma, contributors) == near(gap, 1e-9)
    orders = np.array([1.5, 2.0, 7.0])
    found = DiscreteGaussianSum(Fraction(sigma), contributors, Fraction("0.3"), 3).rdp(1, orders)
    own = eta(sigma * math.sqrt(contributors))
    for alpha, value in zip(map(mpf, orders.tolist()), found.tolist(), strict=True):
        wanted = alpha * mpf("0.3") ** 2 / (2 * mpf(sigma) ** 2 * contributors)
        wanted += 3 * alpha / (alpha - 1) * mpmath.log((1 + own) / (1 - own))
        wanted += 3 * (2 * alpha - 1) / (alpha - 1) * gap
        assert value == near(wanted, 1e-9)


def test_skellam_noise_has_both_branches_of_its_bound():
    orders = np.array([2.0, 3.0, 50.0])
    for variance, l1 in ((5.0, 2.0), (0.5, 0.1), (100.0, 2.2)):
        found = SkellamSum(Fraction(variance), 1, Fraction(3, 2), Fraction(l1), 100).rdp(1, orders)
        for alpha, value in zip(orders.tolist(), found.tolist(), strict=True):
            first = ((2 * alpha - 1) * 2.25 + 6 * l1) / (4 * variance**2)
            assert value == near(alpha * 2.25 / (2 * variance) + min(first, 1.5 * l1 / variance))


# ---- behind sampled cohorts


def moment(ratio: float, order: int) -> mpf:
    """The binomial sum of E_q[(p/q)^i] = exp(i (i - 1) ratio^2 / 2)."""
    with mpmath.workdps(120 + 6 * order):
        powers = [mpmath.exp(i * (i - 1) * mpf(ratio) ** 2 / 2) for i in range(order + 1)]
        return mpmath.fsum((-1) ** (order - i) * mpmath.binomial(order, i) * powers[i] for i in range(order + 1))


@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.5])
def test_moments_of_gaussians_are_their_alternating_sums(ratio):
    found = rdp.gaussian_moments(ratio, 9)
    assert len(found) == 10
    for order in range(10):
        if order >= 2 and order % 2 == 0:
            assert found[order] == pytest.approx(float(mpmath.log(moment(ratio, order))), abs=2e-13, rel=1e-13)
        else:
            assert found[order] == math.inf


@pytest.mark.parametrize(("ratio", "order"), [(1e-3, 60), (0.3, 60), (0.5, 20), (1.2, 2)])
def test_moments_keep_their_digits_at_high_orders(ratio, order):
    found = rdp.gaussian_moments(ratio, order)
    for each in (order, max(2, order // 2)):
        assert found[each] == pytest.approx(float(mpmath.log(moment(ratio, each))), abs=2e-13, rel=1e-13)


def test_moments_that_cannot_matter_are_left_out_and_no_others():
    square = 0.25
    found = rdp.gaussian_moments(0.5, 60)
    kept = np.isfinite(found).nonzero()[0]
    last = int(kept[-1])
    assert kept.tolist() == list(range(2, last + 1, 2))
    assert last * math.exp(-(last - 1) * square) >= 0.1 > (last + 2) * math.exp(-(last + 1) * square)
    assert np.isfinite(rdp.gaussian_moments(5.0, 8)).nonzero()[0].tolist() == [2]
    long = rdp.gaussian_moments(1e-3, 402)
    assert np.isfinite(long[398:403]).tolist() == [True, False, True, False, False]


def sampled(renyi: list[float], rate: float, alpha: int, ratio: float, *, moments: bool) -> mpf:
    """Theorems 9 and 27 of Wang, Balle and Kasiviswanathan, term by term."""
    total = mpf(1)
    for j in range(2, alpha + 1):
        term = 2 * mpmath.exp((j - 1) * mpf(renyi[j]))
        if j == 2:
            term = min(term, 4 * (mpmath.exp(mpf(renyi[2])) - 1))
        elif moments:
            even = moment(ratio, 2 * (j // 2)) * moment(ratio, 2 * ((j + 1) // 2))
            term = min(term, 4 * mpmath.sqrt(even))
        total += mpmath.binomial(alpha, j) * mpf(rate) ** j * term
    return mpmath.log(total) / (alpha - 1)


@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.parametrize(("ratio", "rate"), [(0.2, 0.01), (1.0, 0.1), (1.5, 0.3)])
def test_curves_behind_a_cohort_are_the_published_sums(ratio, rate, moments):
    renyi = [j * ratio**2 / 2 for j in range(8)]
    given = rdp.gaussian_moments(ratio, 8) if moments else None
    found = rdp.without_replacement_rdp(np.array(renyi), rate, given)
    assert found[:2].tolist() == [0, 0]
    for alpha in range(2, 8):
        assert found[alpha] == near(min(sampled(renyi, rate, alpha, ratio, moments=moments), renyi[alpha]), 1e-9)


def test_a_curve_behind_everyone_is_never_above_its_own():
    renyi = np.arange(6) * 0.5
    assert rdp.without_replacement_rdp(renyi, 1.0)[2:].tolist() == renyi[2:].tolist()


# ---- a Gaussian that stands for the sum


def test_the_gap_of_smoothing_is_that_of_the_lemma_and_infinite_beyond_it():
    for width, smooth in ((2.0, 0.8), (0.9, 0.5), (1.5, 1.4), (0.5, 0.45), (0.5, 0.499), (0.9, 0.3)):
        rest = (width**2 - smooth**2) * smooth**2 / width**2  # variance of what is rounded, given the result
        mean = eta(math.sqrt(smooth**2 + rest))
        worst, own = eta(smooth), eta(width)
        above = mpmath.log(1 + mean + worst**2 / (1 - worst)) + mpmath.log(1 + own)
        below = -mpmath.log(1 - mean) - mpmath.log(1 - own)
        assert smoothing_gap(width, smooth) == near(max(above, below), 1e-7)
    for width, smooth in ((1.0, 1.0), (1.0, 1.5), (1.0, 0.0), (1.0, -0.5), (5.0, 0.15)):
        assert smoothing_gap(width, smooth) == math.inf
    assert rdp.theta_tail(0.15) > 1  # where the bound says nothing


@pytest.mark.parametrize(
    ("sigma", "contributors", "dimension", "releases"),
    [(2, 1, 1, 1), (2, 100, 65536, 100), (3, 7, 10, 10**4), (Fraction(3, 2), 30, 8, 10)],
)
def test_a_surrogate_loses_the_least_width_its_slack_allows(sigma, contributors, dimension, releases):
    noise = DiscreteGaussianSum(Fraction(sigma), contributors, Fraction(1), dimension)
    found = surrogate(noise, releases)
    width = float(sigma) * math.sqrt(contributors)
    smooth = math.sqrt(width**2 - found.sigma**2)
    gap, share = rdp.sum_gap(float(sigma), contributors), TOTAL_SLACK / (releases * dimension)
    assert found.slack == near(dimension * (gap + smoothing_gap(width, smooth)), 1e-3)
    allowed = max(share - gap, gap, 4 * rdp.theta_tail(width))
    assert smoothing_gap(width, smooth * (1 + 1e-6)) <= allowed < smoothing_gap(width, smooth * (1 - 1e-6))
    if gap < share / 2:
        assert releases * found.slack <= TOTAL_SLACK * (1 + 1e-6)
    assert 0.3 < smooth < 1.5


def test_narrow_noise_has_no_surrogate_and_wide_noise_loses_little():
    assert surrogate(DiscreteGaussianSum(Fraction(1, 3), 1, Fraction(1), 1), 1) is None
    assert surrogate(DiscreteGaussianSum(Fraction(2), 1, Fraction(1), 1 << 20), 10**6) is not None
    wide = surrogate(DiscreteGaussianSum(Fraction(2), 100, Fraction(1), 1 << 16), 100)
    assert 5e-4 < 1 - wide.sigma / 20 < 2e-3
    narrow = [
        surrogate(DiscreteGaussianSum(Fraction(sigma, 100), 1, Fraction(1), 1), 1) for sigma in range(40, 120)
    ]
    first = next(at for at, each in enumerate(narrow) if each is not None)
    assert all(each is not None for each in narrow[first:])
    # The widest smoothing is three quarters of the width: there the first one is.
    at = (40 + first) / 100
    assert math.sqrt(at**2 - narrow[first].sigma ** 2) == pytest.approx(0.75 * at, rel=0.06)


# ---- binomial noise


SENSITIVITY = binomial.Sensitivity(l1=9.0, l2=3.0, linf=2.0)


def test_binomial_noise_is_charged_by_the_theorem_and_not_outside_of_it():
    delta, dimension, trials = 1e-5, 8, 10**5
    d, v = mpf(delta), mpf(trials) / 4
    wanted = 3 * mpmath.sqrt(2 * mpmath.log(mpf("1.25") / d) / v)
    wanted += (mpf(5) / 2 * 3 * mpmath.sqrt(mpmath.log(10 / d)) + mpf(9) / 3) / (v * (1 - d / 10))
    log_terms = mpmath.log(mpf("1.25") / d) + mpmath.log(20 * dimension / d) * mpmath.log(10 / d)
    wanted += 2 * mpf(2) / 3 * log_terms / v
    assert binomial.binomial_epsilon(trials, SENSITIVITY, dimension, delta) == near(wanted)
    least = 4 * 23 * math.log(10 * dimension / delta)
    assert binomial.binomial_epsilon(math.ceil(least), SENSITIVITY, dimension, delta) < math.inf
    assert binomial.binomial_epsilon(math.floor(least), SENSITIVITY, dimension, delta) == math.inf
    wide = binomial.Sensitivity(l1=1e4, l2=1e4, linf=1e4)
    assert binomial.binomial_epsilon(8 * 10**4, wide, dimension, delta) < math.inf
    assert binomial.binomial_epsilon(8 * 10**4 - 4, wide, dimension, delta) == math.inf


def test_amplification_and_composition_of_pairs_are_their_formulas():
    for epsilon, rate in ((0.1, 0.3), (5.0, 0.01), (699.0, 0.5)):
        wanted = mpmath.log(1 + mpf(rate) * (mpmath.exp(mpf(epsilon)) - 1))
        assert binomial.amplified_epsilon(epsilon, rate) == near(wanted)
    assert binomial.amplified_epsilon(1000.0, 0.5) == near(1000 - mpmath.log(2))
    for epsilon, rounds, slack in ((0.1, 10, 1e-6), (2.0, 3, 0.5)):
        e = mpf(epsilon)
        wanted = mpmath.sqrt(2 * rounds * mpmath.log(1 / mpf(slack))) * e + rounds * e * (mpmath.exp(e) - 1)
        assert binomial.advanced_composition_epsilon(epsilon, rounds, slack) == near(wanted)
    assert binomial.advanced_composition_epsilon(300.0, 1, 0.1) < math.inf
    assert binomial.advanced_composition_epsilon(300.1, 1, 0.1) == math.inf
    for slack in (0.0, -1e-9):
        assert binomial.advanced_composition_epsilon(0.1, 1, slack) == math.inf


def test_cpsgd_is_charged_as_by_its_authors():
    levels, ratio, dimension, delta = 16, 0.25, 10, 1e-9
    spread = math.sqrt(dimension) * ratio * (levels - 1)
    wobble = math.sqrt(2 * spread * math.log(2 / delta))
    l1 = spread + wobble + 4 / 3 * math.log(2 / delta)
    own = binomial.Sensitivity(l1, ratio * (levels - 1) + math.sqrt(l1 + wobble), levels + 1)
    given = {"trials": 10**6, "levels": 16, "dimension": 10, "rate": 0.1, "rounds": 3, "delta": 1e-5}
    given |= {"clip_over_bound": ratio}
    one = binomial.amplified_epsilon(binomial.binomial_epsilon(10**6, own, 10, delta), 0.1)
    wanted = binomial.advanced_composition_epsilon(one, 3, 1e-5 - 2 * 3 * 0.1 * delta)
    assert binomial.cpsgd_epsilon(**given, delta_per_round=delta) == near(wanted)
    for each in (0.0, 1e-5, 1e-4):
        with pytest.raises(ConfigError, match="delta_per_round must be in"):
            binomial.cpsgd_epsilon(**given, delta_per_round=each)
    with pytest.raises(ConfigError, match="delta_per_round must be in"):
        binomial.cpsgd_epsilon(**(given | {"delta": 1.0}), delta_per_round=delta)


# ---- a client's own account, and what goes together


def test_gaussian_releases_have_three_quarters_of_delta_and_cost_slack():
    noise = DiscreteGaussianSum(sigma=Fraction(40), contributors=9, radius=Fraction(30), dimension=100)
    squared, slack = gaussian_cost(noise, 2, 1 << 12).values
    found = filtered_epsilon(Counter({noise: 3}), 2, 1e-5)
    assert found == near(gaussian_epsilon(0.75e-5 * math.exp(-1e-4), math.sqrt(3 * squared)) + 2e-4)
    assert 3 * slack < 1e-4


@pytest.mark.parametrize("others", [1, 2])
def test_mixed_releases_divide_delta_among_all_divisions_of_epsilon(others, monkeypatch):
    """Nine ways to divide tenths between binomial noise and one of two other groups."""
    asked = []
    monkeypatch.setattr(
        composition,
        "_epsilon",
        lambda group, noises, _radii, delta: asked.append((group, len(noises), delta)) or 1.0,
    )
    gaussian = DiscreteGaussianSum(sigma=Fraction(40), contributors=9, radius=Fraction(30), dimension=100)
    skellam = SkellamSum(Fraction(1600), 9, Fraction(30), Fraction(300), 100)
    binomial_sum = BinomialSum(6400, 9, Fraction(30), Fraction(300), Fraction(30), 100)
    mixed = Counter([binomial_sum, gaussian, skellam][: 1 + others])
    assert filtered_epsilon(mixed, 2, 0.5) == near(2.0)
    each = near(0.5 * 0.05 / 36)
    assert asked == [(("gaussian", "rdp")[others - 1], others, each), ("binomial", 1, each)]


def test_shares_of_delta_add_up_to_one():
    assert math.fsum([*composition._ALONE.values(), composition._MIXED]) == near(1.0)


@dataclass(frozen=True)
class AlwaysDrawn:
    rate: float = 1.0
    ratio: float = 0.5
    slack: float = 0.01


def test_the_slack_of_every_release_of_records_is_added(monkeypatch):
    noise = DiscreteGaussianSum(sigma=Fraction(40), contributors=9, radius=Fraction(30), dimension=100)
    everyone = CohortSampling(Sampling.NONE, 5, 5)
    run = RunReleases(everyone, ((noise, 3),), 3, batches=BatchSampling(Fraction(1)))
    monkeypatch.setattr(amplification, "record_pairs", lambda *_: {AlwaysDrawn(): 3})
    found, _ = amplification.record_runs_epsilon([run], Adjacency.ADD_REMOVE, 1e-5, 1 << 11)
    assert found == near(gaussian_epsilon(1e-5 * math.exp(-0.03), math.sqrt(0.75)) + 0.06)


def test_the_last_share_of_a_binomial_sum_leaves_none():
    noise = BinomialSum(100, 3, Fraction(1), Fraction(1), Fraction(1), 4)
    assert noise.without(2) == BinomialSum(100, 1, Fraction(1), Fraction(1), Fraction(1), 4)
    assert noise.without(3) is None


def test_rates_of_coins_are_multiples_of_their_steps():
    for rate in (Fraction(1), Fraction(3, 8), Fraction(1, 1 << 32)):
        assert BatchSampling(rate).rate == rate
    for rate in (Fraction(0), Fraction(1, 3), Fraction(1, 1 << 33), Fraction(9, 8)):
        with pytest.raises(ConfigError, match=r"multiple of 2\^-32 in \(0, 1\]"):
            BatchSampling(rate)


def test_costs_of_many_times_are_of_their_product():
    one = PrivacyLossDistribution(((LossPmf(0.1, 0, np.ones(1), 0.0),) * 2 + (1,),), 0.25)
    assert (one.times(2).times(6).pmfs[0][2], one.times(2).times(6).slack) == (12, 3.0)
    assert [count for *_, count in (one + one.times(3)).pmfs] == [1, 3]


def test_advanced_composition_has_what_the_releases_leave_of_delta():
    total = SimpleNamespace(values=(1e9, 0.6e-5, 0.01, 0.1))
    found = composition.total_epsilon(Method.BINOMIAL, lambda *_: total, 1e-5, 1)
    assert found == near(math.sqrt(0.02 * math.log(1 / 0.4e-5)) + 0.1)
    assert composition.total_epsilon(Method.BINOMIAL, lambda *_: total, 0.6e-5, 1) == math.inf
