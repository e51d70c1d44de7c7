"""The same bounds by other libraries: equal where the bound is the same, never below."""

import math
import warnings
from itertools import islice

import numpy as np
import pytest
from dp_accounting import (
    GaussianDpEvent,
    NeighboringRelation,
    SampledWithoutReplacementDpEvent,
)
from dp_accounting.pld import privacy_loss_distribution as peer_losses
from dp_accounting.rdp import RdpAccountant
from scipy.stats import qmc

from d2pfed.accounting.amplification import Accountant, epsilon_of
from d2pfed.accounting.composition import composed
from d2pfed.accounting.events import Adjacency, CohortSampling, Sampling
from d2pfed.accounting.losses import COARSE, loss_distributions
from d2pfed.accounting.profiles import PairKind, SampledGaussian, gaussian_epsilon
from d2pfed.accounting.rdp import (
    gaussian_moments,
    gaussian_rdp,
    mironov_conversion,
    tight_conversion,
    without_replacement_rdp,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of its own syntax when first imported
    from autodp import rdp_acct, rdp_bank

ORDERS = [*range(2, 22), 24, 28, 32, 40, 48]


def spread(seed, *ranges):
    """Endless points that fill the box of log-scaled ranges evenly; another seed, another part of the sequence."""
    sequence = qmc.Halton(len(ranges), scramble=False)
    sequence.fast_forward(1000 * seed + 1)
    while True:
        for point in sequence.random(64):
            yield [
                math.exp(math.log(low) + u * math.log(high / low))
                for u, (low, high) in zip(point, ranges, strict=True)
            ]


def draws(seed, count):
    """Noise multipliers and rates."""
    return islice(spread(seed, (0.3, 8), (1e-4, 0.5)), count)


def ours_without_replacement(z, rate, top):
    own = gaussian_rdp(np.arange(top + 1.0), 1 / z)
    return without_replacement_rdp(own, rate, gaussian_moments(1 / z, top))


def peer_curve(event, relation):
    accountant = RdpAccountant(ORDERS, relation)
    accountant.compose(event)
    return np.array(accountant._rdp)


def test_renyi_curves_equal_those_of_dp_accounting_at_ten_thousand_points():
    points = 0
    for z, rate in draws(1, 180):
        population = 1_000_000
        cohort = max(1, round(rate * population))
        event = SampledWithoutReplacementDpEvent(population, cohort, GaussianDpEvent(z))
        theirs = peer_curve(event, NeighboringRelation.REPLACE_ONE)
        ours = ours_without_replacement(z, cohort / population, ORDERS[-1])[ORDERS]
        limit = np.array(ORDERS) / (2 * z * z)  # the unsampled curve, which caps ours
        assert ours == pytest.approx(np.minimum(theirs, limit), rel=1e-6)
        points += len(ORDERS)
    for z, _ in draws(3, 220):
        theirs = peer_curve(GaussianDpEvent(z), NeighboringRelation.REPLACE_ONE)
        assert gaussian_rdp(np.array(ORDERS, dtype=float), 1 / z) == pytest.approx(theirs, rel=1e-12)
        points += len(ORDERS)
    assert points >= 10_000


def test_the_tight_conversion_equals_that_of_dp_accounting():
    for z, rate in draws(4, 100):
        accountant = RdpAccountant(ORDERS, NeighboringRelation.REPLACE_ONE)
        accountant.compose(
            SampledWithoutReplacementDpEvent(10_000, max(1, int(rate * 10_000)), GaussianDpEvent(z))
        )
        for delta in (1e-3, 1e-6, 1e-9):
            orders, curve = np.array(ORDERS, dtype=float), np.array(accountant._rdp)
            ours = tight_conversion(orders, curve, delta).min()
            assert ours == pytest.approx(accountant.get_epsilon(delta), rel=1e-9)
            assert ours <= mironov_conversion(orders, curve, delta).min()


def peer_epsilon(z, rate, rounds, delta, relation):
    """Epsilon by the peer on a grid of 200 steps per expected epsilon or finer."""
    pair = peer_losses.from_gaussian_mechanism(
        z, sampling_prob=rate, value_discretization_interval=1e-3, neighboring_relation=relation
    )
    return pair.self_compose(rounds).get_epsilon_for_delta(delta)


def ours_by_losses(law, z, rate, rounds, delta):
    return composed(loss_distributions([(SampledGaussian(law, 1 / z, rate), rounds)], delta, COARSE // 2)).epsilon(
        delta
    )


LAWS = (PairKind.POISSON_ZERO_OUT, PairKind.POISSON_REPLACE_ONE, PairKind.FIXED_SIZE)


def test_loss_distributions_agree_with_dp_accounting_at_two_hundred_points():
    points = 0
    for z, rate, rounds, delta in islice(spread(5, (0.5, 4), (1e-3, 0.5), (1, 200), (1e-8, 1e-3)), 67):
        case = (z, rate, int(rounds), delta)
        zero_out, replace_one, known = (ours_by_losses(law, *case) for law in LAWS)
        for ours, relation in (
            (zero_out, NeighboringRelation.ADD_OR_REMOVE_ONE),
            (replace_one, NeighboringRelation.REPLACE_ONE),
        ):
            # Both err upwards, each by its own grid.
            assert ours == pytest.approx(peer_epsilon(*case, relation), rel=0.02, abs=2e-3 * math.sqrt(rounds))
        assert known >= zero_out * (1 - 5e-3) - 1e-6
        points += len(LAWS)
    assert points >= 200


def test_a_rate_of_one_is_the_plain_gaussian():
    for z, rounds, delta in islice(spread(6, (0.5, 20), (1, 300), (1e-9, 1e-3)), 60):
        exact = gaussian_epsilon(delta, math.sqrt(int(rounds)) / z)
        ours = ours_by_losses(PairKind.FIXED_SIZE, z, 1.0, int(rounds), delta)
        assert exact <= ours <= 1.01 * exact + 1e-6


def test_the_peer_comparison_rejects_a_ratio_that_is_off_by_five_per_cent():
    z, rate, rounds, delta = 0.8, 0.01, 50, 1e-5
    theirs = peer_epsilon(z, rate, rounds, delta, NeighboringRelation.ADD_OR_REMOVE_ONE)
    ours = ours_by_losses(PairKind.POISSON_ZERO_OUT, 1.05 * z, rate, rounds, delta)
    assert ours != pytest.approx(theirs, rel=0.02, abs=2e-3)


def test_renyi_curves_equal_those_of_autodp_at_a_thousand_points():
    points, top = 0, 28
    for z, rate in draws(7, 40):
        peer = rdp_acct.anaRDPacct(m=top)
        peer.compose_subsampled_mechanism(
            lambda order, z=z: rdp_bank.RDP_gaussian({"sigma": z}, order), rate, improved_bound_flag=True
        )
        theirs = peer.RDPs_int[1:top]
        ours = ours_without_replacement(z, rate, top)[2:]
        unsampled = np.arange(2, top + 1) / (2 * z * z)  # caps ours
        assert ours == pytest.approx(np.minimum(theirs, unsampled), rel=1e-6)
        points += len(theirs)
    assert points >= 1000


def test_the_replace_one_sensitivity_is_counted_once():
    """The peer's two accountants read the same event as shifts of two and of one: ours are told which."""
    sampling = CohortSampling(Sampling.NONE, 10, 10)
    for accountant, most in ((Accountant.PLD, 1.0), (Accountant.RDP, 1.1)):
        replace_one, zero_out = (
            epsilon_of(
                sigma / radii,
                sampling,
                1,
                adjacency=adjacency,
                delta=1e-5,
                accountant=accountant,
            )
            for sigma, radii, adjacency in ((1.0, 2, Adjacency.REPLACE_ONE), (1.0, 1, Adjacency.ZERO_OUT))
        )
        assert 9.997256 <= replace_one * (1 + 1e-9) <= most * 9.997257 * 1.001
        assert 4.377178 <= zero_out * (1 + 1e-6) <= most * 4.377179 * 1.001
