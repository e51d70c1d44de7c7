"""The server's machine: one object per exchange, made by closing the one before it.

    Advertising -> Sharing -> Masking -> Confirming -> Unmasking -> the sum

Each has an `outbox` of requests, takes the answers that come (`receive`), and is closed with those that came. Who did
not answer, or answered badly, has dropped out. Too few left: the attempt is void.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np

from d2pfed.errors import ConfigError, PeerError, TooFewClients
from d2pfed.secagg import checks, keys, messages
from d2pfed.secagg.messages import Advert, Kind, holders_within
from d2pfed.secagg.roster import Roster
from d2pfed.secagg.session import Consistency, Delivery, Session
from d2pfed.secagg.unmask import Aggregate, RunJobs, Shares, Sum, unmask
from d2pfed.wire import ClientId, Subset, subset_of

Exchange = Callable[[Mapping[ClientId, bytes]], Iterable[tuple[ClientId, bytes]]]


class Outbox(Mapping[ClientId, bytes]):
    """Requests by client, each built when it is looked up: a model is not copied for a whole cohort at once."""

    def __init__(self, session: Session, asked: Subset, build: Callable[[int], bytes]) -> None:
        self._ranks = {session.cohort[rank]: int(rank) for rank in np.flatnonzero(asked)}
        self._build = build

    def __getitem__(self, client: ClientId) -> bytes:
        return self._build(self._ranks[client])

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


class ServerPhase(Protocol):
    """What the five phases have in common."""

    def outbox(self) -> Outbox:
        """Return the requests."""
        ...

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's answer, or refuse it."""
        ...


def collect(phase: ServerPhase, exchange: Exchange) -> dict[ClientId, PeerError]:
    """Run one exchange of a phase, and return who answered badly and how; they count as dropped out."""
    refused: dict[ClientId, PeerError] = {}
    outbox = phase.outbox()
    for client, data in exchange(outbox) if outbox else ():
        try:
            phase.receive(client, data)
        except PeerError as error:
            refused[client] = error
    return refused


class Gate:
    """Who was asked, and who has answered: a client's first answer is its only one."""

    def __init__(self, session: Session, asked: Subset) -> None:
        self.session = session
        self.asked = asked
        self._answered = np.zeros_like(asked)

    def admit(self, client: ClientId) -> int:
        """Return the rank of a client that was asked and has not answered yet."""
        try:
            rank = self.session.rank(client)
        except ConfigError:
            raise PeerError(f"client {client} is not in the cohort") from None
        if not self.asked[rank] or self._answered[rank]:
            raise PeerError(f"client {client} was not asked, or has answered already")
        self._answered[rank] = True
        return rank

    def outbox(self, build: Callable[[int], bytes]) -> Outbox:
        """Return the requests to all that are asked."""
        return Outbox(self.session, self.asked, build)


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
        return Sharing(
            session, self._roster, self._adverts, _carried(session, subset_of(len(session.cohort), self._adverts))
        )


class Sharing:
    """Second exchange: pass the keys on, collect sealed shares."""

    def __init__(
        self, session: Session, roster: Roster | None, adverts: Mapping[int, Advert], joined: Subset
    ) -> None:
        self._gate = Gate(session, joined)
        self._roster = roster
        self._adverts = adverts
        self._boxes: dict[int, dict[int, bytes]] = {}

    def outbox(self) -> Outbox:
        """Return the keys of each client's holders."""
        session, joined = self._gate.session, self._gate.asked
        return self._gate.outbox(lambda rank: messages.encode_adverts(session, rank, joined, self._adverts))

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's sealed shares."""
        rank = self._gate.admit(client)
        self._boxes[rank] = messages.decode_boxes(self._gate.session, rank, self._gate.asked, data)

    def close(self, model: bytes) -> "Masking":
        """Go on with those that shared and have holders enough, and give them the model."""
        session = self._gate.session
        sharers = _carried(session, subset_of(len(session.cohort), self._boxes))
        return Masking(session, self._roster, self._adverts, sharers, self._boxes, model)


class Masking:
    """Third exchange: pass the boxes and the model on, add up the masked vectors as they come."""

    def __init__(
        self,
        session: Session,
        roster: Roster | None,
        adverts: Mapping[int, Advert],
        sharers: Subset,
        boxes: Mapping[int, Mapping[int, bytes]],
        model: bytes,
    ) -> None:
        self._gate = Gate(session, sharers)
        self._roster = roster
        self._adverts = adverts
        self._boxes = boxes
        self._model = model
        self._total = np.zeros(session.dimension, np.uint32)
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
        session.ring.add_into(self._total, messages.decode_masked(session, rank, data))
        self._arrived.append(rank)

    def close(self) -> "Confirming":
        """Settle who has survived; it is final."""
        session, sharers = self._gate.session, self._gate.asked
        survivors = subset_of(len(session.cohort), self._arrived)
        _require_enough(session, survivors)
        context = keys.context(session, self._model, sharers)
        aggregate = Aggregate(session, self._adverts, context, sharers, survivors, self._total)
        return Confirming(aggregate, self._roster)


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
        """Return the sum of the survivors' vectors, expanding masks through `run_jobs` (an executor's map, say)."""
        return unmask(self._aggregate, self._shares, run_jobs)


def _carried(session: Session, present: Subset) -> Subset:
    """Return those of a subset whose secrets the others of it can open, or find that too few are left."""
    while True:
        short = [
            rank
            for rank in np.flatnonzero(present)
            if len(holders_within(session, rank, present)) < session.threshold
        ]
        if not short:
            break
        present = present.copy()
        present[short] = False
    _require_enough(session, present)
    return present


def _require_enough(session: Session, present: Subset) -> None:
    count = int(present.sum())
    if count < session.quorum:
        raise TooFewClients(f"at least {session.quorum} clients must be left, got {count}")
    if session.delivery is Delivery.BEARER and not present[session.rank(session.bearer)]:
        raise TooFewClients(f"the bearer, client {session.bearer}, must be left")
