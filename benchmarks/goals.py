"""The goals of speed that these benchmarks can measure, each beside what was measured in this run."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import ledger, limits
from benchmarks.peers import one_line
from benchmarks.scales import COMPLETE, Scale
from benchmarks.secagg import measure, measure_crowd, measure_loopback
from d2pfed.errors import ConfigError
from d2pfed.noise.codec import FloatVector
from d2pfed.secagg import crypto

if TYPE_CHECKING:
    from d2pfed.learning import LocalTrainer
    from d2pfed.simulation import Backend

_REPEATS = 5
_PATIENCE_SECONDS = 600
_COMMAND = "from d2pfed.cli import main; main()"
_FIRST = "train --task digits --population 100 --cohort-size 50 --rounds 1 --epsilon 10 --model logistic"
_LONG = (
    "train --task infimnist --model edges --population 100000 --cohort-size 1000 --rounds 50 --epochs 3 "
    "--sampling once --against server --epsilon 1"
)
_ROUND = Scale(clients=100, dimension=32_768, bits=16, dropouts=0)
_CROWD = {
    "assumed": (0.2, 0.6),
    "signed": (0.5, 1.0),
}  # seconds of a client, with 100,000 coordinates and 1,000,000
_SERVER = (15.0, 60.0)
_MOST_GROWTH_MIB = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalRow:
    """One goal: wall-clock seconds where nothing else is said, the least of several runs; None if it failed."""

    what: str
    seconds: float | None
    processor_seconds: float | None  # of all processes that took part
    goal: float
    limit: float | None = None  # seconds that the machine needs at least, measured in the same run
    error: str = ""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Return whether the goal is met, or None if nothing was measured."""
        return None if self.seconds is None else self.seconds <= self.goal


@dataclass(frozen=True, slots=True)
class _Timed:
    """What one run took."""

    seconds: float
    processor_seconds: float


def bench_goals(*, large: bool = False) -> Iterator[GoalRow]:
    """Yield all goals; one that cannot be measured is a row that says why. `large` adds those that take minutes."""
    yield from _commands()
    yield from _protocol(large=large)
    yield from _ledger(large=large)
    yield from _training()
    if large:
        yield _least("50 rounds of 1,000 clients, start to report", 60.0, _whole_run, repeats=1)
    yield _apart("1,000 rounds: MiB that all processes grow by from round 100 on", _MOST_GROWTH_MIB, _grow_apart)


def _commands() -> Iterator[GoalRow]:
    yield _least("d2pfed --help", 0.35, lambda: _command("--help"))
    yield _least("d2pfed plan", 1.0, lambda: _command("plan"))
    yield _least("first command after the install: cold compilation, seconds more", 3.0, _cold, repeats=1)


def _protocol(*, large: bool) -> Iterator[GoalRow]:
    name = "round with all messages, 100 clients, complete, 32,768 coordinates"
    agreements = _ROUND.clients * (_ROUND.clients - 1) * limits.agreement_seconds()  # two secrets for each pair
    yield replace(_least(f"{name}, one process", 0.7, _loopback), limit=agreements)
    yield replace(_least(f"{name}, clients in two processes", 0.7, _in_two), limit=agreements / 2)
    for scale in COMPLETE:
        place = int(scale.dimension > 100_000)
        if place and not large:
            continue
        title = f"1,000 clients, complete, {scale.dimension:,} coordinates, 10 % lost, {scale.consistency.value}"
        try:
            row = measure_crowd(scale)
        except Exception as error:  # noqa: BLE001 - a benchmark that fails is a row
            yield _failed(title, _SERVER[place], error)
            continue
        for who, seconds, goal in (
            ("one client", row.client_seconds, _CROWD[scale.consistency.value][place]),
            ("server", row.server_seconds, _SERVER[place]),
        ):
            yield GoalRow(
                what=f"{title}: {who}, processor seconds", seconds=seconds, processor_seconds=seconds, goal=goal
            )


def _ledger(*, large: bool) -> Iterator[GoalRow]:
    for row in ledger.bench_ledger(ledger.RELEASES if large else ledger.RELEASES[:1]):
        if row.goal is not None:
            name = f"ledger of {row.releases:,} releases: {row.what}, processor seconds"
            yield GoalRow(what=name, seconds=row.seconds, processor_seconds=row.seconds, goal=row.goal)


def _training() -> Iterator[GoalRow]:
    """Yield rounds by worker processes, each measured in a fresh process: workers are forked before it has threads."""
    for clients, goal in ((100, 0.10), (1_000, 0.9)):
        yield _apart(
            f"default round, {clients:,} clients, private", goal, _train_apart, "default", clients, "private"
        )
    yield _apart("default round, 100 clients, without privacy", 0.07, _train_apart, "default", 100, "plain")
    yield _apart("small-cnn, 100 clients, 8 steps of 10", 0.8, _train_apart, "small-cnn", 100, "plain")
    name = "cnn, 10 clients, 8 steps of 10 images of 3 x 24 x 24"
    yield _apart(name, 0.35, _train_apart, "cnn", 10, "plain")


def _apart(what: str, goal: float, measure_it: Callable[..., None], *arguments: object) -> GoalRow:
    """Measure training in a process of its own; one that does not end is a row that says so."""
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    process = spawning.Process(target=measure_it, args=(there, what, goal, *arguments))
    process.start()
    there.close()
    row = _failed(what, goal, TimeoutError(f"no answer in {_PATIENCE_SECONDS} seconds"))
    try:
        if here.poll(_PATIENCE_SECONDS):
            row = here.recv()
    except EOFError as error:
        row = _failed(what, goal, error)
    if process.pid is not None:
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(process.pid, signal.SIGKILL)  # its workers too, should they hang
    process.join()
    return row


def _train_apart(  # noqa: PLR0917 - a process takes arguments by place
    connection: Connection, what: str, goal: float, model: str, clients: int, how: str
) -> None:
    os.setpgid(0, 0)  # with its workers it is one group, which can be ended as a whole
    from benchmarks.training import Federation, convolutional_learner, default_learner  # noqa: PLC0415 - torch takes seconds to load
    from d2pfed.learning import use_one_thread  # noqa: PLC0415
    from d2pfed.simulation import Fidelity  # noqa: PLC0415
    from d2pfed.simulation.process_backend import ProcessBackend  # noqa: PLC0415

    use_one_thread()
    trainer = default_learner() if model == "default" else convolutional_learner(model)
    with closing(ProcessBackend(trainer)) as backend:
        limit = limits.training_seconds(trainer, clients)
        if how == "plain":
            row = _least(what, goal, _updates(backend, trainer, clients, backend.processes()))
            connection.send(replace(row, limit=limit))
            return
        numbers = iter(range(1, _REPEATS + 2))  # a simulation's first round is always by the protocol
        with Federation.open(trainer, clients, 1.0) as federation:
            work = _timer(lambda: federation.private(next(numbers), Fidelity.SUM, backend), backend.processes())
            connection.send(replace(_least(what, goal, work), limit=limit))


def _grow_apart(connection: Connection, what: str, goal: float) -> None:
    """Tell what a run of 1,000 rounds holds in memory, this process and its workers together."""
    os.setpgid(0, 0)
    from benchmarks.memory import measure_growth  # noqa: PLC0415 - torch takes seconds to load

    try:
        early, late = measure_growth()
    except Exception as error:  # noqa: BLE001 - a benchmark that fails is a row
        connection.send(_failed(what, goal, error))
        return
    note = f"{early:.0f} MiB at round 100, {late:.0f} MiB at round 1,000"
    connection.send(GoalRow(what=what, seconds=late - early, processor_seconds=None, goal=goal, note=note))


def _updates(
    backend: "Backend", trainer: "LocalTrainer", clients: int, workers: Sequence[int]
) -> Callable[[], _Timed]:
    """Return what times the mean of the clients' updates."""
    params = trainer.model.initial()

    def mean() -> FloatVector:
        total = np.zeros_like(params)
        for update in backend.train(params, range(clients), 0):
            if not isinstance(update, np.ndarray):
                raise ConfigError("a worker was lost, so the cost means nothing")
            total += update
        return total / np.float32(clients)

    return _timer(mean, workers)


def _timer(work: Callable[[], object], workers: Sequence[int]) -> Callable[[], _Timed]:
    def timed() -> _Timed:
        begun, begun_cpu = time.perf_counter(), _processor(workers)
        work()
        return _Timed(time.perf_counter() - begun, _processor(workers) - begun_cpu)

    return timed


def _loopback() -> _Timed:
    begun = _processor()
    return _Timed(measure_loopback(_ROUND), _processor() - begun)


def _in_two() -> _Timed:
    row = measure(_ROUND, processes=2, agree=crypto.PairSecrets().agree)
    client, server, seconds = row.client_seconds or 0.0, row.server_seconds or 0.0, row.round_seconds or 0.0
    return _Timed(seconds, client * row.clients + server)


def _whole_run() -> _Timed:
    with TemporaryDirectory() as directory:
        return _command(_LONG, Path(directory))


def _command(line: str, directory: Path | None = None, **changed: str) -> _Timed:
    """Run a command of the command line in a process of its own, in some directory."""
    paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path if path)
    begun, begun_cpu = time.perf_counter(), _processor()
    subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", _COMMAND, *line.split()],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=directory,
        env=os.environ | {"PYTHONPATH": paths} | changed,
    )
    return _Timed(time.perf_counter() - begun, _processor() - begun_cpu)


def _cold() -> _Timed:
    """Return what a first command takes more than the same command again: kernels are compiled and kept on disk."""
    with TemporaryDirectory() as directory:
        kernels = str(Path(directory) / "kernels")
        runs = [
            _command(f"{_FIRST} --name {name}", Path(directory), NUMBA_CACHE_DIR=kernels)
            for name in ("first", "again")
        ]
    first, again = runs
    return _Timed(first.seconds - again.seconds, first.processor_seconds - again.processor_seconds)


def _processor(workers: Sequence[int] = ()) -> float:
    """Return the processor seconds of this process, of its workers, and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    fields = (Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split() for process in workers)
    ticks = sum(int(each[11]) + int(each[12]) for each in fields)  # of user and system
    return sum(each.ru_utime + each.ru_stime for each in used) + ticks / os.sysconf("SC_CLK_TCK")


def _least(what: str, goal: float, run: Callable[[], _Timed], repeats: int = _REPEATS) -> GoalRow:
    """Run several times, a first time apart if there are several, and keep the least of either clock."""
    try:
        runs = [run() for _ in range(repeats + (repeats > 1))][repeats > 1 :]
    except Exception as error:  # noqa: BLE001 - a benchmark that fails is a row
        return _failed(what, goal, error)
    return GoalRow(
        what=what,
        seconds=min(each.seconds for each in runs),
        processor_seconds=min(each.processor_seconds for each in runs),
        goal=goal,
    )


def _failed(what: str, goal: float, error: Exception) -> GoalRow:
    told = error.stderr.decode() if isinstance(error, subprocess.CalledProcessError) and error.stderr else ""
    return GoalRow(
        what=what,
        seconds=None,
        processor_seconds=None,
        goal=goal,
        error=" ".join(told.split())[-200:] or one_line(error),
    )
