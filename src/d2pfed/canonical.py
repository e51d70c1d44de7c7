"""One exact text for each frozen value: what is hashed, stored and compared."""

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from fractions import Fraction
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from d2pfed.errors import ConfigError


def encode(value: object) -> str:
    """Return the one JSON text of a value built of frozen dataclasses, enums, numbers, strings and tuples."""
    return json.dumps(_to_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def decode(text: str, types: Mapping[str, type]) -> Any:  # noqa: ANN401 - the caller knows which type it asked for
    """Rebuild a value from its text, out of the named types only; refuse any text but the canonical one."""
    try:
        value = _from_plain(json.loads(text), types)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"not the canonical text of a value: {type(error).__name__}: {error}") from error
    if encode(value) != text:
        raise ConfigError("not the canonical text of a value: it would be written differently")
    return value


def _to_plain(value: object) -> object:
    match value:
        case Enum():
            return {"": type(value).__name__, "is": value.value}
        case None | bool() | int() | str():
            return value
        case float():
            return {"": "float", "is": value.hex()}
        case Fraction():
            return {"": "Fraction", "is": str(value)}
        case bytes():
            return {"": "bytes", "is": value.hex()}
        case tuple():
            return [_to_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {item.name: _to_plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
        return {"": type(value).__name__} | fields
    raise ConfigError(f"a {type(value).__name__} has no canonical text")


def _from_plain(plain: Any, types: Mapping[str, type]) -> object:  # noqa: ANN401 - JSON is untyped
    if isinstance(plain, list):
        return tuple(_from_plain(item, types) for item in plain)
    if not isinstance(plain, dict):
        return plain
    name = plain.pop("")
    match name:
        case "float":
            return float.fromhex(plain["is"])
        case "Fraction":
            # Not Fraction's own reader, which would write 1e999999999 out.
            numerator, _, denominator = plain["is"].partition("/")
            return Fraction(int(numerator), int(denominator or 1))
        case "bytes":
            return bytes.fromhex(plain["is"])
    kind = types[name]
    if issubclass(kind, Enum):
        return kind(plain["is"])
    fields = {key: _from_plain(item, types) for key, item in plain.items()}
    hints = get_type_hints(kind)
    for key, item in fields.items():
        if not _fits(item, hints[key]):
            raise TypeError(f"{name}.{key} cannot be {item!r}")
    return kind(**fields)


def _fits(value: object, hint: Any) -> bool:  # noqa: ANN401 - a type hint has no common type
    """Say whether a value is of the hinted type; where a float is asked for, a whole number will do."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    if isinstance(value, bool):
        return hint in (bool, object)
    return isinstance(value, (int, float) if hint is float else hint)
