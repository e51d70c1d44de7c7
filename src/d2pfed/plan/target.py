"""The Target: what a person wishes for before any noise is chosen."""

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

import numpy as np

from d2pfed.accounting import CAP_SHARE, RELEASED, Adjacency, Observer, Sampling, Scheme, cap_excess
from d2pfed.errors import ConfigError

LOST_TO_THE_CAP = 0.01  # of all contributions, at the default cap on participations


class Kind(StrEnum):
    """The mechanisms by name."""

    CENTERED = "centered"
    SHARED = "shared"
    DESIGNATED = "designated"
    DDGAUSS = "ddgauss"
    SKELLAM = "skellam"
    BINOMIAL = "binomial"


class Turn(StrEnum):
    """The rotations by name."""

    HADAMARD = "hadamard"
    PHASE = "phase"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A wish: how private, against whom, over which clients, for how many rounds of how long a vector."""

    dimension: int
    population: int
    cohort: int
    rounds: int
    epsilon: float = 1.0
    delta: float | None = None  # None: population^-1.1
    against: Observer = RELEASED
    mechanism: Kind = Kind.CENTERED
    scheme: Scheme = Scheme.FIXED
    adjacency: Adjacency = Adjacency.REPLACE_ONE
    dropouts: float = 0.0  # the fraction of a cohort that may be missing from the sum
    colluders: int = 0
    participations: int | None = None  # None: the least cap that costs next to nothing
    attempts_per_round: int = 3
    spare: int | None = None  # attempts beyond one a round that the run may take; None: a tenth of the rounds
    clip_norm: float = 1.0
    bits: int | None = None  # None: as few as serve
    rotation: Turn = Turn.HADAMARD

    def __post_init__(self) -> None:
        for name in ("dimension", "population", "cohort", "rounds", "attempts_per_round"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.cohort > self.population:
            raise ConfigError(f"cohort must be at most the population {self.population}, got {self.cohort}")
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ConfigError(f"epsilon must be positive and finite, got {self.epsilon}")
        if self.delta is not None and not 0 < self.delta < 1:
            raise ConfigError(f"delta must be in (0, 1), got {self.delta}")
        if not (math.isfinite(self.clip_norm) and self.clip_norm > 0):
            raise ConfigError(f"clip must be positive and finite, got {self.clip_norm}")
        if not 0 <= self.dropouts < 1:
            raise ConfigError(f"dropouts must be in [0, 1), got {self.dropouts}")
        if not 0 <= self.colluders < self.quorum:
            raise ConfigError(f"colluders must be in [0, quorum = {self.quorum}), got {self.colluders}")
        if self.bits is not None and not 1 <= self.bits <= 32:
            raise ConfigError(f"bits must be in [1, 32], got {self.bits}")
        self._check_sampling()

    def _check_sampling(self) -> None:
        if self.scheme is Scheme.ONCE and self.rounds * self.cohort > self.population:
            raise ConfigError(
                f"sampling `once` needs rounds x cohort <= population: "
                f"{self.rounds} x {self.cohort} > {self.population}; at most {self.population // self.cohort} rounds"
            )
        if self.participations is not None and not 1 <= self.participations <= self.max_attempts:
            raise ConfigError(
                f"participations must be in [1, max_attempts = {self.max_attempts}], "
                f"got {self.participations}"
            )
        if self.scheme is Scheme.ONCE and self.participations not in (None, 1):
            raise ConfigError(f"sampling `once` means one participation, got {self.participations}")
        if self.scheme is Scheme.POISSON and self.mechanism not in (Kind.SHARED, Kind.DESIGNATED):
            raise ConfigError(
                f"poisson sampling with secret sizes needs a total noise that does not depend on the cohort: "
                f"mechanism shared or designated, got {self.mechanism}"
            )

    @property
    def max_attempts(self) -> int:
        """How many attempts of the whole run may be charged."""
        if self.spare is not None:
            return self.rounds + self.spare
        tenth = -(-self.rounds // 10)
        if self.scheme is Scheme.ONCE:
            return min(self.rounds + tenth, self.population // self.cohort)
        return self.rounds + tenth

    @property
    def quorum(self) -> int:
        """Fewest survivors whose sum may be opened."""
        # The decimal as it was written: in floats 0.29 of 100 clients are 28.
        return self.cohort - math.floor(self.cohort * Fraction(str(self.dropouts)))

    @property
    def spent_delta(self) -> float:
        """The delta of the promise: below 1 / population unless it was given."""
        return self.population**-1.1 if self.delta is None else self.delta

    @property
    def cap(self) -> int:
        """How often one client may contribute: as given, or the least that costs next to nothing.

        An amplified promise pays for the chance that a cap binds, so there it is one that hardly ever does; elsewhere
        at most 1 % of all contributions are lost to it.
        """
        if self.participations is not None:
            return self.participations
        if self.scheme is Scheme.ONCE:
            return 1
        if self.scheme is Scheme.NONE:
            return self.max_attempts
        if self.against != RELEASED:
            return _least_cap(self.max_attempts, self.cohort / self.population)
        sampling = Sampling(self.scheme, self.population, self.cohort)
        allowed = CAP_SHARE / 4 * self.spent_delta / (1 + math.exp(min(self.epsilon, 700)))  # retries add draws
        caps = range(1, self.max_attempts + 1)
        return next(cap for cap in caps if cap_excess(sampling, self.max_attempts, cap) <= allowed)


def _least_cap(rounds: int, rate: float) -> int:
    """Return the least m for which a client's contributions beyond the first m are at most 1 % of all."""
    from scipy.special import bdtrc  # noqa: PLC0415 - slow to load

    kept = np.cumsum(
        bdtrc(np.arange(rounds), rounds, rate)
    )  # the mean of min(Bin(rounds, rate), m), m = 1, 2, ...
    return 1 + int(np.argmax(kept >= (1 - LOST_TO_THE_CAP) * kept[-1]))
