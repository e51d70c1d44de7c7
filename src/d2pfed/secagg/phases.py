"""The phases of a client: each holds only what it may still use, and answers one request."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from d2pfed.errors import ConfigError, PeerError
from d2pfed.graph import Consistency
from d2pfed.randomness import Entropy, Stream
from d2pfed.ring import RingVector
from d2pfed.secagg import checks, crypto, keys, messages, shamir
from d2pfed.secagg.messages import Advert, Kind, holders_within
from d2pfed.secagg.roster import Enrolment
from d2pfed.secagg.session import Delivery, Session
from d2pfed.secagg.shamir import SHARE_BYTES, pack_shares, unpack_share
from d2pfed.wire import Subset

# From the model's bytes and, under Delivery.EVERYONE, the group seed, to the vector to be summed.
Contribute = Callable[[bytes, bytes | None], RingVector]


@dataclass(frozen=True, slots=True)
class Desk:
    """What does not change from phase to phase."""

    session: Session
    rank: int
    contribute: Contribute
    enrolment: Enrolment | None

    def __post_init__(self) -> None:
        if self.session.consistency is Consistency.SIGNED:
            self.enrolled.require_self(self.client)

    @property
    def client(self) -> int:
        """Return this client's identity."""
        return self.session.cohort[self.rank]

    @property
    def enrolled(self) -> Enrolment:
        """Return the enrolment that signed consistency needs."""
        if self.enrolment is None:
            raise ConfigError("signed consistency needs an enrolment, got none")
        return self.enrolment

    def sign(self, statement: bytes) -> bytes:
        """Return this client's signature, empty where nothing is signed."""
        return crypto.sign(self.enrolled.secret, statement) if self.signs else b""

    @property
    def signs(self) -> bool:
        """Say whether this session is signed."""
        return self.session.consistency is Consistency.SIGNED


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
        """Advertise keys that belong to this session alone."""
        session = desk.session
        checks.require_request(data, messages.encode_invitation(session, desk.rank))
        fresh = _fresh(session, desk.client, self.entropy)
        secrets = Advertised(
            fresh.child("seal").key, fresh.child("mask").key, fresh.child("self").key, fresh.child("shares")
        )
        return messages.encode_advert(session, desk.rank, secrets.advert(desk)), secrets


@dataclass(frozen=True, slots=True)
class Advertised:
    """Waits for the others' keys; answers with its secrets in sealed shares."""

    seal_secret: bytes = field(repr=False)
    mask_secret: bytes = field(repr=False)
    seed: bytes = field(repr=False)
    entropy: Entropy

    def advert(self, desk: Desk) -> Advert:
        """Return the public side of the secrets."""
        publics = crypto.Agreement(self.seal_secret).public, crypto.Agreement(self.mask_secret).public
        unsigned = Advert(*publics, keys.commitment(desk.session, desk.client, self.seed), b"")
        statement = keys.advert_statement(desk.session, desk.client, unsigned)
        return Advert(*publics, unsigned.commitment, desk.sign(statement))

    def answer(self, desk: Desk, data: bytes) -> tuple[bytes, Phase]:
        """Split both secrets among the holders that joined, agree on keys with them, forget the private keys."""
        session = desk.session
        listed = messages.decode_adverts(session, desk.rank, data)
        self._check(desk, listed)
        contribution = _group_contribution(self.entropy) if session.delivery is Delivery.EVERYONE else b""
        shares = self._split(session, desk.rank, list(listed.adverts))
        seal, mask = crypto.Agreement(self.seal_secret), crypto.Agreement(self.mask_secret)
        boxes: dict[int, bytes] = {}
        peers: dict[int, Peer] = {}
        for rank, advert in listed.adverts.items():
            if rank == desk.rank:
                continue
            peer, shared = session.cohort[rank], seal.agree(advert.seal_public)
            outbound = keys.box_key(session, shared, desk.client, peer)
            boxes[rank] = crypto.seal(outbound, pack_shares(shares[rank]) + contribution)
            peers[rank] = Peer(keys.box_key(session, shared, peer, desk.client), mask.agree(advert.mask_public))
        state = Shared(self.seed, shares[desk.rank][0], contribution, listed.joined, peers)
        return messages.encode_boxes(session, desk.rank, boxes), state

    def _check(self, desk: Desk, listed: messages.Adverts) -> None:
        _check_left(desk, listed.joined)
        checks.require_own_advert(listed.adverts[desk.rank], self.advert(desk))
        checks.require_distinct_keys(listed.adverts)
        if desk.signs:
            checks.require_enrolled_adverts(desk.session, desk.enrolled.roster, listed.adverts)

    def _split(self, session: Session, rank: int, present: list[int]) -> dict[int, tuple[int, int]]:
        """Return (share of the seed, share of the mask key) by holder; points are places among all the holders."""
        points = [int(place) + 1 for place in np.searchsorted(session.graph.holders(rank), present)]
        stream = self.entropy.child("coefficients").stream()
        secrets = (int.from_bytes(secret, "little") for secret in (self.seed, self.mask_secret))
        columns = [shamir.split(secret, session.threshold, points, stream) for secret in secrets]
        return dict(zip(present, zip(*columns, strict=True), strict=True))


@dataclass(frozen=True, slots=True)
class Peer:
    """What a client keeps about a neighbour: the key of the box to come, and the secret their mask grows from."""

    box_key: bytes = field(repr=False)
    mask_shared: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Shared:
    """Waits for the others' boxes and the model; answers with the masked vector."""

    seed: bytes = field(repr=False)
    own_seed_share: int = field(repr=False)
    contribution: bytes = field(repr=False)
    joined: Subset
    peers: Mapping[int, Peer] = field(repr=False)

    def answer(self, desk: Desk, data: bytes) -> tuple[bytes, Phase]:
        """Open the boxes, mask the contribution, and forget all that could unmask it."""
        session = desk.session
        request = messages.decode_mask_request(session, desk.rank, data)
        checks.require_within(request.sharers, self.joined)
        _check_left(desk, request.sharers)
        opened = {rank: crypto.unseal(self.peers[rank].box_key, box) for rank, box in request.boxes.items()}
        seed_shares = {rank: unpack_share(plain[:SHARE_BYTES]) for rank, plain in opened.items()}
        key_shares = {rank: unpack_share(plain[SHARE_BYTES : 2 * SHARE_BYTES]) for rank, plain in opened.items()}
        seed_shares[desk.rank] = self.own_seed_share
        group = self._group_seed(desk, {rank: plain[2 * SHARE_BYTES :] for rank, plain in opened.items()})
        context = keys.context(session, request.model, request.sharers)
        vector = _checked(session, desk.contribute(request.model, group))
        self._mask(desk, vector, context, keys.NO_GROUP if group is None else keys.group_hash(group), list(opened))
        state = Masked(context, request.sharers, seed_shares, key_shares)
        return messages.encode_masked(session, desk.rank, context, vector), state

    def _group_seed(self, desk: Desk, contributions: dict[int, bytes]) -> bytes | None:
        if desk.session.delivery is not Delivery.EVERYONE:
            return None
        everyone = contributions | {desk.rank: self.contribution}
        return keys.group_seed(desk.session, [everyone[rank] for rank in sorted(everyone)])

    def _mask(self, desk: Desk, vector: RingVector, context: bytes, group: bytes, partners: list[int]) -> None:
        session, ring, client = desk.session, desk.session.ring, desk.client
        own = Stream(keys.self_mask_key(self.seed, context, client))
        ring.add_into(vector, ring.uniform(own, session.dimension))
        for rank in partners:
            pair = client, session.cohort[rank]
            stream = Stream(keys.pair_mask_key(self.peers[rank].mask_shared, context, pair, group))
            apply = ring.add_into if desk.rank < rank else ring.subtract_into
            apply(vector, ring.uniform(stream, session.dimension))


@dataclass(frozen=True, slots=True)
class Masked:
    """Waits to hear whose vectors arrived; answers with its signature, or with one share per client."""

    context: bytes
    sharers: Subset
    seed_shares: Mapping[int, int] = field(repr=False)
    key_shares: Mapping[int, int] = field(repr=False)

    def answer(self, desk: Desk, data: bytes) -> tuple[bytes, Phase]:
        """Confirm the survivors if the session is signed, else open the shares."""
        session = desk.session
        kind = Kind.SURVIVORS if desk.signs else Kind.UNMASK_REQUEST
        survivors = messages.decode_survivors(session, kind, desk.rank, data)
        checks.require_within(survivors, self.sharers)
        _check_left(desk, survivors)
        if not desk.signs:
            return self.open(desk, survivors), Finished()
        signature = desk.sign(keys.survivors_statement(self.context, survivors))
        return messages.encode_confirmation(session, desk.rank, signature), Confirmed(self, survivors)

    def open(self, desk: Desk, survivors: Subset) -> bytes:
        """Return one share per client: of the self-mask seed if its vector arrived, of the mask key if not.

        Guarantee: a survivor's mask key and a dropped client's seed stay closed; both would open its vector.
        Checked: test_malicious_server.py (both kinds of share), test_secagg_machine.py (I1).
        """
        owners = holders_within(desk.session, desk.rank, self.sharers)
        shares = [self.seed_shares[owner] if survivors[owner] else self.key_shares[owner] for owner in owners]
        return messages.encode_opened(desk.session, desk.rank, shares)


@dataclass(frozen=True, slots=True)
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


def _check_left(desk: Desk, present: Subset) -> None:
    """Check what must hold for the clients that are left, whichever exchange it is."""
    checks.require_self(desk.rank, present)
    checks.require_quorum(desk.session, present)
    checks.require_neighbours(desk.session, desk.rank, present)
    checks.require_designated(desk.session, present)


def _checked(session: Session, vector: RingVector) -> RingVector:
    if vector.dtype != np.uint32 or vector.shape != (session.dimension,) or vector.max() >= session.ring.modulus:
        raise ConfigError(f"a contribution must be {session.dimension} numbers of the ring, got {vector.shape}")
    return vector.copy()
