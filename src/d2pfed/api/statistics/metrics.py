"""Private evaluation: metrics of a model's scores on the clients' own labelled data, all in one release."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from d2pfed.api.statistics.counts import MOST_BINS
from d2pfed.api.statistics.releasing import Terms, release_records
from d2pfed.api.statistics.result import Statistic, statistic
from d2pfed.errors import ConfigError
from d2pfed.ledger import Ledger
from d2pfed.statistics.means import drowned
from d2pfed.statistics.metrics import Metrics, MetricScheme, metric_names, scored_records
from d2pfed.statistics.records import Array, clients_of, numbers, positive, whole

BINARY = 2  # classes of scores that are one number per record
MOST_CLASSES = 1 << 10  # whose confusion matrix is the largest table
_TRIED = 8  # records of each client that are scored twice

_log = logging.getLogger("d2pfed.statistics")  # of whoever holds the data


def private_metrics(
    clients: object,
    metrics: Sequence[str] = ("accuracy", "loss"),
    *,
    epsilon: float = 1.0,
    predict: Callable[[Any], object] | None = None,
    classes: int | None = None,
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

    A record counts as zero if a score of it is no probability, its label no class, or `predict` fails for it. Where the
    unit is a record, scores must be functions of their records alone: `predict` is called with one record at a time.

    Args:
        clients: A pair of scores and labels for each client. Scores are probabilities: one number per record, of class
            1, or a row with one number per class. Labels are 0, 1 and so on.
        metrics: Which of accuracy, loss, confusion, calibration and auroc (two classes).
        epsilon: Bound on what the observer learns about one client, or about one record.
        predict: From a client's inputs to scores, where clients have pairs of inputs and labels. Where the unit is a
            record, inputs must be a row per record, and it is called with a slice of one row.
        classes: How many there are; None for as many as the scores that are given. With `predict` it must be stated.
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
    scoring = None if predict is None else _Scoring.of(predict, classes, of_records=terms.of_records)
    data = [_scored(each, scoring, classes, at) for at, each in enumerate(clients_of(clients, "clients"))]
    found = {each.shape[1] - 1 for each in data if len(each)} or {classes or BINARY}
    if len(found) > 1:
        raise ConfigError(f"scores must have one number of classes, got {', '.join(map(str, sorted(found)))}")
    scheme = MetricScheme(
        names=metric_names(metrics),
        classes=found.pop(),
        bins=whole("bins", bins, MOST_BINS),
        max_loss=positive("max_loss", max_loss),
        has_count=max_values is not None or terms.of_records,
    )
    released = release_records("metrics", data, scheme.code, max_values, terms)
    parts = scheme.split(released.total)
    count = float(parts["count"][0]) if scheme.has_count else float(released.clients)
    value, error = scheme.decode(parts, released.sigma, max(count, released.sigma))
    warnings = drowned(count, released.sigma, "count") if scheme.has_count else ()
    return statistic("private metrics", value, error, released).warned(warnings)


def _scored(pair: object, scoring: "_Scoring | None", classes: int | None, client: int) -> Array:
    """Return a client's records: a row of scores, one per class, and the label last."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ConfigError(f"client {client} must have a pair of scores and labels, got {type(pair).__name__}")
    given, labels = pair
    if scoring is None:
        return scored_records(given, labels, f"client {client}", classes)
    return scoring.records(given, np.atleast_1d(numbers(labels, f"labels of client {client}")), client)


@dataclass(frozen=True, slots=True)
class _Scoring:
    """Scores by a user's own function: of a client's records together, or one by one where each is protected.

    Guarantee: what the function fails for counts as zero; where the unit is a record, that record alone, and the
    scores of the others do not depend on it. Checked: test_statistics.py::test_a_record_is_scored_by_itself_alone.
    """

    predict: Callable[[Any], object]
    classes: int
    of_records: bool
    first_failure: list[BaseException] = field(default_factory=list)

    @staticmethod
    def of(predict: Callable[[Any], object], classes: int | None, *, of_records: bool) -> "_Scoring":
        if not callable(predict):
            raise ConfigError(f"predict must be a function, got {type(predict).__name__}")
        if classes is None:
            raise ConfigError("predict needs classes, their number, which no record may decide; got None")
        return _Scoring(predict, whole("classes", classes, MOST_CLASSES), of_records)

    def records(self, inputs: Any, labels: Array, client: int) -> Array:  # noqa: ANN401 - what the function takes
        """Return a client's scored records."""
        if not self.of_records:
            return self._scored(lambda: inputs, labels)
        has_rows = hasattr(inputs, "__getitem__") and hasattr(inputs, "__len__")
        if not has_rows or labels.shape != (len(inputs),):
            raise ConfigError(
                f"client {client} must have a row of inputs for each label where the unit is a record"
            )
        found = [self._one(inputs, labels, at) for at in range(len(labels))]
        few = range(min(_TRIED, len(labels)))
        if any(not np.array_equal(found[at], self._one(inputs, labels, at), equal_nan=True) for at in few[::-1]):
            raise ConfigError(
                "predict must give a record the same scores every time, and does not: it draws random numbers or keeps "
                "something from one call to the next (a network must be in evaluation mode)"
            )
        return np.concatenate([np.empty((0, self.classes + 1)), *found])

    def _one(self, inputs: Any, labels: Array, at: int) -> Array:  # noqa: ANN401 - as above
        return self._scored(lambda: inputs[at : at + 1], labels[at : at + 1])

    def _scored(self, inputs: Callable[[], object], labels: Array) -> Array:
        try:
            return scored_records(self.predict(inputs()), labels, "what is scored", self.classes)
        except BaseException as error:  # noqa: BLE001 - whatever it is, an exit too, no result may tell
            if not self.first_failure:
                self.first_failure.append(error)
                with suppress(BaseException):  # the function may have broken the log
                    _log.warning("what predict fails for counts as zero", exc_info=True)
            return np.full((len(labels), self.classes + 1), np.nan)
