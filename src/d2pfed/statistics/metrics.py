"""Private metrics of a model's scores: scored records as bounded vectors, and what their sum says."""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Unpack

import numpy as np

from d2pfed.errors import ConfigError
from d2pfed.statistics.records import (
    MOST_BINS,
    Array,
    RecordCode,
    bin_of,
    clients_of,
    numbers,
    one_hot,
    positive,
    whole,
)
from d2pfed.statistics.release import Asked, Statistic, Terms, drowned, release_records

Metrics = dict[str, Array]

BINARY = 2  # classes of scores that are one number per record
MOST_CLASSES = 1 << 10  # whose confusion matrix is the largest table
_TRIED = 8  # records of each client that are scored twice

_log = logging.getLogger("d2pfed.statistics")  # read where the data are


class MetricName(StrEnum):
    """The metrics by name."""

    ACCURACY = "accuracy"
    LOSS = "loss"  # the mean negative logarithm of the label's score, capped
    CONFUSION = "confusion"  # shares of all records, by label and by predicted class
    CALIBRATION = "calibration"  # expected calibration error, by bins of the largest score
    AUROC = "auroc"  # of two classes, by bins of the score


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricScheme:
    """How a scored record becomes one vector, and a sum of such vectors becomes metrics.

    A record is a row of scores, one per class, and its label. Each metric has a part of the vector with norm at most 1.
    """

    names: tuple[MetricName, ...]
    classes: int
    bins: int
    max_loss: float
    has_count: bool

    def __post_init__(self) -> None:
        if MetricName.AUROC in self.names and self.classes != 2:
            raise ConfigError(f"auroc is of two classes, got {self.classes}")

    @property
    def sizes(self) -> dict[str, int]:
        """How many coordinates each part has."""
        known = {
            MetricName.ACCURACY: 1,
            MetricName.LOSS: 1,
            MetricName.CONFUSION: self.classes**2,
            MetricName.CALIBRATION: 2 * self.bins,
            MetricName.AUROC: 2 * self.bins,
        }
        return {str(name): known[name] for name in self.names} | ({"count": 1} if self.has_count else {})

    @property
    def code(self) -> RecordCode:
        """How one record becomes a vector."""
        sizes = self.sizes
        return RecordCode(self.encode, sum(sizes.values()), math.sqrt(len(sizes)))

    def encode(self, records: Array) -> Array:
        """Return the vectors of some records, all parts side by side."""
        scores, labels = records[:, :-1], records[:, -1].astype(np.int64)
        guesses = np.argmax(scores, axis=1)
        is_right, edges = guesses == labels, np.linspace(0, 1, self.bins + 1)
        parts = []
        for name in self.sizes:
            match name:
                case MetricName.ACCURACY:
                    parts.append(is_right[:, None].astype(np.float64))
                case MetricName.LOSS:
                    chosen = scores[np.arange(len(labels)), labels]
                    least = np.maximum(chosen, math.exp(-self.max_loss))
                    # One by one: a vector's logarithms may depend on their places in it, in the last bit.
                    losses = -np.array([math.log(score) for score in least.tolist()])
                    parts.append(np.clip(losses / self.max_loss, 0, 1)[:, None])
                case MetricName.CONFUSION:
                    parts.append(one_hot(labels * self.classes + guesses, self.classes**2))
                case MetricName.CALIBRATION:
                    cells = is_right.astype(np.int64) * self.bins + bin_of(scores.max(1), edges)
                    parts.append(one_hot(cells, 2 * self.bins))
                case MetricName.AUROC:
                    parts.append(one_hot(labels * self.bins + bin_of(scores[:, 1], edges), 2 * self.bins))
                case _:
                    parts.append(np.ones((len(records), 1)))
        return np.concatenate(parts, axis=1)

    def decode(self, total: Array, sigma: float, clients: int) -> tuple[Metrics, Metrics]:
        """Return the metrics and their standard errors, from a sum with noise of `sigma` in each coordinate."""
        ends = np.cumsum(list(self.sizes.values()))[:-1]
        parts = dict(zip(self.sizes, np.split(total, ends), strict=True))
        count = max(float(total[-1]) if self.has_count else float(clients), sigma)
        value, error, share = Metrics(), Metrics(), sigma / count
        for name in self.names:
            mean = parts[name] / count
            match name:
                case MetricName.CALIBRATION:
                    # A bin adds |right - middle x (right + wrong)|. Noise alone makes that positive, so each bin is
                    # taken to be zero unless it exceeds its standard deviation.
                    wrong, right = np.split(mean, 2)
                    middles = (np.arange(len(right)) + 0.5) / len(right)
                    gaps = np.abs(right - middles * (right + wrong))
                    spreads = share * np.hypot(1 - middles, middles)
                    value[name] = np.asarray(gaps[gaps > spreads].sum())
                    error[name] = np.asarray(np.linalg.norm(spreads))
                case MetricName.AUROC:
                    # The chance that a record of class 1 has the higher score, ties counted half.
                    negative, positive_ = np.split(mean, 2)
                    below = np.cumsum(negative) - negative / 2
                    above = np.cumsum(positive_[::-1])[::-1] - positive_ / 2
                    totals = max(negative.sum(), share), max(positive_.sum(), share)
                    area = float(positive_ @ below) / (totals[0] * totals[1])
                    slopes = (above / totals[1] - area) / totals[0], (below / totals[0] - area) / totals[1]
                    value[name] = np.asarray(np.clip(area, 0, 1))
                    error[name] = np.asarray(share * np.linalg.norm(np.concatenate(slopes)))
                case _:
                    scale = self.max_loss if name is MetricName.LOSS else 1.0
                    spread = np.full_like(mean, scale * share)
                    if self.has_count:  # a private count in the denominator adds its own noise
                        spread = scale * share * np.sqrt(1 + mean**2)
                    shape = (self.classes, self.classes) if name is MetricName.CONFUSION else ()
                    value[name], error[name] = (scale * mean).reshape(shape), spread.reshape(shape)
        return value, error


def scored_records(scores: object, labels: object, whose: str, classes: int | None = None) -> Array:
    """Return rows of scores and the label; not a number where a score is no probability, or the label no class."""
    scores = numbers(scores, f"scores of {whose}")
    labels = np.atleast_1d(numbers(labels, f"labels of {whose}"))
    if scores.ndim == 1:
        scores = np.stack([1 - scores, scores], axis=1)
    if scores.ndim != 2 or labels.shape != (len(scores),):
        raise ConfigError(
            f"{whose} must have as many labels as rows of scores, got {labels.shape} and {scores.shape}"
        )
    if len(labels) and classes not in (None, scores.shape[1]):
        raise ConfigError(f"scores of {whose} must have {classes} classes, got {scores.shape[1]}")
    usable = ((scores >= 0) & (scores <= 1)).all(axis=1) & np.isin(labels, np.arange(scores.shape[1]))
    return np.where(usable[:, None], np.column_stack([scores, labels]), np.nan)


def metric_names(metrics: object) -> tuple[MetricName, ...]:
    """Return the metrics by their names, each once."""
    given = (metrics,) if isinstance(metrics, str) else metrics
    known = ", ".join(MetricName)
    for name in given if isinstance(given, Sequence) else ():
        if name not in list(MetricName):
            raise ConfigError(f"metrics must be out of {known}, got {name!r}")
    if not isinstance(given, Sequence) or not given or len(set(given)) != len(given):
        raise ConfigError(f"metrics must be different names out of {known}, got {metrics!r}")
    return tuple(MetricName(name) for name in given)


def private_metrics(
    clients: object,
    metrics: Sequence[str] = ("accuracy", "loss"),
    *,
    predict: Callable[[Any], object] | None = None,
    classes: int | None = None,
    bins: int = 20,
    max_loss: float = 5.0,
    max_values: float | None = None,
    **terms: Unpack[Asked],
) -> Statistic[Metrics]:
    """Return metrics of a model on the clients' own data, all of them from one release.

    The metrics asked for share one clip: each of k takes part with norm 1, so the noise grows with sqrt(k). The result
    has a value and a standard error by name; `calibration` and `auroc` come from binned scores.

    A record counts as zero if a score of it is no probability, its label no class, or `predict` fails for it. Where the
    unit is a record, scores must be functions of their records alone: `predict` is called with one record at a time.

    Args:
        clients: A pair of scores and labels for each client. Scores are probabilities: one number per record, of class
            1, or a row with one number per class. Labels are 0, 1 and so on.
        metrics: Which of accuracy, loss, confusion, calibration and auroc (two classes).
        predict: From a client's inputs to scores, where clients have pairs of inputs and labels. Where the unit is a
            record, inputs must be a row per record, and it is called with a slice of one row.
        classes: How many there are; None for as many as the scores that are given. With `predict` it must be stated.
        bins: How many equal bins of scores, for calibration and auroc.
        max_loss: The cap on a record's loss.
        max_values: None gives each client the same weight: its metrics are means over its own records. A number gives
            each record the same weight, up to this many per client; the number of records is then released privately
            beside the rest.
        terms: epsilon, delta, privacy, ledger, fidelity and seed, as in `private_sum`.

    Examples:
        >>> clients = [([0.9, 0.2, 0.7], [1, 0, 0])] * 2000  # scores of class 1, and labels
        >>> found = private_metrics(clients, ["accuracy"], epsilon=1.0)
        >>> bool(abs(found.value["accuracy"] - 2 / 3) < 6 * found.standard_error["accuracy"])
        True
    """
    asked = Terms.of(terms)
    scoring = None
    if predict is not None:
        if not callable(predict):
            raise ConfigError(f"predict must be a function, got {type(predict).__name__}")
        if classes is None:
            raise ConfigError("predict needs classes, their number, which no record may decide; got None")
        scoring = _Scoring(predict, whole("classes", classes, MOST_CLASSES), asked.of_records)
    if classes is not None:
        whole("classes", classes, MOST_CLASSES)
    data = []
    for at, pair in enumerate(clients_of(clients, "clients")):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ConfigError(f"client {at} must have a pair of scores and labels, got {type(pair).__name__}")
        given, labels = pair
        if scoring is None:
            data.append(scored_records(given, labels, f"client {at}", classes))
        else:
            data.append(scoring.records(given, np.atleast_1d(numbers(labels, f"labels of client {at}")), at))
    found = {each.shape[1] - 1 for each in data if len(each)} or {classes or BINARY}
    if len(found) > 1:
        raise ConfigError(f"scores must have one number of classes, got {', '.join(map(str, sorted(found)))}")
    scheme = MetricScheme(
        names=metric_names(metrics),
        classes=found.pop(),
        bins=whole("bins", bins, MOST_BINS),
        max_loss=positive("max_loss", max_loss),
        has_count=max_values is not None or asked.of_records,
    )
    released = release_records("metrics", data, scheme.code, max_values, asked)
    value, error = scheme.decode(released.value, released.sigma, released.clients)
    warnings = drowned(released.value[-1], released.sigma, "count") if scheme.has_count else ()
    return released.computed(value, error, warnings)


@dataclass(slots=True)
class _Scoring:
    """Scores by a user's own function: of a client's records together, or one by one where each is protected.

    Guarantee: what the function fails for counts as zero; where the unit is a record, that record alone, and the
    scores of the others do not depend on it. Checked: test_statistics.py::test_a_record_is_scored_by_itself_alone.
    """

    predict: Callable[[Any], object]
    classes: int
    of_records: bool
    has_failed: bool = False

    def records(self, inputs: Any, labels: Array, client: int) -> Array:  # noqa: ANN401 - what the function takes
        """Return a client's scored records."""
        if not self.of_records:
            return self._scored(inputs, labels, None)
        has_rows = hasattr(inputs, "__getitem__") and hasattr(inputs, "__len__")
        if not has_rows or labels.shape != (len(inputs),):
            raise ConfigError(
                f"client {client} must have a row of inputs for each label where the unit is a record"
            )
        rows = [slice(at, at + 1) for at in range(len(labels))]
        found = [self._scored(inputs, labels[row], row) for row in rows]
        again = [self._scored(inputs, labels[row], row) for row in reversed(rows[:_TRIED])]
        if any(
            not np.array_equal(*pair, equal_nan=True) for pair in zip(reversed(found[:_TRIED]), again, strict=True)
        ):
            raise ConfigError(
                "predict must give a record the same scores every time, and does not: it draws random numbers or keeps "
                "something from one call to the next (a network must be in evaluation mode)"
            )
        return np.concatenate([np.empty((0, self.classes + 1)), *found])

    def _scored(self, inputs: Any, labels: Array, row: slice | None) -> Array:  # noqa: ANN401 - as above
        try:
            scores = self.predict(inputs if row is None else inputs[row])
            return scored_records(scores, labels, "what is scored", self.classes)
        except BaseException:  # noqa: BLE001 - whatever it is, an exit too, no result may tell
            if not self.has_failed:
                self.has_failed = True
                with suppress(BaseException):  # the function may have broken the log
                    _log.warning("what predict fails for counts as zero", exc_info=True)
            return np.full((len(labels), self.classes + 1), np.nan)
