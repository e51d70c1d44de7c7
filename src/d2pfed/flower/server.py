"""The server's half in a ServerApp: an object that is started as Flower's strategies are, and trains privately."""

import logging
from collections.abc import Callable
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
from d2pfed.flower.envelope import Introduction
from d2pfed.flower.grid import Deadlines, GridExchange, Letter, Mail, letter
from d2pfed.flower.layout import Layout, encode_model
from d2pfed.flower.members import Members
from d2pfed.ledger import Ledger
from d2pfed.plan import Plan
from d2pfed.round import Attempt, Masked, Outcome, aggregate, gather
from d2pfed.secagg import Roster, Session
from d2pfed.training import Cohorts, RoundRecord, ServerState, ServerStep, train

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]

_log = logging.getLogger("d2pfed.flower")


@dataclass(frozen=True, slots=True)
class Agreement:
    """What decides a run; the same resumes it, anything else is refused."""

    plan: Plan
    layout: Layout
    step: ServerStep
    clients: tuple[int, ...]
    is_signed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateFedAvg:
    """Federated averaging that sees no client's update, and spends no more than its plan says.

    With a roster, clients sign what they send and were told, and the server cannot make up clients of its own.
    Without one the server is believed to keep to the protocol, and clients are numbered from 0: for simulations.
    `directory` keeps the run: started again with the same, it goes on after the last finished round.

    Guarantee: the ledger in `directory` has a row before masked vectors are asked for and the realised release
    before they are unmasked. Checked: test_flower_federation.py::test_the_ledger_has_the_realised_survivors.
    """

    plan: Plan
    directory: Path
    roster: Roster | None
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

    @property
    def population(self) -> tuple[int, ...]:
        """All clients that can be chosen."""
        return tuple(range(self.plan.sampling.population) if self.roster is None else sorted(self.roster.keys))

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
        layout = Layout.of(initial_arrays)
        if layout.dimension != self.plan.codec.rotation.dimension:
            raise ConfigError(
                f"the arrays must have the plan's {self.plan.codec.rotation.dimension} parameters, "
                f"got {layout.dimension}"
            )
        agreement = Agreement(self.plan, layout, self.step, self.population, self.roster is not None)
        with RunDirectory.open(self.directory, canonical.encode(agreement)) as directory:
            directory.replace("plan.json", canonical.encode(self.plan).encode())
            name = f"{directory.path.name}-{directory.identity().name}"
            with open_run(directory, self.plan, name, self.ledger, directory.load()) as book:
                mail = Mail(grid, self.make_letter, self.deadlines.poll)
                run = _Run(
                    replace(self, deadlines=replace(self.deadlines, training=timeout)),
                    mail,
                    directory,
                    book,
                    layout,
                )
                return run.execute(layout.flatten(initial_arrays), rounds, dict(train_config or {}), evaluate_fn)


class _Run:
    """A run that is under way."""

    def __init__(
        self,
        strategy: PrivateFedAvg,
        mail: Mail,
        directory: RunDirectory,
        book: Ledger,
        layout: Layout,
    ) -> None:
        self._plan = strategy.plan
        self._roster = strategy.roster
        self._step = strategy.step
        self._population = strategy.population
        self._directory = directory
        self._book = book
        self._layout = layout
        self._deadlines = strategy.deadlines
        identity = directory.identity()
        self._name = f"{directory.path.name}-{identity.name}"
        self._cohorts = Cohorts(self._plan.sampling, identity.cohorts)
        introduction = Introduction(self._name, canonical.encode(self._plan), layout.encode())
        self._members = Members(mail, introduction, self._population, self._roster)
        self._exchange = GridExchange(mail, self._members.nodes, self._deadlines)

    def execute(
        self, initial: FloatVector, rounds: int, config: dict[str, object], evaluate: Evaluate | None
    ) -> Result:
        """Go on from where the run is; every finished round is on the disk before the next begins."""
        state = self._resume(initial)
        result = Result()
        self._evaluate(result, state, evaluate)

        def once(number: int, params: FloatVector) -> Outcome:
            return self._round(number, encode_model(params, config | {"server-round": number + 1}))

        for record in train(state, self._step, rounds, once):
            state = record.state
            self._evaluate(result, state, evaluate)
            self._keep(record, result)
        result.arrays = self._layout.unflatten(state.average)
        self._directory.replace("model.safetensors", save({"params": state.average}))
        return result

    def _round(self, number: int, model: bytes) -> Outcome:
        first = self._book.next_attempt(self._name, number)
        cohort = self._draw(number, first)
        there = self._members.seek(cohort, self._deadlines.joining)
        if len(there) < self._plan.quorum:
            raise TooFewClients(
                f"round {number} needs {self._plan.quorum} of {len(cohort)} clients, {len(there)} came within "
                f"{self._deadlines.joining:g} s; start again to go on",
                there,
            )
        self._exchange.laps.clear()
        return aggregate(
            self._plan,
            Attempt(self._name, number, first),
            lambda attempt: self._draw(number, attempt),
            lambda session, _taken: self._gather(session, model),
            self._book,
        )

    def _draw(self, number: int, attempt: int) -> tuple[int, ...]:
        places = self._cohorts.draw(number, attempt, self._book.charged(self._name))
        return tuple(self._population[place] for place in places)

    def _gather(self, session: Session, model: bytes) -> Masked:
        try:
            return gather(session, model, self._exchange, self._roster, self._exchange.refused)
        except TooFewClients as lack:
            _log.warning("round %d, attempt %d is void: %s", session.round + 1, session.attempt, lack)
            raise

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
            "epsilon": self._book.spent(),
            "metrics": dict(metrics),
            "exchanges": laps,
        }
        self._directory.append(line)
        self._directory.save(Checkpoint(record.state, self._book.head().encode()))
        _log.info("round %d: %d survivors, epsilon %.4g", record.round, record.survivors, self._book.spent())
        for lap in self._exchange.laps:
            _log.info("  %-14s %d of %d in %.1f s", lap.exchange, lap.answered, lap.asked, lap.seconds)

    def _evaluate(self, result: Result, state: ServerState, evaluate: Evaluate | None) -> None:
        metrics = evaluate(state.rounds, self._layout.unflatten(state.average)) if evaluate else None
        if metrics is not None:
            result.evaluate_metrics_serverapp[state.rounds] = metrics
