"""A network of 1,210 parameters, as that of benchmarks/deployment_app."""

from torch import nn


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
