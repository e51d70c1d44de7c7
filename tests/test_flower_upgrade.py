"""A rolling upgrade between two commits: an older client with this server and the reverse, over Flower."""

import json
import re
import subprocess
import tarfile
import time
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from loopback import Federation

pytestmark = pytest.mark.slow  # real processes over TLS take minutes: the nightly script runs them

ROOT = Path(__file__).resolve().parent.parent
LIGHT = ROOT / "tests" / "flower_light"
FILES = ("src/d2pfed/secagg/wire.py", "src/d2pfed/deploy/requests.py")  # where VERSION and PLAN_VERSION are
ROUNDS = 2


def git(*arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)
    if done.returncode or not done.stdout:
        pytest.skip(f"this copy of the repository has no history: git {' '.join(arguments)}")
    return done.stdout


@pytest.fixture(scope="module")
def first() -> str:
    """The first commit with the versions of today."""
    return git("log", "-1", "--format=%h", "-G", "^(PLAN_)?VERSION = ", "--", *FILES).decode().strip()


def versions_of(commit: str) -> str:
    """The versions of a commit, as a refusal names them."""
    texts = [git("show", f"{commit}:{file}").decode() for file in FILES]
    wire, plan = (re.search(r"^(?:PLAN_)?VERSION = (\d+)", text, re.MULTILINE)[1] for text in texts)
    return f"d2pfed '{version('d2pfed')}' (wire {wire}, plan {plan})"


def source_of(commit: str, directory: Path) -> Path:
    """The package as it was in a commit."""
    with tarfile.open(fileobj=BytesIO(git("archive", commit, "src"))) as files:
        files.extractall(directory, filter="data")
    return directory / "src"


def federate(directory: Path, server: Path, clients: list[Path]) -> tuple[list[int], str]:
    """The survivors of each round and what the server's app said, each process with its own copy of the package."""
    run, signals = directory / "run", directory / "signals"
    signals.mkdir()
    (signals / "planted").write_text("planted")
    place, count = directory / "federation", len(clients)
    with Federation(place, count, environment={"PYTHONPATH": str(server)}, app=LIGHT, preload="") as federation:
        federation.start_superlink()
        for client, source in enumerate(clients):
            federation.environment = {"PYTHONPATH": str(source)}
            federation.register(client)
            federation.start_supernode(client)
        config = {"cohort": count, "rounds": ROUNDS, "dropouts": 0.2, "colluders": 0.1, "signals": str(signals)}
        config |= {"roster": str(federation.roster), "authority": federation.authority, "directory": str(run)}
        config |= {"draws": str(federation.draws), "joining-seconds": 120.0, "training-seconds": 120.0}
        config |= {"dimension": 20_000}  # a model of 80 kB, in a record of its own
        number = federation.run(LIGHT, config | {"keys-seconds": 120.0})
        until = time.monotonic() + 600
        while "Finished task" not in federation.log("superlink"):
            assert time.monotonic() < until, federation.log("superlink")[-3000:]
            time.sleep(0.5)
        said = federation.flwr("log", str(number), "loopback", "--show")
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return [json.loads(line)["survivors"] for line in lines], said


@pytest.mark.parametrize("is_server_new", [True, False])
def test_releases_of_the_same_versions_work_together(tmp_path, first, is_server_new):
    new, old = ROOT / "src", source_of(first, tmp_path / "old")
    survivors, said = federate(
        tmp_path, *((new, [old, old, new, new, new]) if is_server_new else (old, [new, new, old, old, old]))
    )
    assert survivors == [5] * ROUNDS, said[-3000:]


def test_a_client_of_another_version_is_refused_in_one_line_and_the_run_goes_on_with_a_quorum(tmp_path, first):
    new, old = ROOT / "src", source_of(f"{first}^", tmp_path / "old")
    survivors, said = federate(tmp_path, new, [old, new, new, new, new])
    assert survivors == [4] * ROUNDS, said[-3000:]
    theirs, ours = versions_of(first), versions_of(f"{first}^")
    assert f"the server has {theirs}, and this side has {ours}: they do not fit" in said


def test_clients_refuse_a_server_of_another_version(tmp_path, first):
    new, old = ROOT / "src", source_of(f"{first}^", tmp_path / "old")
    survivors, said = federate(tmp_path, old, [new] * 5)
    assert survivors == []
    theirs, ours = versions_of(f"{first}^"), versions_of(first)
    assert f"the server has {theirs}, and this side has {ours}: they are incompatible" in said
