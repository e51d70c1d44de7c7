"""docs/internals.md names only what exists."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "internals.md").read_text()
NAMES = sorted(set(re.findall(r"`(d2pfed(?:\.\w+)+)`", PAGE)))


def resolve(name: str) -> object:
    """Return what a dotted name stands for: a module, or something in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_walk_exists(name):
    resolve(name)


def test_the_walk_has_many_names_and_a_wrong_one_is_noticed():
    assert len(NAMES) > 25
    with pytest.raises(AttributeError):
        resolve("d2pfed.round.aggregation.aggregated")
