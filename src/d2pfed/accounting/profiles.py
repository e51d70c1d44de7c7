"""Profiles delta(epsilon), epsilon >= 0, of one Gaussian release behind a sampled cohort, in either order."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from d2pfed.accounting.conversion import (
    NARROW,
    FloatArray,
    gaussian_delta,
    mills_drop,
    relative_guard,
    scaled_density,
)

Profile = Callable[[FloatArray], FloatArray]

_FAR = 30.0  # logarithm from which on a hyperbolic sine is half an exponential in double precision


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
        """The profile of the first world against the second, rounded up."""
        profile = replaced_delta if self.law is Law.HIDDEN_REPLACE else known_size_delta
        guard = 1 + relative_guard(self.ratio)
        return lambda epsilon: guard * profile(epsilon, self.ratio, self.rate)

    @property
    def backward(self) -> Profile | None:
        """The profile of the second world against the first, rounded up; None if it is the same."""
        if self.law is not Law.HIDDEN_ZERO_OUT:
            return None
        guard = 1 + relative_guard(self.ratio)
        return lambda epsilon: guard * added_delta(epsilon, self.ratio, self.rate)


def known_size_delta(epsilon: FloatArray, ratio: float, rate: float) -> FloatArray:
    """Return the profile of a Gaussian behind a fixed-size cohort; also of a vector against zero behind a coin.

    Guarantee: dominates every pair of replace-one or zero-out neighbours when `ratio` is that of two radii.
    Proof: theory.md#fixed-size. Checked: test_accounting_oracle.py by exhaustive adaptive optimisation.
    """
    # Where epsilon is small so is the base, and must be so to relative accuracy.
    small = np.log1p(np.expm1(np.minimum(epsilon, 1.0)) / rate)
    large = epsilon - math.log(rate) + np.log1p((rate - 1) * np.exp(-np.maximum(epsilon, 1.0)))
    return rate * gaussian_delta(np.where(epsilon < 1, small, large), ratio)


def added_delta(epsilon: FloatArray, ratio: float, rate: float) -> FloatArray:
    """Return the profile of zero against the client's vector behind a secret coin: zero from -ln(1 - rate) on.

    Guarantee: the mirror image of `known_size_delta` at one radius. Proof: theory.md#poisson.
    """
    kept = np.exp(-epsilon)
    left = np.where(
        kept > 0.5, rate + np.expm1(-epsilon), kept - (1 - rate)
    )  # 1 - rate is exact where it is needed
    # It falls to zero within rounding of the last epsilon, so what is left of the rate is rounded up.
    left = np.maximum(left + 2.0**-50 * np.minimum(rate, kept), 0.0)
    inside = left > 0
    base = -np.log(np.where(inside, np.minimum(left / rate, 1.0), 1.0))
    return np.where(inside, np.exp(epsilon) * left * gaussian_delta(base, ratio), 0.0)


def replaced_delta(epsilon: FloatArray, ratio: float, rate: float) -> FloatArray:
    """Return the profile of the client's vector against its opposite behind a secret coin.

    Guarantee: dominates every pair of vectors of that norm. Proof: theory.md#poisson.
    Checked: test_accounting_curves.py against quadrature.
    """
    from scipy.special import log_ndtr  # noqa: PLC0415 - slow to load

    # The loss is increasing in the output z; where it passes epsilon, exp(ratio z - epsilon / 2) = exp(w) with
    # sinh(w) = sinh(epsilon / 2) exp(ratio^2 / 2) (1 - rate) / rate.
    with np.errstate(divide="ignore"):
        others = np.log((1 - rate) / rate) + epsilon + np.log(-np.expm1(-epsilon))
        log_sinh = others - epsilon / 2 - math.log(2) + ratio * ratio / 2
    far = log_sinh > _FAR
    w = np.where(far, log_sinh + math.log(2), np.arcsinh(np.exp(np.where(far, 0.0, log_sinh))))
    z = (epsilon / 2 + w) / ratio
    if ratio <= NARROW:
        # At z the densities are equal, and tails are densities times Mills ratios.
        near = scaled_density(z, others) * mills_drop(z - ratio, ratio)
        far_side = scaled_density(z + ratio, epsilon) * mills_drop(z - ratio, 2 * ratio)
        return rate * (near + far_side)
    own = log_ndtr(ratio - z)
    other = others + log_ndtr(-z)
    opposite = epsilon + log_ndtr(-ratio - z)
    left = np.maximum(-np.expm1(np.logaddexp(other, opposite) - own), 0.0)
    return np.asarray(rate * np.exp(own) * left, dtype=np.float64)
