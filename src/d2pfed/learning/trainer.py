"""Local training of a cohort, by the fastest of several methods that give the same updates."""

import copy
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property
from io import BytesIO
from itertools import chain
from typing import Any

import numpy as np
import torch

from d2pfed.learning.dense import ONE_THREAD, Moments, train_dense, widths_of
from d2pfed.learning.local_settings import LocalTraining, Optimizer
from d2pfed.learning.local_training import (
    BatchedTrainer,
    SequentialTrainer,
    client_generator,
    loop_gradients,
    vmap_gradients,
)
from d2pfed.learning.model import CPU, Model, Params
from d2pfed.learning.task import Clients, Examples, StoredClients
from d2pfed.learning.user_clients import LabeledClients, UserClients

_CHUNK_BYTES = 1 << 25  # of the parameters of clients that are trained at once
# Batch norms would see the rows that fill up a batch, and dropouts the random numbers of other clients.
_DROPOUT = torch.nn.modules.dropout._DropoutNd  # noqa: SLF001 - torch's only name for all dropouts
_ONE_BY_ONE = torch.nn.modules.batchnorm._NormBase, _DROPOUT  # noqa: SLF001 - the same for batch norms
_TRIAL_CLIENTS = 24  # about a cohort: the more there are, the more vmap gains
_TRIAL_STEPS = 2
_TRIAL_REPEATS = 3  # the first may load or compile
_WORTH_TELLING = 1.5  # times as long
_REFUSED_NOTE = (
    "Clients are trained one by one, as torch.func.vmap cannot train many at once (it takes no functional dropout, no "
    "values that steer the program and no buffers that change): "
)
_TREES_NOTE = "Clients are trained one by one: for many at once, give one tensor of inputs and one of targets."


class TrainingMethod(StrEnum):
    """How a cohort is trained."""

    COMPILED = "compiled"  # multilayer perceptrons by plain SGD or Adam: one compiled call per client
    VMAP = "vmap"  # many clients at once by torch.func.vmap
    LOOP = "loop"  # client after client by autograd


@dataclass(frozen=True, eq=False)
class LocalTrainer:
    """Trains the clients of a cohort from given parameters.

    A client's update depends on params, its examples, the round's seed and its own number, not on who else is in
    the cohort or is trained with it (float rounding apart). Layers before the first trained one are gone through
    once, not at every step. Without a method it is chosen by the model where it is of a known kind, else by a short
    trial on the first client's examples. Updates by different methods differ in float rounding, so trainers that must
    agree in every bit (worker processes) are made from one on which `choose` was called.
    """

    model: Model
    clients: Clients
    local: LocalTraining
    method: TrainingMethod | None = None
    by_row: bool = True  # whether the loss tells rows apart
    note: str = ""  # why clients are trained one by one, where that is slow

    def __call__(self, params: Params, clients: Sequence[int], round_seed: int) -> Iterator[Params]:
        """Yield each client's update, trained minus given parameters, in the order of `clients`."""
        if self._behind_front is not None:
            yield from self._behind_front(params, clients, round_seed)
            return
        match self._choice(params, clients):
            case TrainingMethod.COMPILED:
                widths, rate = widths_of(self.model), self.local.lr * self.local.round_factor(round_seed)
                is_adam = self.local.optimizer is Optimizer.ADAM
                for client in clients:
                    examples = self.clients.examples(client)
                    inputs = examples.inputs
                    is_plain = inputs.dtype == torch.float32 and inputs.device == CPU
                    rows_fit = widths is not None and is_plain and inputs[0:1].numel() in (0, widths[0])
                    if widths is None or not rows_fit or not examples.has_classes(int(widths[-1])):
                        # Examples that do not fit the model: torch says what is wrong with them.
                        loop = SequentialTrainer(self.model, self.clients, self.local)
                        yield loop.train(params, examples, client, round_seed, self.model.working_copy())
                        continue
                    schedule = self.local.schedule(len(examples), client_generator(round_seed, client))
                    moments = Moments(*np.zeros((2, len(params)), np.float32)) if is_adam else None
                    yield train_dense(params, widths, examples, schedule, rate, moments)
            case TrainingMethod.LOOP:
                yield from SequentialTrainer(self.model, self.clients, self.local)(params, clients, round_seed)
            case TrainingMethod.VMAP:
                batched = BatchedTrainer(self.model, self.clients, self.local, self.by_row)
                size = max(1, _CHUNK_BYTES // (4 * self.model.dimension))
                for start in range(0, len(clients), size):
                    yield from batched(params, clients[start : start + size], round_seed)

    def choose(self, params: Params, clients: Sequence[int]) -> "LocalTrainer":
        """Return this trainer with its method fixed, after a trial on one of these clients if one is needed."""
        own = self._behind_front or self
        chosen = own._choice(params, clients)  # noqa: SLF001 - its own
        note = own._note(params, clients) if chosen is TrainingMethod.LOOP else ""  # noqa: SLF001
        return replace(self, method=chosen, note=note)

    def __getstate__(self) -> dict[str, object]:  # without what was found out
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @cached_property
    def _behind_front(self) -> "LocalTrainer | None":
        """The trainer of the layers from the first trained one on, whose clients hold what the others make."""
        if (parts := self.model.behind_front()) is None:
            return None
        seen = _SeenClients(self.clients, parts[0], self.clients.population)
        return LocalTrainer(parts[1], seen, self.local, self.method, self.by_row)

    def _choice(self, params: Params, clients: Sequence[int]) -> TrainingMethod:
        """Return the method: of a known kind of model by what was measured once and for all, else by one trial."""
        if self.method is not None:
            return self.method
        if self.local.needs_loop:
            return TrainingMethod.LOOP
        widths = widths_of(self.model) if self.model.device == CPU and self.by_row else None
        if widths is not None and self.local.precision is None:
            sgd = self.local.optimizer is Optimizer.SGD and not self.local.momentum
            plain = self.local.is_plain and (sgd or self.local.optimizer is Optimizer.ADAM)
            # The compiled loop's products are cut into pieces that need no threads.
            narrow = self.local.batch_size * widths.max() <= ONE_THREAD // 8
            return TrainingMethod.COMPILED if plain and narrow else TrainingMethod.VMAP
        if self.model.has(*_ONE_BY_ONE):
            return TrainingMethod.LOOP
        if "_trial" not in self.__dict__:
            examples = next((own for own in map(self.clients.examples, clients) if len(own)), None)
            if examples is None:
                return TrainingMethod.LOOP
            self.__dict__["_trial"] = self._faster(params, examples)
        chosen: TrainingMethod = self.__dict__["_trial"][0]
        return chosen

    def _faster(self, params: Params, examples: Examples) -> tuple[TrainingMethod, str]:
        """Return loop or vmap, by a few steps of a few clients; the loop where vmap fails, and why.

        The loop goes first, so a mistake in the module is raised as itself; what fails in vmap alone is what vmap
        cannot do (functional dropout, values that steer the program, buffers that are written).
        """
        model, batch = self.model, examples.take(np.arange(min(2, len(examples))))
        own = model.working_copy()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            wanted = loop_gradients(model, own, model.reset(own, params), batch)
        values = model.unflatten(params)
        pair = {name: value.expand(2, *value.shape).clone() for name, value in values.items()}
        twice = torch.stack([batch.inputs] * 2), torch.stack([batch.labels] * 2)
        weights = torch.full((2, len(batch)), 1 / len(batch), device=model.device) if self.by_row else None
        try:
            # Twice: a module may count its calls.
            found = [vmap_gradients(model, pair, *twice, weights) for _ in range(2)]
        except RuntimeError as error:
            return TrainingMethod.LOOP, _REFUSED_NOTE + str(error).strip().splitlines()[0][:160]
        for two, gradient in zip(chain(*found), wanted * 2, strict=True):
            if not torch.allclose(two, gradient.expand_as(two), rtol=1e-3, atol=1e-5):
                return TrainingMethod.LOOP, _REFUSED_NOTE + "it finds other gradients"
        methods = TrainingMethod.VMAP, TrainingMethod.LOOP
        seconds = {method: self._seconds(params, examples, method) for method in methods}
        return min(methods, key=seconds.__getitem__), ""

    def _seconds(self, params: Params, examples: Examples, method: TrainingMethod | None) -> float:
        """Return the least time of a few steps of a few clients that hold these examples."""
        few = np.arange(min(len(examples), _TRIAL_STEPS * self.local.batch_size))
        clients = StoredClients(examples, (few,) * _TRIAL_CLIENTS)
        trial = replace(self, clients=clients, local=replace(self.local, epochs=1), method=method)
        # Time of the processor, where it does all the work: what else runs on a machine should not choose.
        taken, clock = [], time.process_time if self.model.device == CPU else time.perf_counter
        for _ in range(_TRIAL_REPEATS):
            start = clock()
            list(trial(params, range(_TRIAL_CLIENTS), 0))
            taken.append(clock() - start)
        return min(taken)

    def _note(self, params: Params, clients: Sequence[int]) -> str:
        """Say why clients are trained one by one where that is slow, by what factor, and what to do about it."""
        if not self.model.has(_DROPOUT) and not self.local.needs_loop:
            return str(self.__dict__.get("_trial", (None, ""))[1])
        module, cause = copy.deepcopy(self.model.module), "dropout"
        for name, layer in list(module.named_modules()):
            owner, _, last = name.rpartition(".")
            if isinstance(layer, _DROPOUT) and last:
                setattr(module.get_submodule(owner), last, torch.nn.Identity())
        local = self.local
        if local.needs_loop:
            cause = "an optimizer of your own" if callable(local.optimizer) else "step_schedule"
            optimizer = Optimizer.SGD if callable(local.optimizer) else local.optimizer
            local = replace(local, optimizer=optimizer, step_schedule=None)
        without = replace(self, model=replace(self.model, module=module), local=local)
        examples = next((own for own in map(self.clients.examples, clients) if len(own)), None)
        if examples is None or without.model.has(*_ONE_BY_ONE):
            return ""
        method = without._choice(params, clients)  # noqa: SLF001 - its own
        slow = self._seconds(params, examples, TrainingMethod.LOOP)
        factor = slow / without._seconds(params, examples, method)  # noqa: SLF001
        told = f"Clients are trained one by one: that takes {factor:.1f} times as long as without {cause}."
        return told if factor > _WORTH_TELLING else ""


@dataclass(frozen=True, slots=True, eq=False)
class _SeenClients:
    """Clients whose examples went through the untrained layers of a model."""

    clients: Clients
    front: torch.nn.Module
    population: int

    def examples(self, client: int) -> Examples:
        """Return what the trained layers see of one client's examples."""
        own = self.clients.examples(client)
        with torch.no_grad():
            return Examples(self.front(own.inputs), own.labels)


def trainer_for(model: Model, clients: UserClients, local: LocalTraining) -> LocalTrainer | SequentialTrainer:
    """Return the fastest trainer for these clients, one of which is trained for a trial.

    It trains many at once only where each holds one tensor of inputs and one of labels.
    """
    client, found = clients.first()
    if not isinstance(found, Examples) or not found.are_tensors:
        return SequentialTrainer(model, clients, local, _TREES_NOTE)
    few = found.take(np.arange(min(2, len(found))))
    values = model.unflatten(model.initial()) | model.fixed()
    by_row = model.losses_of(model.training, values, few.inputs, few.labels).shape == (len(few),)
    alike = LabeledClients(clients, found.between(0, 0), clients.population)
    return LocalTrainer(model, alike, local, by_row=by_row).choose(model.initial(), (client,))


@contextmanager
def one_thread(model: Model) -> Iterator[None]:
    """Let torch use one thread for a model on the CPU: small products are faster so, and cores stay free."""
    before = torch.get_num_threads()
    if model.device == CPU:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_one_thread() -> None:
    """Let this process have one thread: for programs that start a worker process per core."""
    os.environ.setdefault("NUMEXPR_NUM_THREADS", "1")  # it starts threads as pandas loads it
    torch.set_num_threads(1)


def packed(value: object) -> bytes:
    """Return the bytes that `unpacked` takes in another process of this program; each storage is copied once."""
    whole = BytesIO()
    torch.save(value, whole)  # pickled, each tensor would be an open file, of which a process may have few
    return whole.getvalue()


def unpacked(data: bytes) -> Any:  # noqa: ANN401 - whatever was packed
    """Return what was packed; for bytes of this program itself."""
    return torch.load(BytesIO(data), weights_only=False)
