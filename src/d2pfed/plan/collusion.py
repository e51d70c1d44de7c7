"""How many of a cohort may collude, if so large a share of the population does."""

import math
from fractions import Fraction

from d2pfed.accounting import CohortSampling, Sampling
from d2pfed.errors import ConfigError
from d2pfed.secagg.pairwise.graph import SIGNED_UP_TO
from d2pfed.secagg.pairwise.neighbors import colluders_in_cohort

VERIFIED_DRAWS = 4 << 12  # cohorts that a server can choose among: four rosters of 2^12 draws each


def colluding_clients(share: float, population: int) -> int:
    """Return how many of the population collude: the share as it is written, rounded up."""
    return math.ceil(population * Fraction(str(share)))


def colluders_within(share: float, sampling: CohortSampling, draws: int) -> int:
    """Return the most colluders of a cohort, but for a chance of 2^-40 over all cohorts that a server could choose.

    With `draws` verifiable draws a server chooses among so many cohorts, under `once` among so many partitions. Where
    nothing is drawn verifiably (0 draws, or a known cohort) it can put all colluders into one.
    """
    colluding = colluding_clients(share, sampling.population)
    if colluding == 0:
        return 0
    if sampling.cohort_size > SIGNED_UP_TO:
        raise ConfigError(
            f"colluders are counted in cohorts of at most {SIGNED_UP_TO}, got {sampling.cohort_size}"
        )
    if draws == 0 or sampling.method is Sampling.NONE:
        return (
            colluding if sampling.cohort_size == sampling.population else min(colluding, sampling.cohort_size - 1)
        )
    blocks = sampling.population // sampling.cohort_size if sampling.method is Sampling.ONCE else 1
    return colluders_in_cohort(sampling.population, colluding, sampling.cohort_size, draws * blocks)


def require_honest_majority(cohort: int, quorum: int, colluders: int) -> None:
    """Refuse sizes with which two quorums may have nobody honest in common: 2 quorum > cohort + colluders.

    A server could then have one set of survivors signed by one quorum and another set by another, and learn the
    difference of two sums. Checked: test_policy.py::test_attack_two_quorums_that_share_only_colluders.
    """
    if not 2 * quorum > cohort + colluders:
        raise ConfigError(
            f"2 quorum > cohort + colluders must hold, got quorum {quorum}, cohort {cohort}, colluders {colluders}"
        )
