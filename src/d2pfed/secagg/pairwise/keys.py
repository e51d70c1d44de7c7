"""What clients of a session advertise, who has joined, and the keys and statements that follow from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import digest
from d2pfed.secagg import crypto
from d2pfed.secagg.crypto import PUBLIC_BYTES, SIGNATURE_BYTES
from d2pfed.secagg.pairwise.session import Delivery, Session
from d2pfed.secagg.roster import POSITION_BYTES, Position, unpack_position
from d2pfed.secagg.shamir import SHARE_BYTES, pack_shares, unpack_share
from d2pfed.secagg.wire import ClientId, Reader, Subset, pack_subset, ranks_of, subset_of

COMMITMENT_BYTES = 32
CONTRIBUTION_BYTES = 32
NO_GROUP = b""  # what stands for the hash of the group seed where there is none


@dataclass(frozen=True, slots=True)
class KeyAdvertisement:
    """A client's public keys for one session and the commitment to its self-mask seed; if signed, its position too."""

    seal_public: bytes
    mask_public: bytes
    commitment: bytes
    position: Position | None = None
    signature: bytes = b""

    def pack(self) -> bytes:
        """Return the advertisement's bytes."""
        position = b"" if self.position is None else self.position.pack()
        return self.seal_public + self.mask_public + self.commitment + position + self.signature

    def statement(self, session: Session, client: ClientId) -> bytes:
        """Return the leaf: what an enrolled client signs, and what stands for the advertisement among all others."""
        position = b"" if self.position is None else self.position.pack()
        keys = self.seal_public, self.mask_public, self.commitment
        return digest("d2pfed advert", session.digest, client, *keys, position)


def read_advertisement(session: Session, reader: Reader) -> KeyAdvertisement:
    """Read the next advertisement of a body."""
    public = reader.take(PUBLIC_BYTES), reader.take(PUBLIC_BYTES), reader.take(COMMITMENT_BYTES)
    if not session.is_signed:
        return KeyAdvertisement(*public)
    return KeyAdvertisement(*public, unpack_position(reader.take(POSITION_BYTES)), reader.take(SIGNATURE_BYTES))


@dataclass(frozen=True, slots=True, eq=False)
class JoinedClients:
    """Who joined a session, and the digest A of their advertisements."""

    session: Session
    present: Subset
    digest: bytes

    @staticmethod
    def of(session: Session, leaves: Mapping[int, bytes]) -> "JoinedClients":
        """Return what the advertisements behind these leaves lead to."""
        present, ordered = subset_of(len(session.cohort), leaves), (leaves[rank] for rank in sorted(leaves))
        return JoinedClients(session, present, digest("d2pfed adverts", pack_subset(present), *ordered))


def others(rank: int, present: Subset) -> list[int]:
    """Return with whom of a subset a client shares masks, and its secrets: everyone else."""
    return [other for other in ranks_of(present) if other != rank]


def commitment(session: Session, client: ClientId, seed: bytes) -> bytes:
    """Return the hash that a client publishes of its self-mask seed, which has 256 random bits."""
    return digest("d2pfed commitment", session.digest, client, seed)


def share_key(session: Session, shared: bytes, sender: ClientId, receiver: ClientId) -> bytes:
    """Return the key of the one ciphertext from a sender to a receiver; the way back has another."""
    return crypto.hkdf(shared, "d2pfed box", session.digest, sender, receiver)


def group_seed(session: Session, contributions: Sequence[bytes]) -> bytes:
    """Return the seed that all clients share, from one contribution of each in order of rank."""
    return digest("d2pfed group seed", session.digest, *contributions)


def context(joined: JoinedClients, task: bytes, model: bytes, sharers: Subset) -> bytes:
    """Return the hash of all that clients must have seen alike before they mask.

    Guarantee: masks of two clients cancel only if both saw this session, these advertisements, this task, this
    model and these sharers. Checked: test_malicious_server.py (another model, another task for the victim).
    """
    trained = digest("d2pfed model", model), digest("d2pfed task", task)
    return digest("d2pfed context", joined.session.digest, joined.digest, *trained, pack_subset(sharers))


def pair_mask_key(shared: bytes, context: bytes, pair: tuple[ClientId, ClientId], group: bytes) -> bytes:
    """Return the key of the mask that the lower client of a pair adds and the higher one subtracts."""
    return crypto.hkdf(shared, "d2pfed pair mask", context, min(pair), max(pair), group)


def self_mask_key(seed: bytes, context: bytes, client: ClientId) -> bytes:
    """Return the key of the mask that a client adds for itself."""
    return crypto.hkdf(seed, "d2pfed self mask", context, client)


def survivors_statement(context: bytes, survivors: Subset) -> bytes:
    """Return what an enrolled client signs about whose vectors arrived."""
    return digest("d2pfed survivors", context, pack_subset(survivors))


@dataclass(frozen=True, slots=True)
class ShareContent:
    """What one client encrypts for another: shares of its two secrets, its part of the group seed, a claim.

    `claim` is the latest position of the receiver that the sender remembers."""

    seed_share: int = field(repr=False)
    key_share: int = field(repr=False)
    contribution: bytes = field(repr=False)
    claim: Position | None = None

    def pack(self) -> bytes:
        """Return the bytes to be encrypted."""
        claim = b"" if self.claim is None else self.claim.pack()
        return pack_shares((self.seed_share, self.key_share)) + self.contribution + claim


def decrypt_shares(session: Session, key: bytes, ciphertext: bytes) -> ShareContent | None:
    """Return what a ciphertext holds, or None if it does not decrypt or holds no shares.

    Its sender spoilt it, or the server did. It must not stop its receiver, or one bad client would stop them all.
    """
    try:
        plain = Reader(memoryview(crypto.unseal(key, ciphertext)))
        shares = unpack_share(plain.take(SHARE_BYTES)), unpack_share(plain.take(SHARE_BYTES))
    except PeerError:
        return None
    contribution = plain.take(CONTRIBUTION_BYTES if session.delivery is Delivery.EVERYONE else 0)
    claim = plain.rest()
    return ShareContent(*shares, contribution, unpack_position(claim) if claim else None)
