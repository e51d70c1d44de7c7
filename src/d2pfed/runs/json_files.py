"""Values as plain JSON and back: the type that wrote a file is the type that reads it."""

import dataclasses
import json
import math
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from d2pfed.errors import ConfigError, DamagedFile
from d2pfed.ledger.files import read_given

_hints = cache(get_type_hints)
_NOT_FINITE = {None: math.nan, "inf": math.inf, "-inf": -math.inf}
_LARGEST = 1 << 53  # up to here a float holds every whole number

Value = TypeVar("Value")


def to_json(value: object) -> str:
    """Return a dataclass as one line of JSON; null stands for NaN, a text for an infinite number."""
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: Any) -> object:  # noqa: ANN401 - whatever a dataclass holds
    if dataclasses.is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def from_json(kind: type[Value], text: str, where: str) -> Value:
    """Return the value that a text holds; anything else is refused by place and field."""
    return cast("Value", _build(kind, parse(text, where), where))


def parse(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object that a text is."""
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError):
        raise DamagedFile(f"{where} is damaged: it is not JSON") from None
    if not isinstance(plain, dict):
        raise DamagedFile(f"{where} is damaged: it must be an object, got {type(plain).__name__}")
    return plain


def _runs_in(directory: Path, file: str = "settings.json") -> str:
    """Return the first runs below a directory, in words; empty: there are none."""
    runs = sorted(each.parent for each in directory.glob(f"*/{file}"))
    return f"{', '.join(map(str, runs[:3]))}{' and others' * (len(runs) > 3)}"


def require_directory(run: Path) -> None:
    """Refuse a run that is no directory, and name some that are there."""
    if not run.is_dir():
        there = _runs_in(Path("runs"))
        raise ConfigError(f"there is no run directory {run}" + (f"; there are {there}" if there else ""))


def read_text(path: Path) -> str:
    """Return a file's text."""
    require_directory(path.parent)
    try:
        return read_given(path).decode()
    except FileNotFoundError:
        runs = _runs_in(path.parent, path.name)
        why = (
            f"{path.parent} is no run, but holds {runs}"
            if runs
            else "a run has it once it has ended or was interrupted"
        )
        raise ConfigError(f"{path} is missing: {why}") from None
    except UnicodeDecodeError:
        raise DamagedFile(f"{path} is damaged: it is not text") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _build(hint: Any, plain: Any, where: str) -> object:  # noqa: ANN401 - JSON and type hints have no types
    if get_origin(hint) in (Union, UnionType):
        inner = [option for option in get_args(hint) if option is not NoneType]
        return None if plain is None else _build(inner[0], plain, where)
    if get_origin(hint) is tuple:
        _require(isinstance(plain, list), where, "a list", plain)
        return tuple(_build(get_args(hint)[0], item, where) for item in plain)
    if get_origin(hint) is dict:
        _require(isinstance(plain, dict), where, "an object", plain)
        return {name: _build(get_args(hint)[1], item, f"{where}, {name}") for name, item in plain.items()}
    if dataclasses.is_dataclass(hint):
        kind: Any = hint
        _require(isinstance(plain, dict), where, "an object", plain)
        found = {}
        for item in dataclasses.fields(hint):
            if item.name not in plain:
                raise DamagedFile(f"{where} is damaged: it has no `{item.name}`")
            found[item.name] = _build(_hints(kind)[item.name], plain[item.name], f"{where}, {item.name}")
        try:
            return kind(**found)
        except ConfigError as error:
            raise DamagedFile(f"{where} is damaged: {error}") from error
    if issubclass(hint, Enum):
        _require(plain in [member.value for member in hint], where, f"one of {', '.join(map(str, hint))}", plain)
        return hint(plain)
    whole = isinstance(plain, int) and not isinstance(plain, bool) and abs(plain) <= _LARGEST
    if hint is float:
        if plain is None or (isinstance(plain, str) and plain in _NOT_FINITE):
            return _NOT_FINITE[plain]
        _require(whole or isinstance(plain, float), where, "a number", plain)
        return float(plain)
    if hint is int:
        _require(whole, where, "a whole number of at most 2^53", plain)
    else:
        _require(isinstance(plain, hint), where, f"a {hint.__name__}", plain)
    return plain


def _require(holds: bool, where: str, rule: str, value: object) -> None:  # noqa: FBT001 - a condition, not a mode
    if not holds:
        raise DamagedFile(f"{where} is damaged: it must be {rule}, got {str(value)[:40]}")
