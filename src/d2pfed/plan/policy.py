"""What runs where, and what a client insists on, whatever plan a server proposes.

Server and client ask one table for the plans that each protocol carries. A client refuses what the table does not list,
its own policy may narrow the list further, and it believes no number that the server wrote.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from d2pfed.accounting import SERVER, CohortSampling, Noise, Sampling, Unit, client_epsilon
from d2pfed.errors import ConfigError
from d2pfed.fields import Choice, check_arguments, check_between, check_fields
from d2pfed.noise.clipping import Extra
from d2pfed.noise.mechanisms import MechanismName, Protocol
from d2pfed.plan import bounds
from d2pfed.plan.plan import Plan, run_guarantee
from d2pfed.plan.target import PrivacyTarget
from d2pfed.plan.widths import noise_width
from d2pfed.secagg.lattice.parameters import LEAST_COHORT, colluders_in_committee
from d2pfed.secagg.pairwise.session import MOST_COHORT, require_shares
from d2pfed.secagg.standing.epoch import FEWEST_SILOS, MOST_SILOS, require_carried
from d2pfed.secagg.trust import Consistency


class Request(Choice):
    """What a server asks a client's data for."""

    TRAINING = "training"  # a trained update
    STATISTICS = "statistics"  # a vector of numbers about the data
    EVALUATION = "evaluation"  # how good a model is on the data


@dataclass(frozen=True, slots=True)
class Profile:
    """The plans that one protocol carries. Nothing is carried unless it is listed: no field has a default."""

    protocol: Protocol
    samplings: frozenset[Sampling]
    units: frozenset[Unit]
    extras: frozenset[Extra]
    cohorts: tuple[int, int]  # the least and the largest

    @property
    def mechanisms(self) -> frozenset[MechanismName]:
        """Those whose entry in the table of mechanisms names the protocol."""
        return frozenset(name for name in MechanismName if self.protocol in name.runs_in)

    def require(self, plan: Plan) -> None:
        """Refuse a plan with anything that this protocol does not carry."""
        listed: tuple[tuple[str, StrEnum, Collection[StrEnum]], ...] = (
            ("the mechanism", MechanismName.of(plan.mechanism), self.mechanisms),
            ("sampling", plan.sampling.method, self.samplings),
            ("the unit", plan.unit, self.units),
        )
        for what, found, allowed in listed:
            if found not in allowed:
                names = ", ".join(sorted(allowed))
                raise ConfigError(f"the {self.protocol} protocol takes {what} {names}, the plan has {found}")
        for extra in plan.extras:
            if extra not in self.extras:
                raise ConfigError(f"the {self.protocol} protocol does not take {extra}, the plan has it")
        least, most = self.cohorts
        if not least <= plan.cohort_size <= most:
            raise ConfigError(
                f"the {self.protocol} protocol takes cohorts of {least} to {most:,}, the plan has {plan.cohort_size}"
            )


_CLIENTS, _EVERYTHING = frozenset({Unit.CLIENT}), frozenset(Extra)
_DRAWN, _ALL_ASKED = frozenset({Sampling.FIXED, Sampling.ONCE, Sampling.NONE}), frozenset({Sampling.NONE})
PROFILES = {
    each.protocol: each
    for each in (
        Profile(Protocol.PAIRWISE, _DRAWN, _CLIENTS, _EVERYTHING, (2, MOST_COHORT)),
        Profile(Protocol.LATTICE, _DRAWN, _CLIENTS, _EVERYTHING, (LEAST_COHORT, bounds.MOST_SIGNED)),
        Profile(Protocol.STANDING, _ALL_ASKED, frozenset(Unit), _EVERYTHING, (FEWEST_SILOS, MOST_SILOS)),
    )
}


def require_standing(plan: Plan, enrolled: int) -> None:
    """Refuse a plan that standing keys do not carry: all of a roster with this many silos answer every round.

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
    """Refuse a plan that a protocol does not carry among this many enrolled clients; None: nobody is enrolled."""
    expected = Consistency.ASSUMED if enrolled is None else Consistency.SIGNED
    if plan.consistency is not expected:
        raise ConfigError(f"consistency must be {expected.value}, the plan has {plan.consistency.value}")
    match protocol:
        case Protocol.STANDING:
            require_standing(plan, enrolled or 0)
        case _:
            PROFILES[protocol].require(plan)
            if (plan.protocol is Protocol.LATTICE) != (protocol is Protocol.LATTICE):
                raise ConfigError(f"the plan runs in the {plan.protocol} protocol, not in {protocol}")


@dataclass(frozen=True, slots=True)
class Enrolled:
    """What a client's own roster says of the others: how many there are, and how the server draws them.

    `draws` counts the cohorts (under `once`, the partitions) that the server can choose among under all rosters that
    are to be expected: 2^depth for each; 0 where draws are not verified.
    """

    population: int
    draws: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a client insists on; the defaults suit a cohort of strangers.

    `mechanisms` are those with noise of each client's own, which no other client knows. `binomial` has that too, and
    is left out because its composition is far from tight: a few rounds use up what a budget holds.

    A client whose policy lists the unit record agrees to plans that protect single records and not all that it holds.

    Attributes:
        protocols: those that this client takes part in.
        units: what a plan may protect.
        requests: what a server may ask this client's data for.
        extras: what its vector may have beside an update, within the same radius.
        mechanisms: those that a plan may use.
        least_cohort: the smallest cohort.
        most_cohort: the largest cohort.
        least_quorum: the fewest survivors whose sum may be opened.
        least_colluders: the share of the population that the client wants to be safe from.
        least_noise_multiplier: of a sum over the quorum, without the colluders.
        most_epsilon: against the server and those colluders, as the client computes it.
        most_delta: the failure probability of that.
        most_participations: how often the client contributes to one run.
        most_clip_norm: the largest clip.
        most_bits: bits per coordinate.
        most_dimension: number of coordinates.
        most_fraction_bits: the finest centers of noise; 12 make a table of 4,096 rows.
        most_rounds: the longest run.
        most_attempts_per_round: how often a round may be tried.

    Examples:
        >>> target = PrivacyTarget(dimension=1000, population=10_000, cohort_size=500, rounds=10, epsilon=2.0)
        >>> plan = calibrate(target)
        >>> Policy(least_colluders=0.0, most_epsilon=0.5).check(plan)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        d2pfed.errors.ConfigError: this client's policy: epsilon against server must be at most 0.5, ...
    """

    protocols: tuple[Protocol, ...] = tuple(Protocol)
    units: tuple[Unit, ...] = (Unit.CLIENT,)
    requests: tuple[Request, ...] = tuple(Request)
    extras: tuple[Extra, ...] = tuple(Extra)
    mechanisms: tuple[MechanismName, ...] = tuple(
        name for name in MechanismName if name in PROFILES[Protocol.STANDING].mechanisms
    )
    least_cohort: int = 10
    most_cohort: int = bounds.MOST_SIGNED
    least_quorum: int = 8
    least_colluders: float = 0.1
    least_noise_multiplier: float = 0.3
    most_epsilon: float = 10.0
    most_delta: float = 1e-4
    most_participations: int = 100
    most_clip_norm: float = math.inf
    most_bits: int = 32
    most_dimension: int = 1 << 27
    most_fraction_bits: int = 12
    most_rounds: int = 100_000
    most_attempts_per_round: int = 100

    def __post_init__(self) -> None:
        kinds: dict[str, type[StrEnum]] = {
            "protocols": Protocol,
            "units": Unit,
            "requests": Request,
            "extras": Extra,
            "mechanisms": MechanismName,
        }
        for field, kind in kinds.items():
            given = getattr(self, field)
            is_list = isinstance(given, Collection) and not isinstance(given, str)
            if not is_list or not (len(given) or field == "extras"):
                raise ConfigError(f"{field} must name at least one of {', '.join(kind)}")
            object.__setattr__(self, field, tuple(kind(name) for name in given))
        check_fields(self)
        check_between("least_colluders", self.least_colluders, 0, 1, "[)")

    def check(self, plan: Plan, enrolled: Enrolled | None = None) -> None:
        """Refuse a plan that asks for more than this client gives.

        `enrolled` comes from the client's own roster, which makes the client one that insists on signed consistency.
        Without it the client believes that the server keeps to the protocol: consistency is assumed, the population
        is what the plan says, and cohorts are drawn as stated.

        Sizes are checked before anything is computed from them. Then the client puts its own number of colluders in
        the place of the plan's: the quorum rule, the shares' bounds and epsilon must hold with that. Epsilon is
        for replace-one neighbours, from the noise, the participations and delta alone; where the unit is a record, for
        the plan's adjacency and rate of coins, which the client tosses itself. Checked: test_policy.py.
        """
        check_arguments(Policy.check, locals())
        self._check_sizes(plan)
        _check_one_of("mechanism", MechanismName.of(plan.mechanism), self.mechanisms)
        _check_at_most("width of a client's noise", *noise_width(plan.codec, plan.mechanism))
        refusals = []
        for protocol in sorted(self.protocols, key=lambda each: each is not plan.protocol):  # the plan's own first
            try:
                self.require_served(protocol, plan, enrolled)
            except ConfigError as error:
                refusals.append(error)
        if len(refusals) == len(self.protocols):
            raise refusals[0]
        colluders = self.colluders(plan, enrolled)
        self._check_shares(plan, enrolled, colluders)
        # The noise of a quorum, and what the colluders know of it.
        whole = plan.noise(plan.quorum)
        left = whole.without(colluders)
        multiplier = 0.0 if left is None else math.sqrt(left.sum_variance) / (2 * float(left.radius))
        _check_at_least("noise multiplier", multiplier, self.least_noise_multiplier)
        for observer, noise in (("server", whole), (f"colluding({colluders})", left)):
            _check_at_most(f"epsilon against {observer}", _epsilon(plan, noise), self.most_epsilon)
        # With fewer than the client counts on, its account, which goes by the plan's number, would charge too little.
        _check_at_least("colluders", plan.colluders, colluders)

    def _check_sizes(self, plan: Plan) -> None:
        clip = plan.update_clip if plan.adaptive_clip is None else plan.adaptive_clip.most
        for name, value, limit in (
            ("cohort", plan.cohort_size, self.most_cohort),
            ("dimension", max(plan.codec.length, plan.codec.rotation.dimension), self.most_dimension),
            ("fraction bits", plan.codec.fraction_bits, self.most_fraction_bits),
            ("bits", plan.ring.bits, self.most_bits),
            ("clip norm", clip, self.most_clip_norm),
            ("rounds", plan.rounds, self.most_rounds),
            ("attempts per round", plan.attempts_per_round, self.most_attempts_per_round),
            ("delta", plan.delta, self.most_delta),
        ):
            _check_at_most(name, value, limit)
        _check_at_least("cohort", plan.cohort_size, self.least_cohort)
        _check_at_least("quorum", plan.quorum, self.least_quorum)
        if plan.unit is Unit.CLIENT:
            _check_at_most("max_participations", plan.max_participations, self.most_participations)

    def require_served(self, protocol: Protocol, plan: Plan, enrolled: Enrolled | None) -> None:
        """Refuse a protocol that this client does not take part in, and a plan that the protocol does not carry.

        A client asks this again of every invitation: the server chooses the protocol of an attempt.
        """
        _check_one_of("protocol", protocol, self.protocols)
        _check_one_of("unit", plan.unit, self.units)
        for extra in plan.extras:
            _check_one_of("extra coordinate", extra, self.extras)
        try:
            require_deployable(protocol, plan, None if enrolled is None else enrolled.population)
        except ConfigError as error:
            raise ConfigError(f"this client's policy: {error}") from None

    def require_request(self, request: Request) -> None:
        """Refuse to use this client's data for what it does not serve."""
        check_arguments(Policy.require_request, locals())
        _check_one_of("request", request, self.requests)

    def colluders(self, plan: Plan, enrolled: Enrolled | None) -> int:
        """Return how many of a cohort this client wants to be safe from, whatever number the plan has."""
        return bounds.colluders_within(self.least_colluders, *_drawn(plan, enrolled))

    def _check_shares(self, plan: Plan, enrolled: Enrolled | None, colluders: int) -> None:
        """Refuse numbers with which this many colluders could open a secret, or have two sets of survivors opened.

        All that a committee is follows from its size and its colluders, which a plan is checked for; those are counted
        here with the client's own share and draws. Checked: test_policy.py::test_attack_a_committee_of_colluders.
        """
        committee = plan.committee
        if committee is None:
            bounds.require_honest_majority(plan.cohort_size, plan.quorum, colluders)
            require_shares(plan.cohort_size, plan.threshold, plan.quorum, colluders)
            return
        _check_at_least("quorum", plan.quorum, colluders + 2)
        sampling, draws = _drawn(plan, enrolled)
        colluding = bounds.colluding_clients(self.least_colluders, sampling.population)
        choices = bounds.cohorts_to_choose(sampling, draws)
        own = colluders_in_committee(sampling.population, colluding, committee.size, choices)
        _check_at_least("colluders in the committee", committee.colluders, own)


def _drawn(plan: Plan, enrolled: Enrolled | None) -> tuple[CohortSampling, int]:
    """Return how cohorts are drawn from those whom a client knows to be enrolled, and among how many draws."""
    if enrolled is None:
        return plan.sampling, bounds.VERIFIED_DRAWS
    _check_at_most("population", plan.sampling.population, enrolled.population)
    return CohortSampling(plan.sampling.method, enrolled.population, plan.cohort_size), enrolled.draws


def _epsilon(plan: Plan, noise: Noise | None) -> float:
    if noise is None:
        return math.inf
    release = replace(plan.release("", 0, 0, (), plan.quorum), noise=noise)
    if plan.unit is Unit.RECORD:  # every vector that a silo may send, behind its own coins
        return run_guarantee(release, plan.max_attempts, SERVER, plan.delta, plan.max_participations).epsilon
    return client_epsilon([release] * plan.max_participations, plan.delta)


def default_refusal(target: PrivacyTarget, plan: Plan) -> str:
    """Return why a client with the default policy refuses a plan; empty if it accepts it."""
    is_signed = plan.consistency is Consistency.SIGNED
    try:
        Policy().check(plan, Enrolled(plan.sampling.population, target.draws) if is_signed else None)
    except ConfigError as error:
        return f"A client with the default policy refuses this plan: {error}."
    return ""


def _check_one_of(name: str, value: StrEnum, allowed: Sequence[StrEnum]) -> None:
    if value not in allowed:
        raise ConfigError(f"this client's policy: the {name} must be one of {', '.join(allowed)}, got {value}")


def _check_at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"this client's policy: {name} must be at least {least:g}, the plan has {value:g}")


def _check_at_most(name: str, value: float, most: float) -> None:
    if not value <= most:
        raise ConfigError(f"this client's policy: {name} must be at most {most:g}, the plan has {value:g}")
