"""Flower's private runtime interface, for one minor version: the only file with names that Flower keeps to itself.

A SuperNode that was started with `--isolation process` hands its messages to whoever asks for them at its runtime API.
This is such an asker. Checked: test_flower_node.py, which fails when a name or a signature that is used here changes.
"""

import hashlib
import logging
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx
from flwr.app import Context, Error, Message
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.config import get_metadata_from_config, get_project_config
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.object_ref import load_app
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode import start_client_internal
from flwr.supernode.cli import flower_supernode
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from d2pfed.errors import ConfigError, PeerError
from d2pfed.flower.pace import Pace
from d2pfed.ledger.files import FileError

_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_IDLE_SECONDS = 3.0  # what a SuperNode sleeps when there is no message
_PULL_SECONDS = 600  # for a message to come from the SuperNode, which has it already
_WAITING_SECONDS = 0.05  # in the place of its half second between two looks for the answer

_log = logging.getLogger("d2pfed.flower")


class AppSource(Protocol):
    """Where a client's app comes from."""

    def preload(self) -> None:
        """Load what can be loaded before the first message."""
        ...

    def load(self, run: Run, fab: Fab) -> ClientApp:
        """Return the app that answers the messages of a run, or refuse."""
        ...


@dataclass(frozen=True, slots=True)
class LocalApp:
    """The app in a directory of this machine: what the SuperLink sends is not run."""

    directory: Path

    def preload(self) -> None:
        """Load the app's module now, so that no message has to."""
        config = get_project_config(self.directory)
        load_app(config["tool"]["flwr"]["app"]["components"]["clientapp"], ConfigError, self.directory)

    def load(self, run: Run, _fab: Fab) -> ClientApp:
        """Return the app; refuse a run of an app with another name or version."""
        own = get_metadata_from_config(get_project_config(self.directory))
        if own != (run.fab_id, run.fab_version):
            raise PeerError(f"this client runs the app {' '.join(own)}, and was asked for another")
        app: ClientApp = get_load_client_app_fn("", str(self.directory), multi_app=True)(*own, "")
        return app


@dataclass(frozen=True, slots=True)
class PinnedApp:
    """The app that the SuperLink sends, if its bundle has this SHA-256."""

    sha256: str

    def preload(self) -> None:
        """Load nothing: the app comes with the first message."""

    def load(self, run: Run, fab: Fab) -> ClientApp:
        """Return the app; refuse another bundle before anything of it is unpacked."""
        found = hashlib.sha256(fab.content).hexdigest()
        if found != self.sha256:
            raise PeerError(f"this client runs the app {self.sha256[:16]}... only, and was sent {found[:16]}...")
        install_from_fab(fab.content, skip_prompt=True)
        app: ClientApp = get_load_client_app_fn("", None, multi_app=True)(run.fab_id, run.fab_version, found)
        return app


@dataclass(frozen=True, slots=True)
class Runtime:
    """The runtime API of a SuperNode.

    Attributes:
        address: host and port.
        certificates: PEM of the authority that has signed its certificate; None: plain HTTP, on loopback only.
        secret: what this process shows to be given messages; None where the SuperNode asks for none.
    """

    address: str
    certificates: bytes | None
    secret: bytes | None

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


def answer(runtime: Runtime, token: str, source: AppSource) -> None:
    """Pull one message, have the app answer it, and push the answer.

    Guarantee: what an error says reaches the server only if it is one of ours, which name a rule and no data.
    """
    client = runtime.client(token)
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    signal.alarm(_PULL_SECONDS)  # ends this process: what a SuperNode has lost never comes
    message, context, run, fab = pull_task_input(client)
    signal.alarm(0)
    reply, status, details = _reply(source, message, context, run, fab)
    push_message(client, reply, context)
    push_task_output(client=client, context=context, sub_status=status, details=details)
    client.close()


def _reply(source: AppSource, message: Message, context: Context, run: Run, fab: Fab) -> tuple[Message, str, str]:
    try:
        return source.load(run, fab)(message=message, context=context), SubStatus.COMPLETED, ""
    except Exception as error:  # noqa: BLE001 - whatever it was, the server must hear that this client has failed
        _log.exception("a message cannot be answered")
        reason = _reason(error)
        code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        return Message(Error(code=code, reason=reason), reply_to=message), SubStatus.FAILED, reason


def _reason(error: Exception) -> str:
    """Return what the server may hear of an error."""
    cause = error.__cause__ or error
    is_ours = isinstance(cause, (PeerError, ConfigError)) and not isinstance(cause, FileError)
    return str(cause) if is_ours else "this client failed; its own log says why"


class _HastyTime:
    """The `time` of Flower's SuperNode loop: it looks for messages soon after one came, and every 3 s when idle."""

    def __init__(self) -> None:
        self._pace = Pace(_IDLE_SECONDS)

    def sleep(self, seconds: float) -> None:
        """Sleep for less than was asked, while messages come."""
        if seconds < _IDLE_SECONDS:  # it waits for the answer to a message
            self._pace.hurry()
            time.sleep(min(seconds, _WAITING_SECONDS))
        else:
            self._pace.pause(seconds)


def run_supernode(arguments: list[str]) -> None:
    """Run Flower's SuperNode in this process until it ends; its loop takes its pauses from us."""
    if not hasattr(start_client_internal, "time"):
        raise ConfigError("this version of Flower's SuperNode pauses in another way")
    start_client_internal.time = _HastyTime()
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()
