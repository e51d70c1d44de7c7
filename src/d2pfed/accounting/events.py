"""What was released: the unit of privacy, adjacency, sampling, noise, and the releases of a run counted together."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from operator import ge

from d2pfed.errors import ConfigError, shown
from d2pfed.numerics import canonical

MOST_SILOS = 100  # that one person may have records in


class Unit(StrEnum):
    """The unit of privacy: a guarantee protects everything that one of these contributed.

    Attributes:
        CLIENT: all that a client holds.
        RECORD: one record of a silo, or a group of records there, such as all of one patient.
    """

    CLIENT = "client"
    RECORD = "record"


class Adjacency(StrEnum):
    """The neighbouring relation of a guarantee; on both sides the client takes part and adds its noise.

    Attributes:
        REPLACE_ONE: its vector is any other allowed vector: distance 2 radii.
        ZERO_OUT: its vector is zero: distance 1 radius.
        ADD_REMOVE: a record is there or not: 1 radius. For records only, as their noise is their silo's.
    """

    REPLACE_ONE = "replace-one"
    ZERO_OUT = "zero-out"
    ADD_REMOVE = "add-remove"

    @property
    def radii(self) -> int:
        """How many clip radii apart the neighbours' vectors can be when the client is known to take part."""
        return 2 if self is Adjacency.REPLACE_ONE else 1


class Sampling(StrEnum):
    """How a round's cohort is chosen.

    Attributes:
        FIXED: a fresh uniform subset of known size in each round.
        ONCE: a random partition: each client takes part in one round only; nothing is amplified.
        NONE: the cohort is known or was not drawn at random; nothing is amplified.
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
    """

    method: Sampling
    population: int
    cohort_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.cohort_size <= self.population:
            raise ConfigError(
                f"cohort_size must be in [1, population = {shown(self.population)}], got {shown(self.cohort_size)}"
            )


RATE_STEPS = 1 << 32  # a coin's rate is a multiple of one over this, so that coins are exact


@dataclass(frozen=True, slots=True)
class BatchSampling:
    """How the records of every silo are drawn into an attempt's batch: each by its own secret coin.

    Attributes:
        rate: the probability of each coin, a multiple of 2^-32.
        max_silos: in how many silos one person may have records, each with a coin of its own.
    """

    rate: Fraction
    max_silos: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1 or RATE_STEPS % self.rate.denominator:
            raise ConfigError(f"a batch's rate must be a multiple of 2^-32 in (0, 1], got {self.rate}")
        if not 1 <= self.max_silos <= MOST_SILOS:
            raise ConfigError(f"max_silos must be in [1, {MOST_SILOS}], got {shown(self.max_silos)}")


@dataclass(frozen=True, slots=True)
class DiscreteGaussianSum:
    """The sum of `contributors` independent discrete Gaussians on the integers, around any real centre.

    Attributes:
        sigma: the width of each contributor's noise, in lattice steps.
        contributors: how many noises are in the sum; a single one is the whole noise of `shared`.
        radius: a bound on the L2 norm of a client's vector, in lattice steps.
        dimension: the number of coordinates.
    """

    sigma: Fraction
    contributors: int
    radius: Fraction
    dimension: int

    def __post_init__(self) -> None:
        _check_positive(sigma=self.sigma, contributors=self.contributors, radius=self.radius)
        _check_positive(dimension=self.dimension)

    def without(self, known: int) -> "DiscreteGaussianSum | None":
        """Return the noise left when the shares of `known` contributors are subtracted; None if nothing is."""
        left = self.contributors - known
        return DiscreteGaussianSum(self.sigma, left, self.radius, self.dimension) if left > 0 else None


@dataclass(frozen=True, slots=True)
class SkellamSum:
    """The sum of `contributors` Skellam variables, around an integer centre.

    Attributes:
        variance: the variance of each contributor's noise.
        contributors: how many noises are in the sum.
        radius, l1_radius: bounds on the L2 and L1 norm of a client's vector, in lattice steps.
        dimension: the number of coordinates.
    """

    variance: Fraction
    contributors: int
    radius: Fraction
    l1_radius: Fraction
    dimension: int

    def __post_init__(self) -> None:
        _check_positive(variance=self.variance, contributors=self.contributors, radius=self.radius)
        _check_positive(l1_radius=self.l1_radius, dimension=self.dimension)

    def without(self, known: int) -> "SkellamSum | None":
        """Return the noise left when the shares of `known` contributors are subtracted; None if nothing is."""
        left = self.contributors - known
        return SkellamSum(self.variance, left, self.radius, self.l1_radius, self.dimension) if left > 0 else None


@dataclass(frozen=True, slots=True)
class ContinuousGaussian:
    """Gaussian noise that a trusted server adds to a sum of vectors within `radius`."""

    sigma: float
    radius: float

    def __post_init__(self) -> None:
        _check_positive(sigma=self.sigma, radius=self.radius)

    def without(self, _known: int) -> "ContinuousGaussian":
        """Return itself: no client knows any of the noise."""
        return self


@dataclass(frozen=True, slots=True)
class BinomialSum:
    """The sum of `contributors` centred binomials of `trials` fair coins each, around an integer centre.

    Attributes:
        trials: the number of fair coins per contributor and coordinate.
        contributors: how many noises are in the sum.
        radius, l1_radius, linf_radius: bounds on the L2, L1 and largest-coordinate norm of a client's vector, in
            lattice steps.
        dimension: the number of coordinates.
    """

    trials: int
    contributors: int
    radius: Fraction
    l1_radius: Fraction
    linf_radius: Fraction
    dimension: int

    def __post_init__(self) -> None:
        _check_positive(trials=self.trials, contributors=self.contributors, dimension=self.dimension)
        _check_positive(radius=self.radius, l1_radius=self.l1_radius, linf_radius=self.linf_radius)

    def without(self, known: int) -> "BinomialSum | None":
        """Return the noise left when the shares of `known` contributors are subtracted; None if nothing is."""
        left = self.contributors - known
        return replace(self, contributors=left) if left > 0 else None


Noise = DiscreteGaussianSum | SkellamSum | ContinuousGaussian | BinomialSum


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One unmasked sum: the event that is accounted for, with all that its privacy cost depends on.

    Attributes:
        run: the run that released it; empty in a plan, which names none.
        round: which round of the run.
        attempt: which attempt of that round.
        unit: the unit of privacy.
        adjacency: the neighbouring relation.
        sampling: how its cohort was sampled.
        noise: the noise in the sum.
        participants: the clients whose vectors are in the sum, increasing; empty in a plan, where nobody is known.
        batches: how records were drawn inside each silo, where the unit is a record; else None.
    """

    run: str
    round: int
    attempt: int
    unit: Unit
    adjacency: Adjacency
    sampling: CohortSampling
    noise: Noise
    participants: tuple[int, ...]
    batches: BatchSampling | None = field(default=None, metadata=canonical.OMITTED_IF_NONE)

    def __post_init__(self) -> None:
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
    if batches.max_silos > 1 and adjacency is Adjacency.REPLACE_ONE:
        raise ConfigError(
            f"a person in up to {batches.max_silos} silos is protected under add-remove or zero-out, got replace-one"
        )


def _check_positive(**values: float | Fraction) -> None:
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name} must be positive and finite, got {value}")


@dataclass(frozen=True, slots=True)
class RunReleases:
    """The releases of one run, equal ones counted together.

    Attributes:
        sampling: how its cohorts were drawn.
        noises: each noise and how often it was released.
        max_participations: how often one client contributes before it sends zeros.
        blocks: of a partition, in how many releases a client is known to be: 1, unless participants show that a
            block was used again.
        batches: how records were drawn inside each silo, where the unit is a record.
    """

    sampling: CohortSampling
    noises: tuple[tuple[Noise, int], ...]
    max_participations: int
    blocks: int = 1
    batches: BatchSampling | None = None

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
    blocks = _blocks(releases)
    return [
        RunReleases(
            samplings[run][0],
            tuple(noises[run].items()),
            max_participations,
            blocks.get(run, 1),
            samplings[run][1],
        )
        for run in noises
    ]


def _blocks(releases: Sequence[Release]) -> dict[str, int]:
    participations: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for release in releases:
        if release.sampling.method is Sampling.ONCE and release.participants:
            participations[release.run].update(release.participants)
    return {run: max(counts.values()) for run, counts in participations.items()}
