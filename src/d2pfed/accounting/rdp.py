"""Renyi differential privacy: curves of the noises, curves behind sampled cohorts, orders, conversion to epsilon.

Curves are upper bounds at given orders; lengths are in lattice steps.
"""

import math
from collections.abc import Callable
from decimal import Context, Decimal
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from d2pfed.errors import ConfigError

FloatArray = npt.NDArray[np.float64]


def check_delta(delta: float) -> None:
    """Raise unless delta is a probability that a guarantee may state."""
    if not 0 < delta < 1:
        raise ConfigError(f"delta must be in (0, 1), got {delta}")


def mironov_conversion(orders: FloatArray, renyi: FloatArray, delta: float) -> FloatArray:
    """Return epsilon by Mironov's conversion at each order; never below the tight one. Proof: theory.md#conversions."""
    return renyi + math.log(1 / delta) / (orders - 1)


def tight_conversion(orders: FloatArray, renyi: FloatArray, delta: float) -> FloatArray:
    """Return epsilon at each order by the conversion of Canonne, Kamath and Steinke, or 0 by total variation.

    Guarantee: (alpha, renyi)-Renyi privacy implies (epsilon, delta)-privacy. Proof: theory.md#conversions.
    """
    epsilon = renyi + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return np.where(-np.expm1(-renyi) <= delta * delta, 0.0, np.maximum(epsilon, 0.0))


Conversion = Callable[[FloatArray, FloatArray, float], FloatArray]


_DENSE_LIMIT = 4096
_SPARSE_LIMIT = 1 << 40


def dense_orders(top: int) -> FloatArray:
    """Return the integer orders 2..top."""
    return np.arange(2, top + 1, dtype=np.float64)


def sparse_orders(top: int) -> FloatArray:
    """Return about 24 integer orders per octave, from 2 to top."""
    count = 24 * top.bit_length()
    return np.unique(np.rint(np.geomspace(2, top, count)))


def real_orders(top: int) -> FloatArray:
    """Return real orders from just above 1 to about top, their distance from 1 growing by one per cent a step."""
    return 1 + np.geomspace(1e-5, top, 70 * (17 + top.bit_length()))


def least_epsilon(
    curve: Callable[[FloatArray], FloatArray], grid: Callable[[int], FloatArray], delta: float, convert: Conversion
) -> tuple[float, float]:
    """Return the least epsilon over a grid of orders that grows until the best is inside it, and that order."""
    top, limit = 64, _DENSE_LIMIT if grid is dense_orders else _SPARSE_LIMIT
    while True:
        orders = grid(top)
        epsilon = convert(orders, curve(orders), delta)
        best = int(np.argmin(epsilon))
        if best < len(orders) - 1 or top >= limit:
            return float(epsilon[best]), float(orders[best])
        top *= 4


def theta_tail(width: float) -> float:
    """Return eta(v) = 2 sum_{m >= 1} exp(-2 pi^2 v^2 m^2): two terms and the geometric rest, so it errs upwards."""
    v = max(width, 0.1)  # there it is above 2 already, and nothing is claimed from 1 on
    q = math.exp(-2 * math.pi**2 * v * v)
    return 2 * (q + q**4 / (1 - q**5))


def two_sided(tail: float) -> float:
    """Return ln((1 + eta) / (1 - eta)), infinite where eta is 1 or more."""
    return math.log1p(tail) - math.log1p(-tail) if tail < 1 else math.inf


def gaussian_rdp(orders: FloatArray, ratio: float) -> FloatArray:
    """Return alpha ratio^2 / 2: the curve of a Gaussian, or of a discrete one in any dimension at lattice shifts.

    Guarantee: exact for the continuous Gaussian and for the discrete one at integer orders, an upper bound for
    the discrete one elsewhere. Proof: theory.md#discrete-gaussian.
    """
    return orders * (ratio * ratio / 2)


@lru_cache(maxsize=256)  # a sum over all contributors, asked again for every release and every step of a search
def sum_gap(sigma: float, contributors: int) -> float:
    """Return tau', the max-divergence per coordinate of a sum of discrete Gaussians from one. Proof: theory.md#sums."""
    return math.fsum(two_sided(theta_tail(sigma * math.sqrt(k / (k + 1)))) for k in range(1, contributors))


# Above this order the table of exact moments costs more than it can gain; the other branch of the bound remains.
_HIGHEST_EXACT_MOMENT = 400


def gaussian_moments(ratio: float, top: int) -> FloatArray:
    """Return ln E_q[(p/q - 1)^l] for even l <= `top`, p and q Gaussians `ratio` apart; infinity where left out.

    The alternating sum cancels almost wholly, so it is done in integers wide enough to leave 60 correct bits.
    A moment that the other branch of the bound beats for certain is left infinite, which errs upwards.
    """
    square = ratio * ratio
    found = np.full(top + 1, np.inf)
    last = min(top, _HIGHEST_EXACT_MOMENT)
    while last > 2 and last * math.exp(-(last - 1) * square) < 0.1:
        last -= 1
    cancelled = last + last * last * square / (2 * math.log(2)) + last / 2 * max(0.0, -math.log2(square))
    bits = 80 + math.ceil(cancelled)
    context = Context(prec=10 + math.ceil(bits * math.log10(2)))
    base = int(context.multiply(context.exp(Decimal(square)), context.power(2, bits)))
    one = 1 << bits
    table, power = [one, one], base
    for _ in range(2, last + 1):
        table.append(table[-1] * power >> bits)
        power = power * base >> bits
    differences = np.array(table, dtype=object)
    for order in range(1, last + 1):
        differences = differences[1:] - differences[:-1]
        if order % 2 == 0:
            found[order] = math.log(int(differences[0])) - bits * math.log(2) + 1e-14
    return found


def without_replacement_rdp(renyi: FloatArray, rate: float, moments: FloatArray | None = None) -> FloatArray:
    """Return the curve at orders 0..A of a release behind a fixed-size cohort, from its own curve at orders 0..A.

    Entries 0 and 1 are not used and come back as 0. With exact even `moments` this is Theorem 27, without them
    Theorem 9, which needs no more than an upper bound of the curve.

    Guarantee: replace-one neighbours, cohort drawn afresh, known sizes. Proof: theory.md#renyi-sampling.
    """
    from scipy.special import gammaln, logsumexp  # noqa: PLC0415 - slow to load

    j = np.arange(len(renyi))
    log_terms = math.log(2) + (j - 1) * renyi
    log_terms[2] = min(log_terms[2], math.log(4) + renyi[2] + math.log(-math.expm1(-renyi[2])))
    if moments is not None:
        padded = np.append(moments, np.inf)
        exact = math.log(4) + (padded[2 * (j // 2)] + padded[2 * ((j + 1) // 2)]) / 2
        log_terms[3:] = np.minimum(log_terms, exact)[3:]
    log_terms[:2] = -np.inf
    weights = log_terms + j * math.log(rate)
    alpha = j[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        choose = gammaln(alpha + 1) - gammaln(j + 1) - gammaln(np.maximum(alpha - j, 0) + 1)
        total = logsumexp(np.where(j <= alpha, choose + weights, -np.inf), axis=1)
        # ln(1 + sum_j C(alpha, j) exp(weights[j])) / (alpha - 1) for every alpha
        amplified = np.where(j >= 2, np.logaddexp(0.0, total) / np.maximum(j - 1, 1), 0.0)
    return np.minimum(amplified, np.where(j < 2, 0.0, renyi))
