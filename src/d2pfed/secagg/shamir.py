"""Secrets in shares of which any `threshold` open them and fewer say nothing (Shamir, in a prime field)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from operator import lshift, mul

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.compiled import compiled
from d2pfed.numerics.randomness import Stream

PRIME = (1 << 256) + 297  # the least prime above every 32-byte secret
SECRET_BYTES = 32
SHARE_BYTES = 33

_LIMB_BITS = 52  # five limbs hold a number of the field
_FOLD = 297 << 4  # 2^260 is minus this in the field
_SMALL_POINT = 1 << 11  # a limb times a smaller point stays below 2^63
_WORTH_COMPILING = 1 << 14  # products; with fewer, plain integers are done before the compiler is loaded


def split(
    secrets: Sequence[int], threshold: int, points: Sequence[int], stream: Stream, prime: int = PRIME
) -> list[list[int]]:
    """Return one share per point of each secret.

    Guarantee: fewer than `threshold` shares are uniform and independent of the secret, since every coefficient is
    uniform in the field, zero included. Arithmetic is not constant-time; secrets are used once.
    Checked: test_shamir.py::test_shares_below_the_threshold_say_nothing.
    """
    require_points(points, threshold, prime)
    if not all(0 <= secret < prime for secret in secrets):
        raise ConfigError(f"a secret must be in [0, {prime})")
    falling = [[*(stream.below(prime) for _ in range(threshold - 1)), secret] for secret in secrets]
    if prime == PRIME and max(points) < _SMALL_POINT and len(points) * threshold >= _WORTH_COMPILING:
        shifts, low, shares = [_LIMB_BITS * place for place in range(5)], (1 << _LIMB_BITS) - 1, list[list[int]]()
        for each in falling:  # the same as below, some fifty times as fast
            limbs = np.array([[coefficient >> shift & low for shift in shifts] for coefficient in each], np.int64)
            values = np.zeros((5, len(points)), np.int64)
            _horner(limbs, np.array(points, np.int64), values)
            shares.append([sum(map(lshift, row, shifts)) % PRIME for row in values.T.tolist()])
        return shares
    return _evaluate(falling, points, prime)


class Interpolation:
    """The Lagrange coefficients of one set of share holders, for all the secrets they hold together."""

    def __init__(self, points: Sequence[int], prime: int = PRIME) -> None:
        require_points(points, len(points), prime)
        self._prime = prime
        whole = prod(points) % prime
        below = list(map(mul, points, _gaps(points)))
        self._coefficients = [whole * inverse % prime for inverse in _invert(below, prime)]

    def join(self, shares: Sequence[int]) -> int:
        """Return the secret behind shares given in the order of the points; wrong shares give a wrong secret."""
        if len(shares) != len(self._coefficients):
            raise ConfigError(f"{len(self._coefficients)} shares must be joined, got {len(shares)}")
        total: int = sum(map(mul, self._coefficients, shares))
        return total % self._prime


@dataclass(frozen=True, slots=True)
class Corrected:
    """A secret, and the places of the shares that were not its own."""

    secret: int = field(repr=False)
    wrong: tuple[int, ...]


def correct(
    points: Sequence[int],
    threshold: int,
    shares: Sequence[int],
    is_right: Callable[[int], bool],
    prime: int = PRIME,
) -> Corrected | None:
    """Open a secret from shares, in the order of their points, although some are wrong (Reed-Solomon decoding).

    Guarantee: up to `(shares - threshold) // 2` wrong shares are corrected and named, whatever they are. With more, and
    with a secret that the caller does not recognise, nothing is opened and nobody is named.
    Checked: test_shamir.py::test_wrong_shares_are_corrected_and_named.
    """
    require_points(points, threshold, prime)
    if len(shares) != len(points):
        raise ConfigError(f"{len(points)} shares must be given, got {len(shares)}")
    # Sums over the shares, weighted by powers of their points, are zero if no share is wrong. Otherwise a sum of
    # c x^k over the wrong points x is left in number k: a recurrence whose roots are those points.
    syndromes, terms = list[int](), list(map(mul, shares, _invert(_gaps(points), prime)))
    for _ in range(len(shares) - threshold):
        terms = [term % prime for term in terms]
        syndromes.append(sum(terms) % prime)
        terms = list(map(mul, terms, points))
    locator = _shortest_recurrence(syndromes, prime)
    if 2 * (len(locator) - 1) > len(shares) - threshold:
        return None
    (values,) = _evaluate([locator], points, prime)
    wrong = tuple(place for place, value in enumerate(values) if value == 0)
    if len(wrong) != len(locator) - 1:
        return None
    right = [place for place, value in enumerate(values) if value][:threshold]
    secret = Interpolation([points[place] for place in right], prime).join([shares[place] for place in right])
    return Corrected(secret, wrong) if is_right(secret) else None


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


def _gaps(points: Sequence[int]) -> list[int]:
    """Return for each point the product of its differences to the others, not reduced."""
    return [prod(other - point for other in points if other != point) for point in points]


def _shortest_recurrence(sequence: Sequence[int], prime: int) -> list[int]:
    """Return the monic characteristic polynomial, highest power first, of a sequence's shortest linear recurrence.

    Berlekamp and Massey's algorithm. It is the only one of its length whenever the sequence is twice as long.
    """
    now, last, length, shift, inverse = [1], [1], 0, 1, 1
    for count, _ in enumerate(sequence):
        recent = sequence[count - length : count + 1][::-1]
        gap = sum(map(mul, now, recent)) % prime
        if gap == 0:
            shift += 1
            continue
        factor = gap * inverse % prime
        longer = now + [0] * (len(last) + shift - len(now))
        for place, value in enumerate(last, shift):
            longer[place] = (longer[place] - factor * value) % prime
        if 2 * length <= count:
            last, length, shift, inverse = now, count + 1 - length, 1, pow(gap, -1, prime)
        else:
            shift += 1
        now = longer
    return now + [0] * (length + 1 - len(now))


def _evaluate(falling: Sequence[Sequence[int]], points: Sequence[int], prime: int) -> list[list[int]]:
    """Return the values of polynomials of one degree, each given from the highest coefficient down.

    They are evaluated side by side in one large integer for each point, which is reduced once at the end: points are
    small, so this is the cheapest.
    """
    room = max(points).bit_length() * len(falling[0]) + prime.bit_length() + 1  # bits that no value outgrows
    low = (1 << room) - 1
    side_by_side = [
        sum(coefficient << room * place for place, coefficient in enumerate(column))
        for column in zip(*falling, strict=True)
    ]
    values: list[list[int]] = [[] for _ in falling]
    for point in points:
        value = 0
        for coefficient in side_by_side:  # Horner
            value = value * point + coefficient
        for place, found in enumerate(values):
            found.append((value >> room * place & low) % prime)
    return values


@compiled
def _horner(falling: NDArray[np.int64], points: NDArray[np.int64], values: NDArray[np.int64]) -> None:
    """Take each value times its point plus the next coefficient, limb by limb, the last carry folded into the first."""
    low = np.int64((1 << _LIMB_BITS) - 1)
    for coefficient in falling:
        for index in range(points.size):
            carry = np.int64(0)
            for limb in range(5):
                carry = values[limb, index] * points[index] + coefficient[limb] + (carry >> _LIMB_BITS)
                values[limb, index] = carry & low
            values[0, index] -= _FOLD * (carry >> _LIMB_BITS)


def _invert(values: Sequence[int], prime: int) -> list[int]:
    """Invert all values with one inversion (Montgomery's trick)."""
    ahead = list(accumulate(values, lambda left, right: left * right % prime, initial=1))
    inverse = pow(ahead.pop(), -1, prime)
    inverses = []
    for value, before in zip(reversed(values), reversed(ahead), strict=True):
        inverses.append(inverse * before % prime)
        inverse = inverse * value % prime
    return inverses[::-1]
