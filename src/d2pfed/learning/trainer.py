"""Local training of many clients: a whole chunk at once, or one after the other with the same numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.learning.dense import gradients, layers_of, sgd_step
from d2pfed.learning.local import LocalTraining, Optimizer, Steps
from d2pfed.learning.model import Model, Params, Tensors
from d2pfed.learning.task import Clients, Examples

# Bytes of parameters in a chunk. By hand, small ones that stay in the cache are fastest; vmap has a cost per step.
_CACHE_BYTES = 1 << 22
_CHUNK_BYTES = 1 << 25
# Batch norms would see the rows that fill up a batch, and dropouts the random numbers of other clients; many small
# convolutions with weights of their own are several times slower together than one after the other.
_ONE_BY_ONE = (
    torch.nn.modules.conv._ConvNd,  # noqa: SLF001 - torch's only name for all convolutions
    torch.nn.modules.batchnorm._NormBase,  # noqa: SLF001 - torch's only name for all batch norms
    torch.nn.modules.dropout._DropoutNd,  # noqa: SLF001 - torch's only name for all dropouts
    torch.nn.RNNBase,
)


@dataclass(frozen=True, slots=True, eq=False)
class SequentialTrainer:
    """Trains client after client: for modules that cannot be trained many at once, and as their reference."""

    model: Model
    clients: Clients
    local: LocalTraining

    def __call__(self, params: Params, clients: Sequence[int], round_seed: int) -> Iterator[Params]:
        """Yield each client's update, trained minus given parameters, in the order of `clients`."""
        for client in clients:
            yield self._train(params, self.clients.examples(client), _generator(round_seed, client))

    def _train(self, params: Params, examples: Examples, generator: np.random.Generator) -> Params:
        schedule = self.local.schedule(len(examples), generator)
        values = self.model.unflatten(params)
        fixed = self.model.fixed()
        steps = Steps(self.local, list(values.values()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(generator.integers(2**62)))
            for line in schedule:
                batch = examples.take(line[line >= 0])
                for value in values.values():
                    value.requires_grad_()
                loss = self.model.training_losses(values | fixed, batch.inputs, batch.labels).mean()
                gradients = torch.autograd.grad(loss, list(values.values()), materialize_grads=True)
                values = {name: value.detach() for name, value in values.items()}
                steps.take(list(values.values()), list(gradients))
        return self.model.flatten(values) - params


@dataclass(frozen=True, slots=True, eq=False)
class LocalTrainer:
    """Trains `chunk` clients at once; None picks what fits the cache and bounds memory.

    A client's update depends on params, its examples, the round's seed and its own number, not on who else is in
    the cohort or in its chunk (float rounding apart). Layers before the first trained one are gone through once,
    not at every step. Modules with convolutions, dropout, recurrence or batch
    statistics, and what vmap refuses, go through SequentialTrainer.
    """

    model: Model
    clients: Clients
    local: LocalTraining
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ConfigError(f"chunk must be at least 1, got {self.chunk}")

    def __call__(self, params: Params, clients: Sequence[int], round_seed: int) -> Iterator[Params]:
        """Yield each client's update, trained minus given parameters, in the order of `clients`."""
        if parts := self.model.behind_front():
            front, rest = parts
            yield from LocalTrainer(rest, _Seen(self.clients, front), self.local, self.chunk)(
                params, clients, round_seed
            )
            return
        one_by_one = SequentialTrainer(self.model, self.clients, self.local)
        if self.model.has(*_ONE_BY_ONE):
            yield from one_by_one(params, clients, round_seed)
            return
        budget = _CACHE_BYTES if self._by_hand else _CHUNK_BYTES
        chunk = self.chunk or max(1, budget // (4 * self.model.dimension))
        for start in range(0, len(clients), chunk):
            together = clients[start : start + chunk]
            try:
                updates = self._train(params, together, round_seed)
            except RuntimeError:
                # torch raises it for what vmap cannot do (functional dropout, values that steer the program); a
                # mistake in the module is raised again by the loop.
                updates = list(one_by_one(params, together, round_seed))
            yield from updates

    def _train(self, params: Params, clients: Sequence[int], round_seed: int) -> list[Params]:
        chunk = _Chunk.gather(self.clients, self.local, clients, round_seed)
        start = self.model.unflatten(params)
        values = {name: value.expand(len(clients), *value.shape).clone() for name, value in start.items()}
        step = self._step(values)
        for batch in chunk.batches():
            step({name: value[: len(batch.labels)] for name, value in values.items()}, batch)
        flat = [values[name].reshape(len(clients), -1).float() for name in self.model.names]
        trained = torch.cat(flat, dim=1).numpy()
        trained -= params
        return [trained[place] for place in chunk.places]

    def _step(self, values: Tensors) -> Callable[[Tensors, "_Batch"], None]:
        plain = self.local.optimizer is Optimizer.SGD and not self.local.momentum
        if self._by_hand and plain:
            return lambda own, batch: sgd_step(own, batch.inputs, batch.labels, batch.weights, self.local.lr)
        steps = Steps(self.local, list(values.values()))
        if self._by_hand:
            return lambda own, batch: steps.take(
                list(own.values()), gradients(own, batch.inputs, batch.labels, batch.weights)
            )
        fixed = self.model.fixed()

        def mean_loss(own: Tensors, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
            inputs, labels, weights = batch
            return (self.model.training_losses(own | fixed, inputs, labels) * weights).sum()

        slopes = torch.func.vmap(torch.func.grad(mean_loss))

        def step(own: Tensors, batch: _Batch) -> None:
            found = slopes(own, (batch.inputs, batch.labels, batch.weights))
            steps.take(list(own.values()), [found[name] for name in own])

        return step

    @property
    def _by_hand(self) -> bool:
        return layers_of(self.model) is not None


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """Clients whose examples went through the untrained layers of a model."""

    clients: Clients
    front: torch.nn.Module

    @property
    def population(self) -> int:
        """The number of clients."""
        return self.clients.population

    def examples(self, client: int) -> Examples:
        """Return what the trained layers see of one client's examples."""
        own = self.clients.examples(client)
        with torch.no_grad():
            return Examples(self.front(own.inputs), own.labels)


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """One step of several clients: rows (client, example, ...), and weights that make the sum of losses a mean."""

    inputs: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Clients with the most steps first, so that those still training are always the first rows."""

    table: list[Examples]
    schedules: list[NDArray[np.int64]]
    places: NDArray[np.int64]

    @staticmethod
    def gather(clients: Clients, local: LocalTraining, chosen: Sequence[int], round_seed: int) -> "_Chunk":
        """Fetch the clients' examples and draw the order of their steps; places[k] is where client k went."""
        table = [clients.examples(client) for client in chosen]
        schedules = [
            local.schedule(len(examples), _generator(round_seed, client))
            for client, examples in zip(chosen, table, strict=True)
        ]
        order = np.argsort([-len(schedule) for schedule in schedules], kind="stable")
        return _Chunk([table[at] for at in order], [schedules[at] for at in order], np.argsort(order))

    def batches(self) -> Iterator[_Batch]:
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
            yield _Batch(rows_taken, labels[at], real / real.sum(dim=1, keepdim=True))


def _generator(round_seed: int, client: int) -> np.random.Generator:
    return np.random.default_rng([round_seed, client])
