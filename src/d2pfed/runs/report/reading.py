"""Reading a run's story back from the files in its directory."""

from pathlib import Path
from typing import TypeVar

from d2pfed.accounting import Adjacency, Guarantee, Observer, Unit, View
from d2pfed.errors import ConfigError
from d2pfed.numerics import canonical
from d2pfed.plan import MechanismName, Plan, PrivacyTarget, RotationName, describe
from d2pfed.plan.plan import TYPES
from d2pfed.runs.report.records import Record, read_text
from d2pfed.runs.report.story import RoundPoint, Story
from d2pfed.runs.report.tables import table, text_of

_TYPES = TYPES | {kind.__name__: kind for kind in (Plan, PrivacyTarget, MechanismName, RotationName)}

Value = TypeVar("Value")


def read_story(run: Path) -> Story:
    """Return the story of the run in a directory; a file that is missing or damaged is refused by name."""
    if not run.is_dir():
        raise ConfigError(f"a run is a directory, and {run} is none")
    plan = _decode(f"{run / 'plan.json'}", read_text(run / "plan.json"), Plan)
    settings = Record.parse(f"{run / 'settings.json'}", read_text(run / "settings.json"))
    target = _decode(settings.where, text_of(settings.value("target")), PrivacyTarget)
    summary = Record.parse(f"{run / 'summary.json'}", read_text(run / "summary.json"))
    rounds = _rounds(run / "metrics.jsonl")
    last = rounds[-1].round if rounds else 0
    if (told := summary.whole("rounds")) < last:
        raise ConfigError(
            f"{summary.where} tells of {told} rounds and metrics.jsonl of {last}: the run has gone on since, so resume "
            f"it by its own command first"
        )
    return Story(
        title=f"{settings.text('task')}, {settings.text('model')}",
        run=run.resolve().name,
        data=settings.text("data"),
        settings=table(settings.values),
        plan=plan,
        explanation=describe(target, plan),
        so_far=tuple(_spent(item) for item in summary.records("so_far")),
        done=told,
        charged=summary.whole("charged"),
        rounds=rounds,
        test_accuracy=summary.number_or_none("test_accuracy"),
        stopped=summary.text("stopped"),
        exhausted=summary.text("end") == "exhausted",
        repeatable=settings.value("seed") is not None,
        ledger="ledger.sqlite" if (run / "ledger.sqlite").is_file() else None,
    )


def _decode(where: str, text: str, kind: type[Value]) -> Value:
    try:
        value = canonical.decode(text, _TYPES)
    except ConfigError as error:
        raise ConfigError(f"{where} is damaged: {error}") from error
    if not isinstance(value, kind):
        raise ConfigError(f"{where} is damaged: it must hold a {kind.__name__}, got a {type(value).__name__}")
    return value


def _rounds(path: Path) -> tuple[RoundPoint, ...]:
    lines = read_text(path).splitlines()
    return tuple(_round(Record.parse(f"{path}, line {number}", line)) for number, line in enumerate(lines, 1))


def _round(record: Record) -> RoundPoint:
    return RoundPoint(
        round=record.whole("round"),
        accuracy=record.number("accuracy"),
        loss=record.number("loss"),
        charged=record.whole("charged"),
        survivors=record.whole_or_none("survivors"),
        attempt=record.whole_or_none("attempt"),
        update_norm=record.number("update_norm"),
        upload_bytes=record.whole("upload_bytes"),
        seconds=record.number_or_none("seconds"),
    )


def _spent(record: Record) -> Guarantee:
    observer = record.record("observer")
    try:
        return Guarantee(
            epsilon=record.number("epsilon"),
            delta=record.number("delta"),
            observer=Observer(View(observer.text("view")), observer.whole("colluders")),
            unit=Unit(record.text("unit")),
            adjacency=Adjacency(record.text("adjacency")),
            sampling=record.text("sampling"),
            max_participations=record.whole("max_participations"),
            accountant=record.text("accountant"),
            reason=record.text("reason"),
        )
    except ValueError as error:
        raise ConfigError(f"{record.where} is damaged: {error}") from error
