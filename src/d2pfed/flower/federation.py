"""The server's half of a deployed run: who is asked in an attempt, and the exchanges with them."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from d2pfed.accounting import Sampling
from d2pfed.errors import TooFewClients
from d2pfed.flower.cohorts import BlameTracking, CohortDraw, ParticipationLog, SecretCohorts, cohort_source
from d2pfed.flower.grid import Deadlines, GridExchange, GridTransport
from d2pfed.flower.layout import Layout, encode_model, encode_task
from d2pfed.flower.positions import Positions
from d2pfed.flower.registry import NodeRegistry
from d2pfed.flower.requests import RunAnnouncement
from d2pfed.flower.rosters import SignedRoster
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics import canonical
from d2pfed.plan import Plan
from d2pfed.round import Attempt, Invite, gather, session_of
from d2pfed.runs import ExchangeRecord, Run
from d2pfed.secagg import Session
from d2pfed.secagg.messages import MessageKind
from d2pfed.secagg.position import Position
from d2pfed.training import Cohorts

_log = logging.getLogger("d2pfed.flower")


class FlowerFederation:
    """Clients behind Flower's grid: who is asked in an attempt, and how their vectors come."""

    def __init__(
        self,
        plan: Plan,
        roster: SignedRoster | None,
        transport: GridTransport,
        run: Run,
        layout: Layout,
        *,
        configs: tuple[dict[str, object], dict[str, object]],
        deadlines: Deadlines,
        positions: Positions | None,
        population: tuple[int, ...],
        draws: Path | None,
        alive: Callable[[], None],
    ) -> None:
        self._alive = alive
        self._plan = plan
        self._ledger = run.ledger
        self._roster = None if roster is None else roster.roster
        self._layout = layout
        self._configs = configs
        self._deadlines = deadlines
        sampler = Cohorts(self._plan.sampling, run.directory.identity().cohorts)
        secret = SecretCohorts(sampler, population)
        self._cohorts = cohort_source(plan, roster, draws, run.name, secret)
        self._participation = ParticipationLog(run.directory)
        announcement = RunAnnouncement(
            run.name,
            canonical.encode(self._plan),
            layout.encode(),
            self._cohorts.first_draw,
            b"" if roster is None else roster.data,
        )
        self._registry = NodeRegistry(transport, announcement, population, self._roster)
        self._exchange = GridExchange(
            transport, self._registry.nodes, self._deadlines, self._before, self._plan.quorum
        )
        self._positions = positions
        self._drawn = CohortDraw(())

    def draw(self, attempt: Attempt) -> tuple[int, ...]:
        """Return the cohort of an attempt, once enough of it is there."""
        self._alive()
        self._drawn = self._next(attempt)
        cohort = self._drawn.cohort
        wanted = [client for client in cohort if client not in self._participation.excluded]
        there = self._registry.wait_for(wanted, self._deadlines, self._plan.quorum)
        if len(there) < self._plan.quorum:
            raise TooFewClients(
                f"round {attempt.round} needs {self._plan.quorum} of {len(cohort)} clients, {len(there)} came within "
                f"{self._deadlines.joining:g} s; start again to go on",
                there,
            )
        self._exchange.stats.clear()
        return cohort

    def _next(self, attempt: Attempt) -> CohortDraw:
        """Return the draw of an attempt; of a partition a block that no charged attempt has.

        A server that died between the reservation and the first request for a vector has charged a block, and has
        not noted it.
        """
        drawn = self._cohorts.draw(attempt.round, attempt.number, self._participation.block)
        if self._plan.sampling.method is Sampling.ONCE and self._ledger is not None:
            while any(self._ledger.participations(attempt.run, drawn.cohort).values()):
                self._participation.use_block()
                drawn = self._cohorts.draw(attempt.round, attempt.number, self._participation.block)
        return drawn

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> Session:
        """Return the session of an attempt, bound to the roster and its draw."""
        drawn = self._drawn
        return session_of(self._plan, attempt, cohort, roster=self._roster, draw=drawn.draw, block=drawn.block)

    def collect(self, session: Session, model: FloatVector, _participations: Mapping[int, int]) -> BlameTracking:
        """Run the protocol's exchanges over the grid; clients count their participations themselves."""
        config, run_config = self._configs
        task = encode_task(self._layout, config | {"server-round": session.round + 1}, run_config)
        invite = Invite(
            roster=self._roster,
            opening=self._drawn.opening,
            remembered={} if self._positions is None else self._positions.latest(),
            remember=self._remember,
            excluded=self._participation.excluded,
        )
        try:
            gathered = gather(
                session,
                encode_model(model),
                self._exchange,
                task=task,
                invite=invite,
                refused=self._exchange.refused,
            )
        except TooFewClients as lack:
            _log.warning("round %d, attempt %d is void: %s", session.round + 1, session.attempt, lack)
            self._participation.exclude(lack.blamed)
            raise
        return BlameTracking(gathered, self._participation)

    def exchanges(self) -> tuple[ExchangeRecord, ...]:
        """Return the exchanges of the last attempt."""
        return tuple(self._exchange.stats)

    def _before(self, kind: MessageKind) -> None:
        self._alive()
        if kind is MessageKind.MASK_REQUEST and self._plan.sampling.method is Sampling.ONCE:
            self._participation.use_block()

    def _remember(self, shown: Mapping[int, Position]) -> None:
        if self._positions is not None:
            self._positions.keep(shown)
