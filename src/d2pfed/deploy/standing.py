"""A silo's half of standing keys in a deployment: what it logs, where its keys live, and how a step is charged."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from d2pfed.deploy.account import ClientAccount
from d2pfed.deploy.attempt import (
    agreed_plan,
    enrolment_of,
    marking_rollbacks,
    memory_of,
    note_begun,
    require_beginnings_left,
)
from d2pfed.deploy.config import ClientConfig
from d2pfed.deploy.positions import Positions
from d2pfed.deploy.state import RunTerms
from d2pfed.errors import ConfigError, PeerError
from d2pfed.ledger import decode_release
from d2pfed.ledger.client_log import ClientHistory, Entry
from d2pfed.ledger.keystore import KEYS_ON_DISK, VolatileFile, default_volatile
from d2pfed.ledger.rows import Head
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.numerics.ring import RingVector
from d2pfed.plan import Plan, Protocol
from d2pfed.round import accept_standing_invitation
from d2pfed.secagg import Enrolment, standing
from d2pfed.secagg.wire import BINDING_BYTES, MessageKind, Reader, binding_of, kind_of, pack_integer

_log = logging.getLogger("d2pfed.deploy")

_T = TypeVar("_T")

STANDING_REQUESTS = (
    MessageKind.STANDING_INVITATION,
    MessageKind.STANDING_ADVERTS,
    MessageKind.STANDING_REQUEST,
)


@dataclass(frozen=True, slots=True)
class StandingAttempt:
    """One step, as training and encoding see it."""

    config: ClientConfig
    terms: RunTerms
    plan: Plan
    session: standing.Step

    def charge(self) -> int:
        """Write the row of this step, durably, and return how many vectors of the run were sent before."""
        step = self.session
        return ClientAccount(self.config.log, self.config.budget).charge(
            self.plan,
            step.run,
            step.round,
            step.attempt,
            {"session": step.digest.hex(), "roster": "", "draw": 0},
            require=lambda history: standing.require_charge_once(charged_steps(history, step.epoch), step.number),
        )


# Charges a step, trains for it with the bytes of task and model, and returns the vector that is masked.
ContributeStep = Callable[[StandingAttempt, bytes, bytes], RingVector]


def answer_standing(config: ClientConfig, frame: bytes, contribute: ContributeStep) -> bytes:
    """Answer a request of standing keys: an invitation, the adverts of all, or a step."""
    kind = kind_of(frame)
    if kind == MessageKind.STANDING_INVITATION:
        return _begin(config, frame)
    keys = KeyFile.of(config, binding_of(frame))
    invitation, _ = keys.load()
    place = _Place.of(config, invitation)
    if kind == MessageKind.STANDING_ADVERTS:
        return _agree(place, keys, frame)
    return standing.answer_step(
        place.epoch,
        config.client,
        frame,
        store=KeyStore(keys, place.epoch, config.client),
        contribute=lambda step, task, model: contribute(
            StandingAttempt(config, place.terms, place.plan, step), task, model
        ),
    )


def holds_keys(config: ClientConfig, epoch: bytes) -> bool:
    """Say whether this silo has the keys of an epoch; refuses to say it where its cap or budget is reached."""
    if len(epoch) != BINDING_BYTES:
        raise PeerError(f"an epoch's digest has {BINDING_BYTES} bytes, got {len(epoch)}")
    try:
        invitation, saved = KeyFile.of(config, epoch).load()
    except PeerError:
        return False
    place = _Place.of(config, invitation)
    ClientAccount(config.log, config.budget).require_left(place.plan, place.epoch.run, 0, 0, place.history)
    return is_state(saved)


@dataclass(frozen=True, slots=True)
class _Place:
    """What this silo knows when a request comes: its enrolment, its log, and the epoch by its own plan and roster."""

    config: ClientConfig
    enrolment: Enrolment
    history: ClientHistory
    terms: RunTerms
    plan: Plan
    epoch: standing.Epoch

    @staticmethod
    def of(config: ClientConfig, invitation: bytes) -> "_Place":
        enrolment, history = enrolment_of(config)
        if enrolment is None:
            raise PeerError("standing keys are for enrolled clients, and this one is not")
        invited = standing.decode_invitation(invitation)
        terms, plan = agreed_plan(config, enrolment.roster, invited.run, invited.client, Protocol.STANDING)
        epoch = accept_standing_invitation(plan, invitation, enrolment.roster)
        if len(epoch.cohort) < config.policy.least_cohort:
            least = config.policy.least_cohort
            raise PeerError(f"an epoch must have at least {least} silos, got {len(epoch.cohort)}")
        return _Place(config, enrolment, history, terms, plan, epoch)

    def silo(self, history: ClientHistory) -> standing.Client:
        """Return this silo in its epoch, its log as it is now."""
        return standing.Client(
            epoch=self.epoch,
            client=self.config.client,
            enrolment=self.enrolment,
            history=memory_of(self.config, self.enrolment, history),
            charged=charged_steps(history, self.epoch),
        )


def _begin(config: ClientConfig, invitation: bytes) -> bytes:
    """Check an invitation, note durably that its epoch has begun, and advertise a fresh key."""
    place = _Place.of(config, invitation)
    plan, epoch = place.plan, place.epoch
    keys = KeyFile.of(config, epoch.digest)  # refused here, where keys have no place to live

    def require(history: ClientHistory) -> None:
        ClientAccount(config.log, config.budget).require_below_cap(plan, epoch.run, history)
        standing.require_first_is_new(epoch.first, charged_steps(history, epoch))
        require_later_epoch(history, epoch)
        require_beginnings_left(history, epoch.run, plan)

    row = {
        "run": epoch.run,
        "epoch": epoch.epoch,
        "round": epoch.first // epoch.attempts,
        "attempt": epoch.first % epoch.attempts,
        "session": epoch.digest.hex(),
        "roster": "",  # no draw of it is used up
        "draw": 0,
        "block": 0,
    }
    after = note_begun(config, place.history, require, row)
    with marking_rollbacks(config):
        answer, advertised = place.silo(after).advertise(invitation, Entropy.system().require_system())
    keys.keep_only(epoch.run)
    keys.write(invitation, advertised.encode(epoch, config.client))
    return answer


def require_later_epoch(history: ClientHistory, epoch: standing.Epoch) -> None:
    """Refuse an epoch that is not later than all that this silo has begun in its run: stale, or repeated."""
    begun = [body.get("epoch") for body in history.bodies(Entry.BEGUN) if body["run"] == epoch.run]
    last = max((number for number in begun if isinstance(number, int)), default=-1)
    if epoch.epoch <= last:
        raise PeerError(f"epoch {epoch.epoch} of run {epoch.run} is stale: epoch {last} has begun here")


def _agree(place: _Place, keys: "KeyFile", frame: bytes) -> bytes:
    """Derive the keys of the epoch, once; the private key is gone before the answer leaves."""
    config = place.config

    def change(data: bytes) -> tuple[bytes, standing.Agreed]:
        invitation, saved = split(data)
        advertised = standing.Advertised.decode(place.epoch, config.client, saved)
        ready = place.silo(place.history).agree(advertised, frame)
        return join(invitation, b"" if ready.state is None else ready.state.encode()), ready

    ready = keys.update(change)
    Positions(config.directory / "peers", place.enrolment.roster.keys).keep(ready.met)
    return ready.answer


def charged_steps(history: ClientHistory, epoch: standing.Epoch) -> frozenset[int]:
    """Return the steps of a run that have a row, whatever protocol they were sent by."""
    releases = (
        decode_release(str(body["release"])) for body in history.bodies(Entry.CHARGE) if body["run"] == epoch.run
    )
    return frozenset(epoch.step(release.round, release.attempt) for release in releases)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The file of one epoch's keys, in memory that no backup restores."""

    config: ClientConfig
    file: VolatileFile

    @staticmethod
    def of(config: ClientConfig, epoch: bytes) -> "KeyFile":
        """Return the file of an epoch; refuses a place that is not in memory."""
        parent = config.state or default_volatile()
        if parent is None:
            raise ConfigError("standing keys need a directory in memory: name one in client.toml (state = ...)")
        if config.keys_on_disk:
            _log.warning(KEYS_ON_DISK)
        own = digest("d2pfed volatile", config.authority, config.client).hex()[:32]
        return KeyFile(config, VolatileFile(parent / own, epoch.hex(), keys_on_disk=config.keys_on_disk))

    def load(self) -> tuple[bytes, bytes]:
        """Return the epoch's invitation and what was kept; without it nothing is repaired."""
        data = self.file.read(self._holds)
        if data is None:
            if self.file.refusal:
                _log.warning("standing keys were erased: %s", self.file.refusal)
            raise PeerError("this silo has no standing keys of this epoch: it needs a new one")
        return split(data)

    def write(self, invitation: bytes, saved: bytes) -> None:
        """Keep what belongs to an epoch."""
        self.file.write(join(invitation, saved), self._head())

    def update(self, change: Callable[[bytes], tuple[bytes, _T]]) -> _T:
        """Change what was kept, under its lock; the new value is in its place when this returns."""
        return self.file.update(self._holds, change, self._head)

    def keep_only(self, run: str) -> None:
        """Erase the keys of earlier epochs of a run, and whatever does not fit this start and this log."""
        self.file.sweep(self._holds, lambda data: standing.decode_invitation(split(data)[0]).run == run)

    # Both look at the log when they are called, which is under the file's lock.

    def _holds(self, head: Head) -> bool:
        return self.config.log.read().holds(head)

    def _head(self) -> Head:
        return self.config.log.read().head


@dataclass(frozen=True, slots=True)
class KeyStore:
    """The state of an epoch, as a step sees it."""

    keys: KeyFile
    epoch: standing.Epoch
    client: int

    def read(self) -> standing.State | None:
        """Return the state; a set-up that did not end has none."""
        _, saved = self.keys.load()
        if not is_state(saved):
            return None
        return standing.State.decode(self.epoch, self.client, saved)

    def advance(self, move: Callable[[standing.State], tuple[standing.State, _T]]) -> _T:
        """Replace the state by the one that `move` makes of it, on the disk when this returns."""

        def change(data: bytes) -> tuple[bytes, _T]:
            invitation, saved = split(data)
            state, result = move(standing.State.decode(self.epoch, self.client, saved))
            return join(invitation, state.encode()), result

        return self.keys.update(change)


def is_state(saved: bytes) -> bool:
    """Say whether what was kept are the keys of an epoch, not a set-up under way."""
    return bool(saved) and kind_of(saved) == MessageKind.SAVED_STANDING


def join(invitation: bytes, saved: bytes) -> bytes:
    """Return the bytes of an invitation and what is kept with it."""
    return pack_integer(len(invitation), 4) + invitation + saved


def split(data: bytes) -> tuple[bytes, bytes]:
    """Return an invitation and what was kept with it."""
    reader = Reader(memoryview(data))
    return reader.take(reader.integer(4)), reader.rest()
