"""Each process of a federation with warm nodes is killed in a round."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from loopback import Federation, end

pytestmark = pytest.mark.slow  # real processes over TLS take minutes: the nightly script runs them

ROOT = Path(__file__).resolve().parent.parent
LIGHT = ROOT / "tests" / "flower_light"
NODE, FORK, PARENT, BLOCKING = 2, 3, 4, 0
ROUNDS = 5
HOUR = "3600"
DIMENSION = 20_000  # a model that is a record of its own, here in five chunks
CHUNK = {"FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE": "16384"}


def survivors(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    return [json.loads(line)["survivors"] for line in (file.read_text() if file.exists() else "").splitlines()]


def wait_until(condition, federation: Federation, seconds: float = 600.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, federation.log("superlink")[-3000:]
        time.sleep(0.5)


def forks_of(process: int) -> list[int]:
    """The children of a process that are forks of it: their command is the same."""
    command = Path(f"/proc/{process}/cmdline").read_bytes()
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(file.read_text().rpartition(")")[2].split()[1])
            if parent == process and (file.parent / "cmdline").read_bytes() == command:
                found.append(int(file.parent.name))
    return found


def group_of(leader: int) -> list[int]:
    """The processes of a process group that are left."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group = file.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(int(file.parent.name))
    return found


def apps_of(federation: Federation) -> list[int]:
    """The server's apps of a federation that are running."""
    mark = f"FLWR_HOME={federation.directory / 'flower'}".encode()
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in file.read_bytes() and b"flwr-serverapp" in (file.parent / "cmdline").read_bytes():
                found.append(int(file.parent.name))
    return found


@pytest.fixture
def started(tmp_path):
    """Five warm nodes and a directory for a run: federation, its run's directory, where apps are steered."""
    signals, run, place = tmp_path / "signals", tmp_path / "run", tmp_path / "federation"
    signals.mkdir()
    (signals / "planted").write_text("planted")
    with Federation(
        place,
        5,
        environment={"PYTHONPATH": str(ROOT / "src")} | CHUNK,
        database=str(place / "superlink.db"),
        app=LIGHT,
        preload="",
    ) as federation:
        federation.start_superlink()
        for client in range(5):
            federation.register(client)
            federation.start_supernode(client)
        yield federation, run, signals


def submit(federation: Federation, run: Path, signals: Path) -> None:
    config = {"cohort": 5, "rounds": ROUNDS, "dropouts": 0.2, "colluders": 0.1, "signals": str(signals)}
    config |= {"dimension": DIMENSION}
    config |= {"joining-seconds": 300.0, "keys-seconds": 300.0, "training-seconds": 600.0}
    config |= {"roster": str(federation.roster), "authority": federation.authority, "draws": str(federation.draws)}
    federation.run(LIGHT, config | {"directory": str(run)})


def test_a_run_outlives_the_kill_of_each_process_of_a_client(started):
    federation, run, signals = started
    (signals / f"delay-{NODE}-1").write_text(HOUR)
    submit(federation, run, signals)

    # A whole machine, while it trains: the round goes on with the others, and it takes part again after a restart.
    wait_until((signals / f"training-{NODE}-1").exists, federation)
    (signals / f"delay-{BLOCKING}-2").write_text("100")  # the next round waits for this one: a quorum needs it
    end(federation.nodes[NODE], with_signal=signal.SIGKILL)
    wait_until(lambda: len(survivors(run)) == 1, federation)
    assert survivors(run) == [4]
    until = time.monotonic() + 90
    federation.start_supernode(NODE, name="again")
    while time.monotonic() < until:  # refused until its heartbeat has expired: started again, as by a supervisor
        if federation.nodes[NODE].poll() is not None:
            federation.start_supernode(NODE, name="again")
        time.sleep(5)

    # A fork, while it trains: its node stays, and answers again once Flower has missed the fork's heartbeat.
    (signals / f"delay-{FORK}-3").write_text(HOUR)
    wait_until((signals / f"training-{FORK}-3").exists, federation)
    wait_until((signals / f"training-{NODE}-3").exists, federation)
    (fork,) = forks_of(federation.nodes[FORK].pid)
    os.kill(fork, signal.SIGKILL)
    (signals / f"delay-{BLOCKING}-4").write_text("100")
    (signals / f"delay-{PARENT}-5").write_text(HOUR)
    wait_until(lambda: len(survivors(run)) == 3, federation)
    assert survivors(run)[2] == 4
    assert federation.nodes[FORK].poll() is None

    # The node alone, while its fork trains: fork and SuperNode end with it, and it is not refused when it comes back.
    wait_until((signals / f"training-{PARENT}-5").exists, federation)
    wait_until((signals / f"training-{FORK}-5").exists, federation)
    node = federation.nodes[PARENT]
    os.kill(node.pid, signal.SIGKILL)
    node.wait()
    wait_until(lambda: not group_of(node.pid), federation, 30)
    federation.start_supernode(PARENT, name="back")

    # A SuperNode alone: its node ends, too, and says so to its supervisor.
    wait_until(lambda: "SuperNode ID" in federation.log(f"back-{PARENT}"), federation, 60)
    back = federation.nodes[PARENT]
    (supernode,) = [each for each in group_of(back.pid) if each != back.pid]
    os.kill(supernode, signal.SIGKILL)
    assert back.wait(30) != 0
    wait_until((run / "models.json").exists, federation)
    assert survivors(run)[4] == 4


def test_a_run_outlives_the_kill_of_each_process_of_the_server(started):
    federation, run, signals = started
    (signals / f"delay-{BLOCKING}-2").write_text("30")
    submit(federation, run, signals)

    # The app: submitted again, the run goes on after its last finished round.
    wait_until((signals / f"training-{BLOCKING}-2").exists, federation)
    (app,) = apps_of(federation)
    os.kill(app, signal.SIGKILL)
    (signals / f"delay-{BLOCKING}-3").write_text("30")
    submit(federation, run, signals)

    # The SuperLink: once it is back, it refuses its former app, which ends; submitted again, the run goes on.
    wait_until((signals / f"training-{BLOCKING}-3").exists, federation)
    assert len(survivors(run)) == 2
    end(federation.superlink, with_signal=signal.SIGKILL)
    assert apps_of(federation)
    federation.start_superlink(name="again")
    wait_until(lambda: not apps_of(federation), federation)
    submit(federation, run, signals)
    wait_until((run / "models.json").exists, federation)
    assert len(survivors(run)) == ROUNDS


def test_a_node_that_is_restarted_by_its_supervisor_says_farewell_and_is_not_refused(started):
    federation, _, _ = started
    wait_until(lambda: "SuperNode ID" in federation.log(f"supernode-{NODE}"), federation)
    federation.end(federation.nodes[NODE])  # a signal to all of its processes at once, as systemd sends it
    federation.start_supernode(NODE, name="restarted")
    wait_until(lambda: "SuperNode ID" in federation.log(f"restarted-{NODE}"), federation, 60)
    assert "Failed to activate" not in federation.log(f"restarted-{NODE}")
