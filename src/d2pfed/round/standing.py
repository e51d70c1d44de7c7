"""The server half of standing keys: epochs, and one exchange for each attempt, over any transport."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from d2pfed.errors import ConfigError, TooFewClients, VoidStep
from d2pfed.noise.clipping import with_clip
from d2pfed.noise.codec import FloatVector
from d2pfed.plan import Plan, require_standing
from d2pfed.round.gathering import OpenSum, Refused, Remember, forget, ignore, run_exchange
from d2pfed.round.session import Attempt
from d2pfed.round.standing_silo import epoch_of
from d2pfed.secagg import Exchange, Position, Roster
from d2pfed.secagg.standing import Advertising, Collecting, ReadyEpoch, Step

# Asks these silos whether they are there; of those who answer, whether they hold keys of an epoch (by its digest).
AskPresence = Callable[[Collection[int], bytes], Mapping[int, bool]]

ASSUMPTIONS = (
    "Standing keys: at most {colluders} silos help the server; the roster was not made by the server; no silo's memory "
    "is restored (snapshots of a virtual machine with its memory are outside); erased memory is gone (swap off or "
    "encrypted). Every attempt is charged against the server, void ones too."
)


@dataclass(slots=True, kw_only=True)
class StandingRun:
    """The epochs of one run, as the server sees them.

    Presence is asked for only after a void attempt: who does not answer is left out until it is back, and one that is
    there without keys makes a new epoch necessary. One that says that it is there and then sends no vector, twice in a
    row, is not asked again: every void attempt costs all others.

    Attributes:
        exchange: carries requests to silos and answers back.
        presence: asks silos whether they are there.
        remembered: where the server has met each silo last; `remember` takes what is new.
        refused: hears of each answer that does not count.
        attempts, void: how many steps were asked for, and how many of them were void. All are charged.
        epochs: the number of the next epoch. Silos take part in epochs with rising numbers only, so it must survive
            this process: `note_epochs` takes it before an invitation leaves.
        failing: silos that are not asked any more.
    """

    plan: Plan
    run: str
    roster: Roster
    silos: tuple[int, ...]
    exchange: Exchange
    presence: AskPresence
    remembered: dict[int, Position] = field(default_factory=dict)
    remember: Remember = forget
    refused: Refused = ignore
    attempts: int = 0
    void: int = 0
    epochs: int = 0
    note_epochs: Callable[[int], None] = lambda _number: None
    failing: set[int] = field(default_factory=set)
    _current: ReadyEpoch | None = None
    _away: frozenset[int] = frozenset()
    _vouched: frozenset[int] = frozenset()  # missed the last step, and said since that they are there

    def __post_init__(self) -> None:
        require_standing(self.plan, len(self.roster.clients))
        if len(self.silos) != self.plan.cohort_size:
            raise ConfigError(f"the plan is for {self.plan.cohort_size} silos, got {len(self.silos)}")

    def members(self, attempt: Attempt) -> tuple[int, ...]:
        """Return who is asked in an attempt, after a new epoch if one is needed; raises TooFewClients."""
        if attempt.run != self.run:
            raise ConfigError(f"these silos are in run {self.run}, got run {attempt.run}")
        invited = tuple(sorted(self._wanted))
        self._vouched = frozenset()
        if self._current is not None and self.void and self._left(self._current) != self._wanted:
            missing = self._away
            invited, is_enough = self._look(self._current)
            if attempt.number:
                self._vouched = missing - self._away
            if not is_enough:
                self._current = None
        if self._current is None:
            self._set_up(attempt, invited)
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

    def _left(self, current: ReadyEpoch) -> set[int]:
        return set(current.members) - self._away - self.failing

    @property
    def _wanted(self) -> set[int]:
        return set(self.silos) - self.failing

    def _look(self, current: ReadyEpoch) -> tuple[tuple[int, ...], bool]:
        """Ask who is there, note who is away, and say who is, and whether the current epoch will do for them."""
        there, ready = self.presence(sorted(self._wanted), current.epoch.digest), set(current.members)
        self._away = frozenset(ready - {client for client, has_keys in there.items() if has_keys})
        # One that was invited to this epoch and did not become ready would not do so in another one made for it.
        failed = set(current.epoch.cohort) - ready
        returned = {client for client, has_keys in there.items() if not has_keys} - failed
        return tuple(sorted(there)), not returned and len(self._left(current)) >= self.plan.quorum

    def _set_up(self, attempt: Attempt, invited: tuple[int, ...]) -> None:
        if len(invited) < self.plan.quorum:
            raise TooFewClients(f"at least {self.plan.quorum} silos must be there, got {len(invited)}", invited)
        first = attempt.round * self.plan.attempts_per_round + attempt.number
        for again in range(len(invited)):
            epoch = epoch_of(self.plan, self.run, self.roster, invited, epoch=self.epochs, first=first)
            self.epochs += 1
            self.note_epochs(self.epochs)
            advertising = Advertising(epoch, self.roster, self.remembered)
            run_exchange(advertising, self.exchange, self.refused)
            self._note(advertising.positions)
            agreeing = advertising.close()
            run_exchange(agreeing, self.exchange, self.refused)
            self._note(agreeing.claims)
            # After claims a second set-up: in it, silos hear where peers have met them, and those that come with no
            # later position are left out. Another one only while claims about others leave too few ready.
            if not agreeing.claims or (again and agreeing.is_enough):
                break
        self._current, self._away = agreeing.close(), frozenset()

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


@dataclass(frozen=True, slots=True)
class StandingAttempts:
    """The attempts of a run with standing keys, as `aggregate` takes them."""

    standing: StandingRun
    task: bytes = b""
    clip: float | None = None

    def with_clip(self, clip: float) -> "StandingAttempts":
        """Return the attempts of a round with this clip."""
        return StandingAttempts(self.standing, self.task, clip)

    def draw(self, attempt: Attempt) -> tuple[int, ...]:
        """Return the members: all silos that are there."""
        return self.standing.members(attempt)

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> Step:
        """Return the step of an attempt."""
        return self.standing.step(attempt, cohort)

    def collect(self, session: Step, model: FloatVector, _participations: Mapping[int, int]) -> OpenSum:
        """Gather the members' vectors; each silo counts its own."""
        return self.standing.collect(session, model.tobytes(), with_clip(self.task, self.clip))
