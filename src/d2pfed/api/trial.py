"""Which clients and silos are tried before anything is charged, and what becomes of one that fails afterwards."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from d2pfed import learning
from d2pfed.errors import ConfigError
from d2pfed.noise.codec import FloatVector

LOADED = 8  # clients whose data are loaded to be looked at, where they are no tensors or arrays
TRIED = 32  # kinds of data that are tried

# What a user's module, loss or data may raise.
MISTAKES = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Say in one line what a user's own function has raised; an error of ours stays as it is."""
    try:
        yield
    except ConfigError:
        raise
    except MISTAKES as error:
        raise ConfigError(f"{what}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Return what an error says, in a line."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


@dataclass(frozen=True, slots=True)
class WeightedTrainer:
    """Local training whose updates have their client's weight as last number."""

    trainer: learning.LocalTrainer | learning.SequentialTrainer | learning.PersonalTrainer
    weights: tuple[float, ...] = field(repr=False)

    @property
    def model(self) -> learning.Model:
        """What is trained."""
        return self.trainer.model

    def __call__(self, params: FloatVector, clients: Sequence[int], round_seed: int) -> Iterator[FloatVector]:
        """Yield each client's update and weight, in the order of `clients`."""
        for client, update in zip(clients, self.trainer(params, clients, round_seed), strict=True):
            yield np.append(update, np.float32(self.weights[client]))


UserTrainer = learning.LocalTrainer | learning.SequentialTrainer | learning.PersonalTrainer | WeightedTrainer


@dataclass(frozen=True, slots=True)
class TolerantTrainer:
    """A trainer of charged clients: one that cannot be trained has an update of NaN, which counts as zero.

    An error would tell about the client's data. A run in the clear counts such updates.
    """

    trainer: UserTrainer

    def __call__(self, params: FloatVector, clients: Sequence[int], seed: int) -> Iterator[FloatVector]:
        """Yield the clients' updates."""
        done = 0
        try:
            for update in self.trainer(params, clients, seed):
                yield update
                done += 1
        except (ConfigError, *MISTAKES):
            for client in clients[done:]:  # several may have been trained together
                try:
                    yield from list(self.trainer(params, (client,), seed))
                except (ConfigError, *MISTAKES):
                    size = len(params) + isinstance(self.trainer, WeightedTrainer)
                    yield np.full(size, np.nan, np.float32)

    def __reduce__(self) -> tuple[object, ...]:
        return _tolerant, (learning.packed(self.trainer),)


def _tolerant(data: bytes) -> TolerantTrainer:
    return TolerantTrainer(learning.unpacked(data))


def clients_to_try(clients: learning.UserClients) -> list[int]:
    """Return the clients to try before anything is charged; the first one holds data.

    Of data sets in a list or dictionary there is one of each shape and type, the rarest kinds first, and those with the
    least and the greatest label. All pairs of tensors or arrays are looked at, of other data sets the first few. Of a
    function's clients there is one: they may take long to load.
    """
    first, _ = clients.first()
    held = getattr(clients.load, "__self__", None)
    if not isinstance(held, (list, tuple, dict)):
        return [first]
    kinds, labels = dict[object, list[int]](), list[tuple[float, int]]()
    for client, name in enumerate(clients.names):
        found = held[name]
        if isinstance(found, (list, tuple)) and len(found) == 2 and all(map(_is_array, found)):
            inputs, targets = found
        elif client < LOADED:
            rows = learning.held_by(clients, client)
            inputs, targets = (rows.inputs, rows.labels) if isinstance(rows, learning.Examples) else (None, None)
        else:
            continue
        if not (_is_array(inputs) and _is_array(targets)):  # trees differ in more than a shape
            kinds.setdefault("trees", []).append(client)
        elif inputs.ndim and len(inputs):
            alike = targets.ndim and len(inputs) == len(targets)
            kind = (alike, *((type(each), each.dtype, tuple(each.shape[1:])) for each in (inputs, targets)))
            kinds.setdefault(kind, []).append(client)
            if _are_classes(targets):
                labels += [(int(targets.min()), client), (int(targets.max()), client)]
    rarest = sorted(kinds.values(), key=len)[:TRIED]
    extremes = [min(labels)[1], max(labels)[1]] if labels else []
    return list(dict.fromkeys([first, *(same[0] for same in rarest), *extremes]))


def try_silos(model: learning.Model, params: FloatVector, silos: learning.UserClients) -> None:
    """Refuse a silo whose rows module and loss do not take: afterwards each such record would count as zero.

    Of the silos of every kind some rows are tried, and those with the least and the greatest label.
    """
    for silo in clients_to_try(silos):
        with explained(f"client {silo} cannot be trained"):
            rows = silos.examples(silo)
            chosen = [*range(min(len(rows), TRIED))]
            if _are_classes(rows.labels):
                chosen += [int(rows.labels.argmin()), int(rows.labels.argmax())]
            learning.measure(model, params, [rows.take(np.array(chosen))], {})


def _are_classes(targets: Any) -> bool:  # noqa: ANN401 - of torch or numpy, or a tree of them
    return _is_array(targets) and targets.ndim == 1 and len(targets) > 0 and "int" in str(targets.dtype)


def _is_array(value: object) -> bool:
    return hasattr(value, "ndim") and hasattr(value, "dtype")  # of torch or numpy
