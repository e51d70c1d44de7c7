"""A rehearsal: the whole signed protocol between made-up clients, charged to nobody, before a run begins."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from d2pfed.errors import D2PFedError
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.numerics.ring import RingVector
from d2pfed.round import Invite, gather
from d2pfed.secagg import Client, Consistency, Delivery, Enrolment, History, Roster, Session, crypto, issue_roster
from d2pfed.secagg.pairwise.phases import Masked
from d2pfed.secagg.position import sign_position

CLIENTS = 60
LOST = 6  # before they send their vector

_ISSUED = 0  # a rehearsal has no clock, and nobody asks whether its roster has expired


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What was rehearsed."""

    clients: int
    survivors: int
    dimension: int
    bits: int


def rehearse(dimension: int, bits: int, entropy: Entropy) -> Rehearsal:
    """Run every message of a signed session over vectors of this size, lose some clients, and check the sum.

    Nothing of it comes from anyone's data, so it costs no privacy. A sum that is not that of the survivors is a defect
    of this software, and ends the run before it has begun.
    """
    crowd = _Crowd.make(dimension, bits, entropy)
    masked = gather(crowd.session, b"model", crowd.exchange, task=b"rehearsal", invite=Invite(roster=crowd.roster))
    found, survivors = masked.unmask().vector, masked.survivors
    expected = np.zeros(dimension, np.uint32)
    for client in survivors:
        crowd.session.ring.add_into(expected, crowd.vector(client))
    if len(survivors) != CLIENTS - LOST or not np.array_equal(found, expected):
        raise D2PFedError(
            "the rehearsal of secure aggregation gave a wrong sum: this installation must not be used"
        )
    return Rehearsal(CLIENTS, len(survivors), dimension, bits)


@dataclass(frozen=True, slots=True)
class _Crowd:
    """Enrolled clients in this process."""

    session: Session
    roster: Roster
    entropy: Entropy
    machines: dict[int, Client] = field(default_factory=dict)

    @staticmethod
    def make(dimension: int, bits: int, entropy: Entropy) -> "_Crowd":
        clients = tuple(range(CLIENTS))
        keys = {client: crypto.signing_public(_secret(entropy, client)) for client in clients}
        authority = crypto.signing_public(entropy.child("authority").key)
        roster = issue_roster(keys, authority, serial=1, issued=_ISSUED, entropy=entropy.child("nonce"))
        session = Session(
            plan_digest=digest("d2pfed rehearsal"),
            run="rehearsal",
            round=0,
            attempt=0,
            roster_digest=roster.digest,
            cohort=clients,
            dimension=dimension,
            bits=bits,
            degree=CLIENTS - 1,
            threshold=CLIENTS // 2 + 1,
            quorum=CLIENTS - 2 * LOST,
            colluders=0,
            delivery=Delivery.QUORUM,
            consistency=Consistency.SIGNED,
        )
        return _Crowd(session, roster, entropy)

    def vector(self, client: int) -> RingVector:
        """Return a client's vector: uniform, from its own branch of the entropy."""
        words = self.entropy.child("vector", client).stream().words(self.session.dimension)
        return (words & np.uint64(self.session.ring.modulus - 1)).astype(np.uint32)

    def exchange(self, requests: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """Hand each request to its client; some are lost when the vectors are asked for, and never come back."""
        for client, request in requests.items():
            machine = self.machines.get(client) or self._join(client)
            answer = machine.receive(request)
            if not (client < LOST and isinstance(machine.phase, Masked)):
                yield client, answer

    def _join(self, client: int) -> Client:
        secret, count = _secret(self.entropy, client), 1
        head = digest("d2pfed rehearsal log", client)
        position = sign_position(secret, self.roster.authority, client, count, head)
        self.machines[client] = Client(
            self.session,
            client,
            lambda _task, _model, _group: self.vector(client),
            self.entropy.child("client", client),
            Enrolment(secret, self.roster),
            History(position, lambda *seen: seen == (count, head)),
        )
        return self.machines[client]


def _secret(entropy: Entropy, client: int) -> bytes:
    return entropy.child("signing key", client).key
