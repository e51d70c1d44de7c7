"""Frozen values as tables of names and readable values."""

import json
from collections.abc import Mapping
from typing import cast

from d2pfed.errors import ConfigError
from d2pfed.numerics import canonical
from d2pfed.plan import Plan

MOST_ITEMS = 20  # of a list; the whole of it is in the file
_CHOSEN_BY_TYPE = frozenset({"mechanism", "rotation"})  # their type is what was chosen


def plan_table(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Return everything that was agreed."""
    return table(json.loads(canonical.encode(plan)))


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


def text_of(plain: object) -> str:
    """Return the canonical text of what was read as a part of one."""
    return json.dumps(cast("dict[str, object]", plain), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
