"""What travels inside Flower's messages: an introduction once a run, then frames of secure aggregation.

Whatever comes in is measured before anything is made of it: sizes of texts and bytes, then numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import digest
from d2pfed.secagg.crypto import SIGNATURE_BYTES
from d2pfed.secagg.wire import ClientId, pack_integer

INTRODUCTION = "d2pfed.introduction"
EXCHANGE = "d2pfed.exchange"
MESSAGE_TYPE = "train"  # all requests: Flower hands them to the modifiers of the client's training function


_ID_BYTES = 8
MOST_RUN_BYTES = 255
MOST_PLAN_CHARACTERS = 1 << 16
MOST_LAYOUT_CHARACTERS = 1 << 22
MOST_ROSTER_BYTES = 1 << 26
MOST_FRAME_BYTES = 1 << 31
MOST_DRAWS = 1 << 20
MOST_ATTEMPT_SECONDS = 7 * 86_400.0  # for longer no client keeps the secrets of an attempt


@dataclass(frozen=True, slots=True)
class Introduction:
    """The first request to a node: which run this is, what was planned, the layout of the model, and the draws.

    The roster may come with it, signed by the authority; empty where nobody is enrolled.
    """

    run: str
    plan: str
    layout: str
    first_draw: int = 0
    roster: bytes = b""

    def pack(self) -> RecordDict:
        """Return the content of a message."""
        fields = ConfigRecord({"run": self.run, "plan": self.plan, "layout": self.layout})
        fields["first-draw"], fields["roster"] = self.first_draw, self.roster
        return RecordDict({INTRODUCTION: fields})

    @staticmethod
    def unpack(content: RecordDict) -> "Introduction":
        """Read the content of a message."""
        types = {"run": str, "plan": str, "layout": str, "first-draw": int, "roster": bytes}
        fields = _fields(content, INTRODUCTION, types)
        run, plan, layout = (str(fields[name]) for name in ("run", "plan", "layout"))
        _require_short("a run's name", len(run), MOST_RUN_BYTES)
        _require_short("a plan", len(plan), MOST_PLAN_CHARACTERS)
        _require_short("a layout", len(layout), MOST_LAYOUT_CHARACTERS)
        roster, first = _bytes(fields["roster"], MOST_ROSTER_BYTES), fields["first-draw"]
        if not run or not run.isprintable():
            raise PeerError("a run needs a name of printable characters")
        if not isinstance(first, int) or not 0 <= first < MOST_DRAWS:
            raise PeerError(f"a run's first draw must be in [0, {MOST_DRAWS})")
        return Introduction(run, plan, layout, first, roster)

    def statement(self, node: int, client: ClientId) -> bytes:
        """Return what an enrolled client signs: that this node speaks for it in this run."""
        told = self.run, self.plan, self.layout, self.first_draw, digest("d2pfed roster file", self.roster)
        return digest("d2pfed introduction", *told, node, client)


@dataclass(frozen=True, slots=True)
class Introduced:
    """The answer: for which client the node speaks, and the client's signature, empty if it is not enrolled."""

    client: ClientId
    signature: bytes

    def pack(self) -> RecordDict:
        """Return the content of a message."""
        fields = ConfigRecord({"client": pack_integer(self.client, _ID_BYTES), "signature": self.signature})
        return RecordDict({INTRODUCTION: fields})

    @staticmethod
    def unpack(content: RecordDict) -> "Introduced":
        """Read the content of a message."""
        fields = _fields(content, INTRODUCTION, {"client": bytes, "signature": bytes})
        client = _bytes(fields["client"], _ID_BYTES)
        if len(client) != _ID_BYTES:
            raise PeerError(f"a client's identity must have {_ID_BYTES} bytes, got {len(client)}")
        return Introduced(int.from_bytes(client, "little"), _bytes(fields["signature"], SIGNATURE_BYTES))


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
        if not 0 < seconds <= whole <= MOST_ATTEMPT_SECONDS:
            raise PeerError(
                f"a request must wait for 0 < seconds <= attempt_seconds <= {MOST_ATTEMPT_SECONDS:g}, "
                f"got {seconds:g} and {whole:g}"
            )
        return Request(_bytes(fields["frame"], MOST_FRAME_BYTES), seconds, whole)


def pack_answer(frame: bytes) -> RecordDict:
    """Return the content of an answer: one frame and nothing else."""
    return RecordDict({EXCHANGE: ConfigRecord({"frame": frame})})


def unpack_answer(content: RecordDict) -> bytes:
    """Read the content of an answer."""
    return _bytes(_fields(content, EXCHANGE, {"frame": bytes})["frame"], MOST_FRAME_BYTES)


def _fields(content: RecordDict, name: str, types: dict[str, type]) -> dict[str, object]:
    """Return the fields of the one record that is expected, each of its type; refuse anything else beside them."""
    if list(content) != [name] or not isinstance(content[name], ConfigRecord):
        raise PeerError(f"a message must hold one record {name}, got {_names(content)}")
    fields = dict(content.config_records[name])
    if {key: type(value) for key, value in fields.items()} != types:
        raise PeerError(f"a record {name} must have the fields {sorted(types)}, got {_names(fields)}")
    return dict(fields)


def _names(found: Mapping[str, object]) -> str:
    return f"{len(found)}: {', '.join(sorted(name[:40] for name in found)[:8])}"


def _bytes(value: object, most: int) -> bytes:
    if not isinstance(value, bytes):
        raise PeerError(f"bytes were expected, got {type(value).__name__}")
    _require_short("a field", len(value), most)
    return value


def _require_short(what: str, size: int, most: int) -> None:
    if size > most:
        raise PeerError(f"{what} must have a size of at most {most}, got {size}")
