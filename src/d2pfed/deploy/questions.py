"""How a client answers the question of a private evaluation: with one bounded vector, or one for each record."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.numerics.ring import IntVector
from d2pfed.runs.json_files import from_json
from d2pfed.statistics.questions import MEANS, SCORES, MetricMeans, ScoreMetrics

EXAMPLES = "num-examples"  # among a client's metrics: over how many examples they are


class EvaluatedRecords(Protocol):
    """What a silo holds, as an evaluation of a model sees it."""

    @property
    def count(self) -> int:
        """How many records there are; it stays in the silo."""

    def evaluate(self, record: int) -> Mapping[str, float] | tuple[NDArray[np.floating], int]:
        """Return one record's metrics by name, or its scores and its label; from this record alone."""


@dataclass(frozen=True, slots=True)
class RecordAnswers:
    """The bounded vector with which each record of a silo answers a question (`round.Units`)."""

    question: MetricMeans | ScoreMetrics
    records: EvaluatedRecords

    @property
    def count(self) -> int:
        """How many records there are."""
        return self.records.count

    def gradients(self, chosen: IntVector) -> Iterator[NDArray[np.float32]]:
        """Yield the vectors of chosen records."""
        for place in chosen:
            found = self.records.evaluate(int(place))
            if isinstance(self.question, MetricMeans):
                if not isinstance(found, Mapping):
                    raise ConfigError("a record's evaluation must return its metrics by name")
                vector = self.question.encode(found, 1.0)
            else:
                scores, label = found
                vector = self.question.encode(np.asarray(scores, np.float64)[None], np.asarray([label]))
            yield vector.astype(np.float32)[None]


def question_of(settings: Mapping[str, object]) -> MetricMeans | ScoreMetrics:
    """Return what an evaluation asks for."""
    if MEANS in settings:
        return from_json(MetricMeans, str(settings[MEANS]), MEANS)
    return from_json(ScoreMetrics, str(settings[SCORES]), SCORES)
