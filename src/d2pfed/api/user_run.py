"""One call of `fit` whose arguments are checked: trial, backend, driver, result."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from d2pfed.accounting import Unit
from d2pfed.api.backends import (
    MISTAKES,
    BackendName,
    OwnTrainer,
    WeightedTrainer,
    mistake,
    record_backend,
    start_backend,
    try_client,
)
from d2pfed.api.complete_target import Scope
from d2pfed.api.norms import FILE, NormRecorder, read_norms
from d2pfed.api.result import FitResult
from d2pfed.api.simulated import SimulatedRun
from d2pfed.api.early_stop import EarlyStop
from d2pfed.api.progress import Callback, Watch, listener
from d2pfed.errors import BudgetExceeded
from d2pfed.learning import (
    Groups,
    LocalTraining,
    Metric,
    Model,
    OwnClients,
    RecordTrainer,
    Rows,
    batches_of,
    measure,
    trainer_for,
)
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics import canonical
from d2pfed.plan import Plan, calibrate
from d2pfed.runs import End, RunSettings, RunSummary
from d2pfed.runs.report import read_report
from d2pfed.simulation import Backend, Dropouts, Fidelity


@dataclass(frozen=True, slots=True)
class Details:
    """What decides a run of `fit` beside what every run has; data and initial parameters are not compared.

    Whether rows are grouped by their owner is: it decides what the printed epsilon protects.
    """

    local: LocalTraining
    cohort_size: int
    loss: str
    fixed: str  # digest of all parameters and buffers that are not trained
    early_stop: EarlyStop | None
    max_weight: float | None = field(default=None, metadata=canonical.OMITTED_IF_NONE)  # None: all weigh alike
    unit: str | None = field(default=None, metadata=canonical.OMITTED_IF_NONE)  # "owner" where rows have one


@dataclass(frozen=True, slots=True, eq=False)
class OwnEvaluator:
    """Measures a model on a user's data; those for the test are opened once, at the end."""

    model: Model
    validation: object = field(repr=False)
    held_out: object = field(repr=False)
    metrics: Mapping[str, Metric]

    def validate(self, _rounds: int, params: FloatVector) -> dict[str, float]:
        """Return the metrics on the validation data; none without such data."""
        return measure(self.model, params, batches_of(self.validation, "validation"), self.metrics)

    def test(self, params: FloatVector) -> dict[str, float]:
        """Return the metrics on the test data; none without such data."""
        return measure(self.model, params, batches_of(self.held_out, "test"), self.metrics)

    def rehearse(self, params: FloatVector) -> None:
        """Measure one batch of the validation data, so that a mistake shows before anything is charged."""
        batches: Iterator[Rows] = islice(batches_of(self.validation, "validation"), 1)
        try:
            measure(self.model, params, batches, self.metrics)
        except MISTAKES as error:
            raise mistake("the validation data cannot be measured", error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRun:
    """All that decides a call, checked."""

    model: Model
    clients: OwnClients
    groups: Groups | None
    weights: tuple[float, ...] | None
    scope: Scope
    settings: RunSettings
    details: Details
    evaluator: OwnEvaluator
    evaluate_every: int
    callbacks: tuple[Callback, ...]
    path: Path

    def execute(self, watch: Watch, where: tuple[BackendName, int | None], ledger: Path | None) -> FitResult:
        """Train from where the run is, and say what it came to."""
        plan = None if self.scope.target is None else calibrate(self.scope.target, self.details.max_weight)
        initial = self.model.initial()
        self.evaluator.rehearse(initial)
        backend, line = self._backend(initial, where, plan)
        notes = (*self.scope.notes, line)
        for note in notes:
            watch.say(note)
        run = SimulatedRun(
            settings=self.settings,
            plan=plan,
            sampling=self.scope.sampling,
            initial=initial,
            dropouts=Dropouts(),
            fidelity=Fidelity.SUM,
        )
        summary = run.execute(
            self.path,
            ledger,
            self.evaluator,
            lambda opened: listener(opened, self.model, watch, self.callbacks),
            backend if plan is not None else NormRecorder(backend, self.path / FILE),
            evaluate_every=self.evaluate_every,
            stop=self.details.early_stop,
        )
        if summary.end is End.EXHAUSTED and not summary.rounds:
            raise BudgetExceeded(summary.stopped)
        return self._result(summary, plan, notes)

    def _backend(
        self, params: FloatVector, where: tuple[BackendName, int | None], plan: Plan | None
    ) -> tuple[Backend, str]:
        client, _ = self.clients.first()
        if plan is not None and plan.unit is Unit.RECORD:
            silos = RecordTrainer(self.model, self.clients, self.groups)
            return record_backend(silos, params, where[0], plan.divisor)
        try:
            own = trainer_for(self.model, self.clients, self.details.local)
        except MISTAKES as error:
            raise mistake(f"client {client} cannot be trained", error) from error
        trainer: OwnTrainer = own if self.weights is None else WeightedTrainer(own, self.weights)
        seconds = try_client(trainer, params, client) * self.scope.sampling.cohort_size * self.scope.rounds
        return start_backend(where[0], trainer, (params, client), seconds=seconds, workers=where[1])

    def _result(self, summary: RunSummary, plan: Plan | None, notes: tuple[str, ...]) -> FitResult:
        report = read_report(self.path)
        arrays = load_file(self.path / "model.safetensors")
        params = np.concatenate([arrays[each.name].reshape(-1) for each in self.settings.arrays])
        quantiles, not_finite = read_norms(self.path)
        stop = self.details.early_stop if summary.end is End.STOPPED else None
        return FitResult(
            module=self.model.load(params),
            metrics=summary.metrics,
            test_metrics=summary.test_metrics or None,
            guarantees=summary.guarantees,
            stop_guarantee=None if stop is None or plan is None else stop.guarantee(plan, summary.charged),
            history=report.rounds,
            norm_quantiles=quantiles,
            not_finite=None if plan is not None else not_finite,
            directory=self.path,
            summary=summary,
            plan_summary=report.plan_summary,
            notes=notes,
        )
