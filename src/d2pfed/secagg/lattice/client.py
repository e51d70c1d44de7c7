"""A client's half: an ordinary client speaks once, a member of the committee four times.

    exchange     takes                 durable before the answer leaves          answers with
    -----------  --------------------  ----------------------------------------  --------------------
    convene      INVITATION            a row: begun; the key, where it is kept   LATTICE_ADVERT       members
    contribute   LATTICE_REQUEST       a row: the charge, before data            LATTICE_CONTRIBUTION everyone
    agree        LATTICE_SURVIVORS     a row: what it signs                      LATTICE_SIGNATURE    members
    open         LATTICE_CERTIFICATE   the answer in the place of the key        LATTICE_OPENING      members
    trace        LATTICE_TRACE_REQUEST                                           LATTICE_TRACE        members

Where nobody is enrolled nobody signs, and a member opens what it is told.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import KEY_BYTES, Entropy
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg import crypto
from d2pfed.secagg.lattice import checks, masks, messages
from d2pfed.secagg.lattice import field as fields
from d2pfed.secagg.lattice import session as sessions
from d2pfed.secagg.lattice.field import PRIME
from d2pfed.secagg.lattice.messages import Advert, Contribution, Opened, RequestBody
from d2pfed.secagg.lattice.session import SEED_ELEMENTS, Session
from d2pfed.secagg.pairwise.checks import is_own, require_server_position, ring_copy
from d2pfed.secagg.pairwise.messages import Invitation, decode_invitation
from d2pfed.secagg.position import POSITION_BYTES, History, Position, unpack_position
from d2pfed.secagg.roster import Enrolment
from d2pfed.secagg.wire import ClientId, MessageKind, Reader, frame, pack_integer, unframe

# From the bytes of task and model to the vector to be summed and where the log stands after the charge. It writes the
# charge, durably, before it touches any data, and refuses a second one of this attempt.
Contribute = Callable[[bytes, bytes], tuple[RingVector, Position | None]]
# Writes down, durably, which opening a member signs; refuses a second one of the same session.
Record = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Participant:
    """What a client has in every exchange of an attempt."""

    session: Session
    client: ClientId
    enrolment: Enrolment | None = None
    history: History | None = None

    def __post_init__(self) -> None:
        self.session.rank(self.client)
        if self.session.is_signed:
            if self.enrolment is None or self.history is None:
                raise ConfigError("a signed session needs an enrolment and a history")
            self.enrolment.require_self(self.client)
            if self.enrolment.roster.digest != self.session.roster_digest:
                raise ConfigError("a signed session belongs to the roster of its clients, got another one")
        elif self.enrolment is not None or self.history is not None:
            raise ConfigError("nobody signs in a session without a roster, got an enrolment or a history")

    @property
    def depth(self) -> int | None:
        """Return the depth of the tree that cohorts are drawn from, if they are drawn verifiably."""
        return None if self.enrolment is None else self.enrolment.roster.depth

    def sign(self, statement: bytes) -> bytes:
        """Return this client's signature, empty where nobody is enrolled."""
        return b"" if self.enrolment is None else crypto.sign(self.enrolment.secret, statement)

    def check_invitation(self, invitation: Invitation) -> None:
        """Refuse an invitation to another session, or one that shows that this client was rolled back."""
        checks.require_session(self.session, self.client, invitation)
        if self.enrolment is not None and self.history is not None:
            require_server_position(self.enrolment, self.history, self.client, invitation.remembered)

    def contribute(self, body: RequestBody, model: bytes, contribute: Contribute, entropy: Entropy) -> bytes:
        """Answer a request: all that an ordinary client ever sends.

        Nothing secret outlives the call. `entropy` is fresh from the system and used once, here: a client that is asked
        twice must not mask two vectors alike.
        """
        session, client = self.session, self.client
        self.check_invitation(body.invitation)
        request, adverts = messages.read_request(session, body)
        checks.require_members(session, adverts)
        if self.enrolment is not None:
            checks.require_adverts_signed(session, self.enrolment.roster, adverts)
        for advert in adverts.values():
            crypto.require_order(advert.key)
        checks.require_model(request, model)
        contributed, position = contribute(request.task, model)
        checks.require_after_charge(None if self.history is None else self.history.position, position)
        vector = ring_copy(session.ring, session.dimension, contributed)

        context = request.context
        secret = masks.draw_secret(session, entropy.child("secret"))
        seed = fields.elements(entropy.child("seed").stream(), SEED_ELEMENTS)
        own = crypto.Agreement(entropy.child("key").key)
        masks.add_product(session, context, vector, secret)
        session.ring.add_masks_into(vector, [masks.veil(context, client, fields.pack(seed))], [])
        shares = masks.split(session, secret, seed, entropy.child("shares").stream())
        boxes = np.array(
            [
                shares[place]
                + masks.pads(session, own.agree(adverts[place].key), context, client, session.members[place])
                for place in sorted(adverts)
            ]
        )
        packed = b"" if position is None else position.pack()
        statement = sessions.contribution_statement(session, context, client, own.public, packed)
        contribution = Contribution(
            context=context,
            key=own.public,
            commitment=sessions.commitment(context, client, fields.pack(seed)),
            position=position,
            signature=self.sign(statement),
            boxes=boxes % PRIME,
            vector=vector,
        )
        return messages.encode_contribution(session, client, contribution)

    def convene(self, invitation: bytes, entropy: Entropy) -> tuple[bytes, "Member"]:
        """Answer an invitation as a member of the committee; `entropy` is used once, here."""
        if self.client not in self.session.members:
            raise PeerError(f"client {self.client} is not in the committee that it has computed")
        self.check_invitation(decode_invitation(invitation, self.depth))
        secret = entropy.child("d2pfed lattice member", self.session.digest, self.client).key
        own = crypto.Agreement(secret)
        signature = self.sign(sessions.advert_statement(self.session, self.client, own.public))
        known = {} if self.history is None else dict(self.history.known)
        member = Member(
            secret, {rank: known[name] for rank, name in enumerate(self.session.cohort) if name in known}
        )
        return messages.encode_advert(self.session, self.client, Advert(own.public, signature)), member

    def agree(self, member: "Member", data: bytes, record: Record) -> "MemberAnswer":
        """Sign one set of survivors, or name those whom this member has met later than they say they are."""
        session = self.session
        survivors = messages.decode_survivors(session, self.client, data)
        checks.require_quorum(session, survivors)
        keys = {rank: signed.key for rank, signed in survivors.signed.items()}
        statement = sessions.opening_statement(session, survivors.context, survivors.nonce, keys)
        checks.require_one_statement(member.statement, statement)
        if self.enrolment is None:
            return self._open(replace(member, statement=statement, context=survivors.context, keys=keys))
        checks.require_contributions_signed(session, self.enrolment.roster, survivors)
        enrolled, later = self.enrolment, checks.not_later(survivors, member.known)
        # what its owner did not sign is ignored: a colluder could plant it, and stop every attempt by it
        claims = {rank: known for rank, known in later.items() if is_own(enrolled, session.cohort[rank], known)}
        if claims:
            return MemberAnswer(messages.encode_signature(session, self.client, b"", claims), member)
        record(statement)
        signed = replace(member, statement=statement, context=survivors.context, keys=keys)
        answer = messages.encode_signature(session, self.client, self.sign(statement))
        met = {session.cohort[rank]: each.position for rank, each in survivors.signed.items() if each.position}
        return MemberAnswer(answer, signed, met)

    def open(self, member: "Member", data: bytes) -> "MemberAnswer":
        """Open what a certificate shows that enough members have signed; from then on there is no key."""
        if self.enrolment is None:
            raise PeerError("nothing is certified where nobody is enrolled")
        signatures = messages.decode_certificate(self.session, self.client, data)
        checks.require_certificate(self.session, self.enrolment.roster, member.statement, signatures)
        return self._open(member)

    def trace(self, member: "Member", data: bytes) -> bytes:
        """Help to find who spoilt a sum, after it was opened."""
        messages.decode_trace_request(self.session, self.client, data)
        checks.require_opened(member.trace)
        return member.trace

    def _open(self, member: "Member") -> "MemberAnswer":
        if member.opening:
            return MemberAnswer(member.opening, member)
        session, own = self.session, crypto.Agreement(member.secret)
        count = session.polynomials
        coefficients = np.append(sessions.trace_coefficients(session, member.statement), (0, 1))
        sums, seeds, combined = np.zeros(count, np.int64), list[int](), list[int]()
        for rank in sorted(member.keys):
            shared, client = own.agree(member.keys[rank]), session.cohort[rank]
            pads = masks.pads(session, shared, member.context, client, self.client)
            sums += pads[:count]
            seeds.append(int(pads[count]))
            combined.append(int(pads @ coefficients % PRIME))
        opened = Opened(sums % PRIME, np.array(seeds))
        answer = messages.encode_opening(session, self.client, opened)
        trace = messages.encode_trace(session, self.client, np.array(combined))
        return MemberAnswer(answer, Member(statement=member.statement, opening=answer, trace=trace))


@dataclass(frozen=True, slots=True)
class Member:
    """What a member keeps between exchanges, in volatile storage: a key until it has opened, its answers afterwards."""

    secret: bytes = field(default=b"", repr=False)
    known: Mapping[int, Position] = field(
        default_factory=dict
    )  # by rank: where it had met clients before its advert
    statement: bytes = b""  # what it has signed
    context: bytes = b""
    keys: Mapping[int, bytes] = field(default_factory=dict)  # of the survivors, by rank
    opening: bytes = b""
    trace: bytes = b""

    def encode(self, session: Session, client: ClientId) -> bytes:
        """Return the bytes to keep; whoever restores old ones breaks the guarantee."""
        known = b"".join(pack_integer(rank, 4) + self.known[rank].pack() for rank in sorted(self.known))
        keys = b"".join(pack_integer(rank, 4) + self.keys[rank] for rank in sorted(self.keys))
        parts = self.secret, known, self.statement, self.context, keys, self.opening, self.trace
        sized = (pack_integer(len(part), 4) + part for part in parts)
        return frame(MessageKind.SAVED_LATTICE_MEMBER, session.digest, client, *sized)

    @staticmethod
    def decode(session: Session, client: ClientId, data: bytes) -> "Member":
        """Read the bytes that were kept."""
        reader = unframe(data, MessageKind.SAVED_LATTICE_MEMBER, session.digest, client)
        secret, known, statement, context, keys, opening, trace = (
            reader.take(reader.integer(4)) for _ in range(7)
        )
        reader.end()
        return Member(
            secret,
            {rank: unpack_position(body) for rank, body in _by_rank(known, POSITION_BYTES)},
            statement,
            context,
            dict(_by_rank(keys, KEY_BYTES)),
            opening,
            trace,
        )


def _by_rank(packed: bytes, size: int) -> list[tuple[int, bytes]]:
    records = Reader(memoryview(packed)).records(len(packed) // (4 + size), 4 + size)
    return [(int.from_bytes(record[:4], "little"), record[4:]) for record in records]


@dataclass(frozen=True, slots=True)
class MemberAnswer:
    """A member's answer, what to keep before it leaves, and where the survivors stood."""

    answer: bytes
    member: Member
    met: Mapping[ClientId, Position] = field(default_factory=dict)
