"""How large the numbers of a plan may be, what names, and how many of a cohort may collude.

Bounds are checked before any work is done on a number.
"""

import math
import re
from fractions import Fraction

from d2pfed.accounting import CohortSampling, Sampling
from d2pfed.errors import ConfigError
from d2pfed.secagg.lattice import parameters as lattice
from d2pfed.secagg.trust import colluders_in_cohort

MOST_ROUNDS = 100_000  # more take minutes to account for
MOST_ATTEMPTS = 2 * MOST_ROUNDS  # of a whole run
MOST_ATTEMPTS_PER_ROUND = 1_000
MOST_POPULATION = 10**9
MOST_COHORT = 1_000_000  # where the server is believed
MOST_SIGNED = lattice.MOST_COHORT  # clients of a cohort under a server that may lie
LEAST_DELTA = 1e-50  # smaller ones are beyond what the accountants resolve, and what anyone could notice
VERIFIED_DEPTH = 12  # of a roster's tree of draws
VERIFIED_DRAWS = 4 << VERIFIED_DEPTH  # cohorts that a server can choose among: those of four rosters
LONGEST_NAME = 100  # of a run, an evaluation, a plot: each becomes the name of a file or a directory


def is_plain(name: str) -> bool:
    """Whether a name is safe as that of a file: it leads nowhere else, and hides nothing."""
    return len(name) <= LONGEST_NAME and re.fullmatch(r"\w[\w.-]*", name) is not None


def check_name(whose: str, name: str) -> None:
    """Refuse a name that is to become that of a directory, and is not plain."""
    if not is_plain(name):
        raise ConfigError(
            f"{whose} name must be letters, digits and underscores, after the first also dashes and dots, at most "
            f"{LONGEST_NAME} of all, got {name[: 2 * LONGEST_NAME]!r}"
        )


def colluding_clients(share: float, population: int) -> int:
    """Return how many of the population collude: the share as it is written, rounded up."""
    return math.ceil(population * Fraction(str(share)))


def colluders_within(share: float, sampling: CohortSampling, draws: int) -> int:
    """Return the most colluders of a cohort, except with a chance of 2^-40 over all cohorts that a server could choose.

    With `draws` verifiable draws a server chooses among as many cohorts, under `once` among as many partitions. Where
    nothing is drawn verifiably (0 draws, or a known cohort) it can put all colluders into one.
    """
    colluding = colluding_clients(share, sampling.population)
    if colluding == 0:
        return 0
    if sampling.cohort_size > MOST_SIGNED:
        raise ConfigError(f"colluders are counted in cohorts of at most {MOST_SIGNED}, got {sampling.cohort_size}")
    choices = cohorts_to_choose(sampling, draws)
    if choices == 0:
        return (
            colluding if sampling.cohort_size == sampling.population else min(colluding, sampling.cohort_size - 1)
        )
    return colluders_in_cohort(sampling.population, colluding, sampling.cohort_size, choices)


def cohorts_to_choose(sampling: CohortSampling, draws: int) -> int:
    """Return among how many cohorts a server can choose; 0 where it names them, as nothing is drawn verifiably."""
    if sampling.method is Sampling.NONE:
        return 0
    return draws * (sampling.population // sampling.cohort_size if sampling.method is Sampling.ONCE else 1)


def require_honest_majority(cohort: int, quorum: int, colluders: int) -> None:
    """Refuse sizes with which two quorums may have nobody honest in common: 2 quorum > cohort + colluders.

    A server could then have one set of survivors signed by one quorum and another set by another, and learn the
    difference of two sums. Checked: test_policy.py::test_attack_two_quorums_that_share_only_colluders.
    """
    if not 2 * quorum > cohort + colluders:
        raise ConfigError(
            f"2 quorum > cohort + colluders must hold, got quorum {quorum}, cohort {cohort}, colluders {colluders}"
        )
