"""Random plans for attacked clients: calibrated ones, ones that lie in one field, and settings that sit at the border.

A lie is a plan that is valid by itself: a field was changed after the calibration, so that its numbers do not fit
each other, the roster, or what the client asks for.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache

from d2pfed.accounting import Adjacency, BatchSampling, CohortSampling, Sampling, Unit
from d2pfed.errors import ConfigError
from d2pfed.noise.clipping import AdaptiveClip, Weighting
from d2pfed.noise.mechanisms import BinomialNoise, Centered, DDGauss, Shared, SkellamNoise
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import Stream, digest
from d2pfed.numerics.ring import Ring
from d2pfed.numerics.rotation import Hadamard, RandomPhase
from d2pfed.plan import Plan, PrivacyTarget, Protocol, calibrate
from d2pfed.plan.plan import decode_plan
from d2pfed.secagg.trust import Consistency
from support.attacked_clients import Group

SHARES = (0.0, 0.0, 0.05, 0.1, 0.2, 0.25, 0.3)
FEW = (0.05, 0.1)  # of a large roster: with more, no drawn cohort has an honest majority
LARGEST = 40  # of rosters whose cohorts may be all of them
BASES = 6  # calibrated plans for each kind of roster, protocol and unit; lies and settings vary them
REQUESTS = ("training", "statistics", "evaluation")


def among(stream: Stream, *values):
    return values[stream.below(len(values))]


@dataclass(frozen=True)
class Case:
    """A plan in its canonical text, what the victim insists on, and what the server is about to do with both."""

    group: Group
    protocol: Protocol
    unit: Unit
    lie: str
    text: str
    settings: dict[str, object]
    plan: Plan | None = field(repr=False)  # None: no client reads this text as a plan


def draw_case(
    stream: Stream, seed: str, group: Group, kind: tuple[Protocol, Unit], lies: tuple[str, ...]
) -> Case | None:
    """A case, or None if there is no such plan; `seed` is of the calibrated plans that others vary."""
    size, depth = len(group.roster.clients), group.roster.depth
    share, honest = _calibrated(f"{seed} {stream.below(BASES)}", size, depth, *kind)
    if honest is None:
        return None
    lie = lies[stream.below(len(lies))]
    try:
        plan: Plan | None = LIES[lie](honest, stream)
        text = canonical.encode(plan)
        if lie == "text":
            plan, text = _in_text(honest, stream)
    except ConfigError:
        return None
    settings = _settings(stream, plan or honest, kind[0], share)
    return Case(group, *kind, lie, text, settings, plan)


@cache
def _calibrated(
    base: str, size: int, depth: int | None, protocol: Protocol, unit: Unit
) -> tuple[float, Plan | None]:
    """One of the plans for rosters of a kind, None if there is none, and the share of colluders that a client fears."""
    stream = Stream(digest("base", f"{base} {size} {depth} {protocol} {unit}"))
    share = among(stream, *(SHARES if size <= LARGEST else FEW))
    try:
        return share, calibrate(PrivacyTarget(**_target(stream, size, depth, protocol, unit, share)))
    except ConfigError:
        return share, None


def _target(
    stream: Stream, size: int, depth: int | None, protocol: Protocol, unit: Unit, share: float
) -> dict[str, object]:
    rounds, spare = among(stream, 1, 1, 2, 3), among(stream, 0, 1, 2)
    other = (size - 1, size // 2, size + 1)  # of another roster
    usual = 8 if protocol is Protocol.PAIRWISE else 24
    population = max(3, among(stream, *(size,) * usual, *other))
    target: dict[str, object] = {
        "dimension": among(stream, 64, 100, 128, 256),
        "population": population,
        "cohort_size": population,
        "rounds": rounds,
        "spare": spare,
        "attempts_per_round": among(stream, 1, 2, 3),
        "epsilon": among(stream, 1.0, 4.0, 8.0, 30.0, 200.0),
        "delta": among(stream, 1e-5, 1e-5, 1e-6),
        "against": among(stream, "server", "server", "colluding(1)", "released"),
        "mechanism": among(stream, "centered", "centered", "ddgauss", "skellam"),
        "sampling": Sampling.NONE,
        "dropouts": among(stream, 0.0, 0.1, 0.2, 0.34),
        "colluders": max(share, among(stream, *(0.0,) * 9, *SHARES) if size <= LARGEST else 0.0),
        "draws": 0 if depth is None and size <= LARGEST else 4 << 5,  # in a large roster drawn or not: some lie
        "clip": among(stream, 1.0, 1.0, 0.01, 30.0),
        "rotation": among(stream, "hadamard", "hadamard", "phase"),
        "adjacency": among(stream, Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT),
        "consistency": Consistency.SIGNED,
    }
    if unit is Unit.RECORD:
        target |= {
            "unit": Unit.RECORD,
            "mechanism": "centered",
            "records": among(stream, 100, 5000),
            "batch_rate": among(stream, None, 0.01, 0.3, 1.0),
            "adjacency": among(stream, *Adjacency),
        }
    elif protocol is Protocol.PAIRWISE:
        target |= _pairwise(stream, population, is_large=size > LARGEST, rounds=rounds + spare)
    return target


def _pairwise(stream: Stream, size: int, *, is_large: bool, rounds: int) -> dict[str, object]:
    """Cohorts of all and of parts of the roster, drawn and listed, and the noise that one group holds together."""
    if is_large:
        return {"cohort_size": among(stream, 16, 20, 24), "sampling": Sampling.FIXED, "dropouts": 0.0}
    if stream.below(12) == 0:
        return {"mechanism": "shared", "dropouts": 0.0, "colluders": 0.0}
    sampling = among(stream, Sampling.NONE, Sampling.FIXED, Sampling.FIXED, Sampling.ONCE)
    cohort = among(stream, size, size, max(3, size // 2), max(3, size - 1))
    if sampling is Sampling.ONCE:
        return {"sampling": sampling, "cohort_size": max(1, size // rounds)}
    return {"sampling": sampling, "cohort_size": cohort, "max_participations": among(stream, None, 1)}


def _settings(stream: Stream, plan: Plan, protocol: Protocol, share: float) -> dict[str, object]:
    """What the victim insists on: mostly what the plan has, and now and then a little more."""
    other = next(each for each in Protocol if each is not protocol)
    odd = stream.below(25)
    settings: dict[str, object] = {
        "protocols": among(stream, list(map(str, Protocol)), [str(protocol)], [str(protocol)]),
        "units": among(stream, ["client", "record"], [str(plan.unit)]),
        "requests": list(REQUESTS) if stream.below(3) else [REQUESTS[stream.below(3)], REQUESTS[stream.below(3)]],
        "mechanisms": ["centered", "ddgauss", "skellam", "shared"],
        "least_cohort": among(stream, 3, plan.cohort_size),
        "least_quorum": among(stream, 3, plan.quorum),
        "least_colluders": share,
        "most_epsilon": among(stream, *(1e6,) * 4, 2 * plan.epsilon, 4 * plan.epsilon),
        "budget": among(stream, 1e6, 1e6, 1e6, 4 * plan.epsilon),
    }
    strict: list[dict[str, object]] = [
        {"protocols": [str(other)]},
        {"units": [str(among(stream, *Unit))]},
        {"mechanisms": [among(stream, "centered", "skellam")]},
        {"least_cohort": plan.cohort_size + 1},
        {"least_quorum": plan.quorum + 1},
        {"least_noise_multiplier": among(stream, 0.3, 1.0)},
        {"most_epsilon": among(stream, 1.0, 10.0), "budget": 10.0},
    ]
    return settings | (strict[odd] if odd < len(strict) else {})


# Lies: each returns a plan that is valid by itself, or raises ConfigError


def _width(plan: Plan, stream: Stream) -> Plan:
    """Another width: as steps of the noise, or as steps of the clip."""
    factor = among(stream, Fraction(1, 16), Fraction(1, 2), Fraction(9, 10), Fraction(11, 10), Fraction(2))
    if stream.below(2):
        return replace(plan, codec=replace(plan.codec, granularity=plan.codec.granularity * float(factor)))
    match plan.mechanism:
        case SkellamNoise():
            return replace(plan, mechanism=replace(plan.mechanism, variance=plan.mechanism.variance * factor))
        case BinomialNoise():
            return replace(plan, mechanism=BinomialNoise(plan.mechanism.trials * 2))
        case _:
            return replace(plan, mechanism=replace(plan.mechanism, sigma=plan.mechanism.sigma * factor))


def _mechanism(plan: Plan, stream: Stream) -> Plan:
    """Another mechanism of about that width."""
    sigma = getattr(plan.mechanism, "sigma", Fraction(50))
    return replace(
        plan,
        mechanism=among(
            stream,
            Centered(sigma),
            Shared(sigma),
            DDGauss(sigma),
            SkellamNoise(sigma**2),
            BinomialNoise(2 * math.ceil(2 * sigma**2)),
        ),
    )


def _number(*names: str) -> Callable[[Plan, Stream], Plan]:
    """One of these numbers, a little or much smaller or larger."""

    def lie(plan: Plan, stream: Stream) -> Plan:
        name = names[stream.below(len(names))]
        value = getattr(plan, name)
        return replace(plan, **{name: among(stream, value - 1, value + 1, 0, 1, 2 * value + 1, value // 2)})

    return lie


def _sampling(plan: Plan, stream: Stream) -> Plan:
    method, population, cohort = plan.sampling.method, plan.sampling.population, plan.cohort_size
    match stream.below(4):
        case 0:
            method = among(stream, *Sampling)
        case 1:
            population = max(
                cohort, among(stream, population - 1, population + 1, 2 * population, population // 2)
            )
        case 2:
            cohort = among(stream, cohort - 1, cohort + 1, max(3, cohort // 2))
            population = max(population, cohort)
        case _:
            method, cohort = Sampling.FIXED, max(3, cohort // 2)
    quorum = min(cohort, max(plan.quorum - plan.cohort_size + cohort, cohort // 2 + 1))
    threshold = min(plan.threshold, quorum) if cohort <= plan.cohort_size else max(plan.threshold, cohort // 2 + 1)
    sampling = CohortSampling(method, population, cohort)
    return replace(plan, sampling=sampling, quorum=quorum, threshold=threshold)


def _unit(plan: Plan, stream: Stream) -> Plan:
    """The other unit, or other coins."""
    batches = BatchSampling(Fraction(1, among(stream, 1, 2, 256, 1 << 32)), among(stream, 1, 1, 3))
    if plan.unit is Unit.RECORD and stream.below(2):
        return replace(plan, unit=Unit.CLIENT, batches=None, records=None, adjacency=Adjacency.REPLACE_ONE)
    return replace(
        plan,
        unit=Unit.RECORD,
        batches=batches,
        records=among(stream, 1, 1000),
        max_participations=plan.max_attempts,
        mechanism=Centered(max(Fraction(8), getattr(plan.mechanism, "sigma", Fraction(8)))),
        adjacency=among(stream, *Adjacency),
    )


def _weights(plan: Plan, stream: Stream) -> Plan:
    weighting = Weighting(cap=among(stream, 1.0, 10.0), clip=1.0, share=among(stream, 0.3, 0.9))
    return replace(plan, codec=_clipped(plan, 1.0), weighting=weighting)


def _adaptive(plan: Plan, stream: Stream) -> Plan:
    adaptive = AdaptiveClip(beta=among(stream, 0.1, 0.28), least=1e-3, most=1e3)
    return replace(plan, codec=_clipped(plan, adaptive.radius), adaptive_clip=adaptive)


def _clipped(plan: Plan, clip: float):
    """The codec with another clip, of as many steps."""
    return replace(plan.codec, clip=clip, granularity=plan.codec.granularity * clip / plan.codec.clip)


def _codec(plan: Plan, stream: Stream) -> Plan:
    codec = plan.codec
    changes: list[dict[str, object]] = [
        {"clip": codec.clip * among(stream, 0.5, 2, 100)},
        {"fraction_bits": among(stream, 0, 1, 8, 12, 16)},
        {"box": among(stream, codec.granularity, codec.clip / 2)},
        {"rotation": RandomPhase(codec.rotation.dimension)},
        {"rotation": Hadamard(codec.rotation.dimension)},
        {"rotation": Hadamard(codec.rotation.dimension + among(stream, -1, 1))},
    ]
    return replace(plan, codec=replace(codec, **changes[stream.below(len(changes))]))


def _ring(plan: Plan, stream: Stream) -> Plan:
    return replace(plan, ring=Ring(among(stream, 1, 2, 8, 16, 32, plan.ring.bits - 1, plan.ring.bits + 1)))


def _promise(plan: Plan, stream: Stream) -> Plan:
    """What the plan says of itself, which nobody should believe."""
    changes: list[dict[str, object]] = [
        {"epsilon": among(stream, 1e-3, 0.1, 1e3)},
        {"delta": among(stream, 1e-9, 1e-4, 1e-2)},
        {"adjacency": among(stream, *Adjacency)},
        {"consistency": Consistency.ASSUMED},
    ]
    return replace(plan, **changes[stream.below(len(changes))])


def _in_text(plan: Plan, stream: Stream) -> tuple[Plan | None, str]:
    """One number of the plan's text changed, whatever it is; None if no plan has the text."""
    text = canonical.encode(plan)
    found = list(re.finditer(r"(?<![\w.\"])\d+", text))
    place = found[stream.below(len(found))]
    value = int(place.group())
    text = (
        text[: place.start()]
        + str(among(stream, 0, 1, value + 1, max(0, value - 1), 2 * value))
        + text[place.end() :]
    )
    try:
        return decode_plan(text), text
    except ConfigError:
        return None, text


def _none(plan: Plan, stream: Stream) -> Plan:
    return plan


LIES: dict[str, Callable[[Plan, Stream], Plan]] = {
    "none": _none,
    "width": _width,
    "mechanism": _mechanism,
    "colluders": _number("colluders"),
    "quorum": _number("quorum"),
    "threshold": _number("threshold"),
    "participations": _number("max_participations", "max_attempts", "rounds", "attempts_per_round"),
    "sampling": _sampling,
    "unit": _unit,
    "weights": _weights,
    "adaptive clip": _adaptive,
    "codec": _codec,
    "ring": _ring,
    "promise": _promise,
    "text": _none,
}
USUAL = (*("none",) * len(LIES), *LIES)  # nearly half of all plans lie
