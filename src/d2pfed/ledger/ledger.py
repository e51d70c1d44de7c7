"""The ledger a server writes: reserve before vectors are asked for, commit before they are unmasked."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from d2pfed.accounting.release import Release
from d2pfed.errors import BudgetExceeded, LedgerError
from d2pfed.ledger.book import Book, replay
from d2pfed.ledger.lock import Lock
from d2pfed.ledger.rows import Budget, Head, Key, Kind, Row, chained_row, first_row
from d2pfed.ledger.store import Store, require_file
from d2pfed.ledger.text import encode_release

Meter = Callable[
    [Sequence[Release]], float
]  # epsilon of releases for the budget's observer and delta; errs upwards

ROUNDING = (
    1e-6  # relative: meters are pure functions, and only the rounding of another machine's libraries differs
)


def measure(meter: Meter, releases: Sequence[Release]) -> float:
    """Return epsilon of the releases; refuses a meter that answers with nan or a negative number."""
    epsilon = float(meter(releases)) if releases else 0.0
    if math.isnan(epsilon) or epsilon < 0:
        raise LedgerError(f"the meter must return an epsilon of at least 0, got {epsilon}")
    return epsilon


class Ledger:
    """The budget of a population, drawn on by all runs over its clients and written by one server at a time.

    Each opening starts an epoch. An attempt belongs to the epoch that reserved it: after a crash it can be neither
    committed nor void nor replayed; it stays spent, and the round goes on with `next_attempt`. After an error in
    writing, nobody knows whether the row is on the disk: the ledger closes itself, and only a new opening tells.
    """

    def __init__(self, store: Store, book: Book, meter: Meter, closing: ExitStack) -> None:
        self._store = store
        self._book = book
        self._meter = meter
        self._closing: ExitStack | None = closing

    @staticmethod
    def create(path: Path, budget: Budget, meter: Meter) -> "Ledger":
        """Make a ledger with this budget and open it; refuses if there is one."""
        path = path.resolve()
        with ExitStack() as undo:
            undo.callback((lock := Lock.take(path)).close)
            Store.create(path, first_row(budget))
            undo.pop_all()
        return _begin(path, meter, lock)

    @staticmethod
    def open(path: Path, meter: Meter) -> "Ledger":
        """Open a ledger; refuses at once if another server has it open."""
        return _begin(path.resolve(), meter, Lock.take(_existing(path)))

    @staticmethod
    def open_in_turn(path: Path, meter: Meter) -> "Ledger":
        """Open a ledger as soon as no other server has it open."""
        return _begin(path.resolve(), meter, Lock.wait(_existing(path)))

    @staticmethod
    def take_over(path: Path, meter: Meter) -> "Ledger":
        """Open a ledger although another server has it open, and shut that one out.

        Guarantee: the other server, even if it was only asleep, commits nothing more.
        Checked: test_ledger_races.py::test_a_stopped_server_cannot_commit_after_a_takeover.
        """
        return _begin(path.resolve(), meter, Lock.replace(_existing(path)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the next server in; unfinished attempts stay spent."""
        closing, self._closing = self._closing, None
        if closing is not None:
            closing.close()

    @property
    def budget(self) -> Budget:
        """What may be spent."""
        return self._book.budget

    def reserve(self, run: str, release: Release) -> Row:
        """Record the most an attempt can cost, before the first masked vector is asked for.

        Guarantee: when this returns, the release counts as spent, whatever happens to this process, and with it
        epsilon is within the budget. Checked: test_ledger_crashes.py::test_no_kill_loses_a_release.
        """
        return self._step(Kind.RESERVE, Key(run, release.round, release.attempt), release)

    def commit(self, run: str, release: Release) -> Row:
        """Record what an attempt releases, before the request that unmasks it.

        Guarantee: as `reserve`, and the realised release costs no more than what was reserved for it.
        """
        return self._step(Kind.COMMIT, Key(run, release.round, release.attempt), release)

    def void(self, run: str, number: int, attempt: int) -> Row:
        """Record that an attempt at round `number` ended before anything could be unmasked: it costs nothing."""
        return self._step(Kind.VOID, Key(run, number, attempt), None)

    def releases(self) -> tuple[Release, ...]:
        """Return what counts as spent: all that was committed, and all that was reserved and is not void."""
        return self._book.releases()

    def spent(self) -> float:
        """Return epsilon of `releases`."""
        return self._book.epsilon

    def next_attempt(self, run: str, number: int) -> int:
        """Return the first attempt at round `number` of a run that no row mentions."""
        begun = [key.attempt for key in self._book.attempts if (key.run, key.round) == (run, number)]
        return max(begun, default=-1) + 1

    def head(self) -> Head:
        """Return the last row's number and hash, which a checkpoint carries."""
        return self._book.head

    def require_head(self, head: Head) -> None:
        """Refuse if this ledger does not hold the row that someone has seen: it is an older copy, or another."""
        last = self._book.head.seq
        if head.seq > last:
            raise LedgerError(f"row {head.seq} was seen and the ledger ends at row {last}: it is an older copy")
        if self._book.hashes[head.seq] != head.hash:
            raise LedgerError(
                f"row {head.seq} is not the one that was seen: this is another ledger, or a rewritten one"
            )

    def rows_since(self, head: Head) -> tuple[Row, ...]:
        """Return the rows of attempts after a head: those that a checkpoint with that head knows nothing of."""
        self.require_head(head)
        self._require_open()
        return tuple(row for row in self._store.rows(head.seq + 1) if row.key is not None)

    def _step(self, kind: Kind, key: Key, release: Release | None) -> Row:
        self._require_open()
        body = "" if release is None else encode_release(release)
        if (key, kind) in self._book.seqs:
            return self._replayed(kind, key, body)
        after = self._book.after(kind, key, release)
        # The last row was measured over all that counts now, and a meter is a pure function: a commit of exactly
        # what was reserved costs the same.
        epsilon = self.spent() if after == self._book.releases() else measure(self._meter, after)
        if epsilon > self.budget.epsilon:
            raise BudgetExceeded(f"{key}: epsilon would be {epsilon}, the budget is {self.budget.epsilon}")
        if kind is Kind.COMMIT and epsilon > self.spent():
            raise BudgetExceeded(f"{key}: epsilon would be {epsilon}, with what was reserved it is {self.spent()}")
        return self._append(_next_row(self._book, kind, key, body, epsilon))

    def _replayed(self, kind: Kind, key: Key, body: str) -> Row:
        attempt, seq = self._book.attempts[key], self._book.seqs[key, kind]
        if attempt.epoch != self._book.epoch:
            # The same call after a restart is a new attempt with new noise: under the old row it would be free.
            raise LedgerError(
                f"{key}: an earlier server began it, take attempt {self.next_attempt(key.run, key.round)}"
            )
        (row, *_) = self._store.rows(seq)
        if row.body != body:
            raise LedgerError(f"{key}: {kind} was recorded in row {seq} with another release")
        return row

    def _append(self, row: Row) -> Row:
        try:
            self._store.append(row, self._book.head)
        except BaseException:
            self.close()
            raise
        self._book.add(row)
        return row

    def _require_open(self) -> None:
        if self._closing is None:
            raise LedgerError("the ledger is closed")


def _existing(path: Path) -> Path:
    require_file(path)  # before the lock, which would leave a file beside a ledger that is not there
    return path.resolve()


def _begin(path: Path, meter: Meter, lock: Lock) -> Ledger:
    with ExitStack() as undo:
        undo.callback(lock.close)
        undo.callback((store := Store.open(path)).close)
        book = replay(store.rows())
        epsilon = measure(meter, book.releases())
        if epsilon < book.epsilon * (1 - ROUNDING):
            raise LedgerError(
                f"the meter says {epsilon}, recorded is {book.epsilon}: it is not this budget's meter"
            )
        row = _next_row(book, Kind.OPEN, None, "", epsilon)
        store.append(row, book.head)
        book.add(row)
        return Ledger(store, book, meter, undo.pop_all())


def _next_row(book: Book, kind: Kind, key: Key | None, body: str, epsilon: float) -> Row:
    epoch = book.epoch + (kind is Kind.OPEN)
    return chained_row(book.head, epoch=epoch, kind=kind, key=key, body=body, epsilon=epsilon)
