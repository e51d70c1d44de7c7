"""A rehearsal: the whole signed protocol between made-up clients, charged to nobody, before a run begins."""

from collections.abc import Mapping

import numpy as np

from d2pfed.errors import D2PFedError
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.numerics.ring import RingVector
from d2pfed.round import InProcess, Invite, gather
from d2pfed.secagg import Client, Consistency, Delivery, Enrolment, History, Session, crypto, issue_roster
from d2pfed.secagg.roster import sign_position
from d2pfed.secagg.wire import MessageKind, kind_of

CLIENTS = 60
LOST = 6  # before they send their vector

_ISSUED = 0  # a rehearsal has no clock, and nobody asks whether its roster has expired


def rehearse(dimension: int, bits: int, entropy: Entropy) -> int:
    """Run every message of a signed session over vectors of this size, lose some clients, and check the sum.

    Nothing of it comes from anyone's data, so it costs no privacy. A sum that is not that of the survivors is a defect
    of this software, and ends the run before it has begun. Returns how many clients are in the sum.
    """
    secrets = {client: entropy.child("signing key", client).key for client in range(CLIENTS)}
    keys = {client: crypto.signing_public(secret) for client, secret in secrets.items()}
    authority = crypto.signing_public(entropy.child("authority").key)
    roster = issue_roster(keys, authority, serial=1, issued=_ISSUED, entropy=entropy.child("nonce"))
    session = Session(
        plan_digest=digest("d2pfed rehearsal"),
        run="rehearsal",
        round=0,
        attempt=0,
        roster_digest=roster.digest,
        cohort=tuple(secrets),
        dimension=dimension,
        bits=bits,
        degree=CLIENTS - 1,
        threshold=CLIENTS // 2 + 1,
        quorum=CLIENTS - 2 * LOST,
        colluders=0,
        delivery=Delivery.QUORUM,
        consistency=Consistency.SIGNED,
    )

    def vector(client: int) -> RingVector:
        words = entropy.child("vector", client).stream().words(dimension)
        return (words & np.uint64(session.ring.modulus - 1)).astype(np.uint32)

    def join(client: int) -> Client:
        count, head = 1, digest("d2pfed rehearsal log", client)
        position = sign_position(secrets[client], authority, client, count, head)
        return Client(
            session,
            client,
            lambda _task, _model, _group: vector(client),
            entropy.child("client", client),
            Enrolment(secrets[client], roster),
            History(position, lambda *seen: seen == (count, head)),
        )

    def left(requests: Mapping[int, bytes]) -> list[int]:
        return [
            client
            for client, request in requests.items()
            if client >= LOST or kind_of(request) != MessageKind.MASK_REQUEST
        ]

    transport = InProcess(join, left)
    masked = gather(session, b"model", transport.exchange, task=b"rehearsal", invite=Invite(roster=roster))
    found, survivors = masked.unmask().vector, masked.survivors
    expected = np.zeros(dimension, np.uint32)
    for client in survivors:
        session.ring.add_into(expected, vector(client))
    if len(survivors) != CLIENTS - LOST or not np.array_equal(found, expected):
        raise D2PFedError(
            "the rehearsal of secure aggregation gave a wrong sum: this installation must not be used"
        )
    return len(survivors)
