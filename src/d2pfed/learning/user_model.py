"""A user's module, loss and device as a model, and the trainer that suits it."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from d2pfed.errors import ConfigError
from d2pfed.learning.local_training import LocalTraining
from d2pfed.learning.model import CPU, Forward, Losses, Model, Step, cross_entropy
from d2pfed.learning.sequential import SequentialTrainer
from d2pfed.learning.task import Examples
from d2pfed.learning.trainer import LocalTrainer
from d2pfed.learning.user_clients import LabelledClients, UserClients

Module = torch.nn.Module

# Losses whose mean is that of the rows' own means.
_BY_ELEMENT = (
    torch.nn.MSELoss,
    torch.nn.L1Loss,
    torch.nn.SmoothL1Loss,
    torch.nn.HuberLoss,
    torch.nn.BCELoss,
    torch.nn.BCEWithLogitsLoss,
)
DEVICES = ("cpu", "cuda", "mps")


def user_model(
    module: object,
    *,
    trainable: object = "*",
    loss: Losses | None = None,
    forward: Forward | None = None,
    step: Step | None = None,
    device: object = "cpu",
) -> Model:
    """Return the model of a user's module; None as loss is the cross entropy of class labels."""
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    patterns = (trainable,) if isinstance(trainable, str) else trainable
    if not isinstance(patterns, Sequence) or not all(isinstance(each, str) for each in patterns):
        raise ConfigError(f"trainable must be a pattern or a list of patterns, got {trainable!r}")
    for name, hook in (("loss", loss), ("forward", forward), ("step", step)):
        if hook is not None and not callable(hook):
            raise ConfigError(f"{name} must be a function, got {type(hook).__name__}")
    if step is not None and loss is not None:
        raise ConfigError("step takes the place of the loss: give one of the two, got both")
    model = Model(module, tuple(patterns), _losses(loss), forward, step, device_named(device))
    for name, value in model.module.named_parameters():
        if not torch.isfinite(value).all():
            raise ConfigError(f"the module's parameters must be finite, {name} is not")
    return model


def device_named(name: object) -> torch.device:
    """Return a device that this machine has."""
    name = str(name)
    kind = name.partition(":")[0]
    if kind not in DEVICES:
        raise ConfigError(f"device must be one of {', '.join(DEVICES)}, got {name!r}")
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available[kind]:
        raise ConfigError(f"device {name} is not available on this machine")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be one of {', '.join(DEVICES)}, got {name!r}") from None


def trainer_for(model: Model, clients: UserClients, local: LocalTraining) -> LocalTrainer | SequentialTrainer:
    """Return the fastest trainer for these clients, one of which is trained for a trial.

    Many clients at once where each holds one tensor of inputs and one of labels, on the CPU, and the loss tells rows
    apart; else client after client.
    """
    client, rows = clients.first()
    found = rows.examples()
    if model.device == CPU and model.step is None and found is not None and _tells_rows_apart(model, found):
        empty = Examples(found.inputs[:0], found.labels[:0])
        trainer = LocalTrainer(model, LabelledClients(clients, empty), local)
        return trainer.choose(model.initial(), (client,))
    return SequentialTrainer(model, clients, local)


def _tells_rows_apart(model: Model, examples: Examples) -> bool:
    few = examples.take(np.arange(min(2, len(examples))))
    values = model.unflatten(model.initial()) | model.fixed()
    return model.training_losses(values, few.inputs, few.labels).shape == (len(few),)


def fixed_content(model: Model) -> Iterator[tuple[str, bytes]]:
    """Yield names and bytes of all that is not trained, in the order of the names."""
    for name, value in sorted(model.fixed().items()):
        whole = value.detach().cpu().contiguous().reshape(-1)
        yield name, whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""


@contextmanager
def one_thread(model: Model) -> Iterator[None]:
    """Let torch use one thread for a model on the CPU: small products are faster so, and cores stay free."""
    before = torch.get_num_threads()
    if model.device == CPU:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, eq=False)
class _ByRow:
    """A loss of torch whose rows are told apart."""

    loss: torch.nn.Module

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each row."""
        found: torch.Tensor = self.loss(outputs, targets)
        return found.flatten(1).mean(1) if found.ndim > 1 else found


def _losses(loss: Losses | None) -> Losses:
    if loss is None or loss is torch.nn.functional.cross_entropy:
        return cross_entropy
    if type(loss) in _BY_ELEMENT and getattr(loss, "reduction", "") == "mean":
        own = copy.deepcopy(loss)
        own.reduction = "none"  # type: ignore[attr-defined]
        return _ByRow(own)  # type: ignore[arg-type]
    if type(loss) is torch.nn.CrossEntropyLoss and vars(loss) | {"training": True} == _PLAIN:
        return cross_entropy
    return loss


_PLAIN = vars(torch.nn.CrossEntropyLoss()) | {"training": True}
