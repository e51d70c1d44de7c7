"""Discrete losses dominate the profiles they stand for, also far out in the tail."""

import math
from itertools import product

import mpmath
import numpy as np
import pytest

from d2pfed.accounting.losses import decayed_sums, dominate
from d2pfed.accounting.profiles import (
    PairKind,
    SampledGaussian,
    fixed_size_delta,
    gaussian_delta,
    poisson_add_delta,
    poisson_replace_delta,
    tail_epsilon,
)


def profile(losses, epsilons):
    """Delta of discrete losses, by a plain sum."""
    shares = np.maximum(-np.expm1(epsilons[:, None] - losses.values[None, :]), 0.0)
    return losses.infinite + shares @ losses.masses


@pytest.mark.parametrize("law", PairKind)
@pytest.mark.parametrize(("ratio", "rate"), [(0.05, 0.3), (1.0, 0.01), (2.0, 0.3), (0.2, 1e-4), (3.0, 0.9)])
def test_losses_are_nowhere_below_their_profile_however_small_it_is(law, ratio, rate):
    part = SampledGaussian(law, ratio, rate)
    backward = part.forward if part.backward is None else part.backward
    orders = dominate(part.forward, part.backward, tail_epsilon(part.forward, 1e-60) / 500, 1e-60)
    for losses, ahead, behind in ((orders[0], part.forward, backward), (orders[1], backward, part.forward)):
        epsilons = np.linspace(0, float(losses.values[-1]), 333)
        assert np.all(profile(losses, epsilons) >= ahead(epsilons))
        mirrored = -np.expm1(-epsilons) + np.exp(-epsilons) * behind(epsilons)
        assert np.all(profile(losses, -epsilons) >= mirrored * (1 - 1e-12))
        assert abs(losses.masses.sum() + losses.infinite - 1) < 1e-9


def test_losses_are_close_to_their_profile():
    part = SampledGaussian(PairKind.FIXED_SIZE, 1.0, 0.01)
    losses, _ = dominate(part.forward, part.backward, 1e-3, 1e-60)
    for epsilon in (0.01, 0.3, 2.0, 8.0):
        exact = float(part.forward(np.array([epsilon]))[0])
        assert profile(losses, np.array([epsilon]))[0] == pytest.approx(exact, rel=1e-3)


def exact_profile(law, ratio, rate, epsilon):
    """Delta of one release in forty digits: the two orders of the zero-out pair, or the replace-one pair."""
    ratio, rate = mpmath.mpf(ratio), mpmath.mpf(rate)
    centres = {"removed": (ratio, 0), "added": (0, ratio), "replaced": (ratio, -ratio)}[law]

    def gap(z):
        first, second = ((1 - rate) * mpmath.npdf(z) + rate * mpmath.npdf(z, centre) for centre in centres)
        return first - mpmath.exp(epsilon) * second

    sign = -1 if law == "added" else 1  # the loss grows with sign * z
    low, high = mpmath.mpf(-40), mpmath.mpf(40)
    for _ in range(140):
        middle = (low + high) / 2
        low, high = (low, middle) if gap(sign * middle) > 0 else (middle, high)
    return float(mpmath.quad(lambda z: gap(sign * z), [high, high + 1, high + 4, high + 20]))


@pytest.mark.parametrize(("ratio", "rate"), [(1.0, 0.01), (0.3, 0.2)])
def test_profiles_under_poisson_sampling_equal_forty_digit_integrals(ratio, rate):
    with mpmath.workdps(40):
        for epsilon in (1e-3, 0.005, 0.1, 1.0, 3.0):
            at = np.array([epsilon])
            removed = exact_profile("removed", ratio, rate, epsilon)
            assert fixed_size_delta(at, ratio, rate)[0] == pytest.approx(removed, rel=1e-9)
            replaced = exact_profile("replaced", ratio, rate, epsilon)
            assert poisson_replace_delta(at, ratio, rate)[0] == pytest.approx(replaced, rel=1e-9)
        for epsilon in (1e-3, 0.005):
            added = exact_profile("added", ratio, rate, epsilon)
            assert poisson_add_delta(np.array([epsilon]), ratio, rate)[0] == pytest.approx(added, rel=1e-9)
    assert poisson_add_delta(np.array([-np.log1p(-rate) * 1.001]), ratio, rate)[0] == 0


def test_a_small_profiles_tail_begins_at_epsilon_zero():
    part = SampledGaussian(PairKind.FIXED_SIZE, 1.0, 1e-9)
    assert tail_epsilon(part.forward, 1e-8) == 0
    for tail, rate in product((1e-3, 1e-9, 1e-200), (0.5, 0.01)):
        end = tail_epsilon(SampledGaussian(PairKind.FIXED_SIZE, 1.0, rate).forward, tail)
        at, before = fixed_size_delta(np.array([end, 0.98 * end]), 1.0, rate)
        assert at <= tail < before


def test_a_rate_of_one_is_the_plain_gaussian_pair():
    epsilons = np.linspace(0, 5, 50)
    plain = gaussian_delta(epsilons, 0.7)
    assert fixed_size_delta(epsilons, 0.7, 1.0) == pytest.approx(plain, rel=1e-12)
    assert poisson_replace_delta(epsilons, 0.35, 1.0) == pytest.approx(plain, rel=1e-10)


@pytest.mark.parametrize("step", [1e-3, 0.2, 0.3, 3.0, 40.0])
def test_decayed_sums_equal_their_definition(step):
    masses = np.abs(np.sin(np.arange(1.0, 600.0))) * np.exp(-0.01 * np.arange(1.0, 600.0))
    truth = [
        math.fsum(mass * math.exp(-step * lag) for lag, mass in enumerate(masses[k:].tolist()))
        for k in range(len(masses))
    ]
    np.testing.assert_allclose(decayed_sums(masses, step), truth, rtol=1e-13)


def test_the_check_rejects_losses_rounded_to_the_nearest_grid_point():
    part, step = SampledGaussian(PairKind.FIXED_SIZE, 1.0, 0.3), 0.2
    losses, _ = dominate(part.forward, part.backward, step / 40, 1e-12)
    nearest = np.rint(losses.values / step).astype(int)
    rounded = np.bincount(nearest - nearest[0], weights=losses.masses)
    epsilons = np.linspace(0, 2, 60)
    shares = np.maximum(-np.expm1(epsilons[:, None] - step * (nearest[0] + np.arange(len(rounded)))), 0.0)
    assert np.any(shares @ rounded < part.forward(epsilons) * (1 - 1e-3))
