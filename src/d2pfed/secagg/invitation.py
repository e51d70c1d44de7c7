"""The invitation, the first request: which session, and from which draw its cohort comes."""

from dataclasses import dataclass

from d2pfed.errors import PeerError
from d2pfed.secagg.draws import NODE_BYTES, SEED_BYTES, Opening
from d2pfed.secagg.messages import MessageKind
from d2pfed.secagg.position import NO_POSITION, POSITION_BYTES, Position, unpack_position
from d2pfed.secagg.session import Session
from d2pfed.secagg.wire import ClientId, frame, pack_ids, pack_integer, pack_text, unframe_unbound


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """The first request, read before there is a session: who is asked to take part in which sum.

    Attributes:
        binding: digest of the session, which the receiver builds from its own plan and compares.
        remembered: where the server has met the receiver last, if ever.
        opening: proof of the draw that the cohort follows from; None if cohorts are not drawn verifiably.
        cohort: the clients that are asked; None if they follow from the draw.
    """

    client: ClientId
    binding: bytes
    run: str
    round: int
    attempt: int
    draw: int
    block: int
    remembered: Position | None
    opening: Opening | None
    cohort: tuple[ClientId, ...] | None


def encode_invitation(
    session: Session, rank: int, opening: Opening | None = None, remembered: Position | None = None
) -> bytes:
    """Ask a client to take part."""
    counters = (session.round, session.attempt, session.draw, session.block)
    cohort = pack_ids(session.cohort) if opening is None else opening.seed + b"".join(opening.path)
    return frame(
        MessageKind.INVITATION,
        session.digest,
        session.cohort[rank],
        pack_text(session.run),
        *(pack_integer(counter, 4) for counter in counters),
        NO_POSITION if remembered is None else remembered.pack(),
        cohort,
    )


def decode_invitation(data: bytes, depth: int | None) -> Invitation:
    """Read an invitation, given the depth of the tree of draws in the receiver's roster (None: no verified draws).

    The receiver builds the session from its own plan and checks that it has this binding.
    """
    reader, client, binding = unframe_unbound(data, MessageKind.INVITATION)
    run = reader.text()
    number, attempt, draw, block = (reader.integer(4) for _ in range(4))
    packed = reader.take(POSITION_BYTES)
    cohort = reader.ids() if depth is None else None
    opening = None
    if depth is not None:
        opening = Opening(reader.take(SEED_BYTES), tuple(reader.records(depth, NODE_BYTES)))
    reader.end()
    if not run or (cohort is not None and client not in cohort):
        raise PeerError("an invitation must name a run and invite a client of its cohort")
    return Invitation(
        client=client,
        binding=binding,
        run=run,
        round=number,
        attempt=attempt,
        draw=draw,
        block=block,
        remembered=None if packed == NO_POSITION else unpack_position(packed),
        opening=opening,
        cohort=cohort,
    )
