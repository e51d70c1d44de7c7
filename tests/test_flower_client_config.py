import ast
import os
import stat
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import d2pfed
from d2pfed.deploy.config import default_anchor, init_client, make_secret, read_client_config, read_secret
from d2pfed.deploy.rosters import accept_roster, current_roster
from d2pfed.errors import ConfigError, LedgerError
from d2pfed.ledger.client_log import Entry
from d2pfed.plan import Policy
from d2pfed.secagg.crypto import signing_public
from support.enrolled_clients import anchor_in, directory_of, enrol

AUTHORITY = bytes(range(32))


@pytest.fixture
def directory(tmp_path):
    init_client(tmp_path / "client", 7, AUTHORITY, tmp_path / "anchor")
    return tmp_path / "client"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_new_directory_can_be_read_and_its_log_has_begun(directory):
    read = read_client_config(directory)
    assert (read.client, read.authority) == (7, AUTHORITY)
    assert read.secret is not None
    assert read.policy.least_cohort == 10
    assert read.policy.least_colluders == 0.1
    assert [row.entry for row in read.log.read().rows] == [Entry.OPENING]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in directory.iterdir())
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@pytest.mark.parametrize("client", [7, 8])
def test_a_clients_directory_is_never_overwritten(directory, tmp_path, client):
    before = content(tmp_path)
    with pytest.raises(ConfigError, match="is already a client's directory; nothing in it was changed"):
        init_client(directory, client, AUTHORITY, tmp_path / "anchor")
    assert content(tmp_path) == before


def test_settings_that_a_person_has_edited_are_never_overwritten(directory, tmp_path):
    (directory / "client.toml").write_text("client = 7\n# mine")
    (directory / "log").unlink()
    with pytest.raises(ConfigError, match="nothing in it was changed"):
        init_client(directory, 7, AUTHORITY, tmp_path / "anchor")
    assert (directory / "client.toml").read_text() == "client = 7\n# mine"


def test_a_second_directory_of_a_client_on_one_machine_is_refused(directory, tmp_path):
    with pytest.raises(LedgerError, match="this client has begun before"):
        init_client(tmp_path / "again", 7, AUTHORITY, tmp_path / "anchor")
    assert not (tmp_path / "again").exists()


def test_a_call_that_was_interrupted_may_be_repeated(directory, tmp_path):
    public = signing_public(read_secret(directory / "key"))
    (directory / "log").unlink()
    (tmp_path / "anchor" / "head").unlink()
    for lost in ("client.toml", None):
        if lost:
            (directory / lost).unlink()
        (directory / "log").unlink(missing_ok=True)
        (tmp_path / "anchor" / "head").unlink(missing_ok=True)
        assert init_client(directory, 7, AUTHORITY, tmp_path / "anchor") == public
    assert read_client_config(directory).log.read().head.seq == 1


@pytest.mark.parametrize("call", ["write", "fsync", "link", "replace"])
def test_an_interruption_at_any_moment_leaves_nothing_that_blocks(tmp_path, monkeypatch, call):
    kept, done, moment = getattr(os, call), False, 0
    while not done:
        place, calls = tmp_path / str(moment), []

        def cut(*arguments, calls=calls, last=moment, **options):
            calls.append(call)
            if len(calls) > last:
                if call == "write":
                    kept(arguments[0], arguments[1][:7])
                raise KeyboardInterrupt
            return kept(*arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(os, call, cut)
            try:
                init_client(place / "client", 7, AUTHORITY, place / "anchor")
                done = True
            except KeyboardInterrupt:
                pass
        if not (done or (place / "anchor" / "head").exists()):  # with its anchor in place all of it is
            init_client(place / "client", 7, AUTHORITY, place / "anchor")
        assert read_client_config(place / "client").log.read().head.seq == 1
        moment += 1
    assert moment > 1


@pytest.mark.parametrize("wrong", ["link", "writable", "file"])
def test_an_anchor_that_cannot_be_used_is_found_before_anything_is_written(tmp_path, wrong):
    anchor = tmp_path / "anchor"
    if wrong == "link":
        (tmp_path / "elsewhere").mkdir()
        anchor.symlink_to(tmp_path / "elsewhere")
    elif wrong == "writable":
        anchor.mkdir()
        anchor.chmod(0o777)
    else:
        anchor.write_text("")
    with pytest.raises(ConfigError, match=r"not a link to one|writable by its owner alone"):
        init_client(tmp_path / "client", 7, AUTHORITY, anchor)
    assert not (tmp_path / "client").exists()


@pytest.mark.parametrize("client", [-1, 1 << 64, 10**400])
def test_a_wrong_identity_is_refused_before_anything_is_written(tmp_path, client):
    with pytest.raises(ConfigError, match=r"identity must be in \[0, 2\^64\)"):
        init_client(tmp_path / "client", client, AUTHORITY)
    assert list(tmp_path.iterdir()) == []


def test_the_anchor_is_outside_of_the_directory(tmp_path):
    with pytest.raises(ConfigError, match="the anchor must be outside the client's directory"):
        init_client(tmp_path / "client", 7, AUTHORITY, tmp_path / "client" / "anchor")
    assert list(tmp_path.iterdir()) == []


def test_by_default_the_anchor_is_in_the_users_state_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    init_client(tmp_path / "client", 7, AUTHORITY)
    assert read_client_config(tmp_path / "client").anchor == default_anchor(AUTHORITY, 7)
    assert (default_anchor(AUTHORITY, 7) / "head").is_file()
    assert default_anchor(AUTHORITY, 7).is_relative_to(tmp_path / "state" / "d2pfed")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_anchor(AUTHORITY, 7).is_relative_to(tmp_path / ".local" / "state" / "d2pfed")


@pytest.mark.parametrize(("mode", "is_fine"), [(0o700, True), (0o755, True), (0o770, False), (0o707, False)])
def test_a_directory_that_others_can_write_to_is_refused(directory, mode, is_fine):
    directory.chmod(mode)
    if is_fine:
        read_client_config(directory)
        return
    with pytest.raises(ConfigError, match="writable by its owner alone"):
        read_client_config(directory)


def test_settings_that_others_can_write_are_refused(directory):
    (directory / "client.toml").chmod(0o620)
    with pytest.raises(ConfigError, match="writable by its owner alone"):
        read_client_config(directory)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_key_that_others_can_read_is_refused(directory, mode):
    (directory / "key").chmod(mode)
    with pytest.raises(ConfigError, match="readable by its owner alone"):
        read_client_config(directory)


@pytest.mark.parametrize("name", ["key", "client.toml", "roster"])
def test_links_are_not_followed(tmp_path, name):
    signed = enrol(tmp_path, 3)
    directory = directory_of(tmp_path, 0)
    accept_roster(read_client_config(directory), signed.data)
    (directory / name).rename(tmp_path / "elsewhere")
    (directory / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="must not be a link"):
        current_roster(read_client_config(directory))


def test_a_directory_that_is_a_link_or_somebody_elses_is_refused(directory, tmp_path):
    (tmp_path / "link").symlink_to(directory)
    with pytest.raises(ConfigError, match="not a link"):
        read_client_config(tmp_path / "link")
    if os.geteuid() == 0:
        os.chown(directory, 65534, -1)
        with pytest.raises(ConfigError, match="must belong to the user"):
            read_client_config(directory)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("client = ", "is not TOML"),
        ('client = 0\nsever = "x"', "unknown settings: sever"),
        ('authority = "00"', "not a client's settings"),
        ('client = 0\nauthority = "00"', "64 hexadecimal digits"),
        ('client = 0\nconsistency = "hoped"', "not a client's settings"),
        ('client = -1\nconsistency = "assumed"', "identity must be in"),
        (f'client = {"9" * 400}\nconsistency = "assumed"', "identity must be in"),
        ('client = true\nconsistency = "assumed"', "client must be of type int, got True"),
        ('client = 7.5\nconsistency = "assumed"', "client must be of type int, got 7.5"),
        ('client = "7"\nconsistency = "assumed"', "client must be of type int, got '7'"),
        ("client = 0\nauthority = 5", "authority must be of type str"),
        ("client = 0\npolicy = 5", "policy must be of type dict"),
        ('client = 0\nconsistency = "assumed"\n[policy]\nleast_cohort = "10"', "least_cohort must be of type int"),
        ('client = 0\nconsistency = "assumed"\n[policy]\nleast_cohort = true', "least_cohort must be of type int"),
        (
            'client = 0\nconsistency = "assumed"\n[policy]\nmost_epsilon = "1"',
            "most_epsilon must be of type float",
        ),
        (
            'client = 0\nconsistency = "assumed"\n[policy]\nmechanisms = "centered"',
            "mechanisms must be of type list",
        ),
        ('client = 0\nconsistency = "assumed"\n[budget]\nepsilon = true', "epsilon must be of type float"),
        ('client = 0\nconsistency = "assumed"\n[policy]\nleast_colluders = 1.5', "least_colluders"),
        ('client = 0\nconsistency = "assumed"\n[policy]\nnonsense = 1', "not a client's settings"),
        ('client = 0\nconsistency = "assumed"\n[budget]\nepsilon = inf', "positive and finite"),
        ('client = 0\nconsistency = "assumed"\n[budget]\ndelta = 0.0', "delta must be in"),
        ('client = 0\nconsistency = "assumed"\nanchor = "ANCHOR"', "outside the client's directory"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, text, complaint):
    (tmp_path / "client.toml").write_text(text.replace("ANCHOR", str(tmp_path / "inside")))
    with pytest.raises(ConfigError, match=complaint):
        read_client_config(tmp_path)


def test_a_private_key_is_never_overwritten(tmp_path):
    make_secret(tmp_path / "key")
    before = (tmp_path / "key").read_bytes()
    with pytest.raises(ConfigError, match="already holds a key"):
        make_secret(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == before


def test_no_command_shows_the_variables_of_a_failure():
    """A traceback with locals would show a private key."""
    found = 0
    for file in Path(d2pfed.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Typer"):
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert options.get("pretty_exceptions_show_locals") == "False", file
                found += 1
    assert found >= 2


CRASH = """
import sys, d2pfed.cli
from d2pfed.deploy import config as client_config
def crash(data):
    raise RuntimeError("a defect")
client_config.signing_public = crash
sys.argv = ["d2pfed", "client", "init", sys.argv[1], "7", "00" * 32, "--anchor", sys.argv[2]]
d2pfed.cli.main()
"""


def test_a_defect_in_a_command_shows_no_key(tmp_path):
    directory = tmp_path / "client"
    directory.mkdir(mode=0o700)
    make_secret(directory / "key")
    secret = (directory / "key").read_bytes()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "_TYPER_STANDARD_TRACEBACK": ""}
    ended = subprocess.run(
        [sys.executable, "-c", CRASH, str(directory), str(tmp_path / "anchor")],
        env=environment,
        capture_output=True,
        check=False,
    )
    said = ended.stdout + ended.stderr
    assert b"a defect" in said
    assert all(form not in said for form in (secret, secret.hex().encode(), str(secret)[2:-1].encode()))


def test_each_client_of_a_federation_has_its_own_anchor(tmp_path):
    enrol(tmp_path, 3)
    assert len({anchor_in(tmp_path, client) for client in range(3)}) == 3
    assert all((anchor_in(tmp_path, client) / "head").is_file() for client in range(3))


def test_new_settings_state_every_rule_of_the_policy_as_it_is_by_default(directory):
    text = (directory / "client.toml").read_text()
    stated = tomllib.loads(text)["policy"]
    assert stated.keys() == {field.name for field in fields(Policy)}
    assert read_client_config(directory).policy == Policy()
