"""The client's half in a ClientApp: `ClientApp(mods=[private])` makes an existing training function private."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from d2pfed.errors import ConfigError, PeerError
from d2pfed.flower.account import Account
from d2pfed.flower.envelope import (
    EXCHANGE,
    INTRODUCTION,
    MESSAGE_TYPE,
    Introduced,
    Introduction,
    Request,
    pack_answer,
)
from d2pfed.flower.home import NODE_SETTING, SIMULATION_VARIABLE, Home, read_home, simulated_home
from d2pfed.flower.layout import Layout, decode_model, decode_task
from d2pfed.flower.part import Part, agree
from d2pfed.flower.states import Saved, States
from d2pfed.ledger.private_files import FileError
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import RingVector
from d2pfed.round import Participant
from d2pfed.secagg import Session
from d2pfed.secagg.crypto import sign
from d2pfed.secagg.messages import MessageKind
from d2pfed.secagg.wire import binding_of, kind_of

Train = Callable[[Message, Context], Message]  # what a ClientApp's training function is

_log = logging.getLogger("d2pfed.flower")


def private(message: Message, context: Context, train: Train) -> Message:
    """Answer a request of the private protocol, training only when it asks for the masked vector.

    Guarantee: of what `train` returns, nothing but its arrays is looked at, and they leave clipped, noised and
    masked; its metrics, its counts and the text of its errors do not leave. Every other kind of message is refused.
    Checked: test_flower_client.py::test_nothing_of_the_training_leaves_in_clear.
    """
    try:
        return Message(_answer(message, context, train), reply_to=message)
    except Exception as error:  # whatever it is, Flower would send its text to the server
        if isinstance(error, (PeerError, ConfigError)) and not isinstance(error, FileError):
            raise
        _log.exception("this client failed")
        raise PeerError("this client failed; its own log says why") from None


def _answer(message: Message, context: Context, train: Train) -> RecordDict:
    home, content = _home(context), message.content
    require_training(message)
    if list(content) == [INTRODUCTION]:
        return introduce(home, Introduction.unpack(content), message.metadata.dst_node_id)
    if list(content) == [EXCHANGE]:
        return take_part(home, Request.unpack(content), _Training(message, context, train))
    raise PeerError(f"this client answers requests of d2pfed only, got a message with {sorted(content)}")


def require_training(message: Message) -> None:
    """Refuse a request in the name of another function of the app: what trains would be the server's to choose."""
    if message.metadata.message_type != MESSAGE_TYPE:
        raise PeerError(f"this client answers requests of d2pfed only, they are of type {MESSAGE_TYPE}")


def _home(context: Context) -> Home:
    """Return this client's home; what is wrong with it, files and all, is for its own log."""
    try:
        return home_of(context)
    except (PeerError, ConfigError):
        _log.exception("this client's home cannot be used")
        raise ConfigError("this client is not set up; its own log says why") from None


def home_of(context: Context) -> Home:
    """Return the home that the SuperNode's own configuration names, or that of a simulated client."""
    named = context.node_config.get(NODE_SETTING)
    if named is not None:
        return read_home(Path(str(named)))
    simulated = os.environ.get(SIMULATION_VARIABLE)
    if simulated is None:
        raise ConfigError(
            f"a client needs a home: start its SuperNode with --node-config '{NODE_SETTING}=\"DIRECTORY\"', "
            f"or a simulation with {SIMULATION_VARIABLE}=DIRECTORY"
        )
    return simulated_home(Path(simulated), context.node_config.get("partition-id"))


def introduce(home: Home, introduction: Introduction, node: int) -> RecordDict:
    """Accept a run that this client's policy and budget allow, and say which client this is."""
    States(home.path).sweep()
    agree(home, introduction)
    statement = introduction.statement(node, home.client)
    signature = b"" if home.secret is None else sign(home.secret, statement)
    return Introduced(home.client, signature).pack()


def take_part(home: Home, request: Request, training: "_Training") -> RecordDict:
    """Answer one request of an attempt, from the secrets that were kept and are kept anew."""
    begun = time.monotonic()
    states = States(home.path)
    states.sweep()
    if kind_of(request.frame) == MessageKind.INVITATION:
        part = Part.begin(home, request.frame, request.attempt_seconds)
        states.sweep(lambda other: other.run == part.session.run)
    else:
        part = Part.resume(home, states.take(binding_of(request.frame)))
    contribution = _Contribution(home, part, training)
    answer, state = part.answer(request.frame, contribution.contribute)
    if time.monotonic() - begun > request.seconds:
        raise PeerError(f"the answer took longer than the server's {request.seconds:g} seconds")
    if state is not None:
        saved = part.saved
        states.save(part.session.digest, Saved(saved.run, saved.invitation, saved.begun, saved.expires, state))
    return pack_answer(answer)


class _Training:
    """The application's training function, and the message it is called with."""

    def __init__(self, message: Message, context: Context, train: Train) -> None:
        self._message = message
        self._context = context
        self._train = train

    @property
    def run_config(self) -> Mapping[str, object]:
        """The configuration of the run, which came from the SuperLink."""
        return self._context.run_config

    def update(self, config: ConfigRecord, params: FloatVector, layout: Layout) -> FloatVector:
        """Return the update that training makes: what is trained minus what was sent.

        Training that fails gives the zero vector: whether it fails may depend on the data, and a client that stays
        away would tell. What went wrong is for this client's own log.
        """
        self._message.content = RecordDict({"arrays": layout.unflatten(params), "config": config})
        try:
            reply = self._train(self._message, self._context)
            return _finite(layout.flatten(_only_arrays(reply.content)) - params)
        except Exception:  # noqa: BLE001 - whatever it was, its text must not reach the server
            _log.exception("training failed: this client contributes zero and its noise")
            return np.zeros_like(params)


class _Contribution:
    """This client's contribution to one session."""

    def __init__(self, home: Home, part: Part, training: _Training) -> None:
        self._home = home
        self._part = part
        self._training = training

    def contribute(self, task: bytes, model: bytes, group: bytes | None) -> RingVector:
        """Charge this client's own account, train, and return the ring vector."""
        plan, session = self._part.plan, self._part.session
        layout = Layout.decode(self._part.told.layout)
        config = decode_task(task, layout, self._training.run_config)  # before anything is charged
        params = decode_model(model, layout)
        participations = Account(self._home.log, self._home.budget).charge(
            plan,
            session.run,
            session.round,
            session.attempt,
            _place(session),
            require=self._part.require_draw_left,
        )
        participant = Participant(
            plan=plan,
            client=self._home.client,
            entropy=Entropy.system().require_system(),
            participations=participations,
        )
        return participant.encode(session, self._training.update(config, params, layout), group)


def _place(session: Session) -> dict[str, object]:
    return {"session": session.digest.hex(), "roster": session.roster_digest.hex(), "draw": session.draw}


def _finite(update: FloatVector) -> FloatVector:
    if not np.isfinite(update).all():
        raise ConfigError("the trained arrays must be finite, got NaN or infinity")
    return update


def _only_arrays(content: RecordDict) -> ArrayRecord:
    records = list(content.array_records.values())
    if len(records) != 1:
        raise ConfigError(f"a training function must return one record of arrays, got {len(records)}")
    return records[0]
