"""The Plan, which both sides agree on and every message is bound to."""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from d2pfed.accounting import (
    ALONE,
    CLIENT,
    RELEASED,
    SERVER,
    Adjacency,
    BatchSampling,
    CohortSampling,
    Guarantee,
    Noise,
    Observer,
    Release,
    Sampling,
    Unit,
    View,
    account,
    check_unit,
    colluding,
)
from d2pfed.errors import ConfigError
from d2pfed.fields import check_arguments, check_between, check_fields, check_positive, check_range
from d2pfed.noise.clipping import AdaptiveClip, Extra, Weighting
from d2pfed.noise.codec import Codec
from d2pfed.noise.mechanisms import (
    LEAST_SILO_WIDTH,
    Centered,
    DDGauss,
    Mechanism,
    MechanismName,
    Protocol,
    Rounded,
)
from d2pfed.numerics import canonical
from d2pfed.numerics.model_bytes import FLOAT_BITS, require_bits
from d2pfed.numerics.randomness import digest
from d2pfed.numerics.ring import Ring
from d2pfed.numerics.rotation import Fold, Hadamard, RandomPhase
from d2pfed.plan import bounds
from d2pfed.plan.bounds import require_honest_majority
from d2pfed.plan.widths import summed_vectors, wrap_energy, wrap_probability
from d2pfed.secagg.lattice.parameters import (
    MOST_DIMENSION,
    Committee,
    committee_sizes,
    seated,
    secret_length,
)
from d2pfed.secagg.pairwise.session import MOST_COHORT, require_shares
from d2pfed.secagg.trust import Consistency

MOST_CHARACTERS = 1 << 13  # of a plan's text, which has about 1,600


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that client and server agree on before a run; it names no run, so several may follow it.

    Attributes:
        unit: what is protected.
        adjacency: which neighboring data sets are compared.
        sampling: how cohorts are drawn, from how many clients, and how large they are.
        rounds: how many rounds there are.
        attempts_per_round: how often one round may be tried.
        max_attempts: how many attempts of the whole run may be charged: the guarantee covers this many releases.
        max_participations: how often one client may contribute before it sends zero plus noise.
        epsilon: the guarantee, for the observer `against`.
        delta: its failure probability.
        against: the observer that it holds against.
        consistency: how clients know that the server sent all of them the same.
        colluders: how many of a cohort may tell the server all they know.
        quorum: the fewest survivors that may be unmasked: the noise is enough for these.
        threshold: how many shares open a secret.
        codec: how an update becomes lattice steps.
        mechanism: which noise a client adds.
        ring: the integers modulo which vectors are added.
        adaptive_clip: how the clip follows the median norm; None: a fixed clip.
        batches: how records are drawn inside silos, where the unit is a record.
        records: the public number of records, with which sums are divided.
        weighting: how private weights are carried; None: all clients weigh alike.
        counts_failures: whether a client whose training failed says so in one more coordinate; of records, each record.
        committee: who holds shares in the lattice protocol; None: another protocol.
        secret: how many numbers a client's secret has in the lattice protocol.
        has_standing_keys: whether clients keep their keys for a run, as silos of records do.
        download_bits: per parameter of the model that clients are sent and train from.
        longest_mean: how long the mean of the clipped vectors is taken to be, over the clip, where the ring is chosen.

    Examples:
        >>> target = PrivacyTarget(dimension=1000, population=10_000, cohort_size=500, rounds=10, epsilon=2.0)
        >>> plan = calibrate(target)
        >>> plan.dimension, str(plan.against)
        (1000, 'released')
    """

    unit: Unit
    adjacency: Adjacency
    sampling: CohortSampling
    rounds: int
    attempts_per_round: int
    max_attempts: int
    max_participations: int
    epsilon: float
    delta: float
    against: Observer
    consistency: Consistency
    colluders: int
    quorum: int
    threshold: int
    codec: Codec
    mechanism: Mechanism
    ring: Ring
    adaptive_clip: AdaptiveClip | None = field(default=None, metadata=canonical.OMITTED_IF_DEFAULT)
    batches: BatchSampling | None = field(default=None, metadata=canonical.OMITTED_IF_DEFAULT)
    records: int | None = field(default=None, metadata=canonical.OMITTED_IF_DEFAULT)
    weighting: Weighting | None = field(default=None, metadata=canonical.OMITTED_IF_DEFAULT)
    counts_failures: bool = field(default=False, metadata=canonical.OMITTED_IF_DEFAULT)
    committee: Committee | None = field(default=None, metadata=canonical.OMITTED_IF_DEFAULT)
    secret: int | None = field(default=None, metadata=canonical.OMITTED_IF_DEFAULT)
    has_standing_keys: bool = field(default=False, metadata=canonical.OMITTED_IF_DEFAULT)
    download_bits: int = field(default=FLOAT_BITS, metadata=canonical.OMITTED_IF_DEFAULT)
    longest_mean: float = field(default=1.0, metadata=canonical.OMITTED_IF_DEFAULT)

    def __post_init__(self) -> None:
        check_fields(self)
        cohort = self.sampling.cohort_size
        check_range("population", self.sampling.population, 1, bounds.MOST_POPULATION)
        check_range("cohort", cohort, 1, bounds.MOST_COHORT)
        check_range("rounds", self.rounds, 1, bounds.MOST_ROUNDS)
        check_range("attempts_per_round", self.attempts_per_round, 1, bounds.MOST_ATTEMPTS_PER_ROUND)
        check_range("max_attempts", self.max_attempts, self.rounds, bounds.MOST_ATTEMPTS)
        check_range("max_participations", self.max_participations, 1, self.max_attempts)
        check_range("quorum", self.quorum, 1, cohort)
        check_range("colluders", self.colluders, 0, self.quorum - 1)
        check_range("threshold", self.threshold, 1, cohort)
        check_positive("epsilon", self.epsilon)
        check_between("delta", self.delta, bounds.LEAST_DELTA, 1, "[)")
        require_bits(self.download_bits)
        check_between("longest_mean", self.longest_mean, 0, 1, "(]")
        self._check_units()
        self._check_protocol()
        if isinstance(self.codec.rotation, Fold) and self.codec.rotation.kept != len(self.extras):
            raise ConfigError(
                f"a fold must keep the bit or the weight apart and nothing else, got {self.codec.rotation.kept} kept"
            )
        if self.adaptive_clip is not None and self.codec.clip != self.adaptive_clip.radius:
            raise ConfigError(
                f"the codec's clip must be the radius {self.adaptive_clip.radius} of a vector with its bit where the "
                f"clip adapts, got {self.codec.clip}"
            )
        if self.weighting is not None and (
            self.adaptive_clip is not None or self.unit is not Unit.CLIENT or self.codec.clip != 1
        ):
            raise ConfigError(
                f"a weighting goes with the unit client, a fixed clip and a codec's clip of 1, got {self.unit} and "
                f"{self.codec.clip}"
            )

    def _check_protocol(self) -> None:
        cohort, committee, secret = self.cohort_size, self.committee, self.secret
        if (committee is None) != (secret is None):
            raise ConfigError("a committee and the length of a secret go together, got one of them")
        if committee is None or secret is None:
            require_honest_majority(cohort, self.quorum, self.colluders)
            if self.consistency is Consistency.SIGNED:
                require_shares(cohort, self.threshold, self.quorum, self.colluders)
            return
        mechanism = MechanismName.of(self.mechanism)
        if Protocol.LATTICE not in mechanism.runs_in or self.unit is not Unit.CLIENT or self.has_standing_keys:
            raise ConfigError(
                "the lattice protocol takes discrete Gaussians of each client, the unit client and fresh keys, got "
                f"{mechanism} and {self.unit}"
            )
        check_range("cohort", cohort, 1, bounds.MOST_SIGNED)
        check_range("dimension", self.codec.length, 1, MOST_DIMENSION)
        check_range("quorum", self.quorum, self.colluders + 2, cohort)
        if secret != secret_length(self.ring.bits, self.least_width):
            raise ConfigError(
                f"a secret must have {secret_length(self.ring.bits, self.least_width)} numbers in a ring of "
                f"{self.ring.bits} bits with noise of {float(self.least_width):.4g} steps, got {secret}"
            )
        rule, part = None, Fraction(self.colluders * committee.size, cohort)
        if committee.size in committee_sizes(cohort) and part <= committee.colluders <= committee.size:
            rule = seated(committee.size, committee.colluders, secret, cohort, cohort - self.quorum)
        if committee != rule or self.threshold != committee.openers:
            expected = rule or f"one of {cohort} clients with {self.colluders} colluders"
            raise ConfigError(
                f"a committee must be {expected} and its openers the threshold, got {committee} and {self.threshold}"
            )

    def _check_units(self) -> None:
        if self.sampling.method is Sampling.ONCE and self.max_participations != 1:
            raise ConfigError(f"sampling `once` means one participation, got {self.max_participations}")
        needed, population = self.max_attempts * self.cohort_size, self.sampling.population
        if self.sampling.method is Sampling.ONCE and needed > population:
            raise ConfigError(
                f"sampling `once` needs max_attempts x cohort_size <= population: "
                f"{self.max_attempts} x {self.cohort_size} > {population}"
            )
        check_unit(self.unit, self.adjacency, self.sampling, self.batches)
        if (self.records is None) != (self.batches is None):
            raise ConfigError(f"records go with the unit record, got {self.records} and the unit {self.unit}")
        if self.records is None:
            return
        check_range("records", self.records, 1, bounds.MOST_POPULATION)
        check_range("max_participations", self.max_participations, self.max_attempts, self.max_attempts)
        if self.adaptive_clip is not None or not isinstance(self.mechanism, Centered):
            raise ConfigError("the unit record takes the mechanism centered and a fixed clip")
        if self.mechanism.sigma < LEAST_SILO_WIDTH:
            raise ConfigError(
                f"a silo's noise must be at least {LEAST_SILO_WIDTH} steps wide, got {float(self.mechanism.sigma):g}"
            )

    @property
    def cohort_size(self) -> int:
        """How many clients are asked in a round."""
        return self.sampling.cohort_size

    @property
    def divisor(self) -> float:
        """What a sum is divided by: the cohort's size, or the expected batch, a constant whatever was drawn."""
        if self.batches is None or self.records is None:
            return self.cohort_size
        return float(self.batches.rate * self.records)

    @property
    def protocol(self) -> Protocol | None:
        """Which protocol adds up its vectors; None: none carries it, and only their sum can be simulated.

        With standing keys every attempt in which vectors were sent stays charged, whatever its result.
        """
        if self.committee is not None:
            return Protocol.LATTICE
        if self.unit is Unit.RECORD or self.has_standing_keys:
            return Protocol.STANDING
        pairs = Protocol.PAIRWISE in MechanismName.of(self.mechanism).runs_in
        return Protocol.PAIRWISE if pairs and self.cohort_size <= MOST_COHORT else None

    @property
    def least_width(self) -> Fraction:
        """Width of one client's own noise, in steps, in every coordinate; only of mechanisms that have one."""
        if not isinstance(self.mechanism, Centered | DDGauss):
            raise ConfigError(f"the noise of {type(self.mechanism).__name__} is no discrete Gaussian of a client")
        return self.mechanism.sigma

    @property
    def dimension(self) -> int:
        """How many parameters are trained; a client's bit for an adaptive clip, or its weight, is none of them."""
        return self.codec.rotation.dimension - len(self.extras)

    @property
    def extras(self) -> tuple[Extra, ...]:
        """What the last coordinates of a vector are, one each, behind the update."""
        parts = {Extra.ADAPTIVE_CLIP: self.adaptive_clip, Extra.WEIGHTS: self.weighting}
        found = tuple(extra for extra, part in parts.items() if part is not None)
        return (*found, Extra.FAILURES) if self.counts_failures else found

    def failures_error(self, survivors: int) -> float:
        """Return the standard error of the count of failures in a sum over these clients, by the noise alone."""
        return math.sqrt(self.noise(survivors).sum_variance) * self.codec.granularity / self.codec.clip

    @property
    def update_clip(self) -> float:
        """L2 bound on a client's update; that of its whole vector in units of the clip, where the clip adapts."""
        return self.codec.clip if self.weighting is None else self.weighting.clip

    @property
    def contributed(self) -> Noise | None:
        """The noise that the guarantee rests on: a quorum's, less the clients that collude."""
        return self.noise(self.quorum).without(self.colluders)

    @property
    def sigma(self) -> float:
        """Standard deviation of that noise on the sum, in real units; in units of the clip where the clip adapts."""
        noise = self.contributed
        return math.sqrt(noise.sum_variance) * self.codec.granularity if noise else 0.0

    @property
    def planned_against(self) -> Observer:
        """The observer whose epsilon is the target's: the server includes the colluders that it was planned for."""
        return colluding(self.colluders) if self.colluders and self.against == SERVER else self.against

    @property
    def noise_multiplier(self) -> float:
        """Sigma over the sensitivity of the stated adjacency, rounding included."""
        noise = self.contributed
        return math.sqrt(noise.sum_variance) / (self.adjacency.radii * float(noise.radius)) if noise else 0.0

    @property
    def wrap_probability(self) -> float:
        """Bound on the chance that some coordinate of a round's sum leaves the ring's range."""
        return wrap_probability(self.codec, self.mechanism, self.ring, self.cohort_size, self.longest_sum)

    @property
    def wrap_energy(self) -> float:
        """Bound on the expected square of what wrapping adds to a coordinate, over the variance of its noise."""
        return wrap_energy(self.codec, self.mechanism, self.ring, self.cohort_size, self.longest_sum)

    @property
    def longest_sum(self) -> float:
        """How long a round's sum of clipped vectors is taken to be, in radii of one."""
        return self.longest_mean * summed_vectors(self.cohort_size, self.records, self.batches)

    @property
    def digest(self) -> bytes:
        """Hash of everything agreed."""
        return _digest(self)

    def noise(self, survivors: int) -> Noise:
        """Return the distribution of the noise in a sum over this many clients."""
        check_arguments(Plan.noise, locals())
        return self.mechanism.noise(self.codec, survivors)

    def release(
        self, run: str, number: int, attempt: int, participants: tuple[int, ...], survivors: int
    ) -> Release:
        """Describe what unmasking a sum over this many clients reveals, who are among the participants.

        A plan itself names no run: "" there.
        """
        check_arguments(Plan.release, locals())
        return Release(
            run=run,
            round=number,
            attempt=attempt,
            unit=self.unit,
            adjacency=self.adjacency,
            sampling=self.sampling,
            noise=self.noise(survivors),
            participants=participants,
            batches=self.batches,
        )


@lru_cache(maxsize=16)  # every attempt asks for it several times
def _digest(plan: Plan) -> bytes:
    text = canonical.encode(plan)
    # Every charge names a plan's digest, and so comes after this.
    # Checked: test_plan.py::test_a_plan_that_cannot_be_read_back_is_refused_before_it_is_charged.
    if decode_plan(text) != plan:
        raise ConfigError("a plan must be the one that its canonical text gives back, got another")
    return digest("d2pfed plan", text)


_EVENTS = (Adjacency, BatchSampling, CohortSampling, Observer, Sampling, Unit, View)
_PARTS = (AdaptiveClip, Codec, Committee, Consistency, Fold, Hadamard, RandomPhase, Ring, Rounded, Weighting)
TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (Plan, *_EVENTS, *_PARTS, *(name.kind for name in MechanismName))
}


def decode_plan(text: str) -> Plan:
    """Return the plan that has exactly this canonical text."""
    return canonical.decode(text, TYPES, Plan, most=MOST_CHARACTERS)


def observers(plan: Plan) -> tuple[Observer, ...]:
    """Return the observers whose epsilons are always printed together; `against` is among them."""
    groups = {plan.colluders, plan.against.colluders} - {0}
    return (RELEASED, SERVER, CLIENT, *(colluding(count) for count in sorted(groups)), ALONE)


def guarantees(plan: Plan) -> tuple[Guarantee, ...]:
    """Return what the whole plan spends against each observer, if all attempts are charged with the least noise."""
    release = plan.release("", 0, 0, (), plan.quorum)
    return tuple(
        run_guarantee(release, plan.max_attempts, observer, plan.delta, plan.max_participations)
        for observer in observers(plan)
    )


@lru_cache(maxsize=256)  # a summary asks for what the calibration ended with
def run_guarantee(
    release: Release, attempts: int, observer: Observer, delta: float, max_participations: int
) -> Guarantee:
    """Return what this many equal releases spend against one observer."""
    return account([release] * attempts, observer, delta=delta, max_participations=max_participations)
