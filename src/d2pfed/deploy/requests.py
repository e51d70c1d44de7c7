"""The requests of a server to a client and the answers, as bytes: a run's announcement once, then protocol frames.

A transport carries (kind, bytes) one way and bytes the other; nothing here knows which transport it is. Whatever comes
in is measured before anything is made of it: sizes first, then numbers.
"""

from dataclasses import dataclass
from enum import StrEnum

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import digest
from d2pfed.secagg.crypto import SIGNATURE_BYTES
from d2pfed.secagg.wire import ClientId, Reader, pack_integer

MAX_FRAME_BYTES = 1 << 31
MAX_DRAWS = 1 << 20
MAX_ATTEMPT_SECONDS = 7 * 86_400.0  # no client keeps the secrets of an attempt for longer

HAS_KEYS, HAS_NO_KEYS = b"\x01", b"\x00"  # answers to a request for presence

# The fields of an announcement, and how many bytes each may have.
_FIELDS = {"a run's name": 255, "a plan": 1 << 16, "a layout": 1 << 22, "a roster": 1 << 26}
_ID_BYTES = 8
_SIZE_BYTES = 4
_TIME_BYTES = 8


class RequestKind(StrEnum):
    """What a request asks for; a transport carries it beside the bytes."""

    ANNOUNCEMENT = "d2pfed.announcement"
    EXCHANGE = "d2pfed.exchange"
    PRESENCE = "d2pfed.presence"  # whether a silo is there, with the keys of an epoch


@dataclass(frozen=True, slots=True)
class RunAnnouncement:
    """The first request of a run: its name, plan, model layout, first draw and, for enrolled clients, the roster.

    The roster is as the authority has signed it; empty where no client is enrolled.
    """

    run: str
    plan: str
    layout: str
    first_draw: int = 0
    roster: bytes = b""

    def encode(self) -> bytes:
        """Return the bytes of the request."""
        fields = (self.run.encode(), self.plan.encode(), self.layout.encode(), self.roster)
        return pack_integer(self.first_draw, 8) + b"".join(
            pack_integer(len(field), _SIZE_BYTES) + field for field in fields
        )

    @staticmethod
    def decode(data: bytes) -> "RunAnnouncement":
        """Read the bytes of the request."""
        reader = Reader(memoryview(data))
        first, fields = reader.integer(8), []
        for what, most in _FIELDS.items():
            size = reader.integer(_SIZE_BYTES)
            if size > most:
                raise PeerError(f"{what} must have a size of at most {most}, got {size}")
            fields.append(reader.take(size))
        reader.end()
        try:
            run, plan, layout = (field.decode() for field in fields[:3])
        except UnicodeDecodeError:
            raise PeerError("a run's name, its plan and its layout must be UTF-8") from None
        if not run or not run.isprintable():
            raise PeerError("a run needs a name of printable characters")
        if first >= MAX_DRAWS:
            raise PeerError(f"a run's first draw must be in [0, {MAX_DRAWS})")
        return RunAnnouncement(run, plan, layout, first, fields[3])

    def statement(self, node: int, client: ClientId) -> bytes:
        """Return what an enrolled client signs: that this node speaks for it in this run."""
        announced = self.run, self.plan, self.layout, self.first_draw, digest("d2pfed roster file", self.roster)
        return digest("d2pfed run acceptance", *announced, node, client)


@dataclass(frozen=True, slots=True)
class RunAcceptance:
    """The answer to an announcement: which client the node speaks for, and its signature, empty if not enrolled."""

    client: ClientId
    signature: bytes

    def encode(self) -> bytes:
        """Return the bytes of the answer."""
        return pack_integer(self.client, _ID_BYTES) + self.signature

    @staticmethod
    def decode(data: bytes) -> "RunAcceptance":
        """Read the bytes of the answer."""
        if len(data) not in (_ID_BYTES, _ID_BYTES + SIGNATURE_BYTES):
            raise PeerError(f"an acceptance must have an identity and a signature, got {len(data)} bytes")
        return RunAcceptance(int.from_bytes(data[:_ID_BYTES], "little"), data[_ID_BYTES:])


@dataclass(frozen=True, slots=True)
class ExchangeRequest:
    """One frame of secure aggregation, and how many seconds the server waits for its answer and for the attempt.

    The answer to it is a frame and nothing else.
    """

    frame: bytes
    seconds: float
    attempt_seconds: float

    def encode(self) -> bytes:
        """Return the bytes of the request; times are sent in whole milliseconds."""
        times = (round(seconds * 1000) for seconds in (self.seconds, self.attempt_seconds))
        return b"".join(pack_integer(time, _TIME_BYTES) for time in times) + self.frame

    @staticmethod
    def decode(data: bytes) -> "ExchangeRequest":
        """Read the bytes of the request."""
        if len(data) > MAX_FRAME_BYTES:
            raise PeerError(f"a frame must have a size of at most {MAX_FRAME_BYTES}, got {len(data)}")
        reader = Reader(memoryview(data))
        seconds, whole = reader.integer(_TIME_BYTES) / 1000, reader.integer(_TIME_BYTES) / 1000
        if not 0 < seconds <= whole <= MAX_ATTEMPT_SECONDS:
            raise PeerError(
                f"a request must wait for 0 < seconds <= attempt_seconds <= {MAX_ATTEMPT_SECONDS:g}, "
                f"got {seconds:g} and {whole:g}"
            )
        return ExchangeRequest(reader.rest(), seconds, whole)
