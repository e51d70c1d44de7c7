"""A run over a named task by settings that are written out, and the canonical text that names its stored record."""

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from d2pfed.api import EarlyStop, Job
from d2pfed.api.job import Details, array_shapes, fixed_digest
from d2pfed.api.workload import ModelEvaluator
from d2pfed.learning import LocalTraining, Model, Task
from d2pfed.numerics import canonical
from d2pfed.plan import Plan, PrivacyTarget
from d2pfed.runs import Listener, RunSettings, RunSummary
from d2pfed.simulation import Backend, Dropouts, Fidelity, SerialBackend
from d2pfed.training import ServerOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that decides a run over a named task; records are named by its fields and their order."""

    task: str
    data: str  # what the task says of its data
    model: str
    target: PrivacyTarget
    local: LocalTraining
    server: ServerOptimizer
    dropouts: Dropouts
    fidelity: Fidelity
    seed: int | None  # None: the system's entropy; a number repeats the run and protects nobody
    stop_is_blind: bool = False  # whether the run, if it stops early, does so for nothing that it has shown
    early_stop: EarlyStop | None = field(default=None, metadata=canonical.OMITTED_IF_DEFAULT)
    max_weight: float | None = field(default=None, metadata=canonical.OMITTED_IF_DEFAULT)


def execute(
    job: Job, path: Path, ledger: Path | None, listen: Listener, backend: Backend | None = None
) -> RunSummary:
    """Train from where the run is to its end, its budget's end, or the listener's request to stop.

    `ledger` is one that other runs over these clients share, None the run's own. `backend` says where clients are
    trained, None in this process; a run may go on with another backend than it began with. It is closed at the end.
    """
    with closing(backend or SerialBackend(job.trainer())) as where, job.open(path, ledger) as run:
        return job.train(run, listen, where, evaluate_every=1)


def task_job(settings: Settings, task: Task, model: Model, plan: Plan | None) -> Job:
    """Return a run by this plan; None: in the clear, by the target's rounds and cohorts."""
    sampling = settings.target.cohort_sampling
    return Job(
        settings=RunSettings(
            title=f"{settings.task}, {settings.model}",
            data=settings.data,
            target=None if plan is None else settings.target,
            rounds=settings.target.rounds,
            optimizer=settings.server,
            arrays=array_shapes(model),
            seed=settings.seed,
            stop_is_blind=settings.stop_is_blind,
            details=Details(
                local=settings.local,
                cohort_size=sampling.cohort_size,
                loss="cross_entropy",
                fixed=fixed_digest(model),
                early_stop=settings.early_stop,
                max_weight=settings.max_weight,
                dropouts=settings.dropouts,
                fidelity=settings.fidelity,
                task=settings.task,
                model=settings.model,
            ),
        ),
        plan=plan,
        sampling=sampling,
        model=model,
        clients=task.clients,
        evaluator=ModelEvaluator(model, task.validation, task.test, None),
        validation=task.validation,
    )
