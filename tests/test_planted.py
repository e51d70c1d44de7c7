"""The list of planted bugs does not rot: each still fits the source, and names tests that are there."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUGS = tomllib.loads((ROOT / "tests" / "planted" / "bugs.toml").read_text())["bug"]


def faults(bug):
    """Say what is wrong with an entry of the list."""
    text = (ROOT / "src" / "d2pfed" / bug["file"]).read_text()
    if text.count(bug["old"]) != 1:
        yield f"{bug['file']} has the old text {text.count(bug['old'])} times"
    if bug["old"] == bug["new"]:
        yield "nothing is changed"
    for test in bug["test"].split():
        file, _, name = test.partition("::")
        if "known_answers" in name:
            yield f"{test} is golden bytes"
        found = (ROOT / "tests" / file).read_text() if (ROOT / "tests" / file).exists() else ""
        if not re.search(rf"^def {name or 'test_'}", found, re.MULTILINE):
            yield f"there is no {test}"


def test_there_are_at_least_sixty_bugs_with_names_of_their_own():
    names = [bug["name"] for bug in BUGS]
    assert len(names) == len(set(names)) >= 60
    assert all(set(bug) == {"name", "from", "file", "old", "new", "test"} for bug in BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=[bug["name"] for bug in BUGS])
def test_a_bug_still_fits_the_source_and_names_its_test(bug):
    assert list(faults(bug)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"old": "no such text"},
        {"old": "return"},
        {"new": BUGS[0]["old"]},
        {"test": "test_ring.py::test_nothing_of_the_kind"},
        {"test": "test_no_such_file.py"},
        {"test": "test_ring.py::test_known_answers"},
    ],
    ids=str,
)
def test_a_stale_entry_is_caught(change):
    assert list(faults(BUGS[0] | change))
