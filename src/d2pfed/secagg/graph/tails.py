"""Hypergeometric tails, exact and in logarithms, and how many colluders a drawn cohort can have."""

from fractions import Fraction
from functools import lru_cache
from math import comb, inf, lgamma, log, log2

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError

Logs = NDArray[np.float64]  # logarithms to base 2

_EXACT_UP_TO = 1_000  # clients of a cohort: for larger ones integers grow long

COHORT_BITS = 40  # a cohort with more colluders than counted on is this improbable, as a power of one half


def upper_tail(population: int, marked: int, drawn: int, least: int) -> Fraction:
    """Return the exact chance that at least `least` of `drawn` out of a population are marked (hypergeometric)."""
    marked = min(marked, population)
    first = max(least, 0, drawn - (population - marked))
    hits = sum(
        comb(marked, hit) * comb(population - marked, drawn - hit) for hit in range(first, min(drawn, marked) + 1)
    )
    return Fraction(hits, comb(population, drawn))


@lru_cache(maxsize=4)
def log_factorials(largest: int) -> Logs:
    """Return log2 of 0!, 1!, ... up to `largest`!; sums of a few of them are right to 2^-30 for 100,000."""
    return np.array([lgamma(number + 1) / log(2) for number in range(largest + 1)])


def log_choose(factorials: Logs, items: NDArray[np.int64], taken: NDArray[np.int64] | int) -> Logs:
    """Return log2 of binomial coefficients, minus infinity where nothing can be chosen."""
    left = items - taken
    possible = (left >= 0) & (items >= 0)
    logs = factorials[np.maximum(items, 0)] - factorials[taken] - factorials[np.maximum(left, 0)]
    return np.where(possible, logs, -np.inf)


def log_upper_tails(factorials: Logs, population: int, marked: NDArray[np.int64], drawn: int, least: int) -> Logs:
    """Return log2 of `upper_tail` for many numbers of marked ones."""
    marked = np.minimum(marked, population)[:, None]
    hits = np.arange(least, drawn + 1)
    terms = log_choose(factorials, marked, hits) + log_choose(factorials, population - marked, drawn - hits)
    return np.minimum(log_sum(terms) - log_choose(factorials, np.array(population), drawn), 0.0)


def log_sum(terms: Logs) -> Logs:
    """Return log2 of the sum of 2^terms along the last axis."""
    top = np.max(terms, axis=-1, initial=-np.inf)
    shift = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        logs: Logs = shift + np.log2(np.sum(np.exp2(terms - shift[..., None]), axis=-1))
    return logs


@lru_cache
def colluders_in_cohort(population: int, colluding: int, cohort: int, draws: int) -> int:
    """Return the least number of colluders that no cohort exceeds, whichever of its draws a server uses.

    Guarantee: among `draws` cohorts, drawn uniformly from a population of which `colluding` collude, one with more
    is there with chance at most 2^-40 (exact, by integers, up to cohorts of 1,000). Without verified draws (0) the
    server picks the cohort, and all of it but one client may collude.
    Proof: docs/protocol.md#draws. Checked: test_graph.py::test_colluders_in_a_cohort_are_those_of_the_table.
    """
    if not 0 <= colluding <= population or not 1 <= cohort <= population or draws < 0:
        raise ConfigError(
            f"colluders in [0, {population}], a cohort in [1, {population}] and at least 0 draws are needed, "
            f"got {colluding}, {cohort} and {draws}"
        )
    if draws == 0:
        return min(colluding, cohort - 1)
    if cohort > _EXACT_UP_TO:
        return _colluders_by_logs(population, colluding, cohort, draws)
    honest, hit = population - colluding, min(cohort, colluding)
    allowed = comb(population, cohort) >> COHORT_BITS  # rounded down: the safe side
    # The ways to draw exactly `hit` colluders, from the most downwards, each from the one before.
    ways = comb(colluding, hit) * comb(honest, cohort - hit)
    above = 0
    while (above := above + ways * draws) <= allowed:
        ways = ways * hit * (honest - cohort + hit) // ((colluding - hit + 1) * (cohort - hit + 1))
        hit -= 1
    return hit


def _colluders_by_logs(population: int, colluding: int, cohort: int, draws: int) -> int:
    """Return the same where integers would be millions of bits long: the answer, or at worst one more."""
    honest = population - colluding
    everything = _log_ways(population, cohort)
    allowed = -COHORT_BITS - log2(draws) - 2.0**-7  # lgamma of 10^9 is right to 2^-17, and there are nine of them
    above, least = -inf, max(0, cohort - honest)
    for hit in range(min(cohort, colluding), least, -1):
        term = _log_ways(colluding, hit) + _log_ways(honest, cohort - hit) - everything
        largest = max(above, term)
        above = largest + log2(2.0 ** (above - largest) + 2.0 ** (term - largest))
        if above > allowed:
            return hit
    return least


def _log_ways(items: int, taken: int) -> float:
    return (lgamma(items + 1) - lgamma(taken + 1) - lgamma(items - taken + 1)) / log(2)
