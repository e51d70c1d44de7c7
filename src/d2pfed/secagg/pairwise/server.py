"""The server's machine: one object per exchange, made by closing the one before it.

    Advertising -> Sharing -> Masking -> Confirming -> Unmasking -> the sum

Each has an `outbox` of requests, takes the answers that come (`receive`), and is closed with those that came. Who
did not answer, or answered badly, has dropped out. Too few left: the attempt is void.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from d2pfed.errors import ConfigError, PeerError, TooFewClients
from d2pfed.secagg import checks, crypto, wire
from d2pfed.secagg.draws import Opening
from d2pfed.secagg.pairwise import keys, messages
from d2pfed.secagg.pairwise.keys import JoinedClients, KeyAdvertisement
from d2pfed.secagg.pairwise.messages import EncryptedShares
from d2pfed.secagg.pairwise.session import Session
from d2pfed.secagg.pairwise.unmask import Aggregate, Shares, Sum, unmask
from d2pfed.secagg.roster import Position, Roster
from d2pfed.secagg.wire import ClientId, MessageKind, Outbox, Subset

_NOTHING: Mapping[ClientId, Position] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """What later phases need from the first."""

    joined: JoinedClients
    roster: Roster | None
    advertisements: Mapping[int, KeyAdvertisement]
    blamed: frozenset[int]


class Advertising:
    """First exchange: invite the cohort, collect public keys.

    `opening` proves the draw where cohorts are drawn verifiably, `remembered` is where the server has met each client
    last, and `excluded` are clients that were found to cheat: they are not asked. If signed, `positions` is where those
    that advertised stand, for the server to remember.
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
        self._session, self._roster = session, roster
        self._advertisements: dict[int, KeyAdvertisement] = {}
        self.positions: dict[ClientId, Position] = {}
        self._publics: set[bytes] = set()
        self._blamed: set[int] = set()
        self.outbox = Outbox(
            session.cohort,
            np.array([client not in excluded for client in session.cohort]),
            lambda rank: messages.encode_invitation(session, rank, opening, remembered.get(session.cohort[rank])),
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's keys; one that sends a key of low order is to blame, for no accident makes one."""
        session, rank = self._session, self.outbox.admit(client)
        with wire.opened(session, MessageKind.KEY_ADVERTISEMENT, rank, data) as reader:
            advertisement = keys.read_advertisement(session, reader)
        if self._roster is not None and session.is_signed:
            signed = {rank: (advertisement.statement(session, client), advertisement.signature)}
            checks.require_signed(session, self._roster, signed)
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
        if advertisement.position is not None:
            self.positions[client] = advertisement.position

    def close(self) -> "Sharing":
        """Go on with those that advertised."""
        session, blamed = self._session, frozenset(self._blamed)
        present = wire.subset_of(len(session.cohort), self._advertisements)
        require_enough(session, present, blamed)
        leaves = {
            rank: self._advertisements[rank].statement(session, session.cohort[rank])
            for rank in wire.ranks_of(present)
        }
        joined = JoinedClients.of(session, present, leaves)
        return Sharing(_Known(joined, self._roster, self._advertisements, blamed))


class Sharing:
    """Second exchange: pass the keys on, collect sealed shares."""

    def __init__(self, known: _Known) -> None:
        self._known = known
        self._sent: dict[int, EncryptedShares] = {}
        self.outbox = Outbox(
            known.joined.session.cohort,
            known.joined.present,
            lambda rank: messages.encode_advertisements(known.joined, rank, known.advertisements),
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's sealed shares."""
        rank = self.outbox.admit(client)
        self._sent[rank] = messages.decode_encrypted_shares(self._known.joined, rank, data)

    def close(self, task: bytes, model: bytes) -> "Masking":
        """Go on with those that shared, and give them task and model."""
        joined, blamed = self._known.joined, self._known.blamed
        sharers = wire.subset_of(len(joined.session.cohort), self._sent)
        require_enough(joined.session, sharers, blamed)
        return Masking(self._known, sharers, self._sent, task, model)


class Masking:
    """Third exchange: pass the ciphertexts and the model on, add up the masked vectors as they come."""

    def __init__(
        self, known: _Known, sharers: Subset, sent: Mapping[int, EncryptedShares], task: bytes, model: bytes
    ) -> None:
        session = known.joined.session
        self._known, self._sharers = known, sharers
        self._context = keys.context(known.joined, task, model, sharers)
        self._total = np.zeros(session.dimension, np.uint32)
        self._arrived: list[int] = []
        self._groups: set[bytes] = set()

        def request(rank: int) -> bytes:
            senders = keys.others(rank, sharers)
            claims = wire.subset_of(len(sharers), [sender for sender in senders if sent[sender].claims[rank]])
            shares = EncryptedShares({sender: sent[sender].ciphertexts[rank] for sender in senders}, claims)
            return messages.encode_mask_request(known.joined, rank, sharers, shares, task, model)

        self.outbox = Outbox(session.cohort, sharers, request)

    def receive(self, client: ClientId, data: bytes) -> None:
        """Add a client's masked vector."""
        session, rank = self._known.joined.session, self.outbox.admit(client)
        group, vector = messages.decode_masked_vector(session, rank, self._context, data)
        session.ring.add_into(self._total, vector)
        self._groups.add(group)
        self._arrived.append(rank)

    def close(self) -> "Confirming":
        """Settle who has survived; it is final."""
        session, blamed = self._known.joined.session, self._known.blamed
        survivors = wire.subset_of(len(session.cohort), self._arrived)
        require_enough(session, survivors, blamed)
        require_one_group(session, self._groups, survivors)
        aggregate = Aggregate(
            joined=self._known.joined,
            advertisements=self._known.advertisements,
            context=self._context,
            sharers=self._sharers,
            survivors=survivors,
            total=self._total,
            blamed=blamed,
        )
        return Confirming(aggregate, self._known.roster)


class Confirming:
    """The consistency exchange: survivors sign that they are the survivors. Asks nobody unless signed."""

    def __init__(self, aggregate: Aggregate, roster: Roster | None) -> None:
        self._aggregate, self._roster = aggregate, roster
        self._signatures: dict[int, bytes] = {}
        session, survivors = aggregate.joined.session, aggregate.survivors
        self.survivors = session.names(wire.ranks_of(survivors))  # whose vectors are in the sum
        asked = survivors if session.is_signed else np.zeros_like(survivors)
        self.outbox = Outbox(
            session.cohort,
            asked,
            lambda rank: wire.message(session, MessageKind.SURVIVORS, rank, wire.pack_subset(survivors)),
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's signature."""
        session, rank = self._aggregate.joined.session, self.outbox.admit(client)
        with wire.opened(session, MessageKind.SURVIVORS_SIGNATURE, rank, data) as reader:
            signature = reader.take(crypto.SIGNATURE_BYTES)
        if self._roster is not None:
            statement = keys.survivors_statement(self._aggregate.context, self._aggregate.survivors)
            checks.require_signed(session, self._roster, {rank: (statement, signature)})
        self._signatures[rank] = signature

    def close(self) -> "Unmasking":
        """Go on if a quorum has signed."""
        session = self._aggregate.joined.session
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
        self._shares: Shares = {owner: {} for owner in wire.ranks_of(aggregate.sharers)}
        session, survivors = aggregate.joined.session, aggregate.survivors
        self.survivors = session.names(wire.ranks_of(survivors))  # whose vectors are in the sum

        def request(rank: int) -> bytes:
            if session.is_signed:
                return messages.encode_signatures(session, rank, signatures)
            return wire.message(session, MessageKind.UNMASK_REQUEST, rank, wire.pack_subset(survivors))

        asked = wire.subset_of(len(session.cohort), signatures) if session.is_signed else survivors
        self.outbox = Outbox(session.cohort, asked, request)

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's shares."""
        rank = self.outbox.admit(client)
        shares = messages.decode_unmasking_shares(self._aggregate.joined, rank, self._aggregate.sharers, data)
        for owner, share in shares.items():
            self._shares[owner][rank] = share

    def close(self) -> Sum:
        """Return the sum of the survivors' vectors."""
        return unmask(self._aggregate, self._shares)


def require_enough(session: Session, present: Subset, blamed: Collection[int] = ()) -> None:
    """Find an attempt void if the quorum is not left."""
    left, names = session.names(wire.ranks_of(present)), session.names(blamed)
    if len(left) < session.quorum:
        raise TooFewClients(f"at least {session.quorum} clients must be left, got {len(left)}", left, names)


def require_one_group(session: Session, groups: Collection[bytes], survivors: Subset) -> None:
    """Find an attempt void if clients hold different group seeds: somebody gave different parts to different ones."""
    if len(groups) > 1:
        raise TooFewClients(
            f"all clients must have one group seed, got {len(groups)}", session.names(wire.ranks_of(survivors))
        )
