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
from operator import attrgetter
from typing import Protocol, TypeVar

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import KEY_BYTES, Entropy, Stream
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg import checks, crypto, wire
from d2pfed.secagg.roster import Enrolment, History, Position
from d2pfed.secagg.standing import epoch as epochs
from d2pfed.secagg.standing.epoch import Advert, Epoch, Keys, Step
from d2pfed.secagg.wire import BINDING_BYTES, ClientId, MessageKind

MOST_SKIPPED = 4096  # steps that a client moves its keys on at once

_T = TypeVar("_T")
_named = attrgetter("run", "epoch", "first")  # of an epoch and of an invitation

# From a step and the bytes of its task and model to the vector to be summed. It writes the row of the step, durably,
# before it touches any data, refuses a second row of the same step, and then trains, clips and adds noise.
Contribute = Callable[[Step, bytes, bytes], RingVector]


@dataclass(frozen=True, slots=True)
class Advertised:
    """Between the two exchanges of the set-up: the private key, and the advert of its public one."""

    secret: bytes = field(repr=False)
    advert: Advert

    def encode(self, epoch: Epoch, client: ClientId) -> bytes:
        """Return the bytes to be kept in volatile storage until the next exchange."""
        return wire.frame(
            MessageKind.SAVED_STANDING_ADVERTISED, epoch.digest, client, self.secret, self.advert.pack()
        )

    @staticmethod
    def decode(epoch: Epoch, client: ClientId, data: bytes) -> "Advertised":
        """Read the bytes that were kept."""
        with wire.unframe(data, MessageKind.SAVED_STANDING_ADVERTISED, epoch.digest, client) as reader:
            return Advertised(reader.take(KEY_BYTES), epochs.read_advert(reader))


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What a silo keeps from step to step, in volatile storage only: the key of each peer at the next step."""

    keys: Keys
    client: ClientId
    following: int  # the next step that may be answered
    pair_keys: Mapping[int, bytes] = field(repr=False)  # by rank

    def at(self, number: int) -> "State":
        """Return the state with all keys moved on to a step."""
        moved = dict(self.pair_keys)
        for _ in range(self.following, number):
            moved = {rank: epochs.next_pair_key(key) for rank, key in moved.items()}
        return replace(self, following=number, pair_keys=moved)

    def masks(self, step: Step, step_context: bytes) -> tuple[list[bytes], list[bytes]]:
        """Return the keys of the masks to be added and subtracted at the step that the keys are at."""
        added, subtracted = list[bytes](), list[bytes]()
        for rank, key in self.pair_keys.items():
            if step.members[rank]:
                peer = self.keys.epoch.cohort[rank]
                derived = epochs.mask_key(key, step_context, (self.client, peer))
                (added if self.client < peer else subtracted).append(derived)
        return added, subtracted

    def encode(self) -> bytes:
        """Return the bytes to be kept; restoring old ones breaks the guarantee."""
        packed = (self.pair_keys[rank] for rank in sorted(self.pair_keys))
        fields = (
            self.keys.digest,
            wire.pack_subset(self.keys.joined),
            wire.pack_integer(self.following, 4),
            *packed,
        )
        return wire.frame(MessageKind.SAVED_STANDING, self.keys.epoch.digest, self.client, *fields)

    @staticmethod
    def decode(epoch: Epoch, client: ClientId, data: bytes) -> "State":
        """Read the bytes that were kept."""
        with wire.unframe(data, MessageKind.SAVED_STANDING, epoch.digest, client) as reader:
            digest, joined = reader.take(BINDING_BYTES), reader.subset(len(epoch.cohort))
            following = reader.integer(4)
            peers = (rank for rank in wire.ranks_of(joined) if epoch.cohort[rank] != client)
            pair_keys = {rank: reader.take(KEY_BYTES) for rank in peers}
        return State(Keys(epoch, joined, digest), client, following, pair_keys)


class Store(Protocol):
    """Where a silo's state lives: memory that no backup restores."""

    def read(self) -> State | None:
        """Return the state; None if there is none, which is never repaired."""

    def advance(self, move: Callable[[State], tuple[State, _T]]) -> _T:
        """Under a lock: replace the state by the one that `move` makes of it, then return what else it made.

        When this returns, the new state is as durable as the store ever is, and the old one is gone.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Agreed:
    """The end of a set-up: the answer, the state to keep before it leaves (None: not ready), and where peers stood."""

    answer: bytes
    state: State | None
    met: Mapping[ClientId, Position]


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
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

    def advertise(self, invitation: bytes, entropy: Entropy) -> tuple[bytes, Advertised]:
        """Answer the invitation with a fresh public key; `entropy` is used once, here."""
        epoch, client, invited = self.epoch, self.client, epochs.decode_invitation(invitation)
        named = invited.client, invited.binding, invited.serial, invited.silos, *_named(invited)
        agreed = client, epoch.digest, self.enrolment.roster.serial, epoch.cohort, *_named(epoch)
        checks.require_agreed(named, agreed)
        require_first_is_new(epoch.first, self.charged)
        checks.require_in_chain(self.enrolment, self.history, client, invited.remembered, "the server")
        secret = entropy.child("d2pfed standing client", epoch.digest, client).key
        unsigned = Advert(crypto.Agreement(secret).public, self.history.position)
        signature = crypto.sign(self.enrolment.secret, unsigned.statement(epoch, client))
        advert = replace(unsigned, signature=signature)
        answer = wire.message(epoch, MessageKind.STANDING_ADVERT, epoch.rank(client), advert.pack())
        return answer, Advertised(secret, advert)

    def agree(self, advertised: Advertised, data: bytes, agree: crypto.Agree = crypto.agree) -> Agreed:
        """Derive the keys of all pairs from the others' adverts, and forget the private key.

        A silo that has met a peer at a position that is not earlier does not become ready, and says so: the peer was
        rolled back or cloned.
        """
        epoch, rank, known = self.epoch, self.epoch.rank(self.client), self.history.known
        adverts = epochs.decode_adverts(epoch, rank, data)
        checks.require_own(adverts[rank].pack() if rank in adverts else None, advertised.advert.pack())
        checks.require_quorum(epoch.quorum, len(adverts))
        signed = {
            other: (advert.statement(epoch, epoch.cohort[other]), advert.signature)
            for other, advert in adverts.items()
        }
        checks.require_signed(epoch, self.enrolment.roster, signed)
        checks.require_distinct_keys(advert.public for advert in adverts.values())
        keys, own = Keys.of(epoch, adverts), crypto.Agreement(advertised.secret)
        others = {other: (epoch.cohort[other], advert) for other, advert in adverts.items() if other != rank}
        claims = {
            other: known[peer]
            for other, (peer, advert) in others.items()
            if peer in known and advert.position.count <= known[peer].count
        }
        if claims:
            return Agreed(epochs.encode_claims(epoch, rank, claims), None, {})
        pair_keys: dict[int, bytes] = {}
        for other, (peer, advert) in others.items():
            crypto.require_order(advert.public)
            shared = agree(own, advert.public)
            pair_keys[other] = epochs.pair_key(shared, keys.digest, (self.client, peer))
        return Agreed(
            wire.message(epoch, MessageKind.STANDING_READY, rank, keys.digest),
            State(keys, self.client, epoch.first, pair_keys),
            {peer: advert.position for peer, advert in others.values()},
        )


def answer_step(epoch: Epoch, client: ClientId, data: bytes, *, store: Store, contribute: Contribute) -> bytes:
    """Answer the request for a step's vector, once; an error of any line is final for the lines after it.

    Without keys of this epoch nothing is repaired: the server opens a new one.

    Guarantee: no answer leaves without its row, and no two different answers have the same masks, whatever crashes.
    Checked: test_standing_crashes.py.
    """
    rank = epoch.rank(client)
    request = epochs.decode_request(epoch, rank, data)
    step, state = request.step, store.read()
    if state is None or state.keys.epoch.digest != epoch.digest:
        raise PeerError("this silo has no standing keys of this epoch: it needs a new one")
    checks.require_self(rank, step.members)
    checks.require_within(step.members, state.keys.joined)
    checks.require_quorum(epoch.quorum, len(step.cohort))
    if step.round >= epoch.rounds or step.attempt >= epoch.attempts:
        raise PeerError(
            f"a plan of {epoch.rounds} rounds with {epoch.attempts} attempts each has no round {step.round + 1}, "
            f"attempt {step.attempt}"
        )
    require_step_forward(state.following, step.number)
    vector = checks.ring_copy(epoch.ring, epoch.dimension, contribute(step, request.task, request.model))
    step_context = epochs.context(state.keys.digest, step, request.model, request.task)

    def move(now: State) -> tuple[State, tuple[list[bytes], list[bytes]]]:
        if now.keys.digest != state.keys.digest:
            raise PeerError("this silo has agreed on other keys meanwhile")
        require_step_forward(now.following, step.number)
        moved = now.at(step.number)
        return moved.at(step.number + 1), moved.masks(step, step_context)

    added, subtracted = ([Stream(key) for key in keys] for keys in store.advance(move))
    epoch.ring.add_masks_into(vector, added, subtracted)
    return wire.message(epoch, MessageKind.STANDING_MASKED, rank, step_context, epoch.ring.pack(vector))


def require_first_is_new(first: int, charged: Collection[int]) -> None:
    """Refuse an epoch that begins at or before a step that was charged: it would be answered under the same row."""
    if charged and first <= max(charged):
        raise PeerError(f"an epoch must begin after step {max(charged)}, which was charged, got {first}")


def require_step_forward(following: int, number: int) -> None:
    """Refuse a step that the keys have passed, `following` being the next: it was answered, or skipped for good."""
    if number < following:
        raise PeerError(f"step {number} is over: this silo's keys are at step {following}")
    if number - following > MOST_SKIPPED:
        raise PeerError(f"at most {MOST_SKIPPED} steps may be skipped, got {number - following}")


def require_charge_once(charged: Collection[int], number: int) -> None:
    """Refuse a step that has a row in this silo's ledger: it is never computed again."""
    if number in charged:
        raise PeerError(f"step {number} was charged before")
