"""Record-level privacy over silos: claims against exact games, quadrature and a peer, and their planted twins."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.stats import binom, norm

from d2pfed.accounting import (
    ALONE,
    CLIENT,
    RATE_STEPS,
    RELEASED,
    SERVER,
    Adjacency,
    BatchSampling,
    CohortSampling,
    ContinuousGaussian,
    DiscreteGaussianSum,
    Release,
    Sampling,
    Unit,
    account,
    colluding,
)
from d2pfed.accounting.filters import Filter, PlanCost
from d2pfed.accounting.profiles import (
    fixed_size_delta,
    poisson_add_delta,
    poisson_replace_delta,
    several_coins_add_delta,
    several_coins_delta,
    several_coins_replace_delta,
)
from d2pfed.errors import ConfigError
from d2pfed.ledger.rows import decode_release, encode_release
from d2pfed.numerics.randomness import Entropy
from support import oracle, record_games

SILOS = CohortSampling(Sampling.NONE, 20, 20)
RADIUS = 3  # lattice steps
EPSILONS = (0.3, 1.0, 2.0)


def exact_rate(rate):
    return Fraction(math.floor(Fraction(rate) * RATE_STEPS), RATE_STEPS)


def release(noise, rate=0.01, adjacency=Adjacency.ADD_REMOVE, silos=1, **changes):
    values = {
        "run": "",
        "round": 0,
        "attempt": 0,
        "unit": Unit.RECORD,
        "adjacency": adjacency,
        "sampling": SILOS,
        "noise": noise,
        "participants": (),
        "batches": BatchSampling(exact_rate(rate), silos),
    }
    return Release(**(values | changes))


def epsilon(one, attempts, observer=SERVER, delta=1e-6):
    return account([one] * attempts, observer, delta=delta, max_participations=attempts).epsilon


def silo_noise(honest, multiplier=1.0, dimension=1 << 12):
    """Noise of 8-step silos that is `multiplier` radii wide where 8 are honest."""
    return DiscreteGaussianSum(Fraction(8), honest, Fraction(8 * math.sqrt(8) / multiplier), dimension)


# The numbers of the theory at z = 1, q = 0.01, T = 1000, delta = 1e-6; smoothing costs a little of the width.
GOLDEN = [
    (8, 1, Adjacency.ADD_REMOVE, 2.12),
    (8, 1, Adjacency.ZERO_OUT, 2.12),
    (8, 1, Adjacency.REPLACE_ONE, 3.2),
    (8, 2, Adjacency.ADD_REMOVE, 4.55),
    (8, 2, Adjacency.REPLACE_ONE, 7.01),
    (4, 1, Adjacency.ADD_REMOVE, 5.3),
    (2, 1, Adjacency.ADD_REMOVE, 15.5),
    (1, 1, Adjacency.ADD_REMOVE, 46.8),
]


@pytest.mark.parametrize(("honest", "silos", "adjacency", "expected"), GOLDEN)
def test_epsilons_are_those_of_the_theory(honest, silos, adjacency, expected):
    found = epsilon(release(silo_noise(honest), adjacency=adjacency, silos=silos), 1000)
    assert expected * 0.995 <= found <= expected * 1.025


def test_observers_see_amplified_sums_with_the_noise_they_do_not_know():
    whole = release(silo_noise(8))
    assert epsilon(whole, 1000, CLIENT) == epsilon(release(silo_noise(7)), 1000)
    assert epsilon(whole, 1000, colluding(4)) == epsilon(release(silo_noise(4)), 1000)
    assert epsilon(whole, 1000, ALONE) == epsilon(release(silo_noise(1)), 1000)
    assert epsilon(whole, 1000, RELEASED) == epsilon(whole, 1000)
    none = account([whole], colluding(8), delta=1e-6, max_participations=1)
    assert none.epsilon == math.inf
    assert "no noise" in none.reason


@pytest.mark.parametrize("silos", [1, 2, 3])
def test_a_peer_finds_the_same_for_a_person_in_several_silos(silos):
    weights = binom.pmf(np.arange(silos + 1), silos, 0.02)
    peer = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        1.0, list(range(silos + 1)), list(weights), value_discretization_interval=5e-3
    )
    wanted = peer.self_compose(200).get_epsilon_for_delta(1e-6)
    found = epsilon(release(ContinuousGaussian(1.0, 1.0), 0.02, silos=silos), 200, RELEASED)
    assert found == pytest.approx(wanted, rel=0.015)


@pytest.mark.parametrize(("silos", "shift"), [(2, 0.3), (2, 4.0), (3, 1.5)])
def test_several_coins_have_the_profile_of_their_mixture(silos, shift):
    z = np.linspace(-14, 14 + silos * shift, 60_001)
    weights = binom.pmf(np.arange(silos + 1), silos, 0.05)
    p = sum(weight * norm.pdf(z, heads * shift) for heads, weight in enumerate(weights))
    q = norm.pdf(z)
    for value in (0.0, 0.01, 0.08, 0.5, 1.0, 3.0):
        removed = np.trapezoid(np.maximum(p - math.exp(value) * q, 0), z)
        added = np.trapezoid(np.maximum(q - math.exp(value) * p, 0), z)
        at = np.array([value])
        assert several_coins_delta(at, shift, 0.05, silos)[0] == pytest.approx(removed, rel=1e-4, abs=1e-12)
        assert several_coins_add_delta(at, shift, 0.05, silos)[0] == pytest.approx(added, rel=1e-4, abs=1e-9)


def test_one_coin_is_a_mixture_of_one():
    at = np.linspace(0, 3, 50)
    for ratio in (0.05, 0.9, 5.0):
        assert several_coins_delta(at, ratio, 0.1, 1) == pytest.approx(fixed_size_delta(at, ratio, 0.1), rel=1e-7)
        assert several_coins_add_delta(at, ratio, 0.1, 1) == pytest.approx(
            poisson_add_delta(at, ratio, 0.1), rel=1e-6, abs=1e-12
        )


@pytest.mark.parametrize(("silos", "shift"), [(2, 0.3), (2, 4.0), (3, 1.5)])
def test_a_person_replaced_in_several_silos_has_the_profile_of_two_mixtures(silos, shift):
    z = np.linspace(-14 - silos * shift, 14 + silos * shift, 80_001)
    weights = binom.pmf(np.arange(silos + 1), silos, 0.05)
    p = sum(weight * norm.pdf(z, heads * shift) for heads, weight in enumerate(weights))
    at = np.array([0.0, 0.01, 0.08, 0.5, 1.0, 3.0])
    truth = [np.trapezoid(np.maximum(p - math.exp(value) * p[::-1], 0), z) for value in at]
    found = several_coins_replace_delta(at, shift, 0.05, silos)
    assert found.tolist() == pytest.approx(truth, rel=1e-4, abs=1e-12)
    assert several_coins_replace_delta(at, shift, 0.05, 1) == pytest.approx(
        poisson_replace_delta(at, shift, 0.05), rel=1e-6
    )


def test_no_directions_of_a_replaced_persons_vectors_are_worse_than_opposite_ones():
    """Both worlds have vectors of their own; the first game is the worst case."""
    stream = Entropy.replay(b"opposite directions").stream()

    def uniform(*shape):
        return (stream.words(math.prod(shape)).reshape(shape) + 0.5) / 2.0**64

    draws, closest = norm.ppf(uniform(100_000, 3)), 0.0

    def density(vectors):
        total = 0.0
        for coins in np.ndindex(2, 2):
            shift = np.array(coins) @ vectors
            total = total + 0.3 ** sum(coins) * 0.7 ** (2 - sum(coins)) * np.exp(draws @ shift - shift @ shift / 2)
        return total

    for game in range(12):
        vectors = norm.ppf(uniform(2, 2, 3))
        vectors *= (
            1.2 / np.linalg.norm(vectors, axis=2)[:, :, None] * (1 - 0.5 * uniform(2, 2)[:, :, None] * (game > 5))
        )
        vectors = np.array([vectors[0], -vectors[0]]) if game == 0 else vectors
        one, other = density(vectors[0]), density(vectors[1])
        for value in (0.2, 1.0):
            gain = np.maximum(one - math.exp(value) * other, 0)
            allowed = several_coins_replace_delta(np.array([value]), 1.2, 0.3, 2)[0]
            assert gain.mean() - 4 * gain.std() / math.sqrt(len(gain)) <= allowed
            closest = max(closest, gain.mean() / allowed)
    assert closest > 0.5  # the games are not far from the bound


def test_no_directions_of_a_persons_vectors_are_worse_than_equal_ones():
    stream = Entropy.replay(b"directions").stream()

    def uniform(*shape):
        return (stream.words(math.prod(shape)).reshape(shape) + 0.5) / 2.0**64

    draws = norm.ppf(uniform(100_000, 3))
    for silos in (2, 3):
        for _ in range(6):
            vectors = norm.ppf(uniform(silos, 3))
            vectors *= (1.2 * (0.3 + 0.7 * uniform(silos)) / np.linalg.norm(vectors, axis=1))[:, None]
            ratio = 0.0
            for coins in np.ndindex(*[2] * silos):
                shift = np.array(coins) @ vectors
                chance = 0.3 ** sum(coins) * 0.7 ** (silos - sum(coins))
                ratio = ratio + chance * np.exp(draws @ shift - shift @ shift / 2)
            for value in (0.2, 1.0):
                gain = np.maximum(ratio - math.exp(value), 0)
                allowed = several_coins_delta(np.array([value]), 1.2, 0.3, silos)[0]
                assert gain.mean() - 4 * gain.std() / math.sqrt(len(gain)) <= allowed


def test_one_common_coin_for_all_silos_of_a_person_is_no_bound():
    """Shift s D at rate q, as for a common coin, is below the truth of independent coins."""
    truth = several_coins_delta(np.array([1.0]), 4.0, 0.01, 2)[0]
    assert truth == pytest.approx(0.0146, rel=0.01)
    assert fixed_size_delta(np.array([1.0]), 8.0, 0.01)[0] < 0.7 * truth
    replaced = several_coins_replace_delta(np.array([1.0]), 4.0, 0.01, 2)[0]
    assert poisson_replace_delta(np.array([1.0]), 8.0, 0.01)[0] < 0.7 * replaced


# Two silos of two records, all of their noise counted as one discrete Gaussian of real centre.


def noise_law(width):
    reach = int((5 + 6 * width) * RADIUS)
    return lambda centre: oracle.discrete_gaussian(width * RADIUS, centre * RADIUS, reach)


def claimed(width, rate, attempts, adjacency, delta, silos=1):
    noise = DiscreteGaussianSum(Fraction(width) * RADIUS, 1, Fraction(RADIUS), 1)
    return epsilon(release(noise, rate, Adjacency(adjacency), silos), attempts, delta=delta)


def played(width, rate, attempts, adjacency, value, law=record_games.batch_law):
    pairs = record_games.neighbours(lambda data: law(data, rate, noise_law(width)), adjacency)
    return record_games.worst(pairs, attempts, math.exp(value))


@pytest.mark.parametrize("adjacency", ["add-remove", "zero-out", "replace-one"])
@pytest.mark.parametrize(("width", "rate", "attempts"), [(1.5, 0.25, 1), (1.5, 0.25, 2), (1.5, 0.25, 3)])
def test_no_adaptive_game_over_two_silos_beats_the_claim(width, rate, attempts, adjacency):
    for value in EPSILONS:
        truth = played(width, rate, attempts, adjacency, value)
        if truth > 1e-9:
            assert claimed(width, rate, attempts, adjacency, truth) >= value - 1e-3 * (attempts > 1)


def played_by_a_person(attempts, value):
    """The worst game in which both silos' first record is the same person's, replaced in both."""
    values, rest = (-1, 0, 1), ((1, 0), (-1, 1))
    worlds = [
        record_games.batch_law(((one, *own), (two, *other)), 0.25, noise_law(1.5))
        for own, other in (((rest[0][0],), (rest[0][1],)), ((rest[1][0],), (rest[1][1],)))
        for one in values
        for two in values
    ]
    half = len(worlds) // 2
    pairs = [(p, q) for part in (worlds[:half], worlds[half:]) for p in part for q in part if p is not q]
    return record_games.worst(
        (np.array([p for p, _ in pairs]), np.array([q for _, q in pairs])), attempts, math.exp(value)
    )


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_no_game_with_a_person_replaced_in_two_silos_beats_the_claim(attempts):
    refuted = []
    for value in EPSILONS:
        truth = played_by_a_person(attempts, value)
        assert claimed(1.5, 0.25, attempts, "replace-one", truth, 2) >= value - 1e-3 * (attempts > 1)
        refuted.append(claimed(1.5, 0.25, attempts, "replace-one", truth, 1) < value - 1e-2)
    assert all(refuted)  # one silo's claim is none for this person


def rejected(played, mistaken):
    """Whether some game refutes a mistaken claim."""
    for value in EPSILONS:
        truth = played(value)
        if truth > 1e-9 and mistaken(truth) < value - 1e-2:
            return True
    return False


def test_the_games_reject_add_remove_claimed_for_replace_one():
    assert rejected(
        lambda value: played(1.5, 0.25, 2, "replace-one", value), lambda d: claimed(1.5, 0.25, 2, "add-remove", d)
    )


def test_the_games_reject_one_coin_per_record_where_the_unit_is_a_patient():
    """A patient with two records, each with a coin of its own, is drawn at the rate 1 - (1 - q)^2."""
    law, rate = noise_law(1.5), 1 - 0.75**2

    def truth(value):
        return oracle.delta((1 - rate) * law(0.0) + rate * law(1.0), law(0.0), value)

    assert rejected(truth, lambda d: claimed(1.5, 0.25, 1, "add-remove", d))


def test_the_games_reject_coins_that_are_reused_in_a_retry():
    law, found = noise_law(1.5), []
    for value in EPSILONS:
        p = record_games.joint(((1, 0), (0, 0)), 2, 0.25, law, "same")
        q = record_games.joint(((0, 0), (0, 0)), 2, 0.25, law, "same")
        truth = oracle.delta(p, q, value)
        found.append(claimed(1.5, 0.25, 2, "add-remove", truth) < value - 1e-2)
        fresh = [record_games.joint(data, 2, 0.25, law, "fresh") for data in (((1, 0), (0, 0)), ((0, 0), (0, 0)))]
        assert claimed(1.5, 0.25, 2, "add-remove", oracle.delta(*fresh, value)) >= value - 1e-9
    assert any(found)


def test_the_games_reject_coins_that_the_observer_knows():
    """Coins from a public seed: the sum is seen beside whether the record was drawn."""
    law = noise_law(1.5)
    truth = lambda value: 0.25 * oracle.delta(law(1.0), law(0.0), value)  # noqa: E731 - a short game
    assert rejected(truth, lambda d: claimed(1.5, 0.25, 1, "add-remove", d))


def test_games_reject_a_batch_size_that_is_sent_and_its_divisor():
    """The observer sees the size of the batch of four records, or a mean whose noise tells it."""
    law, size_seen = noise_law(1.5), []
    for value in EPSILONS:
        ratio, total = math.exp(value), 0.0
        for size in range(4):  # of the other three records, all zero, and of the one that is there or not
            others = binom.pmf(size, 3, 0.25)
            before = binom.pmf(size - 1, 3, 0.25) if size else 0.0
            p = 0.75 * others * law(0.0) + 0.25 * before * law(1.0)
            total += np.maximum(p - ratio * others * law(0.0), 0).sum()
        total += 0.25 * binom.pmf(3, 3, 0.25)  # a size of four cannot be without it
        size_seen.append(claimed(1.5, 0.25, 1, "add-remove", total) < value - 1e-2)
    assert any(size_seen)


def test_the_games_reject_noise_of_all_silos_where_only_honest_ones_count():
    """Of three silos one colludes: its noise is subtracted."""
    honest = DiscreteGaussianSum(Fraction(3), 2, Fraction(RADIUS), 1)
    law = lambda c: oracle.noisy_sum(3.0, 2, c * RADIUS, 1 << 10)  # noqa: E731
    p, q = 0.75 * law(0.0) + 0.25 * law(1.0), law(0.0)
    every = release(replace(honest, contributors=3), 0.25)
    found = []
    for value in (0.2, 0.5, 1.0):
        truth = oracle.delta(p, q, value)
        assert epsilon(every, 1, colluding(1), truth) >= value
        found.append(epsilon(every, 1, SERVER, truth) < value - 1e-2)
    assert any(found)


def test_persons_in_different_numbers_of_silos_have_no_common_account():
    one, two = (release(silo_noise(8), silos=silos) for silos in (1, 2))
    message = r"must have the same max_silos, got \[1, 2\]"
    with pytest.raises(ConfigError, match=message):
        account([two, replace(one, run="other")], SERVER, delta=1e-6, max_participations=2)
    with pytest.raises(ConfigError, match=message):
        Filter(9.0, 1e-6, SERVER).charge([PlanCost(two, 5, 1), PlanCost(one, 5, 1)])


def test_releases_say_what_goes_together():
    noise = silo_noise(8)
    with pytest.raises(ConfigError, match="batches go with the unit record"):
        release(noise, unit=Unit.CLIENT)
    with pytest.raises(ConfigError, match="batches go with the unit record"):
        release(noise, batches=None)
    with pytest.raises(ConfigError, match="add-remove is of records"):
        release(noise, unit=Unit.CLIENT, batches=None)
    with pytest.raises(ConfigError, match="every silo is asked"):
        release(noise, sampling=CohortSampling(Sampling.FIXED, 20, 10))
    with pytest.raises(ConfigError, match=r"multiple of 2\^-32"):
        BatchSampling(Fraction(1, 3))
    with pytest.raises(ConfigError, match="max_silos"):
        BatchSampling(Fraction(1, 2), 0)
    with pytest.raises(ConfigError, match="same unit"):
        account([release(noise), release(noise, unit=Unit.CLIENT, adjacency=Adjacency.ZERO_OUT, batches=None)],
                SERVER, delta=1e-6, max_participations=1)  # fmt: skip


def test_a_release_of_records_has_one_text():
    one = release(silo_noise(8), run="r", round=3, attempt=1, participants=(0, 4, 9))
    assert decode_release(encode_release(one)) == one
    assert '"batches"' in encode_release(one)


def test_everything_at_once_is_a_plain_gaussian():
    found = epsilon(release(silo_noise(8), 1.0), 10)
    client = account(
        [release(silo_noise(8), unit=Unit.CLIENT, adjacency=Adjacency.ZERO_OUT, batches=None)] * 10,
        SERVER,
        delta=1e-6,
        max_participations=10,
    ).epsilon
    assert found == pytest.approx(client, rel=1e-6)
    assert epsilon(release(silo_noise(8), 1.0, silos=2), 10) > 1.9 * found


def test_runs_of_records_are_counted_in_units_of_the_first():
    plan = PlanCost(release(silo_noise(8)), 200, 200)
    one = Filter(math.inf, 1e-6, SERVER).charge([plan]).composed_epsilon
    both = Filter(1.6 * one, 1e-6, SERVER)
    assert both.charge([plan, plan]).units == (200, 200)
    other = PlanCost(release(silo_noise(8), 0.02), 50, 50)
    assert both.charge([plan, other]).admitted
    assert not Filter(1.05 * one, 1e-6, SERVER).charge([plan, plan]).admitted


def test_epsilon_of_the_vectors_a_silo_sent_so_far_is_no_guarantee():
    """A reader who stops when that number suits exceeds its delta; the plan's, for all of its attempts, holds."""
    rate, attempts, delta = 0.3, 20, 1e-5
    one = release(silo_noise(8), rate)
    so_far = [epsilon(one, sent, delta=delta) for sent in range(1, attempts + 1)]
    assert oracle.best_stop(1.0, so_far, rate) > 4 * delta
    assert oracle.best_stop(1.0, [so_far[-1]] * attempts, rate) <= 1.02 * delta  # the grid errs upwards
