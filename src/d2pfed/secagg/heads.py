"""Rosters that clients need not hold: a signed head, and a certificate for each slot.

A slot is a client's place in the roster by identity. Draws give slots: a client that holds the head computes the cohort
and the committee by slots, and needs the keys of those alone with whom it deals. Their certificates come with the
messages. Heads and certificates are the authority's, as rosters are: their carrier cannot change them.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import HEAD_BYTES, digest
from d2pfed.secagg import crypto, wire
from d2pfed.secagg.draws import MOST_DEPTH
from d2pfed.secagg.roster import NO_ROOT, Floor, Roster
from d2pfed.secagg.wire import BINDING_BYTES, ClientId, MessageKind, Reader

MOST_POPULATION = 1 << 32
CERTIFICATE_BYTES = 8 + crypto.PUBLIC_BYTES + crypto.SIGNATURE_BYTES

HEAD_MESSAGE_BYTES = wire.HEADER_BYTES + 3 * 8 + 1 + len(NO_ROOT) + 4 + BINDING_BYTES + crypto.SIGNATURE_BYTES
SLIP_BYTES = wire.HEADER_BYTES + 4 + CERTIFICATE_BYTES + 8 + HEAD_BYTES + crypto.SIGNATURE_BYTES

_UNBOUND = bytes(BINDING_BYTES)  # a head belongs to no session
_NO_DEPTH = 255
_COUNTER_BYTES, _SLOT_BYTES = 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a roster says of all its clients together.

    Attributes:
        serial, issued, expires, depth, root: those of the roster.
        population: enrolled clients; their slots are 0 to population - 1.
        digest: of the roster, what sessions and draws are bound to.
        authority: whose signature counts.
    """

    serial: int
    issued: int
    expires: int
    depth: int | None
    root: bytes
    population: int
    digest: bytes
    authority: bytes

    def __post_init__(self) -> None:
        if not 1 <= self.population < MOST_POPULATION:
            raise ConfigError(f"a head must have 1 to {MOST_POPULATION - 1} clients, got {self.population}")
        if self.depth is not None and not 0 <= self.depth <= MOST_DEPTH:
            raise ConfigError(f"a tree of draws has a depth in [0, {MOST_DEPTH}], got {self.depth}")
        if self.depth is None and self.root != NO_ROOT:
            raise ConfigError("a head without draws must have a root of zero bytes")

    def pack(self) -> bytes:
        """Return what the authority signs."""
        times = (wire.pack_integer(each, _COUNTER_BYTES) for each in (self.serial, self.issued, self.expires))
        depth = wire.pack_integer(_NO_DEPTH if self.depth is None else self.depth, 1)
        return b"".join((*times, depth, self.root, wire.pack_integer(self.population, _SLOT_BYTES), self.digest))


def head_of(roster: Roster) -> Head:
    """Return the head of a roster."""
    return Head(
        serial=roster.serial,
        issued=roster.issued,
        expires=roster.expires,
        depth=roster.depth,
        root=roster.root,
        population=len(roster.clients),
        digest=roster.digest,
        authority=roster.authority,
    )


def encode_head(head: Head, authority_secret: bytes) -> bytes:
    """Return a head signed by its authority."""
    if crypto.signing_public(authority_secret) != head.authority:
        raise ConfigError("a head must be signed with the key of the authority that it names")
    body = head.pack()
    signature = crypto.sign(authority_secret, digest("d2pfed roster head", body))
    return wire.frame(MessageKind.ROSTER_HEAD, _UNBOUND, 0, body, signature)


def decode_head(data: bytes, authority: bytes) -> Head:
    """Return a head that this authority has signed; whether it is old or expired is for the caller to check.

    Guarantee: only the authority can change the population, the draws or the roster that a head stands for.
    Checked: test_heads.py::test_no_byte_of_a_head_can_be_changed.
    """
    with wire.unframe(data, MessageKind.ROSTER_HEAD, _UNBOUND, 0) as reader:
        serial, issued, expires = (reader.integer(_COUNTER_BYTES) for _ in range(3))
        depth, root = reader.integer(1), reader.take(len(NO_ROOT))
        population, roster_digest = reader.integer(_SLOT_BYTES), reader.take(BINDING_BYTES)
        signature = reader.take(crypto.SIGNATURE_BYTES)
    try:
        head = Head(
            serial=serial,
            issued=issued,
            expires=expires,
            depth=None if depth == _NO_DEPTH else depth,
            root=root,
            population=population,
            digest=roster_digest,
            authority=authority,
        )
    except ConfigError as error:
        raise PeerError(str(error)) from None
    crypto.require_signature(authority, signature, digest("d2pfed roster head", head.pack()))
    return head


@dataclass(frozen=True, slots=True)
class Certificate:
    """The authority's word that a slot of a roster is this client's, and its key this one."""

    client: ClientId
    key: bytes
    signature: bytes

    def pack(self) -> bytes:
        """Return identity (8), key (32) and signature (64); the slot follows from the draw."""
        return wire.pack_integer(self.client, 8) + self.key + self.signature


def read_certificate(reader: Reader) -> Certificate:
    """Read the next certificate of a body, its signature not yet checked."""
    return Certificate(reader.integer(8), reader.take(crypto.PUBLIC_BYTES), reader.take(crypto.SIGNATURE_BYTES))


def require_certified(head: Head, slot: int, certificate: Certificate) -> None:
    """Refuse a certificate that the authority did not sign for this slot of this roster.

    Guarantee: nobody but the authority can put another key, or another client, into a slot that was drawn.
    Checked: test_heads.py.
    """
    statement = _enrolment(head.digest, slot, certificate.client, certificate.key)
    crypto.require_signature(head.authority, certificate.signature, statement)


@dataclass(frozen=True, slots=True)
class Certified:
    """A head, and the clients that certificates under it have shown, by slot (`Keys`)."""

    head: Head
    certificates: Mapping[int, Certificate] = field(default_factory=dict)

    @property
    def authority(self) -> bytes:
        """Return the authority's public key."""
        return self.head.authority

    @property
    def digest(self) -> bytes:
        """Return the digest of the roster."""
        return self.head.digest

    @property
    def depth(self) -> int | None:
        """Return the depth of the tree of draws."""
        return self.head.depth

    @property
    def root(self) -> bytes:
        """Return the root of the tree of draws."""
        return self.head.root

    @property
    def clients(self) -> range:
        """Return all slots: the population of every draw."""
        return range(self.head.population)

    def key(self, name: ClientId) -> bytes:
        """Return the key of a slot, if its certificate was shown."""
        return self._shown(name).key

    def identity(self, name: ClientId) -> ClientId:
        """Return the client in a slot, if its certificate was shown."""
        return self._shown(name).client

    def name(self, client: ClientId) -> ClientId:
        """Return the slot of a client whose certificate was shown."""
        for slot, certificate in self.certificates.items():
            if certificate.client == client:
                return slot
        raise PeerError(f"no certificate shows that client {client} is enrolled")

    def admit(self, certificates: Mapping[int, Certificate]) -> "Certified":
        """Return the same with further clients; a certificate that does not fit its slot is refused."""
        for slot, certificate in certificates.items():
            if self.certificates.get(slot) != certificate:
                require_certified(self.head, slot, certificate)
        return Certified(self.head, {**self.certificates, **certificates})

    def _shown(self, slot: int) -> Certificate:
        if slot not in self.certificates:
            raise PeerError(f"no certificate of slot {slot} was shown")
        return self.certificates[slot]


@dataclass(frozen=True, slots=True)
class SlotEnrolment:
    """What a client holds that does not hold the roster: its private signing key, the head, its certificate."""

    secret: bytes = field(repr=False)
    roster: Certified

    def require_self(self, client: ClientId) -> None:
        """Refuse to act for a client whose certified key is not this one."""
        if self.roster.key(self.roster.name(client)) != crypto.signing_public(self.secret):
            raise ConfigError(f"client {client} is enrolled with another key")


@dataclass(frozen=True, slots=True)
class CertifiedRoster:
    """A roster with the authority's two signatures for every slot: what the server of such clients holds (`Keys`)."""

    roster: Roster
    signatures: bytes = field(repr=False)  # by slot: of the certificate, and of the floor

    def __post_init__(self) -> None:
        wanted = 2 * crypto.SIGNATURE_BYTES * len(self.roster.clients)
        if len(self.signatures) != wanted:
            raise ConfigError(f"a roster's certificates must have {wanted} bytes, got {len(self.signatures)}")

    @property
    def authority(self) -> bytes:
        """Return the authority's public key."""
        return self.roster.authority

    @property
    def digest(self) -> bytes:
        """Return the digest of the roster."""
        return self.roster.digest

    def key(self, name: ClientId) -> bytes:
        """Return the key of a slot."""
        return self.roster.keys[self.identity(name)]

    def identity(self, name: ClientId) -> ClientId:
        """Return the client in a slot."""
        if not 0 <= name < len(self.roster.clients):
            raise PeerError(f"there is no slot {name} among {len(self.roster.clients)}")
        return self.roster.clients[name]

    def name(self, client: ClientId) -> ClientId:
        """Return the slot of a client."""
        self.roster.key(client)
        return bisect_left(self.roster.clients, client)

    def certificate(self, slot: int) -> Certificate:
        """Return the certificate of a slot."""
        start = 2 * crypto.SIGNATURE_BYTES * slot
        client = self.identity(slot)
        signature = self.signatures[start : start + crypto.SIGNATURE_BYTES]
        return Certificate(client, self.roster.keys[client], signature)

    def encode(self) -> bytes:
        """Return the bytes that the authority gives to the server beside the roster."""
        return wire.frame(MessageKind.CERTIFICATES, self.roster.digest, 0, self.signatures)

    def slip(self, slot: int) -> bytes:
        """Return the bytes that the client in a slot is sent: its certificate, and its floor."""
        start = (2 * slot + 1) * crypto.SIGNATURE_BYTES
        certificate, signature = (
            self.certificate(slot),
            self.signatures[start : start + crypto.SIGNATURE_BYTES],
        )
        count, head = self.roster.floors[certificate.client]
        fields = wire.pack_integer(slot, _SLOT_BYTES), certificate.pack(), wire.pack_integer(count, _COUNTER_BYTES)
        return wire.frame(
            MessageKind.CERTIFICATE, self.roster.digest, certificate.client, *fields, head, signature
        )


def certify(roster: Roster, authority_secret: bytes) -> CertifiedRoster:
    """Return a roster with one certificate for each slot, signed by its authority."""
    if crypto.signing_public(authority_secret) != roster.authority:
        raise ConfigError("certificates must be signed with the key of the authority that enrolled their clients")
    signatures = list[bytes]()
    for slot, client in enumerate(roster.clients):
        statement = _enrolment(roster.digest, slot, client, roster.keys[client])
        signatures.append(crypto.sign(authority_secret, statement))
        floor = _floor(roster.digest, client, roster.floors[client])
        signatures.append(crypto.sign(authority_secret, floor))
    return CertifiedRoster(roster, b"".join(signatures))


def decode_certificates(data: bytes, roster: Roster) -> CertifiedRoster:
    """Return a roster with the certificates that its authority has given to the server."""
    reader = wire.unframe(data, MessageKind.CERTIFICATES, roster.digest, 0)
    try:
        return CertifiedRoster(roster, reader.rest())
    except ConfigError as error:
        raise PeerError(str(error)) from None


def decode_slip(data: bytes, head: Head, client: ClientId) -> tuple[Certified, Floor]:
    """Return a client's own enrolment under a head, and the latest position at which the authority has seen it.

    Guarantee: certificate and floor are the authority's, for this roster and this client.
    Checked: test_heads.py::test_no_byte_of_a_slip_can_be_changed.
    """
    with wire.unframe(data, MessageKind.CERTIFICATE, head.digest, client) as reader:
        slot, certificate = reader.integer(_SLOT_BYTES), read_certificate(reader)
        floor = reader.integer(_COUNTER_BYTES), reader.take(HEAD_BYTES)
        signature = reader.take(crypto.SIGNATURE_BYTES)
    if certificate.client != client or slot >= head.population:
        raise PeerError(f"a certificate of client {client} was expected, got one of client {certificate.client}")
    crypto.require_signature(head.authority, signature, _floor(head.digest, client, floor))
    return Certified(head).admit({slot: certificate}), floor


def _enrolment(roster_digest: bytes, slot: int, client: ClientId, key: bytes) -> bytes:
    return digest("d2pfed enrolment", roster_digest, slot, client, key)


def _floor(roster_digest: bytes, client: ClientId, floor: Floor) -> bytes:
    return digest("d2pfed floor", roster_digest, client, *floor)
