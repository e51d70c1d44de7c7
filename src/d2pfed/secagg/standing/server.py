"""The server's half of standing keys: set an epoch up once, then one exchange a step.

    StandingAdvertising -> StandingAgreeing -> StandingEpoch;   for each step: StandingCollecting -> the sum

A step is all or nothing: if a member's vector is missing, the step is void and its vectors are dropped.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from d2pfed.errors import ConfigError, PeerError, TooFewClients, VoidStep
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg.exchange import Outbox, PendingAnswers
from d2pfed.secagg.position import Position, verify_position
from d2pfed.secagg.roster import Roster
from d2pfed.secagg.standing import checks
from d2pfed.secagg.standing import epoch as standing
from d2pfed.secagg.standing import messages as standing_messages
from d2pfed.secagg.standing.epoch import Epoch, StandingAdvert, StandingKeys, StandingStep
from d2pfed.secagg.standing.messages import StandingRequest
from d2pfed.secagg.wire import ClientId, Subset, subset_of

_NOTHING: Mapping[ClientId, Position] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class StandingEpoch:
    """An epoch that was set up: its keys, and who is ready to use them."""

    keys: StandingKeys
    ready: Subset

    @property
    def epoch(self) -> Epoch:
        """Return the epoch."""
        return self.keys.epoch

    @property
    def members(self) -> tuple[ClientId, ...]:
        """Return who may be a member of a step."""
        return self.epoch.names(self.ready)

    def step(self, number: int, attempt: int, members: Collection[ClientId]) -> StandingStep:
        """Return the step of an attempt at a round with these members."""
        chosen = subset_of(len(self.epoch.cohort), [self.epoch.rank(client) for client in members])
        if bool((chosen & ~self.ready).any()):
            raise ConfigError("a step's members must be ready")
        step = StandingStep(self.epoch, number, attempt, chosen)
        _require_enough(self.epoch, chosen)
        return step


class StandingAdvertising:
    """First exchange of the set-up: invite the silos, collect their adverts."""

    def __init__(self, epoch: Epoch, roster: Roster, remembered: Mapping[ClientId, Position] = _NOTHING) -> None:
        if roster.digest != epoch.roster_digest:
            raise ConfigError("an epoch belongs to the roster of its silos, got another one")
        self._pending = PendingAnswers(epoch, np.ones(len(epoch.cohort), np.bool_))
        self._roster = roster
        self._remembered = remembered
        self._adverts: dict[int, StandingAdvert] = {}

    @property
    def positions(self) -> dict[ClientId, Position]:
        """Return where the silos that advertised stand, for the server to remember."""
        return {self._pending.session.cohort[rank]: advert.position for rank, advert in self._adverts.items()}

    def outbox(self) -> Outbox:
        """Return the invitations."""
        epoch, serial = self._pending.session, self._roster.serial
        return self._pending.outbox(
            lambda rank: standing_messages.encode_standing_invitation(
                epoch, rank, serial, self._remembered.get(epoch.cohort[rank])
            )
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a silo's advert."""
        epoch, rank = self._pending.session, self._pending.admit(client)
        advert = standing_messages.decode_standing_advert(epoch, rank, data)
        checks.require_adverts_signed(epoch, self._roster, {rank: advert})
        checks.require_later_position(client, advert.position, self._remembered.get(client))
        checks.require_no_low_order(advert.public)
        checks.require_distinct({**self._adverts, rank: advert})
        self._adverts[rank] = advert

    def close(self) -> "StandingAgreeing":
        """Go on with those that advertised."""
        epoch = self._pending.session
        _require_enough(epoch, subset_of(len(epoch.cohort), self._adverts))
        return StandingAgreeing(StandingKeys.of(epoch, self._adverts), self._adverts, self._roster)


class StandingAgreeing:
    """Second exchange of the set-up: pass the adverts on, hear who is ready."""

    def __init__(self, keys: StandingKeys, adverts: Mapping[int, StandingAdvert], roster: Roster) -> None:
        self._keys = keys
        self._adverts = adverts
        self._roster = roster
        self._pending = PendingAnswers(keys.epoch, keys.joined)
        self._ready: list[int] = []
        self._claims: dict[ClientId, Position] = {}

    @property
    def claims(self) -> Mapping[ClientId, Position]:
        """Return positions of silos that a peer has met and that are not earlier than now: to be passed on to them."""
        return MappingProxyType(self._claims)

    @property
    def is_enough(self) -> bool:
        """Say whether a quorum is ready."""
        return len(self._ready) >= self._keys.epoch.quorum

    def outbox(self) -> Outbox:
        """Return the adverts for each that joined."""
        epoch = self._keys.epoch
        return self._pending.outbox(
            lambda rank: standing_messages.encode_standing_adverts(epoch, rank, self._adverts)
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a silo's word that it is ready, or why it is not."""
        epoch, rank = self._keys.epoch, self._pending.admit(client)
        said = standing_messages.decode_standing_ready(epoch, rank, data)
        if isinstance(said, bytes):
            if said != self._keys.digest:
                raise PeerError("a silo has agreed on other keys")
            self._ready.append(rank)
            return
        for other, position in said.items():
            name = epoch.cohort[other]
            verify_position(position, self._roster.key(name), self._roster.authority, name)
            checks.require_current_claim(name, position, self._adverts.get(other))
            if name not in self._claims or position.count > self._claims[name].count:
                self._claims[name] = position

    def close(self) -> StandingEpoch:
        """Go on with those whose keys are the server's."""
        ready = subset_of(len(self._keys.epoch.cohort), self._ready)
        _require_enough(self._keys.epoch, ready)
        return StandingEpoch(self._keys, ready)


class StandingCollecting:
    """The one exchange of a step: send the model and the members, add up the masked vectors as they come."""

    def __init__(self, keys: StandingKeys, step: StandingStep, task: bytes, model: bytes) -> None:
        self._keys = keys
        self._request = StandingRequest(step, task, model)
        self._pending = PendingAnswers(keys.epoch, step.members)
        self._context = standing.context(keys.digest, step, model, task)
        self._total: RingVector | None = np.zeros(keys.epoch.dimension, np.uint32)
        self._arrived: list[int] = []

    def outbox(self) -> Outbox:
        """Return the requests: the same for all members but for the name."""
        epoch = self._keys.epoch
        return self._pending.outbox(
            lambda rank: standing_messages.encode_standing_request(epoch, rank, self._request)
        )

    def receive(self, client: ClientId, data: bytes) -> None:
        """Add a member's masked vector; one that comes after the end is refused."""
        if self._total is None:
            raise PeerError(f"the step is over: the vector of client {client} comes too late")
        epoch, rank = self._keys.epoch, self._pending.admit(client)
        vector = standing_messages.decode_standing_masked(epoch, rank, self._context, data)
        epoch.ring.add_into(self._total, vector)
        self._arrived.append(rank)

    def close(self) -> RingVector:
        """Return the sum if every member's vector is in it; otherwise the step is void, and all of it is dropped."""
        total, self._total = self._total, None
        if total is None:
            raise ConfigError("the step is over")
        members, epoch = self._request.step.members, self._keys.epoch
        arrived = subset_of(len(epoch.cohort), self._arrived)
        missing = epoch.names(members & ~arrived)
        if missing:
            raise VoidStep(
                f"all {int(members.sum())} members of a step must answer, {len(missing)} did not: clients "
                f"{', '.join(map(str, missing[:5]))}",
                epoch.names(arrived),
            )
        return total


def _require_enough(epoch: Epoch, present: Subset) -> None:
    left = epoch.names(present)
    if len(left) < epoch.quorum:
        raise TooFewClients(f"at least {epoch.quorum} silos must be left, got {len(left)}", left)
