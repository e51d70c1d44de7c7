"""What the rows add up to: the rules of the ledger as a fold over its rows, the same for writing and verifying."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from d2pfed.accounting.events import Release, Sampling
from d2pfed.errors import BudgetExceeded, ConfigError, LedgerError
from d2pfed.ledger.budget import Budget, ChargedRun, RunPlan, require_no_worse
from d2pfed.ledger.rows import ROOT, Head, Key, Row, RowKind


@dataclass(frozen=True, slots=True)
class AttemptState:
    """An attempt so far: its last kind of row, the server it belongs to, and what it may have released."""

    kind: RowKind
    epoch: int
    release: Release


class LedgerState:
    """The state after a number of rows; `add` refuses a row that breaks a rule and then changes nothing."""

    def __init__(self, first: Row) -> None:
        _check_chain(first, 0, ROOT)
        if (first.kind, first.epoch, first.key, first.epsilon) != (RowKind.CREATE, 0, None, 0.0):
            raise LedgerError("row 0: it must create the ledger, in epoch 0 and at epsilon 0")
        self.budget = Budget.decode(first.body)
        self.epoch = 0
        self.epsilon = 0.0
        self.runs: dict[str, ChargedRun] = {}  # in the order of their beginning
        self.attempts: dict[Key, AttemptState] = {}  # in the order of their reservations
        self.charged: Counter[str] = Counter()  # attempts of each run that are not void
        self.tried: Counter[tuple[str, int]] = Counter()  # attempts of each round of a run, void ones included
        # Charged attempts of a run that each client took part in, by run: counted once, with the attempt's rows.
        self.participations: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self.hashes = [first.hash]

    @property
    def head(self) -> Head:
        """The last row's number and hash."""
        return Head(len(self.hashes) - 1, self.hashes[-1])

    def releases(self) -> tuple[Release, ...]:
        """Return what may have been released: all that was committed, and all that was reserved and is not void."""
        return tuple(attempt.release for attempt in self.attempts.values() if attempt.kind is not RowKind.VOID)

    def plans(self) -> tuple[RunPlan, ...]:
        """Return what was charged, in the order in which the runs began."""
        return tuple(begun.plan for begun in self.runs.values())

    def add(self, row: Row) -> None:
        """Take the next row, or refuse it by number."""
        _check_chain(row, len(self.hashes), self.hashes[-1])
        try:
            self._take(row)
        except (LedgerError, ConfigError, BudgetExceeded) as error:
            raise LedgerError(f"row {row.seq}: {error}") from error
        self.epoch, self.epsilon = row.epoch, row.epsilon
        self.hashes.append(row.hash)

    def _take(self, row: Row) -> None:
        match row.kind:
            case RowKind.OPEN:
                if row.epoch != self.epoch + 1:
                    raise LedgerError(f"a server begins epoch {self.epoch + 1}, got {row.epoch}")
                if row.key is not None or row.body:
                    raise LedgerError("a server's first row names no attempt and has no body")
            case _ if row.epoch != self.epoch:
                raise LedgerError(f"a server of epoch {row.epoch} wrote in epoch {self.epoch}")
            case RowKind.BEGIN:
                if row.key is not None:
                    raise LedgerError("a run's first row names no attempt")
                begun = ChargedRun.decode(row.body)
                self.check_begin(begun)
                self.runs[begun.run] = begun
            case _:
                self._add_step(row)

    def check_begin(self, begun: ChargedRun) -> None:
        """Refuse a run that has begun, or whose guarantee is not of the budget's kind."""
        if begun.run in self.runs:
            raise LedgerError(f"run {begun.run} has begun already")
        if other := next((each.run for each in self.runs.values() if each.owner == begun.owner), None):
            raise LedgerError(f"run {begun.run}: its directory has begun run {other} here")
        self.budget.require_like(begun.plan)

    def step(self, kind: RowKind, key: Key, release: Release | None) -> AttemptState:
        """Return an attempt after its next step, or refuse a step that is not allowed."""
        place = key.run, key.round, key.attempt
        if release is not None and (release.run, release.round, release.attempt) != place:
            raise LedgerError(f"{key} has a release of run {release.run}, {release.round}, {release.attempt}")
        begun = self.attempts.get(key)
        if kind is RowKind.RESERVE and release is not None:
            if begun is not None:
                # The noise is fresh at each call, so the same attempt again would be another release, for nothing.
                raise LedgerError(f"{key} has a row: take attempt {self.tried[key.run, key.round]}")
            self._check_attempt(key, release)
            self._check_block(key, release, ())
            return AttemptState(kind, self.epoch, release)
        if begun is None or begun.kind is not RowKind.RESERVE or kind not in (RowKind.COMMIT, RowKind.VOID):
            raise LedgerError(f"{key}: {kind} cannot follow {'nothing' if begun is None else begun.kind}")
        if begun.epoch != self.epoch:
            # The attempt's keys died with that server: it stays charged, and the round needs a new attempt.
            raise LedgerError(f"{key}: reserved in epoch {begun.epoch}, which epoch {self.epoch} cannot {kind}")
        if release is not None:
            reserved = begun.release.participants
            require_no_worse(release, begun.release)
            is_other = reserved and release.participants != reserved
            if is_other and (strangers := set(release.participants).difference(reserved)):
                raise LedgerError(f"client {min(strangers)} takes part and was not among those reserved for")
            self._check_block(key, release, reserved)
        return AttemptState(kind, begun.epoch, begun.release if release is None else release)

    def _add_step(self, row: Row) -> None:
        if row.key is None:
            raise LedgerError(f"{row.kind} needs the run, round and attempt it is about")
        if row.kind is RowKind.VOID and row.body:
            raise LedgerError("a void attempt releases nothing, so its body must be empty")
        if row.epsilon != self.epsilon:
            raise LedgerError(f"an attempt adds no epsilon: it must stay {self.epsilon}, got {row.epsilon}")
        before, after = self.attempts.get(row.key), self.step(row.kind, row.key, row.release)
        self.attempts[row.key] = after
        if before is None:
            self.tried[row.key.run, row.key.round] += 1
            self.charged[row.key.run] += 1
        if row.kind is RowKind.VOID:
            self.charged[row.key.run] -= 1
        counted = () if before is None else before.release.participants
        real = () if row.kind is RowKind.VOID else after.release.participants
        participations = self.participations[row.key.run]
        if not counted:
            participations.update(real)
        elif counted != real:  # neither names a client twice
            gone = set(counted).difference(real)
            participations.subtract(gone)
            if len(gone) + len(real) != len(counted):  # some are new
                participations.update(set(real).difference(counted))

    def _check_attempt(self, key: Key, release: Release) -> None:
        """Refuse an attempt that its run was not charged for."""
        if key.run not in self.runs:
            raise LedgerError(f"run {key.run} has not begun")
        plan = self.runs[key.run].plan
        if key.round >= plan.rounds:
            raise LedgerError(f"{key}: the run has {plan.rounds} rounds, counted from 0")
        if key.attempt != self.tried[key.run, key.round]:
            raise LedgerError(f"{key}: the next attempt at this round is {self.tried[key.run, key.round]}")
        if key.attempt >= plan.attempts_per_round:
            raise BudgetExceeded(f"{key}: a round may be tried {plan.attempts_per_round} times")
        if self.charged[key.run] >= plan.max_attempts:
            raise BudgetExceeded(
                f"{key}: all of the {plan.max_attempts} attempts that the run may take are charged"
            )
        require_no_worse(release, plan.release)

    def _check_block(self, key: Key, release: Release, counted: Sequence[int]) -> None:
        """Refuse a client's second charged attempt under `once`: the run was charged for one of each client's."""
        if release.sampling.method is Sampling.ONCE:
            again = [
                client
                for client in set(release.participants).difference(counted)
                if self.participations[key.run][client]
            ]
            if again:
                raise LedgerError(f"{key}: `once` uses each client once, and client {min(again)} has contributed")


def _check_chain(row: Row, seq: int, previous: bytes) -> None:
    if row.seq != seq:
        raise LedgerError(f"row {row.seq}: its number must be {seq}")
    if row.hash != row.chained(previous):
        raise LedgerError(f"row {row.seq}: its hash does not follow from it and the row before")
    if not row.epsilon >= 0:
        raise LedgerError(f"row {row.seq}: epsilon must be at least 0, got {row.epsilon}")


def replay(rows: Iterable[Row]) -> LedgerState:
    """Return the state after all rows, each checked as it is read; refuses the first that is wrong."""
    each = iter(rows)
    first = next(each, None)
    if first is None:
        raise LedgerError("it has no rows, so no budget")
    state = LedgerState(first)
    for row in each:
        state.add(row)
    return state
