"""Clients, a committee and a server of the lattice protocol in one process; answers can be lost or changed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

import numpy as np

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import Entropy, Stream, digest
from d2pfed.secagg import History, Roster, collect, crypto
from d2pfed.secagg.heads import (
    CertifiedRoster,
    Head,
    SlotEnrolment,
    certify,
    decode_head,
    decode_slip,
    encode_head,
)
from d2pfed.secagg.heads import head_of as head_of_roster
from d2pfed.secagg.lattice import messages
from d2pfed.secagg.lattice.client import Member, Participant
from d2pfed.secagg.lattice.parameters import Committee, choose_committee
from d2pfed.secagg.lattice.server import Convening, Invitations, Tracing
from d2pfed.secagg.lattice.session import Session, model_digest
from d2pfed.secagg.roster import Enrolment
from support.federation import MODEL, TASK, enrolment_secret, head_of, position_of
from support.federation import enrol as enrol_again
from support.rosters import AUTHORITY

enrol = lru_cache(maxsize=128)(enrol_again)  # a roster never changes
EXCHANGES = ("convene", "vouch", "contribute", "agree", "open", "trace")

Loss = Callable[[str, int, bytes], bytes | None]  # exchange, client, answer


def make_session(
    size: int = 30,
    *,
    signed: bool = True,
    by_slot: bool = False,
    dropouts=Fraction(1, 10),
    colluders: int = 0,
    **changes,
) -> Session:
    """A session whose cohort's identities are not its ranks; the committee is spread over it.

    By slots: the same clients among as many others, so that slots are not ranks either.
    """
    identities = identities_of(size)
    cohort = tuple(map(enrol_more(identities).clients.index, identities)) if by_slot else identities
    secret = changes.get("secret", 48)
    committee = changes.pop("committee", None) or choose_committee(
        size, dropouts, secret, population=size, colluding=colluders, draws=0
    )
    chosen = np.sort(Stream(digest("committee", size)).permutation(size)[: committee.size])
    settings = {
        "plan_digest": digest("a plan"),
        "run": "a run",
        "round": 3,
        "attempt": 0,
        "cohort": cohort,
        "members": tuple(cohort[rank] for rank in chosen),
        "dimension": 7,
        "bits": 10,
        "secret": secret,
        "committee": committee,
        "quorum": max(colluders + 2, size // 2 + 1),
        "colluders": colluders,
    }
    if by_slot:
        settings |= {"roster_digest": enrol_more(identities).digest, "is_by_slot": True}
    elif signed:
        settings |= {"roster_digest": enrol(identities).digest}
    return Session(**(settings | changes))


def identities_of(size: int) -> tuple[int, ...]:
    return tuple(7 + 3 * rank for rank in range(size))


@lru_cache(maxsize=8)
def enrol_more(clients: tuple[int, ...]) -> Roster:
    """A roster of these clients and as many others."""
    return enrol((*clients, *(client + 1 for client in clients)))


@lru_cache(maxsize=8)
def certified(clients: tuple[int, ...]) -> CertifiedRoster:
    """The same with certificates."""
    return certify(enrol_more(clients), AUTHORITY)


@dataclass
class LatticeFederation:
    """All clients of a session; `counts` says how many rows their logs have, `known` what members remember."""

    session: Session
    seed: bytes = b"lattice"
    vectors: Mapping[int, np.ndarray] = field(default_factory=dict)
    counts: Mapping[int, int] = field(default_factory=dict)
    known: Mapping[int, Mapping[int, object]] = field(default_factory=dict)
    loss: Loss = lambda _exchange, _client, answer: answer
    roster: Roster | None = None
    certified: CertifiedRoster | None = None
    head: Head | None = None
    members: dict[int, Member] = field(default_factory=dict)
    refused: dict[str, dict[int, PeerError]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.session.is_by_slot:
            self.certified = certified(identities_of(len(self.session.cohort)))
            self.roster = self.certified.roster
        if self.roster is None and self.session.is_signed:
            self.roster = enrol(self.session.cohort)
        self.statements: dict[int, bytes] = {}

    def rank(self, client: int) -> int:
        """The rank of a client by its identity, whatever the session calls it."""
        return self.session.rank(client if self.certified is None else self.roster.clients.index(client))

    def identity(self, name: int) -> int:
        return name if self.certified is None else self.certified.identity(name)

    def vector(self, client: int) -> np.ndarray:
        if client in self.vectors:
            return self.vectors[client]
        return self.session.ring.uniform(Stream(digest("vector", client)), self.session.dimension)

    def position(self, client: int, after: int = 0):
        if self.roster is None:
            return None
        return position_of(client, self.counts.get(client, 1) + after, self.roster)

    def participant(self, client: int) -> Participant:
        if self.roster is None:
            return Participant(self.session, client)

        def contains(count: int, head: bytes) -> bool:
            return count <= self.counts.get(client, 1) and head == head_of(client, count)

        history = History(self.position(client), contains, self.known.get(client, {}))
        return Participant(self.session, client, self.enrolment(client), history)

    def enrolment(self, client: int) -> Enrolment | SlotEnrolment:
        """What a client holds: the roster, or its head and a slip, as bytes that were read."""
        if self.certified is None:
            return Enrolment(enrolment_secret(client), self.roster)
        head = self.head = self.head or decode_head(
            encode_head(head_of_roster(self.roster), AUTHORITY), self.roster.authority
        )
        slip = self.certified.slip(self.roster.clients.index(client))
        return SlotEnrolment(enrolment_secret(client), decode_slip(slip, head, client)[0])

    def record(self, client: int, statement: bytes) -> None:
        if self.statements.setdefault(client, statement) != statement:
            raise PeerError("a member signs one set of survivors")

    def answer(self, exchange: str, client: int, data: bytes, model: bytes = MODEL) -> bytes:
        """What a client answers; a member's phase is kept as bytes, as a real one would."""
        own, entropy = self.participant(client), Entropy.replay(self.seed).child(exchange, client)
        if exchange == "convene":
            answer, member = own.convene(data, entropy)
            self.members[client] = member
            return answer
        if exchange == "contribute":
            body = messages.decode_request(data, own.depth)
            return own.contribute(
                body, model, lambda _task, _model: (self.vector(client), self.position(client, 1)), entropy
            )
        if exchange == "vouch":
            return own.vouch(data)
        if exchange == "trace":
            return own.trace(self.members[client], data)
        if exchange == "agree" or not self.session.is_signed:
            said = own.agree(self.members[client], data, lambda statement: self.record(client, statement))
        else:
            said = own.open(self.members[client], data)
        self.members[client] = Member.decode(self.session, client, said.member.encode(self.session, client))
        return said.answer

    def exchange(self, name: str):
        def run(requests):
            for client, data in requests.items():
                try:
                    answer = self.loss(name, client, self.answer(name, client, data))
                except PeerError as error:
                    self.refused.setdefault(name, {})[client] = error
                    continue
                if answer is not None:
                    yield client, answer

        return run

    def collect(self, name: str, phase) -> None:
        self.refused.setdefault(name, {}).update(collect(phase, self.exchange(name)))

    def gather(self, **invitations):
        """Run the exchanges up to the vectors; returns the phase in which members sign."""
        convening = Convening(
            Invitations(session=self.session, roster=self.certified or self.roster, **invitations)
        )
        self.collect("convene", convening)
        vouching = convening.close()
        self.collect("vouch", vouching)
        contributing = vouching.close(TASK, model_digest(MODEL))
        self.collect("contribute", contributing)
        return contributing.close(Entropy.replay(self.seed).child("server"))

    def open(self, agreeing):
        """Run the others; returns the sum."""
        self.collect("agree", agreeing)
        opening = agreeing.close()
        self.collect("open", opening)
        opened = opening.close()
        if isinstance(opened, Tracing):
            self.collect("trace", opened)
            opened = opened.close()
        return opened

    def expected(self, survivors) -> np.ndarray:
        total = np.zeros(self.session.dimension, np.uint32)
        for client in survivors:
            self.session.ring.add_into(total, self.vector(client))
        return total


_SIGNED: set[tuple[bytes, bytes, bytes]] = set()
_AGREED: dict[frozenset[bytes], bytes] = {}


def quick(monkeypatch) -> None:
    """Check a signature, and agree on a secret, once only: all clients of a test are in this process."""
    verify, agree = crypto.require_signature, crypto.Agreement.agree

    def require_signature(public: bytes, signature: bytes, statement: bytes) -> None:
        if (public, signature, statement) not in _SIGNED:
            verify(public, signature, statement)
            _SIGNED.add((public, signature, statement))

    def agreed(own: crypto.Agreement, public: bytes) -> bytes:
        pair = frozenset((own.public, public))
        if pair not in _AGREED:
            _AGREED[pair] = agree(own, public)
        return _AGREED[pair]

    monkeypatch.setattr(crypto, "require_signature", require_signature)
    monkeypatch.setattr(crypto.Agreement, "agree", agreed)


def small_committee(size: int, **changes) -> Committee:
    """The committee of a whole cohort, with other numbers where a test wants them."""
    chosen = choose_committee(size, Fraction(1, 10), 48, population=size, colluding=0, draws=0)
    return Committee(**({name: getattr(chosen, name) for name in chosen.__slots__} | changes))
