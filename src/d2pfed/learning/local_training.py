"""Local training by torch: a few epochs of SGD, Adam or RMSprop, one client after the other or many at once."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import torch

from d2pfed.errors import ConfigError, shown
from d2pfed.fields import TRAINING, about, check_types, documented
from d2pfed.learning.model import Model, Params, Tensors
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

    def __call__(self, params: Params, clients: Sequence[int], round_seed: int) -> Iterator[Params]:
        """Yield each client's update, trained minus given parameters, in the order of `clients`."""
        for client in clients:
            yield self.train(params, self.clients.examples(client), client_generator(round_seed, client))

    def train(self, params: Params, examples: Examples, generator: np.random.Generator) -> Params:
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


def loop_gradients(model: Model, values: Tensors, fixed: Tensors, batch: Examples) -> list[torch.Tensor]:
    """Return the gradient of a batch's mean loss, in the order of `values`; may change the buffers in `fixed`."""
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    loss = model.losses_of(model.training, leaves | fixed, batch.inputs, batch.labels).mean()
    return list(torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True))


# From the clients' parameters, inputs and labels, all with the client as first axis, and weights that make the sum of
# each one's losses a mean, to their gradients in the order of the parameters.
FindGradients = Callable[[Tensors, torch.Tensor, torch.Tensor, torch.Tensor], list[torch.Tensor]]


def vmap_gradients(
    model: Model, values: Tensors, inputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> list[torch.Tensor]:
    """Return the gradients of any module that torch.func.vmap can handle."""
    fixed = model.fixed()

    def mean_loss(own: Tensors, inputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (model.losses_of(model.training, own | fixed, inputs, labels) * weights).sum()

    found = torch.func.vmap(torch.func.grad(mean_loss))(values, inputs, labels, weights)
    return [found[name] for name in values]


@dataclass(frozen=True, slots=True, eq=False)
class BatchedTrainer:
    """Trains clients all at once."""

    model: Model
    clients: Clients
    local: LocalTraining
    find: FindGradients

    def __call__(self, params: Params, clients: Sequence[int], round_seed: int) -> Iterator[Params]:
        """Yield each client's update, trained minus given parameters, in the order of `clients`."""
        unsorted = [(each, self.clients.examples(each)) for each in clients]
        schedules = [self.local.schedule(len(own), client_generator(round_seed, each)) for each, own in unsorted]
        # The most steps first, so that those still training are always the first rows.
        order = np.argsort([-len(schedule) for schedule in schedules], kind="stable")
        table, schedules = [unsorted[at][1] for at in order], [schedules[at] for at in order]
        lengths = np.array([len(schedule) for schedule in schedules])
        inputs, labels = (torch.cat([getattr(own, name) for own in table]) for name in ("inputs", "labels"))
        starts = torch.tensor([0, *(len(own) for own in table)]).cumsum(0)[:, None]
        values = {
            name: value.expand(len(clients), *value.shape).clone()
            for name, value in self.model.unflatten(params).items()
        }
        steps = Steps(self.local, list(values.values()))
        for step in range(max(lengths)):
            rows = torch.from_numpy(np.stack([schedule[step] for schedule in schedules[: sum(lengths > step)]]))
            real, at = rows >= 0, rows.clamp(min=0) + starts[: len(rows)]
            taken = inputs.index_select(0, at.flatten()).view(*at.shape, *inputs.shape[1:])
            own = {name: value[: len(rows)] for name, value in values.items()}
            found = self.find(own, taken, labels[at], real / real.sum(dim=1, keepdim=True))
            steps.take(list(own.values()), found)
        flat = [values[name].reshape(len(clients), -1).float() for name in self.model.names]
        trained = torch.cat(flat, dim=1).numpy()
        trained -= params
        for place in np.argsort(order):
            yield trained[place]
