"""The messages of the exchanges: what each carries, as bytes and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from d2pfed.errors import PeerError
from d2pfed.graph import Consistency
from d2pfed.ring import RingVector
from d2pfed.secagg.crypto import PUBLIC_BYTES, SIGNATURE_BYTES, TAG_BYTES
from d2pfed.secagg.session import Delivery, Session
from d2pfed.secagg.shamir import SHARE_BYTES, pack_shares, unpack_share
from d2pfed.wire import (
    HEADER_BYTES,
    ClientId,
    Reader,
    Subset,
    frame,
    pack_ids,
    pack_integer,
    pack_subset,
    pack_text,
    subset_of,
    unframe,
    unframe_unbound,
)

SEED_BYTES = 32
CONTEXT_BYTES = 32


class Kind(IntEnum):
    """What a frame holds; requests are odd, answers even."""

    INVITATION = 1
    ADVERT = 2
    ADVERTS = 3
    BOXES = 4
    MASK_REQUEST = 5
    MASKED = 6
    SURVIVORS = 7
    CONFIRMATION = 8
    UNMASK_REQUEST = 9
    OPENED = 10
    ROSTER = 32
    SAVED_INVITED = 65
    SAVED_ADVERTISED = 66
    SAVED_SHARED = 67
    SAVED_MASKED = 68
    SAVED_CONFIRMED = 69


@dataclass(frozen=True, slots=True)
class Invitation:
    """The first request, read before there is a session: who is asked to take part in which sum."""

    client: ClientId
    binding: bytes
    run: str
    round: int
    attempt: int
    cohort: tuple[ClientId, ...]


@dataclass(frozen=True, slots=True)
class Advert:
    """A client's public keys for one session, the commitment to its self-mask seed, and its signature if any."""

    seal_public: bytes
    mask_public: bytes
    commitment: bytes
    signature: bytes

    def pack(self) -> bytes:
        """Return the advert's bytes."""
        return self.seal_public + self.mask_public + self.commitment + self.signature


@dataclass(frozen=True, slots=True)
class Adverts:
    """Who joined, and the adverts of a client's holders among them (itself included) by rank."""

    joined: Subset
    adverts: Mapping[int, Advert]


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """Who shared keys, the boxes for this client by sender's rank, and the model."""

    sharers: Subset
    boxes: Mapping[int, bytes]
    model: bytes


def holders_within(session: Session, rank: int, present: Subset) -> list[int]:
    """Return who of a subset holds shares of a client's secrets, the client included if it is in the subset."""
    holders = session.graph.holders(rank)
    return [int(holder) for holder in holders[present[holders]]]


def peers_within(session: Session, rank: int, present: Subset) -> list[int]:
    """Return a client's neighbours in a subset."""
    return [peer for peer in holders_within(session, rank, present) if peer != rank]


def encode_invitation(session: Session, rank: int) -> bytes:
    """Ask a client to take part."""
    counters = pack_integer(session.round, 4) + pack_integer(session.attempt, 4)
    return _frame(session, Kind.INVITATION, rank, pack_text(session.run), counters, pack_ids(session.cohort))


def decode_invitation(data: bytes) -> Invitation:
    """Read an invitation; the receiver builds the session from its own plan and checks it has this binding."""
    reader, client, binding = unframe_unbound(data, Kind.INVITATION)
    run = reader.text()
    number, attempt = reader.integer(4), reader.integer(4)
    cohort = reader.ids()
    reader.end()
    if not run or client not in cohort:
        raise PeerError("an invitation must name a run and invite a client of its cohort")
    return Invitation(client, binding, run, number, attempt, cohort)


def encode_advert(session: Session, rank: int, advert: Advert) -> bytes:
    """Advertise a client's keys."""
    return _frame(session, Kind.ADVERT, rank, advert.pack())


def decode_advert(session: Session, rank: int, data: bytes) -> Advert:
    """Read a client's advert."""
    reader = _unframe(session, Kind.ADVERT, rank, data)
    advert = read_advert(session, reader)
    reader.end()
    return advert


def read_advert(session: Session, reader: Reader) -> Advert:
    """Read the next advert of a body."""
    keys = reader.take(PUBLIC_BYTES), reader.take(PUBLIC_BYTES), reader.take(SEED_BYTES)
    return Advert(*keys, reader.take(_signature_bytes(session)))


def encode_adverts(session: Session, rank: int, joined: Subset, adverts: Mapping[int, Advert]) -> bytes:
    """Tell a client who joined, with the adverts of its holders."""
    packed = [adverts[holder].pack() for holder in holders_within(session, rank, joined)]
    return _frame(session, Kind.ADVERTS, rank, pack_subset(joined), *packed)


def decode_adverts(session: Session, rank: int, data: bytes) -> Adverts:
    """Read who joined: one advert for every holder in the subset, no more and no fewer."""
    reader = _unframe(session, Kind.ADVERTS, rank, data)
    joined = reader.subset(len(session.cohort))
    adverts = {holder: read_advert(session, reader) for holder in holders_within(session, rank, joined)}
    reader.end()
    return Adverts(joined, adverts)


def encode_boxes(session: Session, rank: int, boxes: Mapping[int, bytes]) -> bytes:
    """Send a client's sealed shares, one box per neighbour that joined, in order of rank."""
    return _frame(session, Kind.BOXES, rank, *(boxes[peer] for peer in sorted(boxes)))


def decode_boxes(session: Session, rank: int, joined: Subset, data: bytes) -> dict[int, bytes]:
    """Read a client's sealed shares by receiver's rank."""
    reader = _unframe(session, Kind.BOXES, rank, data)
    boxes = _read_boxes(session, peers_within(session, rank, joined), reader)
    reader.end()
    return boxes


def encode_mask_request(
    session: Session, rank: int, sharers: Subset, boxes: Mapping[int, bytes], model: bytes
) -> bytes:
    """Ask a client for its masked vector: who shared keys, the boxes for it in order of rank, the model."""
    ordered = (boxes[peer] for peer in sorted(boxes))
    return _frame(session, Kind.MASK_REQUEST, rank, pack_subset(sharers), *ordered, model)


def decode_mask_request(session: Session, rank: int, data: bytes) -> MaskRequest:
    """Read a request for the masked vector: one box from every neighbour in the subset, then the model."""
    reader = _unframe(session, Kind.MASK_REQUEST, rank, data)
    sharers = reader.subset(len(session.cohort))
    boxes = _read_boxes(session, peers_within(session, rank, sharers), reader)
    return MaskRequest(sharers, boxes, reader.rest())


def encode_masked(session: Session, rank: int, context: bytes, vector: RingVector) -> bytes:
    """Send a masked vector at `bits` bits per coordinate, and the context of its masks."""
    return _frame(session, Kind.MASKED, rank, context, session.ring.pack(vector))


def decode_masked(session: Session, rank: int, context: bytes, data: bytes) -> RingVector:
    """Read a masked vector of the session's dimension; one masked in another context would spoil the sum."""
    reader = _unframe(session, Kind.MASKED, rank, data)
    if reader.take(len(context)) != context:
        raise PeerError("a vector was masked for another model or other sharers")
    packed = reader.take(session.ring.packed_bytes(session.dimension))
    reader.end()
    return session.ring.unpack(packed, session.dimension)


def encode_survivors(session: Session, kind: Kind, rank: int, survivors: Subset) -> bytes:
    """Tell a client whose vectors arrived: to be signed (SURVIVORS) or to be unmasked (UNMASK_REQUEST)."""
    return _frame(session, kind, rank, pack_subset(survivors))


def decode_survivors(session: Session, kind: Kind, rank: int, data: bytes) -> Subset:
    """Read whose vectors arrived."""
    reader = _unframe(session, kind, rank, data)
    survivors = reader.subset(len(session.cohort))
    reader.end()
    return survivors


def encode_confirmation(session: Session, rank: int, signature: bytes) -> bytes:
    """Send a client's signature under what it was told."""
    return _frame(session, Kind.CONFIRMATION, rank, signature)


def decode_confirmation(session: Session, rank: int, data: bytes) -> bytes:
    """Read a client's signature."""
    reader = _unframe(session, Kind.CONFIRMATION, rank, data)
    signature = reader.take(SIGNATURE_BYTES)
    reader.end()
    return signature


def encode_signatures(session: Session, rank: int, signatures: Mapping[int, bytes]) -> bytes:
    """Ask a client to unmask what it signed, with the signatures of others, in order of rank."""
    signers = subset_of(len(session.cohort), signatures)
    ordered = (signatures[signer] for signer in sorted(signatures))
    return _frame(session, Kind.UNMASK_REQUEST, rank, pack_subset(signers), *ordered)


def decode_signatures(session: Session, rank: int, data: bytes) -> dict[int, bytes]:
    """Read signatures by signer's rank; a signer appears once."""
    reader = _unframe(session, Kind.UNMASK_REQUEST, rank, data)
    signers = [int(signer) for signer in reader.subset(len(session.cohort)).nonzero()[0]]
    signatures = reader.records(len(signers), SIGNATURE_BYTES)
    reader.end()
    return dict(zip(signers, signatures, strict=True))


def encode_opened(session: Session, rank: int, shares: Sequence[int]) -> bytes:
    """Send one share for every client of the sharers whose shares this one holds, in order of rank."""
    return _frame(session, Kind.OPENED, rank, pack_shares(shares))


def decode_opened(session: Session, rank: int, sharers: Subset, data: bytes) -> dict[int, int]:
    """Read one share per owner's rank."""
    reader = _unframe(session, Kind.OPENED, rank, data)
    owners = holders_within(session, rank, sharers)
    shares = reader.records(len(owners), SHARE_BYTES)
    reader.end()
    return {owner: unpack_share(share) for owner, share in zip(owners, shares, strict=True)}


def box_bytes(session: Session) -> int:
    """Return the size of a sealed box: two shares, the group contribution if there is one, and the tag."""
    contribution = SEED_BYTES if session.delivery is Delivery.EVERYONE else 0
    return 2 * SHARE_BYTES + contribution + TAG_BYTES


def upload_bytes(session: Session) -> int:
    """Return all that one client sends in an attempt in which nobody drops out."""
    signature = _signature_bytes(session)
    advert = HEADER_BYTES + 2 * PUBLIC_BYTES + SEED_BYTES + signature
    boxes = HEADER_BYTES + session.degree * box_bytes(session)
    masked = HEADER_BYTES + CONTEXT_BYTES + session.ring.packed_bytes(session.dimension)
    confirmation = HEADER_BYTES + signature if signature else 0
    opened = HEADER_BYTES + (session.degree + 1) * SHARE_BYTES
    return advert + boxes + masked + confirmation + opened


def _signature_bytes(session: Session) -> int:
    return SIGNATURE_BYTES if session.consistency is Consistency.SIGNED else 0


def _read_boxes(session: Session, peers: Sequence[int], reader: Reader) -> dict[int, bytes]:
    return dict(zip(peers, reader.records(len(peers), box_bytes(session)), strict=True))


def _frame(session: Session, kind: Kind, rank: int, *fields: bytes) -> bytes:
    return frame(kind, session.digest, session.cohort[rank], *fields)


def _unframe(session: Session, kind: Kind, rank: int, data: bytes) -> Reader:
    return unframe(data, kind, session.digest, session.cohort[rank])
