"""What every key, commitment and signed statement of the protocol is derived from."""

from collections.abc import Sequence

from d2pfed.numerics.randomness import digest
from d2pfed.secagg import crypto
from d2pfed.secagg.adverts import Joined
from d2pfed.secagg.session import Session
from d2pfed.secagg.wire import ClientId, Subset, pack_subset

NO_GROUP = b""  # what stands for the hash of the group seed where there is none


def commitment(session: Session, client: ClientId, seed: bytes) -> bytes:
    """Return the hash that a client publishes of its self-mask seed, which has 256 random bits."""
    return digest("d2pfed commitment", session.digest, client, seed)


def box_key(session: Session, shared: bytes, sender: ClientId, receiver: ClientId) -> bytes:
    """Return the key of the one box from a sender to a receiver; the way back has another."""
    return crypto.hkdf(shared, "d2pfed box", session.digest, sender, receiver)


def group_seed(session: Session, contributions: Sequence[bytes]) -> bytes:
    """Return the seed that all clients share, from one contribution of each in order of rank."""
    return digest("d2pfed group seed", session.digest, *contributions)


def group_hash(seed: bytes) -> bytes:
    """Return the hash of the group seed that goes into the mask keys and to the server, which compares."""
    return digest("d2pfed group hash", seed)


def context(joined: Joined, task: bytes, model: bytes, sharers: Subset) -> bytes:
    """Return the hash of all that clients must have seen alike before they mask.

    Guarantee: masks of two clients cancel only if both saw this session, these adverts, this task, this model and
    these sharers. Checked: test_malicious_server.py (another model, another task for the victim).
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
