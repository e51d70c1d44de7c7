"""One release: from the clients' bounded vectors, through the protocol and a ledger, to a noisy sum and its cost."""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, TypedDict, TypeVar

import numpy as np

from d2pfed.accounting import SERVER, Adjacency, Guarantee, Sampling, Unit, round_up
from d2pfed.errors import ConfigError
from d2pfed.fields import checked_fields
from d2pfed.ledger import Ledger
from d2pfed.ledger.files import software_digest
from d2pfed.noise.clipping import DROWNED
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import MAX_BITS, Ring
from d2pfed.plan import Plan, PrivacyTarget, Protocol, calibrate, guarantees
from d2pfed.round import Attempt, Fidelity, local_sum, run_plan
from d2pfed.round.participant import Update
from d2pfed.secagg.lattice.parameters import MOST_BITS
from d2pfed.statistics.records import Array, CodedRecords, RecordCode, are_known, positive

Value = TypeVar("Value")
Other = TypeVar("Other")

PROTOCOL_UP_TO = 100  # clients whose every message is sent in this process, unless another fidelity is asked for
FEW = 1000  # clients or records: below it, the default delta is no small number
MOST_ROOM = 0.02  # of the clip, that a codec's room for rounding may take
LEAST_BOUND = 1e-30  # on a vector; the most is its inverse: sums are decoded in single precision
SPARE_BITS = 2  # of the ring: a sum that wraps would be far off, and bits cost a short vector nothing
_log = logging.getLogger("d2pfed.statistics")  # read where the data are
_HOW = {  # by fidelity; a deployment has another
    "sum": "simulated: vectors added up without the protocol's messages",
    "protocol": "simulated: every message of the protocol was sent",
}
_CHANGEABLE = ("against", "adjacency", "dropouts", "colluders", "protocol", "unit", "records", "max_silos")
_DEFAULTS = PrivacyTarget(against=SERVER, sampling=Sampling.NONE, dropouts=0.1, colluders=0.1)


class Asked(TypedDict, total=False):
    """What a caller may ask of any statistic: the fields of `Terms`."""

    epsilon: float
    delta: float | None
    privacy: Mapping[str, object] | None
    ledger: Ledger | str | Path | None
    fidelity: str
    seed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How private a statistic is, where it is charged, and how much of the protocol runs."""

    epsilon: float = 1.0
    delta: float | None = None
    privacy: Mapping[str, object] | None = None
    ledger: Ledger | str | Path | None = None
    fidelity: str = "auto"
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.privacy is not None and not isinstance(self.privacy, Mapping):
            raise ConfigError(
                f"privacy must be a dictionary of changes ({', '.join(_CHANGEABLE)}), got {type(self.privacy).__name__}"
            )
        for name in self.privacy or {}:
            if name not in _CHANGEABLE:
                raise ConfigError(f"privacy may change {', '.join(_CHANGEABLE)}, got {name!r}")
        if self.ledger is not None and not isinstance(self.ledger, (Ledger, str, Path)):
            raise ConfigError(
                f"ledger must be a Ledger or the path of one or of a run, got {type(self.ledger).__name__}"
            )
        named: object = self.fidelity
        if not isinstance(named, str) or named not in ("auto", *Fidelity):
            raise ConfigError(f"fidelity must be auto, {', '.join(Fidelity)}, got {self.fidelity!r}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ConfigError(f"seed must be a whole number or None, got {self.seed!r}")
        if self.seed is not None and self.ledger is not None:
            raise ConfigError(
                f"a release on a shared ledger takes its noise from the system, got seed {self.seed}: what repeats "
                "from a seed protects nobody, and is not to be counted as private"
            )

    @staticmethod
    def of(asked: Asked) -> "Terms":
        """Return what a caller asks, who may have mistaken a name."""
        return Terms(**checked_fields(Terms, asked, "a private statistic"))

    @property
    def of_records(self) -> bool:
        """Whether what is protected is a record of a client, and not all that the client holds."""
        return (self.privacy or {}).get("unit", Unit.CLIENT) == Unit.RECORD

    def target(self, dimension: int, clients: int, clip: float, ledger: Ledger | None) -> PrivacyTarget:
        """Return the target of one release over everyone; delta, observer and adjacency are a shared ledger's."""
        changes = dict(self.privacy or {})
        usual = {"adjacency": Adjacency.ADD_REMOVE, "batch_rate": 1.0} if self.of_records else {}
        asked = replace(_DEFAULTS, **(usual | changes))  # type: ignore[arg-type]  # it checks types
        if self.of_records and asked.records is None:
            raise ConfigError(
                "the unit record needs records, a public bound on the number of all records, got None"
            )
        delta = self.delta
        if ledger is not None:
            if delta not in (None, ledger.budget.delta):
                raise ConfigError(f"delta is the ledger's {ledger.budget.delta:g}, got {delta:g}")
            if "against" in changes and asked.against != ledger.budget.observer:
                raise ConfigError(f"against is the ledger's {ledger.budget.observer}, got {asked.against}")
            asked, delta = replace(asked, against=ledger.budget.observer), ledger.budget.delta
            for plan in (*ledger.budget.declared, *ledger.plans())[:1]:
                if plan.release.unit is not asked.unit:
                    raise ConfigError(
                        f"the ledger's runs protect a {plan.release.unit}, and this statistic a {asked.unit}"
                    )
                for name in ("adjacency", "max_silos"):  # one account has one of each
                    charged = getattr(plan.release, name)
                    if name in changes and charged != getattr(asked, name):
                        raise ConfigError(
                            f"{name} is {charged} in all of the ledger's runs, got {getattr(asked, name)}"
                        )
                asked = replace(asked, adjacency=plan.release.adjacency, max_silos=plan.release.max_silos)
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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class Statistic(Generic[Value]):
    """A private statistic: its value, its standard error, and what it cost.

    Attributes:
        name: What was computed, in words.
        value: The statistic, right on average except for what the bounds cut off.
        standard_error: Of the value, by the noise alone: a public number, or follows from released ones.
        guarantees: One epsilon per observer.
        bound: The largest L2 norm of what one client, or one record where that is the unit, contributes.
        clients: How many clients there are.
        plan: What clients and server agreed on: noise, quorum, colluders.
        fidelity: Whether every message of secure aggregation was sent in this process (protocol), or the clients'
            encoded vectors were added up (sum).
        spent: Epsilon of all runs on the ledger together; None where there is none.
        warnings: What a user should know before the value is shared.

    Examples:
        >>> mean = private_mean([20.0 + i % 50 for i in range(2000)], bounds=(0, 100), epsilon=1.0)
        >>> mean.clients, str(mean.guarantees[1].observer)
        (2000, 'server')
    """

    name: str
    value: Value
    standard_error: Value
    guarantees: tuple[Guarantee, ...]
    bound: float
    clients: int
    plan: Plan = field(repr=False)
    fidelity: str
    spent: float | None
    warnings: tuple[str, ...]

    @property
    def epsilon(self) -> float:
        """What the whole release is charged, against the plan's observer and the colluders that are planned for."""
        return self.plan.epsilon

    @property
    def delta(self) -> float:
        """The failure probability of that guarantee."""
        return self.plan.delta

    @property
    def sigma(self) -> float:
        """The standard deviation of the noise in each coordinate of the sum that was released."""
        return math.sqrt(self.plan.noise(self.clients).sum_variance) * self.plan.codec.granularity

    def computed(self, value: Other, error: Other, warnings: tuple[str, ...] = ()) -> "Statistic[Other]":
        """Return what follows from the released sum, at no further cost."""
        released: Statistic[Any] = self
        return replace(released, value=value, standard_error=error, warnings=(*self.warnings, *warnings))

    def __repr__(self) -> str:
        plan, missing = self.plan, self.plan.cohort_size - self.plan.quorum
        lines = [f"{self.name} over {self.clients:,} clients", *_shown(self.value, self.standard_error)]
        lines.append(
            f"epsilon {round_up(plan.epsilon, 4)} at delta {round_up(plan.delta, 3)} against {plan.against} and up "
            f"to {plan.colluders:,} colluding clients (for one {plan.unit} of norm at most {self.bound:.4g}, "
            f"{plan.adjacency})"
        )
        lines += [
            f"against {each.observer}: {each.reason or round_up(each.epsilon, 4)}" for each in self.guarantees
        ]
        lines.append(f"noise planned for {missing:,} missing clients; {_HOW.get(self.fidelity, self.fidelity)}")
        if self.spent is not None:
            lines.append(
                f"all runs on the ledger: epsilon {round_up(self.spent, 4)} against {plan.against}, if none was begun "
                "or stopped for what another had shown; its budget holds whatever was seen"
            )
        return "\n  ".join([*lines, *(f"warning: {each}" for each in self.warnings)])


def _shown(value: object, error: object) -> list[str]:
    """Return a value with its standard error in a few lines."""
    if isinstance(value, dict) and isinstance(error, dict):
        return [f"{name}: {line}" for name in value for line in _shown(value[name], error[name])]
    found, spread = np.asarray(value), np.asarray(error)
    if found.size > 1:
        text = np.array2string(found, precision=4, suppress_small=True, threshold=20, prefix="  ")
        return [f"{text}, standard error up to {spread.max():.3g}"]
    return [f"{found.item():.6g}, standard error {spread.item():.3g}"]


def drowned(total: float, sigma: float, what: str) -> tuple[str, ...]:
    """Return a warning if a total that is divided by is not far above its noise."""
    if total >= DROWNED * sigma:
        return ()
    return (f"The total {what} is below {DROWNED:g} standard deviations of its noise: the ratio means little.",)


def release(
    name: str, contributions: Sequence[Update], dimension: int, bound: float, terms: Terms
) -> Statistic[Array]:
    """Charge a run of one round and one attempt, add up what the clients contribute, and return the noisy sum.

    What is protected, a client's vector or a record's, has an L2 norm of at most `bound`, or is scaled down to it.
    """
    clients = len(contributions)
    if not LEAST_BOUND <= bound <= 1 / LEAST_BOUND:
        raise ConfigError(
            f"the bound on a vector must be in [{LEAST_BOUND:g}, {1 / LEAST_BOUND:g}], got {bound:g}"
        )
    few = Fidelity.PROTOCOL if clients <= PROTOCOL_UP_TO else Fidelity.SUM
    fidelity = few if terms.fidelity == "auto" else Fidelity(terms.fidelity)
    entropy = Entropy.system() if terms.seed is None else Entropy.replay(str(terms.seed).encode())
    with ExitStack() as closing:
        shared = terms.ledger
        if isinstance(shared, (str, Path)):  # a ledger's file, or a run's directory
            own = Path(shared) / "ledger.sqlite"
            is_run = os.path.isdir(shared)  # noqa: PTH112 - a path that cannot be, such as one too long, is no directory
            shared = closing.enter_context(Ledger.open(own if is_run else shared))
        target = terms.target(dimension, clients, bound, shared)
        plan = _plan(target, bound)
        charge, ledger = run_plan(plan), shared
        run = f"{name} {Entropy.system().key[:8].hex() if terms.seed is None else terms.seed}"
        if ledger is None:
            place = Path(closing.enter_context(TemporaryDirectory())) / "ledger.sqlite"
            ledger = closing.enter_context(Ledger.create(place, charge.budget))
        ledger.begin(run, run, charge, software=software_digest(), repeatable=terms.seed is not None)
        numbered = dict(enumerate(contributions))
        total = local_sum(plan, Attempt(run, 0, 0), numbered, ledger, entropy, fidelity=fidelity)
        spent = None if shared is None else ledger.spent()
    warnings, delta = [], target.effective_delta
    what, count = ("records", target.records or 0) if terms.of_records else ("clients", target.population)
    if terms.delta is None and shared is None and count < FEW:
        warnings.append(f"Delta is {count}^-1.1 = {delta:.2g}, large as {what} are few: state a smaller one.")
    elif delta >= 1 / count:
        warnings.append(
            f"Delta {round_up(delta, 6)} is not below 1 / {what} = {1 / count:g}: publishing a random "
            f"{target.unit}'s data whole would satisfy it."
        )
    if terms.seed is not None:
        warnings.append("The noise follows from its seed: anyone who knows the seed can remove it.")
    found = Statistic(
        name=f"private {name}",
        value=total.astype(np.float64),
        standard_error=np.zeros(len(total)),
        guarantees=guarantees(plan),
        bound=bound,
        clients=clients,
        plan=plan,
        fidelity=fidelity,
        spent=spent,
        warnings=tuple(warnings),
    )
    return replace(found, standard_error=np.full(len(total), found.sigma))


def release_records(
    name: str, clients: Sequence[Array], code: RecordCode, most: object, terms: Terms
) -> Statistic[Array]:
    """Release a sum over the clients' records.

    A client contributes the mean of its records' vectors, or their sum scaled down to `most` records; where a record is
    protected, each contributes its own. One that is not finite contributes zero: its holder is told, and no result.
    """
    if not all(are_known(records).all() for records in clients):
        _log.warning("some records hold what is no number, or is out of its range: they count as zero")
    if terms.of_records:
        if most is not None:
            raise ConfigError(f"max_values is for the unit client, got {most} and the unit record")
        coded = [CodedRecords(code, records) for records in clients]
        found, counted = release(name, coded, code.dimension, code.bound, terms), "each record once"
    else:
        cap = None if most is None else positive("max_values", most)
        vectors = [code.of_client(records, cap) for records in clients]
        found = release(name, vectors, code.dimension, code.bound * (1.0 if cap is None else cap), terms)
        counted = "clients, by shares of their values" if cap is None else f"values, up to {cap:g} a client"
    return replace(found, name=f"{found.name} (counting {counted})")


def _plan(target: PrivacyTarget, bound: float) -> Plan:
    """Return a plan in which a vector at its bound is not shrunk: that would bias sums by one part in thousands.

    The codec leaves a little room below its clip for rounding, so the clip is larger by that room, and so is the noise.
    """
    plan = calibrate(target)
    radius, length = plan.codec.grid_radius, plan.codec.length
    room = 4 / radius + length / (6 * radius**2)
    if room < MOST_ROOM:
        target = replace(target, clip=bound * (1 + room))
        plan = calibrate(target)
    if plan.protocol is Protocol.LATTICE:  # whose secrets are as long as the ring asks for
        return calibrate(replace(target, bits=min(MOST_BITS, plan.ring.bits + SPARE_BITS)))
    return replace(plan, ring=Ring(min(MAX_BITS, plan.ring.bits + SPARE_BITS)))
