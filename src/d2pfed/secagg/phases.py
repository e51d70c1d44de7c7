"""The phases of a client: each holds only what it may still use, and answers one request.

Invited -> Advertised -> Shared -> Masked -> (Confirmed, if signed) -> Finished
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import Entropy, Stream
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg import boxes, checks, crypto, keys, messages, shamir
from d2pfed.secagg.adverts import Advert, Joined, leaf
from d2pfed.secagg.desk import Desk
from d2pfed.secagg.invitation import decode_invitation
from d2pfed.secagg.messages import Adverts, EncryptedShares, MaskedVector, MessageKind
from d2pfed.secagg.position import Position
from d2pfed.secagg.session import Delivery, Session
from d2pfed.secagg.wire import ClientId, Subset, subset_of


class Phase(Protocol):
    """A phase answers one request and names the next phase."""

    def answer(self, desk: Desk, data: bytes) -> tuple[bytes, "Phase"]:
        """Return the answer and the next phase."""
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing is left to use: the attempt is over for this client, well or badly."""

    def answer(self, desk: Desk, data: bytes) -> tuple[bytes, Phase]:  # noqa: ARG002 - a phase's signature
        """Refuse whatever comes."""
        raise PeerError("this client has finished this attempt")


@dataclass(frozen=True, slots=True)
class Invited:
    """Waits for the invitation; answers with fresh keys."""

    entropy: Entropy

    def answer(self, desk: Desk, data: bytes) -> tuple[bytes, Phase]:
        """Advertise keys that belong to this session alone, and where this client stands."""
        session, history = desk.session, desk.history
        invited = decode_invitation(data, desk.depth)
        checks.require_invited(session, desk.client, invited)
        if session.is_signed and history is not None:
            checks.require_server_position(desk.enrolled, history, desk.client, invited.remembered)
        fresh = _fresh(session, desk.client, self.entropy)
        secrets = Advertised(
            fresh.child("seal").key,
            fresh.child("mask").key,
            fresh.child("self").key,
            fresh.child("shares"),
            history.position if session.is_signed and history is not None else None,
        )
        return messages.encode_advert(session, desk.rank, secrets.advert(desk)), secrets


@dataclass(frozen=True, slots=True)
class Advertised:
    """Waits for the others' keys; answers with its secrets in sealed shares."""

    seal_secret: bytes = field(repr=False)
    mask_secret: bytes = field(repr=False)
    seed: bytes = field(repr=False)
    entropy: Entropy
    position: Position | None

    def advert(self, desk: Desk) -> Advert:
        """Return the public side of the secrets."""
        publics = crypto.Agreement(self.seal_secret).public, crypto.Agreement(self.mask_secret).public
        unsigned = Advert(*publics, keys.commitment(desk.session, desk.client, self.seed), self.position)
        return replace(unsigned, signature=desk.sign(leaf(desk.session, desk.client, unsigned)))

    def answer(self, desk: Desk, data: bytes) -> tuple[bytes, Phase]:
        """Split both secrets among the holders that joined, agree on keys with them, forget the private keys."""
        session = desk.session
        listed = messages.decode_adverts(session, desk.rank, data)
        self._check(desk, listed)
        contribution = _group_contribution(self.entropy) if session.delivery is Delivery.EVERYONE else b""
        shares = self._split(listed.joined, desk.rank)
        seal, mask = crypto.Agreement(self.seal_secret), crypto.Agreement(self.mask_secret)
        known = desk.history.known if session.is_signed and desk.history is not None else {}
        sealed: dict[int, bytes] = {}
        peers: dict[int, Peer] = {}
        for rank in listed.joined.partners(desk.rank, listed.joined.present):
            advert, peer = listed.adverts[rank], session.cohort[rank]
            shared = seal.agree(advert.seal_public)
            peers[rank] = Peer(keys.box_key(session, shared, peer, desk.client), mask.agree(advert.mask_public))
            if rank in shares:
                outbound = keys.box_key(session, shared, desk.client, peer)
                content = boxes.Content(*shares[rank], contribution, known.get(peer))
                sealed[rank] = crypto.seal(outbound, content.pack())
        claims = subset_of(len(session.cohort), [rank for rank in sealed if session.cohort[rank] in known])
        state = Shared(self.seed, shares[desk.rank][0], contribution, listed.joined, peers, _met(desk, listed))
        return messages.encode_boxes(listed.joined, desk.rank, EncryptedShares(sealed, claims)), state

    def _check(self, desk: Desk, listed: Adverts) -> None:
        session, own = desk.session, self.advert(desk)
        desk.check_left(listed.joined, listed.joined.present)
        checks.require_own_leaf(listed.leaves[desk.rank], leaf(session, desk.client, own))
        checks.require_leaves_fit(session, listed.leaves, listed.adverts)
        checks.require_distinct_keys(listed.adverts)
        if session.is_signed:
            checks.require_enrolled_adverts(session, desk.enrolled.roster, listed.adverts)

    def _split(self, joined: Joined, rank: int) -> dict[int, tuple[int, int]]:
        """Return (share of the seed, share of the mask key) by holder that joined, this client included."""
        holders = sorted([rank, *joined.receivers(rank)])
        stream = self.entropy.child("coefficients").stream()
        secrets = (int.from_bytes(secret, "little") for secret in (self.seed, self.mask_secret))
        points, threshold = joined.points(rank, holders), joined.session.threshold
        columns = [shamir.split(secret, threshold, points, stream) for secret in secrets]
        return dict(zip(holders, zip(*columns, strict=True), strict=True))


@dataclass(frozen=True, slots=True)
class Peer:
    """What a client keeps about a partner: the key of the box to come, and the secret their mask grows from."""

    box_key: bytes = field(repr=False)
    mask_shared: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Waits for the others' boxes and the model; answers with the masked vector.

    `met` is where others stood when they joined, to be remembered beyond this session; it is not saved with it.
    """

    seed: bytes = field(repr=False)
    own_seed_share: int = field(repr=False)
    contribution: bytes = field(repr=False)
    joined: Joined
    peers: Mapping[int, Peer] = field(repr=False)
    met: Mapping[ClientId, Position] = field(default_factory=dict, repr=False)

    def answer(self, desk: Desk, data: bytes) -> tuple[bytes, Phase]:
        """Open the boxes, mask the contribution, and forget all that could unmask it."""
        session, joined = desk.session, self.joined
        request = messages.decode_mask_request(joined, desk.rank, data)
        checks.require_within(request.sharers, joined.present)
        desk.check_left(joined, request.sharers)
        opened = self._open(desk, request.shares)
        group = self._group_seed(desk, request.sharers, opened)
        context = keys.context(joined, request.task, request.model, request.sharers)
        vector = _checked(session, desk.contribute(request.task, request.model, group))
        hashed = keys.NO_GROUP if group is None else keys.group_hash(group)
        self._mask(desk, vector, context, hashed, self._partners(desk, request.sharers, opened))
        seed_shares = {rank: content.seed_share for rank, content in opened.items()}
        key_shares = {rank: content.key_share for rank, content in opened.items()}
        seed_shares[desk.rank] = self.own_seed_share
        state = Masked(context, joined, request.sharers, seed_shares, key_shares)
        return messages.encode_masked(session, desk.rank, MaskedVector(context, hashed, vector)), state

    def _open(self, desk: Desk, shares: EncryptedShares) -> dict[int, boxes.Content]:
        """Return what is in the boxes that open; the others' senders, or the server, will be asked about them."""
        tried = {
            rank: boxes.unseal(desk.session, self.peers[rank].box_key, box) for rank, box in shares.boxes.items()
        }
        opened = {rank: content for rank, content in tried.items() if content is not None}
        colluders = 0 if desk.history is None else desk.history.colluders
        checks.require_few_unopened(desk.session, colluders, len(tried) - len(opened))
        for content in opened.values():
            if content.claim is not None and desk.history is not None:
                checks.require_peer_position(desk.enrolled, desk.history, desk.client, content.claim)
        return opened

    def _partners(self, desk: Desk, sharers: Subset, opened: Mapping[int, boxes.Content]) -> list[int]:  # noqa: ARG002
        """Return with whom masks are shared, whoever's box opened: a server could spoil boxes to have fewer masks."""
        return self.joined.partners(desk.rank, sharers)

    def _group_seed(self, desk: Desk, sharers: Subset, opened: Mapping[int, boxes.Content]) -> bytes | None:
        if desk.session.delivery is not Delivery.EVERYONE:
            return None
        if len(opened) != int(sharers.sum()) - 1:
            raise PeerError("every client's part of the group seed is needed, got a box that does not open")
        everyone = {rank: content.contribution for rank, content in opened.items()}
        everyone[desk.rank] = self.contribution
        return keys.group_seed(desk.session, [everyone[rank] for rank in sorted(everyone)])

    def _mask(self, desk: Desk, vector: RingVector, context: bytes, group: bytes, partners: list[int]) -> None:
        ring, client = desk.session.ring, desk.client
        ring.add_mask_into(vector, Stream(keys.self_mask_key(self.seed, context, client)))
        for rank in partners:
            pair = client, desk.session.cohort[rank]
            key = keys.pair_mask_key(self.peers[rank].mask_shared, context, pair, group)
            apply = ring.add_mask_into if desk.rank < rank else ring.subtract_mask_into
            apply(vector, Stream(key))


@dataclass(frozen=True, slots=True, eq=False)
class Masked:
    """Waits to hear whose vectors arrived; answers with its signature, or with one share per client."""

    context: bytes
    joined: Joined
    sharers: Subset
    seed_shares: Mapping[int, int] = field(repr=False)
    key_shares: Mapping[int, int] = field(repr=False)

    def answer(self, desk: Desk, data: bytes) -> tuple[bytes, Phase]:
        """Confirm the survivors if the session is signed, else open the shares."""
        session = desk.session
        kind = MessageKind.SURVIVORS if session.is_signed else MessageKind.UNMASK_REQUEST
        survivors = messages.decode_survivors(session, kind, desk.rank, data)
        checks.require_within(survivors, self.sharers)
        desk.check_left(self.joined, survivors)
        if not session.is_signed:
            return self.open(desk, survivors), Finished()
        signature = desk.sign(keys.survivors_statement(self.context, survivors))
        return messages.encode_confirmation(session, desk.rank, signature), Confirmed(self, survivors)

    def open(self, desk: Desk, survivors: Subset) -> bytes:
        """Return one share per client: of the self-mask seed if its vector arrived, of the mask key if not.

        Guarantee: a survivor's mask key and a dropped client's seed stay closed; both would open its vector.
        Checked: test_malicious_server.py (both kinds of share), test_secagg_machine.py (I1).
        """
        shares = {
            owner: seed_share if survivors[owner] else self.key_shares[owner]
            for owner, seed_share in self.seed_shares.items()
        }
        return messages.encode_opened(self.joined, desk.rank, self.sharers, shares)


@dataclass(frozen=True, slots=True, eq=False)
class Confirmed:
    """Waits for the others' signatures under the same survivors; answers with one share per client."""

    masked: Masked
    survivors: Subset

    def answer(self, desk: Desk, data: bytes) -> tuple[bytes, Phase]:
        """Open the shares once enough clients have signed what this one has signed."""
        signatures = messages.decode_signatures(desk.session, desk.rank, data)
        statement = keys.survivors_statement(self.masked.context, self.survivors)
        checks.require_enough_signatures(desk.session, signatures)
        checks.require_confirmed(desk.session, desk.enrolled.roster, statement, signatures)
        return self.masked.open(desk, self.survivors), Finished()


def group_seed_of(session: Session, entropies: Mapping[int, Entropy]) -> bytes:
    """Return the group seed that clients with these entropies agree on, for a simulation that skips the exchange."""
    shares = (_fresh(session, client, entropies[client]).child("shares") for client in session.cohort)
    return keys.group_seed(session, [_group_contribution(entropy) for entropy in shares])


def _fresh(session: Session, client: int, entropy: Entropy) -> Entropy:
    return entropy.child("d2pfed client", session.digest, client)


def _group_contribution(entropy: Entropy) -> bytes:
    return entropy.child("group").key


def _met(desk: Desk, listed: Adverts) -> dict[ClientId, Position]:
    """Return where the others stand. Each checks what is said about itself, so nobody checks it for them."""
    positions = {desk.session.cohort[rank]: advert.position for rank, advert in listed.adverts.items()}
    return {
        client: position
        for client, position in positions.items()
        if position is not None and client != desk.client
    }


def _checked(session: Session, vector: RingVector) -> RingVector:
    if vector.dtype != np.uint32 or vector.shape != (session.dimension,) or vector.max() >= session.ring.modulus:
        raise ConfigError(f"a contribution must be {session.dimension} numbers of the ring, got {vector.shape}")
    return vector.copy()
