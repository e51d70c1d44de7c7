"""The models, the patients of a hospital, and the gradient of one patient."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn

TEST = 5  # every fifth patient is for testing
RECORDS = {"table": 455, "images": 1437}  # public: how many patients the hospitals hold in all
CLASSES = {"table": 2, "images": 10}
TYPICAL = [
    14,
    19,
    92,
    655,
    *[0.1] * 6,
    0.4,
    1.2,
    2.9,
    40,
    *[0.02] * 6,
    16,
    26,
    107,
    881,
    *[0.2] * 6,
]  # of a measurement
FILES = {"table": ("breast_cancer.csv", 1), "images": ("digits.csv.gz", 0)}


def make_net(data: str) -> nn.Module:
    """Return an untrained model, the same on every machine."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if data == "table":
            return nn.Linear(30, 2)
        # Group norm in place of batch norm, which would mix the records of a batch.
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 10),
        )


def load_patients(data: str, hospital: int | None, hospitals: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of a hospital's patients, or of the server's test patients (None)."""
    name, header = FILES[data]
    # From scikit-learn's own files: the package itself takes a second to load.
    file = Path(find_spec("sklearn").origin).parent / "datasets" / "data" / name
    table = np.loadtxt(file, delimiter=",", dtype=np.float32, skiprows=header)
    inputs, labels = table[:, :-1], table[:, -1]
    # By typical values, written down beforehand: scales of the patients themselves would leak.
    inputs = np.log1p(np.abs(inputs)) - np.log1p(TYPICAL) if data == "table" else inputs / 16
    places = np.arange(len(labels))
    own = (
        places % TEST == 0 if hospital is None else (places % TEST > 0) & (places // TEST % hospitals == hospital)
    )
    return torch.tensor(inputs[own], dtype=torch.float32), torch.tensor(labels[own]).long()


class Patients:
    """A hospital's patients under a model: what each one adds to it, and how well it does on each."""

    def __init__(self, net: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.net, self.inputs, self.labels = net, inputs, labels

    @property
    def count(self) -> int:
        """How many patients there are; it stays in the hospital."""
        return len(self.labels)

    def gradients(self, chosen: np.ndarray) -> Iterator[np.ndarray]:
        """Yield one row for each chosen patient: minus the gradient of its loss."""
        for place in chosen:
            self.net.zero_grad()
            nn.functional.cross_entropy(self.net(self.inputs[[place]]), self.labels[[place]]).backward()
            yield -torch.cat([each.grad.flatten() for each in self.net.parameters()])[None].numpy()

    def evaluate(self, patient: int) -> tuple[np.ndarray, int]:
        """Return the scores and the label of one patient, which stay in the hospital."""
        with torch.no_grad():
            scores = self.net(self.inputs[[patient]]).softmax(1)[0]
        return scores.numpy(), int(self.labels[patient])


def test(net: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the accuracy."""
    with torch.no_grad():
        return float((net(inputs).argmax(1) == labels).float().mean())
