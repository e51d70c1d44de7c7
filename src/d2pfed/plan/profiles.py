"""What runs where: which features of a plan each way of running supports.

Calibration, server and client ask this one table. A client refuses what the table does not list, whatever the server
says, and its own policy may narrow the list further.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from d2pfed.accounting import Sampling, Unit
from d2pfed.errors import ConfigError
from d2pfed.noise.mechanisms import MechanismName, Protocol
from d2pfed.plan.bounds import MOST_COHORT
from d2pfed.plan.plan import Plan
from d2pfed.secagg.pairwise.graph import SIGNED_UP_TO, Consistency
from d2pfed.secagg.standing.epoch import FEWEST_SILOS, MOST_SILOS, require_carried


class Request(StrEnum):
    """What a server asks a client's data for.

    Attributes:
        TRAINING: a trained update.
        STATISTICS: a vector of numbers about the client's data.
        EVALUATION: how good a model is on the client's data.
    """

    TRAINING = "training"
    STATISTICS = "statistics"
    EVALUATION = "evaluation"


class Feature(StrEnum):
    """Parts of a plan that not every way of running has."""

    ADAPTIVE_CLIP = "an adaptive clip"
    WEIGHTS = "weights"
    SPARSE_GRAPH = "a sparse graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The plans that one way of running supports. Nothing is supported unless it is listed: no field has a default.

    Attributes:
        name: for errors.
        mechanisms: noise that it carries.
        samplings: how its cohorts are drawn.
        units: what its plans may protect.
        features: further parts that a plan may have.
        least_cohort: the fewest clients of a cohort.
        most_cohort: the most.
    """

    name: str
    mechanisms: frozenset[MechanismName]
    samplings: frozenset[Sampling]
    units: frozenset[Unit]
    features: frozenset[Feature]
    least_cohort: int
    most_cohort: int

    def require(self, plan: Plan) -> None:
        """Refuse a plan with anything that this way of running does not support."""
        self._require_one_of("the mechanism", MechanismName.of(plan.mechanism), self.mechanisms)
        self._require_one_of("sampling", plan.sampling.method, self.samplings)
        self._require_one_of("the unit", plan.unit, self.units)
        if unsupported := features_of(plan) - self.features:
            raise ConfigError(f"{self.name} does not take {' and '.join(sorted(unsupported))}, the plan has it")
        if not self.least_cohort <= plan.cohort_size <= self.most_cohort:
            raise ConfigError(
                f"{self.name} takes cohorts of {self.least_cohort} to {self.most_cohort:,}, the plan has "
                f"{plan.cohort_size}"
            )

    def _require_one_of(self, what: str, found: StrEnum, allowed: Collection[StrEnum]) -> None:
        if found not in allowed:
            listed = ", ".join(sorted(allowed))
            raise ConfigError(f"{self.name} takes {what} {listed}, the plan has {found}")


def _running_in(protocol: Protocol) -> frozenset[MechanismName]:
    return frozenset(name for name in MechanismName if protocol in name.runs_in)


SIMULATION = Profile(
    name="a simulation",
    mechanisms=frozenset(MechanismName),
    samplings=frozenset(Sampling),
    units=frozenset(Unit),
    features=frozenset(Feature),
    least_cohort=1,
    most_cohort=MOST_COHORT,
)
PROFILES = {
    Protocol.PAIRWISE: Profile(
        name="the pairwise protocol",
        mechanisms=_running_in(Protocol.PAIRWISE),
        samplings=frozenset({Sampling.FIXED, Sampling.ONCE, Sampling.NONE}),
        units=frozenset({Unit.CLIENT}),
        features=frozenset({Feature.SPARSE_GRAPH}),
        least_cohort=2,
        most_cohort=SIGNED_UP_TO,
    ),
    Protocol.STANDING: Profile(
        name="the standing protocol",
        mechanisms=_running_in(Protocol.STANDING),
        samplings=frozenset({Sampling.NONE}),
        units=frozenset({Unit.CLIENT, Unit.RECORD}),
        features=frozenset(),
        least_cohort=FEWEST_SILOS,
        most_cohort=MOST_SILOS,
    ),
}


def require_standing(plan: Plan, enrolled: int) -> None:
    """Refuse a plan that standing keys do not carry: all of a roster with so many silos answer every round.

    The server names the silos of an epoch, so no draw limits how many of them collude. Plans of standing keys
    therefore draw nobody, and their population is the roster, so that every colluder in it counts.
    Checked: test_profiles.py::test_standing_keys_under_a_plan_of_drawn_cohorts_are_refused.
    """
    PROFILES[Protocol.STANDING].require(plan)
    if not plan.cohort_size == plan.sampling.population == enrolled:
        raise ConfigError(
            f"standing keys are for all silos of a roster in every round, got {plan.cohort_size} of "
            f"{plan.sampling.population} and a roster of {enrolled}"
        )
    require_carried(plan.cohort_size, plan.quorum, plan.colluders, plan.rounds, plan.attempts_per_round)


def require_deployable(protocol: Protocol, plan: Plan, enrolled: int | None) -> None:
    """Refuse a plan that a protocol does not carry among so many enrolled clients; None: nobody is enrolled."""
    expected = Consistency.ASSUMED if enrolled is None else Consistency.SIGNED
    if plan.consistency is not expected:
        raise ConfigError(f"consistency must be {expected.value}, the plan has {plan.consistency.value}")
    match protocol:
        case Protocol.PAIRWISE:
            PROFILES[protocol].require(plan)
        case Protocol.STANDING:
            require_standing(plan, enrolled or 0)


def features_of(plan: Plan) -> frozenset[Feature]:
    """Return which of the further parts a plan has."""
    has = {
        Feature.ADAPTIVE_CLIP: plan.adaptive_clip is not None,
        Feature.WEIGHTS: plan.weighting is not None,
        Feature.SPARSE_GRAPH: plan.neighbours < plan.cohort_size - 1,
    }
    return frozenset(feature for feature, present in has.items() if present)
