"""Flower's private runtime interface, for one minor version: the only file with names that Flower keeps to itself.

A SuperNode that was started with `--isolation process` hands its messages to any process that asks its runtime API.
This is such an asker. Checked: test_flower_node.py, which fails when a name or a signature that is used here changes.
"""

import hashlib
import logging
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
from flwr.app import Error, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.config import get_metadata_from_config, get_project_config
from flwr.common.constant import ErrorCode, Status, SubStatus
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore import log
from flwr.supercore.constant import TaskType
from flwr.supercore.exit import add_exit_handler, register_signal_handlers
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.object_ref import load_app
from flwr.supercore.object_store import ObjectStore, ObjectStoreFactory
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.telemetry import EventType
from flwr.supernode.cli.flower_supernode import _parse_supernode_lifespan_config, _start_supernode_http_api
from flwr.supernode.nodestate import NodeState, NodeStateFactory
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output
from flwr.supernode.start_client_internal import _init_connection, _pull_and_store_message, _push_messages

from d2pfed.deploy.config import APP_SETTING
from d2pfed.deploy.transport import SHORTEST, Pace
from d2pfed.errors import ConfigError, PeerError
from d2pfed.flower.bundle import loaded
from d2pfed.ledger.files import FileError

_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_IDLE_SECONDS = 3.0  # at most, between two looks for a message: as Flower's own SuperNode
_UNFINISHED = (Status.PENDING, Status.STARTING, Status.RUNNING)
_PULL_SECONDS = 600  # for a message to come from the SuperNode, which has it already
_SHUTDOWN_SECONDS = 5.0

_log = logging.getLogger("d2pfed.deploy")


@dataclass(frozen=True, slots=True)
class LocalApp:
    """The app in a directory of this machine: what the SuperLink sends is not run."""

    directory: Path

    def preload(self) -> None:
        """Load the app's module now, so that no message has to."""
        config = get_project_config(self.directory)
        load_app(config["tool"]["flwr"]["app"]["components"]["clientapp"], ConfigError, self.directory)

    def refusal(self, run: Run, _fab: Fab) -> str:
        """Return why this is not the app of a run, by its name and version; empty if it is."""
        own = get_metadata_from_config(get_project_config(self.directory))
        is_own = own == (run.fab_id, run.fab_version)
        return "" if is_own else f"this client runs the app {' '.join(own)}, and was asked for another"

    @contextmanager
    def load(self, _fab: Fab) -> Iterator[tuple[str, ClientApp]]:
        """Yield its name and the app."""
        own = get_metadata_from_config(get_project_config(self.directory))
        yield own[0], get_load_client_app_fn("", str(self.directory), multi_app=True)(*own, "")


@dataclass(frozen=True, slots=True)
class PinnedApp:
    """The app that the SuperLink sends, if its bundle has this SHA-256; unpacked below `place` for each message."""

    sha256: str
    place: Path

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ConfigError(f"a bundle's SHA-256 must be 64 digits of 0-9 and a-f, got {self.sha256[:80]!r}")

    def refusal(self, _run: Run, fab: Fab) -> str:
        """Return why this is not the app that was sent; empty if it is."""
        found = hashlib.sha256(fab.content).hexdigest()
        is_own = found == self.sha256
        return "" if is_own else f"this client runs the app {self.sha256[:16]}..., and was sent {found[:16]}..."

    @contextmanager
    def load(self, fab: Fab) -> Iterator[tuple[str, ClientApp]]:
        """Yield its name, as the bundle states it, and the app."""
        with loaded(fab.content, self.place) as app:
            yield app


@dataclass(frozen=True, slots=True)
class Apps:
    """The apps of this client, one of which answers a message."""

    sources: tuple[LocalApp | PinnedApp, ...]

    def preload(self) -> None:
        """Load a single local app now, so that no message has to. Several might have modules of one name."""
        if len(self.sources) == 1 and isinstance(self.sources[0], LocalApp):
            self.sources[0].preload()

    @contextmanager
    def load(self, run: Run, fab: Fab) -> Iterator[tuple[str, ClientApp]]:
        """Yield the name of a run's app and the app; refuse one that is not listed before anything is unpacked."""
        refusals = list[str]()
        for source in self.sources:
            if refusal := source.refusal(run, fab):
                refusals.append(refusal)
                continue
            with source.load(fab) as app:
                yield app
            return
        raise PeerError("; ".join(refusals))


@dataclass(frozen=True, slots=True)
class Runtime:
    """The runtime API of a SuperNode."""

    address: str
    certificates: bytes | None  # PEM of the authority behind its certificate; None: HTTP, on loopback only
    secret: bytes | None  # what this process shows to be given messages, where the SuperNode asks for it

    def __post_init__(self) -> None:
        if self.certificates is not None:
            return
        # Beyond this machine messages and their tokens would cross a network in the clear.
        host = self.address.rpartition(":")[0]
        try:
            is_loopback = host == "localhost" or ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
        except ValueError:
            is_loopback = False
        if not is_loopback:
            raise ConfigError(
                f"without --root-certificates the runtime must be on loopback, got {self.address[:80]!r}"
            )

    def client(self, token: str | None) -> RuntimeHttpClient:
        """Return a connection: for one message with its token, for asking for messages without."""
        interceptors: list[ProtobufClientInterceptor] = [
            RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
        ]
        if token is not None:
            interceptors.append(RuntimeTokenHttpInterceptor(token))
        elif self.secret is not None:
            interceptors.append(
                SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods={_ACQUIRE})
            )
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=self.certificates is None,
            root_certificates=self.certificates,
            interceptors=interceptors,
            # Who asks for messages asks again anyway, and must notice in between that its SuperNode has ended.
            retry_invoker=None if token is None else make_simple_http_retry_invoker(),
        )


def acquire(client: RuntimeHttpClient) -> str | None:
    """Return the token of a message that waits for its answer, if there is one."""
    try:
        found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
    except httpx.TransportError:
        return None  # the SuperNode is not up yet, or not any more
    return str(found.token) if found.HasField("task") and found.token else None


def answer(runtime: Runtime, token: str, apps: Apps) -> None:
    """Pull one message, have the app answer it, and push the answer.

    Guarantee: what an error says reaches the server only if it is one of ours, which name a rule and no data.
    """
    client = runtime.client(token)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    signal.alarm(_PULL_SECONDS)  # ends this process: what a SuperNode has lost never comes
    message, context, run, fab = pull_task_input(client)
    signal.alarm(0)
    status, details = SubStatus.COMPLETED, ""
    try:
        with apps.load(run, fab) as (name, app):
            context.node_config[APP_SETTING] = name  # what this process has loaded, whatever a run is called
            reply = app(message=message, context=context)
    except Exception as error:  # noqa: BLE001 - whatever it was, the server must learn that this client has failed
        _log.exception("a message cannot be answered")
        cause = error.__cause__ or error
        is_ours = isinstance(cause, (PeerError, ConfigError)) and not isinstance(cause, FileError)
        status, details = SubStatus.FAILED, str(cause) if is_ours else "this client failed; its own log says why"
        reply = Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=details), reply_to=message)
    push_message(client, reply, context)
    push_task_output(client=client, context=context, sub_status=status, details=details)
    client.close()


def send_answers(
    state: NodeState,
    store: ObjectStore,
    message: str | None,
    send: Callable[[Message, ObjectTree, float], tuple[set[str], str]],
    push_object: Callable[[int, str, str, bytes], None],
) -> None:
    """Send the answers that are there; first wait for the one to this message, if its id is given.

    A run that is stopped may leave an answer that nobody waits for. It must leave too: Flower's own loop would take it
    for the answer to the next message, and from then on be one answer behind.
    """
    found = list(state.get_messages_legacy(is_reply=True))
    while message is not None and all(reply.metadata.reply_to_message_id != message for reply in found):
        is_worked_on = bool(state.get_tasks(statuses=_UNFINISHED))
        found += state.get_messages_legacy(is_reply=True)  # looked for last: an answer comes before its task's end
        if not is_worked_on:
            break
        time.sleep(SHORTEST)
    late = [reply.metadata.reply_to_message_id for reply in found if reply.metadata.reply_to_message_id != message]
    if late:
        log(logging.WARNING, "Answers to earlier messages leave only now: %s", ", ".join(late))
    if message is not None and len(late) == len(found):
        # Flower answers for a process that was lost only if it had pulled its message. The next one would pull this.
        log(logging.ERROR, "Message %s has no answer: its process was lost before it began", message)
        state.delete_messages(message_ids=[message])
        store.delete(message)

    def content(name: str) -> bytes | None:
        while (data := store.get(name)) == b"":  # Flower would look for it every half second
            time.sleep(SHORTEST)
        return data

    if found:
        answers = SimpleNamespace(
            get_messages_legacy=lambda **_filter: found,
            get_message_processing_duration=state.get_message_processing_duration,
            delete_messages=state.delete_messages,
        )
        objects = SimpleNamespace(get=content, get_object_tree=store.get_object_tree, delete=store.delete)
        _push_messages(
            state=cast("NodeState", answers),
            object_store=cast("ObjectStore", objects),
            send=send,
            push_object=push_object,
        )


def run_supernode(arguments: list[str]) -> None:
    """Run a SuperNode in this process until it ends: Flower's steps, in a loop with pauses of our own.

    Flower's loop sleeps 3 seconds when there is no message, and has no setting for it. This one takes a message, has
    it answered and sends the answer in the same order, one at a time, and matches answers to messages.
    """
    sys.argv = ["flower-supernode", *arguments]
    config = _parse_supernode_lifespan_config()
    states = NodeStateFactory(objectstore_factory=ObjectStoreFactory())
    server, thread = _start_supernode_http_api(config, states)

    def stop() -> None:
        server.should_exit = True
        thread.join(timeout=_SHUTDOWN_SECONDS)

    add_exit_handler(stop)
    # What Flower falls back to after the first signal. A supervisor signals the whole group, and `d2pfed-node` does so
    # again: the second signal would cut off the farewell, and a restarted node would be refused for a minute.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    register_signal_handlers(
        event_type=EventType.RUN_SUPERNODE_LEAVE, exit_message="SuperNode terminated gracefully."
    )
    state, store, pace = states.state(), states.objectstore_factory.store(), Pace(_IDLE_SECONDS)
    with _init_connection(
        config.server_address,
        config.insecure,
        config.root_certificates,
        config.authentication_keys,
        config.max_retries,
        config.max_wait_time,
    ) as (node, receive, send, get_run, get_fab, pull_object, push_object, confirm):
        state.set_node_id(node)
        log(logging.INFO, "SuperNode ID: %s", node)
        received = ""

        def receive_noted() -> tuple[Message, ObjectTree] | None:
            nonlocal received
            if (found := receive()) is not None:
                received = found[0].metadata.message_id
            return found

        while True:
            taken = _pull_and_store_message(
                state=state,
                object_store=store,
                node_config=config.node_config,
                receive=receive_noted,
                get_run=get_run,
                get_fab=get_fab,
                pull_object=pull_object,
                confirm_message_received=confirm,
                trusted_entities=config.trusted_entities,
            )
            send_answers(state, store, None if taken is None else received, send, push_object)
            if taken is None:
                pace.pause(_IDLE_SECONDS)
            else:
                pace.hurry()
