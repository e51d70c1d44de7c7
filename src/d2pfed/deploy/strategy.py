"""A private run over any engine: its plan, its clients and its directory, and the training that an engine carries."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Self

from safetensors.numpy import save

from d2pfed.accounting import Sampling
from d2pfed.deploy.federation import CohortFederation, Deployment, StandingFederation, require_lasting
from d2pfed.deploy.layout import Layout, NamedArrays
from d2pfed.deploy.monitoring import Callback, Monitor, shown_progress
from d2pfed.deploy.rosters import SignedRoster
from d2pfed.deploy.state import may_outlive_rounds
from d2pfed.deploy.targets import complete_target, read_server_directory, trained_sizes
from d2pfed.deploy.transport import Deadlines, Engine, Pace, Transport
from d2pfed.errors import BudgetExceeded, ConfigError
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.canonical import OMITTED_IF_DEFAULT
from d2pfed.plan import Plan, PrivacyTarget, Protocol, calibrate, require_deployable
from d2pfed.runs import ArrayShape, End, Run, RunSettings, open_run
from d2pfed.statistics.questions import QUESTIONS
from d2pfed.training import ServerOptimizer

# Returns the server's own metrics of the model after a number of rounds.
Evaluate = Callable[[int, NamedArrays], Mapping[str, float]]

BEST = "best.safetensors"  # beside the last model, in the run's directory


class KeyUse(StrEnum):
    """How long the keys live under which vectors are masked."""

    ATTEMPT = "attempt"  # some exchanges a round, dropouts are tolerated
    STANDING = "standing"  # one exchange a round, void and tried again if a silo is missing


@dataclass(frozen=True, slots=True)
class _Deployed:
    """What decides a deployed run beside what every run has."""

    plan: Plan
    layout: Layout
    clients: tuple[int, ...]
    partition: bytes  # digest of the roster that a partition of the clients belongs to; empty for other samplings
    question: tuple[tuple[str, str], ...] = field(default=(), metadata=OMITTED_IF_DEFAULT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Federated averaging that sees no client's update, and spends no more than its plan says.

    With a roster, clients sign what they send and what they were sent, and the server cannot make up clients of its
    own; where the roster has draws, `draws` is the server's file of them, and every client computes its cohort itself.
    Without a roster the server is believed to keep to the protocol, and clients are numbered from 0: for simulations.
    `directory` keeps the run: started again with the same, it goes on after the last finished round.

    Guarantee: the ledger in `directory` has a row before masked vectors are asked for and the realised release
    before they are unmasked. Checked: test_flower_federation.py::test_the_ledger_has_the_realised_survivors.

    Attributes:
        plan: what clients and server agree on.
        directory: where the run is kept.
        roster: who is enrolled; None for simulations.
        draws: the server's file of draws, where the roster has some.
        ledger: one that other runs over these clients share; None: the directory's own.
        positions: directory where the server remembers how far its clients' logs are, which all its runs share; None:
            that of the ledger.
        target: what the plan was calibrated for, so that the report can say it; None if it is not known.
        optimizer: how the server moves the model.
        deadlines: how many seconds the server waits.
        keys: whether clients agree on keys for each attempt, or silos once for the run; None: as the plan says.
        trained: names of the arrays that are trained, while the others stay with the clients; None: all.
        run_config: the run's configuration as the engine brings it, which clients compare with their own.
    """

    plan: Plan
    directory: Path
    roster: SignedRoster | None
    draws: Path | None = None
    ledger: Path | None = None
    positions: Path | None = None
    target: PrivacyTarget | None = None
    optimizer: ServerOptimizer = field(default_factory=ServerOptimizer)
    deadlines: Deadlines = field(default_factory=Deadlines)
    keys: KeyUse | None = None
    trained: tuple[str, ...] | None = None
    run_config: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        if len(self.population) != self.plan.sampling.population:
            raise ConfigError(
                f"the roster must have the {self.plan.sampling.population} clients of the plan's population, "
                f"got {len(self.population)}"
            )
        if self.keys is not None:
            object.__setattr__(self, "keys", KeyUse(self.keys))
        if self.keys is KeyUse.STANDING and self.roster is None:
            raise ConfigError("standing keys are for enrolled silos, got no roster")
        is_lattice = self.plan.protocol is Protocol.LATTICE
        if is_lattice and self.keys is KeyUse.STANDING:
            raise ConfigError("the plan runs in the lattice protocol, which has no standing keys")
        once = Protocol.LATTICE if is_lattice else Protocol.PAIRWISE
        protocol = Protocol.STANDING if self.has_standing_keys else once
        require_deployable(protocol, self.plan, None if self.roster is None else len(self.population))

    @classmethod
    def planned(
        cls,
        privacy: PrivacyTarget | Mapping[str, object],
        model: object,
        run_config: Mapping[str, object],
        *,
        optimizer: ServerOptimizer | None = None,
        deadlines: Deadlines | None = None,
        keys: KeyUse | None = None,
        ledger: Path | None = None,
        personal: Sequence[str] = (),
        max_weight: float | None = None,
        count_failures: bool = False,
    ) -> Self:
        """Return the strategy that trains a model within a privacy target.

        The run's configuration names the server's directory (`d2pfed-directory`), which has the signed `roster`, the
        public key of the `authority` that has signed it and the server's `draws`, and keeps the runs: `run`, then
        `run-2` and so on, or those that `d2pfed-run` names. A run that is done is followed by a new one. Dimension,
        population, rounds, sampling, participations and noise follow from model, roster and configuration.
        """
        directory, roster, draws = read_server_directory(run_config)
        sizes = trained_sizes(model, (personal,) if isinstance(personal, str) else personal)
        target = complete_target(privacy, sizes, roster, run_config)
        plan = calibrate(target, max_weight, count_failures=count_failures)
        if personal and not may_outlive_rounds(plan):
            raise ConfigError("personal layers cannot be kept behind drawn cohorts: ask everyone in every round")
        return cls(
            plan=plan,
            directory=directory,
            roster=roster,
            draws=draws,
            ledger=ledger,
            positions=directory.parent if ledger is None else None,
            target=target,
            optimizer=optimizer or ServerOptimizer(),
            deadlines=deadlines or Deadlines(),
            keys=keys,
            trained=tuple(sizes),
            run_config=dict(run_config),
        )

    @property
    def population(self) -> tuple[int, ...]:
        """All clients that can be chosen."""
        return tuple(range(self.plan.sampling.population)) if self.roster is None else self.roster.roster.clients

    @property
    def has_standing_keys(self) -> bool:
        """Whether silos keep keys for the run, so that a round is one exchange."""
        chosen = self.plan.protocol is Protocol.STANDING if self.keys is None else self.keys is KeyUse.STANDING
        return chosen and self.roster is not None

    def train(
        self,
        engine: Engine,
        arrays: NamedArrays,
        *,
        over: str,
        rounds: int | None = None,
        timeout: float = 3600.0,
        config: Mapping[str, object] | None = None,
        run_config: Mapping[str, object] | None = None,
        evaluate: Evaluate | None = None,
        best: str | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> NamedArrays:
        """Train until `rounds` are done (None: all that are planned) and return the whole model.

        Args:
            engine: carries requests to clients and answers back.
            arrays: the model before the first round.
            over: the engine's name, for the report.
            rounds: after how many rounds to stop.
            timeout: for how many seconds the server waits for the trained vectors of a round.
            config: what clients train with.
            run_config: in place of the strategy's own.
            evaluate: called before the first round and after each, on the server.
            best: names one of its metrics: the model for which it is the greatest is kept as `best.safetensors`.
            callbacks: called after each round with its record and a function that returns the model; one that returns
                False ends the run, which goes on when it is started again.
        """
        rounds = self.plan.rounds if rounds is None else rounds
        if not 1 <= rounds <= self.plan.rounds:
            raise ConfigError(f"num_rounds must be in [1, {self.plan.rounds}], as planned, got {rounds}")
        layout = Layout.of(arrays, self.trained)
        if layout.dimension != self.plan.dimension:
            raise ConfigError(
                f"the arrays must have the plan's {self.plan.dimension} parameters, got {layout.dimension}"
            )
        deadlines, partition = replace(self.deadlines, training=timeout), b""
        if self.roster is not None:
            require_lasting(self.roster.roster, self.plan, deadlines)
            partition = self.roster.roster.digest if self.plan.sampling.method is Sampling.ONCE else b""
        # An answer belongs to its question: another one under the same name is refused.
        question = tuple((key, str(config[key])) for key in QUESTIONS if config and key in config)
        settings = RunSettings(
            title=f"Federation over {over}, {len(self.population):,} clients",
            data="The clients' own data, which nobody else has seen.",
            target=self.target,
            rounds=self.plan.rounds,
            optimizer=self.optimizer,
            arrays=tuple(ArrayShape(entry.name, entry.shape) for entry in layout.entries),
            is_deployed=True,
            details=_Deployed(self.plan, layout, self.population, partition, question),
        )
        initial = layout.flatten(arrays)
        with (
            shown_progress(self.plan),
            open_run(self.directory, settings, self.plan, initial, ledger=self.ledger) as run,
        ):
            evaluator = ServerEvaluation(layout, evaluate, run, best)
            evaluator.validate(run.state.rounds, run.state.average)
            transport = Transport(engine, Pace(self.deadlines.poll))
            monitor = Monitor(
                self.directory,
                run.name,
                self.plan,
                transport.refusals,
                callbacks,
                lambda: evaluator.model(run.last_model()),
            )
            transport.alive = monitor.write
            deployment = Deployment(
                plan=self.plan,
                roster=self.roster,
                transport=transport,
                run=run,
                layout=layout,
                config=config or {},
                run_config=run_config or self.run_config or {},
                deadlines=deadlines,
                positions=self.positions or (self.directory if self.ledger is None else self.ledger.parent),
                population=self.population,
                draws=self.draws,
            )
            if self.has_standing_keys:
                silos = StandingFederation(deployment)
                monitor.callbacks = (silos.note_silos, *callbacks)
                summary = run.train(silos, evaluator, monitor, rounds)
            else:
                summary = run.train(CohortFederation(deployment), evaluator, monitor, rounds)
            if summary.end is End.EXHAUSTED:
                raise BudgetExceeded(summary.stopped)
        return evaluator.model(run.last_model())


class ServerEvaluation:
    """Evaluates each model once, with the server's own data, and keeps the one whose metric `best` is the greatest."""

    def __init__(self, layout: Layout, evaluate: Evaluate | None, run: Run, best: str | None) -> None:
        self._layout = layout
        self._evaluate = evaluate
        self._run = run
        self._best = best
        self._found: dict[int, Mapping[str, float]] = {}  # by the number of rounds
        before = [record.metrics.get(best or "", -math.inf) for record in run.records()]
        self._greatest = max(before, default=-math.inf)

    def validate(self, rounds: int, params: FloatVector) -> dict[str, float]:
        """Return the server's metrics of the model after this number of rounds; none if it has no evaluation."""
        is_new = rounds not in self._found
        if is_new:
            self._found[rounds] = {} if self._evaluate is None else self._evaluate(rounds, self.model(params))
        metrics = dict(self._found[rounds])
        if is_new and rounds and self._best in metrics and metrics[self._best] > self._greatest:
            self._greatest = metrics[self._best]
            self._run.directory.replace(BEST, save(self._layout.unflatten(params)))
        return metrics

    def test(self, _params: FloatVector) -> dict[str, float]:
        """Return nothing: a deployment has no test data of its own."""
        return {}

    def model(self, params: FloatVector) -> NamedArrays:
        """Return the whole model of these parameters: what stays local is as before the first round."""
        return self._layout.unflatten(params) | self._layout.initial_local()
