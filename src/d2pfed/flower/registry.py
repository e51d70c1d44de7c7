"""Which of Flower's nodes speaks for which client, and who of a cohort is here."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from flwr.app import RecordDict

from d2pfed.errors import PeerError
from d2pfed.flower.grid import Deadlines, GridTransport
from d2pfed.flower.progress import Arrivals
from d2pfed.flower.records import answer_from_record, to_record
from d2pfed.flower.requests import RequestKind, RunAcceptance, RunAnnouncement
from d2pfed.secagg import Roster
from d2pfed.secagg.crypto import require_signature
from d2pfed.secagg.wire import ClientId

_AGAIN_SECONDS = 60.0  # after which a node that has not answered the announcement is asked again
_ANNOUNCEMENT = "ANNOUNCEMENT"  # the name of this exchange in the log


class NodeRegistry:
    """Which of Flower's nodes speaks for which client: every node is sent the run's announcement once.

    Guarantee: with a roster, a node stands for a client only with that client's signature, made for this run, plan
    and node. Checked: test_flower_server.py::test_a_node_cannot_speak_for_a_client_whose_key_it_lacks.
    """

    def __init__(
        self,
        transport: GridTransport,
        announcement: RunAnnouncement,
        population: Sequence[ClientId],
        roster: Roster | None,
    ) -> None:
        self._transport = transport
        self._announcement = announcement
        self._population = frozenset(population)
        self._roster = roster
        self._nodes: dict[ClientId, int] = {}
        self._asked: set[int] = set()
        self._failed: set[int] = set()
        self._waiting: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._arrivals = Arrivals()
        self._absent: set[ClientId] = set()

    @property
    def nodes(self) -> Mapping[ClientId, int]:
        """The node of each client that has accepted the run."""
        return MappingProxyType(self._nodes)

    def wait_for(self, cohort: Sequence[ClientId], deadlines: Deadlines, quorum: int) -> tuple[ClientId, ...]:
        """Wait until a whole cohort is there, but no longer than `joining`; return those who are.

        Once a quorum is there, the others have the deadlines' grace, and who did not use it is not waited for again.
        """
        begun = time.monotonic()
        until = begun + deadlines.joining
        self._asked -= self._failed  # once a round: a node that refuses is not asked all the time
        self._failed.clear()
        self._look(deadlines.joining)
        has_quorum = False
        while not self._are_here(cohort, quorum) and self._transport.pause(until):
            self._arrivals.tell(cohort, self._nodes)
            self._look(deadlines.joining)
            if not has_quorum and len(self._nodes.keys() & set(cohort)) >= quorum:
                has_quorum, until = True, deadlines.after_quorum(begun, until)
        self._arrivals.tell(cohort, self._nodes)
        self._absent = (self._absent | set(cohort)) - self._nodes.keys()
        return tuple(client for client in cohort if client in self._nodes)

    def _are_here(self, cohort: Sequence[ClientId], quorum: int) -> bool:
        here = self._nodes.keys() & set(cohort)
        return len(here) >= min(quorum, len(cohort)) and here >= set(cohort) - self._absent

    def _look(self, seconds: float) -> None:
        connected = self._transport.nodes()
        for client in [client for client, node in self._nodes.items() if node not in connected]:
            self._asked.discard(self._nodes.pop(client))  # when it comes back, it is told of the run again
        for late in [each for each in self._waiting if time.monotonic() - self._since[each] > _AGAIN_SECONDS]:
            self._asked.discard(self._waiting.pop(late))  # lost on the way: to answer twice changes nothing
        for node in sorted(connected - self._asked):
            reference = self._transport.send(
                to_record(RequestKind.ANNOUNCEMENT, self._announcement.encode()), node, _ANNOUNCEMENT, seconds
            )
            if reference is not None:
                self._asked.add(node)
                self._waiting[reference] = node
                self._since[reference] = time.monotonic()
        for reference, content in self._transport.pull(_ANNOUNCEMENT, self._waiting):
            node = self._waiting.pop(reference)
            if content is None:
                self._failed.add(node)
            else:
                self._admit(node, content)

    def _admit(self, node: int, content: RecordDict) -> None:
        try:
            client = self._checked(
                node, RunAcceptance.decode(answer_from_record(content, RequestKind.ANNOUNCEMENT))
            )
        except PeerError as error:
            self._transport.refuse(_ANNOUNCEMENT, node, "identity", error)
        else:
            self._nodes[client] = node  # a client that comes back through another node is found there

    def _checked(self, node: int, answer: RunAcceptance) -> ClientId:
        if self._roster is not None:
            statement = self._announcement.statement(node, answer.client)
            require_signature(self._roster.key(answer.client), answer.signature, statement)
        elif answer.client not in self._population:
            raise PeerError(f"client {answer.client} is not of this population")
        return answer.client
