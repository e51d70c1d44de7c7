"""What may be spent, and what a run is charged: wholly, when it begins."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import TypeVar

from d2pfed.accounting import RELEASED, Observer, Release, View, observer_named
from d2pfed.accounting.events import Adjacency, BatchSampling, CohortSampling, Sampling, Unit
from d2pfed.accounting.filters import Filter, FilterDecision, PlanCost
from d2pfed.accounting.laws import LAWS, ContinuousGaussian
from d2pfed.errors import BudgetExceeded, ConfigError, LedgerError
from d2pfed.fields import check_between, check_fields, check_positive
from d2pfed.numerics import canonical

Value = TypeVar("Value")

LARGEST = 2**63 - 1  # of SQLite's integers
MOST_ATTEMPTS = 1 << 31  # of one run

RELEASE_TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (Release, Unit, Adjacency, CohortSampling, BatchSampling, Sampling, *LAWS)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run as the ledger charges it: at most `max_attempts` releases, none of them worse than this one."""

    plan: bytes  # the digest of all that was agreed
    release: Release  # the worst that an attempt may release: of no run, round 0, with nobody known to take part
    rounds: int
    max_attempts: int  # how many attempts of the whole run may be charged
    attempts_per_round: int  # how many a round may have, void ones included
    max_participations: int  # the cap on one client's contributions to the run
    epsilon: float  # what the run guarantees by itself, for its observer
    delta: float
    observer: Observer

    def __post_init__(self) -> None:
        worst = self.release
        if (worst.run, worst.round, worst.attempt, worst.participants) != ("", 0, 0, ()):
            raise ConfigError("what a run is charged for must be a release of no run and nobody")
        if not 1 <= self.rounds <= self.max_attempts <= MOST_ATTEMPTS:
            got = f"{self.rounds} and {self.max_attempts}"
            raise ConfigError(f"a run needs at least one round and as many attempts, got {got}")
        if self.attempts_per_round < 1:
            raise ConfigError(f"attempts per round must be at least 1, got {self.attempts_per_round}")

    @property
    def budget(self) -> "Budget":
        """What the run may spend by itself, whatever else its ledger would still allow."""
        return Budget(self.epsilon, self.delta, self.observer, self.max_participations)

    @property
    def cost(self) -> PlanCost:
        """All that the run may release, as it is accounted for."""
        return PlanCost(self.release, self.max_attempts, self.max_participations)

    def require_guarantee(self) -> None:
        """Refuse a run whose attempts, all of them charged, would spend more than it guarantees by itself."""
        charged = charge_plans(self.budget, (self,))
        if not charged.admitted:
            raise BudgetExceeded(
                f"a run of {self.max_attempts} attempts spends epsilon {charged.composed_epsilon}, and it guarantees "
                f"{self.epsilon}"
            )


@dataclass(frozen=True, slots=True)
class Budget:
    """What all releases of a population may cost together, for which observer, at which cap of participations.

    Attributes:
        epsilon: bound on all runs together.
        delta: failure probability of that bound.
        observer: against whom they hold, or its name.
        max_participations: the most contributions of one client to a run that may be charged.
        declared: runs that were fixed before any output was seen: they are composed exactly.

    Examples:
        >>> str(Budget(2.0, 1e-5, "server", max_participations=3).observer)
        'server'
    """

    epsilon: float
    delta: float
    observer: Observer = RELEASED
    max_participations: int = 1
    declared: tuple[RunPlan, ...] = ()

    def __post_init__(self) -> None:
        named: object = self.observer
        if isinstance(named, str):
            object.__setattr__(self, "observer", observer_named(named))
        check_fields(self)
        check_positive("a budget's epsilon", self.epsilon)
        check_between("a budget's delta", self.delta, 0, 1, "[)")
        if not 1 <= self.max_participations <= LARGEST:
            raise ConfigError(f"a budget's max_participations must be in [1, 2^63), got {self.max_participations}")
        for plan in self.declared:
            self.require_like(plan)

    def require_like(self, plan: RunPlan) -> None:
        """Refuse a run that this budget does not speak of: another observer or delta, or a greater cap.

        A run is charged at its own cap, so a smaller one than the budget's costs less.
        """
        cap = min(self.max_participations, plan.max_participations)
        wanted = replace(self, epsilon=plan.epsilon, max_participations=cap, declared=())
        if plan.budget != wanted:
            wanted = replace(wanted, max_participations=self.max_participations)
            has, needs = (
                f"at delta {each.delta:g} against {each.observer} with at most {each.max_participations} "
                f"participation{'s' * (each.max_participations != 1)}"
                for each in (wanted, plan.budget)
            )
            raise ConfigError(f"the ledger has the budget {has}, this plan needs {needs}")


def charge_plans(budget: Budget, plans: Sequence[RunPlan]) -> FilterDecision:
    """Return whether whole runs, in the order in which they began, are within a budget, and what they cost.

    Guarantee: the budget holds whatever runs and stops were chosen from earlier outputs. Proof: theory.md#filters.
    """
    declared = tuple(plan.cost for plan in budget.declared)
    return Filter(budget.epsilon, budget.delta, budget.observer, declared).charge([plan.cost for plan in plans])


@dataclass(frozen=True, slots=True)
class ChargedRun:
    """A run that was charged: its name, whose it is, its plan, and what it began with."""

    run: str
    owner: str  # what tells its directory from all others
    plan: RunPlan
    software: str = ""  # the digest of the package that began it; empty: not recorded
    repeatable: bool = False  # from a seed, which undoes the noise

    def __post_init__(self) -> None:
        check_name(self.run)


def check_name(run: str) -> None:
    """Refuse a run's name that a person could not read."""
    if not run or not run.isprintable():
        raise ConfigError(f"a run needs a name of printable characters, got {run!r}")


def require_no_worse(release: Release, charged: Release) -> None:
    """Refuse a release that may tell more than the one that was charged: less noise, or another kind of any part.

    More contributors of the same noise are further independent noise on the sum, so what they release is a function
    of what was charged and of something that is no client's data.
    """
    for name in ("unit", "adjacency", "sampling", "batches"):
        planned, real = getattr(charged, name), getattr(release, name)
        if planned != real:
            raise LedgerError(f"{name} was charged as {planned}, and the release says {real}")
    noise, planned_noise = release.noise, charged.noise
    if isinstance(noise, ContinuousGaussian) or isinstance(planned_noise, ContinuousGaussian):
        is_no_worse = noise == planned_noise
    elif type(noise) is not type(planned_noise) or noise.contributors < planned_noise.contributors:
        is_no_worse = False
    else:
        rest = _OTHER_FIELDS[type(noise)]  # to compare fractions takes less time than to hash them for a cache
        is_no_worse = rest(noise) == rest(planned_noise)
    if not is_no_worse:
        raise BudgetExceeded(f"its noise is {noise}, and what was charged has {planned_noise}")


_OTHER_FIELDS = {
    kind: attrgetter(*(item.name for item in fields(kind) if item.name != "contributors")) for kind in LAWS
}


_TYPES = RELEASE_TYPES | {kind.__name__: kind for kind in (Budget, RunPlan, ChargedRun, Observer, View)}


def decode_body(text: str, kind: type[Value]) -> Value:
    """Return the `Budget` or `ChargedRun` that has exactly this text."""
    name = "budget" if kind is Budget else "charged run"
    try:
        return canonical.decode(text, _TYPES, kind)
    except ConfigError as error:
        raise LedgerError(f"not the text of a {name}, or of another version: {error}") from error
