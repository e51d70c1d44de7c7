"""How good a model is on given examples."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.learning.model import Model, Params
from d2pfed.learning.task import Examples
from d2pfed.learning.user_clients import Rows, Tree, concatenated, mapped

_BATCH = 100  # what the layers pass on then stays in a core's cache

Metric = Callable[[Any, Any], Any]  # from all outputs and all targets to a number


def evaluate(model: Model, params: Params, examples: Examples) -> dict[str, float]:
    """Return the share of examples whose class is right, and the mean loss, in evaluation mode."""
    if not len(examples):
        raise ConfigError("evaluation needs at least one example, got 0")
    values = model.unflatten(params) | model.fixed()
    right, loss = 0, 0.0
    with torch.no_grad():
        for inputs, labels in zip(
            torch.split(examples.inputs, _BATCH), torch.split(examples.labels, _BATCH), strict=True
        ):
            outputs = model.outputs_of(model.scoring, values, inputs)
            right += int((outputs.argmax(dim=1) == labels).sum())
            loss += float(model.losses(outputs, labels).double().sum())
    return {"accuracy": right / len(examples), "loss": loss / len(examples)}


def example_losses(model: Model, params: Params, examples: Examples) -> NDArray[np.float64]:
    """Return the loss of each example, in evaluation mode."""
    values = model.unflatten(params) | model.fixed()
    with torch.no_grad():
        losses = model.losses_of(model.scoring, values, examples.inputs, examples.labels)
    found: NDArray[np.float64] = losses.double().numpy().reshape(len(examples), -1).mean(axis=1)
    return found


def measure(
    model: Model, params: Params, batches: Iterable[Rows], metrics: Mapping[str, Metric]
) -> dict[str, float]:
    """Measure a model in evaluation mode, on its device: the mean loss, and each metric of all rows together.

    No rows, no metrics. Outputs and targets are brought together on the CPU only if a metric needs them.
    """
    values = model.unflatten(params) | model.fixed()
    loss, count, outputs, targets = 0.0, 0, list[Tree](), list[Tree]()
    with torch.no_grad():
        for batch in batches:
            if not len(batch):
                continue
            here = batch.each(lambda leaf: leaf.to(model.device))
            needs_outputs = model.step is None or metrics
            found = model.outputs_of(model.scoring, values, here.inputs) if needs_outputs else None
            losses = (
                model.losses(found, here.labels)
                if model.step is None
                else model.losses_of(model.scoring, values, here.inputs, here.labels)
            )
            loss += float(losses.double().mean()) * len(batch)
            count += len(batch)
            if metrics:
                outputs.append(mapped(torch.Tensor.cpu, found))
                targets.append(mapped(torch.Tensor.cpu, batch.labels))
        if not count:
            return {}
        numbers = {"loss": loss / count}
        if metrics:
            whole = concatenated(outputs), concatenated(targets)
            for name, metric in metrics.items():
                value = metric(*whole)
                try:
                    numbers[name] = float(value)
                except (TypeError, ValueError, RuntimeError):
                    text = f"the metric {name} must return a number, got {type(value).__name__}"
                    raise ConfigError(text) from None
    return numbers


def accuracy(outputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of rows whose class is right."""
    return float((outputs.argmax(dim=1) == labels).double().mean())
