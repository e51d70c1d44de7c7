"""A client's own account: one number for all its runs, of whatever noise, whoever chose them."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from d2pfed.accounting import client_epsilon
from d2pfed.accounting.events import (
    Adjacency,
    BatchSampling,
    BinomialSum,
    CohortSampling,
    ContinuousGaussian,
    DiscreteGaussianSum,
    Release,
    Sampling,
    SkellamSum,
    Unit,
)
from d2pfed.accounting.observers import SERVER, account
from d2pfed.accounting.pld import gaussian_epsilon
from d2pfed.errors import ConfigError
from support.adjacencies import OF_CLIENTS

GAUSSIAN = DiscreteGaussianSum(Fraction(2), 100, Fraction(8), 51_370)
SKELLAM = SkellamSum(Fraction(4), 100, Fraction(8), Fraction(64), 51_370)
BINOMIAL = BinomialSum(400_000, 100, Fraction(300), Fraction(60_000), Fraction(30), 51_370)


def row(noise, number=0, adjacency=Adjacency.REPLACE_ONE, run="run"):
    return Release(
        run=run,
        round=number,
        attempt=0,
        unit=Unit.CLIENT,
        adjacency=adjacency,
        sampling=CohortSampling(Sampling.FIXED, 100_000, 100),
        noise=noise,
        participants=(),
    )


def test_one_cpsgd_release_beside_gaussian_ones_is_finite_and_never_below_either_group():
    gaussian, binomial, skellam = [row(GAUSSIAN)] * 5, [row(BINOMIAL)], [row(SKELLAM)] * 2
    for groups in ((gaussian, binomial), (gaussian, skellam), (skellam, binomial), (gaussian, skellam, binomial)):
        alone = [client_epsilon(group, 1e-5) for group in groups]
        together = client_epsilon([release for group in groups for release in group], 1e-5)
        assert sum(alone) <= together < 3 * sum(alone)


@pytest.mark.parametrize("noise", [GAUSSIAN, SKELLAM, BINOMIAL])
def test_one_kind_alone_costs_little_more_than_its_own_account(noise):
    for count in (1, 7, 100):
        exact = account([row(noise)] * count, SERVER, delta=1e-5, max_participations=count).epsilon
        assert exact <= client_epsilon([row(noise)] * count, 1e-5) <= (1.02 if noise is GAUSSIAN else 1.4) * exact


def test_every_release_counts_at_two_radii_whatever_the_plan_says():
    twice = gaussian_epsilon(1e-5, math.sqrt(2) * 16 / 20)
    for adjacency in OF_CLIENTS:
        assert twice < client_epsilon([row(GAUSSIAN, 0, adjacency), row(GAUSSIAN, 1, run="other")], 1e-5)
    assert client_epsilon([row(GAUSSIAN, adjacency=Adjacency.ZERO_OUT)], 1e-5) == client_epsilon(
        [row(GAUSSIAN)], 1e-5
    )


@pytest.mark.parametrize("noise", [GAUSSIAN, SKELLAM, BINOMIAL])
def test_an_account_grows_with_each_release_and_with_a_smaller_delta(noise):
    mixed = [row(GAUSSIAN), row(SKELLAM)]
    counts = [client_epsilon([*mixed, *[row(noise)] * count], 1e-5) for count in (1, 2, 10, 100)]
    assert all(a < b for a, b in pairwise(counts))
    deltas = [client_epsilon([*mixed, row(noise)], delta) for delta in (1e-3, 1e-5, 1e-7)]
    assert all(a < b for a, b in pairwise(deltas))


def test_noise_too_narrow_for_a_surrogate_goes_by_its_renyi_curve():
    narrow = replace(GAUSSIAN, sigma=Fraction(1), dimension=4)
    assert client_epsilon([row(narrow)], 1e-5) < math.inf


def test_nothing_costs_nothing_and_what_cannot_be_covered_costs_infinity():
    assert client_epsilon([], 1e-5) == 0
    assert client_epsilon([row(ContinuousGaussian(20.0, 8.0))], 1e-5) == math.inf
    assert client_epsilon([row(BINOMIAL)] * 2000, 1e-5) == math.inf
    long = replace(GAUSSIAN, dimension=300_000_000)
    assert client_epsilon([row(long)] * 1000, 1e-5) < client_epsilon([row(long)] * 8000, 1e-5) == math.inf
    with pytest.raises(ConfigError, match="delta"):
        client_epsilon([], 0.0)


def record(noise=None, rate=Fraction(1, 32), run="run", silos=1):
    return Release(
        run=run,
        round=0,
        attempt=0,
        unit=Unit.RECORD,
        adjacency=Adjacency.ADD_REMOVE,
        sampling=CohortSampling(Sampling.NONE, 20, 20),
        noise=noise or DiscreteGaussianSum(Fraction(8), 14, Fraction(30), 64),
        participants=(),
        batches=BatchSampling(rate, silos),
    )


@pytest.mark.parametrize("silos", [1, 2])
def test_records_of_one_kind_are_counted_behind_their_silos_coins(silos):
    """Without the coins a plan of epsilon 3 in hundreds of rounds would seem to spend hundreds."""
    for count in (1, 300):
        own = [record(silos=silos)] * (count - 1) + [record(silos=silos, run="other")]
        exact = account(own, SERVER, delta=1e-5, max_participations=count).epsilon
        assert exact <= client_epsilon(own, 1e-5) <= 1.1 * exact
        known = client_epsilon([replace(row(each.noise), run=each.run) for each in own], 1e-5)
        assert client_epsilon(own, 1e-5) < known / 2


def test_records_of_two_kinds_are_not_amplified():
    """What comes second may have been chosen from what came first: no composition of both is a filter."""
    other = record(rate=Fraction(1, 16))
    mixed = [[record()] * 9 + [other], [other] + [record()] * 9, [record()] * 9 + [row(record().noise)]]
    plain = client_epsilon([row(record().noise)] * 10, 1e-5)
    for own in mixed:
        assert plain < client_epsilon(own, 1e-5) < 1.5 * plain
