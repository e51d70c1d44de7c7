"""Running systems, each once: a run is resumed in its folder when stopped, and what it came to is kept in a record.

Records alone are enough to draw every figure again, and to add seeds to it.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from d2pfed.accounting import (
    RELEASED,
    SERVER,
    Adjacency,
    ContinuousGaussian,
    Release,
    Unit,
    upper_bound,
)
from d2pfed.errors import ConfigError, D2PFedError
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.plan import Plan
from d2pfed.round import Outcome
from d2pfed.runs import RoundRecord, RunSummary
from d2pfed.runs.json_files import from_json, read_text, to_json
from d2pfed.runs.report import read_report
from d2pfed.simulation import ClearFederation, Dropouts, Fidelity, SerialBackend
from reproduction.as_coded import CodeRun, Cohort, Trained, run_code
from reproduction.history import Repeat, RunHistory
from reproduction.job import Settings, execute, task_job
from reproduction.result import Context
from reproduction.systems import System
from reproduction.trusted import gaussian_mean

FIRST_SEED = 1  # seeds count up from it: the figures repeat, and all systems of one meet the same cohorts

_OPENERS = ("committee", "secret", "threshold")  # of a plan: who opens a sum, which a simulated sum does not need
Tell = Callable[[int], None]  # is told how many rounds are done


def run_systems(systems: Sequence[System], context: Context) -> list[RunHistory]:
    """Run the systems from every seed, the first seed of all first, and return what they came to.

    With `kept` nothing is run: a system has the seeds that there is a record of.
    """
    seeds = range(FIRST_SEED, FIRST_SEED + context.repeats)
    total = len(seeds) * sum(system.workload.experiment.rounds for system in systems)
    found: list[list[Repeat]] = [[] for _ in systems]
    before = 0
    for seed in seeds:
        for system, repeats in zip(systems, found, strict=True):

            def tell(done: int, label: str = f"{system.label}, seed {seed}", before: int = before) -> None:
                context.report(f"{label}: round {done}", (before + done) / total)

            if not context.kept or _record(system, seed, context.folder).exists():
                repeats.append(_run_system(system, seed, context.folder, tell))
            before += system.workload.experiment.rounds
            context.report(system.label, before / total)
    missing = [system.label for system, repeats in zip(systems, found, strict=True) if not repeats]
    if missing:
        raise ConfigError(
            f"{context.folder / 'records'} must hold a run of every system, got none of {missing[0]}"
        )
    return [
        RunHistory(system=system, repeats=tuple(repeats), released=_epsilons(system, repeats[0].charged))
        for system, repeats in zip(systems, found, strict=True)
    ]


def _run_system(system: System, seed: int, folder: Path, tell: Tell) -> Repeat:
    """Run a system, or read what it came to: that is written once, at the end, and needs no run's folder."""
    record = _record(system, seed, folder)
    if not record.exists():
        if isinstance(system.work, CodeRun):
            made = _as_the_code_ran(system, system.work, seed, tell)
        else:
            made = _trained(system, _settings(system, seed), folder / "runs" / record.stem, tell)
        record.parent.mkdir(parents=True, exist_ok=True)
        partly = record.with_suffix(".partial")
        partly.write_text(f"{to_json(made)}\n")
        partly.replace(record)
    return from_json(Repeat, read_text(record), str(record))


def _record(system: System, seed: int, folder: Path) -> Path:
    return folder / "records" / f"{_folder_name(system, _settings(system, seed))}.json"


def _trained(system: System, settings: Settings, path: Path, tell: Tell) -> Repeat:
    if not _is_finished(path):
        plan = system.work if isinstance(system.work, Plan) else None
        model = system.workload.initial((settings.seed or 0) - FIRST_SEED)
        job = task_job(settings, system.workload.task, model, plan)
        listener = _Telling(tell)
        if isinstance(system.work, ContinuousGaussian):
            with job.open(path, None) as run:
                clear = ClearFederation(SerialBackend(job.trainer()), job.cohorts(run), run.name)
                trusted = _TrustedServer(clear, system.work, Entropy.replay(str(settings.seed).encode()))
                run.train(trusted, job.evaluator, listener)
        else:
            execute(job, path, None, listener)
    return _read(path, settings.seed or 0)


def _as_the_code_ran(system: System, work: CodeRun, seed: int, tell: Tell) -> Repeat:
    workload, start = system.workload, time.perf_counter()
    experiment = workload.experiment
    trained = Trained(
        model=workload.initial(seed - FIRST_SEED),
        task=workload.task,
        local=system.local,
        cohort=Cohort(experiment.population, experiment.cohort_size, experiment.rounds),
    )
    course = run_code(work, trained, seed, tell)
    return Repeat(
        seed=seed,
        validation=tuple(_percent(value) for value in course.validation),
        test=_percent(course.test),
        charged=(),
        server=None,
        seconds=round(time.perf_counter() - start, 1),
    )


@dataclass(frozen=True, slots=True)
class _Telling:
    """Passes on how many rounds are done."""

    tell: Tell

    def __call__(self, record: RoundRecord, /) -> bool:
        self.tell(record.round)
        return True


@dataclass(frozen=True, slots=True)
class _TrustedServer:
    """A server that sees bare updates and adds the noise itself."""

    clear: ClearFederation
    noise: ContinuousGaussian
    entropy: Entropy

    def mean(self, number: int, model: FloatVector) -> Outcome:
        """Return the noisy mean of a round's cohort."""
        cohort = self.clear.cohorts.draw(number, 0, number)
        updates = self.clear.updates(number, model, cohort)
        stream = self.entropy.child("noise", number).stream()
        return Outcome(gaussian_mean(updates, len(cohort), self.noise, stream), 0, len(cohort))


def _settings(system: System, seed: int) -> Settings:
    workload = system.workload
    return Settings(
        task=workload.experiment.task,
        data=f"{workload.task.description} Partition: {workload.partition}.",
        model=workload.experiment.model,
        target=system.target,
        local=system.local,
        server=system.step,
        dropouts=Dropouts(),
        fidelity=Fidelity.SUM,
        seed=seed,
        stop_is_blind=False,
    )


def _folder_name(system: System, settings: Settings) -> str:
    """Return a name that changes with all that decides a run, so that no figure shows another one's run."""
    work = "none"
    if system.work is not None:
        parts = {k: v for k, v in json.loads(canonical.encode(system.work)).items() if k not in _OPENERS}
        work = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    experiment = system.workload.experiment.name.lower()
    return f"{experiment}-{system.name}-{digest(canonical.encode(settings), work).hex()[:8]}"


def _epsilons(system: System, charged: Sequence[int]) -> tuple[float, ...]:
    """Return the epsilon of so many attempts, as of runs that were planned to end there; none without noise."""
    target, work = system.target, system.work
    if work is None or isinstance(work, CodeRun):
        return ()
    release = (
        _release(system, work) if isinstance(work, ContinuousGaussian) else work.release("", 0, 0, (), work.quorum)
    )
    cap = work.max_participations if isinstance(work, Plan) else target.rounds
    return tuple(
        upper_bound(
            [replace(release, round=number) for number in range(count)],
            RELEASED,
            delta=target.effective_delta,
            max_participations=cap,
        ).epsilon
        for count in charged
    )


def _release(system: System, noise: ContinuousGaussian) -> Release:
    return Release(
        run="",
        round=0,
        attempt=0,
        unit=Unit.CLIENT,
        adjacency=Adjacency.REPLACE_ONE,
        sampling=system.workload.experiment.sampling,
        noise=noise,
        participants=(),
    )


def _is_finished(path: Path) -> bool:
    with suppress(D2PFedError):
        return _summary(path).test_metrics is not None
    return False


def _summary(path: Path) -> RunSummary:
    return from_json(RunSummary, read_text(path / "summary.json"), str(path))


def _read(path: Path, seed: int) -> Repeat:
    report = read_report(path)
    test = report.summary.test_metrics or {}
    server = [item.epsilon for item in report.summary.guarantees if item.observer == SERVER]
    return Repeat(
        seed=seed,
        validation=tuple(_percent(record.metrics["accuracy"]) for record in report.rounds),
        test=_percent(test["accuracy"]),
        charged=tuple(record.charged for record in report.rounds),
        server=server[0] if server else None,
        seconds=round(sum(record.seconds or 0.0 for record in report.rounds), 1),
    )


def _percent(fraction: float) -> float:
    return round(100 * fraction, 4)
