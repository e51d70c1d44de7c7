"""Check a certificate of d2pfed without d2pfed: `python certificate_verifier.py FILE --key PUBLIC`.

It checks the signed bytes, that all fields agree, and that each claimed epsilon is at least its own bound less 0.1 %.
Exit status: 0 all of it holds; 1 something is wrong; 2 it cannot be read; 3 something that is named was not checked.
"""

import argparse
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from dp_accounting import pld
from dp_accounting.rdp import compute_epsilon
from scipy.special import log_ndtr, logsumexp, ndtr
from scipy.stats import binom

FORMAT = "d2pfed certificate 1"
FIELDS = """format issued subject released unit adjacency mechanism sampling participations colluders dropouts tuning
    trust_model evaluation assumptions not_covered software plan events claims ledger"""
CLAIM = "observer epsilon delta max_participations scope runs unit adjacency accountant sampling reason"
# The same fact in an event, in a plan's text and as it is stated for readers, of all runs and of the run of a plan.
FACTS = """unit,unit.is,unit.name adjacency,adjacency.is,adjacency.name method,sampling.method.is,sampling.method
    population,sampling.population,sampling.population cohort_size,sampling.cohort_size,sampling.cohort_size"""
PLANNED = """ releases,max_attempts,released.at_most ,colluders,colluders.of_a_cohort ,quorum,dropouts.quorum
    max_participations,max_participations,participations.max_participations ,rounds,subject.rounds_planned
    dimension,,mechanism.dimension ,consistency.is,trust_model.consistency ,ring.bits,mechanism.bits"""
MECHANISM = Literal["Centered", "Shared", "Designated", "DDGauss", "SkellamNoise"]  # as plans spell them
TOLERANCE = 1e-3  # relative: a claim may be so much below this file's own bound, as two grids are never the same
LEAST_DELTA, MOST_RUNS, MOST_COINS = 1e-11, 6, 64  # of loss distributions: beyond are rounding errors and minutes
MOST_BYTES, MOST_CLAIMS, OBSERVERS = 1 << 22, 1000, {"released", "server", "client", "alone"}
_SPELLED: dict[type, str] = {str: r"(?s).+", bytes: r"([0-9a-f]{64}){1,2}", int: r"[1-9][0-9]{0,9}"}
_SPELLED[Fraction] = r"[1-9][0-9]{0,79}(/[1-9][0-9]{0,79})?"

Json = dict[str, Any]
Floats = np.ndarray[Any, Any]


class Wrong(Exception):  # noqa: N818 - the name of the finding
    """The certificate says something that is not so."""


class Unchecked(ValueError):  # noqa: N818 - as above
    """This file has no arithmetic for it."""


@dataclass
class Findings:
    """What was found: a kind (holds, WRONG, NOT CHECKED) and a line each."""

    lines: list[tuple[str, str]] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The exit status."""
        return 1 if "WRONG" in dict(self.lines) else 3 if "NOT CHECKED" in dict(self.lines) else 0

    def note(self, what: str, check: Callable[[], str]) -> bool:
        """Run a check, keep what it finds, in letters that move no cursor, and return whether it holds."""
        try:
            kind, text = "holds", check()
        except (ValueError, ArithmeticError, RecursionError, MemoryError) as error:  # Unchecked, or beyond all
            kind, text = "NOT CHECKED", str(error)
        except (Wrong, LookupError, TypeError, AttributeError) as error:  # the latter: fields of another kind
            kind, text = "WRONG", str(error) if isinstance(error, Wrong) else f"it cannot be read: {error!r:.80}"
        self.lines.append((kind, "".join(each if each.isprintable() else "?" for each in f"{what}: {text}")))
        return kind == "holds"


def canonical(value: object) -> bytes:
    """Return the one text of a certificate, or of its statement."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode()


def read(path: Path) -> tuple[bytes, Json]:
    """Return the bytes of a certificate and what they say; ValueError if it is none."""
    try:
        with path.open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
        content = json.loads(data[:MOST_BYTES], parse_constant=int)  # refuses NaN and the infinities
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"no certificate of at most {MOST_BYTES} bytes: {str(error)[:200]}: {path}") from None
    statement = content.get("statement") if isinstance(content, dict) else None
    if not isinstance(statement, dict) or statement.get("format") != FORMAT:
        raise ValueError(f"{path} is not a certificate of the format {FORMAT!r}")
    return data, content


def check_bytes(data: bytes, content: Json) -> str:
    """Find any change of any byte of a signed file."""
    if set(content) != {"statement", "public_key", "signature"} or canonical(content) != data:
        raise Wrong("the file is not the one text of a certificate's content: a byte was changed")
    public, signature = (_read(content[name], bytes) for name in ("public_key", "signature"))
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, canonical(content["statement"]))
    except (InvalidSignature, ValueError):
        raise Wrong("it is not that of the key under this statement") from None
    return f"that of the Ed25519 key {public.hex()}"


def check_key(public: str, keys: Sequence[str]) -> str:
    """Find a signature by another key than the expected ones."""
    if public not in keys:
        raise (Wrong if keys else Unchecked)(f"{public} is not a key that was named with --key")
    return "the key that was asked for"


def _read(value: object, kind: Any) -> Any:  # noqa: ANN401 - a type, and a value of it
    """Return what a field says: a whole number, or a text, bytes in hexadecimal or a fraction, each of one spelling."""
    known, spelled = get_args(kind), _SPELLED.get(kind, "")
    if known and value not in known:
        raise Unchecked(f"{str(value)[:40]!r}, where {', '.join(known)} are known")
    if spelled and (type(value) is not (int if kind is int else str) or not re.fullmatch(spelled, str(value))):
        raise Wrong(f"{spelled} was expected, got {str(value)[:40]!r}")
    return value if known else bytes.fromhex(str(value)) if kind is bytes else kind(value)


@dataclass(frozen=True, kw_only=True)
class Event:
    """One charged run: so many equal releases, and all that their cost depends on."""

    run: str
    row: str  # of the ledger: its number and its hash
    plan: bytes  # its digest
    software: str  # the digest of the package that began it: the signer's word
    unit: Literal["client", "record"]
    adjacency: Literal["replace-one", "zero-out", "add-remove"]
    method: Literal["fixed", "poisson", "once", "none"]  # how cohorts are drawn
    population: int
    cohort_size: int
    rate: Fraction  # the probability that a unit is in a release: a client's, or that of a record's secret coin
    coins: int  # how many such coins a unit has: a person's records may be in several silos
    kind: Literal["discrete-gaussian", "skellam"]
    variance: Fraction  # of one contributor's noise, in squared lattice steps
    contributors: int
    radius: Fraction  # L2 bound on what a unit adds to a sum, in lattice steps
    l1_radius: Fraction  # the same in L1
    dimension: int
    releases: int
    max_participations: int

    def __post_init__(self) -> None:
        drawn, rounds = Fraction(self.cohort_size, self.population), self.releases if self.method == "once" else 1
        if self.unit == "client" and (self.adjacency == "add-remove" or self.rate != drawn):
            raise Wrong(f"a client has the rate {drawn} and not {self.rate}, and never {self.adjacency}")
        if self.rate > 1 or (self.coins > 1 and (self.unit == "client" or self.adjacency == "replace-one")):
            raise Wrong(f"{self.coins} coins of rate {self.rate} are none of a {self.unit} under {self.adjacency}")
        if not self.contributors <= self.cohort_size <= self.population // rounds:
            raise Wrong(
                f"{rounds} x {self.cohort_size} clients of {self.population} with {self.contributors} noises"
            )
        if self.l1_radius**2 < min(self.radius**2, Fraction(self.dimension)) * self.radius**2:  # theory 12
            raise Wrong(f"an l1_radius of {float(self.l1_radius):g} is too small for {float(self.radius):g} in L2")

    def is_hidden(self, observer: str) -> bool:
        """Whether it cannot know in which releases a unit is: coins of records are secret, cohorts for `released`."""
        is_drawn = self.method == "fixed" or (self.method == "poisson" and self.contributors == 1)  # or sizes show
        return self.rate < 1 and (self.unit == "record" or (is_drawn and observer == "released"))

    def unknown(self, observer: str) -> int:
        """Return how many contributors' noise the observer does not know."""
        if observer == "alone":
            return min(1, self.contributors - 1)  # a single contributor may be another client
        colluding = re.fullmatch(r"colluding\(([1-9][0-9]{0,8})\)", observer, re.ASCII)
        if colluding is None and observer not in OBSERVERS:
            raise Unchecked(f"the observer {observer[:40]!r}")
        return self.contributors - (int(colluding[1]) if colluding else observer == "client")


def event_of(given: Json) -> Event:
    """Return an accounting event; refuses fields that are missing, superfluous or out of range."""
    kinds = {item.name: item.type for item in fields(Event)}
    if set(given) != set(kinds):
        raise Wrong(f"an event has the fields {', '.join(kinds)}, got {', '.join(given)[:200]}")
    return Event(**{name: _read(given[name], kind) for name, kind in kinds.items()})


def check_plan(statement: Json, events: Sequence[Event]) -> str:
    """Compare a run's event and all that is stated of it with the plan whose digest its clients hold."""
    text, name, own, plan = statement["plan"], statement["subject"]["name"], events[-1], None
    found = "none: this is about a ledger, whose runs' plans are named by their digests"
    if text is not None:
        parts = [b"s" + len(part).to_bytes(8, "big") + part for part in (b"d2pfed plan", str(text).encode())]
        digest, own = hashlib.sha256(b"".join(parts)).digest(), {event.run: event for event in events}[name]
        plan, found = dict(json.loads(text)), f"its digest is {digest.hex()}; {name} is what it allows at worst"
        if own.plan != digest or json.dumps(plan, sort_keys=True, separators=(",", ":")) != text:
            raise Wrong(f"its digest is {digest.hex()}, and that of the event of {name} is {own.plan.hex()}")
        rounds, size = [statement["subject"]["rounds_complete"], plan["rounds"], own.releases], own.cohort_size
        ranks = [[0, *rounds], [0, plan["cut_off"], plan["quorum"], size], [0, plan["codec"]["fraction_bits"], 64]]
        ranks += [[min(2, size), plan["threshold"], plan["neighbours"] + 1, size]]
        if odd := [rank for rank in ranks if rank != sorted(rank)]:
            raise Wrong(f"its numbers {str(odd[0])[:80]} are not in their order")
    facts = [fact.split(",") for fact in (FACTS + PLANNED if plan is not None else FACTS).split()]
    pairs = [(told, getattr(own, name)) for name, _, told in facts if name]
    pairs += [(told, reduce(getitem, path.split("."), plan)) for _, path, told in facts if path] if plan else []
    for name, value in [*pairs, *_computed(plan, own, events)]:
        told = reduce(getitem, name.split("."), statement) if "." in name else getattr(own, name)
        is_close = isinstance(value, float) and isinstance(told, float) and math.isclose(told, value, rel_tol=1e-9)
        if type(value) is not type(told) or not (is_close or value == told):
            raise Wrong(f"{name} is stated as {str(told)[:80]}, and it is {str(value)[:80]}")
    return found


def _computed(plan: Json | None, own: Event, events: Sequence[Event]) -> Iterator[tuple[str, object]]:
    """Yield what an event, or the statement, must say by a plan's text and by the other events."""
    yield from (("sampling.rate", str(own.rate)), ("tuning.runs_on_this_ledger", len(events)))
    if plan is None:
        yield "subject.runs", [event.run for event in events]
        yield from (("subject.kind", "ledger"), ("released.at_most", sum(event.releases for event in events)))
        return
    mechanism, codec, grid = plan["mechanism"], plan["codec"], 1 << plan["codec"]["fraction_bits"]
    clip, step = (abs(float.fromhex(codec[name]["is"])) for name in ("clip", "granularity"))
    radius, root = Fraction(math.floor(Fraction(clip) / Fraction(step) * grid), grid), math.sqrt(own.dimension)
    if mechanism[""] != "Centered":  # lengthened by conditional rounding (Kairouz, Liu and Steinke 2021)
        spread, plain = math.sqrt(-2 * math.log(float.fromhex(mechanism["rounded"]["beta"]["is"]))), float(radius)
        square = min((plain + root) ** 2, plain**2 + root**2 / 4 + spread * (plain + root / 2))
        radius = max(own.radius, Fraction(math.sqrt(square) * (1 - 1e-12)))
    name, turn, view = _read(mechanism[""], MECHANISM), codec["rotation"], plan["against"]
    size, is_skellam, missing = turn["dimension"], name == "SkellamNoise", own.cohort_size - plan["quorum"]
    yield from (("radius", radius), ("kind", "skellam" if is_skellam else "discrete-gaussian"))
    yield "dimension", 1 << (size - 1).bit_length() if turn[""] == "Hadamard" else max(size, own.dimension)
    yield "variance", _read(mechanism["variance" if is_skellam else "sigma"]["is"], Fraction) ** (2 - is_skellam)
    yield "contributors", 1 if name in ("Shared", "Designated") else plan["quorum"] - plan["cut_off"]
    if own.unit == "record":
        yield "rate", _read(plan["batches"]["rate"]["is"], Fraction)
        yield "coins", plan["batches"]["max_silos"]
    yield "trust_model.against", f"colluding({view['colluders']})" if view["colluders"] else view["view"]["is"]
    yield "ledger.budget.delta", float.fromhex(plan["delta"]["is"])
    yield "mechanism.clip", "adaptive" if "adaptive_clip" in plan else clip
    yield from (("mechanism.name", name.lower().removesuffix("noise")), ("dropouts.tolerated", missing))
    width = math.sqrt(own.variance * max(own.contributors - plan["colluders"], 0))
    shift = float(own.radius) * (2 if own.adjacency == "replace-one" else 1)
    yield from (("mechanism.sigma", width * step), ("mechanism.noise_multiplier", width / shift))


@dataclass(frozen=True)
class Part:
    """An event as one observer sees it; widths are in lattice steps."""

    event: Event
    left: int  # contributors whose noise is unknown
    count: int  # of releases in which a unit may be known to take part
    is_hidden: bool
    shift: float  # how far neighbours are apart where a unit takes part
    variance: float  # of the noise that is left
    excess: float  # what a cap on participations adds to delta while cohorts are hidden (theory 14)


def eta(width: float) -> float:
    """Bound by how much the mass of a lattice Gaussian varies with its centre (theory 5)."""
    if width < 0.4:
        raise Unchecked(f"noise that is {width:.3g} steps wide is too narrow for any bound")
    q = math.exp(-2 * (math.pi * width) ** 2)
    return 2 * q / (1 - q**3)


def gap(part: Part) -> float:
    """Return how far, per coordinate, a sum of discrete Gaussians is from one of them (theory 6)."""
    widths = [math.sqrt(float(part.event.variance) * k / (k + 1)) for k in range(1, min(part.left, 1 << 12))]
    tails = [2 * math.atanh(eta(width)) for width in widths] or [0.0]
    return math.fsum(tails) + max(0, part.left - 1 - len(widths)) * tails[-1]  # wider ones add less than the last


def surrogate(part: Part, releases: int) -> tuple[float, float] | None:
    """Return the variance of a Gaussian that stands for the noise, and the slack per release (theory 7, 8)."""
    if part.event.kind != "discrete-gaussian":
        return None
    width, apart, share = math.sqrt(part.variance), gap(part), 1e-6 / (releases * part.event.dimension)
    allowed = max(share - apart, apart, 4 * eta(width))
    low, high = 0.4, 0.75 * width
    if high < low or not _smoothing(width, high) <= allowed < 1:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _smoothing(width, middle) <= allowed else (middle, high)
    return part.variance - high * high, part.event.dimension * (apart + _smoothing(width, high))


def _smoothing(width: float, smoothing: float) -> float:
    posterior, worst, own = eta(smoothing * math.sqrt(2 - (smoothing / width) ** 2)), eta(smoothing), eta(width)
    above = math.log1p(posterior + worst * worst / (1 - worst)) + math.log1p(own)
    return max(above, -math.log1p(-posterior) - math.log1p(-own))


def gaussian_delta(epsilon: Floats, mu: float, rate: float = 1.0) -> Floats:
    """Return the profile of Gaussians `mu` standard deviations apart, drawn at a rate (theory 3, 9)."""
    epsilon = np.log1p(np.expm1(epsilon) / rate) if rate < 1 else epsilon
    upper, lower = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return np.asarray(-rate * np.exp(upper) * np.expm1(np.minimum(lower - upper, 0.0)))


def renyi_epsilon(parts: Sequence[Part], delta: float) -> float:
    """Return epsilon by the Renyi curves of sums of discrete Gaussians (theory 6) and Skellam noises (theory 12)."""
    orders = np.unique(np.rint(np.geomspace(2, 1 << 30, 3000)))
    total = np.zeros(len(orders))
    for part, dimension in ((part, part.event.dimension) for part in parts):
        shift, variance = part.shift, part.variance
        if part.event.kind == "skellam":
            l1 = min(float(part.event.l1_radius / part.event.radius), shift, math.sqrt(dimension)) * shift
            extra = np.minimum(((2 * orders - 1) * shift**2 + 6 * l1) / (4 * variance**2), 1.5 * l1 / variance)
        else:
            lattice = orders * 2 * math.atanh(eta(math.sqrt(variance))) + (2 * orders - 1) * gap(part)
            extra = dimension * lattice / (orders - 1)
        total += part.count * (orders * shift**2 / (2 * variance) + extra)
    return float(compute_epsilon(orders.tolist(), total.tolist(), delta)[0])


def known_epsilon(parts: Sequence[Part], delta: float) -> float:
    """Return epsilon where it is known who takes part: Gaussians' squared ratios add, else Renyi curves do."""
    squared = slack = 0.0
    for part in parts:
        smooth = surrogate(part, sum(each.count for each in parts))
        if smooth is None:
            return renyi_epsilon(parts, delta)
        squared += part.count * part.shift**2 / smooth[0]
        slack += part.count * smooth[1]
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        is_enough = gaussian_delta(np.array([middle]), math.sqrt(squared))[0] <= delta * math.exp(-slack)
        low, high = (low, middle) if is_enough else (middle, high)
    return high + 2 * slack if high < 1e6 else math.inf


def hidden_epsilon(parts: Sequence[Part], delta: float, claimed: float) -> float:
    """Return epsilon where it is hidden who takes part, by privacy-loss distributions (theory 9, 10)."""
    counts = [part.event.releases if part.is_hidden else part.count for part in parts]
    if delta < LEAST_DELTA or len(parts) > MOST_RUNS or sum(counts) > 10**6 or parts[0].event.coins > MOST_COINS:
        raise Unchecked(f"{sum(counts)} releases of {len(parts)} runs at delta {delta:g} behind sampled cohorts")
    step, total, slack, excess = min(claimed / max(4096, 256 * math.sqrt(sum(counts))), 1e-3), None, 0.0, 0.0
    for part, count in zip(parts, counts, strict=True):
        smooth = surrogate(part, sum(counts))
        if smooth is None:
            raise Unchecked("noise behind sampled cohorts that no Gaussian stands for")
        slack += count * smooth[1]
        losses = _losses(part, math.sqrt(smooth[0]), step, delta / sum(counts)).self_compose(count)
        total = losses if total is None else total.compose(losses)
        excess += part.excess if part.is_hidden else 0.0
    left = delta * math.exp(-slack) - excess
    return math.inf if left <= 0 or total is None else float(total.get_epsilon_for_delta(left)) + 2 * slack


def _losses(part: Part, sigma: float, step: float, delta: float) -> Any:  # noqa: ANN401 - dp-accounting has no types
    """Return the privacy losses of one release, from above, on a grid."""
    event, mu, rate, top = part.event, float(part.event.radius) / sigma, float(part.event.rate), step
    if not part.is_hidden:
        profile = partial(gaussian_delta, mu=part.shift / sigma)
    elif event.unit == "client" and event.method == "fixed":  # who is not drawn is replaced by another: two radii
        profile = partial(gaussian_delta, mu=2 * mu, rate=rate)
    elif event.adjacency == "replace-one":
        profile = partial(opposite_delta, mu=mu, rate=rate)
    else:
        profile = partial(coins_delta, mu=mu, rate=rate, coins=event.coins)
    while top < 600 and profile(np.array([top]))[0] > delta * 1e-6:
        top *= 1.25
    if not top < min(600, step * (1 << 20)):
        raise Unchecked("losses behind sampled cohorts that are too wide for a grid")
    points = np.arange(-math.ceil(top / step), math.ceil(top / step) + 1)
    grid, ratio = points * step, np.exp(points * step)
    own = profile(grid if profile.func is coins_delta else np.abs(grid))
    orders = [own, 1 - ratio + ratio * own[::-1]]  # the world with the unit keeps its place: each by itself
    if profile.func is not coins_delta:  # both orders are the same (theory 1, H2)
        orders = [np.where(points >= 0, own, 1 - ratio + ratio * own)]
    deltas = [np.minimum.accumulate(np.clip(order, 0.0, 1.0)) for order in orders]
    if not np.isfinite(deltas).all():
        raise Unchecked("losses behind sampled cohorts that are beyond all numbers")
    dots = partial(pld.pld_pmf.create_pmf_pessimistic_connect_dots, step, points)
    return pld.privacy_loss_distribution.PrivacyLossDistribution(*map(dots, deltas))


def opposite_delta(epsilon: Floats, mu: float, rate: float) -> Floats:
    """Return the profile of a vector against its opposite behind a secret coin (theory 10)."""
    c = (1 - rate) * np.expm1(np.maximum(epsilon, 1e-300))
    sinh = np.log(c / (2 * rate)) + (mu * mu - epsilon) / 2  # its logarithm, as it may be beyond all numbers
    passed = (epsilon / 2 + np.logaddexp(sinh, np.logaddexp(0.0, 2 * sinh) / 2)) / mu  # here the loss is epsilon
    gain = rate * (ndtr(mu - passed) - np.exp(epsilon + log_ndtr(-mu - passed))) - c * ndtr(-passed)
    return np.asarray(np.maximum(gain, 0.0))


def coins_delta(epsilon: Floats, mu: float, rate: float, coins: int) -> Floats:
    """Return the profile of a unit with secret coins against none (theory 10): chords of a convex function."""
    heads, z = np.arange(coins + 1)[:, None], np.linspace(-40.0, 40.0 + coins * mu, 1 << 15)
    chances = binom.pmf(heads, coins, rate)
    loss = logsumexp(heads * mu * z - (heads * mu) ** 2 / 2, axis=0, b=chances)
    gain = (chances * ndtr(heads * mu - z)).sum(axis=0) - np.exp(loss + log_ndtr(-z))
    seen, ratio = loss < 650, np.exp(epsilon)
    return np.asarray(np.maximum(np.interp(ratio, np.exp(loss[seen]), gain[seen]), 1 - ratio))


def own_bound(events: Sequence[Event], observer: str, delta: float, claimed: float) -> float:
    """Return this file's own epsilon; infinite if the observer knows all of a noise."""
    parts = []
    for each in events:
        left, shift = each.unknown(observer), each.radius * (2 if each.adjacency == "replace-one" else each.coins)
        cap = each.releases if each.unit == "record" else min(each.max_participations, each.releases)
        others = binom(each.releases - 1, min(1.0, each.cohort_size / max(1, each.population - 1)))
        cost = float(each.releases * each.rate * (each.method == "fixed")) * float(others.sf(cap - 1))
        parts += [Part(each, left, cap, each.is_hidden(observer), float(shift), float(each.variance) * left, cost)]
    if any(part.left < 1 for part in parts):
        return math.inf
    known = known_epsilon(parts, delta)
    if claimed >= known * (1 - TOLERANCE) or not any(part.is_hidden for part in parts):
        return known
    ways = {(*parts,), tuple(replace(part, is_hidden=part.is_hidden and not part.excess) for part in parts)}
    return min(known, *(hidden_epsilon(way, delta, max(claimed, 1e-6)) for way in ways))


def check_claim(claim: Json, events: Sequence[Event]) -> str:
    """Compare one claimed epsilon with this file's own."""
    observer, delta, claimed, runs = (claim[name] for name in ("observer", "delta", "epsilon", "runs"))
    covered = [event for event in events if event.run in runs]
    if not len(covered) == len(runs) == {"run": 1}.get(claim["scope"], len(events)):
        raise Wrong(f"it covers the runs {str(runs)[:80]}, and the events are of others")
    same = claim.get("unit", covered[0].unit), claim.get("adjacency", covered[0].adjacency), covered[0].coins
    is_capped = claim["scope"] != "run" or claim["max_participations"] == covered[0].max_participations
    if any((event.unit, event.adjacency, event.coins) != same for event in covered) or not is_capped:
        raise Wrong("unit, adjacency, cap or a person's silos are not the same in it and in all of its events")
    if claimed is None:
        return "nothing is claimed, epsilon is infinite"
    if claim.get("reason") or not (type(claimed) is type(delta) is float and claimed > 0 and 0 < delta < 1):
        raise Wrong(f"0 < epsilon (or null) and 0 < delta < 1 are expected, got {str((claimed, delta))[:80]}")
    own = own_bound(covered, _read(observer, str), delta, claimed)
    if not claimed >= own * (1 - TOLERANCE):
        raise Wrong(f"epsilon {claimed:.6g} is claimed at delta {delta:.3g}, and it is {own:.6g}")
    return f"epsilon {claimed:.6g} at delta {delta:.3g}; recomputed {own:.6g}"


def check_content(statement: Json, events: list[Event]) -> str:
    """Read the events, and find fields that are missing, and claims, observers or runs that were left out."""
    claims, ledger, names = statement["claims"], statement["ledger"], [row["run"] for row in statement["events"]]
    rows = [row["row"] for row in statement["events"]] + [ledger["head"]]
    places = [int(re.findall(r"\A([0-9]{1,18}):[0-9a-f]{64}\Z", row)[0]) for row in rows]
    if places != sorted(places) or {len(set(places[:-1])), len(set(names)), ledger["runs"]} != {len(names) or -1}:
        raise Wrong(f"the events are of {len(set(names))} runs, and the ledger has others: {str(ledger)[:80]}")
    events.extend(map(event_of, statement["events"]))
    kinds = {(event.plan, replace(event, run="", row="", software="")) for event in events}
    if len(kinds) > len(dict(kinds)):
        raise Wrong("events with the digest of one plan differ in what it allows")
    odd = set(statement) ^ set(FIELDS.split()) | set(ledger["budget"]) ^ set(CLAIM.split()[:4])
    odd |= {name for name, value in statement.items() if not value and name != "plan"}
    for each in claims:
        odd |= set(each) ^ set(CLAIM.split()) | {each["scope"]} - {"run", "ledger"}
        odd |= {f"delta {each['delta']}"} - {f"delta {ledger['budget']['delta']}"}
    if odd:
        raise Wrong(f"fields are missing, superfluous, empty or not the budget's: {', '.join(sorted(odd))[:200]}")
    needed, observers = {("ledger", ledger["budget"]["observer"])} if len(names) > 1 else set(), set(OBSERVERS)
    if statement["plan"] is not None:
        names, colluders = [statement["subject"]["name"]], statement["colluders"]["of_a_cohort"]
        observers |= {statement["trust_model"]["against"], f"colluding({colluders})" if colluders else "server"}
    needed |= {(str([name]), observer) for name in names for observer in observers}
    said = {(str(item["runs"]) if item["scope"] == "run" else item["scope"], item["observer"]) for item in claims}
    if len(said) < len(claims) or len(claims) > MOST_CLAIMS:
        raise Wrong(f"of {len(claims)} claims some are made twice, or there are more than {MOST_CLAIMS}")
    if others := [*(needed - said), *(it for it in said - needed if it[0] not in {*dict(needed)} - {"ledger"})]:
        raise Wrong(f"about {str(others[0])[:80]} nothing is said, or it is not what this is about")
    return f"all fields, {len(events)} charged runs, {len(claims)} claims"


def verify(path: Path, keys: Sequence[str] = ()) -> Findings:
    """Check a certificate; ValueError if it is none."""
    data, content = read(path)
    statement, found, events = content["statement"], Findings(), list[Event]()
    if found.note("signature", lambda: check_bytes(data, content)):
        found.note("signer", lambda: check_key(content["public_key"], keys))
        if found.status != 1 and found.note("content", lambda: check_content(statement, events)):
            found.note("plan", lambda: check_plan(statement, events))
            budget = statement["ledger"]["budget"] | {"scope": "budget", "runs": [event.run for event in events]}
            for claim in [*statement["claims"], budget]:
                found.note(f"{claim['scope']} against {claim['observer']}", partial(check_claim, claim, events))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the certificate that the command line names, print what was found, and return the exit status."""
    parser = argparse.ArgumentParser(description="Check a certificate of d2pfed without d2pfed.")
    parser.add_argument("file", type=Path, metavar="FILE", help="the certificate, a file of JSON")
    parser.add_argument("--key", action="append", default=[], metavar="PUBLIC", help="the signer's public key")
    given = parser.parse_args(arguments)
    try:
        found = verify(given.file, given.key)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.writelines(f"{kind:12}{line}\n" for kind, line in found.lines)
    return found.status


if __name__ == "__main__":
    sys.exit(main())
