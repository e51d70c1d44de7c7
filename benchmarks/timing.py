"""How speed is measured: the best of several batches, on one or more threads, the first call apart."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Barrier, Thread
from time import perf_counter

BATCHES = 7
BATCH_SECONDS = 0.03


@dataclass(frozen=True, slots=True)
class Work:
    """Something to measure: `prepare(dimension)` returns a function that does it once, with a state of its own.

    `largest` bounds the dimension at which a slow peer is measured; its rate counts coordinates, so it compares.
    """

    name: str
    prepare: Callable[[int], Callable[[], object]]
    largest: int = 1 << 62


@dataclass(frozen=True, slots=True)
class Speed:
    """Coordinates per second over all threads, and the seconds of the first call, which may have compiled."""

    rate: float
    first_call_seconds: float


def measure(work: Work, dimension: int, threads: int) -> Speed:
    """Run the work on each thread at once, in batches, and take the best batch."""
    dimension = min(dimension, work.largest)
    runs = [work.prepare(dimension) for _ in range(threads)]
    first_call_seconds = _time([runs[0]], 1)
    repeats = max(1, round(BATCH_SECONDS / max(_time([runs[0]], 1), 1e-7)))
    best = min(_time(runs, repeats) for _ in range(BATCHES))
    return Speed(dimension * threads * repeats / best, first_call_seconds)


def _time(runs: list[Callable[[], object]], repeats: int) -> float:
    """Return the seconds that all runs take side by side."""
    gate = Barrier(len(runs) + 1)

    def work(run: Callable[[], object]) -> None:
        gate.wait()
        for _ in range(repeats):
            run()

    workers = [Thread(target=work, args=(run,)) for run in runs]
    for worker in workers:
        worker.start()
    gate.wait()
    start = perf_counter()
    for worker in workers:
        worker.join()
    return perf_counter() - start
