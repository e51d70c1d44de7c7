"""Clients of the lattice protocol in real directories: rows, keys, and what a lying server or a crash gets."""

import os
import shutil
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from d2pfed.accounting import Sampling
from d2pfed.deploy import attempt as client_attempt
from d2pfed.deploy import lattice as client_lattice
from d2pfed.deploy import state
from d2pfed.deploy.account import ClientSpending
from d2pfed.deploy.config import read_client_config
from d2pfed.deploy.federation import ParticipationLog, require_lasting
from d2pfed.deploy.layout import encode_task
from d2pfed.deploy.requests import RequestKind, RunAcceptance
from d2pfed.deploy.rosters import accept_head, current_head
from d2pfed.deploy.state import SavedPhase
from d2pfed.deploy.transport import Deadlines
from d2pfed.errors import ConfigError, D2PFedError, PeerError, TooFewClients
from d2pfed.ledger.client_log import Entry
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import Protocol
from d2pfed.round import rotation_seed
from d2pfed.runs.directory import RunDirectory
from d2pfed.secagg import lattice
from d2pfed.secagg.lattice import checks, messages
from d2pfed.secagg.roster import sign_position
from d2pfed.secagg.wire import MessageKind, kind_of
from support.crash_moments import Disk, lay_out
from support.enrolled_clients import anchor_in, directory_of, enrol, sign_roster
from support.malicious_server import LAYOUT, MODEL, MaliciousServer, add_one
from support.small_committees import CLIENTS, MEMBERS, keep_keys_in, make_lattice_plan, shrink

TASK = encode_task(LAYOUT, {"server-round": 1})


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    shrink(monkeypatch)


@pytest.fixture(scope="module")
def enrolled(tmp_path_factory):
    """28 enrolled clients, copied for each test."""
    directory = tmp_path_factory.mktemp("enrolled")
    return directory, enrol(directory, CLIENTS)


@pytest.fixture
def server(tmp_path, enrolled):
    made, roster = enrolled
    return serve(tmp_path, made, roster)


def serve(directory, made, roster, **plan):
    shutil.copytree(made, directory, dirs_exist_ok=True)
    for client in range(CLIENTS):
        file = directory_of(directory, client) / "client.toml"
        file.write_text(file.read_text().replace(str(made), str(directory)))
    keep_keys_in(directory)
    server = MaliciousServer(directory, make_lattice_plan(**plan), roster)
    server.announce()
    return server


def config_of(server, client):
    return read_client_config(directory_of(server.directory, client))


def rows(server, client, entry):
    return config_of(server, client).log.read().bodies(entry)


class Steps:
    """The server's phases of one attempt, one at a time; requests are those that clients would be sent."""

    def __init__(self, server, number=0, attempt=0, **invitations):
        self.server, self.session = server, server.session(number, attempt)
        opening = server.opening(self.session.draw)
        brought = {"roster": server.enrolled, "opening": opening} | invitations
        self.phase = lattice.Convening(lattice.Invitations(session=self.session, **brought))
        self.refused = {}

    def run(self, without=(), change=lambda _client, answer: answer):
        for client in self.phase.outbox:
            if client in without:
                continue
            try:
                answer = change(client, self.server.ask_frame(client, self.phase.outbox[client]))
                self.phase.receive(client, answer)
            except D2PFedError as error:
                self.refused[client] = error
        return self

    def vouch(self, **options):
        self.phase = self.phase.close()
        return self.run(**options)

    def contribute(self, **options):
        if isinstance(self.phase, lattice.Convening):
            self.vouch()
        self.phase = self.phase.close(TASK, lattice.model_digest(self.server.model))
        return self.run(**options)

    def agree(self, **options):
        self.phase = self.phase.close(Entropy.system())
        return self.run(**options)

    def open(self, **options):
        self.phase = self.phase.close()
        return self.run(**options)


def decoded(server, opened, number=0, attempt=0):
    seed = rotation_seed(server.session(number, attempt))
    return server.plan.codec.decode(server.plan.ring.center(opened.vector), seed, 1)


def test_a_cohort_speaks_once_and_a_committee_opens_its_sum(server):
    steps = Steps(server).run().contribute().agree().open()
    session = steps.session
    found = decoded(server, steps.phase.close())
    assert not steps.refused
    assert len(session.members) == MEMBERS
    assert np.abs(found - 1).max() < 0.5
    for client in session.cohort:
        is_member = client in session.members
        counts = {entry: len(rows(server, client, entry)) for entry in (Entry.BEGUN, Entry.CHARGE, Entry.SIGNED)}
        assert counts == {Entry.BEGUN: is_member, Entry.CHARGE: 1, Entry.SIGNED: is_member}
        assert not (directory_of(server.directory, client) / "states").exists() or not list(
            (directory_of(server.directory, client) / "states").glob("*.state")
        )


def test_the_next_round_is_another_session_and_another_row(server):
    for number in range(2):
        found = decoded(server, server.attempt(number), number)
        assert np.abs(found - 1).max() < 0.5
    assert len(ClientSpending.of(config_of(server, 3).log.read()).releases) == 2


def test_a_second_request_for_the_same_attempt_gets_no_vector(server, monkeypatch):
    steps = Steps(server).run().contribute()
    client = steps.session.cohort[5]
    with pytest.raises(PeerError, match="is stale: this client has sent its vector"):
        server.ask_frame(client, steps.phase.outbox[client])
    assert len(rows(server, client, Entry.CHARGE)) == 1
    monkeypatch.setattr(client_attempt, "require_unsent", lambda *_: None)
    with pytest.raises(PeerError, match="was used before"):  # where cohorts are drawn, the draw is a second guard
        server.ask_frame(client, steps.phase.outbox[client])
    monkeypatch.setattr(client_attempt.ClientAttempt, "require_unused_draw", lambda *_: None)
    assert kind_of(server.ask_frame(client, steps.phase.outbox[client])) == MessageKind.LATTICE_CONTRIBUTION


def test_no_attempt_before_the_last_gets_a_vector(server):
    earlier = Steps(server).run().vouch()
    assert not Steps(server, attempt=1).run().contribute().refused
    phase, client = earlier.phase.close(TASK, lattice.model_digest(MODEL)), earlier.session.cohort[5]
    with pytest.raises(PeerError, match="attempt 0 of run a run is stale: this client has sent its vector"):
        server.ask_frame(client, phase.outbox[client])


def test_only_the_committee_that_a_client_computes_is_convened(server):
    steps = Steps(server)
    stranger = next(client for client in steps.session.cohort if client not in steps.session.members)
    with pytest.raises(PeerError, match="not in the committee that it has computed"):
        server.ask_frame(stranger, server.invitation(stranger))
    assert not rows(server, stranger, Entry.BEGUN)


def test_another_model_than_the_one_named_is_refused_at_no_cost(server):
    steps = Steps(server).run().vouch()
    phase = steps.phase.close(TASK, lattice.model_digest(MODEL))
    server.model = bytes(len(MODEL) - 4) + b"1234"
    with pytest.raises(PeerError, match="must be the one that the request names"):
        server.ask_frame(0, phase.outbox[0])
    assert not rows(server, 0, Entry.CHARGE)


def test_training_that_fails_is_zero_and_noise(server):
    def failing(client):
        def train(arrays, settings):
            raise SystemExit("records")

        return train if client < 2 else add_one(client)

    server.train = failing
    found = decoded(server, server.attempt())
    assert np.abs(found[:2]).max() < 0.5 < found[2:16].min()
    assert len(rows(server, 0, Entry.CHARGE)) == 1


def test_a_member_signs_one_set_of_survivors_whatever_is_restored(server, monkeypatch):
    """Its state of before is put back, and it is shown the survivors without one client."""
    steps = Steps(server).run().contribute()
    contributing, member = steps.phase, steps.session.members[0]
    keys = server.directory / "keys"
    shutil.copytree(keys, server.directory / "backup")
    steps.agree()
    other = without_one(contributing, steps)
    shutil.rmtree(keys)
    shutil.copytree(server.directory / "backup", keys)
    with pytest.raises(PeerError, match="signs one set of survivors"):
        server.ask_frame(member, other)
    shutil.rmtree(keys)
    shutil.copytree(server.directory / "backup", keys)
    monkeypatch.setattr(client_lattice.lattice, "require_one_statement", lambda *_: None)
    answer = server.ask_frame(member, other)
    assert isinstance(messages.decode_signature(steps.session, steps.session.rank(member), answer), bytes)


def without_one(contributing, steps):
    """The request for signatures of all survivors but the last."""
    session, signed = steps.session, dict(contributing._signed)
    signed.pop(max(signed))
    shown = messages.Survivors(contributing._request.context, bytes(32), signed)
    return messages.encode_survivors(session, session.rank(session.members[0]), shown)


def test_a_refusal_ends_a_members_part(server):
    steps = Steps(server).run().contribute()
    contributing, member = steps.phase, steps.session.members[0]
    shown = messages.Survivors(contributing._request.context, bytes(32), {})
    with pytest.raises(PeerError, match="clients must be left"):
        server.ask_frame(member, messages.encode_survivors(steps.session, steps.session.rank(member), shown))
    steps.agree()
    assert set(steps.refused) == {member}


def test_a_member_that_has_opened_keeps_no_key(server):
    steps = Steps(server).run().contribute().agree()
    member = steps.session.members[0]
    config = config_of(server, member)

    key = kept_by(steps, config).secret
    assert len(key) == 32
    opening = steps.open().phase
    assert kept_by(steps, config).secret == b""
    again = server.ask_frame(member, opening.outbox[member])  # the same bytes may go again
    assert again == kept_by(steps, config).opening
    assert not files_with(server, key)


def test_a_member_killed_while_it_signs_keeps_no_key_once_it_has_opened(server, monkeypatch):
    """What the killed process was writing still has the key, and the one that goes on has another number."""
    steps = Steps(server).run().contribute()
    contributing, member = steps.phase, steps.session.members[0]
    config, replace_path = config_of(server, member), Path.replace
    key = kept_by(steps, config).secret

    def killed(draft, file):
        if file.parent.parent == server.directory / "keys":
            raise KeyboardInterrupt
        return replace_path(draft, file)

    shown = contributing.close(Entropy.replay(b"server"))
    with monkeypatch.context() as process:
        process.setattr(os, "getpid", lambda: 1)
        process.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            server.ask_frame(member, shown.outbox[member])
    assert files_with(server, key) == 2
    steps.phase = shown
    steps.run().open()
    assert not steps.refused
    assert not files_with(server, key)


def kept_by(steps, config):
    """What a member has kept."""
    data = client_lattice.member_keys(config, steps.session.digest).file.read(lambda _: True)
    return lattice.Member.decode(steps.session, config.client, SavedPhase.decode(data).state)


def files_with(server, key) -> int:
    return sum(key in file.read_bytes() for file in server.directory.rglob("*") if file.is_file())


def test_nothing_of_an_attempt_is_answered_after_its_time(server, monkeypatch):
    steps = Steps(server).run().contribute()
    with monkeypatch.context() as later:
        clock = state.time.time
        later.setattr(state.time, "time", lambda: clock() + 3600)
        steps.agree()
        assert set(steps.refused) == set(steps.session.members)
        Steps(server, attempt=1).run()
        config = config_of(server, steps.session.members[0])
        keys = client_lattice.member_keys(config, steps.session.digest)
        assert not keys.holds_any()  # erased by the next attempt


def test_at_its_cap_a_sampled_client_sends_noise_and_moves_on(tmp_path, enrolled):
    server = serve(tmp_path, *enrolled, sampling=Sampling.FIXED, max_participations=1, rounds=3)
    server.attempt(0)
    before = config_of(server, 0).log.read().head.seq
    found = decoded(server, server.attempt(1), 1)
    assert np.abs(found).max() < 0.5
    assert config_of(server, 0).log.read().head.seq > before
    assert len(rows(server, 0, Entry.CHARGE)) == 1
    silent = [row for row in rows(server, 0, Entry.BEGUN) if row.get("silent")]
    assert [row["round"] for row in silent] == [1]


def test_a_member_at_its_cap_begins_each_attempt_once(monkeypatch):
    """It has two rows of each; counted twice, they would end an honest run of one attempt a round halfway."""
    monkeypatch.setattr(client_attempt, "RESTARTS", 0)
    plan = make_lattice_plan(6, sampling=Sampling.FIXED, max_participations=1, spare=0, attempts_per_round=1)

    def history(sessions):
        rows = [{"run": "a run", "session": str(place // 2), "time": 0} for place in range(2 * sessions)]
        return SimpleNamespace(bodies=lambda entry: rows if entry is Entry.BEGUN else [])

    client_attempt.require_beginnings_left(history(5), "a run", plan)
    with pytest.raises(PeerError, match="begun 6 attempts here, its plan allows at most 6"):
        client_attempt.require_beginnings_left(history(6), "a run", plan)


def test_a_client_at_its_cap_is_silent_as_often_as_may_come_to_nothing(tmp_path, enrolled, monkeypatch):
    """Silence costs nobody anything, and leaves a row in a client's log for ever."""
    server = serve(tmp_path, *enrolled, sampling=Sampling.FIXED, max_participations=1)
    server.attempt(0)
    monkeypatch.setattr(client_attempt, "UNCHARGED_A_DAY", 1)
    with pytest.raises(TooFewClients):
        server.attempt(1)
    both = set(server.session(0).members) & set(server.session(1).members)
    refusals = {str(server.refusals[client]) for client in both}
    assert refusals == {"1 attempts failed here within a day, at most 1 may"}
    assert not [row for client in both for row in rows(server, client, Entry.BEGUN) if row.get("silent")]


def test_other_runs_do_not_push_out_one_that_a_client_has_spoken_in(server, monkeypatch):
    """An ordinary client begins nothing: its charge is what shows that a run is under way."""
    server.attempt(0)
    client = next(iter(set(range(CLIENTS)) - set(server.session(0).members)))
    assert not rows(server, client, Entry.BEGUN)
    monkeypatch.setattr(state, "MAX_RUNS", 2)
    for run in ("another", "a third"):
        replace(server, run=run).announce(client)
    runs = state.AcceptedRuns(directory_of(server.directory, client))
    runs.terms("a run")
    with pytest.raises(PeerError, match="never announced"):
        runs.terms("another")


def test_a_partition_with_a_committee_needs_its_roster_for_one_exchange_more():
    deadlines = Deadlines(joining=1.0, keys=100.0, training=1.0)
    roster = SimpleNamespace(serial=1, expires=time.time() + 450)
    plan = SimpleNamespace(rounds=1, sampling=SimpleNamespace(method=Sampling.ONCE), committee=None)
    require_lasting(roster, plan, deadlines)
    plan.committee = "some"
    with pytest.raises(ConfigError, match="1 rounds may take 502 s"):
        require_lasting(roster, plan, deadlines)


def test_a_draw_serves_one_run_only(tmp_path, enrolled):
    server = serve(tmp_path, *enrolled, sampling=Sampling.FIXED, max_participations=2)
    server.attempt(0)
    server.run = "another run"
    server.announce()
    with pytest.raises(TooFewClients):
        server.attempt(0)
    assert {"draw 0 of this roster was used before"} == {str(error) for error in server.refusals.values()}


def test_a_client_put_back_to_before_its_charge_is_noticed(server):
    """By the server's memory, which the client sees before it is charged again."""
    steps = Steps(server).run()
    client = steps.session.cohort[3]
    backup = server.directory / "before"
    shutil.copytree(directory_of(server.directory, client), backup / "home")
    shutil.copytree(anchor_in(server.directory, client), backup / "anchor")
    steps.contribute()
    positions = dict(steps.phase.positions)
    for place, name in ((directory_of, "home"), (anchor_in, "anchor")):
        shutil.rmtree(place(server.directory, client))
        shutil.copytree(backup / name, place(server.directory, client))
    again = Steps(server, attempt=1, remembered=positions).run(without=[client]).contribute()
    assert "rolled back or cloned" in str(again.refused[client])


def test_members_do_not_sign_beside_a_client_that_went_back(server, monkeypatch):
    """A server that forgets: only members that have met the client later notice it."""
    Steps(server).run().contribute().agree()
    steps = Steps(server, attempt=1).run()
    client = steps.session.cohort[3]
    config, position = config_of(server, client), client_attempt.ClientAttempt.position
    first = config.log.read().rows[0].head
    stale = sign_position(config.secret, config.authority, client, first.seq, first.hash)

    def shown(self):
        return stale if self.config.client == client else position(self)

    monkeypatch.setattr(client_attempt.ClientAttempt, "position", shown)
    monkeypatch.setattr(checks, "require_after_charge", lambda *_: None)
    steps.contribute().agree()
    assert set(steps.phase.claims) == {client}
    with pytest.raises(TooFewClients, match="must sign the survivors"):
        steps.phase.close()


def test_a_position_from_before_the_charge_is_never_signed(server, monkeypatch):
    monkeypatch.setattr(client_attempt.ClientAttempt, "position", lambda self: self.memory().position)
    steps = Steps(server).run().contribute()
    assert {str(error) for error in steps.refused.values()} == {
        "a contribution must be signed with the position after its charge"
    }


def test_a_member_whose_roster_has_changed_counts_as_missing(server):
    steps = Steps(server).run()
    member = steps.session.members[2]
    config = config_of(server, member)
    newer = sign_roster(server.directory, {}, server.roster.roster, None)
    accept_head(config, newer.published.head, newer.published.slip(member))
    steps.contribute().agree().open()
    assert set(steps.refused) == {member}
    assert np.abs(decoded(server, steps.phase.close()) - np.array([1.0] * 16)).max() < 1.5


def test_another_protocols_request_is_refused_under_a_lattice_plan(server):
    config = config_of(server, 0)
    with pytest.raises(PeerError, match="accepted with the lattice protocol"):
        client_attempt.agreed_plan(config, current_head(config)[0], server.run, 0, Protocol.STANDING)


REQUESTS = ("convene", "vouch", "contribute", "agree", "open")


def crash_everywhere(server, step, tmp_path, monkeypatch):
    """Have one member answer one request while all system calls are watched; at each moment ask it again.

    Yields what left before the crash, what left after it, and the client's directory then.
    """
    steps = Steps(server)
    member = steps.session.members[1]
    before = {"convene": [], "vouch": ["run"], "contribute": ["run", "vouch"], "agree": ["run", "contribute"]}
    for name in before.get(step, ["run", "contribute", "agree"]):
        getattr(steps, name)()
    if step == "contribute":
        steps.phase = steps.phase.close(TASK, lattice.model_digest(server.model))
    elif step == "agree":
        steps.phase = steps.phase.close(Entropy.system())
    elif step in ("vouch", "open"):
        steps.phase = steps.phase.close()
    asked, sent = steps.phase.outbox[member], []
    root = tmp_path / "watched"
    root.mkdir()
    (server.directory / "keys").mkdir(exist_ok=True)
    for name in (f"client-{member}", f"anchor-{member}", "keys"):
        shutil.copytree(server.directory / name, root / name)
    move(server.directory, root, member)
    watched = MaliciousServer(root, server.plan, server.roster)
    with monkeypatch.context() as patched:
        disk = Disk(root, patched, lambda: len(sent))
        sent.append(watched.ask_frame(member, asked))
        disk._note("after sending")
    for number, moment in enumerate(disk.moments):
        place = lay_out(tmp_path / f"kill-{number}", moment.after_kill)
        move(root, place, member)
        again = MaliciousServer(place, server.plan, server.roster)
        after = []
        with suppress(D2PFedError):
            after.append(again.ask_frame(member, asked))
        yield moment.call, sent[: moment.sent], after, again, member


def move(old, new, client):
    """Make a copy of a client at home in its new place: settings name paths, keys lie where they say."""
    file = directory_of(new, client) / "client.toml"
    file.write_text(file.read_text().replace(str(old), str(new)))
    key_places = [
        client_lattice.member_keys(read_client_config(directory_of(each, client)), bytes(32)).file._directory
        for each in (old, new)
    ]
    brought = new / "keys" / key_places[0].name
    if brought.exists():
        key_places[1].rmdir()
        brought.rename(key_places[1])


@pytest.mark.parametrize("step", REQUESTS)
def test_a_member_killed_at_any_moment_says_one_thing_at_most(server, step, tmp_path, monkeypatch):
    entry = {"convene": Entry.BEGUN, "contribute": Entry.CHARGE, "agree": Entry.SIGNED}.get(step)
    answered = 0
    for call, before, after, again, member in crash_everywhere(server, step, tmp_path, monkeypatch):
        left = {*before, *after}
        assert len(left) <= 1, f"{call}: two answers"
        if entry is not None:
            found = rows(again, member, entry)
            assert len(found) == 1 or (not left and not found), f"{call}: an answer without its row"
        answered += bool(after)
    assert answered


def test_a_client_that_is_greeted_says_who_it_is_and_signs_only_with_its_slip(server):
    announced, client = server.announcement(), 3
    before = config_of(server, client).log.read()
    greeted = RunAcceptance.decode(server.ask(client, RequestKind.ANNOUNCEMENT, announced.greeting.encode()))
    assert greeted == RunAcceptance(client, b"")
    assert config_of(server, client).log.read() == before
    for slip in (b"", server.roster.published.slip(client + 1), bytes(300)):
        with pytest.raises(PeerError):
            server.ask(client, RequestKind.ANNOUNCEMENT, replace(announced, slip=slip).encode())
    whole = replace(announced, roster=server.roster.data, slip=server.roster.published.slip(client))
    with pytest.raises(PeerError):  # a whole roster is no head
        server.ask(client, RequestKind.ANNOUNCEMENT, whole.encode())
    server.announce(client)
    assert (directory_of(server.directory, client) / "roster-head").exists()


def test_suspects_are_left_out_of_one_attempt(tmp_path):
    """Liars in a committee can bring honest clients under suspicion: that must not cost them the run."""
    log = ParticipationLog(RunDirectory(tmp_path, ExitStack()))
    log.note(blamed=[3])
    log.suspect([5, 8])
    assert log.left_out() == {3, 5, 8}
    assert log.left_out() == log.excluded == {3}
