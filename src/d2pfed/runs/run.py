"""The driver of a run: resume, round, record, checkpoint, conclude, wherever the sums come from."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from safetensors.numpy import save

from d2pfed.accounting import Guarantee, account, round_up
from d2pfed.errors import BudgetExceeded, ConfigError, ForgottenAttempt, LostRound, PeerError
from d2pfed.ledger import Ledger
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics import canonical
from d2pfed.plan import Plan, guarantees, observers
from d2pfed.round import (
    Attempt,
    AttemptBinding,
    Attempts,
    Outcome,
    aggregate,
    require_clip,
    run_plan,
)
from d2pfed.runs.directory import Checkpoint, RunDirectory, open_ledger
from d2pfed.runs.json_files import from_json, read_text, to_json
from d2pfed.runs.records import End, ExchangeRecord, RoundRecord, RunSettings, RunSummary
from d2pfed.training import ServerState, train

B = TypeVar("B", bound=AttemptBinding)


class Federation(Attempts[B], Protocol[B]):
    """Clients whose sums are private: simulated, or elsewhere."""

    def exchanges(self) -> tuple[ExchangeRecord, ...]:
        """Return the exchanges of the last round; none where nothing travels."""


@runtime_checkable
class Means(Protocol):
    """Clients whose mean is taken in the clear."""

    def mean(self, number: int, model: FloatVector) -> Outcome:
        """Return the mean update of a round's cohort."""


class Evaluator(Protocol):
    """Measures a model; the test data is opened once, at the end."""

    def validate(self, rounds: int, params: FloatVector) -> dict[str, float]:
        """Return the metrics of the model after this many rounds, on data to choose by."""

    def test(self, params: FloatVector) -> dict[str, float]:
        """Return the metrics of the final model, on data to report on."""


# Hears of every round, and returns whether to go on.
Listener = Callable[[RoundRecord], bool]
# From all rounds so far, measured or not, to why the run ends here; an empty text lets it go on.
StopRule = Callable[[Sequence[RoundRecord]], str]


@contextmanager
def open_run(
    path: Path, settings: RunSettings, plan: Plan | None, initial: FloatVector, *, ledger: Path | None = None
) -> Iterator["Run"]:
    """Open a run in its directory, new or to be resumed, and charge it; its caller is the only one until it closes.

    `plan` is None for training in the clear. `ledger` is one that other runs over these clients share; None: the run's
    own.
    """
    with ExitStack() as stack:
        directory = stack.enter_context(RunDirectory.open(path, canonical.encode(settings)))
        name = directory.path.name
        if settings.is_deployed:
            name = f"{name}-{directory.identity().name}"
        elif (
            settings.seed is not None and ledger is None
        ):  # what follows from the name must follow from the seed alone
            name = f"seed-{settings.seed}"
        last = directory.load()
        if last is None:
            adaptive = None if plan is None else plan.adaptive_clip
            state = settings.optimizer.start(initial, None if adaptive is None else adaptive.initial)
        else:
            state = last.state
        if plan is not None:
            try:
                require_clip(plan, state.clip)
            except (ConfigError, PeerError) as error:
                raise ConfigError(f"the checkpoint in {path} does not go with the plan: {error}") from error
        book, refusal = None, ""
        if plan is None and (directory.path / "plan.json").exists():
            raise ConfigError(f"the run in {path} was begun with a plan: it does not go on in the clear")
        if plan is not None:
            directory.replace("plan.json", canonical.encode(plan).encode())
            try:
                repeatable = settings.seed is not None
                book = stack.enter_context(open_ledger(directory, plan, name, ledger, last, repeatable=repeatable))
            except BudgetExceeded as limit:
                refusal = f"{limit}"
        directory.keep_metrics(state.rounds)
        yield Run(settings, plan, directory, name, state, book, refusal)


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is open: its directory, the state it is in, and the ledger that it is charged to."""

    settings: RunSettings
    plan: Plan | None = field(repr=False)
    directory: RunDirectory
    name: str
    state: ServerState  # when it was opened
    ledger: Ledger | None  # None in the clear, and where its budget does not allow the run
    refusal: str  # why the ledger does not allow it; empty if it does

    def train(
        self,
        source: Federation[B] | Means,
        evaluator: Evaluator,
        listen: Listener,
        rounds: int | None = None,
        *,
        evaluate_every: int = 1,
        stop: StopRule | None = None,
    ) -> RunSummary:
        """Go on from where the run is to its end, its budget's end, or the listener's request to stop.

        `source` has the clients: a federation for a run with a plan, means for one in the clear. `rounds` ends it
        earlier than planned, to be resumed later. The model is evaluated after every `evaluate_every` rounds and after
        the last one. `stop` ends the run for good, by what its rounds have shown.
        """
        if isinstance(source, Means) != (self.plan is None):
            raise ValueError("a run with a plan is not trained in the clear, nor the other way round")
        if self.plan is not None and self.ledger is None:
            return self._conclude(self.state, evaluator, End.EXHAUSTED, self.refusal)
        planned, plan = self.settings.rounds, self.plan
        last = planned if rounds is None else min(rounds, planned)
        hides_batches = plan is not None and plan.batches is not None
        state, start, records = self.state, time.monotonic(), self.records()
        if stop is not None and (why := stop(records)):
            return self._conclude(state, evaluator, End.STOPPED, why)
        try:
            for trained in train(state, self.settings.optimizer, last, partial(self._step, source)):
                state = trained.state
                is_measured = trained.round % evaluate_every == 0 or trained.round == planned
                metrics = evaluator.validate(trained.round, state.average) if is_measured else {}
                clipping, clip = trained.clipping, None if plan is None else state.clip or plan.update_clip
                record = RoundRecord(
                    round=trained.round,
                    metrics=metrics,
                    charged=trained.round if self.ledger is None else self.ledger.charged(self.name),
                    survivors=trained.survivors,
                    attempt=trained.attempt,
                    lost=trained.lost,
                    failures=trained.failures,
                    update_norm=trained.update_norm,
                    clip=clip if clipping is None else clipping.clip,
                    fraction_clipped=None if clipping is None else 1 - clipping.within,
                    upload_bytes=self._upload_bytes,
                    seconds=None if hides_batches else time.monotonic() - start,  # it tells how large a batch was
                    exchanges=() if hides_batches or isinstance(source, Means) else source.exchanges(),
                )
                records.append(record)
                self.directory.append(to_json(record))
                self.directory.save(Checkpoint(state, "" if self.ledger is None else self.ledger.head().encode()))
                goes_on = listen(record)
                if stop is not None and (why := stop(records)):
                    return self._conclude(state, evaluator, End.STOPPED, why)
                if not goes_on and state.rounds < last:
                    return self._conclude(state, evaluator, End.INTERRUPTED, "interrupted")
                start = time.monotonic()
        except BudgetExceeded as limit:
            return self._conclude(state, evaluator, End.EXHAUSTED, f"{limit}")
        if state.rounds < planned:
            return self._conclude(state, evaluator, End.INTERRUPTED, f"asked to stop after round {state.rounds}")
        return self._conclude(state, evaluator, End.COMPLETE, "")

    def _step(self, source: Federation[B] | Means, state: ServerState) -> Outcome:
        """Return the mean of the next round: in the clear, or charged before anything is opened."""
        number, plan, ledger = state.rounds, self.plan, self.ledger
        if isinstance(source, Means):
            return source.mean(number, state.params)
        if plan is None or ledger is None:
            raise ValueError("a run without a ledger opens no sum")
        while True:
            first = ledger.next_attempt(self.name, number)
            if first >= plan.attempts_per_round:
                raise BudgetExceeded(f"round {number + 1} was tried {first} times, as often as it may be")
            attempt = Attempt(self.name, number, first)
            try:
                return aggregate(plan, attempt, state.params, source, ledger, clip=state.clip)
            except ForgottenAttempt as known:  # its sum may have been opened: it stays charged
                ledger.reserve(plan.release(self.name, number, known.attempt, known.cohort, plan.quorum))
                if known.attempt + 1 == plan.attempts_per_round:
                    raise LostRound(f"{known}, and it was the round's last one") from None

    def records(self) -> list[RoundRecord]:
        """Return the rounds so far, as far as they were measured."""
        file = self.directory.path / "metrics.jsonl"
        lines = read_text(file).splitlines()
        return [from_json(RoundRecord, line, f"{file}, line {at}") for at, line in enumerate(lines, 1)]

    def _conclude(self, state: ServerState, evaluator: Evaluator, end: End, stopped: str) -> RunSummary:
        """Open the test data if the run is at its end, write the model, and say what is guaranteed."""
        from d2pfed.runs.report import read_report, write_report  # noqa: PLC0415 - the plotter takes a second to load

        is_complete, plan, ledger = end in (End.COMPLETE, End.STOPPED), self.plan, self.ledger
        so_far, tuning = list[Guarantee](), ""
        if plan is not None and ledger is not None:
            if self.settings.stop_is_blind and not is_complete:  # else what was seen may have stopped the run
                # Without participants: who took part, and how often, stays with the server.
                own = [replace(each, participants=()) for each in ledger.releases() if each.run == self.name]
                cap, seen_by = plan.max_participations, observers(plan) if own else ()
                so_far = [account(own, each, delta=plan.delta, max_participations=cap) for each in seen_by]
            budget, count = ledger.budget, len(ledger.runs())
            if count != 1 or budget != run_plan(plan).budget:  # the ledger is not the run's own
                tuning = (
                    f"{count} run{'s' * (count != 1)} on this ledger, epsilon {round_up(budget.epsilon, 4)} together "
                    f"at delta {round_up(budget.delta, 3)} against {budget.observer}, even if earlier results "
                    f"decided later settings ({round_up(ledger.spent(), 4)} if none did)"
                )
        summary = RunSummary(
            directory=str(self.directory.path),
            rounds=state.rounds,
            end=end,
            stopped=stopped,
            metrics=evaluator.validate(state.rounds, state.average),
            test_metrics=evaluator.test(state.average) if is_complete else None,
            guarantees=() if plan is None else guarantees(plan),
            so_far=tuple(so_far),
            charged=state.rounds if plan is None else 0 if ledger is None else ledger.charged(self.name),
            max_attempts=self.settings.rounds if plan is None else plan.max_attempts,
            upload_bytes=self._upload_bytes,
            dimension=len(state.params),
            bits=None if plan is None else plan.ring.bits,
            repeatable=self.settings.seed is not None,
            tuning=tuning,
        )
        arrays = self.settings.arrays
        parts = np.split(state.average, np.cumsum([array.size for array in arrays])[:-1])
        named = {array.name: part.reshape(array.shape).copy() for array, part in zip(arrays, parts, strict=True)}
        self.directory.replace("model.safetensors", save(named))
        self.directory.replace("summary.json", to_json(summary).encode())
        write_report(read_report(self.directory.path), self.directory.path)
        return summary

    def last_model(self) -> FloatVector:
        """Return the model of the last checkpoint: the one that is released."""
        last = self.directory.load()
        return self.state.average if last is None else last.state.average

    @property
    def _upload_bytes(self) -> int:
        if self.plan is None:
            return 4 * sum(array.size for array in self.settings.arrays)
        return self.plan.ring.packed_bytes(self.plan.codec.length)
