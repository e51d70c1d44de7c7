"""Losses and metrics of classes: one number for each row, wherever the classes are in the outputs."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from d2pfed.errors import ConfigError

Losses = Callable[..., torch.Tensor]  # of outputs and targets; of each example, or their mean
IGNORED = -100  # torch's own: a target that counts for nothing

# Losses whose mean is that of the rows' own means.
_BY_ELEMENT = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The cross entropy of each row of logits: the mean over those of its targets that count."""

    ignored: int = IGNORED
    smoothing: float = 0.0

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of each row; zero where no target of a row counts."""
        losses = nn.functional.cross_entropy(
            classes_second(outputs, labels).float(),
            labels,
            ignore_index=self.ignored,
            label_smoothing=self.smoothing,
            reduction="none",
        )
        if losses.ndim == 1:
            return losses
        if labels.is_floating_point():
            return losses.flatten(1).mean(1)
        return losses.flatten(1).sum(1) / self.counted(labels).clamp(min=1)

    def counted(self, labels: torch.Tensor) -> torch.Tensor:
        """Return how many targets of each row count: by them rows are weighted in the mean of a batch, as by torch."""
        if labels.is_floating_point():
            return torch.ones(len(labels), device=labels.device)
        return (labels != self.ignored).reshape(len(labels), -1).sum(1).float()


cross_entropy = CrossEntropy()


def classes_second(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return logits with the classes on the second axis, where torch has them; a language model's are on the last."""
    if labels.is_floating_point() or outputs.ndim < 3:
        return outputs
    second, last = outputs.shape[2:] == labels.shape[1:], outputs.shape[1:-1] == labels.shape[1:]
    if second and last:
        raise ConfigError(
            f"outputs of shape {tuple(outputs.shape)} may have their classes on the second or on the last axis: give a "
            "loss and metrics that say which"
        )
    return outputs.movedim(-1, 1) if last else outputs


def logits_of(outputs: Any) -> Any:  # noqa: ANN401 - what a user's module returns
    """Return the logits of an output that has some by that name, as those of pretrained transformers do."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    return outputs if found is None else found


@dataclass(frozen=True, slots=True, eq=False)
class _ByRow:
    """A loss of torch whose rows are told apart."""

    loss: nn.Module

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each row."""
        found: torch.Tensor = self.loss(outputs, targets)
        return found.flatten(1).mean(1) if found.ndim > 1 else found


def by_row(loss: Losses | None) -> Losses:
    """Return a user's loss, of each row where torch's own losses can tell."""
    if loss is None or loss is nn.functional.cross_entropy:
        return cross_entropy
    is_mean = isinstance(loss, nn.Module) and getattr(loss, "reduction", "") == "mean"
    if type(loss) in _BY_ELEMENT and is_mean:
        own = copy.deepcopy(loss)
        own.reduction = "none"  # type: ignore[attr-defined]
        return _ByRow(own)  # type: ignore[arg-type]
    if type(loss) is nn.CrossEntropyLoss and is_mean and loss.weight is None:
        own_entropy = CrossEntropy(loss.ignore_index, loss.label_smoothing)
        return cross_entropy if own_entropy == cross_entropy else own_entropy
    return loss


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The share of targets whose class is right, among those that count."""

    ignored: int = IGNORED

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> float:
        """Return the share; zero where none counts."""
        right, counted = classes_second(outputs, labels).argmax(dim=1) == labels, labels != self.ignored
        return float((right & counted).sum()) / max(int(counted.sum()), 1)


accuracy = Accuracy()


def default_metrics(loss: Losses) -> dict[str, Callable[[Any, Any], Any]]:
    """Return what is measured beside a loss where no metrics are given: of classes the accuracy."""
    if isinstance(loss, CrossEntropy):
        return {"accuracy": Accuracy(loss.ignored)}
    return {"accuracy": Accuracy(loss.ignore_index)} if type(loss) is nn.CrossEntropyLoss else {}
