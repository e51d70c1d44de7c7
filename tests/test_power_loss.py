"""What a run directory has said is kept survives a power cut; each sync that it makes is one that it needs."""

import errno
import os
from dataclasses import dataclass

import numpy as np
import pytest

from d2pfed.errors import D2PFedError
from d2pfed.ledger import Budget, Head, Ledger, read_budget
from d2pfed.ledger.files import replace_file
from d2pfed.runs.directory import Checkpoint, RunDirectory
from d2pfed.training import ServerOptimizer
from support.power import Disk

BUDGET = Budget(1.0, 1e-5)
STATE = ServerOptimizer().start(np.arange(4, dtype=np.float32))
HEAD = Head(3, bytes(32))


@dataclass
class Run:
    """A run directory two folders below a disk's root, opened when it is first used."""

    disk: Disk

    def __post_init__(self):
        self.path = self.disk.root / "runs" / "run"
        self.opened = None

    def open(self):
        self.opened = RunDirectory.open(self.path, '{"settings": 1}')


def after(cut):
    return cut / "runs" / "run"


def make_twice(run):
    run.opened.append('{"round": 1}')
    run.opened.append('{"round": 2}')


# What is done, and what must be there after the cut.
STEPS = {
    "open": (Run.open, lambda cut, _run: (after(cut) / "settings.json").read_text() == '{"settings": 1}'),
    "identity": (
        lambda run: run.opened.identity(),
        lambda cut, run: (after(cut) / "identity").read_bytes() == (run.path / "identity").read_bytes(),
    ),
    "ledger": (
        lambda run: Ledger.create(run.path / "ledger.sqlite", BUDGET).close(),
        lambda cut, _run: read_budget(after(cut) / "ledger.sqlite") == BUDGET,
    ),
    "seen": (lambda run: run.opened.note(HEAD), lambda cut, _run: reopened(cut).seen() == HEAD),
    "metrics": (
        make_twice,
        lambda cut, _run: (after(cut) / "metrics.jsonl").read_text() == '{"round": 1}\n{"round": 2}\n',
    ),
    "checkpoint": (
        lambda run: run.opened.save(Checkpoint(STATE, HEAD.encode())),
        lambda cut, _run: np.array_equal(reopened(cut).load().state.params, STATE.params),
    ),
    "settings": (
        lambda run: run.opened.replace("settings.json", b"other"),
        lambda cut, _run: (after(cut) / "settings.json").read_bytes() == b"other",
    ),
}


def reopened(cut):
    directory = RunDirectory.open(after(cut), (after(cut) / "settings.json").read_text())
    directory.close()
    return directory


def survives(step, tmp_path, monkeypatch, skipped=frozenset()):
    """Do all steps up to this one, cut the power, and say whether this one's effect is there, and its syncs."""
    root = tmp_path / "disk"
    root.mkdir()
    with monkeypatch.context() as patched:
        disk = Disk(root, patched)
        run = Run(disk)
        for name, (do, _) in STEPS.items():
            before = disk.count
            if name == step:
                disk.skipped = frozenset(before + number for number in skipped)
            do(run)
            if name == step:
                break
        syncs = disk.count - before
        run.opened.close()
        cut = disk.cut(tmp_path / "left")
    try:
        return STEPS[step][1](cut, run), syncs
    except (OSError, D2PFedError, AttributeError):
        return False, syncs


@pytest.mark.parametrize("step", STEPS)
def test_what_was_kept_survives_a_power_cut(tmp_path, monkeypatch, step):
    assert survives(step, tmp_path, monkeypatch)[0]


@pytest.mark.parametrize("step", STEPS)
def test_every_sync_is_needed(tmp_path, monkeypatch, step):
    """The planted bugs: each sync of each step left out by itself takes the step's effect with it."""
    (tmp_path / "whole").mkdir()
    _, syncs = survives(step, tmp_path / "whole", monkeypatch)
    assert syncs >= 2
    for number in range(syncs):
        place = tmp_path / f"without-{number}"
        place.mkdir()
        kept, _ = survives(step, place, monkeypatch, frozenset({number}))
        last = step == "metrics" and number == 0  # the second line's sync covers the first line too
        assert kept == last, f"sync {number} of {step} can be left out"


@pytest.mark.parametrize("step", [name for name in STEPS if name != "open"])
def test_a_sync_that_fails_is_an_error_that_names_the_file(tmp_path, monkeypatch, step):
    run = Run(Disk(tmp_path, monkeypatch))
    for name, (do, _) in STEPS.items():
        if name == step:
            break
        do(run)

    def fail(_descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(D2PFedError, match="Input/output error"):
        STEPS[step][0](run)
    run.opened.close()


def test_a_cut_takes_what_was_never_synced(tmp_path, monkeypatch):
    disk = Disk(tmp_path, monkeypatch)
    (tmp_path / "file").write_bytes(b"content")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    assert (disk.cut(tmp_path.with_name("left")) / "file").read_bytes() == b""


@pytest.mark.parametrize("skipped", [None, 0, 1])
def test_a_replaced_file_survives_a_power_cut_old_or_new(tmp_path, monkeypatch, skipped):
    """The planted twins leave out the sync of the content, and that of the directory."""
    root = tmp_path / "disk"
    root.mkdir()
    disk = Disk(root, monkeypatch)
    replace_file(root / "file", b"old", mode=0o644)
    disk.skipped = frozenset() if skipped is None else frozenset({disk.count + skipped})
    replace_file(root / "file", b"new", mode=0o644)
    left = (disk.cut(tmp_path / "left") / "file").read_bytes()
    assert left == {None: b"new", 0: b"", 1: b"old"}[skipped]
    assert (root / "file").stat().st_mode & 0o077 == 0o044
