"""Private evaluation: metrics of a model's scores on the clients' own labelled data, all in one release."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from d2pfed.api.statistics.counts import MOST_BINS
from d2pfed.api.statistics.records import Array, RecordCode, bin_of, clients_of, numbers, one_hot, positive, whole
from d2pfed.api.statistics.releasing import Released, Terms, release_records
from d2pfed.api.statistics.result import Statistic, statistic
from d2pfed.api.statistics.sums import drowned
from d2pfed.errors import ConfigError
from d2pfed.ledger import Ledger

Metrics = dict[str, Array]

BINARY = 2  # classes of scores that are one number per record


class MetricName(StrEnum):
    """The metrics by name."""

    ACCURACY = "accuracy"
    LOSS = "loss"  # the mean negative logarithm of the label's score, capped
    CONFUSION = "confusion"  # shares of all records, by label and by predicted class
    CALIBRATION = "calibration"  # expected calibration error, by bins of the largest score
    AUROC = "auroc"  # of two classes, by bins of the score


def private_metrics(
    clients: object,
    metrics: Sequence[str] = ("accuracy", "loss"),
    *,
    epsilon: float = 1.0,
    predict: Callable[[object], object] | None = None,
    bins: int = 20,
    max_loss: float = 5.0,
    max_values: float | None = None,
    delta: float | None = None,
    privacy: Mapping[str, object] | None = None,
    ledger: Ledger | str | Path | None = None,
    fidelity: str = "auto",
    seed: int | None = None,
) -> Statistic[Metrics]:
    """Return metrics of a model on the clients' own data, all of them from one release.

    The metrics asked for share one clip: each of k takes part with norm 1, so the noise grows with sqrt(k). The result
    has a value and a standard error by name; `calibration` and `auroc` come from binned scores.

    Args:
        clients: A pair of scores and labels for each client. Scores are probabilities: one number per record, of class
            1, or a row with one number per class. Labels are 0, 1 and so on.
        metrics: Which of accuracy, loss, confusion, calibration and auroc (two classes).
        epsilon: Bound on what the observer learns about one client, or about one record.
        predict: From a client's inputs to scores, where clients have pairs of inputs and labels.
        bins: How many equal bins of scores, for calibration and auroc.
        max_loss: The cap on a record's loss.
        max_values: None gives each client the same weight: its metrics are means over its own records. A number gives
            each record the same weight, up to so many per client; the number of records is then released privately
            beside the rest.
        delta: Failure probability, as in `private_sum`.
        privacy: Changes to the target, as in `private_sum`.
        ledger: Where the release is charged, as in `private_sum`.
        fidelity: How much of the protocol runs, as in `private_sum`.
        seed: Repeats the noise, as in `private_sum`.

    Raises:
        ConfigError: if an argument cannot be used, before anything is charged.
        BudgetExceeded: if the ledger does not allow the release.
    """
    terms = Terms(epsilon=epsilon, delta=delta, privacy=privacy, ledger=ledger, fidelity=fidelity, seed=seed)
    data = [_scored(each, predict, at) for at, each in enumerate(clients_of(clients, "clients"))]
    widths = {each.shape[1] for each in data if len(each)} or {BINARY + 1}
    if len(widths) > 1:
        classes = ", ".join(str(width - 1) for width in sorted(widths))
        raise ConfigError(f"scores must have one number of classes, got {classes}")
    scheme = _Scheme(
        names=_names(metrics),
        classes=widths.pop() - 1,
        bins=whole("bins", bins, MOST_BINS),
        max_loss=positive("max_loss", max_loss),
        has_count=max_values is not None or terms.of_records,
    )
    released = release_records("metrics", data, scheme.code, max_values, terms)
    parts = scheme.split(released.total)
    count = float(parts["count"][0]) if scheme.has_count else float(released.clients)
    value, error = scheme.decode(parts, released, max(count, released.sigma))
    warnings = drowned(count, released.sigma, "count") if scheme.has_count else ()
    return statistic("private metrics", value, error, released).warned(warnings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheme:
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
                    losses = -np.log(np.maximum(chosen, math.exp(-self.max_loss)))
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

    def decode(self, parts: Mapping[str, Array], released: Released, count: float) -> tuple[Metrics, Metrics]:
        """Return the metrics and their standard errors, from sums over so many records or clients."""
        value: Metrics = {}
        error: Metrics = {}
        share = released.sigma / count
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


def _scored(pair: object, predict: Callable[[object], object] | None, client: int) -> Array:
    """Return a client's records: a row of scores, one per class, and the label last."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ConfigError(f"client {client} must have a pair of scores and labels, got {type(pair).__name__}")
    scores = numbers(_predicted(pair[0], predict, client), f"scores of client {client}")
    labels = np.atleast_1d(numbers(pair[1], f"labels of client {client}"))
    if scores.ndim == 1:
        scores = np.stack([1 - scores, scores], axis=1)
    if scores.ndim != 2 or labels.shape != (len(scores),):
        raise ConfigError(
            f"client {client} must have as many labels as rows of scores, got {labels.shape} and {scores.shape}"
        )
    if (scores < 0).any() or (scores > 1).any():
        raise ConfigError(f"scores of client {client} must be probabilities in [0, 1]")
    if (labels != np.floor(labels)).any() or (labels < 0).any() or (labels >= scores.shape[1]).any():
        raise ConfigError(f"labels of client {client} must be whole numbers in [0, {scores.shape[1]})")
    return np.column_stack([scores, labels])


def _predicted(inputs: object, predict: Callable[[object], object] | None, client: int) -> object:
    """Return a client's scores: given, or by a user's own function, whose mistakes are told in one line."""
    if predict is None:
        return inputs
    if not callable(predict):
        raise ConfigError(f"predict must be a function, got {type(predict).__name__}")
    try:
        return predict(inputs)
    except Exception as error:
        raise ConfigError(f"predict fails for client {client}: {type(error).__name__}: {error}") from error


def _names(metrics: object) -> tuple[MetricName, ...]:
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
