"""The server's half of standing keys over Flower: one exchange for each attempt at a round."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

from d2pfed.errors import TooFewClients, VoidStep
from d2pfed.flower.grid import Deadlines, GridExchange, GridTransport, ask_presence
from d2pfed.flower.layout import Layout, encode_model, encode_task
from d2pfed.flower.positions import Positions
from d2pfed.flower.registry import NodeRegistry
from d2pfed.flower.requests import RunAnnouncement
from d2pfed.flower.rosters import SignedRoster
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics import canonical
from d2pfed.plan import Plan
from d2pfed.round import Attempt, OpenSum, StandingRun
from d2pfed.round.standing import ASSUMPTIONS
from d2pfed.runs import ExchangeRecord, Run
from d2pfed.secagg import StandingStep

_log = logging.getLogger("d2pfed.flower")

_EPOCHS = "epochs"  # file in the run's directory: the number of the next epoch


class StandingSilos:
    """Silos behind Flower's grid, all of a roster, asked in every round.

    A round is one exchange once the keys stand. If a silo is missing, the attempt is void and stays charged; presence
    is then asked for, and the next attempt has the silos that are there.
    """

    def __init__(
        self,
        plan: Plan,
        roster: SignedRoster,
        transport: GridTransport,
        run: Run,
        layout: Layout,
        *,
        configs: tuple[dict[str, object], dict[str, object]],
        deadlines: Deadlines,
        positions: Positions,
    ) -> None:
        self._plan = plan
        self._transport = transport
        self._layout = layout
        self._configs = configs
        self._deadlines = deadlines
        silos = roster.roster.clients
        announcement = RunAnnouncement(run.name, canonical.encode(plan), layout.encode(), 0, roster.data)
        self._registry = NodeRegistry(transport, announcement, silos, roster.roster)
        # Nobody is given up early: an attempt without one of its members is void, and charged.
        self._exchange = GridExchange(
            transport, self._registry.nodes, deadlines, lambda _kind: None, quorum=len(silos)
        )
        numbers = run.directory.path / _EPOCHS
        self._standing = StandingRun(
            plan=plan,
            run=run.name,
            roster=roster.roster,
            silos=silos,
            exchange=self._exchange,
            presence=self._presence,
            remembered=positions.latest(),
            remember=positions.keep,
            refused=self._exchange.refused,
            epochs=int(numbers.read_text()) if numbers.exists() else 0,
            note_epochs=lambda number: run.directory.replace(_EPOCHS, str(number).encode()),
        )
        _log.info("%s", ASSUMPTIONS.format(colluders=plan.colluders))

    def draw(self, attempt: Attempt) -> tuple[int, ...]:
        """Return the silos of an attempt, once enough are there; keys are agreed on if that is needed."""
        waiting = replace(self._deadlines, joining=self._waiting(attempt))
        there = self._registry.wait_for(self._standing.silos, waiting, self._plan.quorum)
        if len(there) < self._plan.quorum:
            raise TooFewClients(
                f"round {attempt.round} needs {self._plan.quorum} of {len(self._standing.silos)} silos, {len(there)} "
                f"came within {self._deadlines.joining:g} s; start again to go on",
                there,
            )
        self._exchange.stats.clear()
        return self._standing.members(attempt)

    def _waiting(self, attempt: Attempt) -> float:
        """Return for how long silos may appear: before the first attempt, for as long as is planned."""
        is_first = self._standing.attempts == 0
        return self._deadlines.joining if is_first or attempt.number else self._deadlines.poll

    def bind(self, attempt: Attempt, cohort: tuple[int, ...]) -> StandingStep:
        """Return the step of an attempt."""
        return self._standing.step(attempt, cohort)

    def collect(self, session: StandingStep, model: FloatVector, _participations: Mapping[int, int]) -> OpenSum:
        """Run the one exchange of a step; silos count their vectors themselves."""
        config, run_config = self._configs
        task = encode_task(self._layout, config | {"server-round": session.round + 1}, run_config)
        try:
            return self._standing.collect(session, encode_model(model), task)
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

    def _presence(self, asked: Collection[int], epoch: bytes) -> Mapping[int, bool]:
        nodes = {client: node for client, node in self._registry.nodes.items() if client in asked}
        return ask_presence(self._transport, nodes, epoch, self._deadlines.keys)
