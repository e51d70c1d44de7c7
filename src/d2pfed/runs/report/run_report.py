"""What the report of a run says, and how it is read back from the run's directory."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from d2pfed.accounting import is_amplified
from d2pfed.errors import ConfigError, DamagedFile
from d2pfed.numerics import canonical
from d2pfed.plan import MechanismName, Plan, PlanSummary, PrivacyTarget, RotationName, describe
from d2pfed.plan.describe import describe_plan
from d2pfed.plan.plan import TYPES
from d2pfed.runs.plain import from_json, parse, read_text, require_directory
from d2pfed.runs.records import End, RoundRecord, RunSummary, TrainingAudit
from d2pfed.runs.report.tables import table, text_of

Value = TypeVar("Value")

BASELINE = "baseline.json"  # in a run's directory, if it names one
AUDIT = "audit.json"  # in a run's directory, if its training was audited

_TYPES = TYPES | {kind.__name__: kind for kind in (PrivacyTarget, MechanismName, RotationName)}


@dataclass(frozen=True, slots=True)
class _Header:
    """What a report says of a run's settings by name; the rest of them is a table."""

    title: str
    data: str
    rounds: int


@dataclass(frozen=True, slots=True)
class Baseline:
    """Another run over the same data, whose metrics stand beside this one's."""

    name: str
    rounds: tuple[RoundRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """All that the report of one run says; without a plan nothing was private."""

    title: str
    run: str  # the run's name
    data: str  # what the data are
    settings: tuple[tuple[str, str], ...]  # names and values
    plan: Plan | None
    plan_summary: PlanSummary | None
    summary: RunSummary
    planned_rounds: int
    rounds: tuple[RoundRecord, ...]  # as far as they were measured: a crash may have taken a line
    ledger: str | None  # its file in the run's directory, if it is there
    baseline: Baseline | None = None
    audit: TrainingAudit | None = None

    def __post_init__(self) -> None:
        if self.plan is not None and self.plan.adaptive_clip is not None:
            for record in self.rounds:
                if record.clip is None or record.fraction_clipped is None:
                    raise ConfigError(f"the plan's clip adapts, and round {record.round} has no clip and fraction")
        numbers = [record.round for record in self.rounds]
        if numbers != sorted(set(numbers)):
            raise ConfigError(f"the rounds of a report must be in order, got {numbers[:10]}")
        if not max(numbers, default=0) <= self.summary.rounds <= self.planned_rounds:
            raise ConfigError(
                f"{self.planned_rounds} rounds were planned, the summary has {self.summary.rounds} and the metrics go "
                f"up to {max(numbers, default=0)}"
            )

    @property
    def is_exhausted(self) -> bool:
        """Whether its budget, or the attempts that it may take, are used up."""
        return self.summary.end is End.EXHAUSTED

    @property
    def amplified(self) -> bool:
        """Whether the guarantee to `released` rests on nobody else knowing who took part."""
        return self.plan is not None and is_amplified(self.plan.sampling)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics of every round that was evaluated, an accuracy first."""
        measured = [record.metrics for record in self.rounds if record.metrics]
        names = [name for name in measured[0] if all(name in each for each in measured)] if measured else []
        return tuple(sorted(names, key=lambda name: name != "accuracy"))

    def noise_in(self, record: RoundRecord) -> float:
        """Return the expected norm of the noise in a round's mean: less if clients with their noise are missing."""
        if self.plan is None or self.plan_summary is None:
            return 0.0
        norm = self.plan_summary.noise_to_clip * self.clip_in(record)
        if not record.survivors:
            return norm
        present, full = (
            self.plan.noise(count).sum_variance for count in (record.survivors, self.plan.cohort_size)
        )
        return norm * math.sqrt(present / full)

    def clip_in(self, record: RoundRecord) -> float:
        """Return the clip of a round, in real units."""
        if self.plan is not None and self.plan.adaptive_clip is None:
            return self.plan.update_clip
        return record.clip or 0.0

    def signal_in(self, record: RoundRecord) -> float:
        """Estimate the norm of a round's mean without its noise, which is nearly orthogonal; 0 if noise is all."""
        return math.sqrt(max(0.0, record.update_norm**2 - self.noise_in(record) ** 2))


def read_report(run: Path) -> RunReport:
    """Return the report of the run in a directory; a file that is missing or damaged is refused by name."""
    require_directory(run)
    file = run / "settings.json"
    settings = parse(read_text(file), f"{file}")
    summary = from_json(RunSummary, read_text(run / "summary.json"), f"{run / 'summary.json'}")
    rounds = _read_rounds(run / "metrics.jsonl")
    if rounds and summary.rounds < rounds[-1].round:
        raise ConfigError(
            f"{run / 'summary.json'} has {summary.rounds} rounds and metrics.jsonl {rounds[-1].round}: the run has "
            f"gone on since, so resume it by its own command first"
        )
    header = from_json(_Header, read_text(file), f"{file}")
    target, plan = _read_target(settings, file), _read_plan(run / "plan.json", summary)
    rows = _rows(settings, file)
    try:
        return RunReport(
            title=header.title,
            run=run.resolve().name,
            data=header.data,
            settings=rows,
            plan=plan,
            plan_summary=None if plan is None else _summarise(target, plan),
            summary=summary,
            planned_rounds=header.rounds,
            rounds=rounds,
            ledger="ledger.sqlite" if (run / "ledger.sqlite").is_file() else None,
            baseline=_read_baseline(run / BASELINE),
            audit=_read_audit(run / AUDIT),
        )
    except ConfigError as error:
        raise ConfigError(f"the files of the run in {run} do not belong together: {error}") from error


def _rows(settings: dict[str, object], file: Path) -> tuple[tuple[str, str], ...]:
    try:
        return table(settings)
    except ConfigError as error:
        raise DamagedFile(f"{file} is damaged: {error}") from error


def _summarise(target: PrivacyTarget | None, plan: Plan) -> PlanSummary:
    return describe_plan(plan) if target is None else describe(target, plan)


def _read_rounds(path: Path) -> tuple[RoundRecord, ...]:
    lines = read_text(path).splitlines()
    return tuple(from_json(RoundRecord, line, f"{path}, line {number}") for number, line in enumerate(lines, 1))


def _read_baseline(path: Path) -> Baseline | None:
    return from_json(Baseline, read_text(path), f"{path}") if path.exists() else None


def _read_audit(path: Path) -> TrainingAudit | None:
    return from_json(TrainingAudit, read_text(path), f"{path}") if path.exists() else None


def _read_plan(path: Path, summary: RunSummary) -> Plan | None:
    """Return the plan of a private run, which must have one; None for a run in the clear."""
    if summary.bits is None and not path.exists():
        return None
    plan = _decode(read_text(path), Plan, f"{path}")
    if summary.bits is None:
        raise ConfigError(f"{path} is there, and by summary.json the run was trained in the clear")
    return plan


def _read_target(settings: dict[str, object], file: Path) -> PrivacyTarget | None:
    target = settings.get("target")
    return None if target is None else _decode(text_of(target), PrivacyTarget, f"{file}")


def _decode(text: str, kind: type[Value], where: str) -> Value:
    try:
        value = canonical.decode(text, _TYPES)
    except ConfigError as error:
        raise DamagedFile(f"{where} is damaged: {error}") from error
    if not isinstance(value, kind):
        raise DamagedFile(f"{where} is damaged: it must hold a {kind.__name__}, got a {type(value).__name__}")
    return value
