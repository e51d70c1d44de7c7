"""Exchanges over Flower's grid: which node speaks for which client, requests, and answers until a deadline."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from d2pfed.errors import ConfigError, PeerError
from d2pfed.flower.pace import Pace
from d2pfed.flower.records import MESSAGE_TYPE, answer_from_record, to_record
from d2pfed.flower.requests import (
    HAS_KEYS,
    MAX_ATTEMPT_SECONDS,
    ExchangeRequest,
    RequestKind,
    require_frame_size,
)
from d2pfed.runs import ExchangeRecord
from d2pfed.secagg.messages import MessageKind
from d2pfed.secagg.wire import ClientId, kind_of

# Makes a message out of content, the node it is for, a group and its seconds to live.
MessageFactory = Callable[[RecordDict, int, str, float], Message]

_log = logging.getLogger("d2pfed.flower")

_PRESENCE = "PRESENCE"
_TRAINING = (MessageKind.MASK_REQUEST, MessageKind.STANDING_REQUEST)  # for whose answers clients train


def make_message(content: RecordDict, node: int, group: str, seconds: float) -> Message:
    """Make a message; works inside a running ServerApp only, which is why tests bring their own."""
    return Message(content, node, MESSAGE_TYPE, ttl=seconds, group_id=group)


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

    def of(self, frame: bytes) -> float:
        """Return the seconds for the answer to a request."""
        return self.training if kind_of(frame) in _TRAINING else self.keys


def refuse(exchange: str, node: int, reason: object) -> None:
    """Log an answer that does not count: in which exchange, whose, by which rule; never what was in it."""
    # Escaped, since a reason may be another machine's words: one line, and nothing that a terminal would obey.
    text = str(reason).encode("unicode_escape").decode()
    _log.warning("%s: node %d is refused: %.300s", exchange, node, text)


class GridTransport:
    """Pushes messages to nodes and pulls the answers."""

    def __init__(self, grid: Grid, make: MessageFactory, poll: float) -> None:
        self.refusals: Counter[str] = Counter()  # by rule, in our words
        self._grid = grid
        self._make = make
        self._pace = Pace(poll)

    def refuse(self, exchange: str, node: int, rule: str, reason: object) -> None:
        """Count and log an answer that does not count."""
        self.refusals[rule] += 1
        refuse(exchange, node, reason)

    def nodes(self) -> set[int]:
        """Return the nodes that are connected now."""
        return set(self._grid.get_node_ids())

    def send(self, content: RecordDict, node: int, group: str, seconds: float) -> str | None:
        """Send one message; return what its answer refers to, or nothing if it could not be sent."""
        # One by one: a cohort's models in one push would be held in memory together.
        self._pace.hurry()
        sent = list(self._grid.push_messages([self._make(content, node, group, seconds)]))
        return sent[0] if sent and sent[0] else None

    def pull(self, exchange: str, waiting: Mapping[str, int]) -> Iterator[tuple[str, RecordDict | None]]:
        """Yield the answers that are there, by what they refer to; nothing in place of an error or a forgery."""
        for reply in self._grid.pull_messages(list(waiting)) if waiting else ():
            self._pace.hurry()
            reference, node = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
            if reference not in waiting:
                self.refuse(exchange, node, "not asked", "it was not asked")
            elif reply.has_error():
                self.refuse(exchange, waiting[reference], "refused or failed", reply.error.reason)
                yield reference, None
            elif node != waiting[reference]:
                self.refuse(exchange, node, "another node", f"it answers for node {waiting[reference]}")
                yield reference, None
            else:
                yield reference, reply.content

    def pause(self, until: float) -> bool:
        """Wait a little; say whether there is time left."""
        left = until - time.monotonic()
        if left > 0:
            self._pace.pause(left)
        return left > 0


class GridExchange:
    """The transport of a run: an `Exchange` whose clients are behind Flower's nodes.

    `before` hears which exchange begins, before its first request is sent. Once `quorum` clients have answered, the
    others have the deadlines' grace.
    """

    def __init__(
        self,
        transport: GridTransport,
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
        stats, clients = self._send(requests)
        waiting = {reference: self._nodes[client] for reference, client in clients.items()}
        begun = time.monotonic()  # of the last request, which had to wait for the others
        until = begun + stats.seconds
        while waiting and self._transport.pause(until):
            for reference, content in self._transport.pull(stats.name, waiting):
                del waiting[reference]
                frame = None if content is None else self._frame(content, stats.name, clients[reference])
                if frame is not None:
                    stats = replace(
                        stats, answered=stats.answered + 1, received_bytes=stats.received_bytes + len(frame)
                    )
                    if stats.answered == self._quorum:
                        until = self._deadlines.after_quorum(begun, until)
                    yield clients[reference], frame
        self.stats.append(replace(stats, seconds=time.monotonic() - start))

    def _send(self, requests: Mapping[ClientId, bytes]) -> tuple[ExchangeRecord, dict[str, ClientId]]:
        """Send what can be sent; return the stats so far, with the deadline as their time, and who was asked."""
        clients: dict[str, ClientId] = {}
        stats = ExchangeRecord("NONE", len(requests), 0, 0.0, 0, 0)
        for client in requests:
            if client not in self._nodes:
                continue
            frame = requests[client]
            kind, seconds = MessageKind(kind_of(frame)), self._deadlines.of(frame)
            if not clients:
                self._before(kind)
            request = ExchangeRequest(frame, seconds, self._deadlines.attempt)
            content = to_record(RequestKind.EXCHANGE, request.encode())
            reference = self._transport.send(content, self._nodes[client], kind.name, seconds)
            if reference is not None:
                clients[reference] = client
                stats = replace(stats, name=kind.name, seconds=seconds, sent_bytes=stats.sent_bytes + len(frame))
        return stats, clients

    def _frame(self, content: RecordDict, exchange: str, client: ClientId) -> bytes | None:
        try:
            answer = answer_from_record(content, RequestKind.EXCHANGE)
            require_frame_size(answer)
        except PeerError as error:
            self._transport.refuse(exchange, self._nodes[client], "malformed", error)
            return None
        return answer

    def refused(self, client: ClientId, error: PeerError) -> None:
        """Log why an answer to the last exchange does not count."""
        self._transport.refuse(self.stats[-1].name, self._nodes[client], "protocol", error)


def ask_presence(
    transport: GridTransport, nodes: Mapping[ClientId, int], epoch: bytes, seconds: float
) -> dict[ClientId, bool]:
    """Ask clients whether they are there; of those who answer in time, say whether they hold keys of an epoch."""
    content = to_record(RequestKind.PRESENCE, epoch)
    sent = {client: transport.send(content, node, _PRESENCE, seconds) for client, node in nodes.items()}
    clients = {reference: client for client, reference in sent.items() if reference is not None}
    waiting = {reference: nodes[client] for reference, client in clients.items()}
    until, there = time.monotonic() + seconds, dict[ClientId, bool]()
    while waiting and transport.pause(until):
        for reference, answer in transport.pull(_PRESENCE, waiting):
            node = waiting.pop(reference)
            if answer is not None:
                try:
                    there[clients[reference]] = answer_from_record(answer, RequestKind.PRESENCE) == HAS_KEYS
                except PeerError as error:
                    refuse(_PRESENCE, node, error)
    return there
