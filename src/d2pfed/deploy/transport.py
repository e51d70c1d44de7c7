"""The server's half of a transport: which node speaks for which client, requests with their answers, deadlines.

An engine carries a kind and bytes to a node and brings the answer back under the request's id. It is an untrusted pipe:
everything that must hold is checked by what the bytes say.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Protocol

from d2pfed.deploy.heads import PublishedHead
from d2pfed.deploy.requests import (
    HAS_KEYS,
    MAX_ATTEMPT_SECONDS,
    MAX_FRAME_BYTES,
    MISSING,
    Blob,
    ExchangeRequest,
    Progress,
    RequestKind,
    RunAcceptance,
    RunAnnouncement,
)
from d2pfed.errors import ConfigError, PeerError
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.model_bytes import encode_model
from d2pfed.round.aggregation import ignore
from d2pfed.runs import ExchangeRecord
from d2pfed.secagg import Roster
from d2pfed.secagg.crypto import require_signature
from d2pfed.secagg.wire import ClientId, MessageKind, kind_of

_log = logging.getLogger("d2pfed.deploy")

SHORTEST = 0.05  # seconds between two looks for work that is expected
_AGAIN_SECONDS = 60.0  # after which a node that has not answered the announcement is asked again
_TELL_SECONDS = 15.0  # while nothing changes, who is missing is said so often
_ANNOUNCEMENT = "ANNOUNCEMENT"  # the name of this exchange in the log
_ALIVE_SECONDS = 10.0  # between two signs of life while the server waits
_PATIENCE = 4.0  # times the slowest answer so far, where one that is missing costs everybody an attempt
_SMALLEST_BLOB = 1 << 16
# For whose answers clients train.
_TRAINING = (MessageKind.MASK_REQUEST, MessageKind.STANDING_REQUEST, MessageKind.LATTICE_REQUEST)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for a request: bytes of a kind, or the engine's word on why there are none."""

    request: str  # its id
    node: int  # who has answered
    kind: RequestKind | None = None
    data: bytes = field(default=b"", repr=False)
    refused: tuple[str, str] = ("", "")  # the rule by which there is no answer, and its text


class Engine(Protocol):
    """A federation engine, such as Flower."""

    def nodes(self) -> set[int]:
        """Return the nodes that are connected now."""
        ...

    def push(
        self, kind: RequestKind, data: bytes, node: int, name: str, seconds: float, *, blob: bytes = b""
    ) -> str | None:
        """Send a request of an exchange, `data` and then `blob`; return its id, or nothing if it could not be sent.

        Many requests end with the same blob: an engine that stores content by its digest stores it once.
        """
        ...

    def pull(self, requests: Collection[str]) -> Iterable[Answer]:
        """Return the answers to these requests that are there."""
        ...


@dataclass(slots=True)
class Pace:
    """A pause that is short at first and grows up to `longest` seconds until something comes."""

    longest: float
    _next: float = SHORTEST

    def hurry(self) -> None:
        """Something came: look again soon."""
        self._next = SHORTEST

    def pause(self, most: float) -> None:
        """Wait, for no longer than `most` seconds; for what takes t seconds, at most about t / 4 too long."""
        time.sleep(max(0.0, min(self._next, self.longest, most)))
        self._next = min(self._next * 1.25, self.longest)


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

    def after_quorum(self, begun: float, until: float, slowest: float = 0.0) -> float:
        """Return until when the server waits for the others, now that a quorum is there: a straggler costs no more.

        `slowest`: seconds of the slowest answer so far, where all are needed.
        """
        now = time.monotonic()
        return min(until, max(now + max(self.grace, now - begun), begun + _PATIENCE * slowest))


@dataclass(slots=True)
class Transport:
    """Sends requests to nodes and takes their answers, each matched to its request; counts those that do not count."""

    engine: Engine
    pace: Pace
    alive: Callable[[], None] = ignore  # is called every few seconds while the server waits
    refusals: Counter[str] = field(default_factory=Counter)  # by rule, in our words
    reasons: dict[int, str] = field(default_factory=dict)  # by node, the last one, in its words
    _told_alive: float = -math.inf

    def refuse(self, exchange: str, node: int, rule: str, reason: object) -> None:
        """Count and log an answer that does not count: in which exchange, whose, why; never what was in it."""
        self.refusals[rule] += 1
        # Escaped, since a reason may be another machine's words: one line, and nothing that a terminal would obey.
        text = self.reasons[node] = str(reason).encode("unicode_escape").decode()[:300]
        _log.warning("%s: node %d is refused: %s", exchange, node, text)

    def send(
        self, kind: RequestKind, data: bytes, node: int, exchange: str, seconds: float, *, blob: bytes = b""
    ) -> str | None:
        """Send one request, `data` and then `blob`; return its id, or nothing if it could not be sent."""
        self.pace.hurry()
        return self.engine.push(kind, data, node, exchange, seconds, blob=blob)

    def pull(
        self, kind: RequestKind, exchange: str, waiting: Mapping[str, int]
    ) -> Iterator[tuple[str, bytes | None]]:
        """Yield the answers that are there, by their request's id; nothing in place of an error or a forgery."""
        for answer in self.engine.pull(waiting.keys()) if waiting else ():
            self.pace.hurry()
            if answer.request not in waiting:
                self.refuse(exchange, answer.node, "not asked", "it was not asked, or is late")
                continue
            node, data = waiting[answer.request], None
            if answer.node != node and answer.kind is not None:
                self.refuse(exchange, answer.node, "another node", f"it answers for node {node}")
            elif answer.kind is None:
                self.refuse(exchange, node, *answer.refused)
            elif answer.kind is not kind:
                reason = f"an answer to {kind.value} was expected, got {answer.kind.value}"
                self.refuse(exchange, node, "malformed", reason)
            elif len(answer.data) > MAX_FRAME_BYTES:
                self.refuse(exchange, node, "malformed", f"an answer of {len(answer.data)} bytes")
            else:
                data = answer.data
            yield answer.request, data

    def pause(self, until: float) -> bool:
        """Wait a little; say whether there is time left."""
        now = time.monotonic()
        if now - self._told_alive > _ALIVE_SECONDS:
            self._told_alive = now
            self.alive()
        left = until - now
        if left > 0:
            self.pace.pause(left)
        return left > 0


@dataclass(slots=True)
class NodeRegistry:
    """Which node speaks for which client: every node is sent the run's announcement once.

    Guarantee: with a roster, a node stands for a client only with that client's signature, made for this run, plan
    and node. Checked: test_flower_server.py::test_a_node_cannot_speak_for_a_client_whose_key_it_lacks.
    """

    transport: Transport
    announcement: RunAnnouncement
    population: frozenset[ClientId]
    roster: Roster | None
    published: PublishedHead | None = None  # where nodes are greeted, and each client gets the head and its slip
    nodes: dict[ClientId, int] = field(default_factory=dict)  # of each client that has accepted the run
    progress: dict[ClientId, Progress] = field(default_factory=dict)  # as it was when each accepted the run
    spoken: dict[ClientId, int] = field(default_factory=dict)  # the last node of each, whether it is there or not
    _asked: set[int] = field(default_factory=set)
    _failed: set[int] = field(default_factory=set)
    _slipped: set[int] = field(default_factory=set)  # who was sent a slip, once for each time it is asked
    _waiting: dict[str, int] = field(default_factory=dict)
    _since: dict[str, float] = field(default_factory=dict)
    _absent: set[ClientId] = field(default_factory=set)
    _told: tuple[set[ClientId], float] = field(default_factory=lambda: (set(), -math.inf))

    def wait_for(
        self, cohort: Sequence[ClientId], deadlines: Deadlines, quorum: int, patience: float | None = None
    ) -> tuple[ClientId, ...]:
        """Wait until a whole cohort is there, but no longer than `patience` (None: `joining`); return those who are.

        Once a quorum is there, the others have the deadlines' grace, and who did not use it is not waited for again. An
        announcement lives for `joining` nevertheless: its answer may be taken at the next wait.
        """
        begun, wanted = time.monotonic(), set(cohort)
        until = begun + (deadlines.joining if patience is None else patience)
        self._asked -= self._failed  # once a round: a node that refuses is not asked all the time
        self._failed.clear()
        self._look(deadlines.joining)
        has_quorum = False
        while True:
            here = self.nodes.keys() & wanted
            if len(here) >= min(quorum, len(cohort)) and here >= wanted - self._absent:
                break
            if len(self._failed) >= len(cohort) and self._failed == self._asked:  # waiting would change nothing
                break
            is_over = not self.transport.pause(until)
            self._tell(wanted)
            self._look(deadlines.joining)
            if is_over:
                break
            if not has_quorum and len(self.nodes.keys() & wanted) >= quorum:
                has_quorum, until = True, deadlines.after_quorum(begun, until)
        self._tell(wanted)
        self._absent = (self._absent | wanted) - self.nodes.keys()
        return tuple(client for client in cohort if client in self.nodes)

    def refusals(self) -> str:
        """Return why nodes refuse the run: each reason, and how many nodes have it."""
        reasons = Counter(self.transport.reasons[node] for node in self._failed if node in self.transport.reasons)
        return "; ".join(f"{count} nodes refuse: {reason}" for reason, count in reasons.most_common(3))

    def _tell(self, cohort: set[ClientId]) -> None:
        """Say who of a cohort is here, whenever that changes and every few seconds while the server waits."""
        present, now = cohort & self.nodes.keys(), time.monotonic()
        missing = sorted(cohort - present)
        if present == self._told[0] and (not missing or now - self._told[1] < _TELL_SECONDS):
            return
        self._told = present, now
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        wait = f"; waiting for {', '.join(map(str, missing[:10]))}{more}" if missing else ""
        _log.info("%d of %d clients are here%s", len(present), len(cohort), wait)

    def _look(self, seconds: float) -> None:
        """Announce the run to nodes that are new, and take what has been answered."""
        connected = self.transport.engine.nodes()
        for client in [client for client, node in self.nodes.items() if node not in connected]:
            del self.nodes[client]
        self._asked &= connected  # one that comes back is told of the run again, also if it had refused or failed
        self._failed &= connected
        for late in [each for each in self._waiting if time.monotonic() - self._since[each] > _AGAIN_SECONDS]:
            self._asked.discard(self._waiting[late])  # lost on the way or late: to answer twice changes nothing
            self._since[late] = math.inf
        first = self.announcement if self.published is None else self.announcement.greeting
        data = first.encode()
        for node in sorted(connected - self._asked):
            self._slipped.discard(node)
            self._announce(node, data, seconds)
        for request, answer in self.transport.pull(RequestKind.ANNOUNCEMENT, _ANNOUNCEMENT, self._waiting):
            node = self._waiting.pop(request)
            if answer is None:
                self._failed |= {node} - set(self._waiting.values())  # it may have been asked again since
                continue
            try:
                accepted = RunAcceptance.decode(answer)
                if self.published is not None and not accepted.signature and node not in self._slipped:
                    self._slipped.add(node)  # it asks for its slip, which tells nothing secret
                    slip = self.published.slip(accepted.client)
                    self._announce(node, replace(self.announcement, slip=slip).encode(), seconds)
                else:
                    self._identify(node, accepted)
            except PeerError as error:
                self.transport.refuse(_ANNOUNCEMENT, node, "identity", error)

    def _announce(self, node: int, data: bytes, seconds: float) -> None:
        request = self.transport.send(RequestKind.ANNOUNCEMENT, data, node, _ANNOUNCEMENT, seconds)
        if request is not None:
            self._asked.add(node)
            self._waiting[request] = node
            self._since[request] = time.monotonic()

    def _identify(self, node: int, answer: RunAcceptance) -> None:
        """Note which client a node speaks for, by its signature where clients are enrolled."""
        if self.roster is not None:
            statement = self.announcement.statement(node, answer.client, answer.progress)
            require_signature(self.roster.key(answer.client), answer.signature, statement)
        elif answer.client not in self.population:
            raise PeerError(f"client {answer.client} is not in this population")
        self.nodes[answer.client] = node  # a client that comes back through another node is found there
        self.spoken[answer.client] = node
        self.progress[answer.client] = answer.progress


@dataclass(slots=True)
class ClientExchange:
    """The exchanges of a run with clients behind an engine's nodes (`secagg.Exchange`).

    `before` is told the kind of an exchange before its first request. After `quorum` answers the others have the grace,
    after `members` where only a committee is asked. With `needs_all` one missing vector costs everybody an attempt: the
    others have several times as long as the slowest vector so far, and keys are waited for until the deadline. The
    `blob`, which frames end with or name, is sent to a node until it has answered, and again if it has lost it.
    """

    transport: Transport
    nodes: Mapping[ClientId, int]
    deadlines: Deadlines
    before: Callable[[MessageKind], None]
    quorum: int
    blob: Blob | None = None
    members: int | None = None
    needs_all: bool = False
    stats: list[ExchangeRecord] = field(default_factory=list)
    _sent_bytes: int = 0
    _slowest: float = 0.0  # seconds of the slowest vector so far
    _held: dict[int, bytes] = field(default_factory=dict)  # by node, the digest of the blob that it has answered

    def __call__(self, requests: Mapping[ClientId, bytes]) -> Iterator[tuple[ClientId, bytes]]:
        """Send each request to its client's node and yield the answers that come before the deadline."""
        start, self._sent_bytes = time.monotonic(), 0
        clients: dict[str, ClientId] = {}
        stats, kind = ExchangeRecord("NONE", len(requests), 0, 0.0, 0, 0), MessageKind.INVITATION
        for client in requests:
            if client not in self.nodes:
                continue
            frame = requests[client]
            kind = MessageKind(kind_of(frame))
            seconds = self.deadlines.training if kind in _TRAINING else self.deadlines.keys
            if not clients:
                self.before(kind)
            # One by one: a cohort's models sent at once would be held in memory together.
            clients |= self._send(client, frame, kind, seconds)
            stats = replace(stats, name=kind.name, seconds=seconds)
        enough = self.quorum if kind in _TRAINING else None if self.needs_all else self.members or self.quorum
        waiting = {request: self.nodes[client] for request, client in clients.items()}
        begun = time.monotonic()  # of the last request, which had to wait for the others
        until, is_over = begun + stats.seconds, False
        while waiting and not is_over:
            # After the deadline a last look: the engine may have been held up while these answers came.
            is_over = not self.transport.pause(until)
            for request, answer in self.transport.pull(RequestKind.EXCHANGE, stats.name, waiting):
                node, client = waiting.pop(request), clients[request]
                if answer is None:
                    continue
                if answer == MISSING and self._held.pop(node, None) is not None:
                    again = self._send(client, requests[client], kind, stats.seconds)
                    clients |= again
                    waiting |= dict.fromkeys(again, node)
                    continue
                self._held |= {node: self.blob.digest} if self.blob is not None and kind in _TRAINING else {}
                stats = replace(
                    stats, answered=stats.answered + 1, received_bytes=stats.received_bytes + len(answer)
                )
                if kind in _TRAINING and self.needs_all:
                    self._slowest = max(self._slowest, time.monotonic() - begun)
                if stats.answered == enough:
                    until = self.deadlines.after_quorum(begun, until, self._slowest)
                yield client, answer
        self.stats.append(replace(stats, seconds=time.monotonic() - start, sent_bytes=self._sent_bytes))

    def carry(self, model: FloatVector, bits: int) -> bytes:
        """Return the model's bytes, which the next exchanges carry; `bits` are of each parameter.

        Those of a small one are not worth a reference. Where a committee opens sums, frames have no model: it always
        goes beside them.
        """
        data = encode_model(model, bits)
        is_blob = self.members is not None or len(data) >= _SMALLEST_BLOB
        self.blob = Blob(data, sha256(data).digest()) if is_blob else None
        return data

    def _send(self, client: ClientId, frame: bytes, kind: MessageKind, seconds: float) -> dict[str, ClientId]:
        """Send a frame, without the blob if the node has it; return the client by the request's id."""
        node, blob = self.nodes[client], self.blob if kind in _TRAINING else None
        is_known = blob is not None and self._held.get(node) == blob.digest
        is_beside = kind is MessageKind.LATTICE_REQUEST
        request = ExchangeRequest(frame, seconds, self.deadlines.attempt)
        data, end = request.split(blob, is_known=is_known, is_beside=is_beside)
        sent = self.transport.send(RequestKind.EXCHANGE, data, node, kind.name, seconds, blob=end)
        if sent is None:
            return {}
        size = 0 if blob is None else len(blob.data)
        self._sent_bytes += len(frame) + (size if is_beside else 0) - (size if is_known else 0)
        return {sent: client}

    def refused(self, client: ClientId, error: PeerError) -> None:
        """Log why an answer to the last exchange does not count."""
        self.transport.refuse(self.stats[-1].name, self.nodes[client], "protocol", error)

    def ask_presence(self, asked: Collection[ClientId], epoch: bytes) -> dict[ClientId, bool]:
        """Ask clients whether they are there; of those who answer in time, say whether they hold keys of an epoch."""
        name, seconds, clients = "PRESENCE", self.deadlines.keys, dict[str, ClientId]()
        for client, node in self.nodes.items():
            if client in asked:
                request = self.transport.send(RequestKind.PRESENCE, epoch, node, name, seconds)
                if request is not None:
                    clients[request] = client
        waiting = {request: self.nodes[client] for request, client in clients.items()}
        begun, there = time.monotonic(), dict[ClientId, bool]()
        until, is_over = begun + seconds, False
        while waiting and not is_over:
            is_over = not self.transport.pause(until)
            for request, answer in self.transport.pull(RequestKind.PRESENCE, name, waiting):
                del waiting[request]
                if answer is not None:
                    there[clients[request]] = answer == HAS_KEYS
                    if len(there) == self.quorum:  # one that hangs is asked again before the next attempt
                        until = self.deadlines.after_quorum(begun, until)
        return there
