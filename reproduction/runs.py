"""Running systems, each once: a run is kept in its folder, resumed when stopped, and read when finished."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
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
from d2pfed.api import Job, Settings, TaskEvaluator
from d2pfed.errors import D2PFedError
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.plan import Plan
from d2pfed.round import Outcome
from d2pfed.runs import RoundRecord, RunSummary
from d2pfed.runs.plain import from_json, read_text
from d2pfed.runs.report import read_report
from d2pfed.simulation import ClearFederation, Dropouts, Fidelity, InProcess
from reproduction.result import Context
from reproduction.systems import System
from reproduction.trusted import gaussian_mean

SEED = 1  # of every run: the figures repeat, and all systems of one meet the same cohorts

Tell = Callable[[int], None]  # is told how many rounds are done


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHistory:
    """What a run came to, round by round and at its end; accuracies in percent."""

    system: System
    validation: tuple[float, ...]  # after each round
    released: tuple[float, ...]  # true epsilon of the released models after each round; empty if not private
    test: float  # of the last model; the test data was opened for it once
    server: float | None  # true epsilon against the server; None: not private
    folder: str

    @property
    def rounds(self) -> range:
        """The numbers of the rounds."""
        return range(1, len(self.validation) + 1)

    @property
    def megabytes(self) -> tuple[float, ...]:
        """What one client that took part in every round has sent after each."""
        return tuple(number * self.system.upload_bytes / 1e6 for number in self.rounds)

    @property
    def published(self) -> tuple[float, ...]:
        """Epsilon after each round as the paper would print it; empty where it printed none."""
        given = self.system.published
        return () if given is None else tuple(given(number) for number in self.rounds)

    @property
    def record(self) -> dict[str, object]:
        """What was run, for the result's JSON."""
        system, experiment = self.system, self.system.workload.experiment
        return {
            "run": self.folder,
            "seed": SEED,
            "data": system.workload.task.description,
            "partition": system.workload.partition,
            "model": experiment.model,
            "rounds": len(self.validation),
            "plan": json.loads(canonical.encode(system.work)) if isinstance(system.work, Plan) else None,
            "local": asdict(system.local),
            "server": asdict(system.step),
        }


def run_systems(systems: Sequence[System], context: Context) -> list[RunHistory]:
    """Run the systems one after the other, reporting how far they are, and return their curves."""
    total = sum(system.workload.experiment.rounds for system in systems)
    curves: list[RunHistory] = []
    before = 0
    for system in systems:

        def tell(done: int, label: str = system.label, before: int = before) -> None:
            context.report(f"{label}: round {done}", (before + done) / total)

        curves.append(_run_system(system, context.folder / "runs", tell))
        before += system.workload.experiment.rounds
        context.report(system.label, before / total)
    return curves


def _run_system(system: System, folder: Path, tell: Tell) -> RunHistory:
    settings = _settings(system)
    path = folder / _folder_name(system, settings)
    if not _is_finished(path):
        plan = system.work if isinstance(system.work, Plan) else None
        job = Job(settings, system.workload.task, system.workload.model, plan)
        listener = _Telling(tell)
        if isinstance(system.work, ContinuousGaussian):
            with job.open(path, None) as run:
                clear = job.clear_federation(run, InProcess(job.trainer()))
                trusted = _TrustedServer(clear, system.work, Entropy.replay(str(SEED).encode()))
                run.train_in_the_clear(trusted, TaskEvaluator(job.model, job.task), listener)
        else:
            job.execute(path, None, listener)
    return _read(system, path)


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


def _settings(system: System) -> Settings:
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
        seed=SEED,
        stop_is_blind=False,
    )


def _folder_name(system: System, settings: Settings) -> str:
    """Return a name that changes with all that decides a run, so that no figure shows another one's run."""
    work = canonical.encode(system.work) if system.work is not None else "none"
    experiment = system.workload.experiment.name.lower()
    return f"{experiment}-{system.name}-{digest(canonical.encode(settings), work).hex()[:8]}"


def _epsilons(system: System, charged: Sequence[int]) -> tuple[float, ...]:
    """Return the epsilon of so many attempts, as of runs that were planned to end there; none without noise."""
    target, work = system.target, system.work
    if work is None:
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


def _read(system: System, path: Path) -> RunHistory:
    report = read_report(path)
    test = report.summary.test_metrics or {}
    server = [item.epsilon for item in report.summary.guarantees if item.observer == SERVER]
    return RunHistory(
        system=system,
        validation=tuple(100 * record.metrics["accuracy"] for record in report.rounds),
        released=_epsilons(system, [record.charged for record in report.rounds]),
        test=100 * test["accuracy"],
        server=server[0] if server else None,
        folder=f"runs/{path.name}",
    )
