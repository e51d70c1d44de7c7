"""Every Python block in the README and the documents runs, and prints what the document says it prints."""

import dataclasses
import inspect
import pkgutil
import re
from contextlib import redirect_stdout
from enum import Enum
from io import StringIO
from pathlib import Path

import pytest

import d2pfed
from d2pfed import errors
from d2pfed.fields import descriptions

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\nprints\n\n```\n(.*?)```)?", re.DOTALL)
BLOCKS = [(page.name, *match.groups()) for page in PAGES for match in BLOCK.finditer(page.read_text())]


@pytest.mark.parametrize(("page", "code", "output"), BLOCKS, ids=[f"{b[0]}-{i}" for i, b in enumerate(BLOCKS)])
def test_the_code_of_a_page_runs_and_prints_what_it_says(page, code, output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(code, page, "exec"), {"__name__": "__main__"})
    assert output is None or printed.getvalue() == output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


THREATS = "".join(
    (ROOT / "docs" / name).read_text() for name in ("threats.md", "threats-tests.md", "sharp-edges.md")
)
NAMED_TESTS = sorted(set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", THREATS)))
NAMED_CODE = sorted(set(re.findall(r"`((?:\w+\.)+\w+)`", THREATS)))


def test_the_threats_name_tests_and_code():
    assert len(NAMED_TESTS) >= 30
    assert len(NAMED_CODE) >= 20


@pytest.mark.parametrize(("file", "name"), NAMED_TESTS, ids=[name for _, name in NAMED_TESTS])
def test_every_attack_that_the_threats_name_is_a_test(file, name):
    assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), f"{file} has no {name}"


def test_every_file_of_tests_that_a_docstring_or_page_names_exists():
    named = {
        file
        for folder, ending in (("src", "py"), ("docs", "md"))
        for page in (ROOT / folder).rglob(f"*.{ending}")
        for file in re.findall(r"\btest_\w+\.py", page.read_text())
    }
    there = {file.name for file in ROOT.glob("**/tests/test_*.py")} | {
        file.name for file in (ROOT / "tests").iterdir()
    }
    assert len(named) > 40
    assert named <= there


@pytest.mark.parametrize("name", NAMED_CODE)
def test_every_check_that_the_threats_name_is_in_the_code(name):
    if name.startswith("flower."):
        pytest.importorskip("flwr")
    assert pkgutil.resolve_name(f"d2pfed.{name}") is not None


def test_a_check_that_is_not_there_is_caught():
    with pytest.raises((AttributeError, ImportError)):
        pkgutil.resolve_name("d2pfed.plan.policy.Policy.checks_nothing")


REFERENCE = "".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
BY_PAGE = {name for name in d2pfed.__all__ if getattr(d2pfed, name).__class__.__name__ != "Observer"}


@pytest.mark.parametrize("name", sorted(BY_PAGE))
def test_every_public_name_is_in_the_reference(name):
    whole = ("::: d2pfed.errors",) if name in vars(errors) else (f".{name}\n",)
    assert any(mark in REFERENCE for mark in whole), name


def undescribed(name: str) -> list[str]:
    """Return the parameters or fields of a public name that its description does not mention."""
    thing = getattr(d2pfed, name)
    text = inspect.getdoc(thing) or ""
    if inspect.isfunction(thing):
        wanted = list(inspect.signature(thing).parameters)
    elif isinstance(thing, type) and issubclass(thing, Enum):
        wanted = list(thing.__members__)
    elif dataclasses.is_dataclass(thing) and isinstance(thing, type):
        own = {each.name for each in descriptions(thing)}  # the reference shows these as a table
        wanted = [each.name for each in dataclasses.fields(thing) if each.name not in own and each.name[0] != "_"]
    else:
        return []
    return [each for each in wanted if not re.search(rf"^\s*{each}:|`{each}`", text, re.MULTILINE)]


@pytest.mark.parametrize("name", d2pfed.__all__)
def test_every_parameter_of_a_public_name_is_described(name):
    assert undescribed(name) == []
