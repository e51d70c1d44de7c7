"""Rounds over 20 silos with privacy of a record, compared with Opacus' DP-SGD and plain SGD on the pooled records.

Both draw Poisson batches of 256 expected records out of 5,000, clip the gradient of each record, add noise and take a
step, in one process with one thread of torch. They take turns, and a ratio is the median over turns of ours divided by
theirs. Ours includes the round's rows of the ledger and its checkpoint, in memory.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
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
_OURS = "d2pfed, 20 silos"

Records = tuple[torch.Tensor, torch.Tensor]
Steps = Callable[[nn.Module, Records], Iterator[None]]  # one step of training after the other, without end


class _Turns:
    """What each round of ours cost, by the clock and of the processor, and a step of each peer right after it.

    Whatever else the machine does meets all of them alike.
    """

    def __init__(self, peers: Mapping[str, Iterator[None]]) -> None:
        self._peers = peers
        self._seen: dict[str, list[tuple[float, float]]] = {name: [] for name in (*peers, _OURS)}
        self._last = _now()

    def __call__(self, *_: object) -> None:
        self._note(_OURS)
        for name, steps in self._peers.items():
            self._last = _now()
            next(steps)
            self._note(name)
        self._last = _now()

    def _note(self, name: str) -> None:
        wall, processor = _now()
        self._seen[name].append((wall - self._last[0], processor - self._last[1]))

    def medians(self, name: str, beside: str | None = None) -> tuple[float, float]:
        """Return the medians of its turns, or of their ratios to another's in the same turn, without the first."""
        own = np.array(self._seen[name][_WARM:])
        wall, processor = np.median(own if beside is None else own / self._seen[beside][_WARM:], axis=0).tolist()
        return wall, processor


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


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
    build = lambda: nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))  # noqa: E731
    peers = {"Opacus, pooled": _dp_sgd, "plain SGD, pooled": _sgd}
    yield from _compared("", build, (inputs, inputs[:, :10].argmax(1)), rounds, peers)


def beside_opacus(name: str, build: Callable[[], nn.Module], records: Records, rounds: int) -> Iterator[SiloRow]:
    """Yield rows of DP-SGD and ours for a module, named in both; for one of torch's threads."""
    yield from _compared(f"{name}: ", build, records, rounds, {"Opacus, pooled": _dp_sgd})


def _compared(
    name: str, build: Callable[[], nn.Module], records: Records, rounds: int, peers: Mapping[str, Steps]
) -> Iterator[SiloRow]:
    """Yield a row of the first peer, of ours and of the others, which took turns."""

    def built() -> nn.Module:
        torch.manual_seed(0)
        return build()

    turns, module = _Turns({what: steps(built(), records) for what, steps in peers.items()}), built()
    _silos(module, records, rounds + _WARM, turns)
    first, *others = peers
    for what in (first, _OURS, *others):
        (wall, processor), (ratio, processor_ratio) = turns.medians(what), turns.medians(what, first)
        yield SiloRow(
            what=f"{name}{what}",
            dimension=sum(value.numel() for value in module.parameters()),
            rounds=rounds,
            seconds=wall,
            processor_seconds=processor,
            ratio=ratio,
            processor_ratio=processor_ratio,
            goal=GOAL if what == _OURS else None,
        )


def _silos(module: nn.Module, records: Records, rounds: int, turns: _Turns) -> None:
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
            run={"progress": False, "callbacks": [turns]},
        )


def _dp_sgd(module: nn.Module, records: Records) -> Iterator[None]:
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
    return _steps(private, optimizer, loader)


def _sgd(module: nn.Module, records: Records) -> Iterator[None]:
    """Train without clip and noise."""
    loader = DataLoader(TensorDataset(*records), batch_size=BATCH, shuffle=True)
    return _steps(module, torch.optim.SGD(module.parameters(), lr=0.1), loader)


def _steps(
    module: nn.Module, optimizer: torch.optim.Optimizer, loader: "DataLoader[tuple[torch.Tensor, ...]]"
) -> Iterator[None]:
    for _epoch in count():
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            yield
