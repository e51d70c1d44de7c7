"""Whole rounds of training: private ones beside the same training without privacy, and beside peers."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.explicit import local_training, privacy_target
from benchmarks.peers import attempt
from benchmarks.training_peers import (
    PEERS,
    Cost,
    Peer,
    TrainingWork,
    one_hidden_layer,
    stored_clients,
    train_in_a_loop,
)
from benchmarks.training_row import TrainingRow
from d2pfed.learning import Examples, LocalTrainer, StoredClients, build_model, fitting, load_task, one_thread
from d2pfed.ledger import Ledger
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import Plan, calibrate
from d2pfed.round import Attempt, aggregate, run_plan
from d2pfed.simulation import Backend, Dropouts, Fidelity, SerialBackend, SimulatedFederation
from d2pfed.training import Cohorts

_LEAST_SHARE = 1 / 1.3  # of the speed without privacy: an overhead of at most 30 %
_ROUNDS = 50  # that the plans are made for; more than are measured
_LOOPS = 2  # of the torch loop: with two threads on a busy machine, one takes very long
_EPSILON = 1.0
_COHORT = 100
_EPSILON_OF_ALL = 30.0  # where the whole population takes part in every round
_LOCAL = local_training(lr=0.2, epochs=3, batch_size=10)
_ONE_EPOCH = local_training(lr=0.2, epochs=1, batch_size=10)


@dataclass(frozen=True, slots=True, eq=False)
class Federation:
    """Something to train: a model, clients, and a plan to do it privately, charged to a ledger on the disk."""

    learner: LocalTrainer
    plan: Plan
    book: Ledger
    entropy: Entropy = field(default_factory=Entropy.system)

    @staticmethod
    @contextmanager
    def open(learner: LocalTrainer, cohort: int, epsilon: float) -> Iterator["Federation"]:
        """Plan for the learner's clients, with a ledger that is thrown away."""
        target = privacy_target(
            dimension=learner.model.dimension,
            population=learner.clients.population,
            cohort_size=cohort,
            rounds=_ROUNDS,
            epsilon=epsilon,
        )
        plan = calibrate(target)
        charge = run_plan(plan)
        budget = replace(charge.budget, epsilon=10 * epsilon)  # a run of each fidelity
        with (
            TemporaryDirectory() as directory,
            Ledger.create(Path(directory) / "ledger.sqlite", budget) as book,
        ):
            for fidelity in Fidelity:
                book.begin(fidelity.value, fidelity.value, charge)
            yield Federation(learner, plan, book)

    def private(self, number: int, fidelity: Fidelity, backend: Backend | None = None) -> FloatVector:
        """Return the private mean of a round: trained (here, if nowhere else), encoded, charged, summed, decoded."""
        federation = SimulatedFederation(
            plan=self.plan,
            backend=backend or SerialBackend(self.learner),
            cohorts=Cohorts(self.plan.sampling, self.entropy.child("cohorts")),
            dropouts=Dropouts(),
            fidelity=fidelity,
            entropy=self.entropy.child("clients"),
            ledger=self.book,
        )
        params = self.learner.model.initial()
        return aggregate(self.plan, Attempt(fidelity.value, number, 0), params, federation, self.book).mean

    def plain(self, number: int) -> FloatVector:
        """Return the mean of the same updates, without privacy."""
        params = self.learner.model.initial()
        total = np.zeros_like(params)
        for update in self.learner(params, self.cohort(number), number):
            total += update
        return total / np.float32(self.plan.cohort_size)

    def cohort(self, number: int) -> tuple[int, ...]:
        """Return the clients of a round."""
        return Cohorts(self.plan.sampling, self.entropy.child("cohorts")).draw(number, 0, number)


def bench_training(repeats: int) -> Iterator[TrainingRow]:
    """Measure the default job, then one epoch of 100 examples a client beside the peers that are installed."""
    yield from compare_without_privacy(default_learner(), _COHORT, repeats)
    yield from compare_with_peers(_COHORT, repeats, PEERS)


def compare_without_privacy(learner: LocalTrainer, cohort: int, repeats: int) -> Iterator[TrainingRow]:
    """Measure both fidelities beside the plain mean of the same updates, in turns."""
    with Federation.open(learner, cohort, _EPSILON) as federation, one_thread(learner.model):
        costs = measure(
            {
                "plain": federation.plain,
                Fidelity.SUM: lambda number: federation.private(number, Fidelity.SUM),
            },
            repeats,
        )
        costs |= measure(
            {Fidelity.PROTOCOL: lambda number: federation.private(number, Fidelity.PROTOCOL)}, max(1, repeats // 4)
        )
        for fidelity, goal in ((Fidelity.SUM, _LEAST_SHARE), (Fidelity.PROTOCOL, None)):
            peer = ("the same without privacy", costs["plain"], goal)
            yield row_of(f"private, {fidelity}", federation, costs[fidelity], peer)


def compare_with_peers(cohort: int, repeats: int, peers: Sequence[Peer]) -> Iterator[TrainingRow]:
    """Measure one epoch of 100 examples a client, at hand in memory for everyone, beside loop, Flower and pfl."""
    task = load_task("infimnist")
    model, clients = build_model("mlp", task, seed=0), stored_clients(task, cohort)
    work = TrainingWork(model.module, tuple(map(clients.examples, range(cohort))), _ONE_EPOCH, repeats)
    loops = {"torch loop, one thread": 1, "torch loop, its default threads": torch.get_num_threads()}
    with Federation.open(LocalTrainer(model, clients, _ONE_EPOCH), cohort, _EPSILON_OF_ALL) as federation:
        with one_thread(model):  # as every command and `fit` have it
            costs = measure(
                {
                    "without privacy": federation.plain,
                    "private, sum": lambda number: federation.private(number, Fidelity.SUM),
                },
                repeats,
            )
        for name, threads in loops.items():
            loop = measure({name: partial(loop_with, work, threads)}, min(repeats, _LOOPS))[name]
            for what, cost in costs.items():
                yield row_of(what, federation, cost, (name, loop, None))
        for peer in peers:
            theirs, error = attempt(peer.needs, partial(peer.measure, work))
            for what, cost in costs.items():  # peers are not private, so the goal is like against like
                goal = peer.goal if what == "without privacy" else None
                yield replace(row_of(what, federation, cost, (peer.name, theirs, goal)), peer_error=error)


def measure_growth(repeats: int, cohorts: tuple[int, ...], widths: tuple[int, ...]) -> Iterator[TrainingRow]:
    """Measure private rounds of the default job by cohort, and by dimension with one hidden layer and 20 clients."""
    learner = default_learner()
    for cohort in cohorts:
        yield _alone("growth in clients", learner, cohort, repeats)
    for width in widths:
        yield _alone(
            "growth in dimension", LocalTrainer(one_hidden_layer(width), learner.clients, _LOCAL), 20, repeats
        )


def default_learner() -> LocalTrainer:
    """Return the learner of `d2pfed train` without options."""
    task = load_task("infimnist")
    return LocalTrainer(build_model(fitting(task), task, seed=0), task.clients, _LOCAL)


def convolutional_learner(name: str) -> LocalTrainer:
    """Return a learner of a convolutional network, 80 images a client: small-cnn on digits, cnn on colour images."""
    local = local_training(lr=0.1, epochs=1, batch_size=10)
    task = load_task("infimnist")
    if name != "cnn":
        return LocalTrainer(build_model(name, task, seed=0), task.clients, local)
    images = torch.rand(800, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    table = Examples(images, torch.arange(800) % 10)
    coloured = replace(task, validation=table, input_shape=(3, 24, 24))
    clients = StoredClients(table, tuple(np.arange(800).reshape(10, 80)))
    return LocalTrainer(build_model(name, coloured, seed=0), clients, local)


def measure(works: Mapping[str, Callable[[int], object]], repeats: int) -> dict[str, Cost]:
    """Return the least cost of each work over several turns, the first one apart: it may compile or load."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for number in range(repeats + 1):
        for name, work in works.items():
            start, begun = time.perf_counter(), time.process_time()
            work(number)
            seen[name].append((time.perf_counter() - start, time.process_time() - begun))
    return {name: Cost(*(min(column) for column in zip(*costs[1:], strict=True))) for name, costs in seen.items()}


def loop_with(work: TrainingWork, threads: int, _number: int) -> None:
    """Train client after client with so many of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        train_in_a_loop(work)
    finally:
        torch.set_num_threads(before)


def _alone(what: str, learner: LocalTrainer, cohort: int, repeats: int) -> TrainingRow:
    with Federation.open(learner, cohort, _EPSILON) as federation, one_thread(learner.model):
        cost = measure({"": lambda number: federation.private(number, Fidelity.SUM)}, repeats)[""]
        return row_of(what, federation, cost, ("", None, None))


def row_of(
    what: str, federation: Federation, cost: Cost, peer: tuple[str, Cost | None, float | None]
) -> TrainingRow:
    """Return what was measured, beside a peer with a goal."""
    learner, (name, theirs, goal) = federation.learner, peer
    return TrainingRow(
        what=what,
        clients=federation.plan.cohort_size,
        examples=len(learner.clients.examples(0)),
        epochs=learner.local.epochs,
        dimension=learner.model.dimension,
        seconds=cost.seconds,
        processor_seconds=cost.processor_seconds,
        peer=name,
        peer_seconds=None if theirs is None else theirs.seconds,
        peer_processor_seconds=None if theirs is None else theirs.processor_seconds,
        goal=goal,
    )
