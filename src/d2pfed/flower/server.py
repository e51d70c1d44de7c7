"""The server's half in a ServerApp: an object that is started as Flower's strategies are, and trains privately."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from safetensors.numpy import save

from d2pfed.accounting import Sampling
from d2pfed.errors import ConfigError, TooFewClients
from d2pfed.flower.cohorts import (
    BlameTracking,
    CohortDraw,
    ParticipationLog,
    SecretCohorts,
    cohort_source,
    require_lasting,
)
from d2pfed.flower.grid import (
    Deadlines,
    GridExchange,
    GridTransport,
    MessageFactory,
    NodeRegistry,
    make_message,
)
from d2pfed.flower.layout import Layout, encode_model, encode_task
from d2pfed.flower.positions import Positions
from d2pfed.flower.records import to_array_record, to_named_arrays
from d2pfed.flower.requests import RunAnnouncement
from d2pfed.flower.rosters import SignedRoster
from d2pfed.ledger import Ledger
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics import canonical
from d2pfed.plan import Plan
from d2pfed.round import Attempt, Invite, Outcome, aggregate, gather, session_of
from d2pfed.runs.directory import Checkpoint, RunDirectory, open_run
from d2pfed.secagg import Session
from d2pfed.secagg.graph import Consistency
from d2pfed.secagg.messages import MessageKind
from d2pfed.secagg.position import Position
from d2pfed.training import Cohorts, RoundRecord, ServerOptimizer, ServerState, train

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]

_log = logging.getLogger("d2pfed.flower")


@dataclass(frozen=True, slots=True)
class Agreement:
    """What decides a run; the same resumes it, anything else is refused."""

    plan: Plan
    layout: Layout
    step: ServerOptimizer
    clients: tuple[int, ...]
    partition: bytes  # digest of the roster that a partition of the clients belongs to; empty for other schemes


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateFedAvg:
    """Federated averaging that sees no client's update, and spends no more than its plan says.

    With a roster, clients sign what they send and were told, and the server cannot make up clients of its own; where
    the roster has draws, `draws` is the server's file of them, and every client computes its cohort itself. Without a
    roster the server is believed to keep to the protocol, and clients are numbered from 0: for simulations.
    `directory` keeps the run: started again with the same, it goes on after the last finished round.

    Guarantee: the ledger in `directory` has a row before masked vectors are asked for and the realised release
    before they are unmasked. Checked: test_flower_federation.py::test_the_ledger_has_the_realised_survivors.
    """

    plan: Plan
    directory: Path
    roster: SignedRoster | None
    draws: Path | None = None
    ledger: Path | None = None  # one that other runs over these clients share; None: the directory's own
    step: ServerOptimizer = field(default_factory=ServerOptimizer)
    deadlines: Deadlines = field(default_factory=Deadlines)
    message_factory: MessageFactory = field(default=make_message, repr=False)

    def __post_init__(self) -> None:
        if self.plan.sampling.method is Sampling.POISSON:
            raise ConfigError(
                "poisson sampling needs secret cohort sizes, and whoever runs a SuperLink counts messages"
            )
        if len(self.population) != self.plan.sampling.population:
            raise ConfigError(
                f"the roster must have the {self.plan.sampling.population} clients of the plan's population, "
                f"got {len(self.population)}"
            )
        expected = Consistency.ASSUMED if self.roster is None else Consistency.SIGNED
        if self.plan.consistency is not expected:
            raise ConfigError(
                f"the plan's consistency must be {expected.value}, got {self.plan.consistency.value}"
            )

    @property
    def population(self) -> tuple[int, ...]:
        """All clients that can be chosen."""
        return tuple(range(self.plan.sampling.population)) if self.roster is None else self.roster.roster.clients

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float = 3600.0,
        *,
        train_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Train until `num_rounds` are done (None: all that are planned) and return the model.

        `timeout` is for how many seconds the server waits for the trained vectors of a round. `evaluate_fn` is
        called before the first round and after each, on the server. Clients report nothing but their vectors.
        """
        rounds = self.plan.rounds if num_rounds is None else num_rounds
        if not 1 <= rounds <= self.plan.rounds:
            raise ConfigError(f"num_rounds must be in [1, {self.plan.rounds}], as planned, got {rounds}")
        layout = Layout.of(arrays := to_named_arrays(initial_arrays))
        if layout.dimension != self.plan.codec.rotation.dimension:
            raise ConfigError(
                f"the arrays must have the plan's {self.plan.codec.rotation.dimension} parameters, "
                f"got {layout.dimension}"
            )
        strategy = replace(self, deadlines=replace(self.deadlines, training=timeout))
        if self.roster is not None:
            require_lasting(self.roster.roster, self.plan, strategy.deadlines)
        agreement = Agreement(self.plan, layout, self.step, self.population, self._partition())
        with RunDirectory.open(self.directory, canonical.encode(agreement)) as directory:
            directory.replace("plan.json", canonical.encode(self.plan).encode())
            name = f"{directory.path.name}-{directory.identity().name}"
            with open_run(directory, self.plan, name, self.ledger, directory.load()) as book:
                transport = GridTransport(grid, self.message_factory, self.deadlines.poll)
                run = _Run(strategy, transport, directory, book, layout)
                return run.execute(layout.flatten(arrays), rounds, dict(train_config or {}), evaluate_fn)

    def _partition(self) -> bytes:
        is_fixed = self.roster is not None and self.plan.sampling.method is Sampling.ONCE
        return self.roster.roster.digest if self.roster is not None and is_fixed else b""


class _Run:
    """A run that is under way."""

    def __init__(
        self,
        strategy: PrivateFedAvg,
        transport: GridTransport,
        directory: RunDirectory,
        book: Ledger,
        layout: Layout,
    ) -> None:
        self._plan = strategy.plan
        self._signed = strategy.roster
        self._roster = None if strategy.roster is None else strategy.roster.roster
        self._step = strategy.step
        self._directory = directory
        self._book = book
        self._layout = layout
        self._deadlines = strategy.deadlines
        identity = directory.identity()
        self._name = f"{directory.path.name}-{identity.name}"
        secret = SecretCohorts(Cohorts(self._plan.sampling, identity.cohorts), strategy.population)
        self._cohorts = cohort_source(self._plan, self._signed, strategy.draws, self._name, secret)
        self._participation = ParticipationLog(directory)
        self._registry = NodeRegistry(transport, self._announcement(), strategy.population, self._roster)
        self._exchange = GridExchange(transport, self._registry.nodes, self._deadlines, self._before)
        self._positions = _positions(strategy)
        self._drawn = CohortDraw(())

    def _announcement(self) -> RunAnnouncement:
        roster = b"" if self._signed is None else self._signed.data
        plan, layout = canonical.encode(self._plan), self._layout.encode()
        return RunAnnouncement(self._name, plan, layout, self._cohorts.first_draw, roster)

    def execute(
        self, initial: FloatVector, rounds: int, config: dict[str, object], evaluate: Evaluate | None
    ) -> Result:
        """Go on from where the run is; every finished round is on the disk before the next begins."""
        state = self._resume(initial)
        result = Result()
        self._evaluate(result, state, evaluate)

        def once(number: int, params: FloatVector) -> Outcome:
            return self._round(number, encode_model(params), config | {"server-round": number + 1})

        for record in train(state, self._step, rounds, once):
            state = record.state
            self._evaluate(result, state, evaluate)
            self._keep(record, result)
        result.arrays = to_array_record(self._layout.unflatten(state.average))
        self._directory.replace("model.safetensors", save({"params": state.average}))
        return result

    def _round(self, number: int, model: bytes, config: dict[str, object]) -> Outcome:
        task = encode_task(self._layout, config)
        return aggregate(
            self._plan,
            Attempt(self._name, number, self._book.next_attempt(self._name, number)),
            lambda attempt: self._draw(number, attempt),
            lambda session, _taken: self._gather(session, task, model),
            self._book,
            bind=self._session,
        )

    def _draw(self, number: int, attempt: int) -> tuple[int, ...]:
        """Return the cohort of an attempt, once enough of it is there."""
        self._drawn = self._cohorts.draw(number, attempt, self._participation.block)
        cohort = self._drawn.cohort
        wanted = [client for client in cohort if client not in self._participation.excluded]
        there = self._registry.wait_for(wanted, self._deadlines.joining)
        if len(there) < self._plan.quorum:
            raise TooFewClients(
                f"round {number} needs {self._plan.quorum} of {len(cohort)} clients, {len(there)} came within "
                f"{self._deadlines.joining:g} s; start again to go on",
                there,
            )
        self._exchange.stats.clear()
        return cohort

    def _session(self, attempt: Attempt, cohort: tuple[int, ...]) -> Session:
        drawn = self._drawn
        return session_of(self._plan, attempt, cohort, roster=self._roster, draw=drawn.draw, block=drawn.block)

    def _before(self, kind: MessageKind) -> None:
        if kind is MessageKind.MASK_REQUEST and self._plan.sampling.method is Sampling.ONCE:
            self._participation.use_block()

    def _gather(self, session: Session, task: bytes, model: bytes) -> BlameTracking:
        invite = Invite(
            roster=self._roster,
            opening=self._drawn.opening,
            remembered={} if self._positions is None else self._positions.latest(),
            remember=self._remember,
            excluded=self._participation.excluded,
        )
        try:
            gathered = gather(
                session, model, self._exchange, task=task, invite=invite, refused=self._exchange.refused
            )
        except TooFewClients as lack:
            _log.warning("round %d, attempt %d is void: %s", session.round + 1, session.attempt, lack)
            self._participation.exclude(lack.blamed)
            raise
        return BlameTracking(gathered, self._participation)

    def _remember(self, shown: Mapping[int, Position]) -> None:
        if self._positions is not None:
            self._positions.keep(shown)

    def _resume(self, initial: FloatVector) -> ServerState:
        checkpoint = self._directory.load()
        if checkpoint is None:
            self._directory.keep_metrics(0)
            return self._step.start(initial)
        self._directory.keep_metrics(checkpoint.state.rounds)
        return checkpoint.state

    def _keep(self, record: RoundRecord, result: Result) -> None:
        metrics = result.evaluate_metrics_serverapp.get(record.round, MetricRecord())
        exchanges = [asdict(each) for each in self._exchange.stats]
        line = {
            "round": record.round,
            "attempt": record.attempt,
            "survivors": record.survivors,
            "update_norm": record.update_norm,
            "epsilon": self._book.spent(),
            "metrics": dict(metrics),
            "exchanges": exchanges,
        }
        self._directory.append(line)
        self._directory.save(Checkpoint(record.state, self._book.head().encode()))
        _log.info("round %d: %d survivors, epsilon %.4g", record.round, record.survivors, self._book.spent())
        for each in self._exchange.stats:
            _log.info("  %-14s %d of %d in %.1f s", each.exchange, each.answered, each.asked, each.seconds)

    def _evaluate(self, result: Result, state: ServerState, evaluate: Evaluate | None) -> None:
        metrics = (
            evaluate(state.rounds, to_array_record(self._layout.unflatten(state.average))) if evaluate else None
        )
        if metrics is not None:
            result.evaluate_metrics_serverapp[state.rounds] = metrics


def _positions(strategy: PrivateFedAvg) -> Positions | None:
    """Return the server's memory of its clients' positions: one file for each authority, beside the ledger."""
    if strategy.roster is None:
        return None
    folder = strategy.directory if strategy.ledger is None else strategy.ledger.parent
    roster = strategy.roster.roster
    return Positions(folder / f"positions-{roster.authority.hex()[:16]}", roster.keys)
