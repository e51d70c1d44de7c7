"""The only door to randomness: system entropy as a tree of named children, expanded by AES-256-CTR."""

import hashlib
import hmac
import os
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.fields import check_range

KEY_BYTES = 32
HEAD_BYTES = 32  # of a client's log: each row's head is the hash of the row and of the head before it
PathPart = str | int | bytes

_CHUNK = 1 << 18  # bytes of keystream per call: large enough to be fast, small enough for the cache
_ZEROS = memoryview(bytes(_CHUNK))  # a slice of it is no copy
_FROM_ZERO = modes.CTR(bytes(16))


def encode_path(*path: PathPart) -> bytes:
    """Join the parts of a path so that no two different paths give the same bytes."""
    joined: list[bytes] = []
    for part in path:
        if type(part) is bytes:
            joined += (b"b" + len(part).to_bytes(8, "big"), part)
        elif type(part) in (str, int):
            joined.append(_encode_label(part))
        else:
            raise ConfigError(f"a path has texts, whole numbers and bytes, got {type(part).__name__}")
    return b"".join(joined)


@lru_cache(1 << 12, typed=True)  # most texts and numbers come again and again; none is a secret
def _encode_label(part: str | int) -> bytes:
    body = str(part).encode()
    return (b"s" if isinstance(part, str) else b"i") + len(body).to_bytes(8, "big") + body


def derive(key: bytes, *path: PathPart) -> bytes:
    """Derive the 32-byte key that belongs to one purpose: HKDF-Expand with SHA-256 over the encoded path.

    Guarantee: keys of different paths are independent, since HKDF is a pseudorandom function of `encode_path`.
    Checked: test_randomness.py::test_any_change_of_a_path_changes_the_key.
    """
    if len(key) != KEY_BYTES:
        raise ConfigError(f"a key must have {KEY_BYTES} bytes, got {len(key)}")
    return hmac.digest(key, encode_path(*path) + b"\x01", "sha256")  # the one block that 32 bytes take


def digest(*path: PathPart) -> bytes:
    """Hash public values to 32 bytes (SHA-256 of the encoded path)."""
    return hashlib.sha256(encode_path(*path)).digest()


def first_head(authority: bytes, client: int) -> bytes:
    """Return the head of a log without rows: it names the client and who enrolled it, by its public key."""
    return digest("d2pfed log", authority, client)


def next_head(head: bytes, number: int, kind: str, body: bytes) -> bytes:
    """Return the head after row `number`, counted from 1.

    Guarantee: anyone who knows a head knows every row before it, since SHA-256 has no known collisions.
    Checked: test_position.py::test_a_head_depends_on_every_row_before_it.
    """
    return digest("d2pfed log", head, number, kind, body)


@dataclass(frozen=True, slots=True)
class Entropy:
    """A node of the tree of secret randomness; the same path from the same root gives the same stream.

    A root is either the system's (`Entropy.system`) or replayed from a known seed for tests and repeatable
    simulations (`Entropy.replay`). Children inherit that mark, and `require_system` refuses replayed ones, so a
    deployment cannot run on a known seed by accident. Take each stream once: equal paths repeat it.

    Attributes:
        key: the node's secret.
        is_replayed: whether it follows from a known seed, and so protects nobody.

    Examples:
        >>> root = Entropy.replay(b"test")
        >>> root.child("noise") == root.child("noise"), root.child("noise").is_replayed
        (True, True)
    """

    key: bytes = field(repr=False)
    is_replayed: bool

    def __post_init__(self) -> None:
        key: object = self.key
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise ConfigError(
                f"entropy must have {KEY_BYTES} bytes, got {len(key) if isinstance(key, bytes) else type(key).__name__}"
            )

    @staticmethod
    def system() -> "Entropy":
        """Make a root from the operating system's generator; fails if there is none."""
        return Entropy(os.urandom(KEY_BYTES), is_replayed=False)

    @staticmethod
    def replay(seed: bytes) -> "Entropy":
        """Make a root that repeats: anyone who knows the seed knows all that follows, so it protects nobody."""
        return Entropy(digest("d2pfed replay", seed), is_replayed=True)

    def child(self, *path: PathPart) -> "Entropy":
        """Return the independent child at the end of a path."""
        return Entropy(derive(self.key, *path), self.is_replayed)

    def stream(self) -> "Stream":
        """Start this node's stream from its beginning."""
        return Stream(self.key)

    def require_system(self) -> "Entropy":
        """Return itself, or refuse if it was replayed from a seed."""
        if self.is_replayed:
            raise ConfigError("a deployment needs the system's entropy, got entropy replayed from a seed")
        return self


class Stream:
    """Random bits from AES-256-CTR under a single-use key, with exact uniform integers."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:  # the cipher would take shorter ones
            raise ConfigError(f"a stream's key must have {KEY_BYTES} bytes, got {len(key)}")
        self._keystream = Cipher(algorithms.AES(key), _FROM_ZERO).encryptor()

    def fill(self, out: NDArray[np.generic]) -> None:
        """Overwrite a contiguous array with the next bytes of the stream."""
        view = out.data.cast("B")
        for start in range(0, len(view), _CHUNK):
            part = view[start : start + _CHUNK]
            self._keystream.update_into(_ZEROS[: len(part)], part)

    def bytes(self, count: int) -> bytes:
        """Return the next bytes."""
        return self._keystream.update(bytes(count))

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return the next 64-bit words (little-endian)."""
        out = np.empty(count, np.dtype("<u8"))
        self.fill(out)
        return out

    def below(self, bound: int) -> int:
        """Return an exactly uniform integer in [0, bound), of any size."""
        if bound < 1:
            raise ConfigError(f"a uniform integer needs a bound of at least 1, got {bound}")
        bits = (bound - 1).bit_length()
        size = (bits + 7) // 8
        excess = 8 * size - bits
        while True:  # rejection: a remainder would favor small values; accepts with probability over 1/2
            draw = int.from_bytes(self.bytes(size), "little") >> excess
            if draw < bound:
                return draw

    def subset(self, population: int, size: int) -> NDArray[np.int64]:
        """Return a uniform subset of range(population) of the given size, sorted (Floyd's algorithm)."""
        check_range("a subset's size", size, 0, population)
        chosen: set[int] = set()
        for last in range(population - size, population):
            draw = self.below(last + 1)
            chosen.add(last if draw in chosen else draw)
        return np.array(sorted(chosen), dtype=np.int64)

    def below_each(self, bound: int, count: int) -> NDArray[np.int64]:
        """Return exactly uniform integers in [0, bound), for a bound of at most 2^63."""
        if not 1 <= bound <= 1 << 63:
            raise ConfigError(f"uniform integers need a bound in [1, 2^63], got {bound}")
        accepted = np.uint64((1 << 64) // bound * bound - 1)
        draws = self.words(count)
        while (rejected := np.flatnonzero(draws > accepted)).size:
            draws[rejected] = self.words(rejected.size)
        return (draws % np.uint64(bound)).astype(np.int64)

    def permutation(self, size: int) -> NDArray[np.int64]:
        """Return a uniform order of range(size): that of random keys, drawn again should two be equal."""
        while True:
            keys = self.words(size)
            order = np.argsort(keys)
            if np.all(np.diff(keys[order]) != 0):
                return order


class LongStream(Stream):
    """The same bits for up to 2^36 bytes, to be filled in only: twice as fast where a processor has wide AES units.

    Galois/counter mode under a nonce of zeros counts as we do, from the third block on; its tag is not asked for.
    Checked: test_randomness.py::test_a_long_stream_is_the_same_stream.
    """

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self._first = self.bytes(32)
        self._keystream = Cipher(algorithms.AES(key), modes.GCM(bytes(12))).encryptor()

    def fill(self, out: NDArray[np.generic]) -> None:
        """Overwrite a contiguous array, the first one of at least 32 bytes, with the next bytes of the stream."""
        view = out.data.cast("B")
        view[: len(self._first)] = self._first
        super().fill(np.frombuffer(view[len(self._first) :], np.uint8))
        self._first = b""
