"""One release: from the clients' bounded vectors, through the protocol and a ledger, to their noisy sum."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from d2pfed.accounting import SERVER, Adjacency, Guarantee, Sampling, Unit, round_up
from d2pfed.errors import ConfigError
from d2pfed.ledger import Budget, Ledger
from d2pfed.ledger.software import software_digest
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import MAX_BITS, Ring
from d2pfed.plan import Plan, PrivacyTarget, calibrate, guarantees
from d2pfed.plan.widths import variance
from d2pfed.round import Attempt, Fidelity, local_sum, run_plan
from d2pfed.round.participant import Update
from d2pfed.statistics.records import Array, CodedRecords, RecordCode, are_known, positive

PROTOCOL_UP_TO = 100  # clients whose every message is sent in this process, unless another fidelity is asked for
FEW = 1000  # clients or records: below it, the default delta is no small number
MOST_ROOM = 0.02  # of the clip, that a codec's room for rounding may take
LEAST_BOUND = 1e-30  # on a vector; the most is its inverse: sums are decoded in single precision
SPARE_BITS = 2  # of the ring: a sum that wraps would be far off, and bits cost a short vector nothing
_log = logging.getLogger("d2pfed.statistics")  # of whoever holds the data
_CHANGEABLE = ("against", "adjacency", "dropouts", "colluders", "unit", "records", "max_silos")
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
        if self.privacy is not None and not isinstance(self.privacy, Mapping):
            raise ConfigError(
                f"privacy must be a dictionary of changes ({', '.join(_CHANGEABLE)}), got {type(self.privacy).__name__}"
            )
        for name in self.privacy or {}:
            if name not in _CHANGEABLE:
                raise ConfigError(f"privacy may change {', '.join(_CHANGEABLE)}, got {name!r}")
        if self.fidelity not in ("auto", *Fidelity):
            raise ConfigError(f"fidelity must be auto, {', '.join(Fidelity)}, got {self.fidelity!r}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ConfigError(f"seed must be a whole number or None, got {self.seed!r}")
        if self.seed is not None and self.ledger is not None:
            raise ConfigError(
                f"a release on a shared ledger takes its noise from the system, got seed {self.seed}: what repeats "
                "from a seed protects nobody, and is not to be counted as private"
            )

    @property
    def of_records(self) -> bool:
        """Whether what is protected is a record of a client, and not all that the client holds."""
        return (self.privacy or {}).get("unit", Unit.CLIENT) == Unit.RECORD

    def target(self, dimension: int, clients: int, clip: float, budget: Budget | None) -> PrivacyTarget:
        """Return the target of one release over everyone; a ledger's budget says delta and observer."""
        usual = {"adjacency": Adjacency.ADD_REMOVE, "batch_rate": 1.0} if self.of_records else {}
        asked = replace(_DEFAULTS, **(usual | dict(self.privacy or {})))  # type: ignore[arg-type]  # it checks types
        if self.of_records and asked.records is None:
            raise ConfigError(
                "the unit record needs records, a public bound on the number of all records, got None"
            )
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

    total: Array = field(repr=False)
    sigma: float  # standard deviation of the noise in each coordinate
    clients: int
    bound: float  # on the norm of what is protected
    guarantees: tuple[Guarantee, ...]
    plan: Plan = field(repr=False)
    fidelity: Fidelity
    spent: float | None  # epsilon of all that the ledger was charged for; None without one
    warnings: tuple[str, ...]


def release(name: str, contributions: Sequence[Update], dimension: int, bound: float, terms: Terms) -> Released:
    """Charge a run of one round, add up what the clients contribute, and return the noisy sum.

    What is protected, a client's vector or a record's, has an L2 norm of at most `bound`, or is scaled down to it. The
    run takes one attempt: what is calibrated for is what is charged. The noise is the least that a quorum less its
    colluders needs.
    """
    clients = len(contributions)
    if not LEAST_BOUND <= bound <= 1 / LEAST_BOUND:
        raise ConfigError(
            f"the bound on a vector must be in [{LEAST_BOUND:g}, {1 / LEAST_BOUND:g}], got {bound:g}"
        )
    with _ledger(terms) as given:
        target = terms.target(dimension, clients, bound, None if given is None else given.budget)
        if given is not None:
            target = _as_charged_before(target, terms, given)
        plan = _plan(target, bound)
        charge, fidelity, run = run_plan(plan), terms.chosen_fidelity(clients), run_name(name, terms)
        with _own_ledger(charge.budget) if given is None else nullcontext(given) as ledger:
            ledger.begin(run, run, charge, software=software_digest(), repeatable=terms.seed is not None)
            numbered = dict(enumerate(contributions))
            total = local_sum(plan, Attempt(run, 0, 0), numbered, ledger, terms.entropy, fidelity=fidelity)
            spent = None if given is None else ledger.spent()
    return Released(
        total=total.astype(np.float64),
        sigma=math.sqrt(variance(plan.noise(clients))) * plan.codec.granularity,
        clients=clients,
        bound=bound,
        guarantees=guarantees(plan),
        plan=plan,
        fidelity=fidelity,
        spent=spent,
        warnings=_warnings(terms, target, given),
    )


def release_records(name: str, clients: Sequence[Array], code: RecordCode, most: object, terms: Terms) -> Released:
    """Release a sum over the clients' records.

    Where a client is protected it contributes one vector: the mean of its records' vectors, or their sum scaled down to
    `most` records. Where a record is, each contributes its own. One that is not finite contributes zero: its holder is
    told, and no result.
    """
    if not all(are_known(records).all() for records in clients):
        _log.warning("some records hold what is no number, or is out of its range: they count as zero")
    if terms.of_records:
        if most is not None:
            raise ConfigError(f"max_values is for the unit client, got {most} and the unit record")
        coded = [CodedRecords(code, records) for records in clients]
        return release(name, coded, code.dimension, code.bound, terms)
    cap = None if most is None else positive("max_values", most)
    vectors = [code.of_client(records, cap) for records in clients]
    return release(name, vectors, code.dimension, code.bound * (1.0 if cap is None else cap), terms)


def _plan(target: PrivacyTarget, bound: float) -> Plan:
    """Return a plan in which a vector at its bound is not shrunk: that would bias sums by one part in thousands.

    The codec leaves a little room below its clip for rounding, so the clip is larger by that room, and so is the noise.
    """
    plan = calibrate(target)
    radius, length = plan.codec.grid_radius, plan.codec.length
    room = 4 / radius + length / (6 * radius**2)
    if room < MOST_ROOM:
        plan = calibrate(replace(target, clip=bound * (1 + room)))
    return replace(plan, ring=Ring(min(MAX_BITS, plan.ring.bits + SPARE_BITS)))


def run_name(name: str, terms: Terms) -> str:
    """Return a name that no other release has, but for one that repeats from its seed."""
    if terms.seed is not None:
        return f"{name} {terms.seed}"
    return f"{name} {Entropy.system().key[:8].hex()}"


def _warnings(terms: Terms, target: PrivacyTarget, ledger: Ledger | None) -> tuple[str, ...]:
    found = []
    what, count = ("records", target.records or 0) if terms.of_records else ("clients", target.population)
    if terms.delta is None and ledger is None and count < FEW:
        found.append(
            f"Delta is {count}^-1.1 = {target.effective_delta:.2g}, large as {what} are few: state a smaller one."
        )
    elif target.effective_delta >= 1 / count:
        found.append(
            f"Delta {round_up(target.effective_delta, 6)} is not below 1 / {what} = {1 / count:g}: publishing a random "
            f"{target.unit}'s data whole would satisfy it."
        )
    if terms.seed is not None:
        found.append("The noise follows from its seed: it protects nobody from whoever knows the seed.")
    return tuple(found)


def _as_charged_before(target: PrivacyTarget, terms: Terms, ledger: Ledger) -> PrivacyTarget:
    """Return the target with adjacency and max_silos of the ledger's other runs, which are those of one account."""
    plans = (*ledger.budget.declared, *ledger.plans())
    if not plans:
        return target
    charged = plans[0].release
    if charged.unit is not target.unit:
        raise ConfigError(f"the ledger's runs protect a {charged.unit}, and this statistic a {target.unit}")
    if "adjacency" in (terms.privacy or {}) and charged.adjacency is not target.adjacency:
        raise ConfigError(f"adjacency is {charged.adjacency} in all of the ledger's runs, got {target.adjacency}")
    if "max_silos" in (terms.privacy or {}) and charged.max_silos != target.max_silos:
        raise ConfigError(f"max_silos is {charged.max_silos} in all of the ledger's runs, got {target.max_silos}")
    return replace(target, adjacency=charged.adjacency, max_silos=charged.max_silos)


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
