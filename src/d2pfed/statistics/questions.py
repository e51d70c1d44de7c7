"""What an evaluation asks of clients: how their numbers become one bounded vector, and a sum of those the means."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from d2pfed.errors import ConfigError
from d2pfed.fields import check_positive
from d2pfed.statistics.metrics import Metrics, MetricScheme, scored_records
from d2pfed.statistics.records import Array, Ball

STATISTIC = "d2pfed.statistic"  # the array that clients fill in, and the setting that names what they fill it with
MEANS = "d2pfed.means"  # the setting that asks for means of a client's own metrics
SCORES = "d2pfed.scores"  # the setting that asks for metrics of a client's scores
QUESTIONS = (STATISTIC, MEANS, SCORES)  # the settings that say what is asked

_ALL = (-1.0, 1.0)  # the bounds of every metric, once it is scaled


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a metric may be: beyond counts as the bound."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ConfigError(f"a metric's bounds must be finite and in order, got {self.low:g} and {self.high:g}")


@dataclass(frozen=True, slots=True)
class MetricMeans:
    """Means of metrics that each client computes itself, weighted by its examples."""

    metrics: dict[str, Bounds]  # by name; public and chosen without looking at the data
    max_examples: float  # the cap on a client's weight

    def __post_init__(self) -> None:
        if not self.metrics:
            raise ConfigError("an evaluation must name its metrics, got none")
        check_positive("max_examples", self.max_examples)

    @property
    def size(self) -> int:
        """The length of a client's vector, whose norm is at most 1."""
        return len(self.metrics) + 1

    def _scaling(self) -> tuple[Ball, Array, Array]:
        """Return where scaled metrics are, the lower bound of each, and its range."""
        low, high = (np.array([getattr(each, end) for each in self.metrics.values()]) for end in ("low", "high"))
        return Ball(len(self.metrics), math.sqrt(len(self.metrics)), _ALL), low, high - low

    def encode(self, found: Mapping[str, float], examples: float) -> Array:
        """Return the vector of a client with these metrics over this many examples."""
        if missing := sorted(set(self.metrics) - set(found)):
            raise ConfigError(f"this client's evaluation has no metric {missing[0]!r}")
        values = np.array([found[name] for name in self.metrics], np.float64)
        if not np.isfinite(values).all() or not (math.isfinite(examples) and examples >= 0):
            raise ConfigError("this client's metrics and its number of examples must be finite")
        ball, low, width = self._scaling()
        share = min(examples / self.max_examples, 1.0)
        return np.asarray(share * ball.joint((2 * (values - low) / width - 1)[None, :])[0])

    def decode(self, total: Array, sigma: float) -> tuple[Metrics, Metrics]:
        """Return each metric's mean and standard error, from the sum of the clients' vectors and its noise."""
        ball, low, width = self._scaling()
        means, errors = ball.mean(total, sigma)
        values = low + width * (np.clip(means, *_ALL) + 1) / 2
        value, error = (
            {name: np.asarray(each) for name, each in zip(self.metrics, found, strict=True)}
            for found in (values, errors * width / 2)
        )
        return value, error


@dataclass(frozen=True, slots=True)
class ScoreMetrics:
    """Metrics of a model's scores on the clients' labelled records."""

    scheme: MetricScheme
    max_values: float | None  # the cap on a client's records, of the same weight each; None: clients have the same

    def __post_init__(self) -> None:
        if self.scheme.has_count != (self.max_values is not None):
            raise ConfigError("records are counted where max_values caps them, and nowhere else")

    @property
    def size(self) -> int:
        """The length of a client's vector, whose norm is at most 1."""
        return self.scheme.code.dimension

    @property
    def _bound(self) -> float:
        return self.scheme.code.bound * (1.0 if self.max_values is None else self.max_values)

    def encode(self, scores: object, labels: object) -> Array:
        """Return the vector of a client with these scores and labels."""
        records = scored_records(scores, labels, "this client", self.scheme.classes)
        return self.scheme.code.of_client(records, self.max_values) / self._bound

    def decode(self, total: Array, sigma: float, clients: int) -> tuple[Metrics, Metrics]:
        """Return the metrics and their standard errors, from the sum of this many clients' vectors and its noise."""
        return self.scheme.decode(total * self._bound, sigma * self._bound, clients)


def is_evaluation(settings: Mapping[str, object]) -> bool:
    """Say whether a request asks for an evaluation, and not for training."""
    return MEANS in settings or SCORES in settings
