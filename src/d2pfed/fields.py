"""Dataclass fields that describe themselves: one place for a setting's meaning, its type check and its default."""

import dataclasses
import inspect
import operator
import re
import sys
from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from fractions import Fraction
from functools import cache
from numbers import Integral, Number, Rational, Real
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from d2pfed.errors import ConfigError, closest, shown

Kind = TypeVar("Kind")

PRIVACY, TRAINING, DATA, RUN = "Privacy", "Training", "Data", "Run"  # the sections of the command line's help


def setting(
    default: object,
    text: str,
    section: str = PRIVACY,
    *,
    unset: str = "",
    parse: Callable[[str], object] | None = None,
    filled_in: str = "",
    also: Mapping[str, object] = {},
) -> Any:  # noqa: ANN401 - of its field
    """Return a described field with a default.

    Args:
        default: The default.
        text: What the setting means, as a sentence.
        section: The section of the command line's help that lists it.
        unset: What None stands for, in words, where the field may be None.
        parse: How a string becomes a value, for a type that is no enum, or a number that may be a name as well.
        filled_in: Who fills the field in where it is left out, for a field that must be known in the end.
        also: Further metadata.
    """
    found = {"help": text, "section": section, "unset": unset, "parse": parse, "filled_in": filled_in}
    return dataclasses.field(default=default, metadata=found | dict(also))


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
    takes_function: bool


def descriptions(kind: type) -> tuple[Description, ...]:
    """Return the described fields of a settings class, in order."""
    hints, found = _hints(cast("Any", kind)), []
    for item in dataclasses.fields(kind):
        if "help" not in item.metadata:
            continue
        hint = hints[item.name]
        kinds = get_args(hint) or (hint,)
        found.append(
            Description(
                name=item.name,
                type=next(part for part in kinds if part is not type(None)),
                default=dataclasses.MISSING if item.metadata["filled_in"] else item.default,
                optional=type(None) in kinds,
                takes_function=any(get_origin(part) is Callable for part in kinds),
                **{name: item.metadata[name] for name in ("help", "section", "unset", "parse", "filled_in")},
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


def checked_fields(kind: type, given: object, name: str) -> dict[str, Any]:
    """Return a dictionary of some fields of a settings class; refuse anything else, and names that it lacks."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{name} must be a {kind.__name__}, a dictionary of its fields, or None, got {type(given).__name__}"
        )
    known = [each.name for each in dataclasses.fields(kind)]
    for key in given:
        if key not in known:
            near = "".join(f" (did you mean {each}?)" for each in closest(str(key), known))
            raise ConfigError(f"{name} has no field {key!r}{near}; its fields are {', '.join(known)}")
    return dict(given)


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
    if each.takes_function and callable(value):
        return value
    if each.type in (int, float):
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
    if isinstance(value, each.type):
        return value
    if issubclass(each.type, Enum):
        # A member of another enum is refused, even if it is a string that is spelt alike.
        if isinstance(value, str) and not isinstance(value, Enum) and value in [one.value for one in each.type]:
            return each.type(value)
        named = [one.value for one in each.type if not (each.takes_function and one.name == "OWN")]
        raise _refused(each, f"one of {', '.join(named)}{' or a function' * each.takes_function}", value)
    raise _refused(each, f"of the type {each.type.__name__}{' or its name' if each.parse else ''}", value)


def _refused(each: Description, rule: str, value: object) -> ConfigError:
    return ConfigError(f"{each.name} must be {rule}{' or None' * each.optional}, got {told(value)}")


def told(value: object) -> str:
    """Return any value as an error shows it: in one line, and not too long a one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return shown(value)  # which Python may not print
    return " ".join(repr(value)[:80].split())


class Choice(StrEnum):
    """An enumeration that refuses an unknown name with the known ones."""

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ConfigError(f"{cls.__name__} must be one of {', '.join(cls)}, got {told(value)}")


def check_fields(value: object) -> None:
    """Refuse a dataclass's value whose fields are not of the types that they are declared with."""
    hints = _hints(cast("Any", type(value)))
    _check_hints(hints, {name: getattr(value, name) for name in hints})


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Refuse a whole number outside of its range."""
    if not least <= value <= most:
        raise ConfigError(f"{name} must be in [{least}, {most}], got {shown(value)}")


def check_positive(name: str, value: float) -> None:
    """Refuse a number that is not positive and finite."""
    if not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{name} must be positive and finite, got {told(value)}")


def check_between(name: str, value: float, least: float, most: float, ends: str = "()") -> None:
    """Refuse a number outside of an interval, to which an end belongs where its bracket is square."""
    is_above = value > least or (ends[0] == "[" and value == least)
    is_below = value < most or (ends[1] == "]" and value == most)
    if not (is_above and is_below):
        raise ConfigError(f"{name} must be in {ends[0]}{least:g}, {most:g}{ends[1]}, got {told(value)}")


def check_arguments(function: Callable[..., object], given: Mapping[str, object]) -> None:
    """Refuse arguments, the locals of a function that has just begun, that are not of the types it declares."""
    _check_hints(_hints(function), given)


def _check_hints(hints: Mapping[str, Any], given: Mapping[str, object]) -> None:
    for name, value in given.items():
        hint = hints.get(name, object)
        if type(value) is not hint and not _fits(value, hint):  # most are of the very type
            is_plain = isinstance(value, (str, Number, NoneType))  # anything else may be long, or somebody's data
            got = told(value) if is_plain else type(value).__name__
            is_class = isinstance(hint, type) and not get_args(hint)
            words = hint.__name__ if is_class else re.sub(r"\b(\w+\.)+\b", "", str(hint))  # without modules
            raise ConfigError(f"{name} must be of the type {words}, got {got}")


_LARGEST = Fraction(sys.float_info.max)


def _fits(value: object, hint: Any) -> bool:  # noqa: ANN401 - an annotation
    """Tell whether a value is of an annotated type; a type that cannot be checked takes all values."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is int:
        return isinstance(value, Integral)
    if hint is float:  # a whole number or fraction may be beyond what a float holds
        return isinstance(value, Real) and not (isinstance(value, Rational) and abs(Fraction(value)) > _LARGEST)
    kind = origin or hint
    is_open = getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False)
    if is_open or not isinstance(kind, type):
        return True
    if isinstance(value, (list, tuple)) and isinstance(value, kind) and len({*parts, ...}) == 2:
        return all(_fits(each, parts[0]) for each in {type(each): each for each in value}.values())
    return isinstance(value, kind)
