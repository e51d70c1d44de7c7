"""What is trained on what, and how it is measured: a user's module and clients, or a task and a model by name."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from d2pfed import learning
from d2pfed.api.backends import explained, first_line
from d2pfed.api.settings import RunOptions, Training
from d2pfed.errors import ConfigError, needs_extra
from d2pfed.ledger.files import replace_file
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import KEY_BYTES, Entropy
from d2pfed.runs.json_files import parse, read_text
from d2pfed.statistics.records import client_weights, positive

MAIN_TASK = "infimnist"
FINGERPRINT = "fingerprint.json"  # in a run's directory, for its owner alone
Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True, eq=False)
class ModelEvaluator:
    """Measures a model on data to choose by, and on test data, which are opened once, at the end."""

    model: learning.Model
    validation: object = field(repr=False)
    held_out: object = field(repr=False)  # the test data, or what opens them
    metrics: Mapping[str, learning.Metric] | None  # None: accuracy and loss of a task's examples
    collate: learning.Collate | None = field(default=None, repr=False)

    def validate(self, _rounds: int, params: FloatVector) -> dict[str, float]:
        """Return the metrics on the validation data; none without such data."""
        return self._measured(params, self.validation, "validation")

    def test(self, params: FloatVector) -> dict[str, float]:
        """Return the metrics on the test data; none without such data."""
        with explained("the test data cannot be opened"):
            opened = self.held_out() if callable(self.held_out) else self.held_out
        return self._measured(params, opened, "test")

    def _measured(self, params: FloatVector, data: object, owner: str) -> dict[str, float]:
        with explained(f"the {owner} data cannot be measured"):
            if self.metrics is None and isinstance(data, learning.Examples):
                return learning.evaluate(self.model, params, data)
            batches = learning.batches_of(data, owner, self.collate)
            return learning.measure(self.model, params, batches, self.metrics or {})

    def rehearse(self, params: FloatVector) -> None:
        """Measure one batch of each data set, so that a mistake shows before anything is charged.

        What test data come to is thrown away, and a task's own stay closed; data that can be read only once are left.
        """
        for given, owner in ((self.validation, "validation"), (self.held_out, "test")):
            if owner == "test" and self.metrics is None:
                continue
            with explained(f"the {owner} data cannot be measured"):
                data = given() if owner == "test" and callable(given) else given
                source: Any = getattr(data, "dataset", data)  # a loader's
                if hasattr(source, "__getitem__") and hasattr(source, "__iter__") and iter(source) is iter(source):
                    continue
                for batch in islice(learning.batches_of(data, owner, self.collate), 1):
                    self._measured(params, batch, owner)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Workload:
    """A model, the clients that train it, and what it is measured on."""

    model: learning.Model
    clients: learning.Clients | learning.UserClients
    evaluator: ModelEvaluator
    training: Training
    title: str
    data: str
    loss: str  # the name by which settings know it
    whole: learning.Model | None = field(default=None, repr=False)  # with the layers that clients keep, if any
    names: tuple[str, str] | None = None  # of task and model, where both can be made again by name
    is_main_job: bool = False
    fingerprint: Mapping[str, str] = field(default_factory=dict, repr=False)

    def weights(self) -> tuple[float, ...] | None:
        """Return the clients' weights; None where all weigh alike."""
        weights = self.training.weights
        if weights is None:
            return None
        if isinstance(weights, str):
            if weights != "examples":
                raise ConfigError(f"weights must be examples or one number for each client, got {weights!r}")
            everyone = range(self.clients.population)
            weights = [float(len(learning.held_by(self.clients, client))) for client in everyone]
        given = client_weights(weights, self.clients.population)
        if not (np.isfinite(given) & (given >= 0)).all():
            raise ConfigError("weights must be finite and at least 0")
        positive("max_weight", self.training.max_weight)
        return tuple(given.tolist())


def workload_of(
    module: object,
    clients: object,
    *,
    population: int | None,
    held_out: tuple[object, object],
    loss: learning.Losses | None,
    metrics: object,
    training: Training,
    options: RunOptions,
    seed: int | None,
) -> Workload:
    """Return what `fit` is to train, with what is measured; `held_out` are validation and test data."""
    names, task = None, clients if isinstance(clients, learning.Task) else None
    parts = {each.name: getattr(training, each.name) for each in fields(Training) if each.name != "device"}
    parts |= {"module": module, "loss": loss, "metrics": metrics, "validation": held_out[0], "test": held_out[1]}
    if isinstance(clients, str):
        task = task_named(clients, population, options.partition, options.data)
        if module is None or isinstance(module, str):
            names = clients, module or learning.fitting(task)
    elif options.partition is not None or options.data is not None:
        raise ConfigError("partition and data are those of a named task")
    if task is not None and any(each is not None for each in held_out):
        raise ConfigError("a task has validation and test data of its own: leave them out")
    if names is not None and task is not None:
        if any(each is not None for each in (loss, training.forward, training.step, training.example_weights)):
            raise ConfigError("a named model has its loss: give a module for a loss, forward or step of your own")
        model = model_named(names[1], task, seed or 0)
        module, loss = model.module, None if model.step is not None else model.losses
        training = replace(training, forward=model.forward, step=model.step)
    if names is None or training.trainable != "*" or training.device != "cpu":
        model = learning.user_model(
            module,
            trainable=training.trainable,
            loss=loss,
            forward=training.forward,
            step=training.step,
            device=training.device,
            weigh=training.example_weights,
        )
    whole = model if training.personal else None
    model = learning.without_personal(model, training.personal) if training.personal else model
    names = None if training.personal else names
    measured: Mapping[str, learning.Metric] | None = None  # those of a task's examples
    if isinstance(metrics, Mapping):
        if not all(isinstance(name, str) and callable(metric) for name, metric in metrics.items()):
            raise ConfigError("metrics must be functions by name")
        if "loss" in metrics:
            raise ConfigError("metrics has the name loss, which is the loss itself")
        measured = metrics
    elif metrics is not None:
        raise ConfigError(f"metrics must be a dictionary of names and functions, got {type(metrics).__name__}")
    elif task is None:
        measured = learning.default_metrics(model.losses) if model.step is None else {}
    function = training.step or loss
    loss_name = getattr(function, "__qualname__", type(function).__qualname__)
    held: learning.Clients | learning.UserClients
    if task is None:
        held = learning.UserClients.of(clients, population, model.device, training.collate)
        validation, test = held_out
        if not isinstance(clients, (list, tuple, dict)):
            client, data = held.first()
            parts[f"client {client}"] = data
    else:
        parts |= {"clients of the task": task.clients, "validation": task.validation}
        held, validation, test = task.clients, task.validation, task.test
    return Workload(
        model=model,
        clients=held,
        evaluator=ModelEvaluator(model, validation, test, measured, training.collate),
        training=training,
        title=type(module).__name__ if names is None else f"{names[0]}, {names[1]}",
        data=f"{held.population:,} clients" if task is None else task.description,
        loss="cross_entropy" if function is None else str(loss_name),
        whole=whole,
        names=names,
        is_main_job=isinstance(clients, str) and clients == MAIN_TASK and population is None,
        fingerprint=learning.fingerprint(parts, clients if task is None else task.name),
    )


def task_named(name: str, population: int | None, partition: str | None, data: Path | None) -> learning.Task:
    """Return the task of that name, or that a user's own function MODULE:FUNCTION makes."""
    if ":" in name:
        return made_by(name, learning.Task)
    divided = learning.parse_partition(partition) if partition else None
    with needs_extra("train", "mlxtend", "sklearn"):
        return learning.load_task(name, population=population, partition=divided, data_dir=data)


def model_named(name: str, task: learning.Task, seed: int) -> learning.Model:
    """Return the model of that name for a task, or that a user's own function MODULE:FUNCTION makes."""
    return made_by(name, learning.Model) if ":" in name else learning.build_model(name, task, seed=seed)


def made_by(name: str, kind: type[Kind]) -> Kind:
    """Return what a user's own function makes; `name` is MODULE:FUNCTION, found from the current directory on."""
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(import_module(module), function)()
    except Exception as error:  # whatever a user's own function raises
        raise ConfigError(f"{name} must be MODULE:FUNCTION without arguments: {first_line(error)}") from error
    finally:
        sys.path.pop(0)
    if not isinstance(made, kind):
        raise ConfigError(f"{name} must return a {kind.__name__} of d2pfed.learning, got a {type(made).__name__}")
    return made


def keep_fingerprint(directory: Path, found: Mapping[str, str], *, is_trained: bool) -> None:
    """Write down what a run is begun with; refuse to go on with something else, and name what differs."""
    if not (directory / FINGERPRINT).exists():
        if is_trained:
            raise ConfigError(
                f"{directory / FINGERPRINT} is missing, which says what the run was trained on: take another directory"
            )
        salt = Entropy.system().stream().bytes(KEY_BYTES).hex()
        replace_file(directory / FINGERPRINT, json.dumps({"salt": salt} | _salted(found, salt)).encode())
        return
    stored = parse(read_text(directory / FINGERPRINT), f"{directory / FINGERPRINT}")
    salted = _salted(found, str(stored.pop("salt", "")))
    differing = [name for name in salted | stored if salted.get(name) != stored.get(name)]
    if differing:
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise ConfigError(
            f"the run in {directory} was begun with other parts: {', '.join(differing[:5])}{more}; a run goes on with "
            "the same module, functions and data only: choose another directory"
        )


def _salted(found: Mapping[str, str], salt: str) -> dict[str, str]:
    # Without it, equal data would show as such in the files of two runs.
    return {name: blake2b(f"{salt} {text}".encode(), digest_size=8).hexdigest() for name, text in found.items()}
