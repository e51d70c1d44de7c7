"""Private statistics and evaluations over any engine: runs of one round that show the server a bounded, noised sum.

An evaluation has a directory of its own: asked again under the same name, it gives the same answer and charges nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from d2pfed.accounting import Guarantee, Unit
from d2pfed.deploy.layout import MOST_LOCAL_BYTES, NamedArrays
from d2pfed.deploy.strategy import Strategy
from d2pfed.deploy.transport import Engine
from d2pfed.errors import ConfigError
from d2pfed.plan import calibrate, guarantees
from d2pfed.plan.bounds import check_name
from d2pfed.runs import RoundRecord
from d2pfed.runs.json_files import from_json, read_text, to_json
from d2pfed.statistics.metrics import Metrics, MetricScheme, metric_names
from d2pfed.statistics.questions import MEANS, SCORES, STATISTIC, Bounds, MetricMeans, ScoreMetrics

EVALUATIONS = "evaluations"  # in the directory of the run that is evaluated

_Strategy = TypeVar("_Strategy", bound=Strategy)
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


@dataclass(frozen=True, slots=True)
class Asked:
    """Of whom an evaluation is asked: a run's strategy, and the engine that reaches its clients."""

    strategy: Strategy
    engine: Engine
    over: str  # the engine's name, for the report
    timeout: float = 3600.0  # seconds that the server waits for the answers
    config: Mapping[str, object] = field(default_factory=dict)  # further settings for the clients


def total_of(asked: Asked, name: str, size: int, arrays: NamedArrays) -> PrivateAnswer[NDArray[np.float64], float]:
    """Ask clients for the vectors of a statistic and return their private sum.

    Args:
        asked: Its strategy has a plan of one round, for as many parameters as `size` and `arrays` have together, and a
            clip that bounds a client's vector, and a `longest_mean` of 1 if all may answer the same. Its `ledger` may
            be that of training.
        name: Tells clients which statistic is meant.
        size: How many numbers a client answers with.
        arrays: A model that clients need, for instance to evaluate it.
    """
    strategy = asked.strategy
    if strategy.plan.rounds != 1:
        raise ConfigError(f"a statistic takes one round, the plan has {strategy.plan.rounds}")
    if strategy.plan.extras:
        raise ConfigError(f"a statistic sends only its vector, the plan has {strategy.plan.extras[0]}")
    if STATISTIC in arrays:
        raise ConfigError(f"the name {STATISTIC} is reserved")
    found = strategy.train(
        asked.engine,
        {**arrays, STATISTIC: np.zeros(size, np.float32)},
        over=asked.over,
        timeout=asked.timeout,
        config={**asked.config, STATISTIC: name},
    )
    file = strategy.directory / "metrics.jsonl"
    record = from_json(RoundRecord, read_text(file).splitlines()[-1], str(file))
    plan, clients = strategy.plan, record.survivors or 0
    return PrivateAnswer(
        value=found[STATISTIC].astype(np.float64) * plan.divisor,
        standard_error=math.sqrt(plan.noise(clients).sum_variance) * plan.codec.granularity,
        clients=clients,
        guarantees=guarantees(plan),
    )


def means_of(
    asked: Asked,
    arrays: NamedArrays,
    metrics: Mapping[str, tuple[float, float]],
    *,
    epsilon: float,
    max_examples: float | None,
    name: str,
) -> PrivateAnswer[Metrics, Metrics]:
    """Return the means of metrics that the clients compute, weighted by their examples, or over all records.

    Args:
        asked: With the strategy of training: its clients are asked, and its `ledger`, if it has one, is charged.
        arrays: The model.
        metrics: Lower and upper bound of each metric by its name; public, and what is beyond counts as the bound.
        epsilon: What this evaluation may cost.
        max_examples: The cap on a client's examples. Unused where records are protected.
        name: Of this evaluation: another name is another release.
    """
    most = 1.0 if asked.strategy.plan.unit is Unit.RECORD else max_examples
    if most is None:
        raise ConfigError(
            "an evaluation that protects clients must state max_examples, the cap on a client's weight"
        )
    means = MetricMeans({key: Bounds(*bounds) for key, bounds in metrics.items()}, most)
    own = evaluation_strategy(asked.strategy, arrays, means.size, epsilon, name)
    own_asked = replace(asked, strategy=own, config={**asked.config, MEANS: to_json(means)})
    found = total_of(own_asked, name, means.size, arrays)
    value, error = means.decode(found.value, found.standard_error)
    return PrivateAnswer(value, error, found.clients, found.guarantees)


def metrics_of(
    asked: Asked,
    arrays: NamedArrays,
    metrics: Sequence[str],
    *,
    epsilon: float,
    classes: int,
    bins: int,
    max_loss: float,
    max_values: float | None,
    name: str,
) -> PrivateAnswer[Metrics, Metrics]:
    """Return metrics of the model's scores on the clients' records, as `d2pfed.private_metrics` does in one process.

    Args:
        asked: As in `means_of`.
        arrays: The model.
        metrics: Which of accuracy, loss, confusion, calibration and auroc (two classes).
        epsilon: What this evaluation may cost.
        classes: How many there are.
        bins: How many equal bins of scores, for calibration and auroc.
        max_loss: The cap on a record's loss.
        max_values: None gives each client the same weight; a number gives each record the same, up to that many of one
            client.
        name: Of this evaluation.
    """
    if asked.strategy.plan.unit is Unit.RECORD:
        max_values = 1.0  # each record counts once
    scheme = MetricScheme(
        names=metric_names(metrics),
        classes=classes,
        bins=bins,
        max_loss=max_loss,
        has_count=max_values is not None,
    )
    scores = ScoreMetrics(scheme, max_values)
    own = evaluation_strategy(asked.strategy, arrays, scores.size, epsilon, name)
    own_asked = replace(asked, strategy=own, config={**asked.config, SCORES: to_json(scores)})
    found = total_of(own_asked, name, scores.size, arrays)
    value, error = scores.decode(found.value, found.standard_error, found.clients)
    return PrivateAnswer(value, error, found.clients, found.guarantees)


def evaluation_strategy(
    strategy: _Strategy, arrays: NamedArrays, size: int, epsilon: float, name: str
) -> _Strategy:
    """Return the strategy of one evaluation: the clients and the observer of training, one round, a clip of 1.

    A small model goes along without being part of the vector. A larger one is part of it, and gets noise that nobody
    looks at.
    """
    if strategy.target is None:
        raise ConfigError("an evaluation needs the target of training: make the strategy from a target")
    check_name("an evaluation's", name)
    is_small = sum(array.nbytes for array in arrays.values()) <= MOST_LOCAL_BYTES
    sent = {} if is_small else {key: array.size for key, array in arrays.items() if array.dtype == np.float32}
    dimension = size + sum(sent.values())
    # Unlike updates, all answers may be the same: a mean as long as the clip must not wrap.
    target = replace(strategy.target, dimension=dimension, rounds=1, epsilon=epsilon, clip=1.0, longest_mean=1.0)
    if target.unit is Unit.RECORD:
        target = replace(target, batch_rate=1.0)  # every record is asked
    directory = strategy.directory / EVALUATIONS / name
    directory.parent.mkdir(parents=True, exist_ok=True)
    return replace(
        strategy,
        plan=calibrate(target),
        target=target,
        directory=directory,
        keys=None,
        trained=(*sent, STATISTIC),
    )
