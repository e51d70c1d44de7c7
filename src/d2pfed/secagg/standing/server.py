"""The server's half of standing keys: set an epoch up once, then one exchange a step.

    Advertising -> Agreeing -> ReadyEpoch;   for each step: Collecting -> the sum

A step is all or nothing: if a member's vector is missing, the step is void and its vectors are dropped.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import numpy as np

from d2pfed.errors import ConfigError, PeerError, TooFewClients, VoidStep
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg import checks, crypto
from d2pfed.secagg.checks import require_current_claim, require_later_position
from d2pfed.secagg.roster import Position, Roster, verify_position
from d2pfed.secagg.standing import epoch as epochs
from d2pfed.secagg.standing.epoch import Advert, Epoch, Keys, Request, Step
from d2pfed.secagg.wire import CONTEXT_BYTES, ClientId, MessageKind, Outbox, Subset, opened, ranks_of, subset_of

_NOTHING: Mapping[ClientId, Position] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class ReadyEpoch:
    """An epoch that was set up: its keys, and who is ready to use them."""

    keys: Keys
    ready: Subset
    epoch: Epoch = field(init=False)
    members: tuple[ClientId, ...] = field(init=False)  # who may be a member of a step

    def __post_init__(self) -> None:
        object.__setattr__(self, "epoch", self.keys.epoch)
        object.__setattr__(self, "members", self.epoch.names(ranks_of(self.ready)))

    def step(self, number: int, attempt: int, members: Collection[ClientId]) -> Step:
        """Return the step of an attempt at a round with these members."""
        chosen = subset_of(len(self.epoch.cohort), [self.epoch.rank(client) for client in members])
        if bool((chosen & ~self.ready).any()):
            raise ConfigError("a step's members must be ready")
        _require_enough(self.epoch, chosen)
        return Step(self.epoch, number, attempt, chosen)


class Advertising:
    """First exchange of the set-up: invite the silos, collect their adverts.

    `positions` is where the silos that advertised stand, for the server to remember.
    """

    def __init__(self, epoch: Epoch, roster: Roster, remembered: Mapping[ClientId, Position] = _NOTHING) -> None:
        if roster.digest != epoch.roster_digest:
            raise ConfigError("an epoch belongs to the roster of its silos, got another one")
        self._epoch, self._roster, self._remembered = epoch, roster, remembered
        self._adverts: dict[int, Advert] = {}
        self.positions: dict[ClientId, Position] = {}
        self.outbox = Outbox(
            epoch.cohort,
            np.ones(len(epoch.cohort), np.bool_),
            lambda rank: epochs.encode_invitation(epoch, rank, roster.serial, remembered.get(epoch.cohort[rank])),
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a silo's advert."""
        rank = self.outbox.admit(client)
        with opened(self._epoch, MessageKind.STANDING_ADVERT, rank, data) as reader:
            advert = epochs.read_advert(reader)
        signed = {rank: (advert.statement(self._epoch, client), advert.signature)}
        checks.require_signed(self._epoch, self._roster, signed)
        require_later_position(client, advert.position, self._remembered.get(client))
        crypto.require_order(advert.public)
        checks.require_distinct_keys([advert.public, *(other.public for other in self._adverts.values())])
        self._adverts[rank] = advert
        self.positions[client] = advert.position

    def close(self) -> "Agreeing":
        """Go on with those that advertised."""
        keys = Keys.of(self._epoch, self._adverts)
        _require_enough(self._epoch, keys.joined)
        return Agreeing(keys, self._adverts, self._roster)


class Agreeing:
    """Second exchange of the set-up: pass the adverts on, learn who is ready.

    `claims` are positions of silos that a peer has met and that are not earlier than now: to be passed on to them.
    """

    def __init__(self, keys: Keys, adverts: Mapping[int, Advert], roster: Roster) -> None:
        self._keys, self._adverts, self._roster = keys, adverts, roster
        self._ready: list[int] = []
        self.claims: dict[ClientId, Position] = {}
        request = partial(epochs.encode_adverts, keys.epoch, adverts=adverts)
        self.outbox = Outbox(keys.epoch.cohort, keys.joined, request)

    @property
    def is_enough(self) -> bool:
        """Say whether a quorum is ready."""
        return len(self._ready) >= self._keys.epoch.quorum

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a silo's word that it is ready, or why it is not."""
        epoch, rank = self._keys.epoch, self.outbox.admit(client)
        said = epochs.decode_ready(epoch, rank, data)
        if isinstance(said, bytes):
            if said != self._keys.digest:
                raise PeerError("a silo has agreed on other keys")
            self._ready.append(rank)
            return
        for other, position in said.items():
            name = epoch.cohort[other]
            verify_position(position, self._roster.key(name), self._roster.authority, name)
            advert = self._adverts.get(other)
            require_current_claim(name, position, None if advert is None else advert.position)
            if name not in self.claims or position.count > self.claims[name].count:
                self.claims[name] = position

    def close(self) -> ReadyEpoch:
        """Go on with those whose keys are the server's."""
        ready = subset_of(len(self._keys.epoch.cohort), self._ready)
        _require_enough(self._keys.epoch, ready)
        return ReadyEpoch(self._keys, ready)


class Collecting:
    """The one exchange of a step: send the model and the members, add up the masked vectors as they come."""

    def __init__(self, keys: Keys, step: Step, task: bytes, model: bytes) -> None:
        self._epoch, self._members = keys.epoch, step.members
        self._context = epochs.context(keys.digest, step, model, task)
        self._total: RingVector | None = np.zeros(keys.epoch.dimension, np.uint32)
        self._arrived: list[int] = []
        request = partial(epochs.encode_request, keys.epoch, request=Request(step, task, model))
        self.outbox = Outbox(keys.epoch.cohort, step.members, request)

    def receive(self, client: ClientId, data: bytes) -> None:
        """Add a member's masked vector; one that comes after the end is refused."""
        if self._total is None:
            raise PeerError(f"the step is over: the vector of client {client} comes too late")
        epoch, rank = self._epoch, self.outbox.admit(client)
        with opened(epoch, MessageKind.STANDING_MASKED, rank, data) as reader:
            checks.require_context(reader.take(CONTEXT_BYTES), self._context)
            vector = reader.vector(epoch.ring, epoch.dimension)
        epoch.ring.add_into(self._total, vector)
        self._arrived.append(rank)

    def close(self) -> RingVector:
        """Return the sum if every member's vector is in it; otherwise the step is void, and all of it is dropped."""
        total, self._total = self._total, None
        if total is None:
            raise ConfigError("the step is over")
        missing = self._epoch.names(set(ranks_of(self._members)) - set(self._arrived))
        if missing:
            raise VoidStep(
                f"all {int(self._members.sum())} members of a step must answer, {len(missing)} did not: clients "
                f"{', '.join(map(str, missing[:5]))}",
                self._epoch.names(self._arrived),
            )
        return total


def _require_enough(epoch: Epoch, present: Subset) -> None:
    left = epoch.names(ranks_of(present))
    if len(left) < epoch.quorum:
        raise TooFewClients(f"at least {epoch.quorum} silos must be left, got {len(left)}", left)
