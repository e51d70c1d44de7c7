"""Which clients an attempt asks: the drawn cohort, less those who were excluded from the run."""

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from d2pfed.accounting import Sampling
from d2pfed.deploy.rosters import Draws, SignedRoster
from d2pfed.deploy.transport import Deadlines
from d2pfed.errors import ConfigError, DamagedFile, TooFewClients
from d2pfed.plan import Plan
from d2pfed.round import MaskedSum
from d2pfed.runs.directory import RunDirectory
from d2pfed.secagg import Roster, Sum
from d2pfed.secagg.draws import Opening, draw_cohort, draw_key
from d2pfed.secagg.wire import ClientId
from d2pfed.training import Cohorts

_log = logging.getLogger("d2pfed.deploy")


@dataclass(frozen=True, slots=True)
class CohortDraw:
    """The cohort of one attempt and, where clients verify it, the draw that it follows from."""

    cohort: tuple[ClientId, ...]
    draw: int = 0
    block: int = 0
    opening: Opening | None = None


class CohortSource(Protocol):
    """Gives each attempt its cohort."""

    @property
    def first_draw(self) -> int:
        """The number of the run's first draw, which the run's announcement states."""
        ...

    def draw(self, number: int, attempt: int, block: int) -> CohortDraw:
        """Return who is asked in an attempt at a round; `block` counts under `once` only."""
        ...


@dataclass(frozen=True, slots=True)
class SecretCohorts:
    """Cohorts that the server draws by itself: a simulation's, or those of a roster without draws."""

    cohorts: Cohorts
    population: Sequence[ClientId]
    first_draw: int = 0

    def draw(self, number: int, attempt: int, block: int) -> CohortDraw:
        """Return who is asked in an attempt at a round."""
        return CohortDraw(tuple(self.population[place] for place in self.cohorts.draw(number, attempt, block)))


class VerifiedCohorts:
    """Cohorts that every client computes itself, from the draws that the server has committed to.

    Guarantee: which draws a run may use is on the disk before its first invitation.
    """

    def __init__(self, plan: Plan, roster: Roster, draws: Draws, run: str) -> None:
        self._plan = plan
        self._roster = roster
        self._tree = draws.tree
        count = 1 if plan.sampling.method is Sampling.ONCE else plan.rounds * plan.attempts_per_round
        self.first_draw = draws.reserve(run, count)

    def draw(self, number: int, attempt: int, block: int) -> CohortDraw:
        """Return who is asked in an attempt at a round."""
        plan, is_once = self._plan, self._plan.sampling.method is Sampling.ONCE
        draw = self.first_draw + (0 if is_once else number * plan.attempts_per_round + attempt)
        opening = self._tree.open(draw)
        key, used = draw_key(self._roster.digest, draw, opening.seed), block if is_once else 0
        return CohortDraw(draw_cohort(key, self._roster.clients, plan.sampling, used), draw, used, opening)


def cohort_source(
    plan: Plan, signed: SignedRoster | None, draws: Path | None, run: str, secret: SecretCohorts
) -> CohortSource:
    """Return the source of a run's cohorts: verified wherever the roster has draws."""
    if signed is None or signed.roster.depth is None:
        return secret
    if draws is None:
        raise ConfigError("a roster with draws needs the server's own file of them: `draws`")
    return VerifiedCohorts(plan, signed.roster, Draws(draws, signed.roster), run)


def require_lasting(roster: Roster, plan: Plan, deadlines: Deadlines) -> None:
    """Refuse a roster whose time is over, or that may not last for a partition, which cannot change rosters."""
    left = roster.expires - time.time()
    if left <= 0:
        raise ConfigError(f"the roster {roster.serial} has expired {-left:.0f} s ago")
    whole = plan.rounds * (deadlines.joining + deadlines.training + 4 * deadlines.keys)
    if plan.sampling.method is Sampling.ONCE and left < whole:
        raise ConfigError(
            f"sampling `once` ends within one roster: {plan.rounds} rounds may take {whole:.0f} s, and roster "
            f"{roster.serial} is good for {left:.0f} s"
        )


class ParticipationLog:
    """Who is excluded from a run, and how many blocks of a partition are used up: a file in the run's directory.

    A block of a partition is used up as soon as its vectors are asked for: under `once` nobody sends a second one.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        file = directory.path / "participation.json"
        try:
            found = json.loads(file.read_text() if file.exists() else '{"excluded": [], "block": 0}')
            self.excluded = frozenset(int(client) for client in found["excluded"])
            self.block = int(found["block"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedFile(f"{file} is damaged: {error}") from error

    def exclude(self, blamed: Iterable[int]) -> None:
        """Treat clients as dropped out from now on."""
        new = frozenset(blamed) - self.excluded
        if new:
            _log.warning("clients %s have sent what cannot be an accident: they are not asked again", sorted(new))
            self.excluded |= new
            self._write()

    def use_block(self) -> None:
        """Go on with the next block of a partition."""
        self.block += 1
        self._write()

    def _write(self) -> None:
        text = json.dumps({"excluded": sorted(self.excluded), "block": self.block})
        self._directory.replace("participation.json", text.encode())


@dataclass(frozen=True, slots=True)
class BlameTracking:
    """Masked vectors whose unmasking excludes the clients that are to blame."""

    masked: MaskedSum
    log: ParticipationLog

    @property
    def survivors(self) -> tuple[int, ...]:
        """The clients whose masked vector arrived."""
        return self.masked.survivors

    def unmask(self) -> Sum:
        """Return the sum."""
        try:
            opened = self.masked.unmask()
        except TooFewClients as lack:
            self.log.exclude(lack.blamed)
            raise
        self.log.exclude(opened.blamed)
        return opened
