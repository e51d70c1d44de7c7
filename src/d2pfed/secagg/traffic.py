"""How many bytes a client sends and receives in one attempt: every message, by its codec, and the model.

Counted for an attempt in which nobody drops out, nobody is met at a remembered position, and nothing is traced. Of the
task only the length is counted, as tasks differ.
"""

from dataclasses import dataclass

from d2pfed.numerics.randomness import HEAD_BYTES
from d2pfed.secagg.crypto import PUBLIC_BYTES, SIGNATURE_BYTES
from d2pfed.secagg.draws import NODE_BYTES, SEED_BYTES, Opening
from d2pfed.secagg.heads import CERTIFICATE_BYTES, HEAD_MESSAGE_BYTES, SLIP_BYTES
from d2pfed.secagg.lattice import messages as lattice
from d2pfed.secagg.lattice.field import ELEMENT_BYTES
from d2pfed.secagg.lattice.session import Session as LatticeSession
from d2pfed.secagg.pairwise.messages import ciphertext_bytes, encode_invitation, upload_bytes
from d2pfed.secagg.pairwise.session import Session
from d2pfed.secagg.roster import NONCE_BYTES, POSITION_BYTES
from d2pfed.secagg.wire import BINDING_BYTES, CONTEXT_BYTES, HEADER_BYTES, pack_text, subset_bytes

_TASK_LENGTH_BYTES = _COUNTER_BYTES = 4
_ID_BYTES = _FLOOR_COUNT_BYTES = _SERIAL_BYTES = 8


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one client sends and receives in one attempt, in bytes."""

    sent: int
    received: int


def pairwise_traffic(session: Session, depth: int | None, model: int) -> Traffic:
    """Return the traffic of a client with pair masks; `depth` is that of the roster's draws, `model` a size."""
    size, signature = len(session.cohort), SIGNATURE_BYTES if session.is_signed else 0
    position, subset = POSITION_BYTES if session.is_signed else 0, subset_bytes(size)
    adverts = HEADER_BYTES + subset + size * (3 * PUBLIC_BYTES + position + signature)
    claims = subset if session.is_signed else 0
    boxes = HEADER_BYTES + subset + claims + (size - 1) * ciphertext_bytes(session)
    request = boxes + _TASK_LENGTH_BYTES + model
    survivors = HEADER_BYTES + subset
    signatures = HEADER_BYTES + subset + size * SIGNATURE_BYTES if session.is_signed else 0
    received = _invitation(session, depth) + adverts + request + survivors + signatures
    return Traffic(upload_bytes(session), received)


def lattice_traffic(session: LatticeSession, depth: int | None, model: int) -> Traffic:
    """Return the traffic of a client that speaks once."""
    members, certificate = session.committee.size, CERTIFICATE_BYTES if session.is_by_slot else 0
    keys = subset_bytes(members) + members * PUBLIC_BYTES
    vouched = subset_bytes(members) + session.committee.vouchers * (SIGNATURE_BYTES + certificate)
    shown = keys + (vouched if session.is_signed else 0)
    received = _invitation(session, depth) + shown + _TASK_LENGTH_BYTES + BINDING_BYTES + model
    return Traffic(lattice.contribution_bytes(session, members), received)


def member_traffic(session: LatticeSession, depth: int | None, model: int) -> Traffic:
    """Return the traffic of a member of the committee, which contributes like everyone."""
    ordinary, size, members = lattice_traffic(session, depth, model), len(session.cohort), session.committee.size
    signed, signature = session.is_signed, SIGNATURE_BYTES if session.is_signed else 0
    certificate = CERTIFICATE_BYTES if session.is_by_slot else 0
    shown_key = PUBLIC_BYTES + signature + certificate
    adverts = HEADER_BYTES + subset_bytes(members) + members * shown_key if signed else 0
    shown = PUBLIC_BYTES + (POSITION_BYTES + SIGNATURE_BYTES if signed else 0) + certificate
    survivors = HEADER_BYTES + CONTEXT_BYTES + lattice.NONCE_BYTES + subset_bytes(size) + size * shown
    agreed = HEADER_BYTES + subset_bytes(members) + members * (SIGNATURE_BYTES + certificate) if signed else 0
    advert, confirmed = HEADER_BYTES + PUBLIC_BYTES + signature, HEADER_BYTES + SIGNATURE_BYTES if signed else 0
    opening = HEADER_BYTES + (session.polynomials + size) * ELEMENT_BYTES
    return Traffic(
        ordinary.sent + advert + 2 * confirmed + opening,
        ordinary.received + _invitation(session, depth) + adverts + survivors + agreed,
    )


def standing_traffic(silos: int, vector: int, model: int) -> Traffic:
    """Return the traffic of a silo in one step with standing keys; keys are exchanged once, before it."""
    received = HEADER_BYTES + 2 * _COUNTER_BYTES + subset_bytes(silos) + _TASK_LENGTH_BYTES + model
    return Traffic(HEADER_BYTES + CONTEXT_BYTES + vector, received)


def standing_keys_traffic(silos: int, run: str) -> Traffic:
    """Return the traffic of a silo that agrees on standing keys with all others, once."""
    advert = PUBLIC_BYTES + POSITION_BYTES + SIGNATURE_BYTES
    numbers = 2 * _COUNTER_BYTES + _SERIAL_BYTES + _COUNTER_BYTES  # epoch, first step, serial, how many silos
    invitation = HEADER_BYTES + len(pack_text(run)) + numbers + silos * _ID_BYTES + POSITION_BYTES
    adverts = HEADER_BYTES + subset_bytes(silos) + silos * advert
    return Traffic(2 * HEADER_BYTES + advert + BINDING_BYTES, invitation + adverts)


def head_bytes() -> int:
    """Return how long a roster's head and one client's slip are, of however many clients."""
    return HEAD_MESSAGE_BYTES + SLIP_BYTES


def roster_bytes(clients: int) -> int:
    """Return how long a roster of this many clients is: identity, key and floor of each."""
    fixed = 3 * _FLOOR_COUNT_BYTES + NONCE_BYTES + 1 + NODE_BYTES + _COUNTER_BYTES + SIGNATURE_BYTES
    return HEADER_BYTES + fixed + clients * (_ID_BYTES + PUBLIC_BYTES + _FLOOR_COUNT_BYTES + HEAD_BYTES)


def _invitation(session: Session | LatticeSession, depth: int | None) -> int:
    opening = None if depth is None else Opening(bytes(SEED_BYTES), (bytes(NODE_BYTES),) * depth)
    return len(encode_invitation(session, 0, opening))
