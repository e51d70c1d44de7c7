"""A client's half: an ordinary client speaks once, a member of the committee five times.

    exchange     takes                 durable before the answer leaves          answers with
    -----------  --------------------  ----------------------------------------  --------------------
    convene      INVITATION            a row: begun; the key, where it is kept   LATTICE_ADVERT       members
    vouch        LATTICE_ADVERTS                                                 LATTICE_VOUCHER      members
    contribute   LATTICE_REQUEST       a row: the charge, before data            LATTICE_CONTRIBUTION everyone
    agree        LATTICE_SURVIVORS     a row: what it signs                      LATTICE_SIGNATURE    members
    open         LATTICE_CERTIFICATE   the answer instead of the key        LATTICE_OPENING      members
    trace        LATTICE_TRACE_REQUEST                                           LATTICE_TRACE        members

Where nobody is enrolled nobody signs, and a member opens what it is told.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import KEY_BYTES, Entropy
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg import crypto, wire
from d2pfed.secagg.checks import enrolled, require_in_chain, require_quorum, ring_copy
from d2pfed.secagg.heads import Certificate, Certified, SlotEnrolment
from d2pfed.secagg.lattice import checks, masks, messages
from d2pfed.secagg.lattice import field as fields
from d2pfed.secagg.lattice import session as sessions
from d2pfed.secagg.lattice.field import PRIME
from d2pfed.secagg.lattice.messages import Advert, Contribution, Opened, RequestBody, SignedKey
from d2pfed.secagg.lattice.session import SEED_ELEMENTS, Request, Session
from d2pfed.secagg.pairwise.messages import Invitation, decode_invitation
from d2pfed.secagg.roster import POSITION_BYTES, Enrolment, History, Keys, Position, unpack_position
from d2pfed.secagg.wire import ClientId, MessageKind, Reader

_NAME_BYTES = 8  # of an identity or a rank, in what a member keeps

# From the bytes of task and model to the vector to be summed and where the log stands after the charge. It writes the
# charge, durably, before it touches any data, and refuses a second one of this attempt.
Contribute = Callable[[bytes, bytes], tuple[RingVector, Position | None]]
# Writes down, durably, which opening a member signs; refuses a second one of the same session.
Record = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Participant:
    """What a client has in every exchange of an attempt; `signed` is what a signed session needs.

    `name` is what the session calls it: its identity, or its slot.
    """

    session: Session
    client: ClientId
    enrolment: Enrolment | SlotEnrolment | None = None
    history: History | None = None
    name: ClientId = field(init=False)
    rank: int = field(init=False)
    signed: tuple[Enrolment | SlotEnrolment, History] | None = field(init=False)

    def __post_init__(self) -> None:
        if self.session.is_by_slot != isinstance(self.enrolment, SlotEnrolment):
            raise ConfigError("a session by slots is for clients that hold the head of a roster, and no other is")
        name = self.client if self.enrolment is None else self.enrolment.roster.name(self.client)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "rank", self.session.rank(name))
        signed = enrolled(self.session.roster_digest, self.client, self.enrolment, self.history)
        if signed is None and (self.enrolment is not None or self.history is not None):
            raise ConfigError("nobody signs in a session without a roster, got an enrolment or a history")
        object.__setattr__(self, "signed", signed)

    @property
    def depth(self) -> int | None:
        """Return the depth of the tree that cohorts are drawn from, if they are drawn verifiably."""
        return None if self.enrolment is None else self.enrolment.roster.depth

    def sign(self, statement: bytes) -> bytes:
        """Return this client's signature, empty where nobody is enrolled."""
        return b"" if self.enrolment is None else crypto.sign(self.enrolment.secret, statement)

    def contribute(self, body: RequestBody, model: bytes, contribute: Contribute, entropy: Entropy) -> bytes:
        """Answer a request: all that an ordinary client ever sends.

        Nothing secret outlives the call. `entropy` is fresh from the system and used once, here: a client that is asked
        twice must not mask two vectors alike.
        """
        self._check_invitation(body.invitation)
        request, vouchers = messages.read_request(self.session, body)
        checks.require_members(self.session, request.keys)
        if self.enrolment is not None:
            keys = self._keys({self.session.members[place]: each.certificate for place, each in vouchers.items()})
            checks.require_vouched(self.session, keys, request.keys, vouchers)
        own = crypto.Agreement(entropy.child("key").key)
        agreed = {place: own.agree(key) for place, key in request.keys.items()}
        checks.require_order(agreed)
        checks.require_model(request, model)
        contributed, position = contribute(request.task, model)
        checks.require_after_charge(None if self.history is None else self.history.position, position)
        vector = ring_copy(self.session.ring, self.session.dimension, contributed)
        bound = request.context, self.name, own.public, position
        signature = self.sign(sessions.contribution_statement(self.session, *bound))
        signed = SignedKey(own.public, position, signature)
        contribution = self._mask(request, vector, signed, agreed, entropy)
        return messages.encode_contribution(self.session, self.rank, contribution)

    def convene(self, invitation: bytes, entropy: Entropy) -> tuple[bytes, "Member"]:
        """Answer an invitation as a member of the committee; `entropy` is used once, here."""
        session, name = self.session, self.name
        if name not in session.members:
            raise PeerError(f"client {self.client} is not in the committee that it has computed")
        self._check_invitation(decode_invitation(invitation, self.depth))
        secret = entropy.child("d2pfed lattice member", session.digest, name).key
        public = crypto.Agreement(secret).public
        advert = Advert(public, self.sign(sessions.advert_statement(session, name, public)))
        known = {} if self.history is None else self.history.known
        if not session.is_by_slot:  # behind slots may be anyone whom it has met
            known = {client: known[client] for client in session.cohort if client in known}
        return wire.message(session, MessageKind.LATTICE_ADVERT, self.rank, advert.pack()), Member(secret, known)

    def vouch(self, data: bytes) -> bytes:
        """Sign that the members' keys are theirs: an ordinary client is shown a few such signatures, and no adverts."""
        session = self.session
        if self.enrolment is None:
            raise PeerError("nobody vouches where nobody is enrolled")
        adverts = messages.decode_adverts(session, self.rank, data)
        keys = self._keys({session.members[place]: each.certificate for place, each in adverts.items()})
        checks.require_adverts_signed(session, keys, adverts)
        statement = sessions.adverts_statement(session, {place: each.key for place, each in adverts.items()})
        return wire.message(session, MessageKind.LATTICE_VOUCHER, self.rank, self.sign(statement))

    def agree(self, member: "Member", data: bytes, record: Record) -> "MemberAnswer":
        """Sign one set of survivors, or name those whom this member has met later than they say they are."""
        session, rank = self.session, self.rank
        survivors = messages.decode_survivors(session, rank, data)
        require_quorum(session.quorum, len(survivors.signed))
        keys = {other: signed.key for other, signed in survivors.signed.items()}
        statement = sessions.opening_statement(session, survivors.context, survivors.nonce, keys)
        checks.require_one_statement(member.statement, statement)
        agreed = replace(member, statement=statement, context=survivors.context, keys=keys)
        if self.enrolment is None:
            return self._open(agreed)
        known = self._keys({session.cohort[other]: each.certificate for other, each in survivors.signed.items()})
        checks.require_contributions_signed(session, known, survivors.context, survivors.signed)
        claims = checks.not_later(session, known, survivors, member.known)
        if claims:
            return MemberAnswer(messages.encode_claims(session, rank, claims), member)
        record(statement)
        answer = wire.message(session, MessageKind.LATTICE_SIGNATURE, rank, self.sign(statement))
        met = {
            known.identity(session.cohort[other]): each.position
            for other, each in survivors.signed.items()
            if each.position
        }
        return MemberAnswer(answer, agreed, met)

    def open(self, member: "Member", data: bytes) -> "MemberAnswer":
        """Open what a certificate shows that enough members have signed; from then on there is no key."""
        if self.enrolment is None:
            raise PeerError("nothing is certified where nobody is enrolled")
        signers = messages.decode_certificate(self.session, self.rank, data)
        keys = self._keys({self.session.members[place]: each.certificate for place, each in signers.items()})
        checks.require_certificate(self.session, keys, member.statement, signers)
        return self._open(member)

    def trace(self, member: "Member", data: bytes) -> bytes:
        """Help to find who spoilt a sum, after it was opened."""
        wire.opened(self.session, MessageKind.LATTICE_TRACE_REQUEST, self.rank, data).end()
        checks.require_opened(member.trace)
        return member.trace

    def _keys(self, shown: Mapping[ClientId, Certificate | None]) -> Keys:
        """Return the keys that this client goes by: those of its roster, or those that certificates show."""
        if self.enrolment is None:
            raise ConfigError("nobody has keys in a session without a roster")
        roster = self.enrolment.roster
        if not isinstance(roster, Certified):
            return roster
        return roster.admit({slot: each for slot, each in shown.items() if each is not None})

    def _check_invitation(self, invitation: Invitation) -> None:
        """Refuse an invitation to another session, or one that shows that this client was rolled back."""
        invitation.require_agreed(self.session, self.name)
        if self.signed is not None:
            require_in_chain(*self.signed, self.client, invitation.remembered, "the server")

    def _mask(
        self,
        request: Request,
        vector: RingVector,
        signed: SignedKey,
        agreed: Mapping[int, bytes],
        entropy: Entropy,
    ) -> Contribution:
        """Hide a vector in place behind A s and a veil, and share what takes them off in a box for each member."""
        session, client, context = self.session, self.name, request.context
        secret = masks.draw_secret(session, entropy.child("secret"))
        seed = fields.elements(entropy.child("seed").stream(), SEED_ELEMENTS)
        masks.add_product(session, context, vector, secret)
        session.ring.add_masks_into(vector, [masks.veil(context, client, fields.pack(seed))], [])
        shares = masks.split(session, secret, seed, entropy.child("shares").stream())
        places = sorted(request.keys)
        pads = masks.pads(session, context, ((agreed[each], client, session.members[each]) for each in places))
        commitment = sessions.commitment(context, client, fields.pack(seed))
        boxes = (shares[places] + pads) % PRIME
        return Contribution(context, signed, commitment, boxes, session.ring.pack(vector))

    def _open(self, member: "Member") -> "MemberAnswer":
        if member.opening:
            return MemberAnswer(member.opening, member)
        session, own = self.session, crypto.Agreement(member.secret)
        keys = sorted(member.keys.items())
        ends = ((own.agree(key), session.cohort[rank], self.name) for rank, key in keys)
        pads, count = masks.pads(session, member.context, ends), session.polynomials
        opened = Opened(pads[:, :count].sum(axis=0) % PRIME, pads[:, count])
        coefficients = np.append(sessions.trace_coefficients(session, member.statement), (0, 1))
        answer = messages.encode_opening(session, self.rank, opened)
        trace = messages.encode_trace(session, self.rank, pads @ coefficients % PRIME)
        return MemberAnswer(answer, Member(statement=member.statement, opening=answer, trace=trace))


@dataclass(frozen=True, slots=True)
class Member:
    """What a member keeps between exchanges, in volatile storage: a key until it has opened, its answers afterwards."""

    secret: bytes = field(default=b"", repr=False)
    known: Mapping[ClientId, Position] = field(default_factory=dict)  # where it had met clients before its advert
    statement: bytes = b""  # what it has signed
    context: bytes = b""
    keys: Mapping[int, bytes] = field(default_factory=dict)  # of the survivors, by rank
    opening: bytes = b""
    trace: bytes = b""

    def encode(self, session: Session, client: ClientId) -> bytes:
        """Return the bytes to keep; restoring old ones breaks the guarantee."""
        known = _pack_named({other: self.known[other].pack() for other in self.known})
        keys = _pack_named(self.keys)
        parts = self.secret, known, self.statement, self.context, keys, self.opening, self.trace
        sized = (wire.pack_integer(len(part), 4) + part for part in parts)
        return wire.frame(MessageKind.SAVED_LATTICE_MEMBER, session.digest, client, *sized)

    @staticmethod
    def decode(session: Session, client: ClientId, data: bytes) -> "Member":
        """Read the bytes that were kept."""
        with wire.unframe(data, MessageKind.SAVED_LATTICE_MEMBER, session.digest, client) as reader:
            secret, known, *parts = (reader.take(reader.integer(4)) for _ in range(7))
        statement, context, keys, opening, trace = parts
        positions = {other: unpack_position(packed) for other, packed in _named(known, POSITION_BYTES).items()}
        return Member(secret, positions, statement, context, _named(keys, KEY_BYTES), opening, trace)


def _pack_named(records: Mapping[int, bytes]) -> bytes:
    return b"".join(wire.pack_integer(name, _NAME_BYTES) + records[name] for name in sorted(records))


def _named(packed: bytes, size: int) -> dict[int, bytes]:
    with Reader(memoryview(packed)) as reader:
        return {reader.integer(_NAME_BYTES): reader.take(size) for _ in range(len(packed) // (_NAME_BYTES + size))}


@dataclass(frozen=True, slots=True)
class MemberAnswer:
    """A member's answer, what to keep before it leaves, and where the survivors stood."""

    answer: bytes
    member: Member
    met: Mapping[ClientId, Position] = field(default_factory=dict)
