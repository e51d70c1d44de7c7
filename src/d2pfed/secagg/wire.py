"""Messages in their one canonical byte form, and an exchange of them as the server sees it.

A message has a fixed header, then fields whose lengths are known before they are read.
"""

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.ring import Ring, RingVector

ClientId = int
Subset = NDArray[np.bool_]  # one flag per rank of the cohort
_T = TypeVar("_T")

VERSION = 2
BINDING_BYTES = 32
CONTEXT_BYTES = 32
ID_LIMIT = 1 << 64
COUNTER_LIMIT = 1 << 32

_MAGIC = b"d2pf"
_HEADER = struct.Struct("<4sBBHQQ32s")  # magic, version, kind, zero, party, bytes of the body, binding
_CHECKSUM_BYTES = 16
HEADER_BYTES = _HEADER.size + _CHECKSUM_BYTES


class MessageKind(IntEnum):
    """What a frame holds. Kinds 1 to 10 belong to pair masks, 11 to 16 to standing keys, 17 to 27 to the lattice."""

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
    LATTICE_ADVERTS = 26
    LATTICE_VOUCHER = 27
    ROSTER = 32
    ROSTER_HEAD = 33
    CERTIFICATE = 34
    CERTIFICATES = 35
    SAVED_INVITED = 65
    SAVED_ADVERTISED = 66
    SAVED_SHARED = 67
    SAVED_MASKED = 68
    SAVED_CONFIRMED = 69
    SAVED_STANDING_ADVERTISED = 70
    SAVED_STANDING = 71
    SAVED_LATTICE_MEMBER = 72


class Bound(Protocol):
    """A session or an epoch: what its messages are bound to, and its clients by rank."""

    @property
    def digest(self) -> bytes:
        """What all of its messages are bound to."""

    @property
    def cohort(self) -> tuple[ClientId, ...]:
        """The clients, increasing."""


def message(session: Bound, kind: MessageKind, rank: int, *fields: bytes | memoryview) -> bytes:
    """Return the frame of a message from or for the client of a rank."""
    return frame(kind, session.digest, session.cohort[rank], *fields)


def opened(session: Bound, kind: MessageKind, rank: int, data: bytes) -> "Reader":
    """Open a message from or for the client of a rank; leaving its `with` block refuses leftovers."""
    return unframe(data, kind, session.digest, session.cohort[rank])


def frame(kind: int, binding: bytes, party: ClientId, *fields: bytes | memoryview) -> bytes:
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
    reader, found_party, found_binding = unframe_unbound(data, kind)
    if found_party != party:
        raise PeerError(f"a message of client {party} was expected, got one of client {found_party}")
    if found_binding != binding:
        raise PeerError("a message is bound to another session")
    return reader


def unframe_unbound(data: bytes, kind: int) -> tuple["Reader", ClientId, bytes]:
    """Open a frame whose party and binding are not known yet, and return them for the caller to check."""
    reader, found_kind, party, binding = _open(data)
    if found_kind != kind:
        raise PeerError(f"a message of kind {kind} was expected, got kind {found_kind}")
    return reader, party, binding


def kind_of(data: bytes) -> int:
    """Return the kind of a frame."""
    return _open(data)[1]


def binding_of(data: bytes) -> bytes:
    """Return what a frame says it is bound to, for the receiver to find its part in that."""
    return _open(data)[3]


def _open(data: bytes) -> tuple["Reader", int, ClientId, bytes]:
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
    return Reader(body), kind, party, binding


def _checksum(*parts: bytes | memoryview) -> bytes:
    running = hashlib.sha256()
    for part in parts:
        running.update(part)
    return running.digest()[:_CHECKSUM_BYTES]


class Reader:
    """A body read once from start to end; every read says how much it wants and gets exactly that."""

    def __init__(self, body: memoryview) -> None:
        self._rest = body

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.end()

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        return bytes(self.view(count))

    def view(self, count: int) -> memoryview:
        """Return the next bytes without a copy: a long field that is read at once."""
        if len(self._rest) < count:
            raise PeerError(f"{count} more bytes were expected, got {len(self._rest)}")
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

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
        if not bool(np.all(ids[1:] > ids[:-1])):  # a list has one canonical form
            raise PeerError("identities must be strictly increasing")
        return tuple(ids.tolist())

    def subset(self, cohort: int) -> Subset:
        """Return the next subset of a cohort: one bit per rank, lowest bit first, spare bits zero."""
        packed = np.frombuffer(self.take((cohort + 7) // 8), np.uint8)
        flags = np.unpackbits(packed, bitorder="little")
        if flags[cohort:].any():
            raise PeerError("the spare bits of a subset must be zero")
        return flags[:cohort].astype(np.bool_)

    def vector(self, ring: Ring, dimension: int) -> RingVector:
        """Return the next vector, at the ring's bits per coordinate."""
        return ring.unpack(self.view(ring.packed_bytes(dimension)), dimension)

    def ranked(self, size: int, read: Callable[[], _T]) -> dict[int, _T]:
        """Return the next records by rank, as `pack_ranked` writes them."""
        return {rank: read() for rank in ranks_of(self.subset(size))}

    def rest(self) -> bytes:
        """Return all that is left."""
        return self.take(len(self._rest))

    def end(self) -> None:
        """Refuse leftovers."""
        if len(self._rest):
            raise PeerError(f"a body must end with its last field, got {len(self._rest)} more bytes")


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


def subset_bytes(size: int) -> int:
    """Return how long a subset of this many is."""
    return (size + 7) // 8


def pack_ranked(size: int, records: Mapping[int, bytes]) -> bytes:
    """Return which of this many ranks have a record, as a subset, and then the records in order."""
    return b"".join((pack_subset(subset_of(size, records)), *(records[rank] for rank in sorted(records))))


def rank_of(session: Bound, client: ClientId) -> int:
    """Return the place of a client in the cohort, or refuse a stranger."""
    cohort, rank = session.cohort, bisect_left(session.cohort, client)
    if rank == len(cohort) or cohort[rank] != client:
        raise ConfigError(f"client {client} is not in the cohort")
    return rank


def names_of(session: Bound, ranks: Iterable[int]) -> tuple[ClientId, ...]:
    """Return the clients of these ranks, increasing."""
    return tuple(session.cohort[rank] for rank in sorted(ranks))


def ranks_of(present: Subset) -> list[int]:
    """Return the ranks of a subset, increasing."""
    ranks: list[int] = np.flatnonzero(present).tolist()
    return ranks


def subset_of(cohort: int, ranks: Iterable[int]) -> Subset:
    """Return the subset of a cohort that has these ranks."""
    present = np.zeros(cohort, np.bool_)
    present[list(ranks)] = True
    return present


# Carries requests to clients and answers back; who is missing has dropped out.
Exchange = Callable[[Mapping[ClientId, bytes]], Iterable[tuple[ClientId, bytes]]]


class Outbox(Mapping[ClientId, bytes]):
    """The requests of an exchange by client, and who has answered: a client's first answer is its only one.

    A request is built when it is looked up, so that a model is not copied for a whole cohort at once.
    """

    def __init__(self, cohort: tuple[ClientId, ...], asked: Subset, build: Callable[[int], bytes]) -> None:
        self._ranks = {cohort[rank]: rank for rank in ranks_of(asked)}
        self._build = build
        self._answered: set[ClientId] = set()

    def __getitem__(self, client: ClientId) -> bytes:
        return self._build(self._ranks[client])

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def admit(self, client: ClientId) -> int:
        """Return the rank of a client that was asked and has not answered yet."""
        if client not in self._ranks or client in self._answered:
            raise PeerError(f"client {client} was not asked, or has answered already")
        self._answered.add(client)
        return self._ranks[client]


class ServerPhase(Protocol):
    """What all phases of a server have in common."""

    outbox: Outbox

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's answer, or refuse it."""


def collect(phase: ServerPhase, exchange: Exchange) -> dict[ClientId, PeerError]:
    """Run one exchange of a phase, and return who answered badly and how; they count as dropped out."""
    refused: dict[ClientId, PeerError] = {}
    for client, data in exchange(phase.outbox) if phase.outbox else ():
        try:
            phase.receive(client, data)
        except PeerError as error:
            refused[client] = error
    return refused
