"""Check a certificate of d2pfed without d2pfed: one file, to be read and run by whoever has to rely on one.

    python certificate_verifier.py FILE --key PUBLIC

It imports nothing else of d2pfed, and needs numpy, scipy, dp-accounting and cryptography. It checks

* the bytes: the file is the one text of its content, signed by the key in it, which is the one that `--key` names;
* the content: every field is there, the plan's text has the plan's digest, and the event of its run is the plan's;
* the arithmetic: every claimed epsilon is at least this file's own bound less 0.1 %. The bound is that of Gaussians in
  the place of the integer noise (docs/theory.md 6 to 10): a closed formula where it is known who takes part,
  dp-accounting's privacy-loss distributions where it is hidden, Renyi curves for noise that has no such Gaussian.

Exit status: 0 all of it holds; 1 something is wrong; 2 the file cannot be read; 3 nothing is wrong, and something that
is named could not be checked. Facts that no arithmetic can tell (how cohorts were drawn, which software ran, that no
charged run was left out) are the word of whoever holds the key: that is why the status is 3 without `--key`.
"""

import argparse
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import compute_epsilon
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr
from scipy.stats import binom

FORMAT = "d2pfed certificate 1"
FIELDS = set(
    "format issued subject released unit adjacency mechanism sampling participations colluders dropouts tuning "  # noqa: SIM905 - a list of one name a line
    "trust_model evaluation assumptions not_covered software plan events claims ledger".split()
)
TOLERANCE = (
    1e-3  # by so much, relatively, a claim may be below this file's own bound: two grids are never the same
)
MOST_BYTES = 1 << 22
LEAST_DELTA = 1e-11  # below it dp-accounting's transforms are too coarse
MOST_KINDS = 6  # of releases whose loss distributions are composed: about a second for each
OBSERVERS = {"released", "server", "client", "alone"}

Json = dict[str, Any]
Floats = NDArray[np.float64]
Profile = Callable[[Floats], Floats]


class Wrong(Exception):  # noqa: N818 - the name of the finding
    """The certificate says something that is not so."""


class Unreadable(Exception):  # noqa: N818 - as above
    """This is no certificate that can be read."""


class Unchecked(Exception):  # noqa: N818 - as above
    """This file has no arithmetic for it."""


@dataclass
class Findings:
    """What was found, a line each."""

    held: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The exit status."""
        return 1 if self.wrong else 3 if self.unchecked else 0

    def note(self, what: str, check: Callable[[], str]) -> bool:
        """Run a check, keep what it finds, and return whether it holds."""
        try:
            self.held.append(f"{what}: {check()}")
        except Wrong as error:
            self.wrong.append(f"{what}: {error}")
        except Unchecked as error:
            self.unchecked.append(f"{what}: {error}")
        else:
            return True
        return False


# The bytes.


def canonical(value: object) -> bytes:
    """Return the one text of a certificate, or of its statement."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode()


def parse(text: str | bytes) -> Any:  # noqa: ANN401 - JSON is untyped
    """Return what JSON says, its numbers finite and of few digits."""
    return json.loads(text, parse_constant=_refuse, parse_int=_whole)


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _whole(digits: str) -> int:
    if len(digits) > 80:
        raise ValueError("a number has more than 80 digits")
    return int(digits)


def read(path: Path) -> tuple[bytes, Json]:
    """Return the bytes of a certificate and what they say."""
    try:
        with path.open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise Unreadable(f"cannot read {path}: {getattr(error, 'strerror', error)}") from None
    if len(data) > MOST_BYTES:
        raise Unreadable(f"{path} has more than {MOST_BYTES} bytes, which no certificate has")
    try:
        content = parse(data)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path} is not JSON: {str(error)[:80]}") from None
    statement = content.get("statement") if isinstance(content, dict) else None
    if not isinstance(statement, dict) or statement.get("format") != FORMAT:
        raise Unreadable(f"{path} is not a certificate of the format {FORMAT!r}")
    return data, content


def check_bytes(data: bytes, content: Json) -> str:
    """Find any change of any byte of a signed file."""
    if set(content) != {"statement", "public_key", "signature"}:
        raise Wrong(f"a certificate is a statement, a public_key and a signature, got {sorted(content)[:5]}")
    public, signature = _hex(content["public_key"], 32), _hex(content["signature"], 64)
    try:
        if canonical(content) != data:
            raise Wrong("the file is not the one text of its content: a byte was changed")
        Ed25519PublicKey.from_public_bytes(public).verify(signature, canonical(content["statement"]))
    except (InvalidSignature, ValueError):
        raise Wrong("it is not that of the key under this statement") from None
    return f"that of the Ed25519 key {public.hex()}"


def check_key(public: str, keys: Sequence[str]) -> str:
    """Find a signature by another key than the expected ones."""
    if not keys:
        raise Unchecked(f"whose key {public} is; name the signer's with --key")
    if public not in keys:
        raise Wrong(f"signed by {public}, which is not the key that was asked for")
    return "the key that was asked for"


# The content: events that have been checked, and the plan that one of them follows.


def _hex(text: object, size: int = 32) -> bytes:
    if not isinstance(text, str) or not re.fullmatch(f"[0-9a-f]{{{2 * size}}}", text, re.ASCII):
        raise Wrong(f"{size} bytes are {2 * size} hexadecimal digits in lower case, got {str(text)[:40]!r}")
    return bytes.fromhex(text)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise Wrong(f"a text was expected, got {str(value)[:40]!r}")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 31:
        raise Wrong(f"a whole number in [1, 2^31] was expected, got {str(value)[:40]!r}")
    return value


def _fraction(value: object) -> Fraction:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]{1,80}(/[1-9][0-9]{0,79})?", value, re.ASCII):
        raise Wrong(f"a fraction such as 5/2 was expected, got {str(value)[:40]!r}")
    if not Fraction(1, 1 << 60) <= Fraction(value) <= 1 << 60:
        raise Wrong(f"a fraction in [2^-60, 2^60] was expected, got {value[:40]}")
    return Fraction(value)


def _take(given: object, **readers: Callable[[Any], Any]) -> Json:
    """Return the fields of an object, each read by its reader; there must be these and no others."""
    if not isinstance(given, dict) or set(given) != set(readers):
        raise Wrong(f"an object with {', '.join(sorted(readers))} was expected, got {str(given)[:80]}")
    return {name: reader(given[name]) for name, reader in readers.items()}


@dataclass(frozen=True, kw_only=True)
class Event:
    """One charged run: so many equal releases, and all that their cost depends on."""

    run: str
    row: str  # of the ledger: its number and its hash
    plan: bytes  # its digest
    unit: str
    adjacency: str
    method: str  # how cohorts are drawn, or under the unit `record` the units of a batch
    population: int
    cohort_size: int
    rate: Fraction  # the probability that a unit is in a release
    kind: str
    variance: Fraction  # of one contributor's noise, in squared lattice steps
    contributors: int
    radius: Fraction  # L2 bound on what a unit adds to a sum, in lattice steps
    l1_radius: Fraction = Fraction(0)
    dimension: int
    releases: int
    max_participations: int

    def __post_init__(self) -> None:
        known = {"unit": ("client", "record"), "adjacency": ("replace-one", "zero-out", "add-remove")}
        for name, values in (known | {"method": ("fixed", "poisson", "once", "none")}).items():
            if getattr(self, name) not in values:
                raise Unchecked(f"the {name} {getattr(self, name)[:40]!r}")
        if self.unit == "client" and self.adjacency == "add-remove":
            raise Wrong("a client's noise goes with the client: add-remove is sound for records only")
        if self.unit == "client" and self.rate != Fraction(self.cohort_size, self.population):
            raise Wrong(f"{self.cohort_size} of {self.population} clients are no rate of {self.rate}")
        if self.rate > 1:
            raise Wrong(f"a rate must be at most 1, got {self.rate}")
        if self.method == "once" and self.releases * self.cohort_size > self.population:
            raise Wrong(f"{self.releases} cohorts of {self.cohort_size} do not fit once into {self.population}")

    def is_hidden(self, observer: str) -> bool:
        """Whether the observer does not know in which releases a unit is, so that sampling may amplify.

        A record's coin is its holder's secret. A client's cohort is known to all but `released`; if its size is
        secret too, there must be one noise that does not tell it.
        """
        if self.unit == "record" or self.rate == 1:
            return self.method == "poisson" and self.rate < 1
        return observer == "released" and (self.method, self.contributors == 1) in (
            ("fixed", True),
            ("fixed", False),
            ("poisson", True),
        )

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
    own: Json = {"sampling": dict, "noise": dict, "run": _text, "row": _text, "plan": _hex, "unit": _text}
    own |= {"adjacency": _text, "releases": _count, "max_participations": _count}
    taken = _take(given, **own)
    sampling, noise = taken.pop("sampling"), taken.pop("noise")
    shape: Json = {"kind": _text, "contributors": _count, "radius": _fraction, "dimension": _count}
    match noise.get("kind"):
        case "discrete-gaussian":
            law = _take(noise, **shape, sigma=_fraction)
            law["variance"] = law.pop("sigma") ** 2
        case "skellam":
            law = _take(noise, **shape, variance=_fraction, l1_radius=_fraction)
        case kind:
            raise Unchecked(f"noise of the kind {str(kind)[:40]!r}")
    drawn = _take(sampling, method=_text, population=_count, cohort_size=_count, rate=_fraction)
    return Event(**taken, **drawn, **law)


def check_plan(text: object, events: Sequence[Event]) -> str:
    """Compare the event of a run with the plan that its clients have agreed to, whose digest they hold."""
    if text is None:
        return "none: this is about a ledger, whose runs' plans are named by their digests"
    parts = [b"s" + len(part).to_bytes(8, "big") + part for part in (b"d2pfed plan", _text(text).encode())]
    own = hashlib.sha256(b"".join(parts)).digest()
    event = next((event for event in events if event.plan == own), None)
    if event is None:
        raise Wrong(f"its digest is {own.hex()}, and no event has that")
    try:
        expected = _planned(parse(_text(text)), event)
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        raise Wrong(f"its text cannot be read: {type(error).__name__}") from None
    for name, value in expected.items():
        if getattr(event, name) != value:
            raise Wrong(f"{name} is {value} in the plan and {getattr(event, name)} in the event")
    return f"its digest is {own.hex()}, and the event of run {event.run} is what it allows at worst"


def _planned(plan: Json, event: Event) -> Json:
    """Return what a plan's text says of its releases; the radius is the clip on the grid, or more after rounding."""
    mechanism, codec, sampling = plan["mechanism"], plan["codec"], plan["sampling"]
    steps = Fraction(float.fromhex(codec["clip"]["is"])) / Fraction(float.fromhex(codec["granularity"]["is"]))
    grid = 1 << codec["fraction_bits"]
    radius, name = Fraction(math.floor(steps * grid), grid), mechanism[""]
    found = {
        "unit": plan["unit"]["is"],
        "adjacency": plan["adjacency"]["is"],
        "method": sampling["method"]["is"],
        "population": sampling["population"],
        "cohort_size": sampling["cohort_size"],
        "contributors": 1 if name in ("Shared", "Designated") else plan["quorum"] - plan["cut_off"],
        "radius": radius if name == "Centered" else max(radius, event.radius),
        "variance": Fraction(mechanism["variance"]["is"])
        if name == "SkellamNoise"
        else Fraction(mechanism["sigma"]["is"]) ** 2,
        "releases": plan["max_attempts"],
        "max_participations": plan["max_participations"],
    }
    if (
        event.unit == "record"
    ):  # its cohorts are the batches: what is drawn, and at which rate, is not the cohort's
        del found["method"], found["population"], found["cohort_size"]
    return found


# The arithmetic: this file's own bound on epsilon.


@dataclass(frozen=True)
class Part:
    """An event as one observer sees it: whose noise is left, and how often a unit may be known to take part."""

    event: Event
    left: int
    count: int
    is_hidden: bool

    @property
    def shift(self) -> float:
        """How far neighbours are apart where a unit takes part, in lattice steps."""
        return (2 if self.event.adjacency == "replace-one" else 1) * float(self.event.radius)

    @property
    def variance(self) -> float:
        """The variance of the noise that is left."""
        return float(self.event.variance) * self.left


def eta(width: float) -> float:
    """Bound by how much the mass of a lattice Gaussian varies with its centre (theory 5)."""
    q = math.exp(-2 * (math.pi * width) ** 2)
    return 2 * q / (1 - q**3) if width > 0.3 else math.inf


def _two_sided(tail: float) -> float:
    return 2 * math.atanh(tail) if tail < 1 else math.inf


def gap(part: Part) -> float:
    """Return how far, per coordinate, a sum of discrete Gaussians is from one of them (theory 6)."""
    widths = [math.sqrt(float(part.event.variance) * k / (k + 1)) for k in range(1, min(part.left, 1 << 12))]
    rest = max(
        0, part.left - 1 - len(widths)
    )  # these are wider, so what they add is less than the last of the others
    tails = [_two_sided(eta(width)) for width in widths]
    return math.fsum(tails) + (rest * tails[-1] if rest else 0.0)


def surrogate(part: Part, releases: int) -> tuple[float, float] | None:
    """Return the variance of a Gaussian that stands for the noise, and the slack per release (theory 7, 8)."""
    width, apart, share = math.sqrt(part.variance), gap(part), 1e-6 / (releases * part.event.dimension)
    allowed = max(share - apart, share / 2, apart, 4 * eta(width))
    low, high = 0.0, 0.75 * width
    if part.event.kind != "discrete-gaussian" or not _smoothing(width, high) <= allowed < 1:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _smoothing(width, middle) <= allowed else (middle, high)
    return part.variance - high * high, part.event.dimension * (apart + _smoothing(width, high))


def _smoothing(width: float, smoothing: float) -> float:
    posterior, worst, own = eta(smoothing * math.sqrt(2 - (smoothing / width) ** 2)), eta(smoothing), eta(width)
    if max(posterior, worst, own) >= 0.5:
        return math.inf
    above = math.log1p(posterior + worst * worst / (1 - worst)) + math.log1p(own)
    return max(above, -math.log1p(-posterior) - math.log1p(-own))


def gaussian_delta(epsilon: Floats, mu: float) -> Floats:
    """Return the profile of two Gaussians `mu` standard deviations apart (theory 3)."""
    upper, lower = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return np.asarray(-np.exp(upper) * np.expm1(np.minimum(lower - upper, 0.0)), dtype=np.float64)


def gaussian_epsilon(delta: float, mu: float) -> float:
    """Return epsilon of two Gaussians at a delta."""
    low, high = 0.0, 1e6
    if not gaussian_delta(np.array([high]), mu)[0] <= delta:
        return math.inf
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(np.array([middle]), mu)[0] > delta else (low, middle)
    return low


def renyi_epsilon(parts: Sequence[Part], delta: float) -> float:
    """Return epsilon by the Renyi curves of sums of discrete Gaussians (theory 6) and Skellam noises (theory 12)."""
    orders = np.unique(np.rint(np.geomspace(2, 1 << 30, 3000)))
    total = np.zeros(len(orders))
    for part in parts:
        shift, variance, dimension = part.shift, part.variance, part.event.dimension
        if part.event.kind == "skellam":
            radii = shift / float(part.event.radius)
            l1 = min(radii * float(part.event.l1_radius), shift**2, shift * math.sqrt(dimension))
            extra = np.minimum(((2 * orders - 1) * shift**2 + 6 * l1) / (4 * variance**2), 1.5 * l1 / variance)
        else:
            lattice = orders * _two_sided(eta(math.sqrt(variance))) + (2 * orders - 1) * gap(part)
            extra = dimension * lattice / (orders - 1)
        total += part.count * (orders * shift**2 / (2 * variance) + extra)
    return float(compute_epsilon(orders.tolist(), total.tolist(), delta)[0]) if total[0] < 1e9 else math.inf


def known_epsilon(parts: Sequence[Part], delta: float) -> float:
    """Return epsilon where it is known who takes part: Gaussians' squared ratios add, else Renyi curves do."""
    squared = slack = 0.0
    for part in parts:
        smooth = surrogate(part, sum(each.count for each in parts))
        if smooth is None:
            return renyi_epsilon(parts, delta)
        squared += part.count * part.shift**2 / smooth[0]
        slack += part.count * smooth[1]
    return gaussian_epsilon(delta * math.exp(-slack), math.sqrt(squared)) + 2 * slack


def cap_excess(event: Event) -> float:
    """Return what clients at their cap add to delta behind cohorts of a fixed size (theory 14)."""
    if event.method != "fixed" or event.max_participations >= event.releases or event.rate == 1:
        return 0.0
    others = event.cohort_size / (event.population - 1)
    reached = binom.sf(event.max_participations - 1, event.releases - 1, others)
    return event.releases * float(event.rate) * float(reached)


def hidden_epsilon(parts: Sequence[Part], delta: float, claimed: float) -> float:
    """Return epsilon where it is hidden who takes part, by privacy-loss distributions (theory 9, 10)."""
    if delta < LEAST_DELTA or len(parts) > MOST_KINDS:
        raise Unchecked(f"a delta below {LEAST_DELTA:g}, or more than {MOST_KINDS} runs, behind sampled cohorts")
    step, slack, total = min(max(claimed / 4096, 2e-6), 1e-3), 0.0, None
    counts = [part.event.releases if part.is_hidden else part.count for part in parts]
    for part, count in zip(parts, counts, strict=True):
        smooth = surrogate(part, sum(counts))
        if smooth is None:
            raise Unchecked("noise behind sampled cohorts that no Gaussian stands for")
        slack += count * smooth[1]
        losses = _losses(part, math.sqrt(smooth[0]), step, delta / sum(counts)).self_compose(count)
        total = losses if total is None else total.compose(losses)
    left = delta * math.exp(-slack) - math.fsum(cap_excess(part.event) for part in parts if part.is_hidden)
    return math.inf if left <= 0 or total is None else float(total.get_epsilon_for_delta(left)) + 2 * slack


def _losses(part: Part, sigma: float, step: float, delta: float) -> Any:  # noqa: ANN401 - dp-accounting has no types
    """Return the privacy losses of one release, from above, on a grid."""
    radius, rate = float(part.event.radius), float(part.event.rate)
    if not part.is_hidden:
        profile = _drawn_profile(part.shift / sigma, 1.0)
    elif part.event.method == "fixed":
        # Another client takes the place of one that is not drawn: two radii, whatever the adjacency.
        profile = _drawn_profile(2 * radius / sigma, rate)
    elif part.event.adjacency == "replace-one":
        profile = _opposite_profile(radius / sigma, rate)
    else:
        return pld.from_gaussian_mechanism(
            sigma, sensitivity=radius, value_discretization_interval=step, sampling_prob=rate
        )
    top = step
    while profile(np.array([top]))[0] > delta * 1e-6 and top < 600:
        top *= 1.25
    grid = np.arange(math.ceil(top / step) + 1)
    if len(grid) > 1 << 21:
        raise Unchecked("losses behind sampled cohorts that are too wide for a grid")
    above, ratio = np.minimum(profile(grid * step), 1.0), np.exp(-grid[:0:-1] * step)
    below = 1 - ratio + ratio * above[:0:-1]  # the other order of the two worlds is the same: theory 1, (H2)
    deltas = np.minimum.accumulate(np.concatenate([below, above]))
    points = np.arange(-grid[-1], grid[-1] + 1)
    return pld.PrivacyLossDistribution(pld_pmf.create_pmf_pessimistic_connect_dots(step, points, deltas))


def _drawn_profile(mu: float, rate: float) -> Profile:
    return lambda epsilon: rate * gaussian_delta(np.log1p(np.expm1(epsilon) / rate), mu)


def _opposite_profile(mu: float, rate: float) -> Profile:
    """Return the profile of a vector against its opposite behind a secret coin: the loss grows with the output."""

    def profile(epsilon: Floats) -> Floats:
        b, c = rate * math.exp(-mu * mu / 2), (1 - rate) * np.expm1(epsilon)
        from_here = np.log((c + np.sqrt(c * c + 4 * b * b * np.exp(epsilon))) / (2 * b)) / mu
        gain = rate * (ndtr(mu - from_here) - np.exp(epsilon) * ndtr(-mu - from_here)) - c * ndtr(-from_here)
        return np.asarray(np.maximum(gain, 0.0), dtype=np.float64)

    return profile


def own_bound(events: Sequence[Event], observer: str, delta: float, claimed: float) -> float:
    """Return this file's own epsilon; infinite if the observer knows all of a noise."""
    parts = [
        Part(each, each.unknown(observer), min(each.max_participations, each.releases), each.is_hidden(observer))
        for each in events
    ]
    if any(part.left < 1 for part in parts):
        return math.inf
    known = known_epsilon(parts, delta)
    if claimed >= known * (1 - TOLERANCE) or not any(part.is_hidden for part in parts):
        return known
    return min(known, hidden_epsilon(parts, delta, claimed))


# The claims.


def check_claim(claim: Json, events: Sequence[Event]) -> str:
    """Compare one claimed epsilon with this file's own."""
    observer, delta, claimed, runs = (claim.get(name) for name in ("observer", "delta", "epsilon", "runs"))
    covered = [event for event in events if isinstance(runs, list) and event.run in runs]
    if not isinstance(runs, list) or not covered or len(covered) != len(runs):
        raise Wrong(f"it covers the runs {str(runs)[:80]}, and the events are of others")
    if any((event.unit, event.adjacency) != (claim.get("unit"), claim.get("adjacency")) for event in covered):
        raise Wrong("its unit and adjacency are not those of its events")
    if not isinstance(delta, float) or not 0 < delta < 1:
        raise Wrong(f"delta must be in (0, 1), got {str(delta)[:40]}")
    if claimed is None:
        return "nothing is claimed, epsilon is infinite"
    if not isinstance(claimed, float) or not 0 < claimed < math.inf:
        raise Wrong(f"epsilon must be positive, or null for none, got {str(claimed)[:40]}")
    own = own_bound(covered, _text(observer), delta, claimed)
    if claimed < own * (1 - TOLERANCE):
        raise Wrong(f"epsilon {claimed:.6g} is claimed at delta {delta:.3g}, and it is {own:.6g}")
    return f"epsilon {claimed:.6g} at delta {delta:.3g}; recomputed {own:.6g}"


def check_statement(statement: Json, events: Sequence[Event], claims: Sequence[Json]) -> str:
    """Find fields that are missing, and claims or runs that were left out."""
    if odd := set(statement) ^ FIELDS:
        raise Wrong(f"fields are missing or superfluous: {', '.join(sorted(odd))[:200]}")
    names, ledger = {event.run for event in events}, statement["ledger"]
    if not isinstance(ledger, dict) or not len(names) == len(events) == ledger.get("runs"):
        raise Wrong(f"the events are of {len(names)} runs, and the ledger has charged others: {str(ledger)[:80]}")
    about = {str(claim.get("runs")) for claim in claims if claim.get("scope") == "run"}
    for runs in about:
        if missing := OBSERVERS - {claim.get("observer") for claim in claims if str(claim.get("runs")) == runs}:
            raise Wrong(f"nothing is said about {', '.join(sorted(missing))}")
    if not about or (len(names) > 1 and "ledger" not in {claim.get("scope") for claim in claims}):
        raise Wrong("a run's own claims, or those of all runs together, are missing")
    return f"all {len(FIELDS)} fields, {len(events)} charged runs, {len(claims)} claims"


def verify(path: Path, keys: Sequence[str] = ()) -> Findings:
    """Check a certificate; raises `Unreadable` if it is none."""
    data, content = read(path)
    statement, found, events = content["statement"], Findings(), list[Event]()
    if not found.note("signature", lambda: check_bytes(data, content)):
        return found
    found.note("signer", lambda: check_key(content["public_key"], keys))
    given, claims = (statement.get(name) for name in ("events", "claims"))
    for rows in (given, claims):
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            found.wrong.append("content: events and claims must be lists of objects")
            return found

    def add(row: Json) -> str:
        events.append(event_of(row))
        return f"run {events[-1].run}, row {events[-1].row} of the ledger"

    is_read = [found.note(f"event {place}", lambda row=row: add(row)) for place, row in enumerate(given)]
    if all(is_read) and found.note("content", lambda: check_statement(statement, events, claims)):
        found.note("plan", lambda: check_plan(statement["plan"], events))
        for claim in claims:
            what = f"{str(claim.get('scope'))[:40]} against {str(claim.get('observer'))[:40]}"
            found.note(what, lambda claim=claim: check_claim(claim, events))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the certificate that the command line names, print what was found, and return the exit status."""
    parser = argparse.ArgumentParser(description="Check a certificate of d2pfed without d2pfed.")
    parser.add_argument("file", type=Path, metavar="FILE", help="the certificate, a file of JSON")
    parser.add_argument("--key", action="append", default=[], metavar="PUBLIC", help="the signer's public key")
    given = parser.parse_args(arguments)
    try:
        found = verify(given.file, given.key)
    except Unreadable as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for title, lines in (("holds", found.held), ("WRONG", found.wrong), ("NOT CHECKED", found.unchecked)):
        sys.stdout.writelines(f"{title:12}{line}\n" for line in lines)
    return found.status


if __name__ == "__main__":
    sys.exit(main())
