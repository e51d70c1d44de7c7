"""The model, the data of a client, and plain training and testing in PyTorch."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TEST = 5  # every fifth digit is for testing


class Net(nn.Module):
    """A small network for 8x8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores of the ten digits."""
        return self.layers(images)


def load_data(partition_id: int, num_partitions: int) -> DataLoader:
    """Return the training digits of one client."""
    images, labels = _digits()
    mine = [
        place for place in range(len(labels)) if place % TEST and place // TEST % num_partitions == partition_id
    ]
    return DataLoader(TensorDataset(images[mine], labels[mine]), batch_size=16, shuffle=True)


def load_test_data() -> DataLoader:
    """Return the digits that no client trains on."""
    images, labels = _digits()
    return DataLoader(TensorDataset(images[::TEST], labels[::TEST]), batch_size=256)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train in place and return the mean loss."""
    net.train()
    total, steps = 0.0, 0
    for _ in range(epochs):
        for images, labels in loader:
            net.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            with torch.no_grad():  # plain steps: torch.optim loads torch's compiler, for longer than this trains
                for parameter in net.parameters():
                    parameter.sub_(lr * parameter.grad)
            total, steps = total + loss.item(), steps + 1
    return total / max(steps, 1)


def test(net: nn.Module, loader: DataLoader) -> float:
    """Return the accuracy."""
    net.eval()
    right = count = 0
    with torch.no_grad():
        for images, labels in loader:
            right += int((net(images).argmax(1) == labels).sum())
            count += len(labels)
    return right / count


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return scikit-learn's digits, from its file: the package itself takes a second to load."""
    package = Path(find_spec("sklearn").origin).parent
    table = np.loadtxt(package / "datasets" / "data" / "digits.csv.gz", delimiter=",", dtype=np.float32)
    return torch.tensor(table[:, :-1]) / 16, torch.tensor(table[:, -1]).long()
