"""Dataclass fields that describe themselves: one place for a setting's meaning, its type check and its default."""

import dataclasses
import inspect
import operator
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from numbers import Real
from typing import Any, TypeVar, cast, get_args, get_type_hints

from d2pfed.errors import ConfigError, shown

Kind = TypeVar("Kind")

PRIVACY, TRAINING, DATA, RUN = "Privacy", "Training", "Data", "Run"  # the sections of the command line's help


def about(
    text: str,
    section: str,
    *,
    unset: str = "",
    parse: Callable[[str], object] | None = None,
    filled_in: str = "",
) -> dict[str, object]:
    """Return the metadata of a field.

    Args:
        text: What the setting means, as a sentence.
        section: The section of the command line's help that lists it.
        unset: What None stands for, in words, where the field may be None.
        parse: How a string becomes a value, for a type that is no enum, or a number that may be a name as well.
        filled_in: Who fills the field in where it is left out, for a field that must be known in the end.
    """
    return {"help": text, "section": section, "unset": unset, "parse": parse, "filled_in": filled_in}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """One field of a settings class, as help, command line, configuration file and report show it."""

    name: str
    type: Any  # without None
    default: object  # dataclasses.MISSING if it must be given
    help: str
    section: str
    unset: str
    optional: bool
    parse: Callable[[str], object] | None
    filled_in: str


def descriptions(kind: type) -> tuple[Description, ...]:
    """Return the described fields of a settings class, in order."""
    hints, found = _hints(cast("Any", kind)), []
    for item in dataclasses.fields(kind):
        if "help" not in item.metadata:
            continue
        kinds = get_args(hints[item.name]) or (hints[item.name],)
        found.append(
            Description(
                name=item.name,
                type=next(part for part in kinds if part is not type(None)),
                default=dataclasses.MISSING if item.metadata["filled_in"] else item.default,
                optional=type(None) in kinds,
                **{key: value for key, value in item.metadata.items() if key != "canonical"},
            )
        )
    return tuple(found)


_hints = cache(get_type_hints)


def documented(kind: type[Kind]) -> type[Kind]:
    """Append to a settings class's docstring an Attributes section made from its fields."""
    lines = []
    for each in descriptions(kind):
        later = f" {each.filled_in} fills it in." if each.filled_in else ""
        lines.append(f"    {each.name}: {each.help}{default_in_words(each)}{later}")
    kind.__doc__ = "\n".join([inspect.cleandoc(kind.__doc__ or ""), "", "Attributes:", *lines])
    return kind


def default_in_words(each: Description) -> str:
    """Return the sentence that states a default; nothing if the field must be given."""
    if each.default is dataclasses.MISSING:
        return ""
    default = each.default.value if isinstance(each.default, Enum) else each.default
    text = f"{default:g}" if isinstance(default, float) else str(default)
    return f" Default: {each.unset if default is None else text}."


def check_types(settings: object) -> None:
    """Convert each field of a frozen settings object to its type, or refuse it with rule and value.

    Names become members of their enum, whole numbers become floats where a float is meant; for `__post_init__`.
    """
    for each in descriptions(type(settings)):
        value = getattr(settings, each.name)
        if not (value is None and (each.optional or each.filled_in)):
            object.__setattr__(settings, each.name, _converted(each, value))


def convert(kind: type, values: Mapping[str, object]) -> dict[str, Any]:
    """Return values of some fields of a settings class, each converted to its type or refused."""
    known = {each.name: each for each in descriptions(kind)}
    return {
        name: value if value is None and known[name].optional else _converted(known[name], value)
        for name, value in values.items()
    }


def _converted(each: Description, value: object) -> object:
    if each.parse is not None and isinstance(value, str):
        return each.parse(value)
    if each.type in (int, float):
        return _number(each, value)
    if isinstance(value, each.type):
        return value
    if issubclass(each.type, Enum):
        # A member of another enum is refused, even if it is a string that is spelt alike.
        if isinstance(value, str) and not isinstance(value, Enum) and value in [one.value for one in each.type]:
            return each.type(value)
        raise _refused(each, f"one of {', '.join(one.value for one in each.type)}", value)
    raise _refused(each, f"of the type {each.type.__name__}{' or its name' if each.parse else ''}", value)


def _number(each: Description, value: object) -> float:
    rule = "a whole number" if each.type is int else "a number"
    if not isinstance(value, bool):
        try:
            if each.type is int:
                return operator.index(value)  # type: ignore[arg-type]
            if isinstance(value, Real):
                return float(value)
        except TypeError:
            pass
        except OverflowError:
            rule = "a number that a float holds"
    raise _refused(each, rule, value)


def _refused(each: Description, rule: str, value: object) -> ConfigError:
    if isinstance(value, int) and not isinstance(value, bool):
        given = shown(value)  # which Python may not print
    else:
        given = " ".join(repr(value)[:80].split())
    return ConfigError(f"{each.name} must be {rule}{' or None' * each.optional}, got {given}")
