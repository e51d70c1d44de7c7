"""What the report of a run says, read back from the run's directory, and numbers as a reader expects them."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from d2pfed.errors import ConfigError, DamagedFile
from d2pfed.numerics import canonical
from d2pfed.numerics.rotation import Fold
from d2pfed.plan import MechanismName, Plan, PlanSummary, PrivacyTarget, ProtocolChoice, RotationName, describe
from d2pfed.plan.describe import describe_plan
from d2pfed.plan.plan import TYPES
from d2pfed.runs.json_files import from_json, parse, read_text, require_directory
from d2pfed.runs.records import SILOS, RoundRecord, RunSummary, SiloTable, TrainingAudit

Value = TypeVar("Value")

BASELINE = "baseline.json"  # in a run's directory, if it names one
AUDIT = "audit.json"  # in a run's directory, if its training was audited
MOST_ITEMS = 20  # of a list in a table; the whole of it is in the file
_CHOSEN_BY_TYPE = frozenset({"mechanism", "rotation"})  # their type is what was chosen

_TYPES = TYPES | {kind.__name__: kind for kind in (PrivacyTarget, MechanismName, ProtocolChoice, RotationName)}


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
    silos: SiloTable | None = None

    def __post_init__(self) -> None:
        if self.plan is not None and self.plan.adaptive_clip is not None:
            for record in self.rounds:
                if record.clip is None or (record.fraction_clipped is None and not record.lost):
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
        """Estimate the norm of a round's mean without its noise, which is nearly orthogonal; 0 if noise is all.

        Decoding a fold spreads each number over its terms, so what is not noise is larger by dimension / length.
        """
        energy = max(0.0, record.update_norm**2 - self.noise_in(record) ** 2)
        if self.is_folded and self.plan is not None:
            energy *= self.plan.codec.length / self.plan.codec.rotation.dimension
        return math.sqrt(energy)

    @property
    def is_folded(self) -> bool:
        """Whether vectors were compressed."""
        return self.plan is not None and isinstance(self.plan.codec.rotation, Fold)

    def rho_in(self, record: RoundRecord) -> float:
        """Return |mean|^2 / (k s^2) as a released sum shows it: what a fold adds, over the energy of the noise."""
        return max(0.0, (record.update_norm / self.noise_in(record)) ** 2 - 1)


def read_report(run: Path) -> RunReport:
    """Return the report of the run in a directory; a file that is missing or damaged is refused by name."""
    require_directory(run)
    file, plan_file = run / "settings.json", run / "plan.json"
    settings = parse(read_text(file), f"{file}")
    summary = from_json(RunSummary, read_text(run / "summary.json"), f"{run / 'summary.json'}")
    rounds = tuple(
        from_json(RoundRecord, line, f"{run / 'metrics.jsonl'}, line {number}")
        for number, line in enumerate(read_text(run / "metrics.jsonl").splitlines(), 1)
    )
    if rounds and summary.rounds < rounds[-1].round:
        raise ConfigError(
            f"{run / 'summary.json'} has {summary.rounds} rounds and metrics.jsonl {rounds[-1].round}: the run has "
            f"gone on since, so resume it by its own command first"
        )
    header = from_json(_Header, read_text(file), f"{file}")
    target, plan = None, None
    if settings.get("target") is not None:
        text = json.dumps(settings["target"], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        target = _decode(text, PrivacyTarget, f"{file}")
    if summary.bits is not None or plan_file.exists():
        plan = _decode(read_text(plan_file), Plan, f"{plan_file}")
        if summary.bits is None:
            raise ConfigError(f"{plan_file} is there, and by summary.json the run was trained in the clear")
    try:
        rows = table(settings)
    except ConfigError as error:
        raise DamagedFile(f"{file} is damaged: {error}") from error
    try:
        described = None
        if plan is not None:
            described = describe_plan(plan) if target is None else describe(target, plan)
        return RunReport(
            title=header.title,
            run=run.resolve().name,
            data=header.data,
            settings=rows,
            plan=plan,
            plan_summary=described,
            summary=summary,
            planned_rounds=header.rounds,
            rounds=rounds,
            ledger="ledger.sqlite" if (run / "ledger.sqlite").is_file() else None,
            baseline=_read_optional(Baseline, run / BASELINE),
            audit=_read_optional(TrainingAudit, run / AUDIT),
            silos=_read_optional(SiloTable, run / SILOS),
        )
    except ConfigError as error:
        raise ConfigError(f"the files of the run in {run} do not belong together: {error}") from error


def _read_optional(kind: type[Value], path: Path) -> Value | None:
    return from_json(kind, read_text(path), f"{path}") if path.exists() else None


def _decode(text: str, kind: type[Value], where: str) -> Value:
    try:
        return canonical.decode(text, _TYPES, kind)
    except ConfigError as error:
        raise DamagedFile(f"{where} is damaged: {error}") from error


def table(plain: Mapping[str, object], where: str = "") -> tuple[tuple[str, str], ...]:
    """Return the fields of a value's canonical JSON as dotted names and readable values, in order of name."""
    found: list[tuple[str, str]] = []
    for name, item in sorted(plain.items()):
        if isinstance(item, dict) and "is" not in item:
            if name in _CHOSEN_BY_TYPE:
                found.append((where + name, str(item.get("", ""))))
            found.extend(table(item, f"{where}{name}."))
        elif name:
            found.append((where + name, _readable(item)))
    return tuple(found)


def _readable(item: object) -> str:
    if item is None:
        return "none"
    if isinstance(item, list):
        more = f", and {len(item) - MOST_ITEMS:,} more" if len(item) > MOST_ITEMS else ""
        return ", ".join(_readable(part) for part in item[:MOST_ITEMS]) + more
    if not isinstance(item, dict):
        return str(item)
    if "is" not in item:  # a value in a list
        return " ".join(
            f"({_readable(part)})" if isinstance(part, list) else _readable(part)
            for name, part in sorted(item.items())
            if name
        )
    value = str(item["is"])
    if item.get("") != "float":
        return value
    try:
        return str(float.fromhex(value))
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"a setting must be a number in hexadecimal, got {value[:40]}") from error


def percent(share: float) -> str:
    """Return a share as a percentage in two decimals."""
    return f"{100 * share:.2f} %"


def shown(metric: str, value: float) -> str:
    """Return a metric as a reader expects it: an accuracy as a percentage."""
    if not math.isfinite(value):
        return "not finite"
    return percent(value) if metric == "accuracy" else f"{value:.4g}"


def unit_of(size_bytes: float) -> tuple[str, float]:
    """Return the unit that suits a size, and its bytes."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return unit, scale
    return "bytes", 1.0


def in_bytes(size_bytes: float) -> str:
    """Return a size in the unit that suits it."""
    unit, scale = unit_of(size_bytes)
    return f"{size_bytes / scale:.3g} {unit}"
