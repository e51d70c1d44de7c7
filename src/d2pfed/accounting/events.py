"""What was released: the unit of privacy, adjacency, sampling, noise, and the releases of a run counted together."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from operator import ge

from d2pfed.accounting.laws import Noise
from d2pfed.errors import ConfigError, shown
from d2pfed.fields import Choice, check_fields, check_range
from d2pfed.numerics import canonical

MOST_SILOS = 100  # that one person may have records in


class Unit(Choice):
    """The unit of privacy: a guarantee protects everything that one of these contributed.

    Attributes:
        CLIENT: all that a client holds.
        RECORD: one record of a silo, or a group of records there, such as all of one patient.
    """

    CLIENT = "client"
    RECORD = "record"


class Adjacency(Choice):
    """The neighboring relation of a guarantee; on both sides the client takes part and adds its noise.

    Attributes:
        REPLACE_ONE: its vector is any other allowed vector: distance 2 radii.
        ZERO_OUT: its vector is zero: distance 1 radius.
        ADD_REMOVE: a record is there or not: 1 radius. For records only, as their noise is their silo's.

    Examples:
        >>> Adjacency("replace-one").radii
        2
    """

    REPLACE_ONE = "replace-one"
    ZERO_OUT = "zero-out"
    ADD_REMOVE = "add-remove"

    @property
    def radii(self) -> int:
        """How many clip radii apart the neighbours' vectors can be when the client is known to take part."""
        return 2 if self is Adjacency.REPLACE_ONE else 1


class Sampling(Choice):
    """How a round's cohort is chosen.

    Attributes:
        FIXED: a fresh uniform subset of known size in each round.
        ONCE: a random partition: each client is in one round, and the models do not tell in which.
        NONE: the cohort is known or was not drawn at random; nothing is amplified.

    Examples:
        >>> [each.value for each in Sampling]
        ['fixed', 'once', 'none']
    """

    FIXED = "fixed"
    ONCE = "once"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class CohortSampling:
    """How the cohorts of a run are sampled.

    Attributes:
        method: the sampling method.
        population: the public number of clients.
        cohort_size: the number of clients in a cohort.

    Examples:
        >>> CohortSampling(Sampling.ONCE, 10_000, 500).method.value
        'once'
    """

    method: Sampling
    population: int
    cohort_size: int

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.cohort_size <= self.population:
            raise ConfigError(
                f"cohort_size must be in [1, population = {shown(self.population)}], got {shown(self.cohort_size)}"
            )


RATE_STEPS = 1 << 32  # a coin's rate is a multiple of one over this, so that coins are exact


@dataclass(frozen=True, slots=True)
class BatchSampling:
    """How the records of every silo are drawn into an attempt's batch: each by its own secret coin."""

    rate: Fraction  # the probability of each coin, a multiple of 2^-32
    max_silos: int = 1  # in how many silos one person may have records, each with a coin of its own

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.rate <= 1 or RATE_STEPS % self.rate.denominator:
            raise ConfigError(f"a batch's rate must be a multiple of 2^-32 in (0, 1], got {self.rate}")
        check_range("max_silos", self.max_silos, 1, MOST_SILOS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One unmasked sum: the event that is accounted for, with all that its privacy cost depends on.

    Attributes:
        run: the run that released it; empty in a plan, which names none.
        round: which round of the run.
        attempt: which attempt of that round.
        unit: the unit of privacy.
        adjacency: the neighboring relation.
        sampling: how its cohort was sampled.
        noise: the noise in the sum.
        participants: the clients whose vectors are in the sum, increasing; empty in a plan, where nobody is known.
        batches: how records were drawn inside each silo, where the unit is a record; else None.

    Examples:
        >>> target = PrivacyTarget(dimension=1000, population=10_000, cohort_size=500, rounds=10, epsilon=2.0)
        >>> release = calibrate(target).release("run", 0, 0, (), 500)
        >>> release.sampling.cohort_size
        500
    """

    run: str
    round: int
    attempt: int
    unit: Unit
    adjacency: Adjacency
    sampling: CohortSampling
    noise: Noise
    participants: tuple[int, ...]
    batches: BatchSampling | None = field(default=None, metadata=canonical.OMITTED_IF_DEFAULT)

    def __post_init__(self) -> None:
        check_fields(self)
        check_unit(self.unit, self.adjacency, self.sampling, self.batches)
        if self.round < 0 or self.attempt < 0:
            raise ConfigError(f"round and attempt must be at least 0, got {self.round} and {self.attempt}")
        if any(map(ge, self.participants, self.participants[1:])):
            raise ConfigError("participants must be strictly increasing")
        if self.participants and not self.run:
            raise ConfigError("a release in which clients took part must name its run")

    @property
    def max_silos(self) -> int:
        """In how many silos the records of one protected person may be; 1 where the unit is a client."""
        return 1 if self.batches is None else self.batches.max_silos


def check_unit(unit: Unit, adjacency: Adjacency, sampling: CohortSampling, batches: BatchSampling | None) -> None:
    """Refuse what does not go together: coins and their adjacency are of records, and records of known silos."""
    if (unit is Unit.RECORD) != (batches is not None):
        raise ConfigError(f"batches go with the unit record, got the unit {unit} and batches {batches}")
    if batches is None:
        if adjacency is Adjacency.ADD_REMOVE:
            raise ConfigError("adjacency add-remove is of records: with a client, its noise would go as well")
        return
    if sampling.method is not Sampling.NONE or sampling.cohort_size != sampling.population:
        raise ConfigError(f"with the unit record every silo is asked (sampling none), got {sampling}")


@dataclass(frozen=True, slots=True)
class RunReleases:
    """The releases of one run, equal ones counted together."""

    sampling: CohortSampling
    noises: tuple[tuple[Noise, int], ...]  # and how often each was released
    max_participations: int  # how often one client contributes before it sends zeros
    # Blocks of a partition that one client is known to be in: more if participants show that one came again.
    blocks: int = 1
    batches: BatchSampling | None = None  # how records were drawn inside each silo, where the unit is a record

    @property
    def count(self) -> int:
        """How many releases there were."""
        return sum(count for _, count in self.noises)


def releases_by_run(releases: Sequence[Release], max_participations: int) -> list[RunReleases]:
    """Return the releases by run, in the order in which runs began; each run has one sampling."""
    # Long lists repeat few objects, and an object's identity is found much faster than its value.
    objects = {id(release): release for release in releases}
    noises: defaultdict[str, Counter[Noise]] = defaultdict(Counter)
    samplings: dict[str, tuple[CohortSampling, BatchSampling | None]] = {}
    for key, count in Counter(map(id, releases)).items():
        release = objects[key]
        noises[release.run][release.noise] += count
        drawn = release.sampling, release.batches
        if samplings.setdefault(release.run, drawn) != drawn:
            raise ConfigError(f"all releases of a run must share one sampling, run {release.run!r} has two")
    participations: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for release in releases:
        if release.sampling.method is Sampling.ONCE and release.participants:
            participations[release.run].update(release.participants)
    return [
        RunReleases(
            samplings[run][0],
            tuple(noises[run].items()),
            max_participations,
            max(participations[run].values(), default=1),
            samplings[run][1],
        )
        for run in noises
    ]
