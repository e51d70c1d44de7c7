"""The ledger a server writes, a run charged when it begins, each attempt before it can reveal; and its check."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from d2pfed.accounting.events import Release
from d2pfed.accounting.filters import FilterDecision
from d2pfed.errors import BudgetExceeded, LedgerError
from d2pfed.ledger.budget import Budget, ChargedRun, RunPlan, charge_plans
from d2pfed.ledger.rows import Head, Key, Row, RowKind, chained_row, encode_release, first_row
from d2pfed.ledger.state import LedgerState, replay
from d2pfed.ledger.store import Lock, Store, require_file
from d2pfed.numerics import canonical

# Whether whole runs, in the order in which they began, are within a budget, and what they cost; errs upwards.
Meter = Callable[[Budget, Sequence[RunPlan]], FilterDecision]

ROUNDING = 1e-6  # relative: meters are pure functions, only the rounding of another machine's libraries differs


def measure(meter: Meter, budget: Budget, plans: Sequence[RunPlan]) -> FilterDecision:
    """Return what the runs cost; refuses a meter that answers with nan or a negative number."""
    if not plans:
        return FilterDecision(admitted=True, units=(), budget_units=0, composed_epsilon=0.0)
    charged = meter(budget, plans)
    if math.isnan(charged.composed_epsilon) or charged.composed_epsilon < 0:
        raise LedgerError(f"the meter must return an epsilon of at least 0, got {charged.composed_epsilon}")
    return charged


class Ledger:
    """The budget of a population, drawn on by all runs over its clients and written by one server at a time.

    A run is charged once, when it begins, for all attempts that it may take; its attempts are recorded and counted.
    Each opening starts an epoch. An attempt belongs to the epoch that reserved it: after a crash it can be neither
    committed nor void; it stays charged, and the round goes on with `next_attempt`. After an error in writing, nobody
    knows whether the row is on the disk: the ledger closes itself, and only a new opening tells.
    """

    def __init__(self, store: Store, state: LedgerState, meter: Meter, closing: ExitStack) -> None:
        self._store = store
        self._state = state
        self._meter = meter
        self._closing: ExitStack | None = closing

    @staticmethod
    def create(path: Path, budget: Budget) -> "Ledger":
        """Make a ledger with this budget and open it; refuses if there is one."""
        return create_metered(path, budget, charge_plans)

    @staticmethod
    def open(path: Path) -> "Ledger":
        """Open a ledger; refuses at once if another server has it open."""
        return open_metered(path, Lock.take, charge_plans)

    @staticmethod
    def open_in_turn(path: Path) -> "Ledger":
        """Open a ledger as soon as no other server has it open."""
        return open_metered(path, Lock.wait, charge_plans)

    @staticmethod
    def take_over(path: Path) -> "Ledger":
        """Open a ledger although another server has it open, and shut that one out.

        Guarantee: the other server, even if it was only asleep, commits nothing more.
        Checked: test_ledger_races.py::test_a_stopped_server_cannot_commit_after_a_takeover.
        """
        return open_metered(path, Lock.replace, charge_plans)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the next server in; unfinished attempts stay charged."""
        closing, self._closing = self._closing, None
        if closing is not None:
            closing.close()

    @property
    def budget(self) -> Budget:
        """What may be spent."""
        return self._state.budget

    def begin(self, run: str, owner: str, plan: RunPlan, *, software: str = "", repeatable: bool = False) -> None:
        """Charge a run for all attempts that it may take, or find that it was charged; it belongs to one owner.

        `software` is the digest of what begins it; `repeatable` says that its noise follows from a seed.

        Guarantee: when this returns, all that the run may release is within the budget, whatever is chosen from
        what was seen: which runs, when they stop, which attempts are repeated.
        Checked: test_ledger.py::test_a_run_is_charged_wholly_when_it_begins.
        """
        self._require_open()
        begun, found = ChargedRun(run, owner, plan, software, repeatable), self._state.runs.get(run)
        if found is not None:
            if found.owner != owner:
                raise LedgerError(f"run {run} was begun by another directory: choose another name")
            if found.plan != plan:
                raise LedgerError(f"run {run} was begun with another plan: choose another name")
            if found.repeatable != repeatable:
                source = "a seed" if found.repeatable else "the system's entropy"
                raise LedgerError(f"run {run} was begun with noise from {source}: choose another name")
            return
        self._state.check_begin(begun)
        charged = measure(self._meter, self.budget, (*self._state.plans(), plan))
        if not charged.admitted:
            raise BudgetExceeded(f"run {run}: {_refusal(charged, self.budget)}")
        self._append(RowKind.BEGIN, None, canonical.encode(begun), charged.composed_epsilon)

    def reserve(self, release: Release) -> Row:
        """Record an attempt at its worst, before the first masked vector is asked for.

        Guarantee: when this returns, the attempt counts as one of those that its run was charged for, whatever
        happens to this process. Checked: test_ledger_crashes.py::test_no_kill_loses_a_release.
        """
        return self._step(RowKind.RESERVE, Key(release.run, release.round, release.attempt), release)

    def commit(self, release: Release) -> Row:
        """Record what an attempt releases, before the request that unmasks it.

        Guarantee: as `reserve`, and the realised release tells no more than what was reserved for it.
        """
        return self._step(RowKind.COMMIT, Key(release.run, release.round, release.attempt), release)

    def void(self, run: str, number: int, attempt: int) -> Row:
        """Record that an attempt at round `number` ended before anything could be unmasked: it does not count."""
        return self._step(RowKind.VOID, Key(run, number, attempt), None)

    def releases(self) -> tuple[Release, ...]:
        """Return what may have been released: all that was committed, and all that was reserved and is not void."""
        return self._state.releases()

    def plans(self) -> tuple[RunPlan, ...]:
        """Return what was charged, in the order in which the runs began."""
        return self._state.plans()

    def spent(self) -> float:
        """Return epsilon of all runs that are charged, each with all attempts that it may take, composed."""
        return self._state.epsilon

    def runs(self) -> tuple[ChargedRun, ...]:
        """Return the runs that are charged, in the order of their beginning."""
        return tuple(self._state.runs.values())

    def charged(self, run: str) -> int:
        """Return how many attempts of a run may have been opened; void ones are not among them."""
        return self._state.charged[run]

    def participations(self, run: str, clients: Iterable[int]) -> dict[int, int]:
        """Return in how many attempts of a run that may have been opened each client took part."""
        return {client: self._state.participations[run][client] for client in clients}

    def require_plan(self, run: str, plan: bytes) -> None:
        """Refuse a plan, by its digest, that is not the one a run was charged for: another has another cap."""
        begun = self._state.runs.get(run)
        if begun is None:
            raise LedgerError(f"run {run} has not begun")
        if begun.plan.plan != plan:
            raise LedgerError(f"run {run} was charged for another plan: what another allows is not counted")

    def next_attempt(self, run: str, number: int) -> int:
        """Return the first attempt at round `number` of a run that no row mentions."""
        return self._state.tried[run, number]

    def head(self) -> Head:
        """Return the last row's number and hash, which a checkpoint carries."""
        return self._state.head

    def require_head(self, head: Head) -> None:
        """Refuse if this ledger does not hold the row that someone has seen: it is an older copy, or another."""
        last = self._state.head.seq
        if head.seq > last:
            raise LedgerError(f"row {head.seq} was seen and the ledger ends at row {last}: it is an older copy")
        if self._state.hashes[head.seq] != head.hash:
            raise LedgerError(
                f"row {head.seq} is not the one that was seen: this is another ledger, or a rewritten one"
            )

    def require_own(self, run: str, head: Head | None, rounds: int) -> None:
        """Refuse if someone else has carried the run on since its owner saw this head, after so many rounds.

        Guarantee: of a run's directory and its copies only one goes on, since each opening has its own epoch.
        Checked: test_run.py::test_of_a_run_and_its_copy_one_goes_on.
        """
        self._require_open()
        epoch = 0 if head is None else next(self._store.rows(head.seq)).epoch
        later = self._store.rows() if head is None else self._store.rows(head.seq + 1)
        for row in tuple(later):
            if row.key is not None and row.key.run == run and (row.epoch > epoch or row.key.round > rounds):
                raise LedgerError(
                    f"run {run}: row {row.seq} is unknown to its directory, which is an older copy, or has one that "
                    f"went on"
                )

    def _step(self, kind: RowKind, key: Key, release: Release | None) -> Row:
        self._require_open()
        self._state.step(kind, key, release)
        return self._append(kind, key, "" if release is None else encode_release(release), self.spent())

    def _append(self, kind: RowKind, key: Key | None, body: str, epsilon: float) -> Row:
        row = _next_row(self._state, kind, key, body, epsilon)
        try:
            self._store.append(row, self._state.head)
        except BaseException:
            self.close()
            raise
        self._state.add(row)
        return row

    def _require_open(self) -> None:
        if self._closing is None:
            raise LedgerError("the ledger is closed")


def _refusal(charged: FilterDecision, budget: Budget) -> str:
    return charged.reason or f"epsilon would be {charged.composed_epsilon}, the budget is {budget.epsilon}"


def create_metered(path: Path, budget: Budget, meter: Meter) -> Ledger:
    """Make a ledger and open it, its runs charged by this meter."""
    path = path.resolve()
    charged = measure(meter, budget, budget.declared)
    if not charged.admitted:
        raise BudgetExceeded(f"the declared runs: {_refusal(charged, budget)}")
    with ExitStack() as undo:
        undo.callback((lock := Lock.take(path)).close)
        Store.create(path, first_row(budget))
        undo.pop_all()
    return _opened(path, meter, lock)


def open_metered(path: Path, lock: Callable[[Path], Lock], meter: Meter) -> Ledger:
    """Open a ledger under a lock that is taken in this way, its runs charged by this meter."""
    require_file(path)  # before the lock, which would leave a file beside a ledger that is not there
    return _opened(path.resolve(), meter, lock(path.resolve()))


def _opened(path: Path, meter: Meter, lock: Lock) -> Ledger:
    with ExitStack() as undo:
        undo.callback(lock.close)
        undo.callback((store := Store.open(path)).close)
        state = replay(store.rows())
        epsilon = measure(meter, state.budget, state.plans()).composed_epsilon
        if epsilon < state.epsilon * (1 - ROUNDING):
            raise LedgerError(
                f"the meter says {epsilon}, recorded is {state.epsilon}: it is not this budget's meter"
            )
        row = _next_row(state, RowKind.OPEN, None, "", epsilon)
        store.append(row, state.head)
        state.add(row)
        return Ledger(store, state, meter, undo.pop_all())


def _next_row(state: LedgerState, kind: RowKind, key: Key | None, body: str, epsilon: float) -> Row:
    epoch = state.epoch + (kind is RowKind.OPEN)
    return chained_row(state.head, epoch=epoch, kind=kind, key=key, body=body, epsilon=epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What a ledger that holds together says."""

    budget: Budget
    head: Head
    servers: int  # how often it was opened for writing
    committed: int
    void: int
    unfinished: int  # reserved and neither committed nor void: they count as charged
    runs: tuple[ChargedRun, ...]  # in the order of their beginning
    charged: dict[str, int]  # attempts of each run that may have been opened
    spent: float  # epsilon of all runs that are charged, each with all attempts it may take, composed anew
    units: int  # what the budget's filter has charged, in rounds of the first run; 0 where it does not count so
    of: int  # the budget in the same units


def read_rows(path: Path) -> tuple[Row, ...]:
    """Return all rows, after checking the chain and the rules; works while a server writes."""
    with closing(Store.read(path)) as store:
        rows = tuple(store.rows())
    replay(rows)
    return rows


def read_budget(path: Path) -> Budget:
    """Return the budget of a ledger, after checking the chain and the rules."""
    return Budget.decode(read_rows(path)[0].body)


def verify(path: Path) -> Verification:
    """Check a ledger from its rows alone; refuses the first row that is wrong, by number.

    Guarantee: numbers, hashes, epochs, the steps of each attempt and the uniqueness of its key follow the rules, no
    run has more attempts than it was charged for, each recorded epsilon is the one the charged runs have, and none is
    over the budget. Whether the last rows are missing shows only against a head that someone kept
    (`Ledger.require_head`). Checked: test_ledger_verify.py.

    Args:
        path: the ledger's file.

    Raises:
        LedgerError: if a row is wrong.
    """
    return verify_metered(path, charge_plans)


def verify_metered(path: Path, meter: Meter) -> Verification:
    """Check a ledger as `verify` does, its runs charged by this meter."""
    with closing(Store.read(path)) as store:
        rows = store.rows()
        state = replay(itertools.islice(rows, 1))
        charged = measure(meter, state.budget, ())
        for row in rows:
            state.add(row)
            # Attempts raise no epsilon, and the rules have held their rows to the epsilon before.
            if row.kind in (RowKind.OPEN, RowKind.BEGIN):
                charged = measure(meter, state.budget, state.plans())
                if abs(row.epsilon - charged.composed_epsilon) > ROUNDING * charged.composed_epsilon:
                    raise LedgerError(
                        f"row {row.seq}: it records epsilon {row.epsilon}, and the charged runs cost "
                        f"{charged.composed_epsilon}"
                    )
                if not charged.admitted:
                    raise LedgerError(f"row {row.seq}: the runs begun so far are over the budget")
    kinds = [attempt.kind for attempt in state.attempts.values()]
    return Verification(
        budget=state.budget,
        head=state.head,
        servers=state.epoch,
        committed=kinds.count(RowKind.COMMIT),
        void=kinds.count(RowKind.VOID),
        unfinished=kinds.count(RowKind.RESERVE),
        runs=tuple(state.runs.values()),
        charged={run: state.charged[run] for run in state.runs},
        spent=charged.composed_epsilon,
        units=sum(charged.units),
        of=charged.budget_units,
    )
