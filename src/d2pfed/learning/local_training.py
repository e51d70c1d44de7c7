"""Local training by torch: a few epochs of SGD, Adam or RMSprop, one client after the other or many at once."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray

from d2pfed.errors import ConfigError, shown
from d2pfed.fields import TRAINING, about, check_types, documented
from d2pfed.learning.model import Model, Module, Params, Tensors
from d2pfed.learning.record_program import by_products
from d2pfed.learning.task import Clients, Examples
from d2pfed.numerics.ring import IntVector

MOST_RATE = 1e6  # greater steps than any float32 model outlives
MOST_EPOCHS, MOST_BATCH = 10_000, 100_000

ADAM_DECAYS = (0.9, 0.999)
_RMSPROP_DECAY = 0.99
ADAM_EPSILON = 1e-8  # RMSprop's too, as in torch.optim


class Optimizer(StrEnum):
    """How gradients become steps; each is torch.optim's of that name with its defaults."""

    SGD = "sgd"
    ADAM = "adam"
    RMSPROP = "rmsprop"


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining:
    """How a client trains: fresh optimizer each round, `epochs` passes over shuffled batches."""

    optimizer: Optimizer = field(default=Optimizer.SGD, metadata=about("The clients' optimizer.", TRAINING))
    lr: float = field(default=0.1, metadata=about("The clients' learning rate.", TRAINING))
    momentum: float = field(default=0.0, metadata=about("The clients' momentum, for sgd.", TRAINING))
    epochs: int = field(default=1, metadata=about("The clients' passes over their data in a round.", TRAINING))
    batch_size: int = field(default=10, metadata=about("The clients' batch size.", TRAINING))

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 < self.lr <= MOST_RATE:
            raise ConfigError(f"lr must be positive and at most {MOST_RATE:g}, got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.momentum and self.optimizer is not Optimizer.SGD:
            raise ConfigError(f"momentum is sgd's, got {self.momentum} with {self.optimizer}")
        if not 1 <= self.epochs <= MOST_EPOCHS:
            raise ConfigError(f"epochs must be in [1, {MOST_EPOCHS}], got {shown(self.epochs)}")
        if not 1 <= self.batch_size <= MOST_BATCH:
            raise ConfigError(f"batch_size must be in [1, {MOST_BATCH}], got {shown(self.batch_size)}")

    def schedule(self, count: int, generator: np.random.Generator) -> IntVector:
        """Return which of `count` rows each step uses, one line a step; -1 fills up the last batch of an epoch."""
        batches = -(-count // self.batch_size)
        lines = np.full((self.epochs, batches * self.batch_size), -1)
        for epoch in lines:
            epoch[:count] = generator.permutation(count)
        return lines.reshape(self.epochs * batches, self.batch_size)


class Steps:
    """An optimizer's memory for some tensors; leading rows of them may stop earlier than others."""

    def __init__(self, local: LocalTraining, values: list[torch.Tensor]) -> None:
        self._local = local
        slots = {Optimizer.SGD: int(local.momentum > 0), Optimizer.ADAM: 2, Optimizer.RMSPROP: 1}
        self._memory = [[torch.zeros_like(value) for value in values] for _ in range(slots[local.optimizer])]
        self._taken = 0

    def take(self, values: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Change `values` in place by one step; they may be the first rows of those at the start."""
        self._taken += 1
        local, (first, second) = self._local, ADAM_DECAYS
        for at, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
            memory = [slot[at][: len(value)] if value.ndim else slot[at] for slot in self._memory]
            match local.optimizer:
                case Optimizer.ADAM:  # with as few passes over memory as there are
                    mean, square = memory
                    mean.lerp_(gradient, 1 - first)
                    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
                    scale = square.sqrt().div_(math.sqrt(1 - second**self._taken)).add_(ADAM_EPSILON)
                    value.addcdiv_(mean, scale, value=-local.lr / (1 - first**self._taken))
                case Optimizer.RMSPROP:
                    (square,) = memory
                    square.mul_(_RMSPROP_DECAY).addcmul_(gradient, gradient, value=1 - _RMSPROP_DECAY)
                    value.sub_(gradient / square.sqrt().add_(ADAM_EPSILON), alpha=local.lr)
                case Optimizer.SGD:
                    move = memory[0].mul_(local.momentum).add_(gradient) if memory else gradient
                    value.sub_(move, alpha=local.lr)


def client_generator(round_seed: int, client: int) -> np.random.Generator:
    """Return the generator of a client's order of examples in a round."""
    return np.random.default_rng([round_seed, client])


@dataclass(frozen=True, slots=True, eq=False)
class SequentialTrainer:
    """Trains client after client: for modules that cannot be trained many at once, and as their reference."""

    model: Model
    clients: Clients
    local: LocalTraining
    note: str = ""  # why clients are trained one by one

    def __call__(self, params: Params, clients: Sequence[int], round_seed: int) -> Iterator[Params]:
        """Yield each client's update, trained minus given parameters, in the order of `clients`."""
        own = self.model.working_copy()
        for client in clients:
            yield self.train(params, self.clients.examples(client), client_generator(round_seed, client), own)

    def train(self, params: Params, examples: Examples, generator: np.random.Generator, own: Module) -> Params:
        """Return the update of one client with these examples, trained in a working copy of the module."""
        schedule = self.local.schedule(len(examples), generator)
        values = self.model.reset(own, params)
        steps = Steps(self.local, values)
        device = self.model.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            # Of the CPU alone where that is enough: for absent devices torch formats a stack at every call.
            seed = torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed
            seed(int(generator.integers(2**62)))
            for line in schedule:
                gradients = loop_gradients(self.model, own, values, examples.take(line[line >= 0]))
                with torch.no_grad():
                    steps.take(values, gradients)
        return (
            self.model.flatten(dict(zip(self.model.names, (value.detach() for value in values), strict=True)))
            - params
        )


def loop_gradients(model: Model, own: Module, values: list[torch.Tensor], batch: Examples) -> list[torch.Tensor]:
    """Return the gradient of a batch's mean loss by a working copy and its trained tensors; may change its buffers."""
    loss = model.losses_of(own, None, batch.inputs, batch.labels).mean()
    return list(torch.autograd.grad(loss, values, materialize_grads=True))


# From the clients' parameters, inputs and labels, all with the client as first axis, and weights that make the sum of
# each one's losses a mean, to their gradients in the order of the parameters. None as weights: all rows count, and a
# loss may reduce them by itself.
FindGradients = Callable[[Tensors, torch.Tensor, torch.Tensor, torch.Tensor | None], list[torch.Tensor]]


def vmap_gradients(
    model: Model, values: Tensors, inputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None
) -> list[torch.Tensor]:
    """Return the gradients of any module that torch.func.vmap can handle."""
    fixed = model.fixed()

    def mean_loss(
        own: Tensors, inputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        losses = model.losses_of(model.training, own | fixed, inputs, labels)
        return losses.mean() if weights is None else (losses * weights).sum()

    axes = (0, 0, 0, None if weights is None else 0)
    with by_products(recurrent=model.has(torch.nn.RNNBase)):
        found = torch.func.vmap(torch.func.grad(mean_loss), in_dims=axes)(values, inputs, labels, weights)
    return [found[name] for name in values]


@dataclass(frozen=True, slots=True, eq=False)
class BatchedTrainer:
    """Trains clients all at once."""

    model: Model
    clients: Clients
    local: LocalTraining
    find: FindGradients
    by_row: bool = True  # whether the loss tells rows apart, so that some may count for nothing

    def __call__(self, params: Params, clients: Sequence[int], round_seed: int) -> Iterator[Params]:
        """Yield each client's update, trained minus given parameters, in the order of `clients`."""
        unsorted = [(each, self.clients.examples(each)) for each in clients]
        schedules = [self.local.schedule(len(own), client_generator(round_seed, each)) for each, own in unsorted]
        # The most steps first, so that those still training are always the first rows.
        order = np.argsort([-len(schedule) for schedule in schedules], kind="stable")
        table, schedules = [unsorted[at][1] for at in order], [schedules[at] for at in order]
        lengths = np.array([len(schedule) for schedule in schedules])
        inputs, labels = (torch.cat([getattr(own, name) for own in table]) for name in ("inputs", "labels"))
        starts = np.cumsum([0, *(len(own) for own in table)])[:, None]
        values = {
            name: value.expand(len(clients), *value.shape).clone()
            for name, value in self.model.unflatten(params).items()
        }
        steps = Steps(self.local, list(values.values()))
        for step in range(max(lengths)):
            rows = np.stack([schedule[step] for schedule in schedules[: sum(lengths > step)]])
            real, at = rows >= 0, rows.clip(min=0) + starts[: len(rows)]
            own = {name: value[: len(rows)] for name, value in values.items()}
            steps.take(list(own.values()), self._gradients(own, inputs, labels, at, real))
        flat = [values[name].reshape(len(clients), -1).float() for name in self.model.names]
        trained = torch.cat(flat, dim=1).cpu().numpy()  # of all at once: a copy from a device waits for it
        trained -= params
        for place in np.argsort(order):
            yield trained[place]

    def _gradients(
        self, values: Tensors, inputs: torch.Tensor, labels: torch.Tensor, at: IntVector, real: NDArray[np.bool_]
    ) -> list[torch.Tensor]:
        """Return the clients' gradients for rows of the table; a loss that reduces by itself gets no others."""

        def find(some: Tensors, at: IntVector, weights: NDArray[np.float32] | None) -> list[torch.Tensor]:
            index = torch.from_numpy(at).to(inputs.device)
            taken = inputs.index_select(0, index.flatten()).view(*index.shape, *inputs.shape[1:])
            own = None if weights is None else torch.from_numpy(weights).to(inputs.device)
            return self.find(some, taken, labels[index], own)

        counts = real.sum(axis=1)
        if self.by_row:
            return find(values, at, (real / counts[:, None]).astype(np.float32))
        if len(sizes := np.unique(counts)) == 1:
            return find(values, at[:, : sizes[0]], None)
        found = [torch.empty_like(value) for value in values.values()]
        for size in sizes:
            places = torch.from_numpy(np.flatnonzero(counts == size)).to(inputs.device)
            some = {name: value[places] for name, value in values.items()}
            for whole, part in zip(found, find(some, at[counts == size, :size], None), strict=True):
                whole[places] = part
        return found
