"""A silo that dies between any two lines of a step, or loses its power: one answer at most, and never without a row."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from d2pfed.errors import D2PFedError
from d2pfed.ledger import keystore
from d2pfed.ledger.client_log import ClientLog, Entry
from d2pfed.ledger.files import make_directory
from d2pfed.ledger.keystore import VolatileFile
from d2pfed.numerics.randomness import Entropy
from d2pfed.secagg import standing
from support.crash_moments import Disk, lay_out
from support.standing import SILOS, Silos, make_epoch
from test_standing_malicious import request

VICTIM = SILOS[0]


@dataclass
class DurableSilo:
    """A silo with its log, anchor and state in files below a root."""

    root: Path
    silos: Silos
    checks_row: bool = True
    advances: bool = True
    charges: bool = True

    def __post_init__(self):
        make_directory(self.root / "home")
        self.log = ClientLog(self.root / "home", self.root / "anchor", bytes(32), VICTIM, lambda: 0.0)
        if not self.log.has_begun():
            self.log.create({"carried": "nothing"})
        self.file = VolatileFile(self.root / "state", "keys", keys_on_disk=True)

    def keep(self, state: standing.State):
        self.file.write(state.encode(), self.log.read().head)

    def rows(self) -> list[int]:
        return [int(str(body["step"])) for body in self.log.read().bodies(Entry.CHARGE)]

    # what `standing.answer_step` needs

    def read(self):
        data = self.file.read(self.log.read().holds)
        return None if data is None else standing.State.decode(self.silos.epoch, VICTIM, data)

    def advance(self, move):
        def change(data):
            state, result = move(standing.State.decode(self.silos.epoch, VICTIM, data))
            return (state.encode() if self.advances else data), result

        return self.file.update(self.log.read().holds, change, lambda: self.log.read().head)

    def charge(self, step):
        if not self.charges:
            return
        while True:
            history = self.log.read()
            if self.checks_row:
                standing.require_charge_once(self.rows(), step.number)
            if self.log.append(history, Entry.CHARGE, {"run": step.run, "step": step.number}) is not None:
                return

    def answer(self, data: bytes) -> bytes:
        def contribute(step, task, model):  # fresh coins and noise every time
            self.charge(step)
            return self.silos.epoch.ring.uniform(Entropy.system().stream(), self.silos.epoch.dimension)

        return standing.answer_step(self.silos.epoch, VICTIM, data, store=self, contribute=contribute)


def set_up(root: Path, **planted) -> tuple[DurableSilo, bytes]:
    silos = Silos(make_epoch())
    silos.set_up()
    silo = DurableSilo(root, silos, **planted)
    silo.keep(silos.by_client[VICTIM].store.state)
    return silo, request(silos, VICTIM, 0, 0)


def crash_everywhere(tmp_path, monkeypatch, **planted):
    """Answer once while all system calls are watched; at each moment start again from what was left, and ask again.

    Returns pairs of the answers that have left by then (before the crash, after it), with the rows after it.
    """
    silo, asked = set_up(tmp_path / "disk", **planted)
    sent: list[bytes] = []
    with monkeypatch.context() as patched:
        disk = Disk(tmp_path / "disk", patched, lambda: len(sent))
        sent.append(silo.answer(asked))
        disk._note("after sending")
    found = []
    for number, moment in enumerate(disk.moments):
        for kind, files in (("kill", moment.after_kill), ("power", moment.after_power_cut)):
            again = DurableSilo(lay_out(tmp_path / f"{kind}-{number}", files), silo.silos, **planted)
            after = []
            with suppress(D2PFedError):
                after.append(again.answer(asked))
            found.append((moment.call, sent[: moment.sent], after, again.rows()))
    return found


def is_safe(found) -> bool:
    """One answer at most for one context, and none without its row."""
    return all(
        len({*before, *after}) <= 1 and (0 in rows or not (before or after)) for _, before, after, rows in found
    )


def test_a_crash_leaves_at_most_one_answer_and_none_without_a_row(tmp_path, monkeypatch):
    found = crash_everywhere(tmp_path, monkeypatch)
    assert len(found) > 20
    assert is_safe(found)
    answered_later = [call for call, before, after, _ in found if after]
    assert answered_later  # a crash before the charge costs nothing
    assert any(
        rows and not before and not after for _, before, after, rows in found
    )  # charged, and silent for good


@pytest.mark.parametrize(
    ("planted", "is_found"),
    [
        ({"checks_row": False}, False),  # the keys have moved on: one guard is left
        ({"advances": False}, False),  # the row is there: the other guard is left
        ({"checks_row": False, "advances": False}, True),
        ({"charges": False}, True),
    ],
)
def test_the_crashes_find_what_is_left_out(tmp_path, monkeypatch, planted, is_found):
    assert is_safe(crash_everywhere(tmp_path, monkeypatch, **planted)) is not is_found


def test_power_loss_takes_a_state_in_memory_with_it(tmp_path, monkeypatch):
    """On a file system in memory nothing of the state is left; the log is, and the silo asks for a new epoch."""
    silo, asked = set_up(tmp_path / "disk")
    answer = silo.answer(asked)
    (tmp_path / "disk" / "state" / "keys").unlink()
    with pytest.raises(D2PFedError, match="needs a new one"):
        silo.answer(asked)
    assert silo.rows() == [0]
    assert answer


def test_two_processes_that_answer_the_same_request_send_one_answer(tmp_path, monkeypatch):
    """One fails at its row, before it trains."""
    silo, asked = set_up(tmp_path / "disk")
    other, answers = DurableSilo(tmp_path / "disk", silo.silos), []
    kept = silo.charge

    def charge(step):  # before this one's charge, another process answers
        answers.append(other.answer(asked))
        kept(step)

    silo.charge = charge
    with pytest.raises(D2PFedError, match="charged before"):
        silo.answer(asked)
    assert len(answers) == 1


def test_another_start_of_the_machine_finds_no_keys(tmp_path, monkeypatch):
    silo, asked = set_up(tmp_path / "disk")
    monkeypatch.setattr(keystore, "boot", lambda: "another start")
    with pytest.raises(D2PFedError, match="needs a new one"):
        silo.answer(asked)
    assert "another start" in silo.file.refusal


def test_answers_differ_from_one_life_to_the_next(tmp_path):
    """What the crashes compare is not constant: without a crash two silos of the same keys send different bytes."""
    first, asked = set_up(tmp_path / "one")
    second, _ = set_up(tmp_path / "two")
    assert first.answer(asked) != second.answer(asked)
