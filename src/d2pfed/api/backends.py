"""Where `fit` trains its clients, which of them are tried before a charge, and what becomes of one that fails later."""

import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from d2pfed import learning
from d2pfed.accounting import Unit
from d2pfed.api.settings import BackendName, RunOptions
from d2pfed.errors import ConfigError, needs_extra
from d2pfed.noise.codec import FloatVector
from d2pfed.simulation import Backend, SerialBackend, Silos, warm_up
from d2pfed.simulation.process_backend import ProcessBackend, start_workers
from d2pfed.training import shuffle_seed

if TYPE_CHECKING:
    from d2pfed.api.job import Job

WORTH_SECONDS = 20.0  # of local training: below it, starting workers costs more than it gains
MOST_SENT_BYTES = 1 << 28  # to one worker
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
        except (Exception, SystemExit):  # noqa: BLE001 - whatever a user's loss or data raise
            for client in clients[done:]:  # several may have been trained together
                try:
                    yield from list(self.trainer(params, (client,), seed))
                except (Exception, SystemExit):  # noqa: BLE001 - as above
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


def start_backend(
    options: RunOptions,
    trainer: UserTrainer,
    trial: tuple[FloatVector, int],
    *,
    seconds: float,
    is_ours: bool = False,
) -> tuple[Backend, str]:
    """Start what trains clients for about this many seconds; return it and a line that says why it is that one.

    `trial` has the parameters and the client that workers are tried with. `is_ours`: model and clients are this
    package's own, so this process may be forked. Workers that are asked for by name and cannot be had are refused.
    """
    name = options.backend
    here = SerialBackend(TolerantTrainer(trainer))
    count = len(os.sched_getaffinity(0)) if options.workers is None else options.workers
    if name is BackendName.RAY:
        with needs_extra("ray", "ray"):
            from d2pfed.simulation.ray_backend import RayBackend  # noqa: PLC0415 - an extra
        ray = RayBackend(TolerantTrainer(trainer), count, options.address)
        return ray, f"Clients are trained by {count} workers of Ray."
    if name is BackendName.IN_PROCESS:
        return here, "Clients are trained in this process, by one thread."
    if name is BackendName.AUTO and (seconds < WORTH_SECONDS or count < 2):
        return here, "Clients are trained in this process, by one thread: there is little to do."
    if is_ours:
        forked, why = start_workers(TolerantTrainer(trainer), options.workers, learning.use_one_thread)
        return forked, why or f"Clients are trained by {count} worker processes."
    if reason := _unsafe(trainer):
        if name is BackendName.PROCESSES:
            raise ConfigError(f"worker processes cannot be used: {reason}")
        return here, f"Clients are trained in this process, by one thread: {reason}."
    backend = None
    with suppress(ConfigError, OSError):  # no worker is left, or one ended before it had all
        backend = ProcessBackend(TolerantTrainer(trainer), count, "forkserver", learning.use_one_thread)
        # One is tried before anything is charged: one that cannot load what it was sent would drop out.
        if next(backend.train(trial[0], (trial[1],), 0)) is not None:
            return backend, f"Clients are trained by {count} worker processes."
    if backend is not None:
        backend.close()
    if name is BackendName.PROCESSES:
        raise ConfigError("worker processes cannot be used: they ended as they began")
    return here, "Clients are trained in this process, by one thread: worker processes ended as they began."


def backend_for(job: "Job", options: RunOptions, path: Path) -> tuple[Backend, str]:
    """Start what trains the clients or silos of a job, tried before anything is charged, and say how it does."""
    params, plan, name = job.model.initial(), job.plan, options.backend
    if plan is not None and plan.unit is Unit.RECORD:
        if name in (BackendName.PROCESSES, BackendName.RAY):
            raise ConfigError("worker processes cannot be used with the unit record: its silos share chunks")
        if isinstance(job.clients, learning.UserClients):
            try_silos(job.model, params, job.clients)
        with explained("gradients cannot be taken record by record"):
            tried = learning.RecordTrainer(job.model, job.clients, job.groups).tried(params, plan.divisor)
        how = f"{tried.chunk} at once" if tried.chunk > 1 else "one by one, as their place in a chunk matters"
        return Silos(tried), f"Records are processed {how}, each clipped by itself."
    with explained("lr_schedule cannot be used"):
        for done in range(job.settings.rounds):
            job.local.round_factor(shuffle_seed("", done))
    trainer: UserTrainer
    client, others, is_ours, seconds = 0, [], not isinstance(job.clients, learning.UserClients), math.inf
    if isinstance(job.clients, learning.UserClients):
        client, *others = clients_to_try(job.clients)
    if job.whole is not None:
        trainer = personal_trainer(job, path)
    elif isinstance(job.clients, learning.UserClients):
        with explained(f"client {client} cannot be trained"):
            trainer = learning.trainer_for(job.model, job.clients, job.local)
    else:
        trainer = job.trainer().choose(params, range(job.clients.population))
    note = trainer.note
    if job.weights is not None:
        trainer = WeightedTrainer(trainer, job.weights)
    if is_ours and plan is not None and name is not BackendName.AUTO:
        warm_up(plan, trainer, params)
    else:
        for _ in range(2):  # the first may compile
            start = perf_counter()
            with explained(f"client {client} cannot be trained"):
                list(trainer(params, (client,), 0))
            seconds = min(seconds, perf_counter() - start)
        seconds *= job.sampling.cohort_size * job.settings.rounds
        for other in others:
            with explained(f"client {other} cannot be trained"):
                list(trainer(params, (other,), 0))
    backend, how = start_backend(options, trainer, (params, client), seconds=seconds, is_ours=is_ours)
    return backend, f"{how} {note}" if note else how


def personal_trainer(job: "Job", path: Path) -> learning.PersonalTrainer:
    """Return what trains a run's clients where each keeps layers of its own."""
    if job.whole is None:
        raise ValueError("the clients of this run keep nothing")
    return learning.PersonalTrainer(job.whole, job.model, job.clients, job.local, path.resolve() / "personal")


def _unsafe(trainer: UserTrainer) -> str:
    """Return why worker processes cannot be used; empty if they can."""
    if trainer.model.device.type != "cpu":
        return f"device {trainer.model.device} is not shared"
    try:
        sent = learning.packed(trainer)
    except Exception as error:  # noqa: BLE001 - whatever a user's objects raise
        return f"model, loss or clients cannot be sent to another process ({first_line(error)})"
    if len(sent) > MOST_SENT_BYTES:
        return f"model and clients have {len(sent) >> 20:,} MB; a function of a client's number would load its own"
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        return "what is defined in a notebook or shell cannot be found there" if b"__main__" in sent else ""
    try:
        text = Path(script).read_text("utf-8", errors="replace")
    except OSError:
        return "the script comes from standard input, and workers import it from a file"
    if re.search(r"""^if\s+__name__\s*==\s*["']__main__["']""", text, re.MULTILINE) is None:
        return f'{Path(script).name} has no `if __name__ == "__main__":`, and workers import it'
    return ""
