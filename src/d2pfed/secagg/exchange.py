"""One exchange as the server sees it: requests go out, answers come in, each client answers once."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

import numpy as np

from d2pfed.errors import ConfigError, PeerError
from d2pfed.secagg.wire import ClientId, Subset

Exchange = Callable[[Mapping[ClientId, bytes]], Iterable[tuple[ClientId, bytes]]]


class Cohort(Protocol):
    """A session or an epoch: who may be asked, by rank."""

    @property
    def cohort(self) -> tuple[ClientId, ...]:
        """The clients, increasing."""
        ...

    def rank(self, client: ClientId) -> int:
        """Return a client's place; ConfigError for a stranger."""
        ...


S = TypeVar("S", bound=Cohort)


class Outbox(Mapping[ClientId, bytes]):
    """Requests by client, each built when it is looked up: a model is not copied for a whole cohort at once."""

    def __init__(self, session: Cohort, asked: Subset, build: Callable[[int], bytes]) -> None:
        self._ranks = {session.cohort[rank]: int(rank) for rank in np.flatnonzero(asked)}
        self._build = build

    def __getitem__(self, client: ClientId) -> bytes:
        return self._build(self._ranks[client])

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


class ServerPhase(Protocol):
    """What all phases have in common."""

    def outbox(self) -> Outbox:
        """Return the requests."""
        ...

    def receive(self, client: ClientId, data: bytes) -> None:
        """Take a client's answer, or refuse it."""
        ...


def collect(phase: ServerPhase, exchange: Exchange) -> dict[ClientId, PeerError]:
    """Run one exchange of a phase, and return who answered badly and how; they count as dropped out."""
    refused: dict[ClientId, PeerError] = {}
    outbox = phase.outbox()
    for client, data in exchange(outbox) if outbox else ():
        try:
            phase.receive(client, data)
        except PeerError as error:
            refused[client] = error
    return refused


class PendingAnswers(Generic[S]):
    """Who was asked, and who has answered: a client's first answer is its only one."""

    def __init__(self, session: S, asked: Subset) -> None:
        self.session = session
        self.asked = asked
        self._answered = np.zeros_like(asked)

    def admit(self, client: ClientId) -> int:
        """Return the rank of a client that was asked and has not answered yet."""
        try:
            rank = self.session.rank(client)
        except ConfigError:
            raise PeerError(f"client {client} is not in the cohort") from None
        if not self.asked[rank] or self._answered[rank]:
            raise PeerError(f"client {client} was not asked, or has answered already")
        self._answered[rank] = True
        return rank

    def outbox(self, build: Callable[[int], bytes]) -> Outbox:
        """Return the requests to all that are asked."""
        return Outbox(self.session, self.asked, build)
