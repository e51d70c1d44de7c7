"""A model of 12 parameters."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.register_buffer("seen", torch.zeros(3))  # a buffer, which stays with its client

    def forward(self, x):
        return self.layer(x)
