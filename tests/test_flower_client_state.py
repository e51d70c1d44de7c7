import stat
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from d2pfed.deploy import state as client_state
from d2pfed.deploy.state import AcceptedRuns, RunTerms, SavedPhase, SavedPhases
from d2pfed.errors import PeerError
from support.crash_moments import Disk, lay_out

SESSION, OTHER = b"s" * 32, b"o" * 32


def saved(seconds: float = 100.0, begun: float = 0.0) -> SavedPhase:
    now = time.time() + begun
    return SavedPhase("a run", b"invitation", now, now + seconds, b"secret state")


def files(directory):
    return sorted(path.name for path in (directory / "states").iterdir() if path.name != "lock")


def test_saved_secrets_are_used_once(tmp_path):
    for _ in range(20):
        SavedPhases(tmp_path).save(SESSION, saved())

        def take(_):
            try:
                return SavedPhases(tmp_path).take(SESSION)
            except PeerError:
                return None

        with ThreadPoolExecutor(8) as pool:
            taken = [each for each in pool.map(take, range(8)) if each is not None]
        assert [each.state for each in taken] == [b"secret state"]
        assert files(tmp_path) == []


def test_secrets_that_were_taken_do_not_come_back_after_a_power_cut(tmp_path, monkeypatch):
    SavedPhases(tmp_path).save(SESSION, saved())
    used = []
    with monkeypatch.context() as patched:
        disk = Disk(tmp_path, patched, lambda: len(used))
        SavedPhases(tmp_path).take(SESSION)
        used.append("sent")
        disk._note("sent")
    for place, moment in enumerate(disk.moments):
        for name, found in (("kill", moment.after_kill), ("power", moment.after_power_cut)):
            where = lay_out(tmp_path / "crashed" / f"{place}-{name}", found)
            if moment.sent:
                with pytest.raises(PeerError, match="no saved phase for that session"):
                    SavedPhases(where).take(SESSION)


def test_a_removal_that_is_not_synced_is_caught_coming_back(tmp_path, monkeypatch):
    SavedPhases(tmp_path).save(SESSION, saved())
    with monkeypatch.context() as patched:
        disk = Disk(tmp_path, patched, lambda: 0)
        patched.setattr(client_state, "sync_directory", lambda path: None)
        SavedPhases(tmp_path).take(SESSION)
        disk._note("sent")
    where = lay_out(tmp_path / "crashed", disk.moments[-1].after_power_cut)
    assert SavedPhases(where).take(SESSION).state == b"secret state"


def test_an_attempt_is_over_when_its_time_is(tmp_path):
    for each in (saved(99, begun=-100), saved(50, begun=50)):  # too late, or a clock that was set back
        SavedPhases(tmp_path).save(SESSION, each)
        with pytest.raises(PeerError, match="expired"):
            SavedPhases(tmp_path).take(SESSION)
        with pytest.raises(PeerError, match="no saved phase for that session"):
            SavedPhases(tmp_path).take(SESSION)


def test_expired_damaged_and_abandoned_state_is_erased(tmp_path, caplog):
    SavedPhases(tmp_path).save(SESSION, saved())
    SavedPhases(tmp_path).save(OTHER, saved(99, begun=-100))
    folder = tmp_path / "states"
    good = (folder / f"{SESSION.hex()}.state").read_bytes()
    (folder / "damaged.state").write_bytes(good[:-1] + b"?")
    (folder / "empty.state").write_bytes(b"")
    (folder / f".{OTHER.hex()}.state.4711").write_bytes(good)
    (folder / "link.state").symlink_to(folder / f"{SESSION.hex()}.state")
    SavedPhases(tmp_path).sweep()
    assert files(tmp_path) == [f"{SESSION.hex()}.state"]
    assert "damaged.state is erased: a saved phase is damaged" in caplog.text
    assert SavedPhases(tmp_path).take(SESSION).state == b"secret state"


def test_a_directory_among_the_states_blocks_nothing(tmp_path, caplog):
    SavedPhases(tmp_path).save(SESSION, saved())
    (tmp_path / "states" / "x.state" / "within").mkdir(parents=True)
    SavedPhases(tmp_path).sweep()
    assert files(tmp_path) == [f"{SESSION.hex()}.state"]
    assert "x.state must be a plain file" in caplog.text


def test_what_cannot_be_erased_blocks_nothing_and_is_named(tmp_path, monkeypatch, caplog):
    (tmp_path / "states" / "x.state").mkdir(parents=True)

    def busy(path):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(client_state.shutil, "rmtree", busy)
    SavedPhases(tmp_path).sweep()
    assert "x.state cannot be erased (Device or resource busy): remove it" in caplog.text


def test_what_is_kept_is_not_printed():
    assert "secret state" not in repr(saved())


def test_a_damaged_state_blocks_no_other(tmp_path):
    SavedPhases(tmp_path).save(SESSION, saved())
    SavedPhases(tmp_path).save(OTHER, saved())
    (tmp_path / "states" / f"{OTHER.hex()}.state").write_bytes(b"\xff" * 40)
    with pytest.raises(PeerError, match="damaged"):
        SavedPhases(tmp_path).take(OTHER)
    assert SavedPhases(tmp_path).take(SESSION).state == b"secret state"


def test_secrets_from_before_the_machine_was_started_are_erased(tmp_path, monkeypatch):
    SavedPhases(tmp_path).save(SESSION, saved())
    SavedPhases(tmp_path).save(OTHER, saved())
    monkeypatch.setattr(client_state, "boot", lambda: "another start")
    with pytest.raises(PeerError, match="before the machine restarted"):
        SavedPhases(tmp_path).take(OTHER)
    SavedPhases(tmp_path).sweep()
    assert files(tmp_path) == []


def test_a_new_attempt_erases_the_secrets_of_the_one_before(tmp_path):
    SavedPhases(tmp_path).save(SESSION, saved())
    SavedPhases(tmp_path).sweep(lambda each: each.run == "another run")
    assert files(tmp_path) == [f"{SESSION.hex()}.state"]
    SavedPhases(tmp_path).sweep(lambda each: each.run == "a run")
    assert files(tmp_path) == []


def test_what_is_kept_is_readable_by_its_owner_alone(tmp_path):
    SavedPhases(tmp_path).save(SESSION, saved())
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in (tmp_path / "states").iterdir())
    assert stat.S_IMODE((tmp_path / "states").stat().st_mode) == 0o700


TERMS = RunTerms("a plan", "a layout", 3, b"roster", b"policy")


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"plan": "another"}, "another plan or layout"),
        ({"layout": "another"}, "another plan or layout"),
        ({"roster": b"newer", "layout": "another"}, "another plan or layout"),
        ({"first_draw": 4}, "first draw under one roster is 3, got 4"),
    ],
)
def test_a_run_keeps_the_terms_that_it_was_announced_with(tmp_path, change, refusal):
    runs = AcceptedRuns(tmp_path)
    runs.accept("a run", TERMS)
    with pytest.raises(PeerError, match=refusal):
        runs.accept("a run", replace(TERMS, **change))
    assert runs.terms("a run") == TERMS
    runs.accept("another run", replace(TERMS, **change))


def test_a_run_may_be_announced_again_under_a_newer_roster(tmp_path):
    runs = AcceptedRuns(tmp_path)
    for terms in (TERMS, TERMS, replace(TERMS, roster=b"newer", first_draw=0, allowed=b"another policy")):
        runs.accept("a run", terms)
        assert AcceptedRuns(tmp_path).terms("a run") == terms
    with pytest.raises(PeerError, match="was never announced to this client"):
        runs.terms("another run")
