"""The ledger a server writes, a run charged when it begins, each attempt before it can reveal; and its check."""

import itertools
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from d2pfed.accounting.events import Release
from d2pfed.accounting.filters import FilterDecision
from d2pfed.errors import BudgetExceeded, LedgerError
from d2pfed.fields import check_arguments
from d2pfed.ledger.budget import Budget, ChargedRun, RunPlan, charge_plans, decode_body
from d2pfed.ledger.rows import Head, Key, Row, RowKind, chained_row, encode_release, first_row
from d2pfed.ledger.state import LedgerState
from d2pfed.ledger.store import Store, replace_lock, require_file, take_lock
from d2pfed.numerics import canonical

# Whether whole runs, in the order in which they began, are within a budget, and what they cost; errs upwards.
Meter = Callable[[Budget, Sequence[RunPlan]], FilterDecision]

ROUNDING = 1e-6  # relative: meters are pure functions, only the rounding of another machine's libraries differs


def measure(meter: Meter, budget: Budget, plans: Sequence[RunPlan]) -> FilterDecision:
    """Return what the runs cost; refuses a meter that answers with nan or a negative number."""
    if not plans:
        return FilterDecision(admitted=True, units=(), budget_units=0, composed_epsilon=0.0)
    charged = meter(budget, plans)
    if not isinstance(charged, FilterDecision):
        raise LedgerError(f"the meter must return a FilterDecision, got {type(charged).__name__}")
    if math.isnan(charged.composed_epsilon) or charged.composed_epsilon < 0:
        raise LedgerError(f"the meter must return an epsilon of at least 0, got {charged.composed_epsilon}")
    return charged


class Ledger(LedgerState, AbstractContextManager["Ledger"]):
    """The budget of a population, drawn on by all runs over its clients and written by one server at a time.

    A run is charged once, when it begins, for all attempts that it may take; its attempts are recorded and counted.
    Each opening starts an epoch. An attempt belongs to the epoch that reserved it: after a crash it can be neither
    committed nor void; it stays charged, and the round goes on with `next_attempt`. After an error in writing, nobody
    knows whether the row is on the disk: the ledger closes itself, and only a new opening tells.

    Examples:
        >>> with Ledger.create("clients.sqlite", Budget(2.0, 1e-5, SERVER)) as ledger:
        ...     ledger.spent(), ledger.runs()
        (0.0, ())
    """

    def __init__(self, path: Path, meter: Meter, lock: int) -> None:
        self._meter = meter
        self._closing: ExitStack | None = None
        with ExitStack() as undo:
            undo.callback(os.close, lock)
            self._store = Store(path)
            undo.callback(self._store.close)
            super().__init__(self._store.rows())
            epsilon = measure(meter, self.budget, self.plans()).composed_epsilon
            if epsilon < self.spent() * (1 - ROUNDING):
                raise LedgerError(
                    f"the meter says {epsilon}, recorded is {self.spent()}: it is not this budget's meter"
                )
            self._closing = undo.pop_all()
        self._append(RowKind.OPEN, None, "", epsilon)

    @staticmethod
    def create(path: Path | str, budget: Budget, meter: Meter = charge_plans) -> "Ledger":
        """Make a ledger with this budget and open it; refuses if there is one."""
        check_arguments(Ledger.create, locals())
        if not Path(path).name or "\0" in str(path):
            raise LedgerError(f"a ledger must be a file, got {str(path)!r}")
        path = Path(path).resolve()
        charged = measure(meter, budget, budget.declared)
        if not charged.admitted:
            raise BudgetExceeded(f"the declared runs: {_refusal(charged, budget)}")
        with ExitStack() as undo:
            undo.callback(os.close, lock := take_lock(path))
            Store.create(path, first_row(budget))
            undo.pop_all()
        return Ledger(path, meter, lock)

    @staticmethod
    def open(
        path: Path | str, *, wait: bool = False, take_over: bool = False, meter: Meter = charge_plans
    ) -> "Ledger":
        """Open a ledger; refuses at once if another server has it open, unless it is to wait or to take over.

        Guarantee: a server that was taken over from, even if it was only asleep, commits nothing more.
        Checked: test_ledger_races.py::test_a_stopped_server_cannot_commit_after_a_takeover.
        """
        check_arguments(Ledger.open, locals())
        path = Path(path)
        require_file(path)  # before the lock, which would leave a file beside a ledger that is not there
        path = path.resolve()
        return Ledger(path, meter, replace_lock(path) if take_over else take_lock(path, wait=wait))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the next server in; unfinished attempts stay charged."""
        closing, self._closing = self._closing, None
        if closing is not None:
            closing.close()

    def begin(self, run: str, owner: str, plan: RunPlan, *, software: str = "", repeatable: bool = False) -> None:
        """Charge a run for all attempts that it may take, or find that it was charged; it belongs to one owner.

        `software` is the digest of what begins it; `repeatable` says that its noise follows from a seed.

        Guarantee: when this returns, all that the run may release is within the budget, whatever is chosen from
        what was seen: which runs, when they stop, which attempts are repeated.
        Checked: test_ledger.py::test_a_run_is_charged_wholly_when_it_begins.
        """
        self._require_open()
        check_arguments(Ledger.begin, locals())
        begun, found = ChargedRun(run, owner, plan, software, repeatable), self._runs.get(run)
        if found is not None:
            if found.owner != owner:
                raise LedgerError(f"run {run} was begun by another directory: choose another name")
            if found.plan != plan:
                raise LedgerError(f"run {run} was begun with another plan: choose another name")
            if found.repeatable != repeatable:
                source = "a seed" if found.repeatable else "the system's entropy"
                raise LedgerError(f"run {run} was begun with noise from {source}: choose another name")
            return
        self.check_begin(begun)
        charged = measure(self._meter, self.budget, (*self.plans(), plan))
        if not charged.admitted:
            raise BudgetExceeded(f"run {run}: {_refusal(charged, self.budget)}")
        self._append(RowKind.BEGIN, None, canonical.encode(begun), charged.composed_epsilon)

    def reserve(self, release: Release) -> Row:
        """Record an attempt at its worst, before the first masked vector is asked for.

        Guarantee: when this returns, the attempt counts as one of those that its run was charged for, whatever
        happens to this process. Checked: test_ledger_crashes.py::test_no_kill_loses_a_release.
        """
        check_arguments(Ledger.reserve, locals())
        return self._step(RowKind.RESERVE, Key(release.run, release.round, release.attempt), release)

    def commit(self, release: Release) -> Row:
        """Record what an attempt releases, before the request that unmasks it.

        Guarantee: as `reserve`, and the realised release tells no more than what was reserved for it.
        """
        check_arguments(Ledger.commit, locals())
        return self._step(RowKind.COMMIT, Key(release.run, release.round, release.attempt), release)

    def void(self, run: str, number: int, attempt: int) -> Row:
        """Record that an attempt at round `number` ended before anything could be unmasked: it does not count."""
        check_arguments(Ledger.void, locals())
        return self._step(RowKind.VOID, Key(run, number, attempt), None)

    def require_own(self, run: str, head: Head | None, rounds: int) -> None:
        """Refuse if someone else has carried the run on since its owner saw this head, after this many rounds.

        Guarantee: of a run's directory and its copies only one goes on, since each opening has its own epoch.
        Checked: test_run.py::test_of_a_run_and_its_copy_one_goes_on.
        """
        self._require_open()
        check_arguments(Ledger.require_own, locals())
        epoch = 0 if head is None else next(self._store.rows(head.seq)).epoch
        later = self._store.rows() if head is None else self._store.rows(head.seq + 1)
        for row in tuple(later):
            if row.key is not None and row.key.run == run and (row.epoch > epoch or row.key.round > rounds):
                raise LedgerError(
                    f"run {run}: its directory does not know row {row.seq}: it is an older copy, or another copy has "
                    f"continued"
                )

    def _step(self, kind: RowKind, key: Key, release: Release | None) -> Row:
        self._require_open()
        self.step(kind, key, release)
        return self._append(kind, key, "" if release is None else encode_release(release), self.spent())

    def _append(self, kind: RowKind, key: Key | None, body: str, epsilon: float) -> Row:
        head, epoch = self.head(), self.epoch + (kind is RowKind.OPEN)
        row = chained_row(head, epoch=epoch, kind=kind, key=key, body=body, epsilon=epsilon)
        try:
            self._store.append(row, head)
        except BaseException:
            self.close()
            raise
        self.add(row)
        return row

    def _require_open(self) -> None:
        if self._closing is None:
            raise LedgerError("the ledger is closed")


def _refusal(charged: FilterDecision, budget: Budget) -> str:
    return charged.reason or f"epsilon would be {charged.composed_epsilon}, the budget is {budget.epsilon}"


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
    spent: float  # epsilon of all runs that are charged, each with all attempts it may take, composed again
    units: int  # what the budget's filter has charged, in rounds of the first run; 0 where it does not count so
    of: int  # the budget in the same units


def read_rows(path: Path) -> tuple[Row, ...]:
    """Return all rows, after checking the chain and the rules; works while a server writes."""
    with closing(Store.read(path)) as store:
        rows = tuple(store.rows())
    LedgerState(rows)
    return rows


def read_budget(path: Path) -> Budget:
    """Return the budget of a ledger, after checking the chain and the rules."""
    return decode_body(read_rows(path)[0].body, Budget)


def verify(path: Path | str, meter: Meter = charge_plans) -> Verification:
    """Check a ledger from its rows alone; refuses the first row that is wrong, by number.

    Guarantee: numbers, hashes, epochs, the steps of each attempt and the uniqueness of its key follow the rules, no
    run has more attempts than it was charged for, each recorded epsilon is the one the charged runs have, and none is
    over the budget. Whether the last rows are missing shows only against a head that someone kept
    (`Ledger.require_head`). Checked: test_ledger_verify.py.

    Args:
        path: the ledger's file.
        meter: what charged its runs.

    Raises:
        LedgerError: if a row is wrong.

    Examples:
        >>> Ledger.create("verified.sqlite", Budget(2.0, 1e-5, SERVER)).close()
        >>> verify("verified.sqlite").committed
        0
    """
    check_arguments(verify, locals())
    with closing(Store.read(Path(path))) as store:
        rows = store.rows()
        state = LedgerState(itertools.islice(rows, 1))
        charged = measure(meter, state.budget, ())
        for row in rows:
            state.add(row)
            # Attempts raise no epsilon, and the rules have held their rows to the epsilon before.
            if row.kind in (RowKind.OPEN, RowKind.BEGIN):
                charged = measure(meter, state.budget, state.plans())
                if abs(row.epsilon - charged.composed_epsilon) > ROUNDING * charged.composed_epsilon:
                    raise LedgerError(
                        f"row {row.seq}: it records epsilon {row.epsilon}, but the charged runs cost "
                        f"{charged.composed_epsilon}"
                    )
                if not charged.admitted:
                    raise LedgerError(f"row {row.seq}: the runs begun so far exceed the budget")
    kinds = [attempt.kind for attempt in state.attempts.values()]
    return Verification(
        budget=state.budget,
        head=state.head(),
        servers=state.epoch,
        committed=kinds.count(RowKind.COMMIT),
        void=kinds.count(RowKind.VOID),
        unfinished=kinds.count(RowKind.RESERVE),
        runs=state.runs(),
        charged={begun.run: state.charged(begun.run) for begun in state.runs()},
        spent=charged.composed_epsilon,
        units=sum(charged.units),
        of=charged.budget_units,
    )
