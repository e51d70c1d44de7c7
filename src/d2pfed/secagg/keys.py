"""What every key, commitment and signed statement of the protocol is derived from."""

from collections.abc import Sequence

from d2pfed.randomness import digest
from d2pfed.secagg import crypto
from d2pfed.secagg.messages import Advert
from d2pfed.secagg.session import Session
from d2pfed.wire import ClientId, Subset, pack_subset

NO_GROUP = b""  # what stands for the hash of the group seed where there is none


def commitment(session: Session, client: ClientId, seed: bytes) -> bytes:
    """Return the hash that a client publishes of its self-mask seed, which has 256 random bits."""
    return digest("d2pfed commitment", session.digest, client, seed)


def advert_statement(session: Session, client: ClientId, advert: Advert) -> bytes:
    """Return what an enrolled client signs about its keys."""
    return digest(
        "d2pfed advert", session.digest, client, advert.seal_public, advert.mask_public, advert.commitment
    )


def box_key(session: Session, shared: bytes, sender: ClientId, receiver: ClientId) -> bytes:
    """Return the key of the one box from a sender to a receiver; the way back has another."""
    return crypto.hkdf(shared, "d2pfed box", session.digest, sender, receiver)


def group_seed(session: Session, contributions: Sequence[bytes]) -> bytes:
    """Return the seed that all clients share, from one contribution of each in order of rank."""
    return digest("d2pfed group seed", session.digest, *contributions)


def group_hash(seed: bytes) -> bytes:
    """Return the hash of the group seed that goes into the mask keys."""
    return digest("d2pfed group hash", seed)


def context(session: Session, model: bytes, sharers: Subset) -> bytes:
    """Return the hash of all that clients must have seen alike before they mask.

    Guarantee: masks of two clients cancel only if both saw this session, this model and these sharers.
    Checked: test_malicious_server.py (another model for the victim).
    """
    return digest("d2pfed context", session.digest, digest("d2pfed model", model), pack_subset(sharers))


def pair_mask_key(shared: bytes, context: bytes, pair: tuple[ClientId, ClientId], group: bytes) -> bytes:
    """Return the key of the mask that the lower client of a pair adds and the higher one subtracts."""
    return crypto.hkdf(shared, "d2pfed pair mask", context, min(pair), max(pair), group)


def self_mask_key(seed: bytes, context: bytes, client: ClientId) -> bytes:
    """Return the key of the mask that a client adds for itself."""
    return crypto.hkdf(seed, "d2pfed self mask", context, client)


def survivors_statement(context: bytes, survivors: Subset) -> bytes:
    """Return what an enrolled client signs about whose vectors arrived."""
    return digest("d2pfed survivors", context, pack_subset(survivors))
