"""Local training of a chunk of clients at once: their parameters have the client as first axis."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from d2pfed.learning.dense import gradients
from d2pfed.learning.local_training import LocalTraining, Steps
from d2pfed.learning.model import Model, Params, Tensors
from d2pfed.learning.sequential import client_generator
from d2pfed.learning.task import Clients, Examples

# From parameters and a batch of each client to gradients, in the order of the parameters.
Gradients = Callable[[Tensors, "Batch"], list[torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step of several clients: rows (client, example, ...), and weights that make the sum of losses a mean."""

    inputs: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


def dense_gradients(values: Tensors, batch: Batch) -> list[torch.Tensor]:
    """Return the gradients of multilayer perceptrons, by hand."""
    return gradients(values, batch.inputs, batch.labels, batch.weights)


def vmap_gradients(model: Model) -> Gradients:
    """Return the function that has torch.func.vmap find the gradients of any module that it can handle."""
    fixed = model.fixed()

    def mean_loss(own: Tensors, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, labels, weights = batch
        return (model.training_losses(own | fixed, inputs, labels) * weights).sum()

    slopes = torch.func.vmap(torch.func.grad(mean_loss))

    def found(values: Tensors, batch: Batch) -> list[torch.Tensor]:
        by_name = slopes(values, (batch.inputs, batch.labels, batch.weights))
        return [by_name[name] for name in values]

    return found


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Clients with the most steps first, so that those still training are always the first rows."""

    table: list[Examples]
    schedules: list[NDArray[np.int64]]
    places: NDArray[np.int64]

    @staticmethod
    def gather(clients: Clients, local: LocalTraining, chosen: Sequence[int], round_seed: int) -> "Chunk":
        """Fetch the clients' examples and draw the order of their steps; places[k] is where client k went."""
        table = [clients.examples(client) for client in chosen]
        schedules = [
            local.schedule(len(examples), client_generator(round_seed, client))
            for client, examples in zip(chosen, table, strict=True)
        ]
        order = np.argsort([-len(schedule) for schedule in schedules], kind="stable")
        return Chunk([table[at] for at in order], [schedules[at] for at in order], np.argsort(order))

    def train(self, model: Model, params: Params, local: LocalTraining, find: Gradients) -> list[Params]:
        """Return the clients' updates, in the order in which they were chosen."""
        count = len(self.table)
        values = {
            name: value.expand(count, *value.shape).clone() for name, value in model.unflatten(params).items()
        }
        steps = Steps(local, list(values.values()))
        for batch in self._batches():
            own = {name: value[: len(batch.labels)] for name, value in values.items()}
            steps.take(list(own.values()), find(own, batch))
        trained = torch.cat([values[name].reshape(count, -1).float() for name in model.names], dim=1).numpy()
        trained -= params
        return [trained[place] for place in self.places]

    def _batches(self) -> Iterator[Batch]:
        """Yield step after step of the clients that still have one."""
        lengths = np.array([len(schedule) for schedule in self.schedules])
        inputs = torch.cat([examples.inputs for examples in self.table])
        labels = torch.cat([examples.labels for examples in self.table])
        starts = torch.tensor([0, *(len(examples) for examples in self.table)]).cumsum(0)[:, None]
        for step in range(max(lengths)):
            rows = torch.from_numpy(
                np.stack([schedule[step] for schedule in self.schedules[: sum(lengths > step)]])
            )
            real = rows >= 0
            at = rows.clamp(min=0) + starts[: len(rows)]
            rows_taken = inputs.index_select(0, at.flatten()).view(*at.shape, *inputs.shape[1:])
            yield Batch(rows_taken, labels[at], real / real.sum(dim=1, keepdim=True))
