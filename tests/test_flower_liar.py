"""A server that lies to clients, homes that are put back, and what is noticed of it: by whom, and by whom not."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict

import lying_server
from crash_moments import Disk, lay_out
from d2pfed.accounting import Sampling
from d2pfed.errors import LedgerError, PeerError, TooFewClients
from d2pfed.flower import client as client_app
from d2pfed.flower import layout, part, runs
from d2pfed.flower.account import NOTHING, Account, Given
from d2pfed.flower.client import introduce
from d2pfed.flower.draws import Committed, make_draws
from d2pfed.flower.envelope import Request, unpack_answer
from d2pfed.flower.home import Home, init_home, read_home
from d2pfed.flower.layout import Entry as ArrayEntry
from d2pfed.flower.layout import Layout, encode_task
from d2pfed.flower.positions import Positions
from d2pfed.flower.rosters import accept_roster
from d2pfed.flower.runs import Runs
from d2pfed.flower.states import Saved
from d2pfed.ledger import client_log
from d2pfed.ledger.client_history import Entry
from d2pfed.round import rotation_seed
from d2pfed.secagg import checks, messages
from d2pfed.secagg.messages import MessageKind
from d2pfed.secagg.position import Position, sign_position
from d2pfed.secagg.wire import HEADER_BYTES, kind_of
from homes import anchor_in, enrol, home_in, sign_roster, write_settings
from local_grid import Train, make_app, make_context, make_message, make_plan, one_hot
from lying_server import LyingServer

VICTIM = 0


@pytest.fixture
def server(tmp_path):
    """Five silos that are always asked together."""
    made = LyingServer(tmp_path, make_plan(rounds=4), enrol(tmp_path, 5))
    made.introduce()
    return made


def home_of(server: LyingServer, client: int = VICTIM) -> Home:
    return read_home(server.homes.get(client, home_in(server.directory, client)))


def vectors(server: LyingServer, client: int = VICTIM) -> int:
    return len(Given.of(home_of(server, client).log.read()).releases)


def back_up(server: LyingServer, name: str = "backup") -> Path:
    """A copy of the victim's home and anchor."""
    for kind, place in (("home", home_in), ("anchor", anchor_in)):
        shutil.copytree(place(server.directory, VICTIM), server.directory / name / kind)
    return server.directory / name


def restore(server: LyingServer, backup: Path) -> None:
    """Put home and anchor back together, as a snapshot of the whole machine does."""
    for kind, place in (("home", home_in), ("anchor", anchor_in)):
        shutil.rmtree(place(server.directory, VICTIM))
        shutil.copytree(backup / kind, place(server.directory, VICTIM))


def latest(server: LyingServer) -> dict[int, Position]:
    """What server and peers have been shown so far: adverts show the position of their attempt's row, nothing later."""
    found = {}
    for client in server.roster.roster.clients:
        home = home_of(server, client)
        begun = [row.head for row in home.log.read().rows if row.entry is Entry.BEGUN]
        if begun:
            last = begun[-1]
            found[client] = sign_position(home.secret, home.authority, client, last.seq, last.hash)
    return found


def at_request(server: LyingServer, kind: MessageKind, do: Callable[[RecordDict], None]) -> None:
    """Have something done on the victim's machine when the next request of a kind arrives there, before its answer."""
    ask, waiting = type(server).ask, [do]

    def asked(client: int, content: RecordDict) -> RecordDict:
        if client == VICTIM and waiting and kind_of(Request.unpack(content).frame) == kind:
            waiting.pop()(content)
        return ask(server, client, content)

    server.ask = asked


def noticed(server: LyingServer) -> bool:
    """Whether the victim has taken itself out, durably."""
    if VICTIM not in server.refusals:
        return False
    with pytest.raises(LedgerError, match="rolled back or cloned"):
        home_of(server).log.read()
    with pytest.raises(PeerError):
        server.introduce(VICTIM)
    return True


# Draws


def test_a_draw_serves_one_run_and_without_the_check_the_same_clients_are_asked_by_every_run(server, monkeypatch):
    server.attempt()
    other = replace(server, run="another run")
    other.introduce()
    with pytest.raises(PeerError, match="draw 0 of this roster was used before"):
        other.invite()
    monkeypatch.setattr(part, "require_unused_draw", lambda *_: None)
    other.invite()


def test_under_once_a_client_that_has_sent_a_vector_is_not_asked_for_another(tmp_path, monkeypatch):
    plan = make_plan(5, rounds=1, population=10, sampling=Sampling.ONCE, spare=0)
    server = LyingServer(tmp_path, plan, enrol(tmp_path, 10))
    server.introduce()
    session = server.session(block=0)
    client = session.cohort[0]
    server.invite(client, number=0, attempt=0, draw=0)
    server.invite(client, number=0, attempt=1, draw=0)  # nothing was sent: another attempt may ask
    home = home_of(server, client)
    note = {"roster": session.roster_digest.hex(), "draw": 0}
    assert Account(home.log, home.budget).charge(plan, "another run", 0, 0, note) == 0
    with pytest.raises(PeerError, match="draw 0 of this roster was used before"):
        server.invite(client, number=0, attempt=2, draw=0)
    monkeypatch.setattr(part, "require_unused_draw", lambda *_: None)
    server.invite(client, number=0, attempt=2, draw=0)


def test_a_runs_draws_are_settled_when_it_is_introduced(server, monkeypatch):
    moved = replace(server, first_draw=7)
    with pytest.raises(PeerError, match="first draw under one roster is 0, got 7"):
        moved.introduce(VICTIM)
    with pytest.raises(PeerError, match="is of draw 0, got 7"):
        moved.invite(draw=7)
    monkeypatch.setattr(runs, "require_same_draws", lambda *_: None)
    moved.introduce(VICTIM)
    moved.invite(draw=7)


def test_a_run_goes_on_under_a_newer_roster_when_it_is_introduced_again(server):
    server.attempt()
    (server.directory / "draws").rename(server.directory / "old draws")
    later = sign_roster(server.directory, {}, server.roster.roster, make_draws(server.directory / "draws", 6))
    newer = replace(server, roster=later, first_draw=3)
    newer.introduce()
    (server.directory / "draws").rename(server.directory / "new draws")
    (server.directory / "old draws").rename(server.directory / "draws")
    with pytest.raises(PeerError):
        server.invite(number=1)  # under the roster before
    (server.directory / "new draws").replace(server.directory / "draws")
    assert newer.attempt(1).vector.any()


# What is trained


def test_a_task_for_another_layout_than_introduced_is_refused_and_costs_nothing(server, monkeypatch):
    other = Layout((ArrayEntry("something-else", (16,), "float32"),))
    with pytest.raises(TooFewClients):
        server.attempt(task=encode_task(other, {}))
    assert "layout that the run was introduced with" in str(server.refusals[VICTIM])
    assert vectors(server) == 0
    monkeypatch.setattr(layout, "require_layout", lambda *_: None)
    server.attempt(attempt=1, task=encode_task(other, {}))
    assert vectors(server) == 1


def test_a_model_of_another_length_is_refused_and_costs_nothing(server, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(lying_server, "encode_model", lambda _: b"short")
        with pytest.raises(TooFewClients):
            server.attempt()
    assert "a model of 16 parameters was expected" in str(server.refusals[VICTIM])
    assert vectors(server) == 0


def test_a_plan_for_another_number_of_parameters_than_its_layout_has_is_refused(server, monkeypatch):
    other = replace(server, run="another", layout=Layout((ArrayEntry("params", (17,), "float32"),)))
    with pytest.raises(PeerError, match="a plan must be for the parameters of its layout"):
        other.introduce(VICTIM)
    monkeypatch.setattr(part, "require_same_dimension", lambda *_: None)
    other.introduce(VICTIM)


def test_a_run_that_was_allowed_under_one_roster_is_not_gone_on_with_under_another(server, monkeypatch):
    """What the policy has allowed was worked out for the population and the draws of that roster."""
    roster = server.roster.roster
    later = sign_roster(server.directory, {}, roster, make_draws(server.directory / "later draws", 6))
    accept_roster(home_of(server), later.data)
    (server.directory / "draws").rename(server.directory / "old draws")
    (server.directory / "later draws").rename(server.directory / "draws")
    newer = replace(server, roster=later)
    with pytest.raises(PeerError, match="was introduced under another roster: it must be introduced again"):
        newer.invite()
    monkeypatch.setattr(part, "require_same_roster", lambda *_: None)
    newer.invite()


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\n{}", b"garbage\n" * 3])
def test_a_damaged_run_must_be_introduced_again_and_blocks_nothing_else(server, damage, caplog):
    other = replace(server, run="another run", first_draw=20)
    other.introduce(VICTIM)
    Runs(home_of(server).path)._file("a run").write_bytes(damage)
    with pytest.raises(PeerError, match="run a run was never introduced"):
        server.invite()
    assert "is damaged and left out: its run must be introduced again" in caplog.text
    other.invite()
    server.introduce(VICTIM)
    server.invite()


def test_a_server_fills_no_disk_with_runs(server, monkeypatch):
    monkeypatch.setattr(runs, "MOST_RUNS", 1)
    server.introduce(VICTIM)  # a known one
    with pytest.raises(PeerError, match="its own log says why"):
        replace(server, run="another run", first_draw=20).introduce(VICTIM)


def test_nothing_of_an_attempt_prints_its_secrets(server):
    server.invite()
    (file,) = (home_of(server).path / "states").glob("*.state")
    kept = Saved.decode(file.read_bytes())
    printed = repr(part.Part.resume(home_of(server), kept))
    secrets = kept.state, home_of(server).secret
    assert all(str(secret)[2:-1] not in printed and secret.hex() not in printed for secret in secrets)


# What is trained: the same function, the same settings, for all


def updates_in(server: LyingServer, attempt: int, task: bytes | None = None) -> np.ndarray:
    """The sum of the clients' updates, noise and all, as the server reads it."""
    plan, seed = server.plan, rotation_seed(server.session(attempt=attempt))
    opened = server.attempt(attempt=attempt, task=task)
    return plan.codec.decode(plan.ring.centre(opened.vector), seed, 1)


def is_the_victims(found: np.ndarray) -> bool:
    """Say whether a sum shows the victim's update and nobody else's."""
    return found[VICTIM] > 0.5 > np.abs(np.delete(found, VICTIM)).max()


def measure(message: Message, _context: Context) -> Message:
    """What an app evaluates: it returns no arrays, so whoever trains by it sends zero and its noise."""
    return Message(RecordDict({"metrics": MetricRecord({"loss": 1.0})}), reply_to=message)


def by_another_function(server: LyingServer, message_type: str) -> None:
    """Ask all but the victim for their vectors in the name of another function of the same app."""

    def ask(client: int, content: RecordDict) -> RecordDict:
        app, message = make_app(one_hot(client)), make_message(content, 100 + client)
        app.evaluate()(measure)
        app.train("quiet")(measure)
        if client != VICTIM and "d2pfed.exchange" in content:
            message.metadata.message_type = message_type
        return app(message, make_context(client, home_in(server.directory, client))).content

    server.ask = ask


@pytest.mark.parametrize("message_type", ["evaluate", "train.quiet"])
def test_which_function_of_an_app_trains_is_not_the_servers_to_choose(server, message_type, monkeypatch):
    by_another_function(server, message_type)
    with pytest.raises(TooFewClients):
        server.attempt()
    assert "requests of d2pfed only" in str(server.refusals[1])
    monkeypatch.setattr(client_app, "require_training", lambda *_: None)
    assert is_the_victims(updates_in(server, 1))


def with_epochs(client: int) -> Train:
    """A training function that takes its number of epochs from the configuration of the run."""

    def train(message: Message, context: Context) -> Message:
        params = message.content["arrays"]["params"].numpy().copy()
        params[client] += min(1.0, context.run_config["local-epochs"])
        return Message(RecordDict({"arrays": ArrayRecord({"params": Array(params)})}), reply_to=message)

    return train


def with_run_config(server: LyingServer, of: Callable[[int], dict[str, object]]) -> None:
    """A SuperLink that gives each client the configuration of the run that it likes."""

    def ask(client: int, content: RecordDict) -> RecordDict:
        context = make_context(client, home_in(server.directory, client))
        context.run_config = of(client)
        return make_app(with_epochs(client))(make_message(content, 100 + client), context).content

    server.ask = ask


def test_another_configuration_of_the_run_for_the_victim_alone_gives_no_sum(server, monkeypatch):
    told = encode_task(server.layout, {"lr": 0.1}, {"local-epochs": 2})
    with_run_config(server, lambda _client: {"local-epochs": 2})
    assert updates_in(server, 0, told)[:5].min() > 0.5
    with_run_config(server, lambda client: {"local-epochs": 2 if client == VICTIM else 0})
    before = vectors(server, 1)
    with pytest.raises(TooFewClients):
        server.attempt(attempt=1, task=told)
    assert "the configuration of the run must be that of the task" in str(server.refusals[1])
    assert vectors(server, 1) == before
    monkeypatch.setattr(layout, "require_run_config", lambda *_: None)
    assert is_the_victims(updates_in(server, 2, told))


@pytest.mark.parametrize("own", [{"local-epochs": True}, {"local-epochs": 1.0}, {}, {"local-epochs": 1, "lr": 2}])
def test_a_configuration_of_the_run_is_compared_by_its_text(server, own):
    told = encode_task(server.layout, {}, {"local-epochs": 1})
    layout.decode_task(told, server.layout, {"local-epochs": 1})
    with pytest.raises(PeerError, match="configuration of the run"):
        layout.decode_task(told, server.layout, own)
    with pytest.raises(PeerError, match="configuration of the run"):  # what nobody was told of
        layout.decode_task(encode_task(server.layout, {}), server.layout, {"local-epochs": 1})


def test_other_names_for_other_clients_give_no_sum(server, monkeypatch):
    """The layout is in the context: clients that were introduced to another one do not cancel with the victim."""
    server.run, server.first_draw = "another run", 20
    other = replace(server, layout=Layout((ArrayEntry("something-else", (16,), "float32"),)))
    server.introduce(VICTIM)
    other.introduce(*server.roster.roster.clients[1:])
    told = encode_task(server.layout, {})
    with pytest.raises(TooFewClients):
        server.attempt(task=told)
    assert "layout that the run was introduced with" in str(server.refusals[1])
    assert VICTIM not in server.refusals
    monkeypatch.setattr(layout, "require_layout", lambda *_: None)
    assert is_the_victims(updates_in(server, 1, told))


def two_runs_on_one_draw(server: LyingServer) -> None:
    """Begin a second run on the draw of a partition before the first has asked for its vectors."""
    other = replace(server, run="another run")
    other.introduce()
    at_request(server, MessageKind.MASK_REQUEST, lambda _: other.attempt())
    server.attempt()


def test_under_once_a_draw_gets_one_vector_whatever_has_begun_on_it(tmp_path):
    plan = make_plan(5, rounds=1, sampling=Sampling.ONCE, spare=0)
    server = LyingServer(tmp_path, plan, enrol(tmp_path, 5))
    server.introduce()
    with pytest.raises(TooFewClients):
        two_runs_on_one_draw(server)
    assert "draw 0 of this roster was used before" in str(server.refusals[VICTIM])
    assert vectors(server) == 1


def test_unless_it_is_checked_again_before_the_vector_a_draw_serves_two_runs(tmp_path, monkeypatch):
    plan = make_plan(5, rounds=1, sampling=Sampling.ONCE, spare=0)
    server = LyingServer(tmp_path, plan, enrol(tmp_path, 5))
    server.introduce()
    monkeypatch.setattr(part.Part, "require_draw_left", lambda *_: None)
    two_runs_on_one_draw(server)
    assert vectors(server) == 2


# The log comes first


def test_the_row_of_an_attempt_is_on_the_disk_before_its_keys_leave(server, tmp_path, monkeypatch):
    sent = []
    with monkeypatch.context() as patched:
        disk = Disk(tmp_path, patched, lambda: len(sent))
        server.invite(attempt=1)
        sent.append("an advert")
        disk._note("sent")
    assert any(moment.sent for moment in disk.moments)
    for place, moment in enumerate(disk.moments):
        for name, files in (("kill", moment.after_kill), ("power", moment.after_power_cut)):
            if moment.sent:
                where = lay_out(tmp_path / "crashed" / f"{place}-{name}", files)
                assert b'"attempt":1' in (where / "home-0" / "log").read_bytes()
                assert (where / "anchor-0" / "head").read_bytes() == (
                    anchor_in(tmp_path, VICTIM) / "head"
                ).read_bytes()


def test_the_position_in_an_advert_counts_its_own_attempt(server):
    before = home_of(server).log.read().head.seq
    shown = {}
    server.attempt(without=())
    for client in (1, 2):
        shown[client] = Positions(home_in(server.directory, client) / "peers", server.roster.roster.keys).latest()
    assert shown[1][VICTIM].count == shown[2][VICTIM].count == before + 1


def test_a_row_after_the_advert_would_leave_a_rollback_by_one_attempt_unnoticed(server, monkeypatch):
    """With the position of before the row, the backup's chain holds all that anyone was shown."""
    backup = back_up(server)
    memory = part.Part._memory

    def early(self):
        kept = memory(self)
        rows = self.history.rows
        last = rows[-2].head if rows[-1].entry is Entry.BEGUN else self.history.head
        signed = sign_position(self.enrolment.secret, self.home.authority, self.home.client, last.seq, last.hash)
        return replace(kept, position=signed)

    monkeypatch.setattr(part.Part, "_memory", early)
    server.attempt()
    restore(server, backup)
    server.attempt(attempt=1)
    assert not noticed(server)


# What is noticed: a log that is at odds with its anchor, should the anchor not see it


@pytest.mark.parametrize("witness", ["server", "peers"])
def test_a_log_that_was_cut_is_noticed_by_others_even_without_an_anchor(server, monkeypatch, witness):
    server.attempt()
    server.attempt(attempt=1)
    server.remembered = latest(server) if witness == "server" else {}
    log = home_in(server.directory, VICTIM) / "log"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-2]))  # the second attempt and its vector
    with pytest.raises(PeerError, match="its own log says why"):
        server.invite(attempt=2)  # the anchor
    monkeypatch.setattr(client_log, "require_anchored", lambda *_: None)
    server.attempt(attempt=2)
    assert noticed(server)


# What is noticed: whole home and anchor restored


def test_an_anchor_that_was_restored_with_its_home_notices_nothing(server):
    backup = back_up(server)
    server.attempt()
    restore(server, backup)
    home_of(server).log.read()
    server.invite(attempt=1)


def test_a_restored_client_is_noticed_by_an_honest_server_at_once(server, monkeypatch):
    backup = back_up(server)
    server.attempt()
    server.remembered = latest(server)
    restore(server, backup)
    with pytest.raises(PeerError, match="rolled back or cloned"):
        server.invite(attempt=1)
    server.refusals[VICTIM] = PeerError("")
    assert noticed(server)
    restore(server, backup)
    monkeypatch.setattr(checks, "require_server_position", lambda *_: None)
    server.invite(attempt=1)


def test_a_restored_client_is_noticed_by_its_peers_before_it_makes_a_vector(server):
    backup = back_up(server)
    server.attempt()
    restore(server, backup)
    server.attempt(attempt=1)  # the server lies: it remembers nobody
    assert "rolled back or cloned" in str(server.refusals[VICTIM])
    assert noticed(server)
    home_of(server).log.adopt({"carried": NOTHING})
    assert vectors(server) == 0
    server.attempt(attempt=2)  # the declaration holds what peers remember
    assert VICTIM not in server.refusals
    assert vectors(server) == 1


def test_without_the_peers_claims_a_restored_client_gives_a_second_vector_for_one_budget(server, monkeypatch):
    backup = back_up(server)
    server.attempt()
    restore(server, backup)
    monkeypatch.setattr(checks, "require_peer_position", lambda *_: None)
    server.attempt(attempt=1)
    assert VICTIM not in server.refusals
    assert vectors(server) == 1  # of the two that it has sent


def test_a_restored_client_is_noticed_by_the_next_roster_up_to_its_floor(server):
    backup = back_up(server)
    server.attempt()
    floor = latest(server)
    server.attempt(attempt=1)
    restore(server, backup)
    roster = server.roster.roster
    later = sign_roster(server.directory, {}, roster, Committed(roster.depth, bytes(32)), shown=floor)
    with pytest.raises(PeerError, match="the authority has seen position"):
        introduce(home_of(server), replace(server, roster=later).introduction(), 100)


@pytest.mark.parametrize(
    ("arrived", "is_noticed"),
    [(MessageKind.INVITATION, True), (MessageKind.MASK_REQUEST, False)],
    ids=["before", "within"],
)
def test_only_what_is_restored_to_before_an_attempts_row_is_noticed(server, arrived, is_noticed):
    """The charge comes after the advert, so nobody was shown it: documented, and true."""
    at_request(server, arrived, lambda _: back_up(server))
    server.attempt()
    server.remembered = latest(server)
    assert vectors(server) == 1
    restore(server, server.directory / "backup")
    assert vectors(server) == 0
    roster = server.roster.roster
    later = sign_roster(server.directory, {}, roster, Committed(roster.depth, bytes(32)), shown=latest(server))
    server.attempt(attempt=1)
    assert noticed(server) == is_noticed
    if not is_noticed:
        assert vectors(server) == 1  # of the two that it has sent
        accept_roster(home_of(server), later.data)  # the floor knows the advert only


def test_restored_within_each_attempt_a_client_has_its_whole_cap_left_and_nobody_notices(server):
    for sent in range(server.plan.max_participations):
        at_request(server, MessageKind.MASK_REQUEST, lambda _, name=f"backup {sent}": back_up(server, name))
        server.attempt(sent // server.plan.attempts_per_round, sent % server.plan.attempts_per_round)
        assert VICTIM not in server.refusals
        server.remembered = latest(server)
        restore(server, server.directory / f"backup {sent}")
    assert vectors(server) == 0


def test_secrets_restored_within_one_start_of_the_machine_answer_a_mask_request_again(server):
    """Two vectors under one mask: their difference is the difference of two noises, and one of them is charged."""
    answers = []

    def ask_twice(content: RecordDict) -> None:
        backup = back_up(server)
        answers.append(server.ask(VICTIM, content))
        restore(server, backup)
        answers.append(server.ask(VICTIM, content))
        restore(server, backup)

    at_request(server, MessageKind.MASK_REQUEST, ask_twice)
    server.attempt()
    session, ring = server.session(), server.plan.ring
    frames = [unpack_answer(answer) for answer in answers]
    context = frames[0][HEADER_BYTES : HEADER_BYTES + messages.CONTEXT_BYTES]
    rank = session.rank(VICTIM)
    first, second = (messages.decode_masked(session, rank, context, frame).vector for frame in frames)
    ring.subtract_into(first, second)
    assert 0 < np.abs(ring.centre(first)).max() < ring.modulus // 4  # no mask is left in it
    assert vectors(server) == 1  # of the three that it has made


# What is noticed: clones, new beginnings, new names


def test_two_clones_on_two_machines_are_noticed_by_the_server_and_by_a_peer_that_meets_both(server, tmp_path):
    clone = back_up(server, "another machine")
    shutil.rmtree(tmp_path / "another machine" / "anchor")
    twin = clone / "home"
    text = (twin / "client.toml").read_text()
    (twin / "client.toml").write_text(text.replace(str(anchor_in(tmp_path, VICTIM)), str(clone / "anchor")))
    shutil.copytree(anchor_in(tmp_path, VICTIM), clone / "anchor")
    server.attempt()
    server.homes[VICTIM] = twin
    server.remembered = latest(replace(server, homes={}))
    with pytest.raises(PeerError, match="rolled back or cloned"):
        server.invite(attempt=1)  # the second's first invitation
    read_home(twin).log.adopt({"carried": NOTHING})
    server.remembered = {}
    server.attempt(attempt=2)
    assert server.refusals == {}
    del server.homes[VICTIM]
    server.attempt(number=1)  # back to the first: a peer has met both
    assert noticed(server)


def test_a_floor_tells_clones_apart_only_if_it_is_later_than_the_copy(server, tmp_path):
    roster, before = server.roster.roster, latest(server)
    shutil.copytree(home_in(tmp_path, VICTIM), tmp_path / "clone" / "home")
    shutil.copytree(anchor_in(tmp_path, VICTIM), tmp_path / "clone" / "anchor")
    settings = tmp_path / "clone" / "home" / "client.toml"
    text = settings.read_text()
    settings.write_text(text.replace(str(anchor_in(tmp_path, VICTIM)), str(tmp_path / "clone" / "anchor")))
    server.attempt()
    second = sign_roster(tmp_path, {}, roster, None, shown=before)
    third = sign_roster(tmp_path, {}, second.roster, None, shown=latest(server))
    clone = read_home(tmp_path / "clone" / "home")
    accept_roster(clone, second.data)
    accept_roster(home_of(server), second.data)
    accept_roster(home_of(server), third.data)
    with pytest.raises(PeerError, match="the authority has seen position"):
        accept_roster(clone, third.data)


def test_two_clones_on_one_machine_are_noticed_by_their_anchor(server, tmp_path):
    shutil.copytree(home_in(tmp_path, VICTIM), tmp_path / "clone")
    server.attempt()
    server.homes[VICTIM] = tmp_path / "clone"
    with pytest.raises(PeerError, match="its own log says why"):
        server.invite(attempt=1)


def begin_again(server: LyingServer, client: int) -> None:
    """An owner keeps nothing but the key, and begins with an empty log."""
    home, anchor = home_in(server.directory, VICTIM), anchor_in(server.directory, VICTIM)
    key = (home / "key").read_bytes()
    shutil.rmtree(home)
    shutil.rmtree(anchor)
    home.mkdir(mode=0o700)
    (home / "key").touch(mode=0o600)
    (home / "key").write_bytes(key)
    init_home(home, client, server.roster.roster.authority, anchor)
    write_settings(server.directory, VICTIM, server.roster.roster.authority, {})


def test_an_owner_who_deletes_everything_is_noticed_by_server_and_peers_until_it_declares(server):
    server.attempt()
    server.remembered = latest(server)
    begin_again(server, VICTIM)
    home_of(server).log.read()  # the anchor knows nothing
    server.introduce(VICTIM)
    with pytest.raises(PeerError, match="rolled back or cloned"):
        server.invite(attempt=1)
    home_of(server).log.adopt({"carried": NOTHING})
    server.invite(attempt=2)  # a false declaration is believed
    assert [body["carried"] for body in home_of(server).log.read().bodies(Entry.DECLARATION)] == [NOTHING]


def test_the_same_data_under_a_new_identity_is_noticed_by_nobody(tmp_path):
    signed = enrol(tmp_path, 5)
    server = LyingServer(tmp_path, make_plan(rounds=4), signed)
    server.introduce()
    server.attempt()
    public = init_home(home_in(tmp_path, 9), 9, signed.roster.authority, anchor_in(tmp_path, 9))
    write_settings(tmp_path, 9, signed.roster.authority, {})
    committed = Committed(signed.roster.depth, signed.roster.root)
    renamed = sign_roster(
        tmp_path, {9: public}, replace(signed.roster, root=bytes(32)), committed, removed=frozenset({VICTIM})
    )
    again = LyingServer(tmp_path, make_plan(rounds=4), renamed, run="another run", first_draw=20)
    again.introduce()
    again.attempt()
    assert again.refusals == {}
    assert vectors(again, 9) == 1


def test_a_restored_client_among_strangers_and_a_lying_server_is_not_noticed(tmp_path):
    """The last row of the table: documented, and true."""
    plan = make_plan(
        5, rounds=1, population=9, sampling=Sampling.FIXED, attempts_per_round=64, max_participations=1
    )
    server = LyingServer(tmp_path, plan, enrol(tmp_path, 9))
    server.introduce()
    cohorts = {draw: set(server.session(attempt=draw).cohort) for draw in range(64)}
    first, second = next(
        pair
        for pair in combinations([draw for draw in cohorts if VICTIM in cohorts[draw]], 2)
        if cohorts[pair[0]] & cohorts[pair[1]] == {VICTIM}
    )
    backup = back_up(server)
    server.attempt(attempt=first)
    restore(server, backup)
    server.attempt(attempt=second)
    assert VICTIM not in server.refusals
    assert vectors(server) == 1  # two have left
