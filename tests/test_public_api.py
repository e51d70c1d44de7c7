import inspect
import subprocess
import sys

import pytest

import d2pfed


def test_the_public_names_are_exactly_those_that_are_listed():
    assert dir(d2pfed) == sorted(d2pfed.__all__)
    assert set(d2pfed._MODULES) == set(d2pfed.__all__)
    assert len(d2pfed.__all__) == len(set(d2pfed.__all__))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        d2pfed.nothing  # noqa: B018


def test_every_public_name_says_what_it_is():
    for name in d2pfed.__all__:
        value = getattr(d2pfed, name)
        assert inspect.getdoc(value), name


def test_type_checkers_see_the_names_that_the_table_has():
    import ast  # noqa: PLC0415

    tree = ast.parse(inspect.getsource(d2pfed))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {name.name: node.module for node in block.body for name in node.names}
    assert seen == d2pfed._MODULES


def test_errors_have_one_root():
    names = [name for name in d2pfed.__all__ if isinstance(getattr(d2pfed, name), type)]
    errors = [name for name in names if issubclass(getattr(d2pfed, name), Exception)]
    assert {"ConfigError", "DamagedFile", "DownloadError", "MissingExtra", "LedgerError"} <= set(errors)
    assert all(issubclass(getattr(d2pfed, name), d2pfed.D2PFedError) for name in errors)
    assert issubclass(d2pfed.ConfigError, ValueError)
    assert not issubclass(d2pfed.DamagedFile, ValueError)


HEAVY = {"torch", "scipy", "numba", "matplotlib", "numpy", "rich", "cryptography"}


def loaded(statement: str) -> set[str]:
    program = (
        f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}}, file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(ended.stderr.split()) & HEAVY


def test_importing_the_package_loads_nothing_heavy():
    assert loaded("import d2pfed") == set()
    assert "numpy" in loaded("import d2pfed; d2pfed.PrivacyTarget")  # the check sees what is loaded


def test_the_help_loads_nothing_heavy():
    help_text = (
        "from d2pfed.cli import main\nsys.argv = ['d2pfed', '--help']\ntry: main()\nexcept SystemExit: pass"
    )
    assert loaded(help_text) == set()
    assert loaded("from d2pfed.cli import main\nsys.argv = ['d2pfed']\nmain()") == set()
