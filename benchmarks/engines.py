"""One simulated round by each backend: the same clients, trained, encoded and added up."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from functools import partial

from benchmarks.engines_row import EngineRow
from benchmarks.explicit import local_training, privacy_target
from benchmarks.peers import attempt
from d2pfed.learning import LocalTrainer, build_model, load_task, one_thread, use_one_thread
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import calibrate
from d2pfed.round import Attempt, session_of
from d2pfed.simulation import Backend, Fidelity, SerialBackend, SimulatedFederation
from d2pfed.simulation.process_backend import start_workers

_ROUNDS = 3  # the first one, in which workers load and kernels compile, does not count


def bench_engines(
    clients: int, ray_workers: int, address: str | None, only: Collection[str] = ()
) -> Iterator[EngineRow]:
    """Yield the speed of each backend on a cohort of digits; the same entropy gives all of them the same sum."""
    task = load_task("infimnist", population=10 * clients)
    model = build_model("mlp", task, seed=0)
    trainer = LocalTrainer(model, task.clients, local_training(lr=0.2, epochs=3, batch_size=10))
    target = privacy_target(
        dimension=model.dimension, population=10 * clients, cohort_size=clients, rounds=_ROUNDS, dropouts=0.1
    )
    plan = calibrate(target)
    params = model.initial()

    def once(backend: Backend, number: int) -> float:
        begun = time.perf_counter()
        session = session_of(plan, Attempt("bench", number, 0), tuple(range(clients)))
        collected = SimulatedFederation(
            plan=plan,
            backend=backend,
            entropy=Entropy.replay(b"bench engines"),
            fidelity=Fidelity.SUM,
        ).collect(session, params, {})
        collected.unmask()
        return time.perf_counter() - begun

    def measure(name: str, start: Callable[[], Backend]) -> EngineRow:
        begun = time.perf_counter()
        with closing(start()) as backend:
            once(backend, 0)
            started = time.perf_counter() - begun
            best = min(once(backend, number) for number in range(1, _ROUNDS))
        return EngineRow(engine=name, clients=clients, start_seconds=started, round_seconds=best)

    def ray() -> Backend:
        from d2pfed.simulation.ray_backend import RayBackend  # noqa: PLC0415 - its absence is a row of the table

        return RayBackend(trainer, ray_workers, address)

    works: dict[str, tuple[tuple[str, ...], Callable[[], Backend]]] = {
        "processes": ((), lambda: start_workers(trainer, None, use_one_thread)[0]),
        "in process": ((), lambda: SerialBackend(trainer)),
        f"ray, {ray_workers} workers": (("ray",), ray),
    }
    with one_thread(model):
        for name, (needs, start) in works.items():
            if only and name.partition(",")[0] not in only:
                continue
            row, error = attempt(needs, partial(measure, name, start))
            yield row or EngineRow(
                engine=name, clients=clients, start_seconds=None, round_seconds=None, error=error
            )


def break_even(rows: Sequence[EngineRow], engine: str, over: str) -> int | None:
    """Return the smallest measured cohort from which on one engine is faster than another; None if there is none."""
    seconds = {(row.engine.partition(",")[0], row.clients): row.round_seconds for row in rows}
    sizes = sorted({row.clients for row in rows if row.round_seconds is not None})
    both = [size for size in sizes if seconds.get((engine, size)) and seconds.get((over, size))]
    slower = [size for size in both if (seconds[engine, size] or 0) >= (seconds[over, size] or 0)]
    faster = [size for size in both if not slower or size > slower[-1]]
    return faster[0] if faster else None
