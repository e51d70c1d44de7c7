"""Epsilon of Gaussian releases under a named accountant, for tables and comparisons."""

import math
from enum import StrEnum

import numpy as np

from d2pfed.accounting.amplification import PairKind, SampledGaussian
from d2pfed.accounting.composition import AdditiveCost, composed
from d2pfed.accounting.events import Adjacency, CohortSampling, Sampling
from d2pfed.accounting.gaussian import gaussian_epsilon
from d2pfed.accounting.pld import COARSE, FINE, loss_distributions
from d2pfed.accounting.rdp import (
    FloatArray,
    check_delta,
    dense_orders,
    gaussian_moments,
    gaussian_rdp,
    least_epsilon,
    mironov_conversion,
    real_orders,
    tight_conversion,
    without_replacement_rdp,
)
from d2pfed.errors import ConfigError


class Accountant(StrEnum):
    """How epsilon is computed."""

    WBK_MIRONOV = (
        "wbk-mironov"  # Theorem 27 of Wang, Balle, Kasiviswanathan with Mironov's conversion: the paper's
    )
    WBK = "wbk"  # the same with the tight conversion
    RDP = "rdp"  # Renyi curves with the tight conversion, whatever the sampling
    PLD = "pld"  # privacy-loss distributions; exact where nothing is sampled


class Grid(StrEnum):
    """How finely privacy losses are resolved; both err upwards."""

    COARSE = "coarse"
    FINE = "fine"

    @property
    def points(self) -> int:
        """The number of positive grid points of one release."""
        return COARSE if self is Grid.COARSE else FINE


def epsilon_of(
    noise_multiplier: float,
    sampling: CohortSampling,
    rounds: int,
    *,
    adjacency: Adjacency,
    delta: float,
    accountant: Accountant,
    grid: Grid = Grid.FINE,
) -> float:
    """Return epsilon against an observer of the models after `rounds` Gaussian releases.

    Args:
        noise_multiplier: sigma over the sensitivity of the stated adjacency: two radii for replace-one, one for
            zero-out. Behind a fixed-size cohort the distance is two radii whatever the adjacency.
        sampling: how the cohort of each round is sampled.
        rounds: the number of releases.
        adjacency: the neighbouring relation.
        delta: the probability that the guarantee may fail, over all rounds together.
        accountant: how epsilon is computed.
        grid: how finely privacy losses are resolved, for `PLD`.

    Guarantee: errs upwards. Proof: theory.md#fixed-size, theory.md#renyi-sampling.
    Checked: test_accounting_golden.py, test_accounting_peers.py.
    """
    check_delta(delta)
    if not (noise_multiplier > 0 and math.isfinite(noise_multiplier)):
        raise ConfigError(f"noise_multiplier must be positive and finite, got {noise_multiplier}")
    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {rounds}")
    pair = _pair(noise_multiplier, sampling, adjacency)
    count = 1 if sampling.method is Sampling.ONCE else rounds
    if accountant is Accountant.PLD:
        return _by_losses(pair, count, delta, grid)
    if accountant is Accountant.RDP and pair.rate == 1:
        return least_epsilon(
            lambda orders: _compose(gaussian_rdp(orders, pair.ratio), count), real_orders, delta, tight_conversion
        )[0]
    convert = mironov_conversion if accountant is Accountant.WBK_MIRONOV else tight_conversion
    return least_epsilon(
        lambda orders: _compose(_sampled_curve(pair, orders), count), dense_orders, delta, convert
    )[0]


def _pair(noise_multiplier: float, sampling: CohortSampling, adjacency: Adjacency) -> SampledGaussian:
    rate = sampling.cohort_size / sampling.population
    one_radius = 1 / (noise_multiplier * adjacency.radii)
    if sampling.method is Sampling.FIXED and rate < 1:
        return SampledGaussian(PairKind.FIXED_SIZE, 2 * one_radius, rate)
    return SampledGaussian(PairKind.FIXED_SIZE, 1 / noise_multiplier, 1.0)


def _by_losses(pair: SampledGaussian, count: int, delta: float, grid: Grid) -> float:
    if pair.rate == 1:
        return gaussian_epsilon(delta, math.sqrt(_compose(np.array([pair.ratio**2]), count)[0]))
    return composed(loss_distributions([(pair, count)], delta, grid.points)).epsilon(delta)


def _sampled_curve(pair: SampledGaussian, orders: FloatArray) -> FloatArray:
    top = int(orders[-1])
    own = gaussian_rdp(np.arange(top + 1, dtype=np.float64), pair.ratio)
    return (
        own[2:]
        if pair.rate == 1
        else without_replacement_rdp(own, pair.rate, gaussian_moments(pair.ratio, top))[2:]
    )


def _compose(values: FloatArray, count: int) -> FloatArray:
    return np.array(composed([(AdditiveCost(tuple(values.tolist())), count)]).values)
