"""Rounds of networks of many kinds: beside a plain loop of torch, and with privacy of a record beside Opacus."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn

from benchmarks.explicit import local_training
from benchmarks.networks import CLASSES, NETWORKS
from benchmarks.silos import RECORDS, beside_opacus
from benchmarks.silos_row import SiloRow
from benchmarks.training import Federation, loop_with, measure, row_of
from benchmarks.training_peers import TrainingWork
from benchmarks.training_row import TrainingRow
from d2pfed.learning import LocalTrainer, UserClients, one_thread, trainer_for, user_model
from d2pfed.simulation import Fidelity

WIDTHS = range(1, 131)  # of one linear layer, by records
BY_RECORD = ("mlp", "cnn", "transformer")
_CLIENTS, _EXAMPLES = 50, 40
_EPSILON = 30.0  # all clients take part in every round
_LOCAL = local_training(lr=0.05, epochs=1, batch_size=10)
_GOAL = 1.0  # times as fast as the loop, in the clear


def bench_networks(repeats: int, names: Sequence[str] = tuple(NETWORKS)) -> Iterator[TrainingRow]:
    """Yield a round of 50 clients with 40 examples each, in the clear and private, beside the loop in one thread."""
    for name in names:
        build, draw = NETWORKS[name]
        torch.manual_seed(0)
        model = user_model(build())
        inputs, labels = draw(_CLIENTS * _EXAMPLES), torch.arange(_CLIENTS * _EXAMPLES) % CLASSES
        clients = UserClients.of(
            list(zip(*(torch.split(values, _EXAMPLES) for values in (inputs, labels)), strict=True)),
            None,
            model.device,
        )
        work = TrainingWork(build(), tuple(map(clients.examples, range(_CLIENTS))), _LOCAL, repeats)
        with one_thread(model):
            learner = trainer_for(model, clients, _LOCAL)
            if not isinstance(learner, LocalTrainer):
                raise TypeError(f"{name} is not trained as a user's own module is")
            with Federation.open(learner, _CLIENTS, _EPSILON) as federation:
                costs = measure(
                    {
                        "in the clear": federation.plain,
                        "private": partial(federation.private, fidelity=Fidelity.SUM),
                        "loop": partial(loop_with, work, 1),
                    },
                    repeats,
                )
                for what, goal in (("in the clear", _GOAL), ("private", None)):
                    beside = "torch loop, one thread", costs["loop"], goal
                    yield row_of(f"{name}, {what}, {learner.method}", federation, costs[what], beside)


def bench_records(rounds: int, widths: Sequence[int] = WIDTHS) -> Iterator[SiloRow]:
    """Yield rounds by record of one linear layer at each width and of three networks, beside Opacus."""
    labels = torch.arange(RECORDS) % CLASSES
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for width in widths:
            inputs = torch.randn(RECORDS, width, generator=torch.Generator().manual_seed(width))
            yield from beside_opacus(
                f"Linear({width}, 10)", partial(nn.Linear, width, CLASSES), (inputs, labels), rounds
            )
        for name in BY_RECORD:
            build, draw = NETWORKS[name]
            yield from beside_opacus(name, build, (draw(RECORDS), labels), rounds)
    finally:
        torch.set_num_threads(threads)
