"""Zero-out behind a fixed-size cohort: the closed form, the worst pair, and what a smaller pair would miss."""

import math
from functools import partial

import mpmath
import numpy as np
import pytest
from mpmath import mpf

from d2pfed.accounting.amplification import Accountant, epsilon_of
from d2pfed.accounting.events import Adjacency, CohortSampling, Sampling
from d2pfed.accounting.profiles import PairKind, SampledGaussian, fixed_size_delta, fixed_size_zero_out_delta
from d2pfed.numerics.randomness import Entropy

EPSILONS = (0.0, 1e-4, 0.05, 0.4, 2.0, 7.0)
AXIS = np.linspace(-9.0, 9.0, 361)


def exact(epsilon, ratio, rate):
    """Delta of (1 - rate) N(-ratio) + rate N(ratio) over (1 - rate) N(-ratio) + rate N(0), in forty digits."""
    epsilon, ratio, rate = mpf(epsilon), mpf(ratio), mpf(rate)
    alpha = mpmath.exp(epsilon)

    def gap(z):
        first, shared, second = (mpmath.npdf(z, centre) for centre in (ratio, -ratio, mpf(0)))
        return rate * first - (alpha - 1) * (1 - rate) * shared - alpha * rate * second

    low, high = mpf(-60), mpf(2000)
    for _ in range(160):
        middle = (low + high) / 2
        low, high = (low, middle) if gap(middle) > 0 else (middle, high)
    tails = [mpmath.ncdf(centre - high) for centre in (ratio, -ratio, mpf(0))]
    return rate * tails[0] - (alpha - 1) * (1 - rate) * tails[1] - alpha * rate * tails[2]


@pytest.mark.parametrize("rate", [1e-4, 0.05, 0.6, 0.999])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.99, 1.1, 5.0])
def test_the_closed_form_equals_forty_digits(ratio, rate):
    found = fixed_size_zero_out_delta(np.array(EPSILONS), ratio, rate)
    with mpmath.workdps(40):
        for epsilon, value in zip(EPSILONS, found.tolist(), strict=True):
            wanted = exact(epsilon, ratio, rate)
            if wanted > mpf(10) ** -290:
                assert value == pytest.approx(float(wanted), rel=1e-8)


def two_dimensional(x, u, rate, ratio, *, reverse):
    """Delta of the two mixtures of a client's vector x, or zero, and another client's u, by quadrature."""
    plane = np.array(np.meshgrid(AXIS, AXIS, indexing="ij"))

    def density(point):
        return np.exp(-((plane - np.reshape(point, (2, 1, 1))) ** 2).sum(axis=0) / 2) / (2 * math.pi)

    shared = (1 - rate) * density(u)
    p, q = shared + rate * density(x), shared + rate * density((0.0, 0.0))
    p, q = (q, p) if reverse else (p, q)
    return float(np.maximum(p - ratio * q, 0).sum() * (AXIS[1] - AXIS[0]) ** 2)


def exceeded(claimed):
    """Count the random vectors, in each order, whose delta is above what is claimed for one radius of 1.5."""
    stream, above = Entropy.replay(b"vectors").stream(), 0
    for _ in range(40):
        length, own, turn, other, rate, epsilon = (stream.below_each(1 << 20, 6) / (1 << 20)).tolist()
        x, u = (
            1.5 * size**0.3 * np.array([math.cos(2 * math.pi * angle), math.sin(2 * math.pi * angle)])
            for size, angle in ((length, own), (other, turn))
        )
        rate, epsilon = 0.02 + 0.68 * rate, 1.2 * epsilon
        for at, reverse in enumerate((False, True)):
            truth = two_dimensional(x, u, rate, math.exp(epsilon), reverse=reverse)
            above += truth > float(claimed(np.array([epsilon]), rate)[at][0]) * (1 + 1e-6) + 1e-9
    return above


def both_orders(epsilon, rate):
    pair = SampledGaussian(PairKind.FIXED_SIZE_ZERO_OUT, 1.5, rate)
    return pair.forward(epsilon), pair.backward(epsilon)


def test_no_pair_of_vectors_is_above_both_orders():
    assert exceeded(both_orders) == 0


def test_the_vectors_reject_a_pair_whose_slot_is_empty_otherwise():
    def empty(epsilon, rate):
        pair = SampledGaussian(PairKind.POISSON_ZERO_OUT, 1.5, rate)
        return pair.forward(epsilon), pair.backward(epsilon)

    assert exceeded(empty) > 0


def test_the_vectors_reject_the_reversed_order_in_place_of_both():
    assert exceeded(lambda epsilon, rate: (both_orders(epsilon, rate)[1],) * 2) > 0


def test_the_worst_vectors_meet_the_claim():
    for rate, epsilon in ((0.1, 0.0), (0.1, 0.5), (0.5, 1.0)):
        forward, backward = both_orders(np.array([epsilon]), rate)
        opposed = two_dimensional((1.5, 0.0), (-1.5, 0.0), rate, math.exp(epsilon), reverse=False)
        alike = two_dimensional((1.5, 0.0), (1.5, 0.0), rate, math.exp(epsilon), reverse=True)
        assert opposed == pytest.approx(float(forward[0]), rel=2e-3, abs=1e-6)
        assert alike == pytest.approx(float(backward[0]), rel=2e-3, abs=1e-6)


def test_it_is_never_above_replace_one_and_both_orders_agree_at_zero():
    for ratio, rate in ((0.1, 0.01), (0.7, 0.1), (3.0, 0.5)):
        pair = SampledGaussian(PairKind.FIXED_SIZE_ZERO_OUT, ratio, rate)
        assert (pair.forward(np.array(EPSILONS)) <= fixed_size_delta(np.array(EPSILONS), 2 * ratio, rate)).all()
        assert pair.forward(np.zeros(1)) == pytest.approx(pair.backward(np.zeros(1)), rel=1e-9)


def least_noise(population, cohort, rounds, adjacency):
    """The least sigma in radii for epsilon 1 at a delta of 1 / (10 n)."""
    sampling, low, high = CohortSampling(Sampling.FIXED, population, cohort), 0.2, 20.0
    epsilon = partial(epsilon_of, sampling=sampling, rounds=rounds, adjacency=adjacency, points=1 << 10)
    while high > 1.0005 * low:
        middle = math.sqrt(low * high)
        too_much = epsilon(middle / adjacency.radii, delta=0.1 / population, accountant=Accountant.PLD) > 1
        low, high = (middle, high) if too_much else (low, middle)
    return high


@pytest.mark.parametrize(
    ("scale", "share"),
    [((100_000, 1_000, 100), 0.932), ((1_000, 100, 20), 0.705), ((10_000, 1_000, 50), 0.618)],
)
def test_the_least_noise_for_epsilon_one_is_smaller(scale, share):
    found, before = (least_noise(*scale, adjacency) for adjacency in (Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE))
    assert found / before == pytest.approx(share, abs=0.003)
