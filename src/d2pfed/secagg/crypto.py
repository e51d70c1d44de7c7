"""The primitives of the protocol: key agreement, sealing, signatures and commitments, all from `cryptography`."""

from collections.abc import Callable
from functools import lru_cache

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import KEY_BYTES, PathPart, encode_path

PUBLIC_BYTES = 32
SIGNATURE_BYTES = 64
TAG_BYTES = 16

_SHA256 = hashes.SHA256()
_NONCE = bytes(12)  # every sealing key seals one message only


class Agreement:
    """A private X25519 key."""

    def __init__(self, secret: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(secret)
        self.public = self._key.public_key().public_bytes_raw()

    def agree(self, public: bytes) -> bytes:
        """Return the secret shared with the owner of a public key; a key of low order is refused."""
        try:
            return self._key.exchange(_read_public(public))
        except ValueError:
            raise PeerError("a public key must not have low order") from None


# A simulation reads each for every client.
_read_public = lru_cache(maxsize=1 << 12)(X25519PublicKey.from_public_bytes)

# How a client finds the secret that it shares with the owner of a public key.
Agree = Callable[[Agreement, bytes], bytes]


def agree(own: Agreement, public: bytes) -> bytes:
    """Compute the secret: what every client does outside of simulations."""
    return own.agree(public)


class PairSecrets:
    """Finds the secret of a pair once where both of its ends are in this process: in a simulation, nowhere else.

    The first end computes the secret and leaves it here, the second takes it away. Checked: test_secagg_pairs.py.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[bytes, bytes], bytes] = {}

    def agree(self, own: Agreement, public: bytes) -> bytes:
        """Return what `own.agree(public)` returns, and refuse what it refuses."""
        shared = self._waiting.pop((public, own.public), None)
        if shared is None:
            shared = self._waiting[own.public, public] = own.agree(public)
        return shared


_FIELD = 2**255 - 19  # of X25519's curve and of its twist
_LOW_ORDERS = frozenset(  # all points of order 8 or less, of both: a multiple of the cofactor maps them to zero
    (
        0,
        1,
        _FIELD - 1,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
    )
)


def require_order(public: bytes) -> None:
    """Refuse a public key of low order, with which every secret agreed on is zero.

    Checked: test_crypto.py::test_keys_of_low_order_are_those_that_agree_on_zero.
    """
    if int.from_bytes(public, "little") % (1 << 255) % _FIELD in _LOW_ORDERS:  # the highest bit does not count
        raise PeerError("a public key must not have low order")


def hkdf(shared: bytes, *path: PathPart) -> bytes:
    """Derive the 32-byte key for one purpose from an agreed secret (HKDF with SHA-256).

    Guarantee: keys of different paths are independent.
    Checked: test_crypto.py::test_any_change_of_a_path_changes_the_key.
    """
    return HKDF(_SHA256, KEY_BYTES, None, encode_path(*path)).derive(shared)


def seal(key: bytes, plain: bytes) -> bytes:
    """Encrypt and authenticate one message under a key that is used for nothing else (AES-256-GCM)."""
    return AESGCM(key).encrypt(_NONCE, plain, None)


def unseal(key: bytes, ciphertext: bytes) -> bytes:
    """Return what was sealed, or refuse a ciphertext that was damaged, moved or made by someone else."""
    try:
        return AESGCM(key).decrypt(_NONCE, ciphertext, None)
    except InvalidTag:
        raise PeerError("a sealed message does not open") from None


def signing_public(secret: bytes) -> bytes:
    """Return the public key that belongs to a private signing key (Ed25519)."""
    return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def sign(secret: bytes, statement: bytes) -> bytes:
    """Return the signature of a statement."""
    return Ed25519PrivateKey.from_private_bytes(secret).sign(statement)


def require_signature(public: bytes, signature: bytes, statement: bytes) -> None:
    """Refuse a signature that is not this key's under this statement."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, statement)
    except (InvalidSignature, ValueError):
        raise PeerError("a signature does not match its statement") from None
