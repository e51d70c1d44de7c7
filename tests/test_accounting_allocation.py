"""One block of an unknown number: the bound against closed forms, quadrature and adaptive games."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from scipy.stats import norm

from d2pfed.accounting import amplification
from d2pfed.accounting.allocation import HiddenBlocks
from d2pfed.accounting.events import Adjacency, CohortSampling, Release, Sampling, Unit
from d2pfed.accounting.laws import DiscreteGaussianSum, SkellamSum
from d2pfed.accounting.observers import RELEASED, SERVER, account
from d2pfed.accounting.profiles import poisson_replace_delta
from support.adjacencies import OF_CLIENTS

POINTS = 1 << 14


def test_one_block_is_a_secret_coin():
    """A vector against its opposite behind a coin, of which the profile is known in forty digits."""
    for ratio, rate in ((0.1, 0.3), (0.3, 0.01), (0.5, 0.1)):
        for epsilon in (0.01, 0.2, 1.0):
            exact = float(poisson_replace_delta(np.array([epsilon]), ratio, rate)[0])
            found = HiddenBlocks(ratio, rate, 1).delta(epsilon, POINTS)
            assert exact <= found <= exact * 1.02 + 1e-6


def quadrature(ratio, weight, epsilon, shifts=(1, -1)):
    """The profile of two blocks by a sum over a fine grid of two outputs."""
    z = np.linspace(-9, 9, 1801)
    q = np.multiply.outer(norm.pdf(z), norm.pdf(z)) * (z[1] - z[0]) ** 2
    worlds = []
    for sign in shifts:
        moved = np.exp(sign * ratio * z - (sign * ratio) ** 2 / 2)
        worlds.append((1 - 2 * weight + weight * (moved[:, None] + moved[None, :])) * q)
    return float(np.maximum(worlds[0] - math.exp(epsilon) * worlds[1], 0).sum())


@pytest.mark.parametrize(("ratio", "weight"), [(0.3, 0.1), (0.5, 0.2), (1.0, 0.4)])
def test_two_blocks_are_their_integral(ratio, weight):
    for epsilon in (0.05, 0.3, 1.0):
        exact = quadrature(ratio, weight, epsilon)
        assert exact * (1 - 1e-4) <= HiddenBlocks(ratio, weight, 2).delta(epsilon, POINTS) <= exact * 1.02 + 1e-6


def best_game(epsilon, width, slots):
    """Delta of someone who chooses what three clients hold in the second block by the output of the first; exact.

    One client in each of two blocks, and `slots` - 2 in none. The one that is looked for has a place of its own, and
    who stood there is in no block, or in the second one if all places are in a block.
    """
    y = np.linspace(-1 - 7 * width, 1 + 7 * width, 241)
    law = {value: norm.pdf(y, value, width) * (y[1] - y[0]) for value in (-1, 0, 1)}
    ratio, best = math.exp(epsilon), 0.0
    for x, other, u in product((-1, 0, 1), repeat=3):
        value = np.zeros(len(y))
        for x2, other2, u2, free in product((-1, 0, 1), repeat=4):
            if slots > 2 and free:
                continue
            p, q = (
                np.multiply.outer(law[mine], law[u2 if slots > 2 else free]) / slots
                + np.multiply.outer(law[u], (slots - 2) * law[u2] + law[mine2]) / slots
                for mine, mine2 in ((x, x2), (other, other2))
            )
            np.maximum(value, np.maximum(p - ratio * q, 0).sum(axis=1), out=value)
        best = max(best, float(value.sum()))
    return best


@pytest.mark.parametrize("width", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("slots", [3, 5])
def test_no_adaptive_game_beats_the_bound(slots, width):
    for epsilon in (0.02, 0.1, 0.3):
        truth = best_game(epsilon, width, slots)
        assert truth <= HiddenBlocks(2 / width, 1 / slots, 2).delta(epsilon, POINTS)


def test_the_games_reject_a_shift_of_one_radius():
    """Another client steps aside, so a block moves by two of them."""
    assert best_game(0.1, 2.0, 3) > 1.1 * HiddenBlocks(1 / 2.0, 1 / 3, 2).delta(0.1, POINTS)


def test_a_finer_grid_is_never_below_what_is_true_and_nearer():
    found = [HiddenBlocks(0.5, 0.02, 40).epsilon(1e-5, 5.0, points) for points in (1 << 11, 1 << 13, 1 << 15)]
    assert found[0] > found[1] > found[2] > 0.98 * found[1]
    assert HiddenBlocks(0.5, 0.02, 40).delta(0.1, 300) == 1.0  # too few points say nothing
    assert HiddenBlocks(80.0, 0.02, 40).epsilon(1e-5, 900.0, POINTS) == 900.0


# ---- whole accounts

NOISE = DiscreteGaussianSum(Fraction(2), 1000, Fraction(7), 4096)
ONCE = CohortSampling(Sampling.ONCE, 100_000, 1000)


def row(noise=NOISE, sampling=ONCE, adjacency=Adjacency.REPLACE_ONE, run="run", participants=()):
    return Release(
        run=run,
        round=0,
        attempt=0,
        unit=Unit.CLIENT,
        adjacency=adjacency,
        sampling=sampling,
        noise=noise,
        participants=participants,
    )


def epsilon(releases, observer=RELEASED):
    return account(releases, observer, delta=3.17e-6, max_participations=1).epsilon


def test_hidden_blocks_of_a_run_amplify_towards_the_models():
    for adjacency in OF_CLIENTS:
        releases = [row(adjacency=adjacency)] * 50
        assert 0.09 < epsilon(releases) < 0.12
        assert epsilon(releases, SERVER) > 0.4
    found = account([row()] * 50, RELEASED, delta=3.17e-6, max_participations=1)
    assert (found.accountant, found.sampling) == ("allocation", "1000 of 100000, once, amplified, unknown block")
    counts = [epsilon([row()] * count) for count in (1, 10, 50, 99)]
    assert counts == sorted(counts)


def test_opposite_vectors_of_all_others_bound_it_from_below():
    """A client in one of fifty blocks, or in none, moves a sum by two radii; in the other world it holds theirs."""
    blocks, weight, ratio, count = 50, 0.01, 14 / (2 * math.sqrt(1000)), 100_000
    drawn = norm.rvs(size=(count, blocks), random_state=7)
    likelihood = 0.5 + weight * np.exp(ratio * drawn - ratio * ratio / 2).sum(axis=1)
    claimed = epsilon([row()] * blocks)

    def delta(wanted):
        above = np.maximum(likelihood - math.exp(wanted), 0)
        return above.mean(), 6 * above.std() / math.sqrt(count)

    mean, error = delta(claimed)
    assert mean - error <= 3.17e-6
    mean, error = delta(claimed / 4)
    assert mean - error > 3.17e-6


@pytest.mark.parametrize(
    "releases",
    [
        [row()] * 100,
        [row(run="one"), row(run="two")],
        [row(participants=(3,)), replace(row(participants=(3,)), round=1)],
        [row(SkellamSum(Fraction(4), 1000, Fraction(7), Fraction(49), 4096))] * 50,
    ],
    ids=["nobody is left over", "two runs", "a client came twice", "no Gaussian"],
)
def test_blocks_that_the_proof_does_not_cover_are_not_amplified(releases):
    assert epsilon(releases) == epsilon(releases, SERVER)


def test_clients_that_may_come_twice_are_not_amplified():
    assert account([row()] * 50, RELEASED, delta=3.17e-6, max_participations=3).epsilon >= epsilon([row()], SERVER)


def test_the_noisiest_block_does_not_stand_for_all():
    thin = replace(NOISE, contributors=500)
    mixed = [row()] * 49 + [replace(row(thin), round=49)]
    assert epsilon([row()] * 50) < epsilon(mixed) == pytest.approx(epsilon([row(thin)] * 50), rel=1e-3)
    assert amplification.once_epsilon([], 1.0, 1e-5)[0] == math.inf
