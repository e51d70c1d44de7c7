"""The examples in the docstrings of public names run, and every public name has one."""

import doctest

import pytest

import d2pfed

PUBLIC = {name: getattr(d2pfed, name) for name in d2pfed.__all__}
CONSTANTS = {"RELEASED", "SERVER", "CLIENT", "ALONE"}
# `aggregate` needs a backend: docs/internals.md walks through it. Errors say all in their first line.
WITHOUT = (
    CONSTANTS
    | {"aggregate"}
    | {name for name, it in PUBLIC.items() if isinstance(it, type) and issubclass(it, Exception)}
)
EXAMPLES = {
    name: it.__doc__ for name, it in PUBLIC.items() if name not in CONSTANTS and ">>> " in (it.__doc__ or "")
}


def failures(name: str, text: str) -> int:
    """Run a docstring's examples with all public names at hand, and count those that fail."""
    examples = doctest.DocTestParser().get_doctest(text, dict(PUBLIC), name, None, None)
    assert examples.examples
    return doctest.DocTestRunner(verbose=False).run(examples).failed


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_public_name_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert failures(name, EXAMPLES[name]) == 0


def test_every_public_name_has_an_example():
    assert sorted(set(PUBLIC) - set(EXAMPLES) - WITHOUT) == []


def test_an_example_that_prints_something_else_is_caught():
    assert failures("wrong", ">>> 1 + 1\n3\n") == 1
