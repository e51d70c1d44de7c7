"""Random plans through real clients: what a victim charges is at least what a server and its colluders can take.

Each plan is put to one victim twice, with two data sets. The server opens sums with as few honest contributors as the
victim allows; their noise is measured and compared with what the victim's log has charged, its epsilon with
dp-accounting's, and all that the server sees of one data set with what it sees of the other.
"""

import json
import logging
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from io import StringIO
from multiprocessing import get_context
from pathlib import Path

from d2pfed.accounting import Sampling, Unit, client_epsilon
from d2pfed.deploy.account import ClientSpending
from d2pfed.deploy.requests import RunAnnouncement
from d2pfed.errors import D2PFedError
from d2pfed.noise import sampler
from d2pfed.noise.mechanisms import MechanismName, Shared
from d2pfed.numerics.randomness import Stream, digest
from d2pfed.plan import Plan, Protocol
from d2pfed.plan.bounds import colluding_clients
from support import noise_oracles as oracles
from support.attacked_clients import Group, Life, make_group
from support.attacks import Attack, Opened
from support.ill_data import ILLS, MARK, SILENT
from support.lying_plans import USUAL, Case, draw_case
from support.server_scripts import Script

KINDS = {  # what is drawn, and how often of ten
    (Protocol.PAIRWISE, Unit.CLIENT): 5,
    (Protocol.STANDING, Unit.CLIENT): 3,
    (Protocol.STANDING, Unit.RECORD): 2,
}
SIZES = (3, 4, 5, 5, 6, 6, 7, 8, 9, 10, 12)
MORE = (20, 40)  # now and then
DEPTHS = (None, 5)  # of trees of draws
LARGE = 300  # a roster in which drawn cohorts hold few of the colluders
BLOCK = 1000  # cases under the same rosters
DELTA = 1e-5  # of a client's budget
SLACK = 1e-3  # by which a charge may be below an oracle: their own rounding
TESTS = 40  # of one plan's sums, at most
TABLES = 512  # of noise, that are kept
LEAST_ACCEPTED = 20  # one plan in so many


@dataclass(frozen=True)
class Outcome:
    """What became of one life of a victim."""

    seen: tuple[str, ...]
    rows: tuple[str, ...]
    refusals: tuple[str, ...]
    spending: ClientSpending
    vectors: int
    opened: tuple[Opened, ...]
    served: frozenset[tuple[str, str]]  # protocols and requests that got a vector


def live(case: Case, home: Path, moves: bytes, ill: str) -> Outcome:
    """One life of the victim, with data of some kind."""
    stream, group, plan = Stream(moves), case.group, case.plan
    share = float(str(case.settings["least_colluders"]))
    colluders = frozenset(group.others[: colluding_clients(share, len(group.roster.clients))])
    home.mkdir()
    unit, dimension = (plan.unit, plan.dimension) if plan is not None else (case.unit, 1)
    life = Life.begin(group, group.victim, home, case.settings, ILLS[unit][ill](dimension))
    opened, served = list[Opened](), set[tuple[str, str]]()
    if plan is None:
        with suppress(D2PFedError):
            life.announce(RunAnnouncement("run", case.text, "", 0, group.signed.data))
    else:
        witness = None
        if stream.below(10) == 0 and group.witness not in colluders:
            witness = Life.begin(group, group.witness, home, case.settings, ILLS[unit]["zeros"](dimension))
        script = Script(case, Attack(plan, life, witness, colluders, "run"), stream)
        script.run()
        opened, served = script.attack.opened, script.served
    history = life.history()
    shutil.rmtree(home)
    return Outcome(
        tuple(life.seen),
        tuple(str(row.entry) for row in history.rows),
        tuple(life.refusals),
        ClientSpending.of(history),
        life.vectors,
        tuple(opened),
        frozenset(served),
    )


def lives_of(case: Case, home: Path, stream: Stream) -> dict[str, Outcome]:
    """The victim's life with zeros, and if a sum was opened another one with other data and the same server."""
    moves = stream.bytes(32)
    lives = {"zeros": live(case, home, moves, "zeros")}
    if case.plan is not None and lives["zeros"].opened:
        ills = list(ILLS[case.plan.unit])
        ill = ills[-1 if stream.below(4) == 0 else 1 + stream.below(len(ills) - 1)]  # the last one is huge
        lives[ill] = live(case, home, moves, ill)
    return lives


@contextmanager
def unheard() -> Iterator[None]:
    """Write what clients tell their owners, and let nobody read it."""
    log, handler = logging.getLogger("d2pfed"), logging.StreamHandler(StringIO())
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.propagate = True
        log.removeHandler(handler)


def faults_of(case: Case, lives: dict[str, Outcome], measure: oracles.Measure) -> Iterator[str]:
    """What is wrong with what a victim did under a plan."""
    (zeros, *others) = lives
    for ill in others:
        one, other = lives[zeros], lives[ill]
        if (one.seen, one.rows) != (other.seen, other.rows):
            yield f"a server tells {zeros} from {ill}: {_difference(one, other)}"
    for name, life in lives.items():
        if any(MARK in text or text.startswith("ESCAPED") for text in life.seen):
            yield f"an error came out with {name}: {[text for text in life.seen if MARK in text or 'ESCAPED' in text]}"
        if case.plan is not None:
            yield from _unserved(case, case.plan, life)
            yield from _uncharged(case.plan, life, measure)
            yield from _lacking(case.plan, life, measure, is_silent=name in SILENT[case.plan.unit])
            yield from _too_cheap(case, case.plan, life)


def _difference(one: Outcome, other: Outcome) -> str:
    pairs = zip((*one.seen, *one.rows, ""), (*other.seen, *other.rows, ""), strict=False)
    return next((f"{left!r} or {right!r}" for left, right in pairs if left != right), "more")


def _unserved(case: Case, plan: Plan, life: Outcome) -> Iterator[str]:
    """What the victim's settings do not list."""
    for protocol, request in life.served:
        found = {
            "protocols": protocol,
            "requests": request,
            "units": str(plan.unit),
            "mechanisms": str(MechanismName.of(plan.mechanism)),
        }
        for name, value in found.items():
            if value not in case.settings[name]:
                yield f"{value} was served, {name} lists {case.settings[name]}"


def _uncharged(plan: Plan, life: Outcome, measure: oracles.Measure) -> Iterator[str]:
    """Vectors that hold data and have no row, and vectors that are longer than their row says."""
    rows = life.spending.releases
    if len(rows) > plan.max_participations:
        yield f"{len(rows)} vectors were charged, the plan allows {plan.max_participations}"
    if len(rows) < life.vectors and plan.sampling.method is not Sampling.FIXED:
        yield f"{life.vectors} vectors were sent and {len(rows)} charged"
    own = oracles.added_variance(plan.mechanism, 1)
    for sent in life.opened:
        is_charged = sent.row < len(rows)
        radius = float(rows[sent.row].noise.radius) if is_charged else 0.0
        if sent.own is None or isinstance(plan.mechanism, Shared) or not oracles.is_measurable(plan, own):
            continue
        if measure.exceeds(sent.own, radius, own):
            yield f"a vector that was {'' if is_charged else 'not '}charged is longer than {radius:g} steps"


def _lacking(plan: Plan, life: Outcome, measure: oracles.Measure, *, is_silent: bool) -> Iterator[str]:
    """Sums with less noise than was charged."""
    rows = life.spending.releases
    for sent in life.opened:
        if sent.row >= len(rows):
            continue  # zeros and noise, which cost nothing
        charged = oracles.charged_variance(rows[sent.row].noise)
        added = oracles.added_variance(plan.mechanism, sent.honest)
        if added < charged * (1 - 1e-12):
            yield f"{sent.protocol}: {sent.honest} honest vectors with a variance of {added:g}, charged {charged:g}"
        if sent.total is not None and measure.lacks(sent.total, charged, plan):
            yield f"{sent.protocol}: a sum with less noise than the charged variance of {charged:g}"
        if sent.total is not None and is_silent and oracles.is_measurable(plan, added):
            measure.pool(sent.total, added)


def _too_cheap(case: Case, plan: Plan, life: Outcome) -> Iterator[str]:
    """Epsilons below what dp-accounting has for the honest contributors that were found."""
    if not life.opened:
        return
    rows, honest = life.spending.releases, min(sent.honest for sent in life.opened)
    charged = client_epsilon(rows, DELTA)
    least = oracles.least_epsilon(plan, honest, len(rows), DELTA)
    if charged < min(least, oracles.MOST) * (1 - SLACK):
        yield f"epsilon {charged:g} was charged, dp-accounting has at least {least:g} for {honest} honest clients"
    whole = oracles.least_epsilon(plan, honest, plan.max_participations, DELTA)
    if min(whole, oracles.MOST) * (1 - SLACK) > float(str(case.settings["budget"])):
        yield f"the plan may cost {whole:g}, and the budget is {case.settings['budget']}"
    own = oracles.least_epsilon(plan, honest, plan.max_participations, plan.delta)
    if plan.unit is Unit.CLIENT and min(own, oracles.MOST) * (1 - SLACK) > float(
        str(case.settings["most_epsilon"])
    ):
        yield f"the plan costs at least {own:g}, and {case.settings['most_epsilon']} is allowed"


@dataclass
class Rosters:
    """Rosters of all sizes, with and without draws, made when they are first asked for."""

    home: Path
    seed: str
    made: dict[tuple[int, int | None], Group] = field(default_factory=dict)

    def draw(self, stream: Stream, protocol: Protocol) -> Group:
        sizes = MORE if stream.below(30) == 0 else SIZES
        size = sizes[stream.below(len(sizes))]
        depth = DEPTHS[stream.below(len(DEPTHS))]
        if protocol is Protocol.PAIRWISE and stream.below(25) == 0:
            size = LARGE
        if (size, depth) not in self.made:
            own = Stream(digest("roster", self.seed, self.home.name, f"{size} {depth}"))
            self.made[size, depth] = make_group(self.home / f"{size}-{depth}", size, depth, own)
        return self.made[size, depth]


@dataclass
class Found:
    """What a block of cases has shown."""

    measure: oracles.Measure
    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    offered: int = 0
    wrong: int = 0

    def add(self, other: "Found") -> None:
        """Add what another block has shown."""
        self.accepted += other.accepted
        self.refused += other.refused
        self.offered += other.offered
        self.wrong += other.wrong
        self.measure.squares += other.measure.squares
        self.measure.spread += other.measure.spread
        self.measure.coordinates += other.measure.coordinates


def block(first: int, count: int, directory: Path, seed: str, lies: tuple[str, ...], kinds: dict) -> Found:
    """Put a block of cases to victims, under rosters of its own, until so many were accepted and had a sum opened."""
    wanted = [kind for kind, times in kinds.items() for _ in range(times)]
    found, rosters = Found(oracles.Measure(TESTS * count)), Rosters(directory / f"rosters-{first}", seed)
    rosters.home.mkdir()
    for number in range(first, first + BLOCK):
        if found.accepted.total() == count:
            break
        stream = Stream(digest("plans", seed, number))
        kind = wanted[stream.below(len(wanted))]
        case = draw_case(stream, seed, rosters.draw(stream, kind[0]), kind, lies)
        if case is None:
            continue
        found.offered += 1
        with unheard():
            lives = lives_of(case, directory / f"life-{first}", stream)
        found.refused.update(rule_of(text) for text in lives["zeros"].refusals)
        if case.plan is not None and lives["zeros"].opened:
            found.accepted[f"{lives['zeros'].opened[0].protocol}/{case.plan.unit}"] += 1
        for fault in faults_of(case, lives, found.measure):
            found.wrong += 1
            sys.stderr.write(f"plan {number} ({case.lie}): {fault}\n")
    shutil.rmtree(rosters.home)
    return found


def plans(
    count: int, directory: Path, seed: str, lies: tuple[str, ...] = USUAL, kinds: dict = KINDS
) -> dict[str, object]:
    """Put plans to victims until so many were accepted and had a sum opened; large campaigns on all cores."""
    found, starts = Found(oracles.Measure(TESTS * count)), range(0, LEAST_ACCEPTED * count, BLOCK)
    one = partial(block, count=count, directory=directory, seed=seed, lies=lies, kinds=kinds)
    with ExitStack() as stack:
        blocks: Iterator[Found] = map(one, starts)
        if count > BLOCK:
            blocks = stack.enter_context(get_context("fork").Pool()).imap(one, starts)
        for each in blocks:
            found.add(each)
            if found.accepted.total() >= count:
                break
    accepted, refused, measure = found.accepted, found.refused, found.measure
    if accepted.total() < count:
        found.wrong += 1
        sys.stderr.write(f"of {found.offered} plans only {accepted.total()} were accepted, {count} are wanted\n")
    if measure.pool_lacks():
        found.wrong += 1
        sys.stderr.write(f"all sums together lack {measure.pooled_lack():.2%} of their noise\n")
    by_kind = ", ".join(f"{times:,} {kind}" for kind, times in sorted(accepted.items()))
    return {
        "campaign": "plans through clients",
        "command": f"scripts/campaign plans-clients {count} --seed {seed}",
        "result": f"{found.offered:,} plans offered to real clients, {accepted.total():,} accepted ({by_kind}), "
        f"{refused.total():,} requests refused by {len(refused)} rules; the variance of {measure.coordinates:,} "
        f"coordinates of opened sums is {1 - measure.pooled_lack():.2%} of what honest clients owe: {found.wrong} sums "
        "or epsilons below what was charged, or data sets told apart",
        "failed": found.wrong,
        "details": dict(refused.most_common()),
    }


def rule_of(text: str) -> str:
    """A refusal without its values."""
    return re.sub(
        r"\b(got|the plan has) .*$", r"\1 ...", re.sub(r"[-+]?\b\d[\d.,]*(e[-+]?\d+)?\b|\binf\b", "#", text)
    )


def main(name: str, size: int, directory: Path, seed: str) -> int:
    """Run the campaign and print what was found."""
    # A client has one plan at a time, a campaign hundreds.
    sampler._table = lru_cache(maxsize=TABLES)(sampler._table.__wrapped__)
    found = {"clients": plans}[name](size, directory, seed)
    print(json.dumps(found))
    return int(found["failed"] != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]))
