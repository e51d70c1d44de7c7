"""The phases of a client: each holds only what it may still use, and answers one request.

Theory of operation. A client is in one phase at a time. A phase accepts one kind of message, answers it with one
message, and gives way to the next phase, which receives only the secrets listed here; all others are forgotten. The
rounds of Bonawitz et al. (2017) are those of the server's requests: AdvertiseKeys, ShareKeys, MaskedInputCollection,
ConsistencyCheck (if signed) and Unmasking.

    phase       may use                               accepts             answers with            next
    ----------  ------------------------------------  ------------------  ----------------------  ----------
    Invited     its entropy                           INVITATION          KEY_ADVERTISEMENT       Advertised
    Advertised  both private keys, self-mask seed     KEY_ADVERTISEMENTS  ENCRYPTED_SHARES        Shared
    Shared      self-mask seed, its own share of it,  MASK_REQUEST        MASKED_VECTOR           Masked
                agreed secrets of its partners
    Masked      the shares it holds for others        UNMASK_REQUEST      UNMASKING_SHARES        Finished
                                          if signed:  SURVIVORS           SURVIVORS_SIGNATURE     Confirmed
    Confirmed   the same, and the set it has signed   UNMASK_REQUEST      UNMASKING_SHARES        Finished
    Finished    nothing                               nothing

Whatever else arrives, and whatever fails a check, leads to Finished. So a client answers each request once, and never
reveals both secrets of another client: a phase that still holds shares has one way out, for one set of survivors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import Entropy, Stream
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg import crypto, shamir
from d2pfed.secagg.pairwise import checks, keys, messages
from d2pfed.secagg.pairwise.checks import ClientSession
from d2pfed.secagg.pairwise.keys import JoinedClients, KeyAdvertisement, leaf, lists_leaves
from d2pfed.secagg.pairwise.messages import EncryptedShares, KeyAdvertisements, MaskedVector, decode_invitation
from d2pfed.secagg.pairwise.session import Delivery, Session
from d2pfed.secagg.position import Position
from d2pfed.secagg.wire import ClientId, MessageKind, Subset, subset_of


class Phase(Protocol):
    """A phase answers one request and names the next phase."""

    def answer(self, local: ClientSession, data: bytes) -> tuple[bytes, "Phase"]:
        """Return the answer and the next phase."""
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing is left to use: the attempt is over for this client, well or badly."""

    def answer(self, local: ClientSession, data: bytes) -> tuple[bytes, Phase]:  # noqa: ARG002 - a phase's signature
        """Refuse whatever comes."""
        raise PeerError("this client has finished this attempt")


@dataclass(frozen=True, slots=True)
class Invited:
    """Waits for the invitation; answers with fresh keys."""

    entropy: Entropy

    def answer(self, local: ClientSession, data: bytes) -> tuple[bytes, Phase]:
        """Advertise keys that belong to this session alone, and where this client stands."""
        session, history = local.session, local.history
        invited = decode_invitation(data, local.depth)
        checks.require_invited(session, local.client, invited)
        if session.is_signed and history is not None:
            checks.require_server_position(local.enrolled, history, local.client, invited.remembered)
        fresh = _fresh(session, local.client, self.entropy)
        secrets = Advertised(
            fresh.child("seal").key,
            fresh.child("mask").key,
            fresh.child("self").key,
            fresh.child("shares"),
            history.position if session.is_signed and history is not None else None,
        )
        return messages.encode_advertisement(session, local.rank, secrets.advertisement(local)), secrets


@dataclass(frozen=True, slots=True)
class Advertised:
    """Waits for the others' keys; answers with its secrets in sealed shares."""

    seal_secret: bytes = field(repr=False)
    mask_secret: bytes = field(repr=False)
    seed: bytes = field(repr=False)
    entropy: Entropy
    position: Position | None

    def advertisement(self, local: ClientSession) -> KeyAdvertisement:
        """Return the public side of the secrets."""
        publics = crypto.Agreement(self.seal_secret).public, crypto.Agreement(self.mask_secret).public
        unsigned = KeyAdvertisement(
            *publics, keys.commitment(local.session, local.client, self.seed), self.position
        )
        return replace(unsigned, signature=local.sign(leaf(local.session, local.client, unsigned)))

    def answer(self, local: ClientSession, data: bytes) -> tuple[bytes, Phase]:
        """Split both secrets among the holders that joined, agree on keys with them, forget the private keys."""
        session = local.session
        listed = messages.decode_advertisements(session, local.rank, data)
        self._check(local, listed)
        contribution = _group_contribution(self.entropy) if session.delivery is Delivery.EVERYONE else b""
        shares = self._split(listed.joined, local.rank)
        seal, mask = crypto.Agreement(self.seal_secret), crypto.Agreement(self.mask_secret)
        known = local.history.known if session.is_signed and local.history is not None else {}
        sealed: dict[int, bytes] = {}
        peers: dict[int, Peer] = {}
        for rank in listed.joined.partners(local.rank, listed.joined.present):
            advertisement, peer = listed.advertisements[rank], session.cohort[rank]
            shared = local.agree(seal, advertisement.seal_public)
            peers[rank] = Peer(
                keys.share_key(session, shared, peer, local.client),
                local.agree(mask, advertisement.mask_public),
            )
            if rank in shares:
                outbound = keys.share_key(session, shared, local.client, peer)
                content = keys.ShareContent(*shares[rank], contribution, known.get(peer))
                sealed[rank] = crypto.seal(outbound, content.pack())
        claims = subset_of(len(session.cohort), [rank for rank in sealed if session.cohort[rank] in known])
        state = Shared(self.seed, shares[local.rank][0], contribution, listed.joined, peers, _met(local, listed))
        return messages.encode_encrypted_shares(listed.joined, local.rank, EncryptedShares(sealed, claims)), state

    def _check(self, local: ClientSession, listed: KeyAdvertisements) -> None:
        session, own = local.session, self.advertisement(local)
        local.check_remaining(listed.joined, listed.joined.present)
        checks.require_own_leaf(listed.leaves[local.rank], leaf(session, local.client, own))
        if lists_leaves(session):  # else they were made from these advertisements
            checks.require_leaves_fit(session, listed.leaves, listed.advertisements)
        checks.require_distinct_keys(listed.advertisements)
        if session.is_signed:
            checks.require_enrolled_advertisements(session, local.enrolled.roster, listed.advertisements)

    def _split(self, joined: JoinedClients, rank: int) -> dict[int, tuple[int, int]]:
        """Return (share of the seed, share of the mask key) by holder that joined, this client included."""
        holders = sorted([rank, *joined.receivers(rank)])
        stream = self.entropy.child("coefficients").stream()
        secrets = [int.from_bytes(secret, "little") for secret in (self.seed, self.mask_secret)]
        points, threshold = joined.points(rank, holders), joined.session.threshold
        columns = shamir.split_each(secrets, threshold, points, stream)
        return dict(zip(holders, zip(*columns, strict=True), strict=True))


@dataclass(frozen=True, slots=True)
class Peer:
    """What a client keeps about a partner: the key of the ciphertext to come, and the secret their mask grows from."""

    share_key: bytes = field(repr=False)
    mask_shared: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """Waits for the others' ciphertexts and the model; answers with the masked vector.

    `met` is where others stood when they joined, to be remembered beyond this session; it is not saved with it.
    """

    seed: bytes = field(repr=False)
    own_seed_share: int = field(repr=False)
    contribution: bytes = field(repr=False)
    joined: JoinedClients
    peers: Mapping[int, Peer] = field(repr=False)
    met: Mapping[ClientId, Position] = field(default_factory=dict, repr=False)

    def answer(self, local: ClientSession, data: bytes) -> tuple[bytes, Phase]:
        """Open the ciphertexts, mask the contribution, and forget all that could unmask it."""
        session, joined = local.session, self.joined
        request = messages.decode_mask_request(joined, local.rank, data)
        checks.require_within(request.sharers, joined.present)
        local.check_remaining(joined, request.sharers)
        opened = self._open(local, request.shares)
        group = self._group_seed(local, request.sharers, opened)
        context = keys.context(joined, request.task, request.model, request.sharers)
        contributed = local.contribute(request.task, request.model, group)
        vector = checks.ring_copy(session.ring, session.dimension, contributed)
        hashed = keys.NO_GROUP if group is None else keys.group_hash(group)
        self._mask(local, vector, context, hashed, self._partners(local, request.sharers, opened))
        seed_shares = {rank: content.seed_share for rank, content in opened.items()}
        key_shares = {rank: content.key_share for rank, content in opened.items()}
        seed_shares[local.rank] = self.own_seed_share
        state = Masked(context, joined, request.sharers, seed_shares, key_shares)
        return messages.encode_masked_vector(session, local.rank, MaskedVector(context, hashed, vector)), state

    def _open(self, local: ClientSession, shares: EncryptedShares) -> dict[int, keys.ShareContent]:
        """Return what is in the ciphertexts that open; the others' senders, or the server, will be asked about them."""
        tried = {
            rank: keys.decrypt_shares(local.session, self.peers[rank].share_key, ciphertext)
            for rank, ciphertext in shares.ciphertexts.items()
        }
        opened = {rank: content for rank, content in tried.items() if content is not None}
        colluders = 0 if local.history is None else local.history.colluders
        checks.require_few_unopened(local.session, colluders, len(tried) - len(opened))
        for content in opened.values():
            if content.claim is not None and local.history is not None:
                checks.require_peer_position(local.enrolled, local.history, local.client, content.claim)
        return opened

    def _partners(
        self,
        local: ClientSession,
        sharers: Subset,
        opened: Mapping[int, keys.ShareContent],  # noqa: ARG002 - masks must not depend on it
    ) -> list[int]:
        """Return with whom masks are shared, whoever's ciphertext opened: a server could spoil some for fewer masks."""
        return self.joined.partners(local.rank, sharers)

    def _group_seed(
        self, local: ClientSession, sharers: Subset, opened: Mapping[int, keys.ShareContent]
    ) -> bytes | None:
        if local.session.delivery is not Delivery.EVERYONE:
            return None
        if len(opened) != int(sharers.sum()) - 1:
            raise PeerError("every client's part of the group seed is needed, got a ciphertext that does not open")
        everyone = {rank: content.contribution for rank, content in opened.items()}
        everyone[local.rank] = self.contribution
        return keys.group_seed(local.session, [everyone[rank] for rank in sorted(everyone)])

    def _mask(
        self, local: ClientSession, vector: RingVector, context: bytes, group: bytes, partners: list[int]
    ) -> None:
        client = local.client
        added = [Stream(keys.self_mask_key(self.seed, context, client))]
        subtracted: list[Stream] = []
        for rank in partners:
            pair = client, local.session.cohort[rank]
            key = keys.pair_mask_key(self.peers[rank].mask_shared, context, pair, group)
            (added if local.rank < rank else subtracted).append(Stream(key))
        local.session.ring.add_masks_into(vector, added, subtracted)


@dataclass(frozen=True, slots=True, eq=False)
class Masked:
    """Waits to hear whose vectors arrived; answers with its signature, or with one share per client."""

    context: bytes
    joined: JoinedClients
    sharers: Subset
    seed_shares: Mapping[int, int] = field(repr=False)
    key_shares: Mapping[int, int] = field(repr=False)

    def answer(self, local: ClientSession, data: bytes) -> tuple[bytes, Phase]:
        """Confirm the survivors if the session is signed, else open the shares."""
        session = local.session
        kind = MessageKind.SURVIVORS if session.is_signed else MessageKind.UNMASK_REQUEST
        survivors = messages.decode_survivors(session, kind, local.rank, data)
        checks.require_within(survivors, self.sharers)
        local.check_remaining(self.joined, survivors)
        if not session.is_signed:
            return self.unmasking_shares(local, survivors), Finished()
        signature = local.sign(keys.survivors_statement(self.context, survivors))
        return messages.encode_confirmation(session, local.rank, signature), Confirmed(self, survivors)

    def unmasking_shares(self, local: ClientSession, survivors: Subset) -> bytes:
        """Return one share per client: of the self-mask seed if its vector arrived, of the mask key if not.

        Guarantee: a survivor's mask key and a dropped client's seed stay closed; both would open its vector.
        Checked: test_malicious_server.py (both kinds of share), test_secagg_machine.py (I1).
        """
        shares = {
            owner: seed_share if survivors[owner] else self.key_shares[owner]
            for owner, seed_share in self.seed_shares.items()
        }
        return messages.encode_unmasking_shares(self.joined, local.rank, self.sharers, shares)


@dataclass(frozen=True, slots=True, eq=False)
class Confirmed:
    """Waits for the others' signatures under the same survivors; answers with one share per client."""

    masked: Masked
    survivors: Subset

    def answer(self, local: ClientSession, data: bytes) -> tuple[bytes, Phase]:
        """Open the shares once enough clients have signed what this one has signed."""
        signatures = messages.decode_signatures(local.session, local.rank, data)
        statement = keys.survivors_statement(self.masked.context, self.survivors)
        checks.require_enough_signatures(local.session, signatures)
        checks.require_confirmed(local.session, local.enrolled.roster, statement, signatures)
        return self.masked.unmasking_shares(local, self.survivors), Finished()


def group_seed_of(session: Session, entropies: Mapping[int, Entropy]) -> bytes:
    """Return the group seed that clients with these entropies agree on, for a simulation that skips the exchange."""
    shares = (_fresh(session, client, entropies[client]).child("shares") for client in session.cohort)
    return keys.group_seed(session, [_group_contribution(entropy) for entropy in shares])


def _fresh(session: Session, client: int, entropy: Entropy) -> Entropy:
    return entropy.child("d2pfed client", session.digest, client)


def _group_contribution(entropy: Entropy) -> bytes:
    return entropy.child("group").key


def _met(local: ClientSession, listed: KeyAdvertisements) -> dict[ClientId, Position]:
    """Return where the others stand. Each checks what is said about itself, so nobody checks it for them."""
    positions = {
        local.session.cohort[rank]: advertisement.position for rank, advertisement in listed.advertisements.items()
    }
    return {
        client: position
        for client, position in positions.items()
        if position is not None and client != local.client
    }
