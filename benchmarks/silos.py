"""Rounds over 20 silos with privacy of a record, beside Opacus' DP-SGD and plain SGD on the pooled records."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import d2pfed
from benchmarks.silos_row import SiloRow
from d2pfed.accounting import SERVER, Unit

WIDTHS = (32, 256)  # of the hidden layer: 2,410 and 19,210 parameters
SILOS, RECORDS, BATCH = 20, 5000, 256
GOAL = 3.0  # times the seconds of DP-SGD
_WARM = 5  # rounds that do not count
_MEMORY = Path("/dev/shm")  # noqa: S108 - files in it have names that nobody guesses


class _Clock:
    """When each round ended, by the clock and by the processor."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, float]] = []

    def __call__(self, *_: object) -> None:
        self._ends.append((time.perf_counter(), time.process_time()))

    def medians(self) -> tuple[float, float]:
        """Return the median of a round, without the first ones: one that something else held up does not count."""
        wall, processor = np.median(np.diff(self._ends[_WARM:], axis=0), axis=0).tolist()
        return wall, processor


Records = tuple[torch.Tensor, torch.Tensor]
Train = Callable[[nn.Module, Records, int, _Clock], None]


def bench_silos(rounds: int = 500, widths: Sequence[int] = WIDTHS) -> Iterator[SiloRow]:
    """Yield, for each model, rows of DP-SGD, ours and plain SGD; torch has one thread in all of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for width in widths:
            yield from _measured(width, rounds)
    finally:
        torch.set_num_threads(threads)


def _measured(width: int, rounds: int) -> Iterator[SiloRow]:
    generator = torch.Generator().manual_seed(width)
    inputs = torch.randn(RECORDS, 64, generator=generator)
    ways = ("Opacus, pooled", _dp_sgd), ("d2pfed, 20 silos", _silos), ("plain SGD, pooled", _sgd)
    build = lambda: nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))  # noqa: E731
    yield from _compared(build, (inputs, inputs[:, :10].argmax(1)), rounds, ways)


def beside_opacus(name: str, build: Callable[[], nn.Module], records: Records, rounds: int) -> Iterator[SiloRow]:
    """Yield rows of DP-SGD and ours for a module, named in both; for one of torch's threads."""
    ways = (f"{name}: Opacus, pooled", _dp_sgd), (f"{name}: d2pfed, 20 silos", _silos)
    yield from _compared(build, records, rounds, ways)


def _compared(
    build: Callable[[], nn.Module], records: Records, rounds: int, ways: Sequence[tuple[str, Train]]
) -> Iterator[SiloRow]:
    peer: tuple[float, float] | None = None
    for what, train in ways:
        clock = _Clock()
        torch.manual_seed(0)
        module = build()
        train(module, records, rounds + _WARM + 1, clock)
        wall, processor = clock.medians()
        peer = peer or (wall, processor)
        yield SiloRow(
            what=what,
            dimension=sum(value.numel() for value in module.parameters()),
            rounds=rounds,
            seconds=wall,
            processor_seconds=processor,
            ratio=wall / peer[0],
            processor_ratio=processor / peer[1],
            goal=GOAL if train is _silos else None,
        )


def _silos(module: nn.Module, records: Records, rounds: int, clock: _Clock) -> None:
    """Train by `d2pfed.fit`, in memory: on a disk each round waits for five syncs, and DP-SGD stores nothing."""
    parts = list(zip(*(torch.split(values, RECORDS // SILOS) for values in records), strict=True))
    with TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as place:
        d2pfed.fit(
            module,
            parts,
            privacy=d2pfed.PrivacyTarget(
                unit=Unit.RECORD,
                epsilon=8,
                delta=1e-5,
                records=RECORDS,
                batch_rate=BATCH / RECORDS,
                against=SERVER,
            ),
            rounds=rounds,
            directory=Path(place) / "run",
            run={"progress": False, "callbacks": [clock]},
        )


def _dp_sgd(module: nn.Module, records: Records, rounds: int, clock: _Clock) -> None:
    """Train by Opacus with Poisson batches."""
    from opacus import PrivacyEngine  # noqa: PLC0415 - of the extra `peers`

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(*records), batch_size=BATCH),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        _steps(private, optimizer, loader, rounds, clock)


def _sgd(module: nn.Module, records: Records, rounds: int, clock: _Clock) -> None:
    """Train without clip and noise."""
    loader = DataLoader(TensorDataset(*records), batch_size=BATCH, shuffle=True)
    _steps(module, torch.optim.SGD(module.parameters(), lr=0.1), loader, rounds, clock)


def _steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: "DataLoader[tuple[torch.Tensor, ...]]",
    rounds: int,
    clock: _Clock,
) -> None:
    taken = 0
    while True:
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            clock()
            taken += 1
            if taken == rounds:
                return
