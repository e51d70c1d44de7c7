import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

import campaign_ledger
from campaign_ledger import additive, begun, release
from d2pfed.errors import LedgerError
from d2pfed.ledger import Budget, Ledger, store, verify

BUDGET = Budget(1000.0, 1e-5)
traced = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace to see or disturb system calls")


def campaign(name: str, size: int, directory: Path) -> dict[str, int]:
    """Run a campaign in a process of its own, which may fork; its counts, or an AssertionError if it fails."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, campaign_ledger.__file__, name, str(size), str(directory)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout)


def child(work: Callable[[Path], None], directory: Path, *, limit: Callable[[], None]) -> str:
    """Run a function of this file in a process with a limit of its own; what it printed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    program = f"import sys, pathlib, test_ledger_crashes as t; t.{work.__name__}(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-B", "-c", program, str(directory)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def own_folders(path: Path) -> list[Path]:
    """The folders down to a test's own that pytest made for this user alone."""
    return [folder for folder in (path, *path.parents) if any("pytest-of-" in part for part in folder.parts)]


def charge_until_refused(directory: Path) -> None:
    """Charge until the ledger refuses, each release told outside only after its row; print why it refused."""
    try:
        campaign_ledger.charge_then_release(directory, 100_000)
    except (LedgerError, campaign_ledger.OutsideError) as error:
        print(repr(error))


def reserve_until_refused(ledger: Ledger, reason: str) -> int:
    """Return how many reservations were accepted before the ledger refused, for the right reason."""
    for number in range(1000):
        try:
            ledger.reserve(release(number + 1))
        except LedgerError as error:
            assert reason in str(error)  # noqa: PT017 - the count of what came before is what matters
            return number
    raise AssertionError("it was never refused")


def test_no_kill_loses_a_release(tmp_path):
    counts = campaign("kills", 100, tmp_path)
    assert (counts["kills"], counts["lost"]) == (100, 0)
    assert counts["releases"] > 30  # the kills found something to lose
    assert counts["unfinished"] > 3  # and came between reserve and commit


def test_a_release_before_its_charge_is_caught_being_lost(tmp_path):
    with pytest.raises(AssertionError, match=r'"lost": [1-9]'):
        campaign("kills-wrong", 30, tmp_path)


@traced
@pytest.mark.parametrize("name", ["faults-kill", "faults-full", "faults-io"])
def test_a_kill_or_an_error_in_any_system_call_loses_nothing(tmp_path, name):
    counts = campaign(name, 12, tmp_path)
    assert counts["points"] >= 6
    assert counts["killed"] == counts["points"] if name == "faults-kill" else counts["refused"] >= 4


@traced
def test_every_row_is_synced_before_its_release(tmp_path):
    assert campaign("unsynced", 9, tmp_path) == {"releases": 6, "lost": 0}


@traced
def test_commits_that_are_not_synced_are_caught(tmp_path):
    with pytest.raises(AssertionError, match='"lost": 6'):
        campaign("unsynced-wrong", 9, tmp_path)


@pytest.mark.parametrize("wrong", ["synchronous=NORMAL", "synchronous=OFF", "journal_mode=MEMORY"])
def test_a_ledger_without_durable_settings_does_not_open(tmp_path, monkeypatch, wrong):
    path = tmp_path / "ledger"
    Ledger.create(path, BUDGET, additive).close()
    monkeypatch.setattr(store, "SETTINGS", (*store.SETTINGS, wrong))
    with pytest.raises(LedgerError, match="must survive a power cut"):
        Ledger.open(path, meter=additive)


@pytest.mark.parametrize("kilobytes", range(0, 64, 6))
def test_a_file_that_may_not_grow_refuses_before_release(tmp_path, kilobytes):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024 + 100, resource.RLIM_INFINITY))

    printed = child(charge_until_refused, tmp_path, limit=limit)
    assert "LedgerError" in printed
    assert campaign_ledger.lost(tmp_path) == 0
    campaign_ledger.charge_then_release(tmp_path, 1)
    assert campaign_ledger.lost(tmp_path) == 0


def test_a_full_disk_refuses_before_release(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a small disk")
    try:
        with begun(disk / "ledger", BUDGET) as ledger:
            ledger.reserve(release(0))
            with (disk / "rubbish").open("wb", buffering=0) as rubbish, suppress(OSError):
                while rubbish.write(bytes(4096)):
                    pass
            accepted = reserve_until_refused(ledger, "full")
            with pytest.raises(LedgerError, match="closed"):
                ledger.commit(release(0))
        (disk / "rubbish").unlink()
        assert verify(disk / "ledger", additive).unfinished >= 1 + accepted
        with Ledger.open(disk / "ledger", meter=additive) as ledger:
            ledger.reserve(release(999))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_database_that_may_not_grow_refuses_and_stays_whole(tmp_path):
    path = tmp_path / "ledger"
    ledger = begun(path, BUDGET)
    connection = ledger._store._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    accepted = reserve_until_refused(ledger, "full")
    report = verify(path, additive)
    assert (report.unfinished, report.charged) == (accepted, {"run": accepted})


def open_and_print(directory: Path) -> None:
    """Try to write and to read a ledger as somebody without rights; print what was said."""
    if os.geteuid() == 0:
        os.setuid(65534)
    doors = {
        "open": lambda path: Ledger.open(path, meter=additive),
        "verify": lambda path: verify(path, additive),
    }
    for name, door in doors.items():
        try:
            print(name, door(directory / "ledger"))
        except LedgerError as error:
            print(name, repr(error))


def test_a_read_only_ledger_refuses_to_open_and_can_still_be_verified(tmp_path):
    path = tmp_path / "ledger"
    with begun(path, BUDGET) as ledger:
        ledger.reserve(release(0))
    path.with_name("ledger.lock").unlink()
    path.chmod(0o444)
    for folder in own_folders(tmp_path):
        folder.chmod(0o555)
    try:
        printed = child(open_and_print, tmp_path, limit=lambda: None).splitlines()
    finally:
        for folder in own_folders(tmp_path):
            folder.chmod(0o700)
    assert printed[0].startswith("open LedgerError")
    assert printed[1].startswith("verify Verification")
    assert "charged={'run': 1}" in printed[1]


def test_a_ledger_is_never_read_without_its_log(tmp_path):
    path = tmp_path / "ledger"
    log = path.with_name("ledger-wal")
    with begun(path, BUDGET) as ledger:
        ledger.reserve(release(0))
        kept = path.read_bytes(), log.read_bytes()
    for file, content in zip((path, log), kept, strict=True):
        file.write_bytes(content)
    assert verify(path, additive).charged == {"run": 1}
    path.with_name("ledger-shm").unlink()
    path.chmod(0o444)
    log.chmod(0o000)
    for folder in own_folders(tmp_path):
        folder.chmod(0o555)
    try:
        printed = child(open_and_print, tmp_path, limit=lambda: None).splitlines()
    finally:
        for folder in own_folders(tmp_path):
            folder.chmod(0o700)
    assert [line.split("(")[0] for line in printed] == ["open LedgerError", "verify LedgerError"]


def test_rights_lost_in_the_middle_refuse_the_next_opening(tmp_path):
    path = tmp_path / "ledger"
    Ledger.create(path, BUDGET, additive).close()
    path.chmod(0o000)
    for folder in own_folders(tmp_path):
        folder.chmod(0o755)
    printed = child(open_and_print, tmp_path, limit=lambda: None).splitlines()
    assert [line.split("(")[0] for line in printed] == ["open LedgerError", "verify LedgerError"]


@pytest.mark.parametrize("suffix", ["", "-wal"])
@pytest.mark.parametrize("replaced", ["gone", "replaced"])
def test_a_ledger_whose_file_vanishes_while_open_refuses_before_release(tmp_path, suffix, replaced):
    path = tmp_path / "ledger"
    with begun(path, BUDGET) as ledger:
        ledger.reserve(release(0))
        file = Path(f"{path}{suffix}")
        content = file.read_bytes()
        file.unlink()
        if replaced == "replaced":
            file.write_bytes(content)
        with pytest.raises(LedgerError):
            ledger.commit(release(0))


def test_a_foreign_write_lock_refuses_and_changes_nothing(tmp_path):
    path = tmp_path / "ledger"
    with begun(path, BUDGET) as ledger:
        ledger._store._connection.execute("PRAGMA busy_timeout = 0")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(LedgerError, match="locked"):
                ledger.reserve(release(0))
    assert verify(path, additive).unfinished == 0


def test_an_error_that_is_not_the_files_also_closes_the_ledger(tmp_path, monkeypatch):
    path = tmp_path / "ledger"
    ledger = begun(path, BUDGET)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "_insert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ledger.reserve(release(0))
    with pytest.raises(LedgerError, match="closed"):
        ledger.reserve(release(0))
    assert verify(path, additive).unfinished == 0
