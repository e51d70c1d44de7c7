"""What the machine allows, measured in the same run: bounds below which no implementation of the same work can come."""

import os
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from d2pfed.secagg import crypto

if TYPE_CHECKING:
    from d2pfed.learning import LocalTrainer

_EXCHANGES = 500
_REPEATS = 5
_SIDE = 1024  # of the matrices that are multiplied
_IMAGES = 16, 64, 32, 32  # that a convolution of 5 x 5 reads, channels second


@cache
def agreement_seconds() -> float:
    """Return the seconds of one X25519 agreement on one core."""
    own, public = crypto.Agreement(bytes(range(32))), crypto.Agreement(bytes(range(1, 33))).public

    def work() -> None:
        for _ in range(_EXCHANGES):
            own.agree(public)

    return _least(work) / _EXCHANGES


@cache
def operations_per_second() -> float:
    """Return the floating-point operations per second of one core: the better of torch's product and convolution."""
    import torch  # noqa: PLC0415 - takes seconds to load

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    left, images, weights = torch.rand(_SIDE, _SIDE), torch.rand(_IMAGES), torch.rand(64, 64, 5, 5)
    images, weights = (each.contiguous(memory_format=torch.channels_last) for each in (images, weights))
    with torch.no_grad():
        products = _operations(lambda: left @ left) / _least(lambda: left @ left)
        convolve: Callable[[], object] = lambda: torch.conv2d(images, weights, padding=2)  # noqa: E731 - timed twice
        convolutions = _operations(convolve) / _least(convolve)
    torch.set_num_threads(threads)
    return max(products, convolutions)


def training_seconds(trainer: "LocalTrainer", clients: int) -> float:
    """Return the seconds of the arithmetic of the trained layers, forward and back, at the best rate of all cores."""
    import torch  # noqa: PLC0415 - takes seconds to load

    examples, model = trainer.clients.examples(0), trainer.model
    batch = torch.zeros_like(examples.inputs[:2])
    if (parts := model.behind_front()) is not None:
        front, model = parts
        with torch.no_grad():
            batch = front(batch)
    each = _operations(lambda: model.module(batch).sum().backward()) / len(batch)
    model.module.zero_grad()
    passes = clients * len(examples) * trainer.local.epochs
    return passes * each / operations_per_second() / len(os.sched_getaffinity(0))


def _operations(work: Callable[[], object]) -> int:
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415 - torch takes seconds to load

    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def _least(work: Callable[[], object]) -> float:
    """Return the least processor seconds of several runs, a first one apart: what a core alone would take."""
    work()
    seconds = []
    for _ in range(_REPEATS):
        begun = time.process_time()
        work()
        seconds.append(time.process_time() - begun)
    return min(seconds)
