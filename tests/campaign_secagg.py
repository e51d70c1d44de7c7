"""The dropout matrix of secure aggregation, cell by cell; `dropouts` runs it at any size and number of seeds."""

import itertools
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np

from d2pfed.errors import TooFewClients
from d2pfed.numerics.randomness import Stream, digest
from d2pfed.secagg import Consistency, Delivery, Session
from support.federation import PHASES, Federation, Loss, expected_sum, make_session, run_round
from support.lattice_sessions import VOIDS, run_lattice, stand_ins
from support.sessions import run_session, run_standing
from test_secagg_damage import damage

AMOUNTS = ("none", "one", "10 %", "20 %", "30 %", "to the limit", "one below the limit")
MOMENTS = ("before", "after", "half")
DELIVERIES = (Delivery.QUORUM,)


@dataclass(frozen=True)
class Cell:
    """One way to lose clients."""

    phase: str
    amount: str
    moment: str
    delivery: Delivery

    def __str__(self) -> str:
        return f"{self.phase}-{self.amount}-{self.moment}-{self.delivery.value}"


MATRIX = [Cell(*choice) for choice in itertools.product(PHASES, AMOUNTS, MOMENTS, DELIVERIES)]


def session_of(cell: Cell, size: int) -> Session:
    """A session that tolerates 30 % of dropouts everywhere, by arithmetic and not by luck."""
    lost = 3 * size // 10
    return make_session(
        size,
        threshold=size // 2 + 1,
        quorum=size - lost,
        delivery=cell.delivery,
        consistency=Consistency.SIGNED if cell.phase == "confirm" else Consistency.ASSUMED,
    )


def limit_of(cell: Cell, session: Session) -> int:
    """How many may be lost in this phase: to the quorum, or in the last one to the threshold."""
    size = len(session.cohort)
    if cell.phase != "unmask":
        return size - session.quorum
    return size - session.threshold  # so many holders of one secret may be silent


def count_of(cell: Cell, session: Session) -> int:
    size, limit = len(session.cohort), limit_of(cell, session)
    shares = {"none": 0, "one": 1, "10 %": size // 10, "20 %": 2 * size // 10, "30 %": 3 * size // 10}
    return (shares | {"to the limit": limit, "one below the limit": limit + 1})[cell.amount]


def loss_of(cell: Cell, dropped: set[int]) -> Loss:
    def lose(phase: str, client: int, answer: bytes | None) -> bytes | None:
        if phase != cell.phase or client not in dropped:
            return answer
        if cell.moment == "before":
            return None
        if not answer:  # asked, and has not answered yet
            return answer
        return None if cell.moment == "after" else answer[: len(answer) // 2]

    return lose


def run_cell(cell: Cell, size: int, seed: int) -> str:
    """Run one cell and return 'sum' or 'void'; a wrong sum or a wrong outcome fails."""
    session = session_of(cell, size)
    stream = Stream(digest("dropouts", str(cell), size, seed))
    dropped = {session.cohort[rank] for rank in stream.subset(size, count_of(cell, session))}
    federation = Federation(session, seed=str(seed).encode())
    try:
        total, survivors = run_round(federation, loss_of(cell, dropped))
    except TooFewClients:
        assert must_be_void(cell, session, dropped), f"{cell}: void without a reason"
        return "void"
    assert not must_be_void(cell, session, dropped), f"{cell}: a sum where there must be none"
    left = set(session.cohort) - (dropped if cell.phase in PHASES[:3] else set())
    assert set(survivors) == left, f"{cell}: wrong survivors"
    assert np.array_equal(total.vector, expected_sum(session, survivors)), f"{cell}: wrong sum"
    return "sum"


def must_be_void(cell: Cell, session: Session, dropped: set[int]) -> bool:
    if cell.phase != "unmask":
        return len(session.cohort) - len(dropped) < session.quorum
    return len(session.cohort) - len(dropped) < session.threshold


def dropouts(size: int, seeds: int) -> str:
    """Run the whole matrix with so many seeds per cell and say what was counted."""
    outcomes = [run_cell(cell, size, seed) for cell in MATRIX for seed in range(seeds)]
    sums, voids = outcomes.count("sum"), outcomes.count("void")
    return f"{len(outcomes)} rounds of {size} clients: {sums} exact sums, {voids} void attempts, 0 wrong"


def sessions(count: int, first: int = 0) -> str:
    """Run so many random sessions of both protocols, an eighth of them larger ones, and say what was counted."""
    outcomes: dict[str, Counter[str]] = {"main": Counter(), "standing": Counter()}
    seed = first
    while sum(found.total() for found in outcomes.values()) < count:
        seed += 1
        if seed % 4:
            outcomes["main"][run_session(seed, 20 if seed % 8 == 1 else 7)] += 1
        else:
            outcomes["standing"].update(run_standing(seed))
    counts = "; ".join(
        f"{name} protocol: {found['sum']:,} exact sums, {found['void']:,} void" for name, found in outcomes.items()
    )
    total = sum(found.total() for found in outcomes.values())
    return f"{total:,} random sessions against the true sum ({counts}): 0 wrong"


def lattice(count: int, first: int = 0, size: int | None = None, processes: int = 1) -> str:
    """Run so many random sessions of the lattice protocol, of 3 to 80 clients, and say what was counted.

    Hashes stand in for key agreement and signatures, except in every hundredth session. Fewer clients than 19 cannot
    open anything, and are refused.
    """
    outcomes, seconds, end = Counter[str](), 0.0, first + count
    parts = [(range(start, min(start + 100, end)), size) for start in range(first, end, 100)]
    with ProcessPoolExecutor(processes, get_context("fork")) if processes > 1 else nullcontext() as pool:
        for found, took in (pool.map if pool else map)(lattice_part, *zip(*parts, strict=True)):
            outcomes.update(found)
            seconds += took
    by_chance = sum(found for name, found in outcomes.items() if name.startswith("by chance"))
    assert by_chance <= 3 + count // 1000, f"{by_chance} ended otherwise than foretold: {outcomes}"
    ends = ", ".join(f"{name} {outcomes[name]:,}" for name in VOIDS if outcomes[name])
    clients = "3 to 80" if size is None else f"{size:,}"
    return (
        f"{count:,} random sessions of the lattice protocol of {clients} clients against the true sum and the foretold "
        f"end: {outcomes['sum']:,} exact sums, {outcomes['refused']:,} refused (fewer than 19 clients), void as "
        f"foretold: {ends}; {by_chance} void by a lie that fitted by chance, 0 wrong; "
        f"{seconds / count:.3f} processor seconds each"
    )


def lattice_part(numbers: range, size: int | None) -> tuple[Counter[str], float]:
    """Run up to a hundred sessions, the last one with real cryptography: how they ended, and processor seconds."""
    begun = time.process_time()
    with stand_ins():
        outcomes = Counter(run_lattice(number, size) for number in numbers[:99])
    outcomes.update(run_lattice(number, size) for number in numbers[99:])
    return outcomes, time.process_time() - begun


def main(name: str, size: int, seed: str) -> None:
    """Run a campaign: `dropouts` by cohort size, the others by their number of cases; print what was counted."""
    first = Stream(digest("sessions", seed)).below(1 << 62)
    campaigns = {"dropouts": lambda: dropouts(size, 1), "damage": lambda: damage(size)}
    campaigns |= {"sessions": lambda: sessions(size, first), "crowds": lambda: lattice(size, first, 1_000)}
    campaigns |= {"lattice": lambda: lattice(size, first, processes=2)}
    counted = campaigns[name]()
    titles = {"dropouts": "dropout matrix", "damage": "damaged messages", "sessions": "random sessions"}
    titles |= {"lattice": "random lattice sessions", "crowds": "random lattice sessions of 1,000 clients"}
    title = titles[name]
    command = f"scripts/campaign secagg-{name} {size} --seed {seed}"
    print(json.dumps({"campaign": title, "command": command, "result": counted, "failed": 0}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[4])
