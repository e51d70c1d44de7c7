"""A silo's half of standing keys in a deployment: what it logs, where its keys live, and how a step is charged."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from d2pfed.errors import PeerError, RolledBack
from d2pfed.flower.client_account import ClientAccount
from d2pfed.flower.client_attempt import enrolment_of, require_beginnings_left, require_same_roster, verdict_of
from d2pfed.flower.client_config import ClientConfig
from d2pfed.flower.client_state import AcceptedRuns, RunTerms
from d2pfed.flower.positions import Positions
from d2pfed.flower.standing_keys import KeyFile, KeyStore, is_state, join, split
from d2pfed.ledger import decode_release
from d2pfed.ledger.client_log import ClientHistory, Entry
from d2pfed.ledger.rows import Head
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import RingVector
from d2pfed.plan import Plan, Protocol, decode_plan
from d2pfed.round import enrolled_in, invited_epoch
from d2pfed.secagg import (
    Enrolment,
    Epoch,
    History,
    StandingAdvertised,
    StandingReady,
    StandingSilo,
    StandingStep,
    answer_step,
    decode_standing_invitation,
)
from d2pfed.secagg.messages import MessageKind
from d2pfed.secagg.position import sign_position
from d2pfed.secagg.standing_checks import require_charge_once, require_first_is_new
from d2pfed.secagg.wire import BINDING_BYTES, binding_of, kind_of

_log = logging.getLogger("d2pfed.flower")

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
    session: StandingStep

    def charge(self) -> int:
        """Write the row of this step, durably, and return how many vectors of the run were sent before."""
        step = self.session
        return ClientAccount(self.config.log, self.config.budget).charge(
            self.plan,
            step.run,
            step.round,
            step.attempt,
            {"session": step.digest.hex(), "roster": "", "draw": 0},
            require=lambda history: require_charge_once(charged_steps(history, step.epoch), step.number),
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
    return answer_step(
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
    epoch: Epoch

    @staticmethod
    def of(config: ClientConfig, invitation: bytes) -> "_Place":
        enrolment, history = enrolment_of(config)
        if enrolment is None:
            raise PeerError("standing keys are for enrolled clients, and this one is not")
        invited = decode_standing_invitation(invitation)
        if invited.client != config.client:
            raise PeerError(f"this is client {config.client}, the invitation is for client {invited.client}")
        terms = AcceptedRuns(config.directory).terms(invited.run)
        require_same_roster(invited.run, terms, enrolment.roster.digest)
        plan = decode_plan(terms.plan)
        if terms.allowed != verdict_of(config.policy):
            config.policy.check(
                plan, enrolled_in(enrolment.roster)
            )  # its owner has changed it since, or the software
        config.policy.require_served(Protocol.STANDING, plan, enrolled_in(enrolment.roster))
        epoch = invited_epoch(plan, invitation, enrolment.roster)
        if len(epoch.cohort) < config.policy.least_cohort:
            least = config.policy.least_cohort
            raise PeerError(f"an epoch must have at least {least} silos, got {len(epoch.cohort)}")
        return _Place(config, enrolment, history, terms, plan, epoch)

    def silo(self, history: ClientHistory) -> StandingSilo:
        """Return this silo in its epoch, its log as it is now."""
        config, roster, head = self.config, self.enrolment.roster, history.head
        secret = self.enrolment.secret
        return StandingSilo(
            epoch=self.epoch,
            client=config.client,
            enrolment=self.enrolment,
            history=History(
                sign_position(secret, roster.authority, config.client, head.seq, head.hash),
                lambda count, found: history.holds(Head(count, found)),
                Positions(config.directory / "peers", roster.keys).latest(),
            ),
            charged=charged_steps(history, self.epoch),
        )

    def mark(self, found: RolledBack) -> NoReturn:
        """Refuse everything from now on: somebody has met this client where its log has never been."""
        self.config.log.mark("shown by the server or another silo", Head(found.count, found.head))
        _log.error("%s: `d2pfed client adopt` is needed", found)
        raise PeerError(
            "this client was rolled back or cloned, and takes part in nothing until a person runs `d2pfed client adopt`"
        )


def _begin(config: ClientConfig, invitation: bytes) -> bytes:
    """Check an invitation, note durably that its epoch has begun, and advertise a fresh key."""
    place = _Place.of(config, invitation)
    keys = KeyFile.of(config, place.epoch.digest)  # refused here, where keys have no place to live
    history = place.history
    while True:
        ClientAccount(config.log, config.budget).require_below_cap(place.plan, place.epoch.run, history)
        require_first_is_new(place.epoch.first, charged_steps(history, place.epoch))
        require_later_epoch(history, place.epoch)
        require_beginnings_left(history, place.epoch.run, place.plan)
        after = config.log.append(history, Entry.BEGUN, _begun(place.epoch))
        if after is not None:
            break
        history = config.log.read()
    try:
        answer, advertised = place.silo(after).advertise(invitation, Entropy.system().require_system())
    except RolledBack as found:
        place.mark(found)
    keys.keep_only(place.epoch.run)
    keys.write(invitation, advertised.encode(place.epoch, config.client))
    return answer


def require_later_epoch(history: ClientHistory, epoch: Epoch) -> None:
    """Refuse an epoch that is not later than all that this silo has begun in its run: stale, or repeated."""
    begun = [body.get("epoch") for body in history.bodies(Entry.BEGUN) if body["run"] == epoch.run]
    last = max((number for number in begun if isinstance(number, int)), default=-1)
    if epoch.epoch <= last:
        raise PeerError(f"epoch {epoch.epoch} of run {epoch.run} is stale: epoch {last} has begun here")


def _agree(place: _Place, keys: "KeyFile", frame: bytes) -> bytes:
    """Derive the keys of the epoch, once; the private key is gone before the answer leaves."""
    config = place.config

    def change(data: bytes) -> tuple[bytes, StandingReady]:
        invitation, saved = split(data)
        advertised = StandingAdvertised.decode(place.epoch, config.client, saved)
        ready = place.silo(place.history).agree(advertised, frame)
        return join(invitation, b"" if ready.state is None else ready.state.encode()), ready

    ready = keys.update(change)
    Positions(config.directory / "peers", place.enrolment.roster.keys).keep(ready.met)
    return ready.answer


def charged_steps(history: ClientHistory, epoch: Epoch) -> frozenset[int]:
    """Return the steps of a run that have a row, whatever protocol they were sent by."""
    releases = (
        decode_release(str(body["release"])) for body in history.bodies(Entry.CHARGE) if body["run"] == epoch.run
    )
    return frozenset(epoch.step(release.round, release.attempt) for release in releases)


def _begun(epoch: Epoch) -> Mapping[str, object]:
    return {
        "run": epoch.run,
        "epoch": epoch.epoch,
        "round": epoch.first // epoch.attempts,
        "attempt": epoch.first % epoch.attempts,
        "session": epoch.digest.hex(),
        "roster": "",  # no draw of it is used up
        "draw": 0,
        "block": 0,
    }
