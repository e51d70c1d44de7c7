"""The server's half of a deployed run: which node speaks for which client, who is asked, and the exchanges."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from d2pfed.accounting import Sampling
from d2pfed.deploy.cohorts import BlameTracking, CohortDraw, ParticipationLog, SecretCohorts, cohort_source
from d2pfed.deploy.layout import Layout, encode_model, encode_task
from d2pfed.deploy.monitoring import Arrivals
from d2pfed.deploy.positions import Positions
from d2pfed.deploy.requests import RequestKind, RunAcceptance, RunAnnouncement
from d2pfed.deploy.rosters import SignedRoster
from d2pfed.deploy.transport import ClientExchange, Deadlines, Transport
from d2pfed.errors import ConfigError, PeerError, TooFewClients, VoidStep
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics import canonical
from d2pfed.plan import Plan
from d2pfed.round import Attempt, Invite, OpenSum, StandingRun, gather, session_of
from d2pfed.round.aggregation import ignore
from d2pfed.round.standing import ASSUMPTIONS
from d2pfed.runs import ExchangeRecord, Run
from d2pfed.secagg import Roster, Session, standing
from d2pfed.secagg.crypto import require_signature
from d2pfed.secagg.wire import ClientId, MessageKind
from d2pfed.training import Cohorts

_log = logging.getLogger("d2pfed.deploy")

_AGAIN_SECONDS = 60.0  # after which a node that has not answered the announcement is asked again
_ANNOUNCEMENT = "ANNOUNCEMENT"  # the name of this exchange in the log
_EPOCHS = "epochs"  # file in the run's directory: the number of the next epoch


class NodeRegistry:
    """Which node speaks for which client: every node is sent the run's announcement once.

    Guarantee: with a roster, a node stands for a client only with that client's signature, made for this run, plan
    and node. Checked: test_flower_server.py::test_a_node_cannot_speak_for_a_client_whose_key_it_lacks.
    """

    def __init__(
        self,
        transport: Transport,
        announcement: RunAnnouncement,
        population: Sequence[ClientId],
        roster: Roster | None,
    ) -> None:
        self._transport = transport
        self._announcement = announcement
        self._population = frozenset(population)
        self._roster = roster
        self._nodes: dict[ClientId, int] = {}
        self._asked: set[int] = set()
        self._failed: set[int] = set()
        self._waiting: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._arrivals = Arrivals()
        self._absent: set[ClientId] = set()

    @property
    def nodes(self) -> Mapping[ClientId, int]:
        """The node of each client that has accepted the run."""
        return MappingProxyType(self._nodes)

    def wait_for(self, cohort: Sequence[ClientId], deadlines: Deadlines, quorum: int) -> tuple[ClientId, ...]:
        """Wait until a whole cohort is there, but no longer than `joining`; return those who are.

        Once a quorum is there, the others have the deadlines' grace, and who did not use it is not waited for again.
        """
        begun = time.monotonic()
        until = begun + deadlines.joining
        self._asked -= self._failed  # once a round: a node that refuses is not asked all the time
        self._failed.clear()
        self._look(deadlines.joining)
        has_quorum = False
        while not self._is_complete(cohort, quorum) and self._transport.pause(until):
            self._arrivals.tell(cohort, self._nodes)
            self._look(deadlines.joining)
            if not has_quorum and len(self._nodes.keys() & set(cohort)) >= quorum:
                has_quorum, until = True, deadlines.after_quorum(begun, until)
        self._arrivals.tell(cohort, self._nodes)
        self._absent = (self._absent | set(cohort)) - self._nodes.keys()
        return tuple(client for client in cohort if client in self._nodes)

    def _is_complete(self, cohort: Sequence[ClientId], quorum: int) -> bool:
        here = self._nodes.keys() & set(cohort)
        return len(here) >= min(quorum, len(cohort)) and here >= set(cohort) - self._absent

    def _look(self, seconds: float) -> None:
        """Announce the run to nodes that are new, and take what has been answered."""
        connected = self._transport.nodes()
        for client in [client for client, node in self._nodes.items() if node not in connected]:
            self._asked.discard(self._nodes.pop(client))  # when it comes back, it is told of the run again
        for late in [each for each in self._waiting if time.monotonic() - self._since[each] > _AGAIN_SECONDS]:
            self._asked.discard(self._waiting.pop(late))  # lost on the way: to answer twice changes nothing
        kind, data = RequestKind.ANNOUNCEMENT, self._announcement.encode()
        for node in sorted(connected - self._asked):
            request = self._transport.send(kind, data, node, _ANNOUNCEMENT, seconds)
            if request is not None:
                self._asked.add(node)
                self._waiting[request] = node
                self._since[request] = time.monotonic()
        for request, answer in self._transport.pull(kind, _ANNOUNCEMENT, self._waiting):
            node = self._waiting.pop(request)
            if answer is None:
                self._failed.add(node)
                continue
            try:
                client = self._identified(node, RunAcceptance.decode(answer))
            except PeerError as error:
                self._transport.refuse(_ANNOUNCEMENT, node, "identity", error)
            else:
                self._nodes[client] = node  # a client that comes back through another node is found there

    def _identified(self, node: int, answer: RunAcceptance) -> ClientId:
        """Return the client that a node speaks for, by its signature where clients are enrolled."""
        if self._roster is not None:
            statement = self._announcement.statement(node, answer.client)
            require_signature(self._roster.key(answer.client), answer.signature, statement)
        elif answer.client not in self._population:
            raise PeerError(f"client {answer.client} is not of this population")
        return answer.client


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A run with clients behind a transport.

    Attributes:
        config: what clients train with.
        run_config: what the engine has told them of the run, which they compare.
        positions: the server's memory of where its clients' logs stand; None where nobody is enrolled.
        draws: the server's file of draws, where the roster has some.
        alive: is called whenever the run goes on.
    """

    plan: Plan
    roster: SignedRoster | None
    transport: Transport
    run: Run
    layout: Layout
    config: Mapping[str, object]
    run_config: Mapping[str, object]
    deadlines: Deadlines
    positions: Positions | None
    population: tuple[int, ...]
    draws: Path | None
    alive: Callable[[], None]

    def registry(self, first_draw: int) -> NodeRegistry:
        """Return the registry of nodes, which announces the run."""
        data, known = (b"", None) if self.roster is None else (self.roster.data, self.roster.roster)
        plan, layout = canonical.encode(self.plan), self.layout.encode()
        announcement = RunAnnouncement(self.run.name, plan, layout, first_draw, data)
        return NodeRegistry(self.transport, announcement, self.population, known)

    def task(self, number: int) -> bytes:
        """Return what clients are told to do in a round."""
        return encode_task(self.layout, {**self.config, "server-round": number + 1}, dict(self.run_config))

    def wait(
        self, registry: NodeRegistry, attempt: Attempt, wanted: Sequence[int], cohort: int, joining: float
    ) -> None:
        """Wait for the clients of an attempt, and refuse to go on without a quorum."""
        self.alive()
        there = registry.wait_for(wanted, replace(self.deadlines, joining=joining), self.plan.quorum)
        if len(there) < self.plan.quorum:
            raise TooFewClients(
                f"round {attempt.round} needs {self.plan.quorum} of {cohort} clients, {len(there)} came within "
                f"{self.deadlines.joining:g} s; start again to go on",
                there,
            )


class PairwiseFederation:
    """Clients that agree on keys for each attempt: a drawn cohort is asked (`round.Attempts`)."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._plan, run, roster = deployment.plan, deployment.run, deployment.roster
        self._ledger = run.ledger
        self._roster = None if roster is None else roster.roster
        secret = SecretCohorts(
            Cohorts(self._plan.sampling, run.directory.identity().cohorts), deployment.population
        )
        self._cohorts = cohort_source(self._plan, roster, deployment.draws, run.name, secret)
        self._participation = ParticipationLog(run.directory)
        self._registry = deployment.registry(self._cohorts.first_draw)
        self._exchange = ClientExchange(
            deployment.transport, self._registry.nodes, deployment.deadlines, self._before, self._plan.quorum
        )
        self._drawn = CohortDraw(())

    def draw(self, attempt: Attempt) -> tuple[int, ...]:
        """Return the cohort of an attempt, once enough of it is there."""
        self._drawn = self._next(attempt)
        cohort = self._drawn.cohort
        wanted = [client for client in cohort if client not in self._participation.excluded]
        self._deployment.wait(self._registry, attempt, wanted, len(cohort), self._deployment.deadlines.joining)
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
        """Run the protocol's exchanges; clients count their participations themselves."""
        positions = self._deployment.positions
        invite = Invite(
            roster=self._roster,
            opening=self._drawn.opening,
            excluded=self._participation.excluded,
            remembered={} if positions is None else positions.latest(),
            remember=ignore if positions is None else positions.keep,
        )
        try:
            gathered = gather(
                session,
                encode_model(model),
                self._exchange,
                task=self._deployment.task(session.round),
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
        self._deployment.alive()
        if kind is MessageKind.MASK_REQUEST and self._plan.sampling.method is Sampling.ONCE:
            self._participation.use_block()


class StandingFederation:
    """Silos with standing keys, all of a roster, asked in every round (`round.Attempts`).

    A round is one exchange once the keys stand. If a silo is missing, the attempt is void and stays charged; presence
    is then asked for, and the next attempt has the silos that are there.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        roster, positions, run = deployment.roster, deployment.positions, deployment.run
        if roster is None or positions is None:
            raise ConfigError("standing keys are for enrolled silos, got no roster")
        silos = roster.roster.clients
        self._registry = deployment.registry(0)
        # Nobody is given up early: an attempt without one of its members is void, and charged.
        self._exchange = ClientExchange(
            deployment.transport, self._registry.nodes, deployment.deadlines, lambda _kind: None, quorum=len(silos)
        )
        numbers = run.directory.path / _EPOCHS
        self._standing = StandingRun(
            plan=deployment.plan,
            run=run.name,
            roster=roster.roster,
            silos=silos,
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
        """Return the silos of an attempt, once enough are there; keys are agreed on if that is needed.

        Only before the first attempt, and after a void one, is there time for silos to appear.
        """
        deadlines, silos = self._deployment.deadlines, self._standing.silos
        is_patient = self._standing.attempts == 0 or attempt.number > 0
        joining = deadlines.joining if is_patient else deadlines.poll
        self._deployment.wait(self._registry, attempt, silos, len(silos), joining)
        self._exchange.stats.clear()
        return self._standing.members(attempt)

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> standing.Step:
        """Return the step of an attempt."""
        return self._standing.step(attempt, cohort)

    def collect(self, session: standing.Step, model: FloatVector, _participations: Mapping[int, int]) -> OpenSum:
        """Run the one exchange of a step; silos count their vectors themselves."""
        try:
            return self._standing.collect(session, encode_model(model), self._deployment.task(session.round))
        except VoidStep as lack:
            _log.warning(
                "round %d, attempt %d is void and stays charged: %s; so far %d attempts of which %d void: all %d are "
                "charged against the server",
                session.round + 1,
                session.attempt,
                lack,
                self._standing.attempts,
                self._standing.void,
                self._standing.attempts,
            )
            raise

    def exchanges(self) -> tuple[ExchangeRecord, ...]:
        """Return the exchanges of the last attempt."""
        return tuple(self._exchange.stats)
