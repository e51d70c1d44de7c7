"""The messages of the exchanges after the invitation: what each carries, as bytes and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from d2pfed.errors import PeerError
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg.crypto import SIGNATURE_BYTES, TAG_BYTES
from d2pfed.secagg.draws import NODE_BYTES, SEED_BYTES, Opening
from d2pfed.secagg.pairwise.keys import (
    LEAF_BYTES,
    JoinedClients,
    KeyAdvertisement,
    advertisement_bytes,
    leaf,
    lists_leaves,
    read_advertisement,
)
from d2pfed.secagg.pairwise.session import Delivery, Session
from d2pfed.secagg.position import NO_POSITION, POSITION_BYTES, Position, unpack_position
from d2pfed.secagg.shamir import SHARE_BYTES, pack_shares, unpack_share
from d2pfed.secagg.wire import (
    HEADER_BYTES,
    ClientId,
    MessageKind,
    Reader,
    Subset,
    frame,
    pack_ids,
    pack_integer,
    pack_subset,
    pack_text,
    subset_bytes,
    subset_of,
    unframe,
    unframe_unbound,
)

CONTEXT_BYTES = 32
HASH_BYTES = 32


@dataclass(frozen=True, slots=True, eq=False)
class KeyAdvertisements:
    """Who joined and what follows from it, the leaves that this client knows, and the advertisements it was shown."""

    joined: JoinedClients
    leaves: Mapping[int, bytes]
    advertisements: Mapping[int, KeyAdvertisement]


@dataclass(frozen=True, slots=True, eq=False)
class EncryptedShares:
    """Sealed ciphertexts by the rank of the other end, and whose of them carry a claim about a position."""

    ciphertexts: Mapping[int, bytes]
    claims: Subset


@dataclass(frozen=True, slots=True, eq=False)
class MaskRequest:
    """Who shared keys, the ciphertexts for this client by sender's rank, the task, and the model."""

    sharers: Subset
    shares: EncryptedShares
    task: bytes
    model: bytes


@dataclass(frozen=True, slots=True)
class MaskedVector:
    """A masked vector, the context of its masks and, under `everyone`, the hash of the group seed (else empty)."""

    context: bytes
    group: bytes
    vector: RingVector


def encode_advertisement(session: Session, rank: int, advertisement: KeyAdvertisement) -> bytes:
    """Advertise a client's keys."""
    return _frame(session, MessageKind.KEY_ADVERTISEMENT, rank, advertisement.pack())


def decode_advertisement(session: Session, rank: int, data: bytes) -> KeyAdvertisement:
    """Read a client's advertisement."""
    reader = _unframe(session, MessageKind.KEY_ADVERTISEMENT, rank, data)
    advertisement = read_advertisement(session, reader)
    reader.end()
    return advertisement


def encode_advertisements(
    joined: JoinedClients, rank: int, leaves: Mapping[int, bytes], advertisements: Mapping[int, KeyAdvertisement]
) -> bytes:
    """Tell a client who joined, with the advertisements of its partners and its own."""
    listed = [leaves[other] for other in sorted(leaves)] if lists_leaves(joined.session) else []
    packed = [advertisements[other].pack() for other in joined.shown(rank)]
    return _frame(
        joined.session,
        MessageKind.KEY_ADVERTISEMENTS,
        rank,
        pack_subset(joined.present),
        b"".join(listed),
        *packed,
    )


def decode_advertisements(session: Session, rank: int, data: bytes) -> KeyAdvertisements:
    """Read who joined: one advertisement for every partner in the subset and its own, no more and no fewer."""
    reader = _unframe(session, MessageKind.KEY_ADVERTISEMENTS, rank, data)
    present = reader.subset(len(session.cohort))
    ranks = [int(other) for other in present.nonzero()[0]]
    if lists_leaves(session):
        leaves = dict(zip(ranks, reader.records(len(ranks), LEAF_BYTES), strict=True))
        joined = JoinedClients.of(session, present, leaves)
        advertisements = {other: read_advertisement(session, reader) for other in joined.shown(rank)}
    else:
        early = JoinedClients(session, present, b"")  # the graph is known before the advertisements
        advertisements = {other: read_advertisement(session, reader) for other in early.shown(rank)}
        leaves = {
            other: leaf(session, session.cohort[other], advertisement)
            for other, advertisement in advertisements.items()
        }
        joined = JoinedClients.of(session, present, leaves)
    reader.end()
    return KeyAdvertisements(joined, leaves, advertisements)


def encode_encrypted_shares(joined: JoinedClients, rank: int, shares: EncryptedShares) -> bytes:
    """Send a client's sealed shares, one ciphertext per other holder that joined, in order of rank."""
    return _frame(
        joined.session, MessageKind.ENCRYPTED_SHARES, rank, *_pack_encrypted_shares(joined.session, shares)
    )


def decode_encrypted_shares(joined: JoinedClients, rank: int, data: bytes) -> EncryptedShares:
    """Read a client's sealed shares by receiver's rank."""
    reader = _unframe(joined.session, MessageKind.ENCRYPTED_SHARES, rank, data)
    shares = _read_encrypted_shares(joined.session, joined.receivers(rank), reader)
    reader.end()
    return shares


def encode_mask_request(  # noqa: PLR0917 - the fields of the message
    joined: JoinedClients, rank: int, sharers: Subset, shares: EncryptedShares, task: bytes, model: bytes
) -> bytes:
    """Ask a client for its masked vector: who shared keys, the ciphertexts for it in order of rank, task and model."""
    ciphertexts = _pack_encrypted_shares(joined.session, shares)
    trained = pack_integer(len(task), 4), task, model
    return _frame(joined.session, MessageKind.MASK_REQUEST, rank, pack_subset(sharers), *ciphertexts, *trained)


def decode_mask_request(joined: JoinedClients, rank: int, data: bytes) -> MaskRequest:
    """Read a request for the masked vector: a ciphertext from every sender in the subset, the task, the model."""
    reader = _unframe(joined.session, MessageKind.MASK_REQUEST, rank, data)
    sharers = reader.subset(len(joined.session.cohort))
    shares = _read_encrypted_shares(joined.session, joined.senders(rank, sharers), reader)
    return MaskRequest(sharers, shares, reader.take(reader.integer(4)), reader.rest())


def encode_masked_vector(session: Session, rank: int, masked: MaskedVector) -> bytes:
    """Send a masked vector at `bits` bits per coordinate, the context of its masks and the group's hash if any."""
    packed = session.ring.pack(masked.vector)
    return _frame(session, MessageKind.MASKED_VECTOR, rank, masked.context, masked.group, packed)


def decode_masked_vector(session: Session, rank: int, context: bytes, data: bytes) -> MaskedVector:
    """Read a masked vector of the session's dimension; one masked in another context would spoil the sum."""
    reader = _unframe(session, MessageKind.MASKED_VECTOR, rank, data)
    if reader.take(CONTEXT_BYTES) != context:
        raise PeerError("a vector was masked for another model, task or set of clients")
    group = reader.take(HASH_BYTES if session.delivery is Delivery.EVERYONE else 0)
    packed = reader.take(session.ring.packed_bytes(session.dimension))
    reader.end()
    return MaskedVector(context, group, session.ring.unpack(packed, session.dimension))


def encode_survivors(session: Session, kind: MessageKind, rank: int, survivors: Subset) -> bytes:
    """Tell a client whose vectors arrived: to be signed (SURVIVORS) or to be unmasked (UNMASK_REQUEST)."""
    return _frame(session, kind, rank, pack_subset(survivors))


def decode_survivors(session: Session, kind: MessageKind, rank: int, data: bytes) -> Subset:
    """Read whose vectors arrived."""
    reader = _unframe(session, kind, rank, data)
    survivors = reader.subset(len(session.cohort))
    reader.end()
    return survivors


def encode_confirmation(session: Session, rank: int, signature: bytes) -> bytes:
    """Send a client's signature under what it was told."""
    return _frame(session, MessageKind.SURVIVORS_SIGNATURE, rank, signature)


def decode_confirmation(session: Session, rank: int, data: bytes) -> bytes:
    """Read a client's signature."""
    reader = _unframe(session, MessageKind.SURVIVORS_SIGNATURE, rank, data)
    signature = reader.take(SIGNATURE_BYTES)
    reader.end()
    return signature


def encode_signatures(session: Session, rank: int, signatures: Mapping[int, bytes]) -> bytes:
    """Ask a client to unmask what it signed, with the signatures of others, in order of rank."""
    signers = subset_of(len(session.cohort), signatures)
    ordered = (signatures[signer] for signer in sorted(signatures))
    return _frame(session, MessageKind.UNMASK_REQUEST, rank, pack_subset(signers), *ordered)


def decode_signatures(session: Session, rank: int, data: bytes) -> dict[int, bytes]:
    """Read signatures by signer's rank; a signer appears once."""
    reader = _unframe(session, MessageKind.UNMASK_REQUEST, rank, data)
    signers = [int(signer) for signer in reader.subset(len(session.cohort)).nonzero()[0]]
    signatures = reader.records(len(signers), SIGNATURE_BYTES)
    reader.end()
    return dict(zip(signers, signatures, strict=True))


def encode_unmasking_shares(joined: JoinedClients, rank: int, sharers: Subset, shares: Mapping[int, int]) -> bytes:
    """Send one share for every client of the sharers whose shares this one holds, and say whose it lacks."""
    lacking = [owner for owner in joined.owners(rank, sharers) if owner not in shares]
    missing = subset_of(len(joined.session.cohort), lacking)
    packed = pack_shares(shares[owner] for owner in sorted(shares))
    return _frame(joined.session, MessageKind.UNMASKING_SHARES, rank, pack_subset(missing), packed)


def decode_unmasking_shares(
    joined: JoinedClients, rank: int, sharers: Subset, data: bytes
) -> dict[int, int | None]:
    """Read one share per owner's rank, None where the sender says that it never got one."""
    reader = _unframe(joined.session, MessageKind.UNMASKING_SHARES, rank, data)
    missing = reader.subset(len(joined.session.cohort))
    owners = joined.owners(rank, sharers)
    held = [owner for owner in owners if not missing[owner]]
    if len(held) + int(missing.sum()) != len(owners) or missing[rank]:
        raise PeerError("only shares that somebody else should have sent can be missing")
    shares = reader.records(len(held), SHARE_BYTES)
    reader.end()
    opened = {owner: unpack_share(share) for owner, share in zip(held, shares, strict=True)}
    return {owner: opened.get(owner) for owner in owners}


def ciphertext_bytes(session: Session) -> int:
    """Return the size of a ciphertext without a claim: two shares, the group contribution if any, and the tag."""
    contribution = SEED_BYTES if session.delivery is Delivery.EVERYONE else 0
    return 2 * SHARE_BYTES + contribution + TAG_BYTES


def upload_bytes(session: Session) -> int:
    """Return what one client sends in an attempt in which nobody drops out and nobody remembers a position.

    In a sparse signed graph clients hold shares of more or fewer others, `degree` on the average: this is the mean.
    """
    subset = subset_bytes(len(session.cohort))
    advertisement = HEADER_BYTES + advertisement_bytes(session)
    ciphertexts = HEADER_BYTES + session.degree * ciphertext_bytes(session) + (subset if session.is_signed else 0)
    group = HASH_BYTES if session.delivery is Delivery.EVERYONE else 0
    masked = HEADER_BYTES + CONTEXT_BYTES + group + session.ring.packed_bytes(session.dimension)
    confirmation = HEADER_BYTES + SIGNATURE_BYTES if session.is_signed else 0
    opened = HEADER_BYTES + subset + (session.degree + 1) * SHARE_BYTES
    return advertisement + ciphertexts + masked + confirmation + opened


def _pack_encrypted_shares(session: Session, shares: EncryptedShares) -> tuple[bytes, ...]:
    claims = (pack_subset(shares.claims),) if session.is_signed else ()
    return (*claims, *(shares.ciphertexts[other] for other in sorted(shares.ciphertexts)))


def _read_encrypted_shares(session: Session, others: Sequence[int], reader: Reader) -> EncryptedShares:
    size = len(session.cohort)
    claims = reader.subset(size) if session.is_signed else subset_of(size, ())
    if bool((claims & ~subset_of(size, others)).any()):
        raise PeerError("a claim must be in a ciphertext")
    plain = ciphertext_bytes(session)
    return EncryptedShares(
        {other: reader.take(plain + POSITION_BYTES * int(claims[other])) for other in others}, claims
    )


def _frame(session: Session, kind: MessageKind, rank: int, *fields: bytes) -> bytes:
    return frame(kind, session.digest, session.cohort[rank], *fields)


def _unframe(session: Session, kind: MessageKind, rank: int, data: bytes) -> Reader:
    return unframe(data, kind, session.digest, session.cohort[rank])


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """The first request, read before there is a session: who is asked to take part in which sum.

    Attributes:
        binding: digest of the session, which the receiver builds from its own plan and compares.
        remembered: where the server has met the receiver last, if ever.
        opening: proof of the draw that the cohort follows from; None if cohorts are not drawn verifiably.
        cohort: the clients that are asked; None if they follow from the draw.
    """

    client: ClientId
    binding: bytes
    run: str
    round: int
    attempt: int
    draw: int
    block: int
    remembered: Position | None
    opening: Opening | None
    cohort: tuple[ClientId, ...] | None


class Named(Protocol):
    """What an invitation says of a session, of whichever protocol."""

    @property
    def run(self) -> str:
        """The run's name."""
        ...

    @property
    def round(self) -> int:
        """The round."""
        ...

    @property
    def attempt(self) -> int:
        """The attempt at it."""
        ...

    @property
    def draw(self) -> int:
        """Which draw gave the cohort."""
        ...

    @property
    def block(self) -> int:
        """Which part of that draw."""
        ...

    @property
    def cohort(self) -> tuple[ClientId, ...]:
        """The clients, increasing."""
        ...

    @property
    def digest(self) -> bytes:
        """What messages are bound to."""
        ...


def encode_invitation(
    session: Named, rank: int, opening: Opening | None = None, remembered: Position | None = None
) -> bytes:
    """Ask a client to take part."""
    body = pack_invitation(session, opening, remembered)
    return frame(MessageKind.INVITATION, session.digest, session.cohort[rank], body)


def pack_invitation(session: Named, opening: Opening | None, remembered: Position | None) -> bytes:
    """Return the body of an invitation."""
    counters = (session.round, session.attempt, session.draw, session.block)
    cohort = pack_ids(session.cohort) if opening is None else opening.seed + b"".join(opening.path)
    numbers = b"".join(pack_integer(counter, 4) for counter in counters)
    return pack_text(session.run) + numbers + (NO_POSITION if remembered is None else remembered.pack()) + cohort


def decode_invitation(data: bytes, depth: int | None) -> Invitation:
    """Read an invitation, given the depth of the tree of draws in the receiver's roster (None: no verified draws).

    The receiver builds the session from its own plan and checks that it has this binding.
    """
    reader, client, binding = unframe_unbound(data, MessageKind.INVITATION)
    invitation = read_invitation(reader, client, binding, depth)
    reader.end()
    return invitation


def read_invitation(reader: Reader, client: ClientId, binding: bytes, depth: int | None) -> Invitation:
    """Read the body of an invitation."""
    run = reader.text()
    number, attempt, draw, block = (reader.integer(4) for _ in range(4))
    packed = reader.take(POSITION_BYTES)
    cohort = reader.ids() if depth is None else None
    opening = None
    if depth is not None:
        opening = Opening(reader.take(SEED_BYTES), tuple(reader.records(depth, NODE_BYTES)))
    if not run or (cohort is not None and client not in cohort):
        raise PeerError("an invitation must name a run and invite a client of its cohort")
    return Invitation(
        client=client,
        binding=binding,
        run=run,
        round=number,
        attempt=attempt,
        draw=draw,
        block=block,
        remembered=None if packed == NO_POSITION else unpack_position(packed),
        opening=opening,
        cohort=cohort,
    )
