"""Exchanges over Flower's grid: requests go out, answers are taken until a deadline of our own, silence drops out."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from d2pfed.errors import ConfigError, PeerError
from d2pfed.flower.envelope import MESSAGE_TYPE, MOST_ATTEMPT_SECONDS, Request, unpack_answer
from d2pfed.runs import ExchangeRecord
from d2pfed.secagg.messages import MessageKind
from d2pfed.secagg.wire import ClientId, kind_of

# Makes a message out of content, the node it is for, a group and its seconds to live.
Letter = Callable[[RecordDict, int, str, float], Message]

_log = logging.getLogger("d2pfed.flower")


def letter(content: RecordDict, node: int, group: str, seconds: float) -> Message:
    """Make a message; works inside a running ServerApp only, which is why tests bring their own."""
    return Message(content, node, MESSAGE_TYPE, ttl=seconds, group_id=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How many seconds the server waits: never without end, never by a clock that can be set."""

    joining: float = 300.0  # for the clients of a cohort to appear
    keys: float = 120.0  # for each exchange in which nobody trains
    training: float = 3600.0  # for the masked vectors; `start` has its own
    poll: float = 0.5  # between two looks for answers

    def __post_init__(self) -> None:
        for name in ("joining", "keys", "training", "poll"):
            if not 0 < getattr(self, name) < 1e7:
                raise ConfigError(f"the deadline {name} must be in (0, 1e7) seconds, got {getattr(self, name)}")
        if self.attempt > MOST_ATTEMPT_SECONDS:
            raise ConfigError(
                f"clients keep the secrets of an attempt for at most {MOST_ATTEMPT_SECONDS:g} seconds: "
                f"2 (training + 4 keys) must not be more, got {self.attempt:g}"
            )

    @property
    def attempt(self) -> float:
        """After how long a client forgets an attempt: twice what its exchanges can take, as sending takes time too."""
        return 2 * (self.training + 4 * self.keys)

    def of(self, frame: bytes) -> float:
        """Return the seconds for the answer to a request."""
        return self.training if kind_of(frame) == MessageKind.MASK_REQUEST else self.keys


def refuse(exchange: str, node: int, reason: object) -> None:
    """Log an answer that does not count: in which exchange, whose, by which rule; never what was in it."""
    # Escaped, since a reason may be another machine's words: one line, and nothing that a terminal would obey.
    text = str(reason).encode("unicode_escape").decode()
    _log.warning("%s: node %d is refused: %.300s", exchange, node, text)


class Mail:
    """Pushes messages to nodes and pulls the answers."""

    def __init__(self, grid: Grid, make: Letter, poll: float) -> None:
        self._grid = grid
        self._make = make
        self._poll = poll

    def nodes(self) -> set[int]:
        """Return the nodes that are connected now."""
        return set(self._grid.get_node_ids())

    def send(self, content: RecordDict, node: int, group: str, seconds: float) -> str | None:
        """Send one message; return what its answer refers to, or nothing if it could not be sent."""
        # One by one: a cohort's models in one push would be held in memory together.
        sent = list(self._grid.push_messages([self._make(content, node, group, seconds)]))
        return sent[0] if sent and sent[0] else None

    def look(self, exchange: str, waiting: Mapping[str, int]) -> Iterator[tuple[str, RecordDict | None]]:
        """Yield the answers that are there, by what they refer to; nothing in place of an error or a forgery."""
        for reply in self._grid.pull_messages(list(waiting)) if waiting else ():
            reference, node = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
            if reference not in waiting:
                refuse(exchange, node, "it was not asked")
            elif reply.has_error():
                refuse(exchange, waiting[reference], reply.error.reason)
                yield reference, None
            elif node != waiting[reference]:
                refuse(exchange, node, f"it answers for node {waiting[reference]}")
                yield reference, None
            else:
                yield reference, reply.content

    def rest(self, until: float) -> bool:
        """Wait a little; say whether there is time left."""
        left = until - time.monotonic()
        if left > 0:
            time.sleep(min(self._poll, left))
        return left > 0


class GridExchange:
    """The transport of a run: an `Exchange` whose clients are behind Flower's nodes.

    `before` hears which exchange begins, before its first request is sent.
    """

    def __init__(
        self,
        mail: Mail,
        nodes: Mapping[ClientId, int],
        deadlines: Deadlines,
        before: Callable[[MessageKind], None],
    ) -> None:
        self._before = before
        self._mail = mail
        self._nodes = nodes
        self._deadlines = deadlines
        self.laps: list[ExchangeRecord] = []

    def __call__(self, requests: Mapping[ClientId, bytes]) -> Iterator[tuple[ClientId, bytes]]:
        """Send each request to its client's node and yield the answers that come before the deadline."""
        start = time.monotonic()
        lap, clients = self._post(requests)
        waiting = {reference: self._nodes[client] for reference, client in clients.items()}
        until = time.monotonic() + lap.seconds  # counted from the last request, which had to wait for the others
        while waiting and self._mail.rest(until):
            for reference, content in self._mail.look(lap.name, waiting):
                del waiting[reference]
                frame = None if content is None else self._frame(content, lap.name, clients[reference])
                if frame is not None:
                    lap = replace(lap, answered=lap.answered + 1, received_bytes=lap.received_bytes + len(frame))
                    yield clients[reference], frame
        self.laps.append(replace(lap, seconds=time.monotonic() - start))

    def _post(self, requests: Mapping[ClientId, bytes]) -> tuple[ExchangeRecord, dict[str, ClientId]]:
        """Send what can be sent; return the lap so far, with the deadline for its time, and who was asked."""
        clients: dict[str, ClientId] = {}
        lap = ExchangeRecord("NONE", len(requests), 0, 0.0, 0, 0)
        for client in requests:
            if client not in self._nodes:
                continue
            frame = requests[client]
            kind, seconds = MessageKind(kind_of(frame)), self._deadlines.of(frame)
            if not clients:
                self._before(kind)
            content = Request(frame, seconds, self._deadlines.attempt).pack()
            reference = self._mail.send(content, self._nodes[client], kind.name, seconds)
            if reference is not None:
                clients[reference] = client
                lap = replace(lap, name=kind.name, seconds=seconds, sent_bytes=lap.sent_bytes + len(frame))
        return lap, clients

    def _frame(self, content: RecordDict, exchange: str, client: ClientId) -> bytes | None:
        try:
            return unpack_answer(content)
        except PeerError as error:
            refuse(exchange, self._nodes[client], error)
            return None

    def refused(self, client: ClientId, error: PeerError) -> None:
        """Log why an answer to the last exchange does not count."""
        refuse(self.laps[-1].name, self._nodes[client], error)
