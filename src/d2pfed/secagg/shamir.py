"""Secrets in shares of which any `threshold` open them and fewer say nothing (Shamir, in a prime field)."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from operator import mul

from d2pfed.errors import ConfigError, PeerError
from d2pfed.randomness import Stream

PRIME = (1 << 256) + 297  # the least prime above every 32-byte secret
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: int, threshold: int, points: Sequence[int], stream: Stream, prime: int = PRIME) -> list[int]:
    """Return one share of the secret per point.

    Guarantee: fewer than `threshold` shares are uniform and independent of the secret, since every coefficient is
    uniform in the field, zero included. Arithmetic is not constant-time; secrets are used once.
    Checked: test_shamir.py::test_shares_below_the_threshold_say_nothing.
    """
    require_points(points, threshold, prime)
    if not 0 <= secret < prime:
        raise ConfigError(f"a secret must be in [0, {prime})")
    falling = [stream.below(prime) for _ in range(threshold - 1)]
    shares = []
    for point in points:
        value = 0
        for coefficient in falling:  # Horner; points are small, so reducing once at the end is the cheapest
            value = (value + coefficient) * point
        shares.append((value + secret) % prime)
    return shares


class Opener:
    """The Lagrange coefficients of one set of share holders, for all the secrets they hold together."""

    def __init__(self, points: Sequence[int], prime: int = PRIME) -> None:
        require_points(points, len(points), prime)
        self._prime = prime
        whole = prod(points) % prime
        below = [point * prod(other - point for other in points if other != point) % prime for point in points]
        self._coefficients = [whole * inverse % prime for inverse in _invert(below, prime)]

    def join(self, shares: Sequence[int]) -> int:
        """Return the secret behind shares given in the order of the points; wrong shares give a wrong secret."""
        if len(shares) != len(self._coefficients):
            raise ConfigError(f"{len(self._coefficients)} shares must be joined, got {len(shares)}")
        total: int = sum(map(mul, self._coefficients, shares))
        return total % self._prime


def require_points(points: Sequence[int], threshold: int, prime: int) -> None:
    """Refuse points that would give a secret away: zero, repeated, or too few for the threshold."""
    if not 1 <= threshold <= len(points):
        raise ConfigError(f"a threshold must be in [1, {len(points)}], got {threshold}")
    if len(set(points)) != len(points) or min(points) < 1 or max(points) >= prime:
        raise ConfigError("the points of shares must be distinct and in [1, prime)")


def pack_shares(shares: Iterable[int]) -> bytes:
    """Return shares as 33 bytes each (little-endian)."""
    return b"".join(share.to_bytes(SHARE_BYTES, "little") for share in shares)


def unpack_share(data: bytes) -> int:
    """Return the share in 33 bytes, or refuse a number outside the field."""
    share = int.from_bytes(data, "little")
    if len(data) != SHARE_BYTES or share >= PRIME:
        raise PeerError("a share must be a number of the field in 33 bytes")
    return share


def _invert(values: Sequence[int], prime: int) -> list[int]:
    """Invert all values with one inversion (Montgomery's trick)."""
    ahead = list(accumulate(values, lambda left, right: left * right % prime, initial=1))
    inverse = pow(ahead.pop(), -1, prime)
    inverses = []
    for value, before in zip(reversed(values), reversed(ahead), strict=True):
        inverses.append(inverse * before % prime)
        inverse = inverse * value % prime
    return inverses[::-1]
