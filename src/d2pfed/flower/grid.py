"""Flower's grid as an engine that carries requests, and requests, answers and models as Flower's records."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError

from d2pfed.deploy.layout import NamedArrays
from d2pfed.deploy.requests import RequestKind
from d2pfed.deploy.transport import Answer
from d2pfed.errors import PeerError

# Makes a message out of content, the node it is for, a group and its seconds to live.
MessageFactory = Callable[[RecordDict, int, str, float], Message]

_log = logging.getLogger("d2pfed.deploy")

MESSAGE_TYPE = "train"  # all requests: Flower hands them to the mods of the client's training function
EVALUATION_TYPE = "evaluate"  # all requests of an evaluation: to the mods of its evaluation function

_FIELD = "data"
_BLOB = "blob"  # the record of a long end, in chunks of Flower's; a SuperLink stores one for all requests
_LONG = 1 << 16  # bytes
_HELD_UP = 200.0  # seconds that Flower waits, at most, for the rest of an answer whose node died while it sent it
# What Flower raises for an answer whose records or chunks do not fit together: after it has taken the answer.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, DecodeError)


def make_message(content: RecordDict, node: int, group: str, seconds: float) -> Message:
    """Make a message; works inside a running ServerApp only, which is why tests bring their own."""
    return Message(content, node, MESSAGE_TYPE, ttl=seconds, group_id=group)


@dataclass(frozen=True, slots=True)
class GridEngine:
    """Flower's grid (`deploy.transport.Engine`)."""

    grid: Grid
    make: MessageFactory

    def nodes(self) -> set[int]:
        """Return the nodes that are connected now."""
        return set(self.grid.get_node_ids())

    def push(
        self, kind: RequestKind, data: bytes, node: int, name: str, seconds: float, *, blob: bytes = b""
    ) -> str | None:
        """Send a request of an exchange, `data` and then `blob`; return its id, or nothing if it could not be sent."""
        content = to_record(kind, data, blob)
        # A SuperLink drops an answer to a message that has expired, also if it came in time and Flower was held up.
        sent = list(self.grid.push_messages([self.make(content, node, name, seconds + _HELD_UP)]))
        return sent[0] if sent and sent[0] else None

    def pull(self, requests: Collection[str]) -> Iterator[Answer]:
        """Return the answers to these requests that are there; none if Flower cannot read one of them.

        Those that came with it are lost, and their clients have dropped out: a client cannot end the server.
        """
        try:
            replies = list(self.grid.pull_messages(list(requests)))
        except _UNREADABLE as error:
            _log.warning("Flower cannot read an answer, and has lost those that came with it: %r", error)
            return
        for reply in replies:
            request, node = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
            if reply.has_error():
                yield Answer(request, node, refused=("refused or failed", str(reply.error.reason)))
                continue
            try:
                yield Answer(request, node, *from_record(reply.content))
            except PeerError as error:
                yield Answer(request, node, refused=("malformed", str(error)))


def to_record(kind: RequestKind, data: bytes, blob: bytes = b"") -> RecordDict:
    """Return the content of a message, `data` and then `blob`: one field, and a record of its own for a long end.

    An announcement is one field of any length, as in every version: the other side must read its versions.
    """
    if not blob and len(data) >= _LONG and kind is not RequestKind.ANNOUNCEMENT:
        data, blob = b"", data
    if len(blob) < _LONG:
        return RecordDict({kind.value: ConfigRecord({_FIELD: data + blob})})
    array = Array("uint8", (len(blob),), _BLOB, blob)
    return RecordDict({kind.value: ConfigRecord({_FIELD: data}), _BLOB: ArrayRecord({_BLOB: array})})


def from_record(content: RecordDict) -> tuple[RequestKind, bytes]:
    """Read the content of a message; refuse anything but the record of a request or an answer and its long end."""
    names = [name for name in content if name != _BLOB]
    if len(names) != 1 or names[0] not in set(RequestKind):
        found = ", ".join(sorted(name[:40] for name in content)[:8])
        raise PeerError(f"a message must hold one record of d2pfed, got {len(content)}: {found}")
    record = content[names[0]]
    data = record.get(_FIELD) if isinstance(record, ConfigRecord) and list(record) == [_FIELD] else None
    if not isinstance(data, bytes):
        raise PeerError(f"a record {names[0]} must have one field of bytes")
    if _BLOB in content:
        end = content[_BLOB]
        if not isinstance(end, ArrayRecord) or list(end) != [_BLOB]:
            raise PeerError(f"a record {_BLOB} must have one array of bytes")
        data += end[_BLOB].data
    return RequestKind(names[0]), data


def to_named_arrays(record: ArrayRecord, names: Iterable[str] | None = None) -> NamedArrays:
    """Return the arrays of a record, all or those of these names."""
    wanted = set(record if names is None else names)
    return {name: array.numpy() for name, array in record.items() if name in wanted}


def to_array_record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Return a record of named arrays."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})
