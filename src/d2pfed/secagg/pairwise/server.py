"""The server's machine: one object per exchange, made by closing the one before it.

    Advertising -> Sharing -> Masking -> Confirming -> Unmasking -> the sum

Each has an `outbox` of requests, takes the answers that come (`receive`), and is closed with those that came. Who
did not answer, or answered badly, has dropped out. Too few left: the attempt is void.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from d2pfed.errors import ConfigError, PeerError, TooFewClients
from d2pfed.secagg import crypto
from d2pfed.secagg.draws import Opening
from d2pfed.secagg.exchange import Outbox, PendingAnswers
from d2pfed.secagg.pairwise import checks, keys, messages
from d2pfed.secagg.pairwise.graph import Graph
from d2pfed.secagg.pairwise.keys import JoinedClients, KeyAdvertisement, leaf
from d2pfed.secagg.pairwise.messages import EncryptedShares, encode_invitation
from d2pfed.secagg.pairwise.session import Session
from d2pfed.secagg.pairwise.unmask import Aggregate, RunJobs, Shares, Sum, unmask
from d2pfed.secagg.position import Position
from d2pfed.secagg.roster import Roster
from d2pfed.secagg.wire import ClientId, MessageKind, Subset, subset_of

_NOTHING: Mapping[ClientId, Position] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """What later phases need from the first."""

    joined: JoinedClients
    roster: Roster | None
    advertisements: Mapping[int, KeyAdvertisement]
    leaves: Mapping[int, bytes] = field(repr=False)
    blamed: frozenset[int]


class Advertising:
    """First exchange: invite the cohort, collect public keys.

    `opening` proves the draw where cohorts are drawn verifiably, `remembered` is where the server has met each client
    last, and `excluded` are clients that were found to cheat: they are not asked.
    """

    def __init__(
        self,
        session: Session,
        roster: Roster | None = None,
        *,
        opening: Opening | None = None,
        remembered: Mapping[ClientId, Position] = _NOTHING,
        excluded: Collection[ClientId] = (),
    ) -> None:
        if session.is_signed and (roster is None or roster.digest != session.roster_digest):
            raise ConfigError("signed consistency needs the session's roster, got none or another")
        if (roster is not None and roster.depth is not None) != (opening is not None):
            raise ConfigError("a roster's verifiable draws need an opening, and only they")
        self._pending = PendingAnswers(session, np.array([client not in excluded for client in session.cohort]))
        self._roster = roster
        self._opening = opening
        self._remembered = remembered
        self._advertisements: dict[int, KeyAdvertisement] = {}
        self._publics: set[bytes] = set()
        self._blamed: set[int] = set()

    @property
    def positions(self) -> dict[ClientId, Position]:
        """Return where the clients that advertised stand, for the server to remember; none unless signed."""
        cohort = self._pending.session.cohort
        return {
            cohort[rank]: advertisement.position
            for rank, advertisement in self._advertisements.items()
            if advertisement.position is not None
        }

    def outbox(self) -> Outbox:
        """Return the invitations."""
        session = self._pending.session
        return self._pending.outbox(
            lambda rank: encode_invitation(
                session, rank, self._opening, self._remembered.get(session.cohort[rank])
            )
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's keys; one that sends a key of low order is to blame, for no accident makes one."""
        session, rank = self._pending.session, self._pending.admit(client)
        advertisement = messages.decode_advertisement(session, rank, data)
        if self._roster is not None and session.is_signed:
            checks.require_enrolled_advertisements(session, self._roster, {rank: advertisement})
        publics = {advertisement.seal_public, advertisement.mask_public}
        try:
            for public in publics:
                crypto.require_order(public)
        except PeerError:
            self._blamed.add(rank)
            raise
        if len(publics) < 2 or publics & self._publics:
            raise PeerError("all public keys of a session must be distinct")
        self._publics |= publics
        self._advertisements[rank] = advertisement

    def close(self) -> "Sharing":
        """Go on with those that advertised and have holders enough."""
        session, blamed = self._pending.session, frozenset(self._blamed)
        present = subset_of(len(session.cohort), self._advertisements)
        if session.fixed_graph is not None:
            present = with_enough_holders(session, session.fixed_graph, present, blamed)
        require_enough(session, present, blamed)
        leaves = {
            rank: leaf(session, session.cohort[rank], self._advertisements[rank]) for rank in _ranks(present)
        }
        joined = JoinedClients.of(session, present, leaves)
        return Sharing(_Known(joined, self._roster, self._advertisements, leaves, blamed))


class Sharing:
    """Second exchange: pass the keys on, collect sealed shares."""

    def __init__(self, known: _Known) -> None:
        self._known = known
        self._pending = PendingAnswers(known.joined.session, known.joined.present)
        self._sent: dict[int, EncryptedShares] = {}

    def outbox(self) -> Outbox:
        """Return the keys of each client's partners."""
        known = self._known
        return self._pending.outbox(
            lambda rank: messages.encode_advertisements(known.joined, rank, known.leaves, known.advertisements)
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's sealed shares."""
        rank = self._pending.admit(client)
        self._sent[rank] = messages.decode_encrypted_shares(self._known.joined, rank, data)

    def close(self, task: bytes, model: bytes) -> "Masking":
        """Go on with those that shared and have holders enough, and give them task and model."""
        joined, blamed = self._known.joined, self._known.blamed
        present = subset_of(len(joined.session.cohort), self._sent)
        sharers = with_enough_holders(joined.session, joined.graph, present, blamed)
        return Masking(self._known, sharers, self._sent, task, model)


class Masking:
    """Third exchange: pass the ciphertexts and the model on, add up the masked vectors as they come."""

    def __init__(
        self, known: _Known, sharers: Subset, sent: Mapping[int, EncryptedShares], task: bytes, model: bytes
    ) -> None:
        session = known.joined.session
        self._known = known
        self._pending = PendingAnswers(session, sharers)
        self._sent = sent
        self._task, self._model = task, model
        self._context = keys.context(known.joined, task, model, sharers)
        self._total = np.zeros(session.dimension, np.uint32)
        self._arrived: list[int] = []
        self._groups: set[bytes] = set()

    def outbox(self) -> Outbox:
        """Return the requests for masked vectors."""
        return self._pending.outbox(self._request)

    def _request(self, rank: int) -> bytes:
        joined, sharers = self._known.joined, self._pending.asked
        ciphertexts = {sender: self._sent[sender].ciphertexts[rank] for sender in joined.senders(rank, sharers)}
        claims = subset_of(len(sharers), [sender for sender in ciphertexts if self._sent[sender].claims[rank]])
        shares = EncryptedShares(ciphertexts, claims)
        return messages.encode_mask_request(joined, rank, sharers, shares, self._task, self._model)

    def receive(self, client: ClientId, data: bytes) -> None:
        """Add a client's masked vector."""
        session, rank = self._pending.session, self._pending.admit(client)
        masked = messages.decode_masked_vector(session, rank, self._context, data)
        session.ring.add_into(self._total, masked.vector)
        self._groups.add(masked.group)
        self._arrived.append(rank)

    def close(self) -> "Confirming":
        """Settle who has survived; it is final."""
        session, blamed = self._pending.session, self._known.blamed
        survivors = subset_of(len(session.cohort), self._arrived)
        require_enough(session, survivors, blamed)
        require_one_group(session, self._groups, survivors)
        aggregate = Aggregate(
            joined=self._known.joined,
            advertisements=self._known.advertisements,
            context=self._context,
            sharers=self._pending.asked,
            survivors=survivors,
            total=self._total,
            blamed=blamed,
        )
        return Confirming(aggregate, self._known.roster)


class Confirming:
    """The consistency exchange: survivors sign that they are the survivors. Asks nobody unless signed."""

    def __init__(self, aggregate: Aggregate, roster: Roster | None) -> None:
        self._aggregate = aggregate
        self._roster = roster
        asked = aggregate.survivors if aggregate.session.is_signed else np.zeros_like(aggregate.survivors)
        self._pending = PendingAnswers(aggregate.session, asked)
        self._signatures: dict[int, bytes] = {}

    @property
    def survivors(self) -> tuple[ClientId, ...]:
        """Return whose vectors are in the sum."""
        return self._aggregate.survivor_ids

    def outbox(self) -> Outbox:
        """Return the survivors to be signed."""
        session, survivors = self._aggregate.session, self._aggregate.survivors
        return self._pending.outbox(
            lambda rank: messages.encode_survivors(session, MessageKind.SURVIVORS, rank, survivors)
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's signature."""
        rank = self._pending.admit(client)
        signature = messages.decode_confirmation(self._pending.session, rank, data)
        if self._roster is not None:
            statement = keys.survivors_statement(self._aggregate.context, self._aggregate.survivors)
            checks.require_confirmed(self._pending.session, self._roster, statement, {rank: signature})
        self._signatures[rank] = signature

    def close(self) -> "Unmasking":
        """Go on if a quorum has signed."""
        session = self._pending.session
        if session.is_signed and len(self._signatures) < session.quorum:
            raise TooFewClients(
                f"{session.quorum} clients must confirm the survivors, got {len(self._signatures)}",
                blamed=session.names(self._aggregate.blamed),
            )
        return Unmasking(self._aggregate, self._signatures)


class Unmasking:
    """Fourth exchange: collect one share per client from each holder, and take the masks off the sum."""

    def __init__(self, aggregate: Aggregate, signatures: Mapping[int, bytes]) -> None:
        self._aggregate = aggregate
        self._signatures = signatures
        signers = subset_of(len(aggregate.session.cohort), signatures)
        self._pending = PendingAnswers(
            aggregate.session, signers if aggregate.session.is_signed else aggregate.survivors
        )
        self._shares: Shares = {int(owner): {} for owner in np.flatnonzero(aggregate.sharers)}

    @property
    def survivors(self) -> tuple[ClientId, ...]:
        """Return whose vectors are in the sum."""
        return self._aggregate.survivor_ids

    def outbox(self) -> Outbox:
        """Return the requests for shares: with the survivors, or with the signatures under them."""
        session, survivors = self._aggregate.session, self._aggregate.survivors
        if session.is_signed:
            return self._pending.outbox(lambda rank: messages.encode_signatures(session, rank, self._signatures))
        return self._pending.outbox(
            lambda rank: messages.encode_survivors(session, MessageKind.UNMASK_REQUEST, rank, survivors)
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's shares."""
        rank = self._pending.admit(client)
        opened = messages.decode_unmasking_shares(self._aggregate.joined, rank, self._aggregate.sharers, data)
        for owner, share in opened.items():
            self._shares[owner][rank] = share

    def close(self, run_jobs: RunJobs = map) -> Sum:
        """Return the sum of the survivors' vectors, its masks expanded by `run_jobs` (an executor's map, say)."""
        return unmask(self._aggregate, self._shares, run_jobs)


def with_enough_holders(session: Session, graph: Graph, present: Subset, blamed: Collection[int] = ()) -> Subset:
    """Return those of a subset whose secrets the others of it can open, or find that too few are left."""
    while np.any(short := present & (graph.count_holders(present) < session.least_holders)):
        present = present & ~short
    require_enough(session, present, blamed)
    return present


def require_enough(session: Session, present: Subset, blamed: Collection[int] = ()) -> None:
    """Find an attempt void if the quorum is not left."""
    left, names = session.names(_ranks(present)), session.names(blamed)
    if len(left) < session.quorum:
        raise TooFewClients(f"at least {session.quorum} clients must be left, got {len(left)}", left, names)


def require_one_group(session: Session, groups: Collection[bytes], survivors: Subset) -> None:
    """Find an attempt void if clients hold different group seeds: somebody gave different parts to different ones."""
    if len(groups) > 1:
        raise TooFewClients(
            f"all clients must have one group seed, got {len(groups)}", session.names(_ranks(survivors))
        )


def _ranks(present: Subset) -> list[int]:
    return [int(rank) for rank in np.flatnonzero(present)]
