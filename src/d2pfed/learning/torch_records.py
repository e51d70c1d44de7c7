"""The records of a data set under a torch module, each by itself, as a silo is asked for them over an engine."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.learning.model import Module
from d2pfed.numerics.ring import IntVector

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class TorchRecords:
    """What a silo holds, for engines that ask for `units` and `evaluate`: a module's gradients and scores.

    A record is a pair of tensors, input and label. The module computes in evaluation mode, so that what a record gives
    depends on that record and the model alone: no dropout, and batch norm as the module came.

    Args:
        module: What is trained; it is copied.
        load: From the silo's name, or the context of Flower's app, to its data set; keep what it has loaded.
        loss: Of a batch of one record.

    Examples:
        >>> data = [(torch.ones(3), torch.tensor(1)), (torch.zeros(3), torch.tensor(0))]
        >>> units = TorchRecords(torch.nn.Linear(3, 2), lambda site: data)
        >>> arrays = {"weight": np.zeros((2, 3), np.float32), "bias": np.zeros(2, np.float32)}
        >>> next(units(arrays, {}, "site-1").gradients(np.array([0])))
        array([[-0.5, -0.5, -0.5,  0.5,  0.5,  0.5, -0.5,  0.5]], dtype=float32)
    """

    module: Module
    load: Callable[[Any], Any] = field(repr=False)
    loss: Loss = field(default=torch.nn.functional.cross_entropy, repr=False)

    def __call__(self, arrays: Mapping[str, np.ndarray], _settings: object, silo: object) -> "RecordsUnderModel":
        """Return what a silo holds under a model."""
        module = copy.deepcopy(self.module).eval()
        values = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        module.load_state_dict(values, strict=False)
        parameters = dict(module.named_parameters())
        trained = [parameters[name] for name in arrays if name in parameters and parameters[name].requires_grad]
        if not trained:
            raise ConfigError(f"the arrays must be parameters of the module, got {', '.join(arrays)[:200]}")
        return RecordsUnderModel(module, trained, self.load(silo), self.loss)


@dataclass(frozen=True, slots=True, eq=False)
class RecordsUnderModel:
    """A silo's records under a model (`d2pfed.round.Units`, `d2pfed.deploy.questions.EvaluatedRecords`)."""

    module: Module
    trained: list[torch.nn.Parameter] = field(repr=False)  # in the order of the arrays that were sent
    data: Any = field(repr=False)
    loss: Loss = field(repr=False)

    @property
    def count(self) -> int:
        """How many records there are; it stays in the silo."""
        return len(self.data)

    def gradients(self, chosen: IntVector) -> Iterator[NDArray[np.float32]]:
        """Yield a row for each chosen record: minus the gradient of its loss."""
        for place in chosen:
            example, label = self.data[int(place)]
            loss = self.loss(self.module(example[None]), label[None])
            found = torch.autograd.grad(loss, self.trained, allow_unused=True, materialize_grads=True)
            yield -torch.cat([each.flatten() for each in found])[None].numpy()

    def evaluate(self, record: int) -> tuple[NDArray[np.floating], int]:
        """Return the scores and the label of one record."""
        example, label = self.data[record]
        with torch.no_grad():
            return self.module(example[None]).softmax(1)[0].numpy(), int(label)
