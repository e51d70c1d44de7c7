"""Profiles made of Renyi curves: never below exact ones, and worth having behind a cohort."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from d2pfed.accounting.events import Adjacency, CohortSampling, Release, Sampling, Unit
from d2pfed.accounting.laws import ContinuousGaussian, DiscreteGaussianSum, SkellamSum
from d2pfed.accounting.losses import dominate
from d2pfed.accounting.observers import RELEASED, account
from d2pfed.accounting.profiles import WIDEST, SampledRdp, rdp_delta, rdp_width
from support import oracle

SKELLAM = SkellamSum(Fraction(40), 1000, Fraction(100), Fraction(22_700), 51_370)


def released(noise, rounds=100, delta=3.16e-6):
    release = Release(
        run="",
        round=0,
        attempt=0,
        unit=Unit.CLIENT,
        adjacency=Adjacency.REPLACE_ONE,
        sampling=CohortSampling(Sampling.FIXED, 100_000, 1000),
        noise=noise,
        participants=(),
    )
    return account([release] * rounds, RELEASED, delta=delta, max_participations=rounds)


def check_against_exact_laws(profile_of):
    """Skellam in one and two dimensions, every shift within the radius, both orders, behind a coin that all know."""
    for variance, radius in ((4, 1), (16, 2), (64, 3)):
        noise = SkellamSum(Fraction(variance), 1, Fraction(radius), Fraction(radius) * 2, 2)
        epsilons = np.linspace(0, 4, 41)
        claimed = profile_of(noise)(epsilons)
        one = oracle.skellam(variance, int(25 * math.sqrt(variance) + 30))
        far = 2 * radius
        for first, second in product(range(far + 1), repeat=2):
            if 0 < first * first + second * second <= far * far:
                p = np.multiply.outer(one[: len(one) - first], one[: len(one) - second])
                q = np.multiply.outer(one[first:], one[second:])
                for epsilon, delta in zip(epsilons, claimed, strict=True):
                    assert np.maximum(p - math.exp(epsilon) * q, 0).sum() <= delta + 1e-12


def test_profiles_are_never_below_the_exact_ones():
    check_against_exact_laws(lambda noise: SampledRdp(noise, 2, 1.0).forward)


def test_the_check_rejects_the_profile_of_one_radius():
    with pytest.raises(AssertionError):
        check_against_exact_laws(lambda noise: SampledRdp(noise, 1, 1.0).forward)


def test_the_envelope_is_convex_symmetric_and_at_most_the_conversion():
    epsilon = np.linspace(0, 6, 400)
    values = SampledRdp(SKELLAM, 2, 1.0).forward(epsilon)
    assert np.all(values <= rdp_delta(epsilon, SKELLAM, 2) * (1 + 1e-3))
    assert np.all(np.diff(np.diff(values) / np.diff(np.exp(epsilon))) >= -1e-12)
    assert values[0] < 0.9 * rdp_delta(epsilon, SKELLAM, 2)[0]
    losses, _ = dominate(SampledRdp(SKELLAM, 2, 0.01).forward, None, 1e-3, 1e-12)
    assert losses.masses.sum() + losses.infinite == pytest.approx(1, abs=1e-9)


def test_sampled_skellam_noise_costs_between_gaussian_and_its_renyi_curve():
    found = released(SKELLAM)
    gaussian = released(ContinuousGaussian(200.0, 100.0))
    assert found.accountant == "pld"
    assert found.epsilon == pytest.approx(1.22, rel=0.01)  # by the curves of theorem 9 it is 1.647
    assert gaussian.epsilon < found.epsilon < 1.647 * 0.76


def test_noise_of_two_kinds_behind_cohorts_composes_by_profiles():
    narrow = DiscreteGaussianSum(Fraction(1, 2), 1, Fraction(1, 10), 1)
    assert released(narrow, rounds=3).epsilon < math.inf


def test_noise_that_hides_nothing_has_no_profile():
    assert rdp_width(SKELLAM, 2) < WIDEST
    dust = replace(SKELLAM, variance=Fraction(1, 10**6))
    assert rdp_width(dust, 2) == WIDEST
    assert released(dust, rounds=2).epsilon > 100
