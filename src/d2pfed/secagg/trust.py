"""Whom the clients of a cohort trust: what the server told the others, and how many of them may help it."""

from enum import Enum
from fractions import Fraction
from functools import lru_cache
from math import comb, inf, lgamma, log, log2

from d2pfed.errors import ConfigError

COHORT_BITS = 40  # a cohort with more colluders than counted on is this improbable, as a power of one half
_EXACT_UP_TO = 1_000  # clients of a cohort: for larger ones integers grow long


class Consistency(Enum):
    """How a client knows that all others were told of the same survivors."""

    ASSUMED = "assumed"  # the server is curious but keeps to the protocol
    SIGNED = "signed"  # enrolled clients sign their keys and what they were told


@lru_cache
def colluders_in_cohort(population: int, colluding: int, cohort: int, draws: int) -> int:
    """Return the least number of colluders that no cohort exceeds, whichever of its draws a server uses.

    Guarantee: among `draws` cohorts, drawn uniformly from a population of which `colluding` collude, one with more
    is there with chance at most 2^-40 (exact, by integers, up to cohorts of 1,000). Without verified draws (0) the
    server picks the cohort, and all of it but one client may collude.
    Proof: docs/protocol.md#draws. Checked: test_trust.py::test_colluders_in_a_cohort_are_those_of_the_table.
    """
    if not 0 <= colluding <= population or not 1 <= cohort <= population or draws < 0:
        raise ConfigError(
            f"colluders in [0, {population}], a cohort in [1, {population}] and at least 0 draws are needed, "
            f"got {colluding}, {cohort} and {draws}"
        )
    if draws == 0:
        return min(colluding, cohort - 1)
    if cohort <= _EXACT_UP_TO:
        return most_marked(population, colluding, cohort, Fraction(1, draws << COHORT_BITS))
    # Where integers would be millions of bits long, by logarithms: the answer, or at worst one more.
    honest, everything = population - colluding, _log_ways(population, cohort)
    allowed = -COHORT_BITS - log2(draws) - 2.0**-7  # lgamma of 10^9 is right to 2^-17, and there are nine of them
    above, least = -inf, max(0, cohort - honest)
    for hit in range(min(cohort, colluding), least, -1):
        term = _log_ways(colluding, hit) + _log_ways(honest, cohort - hit) - everything
        largest = max(above, term)
        above = largest + log2(2.0 ** (above - largest) + 2.0 ** (term - largest))
        if above > allowed:
            return hit
    return least


def most_marked(population: int, marked: int, drawn: int, chance: Fraction) -> int:
    """Return the least number that the marked ones of a uniform draw exceed with at most this chance.

    The hypergeometric law in exact integers, summed from its upper end.
    """
    honest, hit = population - marked, min(drawn, marked)
    allowed = comb(population, drawn) * chance.numerator // chance.denominator  # rounded down: the safe side
    ways = comb(marked, hit) * comb(honest, drawn - hit)
    above = ways
    while above <= allowed and hit > 0:
        ways = ways * hit * (honest - drawn + hit) // ((marked - hit + 1) * (drawn - hit + 1))
        hit -= 1
        above += ways
    return hit


def _log_ways(items: int, taken: int) -> float:
    return (lgamma(items + 1) - lgamma(taken + 1) - lgamma(items - taken + 1)) / log(2)
