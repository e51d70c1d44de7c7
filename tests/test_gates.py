"""Each gate is seen to fail: a violation is planted in a copy of the project, and the gate must name it."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


@pytest.fixture
def copy(tmp_path):
    for name in ("pyproject.toml", "src", "reproduction", "benchmarks"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


def gate(copy: Path, *command: str) -> subprocess.CompletedProcess[str]:
    program = [str(BIN / command[0]), *command[1:]]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{copy / 'src'}:{copy}", "HOME": str(copy)}
    return subprocess.run(program, cwd=copy, env=environment, capture_output=True, text=True, check=False)


def plant(copy: Path, module: str, line: str) -> None:
    file = copy / "src" / "d2pfed" / module
    file.write_text(file.read_text() + f"\n{line}\n")


def test_the_linter_fails_on_every_planted_line(copy):
    planted = [
        ("numerics/ring.py", "import random", "TID251"),
        ("noise/sampler.py", "from numpy.random import default_rng", "TID251"),
        ("secagg/wire.py", "import pickle", "TID251"),
        ("plan/target.py", "assert PrivacyTarget", "S101"),
        ("round/session.py", "def quiet(x):\n    return x", "ANN001"),
        ("noise/codec.py", "def switch(on: bool) -> None: ...", "FBT001"),
    ]
    for module, line, _ in planted:
        plant(copy, module, line)
    result = gate(copy, "ruff", "check", "--no-cache", "--output-format=concise", "src")
    assert result.returncode == 1
    for module, _, code in planted:
        assert re.search(rf"^src/d2pfed/{module}:\d+:\d+: {code} ", result.stdout, re.MULTILINE), module


def test_the_formatter_fails_on_a_planted_line(copy):
    plant(copy, "errors.py", "x = { 'a':1 }")
    assert gate(copy, "ruff", "format", "--no-cache", "--check", "src/d2pfed/errors.py").returncode == 1


def test_the_type_checker_fails_on_a_planted_line(copy):
    plant(copy, "errors.py", 'wrong: int = "text"')
    result = gate(copy, "mypy", "--follow-imports=skip", "src/d2pfed/errors.py")
    assert result.returncode == 1
    assert "Incompatible types" in result.stdout


def test_the_layers_fail_on_every_planted_import(copy):
    layers, ciphers = "Imports go down the layers", "Ciphers live in randomness, secagg.crypto and the verifier"
    torch, backends = "Torch lives in learning", "Flower, NVFlare and Ray stay in their backends"
    planted = [
        ("numerics.ring", "d2pfed.noise.codec", layers),
        ("accounting.events", "d2pfed.noise.sampler", layers),
        ("certificate_verifier", "d2pfed.errors", layers),
        ("numerics.ring", "cryptography", ciphers),
        ("noise.codec", "torch", torch),
        ("round.session", "flwr", backends),
        ("deploy.requests", "flwr", backends),
        ("deploy.transport", "nvflare", backends),
    ]
    for module, imported, _ in planted:
        plant(copy, f"{module.replace('.', '/')}.py", f"import {imported}")
    result = gate(copy, "lint-imports", "--no-cache")
    assert result.returncode == 1
    for module, imported, contract in planted:
        assert f"{contract} BROKEN" in result.stdout
        assert f"d2pfed.{module} -> {imported} (l." in result.stdout


def test_a_module_outside_of_the_layers_is_refused(copy):
    (copy / "src" / "d2pfed" / "helpers.py").write_text('"""Anything."""\n')
    result = gate(copy, "lint-imports", "--no-cache")
    assert result.returncode == 1


def test_the_copy_itself_passes(copy):
    assert gate(copy, "lint-imports", "--no-cache").returncode == 0
    assert gate(copy, "ruff", "check", "--no-cache", "src").returncode == 0


def unchecked_pins(text: str) -> list[str]:
    """The pinned packages of a constraints file that are installed without a hash."""
    entries = [entry for entry in text.replace("\\\n", " ").splitlines() if entry and not entry.startswith("#")]
    return [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry or "==" not in entry]


def test_every_installed_file_is_pinned_by_hash():
    text = (ROOT / "constraints.txt").read_text()
    assert unchecked_pins(text) == []
    assert unchecked_pins(text + "requests==2.0\n") == ["requests==2.0"]


def test_the_build_backend_is_the_pinned_one():
    (backend,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert f"\n{backend} \\" in (ROOT / "constraints.txt").read_text()


def drawn_layers(page: str) -> list[set[str]]:
    """The layers as CONTRIBUTING draws them, from the top."""
    (block,) = (found for found in re.findall(r"```\n(.*?)```", page, re.DOTALL) if found.startswith("cli"))
    return [{name.strip() for name in re.split(r" {2,}", line)[0].split("|")} for line in block.splitlines()]


def contract_layers() -> list[set[str]]:
    """The layers that the linter enforces."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (each for each in settings["contracts"] if each["type"] == "layers")
    return [{name.strip().strip("()") for name in layer.split("|")} for layer in contract["layers"]]


def test_the_layers_are_drawn_as_they_are_enforced():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert drawn_layers(page) == contract_layers()
    assert drawn_layers(page.replace("\nplan ", "\nplans ")) != contract_layers()


def test_every_part_of_the_package_is_in_the_drawing():
    parts = {path.stem for path in (ROOT / "src" / "d2pfed").iterdir() if not path.name.startswith(("_", "py."))}
    assert parts == set().union(*contract_layers())
