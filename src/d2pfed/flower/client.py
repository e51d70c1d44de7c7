"""The client's half in a ClientApp: `ClientApp(mods=[private])` makes an existing training function private."""

import logging
import time
from collections.abc import Callable

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict

from d2pfed.codec import FloatVector
from d2pfed.errors import ConfigError, PeerError
from d2pfed.flower.envelope import EXCHANGE, INTRODUCTION, Introduced, Introduction, Request, pack_answer
from d2pfed.flower.home import Home
from d2pfed.flower.layout import Layout, decode_model
from d2pfed.flower.store import Account, Agreed, Saved, Store
from d2pfed.randomness import Entropy
from d2pfed.ring import RingVector
from d2pfed.round import Participant, accept
from d2pfed.secagg import Client, Session, decode_invitation
from d2pfed.secagg.crypto import sign
from d2pfed.secagg.messages import Kind
from d2pfed.wire import binding_of, kind_of

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
    except (PeerError, ConfigError):
        raise
    except Exception:  # noqa: BLE001 - whatever it was, Flower would send its text to the server
        _log.exception("this client failed")
        raise PeerError("this client failed; its own log says why") from None


def _answer(message: Message, context: Context, train: Train) -> RecordDict:
    home, content = _home(context), message.content
    if list(content) == [INTRODUCTION]:
        return introduce(home, Introduction.unpack(content), message.metadata.dst_node_id)
    if list(content) == [EXCHANGE]:
        return take_part(home, Request.unpack(content), _Training(message, context, train))
    raise PeerError(f"this client answers requests of d2pfed only, got a message with {sorted(content)}")


def _home(context: Context) -> Home:
    """Return this client's home; what is wrong with it, files and all, is for its own log."""
    try:
        return Home.of(context)
    except (PeerError, ConfigError):
        _log.exception("this client's home cannot be used")
        raise ConfigError("this client is not set up; its own log says why") from None


def introduce(home: Home, introduction: Introduction, node: int) -> RecordDict:
    """Accept a run that this client's policy and budget allow, and say which client this is."""

    def check(agreed: Agreed) -> None:
        home.policy.check(agreed.plan)
        if agreed.layout.dimension != agreed.plan.codec.rotation.dimension:
            raise PeerError("a plan must be for the parameters of its layout")
        Account(home.path, home.budget).require_room(agreed.plan)

    Store(home.path).agree(introduction, check)
    statement = introduction.statement(node, home.client)
    signature = b"" if home.enrolment is None else sign(home.enrolment.secret, statement)
    return Introduced(home.client, signature).pack()


def take_part(home: Home, request: Request, training: "_Training") -> RecordDict:
    """Answer one request of an attempt, from the secrets that were kept and are kept anew."""
    begun = time.monotonic()
    store = Store(home.path)
    saved = _begin(home, store, request) if kind_of(request.frame) == Kind.INVITATION else None
    if saved is None:
        saved = store.take(binding_of(request.frame))
    invited = decode_invitation(saved.invitation)
    agreed = store.agreed(invited.run)
    session = accept(agreed.plan, home.policy, saved.invitation, home.consistency)
    part = _Part(home, agreed, session, training)
    client = Client.restore(session, home.client, part.contribute, saved.state, home.enrolment)
    answer = client.receive(request.frame)
    if time.monotonic() - begun > request.seconds:
        raise PeerError(f"the answer took longer than the server's {request.seconds:g} seconds")
    if kind_of(answer) != Kind.OPENED:
        store.save(session.digest, Saved(saved.invitation, saved.begun, saved.expires, client.save()))
    return pack_answer(answer)


def _begin(home: Home, store: Store, request: Request) -> Saved:
    """Check an invitation, note that its attempt has begun, and return a fresh client in it."""
    invited = decode_invitation(request.frame)
    if invited.client != home.client:
        raise PeerError(f"this is client {home.client}, the invitation is for client {invited.client}")
    agreed = store.agreed(invited.run)
    session = accept(agreed.plan, home.policy, request.frame, home.consistency)
    if session.digest != invited.binding:
        raise PeerError(f"run {invited.run} was agreed on with another plan, cohort rule or consistency")
    store.begin(invited.run, invited.round, invited.attempt)
    store.forget(invited.run)
    entropy = Entropy.system().require_system()
    client = Client(session, home.client, _never, entropy, home.enrolment)
    now = time.time()
    return Saved(request.frame, now, now + request.attempt_seconds, client.save())


def _never(_model: bytes, _group: bytes | None) -> RingVector:
    raise PeerError("a vector was asked for before there were keys")


class _Training:
    """The application's training function, and the message it is called with."""

    def __init__(self, message: Message, context: Context, train: Train) -> None:
        self._message = message
        self._context = context
        self._train = train

    def update(self, model: bytes, layout: Layout) -> FloatVector:
        """Return the update that training makes: what is trained minus what was sent.

        Training that fails gives the zero vector: whether it fails may depend on the data, and a client that stays
        away would tell. What went wrong is for this client's own log.
        """
        params, config = decode_model(model, layout)
        self._message.content = RecordDict({"arrays": layout.unflatten(params), "config": config})
        try:
            reply = self._train(self._message, self._context)
            return _finite(layout.flatten(_only_arrays(reply.content)) - params)
        except Exception:  # noqa: BLE001 - whatever it was, its text must not reach the server
            _log.exception("training failed: this client contributes zero and its noise")
            return np.zeros_like(params)


class _Part:
    """This client's contribution to one session."""

    def __init__(self, home: Home, agreed: Agreed, session: Session, training: _Training) -> None:
        self._home = home
        self._agreed = agreed
        self._session = session
        self._training = training

    def contribute(self, model: bytes, group: bytes | None) -> RingVector:
        """Charge this client's own ledger, train, and return the ring vector."""
        plan, session = self._agreed.plan, self._session
        release = plan.release(session.run, session.round, session.attempt, (), plan.quorum)
        taken = Account(self._home.path, self._home.budget).charge(plan, session.run, release)
        participant = Participant(
            plan=plan, client=self._home.client, entropy=Entropy.system().require_system(), taken=taken
        )
        return participant.contribute(session, self._training.update(model, self._agreed.layout), group)


def _finite(update: FloatVector) -> FloatVector:
    if not np.isfinite(update).all():
        raise ConfigError("the trained arrays must be finite, got NaN or infinity")
    return update


def _only_arrays(content: RecordDict) -> ArrayRecord:
    records = list(content.array_records.values())
    if len(records) != 1:
        raise ConfigError(f"a training function must return one record of arrays, got {len(records)}")
    return records[0]
