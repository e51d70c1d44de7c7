"""Enrolled clients: their signing keys, listed by somebody other than the server, and how far their logs have come."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import HEAD_BYTES, Entropy, digest, first_head
from d2pfed.secagg import crypto, wire
from d2pfed.secagg.draws import MOST_DEPTH
from d2pfed.secagg.wire import BINDING_BYTES, Bound, ClientId, MessageKind, Reader

if TYPE_CHECKING:
    from d2pfed.secagg.heads import Head

DAY_SECONDS = 86_400
LIFETIME_DAYS = 30
MOST_LIFETIME_DAYS = 90
NONCE_BYTES = 32
NO_ROSTER = bytes(BINDING_BYTES)  # what stands for a roster's digest where nobody is enrolled
NO_ROOT = bytes(32)  # where cohorts are not verified

_UNBOUND = bytes(BINDING_BYTES)  # a roster belongs to no session
_NO_DEPTH = 255
_COUNTER_BYTES = 8

POSITION_BYTES = _COUNTER_BYTES + HEAD_BYTES + crypto.SIGNATURE_BYTES
NO_POSITION = bytes(POSITION_BYTES)  # where none is known

Floor = tuple[int, bytes]  # rows in a client's log, and the head after them


@dataclass(frozen=True, slots=True)
class Position:
    """The number of rows of a client's log and the head after them, signed."""

    count: int
    head: bytes
    signature: bytes

    def pack(self) -> bytes:
        """Return count (8 bytes, little-endian), head (32) and signature (64)."""
        return wire.pack_integer(self.count, _COUNTER_BYTES) + self.head + self.signature


def unpack_position(data: bytes) -> Position:
    """Return the position in 104 bytes, its signature not yet checked."""
    if len(data) != POSITION_BYTES:
        raise PeerError(f"a position must have {POSITION_BYTES} bytes, got {len(data)}")
    end = _COUNTER_BYTES + HEAD_BYTES
    return Position(int.from_bytes(data[:_COUNTER_BYTES], "little"), data[_COUNTER_BYTES:end], data[end:])


def pack_remembered(position: Position | None) -> bytes:
    """Return a position as `read_remembered` reads it."""
    return NO_POSITION if position is None else position.pack()


def read_remembered(reader: Reader) -> Position | None:
    """Return the next position of a body, if it is one."""
    packed = reader.take(POSITION_BYTES)
    return None if packed == NO_POSITION else unpack_position(packed)


def encode_claims(
    session: Bound, kind: MessageKind, rank: int, size: int, claims: Mapping[int, Position]
) -> bytes:
    """Say, instead of an answer of this size, that a client has met these others, by rank, at no earlier positions."""
    packed = wire.pack_ranked(len(session.cohort), {other: claim.pack() for other, claim in claims.items()})
    return wire.message(session, kind, rank, bytes(size), packed)


def decode_claims(
    session: Bound, kind: MessageKind, rank: int, size: int, data: bytes
) -> bytes | dict[int, Position]:
    """Read an answer of this size, or, where it is zero, the claims that keep a client from giving one."""
    with wire.opened(session, kind, rank, data) as reader:
        answer = reader.take(size)
        if any(answer):
            return answer
        claims = reader.ranked(len(session.cohort), lambda: unpack_position(reader.take(POSITION_BYTES)))
    if not claims:
        raise PeerError("a client that does not answer must show the later positions that it has seen")
    return claims


def sign_position(secret: bytes, authority: bytes, client: ClientId, count: int, head: bytes) -> Position:
    """Return a client's position under its private signing key: it says whose log it is, and who enrolled it."""
    return Position(count, head, crypto.sign(secret, digest("d2pfed position", authority, client, count, head)))


def verify_position(position: Position, public: bytes, authority: bytes, client: ClientId) -> None:
    """Refuse a position that is not signed by its client's key.

    Guarantee: nobody but the client can move it on, or name a position where it has never been.
    Checked: test_position.py::test_no_byte_of_a_position_can_be_changed.
    """
    statement = digest("d2pfed position", authority, client, position.count, position.head)
    crypto.require_signature(public, position.signature, statement)


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


class Keys(Protocol):
    """Public signing keys of enrolled clients, by the names that a session has for them: identities or slots."""

    @property
    def authority(self) -> bytes:
        """The public key of the authority that enrolled them."""

    def key(self, name: ClientId) -> bytes:
        """Return a client's key, or refuse a client that is not known to be enrolled."""

    def identity(self, name: ClientId) -> ClientId:
        """Return the identity behind a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Enrolled clients and their public signing keys, no key twice, as one authority has signed them.

    Attributes:
        keys: the public signing key of each client.
        serial: number of the authority's rosters, from 1: a client never goes back to a lower one.
        issued, expires: seconds since 1970.
        nonce: drawn by the authority after it has received `root`.
        depth: of the tree of draws that the server has committed to; None if cohorts are not verified.
        root: of that tree; zero bytes if there is none.
        floors: the latest position of each client that the authority has seen: rows and head.
        authority: its public signing key.
        clients: all that are enrolled, increasing: the population of every draw.
        digest: what the authority signs, and what a session and a draw are bound to.
    """

    keys: Mapping[ClientId, bytes]
    serial: int
    issued: int
    expires: int
    nonce: bytes
    depth: int | None
    root: bytes
    floors: Mapping[ClientId, Floor]
    authority: bytes
    clients: tuple[ClientId, ...] = field(init=False, repr=False, compare=False)
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_one_key_each(list(self.keys.values()))
        lifetime, heads = self.expires - self.issued, [head for _, head in self.floors.values()]
        if self.issued < 0 or not 0 < lifetime <= MOST_LIFETIME_DAYS * DAY_SECONDS:
            raise ConfigError(
                f"a roster must be valid for at most {MOST_LIFETIME_DAYS} days after its issue, got {lifetime} seconds"
            )
        if self.depth is not None and not 0 <= self.depth <= MOST_DEPTH:
            raise ConfigError(f"a tree of draws has a depth in [0, {MOST_DEPTH}], got {self.depth}")
        if self.depth is None and self.root != NO_ROOT:
            raise ConfigError("a roster without draws must have a root of zero bytes")
        if self.floors.keys() != self.keys.keys():
            raise ConfigError("every enrolled client must have a floor, and nobody else")
        counts = [count for count, _ in self.floors.values()]
        if self.serial < 1 or any(not 0 <= number < 1 << 64 for number in (self.serial, *self.keys, *counts)):
            raise ConfigError(f"a roster's serial, identities and counts must be in [0, 2^64), got {self.serial}")
        sizes = {len(value) for value in (*self.keys.values(), self.authority, self.nonce, self.root, *heads)}
        if sizes != {32}:
            raise ConfigError(f"keys, heads, nonce and root must have 32 bytes, got {sorted(sizes)}")
        object.__setattr__(self, "keys", MappingProxyType(dict(sorted(self.keys.items()))))
        object.__setattr__(self, "clients", tuple(self.keys))
        object.__setattr__(self, "floors", MappingProxyType(dict(self.floors)))
        object.__setattr__(self, "digest", digest("d2pfed roster", _body(self)))

    def key(self, name: ClientId) -> bytes:
        """Return a client's public signing key, or refuse a client that was not enrolled."""
        if name not in self.keys:
            raise PeerError(f"client {name} is not enrolled")
        return self.keys[name]

    def identity(self, name: ClientId) -> ClientId:
        """Return the identity behind a name: who holds the roster names clients by their identities."""
        return name

    def name(self, client: ClientId) -> ClientId:
        """Return the name of a client in sessions."""
        return client


@dataclass(frozen=True, slots=True)
class Enrolment:
    """What an enrolled client holds: its private signing key and the roster it trusts."""

    secret: bytes = field(repr=False)
    roster: Roster

    def require_self(self, client: ClientId) -> None:
        """Refuse to act for a client whose enrolled key is not this one."""
        if self.roster.key(client) != crypto.signing_public(self.secret):
            raise ConfigError(f"client {client} is enrolled with another key")


def require_one_key_each(keys: list[bytes]) -> None:
    """Refuse a roster in which one key plays several clients."""
    if len(set(keys)) != len(keys):
        raise PeerError("every enrolled client must have a key of its own")


def require_authority(authority: bytes, signature: bytes, statement: bytes) -> None:
    """Refuse a roster that somebody else has signed, the server for one."""
    crypto.require_signature(authority, signature, statement)


def require_serial(roster: "Roster | Head", highest: int, seen: bytes) -> None:
    """Refuse a roster older than the highest serial seen (0 if none), or another one of that serial.

    Guarantee: a server cannot bring back a client that the authority has dropped by showing an old roster.
    Checked: test_roster.py::test_a_roster_that_was_replaced_is_refused.
    """
    if roster.serial < highest:
        raise PeerError(f"a roster of serial {highest} or later is needed, got {roster.serial}")
    if roster.serial == highest and roster.digest != seen:
        raise PeerError(f"the authority has signed two rosters of serial {highest}")


def require_unexpired(roster: "Roster | Head", now: int) -> None:
    """Refuse a roster after its time; `now` is that of `not_before`, in seconds since 1970."""
    if now >= roster.expires:
        raise PeerError(f"a roster has expired: it was valid until {roster.expires}, got {now}")


def not_before(clock: int, latest: int) -> int:
    """Return the time by a clock that may have been set back, given the latest time that was ever seen.

    A day is allowed for clocks that differ.
    """
    return max(clock, latest - DAY_SECONDS)


def issue_roster(
    keys: Mapping[ClientId, bytes],
    authority: bytes,
    *,
    serial: int,
    issued: int,
    entropy: Entropy,
    lifetime_days: int = LIFETIME_DAYS,
    depth: int | None = None,
    root: bytes = NO_ROOT,
    floors: Mapping[ClientId, Floor] = MappingProxyType({}),
) -> Roster:
    """Return the authority's next roster; a client without a floor is new.

    Guarantee: the nonce is drawn here, after the root is known, and can be had from nobody, so that the server cannot
    try trees until their cohorts suit it.
    Checked: test_draws.py::test_a_server_that_knows_the_nonce_tries_trees_until_a_cohort_suits_it.
    """
    new = {client: (0, first_head(authority, client)) for client in keys}
    return Roster(
        keys=keys,
        serial=serial,
        issued=issued,
        expires=issued + lifetime_days * DAY_SECONDS,
        nonce=entropy.stream().bytes(NONCE_BYTES),
        depth=depth,
        root=root,
        floors=new | dict(floors),
        authority=authority,
    )


def encode_roster(roster: Roster, authority_secret: bytes) -> bytes:
    """Return a roster signed by the authority that enrolled its clients."""
    if crypto.signing_public(authority_secret) != roster.authority:
        raise ConfigError("a roster must be signed with the key of the authority that it names")
    return wire.frame(MessageKind.ROSTER, _UNBOUND, 0, _body(roster), crypto.sign(authority_secret, roster.digest))


def decode_roster(data: bytes, authority: bytes) -> Roster:
    """Return a roster that this authority has signed; whether it is old or expired is for the caller to check.

    Guarantee: a party that cannot sign as the authority cannot add, drop or change a client, a floor or the draws.
    Checked: test_malicious_server.py (rosters signed by the server itself).
    """
    reader = wire.unframe(data, MessageKind.ROSTER, _UNBOUND, 0)
    serial, issued, expires = (reader.integer(_COUNTER_BYTES) for _ in range(3))
    nonce, depth, root = reader.take(NONCE_BYTES), reader.integer(1), reader.take(len(NO_ROOT))
    clients = reader.ids()
    keys = {client: reader.take(crypto.PUBLIC_BYTES) for client in clients}
    floors = {client: (reader.integer(_COUNTER_BYTES), reader.take(HEAD_BYTES)) for client in clients}
    signature = reader.take(crypto.SIGNATURE_BYTES)
    reader.end()
    try:
        roster = Roster(
            keys=keys,
            serial=serial,
            issued=issued,
            expires=expires,
            nonce=nonce,
            depth=None if depth == _NO_DEPTH else depth,
            root=root,
            floors=floors,
            authority=authority,
        )
    except ConfigError as error:
        raise PeerError(str(error)) from None
    require_authority(authority, signature, roster.digest)
    return roster


def _body(roster: Roster) -> bytes:
    numbers = b"".join(
        wire.pack_integer(each, _COUNTER_BYTES) for each in (roster.serial, roster.issued, roster.expires)
    )
    depth = _NO_DEPTH if roster.depth is None else roster.depth
    fields = [numbers, roster.nonce, wire.pack_integer(depth, 1), roster.root, wire.pack_ids(roster.clients)]
    fields += [roster.keys[client] for client in roster.clients]
    for client in roster.clients:
        count, head = roster.floors[client]
        fields += [wire.pack_integer(count, _COUNTER_BYTES), head]
    return b"".join(fields)
