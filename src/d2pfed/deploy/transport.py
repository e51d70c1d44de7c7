"""The server's half of a transport: who is there, requests with their answers, deadlines.

An engine carries a kind and bytes to a node and brings the answer back under the request's id. It is an untrusted pipe:
everything that must hold is checked by what the bytes say.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from d2pfed.deploy.requests import (
    HAS_KEYS,
    MAX_ATTEMPT_SECONDS,
    ExchangeRequest,
    RequestKind,
    require_frame_size,
)
from d2pfed.errors import ConfigError, PeerError
from d2pfed.runs import ExchangeRecord
from d2pfed.secagg.wire import ClientId, MessageKind, kind_of

_log = logging.getLogger("d2pfed.deploy")

SHORTEST = 0.05  # seconds between two looks for work that is expected
_TRAINING = (MessageKind.MASK_REQUEST, MessageKind.STANDING_REQUEST)  # for whose answers clients train


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for a request: bytes of a kind, or the engine's word on why there are none.

    Attributes:
        request: the id of the request.
        node: who has answered.
        refused: the rule by which there is no answer, and its text; empty where there is one.
    """

    request: str
    node: int
    kind: RequestKind | None = None
    data: bytes = field(default=b"", repr=False)
    refused: tuple[str, str] = ("", "")


class Engine(Protocol):
    """A federation engine, such as Flower."""

    def nodes(self) -> set[int]:
        """Return the nodes that are connected now."""
        ...

    def push(self, kind: RequestKind, data: bytes, node: int, name: str, seconds: float) -> str | None:
        """Send a request of an exchange; return its id, or nothing if it could not be sent."""
        ...

    def pull(self, requests: Collection[str]) -> Iterable[Answer]:
        """Return the answers to these requests that are there."""
        ...


@dataclass(slots=True)
class Pace:
    """A pause that begins at `shortest` seconds and grows up to `longest` until something comes."""

    longest: float
    shortest: float = SHORTEST
    growth: float = 1.25  # waiting for something that takes t seconds ends at most about t / 4 seconds late
    _next: float = field(init=False)

    def __post_init__(self) -> None:
        self.hurry()

    def hurry(self) -> None:
        """Something came: look again soon."""
        self._next = min(self.shortest, self.longest)

    def pause(self, most: float) -> None:
        """Wait, for no longer than `most` seconds."""
        time.sleep(max(0.0, min(self._next, most)))
        self._next = min(self._next * self.growth, self.longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How many seconds the server waits: never without end, never by a clock that can be set."""

    joining: float = 300.0  # for the clients of a cohort to appear
    keys: float = 120.0  # for each exchange in which nobody trains
    training: float = 3600.0  # for the masked vectors; `start` has its own
    grace: float = 15.0  # for the others once a quorum is there; as long as the quorum took, if that is longer
    poll: float = 0.5  # at most, between two looks for answers: they are closer together while answers come

    def __post_init__(self) -> None:
        for name in ("joining", "keys", "training", "grace", "poll"):
            if not 0 < getattr(self, name) < 1e7:
                raise ConfigError(f"the deadline {name} must be in (0, 1e7) seconds, got {getattr(self, name)}")
        if self.attempt > MAX_ATTEMPT_SECONDS:
            raise ConfigError(
                f"clients keep the secrets of an attempt for at most {MAX_ATTEMPT_SECONDS:g} seconds: "
                f"2 (training + 4 keys) must not be more, got {self.attempt:g}"
            )

    @property
    def attempt(self) -> float:
        """After how long a client forgets an attempt: twice what its exchanges can take, as sending takes time too."""
        return 2 * (self.training + 4 * self.keys)

    def after_quorum(self, begun: float, until: float) -> float:
        """Return until when the server waits for the others, now that a quorum is there: a straggler costs no more."""
        now = time.monotonic()
        return min(until, now + max(self.grace, now - begun))


class Transport:
    """Sends requests to nodes and takes their answers, each matched to its request; counts those that do not count."""

    def __init__(self, engine: Engine, poll: float) -> None:
        self.refusals: Counter[str] = Counter()  # by rule, in our words
        self._engine = engine
        self._pace = Pace(poll)

    def refuse(self, exchange: str, node: int, rule: str, reason: object) -> None:
        """Count and log an answer that does not count: in which exchange, whose, why; never what was in it."""
        self.refusals[rule] += 1
        # Escaped, since a reason may be another machine's words: one line, and nothing that a terminal would obey.
        text = str(reason).encode("unicode_escape").decode()
        _log.warning("%s: node %d is refused: %.300s", exchange, node, text)

    def nodes(self) -> set[int]:
        """Return the nodes that are connected now."""
        return self._engine.nodes()

    def send(self, kind: RequestKind, data: bytes, node: int, exchange: str, seconds: float) -> str | None:
        """Send one request; return its id, or nothing if it could not be sent."""
        self._pace.hurry()
        return self._engine.push(kind, data, node, exchange, seconds)

    def pull(
        self, kind: RequestKind, exchange: str, waiting: Mapping[str, int]
    ) -> Iterator[tuple[str, bytes | None]]:
        """Yield the answers that are there, by their request's id; nothing in place of an error or a forgery."""
        for answer in self._engine.pull(waiting.keys()) if waiting else ():
            self._pace.hurry()
            if answer.request not in waiting:
                self.refuse(exchange, answer.node, "not asked", "it was not asked, or comes late")
                continue
            node, data = waiting[answer.request], None
            if answer.node != node and answer.kind is not None:
                self.refuse(exchange, answer.node, "another node", f"it answers for node {node}")
            elif answer.kind is None:
                self.refuse(exchange, node, *answer.refused)
            elif answer.kind is not kind:
                reason = f"an answer to {kind.value} was expected, got {answer.kind.value}"
                self.refuse(exchange, node, "malformed", reason)
            else:
                data = answer.data
            yield answer.request, data

    def pause(self, until: float) -> bool:
        """Wait a little; say whether there is time left."""
        left = until - time.monotonic()
        if left > 0:
            self._pace.pause(left)
        return left > 0


class ClientExchange:
    """The exchanges of a run with clients behind an engine's nodes (`secagg.Exchange`).

    `before` is called with the kind of an exchange before its first request is sent. Once
    `quorum` clients have answered, the others have the deadlines' grace.
    """

    def __init__(
        self,
        transport: Transport,
        nodes: Mapping[ClientId, int],
        deadlines: Deadlines,
        before: Callable[[MessageKind], None],
        quorum: int,
    ) -> None:
        self._before = before
        self._quorum = quorum
        self._transport = transport
        self._nodes = nodes
        self._deadlines = deadlines
        self.stats: list[ExchangeRecord] = []

    def __call__(self, requests: Mapping[ClientId, bytes]) -> Iterator[tuple[ClientId, bytes]]:
        """Send each request to its client's node and yield the answers that come before the deadline."""
        start = time.monotonic()
        clients: dict[str, ClientId] = {}
        stats = ExchangeRecord("NONE", len(requests), 0, 0.0, 0, 0)
        for client in requests:
            if client not in self._nodes:
                continue
            frame = requests[client]
            kind = MessageKind(kind_of(frame))
            seconds = self._deadlines.training if kind in _TRAINING else self._deadlines.keys
            if not clients:
                self._before(kind)
            # One by one: a cohort's models sent at once would be held in memory together.
            data = ExchangeRequest(frame, seconds, self._deadlines.attempt).encode()
            request = self._transport.send(RequestKind.EXCHANGE, data, self._nodes[client], kind.name, seconds)
            if request is not None:
                clients[request] = client
                stats = replace(stats, name=kind.name, seconds=seconds, sent_bytes=stats.sent_bytes + len(frame))
        waiting = {request: self._nodes[client] for request, client in clients.items()}
        begun = time.monotonic()  # of the last request, which had to wait for the others
        until = begun + stats.seconds
        while waiting and self._transport.pause(until):
            for request, answer in self._transport.pull(RequestKind.EXCHANGE, stats.name, waiting):
                node = waiting.pop(request)
                if answer is None:
                    continue
                try:
                    require_frame_size(answer)
                except PeerError as error:
                    self._transport.refuse(stats.name, node, "malformed", error)
                    continue
                stats = replace(
                    stats, answered=stats.answered + 1, received_bytes=stats.received_bytes + len(answer)
                )
                if stats.answered == self._quorum:
                    until = self._deadlines.after_quorum(begun, until)
                yield clients[request], answer
        self.stats.append(replace(stats, seconds=time.monotonic() - start))

    def refused(self, client: ClientId, error: PeerError) -> None:
        """Log why an answer to the last exchange does not count."""
        self._transport.refuse(self.stats[-1].name, self._nodes[client], "protocol", error)

    def ask_presence(self, asked: Collection[ClientId], epoch: bytes) -> dict[ClientId, bool]:
        """Ask clients whether they are there; of those who answer in time, say whether they hold keys of an epoch."""
        name, seconds, clients = "PRESENCE", self._deadlines.keys, dict[str, ClientId]()
        for client, node in self._nodes.items():
            if client in asked:
                request = self._transport.send(RequestKind.PRESENCE, epoch, node, name, seconds)
                if request is not None:
                    clients[request] = client
        waiting = {request: self._nodes[client] for request, client in clients.items()}
        until, there = time.monotonic() + seconds, dict[ClientId, bool]()
        while waiting and self._transport.pause(until):
            for request, answer in self._transport.pull(RequestKind.PRESENCE, name, waiting):
                del waiting[request]
                if answer is not None:
                    there[clients[request]] = answer == HAS_KEYS
        return there
