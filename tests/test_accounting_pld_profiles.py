"""Profiles in double precision, against sixty digits: never below the truth by more than their guard."""

import math

import mpmath
import numpy as np
import pytest
from scipy.special import log_ndtr

from d2pfed.accounting import profiles
from d2pfed.accounting.profiles import (
    PairKind,
    SampledGaussian,
    fixed_size_delta,
    gaussian_delta,
    gaussian_epsilon,
    poisson_add_delta,
    poisson_replace_delta,
    relative_guard,
)

LEAST = mpmath.mpf(10) ** -300


def upper(at):
    return mpmath.erfc(at / mpmath.sqrt(2)) / 2


def true_gaussian(epsilon, ratio):
    return upper(epsilon / ratio - ratio / 2) - mpmath.exp(epsilon) * upper(epsilon / ratio + ratio / 2)


def true_known_size(epsilon, ratio, rate):
    return rate * true_gaussian(mpmath.log1p(mpmath.expm1(epsilon) / rate), ratio)


def true_added(epsilon, ratio, rate):
    left = rate + mpmath.expm1(-epsilon)
    return (
        mpmath.exp(epsilon) * left * true_gaussian(mpmath.log(rate / left), ratio) if left > 0 else mpmath.mpf(0)
    )


def true_replaced(epsilon, ratio, rate):
    """From the quadratic equation for exp(ratio z), not from the hyperbolic sine that the code uses."""
    half = (1 - rate) * mpmath.expm1(epsilon) / (2 * rate)
    z = mpmath.log(half + mpmath.sqrt(half * half + mpmath.exp(epsilon - ratio * ratio))) / ratio + ratio / 2
    tails = mpmath.expm1(epsilon) * (1 - rate) * upper(z) + mpmath.exp(epsilon) * rate * upper(z + ratio)
    return rate * upper(z - ratio) - tails


def spread(number, axes):
    """Points that fill a cube evenly: multiples of roots of primes, modulo 1."""
    steps = np.sqrt([2, 3, 5, 7, 11][:axes])
    return (np.arange(1, number + 1)[:, None] * steps % 1).tolist()


def draws(number):
    """Ratios, rates and how many standard deviations out in the tail."""
    for i, (a, b, c) in enumerate(spread(number, 3)):
        rate = (10 ** (-6 * b), 1 - 10 ** (-1 - 5 * b), 1.0)[i % 3]
        yield 10 ** (-7 + 8.5 * a), rate, 36 * c if i % 2 else 10 ** (-3 * c)


def epsilons(ratio, rate, out):
    """Where each profile is as small as the Gaussian's so far out."""
    base = mpmath.mpf(ratio * (out + ratio / 2))
    rate, ratio = mpmath.mpf(rate), mpmath.mpf(ratio)
    one, other = (1 - rate + rate * mpmath.exp(s * ratio * (out + ratio) - ratio**2 / 2) for s in (1, -1))
    removed, added = mpmath.log1p(rate * mpmath.expm1(base)), -mpmath.log1p(rate * mpmath.expm1(-base))
    return float(removed), float(added), float(mpmath.log(one / other))


def shortfalls(number):
    """Yield, for each profile at each draw, by which share of its guard it is below the truth."""
    with mpmath.workdps(60):
        for ratio, rate, out in draws(number):
            exact_ratio, exact_rate = mpmath.mpf(ratio), mpmath.mpf(rate)
            for epsilon, found, true in zip(
                epsilons(ratio, rate, out),
                (
                    profiles.fixed_size_delta,
                    profiles.poisson_add_delta,
                    profiles.poisson_replace_delta,
                ),
                (true_known_size, true_added, true_replaced),
                strict=True,
            ):
                exact = true(mpmath.mpf(epsilon), exact_ratio, exact_rate)
                if exact > LEAST:
                    value = float(found(np.array(epsilon), ratio, rate))
                    yield float((exact - value) / exact) / relative_guard(ratio)


def broken(number):
    """Return at how many points epsilon does not hold at its delta."""
    count = 0
    with mpmath.workdps(60):
        for a, b in spread(number, 2):
            ratio, delta = 10 ** (-7 + 11 * a), 10 ** (-1 - 299 * b)
            count += true_gaussian(mpmath.mpf(gaussian_epsilon(delta, ratio)), mpmath.mpf(ratio)) > delta
    return count


def difference_of_tails(epsilon, ratio):
    """The textbook formula, whose terms cancel where the ratio is small."""
    return np.exp(log_ndtr(ratio / 2 - epsilon / ratio)) - np.exp(epsilon + log_ndtr(-ratio / 2 - epsilon / ratio))


def test_profiles_are_within_a_third_of_their_guard_at_every_ratio():
    assert max(shortfalls(150)) < 1 / 3


def test_epsilon_of_a_gaussian_holds_at_its_delta_at_every_ratio():
    assert broken(200) == 0


def test_the_checks_reject_a_difference_of_tails(monkeypatch):
    monkeypatch.setattr(profiles, "gaussian_delta", difference_of_tails)
    assert broken(200) > 10
    assert max(shortfalls(50)) > 1


def test_profiles_are_tight_where_they_do_not_fall_to_zero():
    for ratio in (1e-6, 1e-3, 0.999, 1.001, 20.0):
        at = np.array([0.1 * ratio, ratio])
        with mpmath.workdps(60):
            for found, true in ((fixed_size_delta, true_known_size), (poisson_replace_delta, true_replaced)):
                exact = [float(true(mpmath.mpf(e), mpmath.mpf(ratio), mpmath.mpf(0.3))) for e in at]
                assert found(at, ratio, 0.3) == pytest.approx(exact, rel=1e-11)
            exact = float(true_added(mpmath.mpf(0.1 * ratio), mpmath.mpf(ratio), mpmath.mpf(0.9)))
            if ratio <= 1:
                assert float(poisson_add_delta(at[:1], ratio, 0.9)[0]) == pytest.approx(exact, rel=1e-11)
    assert poisson_add_delta(np.array([50.0]), 10.0, 1.0) == pytest.approx(gaussian_delta([50.0], 10.0), rel=1e-10)


def test_a_dominating_pair_rounds_its_profiles_up():
    at = np.array([1e-6, 1e-5])
    for law in PairKind:
        part = SampledGaussian(law, 1e-5, 0.3)
        plain = poisson_replace_delta if law is PairKind.POISSON_REPLACE_ONE else fixed_size_delta
        assert np.all(part.forward(at) > plain(at, 1e-5, 0.3) * (1 + 0.9e-10))
    assert np.all(
        SampledGaussian(PairKind.POISSON_ZERO_OUT, 1e-5, 0.3).backward(at) > poisson_add_delta(at, 1e-5, 0.3)
    )


def test_a_delta_below_the_range_of_doubles_has_a_chernoff_bound():
    for delta in (5e-324, 1e-310, 1e-301):
        assert gaussian_epsilon(delta, 2.0) == 2 + 2 * math.sqrt(-2 * math.log(delta))
    assert gaussian_epsilon(1e-299, 2.0) <= gaussian_epsilon(1e-301, 2.0)
