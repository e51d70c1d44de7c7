"""The messages of a session: what each carries, as bytes and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from d2pfed.errors import PeerError
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg import checks, wire
from d2pfed.secagg.crypto import PUBLIC_BYTES, SIGNATURE_BYTES, TAG_BYTES
from d2pfed.secagg.draws import NODE_BYTES, SEED_BYTES, Opening
from d2pfed.secagg.pairwise import keys
from d2pfed.secagg.pairwise.keys import JoinedClients, KeyAdvertisement
from d2pfed.secagg.pairwise.session import Delivery, Session
from d2pfed.secagg.roster import POSITION_BYTES, Position, pack_remembered, read_remembered
from d2pfed.secagg.shamir import SHARE_BYTES, pack_shares, unpack_share
from d2pfed.secagg.wire import CONTEXT_BYTES, HEADER_BYTES, Bound, ClientId, MessageKind, Reader, Subset

HASH_BYTES = 32


@dataclass(frozen=True, slots=True, eq=False)
class EncryptedShares:
    """Sealed ciphertexts by the rank of the other end, and whose of them carry a claim about a position."""

    ciphertexts: Mapping[int, bytes]
    claims: Subset


_named = attrgetter("run", "round", "attempt", "draw", "block")  # of any protocol's session, and of an invitation


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

    def require_agreed(self, session: Bound, client: ClientId) -> None:
        """Refuse an invitation to another session than the one that this client has built itself."""
        agreed = client, session.digest, *_named(session)
        checks.require_agreed((self.client, self.binding, *_named(self)), agreed)
        if self.cohort is not None:
            checks.require_agreed(self.cohort, session.cohort)


def encode_invitation(
    session: Bound, rank: int, opening: Opening | None = None, remembered: Position | None = None
) -> bytes:
    """Ask a client to take part."""
    named, drawn = pack_invited(session, opening)
    return wire.message(session, MessageKind.INVITATION, rank, named, pack_remembered(remembered), drawn)


def pack_invited(session: Bound, opening: Opening | None) -> tuple[bytes, bytes]:
    """Return what is the same in the invitations of all clients: what is before and after a remembered position."""
    run, *counters = _named(session)
    numbers = (wire.pack_integer(each, 4) for each in counters)
    cohort = wire.pack_ids(session.cohort) if opening is None else opening.seed + b"".join(opening.path)
    return b"".join((wire.pack_text(run), *numbers)), cohort


def decode_invitation(data: bytes, depth: int | None) -> Invitation:
    """Read an invitation, given the depth of the tree of draws in the receiver's roster (None: no verified draws).

    The receiver builds the session from its own plan and checks that it has this binding.
    """
    reader, client, binding = wire.unframe_unbound(data, MessageKind.INVITATION)
    with reader:
        return read_invitation(reader, client, binding, depth)


def read_invitation(reader: Reader, client: ClientId, binding: bytes, depth: int | None) -> Invitation:
    """Read the body of an invitation."""
    invited = Invitation(
        client=client,
        binding=binding,
        run=reader.text(),
        round=reader.integer(4),
        attempt=reader.integer(4),
        draw=reader.integer(4),
        block=reader.integer(4),
        remembered=read_remembered(reader),
        opening=None
        if depth is None
        else Opening(reader.take(SEED_BYTES), tuple(reader.take(NODE_BYTES) for _ in range(depth))),
        cohort=reader.ids() if depth is None else None,
    )
    if not invited.run or (invited.cohort is not None and client not in invited.cohort):
        raise PeerError("an invitation must name a run and invite a client of its cohort")
    return invited


def encode_advertisements(
    joined: JoinedClients, rank: int, advertisements: Mapping[int, KeyAdvertisement]
) -> bytes:
    """Tell a client who joined, with all of their advertisements."""
    packed = {other: advertisements[other].pack() for other in wire.ranks_of(joined.present)}
    body = wire.pack_ranked(len(joined.session.cohort), packed)
    return wire.message(joined.session, MessageKind.KEY_ADVERTISEMENTS, rank, body)


def decode_advertisements(
    session: Session, rank: int, data: bytes
) -> tuple[JoinedClients, dict[int, bytes], dict[int, KeyAdvertisement]]:
    """Read who joined, and by rank what each has signed and its advertisement: of everyone in the subset."""
    with wire.opened(session, MessageKind.KEY_ADVERTISEMENTS, rank, data) as reader:
        advertisements = reader.ranked(len(session.cohort), lambda: keys.read_advertisement(session, reader))
    leaves = {other: each.statement(session, session.cohort[other]) for other, each in advertisements.items()}
    return JoinedClients.of(session, leaves), leaves, advertisements


def encode_encrypted_shares(joined: JoinedClients, rank: int, shares: EncryptedShares) -> bytes:
    """Send a client's sealed shares, one ciphertext per other holder that joined, in order of rank."""
    packed = _pack_encrypted_shares(joined.session, shares)
    return wire.message(joined.session, MessageKind.ENCRYPTED_SHARES, rank, *packed)


def decode_encrypted_shares(joined: JoinedClients, rank: int, data: bytes) -> EncryptedShares:
    """Read a client's sealed shares by receiver's rank."""
    with wire.opened(joined.session, MessageKind.ENCRYPTED_SHARES, rank, data) as reader:
        return _read_encrypted_shares(joined.session, keys.others(rank, joined.present), reader)


def encode_mask_request(  # noqa: PLR0917 - the fields of the message
    joined: JoinedClients, rank: int, sharers: Subset, shares: EncryptedShares, task: bytes, model: bytes
) -> bytes:
    """Ask a client for its masked vector: who shared keys, the ciphertexts for it in order of rank, task and model."""
    ciphertexts = _pack_encrypted_shares(joined.session, shares)
    fields = wire.pack_subset(sharers), *ciphertexts, wire.pack_integer(len(task), 4), task, model
    return wire.message(joined.session, MessageKind.MASK_REQUEST, rank, *fields)


def decode_mask_request(
    joined: JoinedClients, rank: int, data: bytes
) -> tuple[Subset, EncryptedShares, bytes, bytes]:
    """Read who shared keys, a ciphertext from each of them by rank, the task, and the model."""
    reader = wire.opened(joined.session, MessageKind.MASK_REQUEST, rank, data)
    sharers = reader.subset(len(joined.session.cohort))
    shares = _read_encrypted_shares(joined.session, keys.others(rank, sharers), reader)
    return sharers, shares, reader.take(reader.integer(4)), reader.rest()


def decode_masked_vector(session: Session, rank: int, context: bytes, data: bytes) -> tuple[bytes, RingVector]:
    """Read the hash of the group seed, empty unless `everyone` delivers, and the vector masked in this context."""
    with wire.opened(session, MessageKind.MASKED_VECTOR, rank, data) as reader:
        checks.require_context(reader.take(CONTEXT_BYTES), context)
        group = reader.take(HASH_BYTES if session.delivery is Delivery.EVERYONE else 0)
        return group, reader.vector(session.ring, session.dimension)


def encode_signatures(session: Session, rank: int, signatures: Mapping[int, bytes]) -> bytes:
    """Ask a client to unmask what it signed, with the signatures of others, in order of rank."""
    packed = wire.pack_ranked(len(session.cohort), signatures)
    return wire.message(session, MessageKind.UNMASK_REQUEST, rank, packed)


def decode_signatures(session: Session, rank: int, data: bytes) -> dict[int, bytes]:
    """Read signatures by signer's rank; a signer appears once."""
    with wire.opened(session, MessageKind.UNMASK_REQUEST, rank, data) as reader:
        return reader.ranked(len(session.cohort), lambda: reader.take(SIGNATURE_BYTES))


def encode_unmasking_shares(joined: JoinedClients, rank: int, sharers: Subset, shares: Mapping[int, int]) -> bytes:
    """Send one share for every client of the sharers whose shares this one holds, and say whose it lacks."""
    lacking = [owner for owner in wire.ranks_of(sharers) if owner not in shares]
    missing = wire.pack_subset(wire.subset_of(len(joined.session.cohort), lacking))
    packed = pack_shares(shares[owner] for owner in sorted(shares))
    return wire.message(joined.session, MessageKind.UNMASKING_SHARES, rank, missing, packed)


def decode_unmasking_shares(
    joined: JoinedClients, rank: int, sharers: Subset, data: bytes
) -> dict[int, int | None]:
    """Read one share per owner's rank, None where the sender says that it never got one."""
    with wire.opened(joined.session, MessageKind.UNMASKING_SHARES, rank, data) as reader:
        missing = reader.subset(len(joined.session.cohort))
        owners = wire.ranks_of(sharers)
        held = [owner for owner in owners if not missing[owner]]
        if len(held) + int(missing.sum()) != len(owners) or missing[rank]:
            raise PeerError("only shares that somebody else should have sent can be missing")
        shares = {owner: unpack_share(reader.take(SHARE_BYTES)) for owner in held}
    return {owner: shares.get(owner) for owner in owners}


def ciphertext_bytes(session: Session) -> int:
    """Return the size of a ciphertext without a claim: two shares, the group contribution if any, and the tag."""
    contribution = keys.CONTRIBUTION_BYTES if session.delivery is Delivery.EVERYONE else 0
    return 2 * SHARE_BYTES + contribution + TAG_BYTES


def upload_bytes(session: Session) -> int:
    """Return what one client sends in an attempt in which nobody drops out and nobody remembers a position."""
    size = len(session.cohort)
    subset = wire.subset_bytes(size)
    signed = POSITION_BYTES + SIGNATURE_BYTES if session.is_signed else 0
    advertisement = HEADER_BYTES + 2 * PUBLIC_BYTES + keys.COMMITMENT_BYTES + signed
    ciphertexts = HEADER_BYTES + (size - 1) * ciphertext_bytes(session) + (subset if session.is_signed else 0)
    group = HASH_BYTES if session.delivery is Delivery.EVERYONE else 0
    masked = HEADER_BYTES + CONTEXT_BYTES + group + session.ring.packed_bytes(session.dimension)
    confirmation = HEADER_BYTES + SIGNATURE_BYTES if session.is_signed else 0
    shares = HEADER_BYTES + subset + size * SHARE_BYTES
    return advertisement + ciphertexts + masked + confirmation + shares


def _pack_encrypted_shares(session: Session, shares: EncryptedShares) -> tuple[bytes, ...]:
    claims = (wire.pack_subset(shares.claims),) if session.is_signed else ()
    return (*claims, *(shares.ciphertexts[other] for other in sorted(shares.ciphertexts)))


def _read_encrypted_shares(session: Session, others: Sequence[int], reader: Reader) -> EncryptedShares:
    size = len(session.cohort)
    claims = reader.subset(size) if session.is_signed else wire.subset_of(size, ())
    if bool((claims & ~wire.subset_of(size, others)).any()):
        raise PeerError("a claim must be in a ciphertext")
    plain = ciphertext_bytes(session)
    return EncryptedShares(
        {other: reader.take(plain + POSITION_BYTES * int(claims[other])) for other in others}, claims
    )
