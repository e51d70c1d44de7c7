"""A whole training run in its directory: from settings to a released model, resumable after every round."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from safetensors.numpy import save

from d2pfed.accounting import Guarantee, Sampling, account
from d2pfed.errors import BudgetExceeded
from d2pfed.learning import LocalTrainer, LocalTraining, Model, Task, evaluate
from d2pfed.ledger import Ledger
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.plan import Plan, PrivacyTarget, calibrate, observers
from d2pfed.plan.plan import guarantees
from d2pfed.round import Attempt, Outcome, aggregate
from d2pfed.runs.directory import Checkpoint, RunDirectory, open_run
from d2pfed.runs.report import read_story, write_report
from d2pfed.simulation import Crew, Dropouts, Fidelity, Hire, InProcess, Simulation
from d2pfed.training import Cohorts, RoundRecord, ServerOptimizer, ServerState, train


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that decides a run; the same settings resume it, others are refused."""

    task: str
    data: str  # what the task says of its data
    model: str
    target: PrivacyTarget
    local: LocalTraining
    step: ServerOptimizer
    dropouts: Dropouts
    fidelity: Fidelity
    seed: int | None  # None: the system's entropy; a number repeats the run and protects nobody
    stop_is_blind: bool = False  # whether the run, if it stops early, does so for nothing that it has shown


class End(StrEnum):
    """How a run ended."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"  # the same command carries it on
    EXHAUSTED = "exhausted"  # its budget, or the attempts that it may take, are used up: it cannot go on


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is after a round."""

    round: int
    rounds: int
    accuracy: float  # on the validation data
    loss: float
    charged: int  # attempts that may have been opened so far, of the most that the run was charged for
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
    end: End
    stopped: str  # why before the planned end; empty if it came to its end
    test_accuracy: float | None  # None unless all rounds are done
    validation_accuracy: float
    promised: tuple[Guarantee, ...]  # what the whole plan spends: it holds however the run ended
    so_far: tuple[Guarantee, ...]  # what was charged so far; none unless the stop was blind to all outputs
    charged: int  # attempts that may have been opened
    max_attempts: int
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

    def execute(self, path: Path, ledger: Path | None, listen: Listener, hire: Hire = InProcess) -> Summary:
        """Carry the run on from where it is to its end, its budget's end, or the listener's wish.

        `ledger` is one that other runs over these clients share, None the run's own. `hire` says who trains the
        clients; a run may go on with another crew than it began with.
        """
        learner = LocalTrainer(self.model, self.task.clients, self.settings.local)
        with RunDirectory.open(path, canonical.encode(self.settings)) as directory:
            directory.replace("plan.json", canonical.encode(self.plan).encode())
            last = directory.load()
            state = self.settings.step.start(self.model.initial()) if last is None else last.state
            try:
                book = open_run(directory, self.plan, directory.path.name, ledger, last)
            except BudgetExceeded as limit:
                directory.keep_metrics(state.rounds)
                return self._conclude(directory, None, state, End.EXHAUSTED, f"{limit}")
            with book, hire(learner) as crew:
                directory.keep_metrics(state.rounds)
                return self._conclude(directory, book, *self._rounds(directory, book, listen, crew, state))

    def _rounds(
        self, directory: RunDirectory, book: Ledger, listen: Listener, crew: Crew, state: ServerState
    ) -> tuple[ServerState, End, str]:
        start = time.monotonic()
        try:
            for record in train(
                state, self.settings.step, self.plan.rounds, self._aggregate(directory, book, crew)
            ):
                state = record.state
                progress = self._progress(record, book.charged(directory.path.name), time.monotonic() - start)
                directory.append(asdict(progress))
                directory.save(Checkpoint(state, book.head().encode()))
                if not listen(progress) and state.rounds < self.plan.rounds:
                    return state, End.INTERRUPTED, "interrupted"
                start = time.monotonic()
        except BudgetExceeded as limit:
            return state, End.EXHAUSTED, f"{limit}"
        return state, End.COMPLETE, ""

    def _aggregate(
        self, directory: RunDirectory, book: Ledger, crew: Crew
    ) -> Callable[[int, FloatVector], Outcome]:
        seed, run = self.settings.seed, directory.path.name
        entropy = Entropy.system() if seed is None else Entropy.replay(str(seed).encode())
        # Two runs with one seed must not share their cohorts, nor a run and one that goes on from a copy of it. Only a
        # partition is kept when a run is resumed, or a client might be drawn in two rounds.
        drawing = entropy.child("cohorts", run)
        if seed is None and self.plan.sampling.method is Sampling.ONCE:
            drawing = directory.identity().cohorts
        cohorts = Cohorts(self.plan.sampling, drawing)

        def once(number: int, params: FloatVector) -> Outcome:
            shuffle = int.from_bytes(digest("shuffle", run, number)[:7], "little")
            simulation = Simulation(
                plan=self.plan,
                model=params.tobytes(),
                updates=crew.updates(params, shuffle),
                encode=crew.encode(params, shuffle),
                dropouts=self.settings.dropouts,
                entropy=entropy.child("clients"),
                participations={},
            )
            # The first round goes through every message of the protocol; the others give the same sum without.
            fidelity = Fidelity.PROTOCOL if number == 0 else self.settings.fidelity
            first = book.next_attempt(run, number)
            if first >= self.plan.attempts_per_round:
                raise BudgetExceeded(f"round {number} was tried {first} times, as often as it may be")
            return aggregate(
                self.plan,
                Attempt(run, number, first),
                lambda attempt: cohorts.draw(number, attempt, book.charged(run)),
                lambda session, participations: replace(simulation, participations=participations).collect(
                    session, fidelity
                ),
                book,
            )

        return once

    def _progress(self, record: RoundRecord, charged: int, seconds: float) -> Progress:
        metrics = evaluate(self.model, record.state.average, self.task.validation)
        secret = self.plan.sampling.method is Sampling.POISSON
        return Progress(
            round=record.round,
            rounds=self.plan.rounds,
            accuracy=metrics.accuracy,
            loss=metrics.loss,
            charged=charged,
            survivors=None if secret else record.survivors,
            attempt=None if secret else record.attempt,
            update_norm=record.update_norm,
            upload_bytes=self.plan.ring.packed_bytes(self.plan.codec.length),
            seconds=None if secret else seconds,
        )

    def _conclude(
        self, directory: RunDirectory, book: Ledger | None, state: ServerState, end: End, stopped: str
    ) -> Summary:
        """Open the test data if all rounds are done, write the model, and say what was promised."""
        complete = end is End.COMPLETE
        run = directory.path.name
        summary = Summary(
            directory=str(directory.path),
            rounds=state.rounds,
            end=end,
            stopped=stopped,
            test_accuracy=evaluate(self.model, state.average, self.task.test()).accuracy if complete else None,
            validation_accuracy=evaluate(self.model, state.average, self.task.validation).accuracy,
            promised=guarantees(self.plan),
            so_far=() if book is None or complete or not self.settings.stop_is_blind else self._so_far(book, run),
            charged=0 if book is None else book.charged(run),
            max_attempts=self.plan.max_attempts,
            upload_bytes=self.plan.ring.packed_bytes(self.plan.codec.length),
            dimension=self.model.dimension,
            bits=self.plan.ring.bits,
            repeatable=self.settings.seed is not None,
        )
        directory.replace("model.safetensors", save({"params": state.average}))
        directory.replace("summary.json", json.dumps(asdict(summary), default=str, indent=2).encode())
        write_report(read_story(directory.path), directory.path)
        return summary

    def _so_far(self, book: Ledger, run: str) -> tuple[Guarantee, ...]:
        """Return what the attempts so far cost: a bound only if nobody stopped the run for what was seen."""
        # Without participants: who took part, and how often, stays with the server.
        releases = [replace(release, participants=()) for release in book.releases() if release.run == run]
        plan = self.plan
        return tuple(
            account(releases, observer, delta=plan.delta, max_participations=plan.max_participations)
            for observer in observers(plan)
        )
