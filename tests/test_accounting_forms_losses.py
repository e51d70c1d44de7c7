"""Profiles, discrete losses and their composition against integrals in 40 digits, exact sums and closed forms."""

import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as peer
from mpmath import mpf

from d2pfed.accounting import amplification, losses, profiles
from d2pfed.accounting.events import Adjacency, BatchSampling, CohortSampling, RunReleases, Sampling
from d2pfed.accounting.laws import BinomialSum, ContinuousGaussian, DiscreteGaussianSum, SkellamSum
from d2pfed.accounting.profiles import PairKind, SampledGaussian, SampledRdp
from d2pfed.errors import ConfigError

EPSILONS = (0.0, 1e-6, 0.3, 0.99, 1.01, 4.0, 30.0)


@pytest.fixture(autouse=True)
def digits():
    with mpmath.workdps(30):
        yield


def near(value: object, rel: float = 1e-9):
    return pytest.approx(float(value), rel=rel, abs=1e-290)


def exact_gaussian(epsilon: object, mu: object) -> mpf:
    e, m = mpf(epsilon), mpf(mu)
    return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


def mixture(epsilon: float, ratio: float, weights: list[float], *, mirrored: bool = False) -> mpf:
    """The profile of a mixture of Gaussians at 0, ratio, 2 ratio, ... against one at 0, or of the reverse."""
    r, w, bound = mpf(ratio), [mpf(weight) for weight in weights], mpmath.exp(mpf(epsilon))

    def log_ratio(z: mpf) -> mpf:
        return mpmath.log(mpmath.fsum(w[j] * mpmath.exp(j * r * z - (j * r) ** 2 / 2) for j in range(len(w))))

    wanted = -mpf(epsilon) if mirrored else mpf(epsilon)
    if mirrored and w[0] > 0 and wanted <= mpmath.log(w[0]):
        return mpf(0)
    low, high = mpf(-1e4), mpf(1e4)
    for _ in range(110):
        middle = (low + high) / 2
        low, high = (middle, high) if log_ratio(middle) < wanted else (low, middle)
    if mirrored:
        return mpmath.ncdf(low) - bound * mpmath.fsum(w[j] * mpmath.ncdf(low - j * r) for j in range(len(w)))
    return mpmath.fsum(w[j] * mpmath.ncdf(j * r - low) for j in range(len(w))) - bound * mpmath.ncdf(-low)


# ---- Gaussians


@pytest.mark.parametrize("ratio", [1e-3, 0.5, 1.0, 1.001, 3.0, 40.0])
def test_the_profile_of_a_gaussian_is_its_difference_of_tails(ratio):
    found = profiles.gaussian_delta(np.array(EPSILONS), ratio)
    for epsilon, value in zip(EPSILONS, found.tolist(), strict=True):
        assert value == near(exact_gaussian(epsilon, ratio))


def test_mills_ratios_fall_as_their_difference_does():
    for start, width in ((-3.0, 0.5), (0.0, 1.0), (5.0, 2.0), (30.0, 0.01)):
        ends = [mpmath.ncdf(-mpf(t)) / mpmath.npdf(mpf(t)) for t in (start, start + width)]
        assert profiles.mills_drop(np.array([start]), width)[0] == near(ends[0] - ends[1], 1e-11)
    assert profiles.scaled_density(np.array([3.0]), 2.0)[0] == near(mpmath.exp(2) * mpmath.npdf(3), 1e-13)


def test_the_guard_grows_with_ratios_beyond_a_thousand():
    assert profiles.relative_guard(0.0) == 1e-10
    assert profiles.relative_guard(1000.0) == pytest.approx(2e-10)
    assert profiles.relative_guard(4000.0) == pytest.approx(5e-10)


@pytest.mark.parametrize("ratio", [1e-4, 0.3, 2.0, 50.0])
@pytest.mark.parametrize("delta", [1e-200, 1e-9, 0.01])
def test_epsilon_of_a_gaussian_is_the_least_on_the_private_side(delta, ratio):
    found = profiles.gaussian_epsilon(delta, ratio)
    assert exact_gaussian(found, ratio) <= delta
    if found > 0:
        assert exact_gaussian(found * (1 - 1e-8), ratio) > delta * (1 - 1e-6)
        assert exact_gaussian(found * (1 - 1e-7), ratio) > delta
    else:
        assert exact_gaussian(0, ratio) <= delta


def test_epsilon_of_a_gaussian_at_its_edges():
    assert profiles.gaussian_epsilon(0.3, 0.0) == 0
    assert (
        profiles.gaussian_epsilon(0.39, 1.0) == 0 < profiles.gaussian_epsilon(0.38, 1.0)
    )  # total variation 0.3829
    tiny = profiles.gaussian_epsilon(1e-305, 2.0)
    assert tiny == pytest.approx(2 + 2 * math.sqrt(-2 * math.log(1e-305)))  # Chernoff's bound
    assert profiles.gaussian_epsilon(1e-299, 2.0) < 0.99 * tiny
    with pytest.raises(ConfigError, match="delta must be in"):
        profiles.gaussian_epsilon(0.0, 1.0)


# ---- behind sampled cohorts


@pytest.mark.parametrize("rate", [0.001, 0.3, 0.999])
@pytest.mark.parametrize("ratio", [0.01, 0.9, 1.1, 6.0])
def test_profiles_behind_cohorts_are_those_of_mixtures(ratio, rate):
    grid = np.array(EPSILONS)
    for at, epsilon in enumerate(EPSILONS):
        inner = mpmath.log(1 + (mpmath.exp(mpf(epsilon)) - 1) / mpf(rate))
        wanted = mpf(rate) * exact_gaussian(inner, ratio)
        assert profiles.fixed_size_delta(grid, ratio, rate)[at] == near(wanted, 1e-8)
        mirrored = mixture(epsilon, ratio, [1 - mpf(rate), mpf(rate)], mirrored=True)
        assert profiles.poisson_add_delta(grid, ratio, rate)[at] == near(mirrored, 1e-8)
        b, c = mpf(rate) * mpmath.exp(-(mpf(ratio) ** 2) / 2), (1 - mpf(rate)) * mpmath.expm1(epsilon)
        bound = mpmath.exp(mpf(epsilon))
        z = mpmath.log((c + mpmath.sqrt(c * c + 4 * b * b * bound)) / (2 * b)) / ratio
        tails = [mpmath.ncdf(sign * mpf(ratio) - z) for sign in (1, 0, -1)]
        opposite = mpf(rate) * tails[0] - c * tails[1] - mpf(rate) * bound * tails[2]
        assert profiles.poisson_replace_delta(grid, ratio, rate)[at] == near(opposite, 1e-8)


@pytest.mark.parametrize("rate", [0.05, 0.6])
@pytest.mark.parametrize("ratio", [0.02, 0.4, 1.5])
@pytest.mark.parametrize("coins", [2, 3])
def test_profiles_of_several_coins_are_those_of_mixtures(coins, ratio, rate):
    weights = [math.comb(coins, j) * mpf(rate) ** j * (1 - mpf(rate)) ** (coins - j) for j in range(coins + 1)]
    grid = np.array([0.0, 0.1, 1.0, 3.0])
    forward = profiles.several_coins_delta(grid, ratio, rate, coins)
    backward = profiles.several_coins_add_delta(grid, ratio, rate, coins)
    for at, epsilon in enumerate(grid.tolist()):
        for found, mirrored in ((forward[at], False), (backward[at], True)):
            wanted = mixture(epsilon, ratio, weights, mirrored=mirrored)
            if wanted < 1e-290:  # beyond the range of doubles
                assert found < 1e-280
                continue
            assert wanted * (1 - mpf(10) ** -13) <= found == near(wanted, 1e-6 if wanted > 1e-9 else 1e-3)


@pytest.mark.parametrize("rate", [0.001, 0.6, 0.99])
@pytest.mark.parametrize("ratio", [0.02, 0.4, 1.5])
@pytest.mark.parametrize("coins", [2, 5])
def test_the_profile_of_mirrored_mixtures_is_that_of_forty_digits(coins, ratio, rate):
    weights = [math.comb(coins, j) * mpf(rate) ** j * (1 - mpf(rate)) ** (coins - j) for j in range(coins + 1)]
    grid = np.array([0.0, 0.1, 1.0, 3.0])
    found = profiles.several_coins_replace_delta(grid, ratio, rate, coins)

    def density(z):
        return sum(w * mpmath.exp(j * mpf(ratio) * z - (j * mpf(ratio)) ** 2 / 2) for j, w in enumerate(weights))

    for at, epsilon in enumerate(grid.tolist()):
        low, high = mpf(0), mpf(2) ** 14
        for _ in range(150):
            middle = (low + high) / 2
            is_over = mpmath.log(density(middle) / density(-middle)) > epsilon
            low, high = (low, middle) if is_over else (middle, high)
        wanted = sum(
            w * (mpmath.ncdf(j * mpf(ratio) - low) - mpmath.exp(epsilon) * mpmath.ncdf(-j * mpf(ratio) - low))
            for j, w in enumerate(weights)
        )
        if wanted < 1e-290:  # beyond the range of doubles
            assert found[at] < 1e-280
        else:
            assert wanted * (1 - mpf(10) ** -13) <= found[at] == near(wanted, 1e-6)


def test_several_coins_at_their_edges():
    """Sure coins are one shift by all of them; beyond what no coin at all may tell the mirrored profile is 0."""
    for mirrored in (profiles.several_coins_delta, profiles.several_coins_add_delta):
        assert mirrored(np.array([0.5]), 0.7, 1.0, 3)[0] == near(exact_gaussian(0.5, 2.1), 1e-8)
    replaced = profiles.several_coins_replace_delta(np.array([0.5]), 0.7, 1.0, 3)[0]
    assert replaced == near(exact_gaussian(0.5, 4.2), 1e-8)
    last = -3 * math.log1p(-0.2)
    found = profiles.several_coins_add_delta(np.array([last - 1e-3, last + 1e-3, 800.0]), 1.0, 0.2, 3)
    assert found[0] > 0
    assert found[1:].tolist() == [0, 0]
    assert profiles.several_coins_delta(np.array([0.0]), 80.0, 0.999, 3)[0] <= 1 + 1e-9


def test_a_pair_names_its_profiles():
    grid, guard = np.array([0.2]), 1 + profiles.relative_guard(0.8)
    for kind, forward, backward in (
        (PairKind.FIXED_SIZE, profiles.fixed_size_delta, None),
        (PairKind.FIXED_SIZE_ZERO_OUT, profiles.fixed_size_zero_out_delta, profiles.fixed_size_delta),
        (PairKind.POISSON_ZERO_OUT, profiles.fixed_size_delta, profiles.poisson_add_delta),
        (PairKind.POISSON_REPLACE_ONE, profiles.poisson_replace_delta, None),
    ):
        pair = SampledGaussian(kind, 0.8, 0.3)
        assert pair.forward(grid)[0] == pytest.approx(guard * forward(grid, 0.8, 0.3)[0], rel=1e-14)
        assert pair.forward(grid)[0] > forward(grid, 0.8, 0.3)[0]
        if backward is None:
            assert pair.backward is None
        else:
            assert pair.backward(grid)[0] == pytest.approx(guard * backward(grid, 0.8, 0.3)[0], rel=1e-14)
            assert pair.backward(grid)[0] > backward(grid, 0.8, 0.3)[0]
    two = SampledGaussian(PairKind.POISSON_ZERO_OUT, 0.8, 0.3, coins=2)
    assert two.forward(grid) == profiles.several_coins_delta(grid, 0.8, 0.3, 2)
    assert two.backward(grid) == profiles.several_coins_add_delta(grid, 0.8, 0.3, 2)
    replaced = SampledGaussian(PairKind.POISSON_REPLACE_ONE, 0.8, 0.3, coins=2)
    assert replaced.forward(grid) == profiles.several_coins_replace_delta(grid, 0.8, 0.3, 2)
    assert replaced.backward is None


# ---- caps


def test_what_a_cap_costs_is_a_tail_of_binomials():
    sampling = CohortSampling(Sampling.FIXED, 21, 4)
    for attempts, cap in ((5, 1), (5, 2), (5, 4), (12, 3)):
        chance = Fraction(4, 20)
        tail = sum(
            math.comb(attempts - 1, k) * chance**k * (1 - chance) ** (attempts - 1 - k)
            for k in range(cap, attempts)
        )
        kappa = attempts * Fraction(4, 21) * tail
        found = amplification.cap_excess(sampling, attempts, cap)
        assert kappa <= Fraction(found) <= kappa * (1 + Fraction(1, 10**8)) or found == 1.0 <= kappa
    assert amplification.cap_excess(sampling, 5, 5) == 0
    assert amplification.cap_excess(CohortSampling(Sampling.FIXED, 2, 1), 10**6, 1) == 1
    for other in (
        CohortSampling(Sampling.NONE, 21, 4),
        CohortSampling(Sampling.ONCE, 21, 4),
        CohortSampling(Sampling.FIXED, 4, 4),
    ):
        assert amplification.cap_excess(other, 5, 2) == 0
        assert not amplification.is_amplified(other)


# ---- from Renyi curves to profiles


def test_the_profile_of_a_renyi_curve_is_the_least_of_its_orders():
    """At integer orders, of a Gaussian: delta = exp((a - 1)(rho - epsilon)) (1 - 1/a)^a / (a - 1)."""
    noise = ContinuousGaussian(2.0, 1.0)
    epsilons = np.array([0.0, 0.5, 2.0, 5.0])
    found = profiles.rdp_delta(epsilons, noise, 2)
    for at, epsilon in enumerate(epsilons.tolist()):
        best = min(
            mpmath.exp((a - 1) * (a * mpf("0.5") - epsilon)) * (1 - 1 / mpf(a)) ** a / (a - 1)
            for a in range(2, 200)
        )
        tv = mpmath.sqrt(-mpmath.expm1(-2 * mpf("0.5")))
        assert found[at] == near(min(best, tv, 1), 1e-9)


def test_the_hull_of_points_is_their_lower_one():
    xs = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert profiles._hull(xs, [4.0, 1.0, 0.5, 1.0, 0.0]) == [0, 1, 2, 4]
    for ys in itertools.product((0.0, 1.0, 2.0), repeat=5):
        kept = profiles._hull(xs, list(ys))
        on = np.interp(xs, [xs[i] for i in kept], [ys[i] for i in kept])
        assert (kept[0], kept[-1]) == (0, 4)
        assert np.all(on <= np.array(ys) + 1e-12)
        slopes = np.diff([ys[i] for i in kept]) / np.diff([xs[i] for i in kept])
        assert np.all(np.diff(slopes) > 0)


def test_a_profile_from_a_renyi_curve_is_symmetric_and_above_the_gaussian():
    noise = ContinuousGaussian(2.0, 1.0)
    pair = SampledRdp(noise, 2, 0.25)
    assert pair.backward is None
    grid = np.array([0.0, 0.1, 1.0, 3.0])
    found, truth = pair.forward(grid), profiles.fixed_size_delta(grid, 1.0, 0.25)
    assert np.all(found >= truth)
    assert np.all(found[:2] <= 1.7 * truth[:2])
    plain = SampledRdp(noise, 2, 1.0).forward(grid)
    assert np.all(plain <= profiles.rdp_delta(grid, noise, 2) * (1 + 1e-4))
    assert plain[0] < 0.9 * profiles.rdp_delta(grid, noise, 2)[0]  # convexity across 1 is what helps
    assert profiles.rdp_width(noise, 2) < profiles.WIDEST
    assert profiles.rdp_width(ContinuousGaussian(0.01, 1.0), 2) == profiles.WIDEST


# ---- discrete losses


def profile_of(found: losses.LossPmf, epsilon: float) -> float:
    gains = np.maximum(-np.expm1(np.minimum(epsilon - found.values, 0.0)), 0.0)
    return found.infinite + math.fsum((found.masses * gains).tolist())


@pytest.mark.parametrize("kind", PairKind)
def test_discrete_losses_are_above_both_profiles_and_meet_them_on_the_grid(kind):
    pair = SampledGaussian(kind, 0.9, 0.2)
    forward, backward = losses.dominate(pair.forward, pair.backward, 0.05, 1e-9)
    for order, profile, other in (
        (forward, pair.forward, pair.backward or pair.forward),
        (backward, pair.backward or pair.forward, pair.forward),
    ):
        assert order.masses.sum() + order.infinite == pytest.approx(1, abs=1e-9)
        assert 0 <= order.infinite < 2e-9
        for epsilon in (0.0, 0.05, 0.07, 0.5, 1.0):
            exact, found = float(profile(np.array([epsilon]))[0]), profile_of(order, epsilon)
            assert exact <= found * (1 + 1e-12)
            if math.isclose(epsilon / 0.05, round(epsilon / 0.05)):
                assert found == pytest.approx(exact, rel=1e-6, abs=2e-9)
            if epsilon:  # the other sign: 1 - a + a h(1 / a)
                mirror = 1 - math.exp(-epsilon) + math.exp(-epsilon) * float(other(np.array([epsilon]))[0])
                assert mirror <= profile_of(order, -epsilon) * (1 + 1e-12)
                if math.isclose(epsilon / 0.05, round(epsilon / 0.05)):
                    assert profile_of(order, -epsilon) == pytest.approx(mirror, rel=1e-6)
    assert forward.infinite > 0
    assert (forward is backward) is (kind in (PairKind.FIXED_SIZE, PairKind.POISSON_REPLACE_ONE))


@pytest.mark.parametrize("step", [0.5, 0.2, 1e-2, 1e-4])
def test_decayed_sums_are_sums(step):
    masses = np.abs(np.sin(np.arange(1, 700.0))) * np.exp(-np.arange(699) / 90)
    found = losses.decayed_sums(masses, step)
    for k in (0, 1, 63, 64, 65, 500, 698):
        wanted = math.fsum((masses[k:] * np.exp(-step * np.arange(699 - k))).tolist())
        assert found[k] == pytest.approx(wanted, rel=1e-12)


def test_a_tail_is_found_on_the_far_side():
    for scale in (0.3, 2.0, 50.0):
        found = profiles.tail_epsilon(lambda e, s=scale: np.exp(-e / s), 1e-6)
        exact = scale * math.log(1e6)
        assert exact <= found <= exact * 1.0011
    # From 512 to 1024 by halves, until the least and the most are a thousandth apart.
    assert profiles.tail_epsilon(lambda e: np.where(e < 999.25, 1.0, 0.0), 1e-6) == 1000
    assert profiles.tail_epsilon(lambda e: 1e-6 * np.exp(-e), 1e-6) == 0
    assert profiles.tail_epsilon(lambda e: 1.1e-6 * np.exp(-e), 1e-6) > 0


# ---- composition


def two_point(step: float = 0.25) -> losses.LossPmf:
    """Randomised response: losses of one step up or down."""
    up = math.exp(step) / (1 + math.exp(step))
    return losses.LossPmf(step, -1, np.array([1 - up, 0.0, up]), 0.0)


def binomial_delta(count: int, epsilon: float, step: float = 0.25) -> float:
    up = math.exp(step) / (1 + math.exp(step))
    return math.fsum(
        math.comb(count, k)
        * up**k
        * (1 - up) ** (count - k)
        * max(0.0, 1 - math.exp(epsilon - step * (2 * k - count)))
        for k in range(count + 1)
    )


@pytest.mark.parametrize("count", [1, 2, 7, 40])
@pytest.mark.parametrize("delta", [0.2, 1e-4, 1e-12])
def test_composed_coins_have_the_epsilon_of_their_binomial(count, delta):
    found = losses.tilted_epsilon([(two_point(), count)], delta)
    low, high = 0.0, 0.25 * count
    if binomial_delta(count, 0.0) <= delta:
        assert found == pytest.approx(0, abs=1e-12)
        return
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if binomial_delta(count, middle) > delta else (low, middle)
    assert high * (1 - 1e-12) <= found <= high * (1 + (1e-5 if count > 2 else 1e-3))


@pytest.mark.parametrize(("step", "place"), [(0.25, 1), (0.25, 10), (0.01, 40), (0.01, 400), (1e-3, 129)])
def test_a_loss_that_is_sure_costs_nothing_from_its_own_delta_on(step, place):
    sure = losses.LossPmf(step, place, np.array([1.0]), 0.0)
    own = -math.expm1(-step * place)
    for share in (0.01, 0.5, 0.99):
        assert losses.tilted_epsilon([(sure, 1)], own + share * (1 - own)) == 0
        assert losses.tilted_epsilon([(sure, 1)], own * (1 - share)) >= step * place + math.log1p(
            -own * (1 - share)
        )


def test_infinite_losses_use_up_delta_and_more_is_infinite():
    plain = two_point()
    leaky = losses.LossPmf(plain.step, plain.first, plain.masses, 1e-4)
    assert losses.tilted_epsilon([(leaky, 10)], 9e-4) == math.inf
    assert losses.tilted_epsilon([(leaky, 10)], 1e-3) == math.inf
    assert losses.tilted_epsilon([(leaky, 10)], 3e-3) == pytest.approx(
        losses.tilted_epsilon([(plain, 10)], 2e-3), rel=1e-6
    )
    grown = losses.LossPmf(
        plain.step, plain.first, 2 * plain.masses, 1e-4
    )  # masses that are too large count as such
    assert losses.tilted_epsilon([(grown, 3)], 2.3e-3) == math.inf
    assert losses.tilted_epsilon([(grown, 3)], 2.5e-3) < math.inf
    assert losses.tilted_epsilon([(grown, 3)], 0.5) > losses.tilted_epsilon([(plain, 3)], 0.5)


def test_different_losses_convolve():
    """A sum of one coin of one step and one of two, by hand."""
    one, two = two_point(0.25), losses.LossPmf(0.25, -2, np.array([0.3, 0.0, 0.0, 0.0, 0.7]), 0.0)
    up = float(one.masses[2])
    sums = {0.75: up * 0.7, 0.25: (1 - up) * 0.7, -0.25: up * 0.3, -0.75: (1 - up) * 0.3}
    epsilon = losses.tilted_epsilon([(one, 1), (two, 1)], 0.1)
    assert math.fsum(
        mass * max(0.0, 1 - math.exp(epsilon - loss)) for loss, mass in sums.items()
    ) == pytest.approx(0.1, rel=1e-4)


def test_a_distribution_keeps_its_factors_slack_and_both_orders():
    forward, backward = two_point(), losses.LossPmf(0.25, -2, np.array([0.2, 0.0, 0.0, 0.0, 0.8]), 0.0)
    one = losses.PrivacyLossDistribution(((forward, backward, 1),), 1e-3)
    three = one.times(2) + one
    assert [count for *_, count in three.pmfs] == [2, 1]
    assert three.slack == pytest.approx(3e-3)
    left = 0.05 * math.exp(-3e-3) - 0.01
    wanted = [losses.tilted_epsilon([(each, 2), (each, 1)], left) for each in (forward, backward)]
    assert three.epsilon(0.05, 0.01) == pytest.approx(max(wanted) + 2 * 3e-3, rel=1e-12)
    assert wanted[1] > 1.1 * wanted[0]
    swapped = losses.PrivacyLossDistribution(((backward, forward, 1),), 0.0)
    assert swapped.epsilon(0.05) == pytest.approx(losses.tilted_epsilon([(backward, 1)], 0.05), rel=1e-12)
    assert one.epsilon(1e-3, 1e-3) == one.epsilon(1e-3, 2e-3) == math.inf


@pytest.mark.parametrize("count", [1, 30])
def test_gaussians_on_a_grid_compose_to_one_gaussian(count):
    pair = SampledGaussian(PairKind.FIXED_SIZE, 0.5, 1.0)
    costs = losses.loss_distributions([(pair, count)], 1e-6, losses.COARSE)
    assert [times for _, times in costs] == [count]
    found = costs[0][0].times(count).epsilon(1e-6)
    exact = profiles.gaussian_epsilon(1e-6, 0.5 * math.sqrt(count))
    assert exact <= found <= exact * 1.003
    step = costs[0][0].pmfs[0][0].step
    assert step == pytest.approx(profiles.tail_epsilon(pair.forward, 1e-12 / count) / losses.COARSE)


@pytest.mark.parametrize("ratio", [0.1, 1.0])
def test_both_loss_grids_are_near_the_gaussian(ratio):
    """As theory.md says: upper bounds, a few parts in a thousand apart."""
    pair, found = SampledGaussian(PairKind.FIXED_SIZE, ratio, 1.0), []
    for points, wanted in ((losses.COARSE, 2_048), (losses.FINE, 16_384)):
        cost = losses.loss_distributions([(pair, 40)], 1e-6, points)[0][0]
        assert -cost.pmfs[0][0].first in (wanted, wanted + 1)  # rounded up
        found.append(cost.times(40).epsilon(1e-6))
    exact = profiles.gaussian_epsilon(1e-6, ratio * math.sqrt(40))
    assert exact <= found[1] <= found[0] <= exact * 1.003


def test_a_grid_suits_the_narrowest_as_far_as_it_can():
    narrow, wide = (SampledGaussian(PairKind.FIXED_SIZE, ratio, 1.0) for ratio in (0.01, 5.0))
    step = losses.loss_distributions([(narrow, 1), (wide, 3)], 1e-6, 1 << 8)[0][0].pmfs[0][0].step
    widths = [profiles.tail_epsilon(pair.forward, 1e-12 / 4) for pair in (narrow, wide)]
    assert step == pytest.approx(widths[1] / (16 << 8))
    near_one = losses.loss_distributions(
        [(wide, 1), (SampledGaussian(PairKind.FIXED_SIZE, 4.0, 1.0), 3)], 1e-6, 1 << 8
    )
    assert near_one[0][0].pmfs[0][0].step < widths[1] / (1 << 8)


def test_powers_crossings_and_roots():
    base = np.array([0.5 + 0.5j, 2.0, -1.0])
    for count in (1, 2, 3, 10):
        assert np.allclose(losses._power(base, count), base**count)
    grid, profile = np.array([0.0, 1.0, 2.0]), np.array([0.5, 0.2, 0.1])
    assert losses._crossing(grid, profile, 0.05) == math.inf
    assert losses._crossing(grid, profile, 0.6) == 0
    assert losses._crossing(grid, profile, 0.2) == pytest.approx(1.0)
    between = losses._crossing(grid, profile, 0.3)
    assert 0.5 + (0.2 - 0.5) * (math.exp(between) - 1) / (math.e - 1) == pytest.approx(0.3)
    assert losses._crossing(grid - 5, profile, 0.15) == 0
    for root in (1e-6, 0.5, 40.0, 1e5):
        found = losses._root(lambda slope, r=root: slope < r)
        assert root <= found <= root * 1.021
    assert losses.inner(np.array([1.0, 2.0]), np.array([3.0, 4.0])) == 11


@pytest.mark.parametrize("count", [1, 5])
def test_bounds_on_a_profile_enclose_exact_sums(count):
    width = 64
    lower, upper = losses.profile_bounds([(two_point(), count)], width)
    assert len(lower) == len(upper) == width + 1
    for at in range(12):
        exact = binomial_delta(count, 0.25 * at)
        assert lower[at] <= exact <= upper[at]
        assert upper[at] - lower[at] < 1e-9
    leaky = losses.LossPmf(0.25, -1, two_point().masses, 1e-5)
    raised = losses.profile_bounds([(leaky, count)], width)[1] - upper
    assert np.all((raised >= count * 1e-5 * (1 - 1e-9)) & (raised <= count * 1.0001e-5))


def test_bounds_on_a_profile_are_close_however_small_it_is():
    """Three hundred fair coins: the last profiles are of the order of 10^-90."""
    count = 300
    fair = losses.LossPmf(0.25, -1, np.array([0.5, 0.0, 0.5]), 0.0)
    lower, upper = losses.profile_bounds([(fair, count)], count)
    for at in (0, 20, 100, 180, 250, 290):
        more = [(2 * k - count, mpf(math.comb(count, k)) / mpf(2) ** count) for k in range(count + 1)]
        exact = mpmath.fsum(mass * -mpmath.expm1(mpf(at - up) / 4) for up, mass in more if up > at)
        assert lower[at] <= exact <= upper[at]
        assert upper[at] - lower[at] < 1e-6 * exact


@pytest.mark.parametrize("slope", [1e-9, 0.7])
def test_tilted_mass_far_from_the_mean_is_bounded_at_both_ends(slope):
    masses, count, step = np.array([0.01, 0.05, 0.2, 0.5, 0.24]), 10, 0.25
    pmfs = [losses._LogPmf.of(losses.LossPmf(step, -3, masses, 0.0), count)]
    moments = losses._tilt(pmfs, slope)
    whole = np.array([1.0])
    for _ in range(count):
        whole = np.convolve(whole, masses)
    sums = step * np.arange(-3 * count, count + 1)
    tilted = whole * np.exp(slope * sums - moments.log)
    for half in (1.2, 2.0, 3.0, 4.5, 8.0, 20.0):
        exact = float(tilted[np.abs(sums - moments.mean) >= half].sum())
        assert exact <= losses._outside(pmfs, slope, moments, half) <= 40 * exact


def test_mass_above_a_loss_is_bounded_up_to_the_largest_one():
    pmfs = [losses._LogPmf.of(two_point(), 3)]
    up = float(two_point().masses[2])
    for slope in (0.5, 4.0):
        assert losses._above(pmfs, slope, 0.74) >= 3 * math.log(up)
        assert losses._above(pmfs, slope, 0.75) >= 3 * math.log(up)
        assert losses._above(pmfs, slope, 0.76) == -math.inf


# ---- records


def silos(rate: Fraction, count: int, max_silos: int = 1) -> RunReleases:
    noise = DiscreteGaussianSum(Fraction(50), 4, Fraction(70), 2)
    everyone = CohortSampling(Sampling.NONE, 5, 5)
    return RunReleases(everyone, ((noise, count),), count, batches=BatchSampling(rate, max_silos))


@pytest.mark.parametrize(
    ("adjacency", "max_silos", "shift"),
    [(Adjacency.ADD_REMOVE, 1, 1), (Adjacency.REPLACE_ONE, 1, 2), (Adjacency.ZERO_OUT, 3, 3)],
)
def test_records_that_are_always_drawn_cost_a_gaussian(adjacency, max_silos, shift):
    run = silos(Fraction(1), 6, max_silos)
    found, name = amplification.record_runs_epsilon([run, run], adjacency, 1e-5, losses.COARSE)
    assert (found, name) == (near(profiles.gaussian_epsilon(1e-5, shift * 0.7 * math.sqrt(12)), 1e-3), "gaussian")


@pytest.mark.parametrize("max_silos", [2])
def test_records_behind_coins_cost_what_dp_accounting_says(max_silos):
    rate, count = 0.25, 8
    found, name = amplification.record_runs_epsilon(
        [silos(Fraction(1, 4), count, max_silos)], Adjacency.ADD_REMOVE, 1e-5, losses.COARSE
    )
    shifts = [0.7 * heads for heads in range(max_silos + 1)]
    chances = [
        math.comb(max_silos, heads) * rate**heads * (1 - rate) ** (max_silos - heads)
        for heads in range(max_silos + 1)
    ]
    other = peer.from_mixture_gaussian_mechanism(1.0, shifts, chances, value_discretization_interval=3e-2)
    assert (found, name) == (near(other.self_compose(count).get_epsilon_for_delta(1e-5), 5e-3), "pld")


def test_a_replaced_record_costs_between_one_and_two_removals():
    run = silos(Fraction(1, 4), 8)
    replaced, added = (
        amplification.record_runs_epsilon([run], adjacency, 1e-5, losses.COARSE)[0]
        for adjacency in (Adjacency.REPLACE_ONE, Adjacency.ADD_REMOVE)
    )
    assert added < replaced < 2 * added
    pairs = amplification.record_pairs([run, run], Adjacency.REPLACE_ONE, 16)
    ((pair, count),) = pairs.items()
    assert (pair.kind, count, pair.rate, pair.coins) == (PairKind.POISSON_REPLACE_ONE, 16, 0.25, 1)
    assert pair.ratio == near(0.7, 1e-3)


def test_records_without_a_gaussian_or_without_coins_are_not_priced():
    narrow = DiscreteGaussianSum(Fraction(1, 4), 1, Fraction(1), 1)
    run = RunReleases(
        CohortSampling(Sampling.NONE, 5, 5), ((narrow, 1),), 1, batches=BatchSampling(Fraction(1, 2))
    )
    assert amplification.record_runs_epsilon([silos(Fraction(1, 4), 1), run], Adjacency.ADD_REMOVE, 1e-5, 64) == (
        math.inf,
        "none",
    )
    bare = RunReleases(CohortSampling(Sampling.NONE, 5, 5), ((narrow, 1),), 1)
    with pytest.raises(ConfigError, match="must say how they were drawn"):
        amplification.record_pairs([bare], Adjacency.ADD_REMOVE, 1)


# ---- runs against an observer of the models


FIXED = CohortSampling(Sampling.FIXED, 1000, 50)
GAUSS = ContinuousGaussian(2.0, 1.0)


def released(*runs: RunReleases, delta: float = 1e-5, adjacency: Adjacency = Adjacency.ZERO_OUT):
    return amplification.sampled_runs_epsilon(runs, adjacency, delta, losses.COARSE)


def test_runs_that_are_not_drawn_cost_their_cap_and_partitions_one_block():
    for sampling, cap, blocks, counted in (
        (CohortSampling(Sampling.NONE, 9, 3), 4, 1, 4),
        (CohortSampling(Sampling.FIXED, 3, 3), 2, 1, 2),
        (CohortSampling(Sampling.ONCE, 90, 3), 1, 1, 1),
        (CohortSampling(Sampling.ONCE, 90, 3), 5, 2, 2),
    ):
        run = RunReleases(sampling, ((GAUSS, 9),), cap, blocks)
        for adjacency in (Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE):
            exact = profiles.gaussian_epsilon(1e-5, adjacency.radii * 0.5 * math.sqrt(counted))
            assert released(run, adjacency=adjacency) == (near(exact), "gaussian")


def test_drawn_runs_cost_the_profile_of_their_adjacency():
    run = RunReleases(FIXED, ((GAUSS, 1),), 1)
    for adjacency, pair in (
        (Adjacency.ZERO_OUT, SampledGaussian(PairKind.FIXED_SIZE_ZERO_OUT, 0.5, 0.05)),
        (Adjacency.REPLACE_ONE, SampledGaussian(PairKind.FIXED_SIZE, 1.0, 0.05)),
    ):
        found, name = released(run, adjacency=adjacency)
        assert name == "pld"
        assert pair.forward(np.array([found]))[0] == pytest.approx(1e-5, rel=0.02)


def test_a_cap_uses_up_delta_and_beyond_it_nothing_is_amplified():
    run, capped = (RunReleases(FIXED, ((GAUSS, 20),), cap) for cap in (20, 7))
    kappa = amplification.cap_excess(FIXED, 20, 7)
    assert 1e-7 < kappa < 1e-4
    assert released(capped, delta=1e-3 + kappa) == (near(released(run, delta=1e-3)[0], 1e-6), "pld")
    assert released(capped, delta=kappa) == released(capped, delta=kappa / 2) == (math.inf, "none")


SKELLAM = SkellamSum(Fraction(400), 1, Fraction(10), Fraction(40), 16)


def test_noise_without_a_gaussian_takes_the_lesser_of_two_bounds():
    run = RunReleases(FIXED, ((SKELLAM, 5),), 5)
    found, name = released(run)
    pair = SampledRdp(SKELLAM, 2, 0.05)
    ((cost, count),) = losses.loss_distributions([(pair, 5)], 1e-5, losses.COARSE)
    assert (found, name) == (near(cost.times(count).epsilon(1e-5), 1e-6), "pld")
    mixed = released(run, RunReleases(FIXED, ((DiscreteGaussianSum(Fraction(4), 25, Fraction(10), 16), 5),), 5))
    assert mixed[1] == "pld"
    assert found < mixed[0] < 2 * found + 1
    worse, name = released(run, RunReleases(CohortSampling(Sampling.NONE, 1000, 50), ((SKELLAM, 1),), 1))
    assert name == "rdp"
    assert worse > found


def test_undrawn_skellam_noise_has_no_profile_and_costs_its_curve():
    known = RunReleases(CohortSampling(Sampling.NONE, 9, 9), ((SKELLAM, 1),), 1)
    found, name = released(known)
    assert name == "rdp"
    curve = [a * 100 / 800 + min(((2 * a - 1) * 100 + 240) / (4 * 400**2), 60 / 400) for a in range(2, 500)]
    exact = min(
        c + math.log1p(-1 / a) - math.log(a * 1e-5) / (a - 1) for a, c in zip(range(2, 500), curve, strict=True)
    )
    assert found == near(exact, 1e-6)


def test_binomial_noise_is_amplified_by_its_own_rule():
    noise = BinomialSum(10**6, 4, Fraction(10), Fraction(40), Fraction(5), 16)
    drawn, known = (RunReleases(s, ((noise, 2),), 2) for s in (FIXED, CohortSampling(Sampling.NONE, 9, 9)))
    assert [released(each)[1] for each in (drawn, known)] == ["binomial", "binomial"]
    assert released(drawn)[0] < 0.2 * released(known)[0]
