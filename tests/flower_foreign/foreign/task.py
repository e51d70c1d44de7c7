"""A small network with a batch norm, made-up pictures, training and testing."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Tells bright pictures from dark ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 6 * 6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return two scores."""
        return self.fc(torch.relu(self.norm(self.conv(x))).flatten(1))


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> DataLoader:
    """Return the pictures of one client."""
    generator = torch.Generator().manual_seed(1000 * num_partitions + partition_id)
    labels = torch.randint(2, (64,), generator=generator)
    pictures = torch.randn(64, 1, 8, 8, generator=generator) + labels[:, None, None, None]
    return DataLoader(TensorDataset(pictures, labels), batch_size=batch_size, shuffle=True)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train in place and return the last loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    loss = torch.zeros(())
    for _ in range(epochs):
        for pictures, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(pictures), labels)
            loss.backward()
            optimizer.step()
    return float(loss)


def test(net: nn.Module, loader: DataLoader) -> float:
    """Return the accuracy, by the statistics of each batch."""
    net.train()
    with torch.no_grad():
        right = sum(int((net(pictures).argmax(1) == labels).sum()) for pictures, labels in loader)
    return right / len(loader.dataset)
