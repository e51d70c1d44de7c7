"""The samplers' distributions: chi-square against exact pmfs, wrong twins that it rejects, known answers."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from benchmarks.reference_sampler import discrete_gaussian
from d2pfed.errors import ConfigError
from d2pfed.noise.cumulative import BinomialDistribution, SkellamDistribution
from d2pfed.noise.sampler import CenteredDiscreteGaussian, DiscreteGaussian, draw
from d2pfed.numerics.randomness import Entropy
from support.stats import check_every_coordinate_varies, check_fits

FALSE_ALARM = 1e-6
MILLION = 10**6
VECTORS = Path(__file__).parent / "vectors" / "v2"


def stream(name):
    return Entropy.replay(b"test sampler").child(name).stream()


def gaussian_pmf(centre, sigma):
    reach = int(40 * sigma) + 40
    support = np.arange(-reach, reach + 1) + round(centre)
    total = np.exp(-((support - centre) ** 2) / (2 * sigma**2)).sum()
    return lambda values: np.exp(-((values - centre) ** 2) / (2 * sigma**2)) / total


def with_zero_counted_twice(draws, p_zero):
    kept = round(draws.size / (1 + p_zero))
    return np.concatenate([draws[:kept], np.zeros(draws.size - kept, np.int64)])


def with_sign_bias(draws):
    """Let two draws of a hundred lose their sign."""
    return np.concatenate([np.abs(draws[: draws.size // 50]), draws[draws.size // 50 :]])


def accepted(wrong, pmf):
    """Return the names of the draws that the check takes for the distribution."""
    names = []
    for name, draws in wrong.items():
        try:
            check_fits(draws, pmf, FALSE_ALARM)
        except AssertionError:
            continue
        names.append(name)
    return names


SIGMAS = [Fraction(1, 2), Fraction(1), Fraction(2), Fraction(5), Fraction(30), Fraction(300), Fraction(3000)]


@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_gaussian_fits_its_distribution(sigma):
    draws = DiscreteGaussian(sigma).draw(MILLION, stream("gaussian"))
    check_fits(draws, gaussian_pmf(0.0, float(sigma)), FALSE_ALARM)


@pytest.mark.parametrize("sigma", [Fraction(1), Fraction(2), Fraction(5)])
def test_the_check_rejects_wrong_gaussians(sigma):
    good = DiscreteGaussian(sigma).draw(MILLION, stream("gaussian"))
    pmf = gaussian_pmf(0.0, float(sigma))
    wrong = {
        "sigma one per cent too small": DiscreteGaussian(sigma * Fraction(99, 100)).draw(
            MILLION, stream("gaussian")
        ),
        "sigma one per cent too large": DiscreteGaussian(sigma * Fraction(101, 100)).draw(
            MILLION, stream("gaussian")
        ),
        "zero counted twice": with_zero_counted_twice(good, float(pmf(np.zeros(1))[0])),
        "sign bias": with_sign_bias(good),
    }
    assert accepted(wrong, pmf) == []


def test_the_centred_gaussian_fits_its_distribution():
    gaussian = CenteredDiscreteGaussian(Fraction(2), 8)
    for centre in (0, 1, 127, 128, 129, 255, -1, -128, 100_003, -987_654_321):
        draws = gaussian.draw(np.full(MILLION // 5, centre), stream(f"centred {centre}"))
        check_fits(draws - (centre >> 8), gaussian_pmf((centre & 255) / 256, 2.0), FALSE_ALARM)


@pytest.mark.parametrize(
    ("sigma", "bits"), [(Fraction(2), 8), (Fraction(7, 2), 4), (Fraction(40), 3), (Fraction(5), 0)]
)
def test_centres_of_all_fractions_at_once_fit_their_mixture(sigma, bits):
    scale = 1 << bits
    centres = np.tile(np.arange(scale, dtype=np.int64), -(-MILLION // scale))
    draws = CenteredDiscreteGaussian(sigma, bits).draw(centres, stream("mixture"))
    parts = [gaussian_pmf(part / scale, float(sigma)) for part in range(scale)]
    check_fits(draws, lambda values: sum(part(values) for part in parts) / scale, FALSE_ALARM)


def test_the_check_rejects_wrong_centred_gaussians():
    centre, pmf = 300, gaussian_pmf(300 / 256, 2.0)
    centres = np.full(MILLION, centre)
    good = CenteredDiscreteGaussian(Fraction(2), 8).draw(centres, stream("twins"))
    wrong = {
        "sigma one per cent off": CenteredDiscreteGaussian(Fraction(99, 50), 8).draw(centres, stream("twins")),
        "the fraction is dropped": CenteredDiscreteGaussian(Fraction(2), 8).draw(centres & ~255, stream("twins")),
        "the fraction is rounded to sixteenths": CenteredDiscreteGaussian(Fraction(2), 8).draw(
            centres & ~15, stream("twins")
        ),
        "zero counted twice": with_zero_counted_twice(good, float(pmf(np.zeros(1))[0])),
        "sign bias": with_sign_bias(good),
    }
    assert accepted(wrong, pmf) == []


@pytest.mark.parametrize("variance", [Fraction(1, 2), Fraction(4), Fraction(100), Fraction(10_007, 3)])
def test_skellam_fits_its_distribution_and_not_another(variance):
    draws = draw(SkellamDistribution(variance), MILLION, stream("skellam"))
    half = float(variance) / 2
    check_fits(draws, scipy.stats.skellam(half, half).pmf, FALSE_ALARM)
    for wrong in (
        scipy.stats.skellam(half * 1.02, half * 1.02).pmf,
        gaussian_pmf(0.0, float(variance) ** 0.5 * 1.01),
    ):
        with pytest.raises(AssertionError, match="chi-square"):
            check_fits(draws, wrong, FALSE_ALARM)


@pytest.mark.parametrize("trials", [1, 2, 7, 64, 65, 1000, 36_425])
def test_the_binomial_fits_its_distribution_and_not_another(trials):
    draws = draw(BinomialDistribution(trials), MILLION, stream("binomial"))
    assert draws.min() >= 0
    assert draws.max() <= trials
    check_fits(draws, scipy.stats.binom(trials, 0.5).pmf, FALSE_ALARM)
    with pytest.raises(AssertionError, match="chi-square"):
        check_fits(draws, scipy.stats.binom(trials, 0.5 + 0.01 / trials**0.5).pmf, FALSE_ALARM)


@pytest.mark.parametrize("centre", [Fraction(0), Fraction(-7, 3)])
def test_the_reference_fits_its_distribution(centre):
    source = stream("reference")
    square = Fraction(4)
    draws = np.array([discrete_gaussian(centre, square, source) for _ in range(50_000)])
    check_fits(draws, gaussian_pmf(float(centre), 2.0), FALSE_ALARM)
    with pytest.raises(AssertionError, match="chi-square"):
        check_fits(draws, gaussian_pmf(float(centre), 2.08), FALSE_ALARM)


def test_the_reference_and_the_table_fit_each_other():
    source = stream("reference and table")
    slow = np.array([discrete_gaussian(Fraction(77, 256), Fraction(9, 4), source) for _ in range(20_000)])
    fast = CenteredDiscreteGaussian(Fraction(3, 2), 8).draw(np.full(MILLION, 77), source)
    low, high = int(fast.min()), int(fast.max())
    frequency = np.bincount(fast - low, minlength=high - low + 1) / fast.size
    check_fits(
        slow, lambda values: np.interp(values, np.arange(low, high + 1), frequency, left=0, right=0), FALSE_ALARM
    )


@pytest.mark.parametrize("dimension", [1, 2, 63, 64, 65, 32_767, 32_769])
def test_every_coordinate_has_noise(dimension):
    source = stream("coordinates")
    centred = CenteredDiscreteGaussian(Fraction(2), 8)
    for drawn in (
        lambda: DiscreteGaussian(Fraction(2)).draw(dimension, source),
        lambda: centred.draw(np.zeros(dimension, np.int64), source),
    ):
        check_every_coordinate_varies(np.stack([drawn() for _ in range(64)]))


def test_the_check_rejects_a_last_coordinate_without_noise():
    vectors = DiscreteGaussian(Fraction(2)).draw(64 * 100, stream("coordinates")).reshape(64, 100)
    vectors[:, -1] = 0
    with pytest.raises(AssertionError, match="99"):
        check_every_coordinate_varies(vectors)


def test_two_neighbouring_centres_reach_the_same_integers():
    gaussian = CenteredDiscreteGaussian(Fraction(2), 8)
    reached = [set(gaussian.draw(np.full(MILLION, centre), stream("support")).tolist()) for centre in (0, 256)]
    certain = {
        k for k in range(-20, 21) if MILLION * min(gaussian_pmf(c, 2.0)(np.array(k)) for c in (0.0, 1.0)) > 20
    }
    assert certain <= reached[0] & reached[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DiscreteGaussian(Fraction(0)).draw(1, stream("refused")),
        lambda: DiscreteGaussian(Fraction(10**6)).draw(1, stream("refused")),
        lambda: CenteredDiscreteGaussian(Fraction(0), 8).draw(np.zeros(1, np.int64), stream("refused")),
        lambda: CenteredDiscreteGaussian(Fraction(1000), 8).draw(np.zeros(1, np.int64), stream("refused")),
        lambda: CenteredDiscreteGaussian(Fraction(2), -1).draw(np.zeros(1, np.int64), stream("refused")),
        lambda: CenteredDiscreteGaussian(Fraction(2), 17).draw(np.zeros(1, np.int64), stream("refused")),
        lambda: draw(SkellamDistribution(Fraction(-1)), 1, stream("refused")),
        lambda: draw(BinomialDistribution(0), 1, stream("refused")),
        lambda: discrete_gaussian(Fraction(0), Fraction(0), stream("refused")),
    ],
)
def test_distributions_that_cannot_be_sampled_are_refused(make):
    with pytest.raises(ConfigError):
        make()


DISTRIBUTIONS = {
    "gaussian sigma 2": lambda source: DiscreteGaussian(Fraction(2)).draw(64, source),
    "gaussian sigma 300": lambda source: DiscreteGaussian(Fraction(300)).draw(64, source),
    "centred sigma 2, centres 0, 77, 154, ...": lambda source: CenteredDiscreteGaussian(Fraction(2), 8).draw(
        77 * np.arange(64), source
    ),
    "skellam variance 10": lambda source: draw(SkellamDistribution(Fraction(10)), 64, source),
    "binomial 1000": lambda source: draw(BinomialDistribution(1000), 64, source),
    "reference centre 1/3 sigma squared 4": lambda source: np.array(
        [discrete_gaussian(Fraction(1, 3), Fraction(4), source) for _ in range(64)]
    ),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_known_answers(name):
    known = json.loads((VECTORS / "sampler.json").read_text())
    source = Entropy.replay(known["seed"].encode()).child(name).stream()
    assert DISTRIBUTIONS[name](source).tolist() == known["draws"][name]
