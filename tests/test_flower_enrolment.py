import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from d2pfed.cli import app
from d2pfed.deploy.account import ClientSpending
from d2pfed.deploy.config import read_client_config, read_secret
from d2pfed.deploy.rosters import (
    DrawCommitment,
    Draws,
    Positions,
    current_roster,
    make_draws,
    next_roster,
    read_roster,
    shown_positions,
)
from d2pfed.deploy.state import AcceptedRuns, RunTerms
from d2pfed.errors import ConfigError, DamagedFile, LedgerError
from d2pfed.ledger.client_log import Entry
from d2pfed.numerics import canonical
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.secagg.crypto import signing_public
from d2pfed.secagg.roster import sign_position
from support.crash_moments import Disk, lay_out
from support.enrolled_clients import directory_of, enrol, make_plan, sign_roster


def command(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output.strip()


@pytest.fixture
def federation(tmp_path):
    """What docs/deploy.md makes by hand: an authority, two clients, draws, a roster."""
    authority = command("roster", "authority", tmp_path / "authority.key")
    clients = [
        command("client", "init", tmp_path / f"c{number}", number, authority, "--anchor", tmp_path / f"a{number}")
        for number in (4, 9)
    ]
    draws = command("roster", "draws", tmp_path / "draws", "--depth", 5)
    said = command("roster", "sign", tmp_path / "authority.key", tmp_path / "roster", *clients, "--draws", draws)
    assert said.startswith("roster 1 with 2 clients")
    return authority


def test_the_commands_make_client_directories_and_a_roster_that_fit(tmp_path, federation):
    roster = read_roster(tmp_path / "roster", federation).roster
    assert (roster.clients, roster.serial, roster.depth) == ((4, 9), 1, 5)
    assert "2 clients, 32 verified draws" in command("roster", "show", tmp_path / "roster", federation)
    shown = json.loads(command("roster", "show", tmp_path / "roster", federation, "--json"))
    assert set(shown["keys"]) == {"4", "9"}
    assert command("client", "enrol", tmp_path / "c9", tmp_path / "roster").startswith("roster 1 with 2 clients")
    assert current_roster(read_client_config(tmp_path / "c9"))[0].roster == roster


def test_nothing_that_is_signed_or_secret_is_overwritten(tmp_path, federation):
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for again in (
        ("roster", "authority", tmp_path / "authority.key"),
        ("roster", "draws", tmp_path / "draws"),
        ("roster", "sign", tmp_path / "authority.key", tmp_path / "roster", "1=" + "00" * 32),
        ("client", "init", tmp_path / "c4", 4, federation, "--anchor", tmp_path / "a4"),
    ):
        with pytest.raises(ConfigError, match="already"):
            command(*again)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_signed_roster_does_not_go_where_a_link_leads(tmp_path, federation):
    (tmp_path / "new").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="already exists: a signed roster is not overwritten"):
        command("roster", "sign", tmp_path / "authority.key", tmp_path / "new", "--previous", tmp_path / "roster")
    assert not (tmp_path / "elsewhere").exists()


def test_a_roster_is_written_whole_or_not_at_all(tmp_path, federation, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    sign = ("roster", "sign", tmp_path / "authority.key", tmp_path / "new", "--previous", tmp_path / "roster")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            command(*sign)
    assert not (tmp_path / "new").exists()
    assert command(*sign).startswith("roster 2")


@pytest.mark.parametrize("text", ["4", "4=00", "x=" + "00" * 32, "-1=" + "00" * 32, "9" * 30 + "=" + "00" * 32])
def test_a_client_is_given_as_id_and_public_key(tmp_path, federation, text):
    with pytest.raises(ConfigError, match=r"ID=PUBLIC|hexadecimal"):
        command("roster", "sign", tmp_path / "authority.key", tmp_path / "new", "--", text)
    assert not (tmp_path / "new").exists()


def test_show_says_what_was_spent_and_what_would_notice_a_rollback(tmp_path, federation):
    said = " ".join(command("client", "show", tmp_path / "c4").split())
    assert "Client 4: 0 vectors sent, epsilon 0" in said
    assert "Peers and server learn how many attempts this client has begun: 0 so far, position 1" in said
    assert "A rollback is detected by: anchor" in said
    assert "no roster yet" in said
    facts = json.loads(command("client", "show", tmp_path / "c4", "--json"))
    assert (facts["client"], facts["position"], facts["vectors"], facts["epsilon"]) == (4, 1, 0, 0.0)


def test_adopt_says_beside_every_epsilon_that_it_rests_on_a_declaration(tmp_path, federation):
    with pytest.raises(LedgerError, match="nothing to adopt"):
        command("client", "adopt", tmp_path / "c4")
    (tmp_path / "a4" / "head").unlink()
    with pytest.raises(LedgerError, match="client adopt"):
        command("client", "show", tmp_path / "c4")
    assert "carried over: all" in command("client", "adopt", tmp_path / "c4", "--why", "the disk was lost")
    said = " ".join(command("client", "show", tmp_path / "c4").split())
    assert "epsilon infinite" in said
    assert "This rests on a declaration of" in said
    assert "the disk was lost" in said
    assert json.loads(command("client", "show", tmp_path / "c4", "--json"))["epsilon"] is None
    with pytest.raises(ConfigError, match="exclude each other"):
        command("client", "adopt", tmp_path / "c4", "--carried", "nothing", "--run", "a run=plan.json")


def test_attack_a_cheaper_plan_under_the_name_of_a_run_that_was_forgotten(tmp_path, federation):
    """A restored client takes the cheap plan for a new run: what it is asked to declare must not come from there."""
    dear, cheap = make_plan(rounds=3), make_plan(rounds=1)
    config, terms = read_client_config(tmp_path / "c4"), RunTerms(canonical.encode(cheap), "", 0, b"", b"")
    AcceptedRuns(config.directory).accept("R", terms)
    (tmp_path / "plan.json").write_text(canonical.encode(dear))
    (tmp_path / "a4" / "head").unlink()
    with pytest.raises(ConfigError, match="--run must be NAME=FILE, a run and the file of its plan, got R"):
        command("client", "adopt", config.directory, "--run", "R")
    said = command("client", "adopt", config.directory, "--run", f"R={tmp_path}/plan.json")
    assert dear.digest.hex()[:16] in said
    spent = ClientSpending.of(config.log.read())
    assert spent.participations("R") == dear.max_participations > cheap.max_participations


def test_a_declaration_that_makes_no_sense_changes_nothing(tmp_path, federation):
    (tmp_path / "a4" / "head").unlink()
    for options in (
        ("--carried", "some"),
        ("--run", "a run"),
        ("--run", "a run="),
        ("--run", f"a run={tmp_path}/none"),
    ):
        with pytest.raises((ConfigError, OSError)):
            command("client", "adopt", tmp_path / "c4", *options)
    assert not (tmp_path / "a4" / "head").exists()


def test_these_commands_need_no_flower(tmp_path):
    program = "import sys; sys.modules['flwr'] = None; import d2pfed.cli; d2pfed.cli.main()"
    for arguments in ("roster --help", "client --help", f"roster authority {shlex.quote(str(tmp_path / 'key'))}"):
        ended = subprocess.run(
            [sys.executable, "-c", program, *shlex.split(arguments)], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr


# The authority's next roster


@pytest.fixture
def first(tmp_path):
    return enrol(tmp_path, 3, depth=4)


def test_serials_and_floors_only_rise_and_clients_stay(tmp_path, first):
    config = read_client_config(directory_of(tmp_path, 1))
    head, low = config.log.read().head, config.log.read().start
    high = sign_position(config.secret, config.authority, 1, head.seq, head.hash)
    lower = sign_position(config.secret, config.authority, 1, low.seq, low.hash)
    second = sign_roster(tmp_path, {}, first.roster, None, shown={1: high}).roster
    third = sign_roster(tmp_path, {}, second, None, shown={1: lower}).roster
    assert (second.serial, third.serial) == (2, 3)
    assert second.floors[1] == third.floors[1] == (head.seq, head.hash)
    assert second.clients == first.roster.clients


def test_a_client_with_a_new_key_keeps_its_floor(tmp_path, first):
    config = read_client_config(directory_of(tmp_path, 1))
    head = config.log.read().head
    shown = sign_position(config.secret, config.authority, 1, head.seq, head.hash)
    renewed = sign_roster(tmp_path, {1: digest("a new key")}, first.roster, None, shown={1: shown}).roster
    assert renewed.keys[1] == digest("a new key")
    assert renewed.floors[1] == (head.seq, head.hash)


def test_positions_count_only_with_their_clients_own_signature(tmp_path, first):
    config, roster = read_client_config(directory_of(tmp_path, 1)), first.roster
    head = config.log.read().head
    good = sign_position(config.secret, config.authority, 1, head.seq, head.hash)
    forged = sign_position(digest("the server"), config.authority, 2, 99, digest("nowhere"))
    Positions(tmp_path / "positions", roster.keys).keep({1: good, 2: forged})
    assert shown_positions(roster, [tmp_path / "positions"]) == {1: good}
    with pytest.raises(ConfigError, match="needs --previous"):
        shown_positions(None, [tmp_path / "positions"])


def test_each_roster_has_draws_of_its_own_and_not_too_many(tmp_path, first):
    same = DrawCommitment(first.roster.depth, first.roster.root)
    with pytest.raises(ConfigError, match="a new roster needs new draws"):
        sign_roster(tmp_path, {}, first.roster, same)
    with pytest.raises(ConfigError, match="at most 16 unless --deep"):
        sign_roster(tmp_path, {}, first.roster, DrawCommitment(17, digest("root")))
    assert (
        sign_roster(tmp_path, {}, first.roster, DrawCommitment(17, digest("root")), most_depth=20).roster.depth
        == 17
    )


def test_the_nonce_is_drawn_after_the_root_is_known(tmp_path, first):
    """Whoever could name the nonce could try roots until the cohorts suit it."""
    public = signing_public(read_secret(tmp_path / "authority.key"))
    settings = {
        "added": dict(first.roster.keys),
        "removed": frozenset(),
        "shown": {},
        "most_depth": 16,
        "days": 1,
        "now": 1,
    }
    rosters = [
        next_roster(public, None, draws=DrawCommitment(4, digest("root")), entropy=Entropy.system(), **settings)
        for _ in range(2)
    ]
    assert rosters[0].nonce != rosters[1].nonce
    help_text = CliRunner().invoke(app, ["roster", "sign", "--help"]).output
    assert "nonce" not in help_text.replace("draw its nonce after the server", "")


def test_a_client_that_is_removed_must_be_there(tmp_path, first):
    with pytest.raises(ConfigError, match="client 8 cannot be removed"):
        sign_roster(tmp_path, {}, first.roster, None, removed=frozenset({8}))
    assert sign_roster(tmp_path, {}, first.roster, None, removed=frozenset({2})).roster.clients == (0, 1)


def test_renewing_a_roster_takes_floors_from_the_server(tmp_path, federation):
    command("client", "enrol", tmp_path / "c9", tmp_path / "roster")
    config = read_client_config(tmp_path / "c9")
    head = config.log.read().head
    roster = read_roster(tmp_path / "roster", federation).roster
    shown = sign_position(config.secret, config.authority, 9, head.seq, head.hash)
    Positions(tmp_path / "positions", roster.keys).keep({9: shown})
    draws = command("roster", "draws", tmp_path / "draws-2", "--depth", 5)
    options = ("--previous", tmp_path / "roster", "--positions", tmp_path / "positions", "--draws", draws)
    said = command("roster", "sign", tmp_path / "authority.key", tmp_path / "roster-2", *options)
    assert said.startswith("roster 2 with 2 clients")
    assert read_roster(tmp_path / "roster-2", federation).roster.floors[9] == (head.seq, head.hash)
    command("client", "enrol", tmp_path / "c9", tmp_path / "roster-2")
    assert [body["serial"] for body in config.log.read().bodies(Entry.ROSTER)] == [1, 2]


def test_the_guides_commands_are_those_that_there_are():
    docs = Path(__file__).resolve().parent.parent / "docs"
    for line in "\n".join((docs / name).read_text() for name in ("deploy.md", "operate.md")).splitlines():
        words = line.split()
        if words[:2] in (["d2pfed", "client"], ["d2pfed", "roster"]):
            shown = CliRunner().invoke(app, [*words[1:3], "--help"])
            assert shown.exit_code == 0, line
            for option in (word for word in words if word.startswith("--")):
                assert option in shown.output, line


# The server's draws


@pytest.fixture
def roster(tmp_path):
    return enrol(tmp_path, 3, depth=5).roster


@pytest.fixture
def draws(tmp_path, roster):
    return Draws(tmp_path / "draws", roster)


def test_no_draw_serves_two_runs(draws, roster, tmp_path):
    def another_process() -> Draws:
        return Draws(tmp_path / "draws", roster)

    assert draws.reserve("one", 10) == 0
    assert another_process().reserve("two", 12) == 10
    assert another_process().reserve("one", 10) == 0  # resumed
    assert another_process().reserve("three", 10) == 22
    with pytest.raises(ConfigError, match="a run needs 1 draws, and 0 are left"):
        draws.reserve("four", 1)
    with pytest.raises(ConfigError, match="run one has 10 draws, and now asks for 11"):
        draws.reserve("one", 11)


def test_draws_are_used_up_durably_before_they_are_known(draws, roster, tmp_path, monkeypatch):
    first = []
    with monkeypatch.context() as patched:
        disk = Disk(tmp_path, patched, lambda: len(first))
        for run in ("one", "two", "three"):
            draws.reserve(run, 4)
            first.append(run)
        disk._note("end")
    for place, moment in enumerate(disk.moments):
        for name, files in (("kill", moment.after_kill), ("power", moment.after_power_cut)):
            where = lay_out(tmp_path / "crashed" / f"{place}-{name}", files)
            shutil.copy(tmp_path / "draws", where / "draws")  # was there before any run
            assert Draws(where / "draws", roster).reserve("later", 1) >= 4 * moment.sent


def test_the_secret_is_for_its_owner_alone_and_never_overwritten(draws, tmp_path):
    assert stat.S_IMODE((tmp_path / "draws").stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="holds draws already"):
        make_draws(tmp_path / "draws")
    (tmp_path / "draws").chmod(0o640)
    with pytest.raises(ConfigError, match="readable by its owner alone"):
        Draws(tmp_path / "draws", None)


def test_a_roster_for_other_draws_is_refused(tmp_path):
    signed = enrol(tmp_path, 3, depth=5)
    with pytest.raises(ConfigError, match="was signed for draws other than"):
        Draws(tmp_path / "draws", replace(signed.roster, root=digest("another root")))
    with pytest.raises(ConfigError, match="holds no draws"):
        Draws(tmp_path / "nowhere", signed.roster)


def test_the_next_tree_in_the_same_place_has_all_of_its_draws(draws, tmp_path):
    assert draws.reserve("one", 20) == 0
    (tmp_path / "draws").unlink()
    committed = make_draws(tmp_path / "draws", 5)
    renewed = Draws(tmp_path / "draws", SimpleNamespace(serial=2, depth=committed.depth, root=committed.root))
    assert renewed.reserve("two", 20) == 0
    assert renewed.reserve("one", 5) == 20


def test_a_record_of_an_earlier_release_counts(draws, tmp_path):
    (tmp_path / "draws.used").write_text(json.dumps({"one": [0, 7]}))
    assert draws.reserve("two", 1) == 7
    assert draws.reserve("one", 7) == 0


def test_a_damaged_record_is_refused(draws, tmp_path):
    draws.reserve("one", 1)
    (file,) = tmp_path.glob("draws.*.used")
    for text in ("[]", "{", json.dumps({"one": 3})):
        file.write_text(text)
        with pytest.raises(DamagedFile, match="record of used draws is damaged"):
            draws.reserve("two", 1)


@pytest.mark.parametrize("text", ["", "12", "12:00", "x:" + "00" * 32, "21:" + "00" * 32, "-1:" + "00" * 32])
def test_what_the_server_has_committed_to_is_read_exactly(text):
    with pytest.raises(ConfigError, match="draws are DEPTH:ROOT"):
        DrawCommitment.decode(text)
    good = DrawCommitment(12, digest("root"))
    assert DrawCommitment.decode(good.encode()) == good


@pytest.mark.parametrize("depth", [-1, 21])
def test_a_tree_has_at_most_a_million_draws(tmp_path, depth):
    with pytest.raises(ConfigError, match=r"a depth in \[0, 20\]"):
        make_draws(tmp_path / "draws", depth)
    assert list(tmp_path.iterdir()) == []
