"""The values a ledger is made of: its rows and the hash that chains them."""

import json
import re
from dataclasses import dataclass, replace
from enum import StrEnum

from d2pfed.accounting import Release
from d2pfed.errors import ConfigError, LedgerError
from d2pfed.ledger.budget import LARGEST, Budget, ChargedRun, check_name
from d2pfed.ledger.text import decode_release
from d2pfed.numerics.randomness import digest

HASH_BYTES = 32
ROOT = bytes(HASH_BYTES)  # what the first row is chained to


class RowKind(StrEnum):
    """What a row records."""

    CREATE = "create"  # the ledger begins, with its budget
    OPEN = "open"  # a server begins to write, with the next epoch; all earlier servers are shut out
    BEGIN = "begin"  # a run begins and is charged, with all attempts that it may take: the only row that raises epsilon
    RESERVE = "reserve"  # an attempt of a run, before masked vectors are asked for
    COMMIT = "commit"  # what the attempt releases, before it is unmasked
    VOID = "void"  # the attempt ended before anything could be unmasked


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """An attempt at a round of a run: nothing is ever released twice under the same key."""

    run: str
    round: int
    attempt: int

    def __post_init__(self) -> None:
        check_name(self.run)
        if not (0 <= self.round <= LARGEST and 0 <= self.attempt <= LARGEST):
            raise ConfigError(f"round and attempt must be in [0, 2^63), got {self.round} and {self.attempt}")

    def __str__(self) -> str:
        return f"run {self.run}, round {self.round}, attempt {self.attempt}"


@dataclass(frozen=True, slots=True)
class Head:
    """The last row someone has seen: its number and its hash, which covers all rows before it."""

    seq: int
    hash: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.seq <= LARGEST or len(self.hash) != HASH_BYTES:
            raise ConfigError(
                f"a head is a row's number and {HASH_BYTES} bytes, got {self.seq}, {len(self.hash)} bytes"
            )

    def encode(self) -> str:
        """Return the text that a checkpoint carries."""
        return f"{self.seq}:{self.hash.hex()}"

    @staticmethod
    def decode(text: str) -> "Head":
        """Return the head that has exactly this text."""
        match = re.fullmatch(r"(0|[1-9][0-9]{0,18}):([0-9a-f]{64})", text, re.ASCII)
        if match is None:
            raise LedgerError(f"a ledger's head is a number, a colon and 64 hexadecimal digits, got {text!r}")
        return Head(int(match[1]), bytes.fromhex(match[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the ledger; `epsilon` is that of all runs charged so far, composed: what they cost together
    if none of them was chosen from what was seen. The budget holds in any case."""

    seq: int
    epoch: int
    kind: RowKind
    key: Key | None  # of an attempt; None where the row is about the ledger itself
    body: str  # the text of the budget, of a run's beginning or of a release, or empty
    epsilon: float
    hash: bytes

    @property
    def head(self) -> Head:
        """The ledger's head while this row is its last."""
        return Head(self.seq, self.hash)

    @property
    def release(self) -> Release | None:
        """The release that was reserved or committed, if the row is about one."""
        return decode_release(self.body) if self.kind in (RowKind.RESERVE, RowKind.COMMIT) else None

    @property
    def charged_run(self) -> ChargedRun | None:
        """The run that begins, if the row is about one."""
        return ChargedRun.decode(self.body) if self.kind is RowKind.BEGIN else None

    @property
    def survivors(self) -> int | None:
        """How many clients' vectors are in the sum, once that is known."""
        return len(decode_release(self.body).participants) if self.kind is RowKind.COMMIT else None

    def chained(self, previous: bytes) -> bytes:
        """Return the hash this row must carry after a row with the given hash.

        Guarantee: a change of any field of any row changes all later hashes, as SHA-256 is collision-resistant and
        the text is injective. Checked: test_ledger_verify.py::test_a_change_of_any_field_of_any_row_is_found.
        """
        return digest("d2pfed ledger row", previous, self._text())

    def _text(self) -> str:
        """Return the canonical text of all fields but the hash, put together by hand: a ledger has 10^5 rows."""
        key = "null"
        if self.key is not None:
            run = json.dumps(self.key.run)
            key = f'{{"":"Key","attempt":{self.key.attempt},"round":{self.key.round},"run":{run}}}'
        return (
            f'[{self.seq},{self.epoch},{{"":"RowKind","is":"{self.kind.value}"}},{key},{json.dumps(self.body)},'
            f'{{"":"float","is":"{float(self.epsilon).hex()}"}}]'
        )


def first_row(budget: Budget) -> Row:
    """Return the row that creates a ledger."""
    row = Row(seq=0, epoch=0, kind=RowKind.CREATE, key=None, body=budget.encode(), epsilon=0.0, hash=ROOT)
    return replace(row, hash=row.chained(ROOT))


def chained_row(head: Head, *, epoch: int, kind: RowKind, key: Key | None, body: str, epsilon: float) -> Row:
    """Return the row that follows a head."""
    row = Row(seq=head.seq + 1, epoch=epoch, kind=kind, key=key, body=body, epsilon=epsilon, hash=ROOT)
    return replace(row, hash=row.chained(head.hash))
