"""Epsilon of a plain Gaussian under a named accountant: what a table of numbers needs."""

import math
from enum import StrEnum

import numpy as np

from d2pfed.accounting.amplification import Law, SampledGaussian
from d2pfed.accounting.composition import Additive, composed
from d2pfed.accounting.events import Adjacency, CohortSampling, Sampling
from d2pfed.accounting.pld import COARSE, FINE, gaussian_epsilon, loss_costs
from d2pfed.accounting.rdp import (
    FloatArray,
    check_delta,
    dense,
    gaussian,
    gaussian_moments,
    least,
    mironov,
    real,
    secret_coins,
    tight,
    without_replacement,
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

    `noise_multiplier` is sigma over the sensitivity of the stated adjacency: two radii for replace-one, one for
    zero-out. Behind a fixed-size cohort the distance is two radii whatever the adjacency.

    Guarantee: errs upwards. Proof: theory.md#fixed-size, theory.md#renyi-sampling.
    Checked: test_accounting_golden.py, test_accounting_peers.py.
    """
    check_delta(delta)
    if not (noise_multiplier > 0 and math.isfinite(noise_multiplier)):
        raise ConfigError(f"noise_multiplier must be positive and finite, got {noise_multiplier}")
    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {rounds}")
    part = _law(noise_multiplier, sampling, adjacency)
    count = 1 if sampling.method is Sampling.ONCE else rounds
    if accountant is Accountant.PLD:
        return _by_losses(part, count, delta, grid)
    if accountant is Accountant.RDP and part.rate == 1:
        return least(lambda orders: _compose(gaussian(orders, part.ratio), count), real, delta, tight)[0]
    if accountant is not Accountant.RDP and part.law is not Law.KNOWN_SIZE:
        raise ConfigError(f"accountant {accountant} needs a fixed-size cohort, got {sampling.method}")
    convert = mironov if accountant is Accountant.WBK_MIRONOV else tight
    return least(lambda orders: _compose(_sampled_curve(part, orders), count), dense, delta, convert)[0]


def _law(noise_multiplier: float, sampling: CohortSampling, adjacency: Adjacency) -> SampledGaussian:
    rate = sampling.cohort_size / sampling.population
    one_radius = 1 / (noise_multiplier * adjacency.radii)
    if sampling.method is Sampling.FIXED and rate < 1:
        return SampledGaussian(Law.KNOWN_SIZE, 2 * one_radius, rate)
    if sampling.method is Sampling.POISSON and rate < 1:
        law = Law.HIDDEN_ZERO_OUT if adjacency is Adjacency.ZERO_OUT else Law.HIDDEN_REPLACE
        return SampledGaussian(law, one_radius, rate)
    return SampledGaussian(Law.KNOWN_SIZE, 1 / noise_multiplier, 1.0)


def _by_losses(part: SampledGaussian, count: int, delta: float, grid: Grid) -> float:
    if part.rate == 1:
        return gaussian_epsilon(delta, math.sqrt(_compose(np.array([part.ratio**2]), count)[0]))
    return composed(loss_costs([(part, count)], delta, grid.points)).epsilon(delta)


def _sampled_curve(part: SampledGaussian, orders: FloatArray) -> FloatArray:
    top = int(orders[-1])
    if part.law is Law.HIDDEN_REPLACE:
        raise ConfigError("accountant rdp has no bound for secret cohort sizes under replace-one: use pld")
    if part.law is Law.HIDDEN_ZERO_OUT:
        return secret_coins(part.ratio, part.rate, top)[2:]
    own = gaussian(np.arange(top + 1, dtype=np.float64), part.ratio)
    return (
        own[2:] if part.rate == 1 else without_replacement(own, part.rate, gaussian_moments(part.ratio, top))[2:]
    )


def _compose(values: FloatArray, count: int) -> FloatArray:
    return np.array(composed([(Additive(tuple(values.tolist())), count)]).values)
