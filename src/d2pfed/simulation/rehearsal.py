"""A rehearsal: the whole signed protocol between made-up clients, charged to nobody, before a run begins."""

from collections.abc import Mapping
from fractions import Fraction

import numpy as np

from d2pfed.errors import D2PFedError
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.numerics.ring import RingVector
from d2pfed.round import AttemptSession, InProcess, Invite, LatticeClient, gather
from d2pfed.round.aggregation import Machine
from d2pfed.secagg import Client, Consistency, Delivery, Enrolment, History, Position, Session, lattice
from d2pfed.secagg.lattice.parameters import choose_committee
from d2pfed.secagg.roster import sign_position
from d2pfed.secagg.wire import MessageKind, kind_of
from d2pfed.simulation.federation import simulated_roster

REHEARSING = 30  # clients
LOST = 3  # of them, before they send their vector
_MODEL = b"model"
_TRAINING = (MessageKind.MASK_REQUEST, MessageKind.LATTICE_REQUEST)


def rehearse(dimension: int, bits: int, entropy: Entropy, secret: int | None = None) -> int:
    """Run every message of a signed session over vectors of this size, lose some clients, and check the sum.

    `secret` is the length of a client's secret in the lattice protocol; None rehearses pair masks. Nothing of it comes
    from anyone's data, so it costs no privacy. Returns how many clients are in the sum.
    """
    secrets, roster = simulated_roster(entropy, REHEARSING)
    session = _session(roster.digest, tuple(secrets), dimension, bits, secret)

    def vector(client: int) -> RingVector:
        words = entropy.child("vector", client).stream().words(dimension)
        return (words & np.uint64(session.ring.modulus - 1)).astype(np.uint32)

    def position(client: int, count: int) -> Position:
        head = digest("d2pfed rehearsal log", client, count)
        return sign_position(secrets[client], roster.authority, client, count, head)

    def join(client: int) -> Machine:
        enrolment, history = Enrolment(secrets[client], roster), History(position(client, 1), lambda *_: True)
        own = entropy.child("client", client)
        if isinstance(session, Session):
            return Client(session, client, lambda *_: vector(client), own, enrolment, history)
        return LatticeClient(
            own=lattice.Participant(session, client, enrolment, history),
            contribute=lambda *_: (vector(client), position(client, 2)),
            entropy=own,
            model=_MODEL,
        )

    def left(requests: Mapping[int, bytes]) -> list[int]:
        return [client for client, data in requests.items() if client >= LOST or kind_of(data) not in _TRAINING]

    exchange = InProcess(join, left).exchange
    masked = gather(session, _MODEL, exchange, task=b"rehearsal", invite=Invite(roster=roster))
    found, survivors = masked.unmask().vector, masked.survivors
    expected = np.zeros(dimension, np.uint32)
    for client in survivors:
        session.ring.add_into(expected, vector(client))
    if len(survivors) != REHEARSING - LOST or not np.array_equal(found, expected):
        raise D2PFedError(
            "the rehearsal of secure aggregation gave a wrong sum: this installation must not be used"
        )
    return len(survivors)


def _session(
    roster: bytes, cohort: tuple[int, ...], dimension: int, bits: int, secret: int | None
) -> AttemptSession:
    plan, run, quorum = digest("d2pfed rehearsal"), "rehearsal", REHEARSING - 2 * LOST
    if secret is None:
        return Session(
            plan_digest=plan,
            run=run,
            round=0,
            attempt=0,
            roster_digest=roster,
            cohort=cohort,
            dimension=dimension,
            bits=bits,
            threshold=REHEARSING // 2 + 1,
            quorum=quorum,
            colluders=0,
            delivery=Delivery.QUORUM,
            consistency=Consistency.SIGNED,
        )
    committee = choose_committee(
        REHEARSING, Fraction(LOST, REHEARSING), secret, population=REHEARSING, colluding=0, draws=0
    )
    return lattice.Session(
        plan_digest=plan,
        run=run,
        round=0,
        attempt=0,
        roster_digest=roster,
        cohort=cohort,
        members=cohort,
        dimension=dimension,
        bits=bits,
        secret=secret,
        committee=committee,
        quorum=quorum,
        colluders=0,
    )
