"""What the rows add up to: the rules of the ledger as a fold over its rows, the same for writing and verifying."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from d2pfed.accounting.release import Release
from d2pfed.errors import ConfigError, LedgerError
from d2pfed.ledger.rows import ROOT, Budget, Head, Key, Kind, Row


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt so far: its last kind of row, the server it belongs to, and the release it is charged for."""

    kind: Kind
    epoch: int
    release: Release


class Book:
    """The state after a number of rows; `add` refuses a row that breaks a rule and then changes nothing."""

    def __init__(self, first: Row) -> None:
        _check_chain(first, 0, ROOT)
        if (first.kind, first.epoch, first.key, first.epsilon) != (Kind.CREATE, 0, None, 0.0):
            raise LedgerError("row 0: it must create the ledger, in epoch 0 and at epsilon 0")
        self.budget = Budget.decode(first.body)
        self.epoch = 0
        self.epsilon = 0.0
        self.attempts: dict[Key, Attempt] = {}  # in the order of their reservations
        self.seqs: dict[tuple[Key, Kind], int] = {}
        self.hashes = [first.hash]

    @property
    def head(self) -> Head:
        """The last row's number and hash."""
        return Head(len(self.hashes) - 1, self.hashes[-1])

    def releases(self) -> tuple[Release, ...]:
        """Return what counts as spent: all that was committed, and all that was reserved and is not void."""
        return tuple(attempt.release for attempt in self.attempts.values() if attempt.kind is not Kind.VOID)

    def after(self, kind: Kind, key: Key, release: Release | None) -> tuple[Release, ...]:
        """Return what would count as spent after this step of an attempt; refuses a step that is not allowed."""
        attempts = self.attempts | {key: self._step(kind, key, release)}
        return tuple(attempt.release for attempt in attempts.values() if attempt.kind is not Kind.VOID)

    def add(self, row: Row) -> None:
        """Take the next row, or refuse it by number."""
        _check_chain(row, len(self.hashes), self.hashes[-1])
        try:
            if row.kind is Kind.OPEN:
                self._check_open(row)
            else:
                self._add_step(row)
        except (LedgerError, ConfigError) as error:
            raise LedgerError(f"row {row.seq}: {error}") from error
        self.epoch, self.epsilon = row.epoch, row.epsilon
        self.hashes.append(row.hash)

    def _check_open(self, row: Row) -> None:
        if row.epoch != self.epoch + 1:
            raise LedgerError(f"a server begins epoch {self.epoch + 1}, got {row.epoch}")
        if row.key is not None or row.body:
            raise LedgerError("a server's first row names no attempt and has no body")

    def _add_step(self, row: Row) -> None:
        if row.epoch != self.epoch:
            raise LedgerError(f"a server of epoch {row.epoch} wrote in epoch {self.epoch}")
        if row.key is None:
            raise LedgerError(f"{row.kind} needs the run, round and attempt it is about")
        if row.kind is Kind.VOID and row.body:
            raise LedgerError("a void attempt releases nothing, so its body must be empty")
        attempt = self._step(row.kind, row.key, row.release)
        if row.epsilon > self.budget.epsilon:
            raise LedgerError(f"epsilon {row.epsilon} is over the budget of {self.budget.epsilon}")
        if row.kind is Kind.COMMIT and row.epsilon > self.epsilon:
            raise LedgerError(f"epsilon {row.epsilon} is more than the {self.epsilon} with what was reserved")
        self.attempts[row.key] = attempt
        self.seqs[row.key, row.kind] = row.seq

    def _step(self, kind: Kind, key: Key, release: Release | None) -> Attempt:
        if release is not None and (release.round, release.attempt) != (key.round, key.attempt):
            raise LedgerError(f"{key} has a release of round {release.round}, attempt {release.attempt}")
        begun = self.attempts.get(key)
        if kind is Kind.RESERVE and begun is None and release is not None:
            return Attempt(kind, self.epoch, release)
        if begun is None or begun.kind is not Kind.RESERVE or kind not in (Kind.COMMIT, Kind.VOID):
            raise LedgerError(f"{key}: {kind} cannot follow {'nothing' if begun is None else begun.kind}")
        if begun.epoch != self.epoch:
            # The attempt's keys died with that server: it stays spent, and the round needs a new attempt.
            raise LedgerError(f"{key}: reserved in epoch {begun.epoch}, which epoch {self.epoch} cannot {kind}")
        if release is not None:
            _check_realised(release, begun.release)
        return replace(begun, kind=kind, release=begun.release if release is None else release)


def _check_chain(row: Row, seq: int, previous: bytes) -> None:
    if row.seq != seq:
        raise LedgerError(f"row {row.seq}: its number must be {seq}")
    if row.hash != row.chained(previous):
        raise LedgerError(f"row {row.seq}: its hash does not follow from it and the row before")
    if not row.epsilon >= 0:
        raise LedgerError(f"row {row.seq}: epsilon must be at least 0, got {row.epsilon}")


def _check_realised(realised: Release, reserved: Release) -> None:
    for name in ("unit", "adjacency", "sampling"):
        planned, real = getattr(reserved, name), getattr(realised, name)
        if planned != real:
            raise LedgerError(f"{name} was reserved as {planned}, and the commit says {real}")
    strangers = set(realised.participants) - set(reserved.participants)
    if reserved.participants and strangers:
        raise LedgerError(f"client {min(strangers)} takes part and was not among those reserved for")


def replay(rows: Sequence[Row]) -> Book:
    """Return the state after all rows, each checked; refuses the first that is wrong."""
    if not rows:
        raise LedgerError("it has no rows, so no budget")
    book = Book(rows[0])
    for row in rows[1:]:
        book.add(row)
    return book
