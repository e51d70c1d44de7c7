"""A silo's half of standing keys in a deployment: what it logs, where its keys live, and how a step is charged."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from d2pfed.deploy.account import NOTHING_LEFT, ClientAccount, charged
from d2pfed.deploy.attempt import (
    agreed_plan,
    enrolment_of,
    marking_rollbacks,
    memory_of,
    note_begun,
    peers_of,
    require_beginnings_left,
)
from d2pfed.deploy.config import ClientConfig
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
        return ClientAccount.of(self.config).charge(
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
    silo = SiloEpoch.of(config, keys.load()[0], keys)
    if kind == MessageKind.STANDING_REQUEST:
        return standing.answer_step(
            silo.epoch,
            config.client,
            frame,
            store=silo,
            contribute=lambda step, task, model: contribute(
                StandingAttempt(config, silo.terms, silo.plan, step), task, model
            ),
        )

    def agree(data: bytes) -> tuple[bytes, standing.Agreed]:
        """Derive the keys of the epoch, once; the private key is gone before the answer leaves."""
        invitation, saved = split(data)
        advertised = standing.Advertised.decode(silo.epoch, config.client, saved)
        ready = silo.machine(silo.history).agree(advertised, frame)
        return join(invitation, b"" if ready.state is None else ready.state.encode()), ready

    ready = keys.update(agree)
    peers_of(config, silo.enrolment).keep(ready.met)
    return ready.answer


def holds_keys(config: ClientConfig, epoch: bytes) -> bool:
    """Say whether this silo has the keys of an epoch; refuses to say it where its cap or budget is reached."""
    if len(epoch) != BINDING_BYTES:
        raise PeerError(f"an epoch's digest has {BINDING_BYTES} bytes, got {len(epoch)}")
    keys = KeyFile.of(config, epoch)
    try:
        invitation, _ = keys.load()
    except PeerError:
        return False
    silo = SiloEpoch.of(config, invitation, keys)
    release = charged(silo.plan, silo.epoch.run, 0, 0)
    if ClientAccount.of(config).sent_before(silo.plan, release, silo.history) is None:
        raise PeerError(NOTHING_LEFT)
    return silo.read() is not None


@dataclass(frozen=True, slots=True)
class SiloEpoch:
    """A silo when a request comes: its enrolment, its log, the epoch by its own plan and roster, and its keys."""

    config: ClientConfig
    enrolment: Enrolment
    history: ClientHistory
    terms: RunTerms
    plan: Plan
    epoch: standing.Epoch
    keys: "KeyFile"

    @staticmethod
    def of(config: ClientConfig, invitation: bytes, keys: "KeyFile | None" = None) -> "SiloEpoch":
        """Check an invitation; without `keys` it is a new one, and refused here where keys have no place to live."""
        enrolment, history = enrolment_of(config, Protocol.STANDING)
        if not isinstance(enrolment, Enrolment):
            raise PeerError("standing keys are for enrolled clients, and this client is not enrolled")
        invited = standing.decode_invitation(invitation)
        terms, plan = agreed_plan(config, enrolment, invited.run, invited.client, Protocol.STANDING)
        epoch, least = accept_standing_invitation(plan, invitation, enrolment.roster), config.policy.least_cohort
        if len(epoch.cohort) < least:
            raise PeerError(f"an epoch must have at least {least} silos, got {len(epoch.cohort)}")
        keys = keys or KeyFile.of(config, epoch.digest)
        return SiloEpoch(config, enrolment, history, terms, plan, epoch, keys)

    def machine(self, history: ClientHistory) -> standing.Client:
        """Return this silo's side of the set-up, its log as it is now."""
        return standing.Client(
            epoch=self.epoch,
            client=self.config.client,
            enrolment=self.enrolment,
            history=memory_of(self.config, self.enrolment, history),
            charged=charged_steps(history, self.epoch),
        )

    def read(self) -> standing.State | None:
        """Return the epoch's state; a set-up that did not end has none."""
        _, saved = self.keys.load()
        if not saved or kind_of(saved) != MessageKind.SAVED_STANDING:
            return None
        return standing.State.decode(self.epoch, self.config.client, saved)

    def advance(self, move: Callable[[standing.State], tuple[standing.State, _T]]) -> _T:
        """Replace the state by the one that `move` makes of it, on the disk when this returns."""

        def change(data: bytes) -> tuple[bytes, _T]:
            invitation, saved = split(data)
            state, result = move(standing.State.decode(self.epoch, self.config.client, saved))
            return join(invitation, state.encode()), result

        return self.keys.update(change)


def _begin(config: ClientConfig, invitation: bytes) -> bytes:
    """Check an invitation, note durably that its epoch has begun, and advertise a fresh key."""
    silo = SiloEpoch.of(config, invitation)
    plan, epoch = silo.plan, silo.epoch

    def require(history: ClientHistory) -> None:
        ClientAccount.of(config).require_below_cap(plan, epoch.run, history)
        standing.require_first_is_new(epoch.first, charged_steps(history, epoch))
        begun = [body.get("epoch") for body in history.bodies(Entry.BEGUN) if body["run"] == epoch.run]
        last = max((number for number in begun if isinstance(number, int)), default=-1)
        if epoch.epoch <= last:  # stale, or repeated
            raise PeerError(f"epoch {epoch.epoch} of run {epoch.run} is stale: epoch {last} has begun here")
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
    after = note_begun(config, silo.history, require, row)
    with marking_rollbacks(config):
        answer, advertised = silo.machine(after).advertise(invitation, Entropy.system().require_system())
    silo.keys.begin(
        join(invitation, advertised.encode(epoch, config.client)),
        lambda data: standing.decode_invitation(split(data)[0]).run == epoch.run,
    )
    return answer


def charged_steps(history: ClientHistory, epoch: standing.Epoch) -> frozenset[int]:
    """Return the steps of a run that have a row, whatever protocol they were sent by."""
    releases = (
        decode_release(str(body["release"])) for body in history.bodies(Entry.CHARGE) if body["run"] == epoch.run
    )
    return frozenset(epoch.step(release.round, release.attempt) for release in releases)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The file of one epoch's or one attempt's keys, in memory that no backup restores."""

    config: ClientConfig
    file: VolatileFile

    @staticmethod
    def of(config: ClientConfig, bound: bytes, *of_whom: str) -> "KeyFile":
        """Return the file of an epoch, or of an attempt in a place of its own; refuses one that is not in memory."""
        place = key_place(config, *of_whom)
        if place is None:
            raise ConfigError("keys need a directory in memory: name one in client.toml (state = ...)")
        if config.keys_on_disk:
            _log.warning(KEYS_ON_DISK)
        return KeyFile(config, VolatileFile(place, bound.hex(), keys_on_disk=config.keys_on_disk))

    def load(self) -> tuple[bytes, bytes]:
        """Return the epoch's invitation and what was kept; without it nothing is repaired."""
        data = self.file.read(self._holds)
        if data is None:
            if self.file.refusal:
                _log.warning("standing keys were erased: %s", self.file.refusal)
            raise PeerError("this silo has no standing keys of this epoch: it needs a new one")
        return split(data)

    def holds_any(self) -> bool:
        """Say whether anything is kept."""
        return self.file.read(self._holds) is not None

    def begin(self, content: bytes, over: Callable[[bytes], bool]) -> None:
        """Keep what an epoch or an attempt begins with; keys that are over, and what does not fit, are erased."""
        self.sweep(over)
        self.file.write(content, self._head())

    def sweep(self, over: Callable[[bytes], bool]) -> None:
        """Erase the keys beside these ones that are over, and what does not fit."""
        self.file.sweep(self._holds, over)

    def update(self, change: Callable[[bytes], tuple[bytes, _T]]) -> _T:
        """Change what was kept, under its lock; the new value is in its place when this returns."""
        return self.file.update(self._holds, change, self._head)

    # Both look at the log when they are called, which is under the file's lock.

    def _holds(self, head: Head) -> bool:
        return self.config.log.read().holds(head)

    def _head(self) -> Head:
        return self.config.log.read().head


def key_place(config: ClientConfig, *of_whom: str) -> Path | None:
    """Return the directory of a client's keys, made or not yet; None where the system has no place in memory."""
    parent = config.state or default_volatile()
    own = digest("d2pfed volatile", config.authority, config.client, *of_whom).hex()[:32]
    return None if parent is None else parent / own


def join(invitation: bytes, saved: bytes) -> bytes:
    """Return the bytes of an invitation and what is kept with it."""
    return pack_integer(len(invitation), 4) + invitation + saved


def split(data: bytes) -> tuple[bytes, bytes]:
    """Return an invitation and what was kept with it."""
    reader = Reader(memoryview(data))
    return reader.take(reader.integer(4)), reader.rest()
