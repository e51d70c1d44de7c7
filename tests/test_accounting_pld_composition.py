"""The tilted transform against exact sums, at deltas that a plain transform cannot resolve."""

import math
from fractions import Fraction
from itertools import islice, product

import mpmath
import numpy as np
import pytest

from d2pfed.accounting import losses
from d2pfed.accounting.composition import composed
from d2pfed.accounting.losses import COARSE, LossPmf, loss_distributions, profile_bounds, tilted_epsilon
from d2pfed.accounting.profiles import PairKind, SampledGaussian, gaussian_epsilon
from test_accounting_peers import spread

SMALL = LossPmf(0.25, -3, np.array([0.25, 0.125, 0.0, 0.25, 0.25, 0.0, 0.0625, 0.0625]), 0.0)


def exact_law(parts):
    """The masses of the sum as fractions, by plain convolution."""
    law = {0: Fraction(1)}
    for own, count in parts:
        one = [(own.first + i, Fraction(float(mass))) for i, mass in enumerate(own.masses) if mass]
        for _ in range(count):
            new = {}
            for place, mass in law.items():
                for step, share in one:
                    new[place + step] = new.get(place + step, Fraction(0)) + mass * share
            law = new
    return law


def exact_epsilon(parts, delta):
    """The least epsilon of the sum in fifty digits."""
    law, step = exact_law(parts), mpmath.mpf(parts[0][0].step)
    masses = [(place * step, mpmath.mpf(mass.numerator) / mass.denominator) for place, mass in law.items()]

    def at(epsilon):
        return mpmath.fsum(mass * -mpmath.expm1(epsilon - loss) for loss, mass in masses if loss > epsilon)

    low, high = mpmath.mpf(0), max(loss for loss, _ in masses)
    if at(low) <= delta:
        return 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) > delta else (low, middle)
    return float(high)


@pytest.mark.parametrize("delta", [0.3, 1e-3, 1e-8, 1e-20, 1e-33])
def test_epsilon_of_a_sum_is_that_of_exact_arithmetic(delta):
    other = LossPmf(0.25, -1, np.array([0.5, 0.0, 0.375, 0.125]), 0.0)
    with mpmath.workdps(50):
        for parts in ([(SMALL, 1)], [(SMALL, 30)], [(SMALL, 12), (other, 9)]):
            exact = exact_epsilon(parts, delta)
            assert exact <= tilted_epsilon(parts, delta) <= exact * (1 + 1e-5) + 1e-9


def test_mass_at_infinity_is_taken_off_delta():
    heavy = LossPmf(SMALL.step, SMALL.first, SMALL.masses * (1 - 1e-6), 1e-6)
    assert tilted_epsilon([(heavy, 30)], 1e-5) == math.inf
    less = LossPmf(SMALL.step, SMALL.first, SMALL.masses * (1 - 1e-8), 1e-8)
    assert tilted_epsilon([(less, 30)], 1e-5) == pytest.approx(
        tilted_epsilon([(SMALL, 30)], 1e-5 - 3e-7), rel=1e-3
    )


def test_the_gaussian_is_met_from_above_down_to_the_smallest_deltas():
    for delta, ratio, rounds in product((1e-5, 1e-30, 1e-100, 1e-280), (0.05, 0.7), (1, 100)):
        exact = gaussian_epsilon(delta, math.sqrt(rounds) * ratio)
        part = SampledGaussian(PairKind.FIXED_SIZE, ratio, 1.0)
        found = composed(loss_distributions([(part, rounds)], delta, COARSE)).epsilon(delta)
        assert exact <= found <= 1.01 * exact


def test_random_points_are_finite_and_grow_as_delta_falls():
    for z, rate, rounds in islice(spread(8, (0.4, 20), (1e-4, 0.5), (1, 3000)), 25):
        part = SampledGaussian(PairKind.FIXED_SIZE, 1 / z, rate)
        found = [
            composed(loss_distributions([(part, int(rounds))], delta, COARSE)).epsilon(delta)
            for delta in (1e-4, 1e-8, 1e-12, 1e-20)
        ]
        assert all(math.isfinite(value) for value in found)
        assert found == sorted(found)


@pytest.mark.parametrize("size", [64, 1024, 8192])
def test_a_transform_errs_by_less_than_its_bound(size):
    """The bound of theory.md#numerics against a transform in long doubles, for the shapes that occur."""
    rough = np.modf(np.arange(size) * math.sqrt(2))[0]
    shapes = [rough, np.exp(-np.arange(size) / 7.0), np.eye(1, size, 3)[0] + 1e-9 * rough]
    angles = np.arange(size, dtype=np.longdouble) * (2 * np.longdouble(mpmath.nstr(mpmath.pi, 25)) / size)
    roots = np.cos(angles) - 1j * np.sin(angles)
    for shape in shapes:
        exact = np.array([np.sum(shape * roots[(k * np.arange(size)) % size]) for k in range(0, size, size // 32)])
        error = np.abs(np.fft.fft(shape)[:: size // 32] - exact)
        bound = 8 * 2.0**-53 * math.log2(size) * math.sqrt(size) * np.linalg.norm(shape)
        assert np.linalg.norm(error) <= bound


@pytest.mark.parametrize("slope", [3.7, 311.3, 70_001.9])
@pytest.mark.parametrize("mass", [1.0, 0.3, 7e-300])
def test_masses_under_a_steep_tilt_err_by_less_than_their_bound(slope, mass):
    """A loss that is sure, so often, in fifty digits: what is put in errs by as much as its exponent is large."""
    count, size, first = 100, 4, 7
    pmf = losses._LogPmf.of(LossPmf(0.1, first, np.array([mass]), 0.0), count)
    found, error, relative = losses._convolve([pmf], slope, size)
    with mpmath.workdps(50):
        exponent = mpmath.mpf(slope) * float(pmf.values[0]) + mpmath.log(mpmath.mpf(mass))
        exact = np.zeros(size)
        exact[count * first % size] = mpmath.expm1(count * (exponent - pmf.tilted(slope).log / count))
    found[count * first % size] -= 1
    assert np.linalg.norm(found - exact) <= error + relative


@pytest.mark.parametrize("width", [16_384, 20_011])
def test_a_profile_is_between_its_bounds_where_a_transform_rounds_most(width):
    """Losses of one step that are sure: rounding puts a little mass everywhere, most if the width is a prime."""
    step, count = 0.01, width - 100
    lower, upper = profile_bounds([(LossPmf(step, 1, np.array([1.0]), 0.0), count)], width)
    exact = np.maximum(-np.expm1(step * (np.arange(width + 1) - count)), 0.0)
    assert np.all(lower <= exact)
    assert np.all(exact <= upper)
    assert np.all(upper - lower < 1e-6)


def test_the_comparison_rejects_a_transform_that_is_not_tilted(monkeypatch):
    monkeypatch.setattr(losses, "_root", lambda _is_below: 1e-3)
    with mpmath.workdps(50):
        assert tilted_epsilon([(SMALL, 30)], 1e-20) > 1.1 * exact_epsilon([(SMALL, 30)], 1e-20)
