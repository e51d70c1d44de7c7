"""The client half of standing keys: which epoch an invitation is to, and a silo whose keys live in this process."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from d2pfed.errors import ConfigError, PeerError
from d2pfed.noise.mechanisms import Centered, DDGauss, SkellamNoise
from d2pfed.plan import Plan
from d2pfed.secagg import Epoch, Roster, StandingState, StandingStep, decode_standing_invitation
from d2pfed.secagg.standing import MOST_SILOS, require_standing_quorum, require_standing_steps
from d2pfed.secagg.standing_checks import require_charge_once

_T = TypeVar("_T")


def require_standing_plan(plan: Plan) -> None:
    """Refuse a plan that standing keys cannot carry: noise of each silo's own, and all of a few silos every round."""
    if not isinstance(plan.mechanism, (Centered, DDGauss, SkellamNoise)):
        name = type(plan.mechanism).__name__
        raise ConfigError(f"standing keys need noise of each silo's own (centered, ddgauss, skellam), got {name}")
    if plan.cohort_size != plan.sampling.population:
        raise ConfigError(
            f"standing keys are for all silos in every round, got {plan.cohort_size} of {plan.sampling.population}"
        )
    if plan.cut_off:
        raise ConfigError(f"standing keys cut nobody off, the plan has cut_off {plan.cut_off}")
    require_standing_quorum(plan.cohort_size, plan.quorum, plan.colluders)
    require_standing_steps(plan.rounds, plan.attempts_per_round)


def can_stand(plan: Plan) -> bool:
    """Say whether standing keys can carry a plan; the main protocol carries those of fewer or more silos."""
    try:
        require_standing_plan(plan)
    except ConfigError:
        return False
    return plan.cohort_size <= MOST_SILOS


def epoch_of(
    plan: Plan, run: str, roster: Roster, silos: tuple[int, ...], *, epoch: int = 0, first: int = 0
) -> Epoch:
    """Return the epoch of a run that begins at a step, between these silos."""
    require_standing_plan(plan)
    return Epoch(
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


def invited_epoch(plan: Plan, invitation: bytes, roster: Roster) -> Epoch:
    """Return the epoch that an invitation names, recomputed from this silo's own plan and roster."""
    invited = decode_standing_invitation(invitation)
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

    state: StandingState | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self) -> StandingState | None:
        """Return the state."""
        return self.state

    def advance(self, move: Callable[[StandingState], tuple[StandingState, _T]]) -> _T:
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

    def require_room(self, step: StandingStep) -> None:
        """Refuse a step that was charged, and every step once all participations are used."""
        require_charge_once(self.charged, step.number)
        _require_below(len(self.charged), self.most)

    def charge(self, step: StandingStep) -> None:
        """Count a step."""
        self.require_room(step)
        self.charged.add(step.number)


def _require_below(count: int, most: int) -> None:
    """A silo at its cap refuses: nothing is sampled here, so that it is missing tells nothing but its count."""
    if count >= most:
        raise PeerError(f"this silo has sent {count} vectors in this run, its plan allows {most}")
