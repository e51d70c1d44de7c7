"""How long a secret is, how large a committee, and how many of its members open what: from a plan to numbers.

committee   L    clients that hold shares of everybody's secret
threshold   t    members whose shares together say nothing
packed      r    numbers of a secret in one polynomial; any r + t members open a sum
certificate Q    members that must sign one set of survivors before any of them opens it
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil

from d2pfed.errors import ConfigError
from d2pfed.secagg.trust import COHORT_BITS, most_marked

SECRET_DEVIATION = 16  # of a secret's numbers: wider than the noise after a hint, whatever the noise
LEAST_WIDTH = 2  # deviation of a client's noise, in steps, in every coordinate
LEAST_COHORT, MOST_COHORT = 64, 20_000
MOST_DIMENSION, MOST_BITS = 1 << 25, 20

SECURITY_BITS = 136  # of the table below, against the best of the attacks that the estimator knows
_LEAST_BITS = 8  # below it the secrets are those of 8 bits
# Numbers of a secret by the bits of the ring from 8 on, for noise of at least this many steps: 140 bits against the
# primal and 136 against the dual attack (core-SVP, classical), for the noise that a hint leaves. Checked:
# test_lattice_estimate.py.
_SECRETS = {
    2: (448, 448, 512, 576, 640, 640, 704, 768, 832, 832, 896, 960, 1024),
    4: (384, 384, 448, 448, 512, 576, 640, 640, 704, 768, 832, 832, 896),
    8: (384, 384, 384, 384, 448, 512, 512, 576, 640, 704, 704, 768, 832),
    16: (384, 384, 384, 384, 384, 384, 448, 512, 576, 576, 640, 704, 768),
}
LEAST_SECRET = min(map(min, _SECRETS.values()))
_COMMITTEES = (64, 96, 128, 192, 256, 384, 512)
_LEAST_PACKED, _LEAST_PACKED_WHOLE = 48, 16
_ABSENCE_BITS = 20  # a committee with more members missing is this improbable, as a power of one half


@dataclass(frozen=True, slots=True)
class Committee:
    """How a secret is cut into shares: for L members, t of whom may collude, opened by r + t, certified by Q."""

    size: int
    threshold: int
    packed: int
    certificate: int
    colluders: int

    @property
    def openers(self) -> int:
        """Return how many members open a sum."""
        return self.packed + self.threshold

    @property
    def vouchers(self) -> int:
        """Return how many members must vouch for all members' keys: one of them is honest."""
        return self.threshold + 1

    @property
    def least(self) -> int:
        """Return how many members an attempt needs: to certify and open, with two to spare who may lie or vanish."""
        return max(self.certificate, self.openers + 2)


def secret_length(bits: int, width: Fraction) -> int:
    """Return how many numbers a secret has, in a ring of `bits` bits beside noise of this deviation, in steps."""
    if not 1 <= bits <= MOST_BITS:
        raise ConfigError(f"the lattice protocol adds in rings of 1 to {MOST_BITS} bits, got {bits}")
    if width < LEAST_WIDTH:
        raise ConfigError(
            f"the lattice protocol needs noise of at least {LEAST_WIDTH} steps in every coordinate, got "
            f"{float(width):.4g}"
        )
    widest = max(least for least in _SECRETS if least <= width)
    return _SECRETS[widest][max(bits, _LEAST_BITS) - _LEAST_BITS]


def seated(size: int, colluders: int, secret: int, cohort: int, missing: int) -> Committee | None:
    """Return the committee of this size with this many colluders; None if too few may be there to open anything.

    All of it follows from these numbers, so a client that knows them recomputes it.
    """
    absent = most_marked(cohort, missing, size, Fraction(1, 1 << _ABSENCE_BITS))
    threshold = max(colluders, ceil(Fraction(size, 8)))
    packed, certificate = min(secret, size - absent - threshold - 2), (size + colluders) // 2 + 1
    least = _LEAST_PACKED if size < cohort else _LEAST_PACKED_WHOLE
    if packed < least or certificate > size - absent:
        return None
    return Committee(size, threshold, packed, certificate, colluders)


def committee_sizes(cohort: int) -> tuple[int, ...]:
    """Return how many members a committee of this cohort may have: fixed sizes below it, or all of a small one."""
    whole = (cohort,) if cohort <= _COMMITTEES[-1] else ()
    return (*(size for size in _COMMITTEES if size < cohort), *whole)


@lru_cache
def colluders_in_committee(population: int, colluding: int, size: int, draws: int) -> int:
    """Return the most colluders of a committee, whichever of its draws a server uses; 0 draws: it names the members.

    Guarantee: one with more is there with chance at most 2^-40 over all draws (exact integers). Members and others
    are counted apart, so there are twice as many committees. Checked: test_lattice_parameters.py.
    """
    chance = Fraction(1, (2 * draws) << COHORT_BITS) if draws else Fraction(0)
    return most_marked(population, colluding, size, chance)


@lru_cache
def choose_committee(
    cohort: int, dropouts: Fraction, secret: int, *, population: int, colluding: int, draws: int
) -> Committee:
    """Return the least committee that is there, certifies and opens in spite of dropouts and colluders.

    Args:
        cohort: clients of an attempt.
        dropouts: the part of them that may be missing.
        secret: numbers of a client's secret.
        population: enrolled clients, of whom `colluding` may help the server.
        draws: cohorts that a server can choose among, 0 if it names the cohort itself.
    """
    if not 1 <= cohort <= min(MOST_COHORT, population):
        raise ConfigError(
            f"the lattice protocol takes cohorts of at most {min(MOST_COHORT, population)} clients, got {cohort}"
        )
    missing = ceil(dropouts * cohort)
    for size in committee_sizes(cohort):
        colluders = colluders_in_committee(population, colluding, size, draws)
        committee = seated(size, colluders, secret, cohort, missing)
        if committee is not None:
            return committee
    raise ConfigError(
        f"no committee of a cohort of {cohort} opens a sum with {missing} clients missing and {colluding} of "
        f"{population} colluding"
    )
