"""Claims against the exact privacy of small cases: never below, and close where the noise is wide enough."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from d2pfed.accounting.composition import composed, surrogate
from d2pfed.accounting.events import Adjacency, CohortSampling, Release, Sampling, Unit
from d2pfed.accounting.laws import DiscreteGaussianSum, SkellamSum
from d2pfed.accounting.losses import COARSE, loss_distributions
from d2pfed.accounting.observers import CLIENT, RELEASED, SERVER, account, colluding
from d2pfed.accounting.profiles import PairKind, SampledGaussian, gaussian_epsilon
from support import oracle
from support.adjacencies import OF_CLIENTS
from support.record_games import worst

VARIANCES = (1, 2, 4, 16)
CLIENTS = (1, 2, 4, 16, 64)
RADII = (Fraction(3, 4), Fraction(3), Fraction(8))
DELTAS = (1e-3, 1e-6, 1e-9)
MODULI = (64, 1024)


def releases(noise, sampling, adjacency=Adjacency.REPLACE_ONE, rounds=1):
    return [
        Release(
            run="run",
            round=index,
            attempt=0,
            unit=Unit.CLIENT,
            adjacency=adjacency,
            sampling=sampling,
            noise=noise,
            participants=(),
        )
        for index in range(rounds)
    ]


def everyone():
    return CohortSampling(Sampling.NONE, 100, 100)


def exact_laws(sigma, honest, radius, adjacency, modulus):
    # The honest rest sits at a centre that is not an integer, where lattice effects are not the mildest.
    p = oracle.noisy_sum(sigma, honest, float(radius), modulus, other=0.3)
    q = oracle.noisy_sum(
        sigma, honest, 0.0 if adjacency is Adjacency.ZERO_OUT else -float(radius), modulus, other=0.3
    )
    return p, q


def small_cells():
    """Every (variance, clients, dropouts, colluders, radius, adjacency, modulus) with an honest survivor."""
    for variance, clients, radius, adjacency, modulus in product(VARIANCES, CLIENTS, RADII, OF_CLIENTS, MODULI):
        for dropouts, colluders in product(sorted({0, clients // 4, clients // 2}), (0, 1)):
            if clients - dropouts - colluders >= 1:
                yield variance, clients, dropouts, colluders, radius, adjacency, modulus


def claim(variance, survivors, colluders, radius, adjacency, delta):
    sigma = Fraction(math.isqrt(variance * 10**30), 10**15)
    noise = DiscreteGaussianSum(sigma, survivors, radius, 1)
    observer = colluding(colluders) if colluders else SERVER
    return account(releases(noise, everyone(), adjacency), observer, delta=delta, max_participations=1).epsilon


def compare_cells(claimed):
    """Count the cells; fail where a claim is below the truth or, with wide noise that does not wrap, far above."""
    cells, known = 0, {}
    for variance, clients, dropouts, colluders, radius, adjacency, modulus in small_cells():
        honest = clients - dropouts - colluders
        laws = (variance, honest, radius, adjacency, modulus)
        for delta in DELTAS:
            if (*laws, delta) not in known:
                p, q = exact_laws(math.sqrt(variance), honest, radius, adjacency, modulus)
                known[*laws, delta] = oracle.epsilon(p, q, delta)
            truth = known[*laws, delta]
            value = claimed(variance, clients - dropouts, colluders, radius, adjacency, delta)
            where = (variance, clients, dropouts, colluders, radius, adjacency, modulus, delta)
            assert value >= truth, f"claimed {value} below {truth} at {where}"
            fits = 16 * math.sqrt(variance * honest) + 4 * float(radius) < modulus
            if variance >= 4 and fits:
                assert value <= 1.5 * truth + 1e-3, f"claimed {value} far above {truth} at {where}"
            cells += 1
    return cells


def test_claims_are_never_below_the_exact_value_and_close_to_it():
    assert compare_cells(claim) >= 2000


def test_the_cells_reject_a_radius_where_two_apply():
    def one_radius(variance, survivors, colluders, radius, adjacency, delta):
        return claim(variance, survivors, colluders, radius, Adjacency.ZERO_OUT, delta)

    with pytest.raises(AssertionError, match="below"):
        compare_cells(one_radius)


def test_the_cells_reject_noise_of_clients_who_collude():
    def trusting(variance, survivors, _colluders, radius, adjacency, delta):
        return claim(variance, survivors, 0, radius, adjacency, delta)

    with pytest.raises(AssertionError, match="below"):
        compare_cells(trusting)


def test_the_cells_reject_noise_of_clients_who_dropped_out():
    def hopeful(variance, survivors, colluders, radius, adjacency, delta):
        return claim(variance, survivors + 1, colluders, radius, adjacency, delta)

    with pytest.raises(AssertionError, match="below"):
        compare_cells(hopeful)


def test_the_cells_reject_a_gaussian_of_the_discrete_sums_own_width():
    def no_smoothing(variance, survivors, colluders, radius, adjacency, delta):
        ratio = adjacency.radii * float(radius) / math.sqrt(variance * (survivors - colluders))
        return gaussian_epsilon(delta, ratio)

    with pytest.raises(AssertionError, match="below"):
        compare_cells(no_smoothing)


def compare_skellam(overcount):
    cells = 0
    for variance, clients, radius, adjacency in product((4, 16, 64), (1, 4, 16), (1, 3), OF_CLIENTS):
        total = variance * clients
        reach = int(60 * math.sqrt(total) + 60)
        law = oracle.skellam(total, reach)
        shift = radius * adjacency.radii
        p, q = law[shift:], law[: len(law) - shift]
        noise = SkellamSum(Fraction(variance), overcount * clients, Fraction(radius), Fraction(radius), 1)
        for delta in DELTAS:
            value = account(
                releases(noise, everyone(), adjacency), SERVER, delta=delta, max_participations=1
            ).epsilon
            assert value >= oracle.epsilon(p, q, delta)
            cells += 1
    return cells


def test_skellam_claims_are_never_below_the_exact_value():
    assert compare_skellam(1) == 108


def test_the_comparison_rejects_skellam_noise_counted_twice():
    with pytest.raises(AssertionError):
        compare_skellam(2)


# Tiny populations: (population, cohort), sigma of one contributor in radii, rounds, epsilon.
GAMES = [
    (sizes, width, rounds, epsilon)
    for sizes in ((2, 1), (3, 1), (4, 2))
    for width in (1.0, 1.2, 2.0)
    for rounds in (1, 2, 3)
    for epsilon in (0.0, 0.3, 1.0)
]
RADIUS = 6  # lattice steps per clip radius


def laws_of(sizes, width, adjacency):
    population, cohort = sizes
    sigma = width * RADIUS / math.sqrt(cohort)
    reach = int(2 * RADIUS + 8 * width * RADIUS)

    def noise_of(centre):
        one = oracle.discrete_gaussian(sigma, centre * RADIUS, reach)
        rest = [oracle.discrete_gaussian(sigma, 0.0, reach)] * (cohort - 1)
        for law in rest:
            one = np.convolve(one, law)
        return one

    is_zero = adjacency is Adjacency.ZERO_OUT  # the world with the vector keeps its place
    values = (0,) if is_zero else (-1, 0, 1)
    return oracle.neighbours(
        population, lambda data: oracle.cohort_law(data, cohort, noise_of), values, in_order=is_zero
    )


@pytest.fixture(scope="module")
def truths():
    """The exact delta of every game, for replace-one and zero-out neighbours."""
    found = {}
    for adjacency in OF_CLIENTS:
        for sizes, width in sorted({(sizes, width) for sizes, width, _, _ in GAMES}):
            pairs = laws_of(sizes, width, adjacency)
            for rounds, epsilon in product((1, 2, 3), (0.0, 0.3, 1.0)):
                key = (adjacency, sizes, width, rounds, epsilon)
                found[key] = worst(pairs, rounds, math.exp(epsilon))
    return found


def check_games(truths, claimed):
    """Fail where the claim at the exact delta of an adaptive game is below the game's epsilon."""
    for (adjacency, sizes, width, rounds, epsilon), delta in truths.items():
        value = claimed(adjacency, sizes, width, rounds, delta)
        assert value >= epsilon - 1e-9, f"claimed {value} below {epsilon}: {adjacency, sizes, width, rounds}"


def noise_in_games(width, cohort):
    sigma = Fraction(width) * RADIUS / Fraction(math.isqrt(cohort * 10**30), 10**15)
    return DiscreteGaussianSum(sigma, cohort, Fraction(RADIUS), 1)


def released(adjacency, sizes, width, rounds, delta):
    population, cohort = sizes
    rows = releases(
        noise_in_games(width, cohort), CohortSampling(Sampling.FIXED, population, cohort), adjacency, rounds
    )
    return account(rows, RELEASED, delta=delta, max_participations=rounds).epsilon


def by_pair(law, radii, adjacency, sizes, width, rounds, delta):
    """A claim that is right but for the pair it uses: the Gaussian that stands for the noise is the right one."""
    population, cohort = sizes
    smooth = surrogate(noise_in_games(width, cohort), rounds)
    part = SampledGaussian(law, radii * RADIUS / smooth.sigma, cohort / population, smooth.slack)
    return composed(loss_distributions([(part, rounds)], delta, COARSE)).epsilon(delta)


def test_amplified_claims_hold_in_every_adaptive_game(truths):
    check_games(truths, released)


def test_the_claim_is_close_to_the_truth_for_one_round(truths):
    for (adjacency, sizes, width, rounds, epsilon), delta in truths.items():
        if rounds == 1:
            assert released(adjacency, sizes, width, rounds, delta) <= 1.05 * epsilon + 0.02


def test_the_games_reject_one_radius_behind_a_fixed_size_cohort(truths):
    with pytest.raises(AssertionError, match="below"):
        check_games(truths, lambda *case: by_pair(PairKind.FIXED_SIZE, 1, *case))


@pytest.mark.parametrize("kind", [PairKind.FIXED_SIZE, PairKind.POISSON_ZERO_OUT])
def test_zero_out_does_not_halve_the_distance_behind_a_fixed_size_cohort(truths, kind):
    only = {key: value for key, value in truths.items() if key[0] is Adjacency.ZERO_OUT}
    with pytest.raises(AssertionError, match="below"):
        check_games(only, lambda *case: by_pair(kind, 1, *case))


def test_the_games_reject_the_zero_out_pair_for_replace_one(truths):
    only = {key: value for key, value in truths.items() if key[0] is Adjacency.REPLACE_ONE}
    with pytest.raises(AssertionError, match="below"):
        check_games(only, lambda *case: by_pair(PairKind.FIXED_SIZE_ZERO_OUT, 1, *case))


def test_the_games_reject_the_hidden_size_number_for_a_fixed_size_cohort(truths):
    with pytest.raises(AssertionError, match="below"):
        check_games(truths, lambda *case: by_pair(PairKind.POISSON_REPLACE_ONE, 1, *case))


def test_the_games_reject_one_sided_composition(truths):
    one_round = {key: value for key, value in truths.items() if key[3] == 1}
    check_games(one_round, lambda *case: by_pair(PairKind.POISSON_ZERO_OUT, 2, *case))
    with pytest.raises(AssertionError, match="below"):
        check_games(truths, lambda *case: by_pair(PairKind.POISSON_ZERO_OUT, 2, *case))


def test_the_games_reject_delta_spent_anew_in_each_round(truths):
    def per_round(adjacency, sizes, width, rounds, delta):
        return rounds * released(adjacency, sizes, width, 1, delta)

    with pytest.raises(AssertionError, match="below"):
        check_games(truths, per_round)


def test_the_games_reject_rounds_that_are_not_composed(truths):
    def last_round_only(adjacency, sizes, width, rounds, delta):
        return released(adjacency, sizes, width, 1, delta)

    with pytest.raises(AssertionError, match="below"):
        check_games(truths, last_round_only)


def known_participation(claimed):
    """Compare a claim against the server with the exact value of one known participation."""
    noise = DiscreteGaussianSum(Fraction(3), 4, Fraction(4), 1)
    sampling = CohortSampling(Sampling.FIXED, 1000, 4)
    p, q = exact_laws(3.0, 4, 4, Adjacency.REPLACE_ONE, 1024)
    for delta in DELTAS:
        assert claimed(releases(noise, sampling), delta) >= oracle.epsilon(p, q, delta)


def test_the_server_gets_no_amplification():
    known_participation(lambda rows, delta: account(rows, SERVER, delta=delta, max_participations=1).epsilon)
    known_participation(lambda rows, delta: account(rows, CLIENT, delta=delta, max_participations=1).epsilon)


def test_the_comparison_rejects_amplification_for_the_server():
    with pytest.raises(AssertionError):
        known_participation(lambda rows, delta: account(rows, RELEASED, delta=delta, max_participations=1).epsilon)
