"""A client's own log: one file in its home, and the head of it in an anchor outside of the home.

Whoever deletes the log, cuts it, edits it or puts an older one back finds the head outside at odds with it, and the
client then refuses everything until a person has said what is carried over (`adopt`).
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from d2pfed.errors import LedgerError
from d2pfed.ledger.client_history import (
    ADOPT,
    Anchor,
    Body,
    ClientHistory,
    Entry,
    LogRow,
    anchor_after,
    head_after,
    parse,
    require_anchored,
    require_announced,
)
from d2pfed.ledger.files import (
    append_file,
    locked,
    make_directory,
    read_file,
    replace_file,
    require_directory,
    sync_directory,
    truncate_file,
)
from d2pfed.ledger.rows import Head
from d2pfed.numerics.randomness import digest, first_head

MOST_ROWS = 1 << 18  # each request reads all of them, which takes seconds by then


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
        make_directory(self._outside)
        with self._locked():
            self.require_new()
            row = self._row(self._start, Entry.OPENING, carried)
            replace_file(self._file, row.line())
            self._move(Anchor(row.head))
            return ClientHistory(self._start, (row,), 0, "")

    def has_begun(self) -> bool:
        """Say whether there are both a log and an anchor."""
        return _is_there(self._file) and _is_there(self._anchor_file)

    def require_new(self) -> None:
        """Refuse a place where a log cannot begin; changes nothing.

        A log of nothing but its opening, without an anchor, is what an interrupted beginning leaves: it begins anew.
        """
        if _is_there(self._outside):
            require_directory(self._outside)
        for file in (self._anchor_file, self._mark_file, self._file):
            if _is_there(file) and not (file == self._file and self._was_interrupted()):
                raise LedgerError(
                    f"{file} is there already: this client has begun before; see `d2pfed client adopt`"
                )

    def _was_interrupted(self) -> bool:
        rows, more = parse(self._start, read_file(self._file) or b"")
        return not more and [row.entry for row in rows] == [Entry.OPENING]

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
                f"this client's log has {len(seen.rows)} rows and takes no more: begin a new one under a new key"
            )
        row = self._row(seen.head, entry, body)
        with self._locked():
            anchor = self._require_anchor()
            if anchor.head != seen.head or read_file(self._file) != seen.content():
                self._read()  # another process came first, or died while it did, if this holds together
                return None
            self._move(replace(anchor, announced=row.head))
            append_file(self._file, row.line())
            anchor = anchor_after(anchor, [row])
            self._move(anchor)
        return ClientHistory(seen.start, (*seen.rows, row), anchor.serial, anchor.roster)

    def mark(self, why: str, shown: Head) -> None:
        """Note, outside of the log, that a position was shown that this log does not hold; nothing works after it."""
        make_directory(self._outside)
        with self._locked():
            before = (read_file(self._mark_file) or b"").splitlines()
            lines = [*before, f"{shown.encode()} {why}".encode()]
            replace_file(self._mark_file, b"".join(line + b"\n" for line in lines))

    def adopt(self, carried: Body) -> ClientHistory:
        """Go on with what is left of the log, by a person's declaration of what it does not know.

        The rows that hold together are kept, a damaged file is kept aside, and the count goes on above all positions
        that are known, so that others see it rise. Rows of a clock that was ahead count by the declaration's time then.
        """
        make_directory(self._outside)
        with self._locked():
            data = read_file(self._file) or b""
            found, _ = parse(self._start, data)
            before = ClientHistory(self._start, found, 0, "")
            adopted = [head for head in self._known_heads() if not before.holds(head)]
            if not adopted and self._is_whole() and before.latest_seconds() <= self._clock():
                raise LedgerError(
                    "this client's log holds together, nothing was marked and no row is of the future: there is "
                    "nothing to adopt"
                )
            rows = [*found] or [self._row(self._start, Entry.OPENING, {"carried": "unknown"})]
            above = max([rows[-1].head.seq, *(head.seq for head in adopted)]) + 1
            texts = sorted(head.encode() for head in adopted)
            rows.append(self._row(rows[-1].head, Entry.DECLARATION, {**carried, "adopted": texts}, number=above))
            content = b"".join(row.line() for row in rows)
            if not content.startswith(data):
                replace_file(self._file.with_name(f"log.damaged-{digest('damaged', data).hex()[:16]}"), data)
            anchor = anchor_after(self._anchor_or_none(), rows)
            replace_file(self._file, content)
            self._move(anchor)
            self._mark_file.unlink(missing_ok=True)
            sync_directory(self._outside)
            return ClientHistory(self._start, tuple(rows), anchor.serial, anchor.roster)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._outside.exists():
            raise LedgerError(f"there is no anchor in {self._outside}: {ADOPT}")
        require_directory(self._outside)
        # The lock is outside as well: two homes of one client on one machine take turns, and the second is found out.
        with locked(self._outside / "lock"):
            yield

    def _row(self, before: Head, entry: Entry, body: Body, number: int | None = None) -> LogRow:
        dated = {"time": int(self._clock()), **body}
        text = json.dumps(dated, sort_keys=True, separators=(",", ":"), allow_nan=False)
        seq = before.seq + 1 if number is None else number
        return LogRow(entry, json.loads(text), text, head_after(before, seq, entry, text))

    def _read(self) -> ClientHistory:
        anchor = self._require_anchor()
        data = read_file(self._file)
        if data is None:
            raise LedgerError(f"{self._file} is missing, and its anchor is not: {ADOPT}")
        rows, torn = parse(self._start, data)
        require_anchored(rows, self._start, anchor.head)
        require_announced(rows, torn, anchor)
        if torn:
            truncate_file(self._file, len(data) - len(torn))
        if rows and (settled := anchor_after(anchor, rows)) != anchor:
            self._move(anchor := settled)
        return ClientHistory(self._start, rows, anchor.serial, anchor.roster)

    def _require_anchor(self) -> Anchor:
        if (marked := read_file(self._mark_file)) is not None:
            raise LedgerError(
                f"this client was rolled back or cloned ({marked.decode(errors='replace').strip()}): {ADOPT}"
            )
        data = read_file(self._anchor_file)
        if data is None:
            raise LedgerError(f"{self._anchor_file} is missing: {ADOPT}")
        return Anchor.decode(data)

    def _move(self, anchor: Anchor) -> None:
        replace_file(self._anchor_file, anchor.encode())

    def _is_whole(self) -> bool:
        try:
            self._read()
        except LedgerError:
            return False
        return True

    def _anchor_or_none(self) -> Anchor | None:
        try:
            data = read_file(self._anchor_file)
            return None if data is None else Anchor.decode(data)
        except LedgerError:
            return None

    def _known_heads(self) -> list[Head]:
        """Return the positions that this client is known to have had: its anchor's, and what others have shown."""
        anchor = self._anchor_or_none()
        marks = (read_file(self._mark_file) or b"").decode(errors="replace").splitlines()
        shown = [_head_or_none(line.partition(" ")[0]) for line in marks]
        return ([anchor.head] if anchor else []) + [head for head in shown if head is not None]


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _head_or_none(text: str) -> Head | None:
    """Return the position in a mark, or None if the mark is damaged: what is left of it still refuses everything."""
    try:
        return Head.decode(text)
    except LedgerError:
        return None
