"""A silo's half of standing keys: two exchanges set an epoch up, each step after that is one.

    exchange   takes                  keeps afterwards                          answers with
    ---------  ---------------------  ----------------------------------------  ----------------
    set-up 1   STANDING_INVITATION    its X25519 secret and its advert          STANDING_ADVERT
    set-up 2   STANDING_ADVERTS       one key for each peer, no X25519 secret   STANDING_READY
    a step     STANDING_REQUEST       the keys of the step after it             STANDING_MASKED

A step is done in this order: checks; the charge is durable; training, coins and noise; the keys have moved on, durably;
masks; the answer. After the charge a step is never computed again, whatever fails.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import KEY_BYTES, Entropy, Stream
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg import crypto
from d2pfed.secagg.pairwise import checks as common
from d2pfed.secagg.position import POSITION_BYTES, History, Position, unpack_position
from d2pfed.secagg.roster import Enrolment
from d2pfed.secagg.standing import checks
from d2pfed.secagg.standing import epoch as standing
from d2pfed.secagg.standing import messages as standing_messages
from d2pfed.secagg.standing.epoch import Epoch, StandingAdvert, StandingKeys, StandingStep
from d2pfed.secagg.wire import BINDING_BYTES, ClientId, MessageKind, frame, pack_integer, pack_subset, unframe

_T = TypeVar("_T")

# From a step and the bytes of its task and model to the vector to be summed. It writes the row of the step, durably,
# before it touches any data, refuses a second row of the same step, and then trains, clips and adds noise.
StandingContribute = Callable[[StandingStep, bytes, bytes], RingVector]


@dataclass(frozen=True, slots=True)
class StandingAdvertised:
    """Between the two exchanges of the set-up: the private key, and the advert of its public one."""

    secret: bytes = field(repr=False)
    advert: StandingAdvert

    def encode(self, epoch: Epoch, client: ClientId) -> bytes:
        """Return the bytes to be kept in volatile storage until the next exchange."""
        return frame(MessageKind.SAVED_STANDING_ADVERTISED, epoch.digest, client, self.secret, self.advert.pack())

    @staticmethod
    def decode(epoch: Epoch, client: ClientId, data: bytes) -> "StandingAdvertised":
        """Read the bytes that were kept."""
        reader = unframe(data, MessageKind.SAVED_STANDING_ADVERTISED, epoch.digest, client)
        secret, public = reader.take(KEY_BYTES), reader.take(crypto.PUBLIC_BYTES)
        position = unpack_position(reader.take(POSITION_BYTES))
        advert = StandingAdvert(public, position, reader.take(crypto.SIGNATURE_BYTES))
        reader.end()
        return StandingAdvertised(secret, advert)


@dataclass(frozen=True, slots=True, eq=False)
class StandingState:
    """What a silo keeps from step to step, in volatile storage only: the key of each peer at the next step."""

    keys: StandingKeys
    client: ClientId
    following: int  # the next step that may be answered
    pair_keys: Mapping[int, bytes] = field(repr=False)  # by rank

    def at(self, number: int) -> "StandingState":
        """Return the state with all keys moved on to a step."""
        moved = dict(self.pair_keys)
        for _ in range(self.following, number):
            moved = {rank: standing.next_pair_key(key) for rank, key in moved.items()}
        return replace(self, following=number, pair_keys=moved)

    def masks(self, step: StandingStep, step_context: bytes) -> "Masks":
        """Return the keys of the masks that are shared with the other members, for the step the keys are at."""
        added, subtracted = list[bytes](), list[bytes]()
        for rank, key in self.pair_keys.items():
            if step.members[rank]:
                peer = self.keys.epoch.cohort[rank]
                derived = standing.mask_key(key, step_context, (self.client, peer))
                (added if self.client < peer else subtracted).append(derived)
        return Masks(tuple(added), tuple(subtracted))

    def encode(self) -> bytes:
        """Return the bytes to be kept; whoever restores old ones breaks the guarantee."""
        packed = (self.pair_keys[rank] for rank in sorted(self.pair_keys))
        fields = self.keys.digest, pack_subset(self.keys.joined), pack_integer(self.following, 4), *packed
        return frame(MessageKind.SAVED_STANDING, self.keys.epoch.digest, self.client, *fields)

    @staticmethod
    def decode(epoch: Epoch, client: ClientId, data: bytes) -> "StandingState":
        """Read the bytes that were kept."""
        reader = unframe(data, MessageKind.SAVED_STANDING, epoch.digest, client)
        digest, joined = reader.take(BINDING_BYTES), reader.subset(len(epoch.cohort))
        following = reader.integer(4)
        peers = [int(rank) for rank in np.flatnonzero(joined) if epoch.cohort[rank] != client]
        pair_keys = {rank: reader.take(KEY_BYTES) for rank in peers}
        reader.end()
        return StandingState(StandingKeys(epoch, joined, digest), client, following, pair_keys)


@dataclass(frozen=True, slots=True)
class Masks:
    """The keys of a step's masks."""

    added: tuple[bytes, ...] = field(repr=False)
    subtracted: tuple[bytes, ...] = field(repr=False)


class StandingStore(Protocol):
    """Where a silo's state lives: memory that no backup restores."""

    def read(self) -> StandingState | None:
        """Return the state; None if there is none, which is never repaired."""
        ...

    def advance(self, move: Callable[[StandingState], tuple[StandingState, _T]]) -> _T:
        """Under a lock: replace the state by the one that `move` makes of it, then return what else it made.

        When this returns, the new state is as durable as the store ever is, and the old one is gone.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingSilo:
    """What a silo brings to the set-up of an epoch.

    Attributes:
        epoch: as it follows from the silo's own plan and roster, and the names in the invitation.
        history: its own position after the row that says that this epoch has begun, and where it has met others.
        charged: the steps of this run that have a row in its ledger.
    """

    epoch: Epoch
    client: ClientId
    enrolment: Enrolment
    history: History
    charged: Collection[int]

    def __post_init__(self) -> None:
        self.enrolment.require_self(self.client)

    @property
    def rank(self) -> int:
        """Return this silo's place."""
        return self.epoch.rank(self.client)

    def advertise(self, invitation: bytes, entropy: Entropy) -> tuple[bytes, StandingAdvertised]:
        """Answer the invitation with a fresh public key; `entropy` is used once, here."""
        invited = standing_messages.decode_standing_invitation(invitation)
        roster = self.enrolment.roster
        checks.require_epoch_recomputed(self.epoch, self.client, roster.serial, invited)
        checks.require_first_is_new(self.epoch.first, self.charged)
        common.require_server_position(self.enrolment, self.history, self.client, invited.remembered)
        secret = entropy.child("d2pfed standing client", self.epoch.digest, self.client).key
        unsigned = StandingAdvert(crypto.Agreement(secret).public, self.history.position)
        signature = crypto.sign(self.enrolment.secret, unsigned.statement(self.epoch, self.client))
        advert = replace(unsigned, signature=signature)
        return standing_messages.encode_standing_advert(self.epoch, self.rank, advert), StandingAdvertised(
            secret, advert
        )

    def agree(
        self, advertised: StandingAdvertised, data: bytes, agree: crypto.Agree = crypto.agree
    ) -> "StandingReady":
        """Derive the keys of all pairs from the others' adverts, and forget the private key.

        A silo that has met a peer at a position that is not earlier does not become ready, and says so.
        """
        epoch, rank = self.epoch, self.rank
        adverts = standing_messages.decode_standing_adverts(epoch, rank, data)
        checks.require_own_advert(adverts, rank, advertised.advert)
        checks.require_joined_quorum(epoch, adverts)
        checks.require_adverts_signed(epoch, self.enrolment.roster, adverts)
        checks.require_distinct(adverts)
        if claims := checks.not_later(epoch, rank, adverts, self.history.known):
            return StandingReady(standing_messages.encode_standing_claims(epoch, rank, claims), None, {})
        keys, own = StandingKeys.of(epoch, adverts), crypto.Agreement(advertised.secret)
        pair_keys: dict[int, bytes] = {}
        for other, advert in adverts.items():
            if other != rank:
                checks.require_no_low_order(advert.public)
                pair = self.client, epoch.cohort[other]
                pair_keys[other] = standing.pair_key(agree(own, advert.public), keys.digest, pair)
        met = {epoch.cohort[other]: advert.position for other, advert in adverts.items() if other != rank}
        state = StandingState(keys, self.client, epoch.first, pair_keys)
        return StandingReady(standing_messages.encode_standing_ready(epoch, rank, keys.digest), state, met)


@dataclass(frozen=True, slots=True, eq=False)
class StandingReady:
    """The end of a set-up: the answer, the state to keep before it leaves (None: not ready), and where peers stood."""

    answer: bytes
    state: StandingState | None
    met: Mapping[ClientId, Position]


def answer_step(
    epoch: Epoch,
    client: ClientId,
    data: bytes,
    *,
    store: StandingStore,
    contribute: StandingContribute,
) -> bytes:
    """Answer the request for a step's vector, once; an error of any line is final for the lines after it.

    Guarantee: no answer leaves without its row, and no two different answers have the same masks, whatever crashes.
    Checked: test_standing_crashes.py.
    """
    request = standing_messages.decode_standing_request(epoch, epoch.rank(client), data)
    step, state = request.step, _require_state(store, epoch)
    _check_step(state, step)
    vector = common.ring_copy(epoch.ring, epoch.dimension, contribute(step, request.task, request.model))
    step_context = standing.context(state.keys.digest, step, request.model, request.task)

    def move(now: StandingState) -> tuple[StandingState, Masks]:
        if now.keys.digest != state.keys.digest:
            raise PeerError("this silo has agreed on other keys meanwhile")
        checks.require_step_forward(now.following, step.number)
        moved = now.at(step.number)
        return moved.at(step.number + 1), moved.masks(step, step_context)

    masks = store.advance(move)
    added, subtracted = ([Stream(key) for key in keys] for keys in (masks.added, masks.subtracted))
    epoch.ring.add_masks_into(vector, added, subtracted)
    return standing_messages.encode_standing_masked(epoch, epoch.rank(client), step_context, vector)


def _check_step(state: StandingState, step: StandingStep) -> None:
    checks.require_member(step, step.epoch.rank(state.client))
    checks.require_members_joined(step.members, state.keys.joined)
    checks.require_quorum(step)
    checks.require_planned_step(step)
    checks.require_step_forward(state.following, step.number)


def _require_state(store: StandingStore, epoch: Epoch) -> StandingState:
    """Return the state of this epoch; without one nothing is repaired: the server opens a new epoch."""
    state = store.read()
    if state is None or state.keys.epoch.digest != epoch.digest:
        raise PeerError("this silo has no standing keys of this epoch: it needs a new one")
    return state
