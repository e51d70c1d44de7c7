"""How a client trains: optimizer, learning rate and its schedules, batches, and what is added to the loss."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch

from d2pfed.errors import ConfigError
from d2pfed.fields import TRAINING, check_between, check_range, check_types, documented, setting
from d2pfed.numerics.canonical import OMITTED_IF_DEFAULT
from d2pfed.numerics.ring import IntVector
from d2pfed.training import MOST_RATE, round_of

MOST_EPOCHS, MOST_BATCH = 10_000, 100_000

MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
Rate = Callable[[float], float]  # from the share of rounds or steps that is done to a factor of the learning rate


class Optimizer(StrEnum):
    """How gradients become steps; each is torch.optim's of that name with its defaults."""

    SGD = "sgd"
    ADAM = "adam"
    ADAMW = "adamw"
    RMSPROP = "rmsprop"
    OWN = "own"  # in the settings of a run: a user's function


class Schedule(StrEnum):
    """How a learning rate falls."""

    LINEAR = "linear"
    COSINE = "cosine"
    OWN = "own"  # in the settings of a run: a user's function


class Precision(StrEnum):
    """In which numbers modules compute in training; parameters are added up in float32 in any case."""

    FLOAT32 = "float32"
    BF16 = "bf16"  # torch.autocast


def _later(text: str, unset: str) -> Any:  # noqa: ANN401 - of its field
    return setting(None, text, TRAINING, unset=unset, also=OMITTED_IF_DEFAULT)


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining:
    """How a client trains: fresh optimizer each round, `epochs` passes over shuffled batches."""

    optimizer: Optimizer | MakeOptimizer = setting(Optimizer.SGD, "The clients' optimizer.", TRAINING)
    lr: float = setting(0.1, "The clients' learning rate.", TRAINING)
    momentum: float = setting(0.0, "The clients' momentum, for sgd.", TRAINING)
    epochs: int = setting(1, "The clients' passes over their data in a round.", TRAINING)
    batch_size: int = setting(10, "The clients' batch size.", TRAINING)
    weight_decay: float | None = _later("The clients' weight decay.", "0, for adamw 0.01")
    lr_schedule: Schedule | Rate | None = _later(
        "How the clients' learning rate falls over the rounds.", "it does not"
    )
    step_schedule: Schedule | Rate | None = _later(
        "How the learning rate falls within a client's steps of a round.", "it does not"
    )
    max_grad_norm: float | None = _later("Bound on the norm of a batch's gradient in training.", "none")
    proximal: float | None = _later("FedProx's mu: the pull towards the round's model.", "0")
    precision: Precision | None = _later(
        "In which numbers clients train: float32, or bf16 by autocast.", "float32"
    )
    rounds: int | None = _later("The rounds that lr_schedule is over.", "none")

    def __post_init__(self) -> None:
        check_types(self)
        if self.precision is Precision.FLOAT32:
            object.__setattr__(self, "precision", None)
        if not 0 < self.lr <= MOST_RATE:
            raise ConfigError(f"lr must be positive and at most {MOST_RATE:g}, got {self.lr}")
        check_between("momentum", self.momentum, 0, 1, "[)")
        if self.momentum and self.optimizer is not Optimizer.SGD:
            raise ConfigError(f"momentum is sgd's, got {self.momentum} with {self.optimizer}")
        check_range("epochs", self.epochs, 1, MOST_EPOCHS)
        check_range("batch_size", self.batch_size, 1, MOST_BATCH)
        for name in ("weight_decay", "max_grad_norm", "proximal"):
            value = getattr(self, name)
            if value is not None and not (0 <= value <= MOST_RATE and (value or name != "max_grad_norm")):
                raise ConfigError(f"{name} must be positive and at most {MOST_RATE:g}, got {value}")
        if self.weight_decay is not None and callable(self.optimizer):
            raise ConfigError("weight_decay is of a named optimizer: an optimizer of your own has its own")

    @property
    def is_plain(self) -> bool:
        """Whether nothing but SGD, Adam or RMSprop at one rate moves the parameters."""
        more = self.weight_decay, self.step_schedule, self.max_grad_norm, self.proximal, self.precision
        return all(each is None for each in more) and self.optimizer not in (Optimizer.ADAMW, Optimizer.OWN)

    @property
    def needs_loop(self) -> bool:
        """Whether clients must be trained one after the other: they may have different numbers of steps."""
        return callable(self.optimizer) or self.step_schedule is not None

    def described(self) -> "LocalTraining":
        """Return the same with names in place of functions, as a run's settings have it."""
        kinds = {"optimizer": Optimizer, "lr_schedule": Schedule, "step_schedule": Schedule}
        named = {name: kind("own") for name, kind in kinds.items() if callable(getattr(self, name))}
        return replace(self, **named)  # type: ignore[arg-type]  # members of their enums

    def round_factor(self, round_seed: int) -> float:
        """Return the factor of the learning rate in the round of this seed."""
        if self.rounds is None:
            return 1.0
        return rate_factor(self.lr_schedule, min(round_of(round_seed) / self.rounds, 1.0))

    def schedule(self, count: int, generator: np.random.Generator) -> IntVector:
        """Return which of `count` rows each step uses, one line a step; -1 fills up the last batch of an epoch."""
        batches = -(-count // self.batch_size)
        lines = np.full((self.epochs, batches * self.batch_size), -1)
        for epoch in lines:
            epoch[:count] = generator.permutation(count)
        return lines.reshape(self.epochs * batches, self.batch_size)


def rate_factor(schedule: Schedule | Rate | None, done: float) -> float:
    """Return the factor of a learning rate once this share of the rounds or steps is done."""
    match schedule:
        case None:
            return 1.0
        case Schedule.LINEAR:
            return 1 - done
        case Schedule.COSINE:
            return (1 + math.cos(math.pi * done)) / 2
        case Schedule.OWN:
            raise ConfigError("a schedule of the user's own must be given again: settings have its name only")
    found = float(schedule(done))
    if not 0 <= found < math.inf:
        raise ConfigError(f"a schedule must return a factor that is finite and at least 0, got {found}")
    return found
