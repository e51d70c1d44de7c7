"""Local training of one client after the other, by torch's own gradients."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from d2pfed.learning.local_training import LocalTraining, Steps
from d2pfed.learning.model import Model, Params, Tensors
from d2pfed.learning.rows import Rows
from d2pfed.learning.task import Clients, Examples
from d2pfed.learning.user_clients import UserClients


@dataclass(frozen=True, slots=True, eq=False)
class SequentialTrainer:
    """Trains client after client: for modules that cannot be trained many at once, and as their reference."""

    model: Model
    clients: Clients | UserClients
    local: LocalTraining

    def __call__(self, params: Params, clients: Sequence[int], round_seed: int) -> Iterator[Params]:
        """Yield each client's update, trained minus given parameters, in the order of `clients`."""
        for client in clients:
            yield self.train(params, self.clients.examples(client), client_generator(round_seed, client))

    def train(self, params: Params, examples: Examples | Rows, generator: np.random.Generator) -> Params:
        """Return the update of one client with these examples."""
        schedule = self.local.schedule(len(examples), generator)
        values = self.model.unflatten(params)
        fixed = self.model.fixed()
        steps = Steps(self.local, list(values.values()))
        device = self.model.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(int(generator.integers(2**62)))
            for line in schedule:
                gradients = loop_gradients(self.model, values, fixed, examples.take(line[line >= 0]))
                steps.take(list(values.values()), gradients)
        return self.model.flatten(values) - params


def loop_gradients(model: Model, values: Tensors, fixed: Tensors, batch: Examples | Rows) -> list[torch.Tensor]:
    """Return the gradient of a batch's mean loss, in the order of `values`; may change the buffers in `fixed`."""
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    loss = model.training_losses(leaves | fixed, batch.inputs, batch.labels).mean()
    return list(torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True))


def client_generator(round_seed: int, client: int) -> np.random.Generator:
    """Return the generator of a client's order of examples in a round."""
    return np.random.default_rng([round_seed, client])
