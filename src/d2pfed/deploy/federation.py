"""The server's half of a deployed run: whom an attempt asks, and the exchanges with them."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from d2pfed.accounting import Sampling
from d2pfed.deploy.layout import Layout, encode_task
from d2pfed.deploy.requests import RunAnnouncement
from d2pfed.deploy.rosters import Draws, Positions, SignedRoster
from d2pfed.deploy.transport import ClientExchange, Deadlines, NodeRegistry, Transport
from d2pfed.errors import ConfigError, DamagedFile, ForgottenAttempt, LostRound, TooFewClients, VoidStep
from d2pfed.ledger import RowKind
from d2pfed.noise.clipping import with_clip
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics import canonical
from d2pfed.plan import Plan, Protocol
from d2pfed.round import Attempt, AttemptSession, Collected, Invite, OpenSum, StandingRun, gather, session_of
from d2pfed.round.aggregation import ignore
from d2pfed.round.standing import ASSUMPTIONS
from d2pfed.runs import ExchangeRecord, Run, SiloRecord, SiloTable
from d2pfed.runs.directory import RunDirectory
from d2pfed.runs.json_files import to_json
from d2pfed.runs.records import SILOS
from d2pfed.secagg import Roster, Sum, standing
from d2pfed.secagg.draws import Opening, draw_key, draw_order
from d2pfed.secagg.heads import CertifiedRoster
from d2pfed.secagg.wire import ClientId, MessageKind
from d2pfed.training import Cohorts

_log = logging.getLogger("d2pfed.deploy")

# Who is asked for a vector may send it: a block of a partition is used up.
_VECTORS = (MessageKind.MASK_REQUEST, MessageKind.LATTICE_REQUEST)
_EPOCHS = "epochs"  # file in the run's directory: the number of the next epoch


def require_lasting(roster: Roster, plan: Plan, deadlines: Deadlines) -> None:
    """Refuse a roster whose time is over, or that may not last for a partition, which cannot change rosters."""
    left = roster.expires - time.time()
    if left <= 0:
        raise ConfigError(f"roster {roster.serial} expired {-left:.0f} s ago")
    exchanges = 4 if plan.committee is None else 5  # without training: a committee vouches, too, and may trace
    whole = plan.rounds * (deadlines.joining + deadlines.training + exchanges * deadlines.keys)
    if plan.sampling.method is Sampling.ONCE and left < whole:
        raise ConfigError(
            f"sampling `once` must end under one roster: {plan.rounds} rounds may take {whole:.0f} s, and roster "
            f"{roster.serial} expires in {left:.0f} s"
        )


class ParticipationLog:
    """Who is excluded from a run, and how many blocks of a partition have been asked for: a file of the run."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._suspected = frozenset[int]()
        file = directory.path / "participation.json"
        try:
            found = json.loads(file.read_text() if file.exists() else '{"excluded": [], "block": 0}')
            self.excluded = frozenset(int(client) for client in found["excluded"])
            self.block = int(found["block"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedFile(f"{file} is damaged: {error}") from error

    def note(self, *, blamed: Iterable[int] = (), blocks: int = 0) -> None:
        """Treat clients as dropped out from now on, and go on with a later block of a partition."""
        new = frozenset(blamed) - self.excluded
        if new:
            _log.warning(
                "clients %s have sent messages that cannot be accidents, and are not asked again", sorted(new)
            )
        if new or blocks:
            self.excluded |= new
            self.block += blocks
            text = json.dumps({"excluded": sorted(self.excluded), "block": self.block})
            self._directory.replace("participation.json", text.encode())

    def suspect(self, clients: Iterable[int]) -> None:
        """Leave clients out of the next attempt: they may have spoilt this one, or others have made it seem so."""
        self._suspected = frozenset(clients)

    def left_out(self) -> frozenset[int]:
        """Return who is not asked in the attempt that begins; suspects have served their time with it."""
        left_out, self._suspected = self.excluded | self._suspected, frozenset()
        return left_out


@dataclass(frozen=True, slots=True)
class BlameTracking:
    """Masked vectors whose unmasking excludes the clients that are to blame."""

    masked: Collected
    log: ParticipationLog
    survivors: tuple[int, ...]

    def unmask(self) -> Sum:
        """Return the sum."""
        try:
            opened = self.masked.unmask()
        except TooFewClients as lack:
            _log.warning("an attempt is void and stays charged: %s", lack)
            self.log.note(blamed=lack.blamed)
            self.log.suspect(lack.suspected)
            raise
        self.log.note(blamed=opened.blamed)
        return opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A run with clients behind a transport."""

    plan: Plan
    roster: SignedRoster | None
    transport: Transport
    run: Run
    layout: Layout
    config: Mapping[str, object]  # what clients train with
    run_config: Mapping[str, object]  # what the engine has told them of the run, which they compare
    deadlines: Deadlines
    positions: Path  # directory of the server's memory of where its clients' logs stand, a file for each authority
    population: tuple[int, ...]
    draws: Path | None  # the server's file of draws, where the roster has some

    def enrolled(self) -> Roster | CertifiedRoster | None:
        """Return who is enrolled, with all certificates in the lattice protocol, whose clients hold no roster."""
        if self.roster is None or self.plan.protocol is not Protocol.LATTICE:
            return None if self.roster is None else self.roster.roster
        if self.roster.published is None:
            raise ConfigError("the lattice protocol needs roster.head and roster.certificates beside the roster")
        return self.roster.published.certified

    def task(self, number: int) -> bytes:
        """Return what clients are told to do in a round."""
        return encode_task(self.layout, {**self.config, "server-round": number + 1}, dict(self.run_config))


class _Federation:
    """What both kinds of federation have: which nodes are there, and the exchanges with them."""

    def __init__(
        self,
        deployment: Deployment,
        first_draw: int = 0,
        before: Callable[[MessageKind], None] = ignore,
        *,
        members: int | None = None,
        needs_all: bool = False,
    ) -> None:
        plan, signed = deployment.plan, deployment.roster
        self._deployment, self._plan, self._roster = deployment, plan, deployment.enrolled()
        published = None if signed is None or not isinstance(self._roster, CertifiedRoster) else signed.published
        data = b"" if signed is None else signed.data if published is None else published.head
        texts = canonical.encode(plan), deployment.layout.encode()
        announcement = RunAnnouncement(deployment.run.name, *texts, first_draw, data)
        roster, population = None if signed is None else signed.roster, frozenset(deployment.population)
        self._registry = NodeRegistry(deployment.transport, announcement, population, roster, published)
        self._exchange = ClientExchange(
            deployment.transport,
            self._registry.nodes,
            deployment.deadlines,
            before,
            plan.quorum,
            members=members,
            needs_all=needs_all,
        )
        self._clip: float | None = None  # of the round, where the plan's adapts
        self._positions: Positions | None = None  # the server's memory of where enrolled clients stand
        if roster is not None:
            file = deployment.positions / f"positions-{roster.authority.hex()[:16]}"
            self._positions = Positions(file, roster.keys)

    def with_clip(self, clip: float) -> Self:
        """Tell clients this clip from now on: the federation is that of a round, where the plan's clip adapts."""
        self._clip = clip
        return self

    def _task(self, number: int) -> bytes:
        """Return what clients are told to do in a round, its clip included."""
        return with_clip(self._deployment.task(number), self._clip)

    def _wait(self, attempt: Attempt, wanted: Sequence[int], cohort: int, joining: float) -> None:
        """Wait for the clients of an attempt, and refuse to go on without a quorum."""
        deadlines, quorum = self._deployment.deadlines, self._plan.quorum
        there = self._registry.wait_for(wanted, deadlines, quorum, joining)
        if len(there) < quorum:
            refusals = self._registry.refusals()
            raise TooFewClients(
                f"round {attempt.round + 1} needs {quorum} of {cohort} clients, {len(there)} came within "
                f"{deadlines.joining:g} s; {refusals + '; ' if refusals else ''}start again to go on",
                there,
            )
        self._exchange.stats.clear()

    def _require_new(self, attempt: Attempt, cohort: tuple[int, ...]) -> None:
        """Refuse an attempt that its clients have begun before, or gone beyond: the ledger is older than their logs.

        Guarantee: clients that lie, as many as the plan allows for, move nothing.
        Checked: test_flower_backups.py::test_as_many_liars_as_the_plan_allows_for_move_nothing.
        """
        left = self._plan.attempts_per_round - attempt.number  # of this round, this one included
        step = attempt.round * self._plan.attempts_per_round + attempt.number
        begun = [self._registry.progress[each].steps >> step for each in cohort if each in self._registry.nodes]
        if not self._stated(begun):
            return
        within, later = (each % (1 << left) for each in begun), (each >> left for each in begun)
        if attempt.number and self._stated(later) and not self._stated(within):
            raise LostRound(
                "clients have gone on to later rounds that this server, restored from a backup, has forgotten"
            )
        text = (
            f"clients have begun attempt {attempt.number} of round {attempt.round + 1}, which this server, restored "
            "from a backup, has forgotten: it is charged"
        )
        _log.warning("%s", text)
        raise ForgottenAttempt(text, attempt.number, cohort)

    def _stated(self, values: Iterable[int]) -> int:
        """Return the greatest value that some honest client states or exceeds; 0 if only colluders state more."""
        ranked, liars = sorted(values, reverse=True), max(1, self._plan.colluders)
        return ranked[liars] if len(ranked) > liars else 0

    def exchanges(self) -> tuple[ExchangeRecord, ...]:
        """Return the exchanges of the last attempt."""
        return tuple(self._exchange.stats)


@dataclass(frozen=True, slots=True)
class CohortDraw:
    """The cohort of one attempt and, where clients verify it, the draw that it follows from."""

    cohort: tuple[ClientId, ...]
    draw: int = 0
    block: int = 0
    opening: Opening | None = None
    order: tuple[ClientId, ...] = ()  # of the draw: its first clients are the committee


class CohortFederation(_Federation):
    """Clients with keys for each attempt: a drawn cohort is asked, or once and a committee again (`round.Attempts`).

    Under a roster with draws every client computes its cohort too, from what the server has committed to; otherwise the
    server draws by itself. Guarantee: which draws a run may use is on the disk before its first invitation.
    """

    def __init__(self, deployment: Deployment) -> None:
        plan, run, signed = deployment.plan, deployment.run, deployment.roster
        deployment.enrolled()  # refuses a roster without certificates before draws are used up
        self._is_once = plan.sampling.method is Sampling.ONCE
        self._secret = Cohorts(plan.sampling, run.directory.identity().cohorts)
        self._verified: tuple[Draws, Roster] | None = None
        self._first_draw = 0  # of this run, which its announcement states
        if signed is not None and signed.roster.depth is not None:
            if deployment.draws is None:
                raise ConfigError("a roster with draws needs the server's file of them: `draws`")
            draws = Draws(deployment.draws, signed.roster)
            self._first_draw = draws.reserve(
                run.name, 1 if self._is_once else plan.rounds * plan.attempts_per_round
            )
            self._verified = draws, signed.roster
        self._participation = ParticipationLog(run.directory)
        super().__init__(
            deployment,
            self._first_draw,
            lambda kind: self._participation.note(blocks=int(self._is_once and kind in _VECTORS)),
            members=None if plan.committee is None else plan.committee.least,
        )
        self._drawn = CohortDraw(())

    def draw(self, attempt: Attempt) -> tuple[int, ...]:
        """Return the cohort of an attempt, once enough of it is there."""
        self._drawn, ledger = self._draw(attempt), self._deployment.run.ledger
        if self._is_once and ledger is not None:  # a block that no charged attempt has, noted or not
            while any(ledger.participations(attempt.run, self._drawn.cohort).values()):
                self._participation.note(blocks=1)
                self._drawn = self._draw(attempt)
        cohort = self._drawn.cohort
        wanted = [client for client in cohort if client not in self._participation.excluded]
        self._wait(attempt, wanted, len(cohort), self._deployment.deadlines.joining)
        self._require_new(attempt, cohort)
        return cohort

    def _draw(self, attempt: Attempt) -> CohortDraw:
        """Return whom an attempt asks by its number and, under `once`, the block that is next."""
        block = self._participation.block
        if self._verified is None:
            places = self._secret.draw(attempt.round, attempt.number, block)
            return CohortDraw(tuple(self._deployment.population[place] for place in places))
        draws, roster = self._verified
        steps = attempt.round * self._plan.attempts_per_round + attempt.number
        draw, block = (self._first_draw, block) if self._is_once else (self._first_draw + steps, 0)
        opening = draws.tree.open(draw)
        key = draw_key(roster.digest, draw, opening.seed)
        order = draw_order(key, roster.clients, self._plan.sampling, block)
        return CohortDraw(tuple(sorted(order)), draw, block, opening, order)

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> AttemptSession:
        """Return the session of an attempt, bound to the roster and its draw, by its own names of clients."""
        drawn, roster = self._drawn, self._roster
        order = drawn.order
        if roster is not None:
            cohort, order = tuple(map(roster.name, cohort)), tuple(map(roster.name, order))
        return session_of(
            self._plan, attempt, cohort, roster=roster, draw=drawn.draw, block=drawn.block, order=order
        )

    def collect(
        self, session: AttemptSession, model: FloatVector, _participations: Mapping[int, int]
    ) -> BlameTracking:
        """Run the protocol's exchanges; clients count their participations themselves."""
        positions = self._positions
        invite = Invite(
            roster=self._roster,
            opening=self._drawn.opening,
            excluded=self._participation.left_out(),
            remembered={} if positions is None else positions.latest(),
            remember=ignore if positions is None else positions.keep,
        )
        try:
            gathered = gather(
                session,
                self._exchange.carry(model, self._plan.download_bits),
                self._exchange,
                task=self._task(session.round),
                invite=invite,
                refused=self._exchange.refused,
            )
        except TooFewClients as lack:
            _log.warning("round %d, attempt %d is void: %s", session.round + 1, session.attempt, lack)
            self._participation.note(blamed=lack.blamed)
            raise
        return BlameTracking(gathered, self._participation, gathered.survivors)


class StandingFederation(_Federation):
    """Silos with standing keys, all of a roster, asked in every round by one exchange (`round.Attempts`)."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment, needs_all=True)
        roster, positions, run = deployment.roster, self._positions, deployment.run
        if roster is None or positions is None:
            raise ConfigError("standing keys are for enrolled silos, got no roster")
        numbers = run.directory.path / _EPOCHS
        self._standing = StandingRun(
            plan=deployment.plan,
            run=run.name,
            roster=roster.roster,
            silos=roster.roster.clients,
            exchange=self._exchange,
            presence=self._exchange.ask_presence,
            remembered=positions.latest(),
            remember=positions.keep,
            refused=self._exchange.refused,
            epochs=int(numbers.read_text()) if numbers.exists() else 0,
            note_epochs=lambda number: run.directory.replace(_EPOCHS, str(number).encode()),
        )
        _log.info("%s", ASSUMPTIONS.format(colluders=deployment.plan.colluders))

    def draw(self, attempt: Attempt) -> tuple[int, ...]:
        """Return the silos of an attempt, once enough are there; only at first and after a void one they have time."""
        deadlines, silos = self._deployment.deadlines, self._standing.silos
        is_patient = self._standing.attempts == 0 or attempt.number > 0
        joining = deadlines.joining if is_patient else deadlines.poll
        self._wait(attempt, silos, len(silos), joining)
        self._require_new(attempt, silos)
        begun = self._stated(each.epochs for each in self._registry.progress.values())
        self._standing.epochs = max(self._standing.epochs, begun)
        return self._standing.members(attempt, self._registry.nodes)

    def note_silos(self, *_told: object) -> None:
        """Keep for the report what is known of each silo: its part in the ledger, and what it has said and signed."""
        run, positions = self._deployment.run, {} if self._positions is None else self._positions.latest()
        rows = () if run.ledger is None else run.ledger.attempts.values()
        charged = [row for row in rows if row.release.run == run.name and row.kind is not RowKind.VOID]
        reasons, silos = self._deployment.transport.reasons, list[SiloRecord]()
        for silo in self._standing.silos:
            own = [row for row in charged if silo in row.release.participants]
            sums = {row.release.round + 1 for row in own if row.kind is RowKind.COMMIT}
            silos.append(
                SiloRecord(
                    silo=silo,
                    rounds=len(sums),
                    charged=len(own),
                    last_round=max(sums, default=0),
                    position=positions[silo].count if silo in positions else None,
                    is_here=silo in self._registry.nodes,
                    refusal=reasons.get(self._registry.spoken.get(silo, -1), ""),
                )
            )
        run.directory.replace(SILOS, to_json(SiloTable(tuple(silos))).encode())

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> standing.Step:
        """Return the step of an attempt."""
        return self._standing.step(attempt, cohort)

    def collect(self, session: standing.Step, model: FloatVector, _participations: Mapping[int, int]) -> OpenSum:
        """Run the one exchange of a step; silos count their vectors themselves."""
        try:
            return self._standing.collect(
                session,
                self._exchange.carry(model, self._deployment.plan.download_bits),
                self._task(session.round),
            )
        except VoidStep as lack:
            _log.warning(
                "round %d, attempt %d is void and stays charged: %s; so far %d attempts of which %d void: all %d are "
                "charged against the server",
                *(session.round + 1, session.attempt, lack),
                *(self._standing.attempts, self._standing.void, self._standing.attempts),
            )
            raise
