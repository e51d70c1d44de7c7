"""Renyi curves behind a fixed-size cohort: the bounds of Wang, Balle and Kasiviswanathan."""

import math
from decimal import Context, Decimal

import numpy as np

from d2pfed.accounting.conversion import FloatArray

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


def without_replacement(renyi: FloatArray, rate: float, moments: FloatArray | None = None) -> FloatArray:
    """Return the curve at orders 0..A of a release behind a fixed-size cohort, from its own curve at orders 0..A.

    Entries 0 and 1 are not used and come back as 0. With exact even `moments` this is Theorem 27, without them
    Theorem 9, which needs no more than an upper bound of the curve.

    Guarantee: replace-one neighbours, cohort drawn afresh, known sizes. Proof: theory.md#renyi-sampling.
    """
    top = len(renyi) - 1
    j = np.arange(top + 1)
    log_terms = math.log(2) + (j - 1) * renyi
    log_terms[2] = min(log_terms[2], math.log(4) + renyi[2] + math.log(-math.expm1(-renyi[2])))
    if moments is not None:
        padded = np.append(moments, np.inf)
        exact = math.log(4) + (padded[2 * (j // 2)] + padded[2 * ((j + 1) // 2)]) / 2
        log_terms[3:] = np.minimum(log_terms, exact)[3:]
    log_terms[:2] = -np.inf
    weights = log_terms + j * math.log(rate)
    return np.minimum(_expand(weights), np.where(j < 2, 0.0, renyi))


def secret_coins(ratio: float, rate: float, top: int) -> FloatArray:
    """Return the curve at orders 0..top of a Gaussian behind secret independent coins, the client against zero.

    Guarantee: both directions, hidden sizes. Proof: theory.md#renyi-sampling.
    """
    from scipy.special import gammaln, logsumexp  # noqa: PLC0415 - slow to load

    j = np.arange(top + 1, dtype=np.float64)
    weights = j * (j - 1) * (ratio * ratio / 2) + j * math.log(rate)
    alpha = j[:, None]
    choose = gammaln(alpha + 1) - gammaln(j + 1) - gammaln(np.maximum(alpha - j, 0) + 1)
    terms = choose + weights + np.maximum(alpha - j, 0) * math.log1p(-rate)
    total = logsumexp(np.where(j <= alpha, terms, -np.inf), axis=1)
    return np.where(j >= 2, np.maximum(total, 0.0) / np.maximum(j - 1, 1), 0.0)


def _expand(weights: FloatArray) -> FloatArray:
    """Return ln(1 + sum_j C(alpha, j) exp(weights[j])) / (alpha - 1) for every alpha."""
    from scipy.special import gammaln, logsumexp  # noqa: PLC0415 - slow to load

    j = np.arange(len(weights))
    alpha = j[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        choose = gammaln(alpha + 1) - gammaln(j + 1) - gammaln(np.maximum(alpha - j, 0) + 1)
        total = logsumexp(np.where(j <= alpha, choose + weights, -np.inf), axis=1)
        return np.where(j >= 2, np.logaddexp(0.0, total) / np.maximum(j - 1, 1), 0.0)
