"""Metrics of a model's scores: from scored records to vectors that may be summed, and from their sum to metrics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from d2pfed.errors import ConfigError
from d2pfed.statistics.records import Array, RecordCode, bin_of, numbers, one_hot

Metrics = dict[str, Array]


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
        is_right = guesses == labels
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
                    parts.append(self._binned(scores.max(1), is_right.astype(np.int64)))
                case MetricName.AUROC:
                    parts.append(self._binned(scores[:, 1], labels))
                case _:
                    parts.append(np.ones((len(records), 1)))
        return np.concatenate(parts, axis=1)

    def _binned(self, scores: Array, side: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Array:
        edges = np.linspace(0, 1, self.bins + 1)
        return one_hot(side * self.bins + bin_of(scores, edges), 2 * self.bins)

    def split(self, total: Array) -> dict[str, Array]:
        """Return the parts of a sum."""
        ends = np.cumsum(list(self.sizes.values()))[:-1]
        return dict(zip(self.sizes, np.split(total, ends), strict=True))

    def decode(self, parts: Mapping[str, Array], sigma: float, count: float) -> tuple[Metrics, Metrics]:
        """Return the metrics and their standard errors, from sums over so many records or clients.

        `sigma` is the standard deviation of the noise in each coordinate.
        """
        value: Metrics = {}
        error: Metrics = {}
        share = sigma / count
        for name in self.names:
            mean = parts[name] / count
            match name:
                case MetricName.CALIBRATION:
                    value[name], error[name] = _calibration_error(mean, share)
                case MetricName.AUROC:
                    value[name], error[name] = _auroc(mean, share)
                case _:
                    scale = self.max_loss if name is MetricName.LOSS else 1.0
                    # A private count in the denominator adds its own noise.
                    spread = (
                        scale * share * np.sqrt(1 + mean**2)
                        if self.has_count
                        else np.full_like(mean, scale * share)
                    )
                    shape = (self.classes, self.classes) if name is MetricName.CONFUSION else ()
                    value[name], error[name] = (scale * mean).reshape(shape), spread.reshape(shape)
        return value, error


def _calibration_error(mean: Array, noise: float) -> tuple[Array, Array]:
    """Return the mean distance between score and accuracy over bins, and its standard error.

    A bin adds |right - middle x (right + wrong)|. Noise alone makes that positive, so each bin is taken to be zero
    unless it exceeds its standard deviation.
    """
    wrong, right = np.split(mean, 2)
    middles = (np.arange(len(right)) + 0.5) / len(right)
    gaps = right - middles * (right + wrong)
    spreads = noise * np.hypot(1 - middles, middles)
    kept = np.abs(gaps) > spreads
    return np.asarray(np.abs(gaps[kept]).sum()), np.asarray(np.linalg.norm(spreads))


def _auroc(mean: Array, noise: float) -> tuple[Array, Array]:
    """Return the chance that a record of class 1 has the higher score, ties counted half, and its standard error."""
    negative, positive_ = np.split(mean, 2)
    below = np.cumsum(negative) - negative / 2
    above = np.cumsum(positive_[::-1])[::-1] - positive_ / 2
    totals = max(negative.sum(), noise), max(positive_.sum(), noise)
    area = float(positive_ @ below) / (totals[0] * totals[1])
    slopes = np.concatenate([(above / totals[1] - area) / totals[0], (below / totals[0] - area) / totals[1]])
    return np.asarray(np.clip(area, 0, 1)), np.asarray(noise * np.linalg.norm(slopes))


def scored_records(scores: object, labels: object, whose: str, classes: int | None = None) -> Array:
    """Return records, a row of scores, one per class, and the label last; not a number where they cannot be used.

    That is where a score is no probability, or the label no class. Such a record counts as zero.
    """
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
    if not isinstance(given, Sequence) or not given:
        raise ConfigError(f"metrics must be different names out of {known}, got {metrics!r}")
    for name in given:
        if name not in list(MetricName):
            raise ConfigError(f"metrics must be out of {known}, got {name!r}")
    if len(set(given)) != len(given):
        raise ConfigError(f"metrics must be different names out of {known}, got {metrics!r}")
    return tuple(MetricName(name) for name in given)
