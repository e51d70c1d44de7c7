"""Three ways to turn charges into epsilon; which one applies depends on the noise alone."""

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial

import numpy as np

from d2pfed.accounting.binomial import amplified_epsilon
from d2pfed.accounting.charge import (
    Charge,
    approximate,
    binomial_charge,
    gaussian_charge,
    has_gaussian,
    renyi_charge,
)
from d2pfed.accounting.conversion import FloatArray, gaussian_epsilon, tight
from d2pfed.accounting.cost import Additive
from d2pfed.accounting.orders import dense, least
from d2pfed.accounting.release import BinomialSum, Noise
from d2pfed.accounting.sampling import without_replacement
from d2pfed.errors import ConfigError

# From a charge to the same charge behind a fixed-size cohort drawn at a rate.
Amplify = Callable[[Additive, float], Additive]

# From a way to charge one noise, and a way to amplify a charge, to the whole cost.
Total = Callable[[Charge, Amplify], Additive]

# Shares of delta that binomial releases may use up together; the rest pays for advanced composition.
_BINOMIAL_SHARES = (0.9, 0.5, 0.1, 0.01, 0.001)


class Method(StrEnum):
    """How costs are counted."""

    GAUSSIAN = "gaussian"
    RENYI = "rdp"
    BINOMIAL = "binomial"


def method_for(noises: Sequence[Noise], releases: int) -> Method:
    """Return the tightest method that all of the noises allow; raise where there is none."""
    kinds = set(noises)
    binomial = {isinstance(noise, BinomialSum) for noise in kinds}
    if len(binomial) > 1:
        raise ConfigError("binomial noise composes by its own rule and cannot be mixed with other noise")
    if binomial == {True}:
        return Method.BINOMIAL
    return Method.GAUSSIAN if all(has_gaussian(noise, releases) for noise in kinds) else Method.RENYI


def gaussian_total_epsilon(total: Total, delta: float, releases: int) -> float:
    """Return the exact epsilon of unsampled Gaussians, the slack of their surrogates included.

    Guarantee: delta(epsilon) <= exp(slack) delta_Gauss(epsilon - 2 slack). Proof: theory.md#surrogate.
    """
    squared, slack = total(partial(gaussian_charge, releases=releases), lambda charge, _rate: charge).values
    left = delta * math.exp(-slack)
    if left == 0 or not math.isfinite(squared):
        return math.inf
    return gaussian_epsilon(left, math.sqrt(squared)) + 2 * slack


def renyi_total_epsilon(total: Total, delta: float, grid: Callable[[int], FloatArray] = dense) -> float:
    """Return epsilon by Renyi curves at the best integer order.

    Guarantee: (epsilon, delta)-privacy of the whole. Proof: theory.md#composition, theory.md#conversions.
    """

    def curve(orders: FloatArray) -> FloatArray:
        return np.array(total(partial(renyi_charge, orders=orders), _amplified_curve).values)

    return least(curve, grid, delta, tight)[0]


def binomial_total_epsilon(total: Total, delta: float, releases: int) -> float:
    """Return epsilon of (epsilon, delta) releases by advanced or plain composition, whichever is less.

    Guarantee: (epsilon, delta)-privacy of the whole. Proof: theory.md#binomial.
    """
    return min(_compose_binomial(total, delta, delta * share / releases) for share in _BINOMIAL_SHARES)


def _compose_binomial(total: Total, delta: float, delta_each: float) -> float:
    plain, used, square, growth = total(partial(binomial_charge, delta=delta_each), _amplified_pair).values
    if used >= delta:
        return math.inf
    return min(plain, math.sqrt(2 * square * math.log(1 / (delta - used))) + growth)


def _amplified_curve(charge: Additive, rate: float) -> Additive:
    padded = np.concatenate([[0.0, 0.0], charge.values])
    return Additive(tuple(without_replacement(padded, rate)[2:].tolist()))


def _amplified_pair(charge: Additive, rate: float) -> Additive:
    epsilon, delta = charge.values[:2]
    return approximate(amplified_epsilon(epsilon, rate), rate * delta)
