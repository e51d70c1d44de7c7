"""A whole training run in its directory: from settings to a released model, resumable after every round."""

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors.numpy import save

from d2pfed import canonical
from d2pfed.accounting import Scheme, Spent, spent
from d2pfed.codec import FloatVector
from d2pfed.directory import Checkpoint, RunDirectory, open_ledger
from d2pfed.errors import BudgetExceeded
from d2pfed.learning import Learner, LocalTraining, Model, Task, evaluate
from d2pfed.ledger import Head, Ledger
from d2pfed.plan import Plan, Target, calibrate, observers
from d2pfed.randomness import Entropy, digest
from d2pfed.report import read_story, write_report
from d2pfed.round import Attempt, Outcome, aggregate
from d2pfed.simulation import Crew, Dropouts, Fidelity, Hire, InProcess, Simulation
from d2pfed.training import Cohorts, RoundRecord, ServerState, ServerStep, train


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that decides a run; the same settings resume it, others are refused."""

    task: str
    data: str  # what the task says of its data
    model: str
    target: Target
    local: LocalTraining
    step: ServerStep
    dropouts: Dropouts
    fidelity: Fidelity
    seed: int | None  # None: the system's entropy; a number repeats the run and protects nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is after a round."""

    round: int
    rounds: int
    accuracy: float  # on the validation data
    loss: float
    epsilon: float  # spent against the plan's observer
    survivors: int | None  # None, as all that tells it, where cohort sizes are secret
    attempt: int | None
    update_norm: float
    upload_bytes: int  # of one client in this round
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run came to."""

    directory: str
    rounds: int
    stopped: str  # why before the planned end; empty if it came to its end
    test_accuracy: float | None  # None while rounds are left
    validation_accuracy: float
    spent: tuple[Spent, ...]
    upload_bytes: int  # of one client and round
    dimension: int
    bits: int
    repeatable: bool


Listener = Callable[[Progress], bool]  # is told of every round; answers whether to go on


@dataclass(frozen=True, slots=True)
class Job:
    """A run that can be carried out, or carried on."""

    settings: Settings
    task: Task
    model: Model
    plan: Plan = field(repr=False)

    @staticmethod
    def of(settings: Settings, task: Task, model: Model) -> "Job":
        """Plan a run."""
        return Job(settings, task, model, calibrate(settings.target))

    def execute(self, path: Path, ledger: Path, listen: Listener, hire: Hire = InProcess) -> Summary:
        """Carry the run on from where it is to its end, its budget's end, or the listener's wish.

        `hire` says who trains the clients; a run may go on with another crew than it began with.
        """
        learner = Learner(self.model, self.task.clients, self.settings.local)
        with RunDirectory.open(path, canonical.encode(self.settings)) as directory:
            directory.replace("plan.json", canonical.encode(self.plan).encode())
            with open_ledger(ledger, self.plan) as book, hire(learner) as crew:
                state, stopped = self._rounds(directory, book, listen, crew)
                return self._conclude(directory, book, state, stopped)

    def _rounds(
        self, directory: RunDirectory, book: Ledger, listen: Listener, crew: Crew
    ) -> tuple[ServerState, str]:
        state = self._resume(directory, book)
        start = time.monotonic()
        try:
            for record in train(
                state, self.settings.step, self.plan.rounds, self._aggregate(directory, book, crew)
            ):
                state = record.state
                progress = self._progress(record, book.spent(), time.monotonic() - start)
                directory.append(asdict(progress))
                directory.save(Checkpoint(state, book.head().encode()))
                if not listen(progress):
                    return state, "interrupted"
                start = time.monotonic()
        except BudgetExceeded as limit:
            return state, f"the budget is spent: {limit}"
        return state, ""

    def _resume(self, directory: RunDirectory, book: Ledger) -> ServerState:
        """Return the state that was kept last, or the first one; refuse it beside an older ledger."""
        checkpoint = directory.load()
        if checkpoint is None:
            directory.keep_metrics(0)
            return self.settings.step.start(self.model.initial())
        book.require_head(Head.decode(checkpoint.head))
        directory.keep_metrics(checkpoint.state.rounds)
        return checkpoint.state

    def _aggregate(
        self, directory: RunDirectory, book: Ledger, crew: Crew
    ) -> Callable[[int, FloatVector], Outcome]:
        seed, run = self.settings.seed, directory.path.name
        entropy = Entropy.system() if seed is None else Entropy.replay(str(seed).encode())
        # A resumed run keeps its cohorts, or a client of a partition might be drawn in two rounds.
        drawing = directory.identity().cohorts if seed is None else entropy.child("cohorts")
        cohorts = Cohorts(self.plan.sampling, drawing)
        taken: Counter[int] = Counter()
        counted = 0  # releases of earlier rounds, which change no more

        def once(round_number: int, params: FloatVector) -> Outcome:
            nonlocal counted
            releases = book.releases()
            taken.update(client for release in releases[counted:] for client in release.participants)
            counted = len(releases)
            shuffle = int.from_bytes(digest("shuffle", run, round_number)[:7], "little")
            simulation = Simulation(
                plan=self.plan,
                model=params.tobytes(),
                updates=crew.updates(params, shuffle),
                encode=crew.encode(params, shuffle),
                dropouts=self.settings.dropouts,
                entropy=entropy.child("clients"),
                taken=taken,
            )
            # The first round goes through every message of the protocol; the others give the same sum without.
            fidelity = Fidelity.PROTOCOL if round_number == 0 else self.settings.fidelity
            return aggregate(
                self.plan,
                Attempt(run, round_number, book.next_attempt(run, round_number)),
                cohorts.draw(round_number),
                lambda session: simulation.collect(session, fidelity),
                book,
            )

        return once

    def _progress(self, record: RoundRecord, epsilon: float, seconds: float) -> Progress:
        metrics = evaluate(self.model, record.state.average, self.task.validation)
        secret = self.plan.sampling.scheme is Scheme.POISSON
        return Progress(
            round=record.round,
            rounds=self.plan.rounds,
            accuracy=metrics.accuracy,
            loss=metrics.loss,
            epsilon=epsilon,
            survivors=None if secret else record.survivors,
            attempt=None if secret else record.attempt,
            update_norm=record.update_norm,
            upload_bytes=self.plan.ring.packed_bytes(self.plan.codec.length),
            seconds=None if secret else seconds,
        )

    def _conclude(self, directory: RunDirectory, book: Ledger, state: ServerState, stopped: str) -> Summary:
        """Open the test data if training is over, write the model, and say what was spent."""
        over = state.rounds == self.plan.rounds or stopped.startswith("the budget")
        accuracy = evaluate(self.model, state.average, self.task.test()).accuracy if over else None
        directory.replace("model.safetensors", save({"params": state.average}))
        releases = book.releases()
        summary = Summary(
            directory=str(directory.path),
            rounds=state.rounds,
            stopped=stopped,
            test_accuracy=accuracy,
            validation_accuracy=evaluate(self.model, state.average, self.task.validation).accuracy,
            spent=tuple(
                spent(releases, observer, delta=self.plan.delta, cap=self.plan.participations)
                for observer in observers(self.plan)
            )
            if releases
            else (),
            upload_bytes=self.plan.ring.packed_bytes(self.plan.codec.length),
            dimension=self.model.dimension,
            bits=self.plan.ring.bits,
            repeatable=self.settings.seed is not None,
        )
        directory.replace("summary.json", json.dumps(asdict(summary), default=str, indent=2).encode())
        write_report(read_story(directory.path), directory.path)
        return summary
