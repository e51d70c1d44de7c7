"""The rows of a client's log: what it began, sent and was told to trust, each chained to all before it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from d2pfed.errors import LedgerError
from d2pfed.ledger.budget import LARGEST
from d2pfed.ledger.rows import Head
from d2pfed.numerics.randomness import next_head

Body = Mapping[str, object]  # what a row says: a flat JSON object

ADOPT = "until a person has run `d2pfed client adopt`, this client refuses everything"


class Entry(StrEnum):
    """What a row of a client's log records."""

    OPENING = "opening"  # the log begins
    BEGUN = "begun"  # an attempt, before the client's keys for it leave
    CHARGE = "charge"  # a vector, before it is made
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
    _heads: frozenset[Head] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_heads", frozenset({self.start, *(row.head for row in self.rows)}))

    @property
    def head(self) -> Head:
        """The last row's number and hash: this client's position."""
        return self.rows[-1].head if self.rows else self.start

    def content(self) -> bytes:
        """Return the file of these rows."""
        return b"".join(row.line() for row in self.rows)

    def holds(self, head: Head) -> bool:
        """Say whether a position is in this chain, or from before a person's last declaration.

        A declaration speaks for all that this client did before it and the log does not know: its number is above
        every position that was known then.

        Guarantee: a position that this client has shown since, in another life or as a clone, is neither.
        Checked: test_client_log.py::test_a_position_of_another_life_is_not_held.
        """
        declared = max((row.head.seq for row in self.rows if row.entry is Entry.DECLARATION), default=0)
        return head.seq < declared or head in self._heads

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
        row = _parsed(line, head)
        if row is None:
            break
        rows.append(row)
        used, head = used + len(line), row.head
    return tuple(rows), data[used:]


def require_anchored(rows: Sequence[LogRow], start: Head, anchored: Head) -> None:
    """Refuse a log that lacks the head outside: it was deleted, cut, edited or rolled back."""
    if anchored != start and anchored not in {row.head for row in rows}:
        raise LedgerError(
            f"the log lacks the position {anchored.seq} that its anchor has, it was cut, edited or put back: {ADOPT}"
        )


def require_announced(rows: Sequence[LogRow], torn: bytes, anchor: Anchor) -> None:
    """Refuse rows beyond the anchor but for the one that it announces, which a crash leaves.

    The chain has no key: whoever can write the log can add a row that follows from those before it.
    """
    more = [row.head for row in rows if row.head.seq > anchor.head.seq]
    count = len(more) + len(torn.splitlines())
    if count > 1 or more not in ([], [anchor.announced]):
        raise LedgerError(
            f"the log goes beyond its anchor by {count}, and only the row that the anchor announces may be there: "
            f"{ADOPT}"
        )


def _parsed(line: bytes, before: Head) -> LogRow | None:
    """Return the row of a line if it follows from the head before it."""
    try:
        number, kind, text, _ = line.removesuffix(b"\n").decode("ascii").split("\t")
        entry, seq, body = Entry(kind), int(number[:20]), json.loads(text)
    except (ValueError, RecursionError):
        return None
    follows = seq == before.seq + 1 or (entry is Entry.DECLARATION and before.seq < seq <= LARGEST)
    if not (follows and isinstance(body, dict)):
        return None
    row = LogRow(entry, body, text, head_after(before, seq, entry, text))
    return row if row.line() == line else None


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
