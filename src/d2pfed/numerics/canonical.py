"""One exact text for each frozen value: what is hashed, stored and compared."""

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from fractions import Fraction
from functools import cache
from reprlib import repr as shortened
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from d2pfed.errors import ConfigError

MOST_CHARACTERS = 1 << 22  # of any text: a release with 10^6 participants has fewer
MOST_DIGITS = 80  # of a whole number, or of either part of a fraction
MOST_DEPTH = 16  # of values within values
_TOO_LONG = 10**MOST_DIGITS
OMITTED_IF_DEFAULT = {"canonical": "omitted if default"}  # metadata of a field that older texts do not have
_FLOAT_CHARACTERS = 32  # of a float in hexadecimal, which has at most 24

Value = TypeVar("Value")


def encode(value: object) -> str:
    """Return the one JSON text of a value built of frozen dataclasses, enums, numbers, strings and tuples."""
    return json.dumps(_to_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def decode(
    text: str,
    types: Mapping[str, type],
    kind: type[Value] = object,  # type: ignore[assignment]  # any
    *,
    most: int = MOST_CHARACTERS,
) -> Value:
    """Rebuild a value of a kind from its text, out of the named types only; refuse any text but the canonical one.

    The text may come from anyone: its length (`most` characters), its depth and the digits of its numbers are bounded
    before anything is computed from them. Checked: test_canonical.py::test_no_text_makes_decoding_work_hard.
    """
    if len(text) > most:
        raise ConfigError(f"not the canonical text of a value: {len(text)} characters, at most {most} are read")
    try:
        value = _from_plain(json.loads(text, parse_int=_whole, parse_float=_refuse_float), types, MOST_DEPTH)
        again = encode(value)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        told = str(error).partition("\n")[0][:200]
        raise ConfigError(f"not the canonical text of a value: {type(error).__name__}: {told}") from error
    if again != text:
        raise ConfigError("not the canonical text of a value: it would be written differently")
    if not isinstance(value, kind):
        raise ConfigError(f"the text of a {kind.__name__} was expected, got that of a {type(value).__name__}")
    return value


def _to_plain(value: object) -> object:
    match value:
        case Enum():
            return {"": type(value).__name__, "is": value.value}
        case int() if abs(value) >= _TOO_LONG:
            raise ConfigError(f"a number of more than {MOST_DIGITS} digits has no canonical text")
        case None | bool() | int() | str():
            return value
        case float():
            return {"": "float", "is": value.hex()}
        case Fraction():
            _to_plain((value.numerator, value.denominator))  # refuses long ones
            return {"": "Fraction", "is": str(value)}
        case bytes():
            return {"": "bytes", "is": value.hex()}
        case tuple():
            return [_to_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain: dict[str, object] = {"": type(value).__name__}
        for item in dataclasses.fields(value):
            inner = getattr(value, item.name)
            if inner != item.default or "canonical" not in item.metadata:
                plain[item.name] = _to_plain(inner)
        return plain
    raise ConfigError(f"a {type(value).__name__} has no canonical text")


def _whole(digits: str) -> int:
    """Read a whole number of few digits; longer ones cost more to read and to print than any value is worth."""
    if len(digits.removeprefix("-")) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, at most {MOST_DIGITS} are read")
    return int(digits)


def _refuse_float(digits: str) -> float:
    raise ValueError(f"a number is written {digits[:40]}, floats are hexadecimal")


def _from_plain(plain: Any, types: Mapping[str, type], depth: int) -> object:  # noqa: ANN401 - JSON is untyped
    if depth < 0:
        raise ValueError(f"values within values, deeper than {MOST_DEPTH}")
    if isinstance(plain, list):
        return tuple(_from_plain(item, types, depth - 1) for item in plain)
    if not isinstance(plain, dict):
        return plain
    name = plain.pop("")
    match name:
        case "float":
            if len(plain["is"]) > _FLOAT_CHARACTERS:
                count = len(plain["is"])
                raise ValueError(f"a float has {count} characters, at most {_FLOAT_CHARACTERS} are read")
            return float.fromhex(plain["is"])
        case "Fraction":
            # Not Fraction's own reader, which would write 1e999999999 out.
            numerator, _, denominator = plain["is"].partition("/")
            return Fraction(_whole(numerator), _whole(denominator or "1"))
        case "bytes":
            return bytes.fromhex(plain["is"])
    kind: Any = types[name]
    if issubclass(kind, Enum):
        return kind(plain["is"])
    fields = {key: _from_plain(item, types, depth - 1) for key, item in plain.items()}
    hints = _hints(kind)
    for key, item in fields.items():
        if not _fits(item, hints[key]):
            raise TypeError(f"{name}.{key} cannot be {shortened(item)}")
    return kind(**fields)


_hints = cache(get_type_hints)  # looked up once: a text may hold ten thousand values of a class


def _fits(value: object, hint: Any) -> bool:  # noqa: ANN401 - a type hint has no common type
    """Say whether a value is of the hinted type; where a float is asked for, a whole number will do."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    if isinstance(value, bool):
        return hint in (bool, object)
    return isinstance(value, (int, float) if hint is float else hint)
