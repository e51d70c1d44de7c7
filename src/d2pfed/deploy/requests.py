"""The requests of a server to a client and the answers, as bytes: a run's announcement once, then protocol frames.

A transport carries (kind, bytes) one way and bytes the other; nothing here knows which transport it is. Whatever comes
in is measured before anything is made of it: sizes first, then numbers.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from hashlib import sha256
from importlib.metadata import version

from d2pfed.deploy.state import Blobs
from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import digest
from d2pfed.plan.bounds import MOST_ATTEMPTS_PER_ROUND, MOST_ROUNDS
from d2pfed.secagg.crypto import SIGNATURE_BYTES
from d2pfed.secagg.wire import VERSION, ClientId, Reader, pack_integer, pack_text

MAX_FRAME_BYTES = 1 << 31
MAX_DRAWS = 1 << 20
MAX_ATTEMPT_SECONDS = 7 * 86_400.0  # no client keeps the secrets of an attempt for longer

PLAN_VERSION = 3  # of a plan's canonical text, of announcements and answers, of the records that carry requests

HAS_KEYS, HAS_NO_KEYS = b"\x01", b"\x00"  # answers to a request for presence
MISSING = b""  # the answer of a client that lacks the blob that a request refers to

# The fields of an announcement, and how many bytes each may have.
_FIELDS = {"a run's name": 255, "a plan": 1 << 16, "a layout": 1 << 22, "a roster": 1 << 26, "a slip": 1 << 10}
_ID_BYTES = 8
_SIZE_BYTES = 4
_TIME_BYTES = 8
_DIGEST_BYTES = 32
_MOST_STEPS = MOST_ROUNDS * MOST_ATTEMPTS_PER_ROUND  # that an acceptance may state, a bit for each
_INLINE, _ATTACHED, _REFERRED = range(3)  # where the end of a frame is
_BESIDE = 2  # is added where the blob is no part of the frame, which names it by its digest


class RequestKind(StrEnum):
    """What a request asks for; a transport carries it beside the bytes."""

    ANNOUNCEMENT = "d2pfed.announcement"
    EXCHANGE = "d2pfed.exchange"
    PRESENCE = "d2pfed.presence"  # whether a silo is there, with the keys of an epoch


@cache
def own_versions() -> tuple[str, int, int]:
    """Return this side's release, and its versions of messages and plans, in which both sides must agree."""
    return version("d2pfed"), VERSION, PLAN_VERSION


def _pack_versions() -> bytes:
    release, wire, plan = own_versions()
    return pack_text(release) + pack_integer(wire, 2) + pack_integer(plan, 2)


def _require_versions(reader: Reader, whose: str) -> None:
    """Refuse another version than ours, in one line that names both; every version begins with these fields."""
    found, own = (reader.text()[:40], reader.integer(2), reader.integer(2)), own_versions()
    if found[1:] != own[1:]:
        theirs, ours = (f"d2pfed {release!a} (wire {wire}, plan {plan})" for release, wire, plan in (found, own))
        raise PeerError(f"{whose} has {theirs}, and this side has {ours}: they are incompatible")


@dataclass(frozen=True, slots=True)
class Progress:
    """What a client has begun or was charged for in a run: the server may have forgotten it, restored from a backup."""

    steps: int = 0  # bit i is for attempt i % attempts_per_round of round i // attempts_per_round
    epochs: int = 0  # with standing keys, the first epoch that it has not begun

    def encode(self) -> bytes:
        """Return the bytes that an acceptance has, and its signature covers."""
        steps = self.steps.to_bytes((self.steps.bit_length() + 7) // 8, "little")
        return pack_integer(self.epochs, _ID_BYTES) + pack_integer(len(steps), _SIZE_BYTES) + steps

    @staticmethod
    def read(reader: Reader) -> "Progress":
        """Read the bytes of an acceptance."""
        epochs, size = reader.integer(_ID_BYTES), reader.integer(_SIZE_BYTES)
        if size > _MOST_STEPS // 8:
            raise PeerError(f"an acceptance must state at most {_MOST_STEPS} attempts, got {size} bytes of them")
        return Progress(int.from_bytes(reader.take(size), "little"), epochs)


NOTHING_BEGUN = Progress()


@dataclass(frozen=True, slots=True)
class RunAnnouncement:
    """The first request of a run: its name, plan, model layout, first draw and, for enrolled clients, the roster.

    In the lattice protocol the head stands for the roster. The server then greets a node first, with the run's name
    alone: the node answers for which client it speaks, and is sent the announcement with that client's slip.
    """

    run: str
    plan: str
    layout: str
    first_draw: int = 0
    roster: bytes = b""  # or its head, as the authority has signed it; empty where no client is enrolled
    slip: bytes = b""  # the receiver's own, beside a head

    @property
    def greeting(self) -> "RunAnnouncement":
        """Return what a node is asked first where each client gets a slip of its own."""
        return RunAnnouncement(self.run, "", "")

    def encode(self) -> bytes:
        """Return the bytes of the request."""
        fields = (self.run.encode(), self.plan.encode(), self.layout.encode(), self.roster, self.slip)
        sized = (pack_integer(len(field), _SIZE_BYTES) + field for field in fields)
        return b"".join((_pack_versions(), pack_integer(self.first_draw, 8), *sized))

    @staticmethod
    def decode(data: bytes) -> "RunAnnouncement":
        """Read the bytes of the request; refuse a server whose version does not fit."""
        reader = Reader(memoryview(data))
        _require_versions(reader, "the server")
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
        return RunAnnouncement(run, plan, layout, first, *fields[3:])

    def statement(self, node: int, client: ClientId, progress: Progress = NOTHING_BEGUN) -> bytes:
        """Return what an enrolled client signs: that this node speaks for it in this run, and what it has begun."""
        announced = self.run, self.plan, self.layout, self.first_draw, digest("d2pfed roster file", self.roster)
        return digest("d2pfed run acceptance", *announced, node, client, progress.encode())


@dataclass(frozen=True, slots=True)
class RunAcceptance:
    """The answer to an announcement: which client the node speaks for, its signature, and what it has begun.

    The signature is empty if the client is not enrolled, or was greeted.
    """

    client: ClientId
    signature: bytes
    progress: Progress = NOTHING_BEGUN

    def encode(self) -> bytes:
        """Return the bytes of the answer."""
        return _pack_versions() + pack_integer(self.client, _ID_BYTES) + self.progress.encode() + self.signature

    @staticmethod
    def decode(data: bytes) -> "RunAcceptance":
        """Read the bytes of the answer; refuse a client whose version does not fit."""
        reader = Reader(memoryview(data))
        _require_versions(reader, "the client")
        client, progress, signature = reader.integer(_ID_BYTES), Progress.read(reader), reader.rest()
        if len(signature) not in (0, SIGNATURE_BYTES):
            raise PeerError(f"an acceptance must have an identity and a signature, got {len(data)} bytes")
        return RunAcceptance(client, signature, progress)


class MissingBlob(PeerError):  # noqa: N818 - the name of the event, not of a defect
    """A request refers to bytes that this client does not have."""


@dataclass(frozen=True, slots=True)
class Blob:
    """What the frames of an exchange end with or name, a model: sent to a node once, then referred to by SHA-256."""

    data: bytes = field(repr=False)
    digest: bytes


@dataclass(frozen=True, slots=True)
class ExchangeRequest:
    """One frame of secure aggregation, and how many seconds the server waits for its answer and for the attempt.

    The answer to it is a frame and nothing else, or `MISSING`. What the frame binds is whole again once it is decoded,
    or is beside it: the `model` that a request of the lattice protocol names.
    """

    frame: bytes
    seconds: float
    attempt_seconds: float
    model: bytes = field(default=b"", repr=False)

    def encode(self, blob: Blob | None = None, *, is_known: bool = False, is_beside: bool = False) -> bytes:
        """Return the bytes of the request, without a blob that `is_known`; times are in whole milliseconds."""
        return b"".join(self.split(blob, is_known=is_known, is_beside=is_beside))

    def split(
        self, blob: Blob | None = None, *, is_known: bool = False, is_beside: bool = False
    ) -> tuple[bytes, bytes]:
        """Return the bytes of the request in two parts; the second is the blob, if it is sent."""
        times = (round(seconds * 1000) for seconds in (self.seconds, self.attempt_seconds))
        packed = b"".join(pack_integer(time, _TIME_BYTES) for time in times)
        if blob is None or not (is_beside or self.frame.endswith(blob.data)):
            return packed + bytes([_INLINE]) + self.frame, b""
        head = self.frame if is_beside else self.frame[: len(self.frame) - len(blob.data)]
        where = bytes([(_REFERRED if is_known else _ATTACHED) + (_BESIDE if is_beside else 0)])
        size = pack_integer(len(blob.data), _ID_BYTES)
        return b"".join((packed, where, blob.digest, size, head)), b"" if is_known else blob.data

    @staticmethod
    def decode(data: bytes, blobs: Blobs | None = None) -> "ExchangeRequest":
        """Read the bytes of the request; raises MissingBlob where it refers to one that `blobs` does not have.

        Guarantee: the frame ends with bytes of the digest that is stated, or has them beside it.
        Checked: test_flower_blobs.py.
        """
        if len(data) > MAX_FRAME_BYTES:
            raise PeerError(f"a frame must have a size of at most {MAX_FRAME_BYTES}, got {len(data)}")
        reader = Reader(memoryview(data))
        seconds, whole = reader.integer(_TIME_BYTES) / 1000, reader.integer(_TIME_BYTES) / 1000
        if not 0 < seconds <= whole <= MAX_ATTEMPT_SECONDS:
            raise PeerError(
                f"a request must wait for 0 < seconds <= attempt_seconds <= {MAX_ATTEMPT_SECONDS:g}, "
                f"got {seconds:g} and {whole:g}"
            )
        where = reader.integer(1)
        if where == _INLINE:
            return ExchangeRequest(reader.rest(), seconds, whole)
        if where not in (_ATTACHED, _REFERRED, _BESIDE + _ATTACHED, _BESIDE + _REFERRED):
            raise PeerError(f"a request is whole, brings a blob or refers to one, got {where}")
        stated, size, head = reader.take(_DIGEST_BYTES), reader.integer(_ID_BYTES), reader.rest()
        if where in (_ATTACHED, _BESIDE + _ATTACHED):
            found = head[-size:] if 0 < size <= len(head) else b""
            if sha256(found).digest() != stated:
                raise PeerError("a blob must have the digest that names it")
            head = head[:-size]
            if blobs is not None:
                blobs.keep(stated, found)
        else:
            kept = None if blobs is None else blobs.find(stated)
            if kept is None or len(kept) != size:
                raise MissingBlob("this client does not have the blob that a request refers to")
            found = kept
        if where > _REFERRED:
            return ExchangeRequest(head, seconds, whole, found)
        return ExchangeRequest(head + found, seconds, whole)
