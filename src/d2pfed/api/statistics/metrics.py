"""Private evaluation: metrics of a model's scores on the clients' own labelled data, all in one release."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from d2pfed.api.statistics.counts import MOST_BINS
from d2pfed.api.statistics.releasing import Terms, release_records
from d2pfed.api.statistics.result import Statistic, statistic
from d2pfed.errors import ConfigError
from d2pfed.ledger import Ledger
from d2pfed.statistics.means import drowned
from d2pfed.statistics.metrics import Metrics, MetricScheme, metric_names, scored_records
from d2pfed.statistics.records import Array, clients_of, positive, whole

BINARY = 2  # classes of scores that are one number per record


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
    scheme = MetricScheme(
        names=metric_names(metrics),
        classes=widths.pop() - 1,
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


def _scored(pair: object, predict: Callable[[object], object] | None, client: int) -> Array:
    """Return a client's records: a row of scores, one per class, and the label last."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ConfigError(f"client {client} must have a pair of scores and labels, got {type(pair).__name__}")
    return scored_records(_predicted(pair[0], predict, client), pair[1], f"client {client}")


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
