"""The model, the data of a client, and plain training and testing in PyTorch."""

import torch
from sklearn.datasets import load_digits
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
    optimiser = torch.optim.SGD(net.parameters(), lr=lr)
    total, steps = 0.0, 0
    for _ in range(epochs):
        for images, labels in loader:
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            optimiser.step()
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
    bunch = load_digits()
    return torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)
