import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from typer.testing import CliRunner

from d2pfed import canonical
from d2pfed.errors import ConfigError, PeerError
from d2pfed.flower.client import private
from d2pfed.flower.enrol import app as enrol_app
from d2pfed.flower.enrol import read_roster
from d2pfed.flower.envelope import EXCHANGE, Introduction, Request
from d2pfed.flower.home import SIMULATION_VARIABLE, Home, read_home
from d2pfed.flower.layout import Layout
from d2pfed.flower.store import Account, Saved, Store
from d2pfed.ledger import Kind as Entry
from d2pfed.ledger import read_rows
from d2pfed.round import Attempt, session_of
from d2pfed.secagg import Consistency, encode_roster
from d2pfed.secagg.messages import Kind, encode_invitation
from d2pfed.wire import kind_of
from homes import enrol
from local_grid import (
    DIMENSION,
    make_app,
    make_context,
    make_grid,
    make_message,
    make_plan,
    make_strategy,
    noise_bound,
    one_hot,
    start,
)
from rosters import roster_of

LAYOUT = Layout.of(ArrayRecord({"params": Array(np.zeros(DIMENSION, np.float32))}))


def introduction(plan, run: str = "a run") -> Introduction:
    return Introduction(run, canonical.encode(plan), LAYOUT.encode())


def ask(home, content: RecordDict, client: int = 0) -> RecordDict:
    """The answer of a client app to one message; errors come out as they are."""
    app = make_app(one_hot(client))
    return app(make_message(content, 100 + client), make_context(client, home)).content


def invitation(plan, client: int = 0, number: int = 0, attempt: int = 0, run: str = "a run") -> RecordDict:
    session = session_of(plan, Attempt(run, number, attempt), tuple(range(5)), Consistency.SIGNED)
    return Request(encode_invitation(session, client), 60.0, 300.0).pack()


@pytest.fixture
def plan():
    return make_plan()


@pytest.fixture
def home(tmp_path, plan):
    """The home of client 0, to which a run has been introduced."""
    enrol(tmp_path, 5)
    ask(tmp_path / "home-0", introduction(plan).pack())
    return tmp_path / "home-0"


def replay(grid, node: int, kind: Kind):
    """The first request of a kind that went to a node, sent again."""
    for message in grid.sent:
        content = message.content if message.metadata.dst_node_id == node else {}
        if EXCHANGE in content and kind_of(content[EXCHANGE]["frame"]) == kind:
            return make_message(message.content, node)
    raise AssertionError(f"no request {kind} went to node {node}")


def outgoing_bytes(message: Message) -> bytes:
    """Every byte of a message as Flower serialises it."""
    parts, queue = [], [message]
    while queue:
        item = queue.pop()
        parts.append(item.deflate())
        queue.extend((item.children or {}).values())
    return b"".join(parts)


PLANTED_TEXT, PLANTED_NUMBER, PLANTED_WEIGHT = "planted-in-the-data", 987654321.125, 0.123456789


def leaky(client: int):
    """A training function that returns what a quickstart returns, and some of its data."""

    def train(message, context):
        params = message.content["arrays"]["params"].numpy().copy()
        params[client] += PLANTED_WEIGHT
        context.state["seen"] = ConfigRecord({"text": PLANTED_TEXT})
        return Message(
            RecordDict(
                {
                    "arrays": ArrayRecord({"params": Array(params)}),
                    "metrics": MetricRecord({"num-examples": PLANTED_NUMBER, "loss": PLANTED_NUMBER}),
                    "config": ConfigRecord({"text": PLANTED_TEXT}),
                }
            ),
            reply_to=message,
        )

    return train


def failing(client: int):
    def train(message, context):
        raise ValueError(f"bad record: {PLANTED_TEXT} {PLANTED_NUMBER}")

    return train


def planted() -> list[bytes]:
    return [
        PLANTED_TEXT.encode(),
        str(PLANTED_NUMBER).encode(),
        np.float64(PLANTED_NUMBER).tobytes(),
        np.float32(PLANTED_NUMBER).tobytes(),
        np.float32(PLANTED_WEIGHT).tobytes(),
        np.float64(PLANTED_WEIGHT).tobytes(),
        b"num-examples",
    ]


@pytest.mark.parametrize("train", [leaky, failing])
def test_nothing_of_the_training_leaves_in_clear(tmp_path, train):
    grid, roster = make_grid(tmp_path, train=train), enrol(tmp_path, 5)
    start(make_strategy(make_plan(rounds=1), tmp_path, roster), grid)
    sent = b"".join(outgoing_bytes(message) for message in grid.received)
    assert len(grid.received) == 5 * 6
    assert [needle for needle in planted() if needle in sent] == []


def test_the_egress_check_finds_what_an_unmodified_app_sends(tmp_path):
    message = make_message(
        RecordDict({"arrays": ArrayRecord({"params": Array(np.zeros(DIMENSION, np.float32))})}), 100
    )
    reply = leaky(0)(message, make_context(0, None))
    found = [needle for needle in planted() if needle in outgoing_bytes(reply)]
    assert PLANTED_TEXT.encode() in found
    assert b"num-examples" in found
    assert np.float64(PLANTED_NUMBER).tobytes() in found
    assert np.float32(PLANTED_WEIGHT).tobytes() in found


FROZEN = 0.5772156649


def with_frozen_arrays(client: int):
    """A training function that returns a whole model, of which the server knows one array by name."""

    def train(message, context):
        params = message.content["arrays"]["params"].numpy().copy()
        params[client] += 1.0
        arrays = {
            "backbone": Array(np.full(7, FROZEN, np.float32)),
            "batches-seen": Array(np.array(12)),
            "params": Array(params),
        }
        return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)

    return train


def test_only_the_arrays_that_the_server_names_are_trained_and_leave(tmp_path):
    plan, grid, roster = make_plan(rounds=1), make_grid(tmp_path, train=with_frozen_arrays), enrol(tmp_path, 5)
    params = start(make_strategy(plan, tmp_path, roster), grid)
    assert np.abs(params[:5] - 1 / 5).max() < noise_bound(plan, 5)
    sent = b"".join(outgoing_bytes(message) for message in grid.received)
    assert np.float32(FROZEN).tobytes() not in sent
    assert b"backbone" not in sent


def test_no_log_of_either_side_has_data_or_keys(tmp_path, caplog):
    caplog.set_level(1)
    grid, roster = make_grid(tmp_path, train=leaky), enrol(tmp_path, 5)
    start(make_strategy(make_plan(rounds=1), tmp_path, roster), grid)
    keys = [(tmp_path / f"home-{client}" / "key").read_bytes() for client in range(5)]
    secrets = [PLANTED_TEXT, str(PLANTED_NUMBER), str(PLANTED_WEIGHT)]
    for key in [*keys, np.float32(PLANTED_WEIGHT).tobytes(), np.float64(PLANTED_NUMBER).tobytes()]:
        secrets += [key.hex(), str(key)[2:-1]]
    assert "survivors" in caplog.text  # there is a log
    assert [secret for secret in secrets if secret in caplog.text] == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_training_that_fails_contributes_zero_and_its_noise(tmp_path, value):
    def broken(client):
        def train(message, context):
            arrays = {"params": Array(np.full(DIMENSION, value, np.float32))}
            return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)

        return train if client == 1 else one_hot(client)

    grid, roster = make_grid(tmp_path, train=broken), enrol(tmp_path, 5)
    params = start(make_strategy(make_plan(rounds=1), tmp_path, roster), grid)
    assert abs(params[1]) < 0.1 < params[0]
    (commit,) = [r for r in read_rows(tmp_path / "run" / "ledger.sqlite") if r.kind is Entry.COMMIT]
    assert commit.release.participants == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("category", ["evaluate", "train", "query"])
def test_messages_of_other_strategies_are_refused(home, category):
    message = make_message(RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord({"lr": 0.1})}), 100)
    message.metadata.message_type = category
    with pytest.raises(PeerError, match="answers requests of d2pfed only"):
        private(message, make_context(0, home), one_hot(0))


def test_an_invitation_is_answered_once(home, plan):
    ask(home, invitation(plan, number=3))
    with pytest.raises(PeerError, match="stale"):
        ask(home, invitation(plan, number=3))
    with pytest.raises(PeerError, match="round 2, attempt 7 of run a run is stale"):
        ask(home, invitation(plan, number=2, attempt=7))
    ask(home, invitation(plan, number=3, attempt=1))


ANSWER = """
import sys
from pathlib import Path
from local_grid import make_context, make_message
from d2pfed.flower.client import private
from d2pfed.flower.envelope import Request
request = Request(bytes.fromhex(sys.argv[2]), 60.0, 300.0).pack()
assert private(make_message(request, 100), make_context(0, Path(sys.argv[1])), None).has_content()
print(sorted({"numba", "scipy", "dp_accounting", "mpmath", "torch", "matplotlib"} & set(sys.modules)))
"""


def test_a_request_that_asks_for_no_vector_loads_nothing_slow(home, plan):
    """Flower starts a process for each message, so what it loads is what most exchanges cost."""
    frame = invitation(plan)[EXCHANGE]["frame"].hex()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    loaded = subprocess.run(
        [sys.executable, "-c", ANSWER, str(home), frame],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout == "[]\n"


def test_no_request_of_a_finished_round_is_answered_again(tmp_path, plan):
    grid, roster = make_grid(tmp_path), enrol(tmp_path, 5)
    start(make_strategy(plan, tmp_path, roster), grid, 1)
    for kind in (Kind.INVITATION, Kind.ADVERTS, Kind.MASK_REQUEST, Kind.SURVIVORS, Kind.UNMASK_REQUEST):
        again = grid.answer(100, replay(grid, 100, kind))
        assert again.has_error()
        assert "stale" in again.error.reason or "has answered this request" in again.error.reason


def test_a_replayed_request_in_mid_round_gets_no_second_answer(tmp_path, plan):
    grid, roster = make_grid(tmp_path), enrol(tmp_path, 5)
    seconds = []

    def twice(client, message):
        if client == 0 and EXCHANGE in message.content:
            first = grid.answer(100, message)
            seconds.append(grid.answer(100, message))
            return _Answered(first)
        return message

    class _Answered:
        def __init__(self, reply):
            self.reply = reply

    answer = grid.answer
    grid.answer = lambda node, message: message.reply if isinstance(message, _Answered) else answer(node, message)
    grid.going = twice
    start(make_strategy(plan, tmp_path, roster), grid, 1)
    # A second request finds the state of the next phase, which it destroys: any error is final.
    assert all(reply.has_error() for reply in seconds)


def test_a_plan_that_was_not_agreed_on_is_refused(home, plan):
    other = replace(plan, attempts=plan.attempts + 1)
    with pytest.raises(PeerError, match="was agreed on with another plan"):
        ask(home, invitation(other))
    with pytest.raises(PeerError, match="introduced with another plan"):
        ask(home, introduction(other).pack())
    with pytest.raises(PeerError, match="never introduced"):
        ask(home, invitation(plan, run="another run"))


def test_an_invitation_for_another_client_is_refused(home, plan):
    with pytest.raises(PeerError, match="this is client 0, the invitation is for client 3"):
        ask(home, invitation(plan, client=3))


def test_an_attempt_is_over_when_its_time_is(home, plan):
    session = session_of(plan, Attempt("a run", 0, 0), tuple(range(5)), Consistency.SIGNED)
    store = Store(home)
    now = time.time()
    for begun, expires in ((now - 100, now - 1), (now + 50, now + 100)):  # too late, or a clock that was set back
        store.save(session.digest, Saved(b"invitation", begun, expires, b"state"))
        with pytest.raises(PeerError, match="over"):
            store.take(session.digest)
        with pytest.raises(PeerError, match="no part in that session"):
            store.take(session.digest)


def test_an_answer_that_took_too_long_is_not_sent(tmp_path, plan):
    def slow(client):
        def train(message, context):
            time.sleep(1.2 if client == 1 else 0)
            return one_hot(client)(message, context)

        return train

    grid, roster = make_grid(tmp_path, train=slow), enrol(tmp_path, 5)

    def hasty(client, message):
        if client == 1 and EXCHANGE in message.content:
            fields = message.content[EXCHANGE]
            if kind_of(fields["frame"]) == Kind.MASK_REQUEST:
                fields["seconds"] = 1.0
        return message

    grid.going = hasty
    start(make_strategy(plan, tmp_path, roster), grid, 1)
    (late,) = [reply for reply in grid.received if reply.has_error()]
    assert "longer than the server's 1 seconds" in late.error.reason


def test_saved_secrets_are_used_once(tmp_path):
    store, session = Store(tmp_path), b"s" * 32
    now = time.time()
    for _ in range(20):
        store.save(session, Saved(b"invitation", now, now + 100, b"state"))

        def take(_):
            try:
                return Store(tmp_path).take(session)
            except PeerError:
                return None

        with ThreadPoolExecutor(8) as pool:
            taken = [saved for saved in pool.map(take, range(8)) if saved is not None]
        assert [saved.state for saved in taken] == [b"state"]
        assert list((tmp_path / "states").iterdir()) == []


def test_what_is_kept_is_readable_by_its_owner_alone(home, plan):
    ask(home, invitation(plan))
    files = [path for path in (*(home / "states").iterdir(), *(home / "runs").iterdir()) if path.suffix != ".lock"]
    assert len(files) == 3
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)


def test_a_key_that_others_can_read_is_refused(home):
    (home / "key").chmod(0o644)
    with pytest.raises(ConfigError, match="readable by its owner alone"):
        read_home(home)


def test_a_roster_that_the_authority_did_not_sign_is_refused(home):
    roster = read_home(home).enrolment.roster
    other = os.urandom(32)
    (home / "roster").write_bytes(encode_roster(roster_of(roster.keys, other), other))
    with pytest.raises(PeerError, match="signature"):
        read_home(home)


def test_a_client_that_the_roster_knows_by_another_key_is_refused(tmp_path, home):
    (home / "key").write_bytes((tmp_path / "home-1" / "key").read_bytes())
    with pytest.raises(ConfigError, match="client 0 is enrolled with another key"):
        read_home(home)


def test_a_plan_below_the_clients_policy_is_refused(home, plan):
    text = (home / "client.toml").read_text()
    (home / "client.toml").write_text(text.replace("least_cohort = 3", "least_cohort = 6"))
    with pytest.raises(ConfigError, match="policy"):
        ask(home, introduction(plan, "stricter").pack())
    with pytest.raises(ConfigError, match="policy"):
        ask(home, invitation(plan))


def test_a_plan_beyond_the_clients_own_budget_is_refused(tmp_path, plan):
    enrol(tmp_path, 5)
    home = tmp_path / "home-0"
    text = (home / "client.toml").read_text()
    (home / "client.toml").write_text(
        text.replace("epsilon = 1e6\n", "epsilon = 1.0\n").replace("most_epsilon = 1.0", "most_epsilon = 1e6")
    )
    with pytest.raises(ConfigError, match="its budget is 1"):
        ask(home, introduction(plan).pack())


def test_a_client_counts_each_vector_and_stops_at_its_cap(home, plan):
    account = Account(home, read_home(home).budget)
    counts = [
        account.charge(plan, "a run", plan.release(number, 0, (), plan.quorum))
        for number in range(plan.participations + 2)
    ]
    assert counts == [*range(plan.participations), plan.participations, plan.participations]
    assert account.charge(plan, "another run", plan.release(0, 0, (), plan.quorum)) == 0


def test_a_client_at_its_cap_sends_zero_and_its_noise(tmp_path):
    plan = make_plan(rounds=2, participations=1)
    grid, roster = make_grid(tmp_path), enrol(tmp_path, 5)
    models = {}

    def evaluate(number, arrays):
        models[number] = arrays["params"].numpy()

    start(make_strategy(plan, tmp_path, roster), grid, evaluate_fn=evaluate)
    assert (models[1][:5] > 0.1).all()
    assert np.abs(models[2] - models[1]).max() < 0.1


def test_a_client_without_a_home_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.delenv(SIMULATION_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="a client needs a home: start its SuperNode with --node-config"):
        Home.of(make_context(0, None))


def test_a_simulated_client_is_not_enrolled_and_a_home_goes_before_it(monkeypatch, tmp_path, home):
    monkeypatch.setenv(SIMULATION_VARIABLE, str(tmp_path))
    assert Home.of(make_context(3, None)).consistency is Consistency.ASSUMED
    assert Home.of(make_context(3, home)).consistency is Consistency.SIGNED


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("client = ", "is not TOML"),
        ('client = 0\nsever = "x"', "unknown settings: sever"),
        ('authority = "00"', "not a client's settings"),
        ('client = 0\nconsistency = "hoped"', "not a client's settings"),
        ('client = -1\nconsistency = "assumed"', "identity must be in"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, text, complaint):
    (tmp_path / "client.toml").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_home(tmp_path)


def test_the_whole_run_works_without_a_roster_where_everyone_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv(SIMULATION_VARIABLE, str(tmp_path / "simulation"))
    grid = make_grid(tmp_path)
    grid.apps = {node: (app, make_context(node - 100, None)) for node, (app, _) in grid.apps.items()}
    params = start(make_strategy(make_plan(rounds=1), tmp_path, None), grid)
    assert (params[:5] > 0.1).all()


def test_the_commands_of_enrolment_make_a_home_that_can_be_read(tmp_path):
    def enrolled(*arguments) -> str:
        done = CliRunner().invoke(enrol_app, [str(argument) for argument in arguments])
        assert done.exit_code == 0, done.output
        return done.output.strip()

    authority = enrolled("authority", tmp_path / "authority.key")
    clients = [enrolled("client", tmp_path / f"c{number}", number, authority) for number in (4, 9)]
    enrolled("roster", tmp_path / "authority.key", tmp_path / "roster", *clients)
    (tmp_path / "c9" / "roster").write_bytes((tmp_path / "roster").read_bytes())
    home = read_home(tmp_path / "c9")
    assert home.client == 9
    assert home.consistency is Consistency.SIGNED
    assert home.policy.least_cohort == 10
    assert set(read_roster(tmp_path / "roster", authority).keys) == {4, 9}
    again = CliRunner().invoke(enrol_app, ["authority", str(tmp_path / "authority.key")])
    assert isinstance(again.exception, ConfigError)
    assert "holds a key already" in str(again.exception)


def test_an_error_of_the_clients_own_tells_the_server_nothing_of_its_machine(tmp_path, caplog):
    app, message = make_app(one_hot(0)), make_message(introduction(make_plan()).pack(), 100)
    with pytest.raises(ConfigError, match="not set up; its own log says why") as failure:
        app(message, make_context(0, tmp_path / "nowhere"))
    assert str(tmp_path) not in str(failure.value)
    assert str(tmp_path / "nowhere") in caplog.text


def test_a_defect_tells_the_server_nothing_of_the_client(home, plan, caplog):
    (home / "runs").rename(home / "gone")
    (home / "runs").write_text("in the way")
    with pytest.raises(PeerError, match="this client failed; its own log says why"):
        ask(home, invitation(plan))
    assert str(home) in caplog.text


def test_a_new_attempt_forgets_the_secrets_of_the_one_before(home, plan):
    ask(home, invitation(plan, attempt=0))
    (before,) = (home / "states").iterdir()
    ask(home, invitation(plan, attempt=1))
    (after,) = (home / "states").iterdir()
    assert before != after
