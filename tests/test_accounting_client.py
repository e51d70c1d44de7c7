"""A client's own account: one number for all its runs, of whatever noise, whoever chose them."""

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import norm

from d2pfed.accounting import client_epsilon
from d2pfed.accounting.composition import filtered_epsilon
from d2pfed.accounting.events import Adjacency, BatchSampling, CohortSampling, Release, Sampling, Unit
from d2pfed.accounting.laws import BinomialSum, ContinuousGaussian, DiscreteGaussianSum, SkellamSum
from d2pfed.accounting.observers import SERVER, account
from d2pfed.accounting.profiles import gaussian_epsilon
from d2pfed.errors import ConfigError
from support import oracle
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


def test_cpsgd_beside_others_is_finite_and_not_below_either():
    gaussian, binomial, skellam = [row(GAUSSIAN)] * 5, [row(BINOMIAL)], [row(SKELLAM)] * 2
    for groups in ((gaussian, binomial), (skellam, binomial), ([*gaussian, *skellam], binomial)):
        alone = [client_epsilon(group, 1e-5) for group in groups]
        together = client_epsilon([release for group in groups for release in group], 1e-5)
        assert sum(alone) <= together < 3 * sum(alone)


@pytest.mark.parametrize("counts", [(1, 1), (5, 2), (2, 30), (100, 60)])
def test_gaussians_beside_skellam_noise_cost_little_more_than_one_gaussian(counts):
    """No account of both is below one Gaussian of the same squared ratios, which Skellam noise is nearly."""
    releases = [row(GAUSSIAN)] * counts[0] + [row(SKELLAM)] * counts[1]
    exact = gaussian_epsilon(1e-5, math.sqrt(sum(counts)) * 16 / 20)
    assert exact <= client_epsilon(releases, 1e-5) <= 1.25 * exact


def test_no_menu_of_gaussians_and_skellam_noise_beats_an_account_of_both():
    """A Gaussian first; then, by its output, another or Skellam noise: exact on the integers."""
    radius, delta = 5, 1e-3
    gaussian = DiscreteGaussianSum(Fraction(12), 1, Fraction(radius), 1)
    skellam = SkellamSum(Fraction(100), 1, Fraction(radius), Fraction(radius), 1)
    laws = [oracle.discrete_gaussian(12, sign * radius, 140) for sign in (1, -1)]
    noise = oracle.skellam(100, 150)
    menu = [laws, [noise[: -radius * 2], noise[radius * 2 :]]]
    paths = [client_epsilon([row(gaussian), row(one)], delta) for one in (gaussian, skellam)]
    for flip in (1, -1):
        p, q = laws[::flip]
        ratios = math.exp(max(paths)) * q / p
        both = [pair[::way] for pair in menu for way in (1, -1)]
        ahead = [np.maximum(a - ratios[:, None] * b, 0).sum(axis=1) for a, b in both]
        assert float(p @ np.max(ahead, axis=0)) <= delta
        # At epsilon of the second release alone it would not hold.
        thin = math.exp(client_epsilon([row(skellam)], delta)) * q / p
        found = [np.maximum(a - thin[:, None] * b, 0).sum(axis=1) for a, b in menu]
        assert float(p @ np.max(found, axis=0)) > delta


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


# A silo's own account of records: the coins are its own.

OF_SILOS = DiscreteGaussianSum(Fraction(8), 16, Fraction(40), 4096)


def of_records(rate, noise=OF_SILOS, adjacency=Adjacency.REPLACE_ONE):
    return replace(
        row(noise),
        unit=Unit.RECORD,
        adjacency=adjacency,
        sampling=CohortSampling(Sampling.NONE, 20, 20),
        batches=BatchSampling(Fraction(rate)),
    )


@pytest.mark.parametrize("count", [1, 30, 500])
def test_a_silos_own_coins_amplify_in_its_own_account(count):
    releases = [of_records("1/64")] * count
    exact = account(releases, SERVER, delta=1e-5, max_participations=count).epsilon
    own = client_epsilon(releases, 1e-5)
    assert exact <= own <= 1.05 * exact
    assert own < 0.6 * filtered_epsilon(Counter({OF_SILOS: count}), 2, 1e-5)


def test_records_ignore_the_plans_adjacency():
    stated = [of_records("1/64"), of_records("1/64", adjacency=Adjacency.ADD_REMOVE)]
    several = replace(stated[1], batches=BatchSampling(Fraction("1/64"), max_silos=3))
    assert len({client_epsilon([release] * 30, 1e-5) for release in (*stated, several)}) == 1
    assert client_epsilon([of_records("1/32")] * 30, 1e-5) > client_epsilon([stated[0]] * 30, 1e-5)


@pytest.mark.parametrize(
    "other",
    [row(GAUSSIAN), row(OF_SILOS), of_records("1/32"), of_records("1/64", GAUSSIAN)],
    ids=["of a client", "of a client, same noise", "another rate", "another noise"],
)
def test_beside_anything_else_coins_amplify_nothing(other):
    records = [of_records("1/64")] * 30
    mixed = client_epsilon([*records, other], 1e-5)
    noises = Counter(release.noise for release in (*records, other))
    assert mixed == client_epsilon([other, *records], 1e-5) > filtered_epsilon(noises, 2, 1e-5)
    assert mixed > client_epsilon(records, 1e-5) + client_epsilon([other], 1e-5)


def known_coins_delta(noise, count, epsilon):
    """Delta of vectors whose sender the observer knows to be in each sum: a Gaussian, in closed form."""
    ratio = 2 * float(noise.radius) / (float(noise.sigma) * math.sqrt(noise.contributors)) * math.sqrt(count)
    return norm.cdf(ratio / 2 - epsilon / ratio) - math.exp(epsilon) * norm.cdf(-ratio / 2 - epsilon / ratio)


def test_cohorts_drawn_by_the_server_amplify_nothing():
    drawn = replace(row(OF_SILOS), sampling=CohortSampling(Sampling.FIXED, 64 * 20, 20))
    assert known_coins_delta(OF_SILOS, 30, client_epsilon([drawn] * 30, 1e-5)) <= 1e-5
    twin = [of_records(Fraction(drawn.sampling.cohort_size, drawn.sampling.population))] * 30
    assert known_coins_delta(OF_SILOS, 30, client_epsilon(twin, 1e-5)) > 0.01  # the server knows whom it drew


def test_an_account_of_records_stops_at_a_number_that_no_output_can_move():
    costs = [client_epsilon([of_records("1/64")] * count, 1e-5) for count in (1, 2, 5, 20, 100, 400)]
    assert all(earlier < later for earlier, later in pairwise(costs))
    assert (
        client_epsilon([of_records("1")] * 10, 1e-5) >= filtered_epsilon(Counter({OF_SILOS: 10}), 2, 1e-5) * 0.98
    )
