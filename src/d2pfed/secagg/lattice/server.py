"""The server's half of the lattice protocol.

    Convening -> Vouching -> Contributing -> Agreeing -> Opening -> the sum, or Tracing -> the sum

All clients contribute once; only members of the committee are asked again. The survivors are final when Contributing is
closed. What fails before is not charged by the server; what fails after it is.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from d2pfed.errors import ConfigError, PeerError, TooFewClients
from d2pfed.numerics.randomness import Entropy
from d2pfed.secagg import crypto, wire
from d2pfed.secagg.checks import require_context, require_current_claim, require_later_position, require_signed
from d2pfed.secagg.draws import Opening as DrawOpening
from d2pfed.secagg.heads import Certificate, CertifiedRoster
from d2pfed.secagg.lattice import checks, messages
from d2pfed.secagg.lattice import session as sessions
from d2pfed.secagg.lattice.field import Elements
from d2pfed.secagg.lattice.messages import Advert, Opened, SignedKey, Signer, Survivors
from d2pfed.secagg.lattice.opening import Boxes, MaskedTotal, Opener
from d2pfed.secagg.lattice.session import Request, Session
from d2pfed.secagg.pairwise.messages import encode_invitation
from d2pfed.secagg.pairwise.server import Sum
from d2pfed.secagg.roster import Position, Roster, verify_position
from d2pfed.secagg.wire import HEADER_BYTES, ClientId, MessageKind, Outbox, Subset, subset_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitations:
    """What the server brings to an attempt.

    Attributes:
        session: what is agreed on.
        roster: who is enrolled, with all certificates where clients are named by slots; None where nobody is.
        opening: proof of the draw, where cohorts are drawn verifiably.
        remembered: where the server has met each client last.
        excluded: clients that were found to cheat in this run; they count as dropped out.
        identities: those of the cohort, by rank. The server's callers know no slots.
    """

    session: Session
    roster: Roster | CertifiedRoster | None = None
    opening: DrawOpening | None = None
    remembered: Mapping[ClientId, Position] = field(default_factory=dict)
    excluded: Collection[ClientId] = ()
    identities: tuple[ClientId, ...] = field(init=False)

    def __post_init__(self) -> None:
        session, roster = self.session, self.roster
        digest = None if roster is None else roster.digest
        if session.is_signed != (digest == session.roster_digest):
            raise ConfigError("a signed session belongs to the roster of its clients, and no other has one")
        if session.is_by_slot != isinstance(roster, CertifiedRoster):
            raise ConfigError("a session by slots needs its roster's certificates, and no other has some")
        identities = session.cohort if roster is None else tuple(map(roster.identity, session.cohort))
        object.__setattr__(self, "identities", identities)

    def asked(self, names: Collection[ClientId]) -> Subset:
        """Return those of these names that did not cheat, as a subset of the cohort."""
        ranks = [self.session.rank(name) for name in names]
        left = [rank for rank in ranks if self.identities[rank] not in self.excluded]
        return subset_of(len(self.session.cohort), left)

    def certificate(self, name: ClientId) -> Certificate | None:
        """Return the certificate of a slot; None where clients are named by their identities."""
        return self.roster.certificate(name) if isinstance(self.roster, CertifiedRoster) else None


class Convening:
    """First exchange: ask the committee for its keys. Nothing is charged if too few are there."""

    def __init__(self, invitations: Invitations) -> None:
        self._invitations = invitations
        self._adverts: dict[int, Advert] = {}
        session, opening, remembered = invitations.session, invitations.opening, invitations.remembered
        self.outbox = Outbox(
            invitations.identities,
            invitations.asked(session.members),
            lambda rank: encode_invitation(session, rank, opening, remembered.get(invitations.identities[rank])),
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a member's advert."""
        session, roster, rank = self._invitations.session, self._invitations.roster, self.outbox.admit(client)
        with wire.opened(session, MessageKind.LATTICE_ADVERT, rank, data) as reader:
            advert, place = messages.read_advert(session, reader), session.place(session.cohort[rank])
        if roster is not None:
            checks.require_adverts_signed(session, roster, {place: advert})
        crypto.require_order(advert.key)
        self._adverts[place] = replace(advert, certificate=self._invitations.certificate(session.cohort[rank]))

    def close(self) -> "Vouching":
        """Go on with the members that are there."""
        session, least = self._invitations.session, self._invitations.session.committee.least
        if len(self._adverts) < least:
            ranks = [session.rank(session.members[place]) for place in sorted(self._adverts)]
            there = tuple(self._invitations.identities[rank] for rank in ranks)
            raise TooFewClients(
                f"at least {least} members of the committee must be there, got {len(there)}", there
            )
        return Vouching(self._invitations, self._adverts)


class Vouching:
    """Second exchange: members vouch for each other's keys, so that nobody else needs the adverts.

    Asks nobody where nobody is enrolled. Nothing is charged if too few vouch.
    """

    def __init__(self, invitations: Invitations, adverts: Mapping[int, Advert]) -> None:
        self._invitations = invitations
        self._keys = {place: advert.key for place, advert in adverts.items()}
        self._vouchers: dict[int, Signer] = {}
        session = invitations.session
        self._statement = sessions.adverts_statement(session, self._keys)
        self._least = session.committee.vouchers if session.is_signed else 0
        packed = messages.pack_adverts(session, adverts)
        self.outbox = Outbox(
            invitations.identities,
            session.seated(adverts if session.is_signed else ()),
            lambda rank: wire.message(session, MessageKind.LATTICE_ADVERTS, rank, packed),
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a member's signature, unless enough have come: a client is shown no more than it needs."""
        session, roster, rank = self._invitations.session, self._invitations.roster, self.outbox.admit(client)
        with wire.opened(session, MessageKind.LATTICE_VOUCHER, rank, data) as reader:
            signature = reader.take(crypto.SIGNATURE_BYTES)
        if roster is not None and len(self._vouchers) < self._least:
            require_signed(session, roster, {rank: (self._statement, signature)})
            name = session.cohort[rank]
            self._vouchers[session.place(name)] = Signer(signature, self._invitations.certificate(name))

    def close(self, task: bytes, model_digest: bytes) -> "Contributing":
        """Go on with as many vouchers as a client needs."""
        if len(self._vouchers) < self._least:
            raise TooFewClients(f"at least {self._least} members must vouch for keys, got {len(self._vouchers)}")
        request = Request(self._invitations.session, self._keys, task, model_digest)
        return Contributing(self._invitations, request, self._vouchers)


class Contributing:
    """Third exchange: ask everyone, and add up vectors as they come."""

    def __init__(self, invitations: Invitations, request: Request, vouchers: Mapping[int, Signer]) -> None:
        self._invitations, self._request = invitations, request
        session, opening, remembered = invitations.session, invitations.opening, invitations.remembered
        packed = messages.pack_request(request, vouchers, opening)
        self._total = np.zeros(session.dimension, np.uint32)
        self._signed: dict[int, SignedKey] = {}
        self._boxes: dict[int, Boxes] = {}
        self._commitments: dict[int, bytes] = {}
        self.positions: dict[ClientId, Position] = {}  # where clients stand, for the server to remember
        self.outbox = Outbox(
            invitations.identities,
            invitations.asked(session.cohort),
            lambda rank: messages.encode_requested(
                request, rank, packed, remembered.get(invitations.identities[rank])
            ),
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's contribution."""
        known, session, rank = self._invitations, self._invitations.session, self.outbox.admit(client)
        said = messages.decode_contribution(session, rank, len(self._request.keys), data)
        signed, position, roster = said.signed, said.signed.position, known.roster
        require_context(said.context, self._request.context)
        crypto.require_order(signed.key)
        if roster is not None and position is not None:
            checks.require_contributions_signed(session, roster, said.context, {rank: signed})
            verify_position(position, roster.key(session.cohort[rank]), roster.authority, client)
            require_later_position(client, position, known.remembered.get(client))
        session.ring.add_packed_into(self._total, said.vector)
        if position is not None:
            self.positions[client] = position
        certificate = known.certificate(session.cohort[rank])
        self._signed[rank] = SignedKey(signed.key, position, signed.signature, certificate)
        self._boxes[rank] = said.boxes.astype(np.uint16)  # a cohort's are kept until the end
        self._commitments[rank] = said.commitment

    def close(self, entropy: Entropy) -> "Agreeing":
        """Settle who has survived; it is final. `entropy` is used once, here."""
        session, identities = self._invitations.session, self._invitations.identities
        left = tuple(identities[rank] for rank in sorted(self._signed))
        if len(left) < session.quorum:
            raise TooFewClients(f"at least {session.quorum} clients must be left, got {len(left)}", left)
        total = MaskedTotal(
            request=self._request,
            identities=identities,
            nonce=entropy.child("d2pfed lattice nonce", session.digest).key,
            keys={rank: each.key for rank, each in self._signed.items()},
            boxes=self._boxes,
            commitments=self._commitments,
            total=self._total & np.uint32(session.ring.modulus - 1),
        )
        return Agreeing(total, self._signed, self._invitations, entropy)


class Agreeing:
    """Fourth exchange: members sign who has survived. Asks nobody where nobody is enrolled.

    `claims` is where members have met clients later than these say they are: to be remembered.
    """

    def __init__(
        self, total: MaskedTotal, signed: Mapping[int, SignedKey], invitations: Invitations, entropy: Entropy
    ) -> None:
        self._total, self._invitations, self._entropy = total, invitations, entropy
        self._survivors = survivors = Survivors(total.request.context, total.nonce, signed)
        self._signers: dict[int, Signer] = {}
        self.claims: dict[ClientId, Position] = {}
        session, packed = total.request.session, messages.pack_survivors(total.request.session, survivors)
        self.survivors = total.survivors
        self.outbox = Outbox(
            total.identities,
            session.seated(total.request.keys if session.is_signed else ()),
            lambda rank: wire.message(session, MessageKind.LATTICE_SURVIVORS, rank, packed),
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a member's signature, or its claims."""
        session, roster, rank = self._total.request.session, self._invitations.roster, self.outbox.admit(client)
        if roster is None:
            raise PeerError("nobody signs where nobody is enrolled")
        said = messages.decode_signature(session, rank, data)
        if isinstance(said, bytes):
            require_signed(session, roster, {rank: (self._total.statement, said)})
            name = session.cohort[rank]
            self._signers[session.place(name)] = Signer(said, self._invitations.certificate(name))
            return
        for other, claim in said.items():
            name, shown = self._total.identities[other], self._survivors.signed.get(other)
            verify_position(claim, roster.key(session.cohort[other]), roster.authority, name)
            require_current_claim(name, claim, None if shown is None else shown.position)
            if name not in self.claims or claim.count > self.claims[name].count:
                self.claims[name] = claim

    def close(self) -> "Opening":
        """Go on if enough members have signed."""
        least = self._total.request.session.committee.certificate
        if self._invitations.roster is not None and len(self._signers) < least:
            raise TooFewClients(f"at least {least} members must sign the survivors, got {len(self._signers)}")
        return Opening(self._total, self._survivors, self._signers, self._entropy)


class Opening:
    """Fifth exchange: members give the sums of their pads."""

    def __init__(
        self, total: MaskedTotal, survivors: Survivors, signers: Mapping[int, Signer], entropy: Entropy
    ) -> None:
        self._total, self._entropy = total, entropy
        self._answers: dict[int, Opened] = {}
        session = total.request.session
        self.survivors = total.survivors

        if session.is_signed:
            kind, asked = MessageKind.LATTICE_CERTIFICATE, session.seated(signers)
            body = messages.encode_certificate(session, 0, signers)[HEADER_BYTES:]  # the same for all
        else:
            kind, asked = MessageKind.LATTICE_SURVIVORS, session.seated(total.request.keys)
            body = messages.pack_survivors(session, survivors)
        self.outbox = Outbox(total.identities, asked, lambda rank: wire.message(session, kind, rank, body))

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a member's pads."""
        session, rank = self._total.request.session, self.outbox.admit(client)
        opened = messages.decode_opening(session, rank, len(self.survivors), data)
        self._answers[session.place(session.cohort[rank])] = opened

    def close(self) -> "Sum | Tracing":
        """Return the sum, or the exchange that finds who spoilt it."""
        session = self._total.request.session
        if len(self._answers) < session.committee.openers:
            raise TooFewClients(f"{session.committee.openers} members must open a sum, got {len(self._answers)}")
        opener = Opener(self._total, self._answers, self._entropy.child("d2pfed lattice check", session.digest))
        opened = opener.open()
        return Tracing(self._total, opener) if opened is None else Sum(opened, opener.blamed())


class Tracing:
    """Sixth exchange, only if a sum was spoilt: find who disagrees with whom, and open it without them."""

    def __init__(self, total: MaskedTotal, opener: Opener) -> None:
        self._total, self._opener = total, opener
        self._traces: dict[int, Elements] = {}
        session = total.request.session
        self.outbox = Outbox(
            total.identities,
            session.seated(opener.answered),
            lambda rank: wire.message(session, MessageKind.LATTICE_TRACE_REQUEST, rank),
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a member's combined pads."""
        session, rank = self._total.request.session, self.outbox.admit(client)
        combined = messages.decode_trace(session, rank, len(self._total.keys), data)
        self._traces[session.place(session.cohort[rank])] = combined

    def close(self) -> Sum:
        """Return the sum of the survivors, opened without members in dispute; or find the attempt void."""
        vector = self._opener.open_traced(self._traces)
        return Sum(vector, self._opener.blamed())
