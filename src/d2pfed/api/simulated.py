"""A simulated run: its settings, plan and clients brought together with the driver."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from d2pfed.accounting import CohortSampling, Sampling
from d2pfed.learning import Model
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import Plan
from d2pfed.round import can_stand
from d2pfed.runs import ArrayShape, Evaluator, Listener, Run, RunSettings, RunSummary, StopRule, open_run
from d2pfed.simulation import Backend, ClearFederation, Dropouts, Fidelity, SimulatedFederation, StandingFederation
from d2pfed.simulation.rehearsal import rehearse
from d2pfed.training import Cohorts


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A run over clients on this machine, private by a plan, or in the clear."""

    settings: RunSettings
    plan: Plan | None = field(repr=False)  # None: in the clear
    sampling: CohortSampling
    initial: FloatVector = field(repr=False)
    dropouts: Dropouts
    fidelity: Fidelity

    def execute(
        self,
        path: Path,
        ledger: Path | None,
        evaluator: Evaluator,
        listening: Callable[[Run], Listener],
        backend: Backend,
        *,
        evaluate_every: int = 1,
        stop: StopRule | None = None,
    ) -> RunSummary:
        """Train from where the run is to its end, its budget's end, or the listener's request to stop.

        The backend is closed at the end.
        """
        with closing(backend), self.open(path, ledger) as run:
            listen = listening(run)
            if self.plan is None:
                clear = self.clear_federation(run, backend)
                return run.train_in_the_clear(clear, evaluator, listen, evaluate_every=evaluate_every, stop=stop)
            if run.state.rounds == 0:  # once, before anybody's data is touched
                rehearse(self.plan.codec.length, self.plan.ring.bits, Entropy.system())
            if self.plan.uses_standing_keys and can_stand(self.plan):
                silos = self.standing_federation(run, self.plan, backend)
                return run.train(silos, evaluator, listen, evaluate_every=evaluate_every, stop=stop)
            private = self.federation(run, self.plan, backend)
            return run.train(private, evaluator, listen, evaluate_every=evaluate_every, stop=stop)

    @contextmanager
    def open(self, path: Path, ledger: Path | None) -> Iterator[Run]:
        """Open the run in its directory."""
        with open_run(path, self.settings, self.plan, self.initial, ledger=ledger) as run:
            yield run

    def standing_federation(self, run: Run, plan: Plan, backend: Backend) -> StandingFederation:
        """Return silos with standing keys, whose sums are private."""
        return StandingFederation(
            plan=plan,
            run=run.name,
            backend=backend,
            dropouts=self.dropouts,
            fidelity=self.fidelity,
            entropy=self._entropy().child("clients"),
        )

    def federation(self, run: Run, plan: Plan, backend: Backend) -> SimulatedFederation:
        """Return the clients whose sums are private."""
        return SimulatedFederation(
            plan=plan,
            backend=backend,
            cohorts=self._cohorts(run, plan.sampling),
            dropouts=self.dropouts,
            fidelity=self.fidelity,
            entropy=self._entropy().child("clients"),
            ledger=run.ledger,
        )

    def clear_federation(self, run: Run, backend: Backend) -> ClearFederation:
        """Return the same clients with nothing private."""
        return ClearFederation(backend, self._cohorts(run, self.sampling), run.name)

    def _cohorts(self, run: Run, sampling: CohortSampling) -> Cohorts:
        """Return the draws of a run's cohorts.

        Two runs with one seed must not share their cohorts, nor a run and one that goes on from a copy of it. Only a
        partition is kept when a run is resumed, or a client might be drawn in two rounds.
        """
        drawing = self._entropy().child("cohorts", run.name)
        if self.settings.seed is None and sampling.method is Sampling.ONCE:
            drawing = run.directory.identity().cohorts
        return Cohorts(sampling, drawing)

    def _entropy(self) -> Entropy:
        seed = self.settings.seed
        return Entropy.system() if seed is None else Entropy.replay(str(seed).encode())


def array_shapes(model: Model) -> tuple[ArrayShape, ...]:
    """Return the trained arrays of a model, in the order of its flat vector."""
    values = dict(model.module.named_parameters())
    return tuple(ArrayShape(name, tuple(values[name].shape)) for name in model.names)
