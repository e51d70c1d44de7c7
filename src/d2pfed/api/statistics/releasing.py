"""One release: from the clients' bounded vectors, through the protocol and a ledger, to their noisy sum."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from d2pfed.accounting import SERVER, Adjacency, Guarantee, Sampling
from d2pfed.errors import ConfigError
from d2pfed.ledger import Budget, Ledger
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import MAX_BITS, Ring
from d2pfed.plan import Plan, PrivacyTarget, calibrate, guarantees
from d2pfed.plan.widths import variance
from d2pfed.round import Attempt, Fidelity, given_sum, run_plan

Vector = NDArray[np.float64]

PROTOCOL_UP_TO = 100  # clients whose every message is sent in this process, unless another fidelity is asked for
FEW_CLIENTS = 1000  # below it, the default delta is no small number
SPARE_BITS = 2  # of the ring: a sum that wraps would be far off, and bits cost a short vector nothing
_CHANGEABLE = ("against", "adjacency", "dropouts", "colluders")
_DEFAULTS = PrivacyTarget(
    against=SERVER, sampling=Sampling.NONE, adjacency=Adjacency.ZERO_OUT, dropouts=0.1, colluders=0.1
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How private a statistic is, where it is charged, and how much of the protocol runs."""

    epsilon: float
    delta: float | None
    privacy: Mapping[str, object] | None
    ledger: Ledger | str | Path | None
    fidelity: str
    seed: int | None

    def __post_init__(self) -> None:
        for name in self.privacy or {}:
            if name not in _CHANGEABLE:
                raise ConfigError(f"privacy may change {', '.join(_CHANGEABLE)}, got {name!r}")
        if self.fidelity not in ("auto", *Fidelity):
            raise ConfigError(f"fidelity must be auto, {', '.join(Fidelity)}, got {self.fidelity!r}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ConfigError(f"seed must be a whole number or None, got {self.seed!r}")

    def target(self, dimension: int, clients: int, clip: float, budget: Budget | None) -> PrivacyTarget:
        """Return the target of one release over everyone; a ledger's budget says delta and observer."""
        asked = replace(_DEFAULTS, **(self.privacy or {}))  # type: ignore[arg-type]  # it checks their types itself
        delta = self.delta
        if budget is not None:
            if delta not in (None, budget.delta):
                raise ConfigError(f"delta is the ledger's {budget.delta:g}, got {delta:g}")
            if "against" in (self.privacy or {}) and asked.against != budget.observer:
                raise ConfigError(f"against is the ledger's {budget.observer}, got {asked.against}")
            asked, delta = replace(asked, against=budget.observer), budget.delta
        return replace(
            asked,
            epsilon=self.epsilon,
            delta=delta,
            clip=clip,
            dimension=dimension,
            population=clients,
            cohort_size=clients,
            rounds=1,
            spare=0,
        )

    def chosen_fidelity(self, clients: int) -> Fidelity:
        """Return how much of the protocol runs: all of it where clients are few."""
        if self.fidelity != "auto":
            return Fidelity(self.fidelity)
        return Fidelity.PROTOCOL if clients <= PROTOCOL_UP_TO else Fidelity.SUM

    @property
    def entropy(self) -> Entropy:
        """The system's, or replayed from the seed."""
        return Entropy.system() if self.seed is None else Entropy.replay(str(self.seed).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The noisy sum of the clients' vectors, and what is public about it."""

    total: Vector = field(repr=False)
    sigma: float  # standard deviation of the noise in each coordinate
    clients: int
    guarantees: tuple[Guarantee, ...]
    plan: Plan = field(repr=False)
    fidelity: Fidelity
    spent: float | None  # epsilon of all that the ledger was charged for; None without one
    warnings: tuple[str, ...]


def release(name: str, vectors: Sequence[Vector], clip: float, terms: Terms) -> Released:
    """Charge a run of one round, add up the clients' vectors privately, and return the noisy sum.

    Each client's vector is clipped to the L2 norm `clip`. Its run takes one attempt: what is calibrated for is what is
    charged. The noise is the least that a quorum less its colluders needs.
    """
    clients, dimension = len(vectors), len(vectors[0])
    with _ledger(terms) as given:
        target = terms.target(dimension, clients, clip, None if given is None else given.budget)
        if given is not None:
            target = _as_charged_before(target, terms, given)
        plan = calibrate(target)
        plan = replace(plan, ring=Ring(min(MAX_BITS, plan.ring.bits + SPARE_BITS)))
        charge, fidelity = run_plan(plan), terms.chosen_fidelity(clients)
        run = run_name(name)
        numbered = dict(enumerate(vectors))
        with _own_ledger(charge.budget) if given is None else _left_open(given) as ledger:
            ledger.begin(run, run, charge)
            total = given_sum(plan, Attempt(run, 0, 0), numbered, ledger, terms.entropy, fidelity=fidelity)
            spent = None if given is None else ledger.spent()
    return Released(
        total=total.astype(np.float64),
        sigma=math.sqrt(variance(plan.noise(clients))) * plan.codec.granularity,
        clients=clients,
        guarantees=guarantees(plan),
        plan=plan,
        fidelity=fidelity,
        spent=spent,
        warnings=_warnings(terms, plan, clients),
    )


def run_name(name: str) -> str:
    """Return a name that no other release has, whatever the seed."""
    return f"{name} {Entropy.system().key[:8].hex()}"


def _warnings(terms: Terms, plan: Plan, clients: int) -> tuple[str, ...]:
    found = []
    if terms.delta is None and clients < FEW_CLIENTS and plan.delta == plan.sampling.population**-1.1:
        found.append(f"Delta is {clients}^-1.1 = {plan.delta:.2g}, large as clients are few: state a smaller one.")
    if terms.seed is not None:
        found.append("The noise repeats from its seed: it protects nobody from whoever knows the seed.")
    return tuple(found)


def _as_charged_before(target: PrivacyTarget, terms: Terms, ledger: Ledger) -> PrivacyTarget:
    """Return the target with the adjacency of the ledger's other runs: an account has one."""
    charged = [plan.release.adjacency for plan in (*ledger.budget.declared, *ledger.plans())][:1]
    if charged in ([], [target.adjacency]):
        return target
    if "adjacency" in (terms.privacy or {}):
        raise ConfigError(f"adjacency is {charged[0]} in all of the ledger's runs, got {target.adjacency}")
    return replace(target, adjacency=charged[0])


@contextmanager
def _ledger(terms: Terms) -> Iterator[Ledger | None]:
    """Yield the ledger that was given: open already, a file, or that of a run's directory."""
    given = terms.ledger
    if given is None or isinstance(given, Ledger):
        yield given
        return
    if not isinstance(given, (str, Path)):
        raise ConfigError(f"ledger must be a Ledger or the path of one or of a run, got {type(given).__name__}")
    path = Path(given)
    with Ledger.open(path / "ledger.sqlite" if path.is_dir() else path) as ledger:
        yield ledger


@contextmanager
def _own_ledger(budget: Budget) -> Iterator[Ledger]:
    """Yield a ledger for this release alone."""
    with TemporaryDirectory() as place, Ledger.create(Path(place) / "ledger.sqlite", budget) as ledger:
        yield ledger


@contextmanager
def _left_open(ledger: Ledger) -> Iterator[Ledger]:
    """Yield a ledger that its owner closes."""
    yield ledger
