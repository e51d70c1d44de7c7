"""Which of Flower's nodes speaks for which client: every node is told of the run once, and answers with its client."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from flwr.app import RecordDict

from d2pfed.errors import PeerError
from d2pfed.flower.envelope import Introduced, Introduction
from d2pfed.flower.grid import Mail, refuse
from d2pfed.secagg import Roster
from d2pfed.secagg.crypto import require_signature
from d2pfed.secagg.wire import ClientId

_EXCHANGE = "INTRODUCTION"


class NodeRegistry:
    """The clients that have shown themselves so far.

    Guarantee: with a roster, a node stands for a client only with that client's signature, made for this run, plan
    and node. Checked: test_flower_server.py::test_a_node_cannot_speak_for_a_client_whose_key_it_lacks.
    """

    def __init__(
        self, mail: Mail, introduction: Introduction, population: Sequence[ClientId], roster: Roster | None
    ) -> None:
        self._mail = mail
        self._introduction = introduction
        self._population = frozenset(population)
        self._roster = roster
        self._nodes: dict[ClientId, int] = {}
        self._told: set[int] = set()
        self._failed: set[int] = set()
        self._waiting: dict[str, int] = {}

    @property
    def nodes(self) -> Mapping[ClientId, int]:
        """The node of each client that has shown itself."""
        return MappingProxyType(self._nodes)

    def seek(self, cohort: Sequence[ClientId], seconds: float) -> tuple[ClientId, ...]:
        """Wait until a whole cohort is there, but no longer than so many seconds; return those who are."""
        until = time.monotonic() + seconds
        self._told -= self._failed  # once a round: a node that refuses is not asked all the time
        self._failed.clear()
        self._look(seconds)
        while not self._nodes.keys() >= set(cohort) and self._mail.rest(until):
            self._look(seconds)
        return tuple(client for client in cohort if client in self._nodes)

    def _look(self, seconds: float) -> None:
        for node in sorted(self._mail.nodes() - self._told):
            reference = self._mail.send(self._introduction.pack(), node, _EXCHANGE, seconds)
            if reference is not None:
                self._told.add(node)
                self._waiting[reference] = node
        for reference, content in self._mail.look(_EXCHANGE, self._waiting):
            node = self._waiting.pop(reference)
            if content is None:
                self._failed.add(node)
            else:
                self._admit(node, content)

    def _admit(self, node: int, content: RecordDict) -> None:
        try:
            client = self._checked(node, Introduced.unpack(content))
        except PeerError as error:
            refuse(_EXCHANGE, node, error)
        else:
            self._nodes[client] = node  # a client that comes back through another node is found there

    def _checked(self, node: int, answer: Introduced) -> ClientId:
        if self._roster is not None:
            statement = self._introduction.statement(node, answer.client)
            require_signature(self._roster.key(answer.client), answer.signature, statement)
        elif answer.client not in self._population:
            raise PeerError(f"client {answer.client} is not of this population")
        return answer.client
