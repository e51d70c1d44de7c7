"""The field of 65,521 elements that shares live in: interpolation through public points, and the Reed-Solomon decoder.

Points are public, so tables may be looked up by them; values are secret, and are only added and multiplied.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import Stream

PRIME = 65_521
ELEMENT_BYTES = 2

_GENERATOR = 17  # of the multiplicative group: its powers are all elements but zero
_ELEMENT = np.dtype("<u2")

Elements = NDArray[np.int64]  # numbers in [0, PRIME)


def elements(stream: Stream, count: int) -> Elements:
    """Return exactly uniform elements: 16-bit words of a stream, those not below the prime left out."""
    found = np.empty(0, _ELEMENT)
    while found.size < count:
        words = np.empty(count - found.size, _ELEMENT)
        stream.fill(words)
        found = np.concatenate((found, words[words < PRIME]))
    return found.astype(np.int64)


def element_rows(keys: Sequence[bytes], count: int) -> Elements:
    """Return the first elements of the streams of many keys, a row for each."""
    packed = b"".join(Stream(key).bytes(count * ELEMENT_BYTES) for key in keys)
    rows = np.frombuffer(packed, _ELEMENT).reshape(len(keys), count).astype(np.int64)
    for row in np.flatnonzero((rows >= PRIME).any(axis=1)).tolist():
        rows[row] = elements(Stream(keys[row]), count)
    return rows


def pack(values: Elements) -> bytes:
    """Return elements as two bytes each, little-endian."""
    return values.astype(_ELEMENT).tobytes()


def unpack(data: bytes) -> Elements:
    """Read elements that a peer packed; a number that is none is refused."""
    values = np.frombuffer(data, _ELEMENT)
    if values.size and int(values.max()) >= PRIME:
        raise PeerError(f"an element of the field must be below {PRIME}, got {values.max()}")
    return values.astype(np.int64)


def multiply(left: Elements, right: Elements) -> Elements:
    """Return a product of matrices; doubles hold sums of up to 2^20 products exactly, and are fast."""
    product = left.astype(np.float64) @ right.astype(np.float64)
    return product.astype(np.int64) % PRIME


def interpolation(known: Elements, wanted: Elements) -> Elements:
    """Return the matrix from a polynomial's values at the known points to those at the wanted ones.

    All points are distinct. Lagrange's formula in logarithms: the wanted point's distances to all known ones but one,
    over that one's distances to the others.
    """
    logs, powers = _tables()
    apart = logs[(wanted[:, None] - known[None, :]) % PRIME]
    between = logs[(known[:, None] - known[None, :]) % PRIME]
    np.fill_diagonal(between, 0)
    exponents = apart.sum(axis=1)[:, None] - apart - between.sum(axis=1)[None, :]
    matrix: Elements = powers[exponents % (PRIME - 1)]
    return matrix


def decode(points: Elements, values: Elements, size: int) -> NDArray[np.bool_] | None:
    """Say which values of a word are wrong; None if more are than can be told.

    A right word is the values of a polynomial of degree below `size`. Up to (points - size) / 2 wrong ones are found
    (Welch and Berlekamp): polynomials N and E, of degrees below size + errors and at most errors, with
    N(x) = value E(x) at every point, have N = f E, and E vanishes where the value is wrong.
    """
    errors = (len(points) - size) // 2
    powers = np.ones((len(points), size + errors), np.int64)
    for degree in range(1, size + errors):
        powers[:, degree] = powers[:, degree - 1] * points % PRIME
    locators = powers[:, : errors + 1]
    kernel = _kernel(np.hstack((powers, -values[:, None] * locators % PRIME)))
    if kernel is None:
        return None
    right = np.flatnonzero(multiply(locators, kernel[size + errors :, None])[:, 0])[:size]
    if len(right) < size:
        return None
    wrong = misfits(points, values[:, None], right)[:, 0]
    return wrong if int(wrong.sum()) <= errors else None


def decode_words(
    points: Elements, words: Elements, size: int, patience: int
) -> tuple[NDArray[np.bool_], list[int]]:
    """Say which values of each word, a column, are wrong, and which words do not decode.

    Wrong values of many words are mostly at the same points. So what one word shows is tried on all others before the
    next one is decoded for itself. After `patience` words that do not decode, the others that do not fit are given up.
    """
    wrong, lost, pending = np.zeros(words.shape, np.bool_), list[int](), np.arange(words.shape[1])
    suspects = np.zeros(len(points), np.bool_)
    while pending.size:
        differs = misfits(points, words[:, pending], np.flatnonzero(~suspects)[:size])
        fits = differs.sum(axis=0) <= (len(points) - size) // 2
        wrong[:, pending[fits]] = differs[:, fits]
        pending = pending[~fits]
        if not pending.size or len(lost) > patience:
            break
        found = decode(points, words[:, pending[0]], size)
        if found is None:
            lost.append(int(pending[0]))
        else:
            wrong[:, pending[0]] = found
            suspects = suspects | found if int((~suspects & ~found).sum()) >= size else found
        pending = pending[1:]
    return wrong, lost + pending.tolist()


def misfits(points: Elements, words: Elements, known: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Say where words, by columns, differ from the polynomials through their values at the known rows."""
    others = np.setdiff1d(np.arange(len(points)), known)
    differs = np.zeros(words.shape, np.bool_)
    differs[others] = multiply(interpolation(points[known], points[others]), words[known]) != words[others]
    return differs


def _kernel(matrix: Elements) -> Elements | None:
    """Return a vector other than zero that a matrix maps to zero; None if there is none."""
    rows, columns = matrix.shape
    matrix, pivots = matrix.copy(), 0
    for row in range(columns):  # pivots are on the diagonal
        found = np.flatnonzero(matrix[row:, row]) if row < rows else np.empty(0, np.int64)
        if not found.size:
            break  # a column that depends on those before it: the vector ends there
        matrix[[row, row + found[0]]] = matrix[[row + found[0], row]]
        matrix[row] = matrix[row] * pow(int(matrix[row, row]), -1, PRIME) % PRIME
        factors = matrix[:, row].copy()
        factors[row] = 0
        matrix = (matrix - factors[:, None] * matrix[row]) % PRIME
        pivots += 1
    if pivots == columns:
        return None
    vector = np.zeros(columns, np.int64)
    vector[pivots] = 1
    vector[:pivots] = -matrix[:pivots, pivots] % PRIME
    return vector


@lru_cache(maxsize=1)
def _tables() -> tuple[Elements, Elements]:
    """Return the logarithm of every element (of zero, 0) and every power of the generator."""
    powers = np.empty(PRIME - 1, np.int64)
    power = 1
    for exponent in range(PRIME - 1):
        powers[exponent] = power
        power = power * _GENERATOR % PRIME
    logs = np.zeros(PRIME, np.int64)
    logs[powers] = np.arange(PRIME - 1)
    return logs, powers
