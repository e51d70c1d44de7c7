"""Private statistics and evaluations over Flower: runs of one round of which the server sees a bounded, noised sum.

The server asks by `private_total`, `private_evaluate` or `private_metrics`, in its ServerApp. For a total, the client's
`train` function looks for `STATISTIC` in the configuration and answers by `statistic_reply`; for an evaluation, its
`evaluate` function is called as ever. An evaluation has a directory of its own: asked again under the same name, it
gives the same answer and charges nothing.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from d2pfed.deploy.evaluation import Asked, PrivateAnswer, means_of, metrics_of, total_of
from d2pfed.errors import ConfigError
from d2pfed.flower.grid import EVALUATION_TYPE, GridEngine, to_named_arrays
from d2pfed.flower.server import PrivateFedAvg
from d2pfed.statistics.metrics import Metrics
from d2pfed.statistics.questions import STATISTIC


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
    engine = GridEngine(grid, strategy.message_factory)
    return total_of(
        Asked(strategy, engine, "Flower", timeout, dict(config or {})),
        name,
        size,
        {} if arrays is None else to_named_arrays(arrays),
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
    return means_of(
        _asked(strategy, grid, config, timeout),
        to_named_arrays(arrays),
        metrics,
        epsilon=epsilon,
        max_examples=max_examples,
        name=name,
    )


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
        max_values: None gives each client the same weight; a number gives each record the same, up to that many of one
            client.
        name: Of this evaluation.
        config: Settings for the clients' function.
        timeout: For how many seconds the server waits for the answers.
    """
    return metrics_of(
        _asked(strategy, grid, config, timeout),
        to_named_arrays(arrays),
        metrics,
        epsilon=epsilon,
        classes=classes,
        bins=bins,
        max_loss=max_loss,
        max_values=max_values,
        name=name,
    )


def _asked(strategy: PrivateFedAvg, grid: Grid, config: ConfigRecord | None, timeout: float) -> Asked:
    """Return the clients of a strategy, asked by messages that Flower hands to their `evaluate` function."""

    def make(content: RecordDict, node: int, group: str, seconds: float) -> Message:
        message = strategy.message_factory(content, node, group, seconds)
        message.metadata.message_type = EVALUATION_TYPE
        return message

    return Asked(strategy, GridEngine(grid, make), "Flower", timeout, dict(config or {}))
