"""The client half of standing keys: which epoch an invitation is to, and a silo whose keys live in this process."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from d2pfed.errors import ConfigError, PeerError
from d2pfed.plan import Plan, require_standing
from d2pfed.secagg import Roster, standing

_T = TypeVar("_T")


def can_stand(plan: Plan) -> bool:
    """Say whether standing keys can carry a plan; the main protocol carries those of fewer or more silos."""
    try:
        require_standing(plan, plan.sampling.population)
    except ConfigError:
        return False
    return True


def epoch_of(
    plan: Plan, run: str, roster: Roster, silos: tuple[int, ...], *, epoch: int = 0, first: int = 0
) -> standing.Epoch:
    """Return the epoch of a run that begins at a step, between these silos."""
    require_standing(plan, len(roster.clients))
    return standing.Epoch(
        plan_digest=plan.digest,
        run=run,
        epoch=epoch,
        first=first,
        roster_digest=roster.digest,
        cohort=silos,
        dimension=plan.codec.length,
        bits=plan.ring.bits,
        quorum=plan.quorum,
        colluders=plan.colluders,
        rounds=plan.rounds,
        attempts=plan.attempts_per_round,
    )


def invited_epoch(plan: Plan, invitation: bytes, roster: Roster) -> standing.Epoch:
    """Return the epoch that an invitation names, recomputed from this silo's own plan and roster."""
    invited = standing.decode_invitation(invitation)
    if len(invited.silos) > plan.cohort_size:
        raise PeerError(f"an epoch has at most the planned {plan.cohort_size} silos, got {len(invited.silos)}")
    try:
        epoch = epoch_of(plan, invited.run, roster, invited.silos, epoch=invited.epoch, first=invited.first)
    except ConfigError as error:
        raise PeerError(str(error)) from None
    if epoch.digest != invited.binding:
        raise PeerError(f"run {invited.run} was agreed on with another plan or roster")
    return epoch


@dataclass(slots=True)
class StandingMemory:
    """A silo's state in this process: gone with it."""

    state: standing.State | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self) -> standing.State | None:
        """Return the state."""
        return self.state

    def advance(self, move: Callable[[standing.State], tuple[standing.State, _T]]) -> _T:
        """Replace the state by the one that `move` makes of it."""
        with self._lock:
            if self.state is None:
                raise PeerError("this silo has no standing keys")
            self.state, result = move(self.state)
            return result


@dataclass(slots=True)
class StandingSteps:
    """The steps that a silo in this process has sent a vector in: at most so many, each once."""

    most: int
    charged: set[int] = field(default_factory=set)

    def charge(self, step: standing.Step) -> None:
        """Count a step; refuse one that was counted, and every step once all participations are used.

        A silo at its cap refuses: nothing is sampled here, so that it is missing tells nothing but its count.
        """
        standing.require_charge_once(self.charged, step.number)
        if len(self.charged) >= self.most:
            raise PeerError(
                f"this silo has sent {len(self.charged)} vectors in this run, its plan allows {self.most}"
            )
        self.charged.add(step.number)
