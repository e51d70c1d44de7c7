"""The server's half in a ServerApp: an object that is started as Flower's strategies are, and trains privately."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from d2pfed.deploy.layout import NamedArrays
from d2pfed.deploy.monitoring import Callback
from d2pfed.deploy.strategy import KeyUse, Strategy
from d2pfed.deploy.transport import Deadlines
from d2pfed.flower.grid import GridEngine, MessageFactory, make_message, to_array_record, to_named_arrays
from d2pfed.plan import PrivacyTarget
from d2pfed.runs import RoundRecord
from d2pfed.training import ServerOptimizer

__all__ = ["Evaluate", "KeyUse", "PrivateFedAvg"]

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateFedAvg(Strategy):
    """Federated averaging that sees no client's update, and spends no more than its plan says (`deploy.Strategy`).

    Attributes:
        run_config: the app's configuration, which clients compare with their own; `start` may give it instead.
        message_factory: makes a message; tests bring their own.
    """

    message_factory: MessageFactory = field(default=make_message, repr=False)

    @staticmethod
    def for_target(
        privacy: PrivacyTarget | Mapping[str, object],
        model: object,
        context: Context,
        *,
        optimizer: ServerOptimizer | None = None,
        deadlines: Deadlines | None = None,
        keys: KeyUse | None = None,
        ledger: Path | None = None,
        personal: Sequence[str] = (),
        max_weight: float | None = None,
        count_failures: bool = False,
    ) -> "PrivateFedAvg":
        """Return the strategy that trains a model within a privacy target.

        The app's configuration names the server's directory (`d2pfed-directory`), which has the signed `roster`, the
        public key of the `authority` that has signed it and the server's `draws`, and keeps the runs: `run`, then
        `run-2` and so on, or those that `d2pfed-run` names. A run that is done is followed by a new one. Dimension,
        population, rounds, sampling, participations and noise follow from model, roster and configuration. Buffers
        of a torch module, such as the statistics of batch norms, stay with the clients, and so do parameters that a
        pattern of `personal` names, such as `head.*`: each client trains and keeps its own. With `max_weight` the mean
        is weighted by the clients' `num-examples`, each capped at it, and nobody learns a client's number. With
        `count_failures` the server learns in each round about how many clients' training failed, and not whose.
        """
        return PrivateFedAvg.planned(
            privacy,
            model,
            context.run_config,
            optimizer=optimizer,
            deadlines=deadlines,
            keys=keys,
            ledger=ledger,
            personal=personal,
            max_weight=max_weight,
            count_failures=count_failures,
        )

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
        best: str | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Result:
        """Train until `num_rounds` are done (None: all that are planned) and return the model.

        `timeout` is for how many seconds the server waits for the trained vectors of a round. `evaluate_fn` is
        called before the first round and after each, on the server. Clients report nothing but their vectors.
        `best` names one of its metrics: the model for which it is the greatest is kept as `best.safetensors`.
        `callbacks` are called after each round with its record and a function that returns the model; one that returns
        False ends the run, which goes on when it is started again.
        `run_config` is the app's `context.run_config`, if it has one: clients train only by the same.
        """
        result = Result()

        def evaluate(rounds: int, arrays: NamedArrays) -> dict[str, float]:
            found = None if evaluate_fn is None else evaluate_fn(rounds, to_array_record(arrays))
            if found is None:
                return {}
            result.evaluate_metrics_serverapp[rounds] = found
            return {name: float(value) for name, value in found.items() if isinstance(value, (int, float))}

        def tell(callback: Callback) -> Callback:
            def told(record: RoundRecord, model: Callable[[], NamedArrays]) -> object:
                return callback(record, lambda: to_array_record(model()))

            return told

        trained = self.train(
            GridEngine(grid, self.message_factory),
            to_named_arrays(initial_arrays),
            over="Flower",
            rounds=num_rounds,
            timeout=timeout,
            config=train_config,
            run_config=run_config,
            evaluate=evaluate,
            best=best,
            callbacks=[tell(callback) for callback in callbacks],
        )
        result.arrays = to_array_record(trained)
        return result
