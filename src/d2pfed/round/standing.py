"""Standing keys: the server's epochs with one exchange for each attempt, and a silo whose keys live in this process."""

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from d2pfed.errors import ConfigError, PeerError, TooFewClients, VoidStep
from d2pfed.plan import Plan, require_standing
from d2pfed.round.aggregation import OpenSum, Refused, Remember, ignore, run_exchange
from d2pfed.round.session import Attempt, epoch_of
from d2pfed.secagg import Exchange, Position, Roster, standing
from d2pfed.secagg.standing import Advertising, Collecting, ReadyEpoch, State, Step

_T = TypeVar("_T")

# Asks these silos whether they are there; of those who answer, whether they hold keys of an epoch (by its digest).
AskPresence = Callable[[Collection[int], bytes], Mapping[int, bool]]

ASSUMPTIONS = (
    "Standing keys: at most {colluders} silos help the server; the roster was not made by the server; no silo's memory "
    "is restored (snapshots of a virtual machine with its memory are outside); erased memory is gone (swap off or "
    "encrypted). Every attempt is charged against the server, void ones too."
)


def can_stand(plan: Plan) -> bool:
    """Say whether standing keys can carry a plan; the main protocol carries those of fewer or more silos."""
    try:
        require_standing(plan, plan.sampling.population)
    except ConfigError:
        return False
    return True


@dataclass(slots=True, kw_only=True)
class StandingRun:
    """The epochs of one run, as the server sees them.

    Presence is asked for after a void attempt, and when a silo that is left out is connected: who does not answer is
    left out until it is back, and one that is there without keys makes a new epoch necessary. One that says that it is
    there and then sends no vector, twice in a row, is not asked again: every void attempt costs all others.
    """

    plan: Plan
    run: str
    roster: Roster
    silos: tuple[int, ...]
    exchange: Exchange
    presence: AskPresence
    remembered: dict[int, Position] = field(default_factory=dict)  # where the server has met each silo last
    remember: Remember = ignore  # takes what is new of that
    refused: Refused = ignore
    attempts: int = 0  # steps that were asked for: all are charged
    void: int = 0  # steps that were void
    # The number of the next epoch. Silos take part in epochs with rising numbers only, so it must survive this
    # process: `note_epochs` takes it before an invitation leaves.
    epochs: int = 0
    note_epochs: Callable[[int], None] = ignore
    failing: set[int] = field(default_factory=set)  # silos that are not asked any more
    _current: ReadyEpoch | None = None
    _away: frozenset[int] = frozenset()
    _vouched: frozenset[int] = frozenset()  # missed the last step, and said since that they are there

    def __post_init__(self) -> None:
        require_standing(self.plan, len(self.roster.clients))
        if len(self.silos) != self.plan.cohort_size:
            raise ConfigError(f"the plan is for {self.plan.cohort_size} silos, got {len(self.silos)}")

    def members(self, attempt: Attempt, here: Collection[int] | None = None) -> tuple[int, ...]:
        """Return who is asked in an attempt, after a new epoch if one is needed; raises TooFewClients.

        `here` are silos that the transport knows to be connected, None where it does not know.
        """
        if attempt.run != self.run:
            raise ConfigError(f"these silos are in run {self.run}, got run {attempt.run}")
        invited = tuple(sorted(self._wanted if here is None else self._wanted & set(here)))
        self._vouched = frozenset()
        if self._current is not None and self._may_change(self._current, attempt, here):
            current, missing = self._current, self._away
            there = self.presence(sorted(self._wanted), current.epoch.digest)
            invited, ready = tuple(sorted(there)), set(current.members)
            self._away = frozenset(ready - {client for client, has_keys in there.items() if has_keys})
            if attempt.number:
                self._vouched = missing - self._away
            # One that was invited to this epoch and did not become ready would not do so in another one made for it.
            failed = set(current.epoch.cohort) - ready
            returned = {client for client, has_keys in there.items() if not has_keys} - failed
            if returned or len(self._left(current)) < self.plan.quorum:
                self._current = None
        if self._current is None:
            if len(invited) < self.plan.quorum:
                raise TooFewClients(
                    f"at least {self.plan.quorum} silos must be there, got {len(invited)}", invited
                )
            first = attempt.round * self.plan.attempts_per_round + attempt.number
            for again in range(len(invited)):
                epoch = epoch_of(self.plan, self.run, self.roster, invited, epoch=self.epochs, first=first)
                self.epochs += 1
                self.note_epochs(self.epochs)
                inviting = Advertising(epoch, self.roster, self.remembered)
                advertising = run_exchange(inviting, self.exchange, self.refused)
                self._note(advertising.positions)
                agreeing = run_exchange(advertising.close(), self.exchange, self.refused)
                self._note(agreeing.claims)
                # After claims a second set-up: in it, silos learn where peers met them, and those that come with no
                # later position are left out. Another one only while claims about others leave too few ready.
                if not agreeing.claims or (again and agreeing.is_enough):
                    break
            self._current, self._away = agreeing.close(), frozenset()
        return tuple(sorted(self._left(self._require_current())))

    def step(self, attempt: Attempt, members: tuple[int, ...]) -> Step:
        """Return the step of an attempt."""
        return self._require_current().step(attempt.round, attempt.number, members)

    def collect(self, step: Step, model: bytes, task: bytes = b"") -> OpenSum:
        """Run the one exchange of a step; raises VoidStep with those who answered."""
        self.attempts += 1
        collecting = Collecting(self._require_current().keys, step, task, model)
        run_exchange(collecting, self.exchange, self.refused)
        try:
            return OpenSum(step.cohort, collecting.close())
        except VoidStep as lack:
            self.void += 1
            self._away = frozenset(step.cohort) - frozenset(lack.left)
            self.failing |= self._away & self._vouched
            raise

    def _may_change(self, current: ReadyEpoch, attempt: Attempt, here: Collection[int] | None) -> bool:
        """Say whether presence is worth an exchange: after a void attempt, and when one that is left out is here."""
        left_out = self._wanted - self._left(current)
        if here is None:
            return bool(self.void and left_out)
        unready = set(current.epoch.cohort) - set(current.members)  # no new epoch is made for them
        return bool(left_out if attempt.number else (left_out - unready) & set(here))

    def _left(self, current: ReadyEpoch) -> set[int]:
        return set(current.members) - self._away - self.failing

    @property
    def _wanted(self) -> set[int]:
        return set(self.silos) - self.failing

    def _note(self, positions: Mapping[int, Position]) -> None:
        later = {
            client: position
            for client, position in positions.items()
            if client not in self.remembered or position.count >= self.remembered[client].count
        }
        self.remembered.update(later)
        self.remember(later)

    def _require_current(self) -> ReadyEpoch:
        if self._current is None:
            raise ConfigError("no epoch was set up")
        return self._current


@dataclass(slots=True)
class StandingMemory:
    """A silo's state in this process: gone with it."""

    state: State | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self) -> State | None:
        """Return the state."""
        return self.state

    def advance(self, move: Callable[[State], tuple[State, _T]]) -> _T:
        """Replace the state by the one that `move` makes of it."""
        with self._lock:
            if self.state is None:
                raise PeerError("this silo has no standing keys")
            self.state, result = move(self.state)
            return result


@dataclass(slots=True)
class StandingSteps:
    """The steps that a silo in this process has sent a vector in: at most this many, each once."""

    most: int
    charged: set[int] = field(default_factory=set)

    def charge(self, step: Step) -> None:
        """Count a step; refuse one that was counted, and every step once all participations are used.

        A silo at its cap refuses: nothing is sampled here, so that it is missing tells nothing but its count.
        """
        standing.require_charge_once(self.charged, step.number)
        if len(self.charged) >= self.most:
            raise PeerError(
                f"this silo has sent {len(self.charged)} vectors in this run, its plan allows {self.most}"
            )
        self.charged.add(step.number)
