"""The one canonical byte form: a fixed header, then fields whose lengths are known before they are read."""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError, PeerError

ClientId = int
Subset = NDArray[np.bool_]  # one flag per rank of the cohort

VERSION = 2
BINDING_BYTES = 32
ID_LIMIT = 1 << 64

_MAGIC = b"d2pf"
_HEADER = struct.Struct("<4sBBHQQ32s")  # magic, version, kind, zero, party, bytes of the body, binding
_CHECKSUM_BYTES = 16
HEADER_BYTES = _HEADER.size + _CHECKSUM_BYTES


class MessageKind(IntEnum):
    """What a frame holds. Kinds 1 to 10 belong to pair masks, 11 to 16 to standing keys, 17 to 25 to the lattice."""

    INVITATION = 1
    KEY_ADVERTISEMENT = 2
    KEY_ADVERTISEMENTS = 3
    ENCRYPTED_SHARES = 4
    MASK_REQUEST = 5
    MASKED_VECTOR = 6
    SURVIVORS = 7
    SURVIVORS_SIGNATURE = 8
    UNMASK_REQUEST = 9
    UNMASKING_SHARES = 10
    STANDING_INVITATION = 11
    STANDING_ADVERT = 12
    STANDING_ADVERTS = 13
    STANDING_READY = 14
    STANDING_REQUEST = 15
    STANDING_MASKED = 16
    LATTICE_ADVERT = 17
    LATTICE_REQUEST = 18
    LATTICE_CONTRIBUTION = 19
    LATTICE_SURVIVORS = 20
    LATTICE_SIGNATURE = 21
    LATTICE_CERTIFICATE = 22
    LATTICE_OPENING = 23
    LATTICE_TRACE_REQUEST = 24
    LATTICE_TRACE = 25
    ROSTER = 32
    SAVED_INVITED = 65
    SAVED_ADVERTISED = 66
    SAVED_SHARED = 67
    SAVED_MASKED = 68
    SAVED_CONFIRMED = 69
    SAVED_STANDING_ADVERTISED = 70
    SAVED_STANDING = 71
    SAVED_LATTICE_MEMBER = 72


def frame(kind: int, binding: bytes, party: ClientId, *fields: bytes) -> bytes:
    """Join fields behind a header that names kind, what they are bound to, and the client they are from or for.

    A checksum over header and fields follows the header: it finds accidents, and is no protection from a liar.
    """
    if len(binding) != BINDING_BYTES:
        raise ConfigError(f"a binding must have {BINDING_BYTES} bytes, got {len(binding)}")
    size = sum(len(field) for field in fields)
    header = _HEADER.pack(_MAGIC, VERSION, kind, 0, party, size, binding)
    return b"".join((header, _checksum(header, *fields), *fields))


def unframe(data: bytes, kind: int, binding: bytes, party: ClientId) -> "Reader":
    """Open a frame of the expected kind, binding and party; anything else is refused before the body is read."""
    reader, (found_kind, found_party, found_binding) = _open(data)
    if found_kind != kind:
        raise PeerError(f"a message of kind {kind} was expected, got kind {found_kind}")
    if found_party != party:
        raise PeerError(f"a message of client {party} was expected, got one of client {found_party}")
    if found_binding != binding:
        raise PeerError("a message is bound to another session")
    return reader


def unframe_unbound(data: bytes, kind: int) -> tuple["Reader", ClientId, bytes]:
    """Open a frame whose party and binding are not known yet, and return them for the caller to check."""
    reader, (found_kind, party, binding) = _open(data)
    if found_kind != kind:
        raise PeerError(f"a message of kind {kind} was expected, got kind {found_kind}")
    return reader, party, binding


def kind_of(data: bytes) -> int:
    """Return the kind of a frame."""
    return _open(data)[1][0]


def binding_of(data: bytes) -> bytes:
    """Return what a frame says it is bound to, for the receiver to find its part in that."""
    return _open(data)[1][2]


def _open(data: bytes) -> tuple["Reader", tuple[int, ClientId, bytes]]:
    if len(data) < HEADER_BYTES:
        raise PeerError(f"a message has at least {HEADER_BYTES} bytes, got {len(data)}")
    magic, version, kind, zero, party, size, binding = _HEADER.unpack_from(data)
    if magic != _MAGIC or zero != 0:
        raise PeerError("a message must start with a header of this protocol")
    if version != VERSION:
        raise PeerError(f"this protocol has version {VERSION}, got a message of version {version}")
    if size != len(data) - HEADER_BYTES:
        raise PeerError(f"a body of {size} bytes was announced, got {len(data) - HEADER_BYTES}")
    header, body = memoryview(data)[: _HEADER.size], memoryview(data)[HEADER_BYTES:]
    if data[_HEADER.size : HEADER_BYTES] != _checksum(header, body):
        raise PeerError("a message was damaged on its way")
    return Reader(body), (kind, party, binding)


def _checksum(*parts: bytes | memoryview) -> bytes:
    running = hashlib.sha256()
    for part in parts:
        running.update(part)
    return running.digest()[:_CHECKSUM_BYTES]


class Reader:
    """A body read once from start to end; every read says how much it wants and gets exactly that."""

    def __init__(self, body: memoryview) -> None:
        self._rest = body

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        if len(self._rest) < count:
            raise PeerError(f"{count} more bytes were expected, got {len(self._rest)}")
        taken, self._rest = self._rest[:count], self._rest[count:]
        return bytes(taken)

    def records(self, count: int, size_bytes: int) -> list[bytes]:
        """Return the next records of equal size."""
        joined = self.take(count * size_bytes)
        return [joined[start : start + size_bytes] for start in range(0, len(joined), size_bytes)]

    def integer(self, size_bytes: int) -> int:
        """Return the next unsigned integer (little-endian)."""
        return int.from_bytes(self.take(size_bytes), "little")

    def text(self) -> str:
        """Return the next text: one byte of length, then UTF-8."""
        try:
            return self.take(self.integer(1)).decode()
        except UnicodeDecodeError:
            raise PeerError("a text must be UTF-8") from None

    def ids(self) -> tuple[ClientId, ...]:
        """Return the next identities: a 4-byte count, then 8 bytes each, strictly increasing."""
        packed = self.take(8 * self.integer(4))
        ids = np.frombuffer(packed, np.dtype("<u8"))
        require_increasing(ids)
        return tuple(ids.tolist())

    def subset(self, cohort: int) -> Subset:
        """Return the next subset of a cohort: one bit per rank, lowest bit first, spare bits zero."""
        packed = np.frombuffer(self.take(subset_bytes(cohort)), np.uint8)
        flags = np.unpackbits(packed, bitorder="little")
        if flags[cohort:].any():
            raise PeerError("the spare bits of a subset must be zero")
        return flags[:cohort].astype(np.bool_)

    def rest(self) -> bytes:
        """Return all that is left."""
        return self.take(len(self._rest))

    def end(self) -> None:
        """Refuse leftovers."""
        if len(self._rest):
            raise PeerError(f"a body must end with its last field, got {len(self._rest)} more bytes")


def require_increasing(ids: NDArray[np.uint64]) -> None:
    """Refuse identities that repeat or are out of order: a list has one canonical form."""
    if not bool(np.all(ids[1:] > ids[:-1])):
        raise PeerError("identities must be strictly increasing")


def pack_integer(value: int, size_bytes: int) -> bytes:
    """Return an unsigned integer as `Reader.integer` reads it."""
    return value.to_bytes(size_bytes, "little")


def pack_text(text: str) -> bytes:
    """Return a text as `Reader.text` reads it."""
    body = text.encode()
    if len(body) > 255:
        raise ConfigError(f"a text must have at most 255 bytes, got {len(body)}")
    return bytes([len(body)]) + body


def pack_ids(ids: Sequence[ClientId]) -> bytes:
    """Return identities as `Reader.ids` reads them."""
    return pack_integer(len(ids), 4) + np.array(ids, np.dtype("<u8")).tobytes()


def pack_subset(present: Subset) -> bytes:
    """Return a subset as `Reader.subset` reads it."""
    return np.packbits(present, bitorder="little").tobytes()


def subset_of(cohort: int, ranks: Iterable[int]) -> Subset:
    """Return the subset of a cohort that has these ranks."""
    present = np.zeros(cohort, np.bool_)
    present[list(ranks)] = True
    return present


def subset_bytes(cohort: int) -> int:
    """Return the size of a packed subset."""
    return (cohort + 7) // 8
