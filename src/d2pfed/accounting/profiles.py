"""Profiles delta(epsilon), epsilon >= 0, of one Gaussian release behind a sampled cohort, in either order."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from d2pfed.accounting.conversion import FloatArray, gaussian_delta

Profile = Callable[[FloatArray], FloatArray]


class Law(StrEnum):
    """Which pair of laws dominates one release."""

    KNOWN_SIZE = "known-size"  # a fixed-size cohort; with rate 1 the plain Gaussian
    HIDDEN_ZERO_OUT = "hidden-zero-out"  # secret coins, the client's vector against zero
    HIDDEN_REPLACE = "hidden-replace"  # secret coins, the client's vector against another


@dataclass(frozen=True, slots=True)
class SampledGaussian:
    """One Gaussian release behind a sampled cohort.

    `ratio` is shift over sigma: of two radii for `KNOWN_SIZE` (unless `rate` is 1), of one radius for the others.
    """

    law: Law
    ratio: float
    rate: float
    slack: float = 0.0

    @property
    def forward(self) -> Profile:
        """The profile of the first world against the second."""
        profile = replaced_delta if self.law is Law.HIDDEN_REPLACE else known_size_delta
        return lambda epsilon: profile(epsilon, self.ratio, self.rate)

    @property
    def backward(self) -> Profile | None:
        """The profile of the second world against the first; None if it is the same."""
        if self.law is not Law.HIDDEN_ZERO_OUT:
            return None
        return lambda epsilon: added_delta(epsilon, self.ratio, self.rate)


def known_size_delta(epsilon: FloatArray, ratio: float, rate: float) -> FloatArray:
    """Return the profile of a Gaussian behind a fixed-size cohort; also of a vector against zero behind a coin.

    Guarantee: dominates every pair of replace-one or zero-out neighbours when `ratio` is that of two radii.
    Proof: theory.md#fixed-size. Checked: test_accounting_oracle.py by exhaustive adaptive optimisation.
    """
    base = epsilon - math.log(rate) + np.log(-np.expm1(-epsilon) + rate * np.exp(-epsilon))
    return rate * gaussian_delta(base, ratio)


def added_delta(epsilon: FloatArray, ratio: float, rate: float) -> FloatArray:
    """Return the profile of zero against the client's vector behind a secret coin: zero from -ln(1 - rate) on.

    Guarantee: the mirror image of `known_size_delta` at one radius. Proof: theory.md#poisson.
    """
    left = np.maximum(rate + np.expm1(-epsilon), 0.0)
    with np.errstate(divide="ignore"):
        base = math.log(rate) - np.log(left)
    inside = left > 0
    return np.where(inside, np.exp(epsilon) * left * gaussian_delta(np.where(inside, base, 0.0), ratio), 0.0)


def replaced_delta(epsilon: FloatArray, ratio: float, rate: float) -> FloatArray:
    """Return the profile of the client's vector against its opposite behind a secret coin.

    Guarantee: dominates every pair of vectors of that norm. Proof: theory.md#poisson.
    Checked: test_accounting_curves.py against quadrature.
    """
    from scipy.special import log_ndtr  # noqa: PLC0415 - slow to load

    # The loss is increasing in the output z; where it passes epsilon, exp(ratio z) solves a quadratic equation.
    growth = np.expm1(epsilon)
    half = (1 - rate) * growth / (2 * rate)
    log_root = np.log(half + np.sqrt(half * half + np.exp(epsilon - ratio * ratio))) + ratio * ratio / 2
    z = log_root / ratio
    own = log_ndtr(ratio - z)
    with np.errstate(divide="ignore"):
        other = np.log(growth * (1 - rate) / rate) + log_ndtr(-z)
    opposite = epsilon + log_ndtr(-ratio - z)
    left = np.maximum(-np.expm1(np.logaddexp(other, opposite) - own), 0.0)
    return np.asarray(rate * np.exp(own) * left, dtype=np.float64)
