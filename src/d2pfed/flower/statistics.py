"""Private statistics and evaluations over Flower: runs of one round of which the server sees a bounded, noised sum.

The server asks by `private_total`, `private_evaluate` or `private_metrics`, in its ServerApp. For a total, the client's
`train` function looks for `STATISTIC` in the configuration and answers by `statistic_reply`; for an evaluation, its
`evaluate` function is called as ever. An evaluation has a directory of its own: asked again under the same name, it
gives the same answer and charges nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from d2pfed.accounting import Guarantee, Unit
from d2pfed.deploy.layout import MOST_LOCAL_BYTES
from d2pfed.errors import ConfigError
from d2pfed.flower.grid import EVALUATION_TYPE, to_named_arrays
from d2pfed.flower.server import PrivateFedAvg
from d2pfed.plan import calibrate, guarantees
from d2pfed.plan.bounds import check_name
from d2pfed.runs import RoundRecord
from d2pfed.runs.json_files import from_json, read_text, to_json
from d2pfed.statistics.metrics import Metrics, MetricScheme, metric_names
from d2pfed.statistics.questions import MEANS, SCORES, STATISTIC, Bounds, MetricMeans, ScoreMetrics

EVALUATIONS = "evaluations"  # in the directory of the run that is evaluated

_Value = TypeVar("_Value")
_Error = TypeVar("_Error")


@dataclass(frozen=True, slots=True)
class PrivateAnswer(Generic[_Value, _Error]):
    """What clients have answered together.

    Attributes:
        value: The sum over those who took part, or each metric by its name.
        standard_error: Of each number, by the noise alone.
        clients: How many took part.
        guarantees: One epsilon per observer, of this answer alone.
    """

    value: _Value
    standard_error: _Error
    clients: int
    guarantees: tuple[Guarantee, ...] = field(repr=False)


def private_total(
    strategy: PrivateFedAvg,
    grid: Grid,
    name: str,
    size: int,
    *,
    arrays: ArrayRecord | None = None,
    config: ConfigRecord | None = None,
    timeout: float = 3600.0,
) -> PrivateAnswer[NDArray[np.float64], float]:
    """Ask clients for the vectors of a statistic and return their private sum.

    Args:
        strategy: Plan, directory and roster of this statistic: a plan of one round, for as many parameters as `size`
            and `arrays` have together, and a clip that bounds a client's vector. Its `ledger` may be that of training.
        grid: Flower's grid.
        name: Tells clients which statistic is meant.
        size: How many numbers a client answers with.
        arrays: A model that clients need, for instance to evaluate it.
        config: Further settings for the clients.
        timeout: For how many seconds the server waits for the vectors.
    """
    if strategy.plan.rounds != 1:
        raise ConfigError(f"a statistic takes one round, the plan has {strategy.plan.rounds}")
    if strategy.plan.extras:
        raise ConfigError(f"a statistic takes nothing beside its vector, the plan has {strategy.plan.extras[0]}")
    if arrays is not None and STATISTIC in arrays:
        raise ConfigError(f"the name {STATISTIC} is reserved")
    asked = ArrayRecord({**(arrays or {}), STATISTIC: Array(np.zeros(size, np.float32))})
    settings = ConfigRecord({**(config or {}), STATISTIC: name})
    found = strategy.start(grid, asked, timeout=timeout, train_config=settings).arrays
    file = strategy.directory / "metrics.jsonl"
    record = from_json(RoundRecord, read_text(file).splitlines()[-1], str(file))
    plan, clients = strategy.plan, record.survivors or 0
    return PrivateAnswer(
        value=found[STATISTIC].numpy().astype(np.float64) * plan.divisor,
        standard_error=math.sqrt(plan.noise(clients).sum_variance) * plan.codec.granularity,
        clients=clients,
        guarantees=guarantees(plan),
    )


def statistic_reply(message: Message, vector: NDArray[np.floating]) -> Message:
    """Return a client's answer: the arrays as they came, with its vector in the statistic's place."""
    sent = message.content["arrays"]
    if not isinstance(sent, ArrayRecord) or STATISTIC not in sent:
        raise ConfigError(f"a request for a statistic has an array named {STATISTIC}")
    size = sent[STATISTIC].shape
    if vector.shape != tuple(size):
        raise ConfigError(f"a statistic's vector must have the shape {tuple(size)}, got {vector.shape}")
    arrays = ArrayRecord({**sent, STATISTIC: Array(vector.astype(np.float32))})
    return Message(RecordDict({"arrays": arrays}), reply_to=message)


def private_evaluate(
    strategy: PrivateFedAvg,
    grid: Grid,
    arrays: ArrayRecord,
    metrics: Mapping[str, tuple[float, float]],
    *,
    epsilon: float,
    max_examples: float | None = None,
    name: str = "evaluate",
    config: ConfigRecord | None = None,
    timeout: float = 3600.0,
) -> PrivateAnswer[Metrics, Metrics]:
    """Return the means of metrics that the clients' own `evaluate` function returns, weighted by their examples.

    Where the plan protects records, the means are over all records, each of weight 1 (`PrivateRecords`).

    Args:
        strategy: With which the model is trained: its clients are asked, and its `ledger`, if it has one, is charged.
        grid: Flower's grid.
        arrays: The model.
        metrics: Lower and upper bound of each metric, by its name in the `MetricRecord` that `evaluate` returns;
            public, and what is beyond counts as the bound.
        epsilon: What this evaluation may cost.
        max_examples: The cap on `num-examples`, by which clients are weighted; nobody learns a client's number. Unused
            where records are protected.
        name: Of this evaluation: another name is another release.
        config: Settings for the clients' function.
        timeout: For how many seconds the server waits for the answers.
    """
    most = 1.0 if strategy.plan.unit is Unit.RECORD else max_examples
    if most is None:
        raise ConfigError(
            "an evaluation that protects clients must state max_examples, the cap on a client's weight"
        )
    means = MetricMeans({key: Bounds(*bounds) for key, bounds in metrics.items()}, most)
    own = evaluation_strategy(strategy, arrays, means.size, epsilon, name)
    settings = ConfigRecord({**(config or {}), MEANS: to_json(means)})
    found = private_total(own, grid, name, means.size, arrays=arrays, config=settings, timeout=timeout)
    value, error = means.decode(found.value, found.standard_error)
    return PrivateAnswer(value, error, found.clients, found.guarantees)


def private_metrics(
    strategy: PrivateFedAvg,
    grid: Grid,
    arrays: ArrayRecord,
    metrics: Sequence[str] = ("accuracy", "loss"),
    *,
    epsilon: float,
    classes: int,
    bins: int = 20,
    max_loss: float = 5.0,
    max_values: float | None = None,
    name: str = "metrics",
    config: ConfigRecord | None = None,
    timeout: float = 3600.0,
) -> PrivateAnswer[Metrics, Metrics]:
    """Return metrics of the model's scores on the clients' records, as `d2pfed.private_metrics` does in one process.

    The clients' `evaluate` function returns a record of two arrays, `scores` and `labels`, which stay with the client.

    Args:
        strategy: As in `private_evaluate`.
        grid: Flower's grid.
        arrays: The model.
        metrics: Which of accuracy, loss, confusion, calibration and auroc (two classes).
        epsilon: What this evaluation may cost.
        classes: How many there are.
        bins: How many equal bins of scores, for calibration and auroc.
        max_loss: The cap on a record's loss.
        max_values: None gives each client the same weight; a number gives each record the same, up to so many of one
            client.
        name: Of this evaluation.
        config: Settings for the clients' function.
        timeout: For how many seconds the server waits for the answers.
    """
    if strategy.plan.unit is Unit.RECORD:
        max_values = 1.0  # each record counts once
    scheme = MetricScheme(
        names=metric_names(metrics),
        classes=classes,
        bins=bins,
        max_loss=max_loss,
        has_count=max_values is not None,
    )
    scores = ScoreMetrics(scheme, max_values)
    own = evaluation_strategy(strategy, arrays, scores.size, epsilon, name)
    settings = ConfigRecord({**(config or {}), SCORES: to_json(scores)})
    found = private_total(own, grid, name, scores.size, arrays=arrays, config=settings, timeout=timeout)
    value, error = scores.decode(found.value, found.standard_error, found.clients)
    return PrivateAnswer(value, error, found.clients, found.guarantees)


def evaluation_strategy(
    strategy: PrivateFedAvg, arrays: ArrayRecord, size: int, epsilon: float, name: str
) -> PrivateFedAvg:
    """Return the strategy of one evaluation: the clients and the observer of training, one round, a clip of 1.

    A small model goes along without being part of the vector. A larger one is part of it, and gets noise that nobody
    looks at.
    """
    if strategy.target is None:
        raise ConfigError("an evaluation follows from the target of training: give the strategy its target")
    check_name("an evaluation's", name)
    model = to_named_arrays(arrays)
    is_small = sum(array.nbytes for array in model.values()) <= MOST_LOCAL_BYTES
    sent = {} if is_small else {key: array.size for key, array in model.items() if array.dtype == np.float32}
    dimension = size + sum(sent.values())
    target = replace(strategy.target, dimension=dimension, rounds=1, epsilon=epsilon, clip=1.0)
    if target.unit is Unit.RECORD:
        target = replace(target, batch_rate=1.0)  # every record is asked

    def make(content: RecordDict, node: int, group: str, seconds: float) -> Message:
        """Make a message that Flower hands to the clients' `evaluate` function."""
        message = strategy.message_factory(content, node, group, seconds)
        message.metadata.message_type = EVALUATION_TYPE
        return message

    directory = strategy.directory / EVALUATIONS / name
    directory.parent.mkdir(parents=True, exist_ok=True)
    return replace(
        strategy,
        plan=calibrate(target),
        target=target,
        directory=directory,
        keys=None,
        trained=(*sent, STATISTIC),
        message_factory=make,
    )
