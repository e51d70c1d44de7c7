"""Local training of a cohort, by the fastest of several methods that give the same updates."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property

import numpy as np
import torch

from d2pfed.errors import ConfigError
from d2pfed.learning.batched_training import Batch, Chunk, dense_gradients, vmap_gradients
from d2pfed.learning.convolution import ConvolutionalNetwork
from d2pfed.learning.dense import can_train, is_narrow, train_dense, widths_of
from d2pfed.learning.dense_adam import Moments, train_dense_adam
from d2pfed.learning.local_training import LocalTraining, Optimizer
from d2pfed.learning.model import Model, Params
from d2pfed.learning.sequential import SequentialTrainer, client_generator, loop_gradients
from d2pfed.learning.task import Clients, Examples, IntVector

# Bytes of parameters in a chunk. By hand, small ones that stay in the cache are fastest; vmap has a cost per step.
_CACHE_BYTES = 1 << 22
_CHUNK_BYTES = 1 << 25
# Batch norms would see the rows that fill up a batch, and dropouts the random numbers of other clients.
_ONE_BY_ONE = (
    torch.nn.modules.batchnorm._NormBase,  # noqa: SLF001 - torch's only name for all batch norms
    torch.nn.modules.dropout._DropoutNd,  # noqa: SLF001 - torch's only name for all dropouts
    torch.nn.RNNBase,
)
_TRIAL_CLIENTS = 4
_TRIAL_STEPS = 2
_TRIAL_REPEATS = 3


class TrainingMethod(StrEnum):
    """How a cohort is trained."""

    COMPILED = "compiled"  # multilayer perceptrons by plain SGD or Adam: one compiled call per client
    BATCHED = "batched"  # multilayer perceptrons by other optimizers: gradients of many clients by hand
    CONVOLUTION = "convolution"  # plain convolutional networks by hand, client after client
    VMAP = "vmap"  # many clients at once by torch.func.vmap
    LOOP = "loop"  # client after client by autograd


@dataclass(frozen=True, eq=False)
class LocalTrainer:
    """Trains the clients of a cohort from given parameters.

    A client's update depends on params, its examples, the round's seed and its own number, not on who else is in
    the cohort or in its chunk (float rounding apart). Layers before the first trained one are gone through once,
    not at every step. A pickled trainer holds its arguments only; give it `ReloadedClients` to send no data either.

    Attributes:
        model: what is trained, and its loss.
        clients: who holds which examples.
        local: how a client trains.
        chunk: how many clients are trained at once where that is possible; None picks what bounds memory.
        method: how the cohort is trained; None chooses by the model where it is of a known kind, else by a short
            trial on the first client's examples. Updates by different methods differ in float rounding, so trainers
            that must agree in every bit (worker processes) are made from one on which `choose` was called.
    """

    model: Model
    clients: Clients
    local: LocalTraining
    chunk: int | None = None
    method: TrainingMethod | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ConfigError(f"chunk must be at least 1, got {self.chunk}")

    def __call__(self, params: Params, clients: Sequence[int], round_seed: int) -> Iterator[Params]:
        """Yield each client's update, trained minus given parameters, in the order of `clients`."""
        if self._behind_front is not None:
            yield from self._behind_front(params, clients, round_seed)
            return
        method = self._choice(params, clients)
        if method in (TrainingMethod.COMPILED, TrainingMethod.CONVOLUTION):
            for client in clients:
                yield self._train_by_hand(params, client, round_seed)
        elif method in (TrainingMethod.BATCHED, TrainingMethod.VMAP):
            yield from self._train_together(params, clients, round_seed, method)
        else:
            yield from self._sequential(params, clients, round_seed)

    def choose(self, params: Params, clients: Sequence[int]) -> "LocalTrainer":
        """Return this trainer with its method fixed, after a trial on one of these clients if one is needed."""
        if self._behind_front is not None:
            return replace(self, method=self._behind_front.choose(params, clients).method)
        return replace(self, method=self._choice(params, clients))

    def __getstate__(self) -> dict[str, object]:
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @cached_property
    def _behind_front(self) -> "LocalTrainer | None":
        """The trainer of the layers from the first trained one on, whose clients hold what the others make."""
        if (parts := self.model.behind_front()) is None:
            return None
        front, rest = parts
        return LocalTrainer(rest, _Seen(self.clients, front), self.local, self.chunk, self.method)

    @cached_property
    def _known_method(self) -> TrainingMethod | None:
        """The method for a model of a known kind: measured once and for all, not on each machine."""
        if self._widths is not None:
            sgd = self.local.optimizer is Optimizer.SGD and not self.local.momentum
            plain = sgd or self.local.optimizer is Optimizer.ADAM
            narrow = is_narrow(self._widths, self.local.batch_size)
            return TrainingMethod.COMPILED if plain and narrow else TrainingMethod.BATCHED
        if self._network is not None:
            return TrainingMethod.CONVOLUTION
        return TrainingMethod.LOOP if self.model.has(*_ONE_BY_ONE) else None

    @cached_property
    def _network(self) -> ConvolutionalNetwork | None:
        return ConvolutionalNetwork.of(self.model)

    @cached_property
    def _widths(self) -> IntVector | None:
        return widths_of(self.model)

    @property
    def _sequential(self) -> SequentialTrainer:
        return SequentialTrainer(self.model, self.clients, self.local)

    def _train_by_hand(self, params: Params, client: int, round_seed: int) -> Params:
        examples, generator = self.clients.examples(client), client_generator(round_seed, client)
        if self._widths is not None and can_train(examples, self._widths):
            schedule = self.local.schedule(len(examples), generator)
            if self.local.optimizer is Optimizer.ADAM:
                fresh = Moments.fresh(len(params))
                return train_dense_adam(params, self._widths, examples, schedule, self.local.lr, fresh)
            return train_dense(params, self._widths, examples, schedule, self.local.lr)
        if self._network is not None and self._network.can_train(examples):
            schedule = self.local.schedule(len(examples), generator)
            return self._network.train(params, examples, schedule, self.local)
        # Examples that do not fit the model: torch says what is wrong with them.
        return self._sequential.train(params, examples, generator)

    def _train_together(
        self, params: Params, clients: Sequence[int], round_seed: int, method: TrainingMethod
    ) -> Iterator[Params]:
        budget = _CACHE_BYTES if method is TrainingMethod.BATCHED else _CHUNK_BYTES
        size = self.chunk or max(1, budget // (4 * self.model.dimension))
        for start in range(0, len(clients), size):
            chunk = Chunk.gather(self.clients, self.local, clients[start : start + size], round_seed)
            find = dense_gradients if method is TrainingMethod.BATCHED else vmap_gradients(self.model)
            yield from chunk.train(self.model, params, self.local, find)

    def _choice(self, params: Params, clients: Sequence[int]) -> TrainingMethod:
        return self.method or self._known_method or self._tried(params, clients)

    def _tried(self, params: Params, clients: Sequence[int]) -> TrainingMethod:
        """Return the faster of loop and vmap; the first trial counts, and none is made without examples."""
        if (found := self.__dict__.get("_trial")) is not None:
            return TrainingMethod(found)
        examples = next((own for own in map(self.clients.examples, clients) if len(own)), None)
        if examples is None:
            return TrainingMethod.LOOP
        method = (
            _try(self, params, examples) if _vmap_agrees(self.model, params, examples) else TrainingMethod.LOOP
        )
        self.__dict__["_trial"] = method
        return method


def _vmap_agrees(model: Model, params: Params, examples: Examples) -> bool:
    """Tell whether vmap finds the loop's gradient of a few examples.

    The loop goes first, so a mistake in the module is raised as itself; what fails in vmap alone is what vmap cannot
    do (functional dropout, values that steer the program, buffers that are written).
    """
    batch = examples.take(np.arange(min(2, len(examples))))
    values = model.unflatten(params)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wanted = loop_gradients(model, values, model.fixed(), batch)
    pair = {name: value.detach().expand(2, *value.shape).clone() for name, value in values.items()}
    weights = torch.full((2, len(batch)), 1 / len(batch))
    twice = Batch(torch.stack([batch.inputs] * 2), torch.stack([batch.labels] * 2), weights)
    try:
        found = vmap_gradients(model)(pair, twice)
    except RuntimeError:
        return False
    return all(
        torch.allclose(own, gradient.expand_as(own), rtol=1e-3, atol=1e-5)
        for own, gradient in zip(found, wanted, strict=True)
    )


def _try(trainer: LocalTrainer, params: Params, examples: Examples) -> TrainingMethod:
    """Measure a few steps of a few clients by each method."""
    local = replace(trainer.local, epochs=1)
    few = examples.take(np.arange(min(len(examples), _TRIAL_STEPS * local.batch_size)))
    seconds = {}
    for method in (TrainingMethod.VMAP, TrainingMethod.LOOP):
        trial = LocalTrainer(trainer.model, _Same(few), local, trainer.chunk, method)
        taken = []
        for _ in range(_TRIAL_REPEATS):
            start = time.perf_counter()
            list(trial(params, range(_TRIAL_CLIENTS), 0))
            taken.append(time.perf_counter() - start)
        seconds[method] = min(taken)
    return min(seconds, key=seconds.__getitem__)


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """Clients that all hold the same examples."""

    table: Examples
    population: int = _TRIAL_CLIENTS

    def examples(self, client: int) -> Examples:  # noqa: ARG002 - they are all alike
        """Return what every client holds."""
        return self.table


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


def use_one_thread() -> None:
    """Let this process have one thread: for programs that start a worker process per core."""
    os.environ.setdefault("NUMEXPR_NUM_THREADS", "1")  # it starts threads as pandas loads it
    torch.set_num_threads(1)
