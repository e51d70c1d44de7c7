import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from campaign_ledger import additive, begun, plan_of, release
from d2pfed.errors import LedgerError
from d2pfed.ledger import (
    Budget,
    ChargedRun,
    Head,
    Key,
    Ledger,
    RowKind,
    Verification,
    encode_release,
    read_budget,
    read_rows,
    verify,
)
from d2pfed.ledger.rows import chained_row, first_row
from d2pfed.numerics import canonical

BUDGET = Budget(1.0, 1e-5)
CHANGES = {
    "seq": "seq + 100",
    "epoch": "epoch + 1",
    "kind": "CASE kind WHEN 'open' THEN 'create' ELSE 'open' END",
    "run": "coalesce(run, '') || 'x'",
    "round": "coalesce(round, 0) + 7",
    "attempt": "coalesce(attempt, 0) + 7",
    "body": "body || ' '",
    "epsilon": "'0x0.0p+0x'",
    "hash": "zeroblob(32)",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger of two servers: one commit, one void attempt, one unfinished, then one more commit."""
    path = tmp_path / "ledger"
    with begun(path, BUDGET) as ledger:
        ledger.reserve(release(0))
        ledger.commit(release(0, contributors=16))
        ledger.reserve(release(1))
        ledger.void("run", 1, 0)
        ledger.reserve(release(1, 1))
    with Ledger.open(path, meter=additive) as ledger:
        ledger.reserve(release(1, 2))
        ledger.commit(release(1, 2))
    return path


def alter(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def test_a_ledger_that_holds_together_is_summed_up(path):
    report = verify(path, additive)
    assert report == Verification(
        budget=BUDGET,
        head=read_rows(path)[-1].head,
        servers=2,
        committed=2,
        void=1,
        unfinished=1,
        runs=(ChargedRun("run", "owner", plan_of(8)),),
        charged={"run": 3},
        spent=1.0,
        units=0,
        of=0,
    )


def test_rows_tell_what_a_table_needs(path):
    rows = read_rows(path)
    assert [row.kind.value for row in rows] == (
        ["create", "open", "begin", "reserve", "commit", "reserve", "void", "reserve", "open", "reserve", "commit"]
    )
    assert [row.seq for row in rows] == list(range(11))
    assert [row.release.participants for row in rows if row.kind is RowKind.COMMIT] == [(), ()]
    assert [row.epsilon for row in rows] == [0, 0, *[1] * 9]  # the run is charged when it begins
    assert read_budget(path) == BUDGET


def test_it_can_be_verified_while_a_server_writes(path):
    with Ledger.open(path, meter=additive) as ledger:
        for number in range(2, 6):
            ledger.reserve(release(number))
            assert verify(path, additive).head == ledger.head()
            assert verify(path, additive).spent == ledger.spent()


def test_another_process_can_verify_it(path):
    program = (
        "import sys; from pathlib import Path; from campaign_ledger import additive\n"
        "from d2pfed.ledger import verify; print(verify(Path(sys.argv[1]), additive).spent)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with Ledger.open(path, meter=additive) as ledger:
        ledger.reserve(release(7))
        command = [sys.executable, "-c", program, str(path)]
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert float(answer.stdout) == ledger.spent()


@pytest.mark.parametrize("column", CHANGES)
def test_a_change_of_any_field_of_any_row_is_found(path, tmp_path, column):
    content = path.read_bytes()
    for seq in range(11):
        copy = tmp_path / f"copy-{seq}"
        copy.write_bytes(content)
        alter(copy, f"UPDATE entry SET {column} = {CHANGES[column]} WHERE seq = {seq}")
        with pytest.raises(LedgerError, match=rf"row ({seq}|{seq + 1}|{seq + 100}):"):
            verify(copy, additive)
        with pytest.raises(LedgerError):
            Ledger.open(copy, meter=additive)


def test_a_missing_row_is_found_and_a_missing_last_one_by_a_head(path, tmp_path):
    content, head = path.read_bytes(), read_rows(path)[-1].head
    for seq in range(10):
        copy = tmp_path / f"copy-{seq}"
        copy.write_bytes(content)
        alter(copy, f"DELETE FROM entry WHERE seq = {seq}")
        with pytest.raises(LedgerError, match=f"row {seq + 1}:"):
            verify(copy, additive)
    alter(path, "DELETE FROM entry WHERE seq = 10")
    assert verify(path, additive).unfinished == 2
    with Ledger.open(path, meter=additive) as ledger, pytest.raises(LedgerError):
        ledger.require_head(head)
    alter(path, "DELETE FROM entry")
    with pytest.raises(LedgerError, match="no rows"):
        verify(path, additive)


def forge(path: Path, *steps) -> None:
    """Write a ledger whose chain of hashes is right, whatever its rows say."""
    row = first_row(BUDGET)
    rows = [row]
    for epoch, kind, key, body, epsilon in ((1, RowKind.OPEN, None, "", 0.0), *steps):
        row = chained_row(row.head, epoch=epoch, kind=kind, key=key, body=body, epsilon=epsilon)
        rows.append(row)
    Ledger.create(path, BUDGET, additive).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM entry")
        for row in rows:
            key = (row.key.run, row.key.round, row.key.attempt) if row.key else (None, None, None)
            values = (row.seq, row.epoch, row.kind.value, *key, row.body, float(row.epsilon).hex(), row.hash)
            connection.execute("INSERT INTO entry VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)


KEY, BODY = Key("run", 0, 0), encode_release(release(0))
BEGIN = (1, RowKind.BEGIN, None, canonical.encode(ChargedRun("run", "owner", plan_of(1))), 0.125)
RESERVE = (1, RowKind.RESERVE, KEY, BODY, 0.125)
COMMIT = (1, RowKind.COMMIT, KEY, BODY, 0.125)
VOID = (1, RowKind.VOID, KEY, "", 0.125)


def test_a_forged_ledger_that_keeps_the_rules_is_as_good_as_a_real_one(tmp_path):
    forge(tmp_path / "ledger", BEGIN, RESERVE, COMMIT)
    assert verify(tmp_path / "ledger", additive).spent == 0.125


def beginning(epsilon: float, attempts: int = 1, run: str = "run", owner: str = "owner") -> tuple:
    return (1, RowKind.BEGIN, None, canonical.encode(ChargedRun(run, owner, plan_of(attempts))), epsilon)


def reserving(number: int = 0, attempt: int = 0, contributors: int = 8, epsilon: float = 0.125) -> tuple:
    text = encode_release(release(number, attempt, contributors))
    return (1, RowKind.RESERVE, Key("run", number, attempt), text, epsilon)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([reserving(epsilon=0.0)], "row 2: run run has not begun"),
        ([BEGIN, COMMIT], "row 3: .*commit cannot follow nothing"),
        ([BEGIN, RESERVE, COMMIT, VOID], "row 5: .*void cannot follow commit"),
        ([BEGIN, RESERVE, VOID, COMMIT], "row 5: .*commit cannot follow void"),
        ([BEGIN, RESERVE, (2, *COMMIT[1:])], "row 4: a server of epoch 2 wrote in epoch 1"),
        ([(2, RowKind.OPEN, None, "", 0.0), BEGIN], "row 3: a server of epoch 1 wrote in epoch 2"),
        ([BEGIN, (2, RowKind.OPEN, None, "", 0.125), RESERVE], "row 4: a server of epoch 1 wrote in epoch 2"),
        ([(3, RowKind.OPEN, None, "", 0.0)], "row 2: a server begins epoch 2, got 3"),
        ([(2, RowKind.OPEN, KEY, "", 0.0)], "row 2: a server's first row"),
        ([(2, RowKind.OPEN, None, "x", 0.0)], "row 2: a server's first row"),
        ([BEGIN, RESERVE, (2, RowKind.OPEN, None, "", 0.125), (2, *COMMIT[1:])], "row 5: .*reserved in epoch 1"),
        ([BEGIN, (1, RowKind.RESERVE, None, BODY, 0.125)], "row 3: reserve needs the run"),
        ([(1, RowKind.CREATE, KEY, canonical.encode(BUDGET), 0.0)], "row 2: .*create cannot follow nothing"),
        ([(1, RowKind.BEGIN, KEY, BEGIN[3], 0.125)], "row 2: a run's first row names no attempt"),
        ([(1, RowKind.BEGIN, None, BODY, 0.125)], "row 2: not the text of a charged run"),
        ([BEGIN, beginning(0.25)], "row 3: run run has begun already"),
        ([BEGIN, beginning(0.25, run="other")], "row 3: run other: its directory has begun run run here"),
        ([BEGIN, (1, RowKind.RESERVE, KEY, BODY[:-1], 0.125)], "row 3: not the text of a release"),
        (
            [BEGIN, (1, RowKind.RESERVE, KEY, encode_release(release(1)), 0.125)],
            "row 3: .*has a release of run run, 1",
        ),
        ([BEGIN, RESERVE, (1, RowKind.VOID, KEY, BODY, 0.125)], "row 4: a void attempt releases nothing"),
        ([beginning(0.0625)], "row 2: it records epsilon 0.0625, but the charged runs cost 0.125"),
        ([beginning(0.25)], "row 2: it records epsilon 0.25, but the charged runs cost 0.125"),
        ([beginning(1.5, 12)], "row 2: the runs begun so far exceed the budget"),
        ([beginning(float("nan"))], "row 2: epsilon must be at least 0"),
        ([BEGIN, reserving(epsilon=0.25)], "row 3: an attempt adds no epsilon: it must stay 0.125, got 0.25"),
        ([BEGIN, reserving(contributors=4)], "row 3: its noise is"),
        ([BEGIN, RESERVE, (1, RowKind.COMMIT, KEY, reserving(contributors=4)[3], 0.125)], "row 4: its noise is"),
        ([BEGIN, reserving(1)], "row 3: .*the run has 1 rounds"),
        ([BEGIN, reserving(0, 1)], "row 3: .*the next attempt at this round is 0"),
        (
            [
                beginning(0.25, 2),
                *(reserving(number, attempt, 8, 0.25) for number, attempt in ((0, 0), (0, 1), (1, 0))),
            ],
            "row 5: .*all of the 2 attempts",
        ),
    ],
)
def test_a_broken_rule_is_found_under_a_right_chain(tmp_path, steps, words):
    forge(tmp_path / "ledger", *steps)
    with pytest.raises(LedgerError, match=words):
        verify(tmp_path / "ledger", additive)
    if not re.search("epsilon|budget", words):  # what runs cost is found by accounting alone
        with pytest.raises(LedgerError, match=words):
            read_rows(tmp_path / "ledger")


def test_a_gap_in_the_numbers_is_found_under_a_right_chain(path):
    last = read_rows(path)[-1]
    row = chained_row(Head(last.seq + 1, last.hash), epoch=3, kind=RowKind.OPEN, key=None, body="", epsilon=1.0)
    with closing(sqlite3.connect(path)) as connection, connection:
        values = (row.seq, row.epoch, "open", None, None, None, "", row.epsilon.hex(), row.hash)
        connection.execute("INSERT INTO entry VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
    with pytest.raises(LedgerError, match="row 12: its number must be 11"):
        verify(path, additive)


def test_a_ledger_that_does_not_begin_with_its_creation_is_refused(tmp_path):
    path = tmp_path / "ledger"
    Ledger.create(path, BUDGET, additive).close()
    row = replace(first_row(BUDGET), kind=RowKind.OPEN)
    row = replace(row, hash=row.chained(bytes(32)))
    alter(path, "DELETE FROM entry WHERE seq = 1", "UPDATE entry SET kind = 'open'")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE entry SET hash = ?", (row.hash,))
    with pytest.raises(LedgerError, match="row 0: it must create the ledger"):
        verify(path, additive)


@pytest.mark.parametrize(
    "change", ["epoch = 'x'", "run = 3", "kind = 'refund'", "epsilon = '0x1p-3'", "hash = 'x'"]
)
def test_a_field_of_the_wrong_type_is_refused(path, change):
    alter(path, f"UPDATE entry SET {change} WHERE seq = 2")
    with pytest.raises(LedgerError, match="row 2: "):
        read_rows(path)


def test_the_file_itself_keeps_a_key_unique(path):
    with pytest.raises(sqlite3.IntegrityError):
        alter(
            path,
            "INSERT INTO entry SELECT 11, epoch, kind, run, round, attempt, body, epsilon, hash "
            "FROM entry WHERE seq = 10",
        )


def test_what_is_no_ledger_is_refused_by_every_door(tmp_path):
    empty, text, other, folder = (tmp_path / name for name in ("empty", "text", "other", "folder"))
    empty.touch()
    text.write_text("a text that is no database " * 100)
    alter(other, "CREATE TABLE entry (seq INTEGER)")
    folder.mkdir()
    for path in (empty, text, other, folder, tmp_path / "missing"):
        for door in (Ledger.open, partial(Ledger.open, wait=True), partial(Ledger.open, take_over=True), verify):
            with pytest.raises(LedgerError, match=str(path)):
                door(path)
        for door in (read_rows, read_budget):
            with pytest.raises(LedgerError, match=str(path)):
                door(path)
    assert not (tmp_path / "missing.lock").exists()


def test_a_database_of_another_program_is_refused_whatever_else_it_holds(path):
    alter(path, "PRAGMA application_id = 1")
    for door in (Ledger.open, verify):
        with pytest.raises(LedgerError, match="the file is not a ledger"):
            door(path)


def test_damage_that_no_row_shows_is_refused(path):
    (root,) = (page for name, page in pages(path) if name.startswith("sqlite_autoindex"))
    content = bytearray(path.read_bytes())
    end = root * 4096  # an index is filled from its end
    content[end - 8 : end] = bytes(8)
    path.write_bytes(content)
    for door in (Ledger.open, verify):
        with pytest.raises(LedgerError, match="damaged"):
            door(path)


def pages(path: Path) -> list[tuple[str, int]]:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA page_size").fetchone() == (4096,)
        return connection.execute("SELECT name, rootpage FROM sqlite_schema").fetchall()


def test_a_newer_format_is_refused(path):
    alter(path, "PRAGMA user_version = 3")
    for door in (Ledger.open, verify):
        with pytest.raises(LedgerError, match="its format is 3, and this version of d2pfed reads 2"):
            door(path)


def test_a_damaged_page_is_refused_before_any_release(path, tmp_path):
    content = path.read_bytes()
    refused = 0
    for offset in range(0, len(content), 64):
        copy = tmp_path / f"copy-{offset}"
        copy.write_bytes(
            content[:offset]
            + bytes(~byte & 255 for byte in content[offset : offset + 64])
            + content[offset + 64 :]
        )
        try:
            rows = verify(copy, additive)
        except LedgerError:
            refused += 1
            continue
        assert rows.head == verify(path, additive).head  # the bytes were free space
    assert refused > 20
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(LedgerError):
        Ledger.open(path, meter=additive)
