"""Charging loops that are killed, stopped, starved and raced, and the checks that no release is ever lost.

As a program (`campaign_ledger.py kills 300 DIRECTORY`) it prints one JSON object and fails if a count that must be
zero is not. The tests start it in a process of its own, since it forks.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

from d2pfed.accounting import RELEASED
from d2pfed.accounting.events import Adjacency, CohortSampling, Release, Sampling, Unit
from d2pfed.accounting.filters import FilterDecision
from d2pfed.accounting.laws import DiscreteGaussianSum
from d2pfed.errors import BudgetExceeded, LedgerError
from d2pfed.ledger import Budget, Head, Ledger, Row, RowKind, RunPlan, read_rows, store, verify
from d2pfed.ledger.rows import chained_row
from d2pfed.ledger.store import Store
from d2pfed.numerics.randomness import Entropy, Stream

QUORUM = 8
KILLS_PER_LEDGER = 10
PATIENCE = 4  # attempts that a racer may lose to those who shut it out, for each that it needs
ATTEMPTS = 1 << 20  # that the charging loops' run may take
MUST_BE_ZERO = ("lost", "without_row", "failed", "over_budget", "committed_by_sleepers", "unexplained")
WATCHERS: list[int] = []  # descriptors that get a byte for each event
APPEND = Store.append
CALLS = (
    "pwrite64",
    "fdatasync",
    "fsync",
    "ftruncate",
    "rename",
    "unlink",
)  # all that changes a file or makes it durable


class OutsideError(Exception):
    """The world outside could not be told: an error of the loop around the ledger."""


def release(number: int, attempt: int = 0, contributors: int = QUORUM, run: str = "run") -> Release:
    """Return a release; one with the quorum's contributors is what a run of `plan_of` is charged for."""
    return Release(
        run=run,
        round=number,
        attempt=attempt,
        unit=Unit.CLIENT,
        adjacency=Adjacency.REPLACE_ONE,
        sampling=CohortSampling(Sampling.FIXED, 1000, 16),
        noise=DiscreteGaussianSum(Fraction(7, 2), contributors, Fraction(3), 100),
        participants=(),
    )


def plan_of(attempts: int, contributors: int = QUORUM) -> RunPlan:
    """Return a run of so many attempts, any of which may be of any round; each costs `additive` 1 / contributors."""
    return RunPlan(
        plan=b"plan",
        release=release(0, contributors=contributors, run=""),
        rounds=attempts,
        max_attempts=attempts,
        attempts_per_round=attempts,
        max_participations=1,
        epsilon=1.0,
        delta=1e-5,
        observer=RELEASED,
    )


def additive(budget: Budget, plans: Sequence[RunPlan]) -> FilterDecision:
    """A meter whose sums are exact for powers of two: each attempt that a run may take costs 1 / contributors."""
    total = sum(Fraction(plan.max_attempts, plan.release.noise.contributors) for plan in plans)
    return FilterDecision(
        admitted=total <= budget.epsilon, units=(), budget_units=0, composed_epsilon=float(total)
    )


def begun(path: Path, budget: Budget, attempts: int | None = None) -> Ledger:
    """Make a ledger in which one run has begun: by default one that may take all that there is."""
    ledger = Ledger.create(path, budget, additive)
    ledger.begin("run", "owner", plan_of(int(budget.epsilon * QUORUM) if attempts is None else attempts))
    return ledger


def ledger_in(directory: Path) -> Ledger:
    """Open the directory's ledger, or make it, and begin its run or find that it has begun."""
    path = directory / "ledger"
    if path.exists():
        ledger = Ledger.open(path, wait=True, meter=additive)
    else:
        ledger = Ledger.create(path, Budget(1e6, 1e-5), additive)
    ledger.begin("run", "owner", plan_of(ATTEMPTS))
    return ledger


def tell(directory: Path, what: str, number: int, attempt: int) -> None:
    """Let the world outside see something, for good."""
    try:
        with (directory / "outside").open("a") as outside:
            outside.write(f"{what} {number} {attempt}\n")
            outside.flush()
            os.fsync(outside.fileno())
    except OSError as error:
        raise OutsideError from error
    for watcher in WATCHERS:
        os.write(watcher, b".")


def told(directory: Path, what: str) -> list[tuple[int, int]]:
    """Return the (round, attempt) of all that the world outside has seen."""
    path = directory / "outside"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(int(number), int(attempt)) for kind, number, attempt in map(str.split, lines) if kind == what]


def charge_then_release(directory: Path, rounds: int) -> None:
    """The right order; every third attempt ends void before anything is unmasked."""
    with ledger_in(directory) as ledger:
        number = len(told(directory, "release"))
        for count in range(rounds):
            attempt = ledger.next_attempt("run", number)
            ledger.reserve(release(number, attempt))
            tell(directory, "reserved", number, attempt)
            if count % 3 == 1:
                tell(directory, "voiding", number, attempt)
                ledger.void("run", number, attempt)
                continue
            ledger.commit(release(number, attempt, 2 * QUORUM))
            tell(directory, "release", number, attempt)
            number += 1


def visits(directory: Path, count: int) -> None:
    """Open, charge once and close, again and again."""
    for _ in range(count):
        charge_then_release(directory, 1)


def release_then_charge(directory: Path, rounds: int) -> None:
    """The planted bug: the world outside sees the sum before the ledger has its row."""
    with ledger_in(directory) as ledger:
        number = len(told(directory, "release"))
        for _ in range(rounds):
            attempt = ledger.next_attempt("run", number)
            tell(directory, "release", number, attempt)
            ledger.reserve(release(number, attempt))
            ledger.commit(release(number, attempt, 2 * QUORUM))
            number += 1


def lost(directory: Path) -> int:
    """Return how many things the world outside saw are not in the ledger; raises if it does not hold together."""
    path = directory / "ledger"
    releases, reserved, voiding = (set(told(directory, what)) for what in ("release", "reserved", "voiding"))
    if not path.exists():
        return len(releases) + len(reserved)
    rows = read_rows(path)
    keys = {
        kind: {(row.key.round, row.key.attempt) for row in rows if row.key and row.kind is kind}
        for kind in RowKind
    }
    missing = len(releases - keys[RowKind.COMMIT]) + len(reserved - keys[RowKind.RESERVE])
    charged = verify(path, additive).charged.get("run", 0)
    if not missing and charged < len(releases | (reserved - voiding)):
        raise AssertionError(f"the ledger counts {charged} attempts, outside are {len(releases)}")
    return missing


def forked(work: Callable[[], None]) -> int:
    """Start a process that does the work and ends with 0, or with 1 and the error on standard error."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - a fork must never return into its parent's code
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    return child


def killed(loop: Callable[[Path, int], None], directory: Path, stream: Stream) -> None:
    """Kill a charging loop a random number of events after its start, and then a random part of two events later.

    Events, not seconds: on a slow machine the kill comes as often between a row and its release as on a fast one.
    """
    events, end = os.pipe()

    def work() -> None:
        WATCHERS.append(end)
        loop(directory, sys.maxsize)

    child = forked(work)
    os.close(end)
    gap, last = 0.004, time.monotonic()
    for _ in range(stream.below(6)):
        if not os.read(events, 1):
            break
        gap, last = time.monotonic() - last, time.monotonic()
    time.sleep(2 * gap * stream.below(1000) / 1000)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(events)  # only now: the loop must die of nothing but the kill
    if status != signal.SIGKILL:
        raise AssertionError("the charging loop failed by itself")


def kills(loop: Callable[[Path, int], None], count: int, directory: Path, seed: str) -> dict[str, int]:
    """Kill a charging loop at random moments and count what was released and what of it was lost."""
    stream = Entropy.replay(seed.encode()).stream()
    totals = {"kills": 0, "releases": 0, "reserved": 0, "lost": 0, "unfinished": 0, "void": 0}
    while totals["kills"] < count:
        place = directory / f"from-{totals['kills']}"
        place.mkdir()
        for _ in range(min(KILLS_PER_LEDGER, count - totals["kills"])):
            killed(loop, place, stream)
            totals["kills"] += 1
            lost(place)
        loop(place, 1)  # it still works, with the lock free and whatever was left
        totals["releases"] += len(told(place, "release"))
        totals["reserved"] += len(told(place, "reserved"))
        totals["lost"] += lost(place)
        report = verify(place / "ledger", additive)
        totals["unfinished"] += report.unfinished
        totals["void"] += report.void
    return totals


def race(
    opening: Callable[[Path], Ledger], racers: int, charges: int, budget: int, directory: Path
) -> dict[str, int]:
    """Let processes charge one ledger at once, each release told outside, and count what was accepted."""
    path = directory / "ledger"
    Ledger.create(path, Budget(budget / QUORUM, 1e-5), additive).close()

    def charge(racer: int) -> None:
        run, done = f"run-{racer}", 0
        while done < charges:
            try:
                with opening(path) as ledger:
                    ledger.begin(run, run, plan_of(charges * PATIENCE))
                    for _ in range(min(5, charges - done)):
                        number = ledger.next_attempt(run, done)
                        ledger.reserve(release(done, number, run=run))
                        ledger.commit(release(done, number, run=run))
                        tell(directory, "release", racer, done)
                        done += 1
            except BudgetExceeded:
                return
            except LedgerError as error:
                if "another server" not in str(error) and "locked" not in str(error):
                    raise

    children = [forked(lambda racer=racer: charge(racer)) for racer in range(racers)]
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    report = verify(path, additive)
    accepted = told(directory, "release")
    rows = read_rows(path)
    committed = {(int(row.key.run[4:]), row.key.round) for row in rows if row.key and row.kind is RowKind.COMMIT}
    return {
        "accepted": len(accepted),
        "without_row": len(set(accepted) - committed),
        "failed": failed,
        "over_budget": int(report.spent > budget / QUORUM),
        "runs": len(report.runs),
        "servers": report.servers,
    }


def stops(count: int, directory: Path) -> dict[str, int]:
    """Stop a server between reserve and commit, take over, wake it, and count its commits that got through."""
    with ledger_in(directory):
        pass
    path = directory / "ledger"
    committed = 0
    for number in range(count):

        def sleeper(number: int = number) -> None:
            with Ledger.open(path, meter=additive) as ledger:
                ledger.reserve(release(number))
                os.kill(os.getpid(), signal.SIGSTOP)
                try:
                    ledger.commit(release(number))
                except LedgerError:
                    return
                raise AssertionError("a server that was shut out has committed")

        child = forked(sleeper)
        os.waitpid(child, os.WUNTRACED)
        with Ledger.open(path, take_over=True, meter=additive) as ledger:
            ledger.reserve(release(number, 1))
            os.kill(child, signal.SIGCONT)
            committed += os.waitpid(child, 0)[1] != 0
            ledger.commit(release(number, 1))
    report = verify(path, additive)
    return {"stops": count, "committed_by_sleepers": committed, "unfinished": report.unfinished}


def append_unfenced(store: Store, row: Row, _head: Head) -> None:
    """The planted bug: a server that writes after whatever row is the last one now."""
    last = tuple(store.rows())[-1]
    moved = chained_row(last.head, epoch=row.epoch, kind=row.kind, key=row.key, body=row.body, epsilon=row.epsilon)
    APPEND(store, moved, last.head)


def stops_unfenced(count: int, directory: Path) -> dict[str, int]:
    """Stop servers as `stops` does, with no fence."""
    Store.append = append_unfenced
    return stops(count, directory)


def charge_unsynced(directory: Path, rounds: int) -> None:
    """The planted bug: commits that return before they are on the disk."""
    store.SETTINGS = tuple(setting.replace("synchronous=FULL", "synchronous=NORMAL") for setting in store.SETTINGS)
    store.DURABLE = {}
    charge_then_release(directory, rounds)


def traced(options: Sequence[str], loop: str, rounds: int, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a charging loop under strace."""
    command = ["strace", "-f", "-qq", *options, sys.executable, "-B", __file__, loop, str(rounds), str(directory)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def unsynced_releases(loop: str, rounds: int, directory: Path) -> dict[str, int]:
    """Count releases told while bytes of the ledger were not synced: those a power cut would take back."""
    log = directory / "trace"
    traced(["-y", "-o", str(log), "-e", f"trace=write,{','.join(CALLS)}"], loop, rounds, directory)
    dirty: set[str] = set()
    counts = {"releases": 0, "lost": 0}
    for line in log.read_text().splitlines():
        match = re.search(r"\b(\w+)\(\d+<([^>]+)>(.*)", line)
        if match is None:
            continue
        call, path, rest = match.groups()
        name = Path(path).name
        if call == "pwrite64" and name in ("ledger", "ledger-wal"):
            dirty.add(name)
        elif call in ("fdatasync", "fsync"):
            dirty.discard(name)
        elif call == "write" and name == "outside" and '"release' in rest:
            counts["releases"] += 1
            counts["lost"] += bool(dirty)
    return counts


def faults(step: int, directory: Path, injection: str) -> dict[str, int]:
    """Let every step-th call that changes a file fail or kill, one run each, and check what is left each time."""
    counts = {"points": 0, "refused": 0, "killed": 0, "lost": 0, "unexplained": 0}
    for point, call in calls_of_a_loop(directory)[::step]:
        place = directory / f"{call}-{point}"
        place.mkdir()
        inject = f"inject={call}:{injection}:when={point}"
        ended = traced(["-o", "/dev/null", "-e", f"trace={call}", "-e", inject], "charge", 2, place)
        counts["points"] += 1
        counts["killed"] += ended.returncode == -signal.SIGKILL
        counts["refused"] += "LedgerError" in ended.stderr
        if ended.returncode > 0 and not re.search(r"\b(LedgerError|OutsideError)\b", ended.stderr):
            counts["unexplained"] += 1
        counts["lost"] += lost(place)
        charge_then_release(place, 1)
        counts["lost"] += lost(place)
    return counts


def calls_of_a_loop(directory: Path) -> list[tuple[int, str]]:
    """Return the calls that a loop of two rounds makes, each with its count among those of its name."""
    place = directory / "undisturbed"
    place.mkdir()
    traced(["-o", str(place / "trace"), "-e", f"trace={','.join(CALLS)}"], "charge", 2, place)
    seen: Counter[str] = Counter()
    calls: list[tuple[int, str]] = []
    for name in re.findall(r"^\d+ +(\w+)\(", (place / "trace").read_text(), re.MULTILINE):
        seen[name] += 1
        calls.append((seen[name], name))
    return calls


def main(arguments: Sequence[str]) -> int:
    """Run one campaign and print what it counted."""
    name, size, directory, *rest = arguments
    count, place = int(size), Path(directory)
    seed = rest[0] if rest else "ledger"
    campaigns: dict[str, Callable[[], dict[str, int]]] = {
        "kills": lambda: kills(charge_then_release, count, place, seed),
        "kills-wrong": lambda: kills(release_then_charge, count, place, seed),
        "race": lambda: race(
            lambda path: Ledger.open(path, wait=True, meter=additive), 16, count, 8 * PATIENCE * count, place
        ),
        "race-takeover": lambda: race(
            lambda path: Ledger.open(path, take_over=True, meter=additive), 8, count, 4 * PATIENCE * count, place
        ),
        "stops": lambda: stops(count, place),
        "stops-unfenced": lambda: stops_unfenced(count, place),
        "faults-kill": lambda: faults(count, place, "signal=KILL"),
        "faults-full": lambda: faults(count, place, "error=ENOSPC"),
        "faults-io": lambda: faults(count, place, "error=EIO"),
        "unsynced": lambda: unsynced_releases("charge", count, place),
        "unsynced-wrong": lambda: unsynced_releases("charge-unsynced", count, place),
        "visits": lambda: visits(place, count) or {},
        "charge": lambda: charge_then_release(place, count) or {},
        "charge-unsynced": lambda: charge_unsynced(place, count) or {},
    }
    counts = campaigns[name]()
    print(json.dumps(counts))
    return int(any(counts.get(each) for each in MUST_BE_ZERO))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
