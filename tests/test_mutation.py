"""Mutants are what they say, and the map of tests fits the source."""

import ast
import importlib
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from support.mutation import mutants

ROOT = Path(__file__).parent.parent
MAPPED = tomllib.loads((ROOT / "tests" / "planted" / "mapped.toml").read_text())
SOURCE = '''\
"""A docstring with 1 + 2."""
def check(x: int | None = 3) -> "int | None":
    if x < 4 and not x == 5:
        raise ValueError(f"at most {x + 1}")
    forget(x)
    return min(x, 6) + 7
'''


def test_mutants_change_code_and_leave_texts_and_types_alone():
    changes = {(mutant.old, mutant.new) for mutant in mutants(SOURCE)}
    assert changes == {
        ("x < 4 and not x == 5", "not (x < 4 and (not x == 5))"),
        ("x < 4 and not x == 5", "(x < 4 or not x == 5)"),
        ("x < 4", "(x <= 4)"),
        ("not x == 5", "(x == 5)"),
        ("x == 5", "(x != 5)"),
        ("4", "5"),
        ("5", "6"),
        ("6", "7"),
        ("7", "8"),
        ("forget(x)", "pass"),
        ("min", "max"),
        ("min(x, 6) + 7", "(min(x, 6) - 7)"),
    }


def test_a_mutant_differs_from_its_text_in_one_place():
    for mutant in mutants(SOURCE):
        changed = mutant.apply(SOURCE)
        assert changed != SOURCE
        ast.parse(changed)
        assert len(changed) - len(SOURCE) == len(mutant.new) - len(mutant.old)


def test_every_module_of_the_package_is_mapped_in_one_part():
    source = ROOT / "src" / "d2pfed"
    listed = [file for files in MAPPED.values() for file in files]
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if path.name != "__init__.py" or mutants(path.read_text())  # most of these only import
    }
    assert sorted(listed) == sorted(found)
    assert all(file.startswith(f"{part}/") or "/" not in file for part in MAPPED for file in MAPPED[part])


@pytest.mark.parametrize(
    "test", sorted({test for files in MAPPED.values() for names in files.values() for test in names.split()})
)
def test_the_map_names_tests_that_can_be_imported(test):
    assert (ROOT / "tests" / test).is_file()
    with suppress(pytest.skip.Exception):  # an extra that is not installed
        importlib.import_module(Path(test).stem)
