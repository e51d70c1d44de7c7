"""A client's own log: one file in its home, each row chained to all before it, and its head in an anchor outside.

Whoever deletes the log, cuts it, edits it or puts an older one back finds the head outside at odds with it, and the
client then refuses everything until a person has said what is carried over (`adopt`).
"""

import json
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from os.path import lexists
from pathlib import Path

from d2pfed.errors import LedgerError
from d2pfed.ledger import files
from d2pfed.ledger.budget import LARGEST
from d2pfed.ledger.rows import Head
from d2pfed.numerics.randomness import digest, first_head, next_head

Body = Mapping[str, object]  # what a row says: a flat JSON object

MOST_ROWS = 1 << 18  # each request reads all of them, which takes seconds by then
ADOPT = "until a person has run `d2pfed client adopt`, this client refuses everything"


class Entry(StrEnum):
    """What a row of a client's log records."""

    OPENING = "opening"  # the log begins
    BEGUN = "begun"  # an attempt, before the client's keys for it leave
    CHARGE = "charge"  # a vector, before it is made
    SIGNED = "signed"  # whose sum a member of a committee opens, before its signature leaves
    ROSTER = "roster"  # a newer roster that the client goes by
    DECLARATION = "declaration"  # a person's word on what the log does not know


@dataclass(frozen=True, slots=True)
class LogRow:
    """One line; its head covers all lines before it."""

    entry: Entry
    body: Body
    text: str  # of the body: what is hashed
    head: Head

    def line(self) -> bytes:
        """Return the line as it is in the file."""
        return f"{self.head.seq}\t{self.entry}\t{self.text}\t{self.head.hash.hex()}\n".encode()


@dataclass(frozen=True, slots=True)
class Anchor:
    """What is kept outside of the home: the log's head, and the newest roster's serial and digest.

    While a row is added, `announced` is the head that the log will have: only that row may be beyond `head`.
    """

    head: Head
    serial: int = 0
    roster: str = ""
    announced: Head | None = None

    def encode(self) -> bytes:
        """Return the file's content."""
        announced = "" if self.announced is None else f" {self.announced.encode()}"
        return f"{self.head.encode()} {self.serial} {self.roster or '-'}{announced}\n".encode()

    @staticmethod
    def decode(data: bytes) -> "Anchor":
        """Read the file's content."""
        try:
            head, serial, roster, *announced = data.decode("ascii").split()
            (following,) = map(Head.decode, announced) if announced else (None,)
            return Anchor(Head.decode(head), int(serial), bytes.fromhex(roster.strip("-")).hex(), following)
        except (ValueError, LedgerError) as error:
            raise LedgerError(f"not an anchor: {error}: {ADOPT}") from None


@dataclass(frozen=True, slots=True)
class ClientHistory:
    """A log that was found whole, as of one moment."""

    start: Head
    rows: tuple[LogRow, ...]
    serial: int  # of the newest roster that this client has gone by, from the anchor
    roster: str  # its digest in hexadecimal

    @property
    def head(self) -> Head:
        """The last row's number and hash: this client's position."""
        return self.rows[-1].head if self.rows else self.start

    def holds(self, head: Head) -> bool:
        """Say whether a position is in this chain, or from before a person's last declaration.

        A declaration speaks for all that this client did before it and the log does not know: its number is above
        every position that was known then.

        Guarantee: a position that this client has shown since, in another life or as a clone, is neither.
        Checked: test_client_log.py::test_a_position_of_another_life_is_not_held.
        """
        declared = max((row.head.seq for row in self.rows if row.entry is Entry.DECLARATION), default=0)
        place = bisect_left(self.rows, head.seq, key=lambda row: row.head.seq)
        return head.seq < declared or head in (self.start, *(row.head for row in self.rows[place : place + 1]))

    def bodies(self, entry: Entry) -> tuple[Body, ...]:
        """Return what all rows of a kind say, in order."""
        return tuple(row.body for row in self.rows if row.entry is entry)

    def latest_seconds(self) -> int:
        """Return the latest time of a row, from the last declaration on: a person may have mended the clock."""
        last = max((place for place, row in enumerate(self.rows) if row.entry is Entry.DECLARATION), default=0)
        return max((_integer(row.body, "time") for row in self.rows[last:]), default=0)


def parse(start: Head, data: bytes) -> tuple[tuple[LogRow, ...], bytes]:
    """Return the rows that hold together, from the first on, and what follows them."""
    rows: list[LogRow] = []
    used, head = 0, start
    for line in data.splitlines(keepends=True):
        try:
            number, kind, text, _ = line.removesuffix(b"\n").decode("ascii").split("\t")
            entry, seq, body = Entry(kind), int(number[:20]), json.loads(text)
        except (ValueError, RecursionError):
            break
        follows = seq == head.seq + 1 or (entry is Entry.DECLARATION and head.seq < seq <= LARGEST)
        if not (follows and isinstance(body, dict)):
            break
        row = LogRow(entry, body, text, head_after(head, seq, entry, text))
        if row.line() != line:
            break
        rows.append(row)
        used, head = used + len(line), row.head
    return tuple(rows), data[used:]


def require_anchored(rows: Sequence[LogRow], start: Head, anchored: Head) -> None:
    """Refuse a log that lacks the head outside: it was deleted, cut, edited or rolled back."""
    if anchored != start and anchored not in {row.head for row in rows}:
        raise LedgerError(
            f"the log lacks the position {anchored.seq} that its anchor has: it was cut, edited or rolled back: {ADOPT}"
        )


def require_announced(rows: Sequence[LogRow], torn: bytes, anchor: Anchor) -> None:
    """Refuse rows beyond the anchor except the one that it announces, which a crash leaves.

    The chain has no key: anyone who can write the log can add a row that follows from those before it.
    """
    more = [row.head for row in rows if row.head.seq > anchor.head.seq]
    count = len(more) + len(torn.splitlines())
    if count > 1 or more not in ([], [anchor.announced]):
        raise LedgerError(
            f"the log goes beyond its anchor by {count}, and only the row that the anchor announces may be there: "
            f"{ADOPT}"
        )


def head_after(before: Head, number: int, entry: Entry, text: str) -> Head:
    """Return the head of a row after the head before it."""
    return Head(number, next_head(before.hash, number, str(entry), text.encode()))


def anchor_after(anchor: Anchor | None, rows: Sequence[LogRow]) -> Anchor:
    """Return the anchor that goes with these rows; a serial that it has seen is never forgotten."""
    serial, roster = (anchor.serial, anchor.roster) if anchor else (0, "")
    for row in rows:
        if row.entry is Entry.ROSTER and _integer(row.body, "serial") > serial:
            serial, roster = _integer(row.body, "serial"), str(row.body["digest"])
    return Anchor(rows[-1].head, serial, roster)


def _integer(body: Body, name: str) -> int:
    value = body.get(name, 0)
    if not isinstance(value, int):
        raise LedgerError(f"a row's {name} must be a whole number, got {value!r}")
    return value


class ClientLog:
    """The file of one client's log and the anchor outside; each call holds the lock for its own length only.

    A row is added in three steps, each synced before the next: the anchor announces the row's head, the row is written,
    the anchor moves to it.

    Guarantee: when `append` returns, row and anchor survive a power cut; so what is sent afterwards is never without
    its row. A row that is read was written by this client, unless somebody else can write the anchor, too.
    Checked: test_client_log.py::test_power_loss_at_any_moment_leaves_log_and_anchor_agreed,
    test_client_log.py::test_a_row_that_somebody_else_has_chained_to_the_log_is_refused.
    """

    def __init__(
        self, home: Path, anchor: Path, authority: bytes, client: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._file = home / "log"
        self._outside = anchor
        self._anchor_file = anchor / "head"
        self._mark_file = anchor / "mark"
        self._start = Head(0, first_head(authority, client))

    def create(self, carried: Body) -> ClientHistory:
        """Begin a log where there is none, and its anchor; refuses where there is either, or a trace of trouble."""
        files.make_directory(self._outside)
        with self._locked():
            self.require_new()
            row = self._row(self._start, Entry.OPENING, carried)
            files.replace_file(self._file, row.line())
            files.replace_file(self._anchor_file, Anchor(row.head).encode())
            return ClientHistory(self._start, (row,), 0, "")

    def has_begun(self) -> bool:
        """Say whether there are both a log and an anchor."""
        return lexists(self._file) and lexists(self._anchor_file)

    def require_new(self) -> None:
        """Refuse a place where a log cannot begin; changes nothing.

        A log of nothing but its opening, without an anchor, is what an interrupted beginning leaves: it begins again.
        """
        if lexists(self._outside):
            files.require_directory(self._outside)
        for file in (self._anchor_file, self._mark_file, self._file):
            if not lexists(file):
                continue
            if file == self._file:
                rows, more = parse(self._start, files.read_file(file) or b"")
                if not more and [row.entry for row in rows] == [Entry.OPENING]:
                    continue
            raise LedgerError(f"{file} already exists: this client has begun before; see `d2pfed client adopt`")

    def read(self) -> ClientHistory:
        """Return the log, found whole and at one with its anchor; refuse everything else.

        A crash may leave the row that the anchor announces: the anchor is moved up. A line that a crash cut short was
        never followed by anything that left: it is removed.
        """
        with self._locked():
            return self._read()

    def append(self, seen: ClientHistory, entry: Entry, body: Body) -> ClientHistory | None:
        """Add a row after the history that the caller has seen; None, and nothing is added, if others came first."""
        if len(seen.rows) >= MOST_ROWS:
            raise LedgerError(
                f"this client's log has {len(seen.rows)} rows and is full: begin a new one with a new key"
            )
        row = self._row(seen.head, entry, body)
        with self._locked():
            anchor = self._require_anchor()
            if anchor.head != seen.head or files.read_file(self._file) != b"".join(
                each.line() for each in seen.rows
            ):
                self._read()  # another process came first, or died while it did, if this holds together
                return None
            files.replace_file(self._anchor_file, replace(anchor, announced=row.head).encode())
            files.append_file(self._file, row.line())
            anchor = anchor_after(anchor, [row])
            files.replace_file(self._anchor_file, anchor.encode())
        return ClientHistory(seen.start, (*seen.rows, row), anchor.serial, anchor.roster)

    def mark(self, why: str, shown: Head) -> None:
        """Note, outside of the log, that a position was shown that this log does not hold; nothing works after it."""
        files.make_directory(self._outside)
        with self._locked():
            before = (files.read_file(self._mark_file) or b"").splitlines()
            lines = [*before, f"{shown.encode()} {why}".encode()]
            files.replace_file(self._mark_file, b"".join(line + b"\n" for line in lines))

    def adopt(self, carried: Body) -> ClientHistory:
        """Go on with what is left of the log, by a person's declaration of what it does not know.

        The rows that hold together are kept, a damaged file is kept aside, and the count goes on above all positions
        that are known, so that others see it rise. Rows of a clock that was ahead count by the declaration's time then.
        """
        files.make_directory(self._outside)
        with self._locked():
            data = files.read_file(self._file) or b""
            found, _ = parse(self._start, data)
            before = ClientHistory(self._start, found, 0, "")
            anchor, is_whole = None, False
            with suppress(LedgerError):
                anchor = Anchor.decode(files.read_file(self._anchor_file) or b"")
                self._read()
                is_whole = True
            known = [anchor.head] if anchor else []  # positions that this client had, or that others have shown
            for line in (files.read_file(self._mark_file) or b"").decode(errors="replace").splitlines():
                with suppress(LedgerError):  # what is left of a damaged mark still refuses everything
                    known.append(Head.decode(line.partition(" ")[0]))
            adopted = [head for head in known if not before.holds(head)]
            if not adopted and is_whole and before.latest_seconds() <= self._clock():
                raise LedgerError(
                    "this client's log is consistent, nothing was marked and no row is in the future: there is "
                    "nothing to adopt"
                )
            rows = [*found] or [self._row(self._start, Entry.OPENING, {"carried": "unknown"})]
            above = max([rows[-1].head.seq, *(head.seq for head in adopted)]) + 1
            texts = sorted(head.encode() for head in adopted)
            rows.append(self._row(rows[-1].head, Entry.DECLARATION, {**carried, "adopted": texts}, number=above))
            content = b"".join(row.line() for row in rows)
            if not content.startswith(data):
                files.replace_file(self._file.with_name(f"log.damaged-{digest('damaged', data).hex()[:16]}"), data)
            moved = anchor_after(anchor, rows)
            files.replace_file(self._file, content)
            files.replace_file(self._anchor_file, moved.encode())
            self._mark_file.unlink(missing_ok=True)
            files.sync_directory(self._outside)
            return ClientHistory(self._start, tuple(rows), moved.serial, moved.roster)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._outside.exists():
            raise LedgerError(f"there is no anchor in {self._outside}: {ADOPT}")
        files.require_directory(self._outside)
        # The lock is outside as well: two homes of one client on one machine take turns, and the second is found out.
        with files.locked(self._outside / "lock"):
            yield

    def _row(self, before: Head, entry: Entry, body: Body, number: int | None = None) -> LogRow:
        dated = {"time": int(self._clock()), **body}
        text = json.dumps(dated, sort_keys=True, separators=(",", ":"), allow_nan=False)
        seq = before.seq + 1 if number is None else number
        return LogRow(entry, json.loads(text), text, head_after(before, seq, entry, text))

    def _read(self) -> ClientHistory:
        anchor = self._require_anchor()
        data = files.read_file(self._file)
        if data is None:
            raise LedgerError(f"{self._file} is missing, but its anchor exists: {ADOPT}")
        rows, torn = parse(self._start, data)
        require_anchored(rows, self._start, anchor.head)
        require_announced(rows, torn, anchor)
        if torn:
            files.truncate_file(self._file, len(data) - len(torn))
        if rows and (settled := anchor_after(anchor, rows)) != anchor:
            anchor = settled
            files.replace_file(self._anchor_file, anchor.encode())
        return ClientHistory(self._start, rows, anchor.serial, anchor.roster)

    def _require_anchor(self) -> Anchor:
        if (marked := files.read_file(self._mark_file)) is not None:
            raise LedgerError(
                f"this client was rolled back or cloned ({marked.decode(errors='replace').strip()}): {ADOPT}"
            )
        data = files.read_file(self._anchor_file)
        if data is None:
            raise LedgerError(f"{self._anchor_file} is missing: {ADOPT}")
        return Anchor.decode(data)
