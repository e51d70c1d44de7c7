"""Standing keys over Flower: a silo's round is one exchange, each vector in its own account, keys in memory only."""

import json
import logging
import shutil

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from scipy.stats import binomtest

from d2pfed.accounting import Unit
from d2pfed.deploy import client as private_client
from d2pfed.deploy import standing as standing_keys
from d2pfed.deploy.attempt import accept_run
from d2pfed.deploy.client import PrivateClient
from d2pfed.deploy.config import read_client_config
from d2pfed.deploy.requests import ExchangeRequest, Progress, RequestKind, RunAnnouncement
from d2pfed.deploy.standing import KeyFile, holds_keys
from d2pfed.deploy.transport import Deadlines
from d2pfed.errors import ConfigError, PeerError, TooFewClients
from d2pfed.flower.client import PrivateRecords
from d2pfed.flower.grid import from_record
from d2pfed.flower.server import KeyUse
from d2pfed.flower.statistics import private_total
from d2pfed.ledger import RowKind, decode_release, keystore, read_rows
from d2pfed.ledger.client_log import Entry
from d2pfed.plan import PrivacyTarget, calibrate
from d2pfed.plan.describe import describe_plan
from d2pfed.plan.traffic import traffic_of
from d2pfed.round.standing import StandingRun
from d2pfed.secagg import checks
from d2pfed.secagg.roster import POSITION_BYTES
from d2pfed.secagg.standing import server as standing_server
from d2pfed.secagg.wire import MessageKind, kind_of
from support.enrolled_clients import DIMENSION, anchor_in, directory_of, enrol, make_plan, noise_bound
from support.local_grid import make_grid, make_strategy, start

CLIENTS = 5


def federation(tmp_path, **settings):
    """Five silos whose keys live in a directory of their own."""
    roster = enrol(tmp_path, CLIENTS, None, **settings)
    for client in range(CLIENTS):
        file = directory_of(tmp_path, client) / "client.toml"
        file.write_text(f'state = "{tmp_path}/keys"\nkeys_on_disk = true\n{file.read_text()}')
    return roster, make_grid(tmp_path, CLIENTS)


def strategy(plan, tmp_path, roster, **changes):
    return make_strategy(plan, tmp_path, roster, **({"keys": "standing", "draws": None} | changes))


def kinds_sent(grid):
    found = []
    for message in grid.sent:
        kind, data = from_record(message.content)
        found.append(
            MessageKind(kind_of(ExchangeRequest.decode(data).frame)) if kind is RequestKind.EXCHANGE else kind
        )
    return found


def asked(grid):
    """What the last request of the server was."""
    return kinds_sent(grid)[-1]


def exact(*rounds):
    total = np.zeros(DIMENSION)
    for members in rounds:
        total[list(members)] += 1 / CLIENTS
    return total


def rows_of(tmp_path):
    rows = read_rows(tmp_path / "run" / "ledger.sqlite")
    return [(row.kind, row.key.round, row.key.attempt) for row in rows if row.key is not None]


def rows_charged(tmp_path, client):
    return read_client_config(directory_of(tmp_path, client)).log.read().bodies(Entry.CHARGE)


def charges(tmp_path, client):
    return len(rows_charged(tmp_path, client))


def gone(message):
    return Message(Error(code=5, reason="node unavailable"), reply_to=message)


def test_after_the_set_up_a_round_is_one_exchange(tmp_path):
    plan = make_plan(rounds=3)
    roster, grid = federation(tmp_path)
    params = start(strategy(plan, tmp_path, roster), grid)
    everyone = range(CLIENTS)
    assert np.abs(params - exact(everyone, everyone, everyone)).max() < 3 * noise_bound(plan, CLIENTS)
    kinds = kinds_sent(grid)
    assert kinds.count(MessageKind.STANDING_INVITATION) == kinds.count(MessageKind.STANDING_ADVERTS) == CLIENTS
    assert kinds.count(MessageKind.STANDING_REQUEST) == 3 * CLIENTS
    assert RequestKind.PRESENCE not in kinds
    assert set(kinds) == {
        RequestKind.ANNOUNCEMENT,
        MessageKind.STANDING_INVITATION,
        MessageKind.STANDING_ADVERTS,
        MessageKind.STANDING_REQUEST,
    }
    assert [charges(tmp_path, client) for client in everyone] == [3] * CLIENTS
    assert rows_of(tmp_path) == [
        (kind, number, 0) for number in range(3) for kind in (RowKind.RESERVE, RowKind.COMMIT)
    ]


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("protocol", ["standing", "pairwise"])
def test_a_silo_sends_and_receives_what_its_plan_says(tmp_path, protocol, bits):
    plan = make_plan(rounds=2, protocol=protocol, dropouts=0.0, compression=8, download_bits=bits)
    roster, grid = federation(tmp_path)
    start(make_strategy(plan, tmp_path, roster, **({"keys": "standing"} if protocol == "standing" else {})), grid)
    requests = [from_record(each.content) for each in grid.sent if each.metadata.dst_node_id == 101]
    answers = [from_record(each.content)[1] for each in grid.received if each.metadata.src_node_id == 101]
    announced = next(data for kind, data in requests if kind is RequestKind.ANNOUNCEMENT)
    longer = len(RunAnnouncement.decode(announced).run) - 16  # the plan counts a name of 16 letters
    # With fresh keys there is an invitation to each attempt, and in the second one all have met.
    invitations, met = (1, 0) if protocol == "standing" else (2, (CLIENTS - 1) * POSITION_BYTES)
    said, told = traffic_of(plan), f"met before adds {POSITION_BYTES} bytes each way"
    assert sum(map(len, answers)) == said.joining.sent + 2 * said.client.sent + met
    received = said.joining.received + 2 * said.client.received + met
    assert sum(len(data) for _, data in requests) == received + (1 + invitations) * longer
    assert (told in describe_plan(plan).why_bytes) == bool(met)


def test_a_missing_silo_voids_the_attempt_which_stays_charged_to_everyone(tmp_path, caplog):
    plan = make_plan(rounds=1)
    roster, grid = federation(tmp_path)
    requests = []

    def lose(client, message):  # the answer of one silo, once
        if client == 3 and asked(grid) is MessageKind.STANDING_REQUEST:
            requests.append(1)
            return gone(grid.sent[-1]) if len(requests) == 1 else message
        return message

    grid.coming = lose
    with caplog.at_level(logging.WARNING):
        params = start(strategy(plan, tmp_path, roster), grid)
    everyone = range(CLIENTS)
    assert np.abs(params - exact(everyone)).max() < noise_bound(plan, CLIENTS)  # it was there again, with its keys
    assert rows_of(tmp_path) == [(RowKind.RESERVE, 0, 0), (RowKind.RESERVE, 0, 1), (RowKind.COMMIT, 0, 1)]
    assert [charges(tmp_path, client) for client in everyone] == [2] * CLIENTS
    assert kinds_sent(grid).count(RequestKind.PRESENCE) == CLIENTS
    assert "void and stays charged" in caplog.text


def test_a_missing_silo_is_left_out_and_one_without_keys_gets_an_epoch(tmp_path):
    plan = make_plan(rounds=2)
    roster, grid = federation(tmp_path)
    lost = {3}
    grid.going = lambda client, message: message

    def away(client, message):
        if client in lost and asked(grid) in (MessageKind.STANDING_REQUEST, RequestKind.PRESENCE):
            return gone(grid.sent[-1])
        return message

    grid.coming = away
    first = strategy(plan, tmp_path, roster)
    start(first, grid, 1)
    assert rows_of(tmp_path)[-1] == (RowKind.COMMIT, 0, 1)
    lost.clear()
    grid.sent.clear()
    params = start(first, grid)  # another process: it opens a new epoch at the next step
    assert kinds_sent(grid).count(MessageKind.STANDING_INVITATION) == CLIENTS
    assert rows_of(tmp_path)[-1] == (RowKind.COMMIT, 1, 0)
    assert np.abs(params - exact((0, 1, 2, 4), range(CLIENTS))).max() < 2 * noise_bound(plan, CLIENTS)


def test_a_silo_whose_node_was_away_is_told_of_the_run_in_a_message_that_lives_long_enough(tmp_path):
    plan = make_plan(rounds=4)
    roster, grid = federation(tmp_path)
    everyone, answers = dict(grid.apps), []

    def lose(client, message):  # its node is gone in the second round, and back in the third
        if asked(grid) is MessageKind.STANDING_REQUEST:
            answers.append(client)
            if len(answers) == CLIENTS + 4 and client == 3:
                del grid.apps[103]
                return gone(grid.sent[-1])
            if len(answers) == 3 * CLIENTS:
                grid.apps[103] = everyone[103]
        return message

    grid.coming = lose
    params = start(strategy(plan, tmp_path, roster), grid)
    told = zip(grid.sent, kinds_sent(grid), strict=True)
    lives = [message.metadata.ttl for message, kind in told if kind is RequestKind.ANNOUNCEMENT]
    assert len(lives) == CLIENTS + 1
    assert min(lives) > 60.0  # `joining`, although nobody waits so long in the middle of a run
    assert params[3] > 1.5 * params[4] / 4  # it is in the first sum and in the last


def test_a_silo_that_comes_after_the_set_up_gets_keys_without_a_void_attempt(tmp_path):
    plan = make_plan(rounds=4)
    roster, grid = federation(tmp_path)
    late = grid.apps.pop(103)

    def arrive(client, message):
        if asked(grid) is MessageKind.STANDING_REQUEST:
            grid.apps[103] = late
        return message

    grid.coming = arrive
    deadlines = Deadlines(joining=60.0, keys=60.0, grace=0.1, poll=0.001)
    params = start(strategy(plan, tmp_path, roster, deadlines=deadlines), grid)
    kinds = kinds_sent(grid)
    assert kinds.count(MessageKind.STANDING_INVITATION) == 4 + CLIENTS
    assert (
        kinds.count(RequestKind.PRESENCE) == CLIENTS
    )  # once: while it is away, and once it is back, nobody is asked
    assert [step[1:] for step in rows_of(tmp_path) if step[0] is RowKind.COMMIT] == [
        (each, 0) for each in range(4)
    ]
    assert params[3] > 1.5 * params[4] / 4


def die_once_the_keys_stand(tmp_path, monkeypatch, *, forgets=False, learns=False):
    """A server that is killed after the set-up, before anything is charged; and another one, which goes on."""
    if not learns:
        monkeypatch.setattr(private_client, "accept_run", lambda *given: accept_run(*given) and Progress())
    plan = make_plan(rounds=1)
    roster, grid = federation(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(StandingRun, "step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            start(strategy(plan, tmp_path, roster), grid)
    if forgets:
        (tmp_path / "run" / "epochs").unlink()
    start(strategy(plan, tmp_path, roster), grid)


def test_a_server_that_died_at_the_set_up_opens_a_later_epoch(tmp_path, monkeypatch):
    die_once_the_keys_stand(tmp_path, monkeypatch)
    assert rows_of(tmp_path) == [(RowKind.RESERVE, 0, 0), (RowKind.COMMIT, 0, 0)]
    begun = read_client_config(directory_of(tmp_path, 0)).log.read().bodies(Entry.BEGUN)
    assert [body["epoch"] for body in begun] == [0, 1]


def test_a_server_that_forgets_the_number_of_its_epoch_learns_it_from_its_silos(tmp_path, monkeypatch):
    die_once_the_keys_stand(tmp_path, monkeypatch, forgets=True, learns=True)
    assert rows_of(tmp_path) == [(RowKind.RESERVE, 0, 0), (RowKind.COMMIT, 0, 0)]


def test_a_server_that_neither_keeps_nor_learns_the_number_of_its_epoch_is_refused(tmp_path, monkeypatch):
    with pytest.raises(TooFewClients):
        die_once_the_keys_stand(tmp_path, monkeypatch, forgets=True)


def test_a_silo_whose_machine_was_started_again_says_so(tmp_path, monkeypatch):
    plan = make_plan(rounds=2)
    roster, grid = federation(tmp_path)
    steps = []

    def reboot(client, message):  # before the second round, the keys of one silo are gone
        kind = asked(grid)
        if client == 2 and kind is MessageKind.STANDING_REQUEST:
            steps.append(1)
            if len(steps) == 2:
                config = read_client_config(directory_of(tmp_path, 2))
                for file in (tmp_path / "keys").glob("*/*"):
                    if file.parent == KeyFile.of(config, bytes(32)).file._directory:
                        file.unlink()
        return message

    grid.going = reboot
    params = start(strategy(plan, tmp_path, roster), grid)
    kinds = kinds_sent(grid)
    assert kinds.count(RequestKind.PRESENCE) == CLIENTS
    assert kinds.count(MessageKind.STANDING_INVITATION) == 2 * CLIENTS  # a new epoch
    assert [charges(tmp_path, client) for client in range(CLIENTS)] == [3, 3, 2, 3, 3]
    assert np.abs(params - exact(range(CLIENTS), range(CLIENTS))).max() < 2 * noise_bound(plan, CLIENTS)


def test_too_few_silos_end_the_round(tmp_path):
    plan = make_plan(rounds=1)
    roster, grid = federation(tmp_path)
    grid.coming = lambda client, message: (
        gone(grid.sent[-1]) if client in (1, 2, 3) and asked(grid) is not RequestKind.ANNOUNCEMENT else message
    )
    with pytest.raises(TooFewClients):
        start(strategy(plan, tmp_path, roster), grid)


def recorded(tmp_path, rounds=2):
    """A run whose requests a server may send again."""
    plan = make_plan(rounds=rounds)
    roster, grid = federation(tmp_path)
    start(strategy(plan, tmp_path, roster), grid)
    frames = {}
    for message in grid.sent:
        kind, data = from_record(message.content)
        if kind is RequestKind.EXCHANGE and message.metadata.dst_node_id == 100:
            frames.setdefault(MessageKind(kind_of(ExchangeRequest.decode(data).frame)), []).append(data)
    config = read_client_config(directory_of(tmp_path, 0))
    return config, frames


def client_of(config):
    return PrivateClient(config, 100, {}, lambda arrays, settings: arrays)


def test_no_request_is_answered_twice(tmp_path):
    config, frames = recorded(tmp_path)
    before = config.log.read().head
    for sent in frames.values():
        for data in sent:
            with pytest.raises((PeerError, ConfigError)):
                client_of(config).answer(RequestKind.EXCHANGE, data)
    rows = [row.entry for row in config.log.read().rows if row.head.seq > before.seq]
    assert Entry.CHARGE not in rows
    assert len(frames[MessageKind.STANDING_REQUEST]) == 2


def test_presence_tells_who_has_keys_and_nothing_else(tmp_path):
    config, frames = recorded(tmp_path)
    frame = ExchangeRequest.decode(frames[MessageKind.STANDING_REQUEST][0]).frame
    assert holds_keys(config, frame[24:56])
    assert client_of(config).answer(RequestKind.PRESENCE, frame[24:56]) == b"\x01"
    assert client_of(config).answer(RequestKind.PRESENCE, bytes(32)) == b"\x00"
    with pytest.raises(PeerError, match="32 bytes"):
        client_of(config).answer(RequestKind.PRESENCE, b"short")


def test_keys_of_another_start_are_erased(tmp_path, monkeypatch):
    config, frames = recorded(tmp_path)
    epoch = ExchangeRequest.decode(frames[MessageKind.STANDING_REQUEST][0]).frame[24:56]
    monkeypatch.setattr(keystore, "boot", lambda: "another start")
    assert not holds_keys(config, epoch)
    monkeypatch.undo()
    assert not holds_keys(config, epoch)


def test_a_disk_is_refused_unless_the_settings_say_otherwise(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(keystore, "is_in_memory", lambda place: False)
    plan = make_plan(rounds=1)
    roster, grid = federation(tmp_path)
    for client in range(CLIENTS):
        file = directory_of(tmp_path, client) / "client.toml"
        file.write_text(file.read_text().replace("keys_on_disk = true", "keys_on_disk = false"))
    with pytest.raises(TooFewClients):
        start(strategy(plan, tmp_path, roster), grid)
    assert "keys_on_disk" in caplog.text  # in the client's own log: the server learns no path of its machine
    assert not any("keys_on_disk" in reply.error.reason for reply in grid.received if reply.has_error())
    assert not (tmp_path / "keys").exists()


def test_without_a_place_in_memory_a_silo_takes_no_part(tmp_path, monkeypatch):
    monkeypatch.setattr(standing_keys, "default_volatile", lambda: None)
    config, _ = recorded(tmp_path, 1)
    file = config.directory / "client.toml"
    file.write_text(file.read_text().replace(f'state = "{tmp_path}/keys"\n', ""))
    with pytest.raises(ConfigError, match="directory in memory"):
        holds_keys(read_client_config(config.directory), bytes(32))


def test_a_silo_whose_budget_is_spent_is_left_out_and_sends_nothing(tmp_path):
    plan = make_plan(rounds=2)
    roster, grid = federation(tmp_path)
    file, steps = directory_of(tmp_path, 4) / "client.toml", []

    def spend(client, message):  # after the first round its owner lowers the budget
        if client == 4 and asked(grid) is MessageKind.STANDING_REQUEST:
            steps.append(1)
            if len(steps) == 2:
                file.write_text(
                    file.read_text().replace("[budget]\nepsilon = 1000000.0", "[budget]\nepsilon = 1e-6")
                )
        return message

    grid.going = spend
    params = start(strategy(plan, tmp_path, roster), grid)
    assert [charges(tmp_path, client) for client in range(CLIENTS)] == [3, 3, 3, 3, 1]
    assert rows_of(tmp_path)[-1] == (RowKind.COMMIT, 1, 1)
    assert np.abs(params - exact(range(5), range(4))).max() < 2 * noise_bound(plan, CLIENTS)


def test_a_silo_that_announces_itself_and_sends_nothing_is_dropped(tmp_path):
    plan = make_plan(rounds=1)
    roster, grid = federation(tmp_path)
    grid.coming = lambda client, message: (
        gone(grid.sent[-1]) if client == 3 and asked(grid) is MessageKind.STANDING_REQUEST else message
    )
    start(strategy(plan, tmp_path, roster), grid)
    assert rows_of(tmp_path)[-1] == (RowKind.COMMIT, 0, 2)


def test_a_silo_that_hangs_costs_one_attempt_and_comes_back(tmp_path):
    """With deadlines of half a day; without an answer to wait for, the test would not end before them."""
    plan = make_plan(rounds=4)
    roster, grid = federation(tmp_path)
    hung = (MessageKind.STANDING_REQUEST, RequestKind.PRESENCE)

    def hang(client, message):
        kinds = kinds_sent(grid)
        is_hung = CLIENTS < kinds.count(MessageKind.STANDING_REQUEST) <= 3 * CLIENTS
        return None if client == 3 and is_hung and kinds[-1] in hung else message

    grid.coming = hang
    deadlines = Deadlines(joining=40_000.0, keys=40_000.0, grace=0.01, poll=0.001)
    start(strategy(plan, tmp_path, roster, deadlines=deadlines), grid, timeout=100_000.0)
    committed = [
        row.release.participants
        for row in read_rows(tmp_path / "run" / "ledger.sqlite")
        if row.kind is RowKind.COMMIT
    ]
    everyone, others = (0, 1, 2, 3, 4), (0, 1, 2, 4)
    assert committed[:2] == [everyone, others]
    assert committed[-1] == everyone
    assert [key[1:] for key in rows_of(tmp_path) if key[0] is RowKind.RESERVE] == [
        (0, 0),
        (1, 0),
        (1, 1),
        (2, 0),
        (3, 0),
    ]
    assert charges(tmp_path, 0) == 5


def test_standing_keys_need_a_roster_and_a_plan_that_they_can_carry(tmp_path):
    roster, _ = federation(tmp_path)
    with pytest.raises(ConfigError, match="no roster"):
        strategy(make_plan(consistency="assumed"), tmp_path, None)
    with pytest.raises(ConfigError, match="1 to 8 attempts"):
        strategy(make_plan(attempts_per_round=9), tmp_path, roster)
    assert strategy(make_plan(), tmp_path, roster, keys=KeyUse.STANDING).has_standing_keys
    assert not strategy(make_plan(), tmp_path, roster, keys=None).has_standing_keys


def restored_between_rounds(tmp_path, *, forgets):
    """A run of which silo 1 is restored after two rounds, and again at each invitation; what is left is the third."""
    plan = make_plan(rounds=3)
    roster, grid = federation(tmp_path)
    places = directory_of(tmp_path, 1), anchor_in(tmp_path, 1)

    def restore(client, message):
        if client == 1 and asked(grid) is MessageKind.STANDING_INVITATION:
            for place in places:
                if (backup := tmp_path / "backup" / place.name).exists():
                    shutil.copytree(backup, place, dirs_exist_ok=True)
                else:
                    shutil.copytree(place, backup)
        return message

    grid.going = restore  # to before its first epoch
    start(strategy(plan, tmp_path, roster), grid, 1)
    grid.going = lambda _client, message: message
    start(strategy(plan, tmp_path, roster), grid, 2)
    grid.going = restore
    for file in (tmp_path / "run").glob("positions-*") if forgets else ():
        file.unlink()
    return lambda: start(strategy(plan, tmp_path, roster), grid)


def third_round(tmp_path):
    assert rows_of(tmp_path)[-1] == (RowKind.COMMIT, 2, 0)
    (last,) = [row for row in read_rows(tmp_path / "run" / "ledger.sqlite") if row.kind is RowKind.COMMIT][2:]
    return last.release.participants


def test_peers_find_a_restored_silo_even_if_the_server_forgets(tmp_path):
    """Its peers do not become ready and return what they remember; the server passes it on; the silo marks itself."""
    restored_between_rounds(tmp_path, forgets=True)()
    assert (anchor_in(tmp_path, 1) / "mark").exists()
    assert third_round(tmp_path) == (0, 2, 3, 4)


@pytest.fixture
def deaf(monkeypatch):
    """Silo 1 runs a program that does not care where others say they have met it."""
    check = checks.require_in_chain
    monkeypatch.setattr(checks, "require_in_chain", lambda *given: None if given[2] == 1 else check(*given))


@pytest.mark.parametrize("forgets", [False, True])
def test_a_restored_silo_that_comes_all_the_same_is_left_out(tmp_path, deaf, caplog, forgets):
    with caplog.at_level(logging.WARNING):
        restored_between_rounds(tmp_path, forgets=forgets)()
    assert third_round(tmp_path) == (0, 2, 3, 4)
    assert "client 1 is left out: it shows row " in caplog.text


def test_unless_it_is_left_out_a_restored_silo_stops_all_others(tmp_path, deaf, monkeypatch):
    go_on = restored_between_rounds(tmp_path, forgets=False)
    monkeypatch.setattr(standing_server, "require_later_position", lambda *_: None)
    with pytest.raises(TooFewClients):
        go_on()


class Rows:
    """A silo's records: each row is what one adds to the model."""

    def __init__(self, rows: np.ndarray, raising=()) -> None:
        self.rows, self.raising = rows.astype(np.float32), raising

    @property
    def count(self) -> int:
        return len(self.rows)

    def gradients(self, chosen):
        if np.isin(chosen, self.raising).any():
            raise RuntimeError("a secret of the data")
        yield self.rows[chosen]


class Uncounted(Rows):
    """A silo that cannot say how many records it has."""

    @property
    def count(self) -> int:
        raise RuntimeError("a secret of the data")


def record_plan(records=200, rounds=2, batch_rate=1.0, *, count_failures=False):
    return calibrate(
        PrivacyTarget(
            unit="record",
            dimension=DIMENSION,
            population=CLIENTS,
            rounds=rounds,
            records=records,
            batch_rate=batch_rate,
            epsilon=5000.0,
            delta=1e-5,
            colluders=0.2,
            dropouts=0.2,
            against="server",
            consistency="signed",
            spare=2,
        ),
        count_failures=count_failures,
    )


def records_grid(tmp_path, plan, others=None):
    """Each silo holds forty records, all one-hot at its own place; `others` says what some hold instead."""
    tmp_path.mkdir(exist_ok=True)
    roster, grid = federation(tmp_path)

    def units(client):
        def of(arrays, settings, context):
            rows = np.zeros((40, DIMENSION))
            rows[:, client] = 1.0
            return (others or {}).get(client, Rows)(rows)

        return of

    for client in range(CLIENTS):
        app = ClientApp(mods=[PrivateRecords(units(client))])
        app.train()(lambda message, context: message)
        grid.apps[100 + client] = (app, grid.apps[100 + client][1])
    return strategy(plan, tmp_path, roster, keys=None), grid


def test_records_over_flower_are_drawn_clipped_and_summed(tmp_path):
    plan = record_plan()
    silos, grid = records_grid(tmp_path, plan)
    assert silos.has_standing_keys
    params = start(silos, grid, 1)
    expected = np.zeros(DIMENSION)
    expected[:CLIENTS] = 40 * min(1.0, plan.codec.clip) / plan.divisor
    spread = 8 * plan.sigma * 2 / plan.divisor
    assert np.abs(params - expected).max() < spread < expected.max()
    assert set(kinds_sent(grid)) >= {MessageKind.STANDING_REQUEST}


def test_a_statistic_over_flower_is_the_sum_of_the_records_own_numbers(tmp_path):
    plan = record_plan(rounds=1)
    silos, grid = records_grid(tmp_path, plan)
    found = private_total(silos, grid, "places", DIMENSION)
    expected = np.zeros(DIMENSION)
    expected[:CLIENTS] = 40 * min(1.0, plan.codec.clip)
    assert np.abs(found.value - expected).max() < 6 * found.standard_error < 10
    assert {each.unit for each in found.guarantees} == {Unit.RECORD}


def test_the_server_learns_how_many_records_failed(tmp_path):
    plan = record_plan(rounds=1, count_failures=True)

    class Halves(Rows):
        def gradients(self, chosen):
            if chosen[0] % 2:
                raise ValueError("a secret of the data")
            return super().gradients(chosen)

    silos, grid = records_grid(tmp_path, plan, {1: Halves, 3: Halves})
    start(silos, grid)
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    error = plan.failures_error(CLIENTS)
    assert error < 4
    assert record["failures"] == pytest.approx(40, abs=6 * error)  # twenty of each silo that has such records


def test_the_report_tells_of_each_silo_what_the_server_knows(tmp_path):
    plan = record_plan(rounds=3)
    silos, grid = records_grid(tmp_path, plan)
    lost = {3}

    def away(client, message):  # without a vector in the first round, then back
        if client in lost and asked(grid) in (MessageKind.STANDING_REQUEST, RequestKind.PRESENCE):
            return gone(grid.sent[-1])
        return message

    grid.coming = away
    start(silos, grid, 1)
    lost.clear()
    start(silos, grid)
    found = {each["silo"]: each for each in json.loads((tmp_path / "run" / "silos.json").read_text())["silos"]}
    assert [(found[silo]["rounds"], found[silo]["last_round"]) for silo in (0, 3)] == [(3, 3), (2, 3)]
    # The void attempt counts for all: each has charged it to itself.
    for silo, each in found.items():
        assert each["charged"] == charges(tmp_path, silo)
        assert each["position"] <= read_client_config(directory_of(tmp_path, silo)).log.read().head.seq
        assert each["is_here"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<td>2 of 3 rounds</td>" in page
    assert page.count(" of 3 rounds</td>") == CLIENTS
    allowed = {
        "silo",
        "rounds",
        "charged",
        "last_round",
        "position",
        "is_here",
        "refusal",
    }  # no number of its data
    assert set(found[0]) == allowed


def require_records(params, plan, counted):
    """Each silo's place in the model has as many clipped records as are counted, up to noise that hides one of them."""
    clip, spread = min(1.0, plan.codec.clip), 8 * plan.sigma * 2 / plan.divisor
    assert spread < 39 * clip / plan.divisor
    for client, count in enumerate(counted):
        assert abs(params[client] - count * clip / plan.divisor) < spread


def one_raises(rows):
    return Rows(rows, raising=(7,))


def test_a_record_that_raises_moves_the_sum_by_itself_alone(tmp_path, monkeypatch):
    """The server picks a model under which one record raises: taken together, it would carry its batch away."""
    plan = record_plan(rounds=1)
    silos, grid = records_grid(tmp_path / "here", plan, {2: one_raises})
    require_records(start(silos, grid), plan, [40, 40, 39, 40, 40])
    monkeypatch.setattr(private_client, "SingleUnits", lambda units, *_: units)  # the twin
    silos, grid = records_grid(tmp_path / "there", plan, {2: one_raises})
    require_records(start(silos, grid), plan, [40, 40, 0, 40, 40])


@pytest.mark.parametrize("silo", [lambda rows: Rows(rows, raising=range(40)), Uncounted, lambda rows: 1 / 0])
def test_a_silo_without_vectors_sends_noise_alone_and_no_word_of_why(tmp_path, silo):
    plan = record_plan(rounds=1)
    silos, grid = records_grid(tmp_path, plan, {2: silo})
    require_records(start(silos, grid), plan, [40, 40, 0, 40, 40])
    assert not any(reply.has_error() for reply in grid.received)


class Many:
    """Units that add nothing, and note whose coin came up."""

    count = 100_000

    def __init__(self) -> None:
        self.tossed = 0

    def gradients(self, chosen):
        self.tossed += len(chosen)
        return iter(())


def test_a_deployed_silo_tosses_at_the_rate_that_its_own_log_was_charged(tmp_path):
    plan = record_plan(rounds=1, batch_rate=0.25)
    held = [Many() for _ in range(CLIENTS)]
    silos, grid = records_grid(
        tmp_path, plan, {client: lambda _rows, own=own: own for client, own in enumerate(held)}
    )
    start(silos, grid)
    (commit,) = [row for row in read_rows(tmp_path / "run" / "ledger.sqlite") if row.kind is RowKind.COMMIT]
    for client, own in enumerate(held):
        (charge,) = rows_charged(tmp_path, client)
        release = decode_release(charge["release"])
        assert release.batches == commit.release.batches
        # An exact test at the level 1e-6: a rate that is off by four in a hundred is seven deviations away.
        assert binomtest(own.tossed, own.count, float(release.batches.rate)).pvalue >= 1e-6
