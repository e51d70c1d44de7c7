"""The app's own evaluation on the server, and the best model by one of its metrics."""

import math
from collections.abc import Callable

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result
from safetensors.numpy import save

from d2pfed.deploy.layout import Layout
from d2pfed.flower.grid import to_array_record
from d2pfed.noise.codec import FloatVector
from d2pfed.runs import Run

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]

BEST = "best.safetensors"  # beside the last model, in the run's directory


class ServerEvaluation:
    """Evaluates each model once, with the server's own data, and keeps the one whose metric `best` is the greatest.

    Models are released anyway, so choosing one of them by data of the server costs no client's privacy.
    """

    def __init__(self, layout: Layout, evaluate: Evaluate | None, run: Run, best: str | None) -> None:
        self._layout = layout
        self._evaluate = evaluate
        self._run = run
        self._best = best
        self._found: dict[int, MetricRecord | None] = {}
        before = [record.metrics.get(best or "", -math.inf) for record in run.records()]
        self._greatest = max(before, default=-math.inf)

    def validate(self, rounds: int, params: FloatVector) -> dict[str, float]:
        """Return the app's metrics of the model after so many rounds; none if it has no evaluation."""
        is_new = rounds not in self._found and self._evaluate is not None
        if is_new and self._evaluate is not None:
            self._found[rounds] = self._evaluate(rounds, self.record(params))
        found = self._found.get(rounds) or MetricRecord()
        metrics = {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}
        if is_new and rounds and self._best in metrics and metrics[self._best] > self._greatest:
            self._greatest = metrics[self._best]
            self._run.directory.replace(BEST, save(self._layout.unflatten(params)))
        return metrics

    def test(self, _params: FloatVector) -> dict[str, float]:
        """Return nothing: a deployment has no test data of its own."""
        return {}

    def result(self, params: FloatVector) -> Result:
        """Return what Flower's strategies return."""
        result = Result()
        result.arrays = self.record(params)
        found = {rounds: metrics for rounds, metrics in self._found.items() if metrics is not None}
        result.evaluate_metrics_serverapp.update(found)
        return result

    def record(self, params: FloatVector) -> ArrayRecord:
        """Return the whole model of these parameters: what stays local is as before the first round."""
        return to_array_record(self._layout.unflatten(params) | self._layout.initial_local())
