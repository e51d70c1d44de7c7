"""Games of several attempts, runs, stops and menus, exact in small: the claims hold and their planted twins fall."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from scipy.stats import norm

from d2pfed.accounting import filters
from d2pfed.accounting.amplification import cap_excess
from d2pfed.accounting.composition import composed, surrogate
from d2pfed.accounting.events import Adjacency, CohortSampling, Release, Sampling, Unit
from d2pfed.accounting.filters import ReferenceRound
from d2pfed.accounting.laws import DiscreteGaussianSum
from d2pfed.accounting.losses import COARSE, loss_distributions, profile_bounds
from d2pfed.accounting.observers import RELEASED, SERVER, account
from d2pfed.accounting.profiles import (
    PairKind,
    SampledGaussian,
    fixed_size_delta,
    gaussian_epsilon,
    poisson_add_delta,
)
from support import oracle

RADIUS = 3  # lattice steps per clip radius


def row(noise, sampling, number=0, attempt=0, run="run"):
    return Release(
        run=run,
        round=number,
        attempt=attempt,
        unit=Unit.CLIENT,
        adjacency=Adjacency.REPLACE_ONE,
        sampling=sampling,
        noise=noise,
        participants=(),
    )


def noise_of(width, cohort):
    """From a centre in radii to the law of a sum whose noise is `width` radii wide."""
    reach = int((cohort + 6 * width) * RADIUS)
    return lambda centre: oracle.discrete_gaussian(width * RADIUS, centre * RADIUS, reach)


def gaussian(width):
    return DiscreteGaussianSum(Fraction(width) * RADIUS, 1, Fraction(RADIUS), 1)


def claimed(sizes, width, attempts, delta):
    """Epsilon of so many attempts, each behind its own cohort, with nobody at a cap."""
    smooth = surrogate(gaussian(width), attempts)
    part = SampledGaussian(PairKind.FIXED_SIZE, 2 * RADIUS / smooth.sigma, sizes[1] / sizes[0], smooth.slack)
    return composed(loss_distributions([(part, attempts)], delta, COARSE)).epsilon(delta)


def data_sets(population, attempts, count):
    """A spread of what clients hold over time in two worlds, which differ in client 0; the extremes come first."""
    others = [[(1,) * (population - 1)] * attempts, [(-1,) * (population - 1)] * attempts]
    values = [(-1, 0, 1)[(7 * k * k + 3 * k) % 11 % 3] for k in range(count * attempts * (population - 1))]
    for start in range(0, len(values), attempts * (population - 1)):
        block = values[start : start + attempts * (population - 1)]
        others.append([tuple(block[t::attempts][: population - 1]) for t in range(attempts)])
    for rest in others:
        for signs in product((1, -1), repeat=attempts):
            yield (
                [(sign, *held) for sign, held in zip(signs, rest, strict=True)],
                [(-sign, *held) for sign, held in zip(signs, rest, strict=True)],
            )


def worst_delta(sizes, width, attempts, epsilon, draw, caps=None, count=3):
    """The largest delta over the data sets, in both orders."""
    population, cohort = sizes
    sequences = oracle.histories(population, cohort, attempts, draw(population, cohort))
    law, ratio, worst = noise_of(width, cohort), math.exp(epsilon), 0.0
    for first, second in data_sets(population, attempts, count):
        p, q = (oracle.transcript_law(held, sequences, law, caps) for held in (first, second))
        worst = max(worst, np.maximum(p - ratio * q, 0).sum(), np.maximum(q - ratio * p, 0).sum())
    return worst


RETRIES = [((2, 1), 1.0), ((3, 1), 1.0), ((4, 2), 1.6)]


@pytest.mark.parametrize(("sizes", "width"), RETRIES)
def test_a_retry_behind_a_fresh_cohort_is_one_more_round(sizes, width):
    """Whether to retry may be decided from the first sum: not to look at the second is processing of both."""
    for epsilon in (0.3, 1.0):
        truth = worst_delta(sizes, width, 2, epsilon, oracle.fresh)
        assert claimed(sizes, width, 2, truth) >= epsilon - 1e-9


@pytest.mark.parametrize("draw", [oracle.same, oracle.undrawn])
def test_the_games_reject_a_retry_behind_a_cohort_that_is_not_fresh(draw):
    found = []
    for sizes, width in ((3, 1), 1.0), ((4, 2), 1.0), ((2, 1), 1.0):
        for epsilon in (0.3, 1.0, 2.0):
            truth = worst_delta(sizes, width, 2, epsilon, draw)
            found.append(claimed(sizes, width, 2, truth) < epsilon - 1e-6)
    assert any(found)


def test_the_games_reject_attempts_that_fail_whenever_the_client_is_drawn():
    sizes, width, epsilon = (4, 1), 1.0, 1.0
    sequences = oracle.histories(*sizes, 1, oracle.fresh(*sizes))
    truth = max(
        oracle.seen_cohort_delta(first, second, sequences, noise_of(width, 1), math.exp(epsilon))
        for first, second in data_sets(4, 1, 1)
    )
    assert claimed(sizes, width, 1, truth) < epsilon - 1e-3


CAPPED = [((3, 1), 1.0, 3, 2), ((4, 1), 1.2, 3, 2), ((4, 2), 1.6, 3, 2), ((3, 1), 1.2, 3, 1)]


@pytest.mark.parametrize(("sizes", "width", "attempts", "cap"), CAPPED)
def test_a_clients_own_cap_costs_nothing_and_everyones_no_more_than_kappa(sizes, width, attempts, cap):
    population = sizes[0]
    kappa = cap_excess(CohortSampling(Sampling.FIXED, *sizes), attempts, cap)
    for epsilon in (0.3, 1.0):
        own = [cap, *[attempts] * (population - 1)]
        truth = worst_delta(sizes, width, attempts, epsilon, oracle.fresh, own, count=1)
        assert claimed(sizes, width, attempts, truth) >= epsilon - 1e-9
        everyone = worst_delta(sizes, width, attempts, epsilon, oracle.fresh, [cap] * population, count=1)
        assert everyone <= kappa or claimed(sizes, width, attempts, everyone - kappa) >= epsilon - 1e-9


@pytest.mark.parametrize(("sizes", "width", "attempts", "cap"), CAPPED[:3])
def test_budgets_that_end_before_the_cap_cost_the_kappa_of_a_lower_cap(sizes, width, attempts, cap):
    """One other client has a single vector left, the rest their cap."""
    population = sizes[0]
    kappa = cap_excess(CohortSampling(Sampling.FIXED, *sizes), attempts, 1)
    own = [cap, 1, *[cap] * (population - 2)]
    for epsilon in (0.3, 1.0):
        truth = worst_delta(sizes, width, attempts, epsilon, oracle.fresh, own, count=1)
        assert truth <= kappa or claimed(sizes, width, attempts, truth - kappa) >= epsilon - 1e-9


def test_a_state_that_others_keep_tells_in_which_attempts_a_client_was():
    """The sum of the second attempt, given that client 0 was in the first and that it was not; one of two is drawn."""
    sequences = oracle.histories(2, 1, 2, oracle.fresh(2, 1))

    def told(second):
        laws = [
            oracle.transcript_law(
                [(1, -1), second], [each for each in sequences if (0 in each[0][0]) is was], noise_of(1.0, 1)
            )
            for was in (True, False)
        ]
        first, other = (law.sum(axis=0) / law.sum() for law in laws)
        return np.abs(first - other).sum() / 2

    assert told((1, -1)) < 1e-12
    assert told((1, (-1, 1))) > 0.3  # what it holds changes once it has taken part


def test_runs_add_up_and_the_comparison_rejects_runs_taken_for_one():
    """Two partitions, each with one block that the server knows the client to be in."""
    noise, sampling = gaussian(1.5), CohortSampling(Sampling.ONCE, 100, 10)
    law = noise_of(1.5, 1)
    p, q = (np.multiply.outer(law(sign), law(sign)) for sign in (1, -1))
    runs = [row(noise, sampling, number, run=run) for run in ("one", "two") for number in range(3)]
    mistaken = [row(noise, sampling, number) for number in range(6)]
    for epsilon in (1.0, 3.0):
        truth = oracle.delta(p, q, epsilon)
        for observer in (SERVER, RELEASED):
            assert account(runs, observer, delta=truth, max_participations=1).epsilon >= epsilon - 1e-9
            assert account(mistaken, observer, delta=truth, max_participations=1).epsilon < epsilon - 0.1


def test_a_run_may_stop_whenever_it_likes_and_its_plans_epsilon_holds():
    ratio, rounds, delta = 0.05, 10, 1e-5
    whole = gaussian_epsilon(delta, ratio * math.sqrt(rounds))
    assert oracle.best_stop(ratio, [whole] * rounds) <= delta * 1.02  # the grid errs upwards


def test_the_stopping_game_rejects_the_epsilon_of_the_rounds_done_so_far():
    ratio, delta = 0.05, 1e-5
    so_far = [gaussian_epsilon(delta, ratio * math.sqrt(done)) for done in range(1, 11)]
    assert oracle.best_stop(ratio, so_far) > 4 * delta


def test_milestones_at_their_shares_of_delta_hold_and_at_full_delta_do_not():
    ratio, rounds, delta = 0.05, 20, 1e-5

    def milestones(each):
        half, whole = (gaussian_epsilon(each, ratio * math.sqrt(done)) for done in (rounds // 2, rounds))
        return [half] * (rounds // 2) + [whole] * (rounds - rounds // 2)

    assert oracle.best_stop(ratio, milestones(delta / 2)) <= delta
    assert oracle.best_stop(ratio, milestones(delta)) > 1.2 * delta


# First a Gaussian of ratio 3 behind a secret coin of 0.1; then, by its output, the same again or a plain Gaussian.
COIN, PLAIN = (
    SampledGaussian(PairKind.POISSON_ZERO_OUT, 3.0, 0.1),
    SampledGaussian(PairKind.FIXED_SIZE, 1.386, 1.0),
)


def profile(part, ratios):
    """The profile at any ratio alpha, by its mirror image below 1."""
    epsilon = np.log(ratios)
    above = np.abs(epsilon)
    backward = part.forward if part.backward is None else part.backward
    return np.where(epsilon >= 0, part.forward(above), 1 - ratios + ratios * backward(above))


def two_stages(menu, ratio):
    """Delta of the coin first and then whatever of the menu suits its output best, by quadrature."""
    z = np.linspace(-12, 16, 40_001)
    q = norm.pdf(z)
    p = 0.9 * q + 0.1 * norm.pdf(z, 3.0)
    later = np.max([profile(part, ratio * q / p) for part in menu], axis=0)
    return float(np.trapezoid(p * later, z))


def test_composed_losses_are_no_filter_for_adaptively_chosen_plans():
    ratio, delta = math.exp(10.097), 1e-3
    for part in (COIN, PLAIN):
        assert two_stages([part], ratio) == pytest.approx(delta, rel=2e-3)
    assert two_stages([COIN, PLAIN], ratio) == pytest.approx(1.51e-3, rel=0.01)


def test_what_is_charged_in_units_of_the_reference_holds_for_every_menu():
    reference = ReferenceRound.of(COIN, 2, 1e-3)
    slack = 1e-5
    units = reference.units({PLAIN: 1}, slack)
    ratios = np.exp(np.linspace(-3, 10, 27))
    own = filters._losses(reference, COIN)[0]
    width = 1 << 13
    most = profile_bounds([(own, 1 + units)], width)[1]
    places = np.minimum(np.maximum(np.log(ratios) / own.step, 0), width - 1).astype(int)
    for ratio, place in zip(ratios, places, strict=True):
        if ratio >= 1:
            assert two_stages([COIN, PLAIN], ratio) <= most[place] + slack
    # At one unit for the plain one, which by itself would fit as well, the choice costs more than was charged.
    assert (
        two_stages([COIN, PLAIN], math.exp(10.097))
        > 1.4 * profile_bounds([(own, 2)], 1 << 13)[1][int(10.097 / own.step)]
    )


def test_a_run_begun_amid_another_is_covered_by_what_both_were_charged():
    """Two rounds of the coin; after the first, by its output, another run begins: a plain Gaussian, or the coin."""
    reference, slack = ReferenceRound.of(COIN, 2, 1e-3), 1e-5
    units = reference.units({PLAIN: 1}, slack)
    logs = np.linspace(-40, 40, 8001)
    z = np.linspace(-12, 16, 8001)
    q = norm.pdf(z)
    p = 0.9 * q + 0.1 * norm.pdf(z, 3.0)

    def before(later, ratio):
        """Delta of a round of the coin and then of what has this profile on the grid of logarithms."""
        return float(np.trapezoid(p * np.interp(math.log(ratio) + np.log(q / p), logs, later), z))

    def with_the_other_round(parts):
        begun = np.max([profile(part, np.exp(logs)) for part in parts], axis=0)
        return np.array([before(begun, math.exp(log)) for log in logs[::20]])

    own = filters._losses(reference, COIN)[0]
    most = profile_bounds([(own, 2 + units)], width := 1 << 13)[1]
    kinds = [np.interp(logs, logs[::20], with_the_other_round([part])) for part in (COIN, PLAIN)]
    for epsilon in (0.5, 2.0, 6.0, 10.0):
        place = min(int(epsilon / own.step), width - 1)
        assert before(np.max(kinds, axis=0), math.exp(epsilon)) <= most[place] + slack
    # At one unit for the plain one the run that is begun amid the other costs more than was charged.
    thin = profile_bounds([(own, 3)], width)[1]
    assert before(np.max(kinds, axis=0), math.exp(10.097)) > 1.2 * thin[int(10.097 / own.step)]


def test_the_profiles_of_the_menu_are_those_of_the_laws():
    z = np.linspace(-12, 16, 40_001)
    q = norm.pdf(z)
    p = 0.9 * q + 0.1 * norm.pdf(z, 3.0)
    for epsilon in (0.01, 0.05, 1.0):
        removed = np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), z)
        added = np.trapezoid(np.maximum(q - math.exp(epsilon) * p, 0), z)
        assert fixed_size_delta(np.array(epsilon), 3.0, 0.1) == pytest.approx(removed, rel=1e-3)
        assert poisson_add_delta(np.array(epsilon), 3.0, 0.1) == pytest.approx(added, rel=1e-3)
