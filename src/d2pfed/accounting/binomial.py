"""Accounting of cpSGD's binomial noise: its theorem, its amplification, its advanced composition."""

import math
from dataclasses import dataclass

from d2pfed.errors import ConfigError

# The constants b_p, c_p, d_p of the theorem for fair coins; c_p is 7 sqrt(2) / 4, which its authors round up.
_B, _C, _D = 1 / 3, 5 / 2, 2 / 3


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How far apart two neighbours' integer sums can be, in lattice steps."""

    l1: float
    l2: float
    linf: float


def binomial_epsilon(trials: int, sensitivity: Sensitivity, dimension: int, delta: float) -> float:
    """Return epsilon of one release with `trials` fair coins per coordinate; infinite outside the theorem.

    Guarantee: Theorem 1 of Agarwal et al. 2018. Proof: theory.md#binomial.
    Checked: test_accounting_rdp.py against exact binomials.
    """
    variance = trials / 4
    if variance < max(23 * math.log(10 * dimension / delta), 2 * sensitivity.linf):
        return math.inf
    log_ten, log_gauss = math.log(10 / delta), math.log(1.25 / delta)
    main = sensitivity.l2 * math.sqrt(2 * log_gauss / variance)
    skew = (sensitivity.l2 * _C * math.sqrt(log_ten) + sensitivity.l1 * _B) / (variance * (1 - delta / 10))
    largest = sensitivity.linf * (2 / 3 * log_gauss + _D * math.log(20 * dimension / delta) * log_ten) / variance
    return main + skew + largest


def amplified_epsilon(epsilon: float, rate: float) -> float:
    """Return epsilon of an (epsilon, delta) release behind a fixed-size cohort; its delta becomes rate * delta."""
    return math.log1p(rate * math.expm1(epsilon)) if epsilon < 700 else epsilon + math.log(rate)


def advanced_composition_epsilon(epsilon: float, rounds: int, slack: float) -> float:
    """Return epsilon of `rounds` releases by advanced composition, which adds `slack` to their deltas."""
    if epsilon > 300 or slack <= 0:
        return math.inf
    return math.sqrt(2 * rounds * math.log(1 / slack)) * epsilon + rounds * epsilon * math.expm1(epsilon)


def cpsgd_epsilon(
    *,
    trials: int,
    levels: int,
    dimension: int,
    rate: float,
    rounds: int,
    delta: float,
    delta_per_round: float,
    clip_over_bound: float = 1.0,
) -> float:
    """Return cpSGD's epsilon after `rounds`, exactly as its authors and the paper account for it.

    They charge three deltas per round and, of those, one round too few; the difference is in the fifth digit.
    """
    if not 0 < delta_per_round < delta < 1:
        raise ConfigError(f"delta_per_round must be in (0, delta = {delta}), got {delta_per_round}")
    # Stochastic rounding to `levels` in [-bound, bound]: each sensitivity holds with probability 1 - delta_per_round.
    spread = math.sqrt(dimension) * clip_over_bound * (levels - 1)
    wobble = math.sqrt(2 * spread * math.log(2 / delta_per_round))
    l1 = spread + wobble + 4 / 3 * math.log(2 / delta_per_round)
    sensitivity = Sensitivity(l1, clip_over_bound * (levels - 1) + math.sqrt(l1 + wobble), levels + 1)
    one = amplified_epsilon(binomial_epsilon(trials, sensitivity, dimension, delta_per_round), rate)
    return advanced_composition_epsilon(one, rounds, delta - (rounds - 1) * 3 * rate * delta_per_round)
