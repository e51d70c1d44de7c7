"""The PrivacyTarget: what a person wishes for before any noise is chosen."""

import math
from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache

import numpy as np

from d2pfed.accounting import CAP_SHARE, RELEASED, Adjacency, CohortSampling, Observer, Sampling, cap_excess
from d2pfed.errors import ConfigError, shown
from d2pfed.numerics.ring import MAX_BITS
from d2pfed.numerics.rotation import MAX_DIMENSION
from d2pfed.plan.bounds import (
    LEAST_DELTA,
    MOST_ATTEMPTS_PER_ROUND,
    MOST_COHORT,
    MOST_POPULATION,
    MOST_ROUNDS,
    check_range,
)
from d2pfed.plan.collusion import VERIFIED_DRAWS, colluders_within
from d2pfed.secagg.graph import Consistency

LOST_TO_THE_CAP = 0.01  # of all contributions, at the default cap on participations
SPARE = Fraction(1, 10)  # attempts that may be charged beyond one a round, as a share of the rounds


class MechanismName(StrEnum):
    """The mechanisms by name."""

    CENTERED = "centered"
    SHARED = "shared"
    DESIGNATED = "designated"
    DDGAUSS = "ddgauss"
    SKELLAM = "skellam"
    BINOMIAL = "binomial"


HELD_BY_ONE = (MechanismName.SHARED, MechanismName.DESIGNATED)  # where one client can know all of the noise


class RotationName(StrEnum):
    """The rotations by name."""

    HADAMARD = "hadamard"
    PHASE = "phase"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyTarget:
    """A wish: how private, against whom, over which clients, for how many rounds of how long a vector."""

    dimension: int
    population: int
    cohort_size: int
    rounds: int
    epsilon: float = 1.0
    delta: float | None = None  # None: population^-1.1
    against: Observer = RELEASED
    mechanism: MechanismName = MechanismName.CENTERED
    sampling: Sampling = Sampling.FIXED
    adjacency: Adjacency = Adjacency.REPLACE_ONE
    dropouts: float = 0.0  # the fraction of a cohort that may be missing from the sum
    colluders: float = 0.0  # the share of the population that may tell the server all it knows
    draws: int = VERIFIED_DRAWS  # cohorts that the server can choose among, as clients verify; 0: they do not
    consistency: Consistency = Consistency.ASSUMED  # a simulation; a deployment says signed
    max_participations: int | None = None  # None: the least cap that costs next to nothing
    attempts_per_round: int = 3
    spare: int | None = None  # attempts beyond one a round that may be charged; None: a tenth of the rounds
    clip: float = 1.0
    bits: int | None = None  # None: as few as serve
    rotation: RotationName = RotationName.HADAMARD

    def __post_init__(self) -> None:
        check_range("dimension", self.dimension, 1, MAX_DIMENSION)
        check_range("population", self.population, 1, MOST_POPULATION)
        check_range("cohort_size", self.cohort_size, 1, MOST_COHORT)
        if self.cohort_size > self.population:
            raise ConfigError(
                f"cohort_size must be at most the population {self.population}, got {self.cohort_size}"
            )
        check_range("rounds", self.rounds, 1, MOST_ROUNDS)
        check_range("attempts_per_round", self.attempts_per_round, 1, MOST_ATTEMPTS_PER_ROUND)
        check_range("draws", self.draws, 0, 1 << 32)
        if self.spare is not None:
            check_range("spare", self.spare, 0, MOST_ROUNDS)
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ConfigError(f"epsilon must be positive and finite, got {self.epsilon}")
        if self.delta is not None and not LEAST_DELTA <= self.delta < 1:
            raise ConfigError(f"delta must be in [{LEAST_DELTA:g}, 1), got {self.delta}")
        if not (math.isfinite(self.clip) and self.clip > 0):
            raise ConfigError(f"clip must be positive and finite, got {self.clip}")
        for name in ("dropouts", "colluders"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.bits is not None:
            check_range("bits", self.bits, 1, MAX_BITS)
        self._check_sampling()

    def _check_sampling(self) -> None:
        blocks = self.rounds + (self.spare or 0)
        if self.sampling is Sampling.ONCE and blocks * self.cohort_size > self.population:
            raise ConfigError(
                f"sampling `once` needs (rounds + spare) x cohort_size <= population: "
                f"{blocks} x {self.cohort_size} > {self.population}; at most "
                f"{self.population // self.cohort_size} rounds"
            )
        if self.max_participations is not None and not 1 <= self.max_participations <= self.max_attempts:
            raise ConfigError(
                f"max_participations must be in [1, rounds + spare = {self.max_attempts}], "
                f"got {shown(self.max_participations)}"
            )
        if self.sampling is Sampling.ONCE and self.max_participations not in (None, 1):
            raise ConfigError(f"sampling `once` means one participation, got {self.max_participations}")
        if self.sampling is Sampling.POISSON and self.mechanism not in HELD_BY_ONE:
            raise ConfigError(
                f"poisson sampling with secret sizes needs a total noise that does not depend on the cohort: "
                f"mechanism shared or designated, got {self.mechanism}"
            )

    @property
    def cohort_sampling(self) -> CohortSampling:
        """How cohorts are drawn."""
        return CohortSampling(self.sampling, self.population, self.cohort_size)

    @property
    def max_attempts(self) -> int:
        """How many attempts the whole run may be charged for: one a round and the spare ones.

        A crash between charge and result costs one. Under `once` an attempt uses up a block of the population, so
        there are no more than it holds.
        """
        if self.spare is not None:
            return self.rounds + self.spare
        spare = math.ceil(SPARE * self.rounds)
        if self.sampling is Sampling.ONCE:
            spare = min(spare, self.population // self.cohort_size - self.rounds)
        return self.rounds + spare

    @property
    def cohort_colluders(self) -> int:
        """The most colluders of one cohort, but for a chance of 2^-40 over all draws."""
        return colluders_within(self.colluders, self.cohort_sampling, self.draws)

    @property
    def quorum(self) -> int:
        """Fewest survivors whose sum may be opened."""
        # The decimal as it was written: in floats 0.29 of 100 clients are 28.
        return self.cohort_size - math.floor(self.cohort_size * Fraction(str(self.dropouts)))

    @property
    def effective_delta(self) -> float:
        """The delta of the promise: below 1 / population unless it was given."""
        return self.population**-1.1 if self.delta is None else self.delta

    @property
    def effective_max_participations(self) -> int:
        """How often one client may contribute: as given, or the least that costs next to nothing.

        An amplified promise pays for the chance that a cap binds, so there it is one that hardly ever does; elsewhere
        at most 1 % of all contributions are lost to it.
        """
        return self.max_participations or _default_cap(self)


@lru_cache(maxsize=64)  # a search for the least noise asks again and again
def _default_cap(target: PrivacyTarget) -> int:
    if target.sampling is Sampling.ONCE:
        return 1
    attempts = target.max_attempts
    if (
        target.sampling is Sampling.NONE or target.cohort_size == target.population
    ):  # everyone is asked in every round
        return attempts
    if target.against != RELEASED or target.sampling is Sampling.POISSON:  # secret coins pay nothing for a cap
        return _least_cap(attempts, target.cohort_size / target.population)
    allowed = CAP_SHARE * target.effective_delta
    # The excess falls with the cap.
    return 1 + bisect_left(
        range(1, attempts + 1), -allowed, key=lambda cap: -cap_excess(target.cohort_sampling, attempts, cap)
    )


def _least_cap(draws: int, rate: float) -> int:
    """Return the least m for which a client's contributions beyond the first m are at most 1 % of all."""
    from scipy.special import bdtrc  # noqa: PLC0415 - slow to load

    # The mean of min(Bin(draws, rate), m), m = 1, 2, ...
    kept = np.cumsum(bdtrc(np.arange(draws), draws, rate))
    return 1 + int(np.argmax(kept >= (1 - LOST_TO_THE_CAP) * kept[-1]))
