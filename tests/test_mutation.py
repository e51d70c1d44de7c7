"""Mutants are what they say, and the map of tests fits the source."""

import ast
import tomllib
from pathlib import Path

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


def test_every_place_that_matters_is_changed_once_and_texts_and_types_are_left_alone():
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


def test_every_file_that_privacy_rests_on_is_mapped():
    source = ROOT / "src" / "d2pfed"
    listed = {file for files in MAPPED.values() for file in files}
    found = {
        str(path.relative_to(source))
        for part in MAPPED
        for path in (source / part).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert found == listed


def test_the_map_names_files_and_tests_that_are_there():
    for files in MAPPED.values():
        for file, tests in files.items():
            assert (ROOT / "src" / "d2pfed" / file).is_file(), file
            assert all((ROOT / "tests" / test).is_file() for test in tests.split()), tests
