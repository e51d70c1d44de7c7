"""A SuperLink and five SuperNodes as processes of their own, over TLS and with authentication, two private rounds.

One SuperNode is killed while it trains in the first round, another is slower than the deadline in the second.
"""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from loopback import Federation, end, make_certificate, make_node_key

from d2pfed.deploy.account import ClientSpending
from d2pfed.deploy.config import read_client_config
from d2pfed.deploy.rosters import Positions, read_roster
from d2pfed.ledger import RowKind, read_rows
from d2pfed.ledger.client_log import Entry
from d2pfed.ledger.rows import Head
from d2pfed.plan import decode_plan
from d2pfed.secagg.trust import Consistency
from support.enrolled_clients import DIMENSION, make_plan, noise_bound

pytestmark = pytest.mark.slow  # real processes over TLS take minutes: the nightly script runs them

ROOT = Path(__file__).resolve().parent.parent
KILLED, SLOW, WRONG_CERTIFICATE, UNREGISTERED = 2, 3, 5, 6
SURVIVORS = 0, 1, 3, 4
PLAN = {"dropouts": 0.2, "colluders": 0.1, "spare": 6, "epsilon": 20000.0}


ENCODE = """
import numpy as np
import d2pfed.flower.client
from support.enrolled_clients import make_plan
from d2pfed.numerics.randomness import Entropy
plan = make_plan()
centres = plan.codec.prepare(np.ones(16, np.float32), bytes(32))
plan.ring.wrap(plan.mechanism.encode(centres, None, Entropy.system()))
"""


def seconds_to_start() -> float:
    """How long a client's process takes on this machine as busy as it is, once its kernels are compiled."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"}
    for _ in range(2):
        start = time.monotonic()
        subprocess.run([Path(sys.executable).parent / "flwr-clientapp", "--help"], capture_output=True, check=True)
        subprocess.run([sys.executable, "-c", ENCODE], env=environment, check=True)
    return time.monotonic() - start


def wait_for(path: Path, federation: Federation, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        over = "Finished task" in federation.log("superlink") and not path.exists()
        late = over or time.monotonic() > until
        assert not late, f"{path} is missing:\n{federation.log('superlink')[-3000:]}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def federated(tmp_path_factory):
    """Run the federation once; what is left of it is what the tests look at."""
    directory = tmp_path_factory.mktemp("flower")
    deadline = max(15.0, 6 * seconds_to_start())
    signals = directory / "signals"
    signals.mkdir()
    planted = f"planted-{os.urandom(8).hex()}"
    (signals / "planted").write_text(planted)
    (signals / f"delay-{KILLED}-1").write_text("3600")
    (signals / f"delay-{SLOW}-1").write_text(str(1.5 * deadline))
    place = directory / "federation"
    with Federation(
        place, 5, environment={"PYTHONPATH": str(ROOT / "src")}, database=str(place / "superlink.db")
    ) as federation:
        federation.start_superlink()
        handshake = federation_handshake(federation)
        for client in range(5):
            federation.register(client)
            federation.start_supernode(client)
        start_strangers(federation)
        federation.run(
            ROOT / "tests" / "flower_light",
            {
                "directory": str(directory / "run"),
                "roster": str(federation.roster),
                "authority": federation.authority,
                "draws": str(federation.draws),
                "signals": str(signals),
                "training-seconds": deadline,
                "keys-seconds": deadline,
                "joining-seconds": 10 * deadline,
            },
        )
        marker = signals / f"training-{KILLED}-1"
        wait_for(marker, federation, 30 * deadline)
        end(federation.nodes[KILLED], with_signal=signal.SIGKILL)
        wait_for(directory / "run" / "models.json", federation, 30 * deadline)
        yield SimpleNamespace(federation=federation, directory=directory, handshake=handshake, planted=planted)


def federation_handshake(federation: Federation) -> SimpleNamespace:
    """What a stranger sees of the SuperLink's port: with TLS and without."""
    trusted = ssl.create_default_context(cafile=str(federation.certificate))
    with (
        socket.create_connection(("127.0.0.1", federation.port)) as plain,
        trusted.wrap_socket(plain, server_hostname="localhost") as wrapped,
    ):
        version = wrapped.version()
    with socket.create_connection(("127.0.0.1", federation.port)) as plain:
        plain.settimeout(10)
        plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        try:
            answer = plain.recv(100)
        except ConnectionError:
            answer = b""
    return SimpleNamespace(version=version, plain=answer)


def start_strangers(federation: Federation) -> None:
    """One SuperNode that trusts another certificate, and one whose key nobody registered."""
    forged, _ = make_certificate(federation.directory, "forged")
    for client in (WRONG_CERTIFICATE, UNREGISTERED):
        make_node_key(federation.directory / f"node-{client}")
        federation.client_directory(client).mkdir()
    federation.start_supernode(WRONG_CERTIFICATE, certificate=forged)
    federation.start_supernode(UNREGISTERED)


def test_every_part_is_a_process_of_its_own_and_talks_tls(federated):
    processes = [federated.federation.superlink, *federated.federation.nodes.values()]
    assert len({process.pid for process in processes}) == 8
    assert federated.handshake.version in ("TLSv1.2", "TLSv1.3")
    assert b"HTTP/1.1 200" not in federated.handshake.plain


def test_the_sums_are_those_of_the_survivors(federated):
    models = {
        int(key): np.array(value)
        for key, value in json.loads((federated.directory / "run" / "models.json").read_text()).items()
    }
    plan = make_plan(**PLAN)
    for number, survivors in ((1, SURVIVORS), (2, SURVIVORS)):
        exact = np.zeros(DIMENSION)
        exact[list(survivors)] = 1 / 5
        noise = models[number] - models[number - 1] - exact
        assert np.abs(noise).max() < noise_bound(plan, len(survivors)) < 1 / 10
        assert np.abs(noise).max() > 0  # there is noise at all


def test_the_ledger_has_the_realised_survivors(federated):
    rows = [row for row in read_rows(federated.directory / "run" / "ledger.sqlite") if row.key is not None]
    # On a busy machine an attempt may be void and another follow; each has its end in the ledger all the same.
    ends = [row.kind for row in rows[1::2]]
    assert [row.kind for row in rows[::2]] == [RowKind.RESERVE] * len(ends)
    assert ends.count(RowKind.COMMIT) == 2
    assert set(ends) <= {RowKind.COMMIT, RowKind.VOID}
    assert ends[0] is RowKind.VOID  # one killed, one slow: three of five are no quorum beside a colluder
    assert [row.release.participants for row in rows if row.kind is RowKind.COMMIT] == [SURVIVORS] * 2
    metrics = [
        json.loads(line) for line in (federated.directory / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["survivors"] for line in metrics] == [4, 4]
    assert [line["charged"] for line in metrics] == [1, 2]
    assert rows[-1].epsilon <= PLAN["epsilon"]


def test_each_client_has_its_own_log_and_no_secrets_left(federated):
    directory = federated.federation.client_directory(0)
    own = read_client_config(directory)
    history = own.log.read()
    begun = [(body["round"], body["attempt"]) for body in history.bodies(Entry.BEGUN)]
    charged = [(release.round, release.attempt) for release in ClientSpending.of(history).releases]
    assert set(charged) <= set(begun)
    assert {number for number, _ in charged} == {0, 1}
    assert (0, 0) in charged  # the attempt was void, and this client cannot know
    assert {body["draw"] for body in history.bodies(Entry.BEGUN)} == {
        3 * number + attempt for number, attempt in begun
    }
    assert list((directory / "states").glob("*.state")) == []
    secret = [path for path in directory.rglob("*") if path.is_file() and path.name != "client.toml"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in secret)


def test_the_plan_is_safe_from_one_of_five_clients(federated):
    plan = decode_plan((federated.directory / "run" / "plan.json").read_text())
    assert (plan.colluders, plan.quorum, plan.consistency) == (1, 4, Consistency.SIGNED)


def test_the_server_and_peers_remember_how_far_each_client_was(federated):
    roster = read_roster(federated.federation.roster, federated.federation.authority).roster
    (file,) = [path for path in (federated.directory / "run").glob("positions-*") if path.suffix != ".lock"]
    at_server = Positions(file, roster.keys).latest()
    at_peer = Positions(federated.federation.client_directory(0) / "peers", roster.keys).latest()
    for client in SURVIVORS:
        history = read_client_config(federated.federation.client_directory(client)).log.read()
        known = [at_server[client], *([at_peer[client]] if client else [])]
        assert all(history.holds(Head(position.count, position.head)) for position in known)
        assert at_server[client].count >= len(history.bodies(Entry.BEGUN))


def test_client_reports_beside_arrays_never_reach_the_superlink(federated):
    files = [path for path in federated.federation.directory.iterdir() if path.name.startswith("superlink")]
    stored = b"".join(path.read_bytes() for path in files)
    assert b"num-examples" in stored  # the app's own source is there, so what is searched for could be found
    assert federated.planted.encode() not in stored


def test_a_node_does_not_join_a_superlink_with_another_certificate(federated):
    assert federated.federation.nodes[WRONG_CERTIFICATE].poll() not in (None, 0)
    assert "CERTIFICATE_VERIFY_FAILED" in federated.federation.log(f"supernode-{WRONG_CERTIFICATE}")
    assert not (federated.federation.client_directory(WRONG_CERTIFICATE) / "runs").exists()


def test_a_node_whose_key_nobody_registered_is_turned_away(federated):
    assert federated.federation.nodes[UNREGISTERED].poll() not in (None, 0)
    assert "Failed to activate SuperNode" in federated.federation.log(f"supernode-{UNREGISTERED}")
