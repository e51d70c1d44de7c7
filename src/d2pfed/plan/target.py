"""The PrivacyTarget: what is asked for, before any noise is chosen."""

import math
import re
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache

import numpy as np

from d2pfed.accounting import (
    CAP_SHARE,
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
    observer_named,
)
from d2pfed.errors import ConfigError, shown
from d2pfed.fields import TRAINING, check_between, check_positive, check_range, check_types, documented, setting
from d2pfed.noise.mechanisms import MechanismName
from d2pfed.numerics import canonical
from d2pfed.numerics.model_bytes import FLOAT_BITS, require_bits
from d2pfed.numerics.ring import MAX_BITS
from d2pfed.numerics.rotation import MAX_DIMENSION
from d2pfed.plan import bounds
from d2pfed.plan.bounds import colluders_within
from d2pfed.secagg.trust import Consistency

LOST_TO_THE_CAP = 0.01  # of all contributions, at the default cap on participations
SPARE = Fraction(1, 10)  # attempts that may be charged beyond one per round, as a share of the rounds
AUTO, OFF = "auto", "off"  # of compression: as the plan chooses, or none
USUAL_LONGEST_MEAN = 0.5  # over the clip: twice the square that compression reckons with
USUAL_BATCH = 256  # records drawn in a round, in expectation, where no rate is given
_LEAST_START = 1e-12  # of an adaptive clip; the most is its inverse
_LIMITS = {
    "dimension": MAX_DIMENSION,
    "population": bounds.MOST_POPULATION,
    "cohort_size": bounds.MOST_COHORT,
    "rounds": bounds.MOST_ROUNDS,
}


class ProtocolChoice(StrEnum):
    """Protocols by name, and `auto`: the one with the least upload among those that carry the plan."""

    AUTO = "auto"
    PAIRWISE = "pairwise"
    STANDING = "standing"
    LATTICE = "lattice"


class RotationName(StrEnum):
    """The rotations by name, and `auto`: Hadamard's, which is faster, for records or little padding; else phase."""

    AUTO = "auto"
    HADAMARD = "hadamard"
    PHASE = "phase"


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


def parse_compression(text: str) -> int | str:
    """Return a compression as it is written: a number of coordinates, auto or off."""
    if text in (AUTO, OFF):
        return text
    if re.fullmatch(r"[0-9]{1,10}", text):
        return int(text)
    raise ConfigError(f"compression must be a power of two, auto or off, got {text[:80]!r}")


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyTarget:
    """A privacy target: how private, against whom, over which clients, for how many rounds of how long a vector.

    Enumerations may be given by name: `PrivacyTarget(..., mechanism="skellam", against="server")`. The fields that
    `fit` fills in are None until they are known; `calibrate` refuses a target that lacks one.

    Examples:
        >>> target = PrivacyTarget(population=10_000, against="server", sampling="once")
        >>> target.epsilon, str(target.against), f"{target.effective_delta:.2g}"
        (1.0, 'server', '4e-05')
    """

    dimension: int = setting(None, "Number of parameters that are trained.", TRAINING, filled_in="`fit`")
    population: int = setting(None, "Number of clients in the population.", filled_in="`fit`")
    cohort_size: int = setting(None, "Number of clients asked in each round.", filled_in="`fit`")
    rounds: int = setting(None, "Number of rounds.", TRAINING, filled_in="`fit`")
    epsilon: float = setting(1.0, "Bound on what the observer learns about one client.")
    delta: float | None = setting(
        None, "Failure probability of the guarantee.", unset="population^-1.1; records^-1.1"
    )
    against: Observer = setting(
        RELEASED,
        "Observer that epsilon holds against: released, server, client, alone or colluding(c).",
        parse=observer_named,
    )
    mechanism: MechanismName = setting(MechanismName.CENTERED, "How noise enters the sum.")
    sampling: Sampling = setting(
        Sampling.FIXED, "How cohorts are drawn; with the unit record every silo is asked: none."
    )
    adjacency: Adjacency = setting(
        None, "Which neighboring data sets are compared.", unset="replace-one; add-remove for records"
    )
    unit: Unit = setting(
        Unit.CLIENT, "What is protected: all that a client holds, or one record (or group of records) of a silo."
    )
    records: int | None = setting(
        None,
        "Public number of records of all silos, for the unit record; sums are divided by its share in a batch.",
        unset="`fit` counts them where adjacency is not add-remove",
    )
    batch_rate: float | None = setting(
        None,
        "Probability with which a silo draws each of its records in a round, by a secret coin.",
        unset=f"{USUAL_BATCH} records in a round",
    )
    max_silos: int = setting(1, "In how many silos one person may have records, for the unit record.")
    dropouts: float = setting(0.0, "Fraction of a cohort that may be missing from the sum.")
    colluders: float = setting(0.0, "Fraction of the population that may tell the server all it knows.")
    draws: int = setting(
        bounds.VERIFIED_DRAWS,
        "Number of cohorts that the server can choose among, as clients verify; 0: draws are not verified.",
    )
    consistency: Consistency = setting(
        Consistency.ASSUMED,
        "How clients know that the server sent all of them the same: assumed (simulation), signed (deployment).",
    )
    protocol: ProtocolChoice = setting(
        ProtocolChoice.AUTO,
        "How vectors are added up: pairwise (fresh masks, up to 1,000 clients), standing (silos), lattice (clients "
        "speak once, up to 20,000), or auto.",
        also=canonical.OMITTED_IF_DEFAULT,
    )
    max_participations: int | None = setting(
        None, "Cap on the contributions of one client.", unset="the least cap that hardly ever binds"
    )
    attempts_per_round: int = setting(3, "How often one round may be tried.")
    spare: int | None = setting(
        None,
        "Attempts beyond one per round that epsilon covers, for rounds that fail after they were charged.",
        unset="a tenth of the rounds",
    )
    clip: float | str = setting(
        1.0,
        "L2 bound on the update of one client: a number, or auto (from 1 on) or auto(c) (from c on) to follow "
        "the median norm privately.",
        parse=parse_clip,
    )
    bits: int | None = setting(None, "Bits per coordinate.", unset="the fewest that hold the noise and the sum")
    rotation: RotationName = setting(RotationName.HADAMARD, "The random rotation before rounding.")
    compression: int | str = setting(
        OFF,
        "Number of coordinates that a client's vector is folded to, a power of two; auto: the fewest that add "
        "little to the noise; or off.",
        also=canonical.OMITTED_IF_DEFAULT,
        parse=parse_compression,
    )
    longest_mean: float = setting(
        1.0,
        "How long the mean of clipped updates is taken to be, over the clip, where bits are chosen, so that what "
        "wraps has at most 1 % of the noise's energy; 1: all may agree, and 1 % of the sums may wrap.",
        also=canonical.OMITTED_IF_DEFAULT,
    )
    download_bits: int = setting(
        FLOAT_BITS,
        "Bits per parameter of the model that clients are sent: 8 or 32.",
        TRAINING,
        also=canonical.OMITTED_IF_DEFAULT,
    )

    def __post_init__(self) -> None:
        # What follows from the unit: of records the usual adjacency, and that every silo is asked.
        of_records = self.unit == Unit.RECORD
        usual: dict[str, object] = {"adjacency": Adjacency.ADD_REMOVE if of_records else Adjacency.REPLACE_ONE}
        usual |= {"cohort_size": self.population} if of_records else {}
        for name, value in usual.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if of_records and self.sampling == Sampling.FIXED:
            object.__setattr__(self, "sampling", Sampling.NONE)
        check_types(self)
        self._check_numbers()
        if self.unit is Unit.RECORD:
            self._check_records()
        elif self.records is not None or self.batch_rate is not None or self.max_silos != 1:
            raise ConfigError("records, batch_rate and max_silos are for the unit record, got the unit client")
        elif self.adjacency is Adjacency.ADD_REMOVE:
            raise ConfigError("adjacency add-remove is of records: with a client, its noise would go as well")
        if not self.missing:
            self._check_cohorts()

    def _check_numbers(self) -> None:
        limits = {name: (1, most) for name, most in _LIMITS.items()} | {
            "attempts_per_round": (1, bounds.MOST_ATTEMPTS_PER_ROUND),
            "draws": (0, 1 << 32),
            "spare": (0, bounds.MOST_ROUNDS),
            "bits": (1, MAX_BITS),
        }
        for name, (least, most) in limits.items():
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), least, most)
        check_positive("epsilon", self.epsilon)
        if self.delta is not None:
            check_between("delta", self.delta, bounds.LEAST_DELTA, 1, "[)")
        if not isinstance(self.clip, str):
            check_positive("clip", self.clip)
        if isinstance(self.compression, int):
            size = self.dimension or MAX_DIMENSION  # `fit` fills it in
            if not 2 <= self.compression < size or self.compression & (self.compression - 1):
                raise ConfigError(
                    f"compression must be a power of two from 2 on, below the dimension"
                    f"{f' {size}' if self.dimension else ''}, auto or off, got {shown(self.compression)}"
                )
        require_bits(self.download_bits)
        check_between("longest_mean", self.longest_mean, 0, 1, "(]")
        for name in ("dropouts", "colluders"):
            check_between(name, getattr(self, name), 0, 1, "[)")

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
            check_range("records", self.records, 1, bounds.MOST_POPULATION)
        if self.batch_rate is not None and not 1 / RATE_STEPS <= self.batch_rate <= 1:
            raise ConfigError(f"batch_rate must be in [2^-32, 1], got {self.batch_rate}")
        if not self.missing:
            check_unit(self.unit, self.adjacency, self.cohort_sampling, self.batches)

    def _check_cohorts(self) -> None:
        population, cohort, most = self.population, self.cohort_size, self.max_participations
        if cohort > population:
            raise ConfigError(f"cohort_size must be at most the population {population}, got {cohort}")
        blocks = self.rounds + (self.spare or 0)
        if self.sampling is Sampling.ONCE and blocks * cohort > population:
            raise ConfigError(
                f"sampling `once` needs (rounds + spare) x cohort_size <= population: "
                f"{blocks} x {cohort} > {population}; at most {population // cohort} rounds"
            )
        if most is not None and not 1 <= most <= self.max_attempts:
            raise ConfigError(
                f"max_participations must be in [1, rounds + spare = {self.max_attempts}], got {shown(most)}"
            )
        if self.sampling is Sampling.ONCE and most not in (None, 1):
            raise ConfigError(f"sampling `once` means one participation, got {most}")

    def completed(self, who: str, **known: int) -> "PrivacyTarget":
        """Return the target with what somebody knows of its fields; refuse one that states something else."""
        for name, value in known.items():
            if getattr(self, name) not in (None, value):
                raise ConfigError(f"the privacy target has {name} {getattr(self, name)}, and {who} has {value}")
        return replace(self, **known)  # type: ignore[arg-type]  # they are numbers

    @property
    def missing(self) -> tuple[str, ...]:
        """The fields that are not filled in yet."""
        needed = (*_LIMITS, "records") if self.unit is Unit.RECORD else tuple(_LIMITS)
        return tuple(name for name in needed if getattr(self, name) is None)

    @property
    def batches(self) -> BatchSampling | None:
        """How records are drawn inside silos: the rate rounded down to a multiple of 2^-32; None for clients."""
        if self.unit is not Unit.RECORD or self.records is None:
            return None
        rate = min(1.0, USUAL_BATCH / self.records) if self.batch_rate is None else self.batch_rate
        return BatchSampling(Fraction(math.floor(Fraction(rate) * RATE_STEPS), RATE_STEPS), self.max_silos)

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
        """The most colluders of one cohort, except with a chance of 2^-40 over all draws."""
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
        """How often one client may contribute: as given, or the least that costs next to nothing."""
        return self.max_participations or _default_cap(self)


# What `d2pfed train`, `d2pfed plan` and `fit` ask for unless told otherwise: a guarantee that holds against the server.
DEFAULT_TARGET = PrivacyTarget(
    against=SERVER,
    sampling=Sampling.ONCE,
    dropouts=0.1,
    colluders=0.1,
    rotation=RotationName.AUTO,
    compression=AUTO,
    longest_mean=USUAL_LONGEST_MEAN,
)


@lru_cache(maxsize=64)  # a search for the least noise asks again and again
def _default_cap(target: PrivacyTarget) -> int:
    """Return the least cap that costs next to nothing.

    An amplified guarantee pays for the chance that a cap binds, so there it is one that hardly ever does; elsewhere
    at most 1 % of all contributions are lost to it.
    """
    if target.sampling is Sampling.ONCE:
        return 1
    attempts = target.max_attempts
    if target.sampling is Sampling.NONE or target.cohort_size == target.population:
        return attempts  # everyone is asked in every round
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
