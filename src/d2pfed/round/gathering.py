"""The exchanges of an attempt, as the server runs them over any transport."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from d2pfed.errors import PeerError
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg import Advertising, Confirming, Exchange, Position, Roster, ServerPhase, Session, Sum, collect
from d2pfed.secagg.draws import Opening

Refused = Callable[[int, PeerError], None]  # hears of each answer that does not count, and why


Remember = Callable[[Mapping[int, Position]], None]  # hears where clients stand


class Collected(Protocol):
    """Masked vectors of one attempt, summed and not yet opened."""

    @property
    def survivors(self) -> tuple[int, ...]:
        """The clients whose vector is in the sum."""
        ...

    def unmask(self) -> Sum:
        """Open the sum; raises TooFewClients if too few help."""
        ...


@dataclass(frozen=True, slots=True)
class MaskedSum:
    """A sum behind the clients' masks, which the fourth exchange opens."""

    confirming: Confirming
    exchange: Exchange
    refused: Refused

    @property
    def survivors(self) -> tuple[int, ...]:
        """The clients whose masked vector arrived."""
        return self.confirming.survivors

    def unmask(self) -> Sum:
        """Ask the survivors to open the masks."""
        run_exchange(self.confirming, self.exchange, self.refused)
        unmasking = self.confirming.close()
        run_exchange(unmasking, self.exchange, self.refused)
        return unmasking.close()


@dataclass(frozen=True, slots=True)
class OpenSum:
    """A sum that needs no unmasking; `require` refuses it where the protocol could not have opened it."""

    survivors: tuple[int, ...]
    vector: RingVector = field(repr=False)
    require: Callable[[], None] = lambda: None

    def unmask(self) -> Sum:
        """Return the sum; raises TooFewClients where too few would have helped."""
        self.require()
        return Sum(self.vector, ())


class Machine(Protocol):
    """The client's side of an attempt, in this process."""

    def receive(self, request: bytes, /) -> bytes | None:
        """Return the answer to a request; None counts as dropped out."""
        ...


@dataclass(frozen=True, slots=True)
class InProcess:
    """The transport to clients in this process.

    Attributes:
        join: makes a client's machine when it is first asked.
        left: from the requests of an exchange to those who answer, in their order; the others have dropped out.
        machines: those that were made so far.
    """

    join: Callable[[int], Machine]
    left: Callable[[Mapping[int, bytes]], Iterable[int]] = iter
    machines: dict[int, Machine] = field(default_factory=dict)

    def exchange(self, requests: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """Hand each request to its client and yield the answers of those who are left."""
        for client in self.left(requests):
            if client not in self.machines:
                self.machines[client] = self.join(client)
            answer = self.machines[client].receive(requests[client])
            if answer is not None:
                yield client, answer


def ignore(_client: int, _error: PeerError) -> None:
    """Count who answered badly as dropped out, and say no more."""


def forget(_positions: Mapping[int, Position]) -> None:
    """Remember nobody's position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invite:
    """What the server brings to an attempt of enrolled clients.

    Attributes:
        roster: who is enrolled.
        opening: proof of the draw, where cohorts are drawn verifiably.
        remembered: where the server has met each client last.
        remember: takes the positions of all that joined, whatever becomes of the attempt.
        excluded: clients that were found to cheat in this run; they count as dropped out.
    """

    roster: Roster | None = None
    opening: Opening | None = None
    remembered: Mapping[int, Position] = field(default_factory=dict)
    remember: Remember = forget
    excluded: Collection[int] = ()


NOBODY_ENROLLED = Invite()


def gather(
    session: Session,
    model: bytes,
    exchange: Exchange,
    *,
    task: bytes = b"",
    invite: Invite = NOBODY_ENROLLED,
    refused: Refused = ignore,
) -> MaskedSum:
    """Run the first three exchanges of the protocol; raises TooFewClients with those who are left.

    `task` is all that decides what is trained beside the model, `with_clip` puts a round's clip before it; clients
    that were told otherwise add only noise.
    """
    advertising = Advertising(
        session,
        invite.roster,
        opening=invite.opening,
        remembered=invite.remembered,
        excluded=invite.excluded,
    )
    run_exchange(advertising, exchange, refused)
    invite.remember(advertising.positions)
    sharing = advertising.close()
    run_exchange(sharing, exchange, refused)
    masking = sharing.close(task, model)
    run_exchange(masking, exchange, refused)
    return MaskedSum(masking.close(), exchange, refused)


def run_exchange(phase: ServerPhase, exchange: Exchange, refused: Refused) -> None:
    """Run one exchange of a phase, and tell who answered badly."""
    for client, error in collect(phase, exchange).items():
        refused(client, error)
