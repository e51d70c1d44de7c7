"""Local training by torch: a few epochs by any optimizer, one client after the other or many at once."""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.learning.local_settings import LocalTraining, Optimizer, Precision, rate_factor
from d2pfed.learning.losses import CrossEntropy
from d2pfed.learning.model import Model, Module, Params, Tensors
from d2pfed.learning.record_program import by_products
from d2pfed.learning.recurrent import OneProductLstm
from d2pfed.learning.task import Clients, Examples, Parts
from d2pfed.learning.user_clients import UserClients, held_by
from d2pfed.numerics.ring import IntVector

ADAM_DECAYS = (0.9, 0.999)
_RMSPROP_DECAY = 0.99
_ADAMW_DECAY = 0.01
ADAM_EPSILON = 1e-8  # RMSprop's too, as in torch.optim


class Steps:
    """An optimizer's memory for some tensors; leading rows of them may stop earlier than others."""

    def __init__(self, local: LocalTraining, values: list[torch.Tensor], factor: float = 1.0) -> None:
        self._local, self._lr = local, local.lr * factor
        slots: dict[object, int] = {Optimizer.SGD: int(local.momentum > 0), Optimizer.RMSPROP: 1}
        count = slots.get(local.optimizer, 2)
        self._memory = [[torch.zeros_like(value) for value in values] for _ in range(count)]
        self._taken = 0

    def take(self, values: list[torch.Tensor], gradients: list[torch.Tensor], factor: float = 1.0) -> None:
        """Change `values` in place by one step; they may be the first rows of those at the start."""
        self._taken += 1
        local, lr, (first, second) = self._local, self._lr * factor, ADAM_DECAYS
        for at, (value, slope) in enumerate(zip(values, gradients, strict=True)):
            memory = [slot[at][: len(value)] if value.ndim else slot[at] for slot in self._memory]
            is_adamw = local.optimizer is Optimizer.ADAMW
            if is_adamw:
                value.mul_(1 - lr * (_ADAMW_DECAY if local.weight_decay is None else local.weight_decay))
            gradient = slope if is_adamw or not local.weight_decay else slope.add(value, alpha=local.weight_decay)
            match local.optimizer:
                case Optimizer.ADAM | Optimizer.ADAMW:  # with as few passes over memory as there are
                    mean, square = memory
                    mean.lerp_(gradient, 1 - first)
                    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
                    scale = square.sqrt().div_(math.sqrt(1 - second**self._taken)).add_(ADAM_EPSILON)
                    value.addcdiv_(mean, scale, value=-lr / (1 - first**self._taken))
                case Optimizer.RMSPROP:
                    (square,) = memory
                    square.mul_(_RMSPROP_DECAY).addcmul_(gradient, gradient, value=1 - _RMSPROP_DECAY)
                    value.sub_(gradient / square.sqrt().add_(ADAM_EPSILON), alpha=lr)
                case Optimizer.SGD:
                    move = memory[0].mul_(local.momentum).add_(gradient) if memory else gradient
                    value.sub_(move, alpha=lr)


class OwnSteps:
    """A user's optimizer of one client's tensors, at the settings' learning rate unless it has one of its own."""

    def __init__(self, local: LocalTraining, values: list[torch.Tensor], factor: float) -> None:
        self._leaves = [torch.nn.Parameter(value) for value in values]  # of the same memory
        make: Any = local.optimizer
        takes_rate = "lr" in inspect.signature(make).parameters and "lr" not in getattr(make, "keywords", ())
        made = make(list(self._leaves), **({"lr": local.lr} if takes_rate else {}))
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"optimizer must return a torch.optim.Optimizer, got {type(made).__name__}")
        self._optimizer = made
        self._rates = [group.get("lr", 0.0) * factor for group in self._optimizer.param_groups]

    def take(self, _values: list[torch.Tensor], gradients: list[torch.Tensor], factor: float) -> None:
        """Change the tensors in place by one step."""
        for leaf, gradient in zip(self._leaves, gradients, strict=True):
            leaf.grad = gradient
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self._optimizer.step()


def adjusted(
    local: LocalTraining, gradients: list[torch.Tensor], values: list[torch.Tensor], starts: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return gradients with FedProx's pull to the round's parameters, cut to the bound on their norm.

    Values and gradients may have an axis of clients in front, which `starts` have not: each is cut by itself.
    """
    if local.proximal:
        pairs = zip(gradients, values, starts, strict=True)
        gradients = [slope.add(value - start, alpha=local.proximal) for slope, value, start in pairs]
    if local.max_grad_norm is None:
        return gradients
    rows = len(gradients[0]) if gradients[0].ndim > starts[0].ndim else 1
    squares = torch.stack([slope.reshape(rows, -1).float().square().sum(1) for slope in gradients]).sum(0)
    scale = (local.max_grad_norm / (squares.sqrt() + 1e-6)).clamp(max=1)  # as torch's clip_grad_norm_
    return [(slope.reshape(rows, -1) * scale[:, None]).view_as(slope).to(slope.dtype) for slope in gradients]


def autocast(local: LocalTraining, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which modules compute in the precision that is asked for."""
    is_half = local.precision is Precision.BF16
    return torch.autocast(device.type, torch.bfloat16) if is_half else nullcontext()


def client_generator(round_seed: int, client: int) -> np.random.Generator:
    """Return the generator of a client's order of examples in a round."""
    return np.random.default_rng([round_seed, client])


@dataclass(frozen=True, slots=True, eq=False)
class SequentialTrainer:
    """Trains client after client: for modules that cannot be trained many at once, and as their reference."""

    model: Model
    clients: Clients | UserClients
    local: LocalTraining
    note: str = ""  # why clients are trained one by one

    def __call__(self, params: Params, clients: Sequence[int], round_seed: int) -> Iterator[Params]:
        """Yield each client's update, trained minus given parameters, in the order of `clients`."""
        own = self.model.working_copy()
        for client in clients:
            yield self.train(params, held_by(self.clients, client), client, round_seed, own)

    def train(
        self, params: Params, examples: Examples | Parts, client: int, round_seed: int, own: Module
    ) -> Params:
        """Return the update of one client with these examples, trained in a working copy of the module."""
        generator, count, local = client_generator(round_seed, client), len(examples), self.local
        if isinstance(examples, Parts):
            count = len(examples.items)
            local = replace(local, batch_size=examples.batch_size or local.batch_size)
        schedule = local.schedule(count, generator)
        values, device = self.model.reset(own, params), self.model.device
        starts = [value.detach().clone() for value in values] if local.proximal or local.max_grad_norm else []
        kind = OwnSteps if callable(local.optimizer) else Steps
        steps = kind(local, values, local.round_factor(round_seed))
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            # Of the CPU alone where that is enough: for absent devices torch formats a stack at every call.
            seed = torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed
            seed(int(generator.integers(2**62)))
            for done, line in enumerate(schedule):
                with autocast(local, device):
                    found = loop_gradients(self.model, own, values, examples.take(line[line >= 0]))
                with torch.no_grad():
                    found = adjusted(local, found, values, starts)
                    steps.take(values, found, rate_factor(local.step_schedule, done / len(schedule)))
        trained = dict(zip(self.model.names, (value.detach() for value in values), strict=True))
        return self.model.flatten(trained) - params


def loop_gradients(model: Model, own: Module, values: list[torch.Tensor], batch: Examples) -> list[torch.Tensor]:
    """Return the gradient of a batch's mean loss by a working copy and its trained tensors; may change its buffers."""
    losses = model.losses_of(own, None, batch.inputs, batch.labels)
    loss = model.mean_of(losses, model.paired(batch.inputs, batch.labels)[1])
    return list(torch.autograd.grad(loss, values, materialize_grads=True))


def vmap_gradients(
    model: Model, values: Tensors, inputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None
) -> list[torch.Tensor]:
    """Return the clients' gradients in the order of the parameters, of any module that torch.func.vmap can handle.

    Values, inputs and labels have the client as first axis; weights make the sum of each one's losses a mean. None as
    weights: all rows count, and a loss may reduce them by itself.
    """
    fixed = model.fixed()

    def mean_loss(
        own: Tensors, inputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        losses = model.losses_of(model.training, own | fixed, inputs, labels)
        return losses.mean() if weights is None else (losses * weights).sum()

    axes = (0, 0, 0, None if weights is None else 0)
    with by_products(recurrent=model.has(torch.nn.RNNBase)), OneProductLstm():
        found = torch.func.vmap(torch.func.grad(mean_loss), in_dims=axes)(values, inputs, labels, weights)
    return [found[name] for name in values]


@dataclass(frozen=True, slots=True, eq=False)
class BatchedTrainer:
    """Trains clients all at once by torch.func.vmap."""

    model: Model
    clients: Clients
    local: LocalTraining
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
        first = np.cumsum([0, *(len(own) for own in table)])[:, None]
        starts = self.model.unflatten(params)
        values = {name: value.expand(len(clients), *value.shape).clone() for name, value in starts.items()}
        steps = Steps(self.local, list(values.values()), self.local.round_factor(round_seed))
        for step in range(max(lengths)):
            rows = np.stack([schedule[step] for schedule in schedules[: sum(lengths > step)]])
            real, at = rows >= 0, rows.clip(min=0) + first[: len(rows)]
            own = {name: value[: len(rows)] for name, value in values.items()}
            with autocast(self.local, self.model.device):
                found = self._gradients(own, inputs, labels, at, real)
            current = list(own.values())
            steps.take(current, adjusted(self.local, found, current, list(starts.values())))
        flat = [values[name].reshape(len(clients), -1).float() for name in self.model.names]
        trained = torch.cat(flat, dim=1).cpu().numpy()  # of all at once: a copy from a device waits for it
        trained -= params
        for place in np.argsort(order):
            yield trained[place]

    def _gradients(
        self, values: Tensors, inputs: torch.Tensor, labels: torch.Tensor, at: IntVector, real: NDArray[np.bool_]
    ) -> list[torch.Tensor]:
        """Return the clients' gradients for rows of the table; a loss that reduces by itself gets no others."""

        def find(some: Tensors, at: IntVector, real: NDArray[np.bool_] | None) -> list[torch.Tensor]:
            index, weights = torch.from_numpy(at).to(inputs.device), None
            taken = inputs.index_select(0, index.flatten()).view(*index.shape, *inputs.shape[1:])
            if real is not None:
                weights = torch.from_numpy(real.astype(np.float32)).to(inputs.device)
                if isinstance(loss, CrossEntropy) and self.model.step is None:  # by the targets that count
                    weights = weights * loss.counted(labels[index].flatten(0, 1)).view(index.shape)
                weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
            return vmap_gradients(self.model, some, taken, labels[index], weights)

        counts, loss = real.sum(axis=1), self.model.losses
        if self.by_row:
            return find(values, at, real)
        if len(sizes := np.unique(counts)) == 1:
            return find(values, at[:, : sizes[0]], None)
        found = [torch.empty_like(value) for value in values.values()]
        for size in sizes:
            places = torch.from_numpy(np.flatnonzero(counts == size)).to(inputs.device)
            some = {name: value[places] for name, value in values.items()}
            for whole, part in zip(found, find(some, at[counts == size, :size], None), strict=True):
                whole[places] = part
        return found
