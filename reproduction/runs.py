"""Running systems, each once: a run is kept in its folder, resumed when stopped, and read when finished."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from d2pfed.accounting import (
    RELEASED,
    Adjacency,
    ContinuousGaussian,
    Release,
    Unit,
    upper_bound,
)
from d2pfed.api import Job, Progress, Settings
from d2pfed.learning import LocalTrainer, evaluate
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.plan import Plan
from d2pfed.round import Outcome
from d2pfed.runs.directory import Checkpoint, RunDirectory
from d2pfed.simulation import Dropouts, Fidelity, InProcess, Learn
from d2pfed.simulation.trusted import plain_mean
from d2pfed.training import Cohorts, train
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
        if isinstance(system.work, Plan):
            job = Job(settings, system.workload.task, system.workload.model, system.work)
            job.execute(path, None, _listener(tell), lambda learn: InProcess(_finite(learn)))
        else:
            _run_trusted(system, path, canonical.encode(settings), tell)
    return _read(system, path)


def _settings(system: System) -> Settings:
    workload = system.workload
    return Settings(
        task=workload.experiment.task,
        data=f"{workload.task.description} Partition: {workload.partition}.",
        model=workload.experiment.model,
        target=system.target,
        local=system.local,
        step=system.step,
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


def _listener(tell: Tell) -> Callable[[Progress], bool]:
    def listen(progress: Progress) -> bool:
        tell(progress.round)
        return True

    return listen


def _finite(learn: Learn) -> Learn:
    """Return the same training, where a client whose steps diverged sends zero: under great noise some do."""

    def learned(params: FloatVector, clients: Sequence[int], seed: int) -> Iterator[FloatVector]:
        for update in learn(params, clients, seed):
            yield update if np.isfinite(update).all() else np.zeros_like(update)

    return learned


def _run_trusted(system: System, path: Path, settings: str, tell: Tell) -> None:
    """Run FedAvg, or a trusted server's Gaussian: the same loop, without ledger and without secure aggregation."""
    workload, entropy = system.workload, Entropy.replay(str(SEED).encode())
    with RunDirectory.open(path, settings) as directory:
        checkpoint = directory.load()
        state = checkpoint.state if checkpoint else system.step.start(workload.model.initial())
        directory.keep_metrics(state.rounds)
        for record in train(
            state, system.step, workload.experiment.rounds, _aggregate(system, path.name, entropy)
        ):
            state = record.state
            accuracy = evaluate(workload.model, state.average, workload.task.validation).accuracy
            directory.append({"round": record.round, "accuracy": accuracy, "charged": record.round})
            directory.save(Checkpoint(state, ""))
            tell(record.round)
        test = evaluate(workload.model, state.average, workload.task.test()).accuracy
        directory.replace("summary.json", json.dumps({"test_accuracy": test, "promised": []}).encode())


def _aggregate(system: System, run: str, entropy: Entropy) -> Callable[[int, FloatVector], Outcome]:
    workload, noise = system.workload, system.work
    cohorts = Cohorts(workload.experiment.sampling, entropy.child("cohorts"))
    learner = _finite(LocalTrainer(workload.model, workload.task.clients, system.local))

    def once(number: int, params: FloatVector) -> Outcome:
        cohort = cohorts.draw(number, 0, number)
        shuffle = int.from_bytes(digest("shuffle", run, number)[:7], "little")
        updates = learner(params, cohort, shuffle)
        if isinstance(noise, ContinuousGaussian):
            mean = gaussian_mean(updates, len(cohort), noise, entropy.child("noise", number).stream())
        else:
            mean = plain_mean(updates, len(cohort))
        return Outcome(mean, 0, len(cohort))

    return once


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
    with suppress(OSError, ValueError):
        return json.loads((path / "summary.json").read_text())["test_accuracy"] is not None
    return False


def _read(system: System, path: Path) -> RunHistory:
    summary = json.loads((path / "summary.json").read_text())
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    server = [item for item in summary["promised"] if item["observer"]["view"] == "server"]
    return RunHistory(
        system=system,
        validation=tuple(100 * line["accuracy"] for line in lines),
        released=_epsilons(system, [line["charged"] for line in lines]),
        test=100 * summary["test_accuracy"],
        server=server[0]["epsilon"] if server else None,
        folder=f"runs/{path.name}",
    )
