"""One simulated round by the in-process engine and by Ray workers: the same clients, trained, encoded and added up."""

import time
from collections.abc import Iterator
from functools import partial

from benchmarks.engines_row import EngineRow
from benchmarks.explicit import local_training, privacy_target
from benchmarks.peers import attempt
from d2pfed.learning import LocalTrainer, build_model, load_task
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import calibrate
from d2pfed.round import Attempt, session_of
from d2pfed.simulation import Crew, Dropouts, Fidelity, Hire, InProcess, Simulation

_ROUNDS = 3  # the first one, in which workers load and kernels compile, does not count


def bench_engines(clients: int, hires: dict[str, Hire]) -> Iterator[EngineRow]:
    """Yield the speed of each engine on a cohort of digits; the same entropy gives all of them the same sum."""
    task = load_task("infimnist", population=10 * clients)
    model = build_model("mlp", task, seed=0)
    learner = LocalTrainer(model, task.clients, local_training(lr=0.2, epochs=3, batch_size=10))
    target = privacy_target(
        dimension=model.dimension, population=10 * clients, cohort_size=clients, rounds=_ROUNDS, dropouts=0.1
    )
    plan = calibrate(target)
    params = model.initial()

    def once(crew: Crew, number: int) -> float:
        begun = time.perf_counter()
        simulation = Simulation(
            plan=plan,
            model=params.tobytes(),
            updates=crew.updates(params, number),
            encode=crew.encode(params, number),
            dropouts=Dropouts(),
            entropy=Entropy.replay(b"bench engines"),
            participations={},
        )
        session = session_of(plan, Attempt("bench", number, 0), tuple(range(clients)))
        simulation.collect(session, Fidelity.SUM).unmask()
        return time.perf_counter() - begun

    def measure(name: str, hire: Hire) -> EngineRow:
        begun = time.perf_counter()
        with hire(learner) as crew:
            once(crew, 0)
            start = time.perf_counter() - begun
            best = min(once(crew, number) for number in range(1, _ROUNDS))
        return EngineRow(engine=name, clients=clients, start_seconds=start, round_seconds=best)

    yield measure("process", InProcess)
    for name, hire in hires.items():
        row, error = attempt(("ray",), partial(measure, name, hire))
        yield row or EngineRow(engine=name, clients=clients, start_seconds=None, round_seconds=None, error=error)
