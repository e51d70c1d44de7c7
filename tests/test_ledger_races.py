import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import campaign_ledger
from campaign_ledger import additive, begun, release
from d2pfed.errors import LedgerError
from d2pfed.ledger import Budget, Ledger, verify
from test_ledger_crashes import campaign

BUDGET = Budget(1.0, 1e-5)


def test_sixteen_processes_in_turn_spend_the_budget_exactly(tmp_path):
    counts = campaign("race", 10, tmp_path)
    assert (counts["accepted"], counts["runs"], counts["over_budget"]) == (80, 8, 0)
    assert (counts["failed"], counts["without_row"]) == (0, 0)


def test_processes_that_take_over_from_each_other_never_exceed_the_budget(tmp_path):
    counts = campaign("race-takeover", 20, tmp_path)
    assert counts["accepted"] <= 20 * counts["runs"] <= 80
    assert (counts["failed"], counts["without_row"], counts["over_budget"]) == (0, 0, 0)


def test_a_stopped_server_cannot_commit_after_a_takeover(tmp_path):
    assert campaign("stops", 20, tmp_path) == {"stops": 20, "committed_by_sleepers": 0, "unfinished": 20}


def test_a_server_without_a_fence_is_caught_committing_after_a_takeover(tmp_path):
    with pytest.raises(AssertionError, match="a server of epoch 2 wrote in epoch 3"):
        campaign("stops-unfenced", 1, tmp_path)


def test_a_second_server_is_refused_at_once(tmp_path):
    path = tmp_path / "ledger"
    with Ledger.create(path, BUDGET, additive):
        with pytest.raises(LedgerError, match="another server has it open"):
            Ledger.open(path, meter=additive)
        with pytest.raises(LedgerError, match="another server has it open"):
            Ledger.create(path, BUDGET, additive)
        (tmp_path / "link").symlink_to(path)
        with pytest.raises(LedgerError, match="another server has it open"):
            Ledger.open(tmp_path / "link", meter=additive)
    Ledger.open(path, meter=additive).close()


def test_after_a_takeover_the_new_server_holds_the_lock(tmp_path):
    path = tmp_path / "ledger"
    with begun(path, BUDGET) as old, Ledger.open(path, take_over=True, meter=additive) as new:
        with pytest.raises(LedgerError, match="another server has it open"):
            Ledger.open(path, meter=additive)
        with pytest.raises(LedgerError, match="another server took over: found row 3 of epoch 2"):
            old.reserve(release(0))
        with pytest.raises(LedgerError, match="closed"):
            old.reserve(release(0))
        new.reserve(release(0))
    assert verify(path, additive).servers == 2


def test_who_waits_for_a_lock_that_is_replaced_waits_for_the_new_one(tmp_path):
    path = tmp_path / "ledger"
    epochs = []

    def wait() -> None:
        with Ledger.open(path, wait=True, meter=additive) as ledger:
            epochs.append(ledger.reserve(release(0)).epoch)

    old = begun(path, BUDGET)
    waiter = threading.Thread(target=wait)
    waiter.start()
    new = Ledger.open(path, take_over=True, meter=additive)
    old.close()
    new.reserve(release(1))
    new.close()
    waiter.join()
    assert epochs == [3]


def test_a_failed_opening_gives_the_lock_back(tmp_path):
    path = tmp_path / "ledger"
    with begun(path, BUDGET) as ledger:
        ledger.reserve(release(0))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(LedgerError, match="not this budget's meter"):
            Ledger.open(path, meter=lambda budget, _: additive(budget, ()))
        with pytest.raises(LedgerError, match="already exists"):
            Ledger.create(path, BUDGET, additive)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    Ledger.open(path, meter=additive).close()


def test_who_waits_for_a_lock_that_is_deleted_takes_a_new_one(tmp_path):
    path = tmp_path / "ledger"
    epochs = []

    def wait() -> None:
        with Ledger.open(path, wait=True, meter=additive) as ledger:
            epochs.append(ledger.reserve(release(0)).epoch)

    old = begun(path, BUDGET)
    sidecar = path.with_name("ledger.lock")
    inode = f":{sidecar.stat().st_ino} "
    waiter = threading.Thread(target=wait)
    waiter.start()
    while not any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()):
        assert waiter.is_alive()
    sidecar.unlink()
    old.close()
    waiter.join()
    assert epochs == [2]
    assert sidecar.exists()


def test_readers_see_a_whole_ledger_while_servers_come_and_go(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    path = tmp_path / "ledger"
    Ledger.create(path, Budget(1e6, 1e-5), additive).close()
    heads = [0]
    with subprocess.Popen(
        [sys.executable, campaign_ledger.__file__, "visits", "30", str(tmp_path)], env=environment
    ) as writer:
        while writer.poll() is None:
            heads.append(verify(path, additive).head.seq)
    assert writer.returncode == 0
    assert heads == sorted(heads)
    assert len(set(heads)) > 5
    assert verify(path, additive).servers == 31
