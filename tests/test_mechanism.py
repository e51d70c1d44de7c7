import json
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2pfed.accounting import BinomialSum, DiscreteGaussianSum, SkellamSum
from d2pfed.errors import ConfigError
from d2pfed.noise.codec import Centers, Codec, rounded_radius, stochastic_round
from d2pfed.noise.mechanisms import (
    BinomialNoise,
    Centered,
    DDGauss,
    Rounded,
    Share,
    Shared,
    SkellamNoise,
    l1_radius,
)
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.rotation import Hadamard, RandomPhase
from support.stats import check_every_coordinate_varies, check_fits, check_mean

FALSE_ALARM = 1e-6
MILLION = 10**6
VECTORS = Path(__file__).parent / "vectors" / "v2"

MECHANISMS = {
    "centered": Centered(Fraction(5, 2)),
    "shared": Shared(Fraction(9, 2)),
    "ddgauss": DDGauss(Fraction(3)),
    "skellam": SkellamNoise(Fraction(10)),
    "binomial": BinomialNoise(50),
}
ALONE = ("centered", "ddgauss", "skellam", "binomial")  # each client's vector has noise of its own

GRID = 256  # grid units in a lattice step
CENTRES = (77, -300, 20, 211)  # the coordinates of the four clients; none is half-way between two lattice points
ROOT = Entropy.replay(b"test mechanism")


def cohort(size, name="cohort"):
    return [Share(rank, size, ROOT.child("group", name)) for rank in range(size)]


def own(client, name="own"):
    return ROOT.child("client", name, client)


def constant(centre, length):
    """Return a vector of equal coordinates, with a bound far enough above its norm for rounding to be free."""
    return Centers(np.full(length, centre), radius=int(1.1 * (abs(centre) + 256) * length**0.5), fraction_bits=8)


def summed(mechanism, shares, length=MILLION):
    clients = zip(CENTRES, shares, range(len(CENTRES)), strict=True)
    return sum(mechanism.encode(constant(centre, length), share, own(i)) for centre, share, i in clients)


# Exact distributions, computed from their definitions: pairs of the least value and the probabilities from there on.


def gaussian(sigma, centre=Fraction(0)):
    reach = int(13 * sigma) + 2
    exponents = [-((k - centre) ** 2) / (2 * sigma**2) for k in range(-reach, reach + 1)]
    weights = [mpmath.exp(mpmath.mpf(e.numerator) / e.denominator) for e in exponents]
    return -reach, np.array([float(weight / mpmath.fsum(weights)) for weight in weights])


def skellam(variance):
    reach = int(14 * float(variance) ** 0.5) + 20
    mean = mpmath.mpf(variance.numerator) / variance.denominator
    return -reach, np.array(
        [float(mpmath.exp(-mean) * mpmath.besseli(abs(k), mean)) for k in range(-reach, reach + 1)]
    )


def binomial(trials):
    return -trials // 2, np.array(
        [float(mpmath.binomial(trials, k) / mpmath.mpf(2) ** trials) for k in range(trials + 1)]
    )


def rounding(centre):
    fraction = centre % GRID / GRID
    return centre // GRID, np.array([1 - fraction, fraction])


def convolved(*distributions):
    low, probabilities = 0, np.ones(1)
    for start, more in distributions:
        low, probabilities = low + start, np.convolve(probabilities, more)
    return low, probabilities


def pmf(distribution):
    low, probabilities = distribution

    def at(values):
        inside = (values >= low) & (values < low + probabilities.size)
        return np.where(inside, probabilities[np.clip(values - low, 0, probabilities.size - 1)], 0.0)

    return at


@cache
def exact(name):
    """Return the distribution of the sum over the four clients."""
    mechanism = MECHANISMS[name]
    rounded = [rounding(centre) for centre in CENTRES]
    match mechanism:
        case Centered():
            parts = [
                (c // GRID + low, p)
                for c in CENTRES
                for low, p in [gaussian(mechanism.sigma, Fraction(c % GRID, GRID))]
            ]
            return convolved(*parts)
        case Shared():
            return convolved(*rounded, gaussian(mechanism.sigma))
        case DDGauss():
            return convolved(*rounded, *[gaussian(mechanism.sigma)] * len(CENTRES))
        case SkellamNoise():
            return convolved(*rounded, *[skellam(mechanism.variance)] * len(CENTRES))
    return convolved(*rounded, *[binomial(mechanism.trials)] * len(CENTRES))


@cache
def draws(name):
    return summed(MECHANISMS[name], cohort(len(CENTRES)))


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_sum_over_a_cohort_has_exactly_the_convolved_distribution(name):
    assert exact(name)[1].sum() == pytest.approx(1, abs=1e-12)
    check_fits(draws(name), pmf(exact(name)), FALSE_ALARM)


def narrower(mechanism):
    """Return the mechanism with a width that is one per cent too small."""
    match mechanism:
        case SkellamNoise():
            return replace(mechanism, variance=mechanism.variance * Fraction(99, 100) ** 2)
        case BinomialNoise():
            return BinomialNoise(mechanism.trials - 2)  # the nearest: four per cent of the variance
    return replace(mechanism, sigma=mechanism.sigma * Fraction(99, 100))


def without_the_first_noise(name):
    """Return the sum in which the first client has rounded and added nothing."""
    noisy = MECHANISMS[name].encode(constant(CENTRES[0], MILLION), cohort(len(CENTRES))[0], own(0))
    return draws(name) - noisy + Rounded().encode(constant(CENTRES[0], MILLION), own(0))


def wrong_sums(name):
    shares = cohort(len(CENTRES))
    yield "one per cent too narrow", summed(narrower(MECHANISMS[name]), shares)
    if name in ALONE:
        yield "one client's noise is missing", without_the_first_noise(name)
    if name == "shared":
        yield "one share is missing", without_the_first_noise(name)
        yield "shares without rank", summed(MECHANISMS[name], [replace(share, rank=0) for share in shares])


def fits(name, values):
    try:
        check_fits(values, pmf(exact(name)), FALSE_ALARM)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_check_rejects_wrong_sums(name):
    for mistake, wrong in wrong_sums(name):
        assert not fits(name, wrong), f"participations for the distribution: {mistake}"


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1), st.integers(1, 300))
def test_shares_of_all_ranks_add_up_to_the_total(totals, holders):
    nu = np.array(totals)
    parts = np.array([share.part(nu) for share in cohort(holders)], dtype=object)
    assert parts.sum(axis=0).tolist() == totals
    assert parts.max(axis=0).tolist() <= (parts.min(axis=0) + 1).tolist()


@given(st.integers(-(10**60), 10**60), st.integers(2, 40))
def test_shares_add_up_for_integers_of_any_size(total, holders):
    nu = np.array([total], dtype=object)
    assert sum(share.part(nu)[0] for share in cohort(holders)) == total
    assert sum(share.part(nu)[0] for share in cohort(holders)[:-1]) != total or abs(total) < holders
    without_rank = sum(replace(share, rank=0).part(nu)[0] for share in cohort(holders))
    assert (without_rank == total) == (total % holders == 0)


def codec_for(dimension, steps, rotation=Hadamard):
    return Codec(rotation=rotation(dimension), clip=1.0, granularity=1 / steps)


def variance_of(noise):
    match noise:
        case DiscreteGaussianSum():
            return float(noise.sigma) ** 2 * noise.contributors
        case SkellamSum():
            return float(noise.variance) * noise.contributors
        case BinomialSum():
            return noise.trials * noise.contributors / 4
    raise AssertionError(noise)


def rounding_variance(name, centres):
    fractions = np.asarray(centres) % GRID / GRID
    return 0.0 if name == "centered" else float(np.sum(fractions * (1 - fractions)))


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_noise_in_the_sum_is_the_noise_that_is_stated(name):
    stated = MECHANISMS[name].noise(codec_for(MILLION, 8), len(CENTRES))
    squares = (draws(name) - sum(CENTRES) / GRID) ** 2
    rounded = rounding_variance(name, CENTRES)
    check_mean(squares, variance_of(stated) + rounded, FALSE_ALARM)
    for wrong in (0.98, 1.02):
        with pytest.raises(AssertionError, match="mean is off"):
            check_mean(squares, wrong * variance_of(stated) + rounded, FALSE_ALARM)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("survivors", [1, 2, 100])
def test_the_stated_noise_counts_whose_noise_is_in_the_sum(name, survivors):
    codec = codec_for(1000, 8)
    noise = MECHANISMS[name].noise(codec, survivors)
    assert noise.contributors == (1 if name == "shared" else survivors)
    assert noise.dimension == codec.length == 1024
    assert noise.radius == (codec.radius if name == "centered" else Rounded().radius(codec))


@pytest.mark.parametrize("rotation", [Hadamard, RandomPhase])
@pytest.mark.parametrize("name", MECHANISMS)
def test_the_mean_has_the_error_of_the_formula(name, rotation):
    """With s the step: (1 / N^2) (sum of s^2 f (1 - f) + d variance), at most d s^2 / 4N + d variance / N^2."""
    clients, dimension, trials = 8, 1024, 40
    codec, mechanism, seed = codec_for(dimension, 40, rotation), MECHANISMS[name], bytes(32)
    updates = [np.cos(np.arange(dimension) * (client + 1.3)).astype(np.float32) for client in range(clients)]
    updates = [np.float32(0.9) * update / np.linalg.norm(update) for update in updates]
    prepared = [codec.prepare(update, seed) for update in updates]
    assert codec.length == dimension

    def error(trial):
        shares = cohort(clients, f"error {trial}")
        vectors = [mechanism.encode(prepared[i], shares[i], own(i, f"error {trial}")) for i in range(clients)]
        return codec.decode(sum(vectors), seed, clients) - np.mean(updates, axis=0, dtype=np.float64)

    squares = np.concatenate([error(trial) ** 2 for trial in range(trials)])
    noise = variance_of(mechanism.noise(codec, clients))
    rounded = rounding_variance(name, np.concatenate([centres.values for centres in prepared])) / dimension
    step = codec.granularity / clients
    check_mean(squares, step**2 * (noise + rounded), FALSE_ALARM)
    assert rounded <= clients / 4
    with pytest.raises(AssertionError, match="mean is off"):
        check_mean(squares, step**2 * noise * (1 - 1 / clients) + step**2 * rounded, FALSE_ALARM)
    if name == "centered":
        with pytest.raises(AssertionError, match="mean is off"):
            check_mean(squares, step**2 * (noise + clients / 4), FALSE_ALARM)


@dataclass(frozen=True)
class Forgetful:
    """A planted bug: some coordinates are rounded down and get no noise."""

    mechanism: object
    forgotten: slice

    def encode(self, centres, share, entropy):
        vector = self.mechanism.encode(centres, share, entropy)
        vector[self.forgotten] = centres.values[self.forgotten] >> centres.fraction_bits
        return vector


def noisy_vectors(name, mechanism, dimension, rotation):
    """Return 64 times what an observer must not predict: a client's vector, or the cohort's sum."""
    codec = codec_for(dimension, 3, rotation)
    centres = codec.prepare(np.zeros(dimension), bytes(32))
    clients = 1 if name in ALONE else 3

    def vector(repeat):
        shares = cohort(clients, f"coordinates {repeat}")
        return sum(mechanism.encode(centres, s, own(s.rank, f"coordinates {repeat}")) for s in shares)

    return np.stack([vector(repeat) for repeat in range(64)])


@pytest.mark.parametrize("rotation", [Hadamard, RandomPhase])
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("dimension", [1, 2, 5, 33, 1025])
def test_every_coordinate_has_noise_padding_included(name, rotation, dimension):
    check_every_coordinate_varies(noisy_vectors(name, MECHANISMS[name], dimension, rotation))


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("forgotten", [slice(0, 1), slice(-1, None), slice(33, None)])
def test_the_check_rejects_a_coordinate_without_noise(name, forgotten):
    planted = Forgetful(MECHANISMS[name], forgotten)
    with pytest.raises(AssertionError, match="coordinates without noise"):
        check_every_coordinate_varies(noisy_vectors(name, planted, 33, Hadamard))


@pytest.mark.parametrize("name", ALONE)
def test_noise_of_two_clients_is_independent(name):
    mechanism, (share, *_) = MECHANISMS[name], cohort(2)
    left, right = (mechanism.encode(constant(0, MILLION), share, own(client)) for client in (0, 1))
    each = variance_of(mechanism.noise(codec_for(MILLION, 8), 1))
    check_mean((left - right) ** 2, 2 * each, FALSE_ALARM)
    check_mean((left + right) ** 2, 2 * each, FALSE_ALARM)
    again = mechanism.encode(constant(0, MILLION), share, own(0))
    with pytest.raises(AssertionError, match="mean is off"):
        check_mean((left + again) ** 2, 2 * each, FALSE_ALARM)


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_same_entropy_replays_and_another_does_not(name):
    mechanism, share = MECHANISMS[name], cohort(3)[1]
    first, again, other = (mechanism.encode(constant(77, 1000), share, own(i)) for i in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("name", MECHANISMS)
def test_rounding_and_noise_have_streams_of_their_own(name, monkeypatch):
    taken, right = [], Entropy.stream
    monkeypatch.setattr(Entropy, "stream", lambda self: taken.append(self.key) or right(self))
    centres = Centers(np.full(8, 100), radius=300, fraction_bits=8)
    for rank in range(2):
        MECHANISMS[name].encode(centres, None if name != "shared" else Share(rank, 2, ROOT.child(rank)), own(rank))
    assert len(taken) == len(set(taken)) == {"centered": 2}.get(name, 4)


def test_a_group_shares_one_noise_and_groups_differ():
    shared, centres = Shared(Fraction(300)), constant(0, 1000)
    one, two = (
        sum(shared.encode(centres, share, own(client)) for share in cohort(5, group))
        for group, client in (("one", 0), ("two", 0))
    )
    same = sum(shared.encode(centres, share, own(9)) for share in cohort(5, "one"))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, two)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: Share(3, 3, ROOT), r"rank must be in \[0, 3\), got 3"),
        (lambda: Share(-1, 3, ROOT), r"rank must be in \[0, 3\), got -1"),
        (lambda: Share(0, 0, ROOT), r"rank must be in \[0, 0\), got 0"),
        (lambda: Centered(Fraction(199, 100)), "at least 2 steps wide and at most 1048576, got 1.99"),
        (lambda: BinomialNoise(7), r"even and in \[2, 2\^42\], got 7"),
        (lambda: BinomialNoise(0), r"even and in \[2, 2\^42\], got 0"),
        (lambda: Shared(Fraction(3)).encode(constant(0, 4), None, own(0)), "group's secret, got none"),
    ],
)
def test_invalid_parameters_are_refused(make, rule):
    with pytest.raises(ConfigError, match=rule):
        make()


def test_the_least_width_is_allowed():
    assert Centered(Fraction(2)).sigma == 2


integer_vectors = st.lists(st.integers(-(2**20), 2**20), min_size=1, max_size=40)


def norm_above(vector):
    """Return a rational just above the L2 norm."""
    return Fraction(int(mpmath.ceil(mpmath.sqrt(sum(x * x for x in vector)) * 2**20)), 2**20)


@given(integer_vectors)
def test_no_integer_vector_is_longer_than_its_l1_radius(vector):
    assert sum(map(abs, vector)) <= l1_radius(norm_above(vector), len(vector))


@pytest.mark.parametrize("length", [1, 2, 3, 100, 1000])
def test_the_l1_radius_is_reached(length):
    equal, sparse = [7] * length, [1] + [0] * (length - 1)
    assert float(l1_radius(norm_above(equal), length)) == pytest.approx(7 * length, rel=1e-6)
    assert float(l1_radius(norm_above(sparse), length)) == pytest.approx(1)


def test_one_large_coordinate_is_not_rounded_beyond_the_radius():
    """A vector along one axis, whose one coordinate may alone exceed the bound of a small dimension."""
    codec = Codec(rotation=Hadamard(4), clip=1.0, granularity=256 / 5128)
    centres = Centers(np.array([codec.grid_radius, 0, 0, 0]), codec.grid_radius, 8)
    bound = Rounded().radius(codec) ** 2
    assert bound < 21**2
    assert all(Rounded().encode(centres, own(i))[0] ** 2 <= bound for i in range(100))


@given(st.integers(1, 200), st.integers(1, 2000), st.integers(0, 10**6))
def test_no_rounded_vector_exceeds_the_radius_that_is_stated(length, centre, seed):
    centres = Centers(np.full(length, centre), radius=int(mpmath.ceil(centre * length**0.5)), fraction_bits=8)
    radius = rounded_radius(centres.steps, length, Rounded().beta)
    rounded = Rounded().encode(centres, ROOT.child(seed))
    assert int(np.dot(rounded, rounded)) <= radius**2


def test_the_uninflated_clip_and_unconditional_rounding_are_exceeded():
    """Planted bugs: the clip itself as the bound, and rounding once without a look at the norm."""
    halves = Centers(np.full(64, 128), radius=1024, fraction_bits=8)
    codec = codec_for(64, 4)
    assert codec.grid_radius == halves.radius
    for name, mechanism in MECHANISMS.items():
        stated = mechanism.noise(codec, 3).radius
        assert (stated == codec.radius) == (name == "centered")
    squares = [int(np.sum(Rounded().encode(halves, own(i)) ** 2)) for i in range(2000)]
    assert codec.radius**2 < max(squares) <= Rounded().radius(codec) ** 2
    careless = [int(np.sum(stochastic_round(halves, own(i).stream()) ** 2)) for i in range(2000)]
    assert max(careless) > Rounded().radius(codec) ** 2


def test_the_binomial_states_the_largest_coordinate_of_a_rounded_vector():
    wide, narrow = codec_for(100, 20), replace(codec_for(100, 20), box=0.1)
    assert BinomialNoise(50).noise(wide, 3).linf_radius == 20
    assert BinomialNoise(50).noise(narrow, 3).linf_radius == 2
    centres = narrow.prepare(np.eye(1, 100)[0], bytes(32))
    rounded = np.stack([Rounded().encode(centres, own(i)) for i in range(100)])
    assert np.abs(rounded).max() <= 2


@pytest.mark.parametrize("name", MECHANISMS)
def test_known_answers(name):
    known = json.loads((VECTORS / "mechanism.json").read_text())
    root = Entropy.replay(known["seed"].encode())
    centres = Centers(np.array(known["centres"]), known["radius"], known["fraction_bits"])
    for rank, vector in enumerate(known["vectors"][name]):
        share = Share(rank, known["holders"], root.child("group"))
        assert MECHANISMS[name].encode(centres, share, root.child("client", rank)).tolist() == vector


def test_trials_are_even_and_within_the_width_that_sums_hold():
    assert BinomialNoise(2).trials == 2
    assert BinomialNoise(1 << 42).trials == 1 << 42
    for trials in (0, 1, 3, (1 << 42) + 2):
        with pytest.raises(ConfigError, match="even and in"):
            BinomialNoise(trials)
