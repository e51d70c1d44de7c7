"""What the operators of clients and servers see: events, status commands, refusals."""

import json
import time
from contextlib import ExitStack

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Array, ArrayRecord, Message, RecordDict

from d2pfed.cli import main
from d2pfed.deploy import health
from d2pfed.deploy.config import read_client_config
from d2pfed.deploy.health import Event, client_status, note, read_events, server_status
from d2pfed.deploy.transport import Transport
from d2pfed.errors import ConfigError, DamagedFile, TooFewClients
from d2pfed.ledger.files import locked
from support.enrolled_clients import directory_of, enrol, make_plan
from support.local_grid import make_grid, make_strategy, one_hot, start


def events(tmp_path, client):
    return read_events(directory_of(tmp_path, client))


def status(*arguments) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["d2pfed", *map(str, arguments)])
        try:
            main()
        except SystemExit as ended:
            return ended.code
    return 0


@pytest.fixture
def server(tmp_path):
    """A server's directory after a whole run, in which training fails at client 1 and is not finite at client 2."""

    class Unspeakable(Exception):  # noqa: N818 - its text raises, as a user's may
        def __str__(self):
            raise SystemExit("no text")

    def train(client):
        def fail(message, context):
            raise Unspeakable if client == 3 else RuntimeError("no such column: age")

        def diverge(message, context):
            params = np.full(message.content["arrays"]["params"].numpy().shape, np.nan, np.float32)
            return Message(RecordDict({"arrays": ArrayRecord({"params": Array(params)})}), reply_to=message)

        return {1: fail, 2: diverge, 3: fail}.get(client, one_hot(client))

    roster, grid = enrol(tmp_path, 5), make_grid(tmp_path, train=train)
    (tmp_path / "roster").write_bytes(roster.data)
    (tmp_path / "authority").write_text(roster.roster.authority.hex())
    start(make_strategy(make_plan(rounds=1), tmp_path, roster), grid)
    return tmp_path


def test_a_client_that_sends_only_noise_is_seen_by_its_operator_alone(server, capsys):
    assert json.loads((server / "run" / "metrics.jsonl").read_text())["survivors"] == 5
    assert events(server, 0).keys() == {Event.ANSWERED, Event.TRAINED}
    assert events(server, 1)[Event.FAILED].text == "RuntimeError: no such column: age"
    assert "must be finite" in events(server, 2)[Event.FAILED].text
    assert Event.ANSWERED in events(server, 3)  # an error whose text cannot be had changes nothing
    assert status("client", "status", directory_of(server, 0)) == 0
    assert status("client", "status", directory_of(server, 1)) == 1
    assert (
        "PROBLEM: training fails, so only noise is sent: RuntimeError: no such column" in capsys.readouterr().out
    )


def test_a_success_ends_a_problem(server):
    directory = directory_of(server, 1)
    events = {Event.FAILED: [int(time.time()) - 60, "old"], Event.TRAINED: [int(time.time()), ""]}
    (directory / health.HEALTH).write_text(json.dumps(events))
    assert client_status(read_client_config(directory)).problems == ()


@pytest.mark.parametrize("text", ["", "[]", '{"answered": 3}', '{"fancy": [1, ""]}', "\xff", "[" * 3000])
def test_a_damaged_file_is_named_and_the_next_event_replaces_it(server, text):
    directory = directory_of(server, 0)
    (directory / health.HEALTH).write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedFile, match=r"health\.json is damaged"):
        read_events(directory)
    note(directory, Event.ANSWERED)
    assert read_events(directory).keys() == {Event.ANSWERED}


def test_an_event_that_cannot_be_written_is_dropped(tmp_path):
    note(tmp_path / "missing", Event.ANSWERED)
    assert not (tmp_path / "missing").exists()


def test_a_finished_run_is_healthy_and_writes_its_metrics(server, capsys):
    assert status("deploy", "status", server, "--json", "--metrics", server / "out.prom") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["rounds"], found["problems"]) == ("complete", 1, [])
    assert "d2pfed_server_rounds 1\n" in (server / "out.prom").read_text()


def test_a_run_that_was_killed_is_a_problem(server, capsys):
    (server / "run" / "summary.json").unlink()
    assert status("deploy", "status", server) == 1
    assert "stopped before its end; submit the app again" in capsys.readouterr().out


def test_a_run_at_work_is_healthy_until_it_shows_no_life(server, monkeypatch):
    with locked(server / "run" / "lock"):
        assert server_status(server).facts["state"] == "at work"
        assert server_status(server).problems == ()
        monkeypatch.setattr(health, "STALLED_SECONDS", -1)
        assert "no sign of life" in server_status(server).problems[0]


def test_a_supervisor_waits_until_nobody_works_on_the_run(server, monkeypatch):
    slept = []
    with ExitStack() as stack:
        stack.enter_context(locked(server / "run" / "lock"))

        def sleep(seconds):
            slept.append(seconds)
            if len(slept) == 3:
                stack.close()

        monkeypatch.setattr("d2pfed.cli.federation.time.sleep", sleep)
        assert status("deploy", "status", server, "--wait") == 0
    assert len(slept) == 3


def test_a_roster_that_expires_within_a_week_is_a_problem_on_both_sides(server, monkeypatch):
    now = time.time()
    monkeypatch.setattr(health.time, "time", lambda: now + 24 * 86_400)
    assert "expires in 6.0 days: the authority must sign the next one" in server_status(server).problems[0]
    assert client_status(read_client_config(directory_of(server, 0))).problems == server_status(server).problems
    monkeypatch.setattr(health.time, "time", lambda: now + 31 * 86_400)
    assert "has expired" in server_status(server).problems[0]


def test_a_directory_without_a_run_is_refused_in_a_line(tmp_path):
    with pytest.raises(ConfigError, match="there is no run in"):
        server_status(tmp_path)


def test_a_server_ends_at_once_with_the_reasons_if_every_node_refuses(tmp_path, monkeypatch):
    roster, grid = enrol(tmp_path, 5, least_cohort=50), make_grid(tmp_path)
    monkeypatch.setattr(Transport, "pause", lambda *_: pytest.fail("it waits for nodes that have refused"))
    with pytest.raises(TooFewClients, match=r"5 nodes refuse: .*cohort.* at least 50.*start again"):
        start(make_strategy(make_plan(), tmp_path, roster), grid)
    assert "cohort" in read_events(directory_of(tmp_path, 0))[Event.REFUSED].text
