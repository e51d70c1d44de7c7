"""Where `fit` trains its clients: worker processes where they are safe and worth it, else this process."""

import math
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from d2pfed.accounting import Unit
from d2pfed.api import trial
from d2pfed.api.settings import BackendName, RunOptions
from d2pfed.api.trial import TolerantTrainer, try_silos
from d2pfed.errors import ConfigError, needs_extra
from d2pfed.learning import PersonalTrainer, RecordTrainer, UserClients, packed, trainer_for, use_one_thread
from d2pfed.noise.codec import FloatVector
from d2pfed.simulation import Backend, SerialBackend, Silos, warm_up
from d2pfed.simulation.process_backend import ProcessBackend, start_workers

if TYPE_CHECKING:
    from d2pfed.api.job import Job

WORTH_SECONDS = 20.0  # of local training: below it, starting workers costs more than it gains
MOST_SENT_BYTES = 1 << 28  # to one worker


def start_backend(
    options: RunOptions,
    trainer: trial.UserTrainer,
    trial: tuple[FloatVector, int],
    *,
    seconds: float,
    is_ours: bool = False,
) -> tuple[Backend, str]:
    """Start what trains clients for about so many seconds; return it and a line that says why it is that one.

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
        forked, why = start_workers(TolerantTrainer(trainer), options.workers, use_one_thread)
        return forked, why or f"Clients are trained by {count} worker processes."
    if reason := _unsafe(trainer):
        if name is BackendName.PROCESSES:
            raise ConfigError(f"worker processes cannot be used: {reason}")
        return here, f"Clients are trained in this process, by one thread: {reason}."
    backend = None
    with suppress(ConfigError, OSError):  # no worker is left, or one ended before it had all
        backend = ProcessBackend(TolerantTrainer(trainer), count, "forkserver", use_one_thread)
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
        if isinstance(job.clients, UserClients):
            try_silos(job.model, params, job.clients)
        with trial.explained("gradients cannot be taken record by record"):
            tried = RecordTrainer(job.model, job.clients, job.groups).tried(params, plan.divisor)
        how = (
            f"{tried.chunk} at once" if tried.chunk > 1 else "one by one, as they depend on their place in a chunk"
        )
        return Silos(tried), f"Records are processed {how}, each clipped by itself."
    trainer: trial.UserTrainer
    client, others, is_ours, seconds = 0, [], not isinstance(job.clients, UserClients), math.inf
    if isinstance(job.clients, UserClients):
        client, *others = trial.clients_to_try(job.clients)
    if job.whole is not None:
        trainer = personal_trainer(job, path)
    elif isinstance(job.clients, UserClients):
        with trial.explained(f"client {client} cannot be trained"):
            trainer = trainer_for(job.model, job.clients, job.local)
    else:
        trainer = job.trainer().choose(params, range(job.clients.population))
    note = trainer.note
    if job.weights is not None:
        trainer = trial.WeightedTrainer(trainer, job.weights)
    if is_ours and plan is not None and name is not BackendName.AUTO:
        warm_up(plan, trainer, params)
    else:
        for _ in range(2):  # the first may compile
            start = perf_counter()
            with trial.explained(f"client {client} cannot be trained"):
                list(trainer(params, (client,), 0))
            seconds = min(seconds, perf_counter() - start)
        seconds *= job.sampling.cohort_size * job.settings.rounds
        for other in others:
            with trial.explained(f"client {other} cannot be trained"):
                list(trainer(params, (other,), 0))
    backend, how = start_backend(options, trainer, (params, client), seconds=seconds, is_ours=is_ours)
    return backend, f"{how} {note}" if note else how


def personal_trainer(job: "Job", path: Path) -> PersonalTrainer:
    """Return what trains a run's clients where each keeps layers of its own."""
    if job.whole is None:
        raise ValueError("the clients of this run keep nothing")
    return PersonalTrainer(job.whole, job.model, job.clients, job.local, path.resolve() / "personal")


def _unsafe(trainer: trial.UserTrainer) -> str:
    """Return why worker processes cannot be used; empty if they can."""
    if trainer.model.device.type != "cpu":
        return f"device {trainer.model.device} is not shared"
    try:
        sent = packed(trainer)
    except Exception as error:  # noqa: BLE001 - whatever a user's objects raise
        return f"model, loss or clients cannot be sent to another process ({trial.first_line(error)})"
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
