"""The page of theory: its examples come out, what it cites and names exists, and what cites it finds it."""

import importlib
import math
import pkgutil
import re
from fractions import Fraction
from pathlib import Path

import pytest

from d2pfed import accounting
from d2pfed.secagg import trust
from d2pfed.secagg.lattice import parameters
from support.commands import run_command

ROOT = Path(__file__).parent.parent
THEORY = (ROOT / "docs" / "theory.md").read_text()
PLAIN = re.sub(r"```.*?```|`[^`\n]*`|\$\$.+?\$\$|\$[^$]+\$", " ", THEORY, flags=re.DOTALL)
EXAMPLES = [each for each in re.findall(r"`([^`]+)` gives `([^`]+)`", THEORY) if each != ("X", "Y")]
NUMBERS = re.findall(r"\*\*(?:[A-Z]\w+ )*(\d+\.\d+|A\.\d+)\b", PLAIN)
STATEMENTS = set(NUMBERS)
SECTIONS = set(re.findall(r"^## (\d+)\. ", THEORY, re.MULTILINE))
ANCHORS = set(re.findall(r'<a id="([a-z-]+)"></a>', THEORY))
CITED_IN = [
    path
    for folder in ("src", "tests", "docs", "benchmarks", "reproduction", "examples", "scripts")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {"", ".py", ".md", ".yml", ".toml", ".ipynb"} and path.is_file()
    if path.name != "test_theory.py"
] + sorted(ROOT.glob("*.md"))

NAMES = {"math": math, "Fraction": Fraction, **vars(trust), **vars(parameters)}
for module in pkgutil.iter_modules(accounting.__path__):
    NAMES[module.name] = importlib.import_module(f"d2pfed.accounting.{module.name}")
    NAMES |= {name: value for name, value in vars(NAMES[module.name]).items() if name[0] != "_"}


def as_written(value, text: str) -> str:
    """Return a number in the form and with the digits of a text."""
    if re.fullmatch(r"-?\d+", text):
        return str(value)
    form = "e" if "e" in text else "f"
    decimals = len(re.search(r"\.(\d*)", text)[1]) if "." in text else 0
    return f"{value:.{decimals}{form}}"


@pytest.fixture(scope="module")
def printed():
    """The standard output of each command line that was asked for, with single spaces."""
    return {}


@pytest.fixture
def comes_out(printed, monkeypatch, capsys):
    """Return whether an example gives what the page says."""

    def answer(asked: str, told: str) -> bool:
        if not asked.startswith("d2pfed "):
            return as_written(eval(asked, dict(NAMES)), told) == told
        if asked not in printed:
            status, text, _ = run_command(asked.split()[1:], monkeypatch, capsys)
            assert status == 0
            printed[asked] = " ".join(text.split())
        return re.search(rf"(?<![\w.]){re.escape(told)}(?!\.?\w)", printed[asked]) is not None

    return answer


@pytest.mark.parametrize(("asked", "told"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_of_the_page_comes_out(asked, told, comes_out):
    assert comes_out(asked, told)


def test_the_examples_reject_a_wrong_last_digit(comes_out):
    assert not comes_out("profiles.gaussian_epsilon(1e-5, 1.0)", "4.377177")
    assert not comes_out("d2pfed account --noise-multiplier 0.6", "epsilon 0.782")


def test_every_section_with_a_theorem_has_an_example():
    sections = re.split(r"^## (?=\d+\. |Appendix)", THEORY, flags=re.MULTILINE)[1:]
    assert [text.split("\n")[0] for text in sections if "` gives `" not in text] == ["20. What is not claimed"]


PLANS = (
    "plan",
    "plan --sampling fixed --against released --consistency signed --protocol pairwise",
    "plan --unit record --population 8 --records 25600 --dimension 20000 --rounds 100",
)


@pytest.mark.parametrize("line", PLANS)
def test_every_line_of_a_plan_has_a_row(line, monkeypatch, capsys):
    _, text, _ = run_command(line.split(), monkeypatch, capsys)
    lines = re.findall(r"^│ (.*?) +│", text, re.MULTILINE)
    observers = re.findall(r"^(released|server|client|colluding|alone)\b.* \d", text, re.MULTILINE)
    table = THEORY[THEORY.index('id="printed"') : THEORY.index('id="assumptions"')]
    named = set(re.findall(r"`([^`]+)`", table)) | {"colluding" if "`colluding(c)`" in table else ""}
    assert len(lines) >= 13
    assert len(set(observers)) == 5
    assert {*lines, *observers} <= named


def test_every_statement_that_the_page_cites_exists():
    cited = set(re.findall(r"(?<![\d.,\-^])((?:1?[1-9]|10|20)\.\d{1,2}|A\.\d+)(?![\d%])", PLAIN))
    assert len(cited) > 40
    assert cited <= STATEMENTS


def test_statements_are_numbered_in_order():
    numbers = [tuple(map(int, each.replace("A", "99").split("."))) for each in NUMBERS]
    assert numbers == sorted(set(numbers))


def references(text: str) -> list[str]:
    """Return the anchors, sections and statements of the page of theory that a text refers to."""
    found = [f"#{anchor}" for anchor in re.findall(r"theory\.md#([\w-]+)", text)]
    for words in re.findall(
        r"[Tt]heory(?:\.md)?`?,? (?:sections? )?(\d[\d.]*(?:(?:, | and | to )\d[\d.]*)*)", text
    ):
        found += [number.rstrip(".") for number in re.findall(r"\d[\d.]*", words)]
    return found + re.findall(r"theory\.md#[\w-]+\), claim (\d+\.\d+)", text)


def is_there(reference: str) -> bool:
    return reference[1:] in ANCHORS if reference[0] == "#" else reference in SECTIONS | STATEMENTS


def test_every_reference_to_the_page_finds_it():
    found = {(path.name, each) for path in CITED_IN for each in references(path.read_text(errors="ignore"))}
    assert len(found) > 50
    assert [each for each in sorted(found) if not is_there(each[1])] == []


def test_references_that_lead_nowhere_are_caught():
    text = "theory.md#nothing, (theory 3, 99), docs/theory.md, section 21, [theory.md, 18.3](theory.md#lattice)"
    assert [each for each in references(text) if not is_there(each)] == ["#nothing", "99", "21"]


def test_every_test_file_and_function_that_accounting_names_exists():
    for path in sorted(Path(accounting.__file__).parent.glob("*.py")):
        for name in re.findall(r"test_\w+\.py", path.read_text()):
            assert (ROOT / "tests" / name).exists(), (path.name, name)


def test_every_test_and_every_name_that_the_page_names_exists():
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for name in re.findall(r"`(?:test_\w+\.py::)?(test_\w+)`", THEORY):
        assert f"def {name}(" in tests, name
    for name in re.findall(r"`((?:[a-z_]+\.)+(?!py`|md`)\w+)`", THEORY):
        inside = (Path(accounting.__file__).parent / f"{name.split('.')[0]}.py").exists()
        assert pkgutil.resolve_name(f"d2pfed.{'accounting.' if inside else ''}{name}") is not None
