"""One epoch of FedAvg without privacy as peers do it: a plain torch loop, Flower's simulation, pfl's."""

import copy
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any  # the peers need not be installed, so they are reached by name and have no types

import numpy as np
import torch
from torch import nn

from benchmarks.peers import PeerCrash, one_line
from d2pfed.learning import Examples, LocalTraining, Model, StoredClients, Task


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds by the clock and, where one process does it all, of the processor."""

    seconds: float
    processor_seconds: float | None


@dataclass(frozen=True, slots=True, eq=False)
class TrainingWork:
    """A module, what each client holds, how it trains (plain SGD), and how many rounds are timed."""

    module: nn.Module
    table: tuple[Examples, ...]
    local: LocalTraining
    rounds: int


@dataclass(frozen=True, slots=True)
class Peer:
    """Another implementation, the modules it needs, and how many times as fast as it we wish to be."""

    name: str
    needs: tuple[str, ...]
    goal: float
    measure: Callable[[TrainingWork], Cost]


RunPeer = Callable[[TrainingWork], list[float]]  # returns when each round ended; sent to another process by name


def stored_clients(task: Task, count: int) -> StoredClients:
    """Return clients with 100 digits each, made beforehand from those of the task's clients."""
    made = [task.clients.examples(client) for client in range(2 * count)]
    table = Examples(torch.cat([each.inputs for each in made]), torch.cat([each.labels for each in made]))
    return StoredClients(table, tuple(np.arange(100 * count).reshape(count, 100)))


def one_hidden_layer(width: int) -> Model:
    """Return a model of 28 x 28 digits whose dimension grows with the width."""
    return Model(nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10)))


def train_in_a_loop(work: TrainingWork) -> dict[str, torch.Tensor]:
    """Return the mean of the clients' models, each trained after the other."""
    total = {name: torch.zeros_like(value) for name, value in work.module.state_dict().items()}
    for examples in work.table:
        for name, value in train_alone(work.module, examples, work.local).items():
            total[name] += value / len(work.table)
    return total


def train_alone(module: nn.Module, examples: Examples, local: LocalTraining) -> dict[str, torch.Tensor]:
    """Return the parameters after the usual loop over shuffled batches with torch's own optimizer."""
    own = copy.deepcopy(module)
    optimizer = torch.optim.SGD(own.parameters(), lr=local.lr)
    for _ in range(local.epochs):
        for rows in torch.split(torch.randperm(len(examples)), local.batch_size):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(own(examples.inputs[rows]), examples.labels[rows])
            torch.autograd.backward(loss)
            optimizer.step()
    return dict(own.state_dict())


def measure_in_process(peer: RunPeer, work: TrainingWork) -> Cost:
    """Run a peer in a process of its own, which logs to standard error, and take its best round but the first.

    Raises:
        PeerCrash: The peer raised an error, which the text names, or its process ended without an answer.
    """
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    # pfl sets itself up in a process of this name only.
    process = spawning.Process(target=_serve, args=(peer, work, there), name="MainProcess")
    process.start()
    there.close()
    try:
        ends: list[float] | str = here.recv()
    except EOFError:
        process.join()
        raise PeerCrash(f"its process ended with exit code {process.exitcode} and no answer") from None
    process.join()
    if isinstance(ends, str):
        raise PeerCrash(ends)
    if len(ends) < 3:
        raise PeerCrash(f"it finished {len(ends)} rounds, too few to time one")
    return Cost(float(np.diff(ends)[1:].min()), None)


def _serve(peer: RunPeer, work: TrainingWork, answer: Connection) -> None:
    os.dup2(2, 1)
    try:
        answer.send(peer(work))
    except Exception as error:  # noqa: BLE001 - the other process reports it
        answer.send(one_line(error))


def _run_flower(work: TrainingWork) -> list[float]:
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    app, strategy = import_module("flwr.app"), import_module("flwr.serverapp.strategy")
    clients, server = import_module("flwr.clientapp").ClientApp(), import_module("flwr.serverapp").ServerApp()
    ends: list[float] = []
    with TemporaryDirectory() as directory:
        path = Path(directory)
        np.save(path / "inputs.npy", np.stack([examples.inputs.numpy() for examples in work.table]))
        np.save(path / "labels.npy", np.stack([examples.labels.numpy() for examples in work.table]))
        module, local = work.module, work.local

        def train(message: Any, context: Any) -> Any:  # noqa: ANN401 - Flower's types
            own = int(context.node_config["partition-id"])
            inputs, labels = (np.load(path / f"{name}.npy", mmap_mode="r")[own] for name in ("inputs", "labels"))
            examples = Examples(torch.tensor(inputs), torch.tensor(labels))
            given = copy.deepcopy(module)
            given.load_state_dict(message.content["arrays"].to_torch_state_dict())
            trained = app.ArrayRecord(train_alone(given, examples, local))
            counted = app.MetricRecord({"num-examples": len(examples)})
            return app.Message(app.RecordDict({"arrays": trained, "metrics": counted}), reply_to=message)

        def main(grid: Any, _context: Any) -> None:  # noqa: ANN401 - Flower's types
            strategy.FedAvg(fraction_evaluate=0.0).start(
                grid,
                app.ArrayRecord(module.state_dict()),
                num_rounds=work.rounds + 1,
                evaluate_fn=lambda *_: ends.append(time.perf_counter()),
            )

        clients.train()(train)
        server.main()(main)
        resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        import_module("flwr.simulation").run_simulation(server, clients, len(work.table), backend_config=resources)
    return ends


def _run_pfl(work: TrainingWork) -> list[float]:
    data, model = import_module("pfl.data"), import_module("pfl.model.pytorch")
    parameters, base = import_module("pfl.hyperparam"), import_module("pfl.algorithm.base")
    ends: list[float] = []
    network = _WithLoss(work.module)
    tables = [data.dataset.Dataset([examples.inputs, examples.labels]) for examples in work.table]
    order = iter(range(len(tables) * (work.rounds + 3)))
    federated = data.FederatedDataset(lambda client: tables[client], lambda: next(order) % len(tables))

    class Watch(import_module("pfl.callback.base").TrainingProcessCallback):  # type: ignore[misc]
        """Notes when each round ends."""

        def after_central_iteration(self, *_: Any, **__: Any) -> Any:  # noqa: ANN401 - pfl's types
            ends.append(time.perf_counter())
            return False, import_module("pfl.metrics").Metrics()

    import_module("pfl.algorithm.federated_averaging").FederatedAveraging().run(
        base.NNAlgorithmParams(
            central_num_iterations=work.rounds + 2,
            evaluation_frequency=work.rounds + 3,
            train_cohort_size=len(tables),
            val_cohort_size=None,
        ),
        import_module("pfl.aggregate.simulate").SimulatedBackend(federated, None),
        model.PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0)),
        parameters.NNTrainHyperParams(
            local_num_epochs=work.local.epochs,
            local_learning_rate=work.local.lr,
            local_batch_size=work.local.batch_size,
        ),
        callbacks=[Watch()],
    )
    return ends


class _WithLoss(nn.Module):
    """A module with the two methods that pfl asks for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch."""
        return nn.functional.cross_entropy(self.inner(inputs), labels)

    def metrics(self, _inputs: torch.Tensor, _labels: torch.Tensor) -> dict[str, Any]:
        """Return nothing: rounds are timed, not judged."""
        return {}


PEERS = (
    Peer("Flower's simulation", ("flwr", "ray"), 15.0, partial(measure_in_process, _run_flower)),
    Peer("pfl", ("pfl",), 4.0, partial(measure_in_process, _run_pfl)),
)
