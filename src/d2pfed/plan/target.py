"""The PrivacyTarget: what is asked for, before any noise is chosen."""

import math
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from typing import cast

import numpy as np

from d2pfed.accounting import (
    ALONE,
    CAP_SHARE,
    CLIENT,
    RATE_STEPS,
    RELEASED,
    SERVER,
    Adjacency,
    BatchSampling,
    CohortSampling,
    Observer,
    Sampling,
    Unit,
    cap_excess,
    check_unit,
    colluding,
)
from d2pfed.errors import ConfigError, shown
from d2pfed.fields import PRIVACY, TRAINING, about, check_types, documented
from d2pfed.noise.mechanisms import MechanismName
from d2pfed.numerics.ring import MAX_BITS
from d2pfed.numerics.rotation import MAX_DIMENSION
from d2pfed.plan.bounds import (
    LEAST_DELTA,
    MOST_ATTEMPTS_PER_ROUND,
    MOST_COHORT,
    MOST_POPULATION,
    MOST_ROUNDS,
    VERIFIED_DRAWS,
    check_range,
    colluders_within,
)
from d2pfed.secagg.pairwise.graph import Consistency

LOST_TO_THE_CAP = 0.01  # of all contributions, at the default cap on participations
SPARE = Fraction(1, 10)  # attempts that may be charged beyond one per round, as a share of the rounds


_LATER = cast("int", None)  # of a field that is filled in before anything is computed from it
_BY_UNIT = cast("Adjacency", None)  # of a field whose default depends on the unit
USUAL_BATCH = 256  # records drawn in a round, in expectation, where no rate is given

_LIMITS = {
    "dimension": MAX_DIMENSION,
    "population": MOST_POPULATION,
    "cohort_size": MOST_COHORT,
    "rounds": MOST_ROUNDS,
}


_LEAST_START = 1e-12  # of an adaptive clip; the most is its inverse


class RotationName(StrEnum):
    """The rotations by name."""

    HADAMARD = "hadamard"
    PHASE = "phase"


def observer_named(name: str) -> Observer:
    """Return the observer of that name."""
    known = {str(each): each for each in (RELEASED, SERVER, CLIENT, ALONE)}
    if name in known:
        return known[name]
    count = name.removeprefix("colluding(").removesuffix(")")
    if name == f"colluding({count})" and count.isdecimal() and count.isascii() and len(count) <= 9:
        return colluding(int(count))
    raise ConfigError(f"against must be released, server, client, alone or colluding(c), got {name[:80]!r}")


def initial_clip_named(name: str) -> float:
    """Return the clip that an adaptive one starts from: 1 for `auto`, c for `auto(c)`."""
    if name == "auto":
        return 1.0
    with suppress(ValueError):
        start = float(name.removeprefix("auto(").removesuffix(")"))
        if name.startswith("auto(") and name.endswith(")") and _LEAST_START <= start <= 1 / _LEAST_START:
            return start
    raise ConfigError(
        f"clip must be a positive number, auto, or auto(c) with c in [{_LEAST_START:g}, {1 / _LEAST_START:g}], "
        f"got {name[:80]!r}"
    )


def parse_clip(text: str) -> float | str:
    """Return a clip as it is written: a number, or the name of an adaptive one."""
    try:
        return float(text)
    except ValueError:
        initial_clip_named(text)
        return text


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyTarget:
    """A privacy target: how private, against whom, over which clients, for how many rounds of how long a vector.

    Enumerations may be given by name: `PrivacyTarget(..., mechanism="skellam", against="server")`. The fields that
    `fit` fills in are None until they are known; `calibrate` refuses a target that lacks one.
    """

    dimension: int = field(
        default=_LATER, metadata=about("Number of parameters that are trained.", TRAINING, filled_in="`fit`")
    )
    population: int = field(
        default=_LATER, metadata=about("Number of clients in the population.", PRIVACY, filled_in="`fit`")
    )
    cohort_size: int = field(
        default=_LATER, metadata=about("Number of clients asked in each round.", PRIVACY, filled_in="`fit`")
    )
    rounds: int = field(default=_LATER, metadata=about("Number of rounds.", TRAINING, filled_in="`fit`"))
    epsilon: float = field(
        default=1.0, metadata=about("Bound on what the observer learns about one client.", PRIVACY)
    )
    delta: float | None = field(
        default=None,
        metadata=about("Failure probability of the guarantee.", PRIVACY, unset="population^-1.1; records^-1.1"),
    )
    against: Observer = field(
        default=RELEASED,
        metadata=about(
            "Observer that epsilon holds against: released, server, client, alone or colluding(c).",
            PRIVACY,
            parse=observer_named,
        ),
    )
    mechanism: MechanismName = field(
        default=MechanismName.CENTERED, metadata=about("How noise enters the sum.", PRIVACY)
    )
    sampling: Sampling = field(
        default=Sampling.FIXED,
        metadata=about("How cohorts are drawn; with the unit record every silo is asked: none.", PRIVACY),
    )
    adjacency: Adjacency = field(
        default=_BY_UNIT,
        metadata=about(
            "Which neighboring data sets are compared.", PRIVACY, unset="replace-one; add-remove for records"
        ),
    )
    unit: Unit = field(
        default=Unit.CLIENT,
        metadata=about(
            "What is protected: all that a client holds, or one record (or group of records) of a silo.", PRIVACY
        ),
    )
    records: int | None = field(
        default=None,
        metadata=about(
            "Public number of records of all silos, for the unit record; sums are divided by its share in a batch.",
            PRIVACY,
            unset="`fit` counts them where adjacency is not add-remove",
        ),
    )
    batch_rate: float | None = field(
        default=None,
        metadata=about(
            "Probability with which a silo draws each of its records in a round, by a secret coin.",
            PRIVACY,
            unset=f"{USUAL_BATCH} records in a round",
        ),
    )
    max_silos: int = field(
        default=1, metadata=about("In how many silos one person may have records, for the unit record.", PRIVACY)
    )
    dropouts: float = field(
        default=0.0, metadata=about("Fraction of a cohort that may be missing from the sum.", PRIVACY)
    )
    colluders: float = field(
        default=0.0,
        metadata=about("Fraction of the population that may tell the server all it knows.", PRIVACY),
    )
    draws: int = field(
        default=VERIFIED_DRAWS,
        metadata=about(
            "Number of cohorts that the server can choose among, as clients verify; 0: draws are not verified.",
            PRIVACY,
        ),
    )
    consistency: Consistency = field(
        default=Consistency.ASSUMED,
        metadata=about(
            "How clients know that the server sent all of them the same: assumed (simulation), signed (deployment).",
            PRIVACY,
        ),
    )
    max_participations: int | None = field(
        default=None,
        metadata=about(
            "Cap on the contributions of one client.", PRIVACY, unset="the least cap that hardly ever binds"
        ),
    )
    attempts_per_round: int = field(default=3, metadata=about("How often one round may be tried.", PRIVACY))
    spare: int | None = field(
        default=None,
        metadata=about(
            "Attempts beyond one per round that epsilon covers, for rounds that fail after they were charged.",
            PRIVACY,
            unset="a tenth of the rounds",
        ),
    )
    clip: float | str = field(
        default=1.0,
        metadata=about(
            "L2 bound on the update of one client: a number, or auto (from 1 on) or auto(c) (from c on) to follow "
            "the median norm privately.",
            PRIVACY,
            parse=parse_clip,
        ),
    )
    bits: int | None = field(
        default=None,
        metadata=about("Bits per coordinate.", PRIVACY, unset="the fewest that hold the noise and the sum"),
    )
    rotation: RotationName = field(
        default=RotationName.HADAMARD, metadata=about("The random rotation before rounding.", PRIVACY)
    )

    def __post_init__(self) -> None:
        self._fill_in_by_unit()
        check_types(self)
        if self.unit is Unit.RECORD:
            self._check_records()
        else:
            self._check_no_records()
        for name in set(_LIMITS) - set(self.missing):
            check_range(name, getattr(self, name), 1, _LIMITS[name])
        check_range("attempts_per_round", self.attempts_per_round, 1, MOST_ATTEMPTS_PER_ROUND)
        check_range("draws", self.draws, 0, 1 << 32)
        if self.spare is not None:
            check_range("spare", self.spare, 0, MOST_ROUNDS)
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ConfigError(f"epsilon must be positive and finite, got {self.epsilon}")
        if self.delta is not None and not LEAST_DELTA <= self.delta < 1:
            raise ConfigError(f"delta must be in [{LEAST_DELTA:g}, 1), got {self.delta}")
        if not isinstance(self.clip, str) and not 0 < self.clip < math.inf:
            raise ConfigError(f"clip must be positive and finite, got {self.clip}")
        for name in ("dropouts", "colluders"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.bits is not None:
            check_range("bits", self.bits, 1, MAX_BITS)
        self._check_cohorts()

    def _fill_in_by_unit(self) -> None:
        """Fill in what follows from the unit: of records the usual adjacency, and that every silo is asked."""
        of_records, later = self.unit == Unit.RECORD, cast("None", _LATER)
        if self.adjacency is cast("Adjacency", later):
            usual = Adjacency.ADD_REMOVE if of_records else Adjacency.REPLACE_ONE
            object.__setattr__(self, "adjacency", usual)
        if of_records and self.sampling == Sampling.FIXED:
            object.__setattr__(self, "sampling", Sampling.NONE)
        if of_records and self.cohort_size is cast("int", later):
            object.__setattr__(self, "cohort_size", self.population)

    def _check_no_records(self) -> None:
        if self.records is not None or self.batch_rate is not None or self.max_silos != 1:
            raise ConfigError("records, batch_rate and max_silos are for the unit record, got the unit client")
        if self.adjacency is Adjacency.ADD_REMOVE:
            raise ConfigError("adjacency add-remove is of records: with a client, its noise would go as well")

    def _check_records(self) -> None:
        if self.mechanism is not MechanismName.CENTERED or isinstance(self.clip, str):
            raise ConfigError(
                f"the unit record takes the mechanism centered and a fixed clip, got {self.mechanism} and {self.clip}"
            )
        if self.max_participations is not None:
            raise ConfigError(
                f"records have no cap on participations, as a silo sends a vector in every attempt, got "
                f"{self.max_participations}"
            )
        if self.records is not None:
            check_range("records", self.records, 1, MOST_POPULATION)
        if self.batch_rate is not None and not 1 / RATE_STEPS <= self.batch_rate <= 1:
            raise ConfigError(f"batch_rate must be in [2^-32, 1], got {self.batch_rate}")
        if not self.missing:
            check_unit(self.unit, self.adjacency, self.cohort_sampling, self.batches)

    @property
    def batches(self) -> BatchSampling | None:
        """How records are drawn inside silos: the rate rounded down to a multiple of 2^-32; None for clients."""
        if self.unit is not Unit.RECORD or self.records is None:
            return None
        rate = min(1.0, USUAL_BATCH / self.records) if self.batch_rate is None else self.batch_rate
        return BatchSampling(Fraction(math.floor(Fraction(rate) * RATE_STEPS), RATE_STEPS), self.max_silos)

    def _check_cohorts(self) -> None:
        if self.missing:
            return
        if self.cohort_size > self.population:
            raise ConfigError(
                f"cohort_size must be at most the population {self.population}, got {self.cohort_size}"
            )
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

    @property
    def missing(self) -> tuple[str, ...]:
        """The fields that are not filled in yet."""
        needed = (*_LIMITS, "records") if self.unit is Unit.RECORD else tuple(_LIMITS)
        return tuple(name for name in needed if getattr(self, name) is None)

    def require_complete(self) -> None:
        """Refuse a target that lacks what a plan depends on."""
        if self.missing:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in self.missing)
            raise ConfigError(
                f"a plan needs {', '.join(self.missing)}: state what is missing ({flags} on the command line); `fit` "
                "fills in what it can count"
            )

    @property
    def fixed_clip(self) -> float:
        """The clip, if it is a number."""
        if isinstance(self.clip, str):
            raise ConfigError(f"a fixed clip was expected, got {self.clip}")
        return self.clip

    @property
    def initial_clip(self) -> float | None:
        """The clip that an adaptive one starts from; None if the clip is fixed."""
        return initial_clip_named(self.clip) if isinstance(self.clip, str) else None

    @property
    def cohort_sampling(self) -> CohortSampling:
        """How cohorts are drawn."""
        return CohortSampling(self.sampling, self.population, self.cohort_size)

    @property
    def max_attempts(self) -> int:
        """How many attempts the whole run may be charged for: one per round and the spare ones.

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
        """The delta of the guarantee: below 1 / population, or 1 / records, unless it was given."""
        protected = self.population if self.unit is Unit.CLIENT else (self.records or self.population)
        return protected**-1.1 if self.delta is None else self.delta

    @property
    def effective_max_participations(self) -> int:
        """How often one client may contribute: as given, or the least that costs next to nothing.

        An amplified guarantee pays for the chance that a cap binds, so there it is one that hardly ever does; elsewhere
        at most 1 % of all contributions are lost to it.
        """
        return self.max_participations or _default_cap(self)


# What `d2pfed train`, `d2pfed plan` and `fit` ask for unless told otherwise: a guarantee that holds against the server.
DEFAULT_TARGET = PrivacyTarget(against=SERVER, sampling=Sampling.ONCE, dropouts=0.1, colluders=0.1)


@lru_cache(maxsize=64)  # a search for the least noise asks again and again
def _default_cap(target: PrivacyTarget) -> int:
    if target.sampling is Sampling.ONCE:
        return 1
    attempts = target.max_attempts
    if (
        target.sampling is Sampling.NONE or target.cohort_size == target.population
    ):  # everyone is asked in every round
        return attempts
    if target.against != RELEASED:
        from scipy.special import bdtrc  # noqa: PLC0415 - slow to load

        # The least m for which the mean of min(Bin(attempts, rate), m) is nearly all of that without a cap.
        kept = np.cumsum(bdtrc(np.arange(attempts), attempts, target.cohort_size / target.population))
        return 1 + int(np.argmax(kept >= (1 - LOST_TO_THE_CAP) * kept[-1]))
    allowed = CAP_SHARE * target.effective_delta
    # The excess falls with the cap.
    return 1 + bisect_left(
        range(1, attempts + 1), -allowed, key=lambda cap: -cap_excess(target.cohort_sampling, attempts, cap)
    )
