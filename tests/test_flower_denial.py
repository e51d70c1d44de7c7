"""A server that wants to fill a client's disk or to keep it out of later runs: what it can leave there is bounded."""

import os
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from d2pfed.deploy import attempt as client_attempt
from d2pfed.deploy import standing as client_standing
from d2pfed.deploy import state as client_state
from d2pfed.deploy import state as local_arrays
from d2pfed.deploy.config import read_client_config
from d2pfed.deploy.layout import Layout, encode_task
from d2pfed.deploy.state import AcceptedRuns, LocalArrays, RunTerms
from d2pfed.errors import LedgerError, PeerError, TooFewClients
from d2pfed.ledger import client_log, keystore
from d2pfed.ledger.client_log import Entry
from d2pfed.numerics.model_bytes import encode_model
from d2pfed.plan import Policy
from d2pfed.round import epoch_of
from d2pfed.secagg import checks, standing
from d2pfed.secagg.standing import epoch as epochs
from d2pfed.secagg.wire import HEADER_BYTES, MessageKind, binding_of, frame, kind_of, subset_of
from support.decoding import decode_advert
from support.enrolled_clients import DIMENSION, directory_of, enrol, make_plan
from support.malicious_server import MaliciousServer
from support.twins import twin

VICTIM, SILOS = 0, 5


@pytest.fixture
def server(tmp_path):
    """Five silos, asked together, whose keys live in a directory of their own."""
    roster = enrol(tmp_path, SILOS, None)
    for client in range(SILOS):
        file = directory_of(tmp_path, client) / "client.toml"
        file.write_text(f'state = "{tmp_path}/keys"\nkeys_on_disk = true\n{file.read_text()}')
    made = MaliciousServer(tmp_path, make_plan(rounds=1, spare=0, attempts_per_round=2), roster)
    made.announce(VICTIM)
    return made


def config_of(server):
    return read_client_config(directory_of(server.directory, VICTIM))


def begun(server):
    return len(config_of(server).log.read().bodies(Entry.BEGUN))


def begin_epoch(server, number, run="a run"):
    """Invite the victim to an epoch of standing keys; nobody else ever hears of it."""
    roster = server.roster.roster
    epoch = epoch_of(server.plan, run, roster, roster.clients, epoch=number)
    server.ask_frame(VICTIM, epochs.encode_invitation(epoch, epoch.rank(VICTIM), roster.serial, None))
    return epoch


# Rows


def test_an_epoch_begins_once_and_its_number_rises(server, monkeypatch):
    for number in (0, 5):
        begin_epoch(server, number)
    for number in (0, 4, 5):
        with pytest.raises(PeerError, match=f"epoch {number} of run a run is stale: epoch 5 has begun here"):
            begin_epoch(server, number)
    assert begun(server) == 2
    monkeypatch.setattr(
        client_standing, "_begin", twin(client_standing._begin, "if epoch.epoch <= last:", "if False:")
    )
    begin_epoch(server, 5)
    assert begun(server) == 3


def test_epochs_that_a_silo_began_before_they_had_numbers_block_none(server, monkeypatch):
    note = client_standing.note_begun
    with monkeypatch.context() as patched:
        patched.setattr(
            client_standing, "note_begun", lambda *given: note(*given[:3], {**given[3], "epoch": None})
        )
        begin_epoch(server, 3)
    begin_epoch(server, 0)


def test_a_run_begins_a_limited_number_of_epochs(server, monkeypatch):
    """Each costs the server one message, and the silo a row that it keeps for ever."""
    monkeypatch.setattr(client_attempt, "RESTARTS", 3)
    most = server.plan.attempts_per_round * server.plan.max_attempts + 3
    for number in range(most):
        begin_epoch(server, number)
    with pytest.raises(PeerError, match=f"begun {most} attempts here, its plan allows at most {most}"):
        begin_epoch(server, most)
    assert begun(server) == most
    server.run = "another run"
    server.announce(VICTIM)
    begin_epoch(server, 0, "another run")
    monkeypatch.setattr(client_standing, "require_beginnings_left", lambda *_: None)
    begin_epoch(server, most)


def test_a_run_begins_a_limited_number_of_attempts(server, monkeypatch):
    """Steps of a plan may be many more than any run charges: 100,000 rounds of 1,000 attempts each."""
    monkeypatch.setattr(client_attempt, "RESTARTS", 0)
    monkeypatch.setattr(client_attempt, "MOST_ATTEMPTS", 1)
    server.invite(VICTIM, 0, 0)
    with pytest.raises(PeerError, match="begun 1 attempts here, its plan allows at most 1"):
        server.invite(VICTIM, 0, 1)
    assert begun(server) == 1
    monkeypatch.setattr(client_attempt, "require_beginnings_left", lambda *_: None)
    server.invite(VICTIM, 0, 1)


def test_what_comes_to_nothing_is_bounded_by_the_day_over_all_runs(server, monkeypatch):
    """Names of runs are free: each run alone stays within its own bound."""
    monkeypatch.setattr(client_attempt, "UNCHARGED_A_DAY", 3)
    for run in ("one", "two", "three", "four"):
        server.run = run
        server.announce(VICTIM)
        if run != "four":
            server.invite(VICTIM)
    with pytest.raises(PeerError, match="3 attempts failed here within a day, at most 3 may"):
        server.invite(VICTIM)
    with monkeypatch.context() as later:
        later.setattr(client_attempt.time, "time", lambda: 2e9 + 86_400)
        server.invite(VICTIM)


def test_what_is_charged_does_not_count_as_nothing(server, monkeypatch):
    monkeypatch.setattr(client_attempt, "UNCHARGED_A_DAY", 1)
    longer = replace(server, plan=make_plan(rounds=2), run="a longer run")
    longer.announce()
    longer.attempt()
    assert longer.refusals == {}
    longer.invite(VICTIM, 1, 0)


def test_a_refusal_names_no_directory_of_the_client(tmp_path, monkeypatch):
    monkeypatch.setattr(keystore, "is_in_memory", lambda _directory: False)
    roster = enrol(tmp_path, SILOS, None)
    server = MaliciousServer(tmp_path, make_plan(rounds=1), replace(roster, data=b""))
    with pytest.raises(PeerError, match="this client failed; its own log says why"):
        server.announce(VICTIM)
    server = MaliciousServer(tmp_path, make_plan(rounds=1), roster)
    server.announce(VICTIM)
    file = directory_of(tmp_path, VICTIM) / "client.toml"
    file.write_text(f'state = "{tmp_path}/keys"\n{file.read_text()}')
    with pytest.raises(PeerError, match="this client failed; its own log says why"):
        begin_epoch(server, 0)


def test_other_software_holds_a_plan_against_the_policy_again(server, monkeypatch):
    """A release that mends the check must not go on with what the one before has allowed."""
    monkeypatch.setattr(client_attempt, "software_digest", lambda: "another release")

    def mended(*_):
        raise PeerError("the mended check")

    monkeypatch.setattr(Policy, "check", mended)
    with pytest.raises(PeerError, match="the mended check"):
        server.invite(VICTIM)


def test_a_log_does_not_grow_without_end_whatever_is_begun(server, monkeypatch):
    log = config_of(server).log
    monkeypatch.setattr(client_log, "MOST_ROWS", len(log.read().rows) + 1)
    begin_epoch(server, 0)
    with pytest.raises(PeerError, match="its own log says why"):
        begin_epoch(server, 1)
    with pytest.raises(LedgerError, match="is full: begin a new one with a new key"):
        log.append(log.read(), Entry.BEGUN, {})
    monkeypatch.setattr(client_log, "MOST_ROWS", 1 << 18)
    begin_epoch(server, 1)


# Files


def announce(server, *runs):
    for run in runs:
        replace(server, run=run).announce(VICTIM)
        time.sleep(0.02)  # a file's time is that of the kernel's last tick: two files in one tick have no order


def known(server, *runs):
    accepted = AcceptedRuns(config_of(server).directory)
    return [run for run in runs if accepted.file(run).exists()]


def test_runs_that_never_began_make_room_for_later_ones(server, monkeypatch):
    """Otherwise whoever announces runs and does no more keeps a client out of all others until somebody cleans up."""
    monkeypatch.setattr(client_state, "MAX_RUNS", 3)
    server.invite(VICTIM)
    announce(server, *"bcdefg")
    assert known(server, "a run", *"bcdefg") == ["a run", "f", "g"]
    server.invite(VICTIM, 0, 1)  # it has lost nothing
    monkeypatch.setattr(client_state, "MAX_RUNS", 100)
    announce(server, *"hijk")
    assert len(known(server, "a run", *"bcdefghijk")) == 7


def test_of_runs_that_began_the_longest_idle_makes_room(server, monkeypatch):
    monkeypatch.setattr(client_state, "MAX_RUNS", 3)
    for run in "bc":
        announce(server, run)
        replace(server, run=run).invite(VICTIM)
    server.invite(VICTIM)
    replace(server, run="b").invite(VICTIM, 0, 1)
    announce(server, "d")
    assert known(server, "a run", *"bcd") == ["a run", "b", "d"]
    with pytest.raises(PeerError, match="run c was never announced"):
        replace(server, run="c").invite(VICTIM, 0, 1)
    announce(server, "c")  # in the place of d, which never began
    assert known(server, "a run", *"bcd") == ["a run", "b", "c"]
    with pytest.raises(PeerError, match="round 1, attempt 0 of run c is stale"):
        replace(server, run="c").invite(VICTIM)
    replace(server, run="c").invite(VICTIM, 0, 1)


def test_the_terms_of_all_runs_have_a_limited_size(tmp_path, monkeypatch):
    """A layout may have two megabytes, and ten thousand runs as many layouts."""
    monkeypatch.setattr(client_state, "MAX_RUNS_BYTES", 10_000)
    accepted = AcceptedRuns(tmp_path)
    for number in range(20):
        accepted.accept(f"run {number}", RunTerms("plan", "layout" * 500, 0, b"", b""), {"run 3": 0})
        os.utime(accepted.file(f"run {number}"), (number, number))  # the clock of files may be coarse
    found = [number for number in range(20) if accepted.file(f"run {number}").exists()]
    assert found == [3, 18, 19]
    assert sum(file.stat().st_size for file in (tmp_path / "runs").glob("*.json")) <= 10_000


def test_attempts_that_are_left_do_not_fill_a_disk(server, monkeypatch):
    monkeypatch.setattr(client_state, "MAX_PHASES", 2)
    states = config_of(server).directory / "states"

    def leave(*runs):
        for run in runs:
            other = replace(server, run=run)
            other.announce(VICTIM)
            other.invite(VICTIM)
        return len(list(states.glob("*.state")))

    assert leave(*"bcde") == 2
    monkeypatch.setattr(client_state, "keep_newest", lambda *_: None)
    assert leave(*"fgh") == 5


def test_keys_of_runs_that_are_left_do_not_fill_the_memory(server, monkeypatch):
    monkeypatch.setattr(keystore, "MOST_FILES", 2)

    def leave(*runs):
        for run in runs:
            announce(server, run)
            begin_epoch(server, 0, run)
        return sum(file.name != "lock" for file in (server.directory / "keys").glob("*/*"))

    assert leave(*"bcdef") == 3  # with those of the epoch that has just begun
    monkeypatch.setattr(keystore.files, "keep_newest", lambda *_: None)
    assert leave(*"gh") == 4 + 1


def test_arrays_of_runs_that_are_over_do_not_fill_a_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(local_arrays, "MOST_RUNS", 2)
    layout = Layout.of({"params": np.zeros(3, np.float32), "seen": np.zeros(3)}, ["params"])
    runs = [LocalArrays(tmp_path, f"run {number}", make_plan()) for number in range(5)]
    for each in runs:
        each.keep(layout, {"seen": np.ones(3)})
    kept = [bool(each.load(layout)["seen"].any()) for each in runs]
    assert kept == [False, False, False, True, True]
    monkeypatch.setattr(local_arrays, "keep_newest", lambda *_: None)
    for each in runs:
        each.keep(layout, {"seen": np.full(3, 2.0)})
    assert all(each.load(layout)["seen"].any() for each in runs)


# The budget


def charges(server):
    return len(config_of(server).log.read().bodies(Entry.CHARGE))


def ask_for_step(server, helpers):
    """Set up an epoch with the victim and some others alone, and ask the victim for its vector."""
    roster, ask = server.roster.roster, server.ask_frame
    epoch = epoch_of(server.plan, server.run, roster, roster.clients, epoch=begun(server))
    ranks = [epoch.rank(client) for client in (VICTIM, *helpers)]
    adverts = {
        rank: decode_advert(
            epoch, rank, ask(epoch.cohort[rank], epochs.encode_invitation(epoch, rank, roster.serial, None))
        )
        for rank in ranks
    }
    ask(VICTIM, epochs.encode_adverts(epoch, epoch.rank(VICTIM), adverts))
    step = standing.Step(epoch, 0, 0, subset_of(SILOS, ranks))
    model = encode_model(np.zeros(DIMENSION, np.float32))
    request = epochs.Request(step, encode_task(server.layout, {}), model)
    ask(VICTIM, epochs.encode_request(epoch, epoch.rank(VICTIM), request))


def test_a_vector_is_charged_only_after_a_quorum_has_agreed_on_keys(server, monkeypatch):
    """A server with one silo of its own spends nothing of the victim's budget."""
    server.announce()
    with pytest.raises(PeerError, match="at least 3 clients must be left, got 2"):
        ask_for_step(server, (1,))
    assert charges(server) == 0
    checked, rest = [], checks.require_quorum
    monkeypatch.setattr(
        checks, "require_quorum", lambda *given: rest(*given) if checked else checked.append(given)
    )
    with pytest.raises(PeerError, match="at least 3 clients must be left, got 2"):
        ask_for_step(server, (1,))  # its keys were agreed on, and the members of the step are counted again
    assert checked
    assert charges(server) == 0
    monkeypatch.setattr(checks, "require_quorum", lambda *_: None)
    ask_for_step(server, (1,))
    assert charges(server) == 1


def test_a_vector_is_charged_only_after_the_others_have_sent_shares(server, monkeypatch):
    """A server that has the cohort's keys, but not what it has sealed for the victim, spends nothing of its budget."""
    server.announce()
    ask = server.ask_frame

    def spoil(client, request):
        answer = ask(client, request)
        if client != VICTIM and kind_of(answer) == MessageKind.ENCRYPTED_SHARES:
            sealed = bytes(byte ^ 1 for byte in answer[HEADER_BYTES + 8 :])
            body = answer[HEADER_BYTES : HEADER_BYTES + 8] + sealed
            return frame(MessageKind.ENCRYPTED_SHARES, binding_of(answer), client, body)
        return answer

    server.ask_frame = spoil
    with pytest.raises(TooFewClients):
        server.attempt()
    assert "at most 1 ciphertexts may fail to open, got 4" in str(server.refusals[VICTIM])
    assert charges(server) == 0
    monkeypatch.setattr(checks, "require_few_unopened", lambda *_: None)
    with suppress(TooFewClients):
        server.attempt(0, 1)
    assert charges(server) == 1
