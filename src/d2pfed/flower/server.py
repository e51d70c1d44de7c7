"""The server's half in a ServerApp: an object that is started as Flower's strategies are, and trains privately."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from safetensors.numpy import save

from d2pfed import canonical
from d2pfed.accounting import Scheme
from d2pfed.codec import FloatVector
from d2pfed.directory import Checkpoint, RunDirectory, open_run
from d2pfed.errors import ConfigError, TooFewClients
from d2pfed.flower.cohorts import Drawn, SecretCohorts, cohort_source, require_lasting
from d2pfed.flower.envelope import Introduction
from d2pfed.flower.grid import Deadlines, GridExchange, Letter, Mail, letter
from d2pfed.flower.layout import Layout, encode_model, encode_task
from d2pfed.flower.members import Members
from d2pfed.flower.notes import Notes, Watched
from d2pfed.flower.positions import Positions
from d2pfed.flower.rosters import SignedRoster
from d2pfed.graph import Consistency
from d2pfed.ledger import Ledger
from d2pfed.plan import Plan
from d2pfed.round import Attempt, Invite, Outcome, aggregate, gather, session_of
from d2pfed.secagg import Session
from d2pfed.secagg.messages import Kind
from d2pfed.secagg.position import Position
from d2pfed.training import Cohorts, RoundRecord, ServerState, ServerStep, train

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
_Config = dict[str, object]  # what training goes by: of the rounds, of the run

_log = logging.getLogger("d2pfed.flower")


@dataclass(frozen=True, slots=True)
class Agreement:
    """What decides a run; the same resumes it, anything else is refused."""

    plan: Plan
    layout: Layout
    step: ServerStep
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
    step: ServerStep = field(default_factory=ServerStep)
    deadlines: Deadlines = field(default_factory=Deadlines)
    make_letter: Letter = field(default=letter, repr=False)

    def __post_init__(self) -> None:
        if self.plan.sampling.scheme is Scheme.POISSON:
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
        run_config: Mapping[str, object] | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Train until `num_rounds` are done (None: all that are planned) and return the model.

        `timeout` is for how many seconds the server waits for the trained vectors of a round. `evaluate_fn` is
        called before the first round and after each, on the server. Clients report nothing but their vectors.
        `run_config` is the app's `context.run_config`, if it has one: clients train only by the same.
        """
        rounds = self.plan.rounds if num_rounds is None else num_rounds
        if not 1 <= rounds <= self.plan.rounds:
            raise ConfigError(f"num_rounds must be in [1, {self.plan.rounds}], as planned, got {rounds}")
        layout = Layout.of(initial_arrays)
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
                mail = Mail(grid, self.make_letter, self.deadlines.poll)
                run = _Run(strategy, mail, directory, book, layout)
                told: tuple[_Config, _Config] = {**(train_config or {})}, {**(run_config or {})}
                return run.execute(layout.flatten(initial_arrays), rounds, told, evaluate_fn)

    def _partition(self) -> bytes:
        is_fixed = self.roster is not None and self.plan.sampling.scheme is Scheme.ONCE
        return self.roster.roster.digest if self.roster is not None and is_fixed else b""


class _Run:
    """A run that is under way."""

    def __init__(
        self, strategy: PrivateFedAvg, mail: Mail, directory: RunDirectory, book: Ledger, layout: Layout
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
        self._notes = Notes(directory)
        self._members = Members(mail, self._introduction(), strategy.population, self._roster)
        self._exchange = GridExchange(mail, self._members.nodes, self._deadlines, self._before)
        self._positions = _positions(strategy)
        self._drawn = Drawn(())

    def _introduction(self) -> Introduction:
        roster = b"" if self._signed is None else self._signed.data
        plan, layout = canonical.encode(self._plan), self._layout.encode()
        return Introduction(self._name, plan, layout, self._cohorts.first_draw, roster)

    def execute(
        self, initial: FloatVector, rounds: int, told: tuple[_Config, _Config], evaluate: Evaluate | None
    ) -> Result:
        """Go on from where the run is; every finished round is on the disk before the next begins."""
        state = self._resume(initial)
        result = Result()
        self._evaluate(result, state, evaluate)

        def once(number: int, params: FloatVector) -> Outcome:
            config, run_config = told
            task = encode_task(self._layout, config | {"server-round": number + 1}, run_config)
            return self._round(number, encode_model(params), task)

        for record in train(state, self._step, rounds, once):
            state = record.state
            self._evaluate(result, state, evaluate)
            self._keep(record, result)
        result.arrays = self._layout.unflatten(state.average)
        self._directory.replace("model.safetensors", save({"params": state.average}))
        return result

    def _round(self, number: int, model: bytes, task: bytes) -> Outcome:
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
        self._drawn = self._next(number, attempt)
        cohort = self._drawn.cohort
        wanted = [client for client in cohort if client not in self._notes.excluded]
        there = self._members.seek(wanted, self._deadlines.joining)
        if len(there) < self._plan.quorum:
            raise TooFewClients(
                f"round {number} needs {self._plan.quorum} of {len(cohort)} clients, {len(there)} came within "
                f"{self._deadlines.joining:g} s; start again to go on",
                there,
            )
        self._exchange.laps.clear()
        return cohort

    def _next(self, number: int, attempt: int) -> Drawn:
        """Return the draw of an attempt; of a partition a block that no charged attempt has.

        A server that died between the reservation and the first request for a vector has charged a block, and has
        not noted it.
        """
        drawn = self._cohorts.draw(number, attempt, self._notes.block)
        if self._plan.sampling.scheme is Scheme.ONCE:
            while any(self._book.taken(self._name, drawn.cohort).values()):
                self._notes.use_block()
                drawn = self._cohorts.draw(number, attempt, self._notes.block)
        return drawn

    def _session(self, attempt: Attempt, cohort: tuple[int, ...]) -> Session:
        drawn = self._drawn
        return session_of(self._plan, attempt, cohort, roster=self._roster, draw=drawn.draw, block=drawn.block)

    def _before(self, kind: Kind) -> None:
        if kind is Kind.MASK_REQUEST and self._plan.sampling.scheme is Scheme.ONCE:
            self._notes.use_block()

    def _gather(self, session: Session, task: bytes, model: bytes) -> Watched:
        invite = Invite(
            roster=self._roster,
            opening=self._drawn.opening,
            remembered={} if self._positions is None else self._positions.latest(),
            remember=self._remember,
            excluded=self._notes.excluded,
        )
        try:
            gathered = gather(
                session, model, self._exchange, task=task, invite=invite, refused=self._exchange.refused
            )
        except TooFewClients as lack:
            _log.warning("round %d, attempt %d is void: %s", session.round + 1, session.attempt, lack)
            self._notes.exclude(lack.blamed)
            raise
        return Watched(gathered, self._notes)

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
        laps = [asdict(lap) for lap in self._exchange.laps]
        line = {
            "round": record.round,
            "attempt": record.attempt,
            "survivors": record.survivors,
            "update_norm": record.update_norm,
            "epsilon": self._plan.epsilon,  # of all attempts, whatever was seen when other runs were begun
            "metrics": dict(metrics),
            "exchanges": laps,
        }
        self._directory.append(line)
        self._directory.save(Checkpoint(record.state, self._book.head().encode()))
        charged, most = self._book.charged(self._name), self._plan.max_attempts
        _log.info("round %d: %d survivors, %d of %d attempts", record.round, record.survivors, charged, most)
        for lap in self._exchange.laps:
            _log.info("  %-14s %d of %d in %.1f s", lap.exchange, lap.answered, lap.asked, lap.seconds)

    def _evaluate(self, result: Result, state: ServerState, evaluate: Evaluate | None) -> None:
        metrics = evaluate(state.rounds, self._layout.unflatten(state.average)) if evaluate else None
        if metrics is not None:
            result.evaluate_metrics_serverapp[state.rounds] = metrics


def _positions(strategy: PrivateFedAvg) -> Positions | None:
    """Return the server's memory of its clients' positions: one file for each authority, beside the ledger."""
    if strategy.roster is None:
        return None
    folder = strategy.directory if strategy.ledger is None else strategy.ledger.parent
    roster = strategy.roster.roster
    return Positions(folder / f"positions-{roster.authority.hex()[:16]}", roster.keys)
