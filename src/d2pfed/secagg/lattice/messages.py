"""The messages of the lattice protocol, kinds 17 to 25: what each carries, as bytes and back."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from d2pfed.errors import PeerError
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg.crypto import PUBLIC_BYTES, SIGNATURE_BYTES
from d2pfed.secagg.draws import Opening
from d2pfed.secagg.lattice import field as fields
from d2pfed.secagg.lattice.field import ELEMENT_BYTES, Elements
from d2pfed.secagg.lattice.session import Request, Session
from d2pfed.secagg.pairwise.messages import Invitation, pack_invitation, read_invitation
from d2pfed.secagg.position import POSITION_BYTES, Position, unpack_position
from d2pfed.secagg.wire import (
    BINDING_BYTES,
    HEADER_BYTES,
    ClientId,
    MessageKind,
    Reader,
    frame,
    pack_integer,
    pack_subset,
    subset_of,
    unframe,
    unframe_unbound,
)

NONCE_BYTES = 32
NO_SIGNATURE = bytes(SIGNATURE_BYTES)  # of a member that does not sign, and says why


@dataclass(frozen=True, slots=True)
class Advert:
    """A member's key in this attempt, and its signature (no bytes where nobody is enrolled)."""

    key: bytes
    signature: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """All that a client says: its key, a box for each member that is there, and its vector behind its masks."""

    context: bytes
    key: bytes
    commitment: bytes
    position: Position | None
    signature: bytes
    boxes: Elements = field(repr=False)  # a row for each member that is there, by place
    vector: RingVector = field(repr=False)


@dataclass(frozen=True, slots=True)
class SignedKey:
    """A survivor's key, and what it signed it with."""

    key: bytes
    position: Position | None = None
    signature: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class Survivors:
    """Whose vectors are to be opened, by rank, under a fresh nonce."""

    context: bytes
    nonce: bytes
    signed: Mapping[int, SignedKey]


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A member's pads: summed over the survivors for their secrets, one for each survivor for its seed."""

    sums: Elements
    seeds: Elements


def encode_advert(session: Session, member: ClientId, advert: Advert) -> bytes:
    """Advertise a member's key."""
    return frame(MessageKind.LATTICE_ADVERT, session.digest, member, advert.key, advert.signature)


def decode_advert(session: Session, member: ClientId, data: bytes) -> Advert:
    """Read a member's advert."""
    reader = unframe(data, MessageKind.LATTICE_ADVERT, session.digest, member)
    advert = _read_advert(session, reader)
    reader.end()
    return advert


@dataclass(frozen=True, slots=True, eq=False)
class RequestBody:
    """A request as it was read, before there is a session to compare it with."""

    invitation: Invitation
    rest: bytes = field(repr=False)


def encode_request(
    request: Request,
    client: ClientId,
    adverts: Mapping[int, Advert],
    opening: Opening | None,
    remembered: Position | None,
) -> bytes:
    """Ask a client for its contribution."""
    session, invitation = request.session, pack_invitation(request.session, opening, remembered)
    listed = (adverts[place].key + adverts[place].signature for place in sorted(adverts))
    task = pack_integer(len(request.task), 4), request.task, request.model_digest
    return frame(
        MessageKind.LATTICE_REQUEST,
        session.digest,
        client,
        invitation,
        pack_subset(request.present),
        *listed,
        *task,
    )


def decode_request(data: bytes, depth: int | None) -> RequestBody:
    """Read the invitation in a request: from it the receiver builds the session, with which `read_request` goes on."""
    reader, client, binding = unframe_unbound(data, MessageKind.LATTICE_REQUEST)
    return RequestBody(read_invitation(reader, client, binding, depth), reader.rest())


def read_request(session: Session, body: RequestBody) -> tuple[Request, dict[int, Advert]]:
    """Read which members are there, with their adverts, and what is to be trained."""
    reader = Reader(memoryview(body.rest))
    present = reader.subset(session.committee.size)
    adverts = {int(place): _read_advert(session, reader) for place in np.flatnonzero(present)}
    task = reader.take(reader.integer(4))
    model = reader.take(BINDING_BYTES)
    reader.end()
    return Request(session, {place: advert.key for place, advert in adverts.items()}, task, model), adverts


def encode_contribution(session: Session, client: ClientId, contribution: Contribution) -> bytes:
    """Send a client's one message."""
    signed = (b"" if contribution.position is None else contribution.position.pack()) + contribution.signature
    shown = contribution.context, contribution.key, contribution.commitment, signed
    masked = fields.pack(contribution.boxes), session.ring.pack(contribution.vector)
    return frame(MessageKind.LATTICE_CONTRIBUTION, session.digest, client, *shown, *masked)


def decode_contribution(session: Session, client: ClientId, members: int, data: bytes) -> Contribution:
    """Read a contribution with a box for each of so many members."""
    reader = unframe(data, MessageKind.LATTICE_CONTRIBUTION, session.digest, client)
    context, key, commitment = reader.take(BINDING_BYTES), reader.take(PUBLIC_BYTES), reader.take(BINDING_BYTES)
    signed = _read_signed(session, reader, key)
    columns = session.polynomials + 2
    boxes = fields.unpack(reader.take(members * columns * ELEMENT_BYTES)).reshape(members, columns)
    vector = session.ring.unpack(reader.take(session.ring.packed_bytes(session.dimension)), session.dimension)
    reader.end()
    return Contribution(context, key, commitment, signed.position, signed.signature, boxes, vector)


def encode_survivors(session: Session, member: ClientId, survivors: Survivors) -> bytes:
    """Tell a member whose vectors arrived."""
    present = pack_subset(subset_of(len(session.cohort), survivors.signed))
    listed = (
        each.key + (b"" if each.position is None else each.position.pack()) + each.signature
        for _, each in sorted(survivors.signed.items())
    )
    named = survivors.context, survivors.nonce, present
    return frame(MessageKind.LATTICE_SURVIVORS, session.digest, member, *named, *listed)


def decode_survivors(session: Session, member: ClientId, data: bytes) -> Survivors:
    """Read whose vectors arrived."""
    reader = unframe(data, MessageKind.LATTICE_SURVIVORS, session.digest, member)
    context, nonce = reader.take(BINDING_BYTES), reader.take(NONCE_BYTES)
    present = np.flatnonzero(reader.subset(len(session.cohort)))
    signed = {int(rank): _read_signed(session, reader, reader.take(PUBLIC_BYTES)) for rank in present}
    reader.end()
    return Survivors(context, nonce, signed)


def encode_signature(
    session: Session, member: ClientId, signature: bytes, claims: Mapping[int, Position] | None = None
) -> bytes:
    """Sign what is to be opened, or say which clients, by rank, have been met at a later position."""
    if not claims:
        return frame(MessageKind.LATTICE_SIGNATURE, session.digest, member, signature)
    peers = pack_subset(subset_of(len(session.cohort), claims))
    listed = (claims[rank].pack() for rank in sorted(claims))
    return frame(MessageKind.LATTICE_SIGNATURE, session.digest, member, NO_SIGNATURE, peers, *listed)


def decode_signature(session: Session, member: ClientId, data: bytes) -> bytes | dict[int, Position]:
    """Read a member's signature, or its claims."""
    reader = unframe(data, MessageKind.LATTICE_SIGNATURE, session.digest, member)
    signature = reader.take(SIGNATURE_BYTES)
    if signature != NO_SIGNATURE:
        reader.end()
        return signature
    ranks = np.flatnonzero(reader.subset(len(session.cohort)))
    claims = {int(rank): unpack_position(reader.take(POSITION_BYTES)) for rank in ranks}
    reader.end()
    if not claims:
        raise PeerError("a member that does not sign must say whom it has met later")
    return claims


def encode_certificate(session: Session, member: ClientId, signatures: Mapping[int, bytes]) -> bytes:
    """Show a member who has signed, by place."""
    signers = pack_subset(subset_of(session.committee.size, signatures))
    listed = (signatures[place] for place in sorted(signatures))
    return frame(MessageKind.LATTICE_CERTIFICATE, session.digest, member, signers, *listed)


def decode_certificate(session: Session, member: ClientId, data: bytes) -> dict[int, bytes]:
    """Read the signatures, by place."""
    reader = unframe(data, MessageKind.LATTICE_CERTIFICATE, session.digest, member)
    places = np.flatnonzero(reader.subset(session.committee.size)).tolist()
    signatures = dict(zip(places, reader.records(len(places), SIGNATURE_BYTES), strict=True))
    reader.end()
    return signatures


def encode_opening(session: Session, member: ClientId, opened: Opened) -> bytes:
    """Send a member's pads."""
    pads = fields.pack(opened.sums) + fields.pack(opened.seeds)
    return frame(MessageKind.LATTICE_OPENING, session.digest, member, pads)


def decode_opening(session: Session, member: ClientId, survivors: int, data: bytes) -> Opened:
    """Read a member's pads."""
    reader = unframe(data, MessageKind.LATTICE_OPENING, session.digest, member)
    sums = fields.unpack(reader.take(session.polynomials * ELEMENT_BYTES))
    seeds = fields.unpack(reader.take(survivors * ELEMENT_BYTES))
    reader.end()
    return Opened(sums, seeds)


def encode_trace_request(session: Session, member: ClientId) -> bytes:
    """Ask a member that has opened which of its pads went where."""
    return frame(MessageKind.LATTICE_TRACE_REQUEST, session.digest, member)


def decode_trace_request(session: Session, member: ClientId, data: bytes) -> None:
    """Read the request, which has no body."""
    unframe(data, MessageKind.LATTICE_TRACE_REQUEST, session.digest, member).end()


def encode_trace(session: Session, member: ClientId, combined: Elements) -> bytes:
    """Send a member's combined pads, one for each survivor."""
    return frame(MessageKind.LATTICE_TRACE, session.digest, member, fields.pack(combined))


def decode_trace(session: Session, member: ClientId, survivors: int, data: bytes) -> Elements:
    """Read a member's combined pads."""
    reader = unframe(data, MessageKind.LATTICE_TRACE, session.digest, member)
    combined = fields.unpack(reader.take(survivors * ELEMENT_BYTES))
    reader.end()
    return combined


def contribution_bytes(session: Session, members: int) -> int:
    """Return the size of a contribution with boxes for so many members: all that an ordinary client uploads."""
    signed = POSITION_BYTES + SIGNATURE_BYTES if session.is_signed else 0
    boxes = members * (session.polynomials + 2) * ELEMENT_BYTES
    shown = 2 * BINDING_BYTES + PUBLIC_BYTES + signed
    return HEADER_BYTES + shown + boxes + session.ring.packed_bytes(session.dimension)


def _read_advert(session: Session, reader: Reader) -> Advert:
    return Advert(reader.take(PUBLIC_BYTES), reader.take(SIGNATURE_BYTES if session.is_signed else 0))


def _read_signed(session: Session, reader: Reader, key: bytes) -> SignedKey:
    if not session.is_signed:
        return SignedKey(key)
    return SignedKey(key, unpack_position(reader.take(POSITION_BYTES)), reader.take(SIGNATURE_BYTES))
