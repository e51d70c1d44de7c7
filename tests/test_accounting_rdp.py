"""Curves, gaps and conversions against exact divergences and high-precision arithmetic."""

import math
from fractions import Fraction
from itertools import product

import mpmath
import numpy as np
import pytest

from d2pfed.accounting import rdp
from d2pfed.accounting.binomial import Sensitivity, binomial_epsilon
from d2pfed.accounting.composition import TOTAL_SLACK, smoothing_gap, surrogate
from d2pfed.accounting.laws import DiscreteGaussianSum, SkellamSum
from d2pfed.accounting.losses import dominate
from d2pfed.accounting.profiles import (
    PairKind,
    SampledGaussian,
    fixed_size_delta,
    gaussian_delta,
    gaussian_epsilon,
)
from d2pfed.accounting.rdp import gaussian_moments, mironov_conversion, tight_conversion, without_replacement_rdp
from support import oracle

ORDERS = np.array([1.1, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0])


def sum_of_gaussians(sigma, contributors, centre):
    reach = int(30 * sigma + 13 * 5 + 3)  # a divergence of order 12 looks 12 shifts far
    law = oracle.discrete_gaussian(sigma, centre, reach)
    for _ in range(contributors - 1):
        law = np.convolve(law, oracle.discrete_gaussian(sigma, 0.0, reach), mode="same")
    return law


def sum_pair(sigma, contributors, first, second):
    p, q = (sum_of_gaussians(sigma, contributors, centre) for centre in (first, second))
    seen = (p > 1e-280) & (q > 1e-280)  # above underflow; leaving out the rest lowers the divergence
    return p[seen], q[seen]


def check_real_sums(curve):
    for sigma, contributors in product((0.4, 0.5, 0.7, 1.0, 2.0), (1, 2, 3, 5)):
        for first, second in ((0.0, 0.5), (0.25, -0.25), (0.3, 1.9), (-0.5, 2.5)):
            p, q = sum_pair(sigma, contributors, first, second)
            claimed = curve(ORDERS, sigma=sigma, contributors=contributors, shift=abs(first - second), dimension=1)
            exact = np.array([max(oracle.renyi(p, q, order), oracle.renyi(q, p, order)) for order in ORDERS])
            assert np.all(claimed >= exact * (1 - 1e-9)), f"below at {sigma}, {contributors}, {first}, {second}"


def test_sums_around_real_centres_stay_below_the_bound():
    def claimed(orders, *, sigma, contributors, shift, dimension):
        return DiscreteGaussianSum(Fraction(sigma), contributors, Fraction(shift), dimension).rdp(1, orders)

    check_real_sums(claimed)


def test_the_check_rejects_a_bound_without_the_lattice_term():
    def no_lattice(orders, *, sigma, contributors, shift, dimension):
        return rdp.gaussian_rdp(orders, shift / (sigma * math.sqrt(contributors)))

    with pytest.raises(AssertionError, match="below"):
        check_real_sums(no_lattice)


def test_a_discrete_gaussian_has_the_gaussian_curve_at_integer_orders():
    for sigma, shift in product((1.0, 2.0, 3.0), (1, 2, 4)):
        p, q = sum_pair(sigma, 1, shift, 0)
        for order in (2, 3, 5):
            assert oracle.renyi(p, q, order) == pytest.approx(order * shift**2 / (2 * sigma**2), rel=1e-9)
        for order in (1.5, 2.5, 3.3):
            assert oracle.renyi(p, q, order) <= order * shift**2 / (2 * sigma**2) * (1 + 1e-12)


def check_skellam(curve):
    orders = np.array([2.0, 3.0, 8.0, 32.0, 128.0])
    for variance, shift in product((0.5, 4.0, 20.0, 100.0, 400.0), (1, 2, 5, 10)):
        law = oracle.skellam(variance, int(40 * math.sqrt(variance) + 12 * shift + 60))
        p, q = law[shift:], law[: len(law) - shift]
        seen = (p > 1e-280) & (q > 1e-280)
        claimed = curve(orders, variance=variance, shift=shift, l1_shift=shift)
        exact = np.array([oracle.renyi(p[seen], q[seen], order) for order in orders])
        assert np.all(claimed >= exact * (1 - 1e-9)), f"below at {variance}, {shift}"


def skellam_curve(orders, *, variance, shift, l1_shift):
    return SkellamSum(Fraction(variance), 1, Fraction(shift), Fraction(l1_shift), 1).rdp(1, orders)


def test_skellam_stays_below_its_bound():
    check_skellam(skellam_curve)


def test_the_check_rejects_a_variance_that_is_two_per_cent_too_large():
    def overstated(orders, *, variance, shift, l1_shift):
        return skellam_curve(orders, variance=1.02 * variance, shift=shift, l1_shift=l1_shift)

    with pytest.raises(AssertionError, match="below"):
        check_skellam(overstated)


def test_the_theta_tail_is_the_series_and_errs_upwards():
    for width in (0.2, 0.4, 0.7, 1.0, 2.0, 3.0):
        with mpmath.workdps(40):
            series = 2 * mpmath.nsum(
                lambda m, w=width: mpmath.exp(-2 * mpmath.pi**2 * w**2 * m**2), [1, mpmath.inf]
            )
        assert float(series) * (1 - 1e-12) <= rdp.theta_tail(width) <= float(series) * (1 + 1e-4)
    assert rdp.theta_tail(0.01) > 1
    assert rdp.two_sided(1.5) == math.inf


def test_a_sum_is_within_its_gap_of_one_discrete_gaussian():
    tightest = 0.0
    for sigma, contributors in product((0.45, 0.5, 0.6, 0.8), (2, 3, 4)):
        law = sum_of_gaussians(sigma, contributors, 0.37)
        single = oracle.discrete_gaussian(sigma * math.sqrt(contributors), 0.37, len(law) // 2)
        seen = (law > 1e-200) & (single > 1e-200)
        measured = np.max(np.abs(np.log(law[seen] / single[seen])))
        assert measured <= rdp.sum_gap(sigma, contributors)
        tightest = max(tightest, measured / rdp.sum_gap(sigma, contributors))
    assert tightest > 0.2


def rounded_gaussian(width, smoothing, centre, reach):
    """A Gaussian of variance width^2 - smoothing^2, rounded by a discrete Gaussian of width smoothing."""
    rest = math.sqrt(width**2 - smoothing**2)
    nodes = np.linspace(centre - 10 * rest, centre + 10 * rest, 6001)
    weights = np.exp(-((nodes - centre) ** 2) / (2 * rest**2))
    kernel = np.array([oracle.discrete_gaussian(smoothing, y, reach) for y in nodes])
    return (weights / weights.sum()) @ kernel


def check_smoothing(gap):
    tightest = 0.0
    for width, smoothing, centre in product((1.0, 2.0), (0.45, 0.6, 0.7), (0.0, 0.25, 0.5)):
        reach = int(5 * width + 3)
        law = rounded_gaussian(width, smoothing, centre, 3 * reach)[2 * reach : -2 * reach]
        exact = oracle.discrete_gaussian(width, centre, 3 * reach)[2 * reach : -2 * reach]
        measured = np.max(np.abs(np.log(law / exact)))
        assert measured <= gap(width, smoothing), f"above at {width}, {smoothing}, {centre}"
        tightest = max(tightest, measured / gap(width, smoothing))
    return tightest


def test_a_rounded_gaussian_is_within_the_smoothing_gap():
    assert check_smoothing(smoothing_gap) > 0.5


def test_the_check_rejects_a_gap_that_forgets_the_mean():
    def quadratic_only(width, smoothing):
        worst = rdp.theta_tail(smoothing)
        return worst * worst / (1 - worst)

    with pytest.raises(AssertionError, match="above"):
        check_smoothing(quadratic_only)


def test_the_surrogate_loses_less_than_half_a_per_cent_of_sigma():
    noise = DiscreteGaussianSum(Fraction(2), 100, Fraction(10), 65_536)
    smooth = surrogate(noise, 100)
    assert 0.995 * 20 <= smooth.sigma < 20
    assert 100 * smooth.slack <= TOTAL_SLACK * (1 + 1e-9)


def test_the_surrogate_covers_one_contributor_and_refuses_narrow_noise():
    alone = surrogate(DiscreteGaussianSum(Fraction(20), 1, Fraction(10), 65_536), 2000)
    assert alone.sigma > 0.995 * 20
    assert surrogate(DiscreteGaussianSum(Fraction(1, 2), 1, Fraction(10), 1), 1) is None
    assert smoothing_gap(1.0, 1.0) == math.inf
    assert smoothing_gap(1.0, 0.05) == math.inf


def test_more_releases_or_dimensions_never_widen_the_surrogate():
    def sigma(dimension, releases):
        return surrogate(DiscreteGaussianSum(Fraction(2), 10, Fraction(1), dimension), releases).sigma

    assert sigma(1, 1) >= sigma(1, 10) >= sigma(100, 10) >= sigma(10_000, 1000)


def test_the_gaussian_curve_equals_high_precision_arithmetic():
    with mpmath.workdps(60):
        for ratio, epsilon in product((1e-3, 0.1, 0.5, 1.0, 3.0, 20.0, 60.0), (0.0, 0.01, 0.5, 3.0, 30.0, 800.0)):
            a, b = mpmath.mpf(ratio) / 2, mpmath.mpf(epsilon) / mpmath.mpf(ratio)
            exact = mpmath.ncdf(a - b) - mpmath.exp(epsilon) * mpmath.ncdf(-a - b)
            if exact > 1e-18:
                assert float(gaussian_delta(epsilon, ratio)) == pytest.approx(float(exact), rel=1e-9)


def test_the_gaussian_epsilon_ends_on_the_private_side():
    for ratio, delta in product((0.01, 0.3, 1.0, 5.0, 40.0), (1e-12, 1e-6, 1e-2)):
        epsilon = gaussian_epsilon(delta, ratio)
        assert gaussian_delta(epsilon, ratio) <= delta
        assert epsilon == 0 or gaussian_delta(epsilon * (1 - 1e-8), ratio) > delta


def test_the_tight_conversion_is_sound_and_never_above_the_published_one():
    orders = np.geomspace(1.01, 1000, 4000)
    for ratio, delta in product((0.05, 0.5, 2.0, 10.0), (1e-9, 1e-5, 1e-2)):
        curve = rdp.gaussian_rdp(orders, ratio)
        exact, close = gaussian_epsilon(delta, ratio), tight_conversion(orders, curve, delta).min()
        assert exact <= close * (1 + 1e-9)
        assert close <= mironov_conversion(orders, curve, delta).min()
    assert tight_conversion(np.array([2.0]), np.array([1e-13]), 1e-6)[0] == 0


def test_exact_moments_equal_high_precision_sums():
    for ratio in (0.1, 0.5, 1.0, 2.0):
        moments = gaussian_moments(ratio, 12)
        with mpmath.workdps(80):
            for even in range(2, 13, 2):
                terms = [
                    (-1) ** (even - i)
                    * mpmath.binomial(even, i)
                    * mpmath.exp(i * (i - 1) * mpmath.mpf(ratio) ** 2 / 2)
                    for i in range(even + 1)
                ]
                exact = float(mpmath.log(mpmath.fsum(terms)))
                assert moments[even] == math.inf or moments[even] == pytest.approx(exact, abs=1e-12)


def test_leaving_out_exact_moments_never_lowers_the_bound():
    for ratio, rate in product((0.2, 0.5, 1.0, 2.0), (1e-3, 0.05, 0.5)):
        own = rdp.gaussian_rdp(np.arange(41.0), ratio)
        exact = without_replacement_rdp(own, rate, gaussian_moments(ratio, 40))
        assert np.all(exact <= without_replacement_rdp(own, rate) * (1 + 1e-12))
        assert np.all(exact[2:] <= own[2:])


def profile(losses, epsilons):
    """Delta of discrete losses, by a plain sum."""
    shares = np.maximum(-np.expm1(epsilons[:, None] - losses.values[None, :]), 0.0)
    return losses.infinite + shares @ losses.masses


@pytest.mark.parametrize(("ratio", "rate"), [(1.0, 0.01), (2.0, 0.3), (0.2, 0.001), (3.0, 1.0)])
def test_the_grid_is_nowhere_below_the_profile(ratio, rate):
    part = SampledGaussian(PairKind.FIXED_SIZE, ratio, rate)
    losses, _ = dominate(part.forward, part.backward, 0.05, 1e-12)
    epsilons = np.linspace(0, 6, 101)
    true = fixed_size_delta(epsilons, ratio, rate)
    assert np.all(profile(losses, epsilons) >= true * (1 - 1e-9))
    mirrored = 1 - np.exp(-epsilons) + np.exp(-epsilons) * true
    assert np.all(profile(losses, -epsilons) >= mirrored * (1 - 1e-9))
    assert profile(losses, np.array([1.0]))[0] == pytest.approx(
        float(fixed_size_delta(np.array(1.0), ratio, rate)), rel=0.05, abs=1e-10
    )


def coin_delta(first, second, rate, epsilon):
    """Delta, by a plain sum over the plane, of a client that holds one point or another behind a secret coin."""
    axis = np.linspace(-9, 9, 361)
    x, y = np.meshgrid(axis, axis)

    def density(point):
        return np.exp(-((x - point[0]) ** 2 + (y - point[1]) ** 2) / 2) / (2 * math.pi)

    p, q = ((1 - rate) * density((0, 0)) + rate * density(point) for point in (first, second))
    return np.maximum(p - math.exp(epsilon) * q, 0).sum() * (axis[1] - axis[0]) ** 2


@pytest.mark.parametrize("rate", [0.05, 0.4])
def test_opposite_vectors_are_the_worst_pair_under_poisson_sampling(rate):
    radius = 1.5
    for epsilon in (0.0, 0.2, -0.1):
        worst = coin_delta((radius, 0), (-radius, 0), rate, epsilon)
        for length, angle in product((0.0, 0.5, 1.0), np.linspace(0, math.pi, 7)):
            other = (radius * length * math.cos(angle), radius * length * math.sin(angle))
            assert coin_delta((radius, 0), other, rate, epsilon) <= worst + 1e-9
            assert coin_delta(other, (radius, 0), rate, epsilon) <= worst + 1e-9


@pytest.mark.parametrize("rate", [0.05, 0.4])
def test_losses_under_poisson_sampling_equal_quadrature(rate):
    radius = 1.5
    for law, second in ((PairKind.POISSON_REPLACE_ONE, (-radius, 0)), (PairKind.POISSON_ZERO_OUT, (0, 0))):
        part = SampledGaussian(law, radius, rate)
        orders = dominate(part.forward, part.backward, 1e-3, 1e-12)
        for epsilon in (0.0, 0.1, 0.3):
            both = (coin_delta((radius, 0), second, rate, epsilon), coin_delta(second, (radius, 0), rate, epsilon))
            for losses, exact in zip(orders, both, strict=True):
                assert profile(losses, np.array([epsilon]))[0] == pytest.approx(exact, rel=1e-3, abs=1e-9)


def test_binomial_noise_stays_below_its_theorem():
    for trials, shift, delta in product((2_000, 20_000), (1, 3), (1e-2, 1e-4)):
        k = np.arange(trials + 1)
        logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
        law = np.exp(logs[-1] - logs - logs[::-1] - trials * math.log(2))
        assert len(k) == len(law)
        p, q = np.append(np.zeros(shift), law), np.append(law, np.zeros(shift))
        claimed = binomial_epsilon(trials, Sensitivity(shift, shift, shift), 1, delta)
        assert claimed >= oracle.epsilon(p, q, delta)
    assert binomial_epsilon(100, Sensitivity(1, 1, 1), 1, 1e-4) == math.inf
