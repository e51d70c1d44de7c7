import fcntl
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from d2pfed.accounting import Sampling
from d2pfed.deploy import attempt
from d2pfed.deploy.account import ClientAccount, ClientSpending
from d2pfed.deploy.config import SIMULATION_VARIABLE, read_client_config
from d2pfed.deploy.requests import ExchangeRequest, RequestKind
from d2pfed.errors import ConfigError, LedgerError, PeerError
from d2pfed.flower import client as client_module
from d2pfed.flower.client import config_of, private
from d2pfed.flower.grid import from_record, to_record
from d2pfed.ledger import RowKind, read_rows
from d2pfed.numerics import canonical
from d2pfed.plan import Policy
from d2pfed.secagg.trust import Consistency
from d2pfed.secagg.wire import MessageKind, kind_of
from support.enrolled_clients import DIMENSION, anchor_in, directory_of, enrol, make_plan, noise_bound
from support.local_grid import (
    make_app,
    make_context,
    make_grid,
    make_message,
    make_strategy,
    one_hot,
    start,
)
from support.malicious_server import MaliciousServer


@pytest.fixture
def plan():
    return make_plan()


@pytest.fixture
def server(tmp_path, plan):
    """A server whose run has been announced to client 0."""
    made = MaliciousServer(tmp_path, plan, enrol(tmp_path, 5))
    made.announce(0)
    return made


@pytest.fixture
def directory(tmp_path, server):
    return directory_of(tmp_path, 0)


def frame_kind(message: Message) -> MessageKind | None:
    """The kind of protocol frame that a request carries; None for an announcement."""
    kind, data = from_record(message.content)
    return MessageKind(kind_of(ExchangeRequest.decode(data).frame)) if kind is RequestKind.EXCHANGE else None


def replay(grid, node: int, kind: MessageKind):
    """The first request of a kind that went to a node, sent again."""
    for message in grid.sent:
        if message.metadata.dst_node_id == node and frame_kind(message) is kind:
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
    keys = [(tmp_path / f"client-{client}" / "key").read_bytes() for client in range(5)]
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
    (commit,) = [r for r in read_rows(tmp_path / "run" / "ledger.sqlite") if r.kind is RowKind.COMMIT]
    assert commit.release.participants == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("category", ["evaluate", "train", "query"])
def test_messages_of_other_strategies_are_refused(directory, category):
    message = make_message(RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord({"lr": 0.1})}), 100)
    message.metadata.message_type = category
    with pytest.raises(PeerError, match="of d2pfed"):
        private(message, make_context(0, directory), one_hot(0))


def test_an_invitation_is_answered_once(server):
    server.invite(number=1, attempt=1)
    with pytest.raises(PeerError, match="stale"):
        server.invite(number=1, attempt=1)
    with pytest.raises(PeerError, match="round 1, attempt 2 of run a run is stale"):
        server.invite(number=0, attempt=2)
    server.invite(number=1, attempt=2)


ANSWER = """
import sys
from pathlib import Path
from support.local_grid import make_context, make_message
from d2pfed.flower.client import private
from d2pfed.flower.grid import to_record
from d2pfed.deploy.requests import ExchangeRequest, RequestKind
request = to_record(RequestKind.EXCHANGE, ExchangeRequest(bytes.fromhex(sys.argv[2]), 60.0, 300.0).encode())
assert private(make_message(request, 100), make_context(0, Path(sys.argv[1])), None).has_content()
print(sorted({"numba", "scipy", "dp_accounting", "mpmath", "torch", "matplotlib"} & set(sys.modules)))
"""


def test_a_request_that_asks_for_no_vector_loads_nothing_slow(server, directory):
    """Flower starts a process for each message, so what it loads is what most exchanges cost."""
    frame = server.invitation().hex()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    loaded = subprocess.run(
        [sys.executable, "-c", ANSWER, str(directory), frame],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout == "[]\n"


def test_no_request_of_a_finished_round_is_answered_again(tmp_path, plan):
    grid, roster = make_grid(tmp_path), enrol(tmp_path, 5)
    start(make_strategy(plan, tmp_path, roster), grid, 1)
    for kind in (
        MessageKind.INVITATION,
        MessageKind.KEY_ADVERTISEMENTS,
        MessageKind.MASK_REQUEST,
        MessageKind.SURVIVORS,
        MessageKind.UNMASK_REQUEST,
    ):
        again = grid.answer(100, replay(grid, 100, kind))
        assert again.has_error()
        assert "stale" in again.error.reason or "has already answered this request" in again.error.reason


def test_a_replayed_request_in_mid_round_gets_no_second_answer(tmp_path, plan):
    grid, roster = make_grid(tmp_path), enrol(tmp_path, 5)
    seconds = []

    def twice(client, message):
        if client == 0 and frame_kind(message) is not None:
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


def test_a_plan_that_was_not_agreed_on_is_refused(server, plan):
    other = replace(plan, attempts_per_round=plan.attempts_per_round + 1)
    with pytest.raises(PeerError, match="was agreed on with another plan"):
        replace(server, plan=other).invite()
    with pytest.raises(PeerError, match="announced with another plan"):
        replace(server, plan=other).announce(0)
    with pytest.raises(PeerError, match="never announced"):
        replace(server, run="another run").invite()


def test_an_invitation_for_another_client_is_refused(server):
    with pytest.raises(PeerError, match="this is client 0, the invitation is for client 3"):
        server.ask_frame(0, server.invitation(client=3))


def test_a_vector_that_took_long_is_sent_all_the_same(tmp_path, plan):
    """A refusal would show that training took longer than the server chose to wait."""

    def slow(client):
        def train(message, context):
            time.sleep(1.2 if client == 1 else 0)
            return one_hot(client)(message, context)

        return train

    grid, roster = make_grid(tmp_path, train=slow), enrol(tmp_path, 5)

    def hasty(client, message):
        if client == 1 and frame_kind(message) is MessageKind.MASK_REQUEST:
            request = ExchangeRequest.decode(from_record(message.content)[1])
            message.content = to_record(RequestKind.EXCHANGE, replace(request, seconds=1.0).encode())
        return message

    grid.going = hasty
    start(make_strategy(plan, tmp_path, roster), grid, 1)
    assert not any(reply.has_error() for reply in grid.received)


def test_the_whole_run_works_without_a_roster_where_everyone_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv(SIMULATION_VARIABLE, str(tmp_path / "simulation"))
    grid = make_grid(tmp_path)
    grid.apps = {node: (app, make_context(node - 100, None)) for node, (app, _) in grid.apps.items()}
    plan = make_plan(rounds=1, consistency=Consistency.ASSUMED)
    params = start(make_strategy(plan, tmp_path, None), grid)
    assert (params[:5] > 0.1).all()


def test_a_clients_own_error_tells_the_server_nothing(tmp_path, server, caplog):
    app, message = (
        make_app(one_hot(0)),
        make_message(to_record(RequestKind.ANNOUNCEMENT, server.announcement().encode()), 100),
    )
    with pytest.raises(ConfigError, match="not set up; its own log says why") as failure:
        app(message, make_context(0, tmp_path / "nowhere"))
    assert str(tmp_path) not in str(failure.value)
    assert str(tmp_path / "nowhere") in caplog.text


@pytest.mark.parametrize("failure", [LedgerError, RuntimeError, UnicodeError])
def test_whatever_is_wrong_with_a_config_tells_the_server_nothing(server, directory, monkeypatch, caplog, failure):
    def broken(path):
        raise failure(f"planted in {path}")

    monkeypatch.setattr(client_module, "read_client_config", broken)
    message = make_message(to_record(RequestKind.ANNOUNCEMENT, server.announcement().encode()), 100)
    with pytest.raises(ConfigError, match="not set up; its own log says why") as raised:
        private(message, make_context(0, directory), one_hot(0))
    assert raised.value.__suppress_context__
    assert f"planted in {directory}" in caplog.text


def test_a_defect_tells_the_server_nothing_of_the_client(server, directory, caplog):
    (directory / "runs").rename(directory / "gone")
    (directory / "runs").write_text("in the way")
    with pytest.raises((PeerError, ConfigError)) as failure:
        server.invite()
    assert str(directory) not in str(failure.value)
    assert str(directory) in caplog.text


def test_a_new_attempt_forgets_the_secrets_of_the_one_before(server, directory):
    server.invite(attempt=0)
    (before,) = (directory / "states").glob("*.state")
    server.invite(attempt=1)
    (after,) = (directory / "states").glob("*.state")
    assert before != after


def test_a_client_without_a_directory_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.delenv(SIMULATION_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="a client needs a directory: start its SuperNode with --node-config"):
        config_of(make_context(0, None))


def test_a_configured_directory_overrides_a_simulated_client(monkeypatch, tmp_path, directory):
    monkeypatch.setenv(SIMULATION_VARIABLE, str(tmp_path))
    assert config_of(make_context(3, None)).secret is None
    assert config_of(make_context(3, directory)).secret is not None


def is_free(lock) -> bool:
    descriptor = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_a_plan_is_checked_while_no_lock_is_held(tmp_path, monkeypatch):
    """A plan that takes long to check must not keep other runs waiting."""
    free, check, room = [], Policy.check, ClientAccount.require_room

    def look(*_):
        places = [directory_of(tmp_path, 0) / "runs" / "lock", anchor_in(tmp_path, 0) / "lock"]
        free.extend(is_free(lock) for lock in places if lock.exists())

    def slow_check(self, plan, enrolled=None):
        look()
        check(self, plan, enrolled)

    def slow_room(self, plan, run, history):
        look()
        room(self, plan, run, history)

    monkeypatch.setattr(Policy, "check", slow_check)
    monkeypatch.setattr(ClientAccount, "require_room", slow_room)
    server = MaliciousServer(tmp_path, make_plan(), enrol(tmp_path, 5))
    server.announce(0)
    replace(server, run="another run", first_draw=20).announce(0)
    assert free == [True] * len(free)
    assert len(free) >= 4


WILD = {
    '"cohort_size":5': '"cohort_size":1000000000000',
    '"population":5': '"population":1000000000000',
    '"dimension":16': '"dimension":1' + "0" * 300,
    '"rounds":2': '"rounds":1' + "0" * 4000,
    '"is":"2"': '"is":"4294967296"',
}


@pytest.mark.parametrize("found", WILD)
def test_wild_numbers_in_an_announcement_are_refused(server, found):
    text = canonical.encode(server.plan)
    assert found in text
    wild = replace(server.announcement(), run="wild", plan=text.replace(found, WILD[found]))
    with pytest.raises((PeerError, ConfigError)):
        server.ask(0, RequestKind.ANNOUNCEMENT, wild.encode())
    server.invite()  # it is as before


def test_a_plan_below_policy_is_refused_even_after_agreement(server, directory):
    text = (directory / "client.toml").read_text()
    (directory / "client.toml").write_text(text.replace("least_cohort = 3", "least_cohort = 6"))
    with pytest.raises(ConfigError, match="policy"):
        replace(server, run="stricter").announce(0)
    with pytest.raises(ConfigError, match="policy"):
        server.invite()


def test_colluders_that_the_client_counts_on_are_not_the_servers_to_choose(server, directory):
    """Five clients with a quorum of three fall to one colluder."""
    text = (directory / "client.toml").read_text()
    (directory / "client.toml").write_text(text.replace("least_colluders = 0.0", "least_colluders = 0.1"))
    with pytest.raises(ConfigError, match="2 quorum > cohort"):
        replace(server, run="stricter").announce(0)
    safe = make_plan(dropouts=0.2, colluders=0.1)
    assert safe.colluders == 1
    replace(server, run="safer", plan=safe).announce(0)


def test_the_protocol_gets_the_clients_own_number_of_colluders(server, directory, monkeypatch):
    """It decides how many boxes may fail to open, which is how many claims a server can hide."""
    text = (directory / "client.toml").read_text()
    (directory / "client.toml").write_text(text.replace("least_colluders = 0.0", "least_colluders = 0.3"))
    kept, memories = attempt.memory_of, []
    monkeypatch.setattr(attempt, "memory_of", lambda *given: memories.append(kept(*given)) or memories[-1])
    safer = replace(server, run="safer", plan=make_plan(dropouts=0.2, colluders=0.3), first_draw=30)
    safer.announce(0)
    safer.invite()
    assert [memory.colluders for memory in memories] == [2]


def test_a_saved_phase_that_a_crash_has_left_is_erased_at_the_next_message(server, directory):
    server.invite()
    (state,) = (directory / "states").glob("*.state")
    leftover = directory / "states" / f".{state.name}.4711"
    leftover.write_bytes(state.read_bytes())
    damaged = directory / "states" / ("ff" * 32 + ".state")
    damaged.write_bytes(b"damaged")
    replace(server, run="another run", first_draw=30).announce(0)
    assert not leftover.exists()
    assert not damaged.exists()
    assert state.exists()


def test_a_sampled_client_at_its_cap_sends_zero_and_its_noise(tmp_path):
    plan = make_plan(rounds=2, sampling=Sampling.FIXED, max_participations=1)
    grid, roster = make_grid(tmp_path), enrol(tmp_path, 5)
    models = {}

    def evaluate(number, arrays):
        models[number] = arrays["params"].numpy()

    strategy = make_strategy(plan, tmp_path, roster)
    start(strategy, grid, evaluate_fn=evaluate)
    assert (models[1][:5] > 0.1).all()
    assert np.abs(models[2] - models[1]).max() < 0.1
    assert all(reply.has_content() for reply in grid.received)  # nobody stays away
    for client in range(5):
        assert len(ClientSpending.of(read_client_config(directory_of(tmp_path, client)).log.read()).releases) == 1


def test_a_second_run_over_the_same_clients_is_possible_and_counted(tmp_path):
    plan = make_plan(rounds=2, spare=0)
    grid, roster = make_grid(tmp_path), enrol(tmp_path, 5)
    strategy = make_strategy(plan, tmp_path, roster)
    start(strategy, grid)
    start(replace(strategy, directory=tmp_path / "another run"), grid)
    for client in range(5):
        releases = ClientSpending.of(read_client_config(directory_of(tmp_path, client)).log.read()).releases
        assert len(releases) == 4
        assert len({release.run for release in releases}) == 2
