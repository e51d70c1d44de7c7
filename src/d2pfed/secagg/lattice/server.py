"""The server's half of the lattice protocol.

    Convening -> Contributing -> Agreeing -> Opening -> the sum, or Tracing -> the sum

All clients contribute once; only members of the committee are asked again. The survivors are final when Contributing is
closed. What fails before is not charged by the server; what fails after it is.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from d2pfed.errors import ConfigError, PeerError, TooFewClients
from d2pfed.numerics.randomness import Entropy
from d2pfed.secagg import crypto
from d2pfed.secagg.draws import Opening as DrawOpening
from d2pfed.secagg.exchange import Outbox, PendingAnswers
from d2pfed.secagg.lattice import checks, messages
from d2pfed.secagg.lattice.field import Elements
from d2pfed.secagg.lattice.messages import Advert, Opened, SignedKey, Survivors
from d2pfed.secagg.lattice.opening import Boxes, MaskedTotal, Opener
from d2pfed.secagg.lattice.session import Request, Session
from d2pfed.secagg.pairwise.messages import encode_invitation
from d2pfed.secagg.pairwise.unmask import Sum
from d2pfed.secagg.position import Position, verify_position
from d2pfed.secagg.roster import Roster
from d2pfed.secagg.wire import ClientId, Subset, subset_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitations:
    """What the server brings to an attempt.

    Attributes:
        session: what is agreed on.
        roster: who is enrolled; None where nobody is.
        opening: proof of the draw, where cohorts are drawn verifiably.
        remembered: where the server has met each client last.
        excluded: clients that were found to cheat in this run; they count as dropped out.
    """

    session: Session
    roster: Roster | None = None
    opening: DrawOpening | None = None
    remembered: Mapping[ClientId, Position] = field(default_factory=dict)
    excluded: Collection[ClientId] = ()

    def __post_init__(self) -> None:
        digest = None if self.roster is None else self.roster.digest
        if self.session.is_signed != (digest == self.session.roster_digest):
            raise ConfigError("a signed session belongs to the roster of its clients, and no other has one")

    def asked(self, clients: Collection[ClientId]) -> Subset:
        """Return these clients without those that cheated, as a subset of the cohort."""
        ranks = [self.session.rank(client) for client in clients if client not in self.excluded]
        return subset_of(len(self.session.cohort), ranks)


class Convening:
    """First exchange: ask the committee for its keys. Nothing is charged if too few are there."""

    def __init__(self, invitations: Invitations) -> None:
        self._invitations = invitations
        session = invitations.session
        self._pending = PendingAnswers(session, invitations.asked(session.members))
        self._adverts: dict[int, Advert] = {}

    def outbox(self) -> Outbox:
        """Return the invitations."""
        session, known = self._invitations.session, self._invitations
        return self._pending.outbox(
            lambda rank: encode_invitation(
                session, rank, known.opening, known.remembered.get(session.cohort[rank])
            )
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a member's advert."""
        session, roster = self._invitations.session, self._invitations.roster
        self._pending.admit(client)
        advert, place = messages.decode_advert(session, client, data), session.place(client)
        if roster is not None:
            checks.require_adverts_signed(session, roster, {place: advert})
        crypto.require_order(advert.key)
        self._adverts[place] = advert

    def close(self, task: bytes, model_digest: bytes) -> "Contributing":
        """Go on with the members that are there."""
        session, least = self._invitations.session, self._invitations.session.committee.least
        if len(self._adverts) < least:
            there = tuple(session.members[place] for place in sorted(self._adverts))
            raise TooFewClients(
                f"at least {least} members of the committee must be there, got {len(there)}", there
            )
        keys = {place: advert.key for place, advert in self._adverts.items()}
        return Contributing(self._invitations, Request(session, keys, task, model_digest), self._adverts)


class Contributing:
    """Second exchange: ask everyone, and add up vectors as they come."""

    def __init__(self, invitations: Invitations, request: Request, adverts: Mapping[int, Advert]) -> None:
        self._invitations = invitations
        self._request = request
        self._adverts = adverts
        session = invitations.session
        self._pending = PendingAnswers(session, invitations.asked(session.cohort))
        self._total = np.zeros(session.dimension, np.uint32)
        self._signed: dict[int, SignedKey] = {}
        self._boxes: dict[int, Boxes] = {}
        self._commitments: dict[int, bytes] = {}

    @property
    def positions(self) -> dict[ClientId, Position]:
        """Return where the clients that contributed stand, for the server to remember."""
        cohort = self._invitations.session.cohort
        return {cohort[rank]: each.position for rank, each in self._signed.items() if each.position is not None}

    def outbox(self) -> Outbox:
        """Return the requests."""
        known, cohort = self._invitations, self._invitations.session.cohort
        return self._pending.outbox(
            lambda rank: messages.encode_request(
                self._request, cohort[rank], self._adverts, known.opening, known.remembered.get(cohort[rank])
            )
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's contribution."""
        known, session = self._invitations, self._invitations.session
        rank = self._pending.admit(client)
        contribution = messages.decode_contribution(session, client, len(self._adverts), data)
        if contribution.context != self._request.context:
            raise PeerError("a vector was masked for another model, task or committee")
        crypto.require_order(contribution.key)
        signed = SignedKey(contribution.key, contribution.position, contribution.signature)
        if known.roster is not None and signed.position is not None:
            one = Survivors(contribution.context, b"", {rank: signed})
            checks.require_contributions_signed(session, known.roster, one)
            verify_position(signed.position, known.roster.key(client), known.roster.authority, client)
            if client in known.remembered and checks.not_later(one, {rank: known.remembered[client]}):
                raise PeerError(f"client {client} has come no further than where it was met before")
        session.ring.add_into(self._total, contribution.vector)
        self._signed[rank] = signed
        self._boxes[rank] = contribution.boxes.astype(np.uint16)  # a cohort's are kept until the end
        self._commitments[rank] = contribution.commitment

    def close(self, entropy: Entropy) -> "Agreeing":
        """Settle who has survived; it is final. `entropy` is used once, here."""
        session = self._invitations.session
        left = session.names(self._signed)
        if len(left) < session.quorum:
            raise TooFewClients(f"at least {session.quorum} clients must be left, got {len(left)}", left)
        nonce = entropy.child("d2pfed lattice nonce", session.digest).key
        total = MaskedTotal(
            request=self._request,
            nonce=nonce,
            keys={rank: each.key for rank, each in self._signed.items()},
            boxes=self._boxes,
            commitments=self._commitments,
            total=self._total,
        )
        return Agreeing(total, self._signed, self._invitations.roster, entropy)


class Agreeing:
    """Third exchange: members sign who has survived. Asks nobody where nobody is enrolled."""

    def __init__(
        self, total: MaskedTotal, signed: Mapping[int, SignedKey], roster: Roster | None, entropy: Entropy
    ) -> None:
        self._total = total
        self._survivors = Survivors(total.request.context, total.nonce, signed)
        self._roster = roster
        self._entropy = entropy
        session = total.request.session
        asked = (
            [session.rank(session.members[place]) for place in total.request.keys] if roster is not None else []
        )
        self._pending = PendingAnswers(session, subset_of(len(session.cohort), asked))
        self._signatures: dict[int, bytes] = {}
        self._claims: dict[ClientId, Position] = {}

    @property
    def survivors(self) -> tuple[ClientId, ...]:
        """Return whose vectors are in the sum."""
        return self._total.request.session.names(self._survivors.signed)

    @property
    def claims(self) -> Mapping[ClientId, Position]:
        """Return where members have met clients later than these say they are: to be remembered."""
        return MappingProxyType(self._claims)

    def outbox(self) -> Outbox:
        """Return the survivors to be signed."""
        session = self._total.request.session
        return self._pending.outbox(
            lambda rank: messages.encode_survivors(session, session.cohort[rank], self._survivors)
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a member's signature, or its claims."""
        session, roster = self._total.request.session, self._roster
        self._pending.admit(client)
        said = messages.decode_signature(session, client, data)
        if roster is None:
            raise PeerError("nobody signs where nobody is enrolled")
        if isinstance(said, bytes):
            crypto.require_signature(roster.key(client), said, self._total.statement)
            self._signatures[session.place(client)] = said
            return
        checks.require_claims(self._survivors, said)
        named = {session.cohort[rank]: position for rank, position in said.items()}
        for name, position in named.items():
            verify_position(position, roster.key(name), roster.authority, name)
        for name, position in named.items():
            if name not in self._claims or position.count > self._claims[name].count:
                self._claims[name] = position

    def close(self) -> "Opening":
        """Go on if enough members have signed."""
        least = self._total.request.session.committee.certificate
        if self._roster is not None and len(self._signatures) < least:
            raise TooFewClients(f"at least {least} members must sign the survivors, got {len(self._signatures)}")
        return Opening(self._total, self._survivors, self._signatures, self._entropy)


class Opening:
    """Fourth exchange: members give the sums of their pads."""

    def __init__(
        self, total: MaskedTotal, survivors: Survivors, signatures: Mapping[int, bytes], entropy: Entropy
    ) -> None:
        self._total = total
        self._survivors = survivors
        self._signatures = signatures
        self._entropy = entropy
        session = total.request.session
        places = signatures if session.is_signed else total.request.keys
        asked = [session.rank(session.members[place]) for place in places]
        self._pending = PendingAnswers(session, subset_of(len(session.cohort), asked))
        self._answers: dict[int, Opened] = {}

    @property
    def survivors(self) -> tuple[ClientId, ...]:
        """Return whose vectors are in the sum."""
        return self._total.request.session.names(self._survivors.signed)

    def outbox(self) -> Outbox:
        """Return the certificates, or the survivors where nobody is enrolled."""
        session = self._total.request.session
        if session.is_signed:
            return self._pending.outbox(
                lambda rank: messages.encode_certificate(session, session.cohort[rank], self._signatures)
            )
        return self._pending.outbox(
            lambda rank: messages.encode_survivors(session, session.cohort[rank], self._survivors)
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a member's pads."""
        session = self._total.request.session
        self._pending.admit(client)
        opened = messages.decode_opening(session, client, len(self._survivors.signed), data)
        self._answers[session.place(client)] = opened

    def close(self) -> "Sum | Tracing":
        """Return the sum, or the exchange that finds who spoilt it."""
        session = self._total.request.session
        if len(self._answers) < session.committee.openers:
            raise TooFewClients(f"{session.committee.openers} members must open a sum, got {len(self._answers)}")
        opener = Opener(self._total, self._answers, self._entropy.child("d2pfed lattice check", session.digest))
        opened = opener.open()
        return Tracing(self._total, opener) if opened is None else Sum(opened, opener.blamed())


class Tracing:
    """Fifth exchange, only if a sum was spoilt: find who disagrees with whom, and open it without them."""

    def __init__(self, total: MaskedTotal, opener: Opener) -> None:
        self._total = total
        self._opener = opener
        session = total.request.session
        asked = [session.rank(session.members[place]) for place in opener.answered]
        self._pending = PendingAnswers(session, subset_of(len(session.cohort), asked))
        self._traces: dict[int, Elements] = {}

    def outbox(self) -> Outbox:
        """Return the requests."""
        session = self._total.request.session
        return self._pending.outbox(lambda rank: messages.encode_trace_request(session, session.cohort[rank]))

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a member's combined pads."""
        session = self._total.request.session
        self._pending.admit(client)
        self._traces[session.place(client)] = messages.decode_trace(session, client, len(self._total.keys), data)

    def close(self) -> Sum:
        """Return the sum of the survivors, opened without members in dispute; or find the attempt void."""
        vector = self._opener.open_traced(self._traces)
        return Sum(vector, self._opener.blamed())
