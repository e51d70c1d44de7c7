"""Settings of `fit` that travel together, each checked at construction; a dictionary of the fields will do."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from d2pfed import learning
from d2pfed.accounting import Guarantee
from d2pfed.accounting.filters import milestones
from d2pfed.api.progress import Watcher
from d2pfed.api.result import FitResult
from d2pfed.errors import ConfigError
from d2pfed.fields import (
    DATA,
    RUN,
    TRAINING,
    check_fields,
    check_range,
    check_types,
    checked_fields,
    documented,
    setting,
)
from d2pfed.plan import Plan, guarantees
from d2pfed.plan.bounds import check_name
from d2pfed.round import run_plan
from d2pfed.runs import RoundRecord
from d2pfed.simulation import Dropouts, Fidelity
from d2pfed.training import ServerOptimizer, named_server

Kind = TypeVar("Kind")
_LOCAL = {each.name: each.metadata for each in fields(learning.LocalTraining)}  # described there

# Called with each round's record and a function that returns the module as it is after the round.
Callback = Callable[[RoundRecord, Callable[[], learning.Module]], object]


class BackendName(StrEnum):
    """Where clients are trained."""

    AUTO = "auto"  # worker processes where they are safe and worth it, else this process
    PROCESSES = "processes"
    IN_PROCESS = "in-process"
    RAY = "ray"  # workers on one machine or many


@documented
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Training:
    """How clients train and what they weigh, beyond the learning rate, epochs and batch size.

    Beside the attributes below there are `trainable`: a pattern or patterns of parameter names, such as `head.*`, the
    others keep their values; `forward`: from the module and inputs to outputs, where the module is not called with the
    inputs; `step`: from the module and a batch to its loss, in place of forward and loss; `collate`: from a list of
    examples to a batch, where they are of unequal length; `example_weights`: from inputs and targets to a factor of
    each example's loss; `weights`: a weight from 0 on
    for each client, by which the mean update is weighted, or `examples` for how many it has: they are private, their
    sum is released beside the updates' in one vector; `groups`: where the unit of privacy is a record, for each silo
    the owner of each row, such as a patient, all of whose rows in a silo are then one unit; `personal`: a pattern or
    patterns of parameters that each client trains for itself and keeps.

    An optimizer may be a function of parameters, such as `torch.optim.NAdam`: one that takes `lr` gets that of `fit`,
    another has its own. A schedule may be a function from the share of rounds or steps that is done to a factor.

    Examples:
        >>> str(Training(optimizer="adam", trainable="head.*").optimizer)
        'adam'
    """

    optimizer: learning.Optimizer | learning.MakeOptimizer = field(
        default=learning.Optimizer.SGD, metadata=_LOCAL["optimizer"]
    )
    momentum: float = field(default=0.0, metadata=_LOCAL["momentum"])
    weight_decay: float | None = field(default=None, metadata=_LOCAL["weight_decay"])
    lr_schedule: learning.Schedule | learning.Rate | None = field(default=None, metadata=_LOCAL["lr_schedule"])
    step_schedule: learning.Schedule | learning.Rate | None = field(default=None, metadata=_LOCAL["step_schedule"])
    max_grad_norm: float | None = field(default=None, metadata=_LOCAL["max_grad_norm"])
    proximal: float | None = field(default=None, metadata=_LOCAL["proximal"])
    precision: learning.Precision | None = field(default=None, metadata=_LOCAL["precision"])
    device: str = setting("cpu", "cpu, cuda or mps.", TRAINING)
    max_weight: float | None = setting(
        None, "Cap on a weight: public, chosen without a look at the weights.", TRAINING, unset="none"
    )
    trainable: str | Sequence[str] = "*"
    forward: learning.Forward | None = None
    step: learning.Step | None = None
    collate: learning.Collate | None = None
    example_weights: learning.Weigh | None = None
    personal: str | Sequence[str] = ()
    weights: Sequence[float] | str | None = None
    groups: learning.Groups | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if (self.weights is None) != (self.max_weight is None):
            given = "max_weight" if self.weights is None else "weights"
            raise ConfigError(f"weights and max_weight go together, got only {given}")
        if self.collate is not None and not callable(self.collate):
            raise ConfigError(f"collate must be a function of examples, got {type(self.collate).__name__}")
        for name in ("optimizer", "lr_schedule", "step_schedule"):
            if getattr(self, name) == "own":
                raise ConfigError(f"{name} must be a function or one of the other names, got own")

    def local(self, rounds: int, **steps: Any) -> learning.LocalTraining:  # noqa: ANN401 - its fields
        """Return how a client trains in a run of this many rounds; `steps` are lr, epochs and batch_size."""
        shared = {
            each.name: getattr(self, each.name)
            for each in fields(learning.LocalTraining)
            if hasattr(self, each.name)
        }
        return learning.LocalTraining(**shared, **steps, rounds=None if self.lr_schedule is None else rounds)


class Mode(StrEnum):
    """Which values of a metric are better."""

    MIN = "min"
    MAX = "max"


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop:
    """Ends a run once a validation metric has not improved for some evaluations.

    The guarantee of the whole plan holds wherever the run ends. A lower one may be stated only at numbers of attempts
    that were fixed beforehand: `milestones`, at which alone the run then stops; they share delta.

    Examples:
        >>> EarlyStop(metric="accuracy", mode="max", milestones=(25, 50)).patience
        5
    """

    metric: str = setting("loss", "The validation metric that is watched.", RUN)
    mode: Mode = setting(Mode.MIN, "Which values are better.", RUN)
    patience: int = setting(5, "Evaluations without improvement that end the run.", RUN)
    least_gain: float = setting(0.0, "What counts as an improvement.", RUN)
    milestones: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        if self.patience < 1:
            raise ConfigError(f"patience must be at least 1, got {self.patience}")
        if not (math.isfinite(self.least_gain) and self.least_gain >= 0):
            raise ConfigError(f"least_gain must be finite and at least 0, got {self.least_gain}")
        given: object = self.milestones
        object.__setattr__(self, "milestones", tuple(given) if isinstance(given, list) else given)
        check_fields(self)
        stops = self.milestones
        if list(stops) != sorted(set(stops)) or stops[:1] < (1,) * bool(stops):
            raise ConfigError(f"milestones must be increasing whole numbers from 1 on, got {stops}")

    def __call__(self, records: Sequence[RoundRecord]) -> str:
        """Return why a run with these rounds ends here; empty if it goes on."""
        values = [record.metrics[self.metric] for record in records if self.metric in record.metrics]
        best, idle = math.inf, 0
        for value in (-value if self.mode is Mode.MAX else value for value in values):
            idle += 1
            if value < best - self.least_gain:  # a value that is not finite is no improvement
                best, idle = value, 0
        if idle < self.patience or (self.milestones and records[-1].charged not in self.milestones):
            return ""
        return f"{self.metric} has not improved for {idle} evaluations"

    def guarantee(self, plan: Plan, charged: int) -> Guarantee | None:
        """Return what a run that stopped after this many charged attempts may state besides its plan's guarantee."""
        if not self.milestones:
            return None
        stops = (*(stop for stop in self.milestones if stop < plan.max_attempts), plan.max_attempts)
        found = milestones(run_plan(plan).cost, stops, plan.against, plan.delta)
        at = next(place for place, stop in enumerate(stops) if stop >= charged)
        whole = next((each for each in guarantees(plan) if each.observer == plan.against), None)
        return None if whole is None else replace(whole, epsilon=found[at], delta=plan.delta)


@documented
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunOptions:
    """How a run is carried out and watched.

    Beside the attributes below there are `baseline`: a result or a run's directory whose metrics the report shows
    beside this run's; `progress`: whether to show a bar on standard error, None in a terminal or notebook only;
    `dropouts`: the fraction of clients that is lost before each exchange of a simulated round; `callbacks`: functions
    that are called after each round with its record and a function that returns the current module. One that returns
    False interrupts the run, which `resume` carries on.

    Examples:
        >>> RunOptions(name="trial-1", ledger="clients.sqlite", evaluate_every=5).name
        'trial-1'
    """

    name: str | None = setting(
        None,
        "The run's name: of its directory under `runs`, and of its report.",
        RUN,
        unset="what is trained, and a digest of the settings",
    )
    ledger: Path | None = setting(
        None,
        "Ledger shared with other runs over these clients, see `ledger create`.",
        RUN,
        parse=Path,
        unset="the run's own",
    )
    evaluate_every: int = setting(1, "Rounds from one evaluation to the next.", RUN)
    backend: BackendName = setting(BackendName.AUTO, "Where clients are trained.", RUN)
    workers: int | None = setting(None, "Worker processes.", RUN, unset="one per core")
    address: str | None = setting(
        None, "Address of a Ray cluster, for the backend ray.", RUN, unset="this machine"
    )
    fidelity: Fidelity = setting(Fidelity.SUM, "sum, or protocol: every message of every round.", RUN)
    partition: str | None = setting(
        None, "Of a named task: iid, shards, dirichlet:ALPHA or owner.", DATA, unset="the task's"
    )
    data: Path | None = setting(
        None, "Directory of the data sets of named tasks.", DATA, parse=Path, unset="D2PFED_DATA, or the cache"
    )
    dropouts: Dropouts = field(default_factory=Dropouts)
    stop_is_blind: bool = setting(
        default=False,
        text="Declare that nobody stops the run because of its outputs, so that the spent part may be reported.",
        section=RUN,
    )
    baseline: FitResult | str | Path | None = None
    progress: bool | Watcher | None = None
    callbacks: Callback | Sequence[Callback] = ()

    def __post_init__(self) -> None:
        check_types(self)
        if self.name is not None:
            check_name("a run's", self.name)
        every: Any = (self.callbacks,) if callable(self.callbacks) else self.callbacks
        if not isinstance(every, Sequence) or not all(callable(each) for each in every):
            raise ConfigError(f"callbacks must be functions, got {type(self.callbacks).__name__}")
        object.__setattr__(self, "callbacks", tuple(every))
        check_range("evaluate_every", self.evaluate_every, 1, 2**63 - 1)
        if self.workers is not None:
            check_range("workers", self.workers, 1, 2**63 - 1)


# Parameters of `fit` that have become fields, and where they are now.
MOVED = {
    **{f"server_{each.name}": f"server={{{each.name!r}: ...}}" for each in fields(ServerOptimizer)},
    **{each.name: f"training={{{each.name!r}: ...}}" for each in fields(Training)},
    **{each.name: f"run={{{each.name!r}: ...}}" for each in fields(RunOptions)},
}


def settings_of(kind: type[Kind], given: object, name: str) -> Kind:
    """Return a settings object, made of its fields where a dictionary is given; None is all defaults."""
    if isinstance(given, kind):
        return given
    if given is None:
        return kind()
    if isinstance(given, str) and kind is ServerOptimizer:
        given = named_server(given)
    return kind(**checked_fields(kind, given, name))
