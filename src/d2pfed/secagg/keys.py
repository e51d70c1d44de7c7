"""What every key, commitment and signed statement is derived from, and what is encrypted under the share keys."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import digest
from d2pfed.secagg import crypto
from d2pfed.secagg.advertisements import JoinedClients
from d2pfed.secagg.position import Position, unpack_position
from d2pfed.secagg.session import Delivery, Session
from d2pfed.secagg.shamir import SHARE_BYTES, pack_shares, unpack_share
from d2pfed.secagg.wire import ClientId, Reader, Subset, pack_subset

CONTRIBUTION_BYTES = 32
NO_GROUP = b""  # what stands for the hash of the group seed where there is none


def commitment(session: Session, client: ClientId, seed: bytes) -> bytes:
    """Return the hash that a client publishes of its self-mask seed, which has 256 random bits."""
    return digest("d2pfed commitment", session.digest, client, seed)


def share_key(session: Session, shared: bytes, sender: ClientId, receiver: ClientId) -> bytes:
    """Return the key of the one ciphertext from a sender to a receiver; the way back has another."""
    return crypto.hkdf(shared, "d2pfed box", session.digest, sender, receiver)


def group_seed(session: Session, contributions: Sequence[bytes]) -> bytes:
    """Return the seed that all clients share, from one contribution of each in order of rank."""
    return digest("d2pfed group seed", session.digest, *contributions)


def group_hash(seed: bytes) -> bytes:
    """Return the hash of the group seed that goes into the mask keys and to the server, which compares."""
    return digest("d2pfed group hash", seed)


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
        plain = crypto.unseal(key, ciphertext)
        shares = unpack_share(plain[:SHARE_BYTES]), unpack_share(plain[SHARE_BYTES : 2 * SHARE_BYTES])
    except PeerError:
        return None
    is_group = session.delivery is Delivery.EVERYONE
    if len(plain) == 2 * SHARE_BYTES and not is_group:
        return ShareContent(*shares, b"")
    rest = Reader(memoryview(plain)[2 * SHARE_BYTES :])
    contribution = rest.take(CONTRIBUTION_BYTES if is_group else 0)
    claim = rest.rest()
    return ShareContent(*shares, contribution, unpack_position(claim) if claim else None)
