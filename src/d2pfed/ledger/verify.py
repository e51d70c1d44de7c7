"""Reading a ledger from outside: its rows, its budget, and a check of everything from the rows alone."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from d2pfed.accounting.filters import FilterDecision
from d2pfed.errors import LedgerError
from d2pfed.ledger.budget import Budget, ChargedRun, charge_plans
from d2pfed.ledger.ledger import ROUNDING, Meter, measure
from d2pfed.ledger.rows import Head, Row, RowKind
from d2pfed.ledger.state import LedgerState, replay
from d2pfed.ledger.store import Store


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
    rows = _rows(path)
    replay(rows)
    return rows


def read_budget(path: Path) -> Budget:
    """Return the budget of a ledger, after checking the chain and the rules."""
    return replay(_rows(path)).budget


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
        return _verified(store.rows(), meter)


def _verified(rows: Iterator[Row], meter: Meter) -> Verification:
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
    return _summary(state, charged)


def _rows(path: Path) -> tuple[Row, ...]:
    with closing(Store.read(path)) as store:
        return tuple(store.rows())


def _summary(state: LedgerState, charged: FilterDecision) -> Verification:
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
