"""Check a certificate of d2pfed without d2pfed: `python certificate_verifier.py FILE --key PUBLIC`.

It checks the signed bytes, that all fields agree, and that each claimed epsilon is at least its own bound less 0.1 %: a
run's by composition, a ledger's budget by a privacy filter, as plans and stops may have been chosen from outputs.
Exit status: 0 all of it holds; 1 something is wrong; 2 it cannot be read; 3 something that is named was not checked.
"""

import argparse
import hashlib
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from scipy.stats import binom, hypergeom

FORMAT = "d2pfed certificate 2"
FIELDS = """format issued subject released unit adjacency mechanism sampling participations colluders dropouts tuning
    trust_model evaluation assumptions not_covered software plan events claims ledger"""
CLAIM = "observer epsilon delta max_participations scope runs unit adjacency accountant sampling reason condition"
LEDGER, BUDGET = "head runs budget means", "observer epsilon delta declared"
# By the scope of a claim, on what it rests beside the assumptions: the product of runs is no filter (theory 15).
CONDITIONS = {"run": "", "composed": "if no plan or stop depended on outputs"}
# The same fact in an event, in a plan's text and as it is stated for readers, of all runs and of the run of a plan.
FACTS = """unit,unit.is,unit.name adjacency,adjacency.is,adjacency.name method,sampling.method.is,sampling.method
    population,sampling.population,sampling.population cohort_size,sampling.cohort_size,sampling.cohort_size"""
PLANNED = """ releases,max_attempts,released.at_most ,colluders,colluders.of_a_cohort ,quorum,dropouts.quorum
    max_participations,max_participations,participations.max_participations ,rounds,subject.rounds_planned
    dimension,,mechanism.dimension ,consistency.is,trust_model.consistency ,ring.bits,mechanism.bits"""
MECHANISM = Literal["Centered", "Shared", "DDGauss", "SkellamNoise"]  # as plans spell them
# Of the lattice protocol (protocol.md): 64ths of a secret's length from 8 bits on, by the least width of the noise.
SECRETS = {
    2: (7, 7, 8, 9, 10, 10, 11, 12, 13, 13, 14, 15, 16),
    4: (6, 6, 7, 7, 8, 9, 10, 10, 11, 12, 13, 13, 14),
    8: (6, 6, 6, 6, 7, 8, 8, 9, 10, 11, 11, 12, 13),
    16: (6, 6, 6, 6, 6, 6, 7, 8, 9, 9, 10, 11, 12),
}
COMMITTEES = (64, 96, 128, 192, 256, 384, 512)
TOLERANCE = 1e-3  # relative: a claim may be so much below this file's own bound, as two grids are never the same
LEAST_DELTA, MOST_RUNS, MOST_COINS = 1e-11, 6, 64  # of loss distributions: beyond are rounding errors and minutes
MOST_BYTES, MOST_CLAIMS, OBSERVERS = 1 << 22, 1000, {"released", "server", "client", "alone"}
# All that this file has no arithmetic for; docs/certificate.md lists the same.
UNCHECKED = {
    "signer": "the signer, as no key was named",
    "noise": "binomial noise, and noise of a trusted server",
    "skellam": "noise without a Gaussian bound, behind sampled cohorts",
    "mechanism": "an unknown mechanism",
    "narrow": "noise of less than 0.4 steps",
    "delta": f"a delta below {LEAST_DELTA:g} behind sampled cohorts",
    "slack": f"a plan of another kind with a slack below {LEAST_DELTA:g}",
    "kinds": f"more than {MOST_RUNS} kinds of runs, or a million releases, behind sampled cohorts",
    "coins": f"a person in more than {MOST_COINS} silos",
    "wide": "losses too wide for a grid",
    "memory": "too little memory",
}
# Of a budget whose later runs may have been chosen from outputs: shares of delta that are fixed beforehand (theory 15).
SLACK, BASIC, EXCHANGED, MOST_UNITS = 0.05, 0.05, 1e-5, 1 << 17
_SPELLED: dict[type, str] = {str: r"(?s).+", bytes: r"([0-9a-f]{64}){1,2}", int: r"[1-9][0-9]{0,9}"}
_SPELLED[Fraction] = r"[1-9][0-9]{0,79}(/[1-9][0-9]{0,79})?"

Json = dict[str, Any]
Floats = np.ndarray[Any, Any]


class Wrong(Exception):  # noqa: N818 - the name of the finding
    """The certificate says something that is not so."""


class Unchecked(Exception):  # noqa: N818 - as above
    """This file has no arithmetic for it: one of the kinds that are listed."""

    def __init__(self, kind: str, found: object) -> None:
        super().__init__(f"{UNCHECKED[kind]}: {str(found)[:80]}")


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
        except (Unchecked, MemoryError) as error:
            kind = "NOT CHECKED"
            text = str(error if isinstance(error, Unchecked) else Unchecked("memory", error))
        except Exception as error:  # noqa: BLE001 - of what makes no sense nothing holds
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
        raise Wrong("the file is not the canonical text of its content: a byte was changed")
    public, signature = (_read(content[name], bytes) for name in ("public_key", "signature"))
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, canonical(content["statement"]))
    except (InvalidSignature, ValueError):
        raise Wrong("it is not a signature of this statement by this key") from None
    return f"that of the Ed25519 key {public.hex()}"


def check_key(public: str, keys: Sequence[str]) -> str:
    """Find a signature by another key than the expected ones."""
    if not keys:
        raise Unchecked("signer", public)
    if public not in keys:
        raise Wrong(f"{public} is not a key that was named with --key")
    return "the key that was named"


def _read(value: object, kind: Any) -> Any:  # noqa: ANN401 - a type, and a value of it
    """Return what a field says: a whole number, or a text, bytes in hexadecimal or a fraction, each of one spelling."""
    known, spelled = get_args(kind), _SPELLED.get(kind, "")
    if known and value in ("binomial", "gaussian"):
        raise Unchecked("noise", value)
    if known and value not in known:
        raise Wrong(f"one of {', '.join(known)} was expected, got {str(value)[:40]!r}")
    if spelled and (type(value) is not (int if kind is int else str) or not re.fullmatch(spelled, str(value))):
        raise Wrong(f"{spelled} was expected, got {str(value)[:40]!r}")
    return value if known else bytes.fromhex(str(value)) if kind is bytes else kind(value)


@dataclass(frozen=True, kw_only=True)
class Event:
    """One charged run: a number of equal releases, and all that their cost depends on."""

    run: str
    row: str  # of the ledger: its number and its hash
    plan: bytes  # its digest
    software: str  # the digest of the package that began it: the signer's word
    unit: Literal["client", "record"]
    adjacency: Literal["replace-one", "zero-out", "add-remove"]
    method: Literal["fixed", "once", "none"]  # how cohorts are drawn
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
            raise Wrong(
                f"a client needs the rate {drawn}, and no add-remove, got {self.rate} and {self.adjacency}"
            )
        if self.rate > 1 or (self.coins > 1 and self.unit == "client"):
            raise Wrong(f"{self.coins} coins of rate {self.rate} are impossible for a {self.unit}")
        if not self.contributors <= self.cohort_size <= self.population // rounds:
            raise Wrong(
                f"{rounds} x {self.cohort_size} of {self.population}, noise of {self.contributors}: impossible"
            )
        root = Fraction(math.isqrt(self.dimension << 64) + 1, 1 << 32)
        if self.l1_radius != min(root * self.radius, self.radius**2):  # theory 12
            raise Wrong(f"l1_radius {float(self.l1_radius):g} does not follow from radius {float(self.radius):g}")

    def is_hidden(self, observer: str) -> bool:
        """Whether it cannot know in which releases a unit is: coins of records are secret, cohorts for `released`."""
        return self.rate < 1 and (self.unit == "record" or (self.method == "fixed" and observer == "released"))

    def unknown(self, observer: str) -> int:
        """Return how many contributors' noise the observer does not know."""
        if observer == "alone":
            return min(1, self.contributors - 1)  # a single contributor may be another client
        colluding = re.fullmatch(r"colluding\(([1-9][0-9]{0,8})\)", observer, re.ASCII)
        if colluding is None and observer not in OBSERVERS:
            raise Wrong(f"there is no observer {observer[:40]!r}")
        return self.contributors - (int(colluding[1]) if colluding else observer == "client")

    @property
    def cost(self) -> "Event":
        """All that its cost depends on."""
        return replace(self, run="", row="", plan=b"", software="")


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
            raise Wrong(f"its digest is {digest.hex()}, but that of the event of {name} is {own.plan.hex()}")
        size, bits = own.cohort_size, plan["codec"]["fraction_bits"]
        opened = [min(2, size), plan["threshold"], plan["quorum"], size]
        ranks = [[0, plan["rounds"], own.releases], [0, bits, 64], opened]
        if "committee" in plan:
            check_committee(plan, own)
            ranks[-1] = [plan["colluders"] + 2, plan["quorum"], size]
        if odd := [rank for rank in ranks if rank != sorted(rank)]:
            raise Wrong(f"its numbers {str(odd[0])[:80]} are out of order")
    facts = [fact.split(",") for fact in (FACTS + PLANNED if plan is not None else FACTS).split()]
    pairs = [(told, getattr(own, name)) for name, _, told in facts if name]
    pairs += [(told, reduce(getitem, path.split("."), plan)) for _, path, told in facts if path] if plan else []
    for name, value in [*pairs, *_computed(plan, own, events)]:
        told = reduce(getitem, name.split("."), statement) if "." in name else getattr(own, name)
        is_close = isinstance(value, float) and isinstance(told, float) and math.isclose(told, value, rel_tol=1e-9)
        if type(value) is not type(told) or not (is_close or value == told):
            raise Wrong(f"{name} is stated as {str(told)[:80]}, but is {str(value)[:80]}")
    return found


def check_committee(plan: Json, own: Event) -> None:
    """Recompute secret and committee of the lattice protocol from all that they follow from."""
    size, colluders = _read(plan["committee"]["size"], int), plan["committee"]["colluders"]
    width, noise = _read(plan["mechanism"]["sigma"]["is"], Fraction), plan["mechanism"][""]
    cohort, bits = own.cohort_size, plan["ring"]["bits"]
    rows = [row for least, row in SECRETS.items() if least <= width and noise in {"Centered", "DDGauss"}]
    if not rows or bits not in range(1, 21) or own.unit != "client" or cohort > 20_000:
        raise Wrong("the lattice protocol needs discrete Gaussians of at least 2 steps, and at most 20 bits")
    secret, is_whole = 64 * rows[-1][max(bits, 8) - 8], size == cohort <= 512
    chances = hypergeom(cohort, cohort - plan["quorum"], size).sf(np.arange(size + 1))
    there, threshold = size - int(np.argmax(chances <= 2.0**-20)), max(colluders, -(-size // 8))
    packed, certificate = min(secret, there - threshold - 2), (size + colluders) // 2 + 1
    rule = {"": "Committee", "size": size, "threshold": threshold, "packed": packed, "certificate": certificate}
    fits = (is_whole or (size in COMMITTEES and size < cohort)) and packed >= (16 if is_whole else 48)
    fits &= certificate <= there and colluders * cohort >= plan["colluders"] * size
    told = plan["committee"], plan["secret"], plan["threshold"]
    if not fits or told != (rule | {"colluders": colluders}, secret, packed + threshold):
        raise Wrong(
            f"committee, secret and threshold are {str(told)[:160]}, but the rule requires {rule}, {secret}"
        )


def _computed(plan: Json | None, own: Event, events: Sequence[Event]) -> Iterator[tuple[str, object]]:
    """Yield what an event, or the statement, must say by a plan's text and by the other events."""
    yield from (("sampling.rate", str(own.rate)), ("tuning.runs_on_this_ledger", len(events)))
    if plan is None:
        yield "subject.runs", [event.run for event in events]
        yield from (("subject.kind", "ledger"), ("released.at_most", sum(event.releases for event in events)))
        return
    mechanism, codec, grid = plan["mechanism"], plan["codec"], 1 << plan["codec"]["fraction_bits"]
    if (name := mechanism[""]) not in get_args(MECHANISM):
        raise Unchecked("mechanism", name)
    clip, step = (abs(float.fromhex(codec[name]["is"])) for name in ("clip", "granularity"))
    radius, root = Fraction(math.floor(Fraction(clip) / Fraction(step) * grid), grid), math.sqrt(own.dimension)
    plain, is_whole = float(radius), name == "Shared"
    vectors = noises = own.cohort_size
    if own.unit == "record":
        vectors = int(binom.isf(1e-6, plan["records"], float(own.rate)))
    spread, reach = float(own.variance) * (1 if is_whole else noises), (1 << plan["ring"]["bits"]) / 2
    longest = float.fromhex(plan["longest_mean"]["is"]) if "longest_mean" in plan else 1.0  # of the mean, in clips
    proxy = (longest * vectors * plain) ** 2 / own.dimension + spread
    proxy += noises / 4 if "rounded" in mechanism else 0.0  # the rounding's own
    slope, excess = reach / proxy, 0.0
    if own.kind == "skellam":  # heavier tails than a Gaussian's
        slope = min(slope, 1.0)
        excess = spread * (math.cosh(slope) - 1 - slope**2 / 2)
    tail = math.exp(
        min(0.0, slope * (slope * proxy / 2 - reach) + excess)
    )  # sub-Gaussian, of one coordinate's side
    yield "mechanism.wrap_probability", min(1.0, 2 * own.dimension * tail)
    if name != "Centered":  # lengthened by conditional rounding (Kairouz, Liu and Steinke 2021)
        spread = math.sqrt(2 * math.log(1 / float.fromhex(mechanism["rounded"]["beta"]["is"])))
        square = math.ceil(min((plain + root) ** 2, plain**2 + own.dimension / 4 + spread * (plain + root / 2)))
        radius = Fraction(math.isqrt(square << 64) + 1, 1 << 32)
    turn, view = codec["rotation"], plan["against"]
    size, is_skellam, missing = turn["dimension"], name == "SkellamNoise", own.cohort_size - plan["quorum"]
    if not 1 <= size < 1 << 32:  # before its padded length is looked for
        raise Wrong(f"a model has between 1 and 2^32 parameters, got {str(size)[:80]}")
    yield from (("radius", radius), ("kind", "skellam" if is_skellam else "discrete-gaussian"))
    if turn[""] == "Hadamard":
        length = 1 << (size - 1).bit_length()
    elif turn[""] == "RandomPhase":
        length = 2 * smooth_from((size + 1) // 2)
    else:
        length = turn.get("length", 0)
        if turn[""] != "Fold" or not (1 < length < size and length & (length - 1) == 0):
            raise Wrong(f"a vector of {size} parameters cannot be folded to {str(length)[:80]} numbers")
    yield "dimension", length
    yield "variance", _read(mechanism["variance" if is_skellam else "sigma"]["is"], Fraction) ** (2 - is_skellam)
    yield "contributors", 1 if is_whole else plan["quorum"]
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
    is_block: bool = False  # whether a client is in one of its releases, and it is hidden in which (theory 14)

    @property
    def round(self) -> "Part":
        """One of its releases, of however many."""
        return replace(self, event=replace(self.event, releases=1, max_participations=1), count=1, excess=0.0)


def eta(width: float) -> float:
    """Bound by how much the mass of a lattice Gaussian varies with its center (theory 5)."""
    if width < 0.4:
        raise Unchecked("narrow", f"{width:.3g}")
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


ORDERS = np.unique(np.rint(np.geomspace(2, 1 << 30, 3000)))


def renyi_curve(part: Part) -> Floats:
    """Return the Renyi divergences of one release: sums of discrete Gaussians (theory 6), Skellam noise (theory 12)."""
    shift, variance, dimension = part.shift, part.variance, part.event.dimension
    if part.event.kind == "skellam":
        l1 = min(float(part.event.l1_radius / part.event.radius), shift, math.sqrt(dimension)) * shift
        extra = np.minimum(((2 * ORDERS - 1) * shift**2 + 6 * l1) / (4 * variance**2), 1.5 * l1 / variance)
    else:
        lattice = ORDERS * 2 * math.atanh(eta(math.sqrt(variance))) + (2 * ORDERS - 1) * gap(part)
        extra = dimension * lattice / (ORDERS - 1)
    return np.asarray(ORDERS * shift**2 / (2 * variance) + extra)


def renyi_epsilon(curve: Floats, delta: float) -> float:
    """Return epsilon by Renyi divergences at the orders (theory 4)."""
    return float(compute_epsilon(ORDERS.tolist(), curve.tolist(), delta)[0])


def gaussian_epsilon(squared: float, slack: float, delta: float) -> float:
    """Return epsilon of Gaussians whose squared ratios add up to so much, exchanged at so much slack (theory 3, 8)."""
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        is_enough = gaussian_delta(np.array([middle]), math.sqrt(squared))[0] <= delta * math.exp(-slack)
        low, high = (low, middle) if is_enough else (middle, high)
    return high + 2 * slack if high < 1e6 else math.inf


Parts = Mapping[Part, int]  # and how many of each


def known_epsilon(parts: Parts, delta: float) -> float:
    """Return epsilon where it is known who takes part: Gaussians' squared ratios add, else Renyi curves do."""
    squared = slack = 0.0
    releases = sum(part.count * times for part, times in parts.items())
    for part, times in parts.items():
        smooth = surrogate(part, releases)
        if smooth is None:
            curves = [times * each.count * renyi_curve(each) for each, times in parts.items()]
            return renyi_epsilon(np.sum(curves, axis=0), delta)
        squared += times * part.count * part.shift**2 / smooth[0]
        slack += times * part.count * smooth[1]
    return gaussian_epsilon(squared, slack, delta)


def hidden_epsilon(parts: Parts, delta: float, claimed: float) -> float:
    """Return epsilon where it is hidden who takes part, by privacy-loss distributions (theory 9, 10)."""
    counts = {
        part: times * (part.event.releases if part.is_hidden else part.count) for part, times in parts.items()
    }
    step = grid_step(parts, delta, total := sum(counts.values()), claimed)
    composed, slack, excess = list[Any](), 0.0, 0.0
    for part, count in counts.items():
        smooth = surrogate(part, total)
        if smooth is None:
            raise Unchecked("skellam", part.event.kind)
        slack += count * smooth[1]
        losses = [each.self_compose(count) for each in _losses(part, math.sqrt(smooth[0]), step, delta / total)]
        composed = _product(composed, losses)
        excess += parts[part] * part.excess if part.is_hidden else 0.0
    left = delta * math.exp(-slack) - excess
    return math.inf if left <= 0 else max(float(each.get_epsilon_for_delta(left)) for each in composed) + 2 * slack


def block_epsilon(part: Part, delta: float, known: float) -> float:
    """Return epsilon where a client is in one release, or none, and it is hidden in which (theory 14, once).

    X and Y are the likelihood ratios of opposite shifts: delta is rate times what the sum of X - alpha Y over all
    releases has on average above (alpha - 1) (1 / rate - releases).
    """
    event, smooth = part.event, surrogate(part, part.event.releases)
    if smooth is None or event.releases * event.rate >= 1 or not math.isfinite(known):
        return math.inf
    mu, rate, count = 2 * float(event.radius) / math.sqrt(smooth[0]), float(event.rate), event.releases
    edges, slack = np.linspace(-5.0, 7.5, 1 << 16), count * smooth[1]
    z, chances = edges[1:] - (edges[1] - edges[0]) / 2, np.diff(ndtr(edges))
    chances[0] += ndtr(edges[0])  # a sum is the larger for what is raised to there

    def is_enough(epsilon: float) -> bool:
        alpha, points = math.exp(epsilon), max(64, (1 << 18) // count)
        values = np.exp(mu * z - mu * mu / 2) - alpha * np.exp(-mu * z - mu * mu / 2)
        at = (values - values[0]) / (values[-1] - values[0]) * (points - 1)
        low = np.minimum(at.astype(int), points - 2)
        law = np.bincount(low, chances * (low + 1 - at), points)  # what falls between two points is divided
        law += np.bincount(low + 1, chances * (at - low), points)
        size = 1 << math.ceil(math.log2(points * count))
        summed = np.fft.irfft(np.fft.rfft(law, size) ** count, size)
        total = count * values[0] + np.arange(size) * (values[-1] - values[0]) / (points - 1)
        excess = np.maximum(total - (alpha - 1) * (1 / rate - count), 0.0)
        return rate * float((excess * summed).sum()) <= delta * math.exp(-slack)

    low, high = 0.0, known
    while high - low > TOLERANCE / 10 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high + 2 * slack


def smooth_from(least: int, primes: tuple[int, ...] = (11, 7, 5, 3)) -> int:
    """Return the least number from `least` on with no prime factors but 2 and these: half the length of phases."""
    if not primes:
        return 1 << (least - 1).bit_length()
    found, power = list[int](), 1
    while power < least:
        found.append(power * smooth_from(-(-least // power), primes[1:]))
        power *= primes[0]
    return min([*found, power])


def grid_step(parts: Parts, delta: float, releases: int, epsilon: float) -> float:
    """Return a step of losses for about so much epsilon; refuse what would be rounding errors, or take minutes."""
    if delta < LEAST_DELTA:
        raise Unchecked("delta", delta)
    if len(parts) > MOST_RUNS or releases > 10**6:
        raise Unchecked("kinds", f"{len(parts)} with {releases} releases")
    if any(part.event.coins > MOST_COINS for part in parts):
        raise Unchecked("coins", max(part.event.coins for part in parts))
    return min(epsilon / max(4096, 256 * math.sqrt(releases)), 1e-3)


def _product(composed: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """Return the losses of both, in each order; a single one is its own mirror image."""
    if not composed:
        return list(more)
    size = max(len(composed), len(more))
    pairs = zip((*composed, *composed)[:size], (*more, *more)[:size], strict=True)
    return [one.compose(other) for one, other in pairs]


def _losses(part: Part, sigma: float, step: float, delta: float) -> list[Any]:
    """Return the privacy losses of one release, from above, on a grid, in each order; one if both are the same."""
    event, mu, rate, top = part.event, float(part.event.radius) / sigma, float(part.event.rate), step
    behind = None  # the profile of the reversed order, where it is another: nowhere above the first
    is_same = not part.is_hidden or event.unit == "client" or event.adjacency == "replace-one"
    if not part.is_hidden:
        profile = partial(gaussian_delta, mu=part.shift / sigma)
    elif event.unit == "client":  # who is not drawn is replaced by another: two radii
        profile = partial(gaussian_delta, mu=2 * mu, rate=rate)
        if event.adjacency == "zero-out":
            profile, behind = partial(replaced_delta, mu=mu, rate=rate), partial(gaussian_delta, mu=mu, rate=rate)
    elif event.adjacency == "replace-one" and event.coins == 1:
        profile = partial(opposite_delta, mu=mu, rate=rate)
    else:
        profile = partial(coins_delta, mu=mu, rate=rate, coins=event.coins, against=-is_same)
    while top < 600 and profile(np.array([top]))[0] > delta * 1e-6:
        top *= 1.25
    if not top < min(600, step * (1 << 20)):
        raise Unchecked("wide", f"{top:.3g}")
    points = np.arange(-math.ceil(top / step), math.ceil(top / step) + 1)
    grid, ratio = points * step, np.exp(points * step)
    own = profile(np.abs(grid) if is_same else grid)
    orders = [own, 1 - ratio + ratio * own[::-1]]  # the world with the unit keeps its place: each by itself
    if is_same:  # below 0 by the reversed order (theory 1, H2)
        other = own if behind is None else behind(np.abs(grid))
        orders = [np.where(points >= 0, one, 1 - ratio + ratio * two) for one, two in ((own, other), (other, own))]
        orders = orders[: 1 if behind is None else 2]
    deltas = [np.minimum.accumulate(np.clip(order, 0.0, 1.0)) for order in orders]
    if not np.isfinite(deltas).all():
        raise Unchecked("wide", "beyond all numbers")
    return [pld.pld_pmf.create_pmf_pessimistic_connect_dots(step, points, order) for order in deltas]


def replaced_delta(epsilon: Floats, mu: float, rate: float) -> Floats:
    """Return the profile of a client's vector against zero in a cohort where another stands otherwise (theory 9)."""
    c, a = np.expm1(epsilon) * (1 - rate) / rate, np.exp(epsilon + mu * mu / 2)
    passed = np.log((a + np.sqrt(a * a + 4 * c)) / 2) / mu  # here the loss is epsilon
    gain = ndtr(mu - passed) - c * ndtr(-mu - passed) - np.exp(epsilon + log_ndtr(-passed))
    return np.asarray(np.maximum(rate * gain, 0.0))


def opposite_delta(epsilon: Floats, mu: float, rate: float) -> Floats:
    """Return the profile of a vector against its opposite behind a secret coin (theory 10)."""
    c = (1 - rate) * np.expm1(np.maximum(epsilon, 1e-300))
    sinh = np.log(c / (2 * rate)) + (mu * mu - epsilon) / 2  # its logarithm, as it may be beyond all numbers
    passed = (epsilon / 2 + np.logaddexp(sinh, np.logaddexp(0.0, 2 * sinh) / 2)) / mu  # here the loss is epsilon
    gain = rate * (ndtr(mu - passed) - np.exp(epsilon + log_ndtr(-mu - passed))) - c * ndtr(-passed)
    return np.asarray(np.maximum(gain, 0.0))


def coins_delta(epsilon: Floats, mu: float, rate: float, coins: int, against: int = 0) -> Floats:
    """Return the profile of a unit with secret coins against none, or its opposite (theory 17): chords, convex."""
    heads, last = np.arange(coins + 1)[:, None], 40.0 + coins * mu
    z = np.linspace(against * coins * mu - 40.0, last, 1 << 15)
    chances = binom.pmf(heads, coins, rate)
    loss = logsumexp(heads * mu * z - (heads * mu) ** 2 / 2, axis=0, b=chances)
    tail = logsumexp(log_ndtr(against * heads * mu - z), axis=0, b=chances)
    if against:
        loss -= loss[::-1]
    gain = (chances * ndtr(heads * mu - z)).sum(axis=0) - np.exp(loss + tail)
    seen, ratio = loss < 650, np.exp(epsilon)
    return np.asarray(np.maximum(np.interp(ratio, np.exp(loss[seen]), gain[seen]), 1 - ratio))


def parts_of(events: Sequence[Event], observer: str) -> Parts:
    """Return the events as an observer sees them."""
    parts: Counter[Part] = Counter()
    for each in events:
        left, shift = each.unknown(observer), each.radius * each.coins * (1 + (each.adjacency == "replace-one"))
        cap = each.releases if each.unit == "record" else min(each.max_participations, each.releases)
        others = binom(each.releases - 1, min(1.0, each.cohort_size / max(1, each.population - 1)))
        cost = float(each.releases * each.rate * (each.method == "fixed")) * float(others.sf(cap - 1))
        is_hidden, variance = each.is_hidden(observer), float(each.variance) * left
        is_block = each.method == "once" and each.unit == "client" and cap == 1 and observer == "released"
        parts[Part(each.cost, left, cap, is_hidden, float(shift), variance, cost, is_block)] += 1
    return parts


def own_bound(events: Sequence[Event], observer: str, delta: float, claimed: float) -> float:
    """Return this file's own epsilon of events that were fixed beforehand; infinite if a noise is all known.

    It may be any bound that a claim of so much meets.
    """
    return bound(parts_of(events, observer), delta, claimed, claimed)


def bound(parts: Parts, delta: float, scale: float, enough: float) -> float:
    """Return epsilon of releases, at about this scale: the least that is known, or one that is small enough."""
    if any(part.left < 1 for part in parts):
        return math.inf
    known = known_epsilon(parts, delta)
    if sum(parts.values()) == 1 and (part := next(iter(parts))).is_block:
        known = min(known, block_epsilon(part, delta, known))
    if enough >= known * (1 - TOLERANCE) or not any(part.is_hidden for part in parts):
        return known
    uncapped = {replace(part, is_hidden=part.is_hidden and not part.excess): n for part, n in parts.items()}
    ways = [parts] if uncapped == parts else [parts, uncapped]
    return min(known, *(hidden_epsilon(way, delta, max(scale, 1e-6)) for way in ways))


def check_claim(claim: Json, events: Sequence[Event]) -> str:
    """Compare one claimed epsilon with this file's own."""
    observer, delta, claimed, runs = (claim[name] for name in ("observer", "delta", "epsilon", "runs"))
    covered = [event for event in events if event.run in runs]
    if not len(covered) == len(runs) == {"run": 1}.get(claim["scope"], len(events)):
        raise Wrong(f"it covers the runs {str(runs)[:80]}, but the events are of others")
    require_alike(covered)
    same = claim["unit"], claim["adjacency"], claim["max_participations"]
    if same != (covered[0].unit, covered[0].adjacency, max(event.max_participations for event in covered)):
        raise Wrong(f"unit, adjacency and cap are not those of its events: {str(same)[:80]}")
    if claimed is None:
        return "nothing is claimed, epsilon is infinite"
    if claim["reason"]:
        raise Wrong(f"an epsilon is stated with a reason for having none: {str(claim['reason'])[:80]}")
    require_numbers(claimed, delta)
    return met(claimed, delta, own_bound(covered, _read(observer, str), delta, claimed))


def require_alike(events: Sequence[Event]) -> None:
    """Refuse events that are priced for different units."""
    if len({(event.unit, event.adjacency, event.coins) for event in events}) > 1:
        raise Wrong("unit, adjacency or a person's silos are not the same in all of its events")


def require_numbers(epsilon: object, delta: object) -> None:
    """Refuse what is no epsilon, or no delta."""
    if not (isinstance(epsilon, float) and isinstance(delta, float) and epsilon > 0 and 0 < delta < 1):
        raise Wrong(f"0 < epsilon and 0 < delta < 1 are expected, got {str((epsilon, delta))[:80]}")


def met(claimed: float, delta: float, own: float) -> str:
    """Find an epsilon that is less than this file's own."""
    if not claimed >= own * (1 - TOLERANCE):
        raise Wrong(f"epsilon {claimed:.6g} is claimed at delta {delta:.3g}, but it is {own:.6g}")
    return f"epsilon {claimed:.6g} at delta {delta:.3g}; recomputed {own:.6g}"


def check_budget(budget: Json, events: Sequence[Event]) -> str:
    """Compare a ledger's budget with what a privacy filter makes of its runs, in the order in which they began.

    The product of what was begun is no filter: the next plan may have been chosen from what the last one showed.
    """
    epsilon, delta, observer = (budget[name] for name in ("epsilon", "delta", "observer"))
    declared = [event_of({"run": "-", "row": "-", "software": "-"} | each) for each in budget["declared"]]
    fixed = [event.cost for event in declared or events[:1]]
    require_alike([*fixed, *events])
    require_numbers(epsilon, delta)
    unused, later = Counter(fixed), []
    for event in (event.cost for event in events):
        unused[event] -= 1
        later += [event] if unused[event] < 0 else []
    if not later:
        return met(epsilon, delta, own_bound(fixed, _read(observer, str), delta, epsilon))
    found, failed = [], list[Unchecked]()
    for rule in filter_rules(fixed, later, observer, delta, epsilon):
        try:
            found.append(rule())
        except Unchecked as error:
            failed.append(error)
        if found and epsilon >= found[-1] * (1 - TOLERANCE):
            break
    else:
        if failed:
            raise failed[0]
    return met(epsilon, delta, min(found))


def filter_rules(
    fixed: Sequence[Event], later: Sequence[Event], observer: str, delta: float, epsilon: float
) -> list[Callable[[], float]]:
    """Return the rules one of which must admit all runs, each as the epsilon that it needs (theory 15)."""
    parts = [parts_of([event], observer) for event in (*fixed, *later)]
    if any(part.left < 1 for each in parts for part in each):
        return [lambda: math.inf]
    hides = [part.is_hidden or part.event.unit == "record" for each in parts[: len(fixed)] for part in each]
    if hides[0] and all(surrogate(part, 1 << 16) for each in parts[: len(fixed)] for part in each):
        counted = partial(counted_epsilon, parts[: len(fixed)], parts[len(fixed) :], delta, epsilon)
        return [counted, partial(added_epsilon, fixed, later, observer, BASIC * delta, epsilon)]
    if any(hides):
        return [partial(added_epsilon, fixed, later, observer, delta, epsilon)]
    known = partial(filtered_epsilon, sum(map(Counter, parts), Counter()), (1 - BASIC) * delta)
    return [known, partial(added_epsilon, fixed, later, observer, BASIC * delta, epsilon)]


def added_epsilon(
    fixed: Sequence[Event], later: Sequence[Event], observer: str, delta: float, epsilon: float
) -> float:
    """Return the sum of the epsilons, each at half the delta of the one before."""
    stages, total = [parts_of(stage, observer) for stage in (fixed, *([event] for event in later))], 0.0
    for stage in stages:
        delta /= 2
        total += bound(stage, delta, epsilon / len(stages), 0.0)
    return total


def filtered_epsilon(parts: Parts, delta: float) -> float:
    """Return epsilon of releases each of which may have been chosen from outputs, where nothing is hidden.

    Gaussians alone by the sum of their squared ratios, all others, and Gaussians beside them, by one rho with
    D(alpha) <= alpha rho. Which of these a ledger will hold was open: each case has its own share of delta.
    """
    squared = slack = rho = 0.0
    is_gaussian = True
    for part, times in parts.items():
        count, smooth = times * part.count, surrogate(part, 1 << 12)
        rho += count * float(np.max(renyi_curve(part) / ORDERS))
        if smooth is not None and smooth[1] <= 1e-4 / (1 << 12):
            squared, slack = squared + count * part.shift**2 / smooth[0], slack + count * smooth[1]
        else:
            is_gaussian = False
    if not is_gaussian:
        return renyi_epsilon(rho * ORDERS, 0.15 * delta)
    return math.inf if slack > 1e-4 else gaussian_epsilon(squared, 1e-4, 0.75 * delta)


def counted_epsilon(fixed: Sequence[Parts], later: Sequence[Parts], delta: float, epsilon: float) -> float:
    """Return epsilon of all runs, counted in rounds of the first one: of another kind, as many as cover it."""
    first, every = next(iter(fixed[0])), list(itertools.chain(*fixed, *later))
    counts = {part: part.event.releases if part.is_hidden else part.count for part in every}
    step = grid_step(counts, delta, total := sum(counts[part] for part in every), epsilon)
    exchanged = {part: surrogate(part, 1 << 16) for part in counts}
    if not all(exchanged.values()):
        raise Unchecked("skellam", first.event.kind)
    smooth = {part: found for part, found in exchanged.items() if found}
    losses = {part: _losses(part, math.sqrt(found[0]), step, delta / total) for part, found in smooth.items()}
    left = SLACK * delta - math.fsum(part.excess for part in itertools.chain(*fixed))
    units, others = 0, list[Any]()
    for part in itertools.chain(*fixed):
        if part.round == first.round:
            units += counts[part]
        else:
            others = _product(others, [each.self_compose(counts[part]) for each in losses[part]])
    for part in itertools.chain(*later):
        left -= part.excess
        if part.round == first.round:
            units += counts[part]
            continue
        left /= 2
        run = [each.self_compose(counts[part]) for each in losses[part]]
        units += units_over(run, losses[first], left, step)
    if left < 0 or math.fsum(counts[part] * smooth[part][1] for part in every) > EXCHANGED or units > MOST_UNITS:
        return math.inf
    whole = _product(others, [each.self_compose(units) for each in losses[first]])
    delta *= (1 - BASIC) * math.exp(-EXCHANGED) - SLACK
    return max(float(each.get_epsilon_for_delta(delta)) for each in whole) + 2 * EXCHANGED


def units_over(run: Sequence[Any], unit: Sequence[Any], slack: float, step: float) -> int:
    """Return the least number of units whose product plus a slack is nowhere below a run's profile, in both orders."""
    if slack < LEAST_DELTA:  # far more than rounding, which may have made products of the unit too large
        raise Unchecked("slack", f"{slack:.3g}")
    size = max(len(run), len(unit))
    orders = list(zip((*run, *run)[:size], (*unit, *unit)[:size], strict=True))
    tops = [math.ceil(max(one.get_epsilon_for_delta(slack), 0.0) / step) + 1 for one, _ in orders]
    wanted = [_profile(one, step, top) - slack for (one, _), top in zip(orders, tops, strict=True)]

    def covers(count: int) -> bool:
        return all(
            np.all(want <= _profile(each.self_compose(count), step, top))
            for want, (_, each), top in zip(wanted, orders, tops, strict=True)
        )

    low, high = 0, 1
    while not covers(high):
        low, high = high, 2 * high
        if high > MOST_UNITS:
            return high
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if covers(middle) else (middle, high)
    return high


def _profile(losses: Any, step: float, top: int) -> Floats:  # noqa: ANN401 - dp-accounting has no types
    """Return delta at the first grid points from 0 on; beyond them the slack of a comparison alone is enough."""
    dense = losses.to_dense_pmf()
    masses, first = np.asarray(dense._probs), dense._lower_loss  # noqa: SLF001 - its own loop takes seconds
    seen = np.arange(top + 1)
    above = np.clip(seen + 1 - first, 0, len(masses))
    with np.errstate(over="ignore"):
        shrunk = masses * np.exp(-np.maximum((np.arange(len(masses)) + first) * step, 0.0))
    tails = [np.append(np.cumsum(each[::-1])[::-1], 0.0)[above] for each in (masses, shrunk)]
    return np.asarray(dense._infinity_mass + tails[0] - np.exp(seen * step) * tails[1])  # noqa: SLF001 - as above


def check_content(statement: Json, events: list[Event]) -> str:
    """Read the events, and find fields that are missing, and claims, observers or runs that were left out."""
    claims, ledger, names = statement["claims"], statement["ledger"], [row["run"] for row in statement["events"]]
    rows = [row["row"] for row in statement["events"]] + [ledger["head"]]
    places = [int(re.findall(r"\A([0-9]{1,18}):[0-9a-f]{64}\Z", row)[0]) for row in rows]
    if places != sorted(places) or {len(set(places[:-1])), len(set(names)), ledger["runs"]} != {len(names) or -1}:
        raise Wrong(f"the events are of {len(set(names))} runs, but the ledger has others: {str(ledger)[:80]}")
    events.extend(map(event_of, statement["events"]))
    kinds = {(event.plan, replace(event, run="", row="", software="")) for event in events}
    if len(kinds) > len(dict(kinds)):
        raise Wrong("events with the digest of one plan differ in what it allows")
    odd = set(statement) ^ set(FIELDS.split()) | set(ledger) ^ set(LEDGER.split())
    odd |= set(ledger["budget"]) ^ set(BUDGET.split())
    odd |= {name for name, value in statement.items() if not value and name != "plan"}
    for each in claims:
        odd |= set(each) ^ set(CLAIM.split()) | {each["scope"]} - set(CONDITIONS)
        odd |= {f"condition {each['condition']}"} - {f"condition {CONDITIONS.get(each['scope'])}"}
        odd |= {f"delta {each['delta']}"} - {f"delta {ledger['budget']['delta']}"}
    if odd:
        raise Wrong(f"fields are missing, superfluous, empty or not the budget's: {', '.join(sorted(odd))[:200]}")
    needed, observers = {("composed", ledger["budget"]["observer"])} if len(names) > 1 else set(), set(OBSERVERS)
    if statement["plan"] is not None:
        names, colluders = [statement["subject"]["name"]], statement["colluders"]["of_a_cohort"]
        observers |= {statement["trust_model"]["against"], f"colluding({colluders})" if colluders else "server"}
    needed |= {(str([name]), observer) for name in names for observer in observers}
    said = {(str(item["runs"]) if item["scope"] == "run" else item["scope"], item["observer"]) for item in claims}
    if len(said) < len(claims) or len(claims) > MOST_CLAIMS:
        raise Wrong(f"{len(claims)} claims: some are made twice, or there are more than {MOST_CLAIMS}")
    if others := [*(needed - said), *(it for it in said - needed if it[0] not in {*dict(needed)} - {"composed"})]:
        raise Wrong(f"{str(others[0])[:80]} is not stated, or not covered by this certificate")
    return f"all fields, {len(events)} charged runs, {len(claims)} claims"


def verify(path: Path, keys: Sequence[str] = ()) -> Findings:
    """Check a certificate; ValueError if it is none."""
    data, content = read(path)
    statement, found, events = content["statement"], Findings(), list[Event]()
    if found.note("signature", lambda: check_bytes(data, content)):
        found.note("signer", lambda: check_key(content["public_key"], keys))
        if found.status != 1 and found.note("content", lambda: check_content(statement, events)):
            found.note("plan", lambda: check_plan(statement, events))
            for claim in statement["claims"]:
                found.note(f"{claim['scope']} against {claim['observer']}", partial(check_claim, claim, events))
            budget = statement["ledger"]["budget"]
            found.note(f"budget against {budget['observer']}", lambda: check_budget(budget, events))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the certificate that the command line names, print what was found, and return the exit status."""
    parser = argparse.ArgumentParser(description="Check a certificate of d2pfed without d2pfed.")
    parser.add_argument("file", type=Path, metavar="FILE", help="the certificate (JSON)")
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
