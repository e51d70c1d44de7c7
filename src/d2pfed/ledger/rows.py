"""The values a ledger is made of: the one text of a release, rows, and the hash that chains them."""

import base64
import binascii
import json
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate

from d2pfed.accounting.events import Release
from d2pfed.errors import ConfigError, LedgerError
from d2pfed.ledger.budget import LARGEST, RELEASE_TYPES, Budget, check_name
from d2pfed.numerics import canonical
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
    """One line of the ledger; `epsilon` is that of all runs charged so far, if none was chosen from what was seen."""

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

    def chained(self, previous: bytes) -> bytes:
        """Return the hash this row must carry after a row with the given hash.

        Guarantee: a change of any field of any row changes all later hashes, as SHA-256 is collision-resistant and
        the text is injective. Checked: test_ledger_verify.py::test_a_change_of_any_field_of_any_row_is_found.
        """
        key = "null"
        if self.key is not None:
            run = json.dumps(self.key.run)
            key = f'{{"":"Key","attempt":{self.key.attempt},"round":{self.key.round},"run":{run}}}'
        # The canonical text of all fields but the hash, put together by hand: a ledger has 10^5 rows.
        text = (
            f'[{self.seq},{self.epoch},{{"":"RowKind","is":"{self.kind.value}"}},{key},{json.dumps(self.body)},'
            f'{{"":"float","is":"{float(self.epsilon).hex()}"}}]'
        )
        return digest("d2pfed ledger row", previous, text)


def first_row(budget: Budget) -> Row:
    """Return the row that creates a ledger."""
    row = Row(seq=0, epoch=0, kind=RowKind.CREATE, key=None, body=canonical.encode(budget), epsilon=0.0, hash=ROOT)
    return replace(row, hash=row.chained(ROOT))


def chained_row(head: Head, *, epoch: int, kind: RowKind, key: Key | None, body: str, epsilon: float) -> Row:
    """Return the row that follows a head."""
    row = Row(seq=head.seq + 1, epoch=epoch, kind=kind, key=key, body=body, epsilon=epsilon, hash=ROOT)
    return replace(row, hash=row.chained(head.hash))


VERSION = 2


@dataclass(frozen=True, slots=True)
class Recorded:
    """A release without its participants, and these packed."""

    version: int
    release: Release
    participants: str


_TYPES = RELEASE_TYPES | {"Recorded": Recorded}


# What differs between the attempts of one run: participants, attempt, round, run. The rest of a text, the frame, is
# one of few in a ledger and decoded once. Braces are matched by depth, so a part cannot reach into the next.
_NUMBER = r"(0|[1-9][0-9]{0,18})"
_VALUE = r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"
_ATTEMPT = re.compile(
    r'(\{"":"Recorded","participants":")([A-Za-z0-9+/=]*)'
    rf'(","release":\{{"":"Release","adjacency":{_VALUE},"attempt":){_NUMBER}'
    rf'((?:,"batches":{_VALUE})?,"noise":{_VALUE},"participants":\[\],"round":){_NUMBER}'
    r'(,"run":)("(?:[^"\\]|\\.)*")'
    rf'(,"sampling":{_VALUE},"unit":{_VALUE}\}},"version":[0-9]+\}})'
)
_FRAMES = 1024  # how many frames are remembered: a frame for each number of survivors, of a few hundred bytes each


def encode_release(release: Release) -> str:
    """Return the canonical text of a release.

    Its participants are base64 of the gaps between them: seven bits a byte, the last byte of each gap below 128.
    """
    packed, previous = bytearray(), -1
    for identity in release.participants:
        gap = identity - previous - 1
        if gap < 0:
            raise ConfigError(f"participants must be at least 0 and increasing, got {identity} after {previous}")
        while gap > 127:
            packed.append(128 | gap & 127)
            gap >>= 7
        packed.append(gap)
        previous = identity
    text = base64.b64encode(packed).decode()
    return canonical.encode(Recorded(VERSION, replace(release, participants=()), text))


def decode_release(text: str) -> Release:
    """Return the release that has exactly this text.

    Guarantee: `encode_release(decode_release(text)) == text`, so unknown fields, other versions and other spellings of
    a value are refused. Checked: test_ledger_text.py::test_a_damaged_text_is_refused_or_is_canonical.
    """
    parts = _ATTEMPT.fullmatch(text) if len(text) <= canonical.MOST_CHARACTERS else None
    if parts is None:
        return _decode_whole(text)
    start, packed, before, attempt, between, number, name, run, end = parts.groups()
    frame = _decode_frame(f'{start}{before}0{between}0{name}""{end}')
    try:
        # The frame is canonical, and so are the name, the two whole numbers by their pattern and the participants.
        return replace(
            frame, run=_decode_name(run), round=int(number), attempt=int(attempt), participants=_unpack(packed)
        )
    except (ConfigError, ValueError, binascii.Error) as error:
        raise LedgerError(f"not the text of a release: {error}") from error


def _decode_whole(text: str) -> Release:
    try:
        recorded = canonical.decode(text, _TYPES, Recorded)
        if recorded.version != VERSION:
            raise LedgerError(f"not the text of a release of version {VERSION}")
        release = replace(recorded.release, participants=_unpack(recorded.participants))
    except (ConfigError, ValueError, binascii.Error) as error:
        raise LedgerError(f"not the text of a release: {error}") from error
    if encode_release(release) != text:
        raise LedgerError("not the canonical text of a release: another spelling")
    return release


_decode_frame = lru_cache(_FRAMES)(_decode_whole)


@lru_cache(64)  # a ledger has few runs
def _decode_name(text: str) -> str:
    """Return the run's name that has exactly this text in JSON."""
    name: str = json.loads(text)
    if json.dumps(name) != text:
        raise ValueError("another spelling of the run's name")
    return name


@lru_cache(2)  # a commit often has its reservation's participants; more would hold large cohorts for nothing
def _unpack(text: str) -> tuple[int, ...]:
    """Return the identities that `encode_release` writes as exactly this text."""
    data = base64.b64decode(text, validate=True)
    if base64.b64encode(data).decode() != text:
        raise ValueError("the participants are in another spelling of base64")
    gaps = re.findall(rb"[\x80-\xff]*[\x00-\x7f]|[\x80-\xff]+\Z", data)
    return tuple(accumulate(map(_step, gaps), initial=-1))[1:]


@lru_cache(1 << 14)  # a ledger has millions of gaps, most of them of one byte or two
def _step(gap: bytes) -> int:
    """Return how far the bytes of a gap lead to the next identity."""
    if (len(gap) > 1 and not gap[-1]) or gap[-1] > 127:
        raise ValueError("a participant has more bytes than it needs, or its last byte is missing")
    return 1 + sum((byte & 127) << 7 * place for place, byte in enumerate(gap))
