"""What a client does with its examples: a few epochs of SGD, Adam or RMSprop, in a seeded order."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray

from d2pfed.errors import ConfigError, shown
from d2pfed.fields import TRAINING, about, check_types, documented

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

    def schedule(self, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
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
        for at, (value, gradient) in enumerate(zip(values, gradients, strict=True)):
            memory = [slot[at][: len(value)] if value.ndim else slot[at] for slot in self._memory]
            if self._local.optimizer is Optimizer.ADAM:
                self._adam(value, gradient, *memory)
            else:
                value.sub_(self._direction(gradient, memory), alpha=self._local.lr)

    def _direction(self, gradient: torch.Tensor, memory: list[torch.Tensor]) -> torch.Tensor:
        if self._local.optimizer is Optimizer.SGD:
            return memory[0].mul_(self._local.momentum).add_(gradient) if memory else gradient
        memory[0].mul_(_RMSPROP_DECAY).addcmul_(gradient, gradient, value=1 - _RMSPROP_DECAY)
        return gradient / memory[0].sqrt().add_(ADAM_EPSILON)

    def _adam(self, value: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor) -> None:
        """Take Adam's step with as few passes over memory as there are."""
        first, second = ADAM_DECAYS
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = square.sqrt().div_(math.sqrt(1 - second**self._taken)).add_(ADAM_EPSILON)
        value.addcdiv_(mean, scale, value=-self._local.lr / (1 - first**self._taken))
