"""Random sessions of the lattice protocol: any size and ring, dropouts anywhere, members and clients that cheat."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256, shake_128
from unittest.mock import patch

import numpy as np

from d2pfed.errors import PeerError, TooFewClients
from d2pfed.numerics.randomness import Stream, digest
from d2pfed.secagg import crypto, heads
from d2pfed.secagg.lattice import masks, messages
from d2pfed.secagg.lattice import session as sessions
from d2pfed.secagg.lattice.field import PRIME
from d2pfed.secagg.lattice.parameters import Committee
from d2pfed.secagg.lattice.session import Session
from support.lattice import EXCHANGES, LatticeFederation, certified, make_session

CHEATS = ("sums", "seeds", "sums and traces", "boxes", "commitment")


public_of = lru_cache(maxsize=1 << 12)(crypto.signing_public)


def hashed(*parts: bytes) -> bytes:
    return sha256(b"".join(parts)).digest()


@contextmanager
def stand_ins() -> Iterator[None]:
    """Hashes in the place of key agreement, signatures and pads: sums and blame are none the wiser."""

    def begin(own: crypto.Agreement, secret: bytes) -> None:
        own.public = hashed(secret)

    def agree(own: crypto.Agreement, public: bytes) -> bytes:
        return hashed(*sorted((own.public, public)))

    def sign(secret: bytes, statement: bytes) -> bytes:
        return 2 * hashed(public_of(secret), statement)

    def require_signature(public: bytes, signature: bytes, statement: bytes) -> None:
        if signature != 2 * hashed(public, statement):
            raise PeerError("a signature does not fit its statement")

    def pads(session: Session, shared: bytes, context: bytes, client: int, member: int) -> np.ndarray:
        return words(session.polynomials + 2, context, shared, client, member)

    @lru_cache(maxsize=1 << 14)  # for both ends
    def words(count: int, context: bytes, shared: bytes, client: int, member: int) -> np.ndarray:
        named = context + shared + client.to_bytes(8, "little") + member.to_bytes(8, "little")
        return np.frombuffer(shake_128(named).digest(2 * count), "<u2").astype(np.int64) % PRIME

    read, requests = messages.read_request, dict[tuple[bytes, bytes], object]()

    def read_request(session: Session, body: messages.RequestBody) -> object:
        named = session.digest, body.rest  # all clients are sent the same
        if named not in requests:
            requests.clear()
            requests[named] = read(session, body)
        return requests[named]

    replaced = {"sign": sign, "require_signature": require_signature, "signing_public": public_of}
    agreeing = patch.multiple(crypto.Agreement, __init__=begin, agree=agree)
    padding, probing = patch.object(masks, "pads", pads), patch.object(crypto, "require_order")
    reading = patch.object(messages, "read_request", read_request)
    once = lru_cache(maxsize=1 << 14)(digest)  # every client hashes what every other has signed
    hashing = patch.object(heads, "digest", once), patch.object(sessions, "digest", once)
    certified.cache_clear()  # what hashes have signed, and what was signed in earnest, is of no use to the other
    with patch.multiple(crypto, **replaced), agreeing, padding, probing, reading, hashing[0], hashing[1]:
        yield
    certified.cache_clear()


def draw_session(stream: Stream, size: int | None) -> Session:
    """A session of 19 to 80 clients, small ones more often, of whom up to three collude.

    Most committees are as small as can open anything; the others are those that the rule chooses, from 23 clients on.
    """
    by_rule = size is not None or stream.below(8) == 0
    if size is None:
        size = (23 if by_rule else 19) + min(stream.below(58) for _ in range(3 if by_rule else 8))
    way = ({}, {"by_slot": True}, {"signed": False})[stream.below(3)]
    colluders = stream.below(4 if by_rule else min(4, size - 17))
    return make_session(
        size,
        dropouts=Fraction(1, 24 if size > 64 and stream.below(2) else 12),  # a committee smaller than the cohort
        colluders=colluders,
        bits=1 + stream.below(20),
        dimension=1 + stream.below(40),
        secret=(48 if size > 64 else 16) + stream.below(40),  # a smaller committee packs 48 numbers
        attempt=stream.below(1000),
        committee=None if by_rule else draw_committee(stream, size, colluders),
        **way,
    )


def draw_committee(stream: Stream, size: int, colluders: int) -> Committee:
    """A committee that packs 16 numbers, with at most six members to spare for the missing and for liars."""
    threshold = max(1, colluders)
    members = min(size, 18 + threshold + stream.below(7))
    return Committee(members, threshold, 16, (members + colluders) // 2 + 1, colluders)


def run_lattice(seed: int, size: int | None = None) -> str:
    """Run one session and return 'sum' or 'void'; a wrong sum, a void without a reason or wrong blame fails."""
    stream = Stream(digest("lattice session", seed))
    session = draw_session(stream, size)
    committee, federation = session.committee, LatticeFederation(session, seed=digest(seed))
    identities = tuple(map(federation.identity, session.cohort))
    lost = {
        client: EXCHANGES[stream.below(4)]
        for client in identities
        if stream.below(24) == 0  # about one in a session, sometimes too many
    }
    cheats = {
        identities[rank]: CHEATS[stream.below(len(CHEATS))]
        for rank in stream.subset(len(identities), stream.below(session.colluders + 1))
    }
    federation.loss = fate_of(federation, lost, cheats, stream)
    gone = len(lost.keys() & set(map(federation.identity, session.members)))
    try:
        agreeing = federation.gather()
        opened = federation.open(agreeing)
    except TooFewClients as void:
        named, spare = set(void.blamed), committee.size - gone - committee.openers
        few = gone > committee.size - committee.least or len(lost) > len(identities) - session.quorum
        assert few or cheats, f"{seed}: void for {len(lost)} missing"
        assert named <= set(cheats) or len(cheats) > spare // 2, f"{seed}: {named} blamed for {cheats}"
        return "void"
    assert np.array_equal(opened.vector, federation.expected(agreeing.survivors)), (
        f"{seed}: wrong sum of {session}"
    )
    assert set(opened.blamed) <= set(cheats), f"{seed}: {opened.blamed} blamed for {cheats}"
    return "sum"


def fate_of(federation: LatticeFederation, lost, cheats, stream: Stream):
    """What becomes of each answer: gone from some exchange on, or changed."""
    order = {name: place for place, name in enumerate(EXCHANGES)}

    def loss(name, client, answer):
        if client in lost and order[name] >= order[lost[client]]:
            return None
        if client not in cheats:
            return answer
        return changed(federation.session, name, federation.rank(client), answer, cheats[client], stream)

    return loss


def changed(session: Session, name: str, rank: int, answer: bytes, cheat: str, stream: Stream) -> bytes:
    if name == "contribute" and cheat in ("boxes", "commitment"):
        columns = 2 * (session.polynomials + 2)
        fixed = messages.contribution_bytes(session, 0)
        said = messages.decode_contribution(session, rank, (len(answer) - fixed) // columns, answer)
        if cheat == "commitment":
            return messages.encode_contribution(session, rank, replace(said, commitment=bytes(32)))
        rows = stream.subset(len(said.boxes), 1 + stream.below(8))
        said.boxes[rows] = (said.boxes[rows] + 1 + stream.below_each(PRIME - 1, len(rows))[:, None]) % PRIME
        return messages.encode_contribution(session, rank, said)
    if name not in ("open", "trace") or cheat in ("boxes", "commitment"):
        return answer
    count = (len(answer) - 72) // 2 - (session.polynomials if name == "open" else 0)
    noise = 1 + stream.below_each(PRIME - 1, count)
    if name == "trace":
        said = messages.decode_trace(session, rank, count, answer)
        return messages.encode_trace(session, rank, (said + noise * (cheat == "sums and traces")) % PRIME)
    said = messages.decode_opening(session, rank, count, answer)
    if cheat == "seeds":
        return messages.encode_opening(session, rank, replace(said, seeds=(said.seeds + noise) % PRIME))
    return messages.encode_opening(session, rank, replace(said, sums=(said.sums + 1 + noise[0]) % PRIME))
