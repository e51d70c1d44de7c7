"""The exchanges of an attempt, as the server runs them over any transport."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from d2pfed.errors import PeerError
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
        _run(self.confirming, self.exchange, self.refused)
        unmasking = self.confirming.close()
        _run(unmasking, self.exchange, self.refused)
        return unmasking.close()


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
    _run(advertising, exchange, refused)
    invite.remember(advertising.positions)
    sharing = advertising.close()
    _run(sharing, exchange, refused)
    masking = sharing.close(task, model)
    _run(masking, exchange, refused)
    return MaskedSum(masking.close(), exchange, refused)


def _run(phase: ServerPhase, exchange: Exchange, refused: Refused) -> None:
    for client, error in collect(phase, exchange).items():
        refused(client, error)
