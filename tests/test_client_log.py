import math
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from d2pfed.errors import ConfigError, LedgerError
from d2pfed.ledger import client_log
from d2pfed.ledger import files as ledger_files
from d2pfed.ledger.client_log import (
    Anchor,
    Body,
    ClientHistory,
    ClientLog,
    Entry,
    LogRow,
    anchor_after,
    head_after,
    parse,
    require_announced,
)
from d2pfed.ledger.rows import Head
from d2pfed.numerics.randomness import digest
from support.crash_moments import Disk, lay_out

AUTHORITY, CLIENT = bytes(range(32)), 7


def log_in(root: Path, clock=None) -> ClientLog:
    home, outside = root / "home", root / "outside"
    for folder in (home, outside):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return ClientLog(home, outside, AUTHORITY, CLIENT, *([clock] if clock else []))


def begin(log: ClientLog, number: int) -> ClientHistory:
    """Append one row, whoever comes in between."""
    while True:
        if (after := log.append(log.read(), Entry.BEGUN, {"number": number})) is not None:
            return after


def numbers(history: ClientHistory) -> list[object]:
    return [body["number"] for body in history.bodies(Entry.BEGUN)]


@pytest.fixture
def log(tmp_path):
    made = log_in(tmp_path)
    made.create({"carried": "nothing"})
    for number in range(3):
        begin(made, number)
    return made


def copy(root: Path, target: Path) -> Path:
    shutil.copytree(root, target)
    return target


def test_heads_are_chained_as_documented(log, tmp_path):
    history = log.read()
    before = digest("d2pfed log", AUTHORITY, CLIENT)
    for number, row in enumerate(history.rows, 1):
        before = digest("d2pfed log", before, number, str(row.entry), row.text.encode())
        assert row.head == Head(number, before)
    assert history.head == Head(4, before)
    assert (tmp_path / "outside" / "head").read_text().startswith(f"4:{before.hex()} ")


def test_a_log_is_never_begun_by_itself_nor_twice(tmp_path):
    with pytest.raises(LedgerError, match="adopt"):
        ClientLog(tmp_path, tmp_path / "outside", AUTHORITY, CLIENT).read()
    log = log_in(tmp_path)
    with pytest.raises(LedgerError, match="missing"):
        log.read()
    log.create({})
    for lost in ("home/log", "outside/head"):
        with pytest.raises(LedgerError, match="already exists"):
            log_in(tmp_path).create({})
        (tmp_path / lost).unlink()
    log_in(tmp_path).create({})


def cut(root: Path, rows: int) -> None:
    file = root / "home" / "log"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[: len(lines) - rows]))


def edit(root: Path) -> None:
    file = root / "home" / "log"
    file.write_bytes(file.read_bytes().replace(b'"number":1', b'"number":9'))


DAMAGE = {
    "deleted": lambda root: (root / "home" / "log").unlink(),
    "emptied": lambda root: (root / "home" / "log").write_bytes(b""),
    "cut by one row": lambda root: cut(root, 1),
    "cut by two rows": lambda root: cut(root, 2),
    "cut in the middle of a row": lambda root: (root / "home" / "log").write_bytes(
        (root / "home" / "log").read_bytes()[:-9]
    ),
    "edited": edit,
    "without its anchor": lambda root: (root / "outside" / "head").unlink(),
    "with a damaged anchor": lambda root: (root / "outside" / "head").write_bytes(b"4:00"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_log_at_odds_with_its_anchor_is_refused_until_adopted(log, tmp_path, damage):
    seen = log.read()
    damage(tmp_path)
    for _ in range(2):
        with pytest.raises(LedgerError):
            log_in(tmp_path).read()
    with pytest.raises((LedgerError, ConfigError)):
        log_in(tmp_path).append(seen, Entry.BEGUN, {"number": 3})
    adopted = log_in(tmp_path).adopt({"carried": "all"})
    assert adopted.rows[-1].entry is Entry.DECLARATION
    again = log_in(tmp_path).read()
    assert again == adopted
    assert adopted.head.seq >= 4
    begin(log_in(tmp_path), 17)
    assert numbers(log_in(tmp_path).read())[-1] == 17


def test_without_the_anchor_check_a_log_cut_by_one_row_begins_anew(log, tmp_path, monkeypatch):
    cut(tmp_path, 1)
    monkeypatch.setattr(client_log, "require_anchored", lambda *_: None)
    assert numbers(log_in(tmp_path).read()) == [0, 1]


def test_an_older_anchor_is_refused_and_without_the_rule_it_is_not(log, tmp_path, monkeypatch):
    old = (tmp_path / "outside" / "head").read_bytes()
    begin(log, 3)
    begin(log, 4)
    (tmp_path / "outside" / "head").write_bytes(old)
    with pytest.raises(LedgerError, match="beyond its anchor by 2"):
        log_in(tmp_path).read()
    monkeypatch.setattr(client_log, "require_announced", lambda *_: None)
    assert numbers(log_in(tmp_path).read()) == [0, 1, 2, 3, 4]


def chained(log: ClientLog, tmp_path: Path, entry: Entry, body: Body, number: int | None = None) -> None:
    """Somebody who can write the log, and not the anchor, adds a row that follows from those before it."""
    row = log._row(log.read().head, entry, body, number)
    with (tmp_path / "home" / "log").open("ab") as file:
        file.write(row.line())


FOREIGN = {
    "a charge": (Entry.CHARGE, {"run": "a run", "release": ""}, None),
    "an attempt": (Entry.BEGUN, {"number": 9}, None),
    "a declaration above all that others have seen": (Entry.DECLARATION, {"carried": "nothing"}, 1 << 40),
}


@pytest.mark.parametrize(("entry", "body", "number"), FOREIGN.values(), ids=FOREIGN)
def test_a_row_that_somebody_else_has_chained_to_the_log_is_refused(log, tmp_path, entry, body, number):
    seen = log.read()
    chained(log, tmp_path, entry, body, number)
    for call in (log_in(tmp_path).read, lambda: log_in(tmp_path).append(seen, Entry.BEGUN, {"number": 3})):
        with pytest.raises(
            LedgerError, match="beyond its anchor by 1, and only the row that the anchor announces"
        ):
            call()
    assert log_in(tmp_path).adopt({"carried": "all"}).rows[-1].body["carried"] == "all"


def test_without_the_announcement_such_a_row_hides_a_rollback(log, tmp_path, monkeypatch):
    """A declaration speaks for all positions below its number: what peers remember of a lost row counts as held."""
    lost = Head(7, digest("a position of another life"))
    assert not log.read().holds(lost)
    chained(log, tmp_path, *FOREIGN["a declaration above all that others have seen"])
    monkeypatch.setattr(client_log, "require_announced", lambda *_: None)
    assert log_in(tmp_path).read().holds(lost)


def interrupted(root: Path, before: bytes, announced: Head) -> None:
    """Put the anchor back to where it announces a row, as a crash in the middle of `append` leaves it."""
    (root / "outside" / "head").write_bytes(replace(Anchor.decode(before), announced=announced).encode())


def test_a_crash_between_row_and_anchor_moves_the_anchor_up(log, tmp_path):
    old = (tmp_path / "outside" / "head").read_bytes()
    after = begin(log, 3)
    interrupted(tmp_path, old, after.head)
    assert log_in(tmp_path).read() == after
    assert (tmp_path / "outside" / "head").read_bytes() == Anchor(after.head).encode()


def test_a_crash_between_announcement_and_row_leaves_the_log_as_it_was(log, tmp_path):
    seen, anchor = log.read(), (tmp_path / "outside" / "head").read_bytes()
    interrupted(tmp_path, anchor, Head(5, digest("a row that was never written")))
    assert log_in(tmp_path).read() == seen
    assert (tmp_path / "outside" / "head").read_bytes() == anchor
    assert begin(log, 3).head.seq == 5


def test_who_goes_on_after_another_process_died_at_its_row_comes_second(log, tmp_path):
    seen, old = log.read(), (tmp_path / "outside" / "head").read_bytes()
    after = begin(log, 3)
    interrupted(tmp_path, old, after.head)
    assert log.append(seen, Entry.BEGUN, {"number": 4}) is None
    assert log.read() == after


def test_another_row_than_the_announced_one_is_refused(log, tmp_path):
    old = (tmp_path / "outside" / "head").read_bytes()
    begin(log, 3)
    interrupted(tmp_path, old, Head(5, digest("another row")))
    with pytest.raises(LedgerError, match="beyond its anchor by 1"):
        log_in(tmp_path).read()


def test_anchors_of_before_rows_were_announced_are_read(log, tmp_path):
    """The file at rest has not changed; what an older version left in the middle of a row is for a person."""
    head = log.read().head
    assert (tmp_path / "outside" / "head").read_text() == f"{head.encode()} 0 -\n"
    assert Anchor.decode(f"{head.encode()} 0 -\n".encode()) == Anchor(head)
    with pytest.raises(LedgerError, match="client adopt"):
        Anchor.decode(f"{head.encode()} 0 - {head.encode()} {head.encode()}\n".encode())


def test_a_line_that_a_crash_cut_short_is_removed_wherever_it_was_cut(log, tmp_path):
    file, anchor = tmp_path / "home" / "log", tmp_path / "outside" / "head"
    whole, old = file.read_bytes(), anchor.read_bytes()
    after = begin(log, 3)
    longer = file.read_bytes()
    for size in range(len(whole), len(longer)):
        file.write_bytes(longer[:size])
        interrupted(tmp_path, old, after.head)
        assert numbers(log_in(tmp_path).read()) == [0, 1, 2]
        assert file.read_bytes() == whole
    zeros = whole + bytes(len(longer) - len(whole))  # what some file systems leave of a block that was not written
    file.write_bytes(zeros)
    interrupted(tmp_path, old, after.head)
    assert numbers(log_in(tmp_path).read()) == [0, 1, 2]


def recorded(root: Path, monkeypatch) -> Disk:
    """A few rows, each followed by something that leaves; every moment of it."""
    sent = []
    with monkeypatch.context() as patched:
        disk = Disk(root, patched, lambda: len(sent))
        for number in range(3, 7):
            begin(log_in(root), number)
            sent.append(number)
    return disk


def unpaid(disk: Disk, root: Path) -> int:
    """In how many of the moments something had left without its row, or log and anchor did not agree."""
    bad = 0
    for place, moment in enumerate(disk.moments):
        for name, files in (("kill", moment.after_kill), ("power", moment.after_power_cut)):
            where = lay_out(root / f"{place}-{name}", files)
            try:
                found = numbers(log_in(where).read())
                bad += len(found) < 3 + moment.sent
            except LedgerError:
                bad += 1
    return bad


def test_power_loss_at_any_moment_leaves_log_and_anchor_agreed(log, tmp_path, monkeypatch):
    disk = recorded(tmp_path, monkeypatch)
    assert len(disk.moments) > 40
    assert unpaid(disk, tmp_path / "crashed") == 0


@pytest.mark.parametrize("part", ["append_file", "sync_directory"])
def test_a_missing_sync_is_caught(log, tmp_path, monkeypatch, part):
    original = getattr(ledger_files, part)

    def lazy(*arguments):
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", lambda descriptor: None)
            original(*arguments)

    monkeypatch.setattr(ledger_files, part, lazy)
    assert unpaid(recorded(tmp_path, monkeypatch), tmp_path / "crashed") > 0


def test_an_anchor_that_moves_before_its_row_is_caught(log, tmp_path, monkeypatch):
    append, replace_file = ledger_files.append_file, ledger_files.replace_file

    def late(file, content):
        pending.append((file, content))

    def moved(file, content):
        replace_file(file, content)
        while pending:
            append(*pending.pop())

    pending = []
    monkeypatch.setattr(ledger_files, "append_file", late)
    monkeypatch.setattr(ledger_files, "replace_file", moved)
    assert unpaid(recorded(tmp_path, monkeypatch), tmp_path / "crashed") > 0


def test_processes_on_one_machine_take_turns(log, tmp_path):
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda number: begin(log_in(tmp_path), number), range(3, 27)))
    history = log_in(tmp_path).read()
    assert sorted(numbers(history)) == list(range(27))


def test_whoever_came_second_is_told_and_adds_nothing(log, tmp_path):
    seen = log.read()
    begin(log_in(tmp_path), 3)
    assert log.append(seen, Entry.BEGUN, {"number": 4}) is None
    assert numbers(log.read()) == [0, 1, 2, 3]


def test_two_homes_on_one_machine_are_found_out_by_their_anchor(log, tmp_path):
    clone = copy(tmp_path / "home", tmp_path / "clone")
    begin(log, 3)
    with pytest.raises(LedgerError, match="lacks the position"):
        ClientLog(clone, tmp_path / "outside", AUTHORITY, CLIENT).read()


def test_a_home_restored_together_with_its_anchor_is_not_noticed_here(log, tmp_path):
    backup = copy(tmp_path, tmp_path.with_name(f"{tmp_path.name}-backup"))
    after = begin(log, 3)
    restored = log_in(backup).read()  # no complaint: only others can know
    assert not restored.holds(after.head)


def test_a_position_of_another_life_is_not_held(log, tmp_path):
    backup = copy(tmp_path, tmp_path.with_name(f"{tmp_path.name}-backup"))
    after, other = begin(log, 3), begin(log_in(backup), 4)
    assert after.head.seq == other.head.seq
    assert after.holds(after.head)
    assert after.holds(after.start)
    assert after.holds(log_in(tmp_path).read().rows[1].head)
    assert not after.holds(other.head)
    assert not after.holds(Head(2, after.head.hash))


def test_a_mark_refuses_everything_until_it_is_adopted(log, tmp_path):
    shown = Head(40, digest("a position of another life"))
    log.mark("shown by a peer", shown)
    seen = ClientHistory(log._start, (), 0, "")
    for call in (log.read, lambda: log.append(seen, Entry.BEGUN, {})):
        with pytest.raises(LedgerError, match="rolled back or cloned"):
            call()
    adopted = log.adopt({"carried": "all"})
    assert adopted.head.seq == 41
    assert adopted.holds(shown)
    assert log.read() == adopted
    assert begin(log, 3).head.seq == 42


def test_nothing_is_adopted_where_nothing_is_wrong(log):
    with pytest.raises(LedgerError, match="there is nothing to adopt"):
        log.adopt({"carried": "all"})


def test_adopting_can_be_interrupted_at_any_moment(log, tmp_path, monkeypatch):
    cut(tmp_path, 1)
    log.mark("shown by the server", Head(9, digest("elsewhere")))
    with monkeypatch.context() as patched:
        disk = Disk(tmp_path, patched, lambda: 0)
        log.adopt({"carried": "all"})
    for place, moment in enumerate(disk.moments):
        for name, files in (("kill", moment.after_kill), ("power", moment.after_power_cut)):
            where = log_in(lay_out(tmp_path / "crashed" / f"{place}-{name}", files))
            try:
                history = where.read()
            except LedgerError:
                history = where.adopt({"carried": "all"})
            assert history.rows[-1].entry is Entry.DECLARATION
            assert history.holds(Head(9, digest("elsewhere")))


def test_a_damaged_log_is_kept_aside_when_it_is_adopted(log, tmp_path):
    edit(tmp_path)
    damaged = (tmp_path / "home" / "log").read_bytes()
    log.adopt({"carried": "all"})
    (aside,) = (tmp_path / "home").glob("log.damaged-*")
    assert aside.read_bytes() == damaged


def test_the_newest_roster_is_remembered_outside_even_when_the_log_is_lost(log, tmp_path):
    after = log.append(log.read(), Entry.ROSTER, {"serial": 5, "digest": "ab" * 32})
    assert (after.serial, after.roster) == (5, "ab" * 32)
    (tmp_path / "home" / "log").unlink()
    adopted = log.adopt({"carried": "all"})
    assert (adopted.serial, adopted.roster) == (5, "ab" * 32)
    assert log.read().serial == 5


def test_a_clock_that_was_set_back_is_known_and_a_person_may_mend_it(tmp_path):
    now = [1000.0]
    log = log_in(tmp_path, lambda: now[0])
    log.create({})
    now[0] = 5_000_000.0
    begin(log, 0)
    now[0] = 2000.0
    assert begin(log, 1).latest_seconds() == 5_000_000
    (tmp_path / "outside" / "head").unlink()
    assert log.adopt({}).latest_seconds() == 2000


def test_a_row_of_a_clock_that_was_ahead_can_be_adopted(tmp_path):
    now = [5_000_000.0]
    log = log_in(tmp_path, lambda: now[0])
    log.create({})
    with pytest.raises(LedgerError, match="nothing to adopt"):
        log.adopt({})
    now[0] = 2000.0
    assert log.adopt({}).latest_seconds() == 2000
    assert log.read().latest_seconds() == 2000
    with pytest.raises(LedgerError, match="nothing to adopt"):
        log.adopt({})


@pytest.mark.parametrize("damage", [b"", b"garbage", b"garbage\n", b"\xff\n\n12:ab why"])
def test_a_damaged_mark_refuses_everything_until_it_is_adopted(log, tmp_path, damage):
    (tmp_path / "outside" / "mark").touch(mode=0o600)
    (tmp_path / "outside" / "mark").write_bytes(damage)
    with pytest.raises(LedgerError, match="client adopt"):
        log.read()
    log.mark("a peer", Head(90, bytes(32)))  # a line of its own
    assert log.adopt({"carried": "nothing"}).head.seq == 91
    log.read()


@pytest.mark.parametrize("damage", [b"", b"garbage\n", b"1:ab 3 -\n", b"1:" + b"0" * 64 + b" 3 xyz\n"])
def test_a_damaged_anchor_refuses_everything_until_it_is_adopted(log, tmp_path, damage):
    (tmp_path / "outside" / "head").write_bytes(damage)
    with pytest.raises(LedgerError, match="client adopt"):
        log.read()
    log.adopt({"carried": "nothing"})
    log.read()


def test_a_serial_is_never_forgotten_whatever_the_rows_say(log):
    """Rows of an older roster, put back under an anchor that has seen a newer one, do not bring it back."""
    rows = log.append(log.read(), Entry.ROSTER, {"serial": 5, "digest": "ab" * 32}).rows
    newer = Anchor(rows[-1].head, 9, "cd" * 32)
    assert anchor_after(newer, rows) == newer
    assert anchor_after(None, rows) == Anchor(rows[-1].head, 5, "ab" * 32)
    assert anchor_after(Anchor(rows[-1].head, 3, "cd" * 32), rows).serial == 5


@pytest.mark.parametrize("name", ["home/log", "outside/head", "outside/mark", "outside/lock"])
def test_links_are_not_followed(log, tmp_path, name):
    file = tmp_path / name
    target = tmp_path / "elsewhere"
    if file.exists():
        file.rename(target)
    else:
        target.write_bytes(b"")
    file.symlink_to(target)
    with pytest.raises(ConfigError, match="must not be a link"):
        log_in(tmp_path).read()


@pytest.mark.parametrize("name", ["home/log", "outside/head", "outside"])
def test_files_that_others_can_write_are_refused(log, tmp_path, name):
    (tmp_path / name).chmod(0o770 if name == "outside" else 0o660)
    with pytest.raises(ConfigError, match="writable by its owner alone"):
        log_in(tmp_path).read()


def test_files_of_somebody_else_are_refused(log, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs the right to give a file away")
    os.chown(tmp_path / "home" / "log", 65534, -1)
    with pytest.raises(ConfigError, match="must belong to the user"):
        log_in(tmp_path).read()


def test_everything_is_for_its_owner_alone(log, tmp_path):
    log.mark("shown", Head(9, bytes(32)))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)


def test_who_comes_second_is_told_of_a_log_that_was_cut_in_between(log, tmp_path):
    seen = log.read()
    begin(log_in(tmp_path), 3)
    file = tmp_path / "home" / "log"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(LedgerError, match="lacks the position"):
        log.append(seen, Entry.BEGUN, {"number": 4})


def test_an_interrupted_beginning_begins_anew_and_another_log_does_not(tmp_path):
    made = log_in(tmp_path)
    made.create({"carried": "first"})
    (tmp_path / "outside" / "head").unlink()
    made.create({"carried": "second"})
    assert made.read().bodies(Entry.OPENING)[0]["carried"] == "second"
    begin(made, 0)
    (tmp_path / "outside" / "head").unlink()
    with pytest.raises(LedgerError, match="already exists"):
        made.create({"carried": "third"})


def test_the_first_row_has_a_time_as_well(tmp_path):
    assert log_in(tmp_path, clock=lambda: 100.0).create({}).latest_seconds() == 100
    assert ClientHistory(Head(0, bytes(32)), (), 0, "").latest_seconds() == 0


def test_a_row_beyond_the_anchor_and_a_torn_line_are_more_than_a_crash(log):
    rows = log.read().rows
    before = Anchor(rows[-2].head, announced=rows[-1].head)
    require_announced(rows, b"", before)
    require_announced(rows, b"half", Anchor(rows[-1].head))
    with pytest.raises(LedgerError, match="beyond its anchor by 2"):
        require_announced(rows, b"half", before)


def test_a_row_says_names_and_values():
    start = Head(0, bytes(32))

    def line(text: str) -> bytes:
        return LogRow(Entry.CHARGE, {}, text, head_after(start, 1, Entry.CHARGE, text)).line()

    assert len(parse(start, line('{"time":1}'))[0]) == 1
    assert parse(start, line("[1]")) == ((), line("[1]"))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_has_no_word_for_is_never_written(log, number):
    before = log.read()
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.append(before, Entry.BEGUN, {"number": number})
    assert log.read() == before


def test_no_file_stays_open(log, tmp_path):
    """A client runs for months; whatever it leaves open with each row is missing in the end."""
    before = set(Path("/dev/fd").iterdir())
    begin(log, 3)
    with (tmp_path / "home" / "log").open("ab") as file:
        file.write(b"torn")
    log.read()  # cuts it
    log.mark("cloned", Head(50, bytes(32)))
    log.adopt({"carried": "nothing"})
    (tmp_path / "home" / "log").chmod(0o666)
    with pytest.raises(ConfigError, match="writable by its owner alone"):
        log.read()
    with pytest.raises(ConfigError, match="writable by its owner alone"):
        ledger_files.append_file(tmp_path / "home" / "log", b"more")
    assert set(Path("/dev/fd").iterdir()) <= before
