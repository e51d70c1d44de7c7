"""The parts of `scripts/bench all`, each in a process of its own: one that fails takes no other with it."""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.arithmetic import DIMENSIONS, THREADS, arithmetic
from benchmarks.deployment import DeploymentRow, bench_deployment, cases
from benchmarks.encode import prepare_encode
from benchmarks.goals import GoalRow, bench_goals
from benchmarks.growth import measure_growth
from benchmarks.peers import one_line
from benchmarks.scales import MODEST, SILOS
from benchmarks.secagg import bench_secagg
from benchmarks.standing import bench_standing
from benchmarks.tables import Row

_CLIENTS = 200  # of a backend's round
_REPEATS = 5  # of a round of training
_SILO_ROUNDS = 100
_FEDERATION = (5, 4, 20, 50)  # nodes and rounds of a real federation, silos and rounds of one with standing keys
_PATIENCE_SECONDS = 600.0  # for all of its rounds

Measure = Callable[[], Iterable[Row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a part has measured until it ended or failed, the seconds that it took, and why it failed."""

    rows: list[Row]
    seconds: float
    error: str = ""


def _arithmetic() -> Iterable[Row]:
    return arithmetic(DIMENSIONS[:2], THREADS, prepare_encode)


def _secagg() -> Iterator[Row]:
    yield from bench_secagg(MODEST)
    yield from bench_standing(SILOS[:1])


def _backends() -> Iterable[Row]:
    from benchmarks.engines import bench_engines  # noqa: PLC0415 - torch takes seconds to load

    return bench_engines(_CLIENTS, 2, None)


def _training() -> Iterable[Row]:
    from benchmarks.training import bench_training  # noqa: PLC0415 - torch takes seconds to load

    return bench_training(_REPEATS)


def _silos() -> Iterable[Row]:
    from benchmarks.silos import bench_silos  # noqa: PLC0415 - torch and Opacus take seconds to load

    return bench_silos(_SILO_ROUNDS)


def _goals() -> Iterable[GoalRow]:
    return bench_goals(large=True)


def _modest_goals() -> Iterable[GoalRow]:
    return bench_goals()


def _deployment() -> Iterable[DeploymentRow]:
    return bench_deployment(cases(*_FEDERATION), _PATIENCE_SECONDS)


PARTS: Mapping[str, Measure] = {
    "goals": _goals,
    "arithmetic": _arithmetic,
    "secagg": _secagg,
    "engines": _backends,
    "training": _training,
    "silos": _silos,
    "deployment": _deployment,
    "growth": measure_growth,
}
# Beside busy loops, what takes minutes on idle cores is left out.
BUSY_PARTS: Mapping[str, Measure] = {
    name: _modest_goals if name == "goals" else measure for name, measure in PARTS.items() if name != "deployment"
}


def run_part(measure: Measure, tell: Callable[[Row], None]) -> Measured:
    """Measure one part in a process of its own, and tell each row as soon as it is there."""
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe(duplex=False)
    begun, rows = time.perf_counter(), list[Row]()
    process = spawning.Process(target=_serve, args=(measure, there))
    process.start()
    there.close()
    try:
        while not isinstance(answer := here.recv(), str):
            rows.append(answer)
            tell(answer)
        process.join()
    except EOFError:
        process.join()
        answer = f"its process ended with exit code {process.exitcode}"
    return Measured(rows=rows, seconds=time.perf_counter() - begun, error=answer)


def _serve(measure: Measure, answers: Connection) -> None:
    """Send every row, then a text: why it failed, or nothing."""
    try:
        for row in measure():
            answers.send(row)
    except Exception as error:  # noqa: BLE001 - whatever a part raises is a result
        answers.send(one_line(error))
    else:
        answers.send("")
