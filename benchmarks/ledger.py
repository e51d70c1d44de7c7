"""What a long ledger costs: opening it, verifying it, and recording the next attempt."""

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from d2pfed.accounting import RELEASED, Adjacency, CohortSampling, DiscreteGaussianSum, Release, Sampling, Unit
from d2pfed.ledger import Budget, Head, Key, Ledger, RowKind, RunPlan, encode_release, verify
from d2pfed.ledger.rows import chained_row

RELEASES = (10_000, 100_000)
_COHORT, _QUORUM, _POPULATION, _MAX_PARTICIPATIONS = 100, 95, 100_000, 1_000
_REPEATS = 15
_GOALS = {10_000: (1.5, 0.03), 100_000: (10.0, 0.03)}  # seconds to open, and to record an attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """Processor seconds of one operation on a ledger that holds so many releases."""

    what: str
    releases: int
    seconds: float
    goal: float | None

    @property
    def met(self) -> bool | None:
        """Whether the goal was reached, where there is one."""
        return None if self.goal is None else self.seconds <= self.goal


def bench_ledger(sizes: Sequence[int] = RELEASES) -> Iterator[LedgerRow]:
    """Yield, for each number of releases, what opening, reserving, committing and verifying take."""
    for releases in sizes:
        with TemporaryDirectory() as place:
            yield from _measured(Path(place) / "ledger", releases)


def _measured(path: Path, releases: int) -> Iterator[LedgerRow]:
    fill(path, releases)
    goal_open, goal_step = _GOALS.get(releases, (None, None))
    opened: list[Ledger] = []
    yield LedgerRow(
        what="open", releases=releases, seconds=_seconds(lambda: opened.append(Ledger.open(path))), goal=goal_open
    )
    reserves, commits = [], []
    with opened[0] as ledger:
        for number in range(releases, releases + _REPEATS):
            planned, real = _release(number, _COHORT, _QUORUM), _release(number, _COHORT, _COHORT)
            reserves.append(_seconds(partial(ledger.reserve, planned)))
            commits.append(_seconds(partial(ledger.commit, real)))
    yield LedgerRow(what="reserve", releases=releases, seconds=median(reserves), goal=goal_step)
    yield LedgerRow(what="commit", releases=releases, seconds=median(commits), goal=goal_step)
    yield LedgerRow(what="verify", releases=releases, seconds=_seconds(lambda: verify(path)), goal=None)


def fill(path: Path, releases: int) -> None:
    """Make a ledger in which one run has released so much, two rows for each attempt, and may go on."""
    most = releases + _REPEATS
    plan = RunPlan(
        plan=bytes(32),
        release=replace(_release(0, 0, _QUORUM), run=""),
        rounds=most,
        max_attempts=most,
        attempts_per_round=1,
        max_participations=_MAX_PARTICIPATIONS,
        epsilon=1e6,
        delta=1e-6,
        observer=RELEASED,
    )
    with Ledger.create(path, Budget(1e6, 1e-6, RELEASED, _MAX_PARTICIPATIONS)) as ledger:
        ledger.begin("run", "owner", plan)
        head, epsilon = ledger.head(), ledger.spent()
    rows = list(_attempts(head, epsilon, releases))
    with closing(sqlite3.connect(path)) as connection, connection:  # one transaction, which no ledger offers
        connection.executemany("INSERT INTO entry VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)


def _attempts(head: Head, epsilon: float, releases: int) -> Iterator[tuple[object, ...]]:
    for number in range(releases):
        survivors = _COHORT - number % 5
        for kind, release in (
            (RowKind.RESERVE, _release(number, _COHORT, _QUORUM)),
            (RowKind.COMMIT, _release(number, survivors, survivors)),
        ):
            key, body = Key("run", number, 0), encode_release(release)
            row = chained_row(head, epoch=1, kind=kind, key=key, body=body, epsilon=epsilon)
            yield row.seq, 1, kind.value, key.run, key.round, key.attempt, body, epsilon.hex(), row.hash
            head = row.head


def _release(number: int, participants: int, contributors: int) -> Release:
    first = 37 * number % 1000
    return Release(
        run="run",
        round=number,
        attempt=0,
        unit=Unit.CLIENT,
        adjacency=Adjacency.REPLACE_ONE,
        sampling=CohortSampling(Sampling.FIXED, _POPULATION, _COHORT),
        noise=DiscreteGaussianSum(Fraction(400), contributors, Fraction(1000), 19_354),
        participants=tuple(range(first, first + 990 * participants, 990)),
    )


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
