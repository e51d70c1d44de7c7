"""The lattice protocol over Flower: one message to most clients, four to the committee, whoever is missing."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Array, ArrayRecord, Message, RecordDict

from d2pfed.deploy import standing as keys_of_silos
from d2pfed.deploy.config import SIMULATION_VARIABLE, read_client_config
from d2pfed.deploy.requests import ExchangeRequest, RequestKind
from d2pfed.deploy.transport import Deadlines
from d2pfed.errors import ConfigError, TooFewClients
from d2pfed.flower.grid import from_record, to_record
from d2pfed.flower.server import KeyUse
from d2pfed.ledger import RowKind, keystore, read_rows
from d2pfed.ledger.client_log import Entry
from d2pfed.secagg.wire import HEADER_BYTES, MessageKind, binding_of, frame, kind_of
from support.enrolled_clients import DIMENSION, directory_of, enrol
from support.local_grid import LocalGrid, make_app, make_context, make_grid, make_strategy, start
from support.small_committees import CLIENTS, MEMBERS, keep_keys_in, make_lattice_plan, shrink

ASKED = {
    MessageKind.INVITATION: MEMBERS,
    MessageKind.LATTICE_ADVERTS: MEMBERS,
    MessageKind.LATTICE_REQUEST: CLIENTS,
    MessageKind.LATTICE_SURVIVORS: MEMBERS,
    MessageKind.LATTICE_CERTIFICATE: MEMBERS,
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    shrink(monkeypatch)


def train(client):
    """Adds one at a place that some clients share."""

    def trained(message, _context):
        params = message.content["arrays"]["params"].numpy().copy()
        params[client % DIMENSION] += 1.0
        return Message(RecordDict({"arrays": ArrayRecord({"params": Array(params)})}), reply_to=message)

    return trained


@pytest.fixture
def grid(tmp_path):
    roster = enrol(tmp_path, CLIENTS)
    keep_keys_in(tmp_path)
    made = make_grid(tmp_path, CLIENTS, train)
    made.roster = roster
    return made


def kind_in(message):
    """The kind of frame that a request carries; None for an announcement."""
    return MessageKind.__members__.get(message.metadata.group_id)


def asked_of(grid):
    """How many requests of each kind each client was sent."""
    found = {}
    for message in grid.sent:
        if kind_in(message) is not None:
            found.setdefault(message.metadata.dst_node_id - 100, []).append(kind_in(message))
    return found


def steps(directory):
    rows = read_rows(directory / "run" / "ledger.sqlite")
    return [row.kind for row in rows if row.key is not None]


def records(directory):
    return [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]


def shares(survivors):
    """What the mean would be without noise."""
    found = np.zeros(DIMENSION)
    for client in survivors:
        found[client % DIMENSION] += 1 / CLIENTS
    return found


def test_most_clients_get_one_message_and_members_five(tmp_path, grid):
    plan = make_lattice_plan(rounds=1)
    params = start(make_strategy(plan, tmp_path, grid.roster), grid)
    assert np.abs(params - shares(range(CLIENTS))).max() < 0.3 / CLIENTS
    found = sorted(len(kinds) for kinds in asked_of(grid).values())
    assert found == [1] * (CLIENTS - MEMBERS) + [5] * MEMBERS
    assert steps(tmp_path) == [RowKind.RESERVE, RowKind.COMMIT]
    exchanges = records(tmp_path)[0]["exchanges"]
    assert {MessageKind[each["name"]]: each["asked"] for each in exchanges} == ASKED
    assert all(each["answered"] == each["asked"] and each["sent_bytes"] > 0 for each in exchanges)
    requests = [from_record(each.content)[1] for each in grid.sent if kind_in(each) is MessageKind.LATTICE_REQUEST]
    frames = sum(len(ExchangeRequest.decode(data).frame) for data in requests)
    assert exchanges[2]["sent_bytes"] == frames + CLIENTS * DIMENSION * 4  # the model goes beside its request


def silent(grid, kind, clients):
    """Lose the requests of a kind to these clients."""

    def going(client, message):
        return None if client in clients and kind_in(message) is kind else message

    grid.going = going


@pytest.mark.parametrize("kind", list(ASKED))
def test_a_few_may_be_slow_at_each_exchange_and_cost_a_grace(tmp_path, grid, kind):
    gone = (1, 2)
    silent(grid, kind, gone)
    deadlines = Deadlines(joining=60.0, keys=6.0, grace=0.05, poll=0.001)
    plan = make_lattice_plan(rounds=1)
    params = start(make_strategy(plan, tmp_path, grid.roster, deadlines=deadlines), grid)
    left = [client for client in range(CLIENTS) if kind is not MessageKind.LATTICE_REQUEST or client not in gone]
    assert np.abs(params - shares(left)).max() < 0.3 / CLIENTS
    assert steps(tmp_path) == [RowKind.RESERVE, RowKind.COMMIT]
    assert records(tmp_path)[0]["survivors"] == len(left)


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        (MessageKind.INVITATION, RowKind.VOID),
        (MessageKind.LATTICE_REQUEST, RowKind.VOID),
        (MessageKind.LATTICE_SURVIVORS, RowKind.COMMIT),
        (MessageKind.LATTICE_CERTIFICATE, RowKind.COMMIT),
    ],
)
def test_too_many_missing_end_an_attempt_and_the_next_goes_on(tmp_path, grid, kind, ends):
    lost = set()

    def going(client, message):
        if kind_in(message) is kind and client < 20 and client not in lost:
            lost.add(client)
            return None
        return message

    grid.going = going
    # Short only where somebody is missing: members forget their keys after twice the sum of an attempt's deadlines.
    keys, timeout = (60.0, 0.5) if kind is MessageKind.LATTICE_REQUEST else (0.3, 60.0)
    deadlines = Deadlines(joining=60.0, keys=keys, grace=0.05, poll=0.001)
    plan = make_lattice_plan(rounds=1)
    strategy = make_strategy(plan, tmp_path, grid.roster, deadlines=deadlines)
    params = start(strategy, grid, timeout=timeout)
    assert np.abs(params - shares(range(CLIENTS))).max() < 0.3 / CLIENTS
    assert steps(tmp_path) == [RowKind.RESERVE, ends, RowKind.RESERVE, RowKind.COMMIT]
    assert records(tmp_path)[0]["attempt"] == 1


@pytest.mark.parametrize("kind", list(ASKED))
def test_a_server_that_dies_between_exchanges_goes_on_with_an_attempt(tmp_path, grid, kind):
    """What was reserved or charged stays so; members' keys of the dead attempt are erased by the next."""

    def going(_client, message):
        if kind_in(message) is kind:
            raise KeyboardInterrupt
        return message

    grid.going = going
    plan = make_lattice_plan(rounds=1)
    with pytest.raises(KeyboardInterrupt):
        start(make_strategy(plan, tmp_path, grid.roster), grid)
    grid.going = lambda _client, message: message
    params = start(make_strategy(plan, tmp_path, grid.roster), grid)
    assert np.abs(params - shares(range(CLIENTS))).max() < 0.3 / CLIENTS
    opened = kind in (MessageKind.LATTICE_SURVIVORS, MessageKind.LATTICE_CERTIFICATE)
    first = [RowKind.RESERVE, RowKind.COMMIT] if opened else [RowKind.RESERVE]
    assert steps(tmp_path) == [*first, RowKind.RESERVE, RowKind.COMMIT]
    for client in range(CLIENTS):
        log = read_client_config(directory_of(tmp_path, client)).log.read()
        assert len(log.bodies(Entry.CHARGE)) == (2 if opened else 1)
    assert len(list((tmp_path / "keys").glob("*/" + "?" * 64))) == MEMBERS


def test_a_member_that_lies_is_left_out_of_the_opening(tmp_path, grid):
    def coming(client, message):
        if message.has_error():
            return message
        kind, data = from_record(message.content)
        if client == 5 and kind is RequestKind.EXCHANGE and kind_of(data) == MessageKind.LATTICE_OPENING:
            wrong = bytes(2) + data[HEADER_BYTES + 2 :]
            data = frame(MessageKind.LATTICE_OPENING, binding_of(data), client, wrong)
            message.content = to_record(kind, data)
        return message

    grid.coming = coming
    params = start(make_strategy(make_lattice_plan(rounds=1), tmp_path, grid.roster), grid)
    assert np.abs(params - shares(range(CLIENTS))).max() < 0.3 / CLIENTS


def test_a_run_works_without_a_roster_where_everyone_says_so(tmp_path, monkeypatch):
    """Nobody signs: members open what they are told, in one exchange."""
    monkeypatch.setenv(SIMULATION_VARIABLE, str(tmp_path / "simulated"))
    monkeypatch.setattr(keys_of_silos, "default_volatile", lambda: tmp_path / "keys")
    monkeypatch.setattr(keystore, "is_in_memory", lambda _directory: True)
    plan = make_lattice_plan(rounds=1, consistency="assumed")
    apps = {100 + client: (make_app(train(client)), make_context(client, None)) for client in range(CLIENTS)}
    grid = LocalGrid(apps)
    params = start(make_strategy(plan, tmp_path, None), grid)
    assert np.abs(params - shares(range(CLIENTS))).max() < 0.3 / CLIENTS
    assert sorted(map(len, asked_of(grid).values())) == [1] * (CLIENTS - MEMBERS) + [3] * MEMBERS


def test_a_lattice_plan_takes_no_standing_keys(tmp_path, grid):
    with pytest.raises(ConfigError, match="has no standing keys"):
        make_strategy(make_lattice_plan(), tmp_path, grid.roster, keys=KeyUse.STANDING)


def test_a_run_without_enough_members_ends_with_the_reason(tmp_path, grid, caplog):
    silent(grid, MessageKind.INVITATION, range(12))
    deadlines = Deadlines(joining=60.0, keys=0.2, grace=0.05, poll=0.001)
    plan = replace(make_lattice_plan(rounds=1), attempts_per_round=1)
    with pytest.raises(TooFewClients, match="failed in all"):
        start(make_strategy(plan, tmp_path, grid.roster, deadlines=deadlines), grid)
    assert "members of the committee must be there" in caplog.text
    logs = [read_client_config(directory_of(tmp_path, client)).log.read() for client in range(CLIENTS)]
    assert not any(log.bodies(Entry.CHARGE) for log in logs)
