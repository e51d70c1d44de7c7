"""Whether memory stays flat: what a run of many rounds holds early and late, its worker processes included."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.explicit import local_training, privacy_target
from d2pfed.learning import build_model, load_task, use_one_thread
from d2pfed.plan import calibrate
from d2pfed.simulation import Dropouts, Fidelity, warm_up
from d2pfed.simulation.process_backend import ProcessBackend
from d2pfed.training import SecondMoment, ServerOptimizer
from reproduction.job import Settings, execute, task_job

if TYPE_CHECKING:
    from d2pfed.runs import RoundRecord

EARLY, LATE = 100, 1_000
_CLIENTS, _COHORT = 500, 20


def measure_growth(early: int = EARLY, late: int = LATE) -> tuple[float, float]:
    """Train for `late` rounds on two workers; return the MiB in memory after the early round and after the last."""
    use_one_thread()
    task = load_task("digits", population=_CLIENTS)
    model = build_model("logistic", task, seed=0)
    target = privacy_target(
        dimension=model.dimension, population=_CLIENTS, cohort_size=_COHORT, rounds=late, epsilon=1e3
    )
    settings = Settings(
        task="digits",
        data=task.description,
        model="logistic",
        target=target,
        local=local_training(lr=0.1, epochs=1, batch_size=10),
        server=ServerOptimizer(
            lr=1.0, momentum=0.0, second_moment=0.0, second_rule=SecondMoment.ADAM, lr_decay=1.0, averaging=0.0
        ),
        dropouts=Dropouts(),
        fidelity=Fidelity.SUM,
        seed=None,
        stop_is_blind=True,
    )
    job = task_job(settings, task, model, plan := calibrate(target))
    warm_up(plan, job.trainer(), model.initial())
    backend, seen = ProcessBackend(job.trainer(), 2), dict[int, float]()
    processes = ("self", *map(str, backend.processes()))

    def listen(record: "RoundRecord") -> bool:
        if record.round in (early, late):
            seen[record.round] = sum(map(_resident_mib, processes))
        return True

    with TemporaryDirectory() as directory:
        execute(job, Path(directory) / "run", None, listen, backend)
    return seen[early], seen[late]


def _resident_mib(process: str) -> float:
    """Return what a process has in memory of its own: pages that it shares with its workers do not count twice."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise LookupError(f"/proc/{process}/smaps_rollup has no line about Pss")
