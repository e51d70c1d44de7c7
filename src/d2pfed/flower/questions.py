"""Questions of an evaluation as settings of a request, and a client's answer out of what its function returned."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from d2pfed.errors import ConfigError
from d2pfed.runs.plain import from_json, to_json
from d2pfed.statistics.questions import MEANS, SCORES, MetricMeans, ScoreMetrics
from d2pfed.statistics.records import Array

_Record = TypeVar("_Record", ArrayRecord, MetricRecord)
_EXAMPLES = "num-examples"  # as Flower's own strategies call it


def encode_question(question: MetricMeans | ScoreMetrics) -> str:
    """Return a question as the text of a setting."""
    return to_json(question)


def answer_question(settings: Mapping[str, object], returned: RecordDict) -> Array:
    """Return the vector that answers a question, out of what the client's `evaluate` function returned."""
    if MEANS in settings:
        found = _only(list(returned.metric_records.values()), "metrics")
        numbers = {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}
        if _EXAMPLES not in numbers:
            raise ConfigError(f"an evaluation must return {_EXAMPLES} among its metrics")
        question = from_json(MetricMeans, str(settings[MEANS]), MEANS)
        return question.encode(numbers, numbers[_EXAMPLES])
    arrays = _only(list(returned.array_records.values()), "arrays")
    if not {"scores", "labels"} <= set(arrays):
        raise ConfigError("an evaluation of scores must return the arrays scores and labels")
    scored = from_json(ScoreMetrics, str(settings[SCORES]), SCORES)
    return scored.encode(*(np.asarray(arrays[name].numpy(), np.float64) for name in ("scores", "labels")))


def _only(records: Sequence[_Record], what: str) -> _Record:
    if len(records) != 1:
        raise ConfigError(f"an evaluation must return one record of {what}, got {len(records)}")
    return records[0]
