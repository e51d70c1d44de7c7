"""How far a client's log has come, signed by the client: what peers, server and authority remember of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import HEAD_BYTES, digest, first_head, next_head
from d2pfed.secagg import crypto
from d2pfed.secagg.wire import ClientId, pack_integer

__all__ = [
    "History",
    "Position",
    "POSITION_BYTES",
    "NO_POSITION",
    "statement",
    "sign_position",
    "verify_position",
    "unpack_position",
    "first_head",
    "next_head",
]

_COUNT_BYTES = 8
POSITION_BYTES = _COUNT_BYTES + HEAD_BYTES + crypto.SIGNATURE_BYTES
NO_POSITION = bytes(POSITION_BYTES)  # where none is known


@dataclass(frozen=True, slots=True)
class Position:
    """The number of rows of a client's log and the head after them, signed."""

    count: int
    head: bytes
    signature: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.count < 1 << (8 * _COUNT_BYTES):
            raise ConfigError(f"a position's count must be in [0, 2^64), got {self.count}")
        if len(self.head) != HEAD_BYTES or len(self.signature) != crypto.SIGNATURE_BYTES:
            raise ConfigError(
                f"a position's head and signature must have {HEAD_BYTES} and {crypto.SIGNATURE_BYTES} bytes, "
                f"got {len(self.head)} and {len(self.signature)}"
            )

    def pack(self) -> bytes:
        """Return count (8 bytes, little-endian), head (32) and signature (64)."""
        return pack_integer(self.count, _COUNT_BYTES) + self.head + self.signature


def unpack_position(data: bytes) -> Position:
    """Return the position in 104 bytes, its signature not yet checked."""
    if len(data) != POSITION_BYTES:
        raise PeerError(f"a position must have {POSITION_BYTES} bytes, got {len(data)}")
    end = _COUNT_BYTES + HEAD_BYTES
    return Position(int.from_bytes(data[:_COUNT_BYTES], "little"), data[_COUNT_BYTES:end], data[end:])


def statement(authority: bytes, client: ClientId, count: int, head: bytes) -> bytes:
    """Return what a client signs: whose log it is, under which authority (its public key), and how far it is."""
    return digest("d2pfed position", authority, client, count, head)


def sign_position(secret: bytes, authority: bytes, client: ClientId, count: int, head: bytes) -> Position:
    """Return a client's position under its private signing key."""
    return Position(count, head, crypto.sign(secret, statement(authority, client, count, head)))


def verify_position(position: Position, public: bytes, authority: bytes, client: ClientId) -> None:
    """Refuse a position that is not signed by its client's key.

    Guarantee: nobody but the client can move it on, or name a position where it has never been.
    Checked: test_position.py::test_no_byte_of_a_position_can_be_changed.
    """
    crypto.require_signature(
        public, position.signature, statement(authority, client, position.count, position.head)
    )


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """A client's memory when it joins a signed session.

    Attributes:
        position: its own after the row that says that this session has begun, signed by itself.
        contains: says whether its chain of rows has this head at this count.
        known: the latest position at which it has met each other client, before this session.
        colluders: how many of the cohort it expects to collude by its own reckoning, whatever the session says.
    """

    position: Position
    contains: Callable[[int, bytes], bool]
    known: Mapping[ClientId, Position] = field(default_factory=dict)
    colluders: int = 0
