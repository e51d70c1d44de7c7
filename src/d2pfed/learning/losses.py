"""Losses and metrics of classes: one number for each row, over those of its targets that count."""

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
        check_classes(outputs, labels)
        losses = nn.functional.cross_entropy(
            outputs.float(),
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


def check_classes(outputs: torch.Tensor, labels: torch.Tensor) -> None:
    """Refuse outputs whose classes are not on the second axis, where torch has them: shapes may fit by chance alone."""
    if outputs.ndim > 2 and not labels.is_floating_point() and outputs.shape[2:] != labels.shape[1:]:
        raise ConfigError(
            f"outputs must have their classes on the second axis, got {tuple(outputs.shape)} for targets of "
            f"{tuple(labels.shape)}; where they are on the last, return a dictionary with the key logits"
        )


def logits_of(outputs: Any) -> Any:  # noqa: ANN401 - what a user's module returns
    """Return the logits of an output that has some by that name, as pretrained transformers', with classes second.

    There the classes are on the last axis; torch's losses and metrics have them on the second.
    """
    if isinstance(outputs, torch.Tensor):
        return outputs
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    return found.movedim(-1, 1) if isinstance(found, torch.Tensor) and found.ndim > 1 else outputs


@dataclass(frozen=True, slots=True, eq=False)
class _ByRow:
    """A loss of torch whose rows are kept separate."""

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
        return CrossEntropy(loss.ignore_index, loss.label_smoothing)
    return loss


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The share of targets whose class is right, among those that count."""

    ignored: int = IGNORED

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> float:
        """Return the share; zero where none counts."""
        check_classes(outputs, labels)
        right, counted = outputs.argmax(dim=1) == labels, labels != self.ignored
        return float((right & counted).sum()) / max(int(counted.sum()), 1)


def seen_by(function: object, outputs: Any) -> Any:  # noqa: ANN401 - what a user's module returns
    """Return what a loss or metric is given: torch's own and the default ones the logits, a user's the outputs."""
    is_known = isinstance(function, (CrossEntropy, Accuracy, _ByRow, nn.Module))
    return logits_of(outputs) if is_known else outputs


def default_metrics(loss: Losses) -> dict[str, Callable[[Any, Any], Any]]:
    """Return what is measured beside a loss where no metrics are given: of classes the accuracy."""
    if isinstance(loss, CrossEntropy):
        return {"accuracy": Accuracy(loss.ignored)}
    return {"accuracy": Accuracy(loss.ignore_index)} if type(loss) is nn.CrossEntropyLoss else {}
