"""How good a model is on given examples."""

from dataclasses import dataclass

import torch

from d2pfed.errors import ConfigError
from d2pfed.learning.model import Model, Params
from d2pfed.learning.task import Examples

_BATCH = 1000


@dataclass(frozen=True, slots=True)
class Metrics:
    """The share of examples whose class is right, and the mean loss."""

    accuracy: float
    loss: float


def evaluate(model: Model, params: Params, examples: Examples) -> Metrics:
    """Measure a model in evaluation mode."""
    if not len(examples):
        raise ConfigError("evaluation needs at least one example, got 0")
    values = model.unflatten(params) | model.fixed()
    right, loss = 0, 0.0
    with torch.no_grad():
        for inputs, labels in zip(
            torch.split(examples.inputs, _BATCH), torch.split(examples.labels, _BATCH), strict=True
        ):
            outputs = model.outputs(values, inputs)
            right += int((outputs.argmax(dim=1) == labels).sum())
            loss += float(model.losses(outputs, labels).double().sum())
    return Metrics(right / len(examples), loss / len(examples))
