"""The client's half of a private federation: (kind, bytes) in, bytes out, over whatever transport carries them."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from d2pfed.accounting import Unit
from d2pfed.errors import ConfigError, PeerError
from d2pfed.flower.client_account import ClientAccount
from d2pfed.flower.client_attempt import ClientAttempt, accept_run
from d2pfed.flower.client_config import ClientConfig
from d2pfed.flower.client_standing import STANDING_REQUESTS, StandingAttempt, answer_standing, holds_keys
from d2pfed.flower.client_state import SavedPhase, SavedPhases
from d2pfed.flower.layout import Layout, NamedArrays, decode_model, decode_task
from d2pfed.flower.local_arrays import LocalArrays
from d2pfed.flower.requests import (
    HAS_KEYS,
    HAS_NO_KEYS,
    ExchangeRequest,
    RequestKind,
    RunAcceptance,
    RunAnnouncement,
)
from d2pfed.ledger.files import FileError
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import IntVector, RingVector
from d2pfed.round import Participant, Units
from d2pfed.secagg import Session
from d2pfed.secagg.crypto import sign
from d2pfed.secagg.messages import MessageKind
from d2pfed.secagg.wire import binding_of, kind_of
from d2pfed.statistics.questions import is_evaluation

# Trains the model with these arrays under this configuration, and returns the trained arrays; where the unit is a
# record, the silo's units under that model instead.
TrainArrays = Callable[[NamedArrays, Mapping[str, object]], NamedArrays | Units]

_log = logging.getLogger("d2pfed.flower")


class Purpose(StrEnum):
    """Which function of the app a request is handed to."""

    TRAINING = "training"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True)
class PrivateClient:
    """One client with its configuration, log, policy and saved phases; knows no transport and imports none.

    A transport builds one per request: all state is in the client's directory. `node` is the transport's number for
    this end of the connection, which an enrolled client signs; `run_config` is the run's configuration as the
    transport has brought it, which the task must agree with; `train` is called only for a mask request, and `purpose`
    says which function of the app it is: a task for the other one is refused.

    Guarantee: of what `train` returns, only the arrays that were announced are used, and they leave clipped, noised and
    masked. The text of an error that is raised holds nothing of the client's data or files: a transport may send it.
    Checked: test_flower_private_client.py, test_flower_client.py::test_nothing_of_the_training_leaves_in_clear.
    """

    config: ClientConfig
    node: int
    run_config: Mapping[str, object]
    train: TrainArrays
    purpose: Purpose = Purpose.TRAINING

    def answer(self, kind: RequestKind, data: bytes) -> bytes:
        """Return the answer to a request; raise PeerError or ConfigError where there is none."""
        try:
            if kind is RequestKind.ANNOUNCEMENT:
                return self._accept(RunAnnouncement.decode(data)).encode()
            if kind is RequestKind.PRESENCE:
                return HAS_KEYS if holds_keys(self.config, data) else HAS_NO_KEYS
            return self._participate(ExchangeRequest.decode(data))
        except Exception as error:  # whatever it is: a transport may send its text to the server
            if isinstance(error, (PeerError, ConfigError)) and not isinstance(error, FileError):
                raise
            _log.exception("this client failed")
            raise PeerError("this client failed; its own log says why") from None

    def _accept(self, announcement: RunAnnouncement) -> RunAcceptance:
        """Accept a run that this client's policy and budget allow, and say which client this is."""
        SavedPhases(self.config.directory).sweep()
        accept_run(self.config, announcement)
        statement = announcement.statement(self.node, self.config.client)
        signature = b"" if self.config.secret is None else sign(self.config.secret, statement)
        return RunAcceptance(self.config.client, signature)

    def _participate(self, request: ExchangeRequest) -> bytes:
        """Answer one frame of an attempt, from the phase that was saved, and save the next one."""
        begun = time.monotonic()
        if kind_of(request.frame) in STANDING_REQUESTS:
            answer = answer_standing(self.config, request.frame, self._encode)
            require_in_time(begun, request.seconds)
            return answer
        phases = SavedPhases(self.config.directory)
        phases.sweep()
        if kind_of(request.frame) == MessageKind.INVITATION:
            attempt = ClientAttempt.begin(self.config, request.frame, request.attempt_seconds)
            phases.sweep(lambda other: other.run == attempt.session.run)
        else:
            attempt = ClientAttempt.resume(self.config, phases.take(binding_of(request.frame)))
        answer, state = attempt.answer(
            request.frame, _Contribution(attempt, self.run_config, self.train, self.purpose).contribute
        )
        require_in_time(begun, request.seconds)
        if state is not None:
            saved = attempt.saved
            next_phase = SavedPhase(saved.run, saved.invitation, saved.begun, saved.expires, state)
            phases.save(attempt.session.digest, next_phase)
        return answer

    def _encode(self, attempt: StandingAttempt, task: bytes, model: bytes) -> RingVector:
        """Train and return the ring vector of a step, which is charged afterwards, before it is masked."""
        contribution = _Contribution(attempt, self.run_config, self.train, self.purpose)
        return contribution.vector(*contribution.read(task, model), None, 0)


def require_purpose(settings: Mapping[str, object], purpose: Purpose) -> None:
    """Refuse a task for another function than the one that is called: all clients of a sum do the same."""
    if is_evaluation(settings) != (purpose is Purpose.EVALUATION):
        raise PeerError(f"a request for {purpose} must have a task for it")


def require_in_time(begun: float, seconds: float) -> None:
    """Refuse to send what the server does not wait for any more."""
    if time.monotonic() - begun > seconds:
        raise PeerError(f"the answer took longer than the server's {seconds:g} seconds")


@dataclass(frozen=True, slots=True)
class _NoUnits:
    """A silo that holds nothing."""

    count: int = 0

    def gradients(self, _chosen: IntVector) -> Iterator[NDArray[np.float32]]:
        """Return nothing."""
        return iter(())


@dataclass(frozen=True, slots=True)
class _Contribution:
    """This client's contribution to one session, or to one step with standing keys."""

    attempt: ClientAttempt | StandingAttempt
    run_config: Mapping[str, object]
    train: TrainArrays
    purpose: Purpose

    def contribute(self, task: bytes, model: bytes, group: bytes | None) -> RingVector:
        """Charge this client's own account, train, and return the ring vector."""
        attempt = self.attempt
        if not isinstance(attempt, ClientAttempt):
            raise ConfigError("a step with standing keys is charged after its vector is made")
        settings, params = self.read(task, model)  # before anything is charged
        session = attempt.session
        participations = ClientAccount(attempt.config.log, attempt.config.budget).charge(
            attempt.plan,
            session.run,
            session.round,
            session.attempt,
            _draw_of(session),
            require=attempt.require_draw_left,
        )
        return self.vector(settings, params, group, participations)

    def read(self, task: bytes, model: bytes) -> tuple[dict[str, object], FloatVector]:
        """Return the settings and the parameters that the server has sent."""
        layout = Layout.decode(self.attempt.terms.layout)
        settings = dict(decode_task(task, layout, self.run_config))
        require_purpose(settings, self.purpose)
        return settings, decode_model(model, layout)

    def vector(
        self, settings: Mapping[str, object], params: FloatVector, group: bytes | None, participations: int
    ) -> RingVector:
        """Train and encode, with the system's entropy."""
        participant = Participant(
            plan=self.attempt.plan,
            client=self.attempt.config.client,
            entropy=Entropy.system().require_system(),
            participations=participations,
        )
        layout = Layout.decode(self.attempt.terms.layout)
        if self.attempt.plan.unit is Unit.RECORD:
            return self._records(participant, settings, layout.unflatten(params))
        return participant.encode(self.attempt.session, self._update(settings, params, layout), group)

    def _records(
        self, participant: Participant, settings: Mapping[str, object], arrays: NamedArrays
    ) -> RingVector:
        """Return the vector of a secret batch; if it cannot be computed, that of an empty one, as in `_update`."""
        try:
            units = _units(self.train(arrays, settings))
            return participant.encode(self.attempt.session, units, None)
        except Exception:  # noqa: BLE001 - whatever it was, its text must not reach the server
            _log.exception("the gradients of a batch failed: this silo contributes its noise alone")
            return participant.encode(self.attempt.session, _NoUnits(), None)

    def _update(self, settings: Mapping[str, object], params: FloatVector, layout: Layout) -> FloatVector:
        """Return the update that training makes: what is trained minus what was sent.

        Training that fails gives the zero vector: whether it fails may depend on the data, and a missing client would
        show it. What went wrong is for this client's own log.
        """
        try:
            local = LocalArrays(self.attempt.config.directory, self.attempt.session.run, self.attempt.plan)
            trained = _arrays(self.train(layout.unflatten(params) | local.load(layout), settings))
            update = _finite(layout.flatten(trained) - params)
            local.keep(layout, trained)
        except Exception:  # noqa: BLE001 - whatever it was, its text must not reach the server
            _log.exception("training failed: this client contributes zero and its noise")
            return np.zeros_like(params)
        return update


def _units(made: NamedArrays | Units) -> Units:
    if not isinstance(made, Units):
        raise ConfigError("a plan with the unit record needs a silo's units (PrivateRecords), got arrays")
    return made


def _arrays(made: NamedArrays | Units) -> NamedArrays:
    if isinstance(made, Units):
        raise ConfigError("units of records are for a plan with the unit record")
    return made


def _draw_of(session: Session) -> dict[str, object]:
    return {"session": session.digest.hex(), "roster": session.roster_digest.hex(), "draw": session.draw}


def _finite(update: FloatVector) -> FloatVector:
    if not np.isfinite(update).all():
        raise ConfigError("the trained arrays must be finite, got NaN or infinity")
    return update
