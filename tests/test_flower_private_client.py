"""The client's half over a transport that is one function call: it needs no Flower, and none of its records."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from d2pfed.accounting import Sampling
from d2pfed.deploy.account import ClientAccount, ClientSpending
from d2pfed.deploy.client import PrivateClient
from d2pfed.deploy.config import NOBODY, ClientBudget, ClientConfig, read_client_config
from d2pfed.deploy.layout import encode_task
from d2pfed.deploy.requests import ExchangeRequest, RequestKind, RunAcceptance, RunAnnouncement
from d2pfed.errors import ConfigError, PeerError, TooFewClients
from d2pfed.ledger.client_log import Entry
from d2pfed.ledger.files import make_directory
from d2pfed.numerics import canonical
from d2pfed.numerics.model_bytes import encode_model
from d2pfed.plan import Policy
from d2pfed.round import Attempt, Invite, gather, rotation_seed, session_of
from d2pfed.secagg.crypto import require_signature
from d2pfed.secagg.pairwise.messages import encode_invitation
from d2pfed.secagg.trust import Consistency
from d2pfed.secagg.wire import MessageKind, frame
from support.enrolled_clients import DIMENSION, directory_of, enrol, make_plan, noise_bound
from support.malicious_server import LAYOUT, MaliciousServer, add_one

CLIENTS = 5


@pytest.fixture
def server(tmp_path):
    """A server that has announced its run to all clients."""
    made = MaliciousServer(tmp_path, make_plan(CLIENTS), enrol(tmp_path, CLIENTS))
    made.announce()
    return made


def spent(server: MaliciousServer, client: int) -> int:
    return len(ClientSpending.of(read_client_config(directory_of(server.directory, client)).log.read()).releases)


def test_an_attempt_over_plain_function_calls_charges_every_client_once(server):
    assert server.attempt().vector.any()
    assert server.refusals == {}
    assert [spent(server, client) for client in range(CLIENTS)] == [1] * CLIENTS


def test_a_row_says_of_which_round_and_attempt_its_vector_is(server):
    for number, attempt in ((0, 0), (0, 1), (1, 0)):
        server.attempt(number, attempt)
    history = read_client_config(directory_of(server.directory, 3)).log.read()
    releases = ClientSpending.of(history).releases
    assert [(each.run, each.round, each.attempt) for each in releases] == [
        (server.run, 0, 0),
        (server.run, 0, 1),
        (server.run, 1, 0),
    ]
    assert [body["draw"] for body in history.bodies(Entry.CHARGE)] == [
        server.draw(*each) for each in ((0, 0), (0, 1), (1, 0))
    ]


def test_what_leaves_is_the_difference_to_the_model_that_was_sent(server):
    model, session = np.full(DIMENSION, 0.25, np.float32), server.session()
    opening, task = server.opening(session.draw), encode_task(LAYOUT, {"server-round": 1})
    invite = Invite(roster=server.roster.roster, opening=opening)
    total = gather(session, encode_model(model), server.exchange, task=task, invite=invite).unmask().vector
    found = server.plan.codec.decode(server.plan.ring.center(total), rotation_seed(session), 1)
    expected = np.where(np.arange(DIMENSION) < CLIENTS, min(1.0, server.plan.codec.clip), 0)
    assert np.abs(found - expected).max() < CLIENTS * noise_bound(server.plan, CLIENTS) < 0.6


@pytest.mark.parametrize("fits", [True, False])
def test_a_model_comes_at_the_bits_of_the_plan_or_nobody_trains(tmp_path, fits):
    plan = replace(make_plan(CLIENTS), download_bits=8)
    server = MaliciousServer(tmp_path, plan, enrol(tmp_path, CLIENTS))
    server.announce()
    session, task = server.session(), encode_task(LAYOUT, {"server-round": 1})
    invite = Invite(roster=server.roster.roster, opening=server.opening(session.draw))
    model = encode_model(np.full(DIMENSION, 0.25, np.float32), 8 if fits else 32)
    if fits:
        assert gather(session, model, server.exchange, task=task, invite=invite).unmask().vector.any()
    else:
        with pytest.raises(TooFewClients):
            gather(session, model, server.exchange, task=task, invite=invite)
    assert [spent(server, client) for client in range(CLIENTS)] == [int(fits)] * CLIENTS


def test_any_frame_makes_a_client_erase_what_a_crash_has_left(server):
    server.invite()
    left = directory_of(server.directory, 0) / "states" / "left-by-a-crash.state"
    left.write_bytes(b"secrets of another attempt")
    stale = frame(MessageKind.UNMASK_REQUEST, bytes(32), 0)
    with pytest.raises(PeerError, match="no saved phase"):
        server.ask_frame(0, stale)
    assert not left.exists()


def test_a_client_signs_for_its_own_node(server):
    announcement, config = server.announcement(), read_client_config(directory_of(server.directory, 2))
    data = PrivateClient(config, 42, {}, add_one(2)).answer(RequestKind.ANNOUNCEMENT, announcement.encode())
    acceptance = RunAcceptance.decode(data)
    key = server.roster.roster.key(2)
    require_signature(key, acceptance.signature, announcement.statement(42, 2))
    with pytest.raises(PeerError, match="a signature does not match"):
        require_signature(key, acceptance.signature, announcement.statement(43, 2))


def test_at_its_cap_a_sampled_client_sends_zero_and_no_row_is_written(tmp_path):
    plan = make_plan(CLIENTS, sampling=Sampling.FIXED, max_participations=1)
    server = MaliciousServer(tmp_path, plan, enrol(tmp_path, CLIENTS))
    server.announce()
    first, second = server.sum_of_updates(0), server.sum_of_updates(1)
    assert first[:CLIENTS].min() > 0.5 > np.abs(second).max()
    assert server.refusals == {}
    assert [spent(server, client) for client in range(CLIENTS)] == [1] * CLIENTS


def test_at_its_cap_a_client_that_is_always_asked_begins_nothing(server):
    config = read_client_config(directory_of(server.directory, 0))
    account = ClientAccount(config.log, config.budget)
    for number in range(server.plan.max_participations):
        account.charge(server.plan, server.run, number, 0, {"roster": "", "draw": number})
    before = config.log.read()
    with pytest.raises(ConfigError, match=f"has sent {server.plan.max_participations} vectors in run"):
        server.invite()
    assert config.log.read() == before


def test_a_client_joins_no_cohort_below_its_least_whatever_the_plan_allows(tmp_path):
    """Shares of one noise are those of all: an attempt may go on with those who were left, down to two."""
    plan = make_plan(CLIENTS, mechanism="shared", dropouts=0, colluders=0.0, consistency=Consistency.ASSUMED)
    lenient = {"most_epsilon": 1e6, "least_noise_multiplier": 0.0, "least_colluders": 0.0, "least_quorum": 2}
    config = ClientConfig(
        directory=tmp_path / "client",
        client=0,
        authority=NOBODY,
        anchor=tmp_path / "anchor",
        policy=Policy(mechanisms=("shared",), least_cohort=4, **lenient),
        budget=ClientBudget(1e6),
        secret=None,
    )
    make_directory(config.directory)
    config.log.create({"carried": "nothing"})
    client = PrivateClient(config, 42, {}, add_one(0))
    announcement = RunAnnouncement("a run", canonical.encode(plan), LAYOUT.encode())
    client.answer(RequestKind.ANNOUNCEMENT, announcement.encode())
    for attempt, cohort in enumerate([(0, 1, 2, 3, 4), (0, 2, 3, 4), (0, 3, 4)]):
        session = session_of(plan, Attempt("a run", 0, attempt), cohort)
        request = ExchangeRequest(encode_invitation(session, 0, None, None), 60.0, 300.0).encode()
        if len(cohort) >= 4:
            assert client.answer(RequestKind.EXCHANGE, request)
        else:
            with pytest.raises(PeerError, match="a cohort must have at least 4 clients, got 3"):
                client.answer(RequestKind.EXCHANGE, request)
    assert len(config.log.read().bodies(Entry.BEGUN)) == 2


def test_a_client_trains_only_for_a_mask_request_and_with_what_was_sent(server):
    calls = []

    def recording(client):
        def train(arrays, settings):
            calls.append((client, sorted(arrays), dict(settings)))
            return add_one(client)(arrays, settings)

        return train

    observed = replace(server, train=recording)
    observed.invite(0)
    assert calls == []
    observed.attempt(attempt=1)
    assert sorted(calls) == [(client, ["params"], {"server-round": 1}) for client in range(CLIENTS)]


@pytest.mark.parametrize("failure", [ValueError("planted"), RuntimeError("planted"), KeyError("planted")])
def test_the_text_of_a_failure_in_training_is_in_no_answer_and_no_error(server, failure, caplog):
    def failing(client):
        def train(arrays, settings):
            raise failure

        return train if client == 1 else add_one(client)

    assert replace(server, train=failing).attempt().vector.any()
    assert server.refusals == {}  # it contributes zero and its noise
    assert "planted" in caplog.text  # for its own log


def test_a_defect_of_the_client_is_named_in_its_own_log_only(server, monkeypatch, caplog):
    def broken(*_):
        raise OSError(5, "planted", str(server.directory))

    monkeypatch.setattr("d2pfed.deploy.client.accept_run", broken)
    with pytest.raises(PeerError, match="its own log says why") as failure:
        server.announce(0)
    assert str(server.directory) not in str(failure.value)
    assert failure.value.__cause__ is None
    assert "planted" in caplog.text


@pytest.mark.parametrize("kind", RequestKind)
@pytest.mark.parametrize("data", [b"", b"\xff" * 200, bytes(200)], ids=["empty", "ones", "zeros"])
def test_bytes_that_are_no_request_are_refused(server, kind, data):
    with pytest.raises((PeerError, ConfigError)):
        server.ask(0, kind, data)
    server.invite(0)  # it is as before


WITHOUT_FLOWER = """
import sys
sys.modules["flwr"] = None  # importing it fails
from pathlib import Path
from d2pfed.deploy.config import read_client_config
from d2pfed.deploy.client import PrivateClient
from d2pfed.deploy.requests import ExchangeRequest, RequestKind
request = ExchangeRequest(bytes.fromhex(sys.argv[2]), 60.0, 300.0)
client = PrivateClient(read_client_config(Path(sys.argv[1])), 100, {}, None)
print(len(client.answer(RequestKind.EXCHANGE, request.encode())) > 0)
"""


def run_without_flower(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_clients_half_works_where_flower_is_not_installed(server):
    directory = str(directory_of(server.directory, 0))
    assert run_without_flower(WITHOUT_FLOWER, directory, server.invitation(0).hex()).stdout == "True\n"
    wrapper = WITHOUT_FLOWER.replace("from pathlib", "import d2pfed.flower.client\nfrom pathlib")
    assert "flwr" in run_without_flower(wrapper, directory, server.invitation(0, attempt=1).hex()).stderr
