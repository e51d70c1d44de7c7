"""The Plan, which both sides agree on and every message is bound to, and the Policy a client holds it against."""

import math
from dataclasses import dataclass

from d2pfed import canonical
from d2pfed.accounting import (
    ALONE,
    CLIENT,
    RELEASED,
    SERVER,
    Adjacency,
    BinomialSum,
    ContinuousGaussian,
    DiscreteGaussianSum,
    Noise,
    Observer,
    Release,
    Sampling,
    Scheme,
    SkellamSum,
    Spent,
    Unit,
    View,
    colluding,
    spent,
)
from d2pfed.codec import Codec
from d2pfed.errors import ConfigError
from d2pfed.mechanism import (
    BinomialNoise,
    Centered,
    DDGauss,
    Designated,
    Mechanism,
    Rounded,
    Shared,
    SkellamNoise,
)
from d2pfed.randomness import digest
from d2pfed.ring import Ring
from d2pfed.rotation import Hadamard, RandomPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that client and server agree on before a run; it names no run, so several may follow it."""

    unit: Unit
    adjacency: Adjacency
    sampling: Sampling
    rounds: int
    attempts: int  # how often one round may be tried
    participations: int  # how often one client may contribute before it sends zero plus noise
    epsilon: float  # the promise, for the observer `against`
    delta: float
    against: Observer
    colluders: int
    quorum: int  # fewest survivors that may be unmasked: the noise is enough for these
    threshold: int  # how many shares open a secret
    neighbours: int  # how many others each client shares keys with
    codec: Codec
    mechanism: Mechanism
    ring: Ring

    def __post_init__(self) -> None:
        cohort = self.sampling.cohort
        _check_range("rounds", self.rounds, 1, 1 << 31)
        _check_range("attempts", self.attempts, 1, 1 << 16)
        _check_range("participations", self.participations, 1, self.rounds * self.attempts)
        _check_range("quorum", self.quorum, 1, cohort)
        _check_range("colluders", self.colluders, 0, self.quorum - 1)
        _check_range("neighbours", self.neighbours, min(1, cohort - 1), cohort - 1)
        _check_range("threshold", self.threshold, 1, self.neighbours + 1)
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ConfigError(f"epsilon must be positive and finite, got {self.epsilon}")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta must be in (0, 1), got {self.delta}")
        if self.sampling.scheme is Scheme.ONCE and self.participations != 1:
            raise ConfigError(f"sampling `once` means one participation, got {self.participations}")

    @property
    def cohort(self) -> int:
        """How many clients are asked in a round, which is also what the sum is divided by."""
        return self.sampling.cohort

    @property
    def contributed(self) -> Noise | None:
        """The noise that the promise rests on: that of a quorum, without what the colluders know."""
        return self.noise(self.quorum).without(self.colluders)

    @property
    def sigma(self) -> float:
        """Standard deviation of that noise on the sum, in real units."""
        return math.sqrt(variance(self.contributed)) * self.codec.granularity if self.contributed else 0.0

    @property
    def noise_multiplier(self) -> float:
        """Sigma over the sensitivity of the stated adjacency, rounding included."""
        noise = self.contributed
        return math.sqrt(variance(noise)) / (self.adjacency.radii * float(noise.radius)) if noise else 0.0

    @property
    def wrap_probability(self) -> float:
        """Bound on the chance that some coordinate of a round's sum leaves the ring's range."""
        return wrap_probability(self.codec, self.mechanism, self.ring, largest_cohort(self.sampling))

    @property
    def digest(self) -> bytes:
        """Hash of everything agreed."""
        return digest("d2pfed plan", canonical.encode(self))

    def noise(self, survivors: int) -> Noise:
        """Return the law of the noise in a sum over so many clients."""
        return self.mechanism.noise(self.codec, survivors)

    def release(self, number: int, attempt: int, participants: tuple[int, ...], survivors: int) -> Release:
        """Describe what unmasking a sum over so many clients reveals, who are among the participants."""
        return Release(
            run="",
            round=number,
            attempt=attempt,
            unit=self.unit,
            adjacency=self.adjacency,
            sampling=self.sampling,
            noise=self.noise(survivors),
            participants=participants,
        )


TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(Plan, Adjacency, Sampling, Scheme, Unit, Observer, View, Codec, Ring, Hadamard, RandomPhase, Rounded),
        *(Centered, Shared, Designated, DDGauss, SkellamNoise, BinomialNoise),
    )
}


def decode_plan(text: str) -> Plan:
    """Return the plan that has exactly this canonical text."""
    plan = canonical.decode(text, TYPES)
    if not isinstance(plan, Plan):
        raise ConfigError(f"the text of a plan was expected, got that of a {type(plan).__name__}")
    return plan


def observers(plan: Plan) -> tuple[Observer, ...]:
    """Return those for whom an epsilon is always printed, together."""
    colluders = (colluding(plan.colluders),) if plan.colluders else ()
    return (RELEASED, SERVER, CLIENT, *colluders, ALONE)


def promises(plan: Plan) -> tuple[Spent, ...]:
    """Return what the whole plan spends against each observer, if every round has a quorum and no more."""
    releases = [plan.release(number, 0, (), plan.quorum) for number in range(plan.rounds)]
    return tuple(
        spent(releases, observer, delta=plan.delta, cap=plan.participations) for observer in observers(plan)
    )


def wrap_probability(codec: Codec, mechanism: Mechanism, ring: Ring, cohort: int) -> float:
    """Bound the chance that any coordinate of a sum over the cohort falls outside of [-m/2, m/2).

    After the rotation a coordinate is sub-Gaussian with proxy (cohort radius)^2 / length, a rounding, where there is
    one, adds at most 1/4 a client, and the noise its variance; a union bound over the coordinates does the rest.
    Skellam noise has heavier tails than that, so its own moment generating function takes the Gaussian's place.
    """
    noise, reach = mechanism.noise(codec, cohort), ring.modulus / 2
    signal = (cohort * float(codec.radius)) ** 2 / codec.length
    rounding = 0 if isinstance(mechanism, Centered) else cohort / 4
    proxy = signal + rounding + variance(noise)
    slope, excess = reach / proxy, 0.0
    if isinstance(noise, SkellamSum):
        slope = min(slope, 1.0)  # Chernoff's bound holds at any slope, and beyond 1 the excess explodes
        excess = variance(noise) * (math.cosh(slope) - 1 - slope**2 / 2)
    return min(1.0, 2 * codec.length * math.exp(min(0.0, slope * (slope * proxy / 2 - reach) + excess)))


def variance(noise: Noise) -> float:
    """Return the variance of a noise per coordinate, in squared steps."""
    match noise:
        case DiscreteGaussianSum():
            return float(noise.sigma**2 * noise.contributors)
        case SkellamSum():
            return float(noise.variance * noise.contributors)
        case BinomialSum():
            return noise.trials * noise.contributors / 4
        case ContinuousGaussian():
            return noise.sigma**2


def largest_cohort(sampling: Sampling) -> int:
    """Return the cohort that the ring must hold: of secret size, one that is exceeded once in a million rounds."""
    if sampling.scheme is not Scheme.POISSON:
        return sampling.cohort
    from scipy.stats import binom  # noqa: PLC0415 - slow to load, and only secret cohorts need it

    return int(binom.isf(1e-6, sampling.population, sampling.cohort / sampling.population))


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} must be in [{least}, {most}], got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a client insists on, whatever a server proposes; the defaults suit a cohort of strangers."""

    least_cohort: int = 10
    least_quorum: int = 8
    least_noise_multiplier: float = 0.3
    most_epsilon: float = 10.0  # of the plan's own promise
    most_delta: float = 1e-4
    most_participations: int = 100
    most_clip_norm: float = math.inf
    most_bits: int = 32

    def check(self, plan: Plan) -> None:
        """Refuse a plan that asks for more than this client gives."""
        _check_at_least("cohort", plan.cohort, self.least_cohort)
        _check_at_least("quorum", plan.quorum, self.least_quorum)
        _check_at_least("threshold", plan.threshold, (plan.neighbours + 1) // 2 + 1)
        _check_at_least("noise multiplier", plan.noise_multiplier, self.least_noise_multiplier)
        _check_at_most("epsilon", plan.epsilon, self.most_epsilon)
        _check_at_most("delta", plan.delta, self.most_delta)
        _check_at_most("participations", plan.participations, self.most_participations)
        _check_at_most("clip norm", plan.codec.clip_norm, self.most_clip_norm)
        _check_at_most("bits", plan.ring.bits, self.most_bits)


def _check_at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"this client's policy: {name} must be at least {least:g}, the plan has {value:g}")


def _check_at_most(name: str, value: float, most: float) -> None:
    if not value <= most:
        raise ConfigError(f"this client's policy: {name} must be at most {most:g}, the plan has {value:g}")
