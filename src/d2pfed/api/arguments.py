"""The arguments of `fit`, checked and in their own types."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from d2pfed.api.complete_target import Scope
from d2pfed.api.result import FitResult
from d2pfed.api.early_stop import EarlyStop
from d2pfed.api.progress import Callback
from d2pfed.errors import ConfigError
from d2pfed.learning import LocalTraining, Metric, Model, accuracy, fixed_content
from d2pfed.ledger.files import replace_file
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import digest
from d2pfed.plan.bounds import check_name, check_range
from d2pfed.runs import RunSettings
from d2pfed.runs.plain import to_json
from d2pfed.runs.report import BASELINE, Baseline, read_report
from d2pfed.statistics.records import client_weights, positive


def run_directory(given: object, settings: RunSettings, model: Model) -> Path:
    """Return where a run is kept; by default another place for other settings or another initial module."""
    if given is None:
        made = digest(canonical.encode(settings), model.initial().tobytes()).hex()[:8]
        check_name("a run's", name := f"{settings.title.lower()}-{made}")
        return Path("runs") / name
    if not isinstance(given, (str, Path)):
        raise ConfigError(f"directory must be a path, got {type(given).__name__}")
    return Path(given)


def keep_baseline(path: Path, baseline: object) -> None:
    """Write the rounds of a baseline into a run's directory, where its report finds them."""
    if baseline is None:
        return
    if isinstance(baseline, FitResult):
        found = Baseline(baseline.directory.name, baseline.history)
    elif isinstance(baseline, (str, Path)):
        other = read_report(Path(baseline))
        found = Baseline(other.run, other.rounds)
    else:
        raise ConfigError(f"baseline must be a FitResult or a run's directory, got {type(baseline).__name__}")
    try:
        path.mkdir(parents=True, exist_ok=True)
        replace_file(path / BASELINE, to_json(found).encode(), mode=0o666)
    except OSError as error:
        raise ConfigError(f"cannot use the run directory {path}: {error.strerror}") from error


def fixed_digest(model: Model) -> str:
    """Return the digest of all that is not trained: a run goes on with the same only."""
    parts = [part for name, content in fixed_content(model) for part in (name, content)]
    return digest("d2pfed fixed parameters", *parts).hex()


def checked_metrics(metrics: object, model: Model) -> dict[str, Metric]:
    """Return the metrics by name: of class labels the accuracy, unless others are given."""
    if metrics is None:
        return {"accuracy": accuracy} if model.is_plain else {}
    if not isinstance(metrics, Mapping) or not all(
        isinstance(name, str) and callable(metric) for name, metric in metrics.items()
    ):
        raise ConfigError(f"metrics must be a dictionary of names and functions, got {type(metrics).__name__}")
    if "loss" in metrics:
        raise ConfigError("metrics has the name loss, which is the loss itself")
    return dict(metrics)


def checked_stop(stop: object, validation: object) -> EarlyStop | None:
    """Return the rule that ends a run early, if any."""
    if stop is not None and not isinstance(stop, EarlyStop):
        raise ConfigError(f"early_stop must be an EarlyStop or None, got {type(stop).__name__}")
    if stop is not None and validation is None:
        raise ConfigError("early_stop needs validation data, got none")
    return stop


def checked_weights(
    weights: object, max_weight: object, clients: int, scope: Scope
) -> tuple[tuple[float, ...] | None, float | None]:
    """Return the clients' weights and their cap; None and None where all weigh alike."""
    if weights is None and max_weight is None:
        return None, None
    if weights is None or max_weight is None:
        raise ConfigError(
            f"weights and max_weight go together, got only {'max_weight' if weights is None else 'weights'}"
        )
    if scope.target is None:
        raise ConfigError("weights are for private training, and privacy is None")
    given = client_weights(weights, clients)
    if not (np.isfinite(given) & (given >= 0)).all():
        raise ConfigError("weights must be finite and at least 0")
    return tuple(given.tolist()), positive("max_weight", max_weight)


def checked_callbacks(callbacks: object) -> tuple[Callback, ...]:
    """Return what is called after each round."""
    given = (callbacks,) if callable(callbacks) else callbacks
    if not isinstance(given, Sequence) or not all(callable(each) for each in given):
        raise ConfigError(f"callbacks must be functions, got {type(callbacks).__name__}")
    return tuple(given)


def check_local(local: LocalTraining, groups: object, *, by_record: bool) -> None:
    """Refuse local steps where the unit is a record, which takes one gradient of each; and groups where it is not."""
    if not by_record:
        if groups is not None:
            raise ConfigError("groups are for privacy with the unit record")
        return
    usual = LocalTraining(lr=local.lr)
    for name in ("optimizer", "momentum", "epochs", "batch_size"):
        if getattr(local, name) != getattr(usual, name):
            raise ConfigError(
                f"with the unit record a round is one step over a secret batch (batch_rate), got {name} "
                f"{getattr(local, name)}; the server's momentum and Adam can be used"
            )


def checked_seed(seed: object) -> int | None:
    """Return the seed, if any."""
    return None if seed is None else whole_number("seed", seed, 0)


def whole_number(name: str, value: object, least: int) -> int:
    """Return a whole number that is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    check_range(name, value, least, 2**63 - 1)
    return value


def ledger_path(ledger: object, seed: int | None = None) -> Path | None:
    """Return the file of a shared ledger, if any; refuse one for a run from a seed, which protects nobody."""
    if ledger is not None and not isinstance(ledger, (str, Path)):
        raise ConfigError(f"ledger must be the path of a ledger's file, got {type(ledger).__name__}")
    if ledger is not None and seed is not None:
        raise ConfigError(
            f"a run on a shared ledger takes its noise from the system, got seed {seed}: what repeats from a seed "
            "protects nobody, and is not to be counted as private"
        )
    return None if ledger is None else Path(ledger)


def function_name(function: object) -> str:
    """Return the name by which settings know a loss."""
    if function is None:
        return "cross_entropy"
    return str(getattr(function, "__qualname__", type(function).__qualname__))
