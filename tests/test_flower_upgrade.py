"""A rolling upgrade between two commits: an older client with this server and the reverse, over Flower."""

import json
import subprocess
import tarfile
import time
from io import BytesIO
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from loopback import Federation

pytestmark = pytest.mark.slow  # real processes over TLS take minutes: the nightly script runs them

ROOT = Path(__file__).resolve().parent.parent
LIGHT = ROOT / "tests" / "flower_light"
FITS = "eefc579f"  # the first commit with wire 2, plan 2
OLDER = "7ea329b8"  # the commit before it: wire 2, plan 1
ROUNDS = 2


def source_of(commit: str, directory: Path) -> Path:
    """The package as it was in a commit."""
    command = ["git", "-C", str(ROOT), "archive", commit, "src"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"commit {commit} is not in this copy of the repository")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as files:
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
        number = federation.run(LIGHT, config | {"keys-seconds": 120.0})
        until = time.monotonic() + 600
        while "Finished task" not in federation.log("superlink"):
            assert time.monotonic() < until, federation.log("superlink")[-3000:]
            time.sleep(0.5)
        said = federation.flwr("log", str(number), "loopback", "--show")
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return [json.loads(line)["survivors"] for line in lines], said


@pytest.mark.parametrize("is_server_new", [True, False])
def test_releases_of_the_same_versions_work_together(tmp_path, is_server_new):
    new, old = ROOT / "src", source_of(FITS, tmp_path / "old")
    survivors, said = federate(
        tmp_path, *((new, [old, old, new, new, new]) if is_server_new else (old, [new, new, old, old, old]))
    )
    assert survivors == [5] * ROUNDS, said[-3000:]


def test_a_client_of_another_version_is_refused_in_one_line_and_the_run_goes_on_with_a_quorum(tmp_path):
    new, old = ROOT / "src", source_of(OLDER, tmp_path / "old")
    survivors, said = federate(tmp_path, new, [old, new, new, new, new])
    assert survivors == [4] * ROUNDS, said[-3000:]
    refusal = "the server has d2pfed '0.1.0' (wire 2, plan 2), and this side has d2pfed '0.1.0' (wire 2, plan 1): "
    assert f"{refusal}they do not fit" in said


def test_clients_refuse_a_server_of_another_version(tmp_path):
    new, old = ROOT / "src", source_of(OLDER, tmp_path / "old")
    survivors, said = federate(tmp_path, old, [new] * 5)
    assert survivors == []
    refusal = "the server has d2pfed '0.1.0' (wire 2, plan 1), and this side has d2pfed '0.1.0' (wire 2, plan 2): "
    assert f"{refusal}they do not fit" in said
