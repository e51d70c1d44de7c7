"""The server's machine: one object per exchange, made by closing the one before it; at the end the masks come off.

    Advertising -> Sharing -> Masking -> Confirming -> Unmasking -> the sum

Each has an `outbox` of requests, takes the answers that come (`receive`), and is closed with those that came. Who
did not answer, or answered badly, has dropped out. Too few left: the attempt is void.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from d2pfed.errors import ConfigError, PeerError, TooFewClients
from d2pfed.numerics.randomness import Stream
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg import checks, crypto, wire
from d2pfed.secagg.crypto import Agreement
from d2pfed.secagg.draws import Opening
from d2pfed.secagg.pairwise import keys, messages
from d2pfed.secagg.pairwise.keys import JoinedClients, KeyAdvertisement
from d2pfed.secagg.pairwise.messages import EncryptedShares
from d2pfed.secagg.pairwise.session import Session
from d2pfed.secagg.roster import Position, Roster
from d2pfed.secagg.shamir import SECRET_BYTES, Corrected, Interpolation, correct
from d2pfed.secagg.wire import ClientId, MessageKind, Outbox, Subset, ranks_of

Shares = dict[int, dict[int, int | None]]  # by owner's rank, then holder's; None: the holder says it never got one
IsRight = Callable[[bytes], bool]

_MASKS_TOGETHER = 32  # streams that are open at once
_NOTHING: Mapping[ClientId, Position] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What later phases need from the first; `blamed` are the ranks of those found to cheat so far."""

    joined: JoinedClients
    roster: Roster | None
    advertisements: Mapping[int, KeyAdvertisement]
    blamed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Aggregate:
    """The masked sum, and what is needed to unmask it."""

    known: Known
    context: bytes
    sharers: Subset
    survivors: Subset
    total: RingVector = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """The unmasked sum, and the clients that must have cheated and did no harm."""

    vector: RingVector
    blamed: tuple[ClientId, ...]


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
        session, shown, blamed = self._session, self._advertisements, frozenset(self._blamed)
        leaves = {rank: each.statement(session, session.cohort[rank]) for rank, each in shown.items()}
        joined = JoinedClients.of(session, leaves)
        require_enough(session, joined.present, blamed)
        return Sharing(Known(joined, self._roster, shown, blamed))


class Sharing:
    """Second exchange: pass the keys on, collect sealed shares."""

    def __init__(self, known: Known) -> None:
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
        self, known: Known, sharers: Subset, sent: Mapping[int, EncryptedShares], task: bytes, model: bytes
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
        if len(self._groups) > 1:  # somebody gave different parts of the seed to different clients
            left = session.names(ranks_of(survivors))
            raise TooFewClients(f"all clients must have one group seed, got {len(self._groups)}", left)
        return Confirming(Aggregate(self._known, self._context, self._sharers, survivors, self._total))


class Confirming:
    """The consistency exchange: survivors sign that they are the survivors. Asks nobody unless signed."""

    def __init__(self, aggregate: Aggregate) -> None:
        self._aggregate = aggregate
        self._signatures: dict[int, bytes] = {}
        session, survivors = aggregate.known.joined.session, aggregate.survivors
        self.survivors = session.names(ranks_of(survivors))  # whose vectors are in the sum
        asked = survivors if session.is_signed else np.zeros_like(survivors)
        self.outbox = Outbox(
            session.cohort,
            asked,
            lambda rank: wire.message(session, MessageKind.SURVIVORS, rank, wire.pack_subset(survivors)),
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's signature."""
        known, rank = self._aggregate.known, self.outbox.admit(client)
        session = known.joined.session
        with wire.opened(session, MessageKind.SURVIVORS_SIGNATURE, rank, data) as reader:
            signature = reader.take(crypto.SIGNATURE_BYTES)
        if known.roster is not None:
            statement = keys.survivors_statement(self._aggregate.context, self._aggregate.survivors)
            checks.require_signed(session, known.roster, {rank: (statement, signature)})
        self._signatures[rank] = signature

    def close(self) -> "Unmasking":
        """Go on if a quorum has signed."""
        known, session = self._aggregate.known, self._aggregate.known.joined.session
        if session.is_signed and len(self._signatures) < session.quorum:
            raise TooFewClients(
                f"{session.quorum} clients must confirm the survivors, got {len(self._signatures)}",
                blamed=session.names(known.blamed),
            )
        return Unmasking(self._aggregate, self._signatures)


class Unmasking:
    """Fourth exchange: collect one share per client from each holder, and take the masks off the sum."""

    def __init__(self, aggregate: Aggregate, signatures: Mapping[int, bytes]) -> None:
        self._aggregate = aggregate
        self._shares: Shares = {owner: {} for owner in ranks_of(aggregate.sharers)}
        session, survivors = aggregate.known.joined.session, aggregate.survivors
        self.survivors = session.names(ranks_of(survivors))  # whose vectors are in the sum

        def request(rank: int) -> bytes:
            if session.is_signed:
                return messages.encode_signatures(session, rank, signatures)
            return wire.message(session, MessageKind.UNMASK_REQUEST, rank, wire.pack_subset(survivors))

        asked = wire.subset_of(len(session.cohort), signatures) if session.is_signed else survivors
        self.outbox = Outbox(session.cohort, asked, request)

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's shares."""
        joined, rank = self._aggregate.known.joined, self.outbox.admit(client)
        shares = messages.decode_unmasking_shares(joined, rank, self._aggregate.sharers, data)
        for owner, share in shares.items():
            self._shares[owner][rank] = share

    def close(self) -> Sum:
        """Return the sum of the survivors' vectors."""
        return unmask(self._aggregate, self._shares)


def require_enough(session: Session, present: Subset, blamed: Collection[int] = ()) -> None:
    """Find an attempt void if the quorum is not left."""
    left, names = session.names(ranks_of(present)), session.names(blamed)
    if len(left) < session.quorum:
        raise TooFewClients(f"at least {session.quorum} clients must be left, got {len(left)}", left, names)


def unmask(aggregate: Aggregate, shares: Shares) -> Sum:
    """Return the survivors' sum, or find that too few right shares are left to open some secret."""
    known, context, recovery = aggregate.known, aggregate.context, _SecretRecovery(aggregate.known, shares)
    session, total = known.joined.session, aggregate.total.copy()
    masks = list[tuple[bool, bytes]]()  # those left in the sum: is it to be added, its key
    for owner in ranks_of(aggregate.survivors):
        masks.append((False, keys.self_mask_key(recovery.seed(owner), context, session.cohort[owner])))
    for owner in ranks_of(aggregate.sharers & ~aggregate.survivors):
        agreement = recovery.mask_key(owner)
        for peer in keys.others(owner, aggregate.survivors):
            shared = agreement.agree(known.advertisements[peer].mask_public)
            pair = session.cohort[owner], session.cohort[peer]
            key = keys.pair_mask_key(shared, context, pair, keys.NO_GROUP)
            masks.append((peer > owner, key))  # the higher of a pair had subtracted it
    for start in range(0, len(masks), _MASKS_TOGETHER):
        some = masks[start : start + _MASKS_TOGETHER]
        added, subtracted = (
            [Stream(key) for is_added, key in some if is_added is wanted] for wanted in (True, False)
        )
        session.ring.add_masks_into(total, added, subtracted)
    return Sum(total, session.names(known.blamed | recovery.certain()))


class _SecretRecovery:
    """Opens secrets from shares and checks them; remembers Lagrange coefficients, and whose shares were wrong.

    Two clients are in dispute if one of them has cheated: an owner whose share did not reach its holder, or was wrong
    there. A server that passes the ciphertexts on cannot tell which. But an honest client is in dispute with cheats
    only, so a client in dispute with more others than there may be cheats is one itself.
    """

    def __init__(self, known: Known, shares: Shares) -> None:
        self._known, self._session = known, known.joined.session
        self._most_liars = max(1, self._session.colluders)
        self._given = {
            owner: {holder: share for holder, share in held.items() if share is not None}
            for owner, held in shares.items()
        }
        self._disputes: defaultdict[int, set[int]] = defaultdict(set)
        for owner, held in shares.items():
            self._dispute(owner, held.keys() - self._given[owner].keys())
        self._coefficients: dict[tuple[int, ...], Interpolation] = {}
        self._suspects: set[int] = set()
        self._right: dict[int, IsRight] = {}  # of the secrets that were opened, by owner

    def seed(self, owner: int) -> bytes:
        """Return a client's self-mask seed, as it committed to it."""
        client, committed = self._session.cohort[owner], self._known.advertisements[owner].commitment
        return self._open(owner, lambda seed: keys.commitment(self._session, client, seed) == committed)

    def mask_key(self, owner: int) -> Agreement:
        """Return a client's private mask key, as it advertised it."""
        public = self._known.advertisements[owner].mask_public
        return Agreement(self._open(owner, lambda secret: Agreement(secret).public == public))

    def _open(self, owner: int, is_right: IsRight) -> bytes:
        """Return the owner's secret from just enough shares, suspects last, or else correct what is wrong."""
        holders = sorted(self._given[owner], key=lambda holder: (holder in self._suspects, holder))
        few = sorted(holders[: self._session.threshold])
        secret = self._join(owner, few, is_right) or self._correct(owner, is_right)
        if secret is not None:
            self._right[owner] = is_right
            return secret
        # An owner is certain to be the cheat if enough shares came to outvote all liars among the holders, and
        # if enough agree on a wrong secret to open it even without the liars: they are the owner's.
        session, count, liars = self._session, len(holders), self._most_liars
        certain, threshold = self.certain(), session.threshold
        blamed, others = self._known.blamed | certain, self._disputes[owner] - certain
        if count >= threshold + 2 * liars or self._agreeing(owner) >= threshold + liars:
            blamed |= {owner}
        elif others and owner not in certain:  # no certain cheat explains it: one of them must be one
            blamed |= {owner, *others}
        raise TooFewClients(
            f"{threshold} right shares must open a secret of client {session.cohort[owner]}, got {count} shares",
            blamed=session.names(blamed),
        )

    def certain(self) -> frozenset[int]:
        """Hold the shares of all who sent a wrong one against all opened secrets; return who is certain to cheat."""
        for owner, is_right in self._right.items():
            held = self._given[owner]
            others = [holder for holder in sorted(held) if holder not in self._suspects]
            few = others[: self._session.threshold - 1]
            if len(few) == self._session.threshold - 1:
                suspects = self._suspects & held.keys()
                wrong = [holder for holder in suspects if not self._join(owner, [*few, holder], is_right)]
                self._dispute(owner, wrong)
        return frozenset(client for client, others in self._disputes.items() if len(others) > self._most_liars)

    def _dispute(self, owner: int, holders: Iterable[int]) -> None:
        """Note whose share of an owner was missing or wrong."""
        for holder in holders:
            self._disputes[owner].add(holder)
            self._disputes[holder].add(owner)

    def _join(self, owner: int, holders: list[int], is_right: IsRight) -> bytes | None:
        """Return the secret behind just enough shares, if it is the right one."""
        if len(holders) < self._session.threshold:
            return None
        points = tuple(holder + 1 for holder in holders)
        if points not in self._coefficients:
            self._coefficients[points] = Interpolation(points)
        held = self._given[owner]
        return _secret(self._coefficients[points].join([held[holder] for holder in holders]), is_right)

    def _correct(self, owner: int, is_right: IsRight) -> bytes | None:
        """Return the secret that most shares agree on, if it is the right one, and suspect who sent the others."""
        corrected = self._decode(owner, lambda secret: _secret(secret, is_right) is not None)
        if corrected is None:
            return None
        holders = sorted(self._given[owner])
        wrong = [holders[place] for place in corrected.wrong]
        self._dispute(owner, wrong)
        self._suspects.update(wrong)
        return corrected.secret.to_bytes(SECRET_BYTES, "little")

    def _decode(self, owner: int, is_right: Callable[[int], bool]) -> Corrected | None:
        held, threshold = self._given[owner], self._session.threshold
        holders = sorted(held)
        if len(holders) < threshold:
            return None
        points, shares = [holder + 1 for holder in holders], [held[holder] for holder in holders]
        return correct(points, threshold, shares, is_right)

    def _agreeing(self, owner: int) -> int:
        """Return how many shares are of one secret, right or wrong, if enough are to be certain."""
        corrected = self._decode(owner, lambda _secret: True)
        return 0 if corrected is None else len(self._given[owner]) - len(corrected.wrong)


def _secret(joined: int, is_right: IsRight) -> bytes | None:
    if joined >> (8 * SECRET_BYTES):
        return None
    secret = joined.to_bytes(SECRET_BYTES, "little")
    return secret if is_right(secret) else None
