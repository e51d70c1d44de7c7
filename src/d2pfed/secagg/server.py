"""The server's machine: one object per exchange, made by closing the one before it.

    Advertising -> Sharing -> Masking -> Confirming -> Unmasking -> the sum

Each has an `outbox` of requests, takes the answers that come (`receive`), and is closed with those that came. Who
did not answer, or answered badly, has dropped out. Too few left: the attempt is void.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from d2pfed.errors import ConfigError, PeerError, TooFewClients
from d2pfed.graph import Consistency
from d2pfed.secagg import checks, keys, messages
from d2pfed.secagg.exchange import Gate, Outbox
from d2pfed.secagg.messages import Advert, Kind
from d2pfed.secagg.roster import Roster
from d2pfed.secagg.session import Delivery, Session
from d2pfed.secagg.unmask import Aggregate, RunJobs, Shares, Sum, unmask
from d2pfed.wire import ClientId, Subset, subset_of


@dataclass(frozen=True, slots=True)
class _Known:
    """What later phases need from the first."""

    session: Session
    roster: Roster | None
    adverts: Mapping[int, Advert]


class Advertising:
    """First exchange: invite the cohort, collect public keys."""

    def __init__(self, session: Session, roster: Roster | None = None) -> None:
        if session.consistency is Consistency.SIGNED and roster is None:
            raise ConfigError("signed consistency needs a roster, got none")
        self._gate = Gate(session, np.ones(len(session.cohort), np.bool_))
        self._roster = roster
        self._adverts: dict[int, Advert] = {}
        self._publics: set[bytes] = set()

    def outbox(self) -> Outbox:
        """Return the invitations."""
        return self._gate.outbox(lambda rank: messages.encode_invitation(self._gate.session, rank))

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's keys."""
        session, rank = self._gate.session, self._gate.admit(client)
        advert = messages.decode_advert(session, rank, data)
        if self._roster is not None and session.consistency is Consistency.SIGNED:
            checks.require_enrolled_adverts(session, self._roster, {rank: advert})
        publics = {advert.seal_public, advert.mask_public}
        if len(publics) < 2 or publics & self._publics:
            raise PeerError("all public keys of a session must be distinct")
        self._publics |= publics
        self._adverts[rank] = advert

    def close(self) -> "Sharing":
        """Go on with those that advertised and have holders enough."""
        session = self._gate.session
        joined = carried(session, subset_of(len(session.cohort), self._adverts))
        return Sharing(_Known(session, self._roster, self._adverts), joined)


class Sharing:
    """Second exchange: pass the keys on, collect sealed shares."""

    def __init__(self, known: _Known, joined: Subset) -> None:
        self._known = known
        self._gate = Gate(known.session, joined)
        self._boxes: dict[int, dict[int, bytes]] = {}

    def outbox(self) -> Outbox:
        """Return the keys of each client's holders."""
        session, joined, adverts = self._known.session, self._gate.asked, self._known.adverts
        return self._gate.outbox(lambda rank: messages.encode_adverts(session, rank, joined, adverts))

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's sealed shares."""
        rank = self._gate.admit(client)
        self._boxes[rank] = messages.decode_boxes(self._gate.session, rank, self._gate.asked, data)

    def close(self, model: bytes) -> "Masking":
        """Go on with those that shared and have holders enough, and give them the model."""
        session = self._gate.session
        sharers = carried(session, subset_of(len(session.cohort), self._boxes))
        return Masking(self._known, sharers, self._boxes, model)


class Masking:
    """Third exchange: pass the boxes and the model on, add up the masked vectors as they come."""

    def __init__(
        self, known: _Known, sharers: Subset, boxes: Mapping[int, Mapping[int, bytes]], model: bytes
    ) -> None:
        self._known = known
        self._gate = Gate(known.session, sharers)
        self._boxes = boxes
        self._model = model
        self._context = keys.context(known.session, model, sharers)
        self._total = np.zeros(known.session.dimension, np.uint32)
        self._arrived: list[int] = []

    def outbox(self) -> Outbox:
        """Return the requests for masked vectors."""
        return self._gate.outbox(self._request)

    def _request(self, rank: int) -> bytes:
        session, sharers = self._gate.session, self._gate.asked
        boxes = {peer: self._boxes[peer][rank] for peer in messages.peers_within(session, rank, sharers)}
        return messages.encode_mask_request(session, rank, sharers, boxes, self._model)

    def receive(self, client: ClientId, data: bytes) -> None:
        """Add a client's masked vector."""
        session, rank = self._gate.session, self._gate.admit(client)
        session.ring.add_into(self._total, messages.decode_masked(session, rank, self._context, data))
        self._arrived.append(rank)

    def close(self) -> "Confirming":
        """Settle who has survived; it is final."""
        session, sharers = self._gate.session, self._gate.asked
        survivors = subset_of(len(session.cohort), self._arrived)
        require_enough(session, survivors)
        aggregate = Aggregate(session, self._known.adverts, self._context, sharers, survivors, self._total)
        return Confirming(aggregate, self._known.roster)


class Confirming:
    """The consistency exchange: survivors sign that they are the survivors. Asks nobody unless signed."""

    def __init__(self, aggregate: Aggregate, roster: Roster | None) -> None:
        self._aggregate = aggregate
        self._roster = roster
        self._is_signed = aggregate.session.consistency is Consistency.SIGNED
        asked = aggregate.survivors if self._is_signed else np.zeros_like(aggregate.survivors)
        self._gate = Gate(aggregate.session, asked)
        self._signatures: dict[int, bytes] = {}

    @property
    def survivors(self) -> tuple[ClientId, ...]:
        """Return whose vectors are in the sum."""
        return self._aggregate.survivor_ids

    def outbox(self) -> Outbox:
        """Return the survivors to be signed."""
        session, survivors = self._aggregate.session, self._aggregate.survivors
        return self._gate.outbox(lambda rank: messages.encode_survivors(session, Kind.SURVIVORS, rank, survivors))

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's signature."""
        rank = self._gate.admit(client)
        signature = messages.decode_confirmation(self._gate.session, rank, data)
        if self._roster is not None:
            statement = keys.survivors_statement(self._aggregate.context, self._aggregate.survivors)
            checks.require_confirmed(self._gate.session, self._roster, statement, {rank: signature})
        self._signatures[rank] = signature

    def close(self) -> "Unmasking":
        """Go on if a quorum has signed."""
        if not self._is_signed:
            return Unmasking(self._aggregate, {})
        if len(self._signatures) < self._gate.session.quorum:
            raise TooFewClients(
                f"{self._gate.session.quorum} clients must confirm the survivors, got {len(self._signatures)}"
            )
        return Unmasking(self._aggregate, self._signatures)


class Unmasking:
    """Fourth exchange: collect one share per client from each holder, and take the masks off the sum."""

    def __init__(self, aggregate: Aggregate, signatures: Mapping[int, bytes]) -> None:
        self._aggregate = aggregate
        self._signatures = signatures
        signers = subset_of(len(aggregate.session.cohort), signatures)
        is_signed = aggregate.session.consistency is Consistency.SIGNED
        self._gate = Gate(aggregate.session, signers if is_signed else aggregate.survivors)
        self._shares: Shares = {int(owner): {} for owner in np.flatnonzero(aggregate.sharers)}

    @property
    def survivors(self) -> tuple[ClientId, ...]:
        """Return whose vectors are in the sum."""
        return self._aggregate.survivor_ids

    def outbox(self) -> Outbox:
        """Return the requests for shares: with the survivors, or with the signatures under them."""
        session, survivors = self._aggregate.session, self._aggregate.survivors
        if session.consistency is Consistency.SIGNED:
            return self._gate.outbox(lambda rank: messages.encode_signatures(session, rank, self._signatures))
        return self._gate.outbox(
            lambda rank: messages.encode_survivors(session, Kind.UNMASK_REQUEST, rank, survivors)
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's shares."""
        session, rank = self._gate.session, self._gate.admit(client)
        opened = messages.decode_opened(session, rank, self._aggregate.sharers, data)
        for owner, share in opened.items():
            self._shares[owner][rank] = share

    def close(self, run_jobs: RunJobs = map) -> Sum:
        """Return the sum of the survivors' vectors, its masks expanded by `run_jobs` (an executor's map, say)."""
        return unmask(self._aggregate, self._shares, run_jobs)


def carried(session: Session, present: Subset) -> Subset:
    """Return those of a subset whose secrets the others of it can open, or find that too few are left."""
    while np.any(short := present & (session.graph.count_holders(present) < session.least_neighbours)):
        present = present & ~short
    require_enough(session, present)
    return present


def require_enough(session: Session, present: Subset) -> None:
    """Find an attempt void if the quorum, or the designated, is not left."""
    left = tuple(session.cohort[rank] for rank in _ranks(present))
    if len(left) < session.quorum:
        raise TooFewClients(f"at least {session.quorum} clients must be left, got {len(left)}", left)
    if session.delivery is Delivery.DESIGNATED and not present[session.rank(session.designated)]:
        raise TooFewClients(f"the designated, client {session.designated}, must be left", left)


def _ranks(present: Subset) -> list[int]:
    return [int(rank) for rank in np.flatnonzero(present)]
