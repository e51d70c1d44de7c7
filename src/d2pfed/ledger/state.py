"""What the rows add up to: the rules of the ledger as a fold over its rows, the same for writing and verifying."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from d2pfed.accounting.events import Release, Sampling
from d2pfed.errors import BudgetExceeded, ConfigError, LedgerError
from d2pfed.fields import check_arguments
from d2pfed.ledger.budget import Budget, ChargedRun, RunPlan, decode_body, require_no_worse
from d2pfed.ledger.rows import ROOT, Head, Key, Row, RowKind


@dataclass(frozen=True, slots=True)
class AttemptState:
    """An attempt so far: its last kind of row, the server it belongs to, and what it may have released."""

    kind: RowKind
    epoch: int
    release: Release


class LedgerState:
    """The state after a number of rows; `add` refuses a row that breaks a rule and then changes nothing."""

    def __init__(self, rows: Iterable[Row]) -> None:
        each = iter(rows)
        first = next(each, None)
        if first is None:
            raise LedgerError("it has no rows, so no budget")
        _check_chain(first, 0, ROOT)
        if (first.kind, first.epoch, first.key, first.epsilon) != (RowKind.CREATE, 0, None, 0.0):
            raise LedgerError("row 0: it must create the ledger, in epoch 0 and at epsilon 0")
        self.budget = decode_body(first.body, Budget)
        self.epoch = 0
        self.attempts: dict[Key, AttemptState] = {}  # in the order of their reservations
        self._epsilon = 0.0
        self._runs: dict[str, ChargedRun] = {}  # in the order of their beginning
        self._charged: Counter[str] = Counter()  # attempts of each run that are not void
        self._tried: Counter[tuple[str, int]] = Counter()  # attempts of each round of a run, void ones included
        # Charged attempts of a run that each client took part in, by run: counted once, with the attempt's rows.
        self._participations: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._hashes = [first.hash]
        for row in each:
            self.add(row)

    def head(self) -> Head:
        """Return the last row's number and hash, which a checkpoint carries."""
        return Head(len(self._hashes) - 1, self._hashes[-1])

    def require_head(self, head: Head) -> None:
        """Refuse if this ledger does not hold the row that someone has seen: it is an older copy, or another."""
        check_arguments(LedgerState.require_head, locals())
        last = self.head().seq
        if head.seq > last:
            raise LedgerError(f"row {head.seq} was seen and the ledger ends at row {last}: it is an older copy")
        if self._hashes[head.seq] != head.hash:
            raise LedgerError(
                f"row {head.seq} is not the one that was seen: this is another ledger, or a rewritten one"
            )

    def runs(self) -> tuple[ChargedRun, ...]:
        """Return the runs that are charged, in the order of their beginning."""
        return tuple(self._runs.values())

    def plans(self) -> tuple[RunPlan, ...]:
        """Return what was charged, in the order in which the runs began."""
        return tuple(begun.plan for begun in self._runs.values())

    def spent(self) -> float:
        """Return epsilon of all runs that are charged, each with all attempts that it may take, composed."""
        return self._epsilon

    def releases(self) -> tuple[Release, ...]:
        """Return what may have been released: all that was committed, and all that was reserved and is not void."""
        return tuple(attempt.release for attempt in self.attempts.values() if attempt.kind is not RowKind.VOID)

    def charged(self, run: str) -> int:
        """Return how many attempts of a run may have been opened; void ones are not among them."""
        check_arguments(LedgerState.charged, locals())
        return self._charged[run]

    def participations(self, run: str, clients: Iterable[int]) -> dict[int, int]:
        """Return in how many attempts of a run that may have been opened each client took part."""
        check_arguments(LedgerState.participations, locals())
        return {client: self._participations[run][client] for client in clients}

    def next_attempt(self, run: str, number: int) -> int:
        """Return the first attempt at round `number` of a run that no row mentions."""
        check_arguments(LedgerState.next_attempt, locals())
        return self._tried[run, number]

    def require_plan(self, run: str, plan: bytes) -> None:
        """Refuse a plan, by its digest, that is not the one a run was charged for: another has another cap."""
        check_arguments(LedgerState.require_plan, locals())
        begun = self._runs.get(run)
        if begun is None:
            raise LedgerError(f"run {run} has not begun")
        if begun.plan.plan != plan:
            raise LedgerError(f"run {run} was charged for another plan: what another allows is not counted")

    def add(self, row: Row) -> None:
        """Take the next row, or refuse it by number."""
        _check_chain(row, len(self._hashes), self._hashes[-1])
        try:
            self._take(row)
        except (LedgerError, ConfigError, BudgetExceeded) as error:
            raise LedgerError(f"row {row.seq}: {error}") from error
        self.epoch, self._epsilon = row.epoch, row.epsilon
        self._hashes.append(row.hash)

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
                begun = decode_body(row.body, ChargedRun)
                self.check_begin(begun)
                self._runs[begun.run] = begun
            case _:
                self._add_step(row)

    def check_begin(self, begun: ChargedRun) -> None:
        """Refuse a run that has begun, or whose guarantee is not of the budget's kind."""
        if begun.run in self._runs:
            raise LedgerError(f"run {begun.run} has begun already")
        if other := next((each.run for each in self._runs.values() if each.owner == begun.owner), None):
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
                raise LedgerError(f"{key} has a row: take attempt {self._tried[key.run, key.round]}")
            self._check_attempt(key, release)
            self._check_block(key, release, ())
            return AttemptState(kind, self.epoch, release)
        if begun is None or begun.kind is not RowKind.RESERVE or kind not in (RowKind.COMMIT, RowKind.VOID):
            raise LedgerError(f"{key}: {kind} cannot follow {'nothing' if begun is None else begun.kind}")
        if begun.epoch != self.epoch:
            # The attempt's keys died with that server: it stays charged, and the round needs a new attempt.
            raise LedgerError(f"{key}: reserved in epoch {begun.epoch}, which epoch {self.epoch} cannot {kind}")
        if release is None:
            return AttemptState(kind, begun.epoch, begun.release)
        reserved = begun.release.participants
        require_no_worse(release, begun.release)
        is_other = reserved and release.participants != reserved
        if is_other and (strangers := set(release.participants).difference(reserved)):
            raise LedgerError(f"client {min(strangers)} takes part and was not among those reserved for")
        self._check_block(key, release, reserved)
        return AttemptState(kind, begun.epoch, release)

    def _add_step(self, row: Row) -> None:
        if row.key is None:
            raise LedgerError(f"{row.kind} needs the run, round and attempt it is about")
        if row.kind is RowKind.VOID and row.body:
            raise LedgerError("a void attempt releases nothing, so its body must be empty")
        if row.epsilon != self._epsilon:
            raise LedgerError(f"an attempt adds no epsilon: it must stay {self._epsilon}, got {row.epsilon}")
        before, after = self.attempts.get(row.key), self.step(row.kind, row.key, row.release)
        self.attempts[row.key] = after
        if before is None:
            self._tried[row.key.run, row.key.round] += 1
            self._charged[row.key.run] += 1
        if row.kind is RowKind.VOID:
            self._charged[row.key.run] -= 1
        counted = () if before is None else before.release.participants
        real = () if row.kind is RowKind.VOID else after.release.participants
        participations = self._participations[row.key.run]
        if not counted:
            participations.update(real)
        elif counted != real:  # neither names a client twice
            gone = set(counted).difference(real)
            participations.subtract(gone)
            if len(gone) + len(real) != len(counted):  # some are new
                participations.update(set(real).difference(counted))

    def _check_attempt(self, key: Key, release: Release) -> None:
        """Refuse an attempt that its run was not charged for."""
        if key.run not in self._runs:
            raise LedgerError(f"run {key.run} has not begun")
        plan, due = self._runs[key.run].plan, self._tried[key.run, key.round]
        if key.round >= plan.rounds:
            raise LedgerError(f"{key}: the run has {plan.rounds} rounds, counted from 0")
        if key.attempt != due:
            raise LedgerError(f"{key}: the next attempt at this round is {due}")
        if key.attempt >= plan.attempts_per_round:
            raise BudgetExceeded(f"{key}: a round may be tried {plan.attempts_per_round} times")
        if self._charged[key.run] >= plan.max_attempts:
            raise BudgetExceeded(
                f"{key}: all of the {plan.max_attempts} attempts that the run may take are charged"
            )
        require_no_worse(release, plan.release)

    def _check_block(self, key: Key, release: Release, counted: Sequence[int]) -> None:
        """Refuse a client's second charged attempt under `once`: the run was charged for one of each client's."""
        if release.sampling.method is Sampling.ONCE:
            new = set(release.participants).difference(counted)
            if again := [client for client in new if self._participations[key.run][client]]:
                raise LedgerError(f"{key}: `once` uses each client once, and client {min(again)} has contributed")


def _check_chain(row: Row, seq: int, previous: bytes) -> None:
    if row.seq != seq:
        raise LedgerError(f"row {row.seq}: its number must be {seq}")
    if row.hash != row.chained(previous):
        raise LedgerError(f"row {row.seq}: its hash does not follow from it and the row before")
    if not row.epsilon >= 0:
        raise LedgerError(f"row {row.seq}: epsilon must be at least 0, got {row.epsilon}")
