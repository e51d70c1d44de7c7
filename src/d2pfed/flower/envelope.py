"""What travels inside Flower's messages: an introduction once a run, then frames of secure aggregation."""

from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict

from d2pfed.errors import PeerError
from d2pfed.randomness import digest
from d2pfed.wire import ID_LIMIT, ClientId, pack_integer

INTRODUCTION = "d2pfed.introduction"
EXCHANGE = "d2pfed.exchange"
MESSAGE_TYPE = "train"  # all requests: Flower hands them to the modifiers of the client's training function


@dataclass(frozen=True, slots=True)
class Introduction:
    """The first request to a node: which run this is, what was planned, and the layout of the model."""

    run: str
    plan: str
    layout: str

    def pack(self) -> RecordDict:
        """Return the content of a message."""
        return RecordDict(
            {INTRODUCTION: ConfigRecord({"run": self.run, "plan": self.plan, "layout": self.layout})}
        )

    @staticmethod
    def unpack(content: RecordDict) -> "Introduction":
        """Read the content of a message."""
        fields = _fields(content, INTRODUCTION, {"run": str, "plan": str, "layout": str})
        return Introduction(str(fields["run"]), str(fields["plan"]), str(fields["layout"]))

    def statement(self, node: int, client: ClientId) -> bytes:
        """Return what an enrolled client signs: that this node speaks for it in this run."""
        return digest("d2pfed introduction", self.run, self.plan, self.layout, node, client)


@dataclass(frozen=True, slots=True)
class Introduced:
    """The answer: for which client the node speaks, and the client's signature, empty if it is not enrolled."""

    client: ClientId
    signature: bytes

    def pack(self) -> RecordDict:
        """Return the content of a message."""
        fields = ConfigRecord({"client": pack_integer(self.client, 8), "signature": self.signature})
        return RecordDict({INTRODUCTION: fields})

    @staticmethod
    def unpack(content: RecordDict) -> "Introduced":
        """Read the content of a message."""
        fields = _fields(content, INTRODUCTION, {"client": bytes, "signature": bytes})
        client = int.from_bytes(_bytes(fields["client"]), "little")
        if client >= ID_LIMIT:
            raise PeerError(f"a client's identity must be in [0, 2^64), got {client}")
        return Introduced(client, _bytes(fields["signature"]))


@dataclass(frozen=True, slots=True)
class Request:
    """One request of an exchange: for how long the server waits for its answer, and for the whole attempt."""

    frame: bytes
    seconds: float
    attempt_seconds: float

    def pack(self) -> RecordDict:
        """Return the content of a message."""
        fields = ConfigRecord(
            {"frame": self.frame, "seconds": float(self.seconds), "attempt_seconds": float(self.attempt_seconds)}
        )
        return RecordDict({EXCHANGE: fields})

    @staticmethod
    def unpack(content: RecordDict) -> "Request":
        """Read the content of a message."""
        fields = _fields(content, EXCHANGE, {"frame": bytes, "seconds": float, "attempt_seconds": float})
        seconds, whole = float(str(fields["seconds"])), float(str(fields["attempt_seconds"]))
        if not 0 < seconds <= whole:
            raise PeerError(f"a request must wait for a while, got {seconds} of {whole} seconds")
        return Request(_bytes(fields["frame"]), seconds, whole)


def pack_answer(frame: bytes) -> RecordDict:
    """Return the content of an answer: one frame and nothing else."""
    return RecordDict({EXCHANGE: ConfigRecord({"frame": frame})})


def unpack_answer(content: RecordDict) -> bytes:
    """Read the content of an answer."""
    return _bytes(_fields(content, EXCHANGE, {"frame": bytes})["frame"])


def _fields(content: RecordDict, name: str, types: dict[str, type]) -> dict[str, object]:
    """Return the fields of the one record that is expected, each of its type; refuse anything else beside them."""
    if list(content) != [name] or not isinstance(content[name], ConfigRecord):
        raise PeerError(f"a message must hold one record {name}, got {sorted(content)}")
    fields = dict(content.config_records[name])
    if {key: type(value) for key, value in fields.items()} != types:
        raise PeerError(f"a record {name} must have the fields {sorted(types)}, got {sorted(fields)}")
    return dict(fields)


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise PeerError(f"bytes were expected, got {type(value).__name__}")
    return value
