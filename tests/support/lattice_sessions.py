"""Random sessions of the lattice protocol: any size and ring, dropouts anywhere, members and clients that cheat."""

from dataclasses import replace
from fractions import Fraction

import numpy as np

from d2pfed.errors import TooFewClients
from d2pfed.numerics.randomness import Stream, digest
from d2pfed.secagg.lattice import messages
from d2pfed.secagg.lattice.field import PRIME
from d2pfed.secagg.lattice.session import Session
from support.lattice import EXCHANGES, LatticeFederation, make_session

CHEATS = ("sums", "seeds", "sums and traces", "boxes", "commitment")


def draw_session(stream: Stream) -> Session:
    """A session of 24 to 36 clients, all of them in the committee, of whom up to three collude."""
    size = 24 + stream.below(13)
    return make_session(
        size,
        signed=stream.below(2) == 1,
        dropouts=Fraction(1, 12),
        colluders=stream.below(4),
        bits=1 + stream.below(20),
        dimension=1 + stream.below(40),
        secret=16 + stream.below(40),
        attempt=stream.below(1000),
    )


def run_lattice(seed: int) -> str:
    """Run one session and return 'sum' or 'void'; a wrong sum, a void without a reason or wrong blame fails."""
    stream = Stream(digest("lattice session", seed))
    session = draw_session(stream)
    lost = {
        client: EXCHANGES[stream.below(4)]
        for client in session.cohort
        if stream.below(24) == 0  # about one in a session, sometimes too many
    }
    cheats = {
        session.cohort[rank]: CHEATS[stream.below(len(CHEATS))]
        for rank in stream.subset(len(session.cohort), stream.below(session.colluders + 1))
    }
    federation = LatticeFederation(session, seed=digest(seed), loss=fate_of(session, lost, cheats, stream))
    try:
        agreeing = federation.gather()
        opened = federation.open(agreeing)
    except TooFewClients as void:
        named = set(void.blamed)
        spare = session.committee.size - len(lost) - session.committee.openers
        assert lost or cheats, f"{seed}: void without a reason"
        assert len(lost) > 2 or cheats, f"{seed}: void for {len(lost)} missing"
        assert named <= set(cheats) or len(cheats) > spare // 2, f"{seed}: {named} blamed for {cheats}"
        return "void"
    assert np.array_equal(opened.vector, federation.expected(agreeing.survivors)), (
        f"{seed}: wrong sum of {session}"
    )
    assert set(opened.blamed) <= set(cheats), f"{seed}: {opened.blamed} blamed for {cheats}"
    return "sum"


def fate_of(session: Session, lost, cheats, stream: Stream):
    """What becomes of each answer: gone from some exchange on, or changed."""
    order = {name: place for place, name in enumerate(EXCHANGES)}

    def loss(name, client, answer):
        if client in lost and order[name] >= order[lost[client]]:
            return None
        return changed(session, name, client, answer, cheats[client], stream) if client in cheats else answer

    return loss


def changed(session: Session, name: str, client: int, answer: bytes, cheat: str, stream: Stream) -> bytes:
    if name == "contribute" and cheat in ("boxes", "commitment"):
        columns = 2 * (session.polynomials + 2)
        fixed = messages.contribution_bytes(session, 0)
        said = messages.decode_contribution(
            session, session.rank(client), (len(answer) - fixed) // columns, answer
        )
        if cheat == "commitment":
            return messages.encode_contribution(session, session.rank(client), replace(said, commitment=bytes(32)))
        rows = stream.subset(len(said.boxes), 1 + stream.below(8))
        said.boxes[rows] = (said.boxes[rows] + 1 + stream.below_each(PRIME - 1, len(rows))[:, None]) % PRIME
        return messages.encode_contribution(session, session.rank(client), said)
    if name not in ("open", "trace") or cheat in ("boxes", "commitment"):
        return answer
    count = (len(answer) - 72) // 2 - (session.polynomials if name == "open" else 0)
    noise = 1 + stream.below_each(PRIME - 1, count)
    if name == "trace":
        said = messages.decode_trace(session, session.rank(client), count, answer)
        return messages.encode_trace(
            session, session.rank(client), (said + noise * (cheat == "sums and traces")) % PRIME
        )
    said = messages.decode_opening(session, session.rank(client), count, answer)
    if cheat == "seeds":
        return messages.encode_opening(
            session, session.rank(client), replace(said, seeds=(said.seeds + noise) % PRIME)
        )
    return messages.encode_opening(
        session, session.rank(client), replace(said, sums=(said.sums + 1 + noise[0]) % PRIME)
    )
