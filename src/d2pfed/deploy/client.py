"""The client's half of a private federation: (kind, bytes) in, bytes out, over whatever transport carries them."""

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from d2pfed.accounting import Unit
from d2pfed.deploy.attempt import ClientAttempt, accept_run
from d2pfed.deploy.config import ClientConfig
from d2pfed.deploy.health import Event, note
from d2pfed.deploy.lattice import LATTICE_REQUESTS, answer_lattice, convene, sweep_members
from d2pfed.deploy.layout import Layout, NamedArrays, decode_task
from d2pfed.deploy.requests import (
    HAS_KEYS,
    HAS_NO_KEYS,
    MISSING,
    ExchangeRequest,
    MissingBlob,
    RequestKind,
    RunAcceptance,
    RunAnnouncement,
)
from d2pfed.deploy.standing import STANDING_REQUESTS, StandingAttempt, answer_standing, holds_keys
from d2pfed.deploy.state import Blobs, LocalArrays, SavedPhases
from d2pfed.errors import ConfigError, PeerError
from d2pfed.ledger.files import FileError
from d2pfed.noise.clipping import split_clip
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.model_bytes import decode_model
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import IntVector, RingVector
from d2pfed.plan import Request
from d2pfed.round import Participant, Units
from d2pfed.secagg import lattice
from d2pfed.secagg.crypto import sign
from d2pfed.secagg.wire import MessageKind, binding_of, kind_of
from d2pfed.statistics.questions import STATISTIC, is_evaluation


@dataclass(frozen=True, slots=True)
class WeightedArrays:
    """Trained arrays with the number that weighs them where a plan has weights, such as that of a client's examples."""

    arrays: NamedArrays = field(repr=False)
    weight: float | None = field(repr=False)  # None: not known, which is an error where it is needed


# Trains the model with these arrays under this configuration, and returns the trained arrays; where the unit is a
# record, the silo's units under that model instead.
TrainArrays = Callable[[NamedArrays, Mapping[str, object]], NamedArrays | WeightedArrays | Units]

_log = logging.getLogger("d2pfed.deploy")


class Purpose(StrEnum):
    """Which function of the app a request is handed to."""

    TRAINING = "training"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True)
class PrivateClient:
    """One client with its configuration, log, policy and saved phases; knows no transport and imports none.

    A transport builds one per request: all state is in the client's directory. `node` is the transport's number for
    this end of the connection, which an enrolled client signs; the task must agree with `run_config`, the run's
    configuration as the transport has brought it, and with `purpose`, the function of the app that `train` is.

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
            with discreet():
                answer = self._answer(kind, data)
        except (PeerError, ConfigError) as refusal:
            note(self.config.directory, Event.REFUSED, refusal)
            raise
        note(self.config.directory, Event.ANSWERED, kind.name.lower())
        return answer

    def _answer(self, kind: RequestKind, data: bytes) -> bytes:
        if self.config.apps and not self.config.app:  # by the transport: there would be no limit to keep to
            raise ConfigError(
                "client.toml lists apps, but this node does not say which one answers: set d2pfed-app in its settings"
            )
        if kind is RequestKind.PRESENCE:
            return HAS_KEYS if holds_keys(self.config, data) else HAS_NO_KEYS
        if kind is RequestKind.ANNOUNCEMENT:
            announcement = RunAnnouncement.decode(data)
            SavedPhases(self.config.directory).sweep()
            sweep_members(self.config)
            progress = accept_run(self.config, announcement)
            if progress is None:
                return RunAcceptance(self.config.client, b"").encode()
            statement = announcement.statement(self.node, self.config.client, progress)
            signature = b"" if self.config.secret is None else sign(self.config.secret, statement)
            return RunAcceptance(self.config.client, signature, progress).encode()
        try:
            request = ExchangeRequest.decode(data, Blobs(self.config.directory))
        except MissingBlob:
            return MISSING  # before anything has changed: it is asked again
        frame = request.frame
        if kind_of(frame) in STANDING_REQUESTS:
            return answer_standing(self.config, frame, self._contribute)
        if kind_of(frame) in LATTICE_REQUESTS:
            return answer_lattice(self.config, request, self._contribute)
        # A frame of pair masks is answered from the phase that was saved, and the next one is saved.
        phases = SavedPhases(self.config.directory)
        phases.sweep()
        if kind_of(frame) == MessageKind.INVITATION:
            attempt = ClientAttempt.begin(self.config, frame, request.attempt_seconds)
            if isinstance(attempt.session, lattice.Session):
                return convene(attempt, frame)
            phases.sweep(lambda other: other.run == attempt.session.run)
        else:
            attempt = ClientAttempt.resume(self.config, phases.take(binding_of(frame)))
        answer, state = attempt.answer(frame, partial(self._contribute, attempt))
        if state is not None:
            phases.save(attempt.session.digest, replace(attempt.saved, state=state))
        return answer

    def _contribute(
        self, attempt: ClientAttempt | StandingAttempt, task: bytes, model: bytes, group: bytes | None = None
    ) -> RingVector:
        """Charge this client's own account, then train and return the ring vector, with the system's entropy.

        Guarantee: the row is on the disk before any data is touched. From then on the vector always comes, zero and
        its noise whatever fails: a missing vector or the text of an error could depend on the data.
        Checked: test_totality.py.
        """
        layout = Layout.decode(attempt.terms.layout)
        clip, rest = split_clip(attempt.plan.adaptive_clip, task)
        settings = decode_task(rest, layout, self.run_config)
        if is_evaluation(settings) != (self.purpose is Purpose.EVALUATION):  # all clients of a sum do the same
            raise PeerError(f"a request for {self.purpose} must have a task for it")
        asked = Request.STATISTICS if STATISTIC in settings else Request.TRAINING
        attempt.config.policy.require_request(Request.EVALUATION if is_evaluation(settings) else asked)
        params = decode_model(model, layout.dimension, attempt.plan.download_bits)
        # Made before any data is touched: what is sent in place of an update must not fail in its turn.
        size = len(params) + (attempt.plan.weighting is not None)
        nothing = _NoUnits() if attempt.plan.unit is Unit.RECORD else np.zeros(size, np.float32)
        participant = Participant(
            plan=attempt.plan,
            client=attempt.config.client,
            entropy=Entropy.system().require_system(),
            participations=attempt.charge(),
        )
        process = os.getpid()
        try:
            update = self._update(attempt, settings, params, layout)
            vector = participant.encode(attempt.session, update, group, clip)
        except BaseException as error:  # noqa: BLE001 - a user's function may raise an exit or an interrupt
            log_error("training failed: this client contributes zero plus its noise")
            note(attempt.config.directory, Event.FAILED, error)
        else:
            note(attempt.config.directory, Event.TRAINED)
            return vector
        finally:
            # A copy that a user's function has forked and let out would send a second vector with one noise.
            if os.getpid() != process:
                os._exit(1)
        return participant.encode(attempt.session, nothing, group, clip, has_failed=True)

    def _update(
        self,
        attempt: ClientAttempt | StandingAttempt,
        settings: Mapping[str, object],
        params: FloatVector,
        layout: Layout,
    ) -> FloatVector | Units:
        """Return what training adds to the parameters that were sent, its weight last; or a silo's units of records."""
        if attempt.plan.unit is Unit.RECORD:
            made = self.train(layout.unflatten(params) | layout.initial_local(), settings)
            if not isinstance(made, Units):
                raise ConfigError("a plan with the unit record needs a silo's units (PrivateRecords), got arrays")
            # An evaluation's answer is the last array; a large model before it gets noise that nobody looks at.
            last = math.prod(layout.entries[-1].shape) if is_evaluation(settings) else layout.dimension
            return SingleUnits(made, attempt.plan.dimension, layout.dimension - last)
        local = LocalArrays(attempt.config.directory, attempt.session.run, attempt.plan)
        trained = self.train(layout.unflatten(params) | local.load(layout), settings)
        if isinstance(trained, Units):
            raise ConfigError("units of records are for a plan with the unit record")
        weighted = trained if isinstance(trained, WeightedArrays) else WeightedArrays(trained, None)
        update = layout.flatten(weighted.arrays) - params
        if attempt.plan.weighting is not None:
            if weighted.weight is None:
                raise ConfigError(
                    "a plan with weights needs the weight of each update: return num-examples in the metrics"
                )
            update = np.append(update, np.float32(weighted.weight))
        if not np.isfinite(update).all():
            raise ConfigError("the trained arrays and their weight must be finite, got NaN or infinity")
        local.keep(layout, weighted.arrays)
        return update


@contextmanager
def discreet() -> Iterator[None]:
    """Let errors of ours out, which name a rule; of any other a transport may send only that there was one."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (PeerError, ConfigError)) and not isinstance(error, FileError):
            raise
        log_error("this client failed")
        raise PeerError("this client failed; its own log says why") from None


def log_error(what: str) -> None:
    """Log the error that is being handled; where a user's function has broken the log, nothing else changes."""
    with suppress(BaseException):
        _log.exception(what)


@dataclass(frozen=True, slots=True)
class _NoUnits:
    """A silo that holds nothing."""

    count: int = 0

    def gradients(self, _chosen: IntVector) -> Iterator[NDArray[np.float32]]:
        """Return nothing."""
        return iter(())


_TOGETHER = 1 << 21  # numbers of vectors that are in memory at once


@dataclass(frozen=True, slots=True)
class SingleUnits:
    """Units of a user's own making, as a batch of a plan takes them.

    Guarantee: what a unit adds depends on that unit and the model alone, if the user's code keeps nothing from one call
    to the next; one that raises, or gives anything but one vector, counts as zero. Proof: theory.md#records.
    Checked: test_flower_standing.py::test_a_record_that_raises_moves_the_sum_by_itself_alone.
    """

    units: Units = field(repr=False)
    dimension: int
    padding: int = 0  # zeros before a unit's own numbers

    @property
    def count(self) -> int:
        """How many units there are."""
        return self.units.count

    def gradients(self, chosen: IntVector) -> Iterator[NDArray[np.float32]]:
        """Yield the vectors of the chosen units; for one that has none, a row that is not finite and counts as zero."""
        failures: list[BaseException] = []
        step = max(1, _TOGETHER // self.dimension)
        for start in range(0, len(chosen), step):
            part = chosen[start : start + step]
            rows = np.full((len(part), self.dimension), np.nan, np.float32)
            for row, unit in zip(rows, part, strict=True):
                try:
                    (given,) = islice(self.units.gradients(np.array([int(unit)])), 2)
                    found: NDArray[np.floating] = np.asarray(given)
                    if found.shape == (1, self.dimension - self.padding) and np.issubdtype(
                        found.dtype, np.floating
                    ):
                        with np.errstate(all="ignore"):
                            row[: self.padding], row[self.padding :] = 0, found[0]
                    else:
                        kind = f"{found.dtype} of shape {found.shape}"
                        failures = failures or [
                            ConfigError(f"a unit's vector must be one row of floats, got {kind}")
                        ]
                except BaseException as error:  # noqa: BLE001 - an exit or an interrupt too: it is this unit's alone
                    failures = failures or [error]
            yield rows
        if failures:
            with suppress(BaseException):  # a unit may have broken the log, and must not take the others along
                _log.error("units without a vector count as zero; this is the first error", exc_info=failures[0])
