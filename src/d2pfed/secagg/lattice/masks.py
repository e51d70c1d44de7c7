"""What hides a client's vector, A s and a veil, and the shares that open the sum of both."""

from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from d2pfed.noise.sampler import DiscreteGaussian
from d2pfed.numerics.compiled import compiled
from d2pfed.numerics.randomness import Entropy, LongStream, Stream, derive
from d2pfed.numerics.ring import IntVector, RingVector
from d2pfed.secagg import crypto
from d2pfed.secagg.lattice import field as fields
from d2pfed.secagg.lattice.field import PRIME, Elements
from d2pfed.secagg.lattice.parameters import SECRET_DEVIATION, Committee
from d2pfed.secagg.lattice.session import Session
from d2pfed.secagg.wire import ClientId

_BLOCK = 1 << 17  # words of the matrix at a time
_LONG = range(1 << 10, 1 << 36)  # bytes of a matrix that a long stream pays for, and has


def add_product(session: Session, context: bytes, total: RingVector, secret: IntVector) -> None:
    """Add A s to a vector in place: row j of A is words j l to j l + l - 1 of the context's keystream."""
    word, length = session.ring.mask_word, session.secret
    key, rows = derive(context, "d2pfed lattice matrix"), max(1, _BLOCK // length)
    stream = LongStream(key) if total.size * length * word.itemsize in _LONG else Stream(key)
    block, factors = np.empty((rows, length), word), secret.astype(word)  # modulo the word: the ring divides it
    for start in range(0, total.size, rows):
        part = total[start : start + rows]
        stream.fill(block[: part.size])
        _add_products(block[: part.size], factors, part)
    total &= np.uint32(session.ring.modulus - 1)


@compiled
def _add_products(
    rows: NDArray[np.unsignedinteger], factors: NDArray[np.unsignedinteger], out: RingVector
) -> None:
    """Multiply modulo the word: sums of narrow words are several times as fast as those of wide ones."""
    word = factors.dtype.type
    for row in range(rows.shape[0]):
        total = word(0)
        for column in range(rows.shape[1]):
            total = word(total + word(rows[row, column] * factors[column]))
        out[row] += np.uint32(total)


def veil(context: bytes, client: ClientId, seed: bytes) -> Stream:
    """Return the stream of a client's veil, to be added by the client and taken off for survivors."""
    return Stream(crypto.hkdf(seed, "d2pfed lattice veil", context, client))


def draw_secret(session: Session, entropy: Entropy) -> IntVector:
    """Return a short secret, by the exact sampler."""
    return DiscreteGaussian(Fraction(SECRET_DEVIATION)).draw(session.secret, entropy.stream())


def split(session: Session, secret: IntVector, seed: Elements, stream: Stream) -> Elements:
    """Return the shares of a secret and of the seed of a veil: a row for each member, a column for each polynomial.

    A polynomial is given by its values at 1, 2, ...: what is shared, then `threshold` uniform ones. The last one is
    uniform throughout: it blinds a trace.

    Guarantee: the rows of any `threshold` members are uniform, whatever is shared.
    Proof: docs/protocol.md#lattice. Checked: test_lattice.py::test_the_shares_of_a_thresholds_members_are_uniform.
    """
    committee, count = session.committee, session.polynomials
    values = fields.elements(stream, committee.openers * (count + 2)).reshape(committee.openers, count + 2)
    padded = np.pad(secret % PRIME, (0, committee.packed * count - secret.size))
    values[: committee.packed, :count] = padded.reshape(count, committee.packed).T
    shares = fields.multiply(_share_matrix(committee.openers, committee), values)
    seeds = np.concatenate((seed, values[: committee.threshold, count]))
    shares[:, count] = fields.multiply(_share_matrix(len(seeds), committee), seeds[:, None])[:, 0]
    return shares


@lru_cache(maxsize=8)  # the same for all clients of a run
def _share_matrix(known: int, committee: Committee) -> Elements:
    first = committee.openers + 1
    return fields.interpolation(np.arange(1, known + 1), np.arange(first, first + committee.size))


def pads(session: Session, context: bytes, ends: Iterable[tuple[bytes, ClientId, ClientId]]) -> Elements:
    """Return the pads of boxes, a row for each: by the secret that client and member have agreed on, and both."""
    keys = [crypto.hkdf(shared, "d2pfed lattice pads", context, client, member) for shared, client, member in ends]
    return fields.element_rows(keys, session.polynomials + 2)
