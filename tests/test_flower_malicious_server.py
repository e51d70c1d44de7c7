"""A server that lies to clients, clients that are restored from backups, and who notices it and who does not."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from d2pfed.accounting import Sampling
from d2pfed.deploy import attempt as client_attempt
from d2pfed.deploy import client as private_client
from d2pfed.deploy.account import NOTHING, ClientAccount, ClientSpending
from d2pfed.deploy.config import ClientConfig, init_client, read_client_config
from d2pfed.deploy.layout import ArraySpec, Layout, decode_task, encode_task
from d2pfed.deploy.rosters import DrawCommitment, Positions, accept_roster, make_draws
from d2pfed.deploy.state import AcceptedRuns, SavedPhase
from d2pfed.errors import LedgerError, PeerError, TooFewClients
from d2pfed.ledger import client_log
from d2pfed.ledger.client_log import Entry
from d2pfed.secagg import checks
from d2pfed.secagg.pairwise import messages
from d2pfed.secagg.roster import Position, sign_position
from d2pfed.secagg.wire import HEADER_BYTES, MessageKind, kind_of
from support.crash_moments import Disk, lay_out
from support.enrolled_clients import anchor_in, directory_of, enrol, make_plan, sign_roster, write_settings
from support.malicious_server import MaliciousServer, add_one, shows_only
from support.rings import subtract_into
from support.twins import twin

VICTIM = 0


@pytest.fixture
def server(tmp_path):
    """Five silos that are always asked together."""
    made = MaliciousServer(tmp_path, make_plan(rounds=4), enrol(tmp_path, 5))
    made.announce()
    return made


def config_of(server: MaliciousServer, client: int = VICTIM) -> ClientConfig:
    return read_client_config(server.moved.get(client, directory_of(server.directory, client)))


def vectors(server: MaliciousServer, client: int = VICTIM) -> int:
    return len(ClientSpending.of(config_of(server, client).log.read()).releases)


def back_up(server: MaliciousServer, name: str = "backup") -> Path:
    """A copy of the victim's directory and anchor."""
    for kind, place in (("directory", directory_of), ("anchor", anchor_in)):
        shutil.copytree(place(server.directory, VICTIM), server.directory / name / kind)
    return server.directory / name


def restore(server: MaliciousServer, backup: Path) -> None:
    """Put directory and anchor back together, as a snapshot of the whole machine does."""
    for kind, place in (("directory", directory_of), ("anchor", anchor_in)):
        shutil.rmtree(place(server.directory, VICTIM))
        shutil.copytree(backup / kind, place(server.directory, VICTIM))


def latest(server: MaliciousServer) -> dict[int, Position]:
    """What server and peers have been shown so far: adverts show the position of their attempt's row, nothing later."""
    found = {}
    for client in server.roster.roster.clients:
        config = config_of(server, client)
        begun = [row.head for row in config.log.read().rows if row.entry is Entry.BEGUN]
        if begun:
            last = begun[-1]
            found[client] = sign_position(config.secret, config.authority, client, last.seq, last.hash)
    return found


def at_request(server: MaliciousServer, kind: MessageKind, do: Callable[[bytes], None]) -> None:
    """Have something done on the victim's machine when the next request of a kind arrives there, before its answer."""
    ask, waiting = type(server).ask_frame, [do]

    def asked(client: int, frame: bytes) -> bytes:
        if client == VICTIM and waiting and kind_of(frame) == kind:
            waiting.pop()(frame)
        return ask(server, client, frame)

    server.ask_frame = asked


def noticed(server: MaliciousServer) -> bool:
    """Whether the victim has taken itself out, durably."""
    if VICTIM not in server.refusals:
        return False
    with pytest.raises(LedgerError, match="rolled back or cloned"):
        config_of(server).log.read()
    with pytest.raises(PeerError):
        server.announce(VICTIM)
    return True


# Draws


def test_a_draw_serves_one_run_only(server, monkeypatch):
    server.attempt()
    other = replace(server, run="another run")
    other.announce()
    with pytest.raises(PeerError, match="draw 0 of this roster was used before"):
        other.invite()
    monkeypatch.setattr(client_attempt.ClientAttempt, "require_unused_draw", lambda *_: None)
    other.invite()


def test_a_draw_on_which_an_attempt_has_begun_serves_no_other_run(server):
    server.invite()  # and no vector is asked for: the server has seen who answers
    assert vectors(server) == 0
    other = replace(server, run="another run")
    other.announce(VICTIM)
    with pytest.raises(PeerError, match="draw 0 of this roster was used before"):
        other.invite()


def test_under_once_a_client_sends_one_vector(tmp_path, monkeypatch):
    plan = make_plan(5, rounds=1, population=10, sampling=Sampling.ONCE, spare=0)
    server = MaliciousServer(tmp_path, plan, enrol(tmp_path, 10))
    server.announce()
    session = server.session(block=0)
    client = session.cohort[0]
    server.invite(client, number=0, attempt=0, draw=0)
    server.invite(client, number=0, attempt=1, draw=0)  # nothing was sent: another attempt may ask
    config = config_of(server, client)
    note = {"session": "other", "roster": session.roster_digest.hex(), "draw": 0}
    assert ClientAccount(config.log, config.budget).charge(plan, "another run", 0, 0, note) == 0
    with pytest.raises(PeerError, match="draw 0 of this roster was used before"):
        server.invite(client, number=0, attempt=2, draw=0)
    monkeypatch.setattr(client_attempt.ClientAttempt, "require_unused_draw", lambda *_: None)
    server.invite(client, number=0, attempt=2, draw=0)


def test_a_runs_draws_are_settled_when_it_is_announced(server):
    moved = replace(server, first_draw=7)
    with pytest.raises(PeerError, match="first draw under one roster is 0, got 7"):
        moved.announce(VICTIM)
    with pytest.raises(PeerError, match="is of draw 0, got 7"):
        moved.invite(draw=7)


def test_a_run_goes_on_under_a_newer_roster_when_it_is_announced_again(server):
    server.attempt()
    (server.directory / "draws").rename(server.directory / "old draws")
    later = sign_roster(server.directory, {}, server.roster.roster, make_draws(server.directory / "draws", 6))
    newer = replace(server, roster=later, first_draw=3)
    newer.announce()
    (server.directory / "draws").rename(server.directory / "new draws")
    (server.directory / "old draws").rename(server.directory / "draws")
    with pytest.raises(PeerError):
        server.invite(number=1)  # under the roster before
    (server.directory / "new draws").replace(server.directory / "draws")
    assert newer.attempt(1).vector.any()


# What is trained


def test_a_task_for_another_layout_is_refused_at_no_cost(server, monkeypatch):
    other = Layout((ArraySpec("something-else", (16,), "float32"),))
    with pytest.raises(TooFewClients):
        server.attempt(task=encode_task(other, {}))
    assert "layout that the run was announced with" in str(server.refusals[VICTIM])
    assert vectors(server) == 0
    monkeypatch.setattr(private_client, "decode_task", twin(decode_task, "if task[4 :", "if () and task[4 :"))
    server.attempt(attempt=1, task=encode_task(other, {}))
    assert vectors(server) == 1


def test_a_model_of_another_length_is_refused_and_costs_nothing(server):
    server.model = b"short"
    with pytest.raises(TooFewClients):
        server.attempt()
    assert "a model of 16 parameters at 32 bits must have 64 bytes, got 5" in str(server.refusals[VICTIM])
    assert vectors(server) == 0


def test_a_plan_that_does_not_fit_its_layout_is_refused(server):
    other = replace(server, run="another", layout=Layout((ArraySpec("params", (17,), "float32"),)))
    with pytest.raises(PeerError, match="a plan must have the dimension of its layout"):
        other.announce(VICTIM)


def test_a_run_allowed_under_one_roster_does_not_continue_under_another(server):
    """What the policy has allowed was worked out for the population and the draws of that roster."""
    roster = server.roster.roster
    later = sign_roster(server.directory, {}, roster, make_draws(server.directory / "later draws", 6))
    accept_roster(config_of(server), later.data)
    (server.directory / "draws").rename(server.directory / "old draws")
    (server.directory / "later draws").rename(server.directory / "draws")
    newer = replace(server, roster=later)
    with pytest.raises(PeerError, match="was announced under another roster: it must be announced again"):
        newer.invite()


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\n{}", b"garbage\n" * 3])
def test_a_damaged_run_must_be_announced_again_and_blocks_nothing_else(server, damage, caplog):
    other = replace(server, run="another run", first_draw=20)
    other.announce(VICTIM)
    AcceptedRuns(config_of(server).directory).file("a run").write_bytes(damage)
    with pytest.raises(PeerError, match="run a run was never announced"):
        server.invite()
    assert "is damaged and ignored: its run must be announced again" in caplog.text
    other.invite()
    server.announce(VICTIM)
    server.invite()


def test_nothing_of_an_attempt_prints_its_secrets(server):
    server.invite()
    (file,) = (config_of(server).directory / "states").glob("*.state")
    kept = SavedPhase.decode(file.read_bytes())
    printed = repr(client_attempt.ClientAttempt.resume(config_of(server), kept))
    secrets = kept.state, config_of(server).secret
    assert all(str(secret)[2:-1] not in printed and secret.hex() not in printed for secret in secrets)


# What is trained: the same for all


@pytest.mark.parametrize("own", [{"local-epochs": True}, {"local-epochs": 1.0}, {}, {"local-epochs": 1, "lr": 2}])
def test_the_configuration_of_the_run_is_compared_by_its_text(server, own):
    task = encode_task(server.layout, {}, {"local-epochs": 1})
    decode_task(task, server.layout, {"local-epochs": 1})
    with pytest.raises(PeerError, match="configuration of the run"):
        decode_task(task, server.layout, own)
    with pytest.raises(PeerError, match="configuration of the run"):  # a task that states none
        decode_task(encode_task(server.layout, {}), server.layout, {"local-epochs": 1})


def test_other_names_for_other_clients_give_no_sum(server, monkeypatch):
    """The layout is in the context: clients to which another one was announced do not cancel with the victim."""
    server.run, server.first_draw = "another run", 20
    other = replace(server, layout=Layout((ArraySpec("something-else", (16,), "float32"),)))
    server.train = lambda client: add_one(client) if client == VICTIM else lambda arrays, settings: arrays
    server.announce(VICTIM)
    other.announce(*server.roster.roster.clients[1:])
    task = encode_task(server.layout, {})
    with pytest.raises(TooFewClients):
        server.attempt(task=task)
    assert "layout that the run was announced with" in str(server.refusals[1])
    assert VICTIM not in server.refusals
    monkeypatch.setattr(private_client, "decode_task", twin(decode_task, "if task[4 :", "if () and task[4 :"))
    assert shows_only(VICTIM, server.sum_of_updates(1, task))


def two_runs_on_one_draw(server: MaliciousServer) -> None:
    """Begin a second run on the draw of a partition before the first has asked for its vectors."""
    other = replace(server, run="another run")
    other.announce()
    at_request(server, MessageKind.MASK_REQUEST, lambda _: other.attempt())
    server.attempt()


@pytest.fixture
def partition(tmp_path):
    """Five clients of a partition: each sends one vector."""
    plan = make_plan(5, rounds=1, sampling=Sampling.ONCE, spare=0)
    made = MaliciousServer(tmp_path, plan, enrol(tmp_path, 5))
    made.announce()
    return made


def test_under_once_a_draw_gets_one_vector_whatever_has_begun_on_it(partition):
    with pytest.raises(TooFewClients):
        two_runs_on_one_draw(partition)
    assert "draw 0 of this roster was used before" in str(partition.refusals[VICTIM])
    assert vectors(partition) == 1


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
                assert b'"attempt":1' in (where / "client-0" / "log").read_bytes()
                assert (where / "anchor-0" / "head").read_bytes() == (
                    anchor_in(tmp_path, VICTIM) / "head"
                ).read_bytes()


def test_the_position_in_an_advert_counts_its_own_attempt(server):
    before = config_of(server).log.read().head.seq
    shown = {}
    server.attempt(without=())
    for client in (1, 2):
        shown[client] = Positions(
            directory_of(server.directory, client) / "peers", server.roster.roster.keys
        ).latest()
    assert shown[1][VICTIM].count == shown[2][VICTIM].count == before + 1


def test_a_row_after_the_advert_hides_a_rollback_by_one_attempt(server, monkeypatch):
    """With the position of before the row, the backup's chain holds all that anyone was shown."""
    backup = back_up(server)
    memory = client_attempt.memory_of

    def early(config, enrolment, history, colluders):
        last = history.rows[-2].head if history.rows[-1].entry is Entry.BEGUN else history.head
        signed = sign_position(enrolment.secret, config.authority, config.client, last.seq, last.hash)
        return replace(memory(config, enrolment, history, colluders), position=signed)

    monkeypatch.setattr(client_attempt, "memory_of", early)
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
    log = directory_of(server.directory, VICTIM) / "log"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-2]))  # the second attempt and its vector
    with pytest.raises(PeerError, match="its own log says why"):
        server.invite(attempt=2)  # the anchor
    monkeypatch.setattr(client_log, "require_anchored", lambda *_: None)
    server.attempt(attempt=2)
    assert noticed(server)


# What is noticed: directory and anchor restored together


def test_an_anchor_that_was_restored_with_its_directory_notices_nothing(server):
    backup = back_up(server)
    server.attempt()
    restore(server, backup)
    config_of(server).log.read()
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
    monkeypatch.setattr(checks, "require_in_chain", lambda *_: None)
    server.invite(attempt=1)


def test_peers_notice_a_restored_client_before_it_makes_a_vector(server):
    backup = back_up(server)
    server.attempt()
    restore(server, backup)
    server.attempt(attempt=1)  # the server lies: it remembers nobody
    assert "rolled back or cloned" in str(server.refusals[VICTIM])
    assert noticed(server)
    config_of(server).log.adopt({"carried": NOTHING})
    assert vectors(server) == 0
    server.attempt(attempt=2)  # the declaration holds what peers remember
    assert VICTIM not in server.refusals
    assert vectors(server) == 1


def test_without_claims_a_restored_client_sends_a_second_vector(server, monkeypatch):
    backup = back_up(server)
    server.attempt()
    restore(server, backup)
    monkeypatch.setattr(checks, "require_in_chain", lambda *_: None)
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
    later = sign_roster(server.directory, {}, roster, DrawCommitment(roster.depth, bytes(32)), shown=floor)
    with pytest.raises(PeerError, match="the authority has seen position"):
        replace(server, roster=later).announce(VICTIM)


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
    later = sign_roster(
        server.directory, {}, roster, DrawCommitment(roster.depth, bytes(32)), shown=latest(server)
    )
    server.attempt(attempt=1)
    assert noticed(server) == is_noticed
    if not is_noticed:
        assert vectors(server) == 1  # of the two that it has sent
        accept_roster(config_of(server), later.data)  # the floor knows the advert only


def test_a_client_restored_within_each_attempt_keeps_its_whole_cap(server):
    for sent in range(server.plan.max_participations):
        at_request(server, MessageKind.MASK_REQUEST, lambda _, name=f"backup {sent}": back_up(server, name))
        server.attempt(sent // server.plan.attempts_per_round, sent % server.plan.attempts_per_round)
        assert VICTIM not in server.refusals
        server.remembered = latest(server)
        restore(server, server.directory / f"backup {sent}")
    assert vectors(server) == 0


def test_secrets_restored_since_boot_answer_a_mask_request_again(server):
    """Two vectors under one mask: their difference is the difference of two noises, and one of them is charged."""
    answers = []

    def ask_twice(frame: bytes) -> None:
        backup = back_up(server)
        answers.append(server.ask_frame(VICTIM, frame))
        restore(server, backup)
        answers.append(server.ask_frame(VICTIM, frame))
        restore(server, backup)

    at_request(server, MessageKind.MASK_REQUEST, ask_twice)
    server.attempt()
    session, ring = server.session(), server.plan.ring
    context = answers[0][HEADER_BYTES : HEADER_BYTES + messages.CONTEXT_BYTES]
    rank = session.rank(VICTIM)
    first, second = (messages.decode_masked_vector(session, rank, context, frame)[1] for frame in answers)
    subtract_into(ring, first, second)
    assert 0 < np.abs(ring.center(first)).max() < ring.modulus // 4  # no mask is left in it
    assert vectors(server) == 1  # of the three that it has made


# What is noticed: clones, new beginnings, new names


def test_server_and_peers_notice_clones(server, tmp_path):
    clone = back_up(server, "another machine")
    shutil.rmtree(tmp_path / "another machine" / "anchor")
    twin = clone / "directory"
    text = (twin / "client.toml").read_text()
    (twin / "client.toml").write_text(text.replace(str(anchor_in(tmp_path, VICTIM)), str(clone / "anchor")))
    shutil.copytree(anchor_in(tmp_path, VICTIM), clone / "anchor")
    server.attempt()
    server.moved[VICTIM] = twin
    server.remembered = latest(replace(server, moved={}))
    with pytest.raises(PeerError, match="rolled back or cloned"):
        server.invite(attempt=1)  # the second's first invitation
    read_client_config(twin).log.adopt({"carried": NOTHING})
    server.remembered = {}
    server.attempt(attempt=2)
    assert server.refusals == {}
    del server.moved[VICTIM]
    server.attempt(number=1)  # back to the first: a peer has met both
    assert noticed(server)


def test_a_floor_tells_clones_apart_only_if_it_is_later_than_the_copy(server, tmp_path):
    roster, before = server.roster.roster, latest(server)
    shutil.copytree(directory_of(tmp_path, VICTIM), tmp_path / "clone" / "directory")
    shutil.copytree(anchor_in(tmp_path, VICTIM), tmp_path / "clone" / "anchor")
    settings = tmp_path / "clone" / "directory" / "client.toml"
    text = settings.read_text()
    settings.write_text(text.replace(str(anchor_in(tmp_path, VICTIM)), str(tmp_path / "clone" / "anchor")))
    server.attempt()
    second = sign_roster(tmp_path, {}, roster, None, shown=before)
    third = sign_roster(tmp_path, {}, second.roster, None, shown=latest(server))
    clone = read_client_config(tmp_path / "clone" / "directory")
    accept_roster(clone, second.data)
    accept_roster(config_of(server), second.data)
    accept_roster(config_of(server), third.data)
    with pytest.raises(PeerError, match="the authority has seen position"):
        accept_roster(clone, third.data)


def test_two_clones_on_one_machine_are_noticed_by_their_anchor(server, tmp_path):
    shutil.copytree(directory_of(tmp_path, VICTIM), tmp_path / "clone")
    server.attempt()
    server.moved[VICTIM] = tmp_path / "clone"
    with pytest.raises(PeerError, match="its own log says why"):
        server.invite(attempt=1)


def begin_again(server: MaliciousServer, client: int) -> None:
    """An owner keeps nothing but the key, and begins with an empty log."""
    directory, anchor = directory_of(server.directory, VICTIM), anchor_in(server.directory, VICTIM)
    key = (directory / "key").read_bytes()
    shutil.rmtree(directory)
    shutil.rmtree(anchor)
    directory.mkdir(mode=0o700)
    (directory / "key").touch(mode=0o600)
    (directory / "key").write_bytes(key)
    init_client(directory, client, server.roster.roster.authority, anchor)
    write_settings(server.directory, VICTIM, server.roster.roster.authority, {})


def test_an_owner_who_deletes_everything_is_noticed_until_it_declares(server):
    server.attempt()
    server.remembered = latest(server)
    begin_again(server, VICTIM)
    config_of(server).log.read()  # the anchor knows nothing
    server.announce(VICTIM)
    with pytest.raises(PeerError, match="rolled back or cloned"):
        server.invite(attempt=1)
    config_of(server).log.adopt({"carried": NOTHING})
    server.invite(attempt=2)  # a false declaration is believed
    assert [body["carried"] for body in config_of(server).log.read().bodies(Entry.DECLARATION)] == [NOTHING]


def test_the_same_data_under_a_new_identity_is_noticed_by_nobody(tmp_path):
    signed = enrol(tmp_path, 5)
    server = MaliciousServer(tmp_path, make_plan(rounds=4), signed)
    server.announce()
    server.attempt()
    public = init_client(directory_of(tmp_path, 9), 9, signed.roster.authority, anchor_in(tmp_path, 9))
    write_settings(tmp_path, 9, signed.roster.authority, {})
    committed = DrawCommitment(signed.roster.depth, signed.roster.root)
    renamed = sign_roster(
        tmp_path, {9: public}, replace(signed.roster, root=bytes(32)), committed, removed=frozenset({VICTIM})
    )
    again = MaliciousServer(tmp_path, make_plan(rounds=4), renamed, run="another run", first_draw=20)
    again.announce()
    again.attempt()
    assert again.refusals == {}
    assert vectors(again, 9) == 1


def test_strangers_and_a_lying_server_miss_a_restored_client(tmp_path):
    """The last row of the table: documented, and true."""
    plan = make_plan(
        5, rounds=1, population=9, sampling=Sampling.FIXED, attempts_per_round=64, max_participations=1
    )
    server = MaliciousServer(tmp_path, plan, enrol(tmp_path, 9))
    server.announce()
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
