"""The messages of the lattice protocol, kinds 17 to 27: what each carries, as bytes and back."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from d2pfed.secagg import roster, wire
from d2pfed.secagg.crypto import PUBLIC_BYTES, SIGNATURE_BYTES
from d2pfed.secagg.draws import Opening
from d2pfed.secagg.heads import Certificate, read_certificate
from d2pfed.secagg.lattice import field as fields
from d2pfed.secagg.lattice.field import ELEMENT_BYTES, Elements
from d2pfed.secagg.lattice.session import Request, Session
from d2pfed.secagg.pairwise.messages import Invitation, pack_invited, read_invitation
from d2pfed.secagg.roster import POSITION_BYTES, Position, pack_remembered, unpack_position
from d2pfed.secagg.wire import BINDING_BYTES, CONTEXT_BYTES, HEADER_BYTES, MessageKind, Reader

NONCE_BYTES = 32


@dataclass(frozen=True, slots=True)
class Advert:
    """A member's key in this attempt, its signature (no bytes where nobody is enrolled), and its certificate.

    The server adds the certificate, where clients are named by slots.
    """

    key: bytes
    signature: bytes = b""
    certificate: Certificate | None = None

    def pack(self) -> bytes:
        """Return the advert's bytes."""
        return self.key + self.signature + _packed(self.certificate)


@dataclass(frozen=True, slots=True)
class SignedKey:
    """A client's key, where its log stood, its signature of both, and the certificate that the server adds."""

    key: bytes
    position: Position | None = None
    signature: bytes = b""
    certificate: Certificate | None = None

    @property
    def proof(self) -> bytes:
        """Return what follows a key: position and signature, no bytes where nobody is enrolled."""
        return (b"" if self.position is None else self.position.pack()) + self.signature


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """All that a client says: its key, a box for each member that is there, and its vector behind its masks."""

    context: bytes
    signed: SignedKey
    commitment: bytes
    boxes: Elements = field(repr=False)  # a row for each member that is there, by place
    vector: bytes | memoryview = field(repr=False)  # packed, and read when it is added to the others


@dataclass(frozen=True, slots=True, eq=False)
class Survivors:
    """Whose vectors are to be opened, by rank, under a fresh nonce."""

    context: bytes
    nonce: bytes
    signed: Mapping[int, SignedKey]


@dataclass(frozen=True, slots=True)
class Signer:
    """A member's signature, of all members' keys or of an opening, and its certificate if clients go by slots."""

    signature: bytes
    certificate: Certificate | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A member's pads: summed over the survivors for their secrets, one for each survivor for its seed."""

    sums: Elements
    seeds: Elements


@dataclass(frozen=True, slots=True, eq=False)
class RequestBody:
    """A request as it was read, before there is a session to compare it with."""

    invitation: Invitation
    rest: bytes = field(repr=False)


def read_advert(session: Session, reader: Reader) -> Advert:
    """Read the next advert of a body."""
    return Advert(reader.take(PUBLIC_BYTES), reader.take(SIGNATURE_BYTES if session.is_signed else 0))


def pack_adverts(session: Session, adverts: Mapping[int, Advert]) -> bytes:
    """Return the body that all members are shown each other's adverts with, by place."""
    return wire.pack_ranked(session.committee.size, {place: each.pack() for place, each in adverts.items()})


def decode_adverts(session: Session, rank: int, data: bytes) -> dict[int, Advert]:
    """Read the members' adverts, by place."""
    with wire.opened(session, MessageKind.LATTICE_ADVERTS, rank, data) as reader:
        return reader.ranked(
            session.committee.size,
            lambda: replace(read_advert(session, reader), certificate=_read_certificate(session, reader)),
        )


def encode_request(
    request: Request,
    rank: int,
    vouchers: Mapping[int, Signer],
    opening: Opening | None,
    remembered: Position | None,
) -> bytes:
    """Ask a client for its contribution."""
    return encode_requested(request, rank, pack_request(request, vouchers, opening), remembered)


def pack_request(request: Request, vouchers: Mapping[int, Signer], opening: Opening | None) -> tuple[bytes, bytes]:
    """Return what is the same in the requests to all clients: what is before and after a remembered position."""
    session = request.session
    named, drawn = pack_invited(session, opening)
    keys, signed = wire.pack_ranked(session.committee.size, request.keys), _pack_signers(session, vouchers)
    task = wire.pack_integer(len(request.task), 4), request.task, request.model_digest
    return named, b"".join((drawn, keys, signed if session.is_signed else b"", *task))


def encode_requested(
    request: Request, rank: int, packed: tuple[bytes, bytes], remembered: Position | None
) -> bytes:
    """Ask a client for its contribution, by what `pack_request` has returned."""
    named, rest = packed
    return wire.message(
        request.session, MessageKind.LATTICE_REQUEST, rank, named, pack_remembered(remembered), rest
    )


def decode_request(data: bytes, depth: int | None) -> RequestBody:
    """Read the invitation in a request: from it the receiver builds the session, with which `read_request` goes on."""
    reader, client, binding = wire.unframe_unbound(data, MessageKind.LATTICE_REQUEST)
    return RequestBody(read_invitation(reader, client, binding, depth), reader.rest())


def read_request(session: Session, body: RequestBody) -> tuple[Request, dict[int, Signer]]:
    """Read which members are there, with their keys, who vouches for these, and what is to be trained."""
    with Reader(memoryview(body.rest)) as reader:
        keys = reader.ranked(session.committee.size, lambda: reader.take(PUBLIC_BYTES))
        vouchers = _read_signers(session, reader) if session.is_signed else {}
        return Request(session, keys, reader.take(reader.integer(4)), reader.take(BINDING_BYTES)), vouchers


def encode_contribution(session: Session, rank: int, said: Contribution) -> bytes:
    """Send a client's one message."""
    shown = said.context, said.signed.key, said.commitment, said.signed.proof
    return wire.message(
        session, MessageKind.LATTICE_CONTRIBUTION, rank, *shown, fields.pack(said.boxes), said.vector
    )


def decode_contribution(session: Session, rank: int, members: int, data: bytes) -> Contribution:
    """Read a contribution with a box for each of this many members."""
    columns = session.polynomials + 2
    with wire.opened(session, MessageKind.LATTICE_CONTRIBUTION, rank, data) as reader:
        context, key = reader.take(CONTEXT_BYTES), reader.take(PUBLIC_BYTES)
        commitment, signed = reader.take(BINDING_BYTES), _read_signed(session, reader, key)
        boxes = _read_elements(reader, members * columns).reshape(members, columns)
        vector = reader.view(session.ring.packed_bytes(session.dimension))
        return Contribution(context, signed, commitment, boxes, vector)


def encode_survivors(session: Session, rank: int, survivors: Survivors) -> bytes:
    """Tell a member whose vectors arrived."""
    return wire.message(session, MessageKind.LATTICE_SURVIVORS, rank, pack_survivors(session, survivors))


def pack_survivors(session: Session, survivors: Survivors) -> bytes:
    """Return the body that all members are told whose vectors arrived with."""
    packed = {other: _packed(each.certificate) + each.key + each.proof for other, each in survivors.signed.items()}
    return survivors.context + survivors.nonce + wire.pack_ranked(len(session.cohort), packed)


def decode_survivors(session: Session, rank: int, data: bytes) -> Survivors:
    """Read whose vectors arrived."""

    def signed() -> SignedKey:
        certificate = _read_certificate(session, reader)
        return replace(_read_signed(session, reader, reader.take(PUBLIC_BYTES)), certificate=certificate)

    with wire.opened(session, MessageKind.LATTICE_SURVIVORS, rank, data) as reader:
        context, nonce = reader.take(CONTEXT_BYTES), reader.take(NONCE_BYTES)
        return Survivors(context, nonce, reader.ranked(len(session.cohort), signed))


def encode_claims(session: Session, rank: int, claims: Mapping[int, Position]) -> bytes:
    """Say that a member does not sign: it has met these clients, by rank, at positions that are not earlier."""
    return roster.encode_claims(session, MessageKind.LATTICE_SIGNATURE, rank, SIGNATURE_BYTES, claims)


def decode_signature(session: Session, rank: int, data: bytes) -> bytes | dict[int, Position]:
    """Read a member's signature, or, where it is zero, its claims."""
    return roster.decode_claims(session, MessageKind.LATTICE_SIGNATURE, rank, SIGNATURE_BYTES, data)


def encode_certificate(session: Session, rank: int, signers: Mapping[int, Signer]) -> bytes:
    """Show a member who has signed, by place."""
    return wire.message(session, MessageKind.LATTICE_CERTIFICATE, rank, _pack_signers(session, signers))


def decode_certificate(session: Session, rank: int, data: bytes) -> dict[int, Signer]:
    """Read the signatures, by place."""
    with wire.opened(session, MessageKind.LATTICE_CERTIFICATE, rank, data) as reader:
        return _read_signers(session, reader)


def encode_opening(session: Session, rank: int, opened: Opened) -> bytes:
    """Send a member's pads."""
    pads = fields.pack(opened.sums), fields.pack(opened.seeds)
    return wire.message(session, MessageKind.LATTICE_OPENING, rank, *pads)


def decode_opening(session: Session, rank: int, survivors: int, data: bytes) -> Opened:
    """Read a member's pads."""
    with wire.opened(session, MessageKind.LATTICE_OPENING, rank, data) as reader:
        return Opened(_read_elements(reader, session.polynomials), _read_elements(reader, survivors))


def encode_trace(session: Session, rank: int, combined: Elements) -> bytes:
    """Send a member's combined pads, one for each survivor."""
    return wire.message(session, MessageKind.LATTICE_TRACE, rank, fields.pack(combined))


def decode_trace(session: Session, rank: int, survivors: int, data: bytes) -> Elements:
    """Read a member's combined pads."""
    with wire.opened(session, MessageKind.LATTICE_TRACE, rank, data) as reader:
        return _read_elements(reader, survivors)


def contribution_bytes(session: Session, members: int) -> int:
    """Return the size of a contribution with boxes for this many members: all that an ordinary client uploads."""
    signed = POSITION_BYTES + SIGNATURE_BYTES if session.is_signed else 0
    boxes = members * (session.polynomials + 2) * ELEMENT_BYTES
    shown = CONTEXT_BYTES + PUBLIC_BYTES + BINDING_BYTES + signed
    return HEADER_BYTES + shown + boxes + session.ring.packed_bytes(session.dimension)


def _read_elements(reader: Reader, count: int) -> Elements:
    return fields.unpack(reader.take(count * ELEMENT_BYTES))


def _packed(certificate: Certificate | None) -> bytes:
    return b"" if certificate is None else certificate.pack()


def _read_certificate(session: Session, reader: Reader) -> Certificate | None:
    return read_certificate(reader) if session.is_by_slot else None


def _pack_signers(session: Session, signers: Mapping[int, Signer]) -> bytes:
    signed = {place: _packed(each.certificate) + each.signature for place, each in signers.items()}
    return wire.pack_ranked(session.committee.size, signed)


def _read_signers(session: Session, reader: Reader) -> dict[int, Signer]:
    def signer() -> Signer:
        certificate = _read_certificate(session, reader)
        return Signer(reader.take(SIGNATURE_BYTES), certificate)

    return reader.ranked(session.committee.size, signer)


def _read_signed(session: Session, reader: Reader, key: bytes) -> SignedKey:
    if not session.is_signed:
        return SignedKey(key)
    return SignedKey(key, unpack_position(reader.take(POSITION_BYTES)), reader.take(SIGNATURE_BYTES))
