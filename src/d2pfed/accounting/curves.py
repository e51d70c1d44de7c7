"""Renyi divergence curves of the noises, as upper bounds at given orders; units are lattice steps."""

import math
from functools import lru_cache

import numpy as np

from d2pfed.accounting.conversion import FloatArray


def theta_tail(width: float) -> float:
    """Return eta(v) = 2 sum_{m >= 1} exp(-2 pi^2 v^2 m^2), which bounds how a lattice Gaussian's mass varies.

    The sum is cut after two terms and the geometric rest added, so it errs upwards.
    """
    v = max(width, 0.1)  # there it is above 2 already, and nothing is claimed from 1 on
    q = math.exp(-2 * math.pi**2 * v * v)
    return 2 * (q + q**4 / (1 - q**5))


def two_sided(tail: float) -> float:
    """Return ln((1 + eta) / (1 - eta)), infinite where eta is 1 or more."""
    return math.log1p(tail) - math.log1p(-tail) if tail < 1 else math.inf


def gaussian(orders: FloatArray, ratio: float) -> FloatArray:
    """Return alpha ratio^2 / 2: the curve of a Gaussian, or of a discrete one in any dimension at lattice shifts.

    Guarantee: exact for the continuous Gaussian and for the discrete one at integer orders, an upper bound for
    the discrete one elsewhere. Proof: theory.md#discrete-gaussian.
    """
    return orders * (ratio * ratio / 2)


@lru_cache(maxsize=256)  # a sum over all contributors, asked again for every release and every step of a search
def sum_gap(sigma: float, contributors: int) -> float:
    """Return tau', the max-divergence per coordinate between a sum of discrete Gaussians and a single one.

    Guarantee: holds in both directions for any real centres. Proof: theory.md#sums.
    """
    return math.fsum(two_sided(theta_tail(sigma * math.sqrt(k / (k + 1)))) for k in range(1, contributors))


def real_centred_sum(
    orders: FloatArray, *, sigma: float, contributors: int, shift: float, dimension: int
) -> FloatArray:
    """Return the curve of a sum of discrete Gaussians around real centres that are `shift` apart in L2.

    Guarantee: an upper bound for every real centre and every order above 1. Proof: theory.md#sums.
    """
    ratio = shift / (sigma * math.sqrt(contributors))
    one = orders / (orders - 1) * two_sided(theta_tail(sigma * math.sqrt(contributors)))
    gap = (2 * orders - 1) / (orders - 1) * sum_gap(sigma, contributors)
    return gaussian(orders, ratio) + dimension * (one + gap)


def integer_centred_sum(
    orders: FloatArray, *, sigma: float, contributors: int, shift: float, l1_shift: float, dimension: int
) -> FloatArray:
    """Return the curve of a sum of discrete Gaussians around integer centres: the least of three bounds.

    Guarantee: Kairouz, Liu and Steinke 2021, with tau = 10 sum exp(-2 pi^2 sigma^2 k / (k + 1)).
    Proof: theory.md#sums. Checked: test_accounting_curves.py against exact divergences.
    """
    k = np.arange(1, contributors, dtype=np.float64)
    tau = 10 * float(np.sum(np.exp(-2 * math.pi**2 * sigma**2 * k / (k + 1))))
    total, d = sigma * math.sqrt(contributors), dimension
    ratio = shift / total
    linear = ratio**2 + 2 * l1_shift * tau / total + tau**2 * d
    triangle = (ratio + tau * math.sqrt(d)) ** 2
    return np.minimum(orders / 2 * ratio**2 + tau * d, orders / 2 * min(linear, triangle))


def skellam(orders: FloatArray, *, variance: float, shift: float, l1_shift: float) -> FloatArray:
    """Return the curve of Skellam noise of the given total variance under integer shifts, at integer orders.

    Guarantee: Agarwal, Kairouz and Liu 2021. Proof: theory.md#skellam. Checked: test_accounting_curves.py
    against exact divergences.
    """
    square = shift * shift
    extra = ((2 * orders - 1) * square + 6 * l1_shift) / (4 * variance**2)
    return orders * square / (2 * variance) + np.minimum(extra, 3 * l1_shift / (2 * variance))
