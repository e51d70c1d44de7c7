"""Phones train adapters and head of a transformer, nothing else: python examples/adapters.py [PHONES]."""

import sys

import torch
from torch import nn

import d2pfed


class Adapter(nn.Sequential):
    """Two thin layers whose result is added to what they are given."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Add the adapter's part."""
        return states + super().forward(states)


if __name__ == "__main__":
    phones = [(x, (x[:, 0] < 25).long()) for x in torch.randint(50, (int((sys.argv[1:] or [2000])[0]), 20, 9))]
    first, last = (nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in "12")
    thin, more = (Adapter(nn.Linear(32, 4), nn.ReLU(), nn.Linear(4, 32)) for _ in "12")
    net = nn.Sequential(nn.Embedding(50, 32), first, thin, last, more, nn.Flatten(), nn.Linear(288, 2))
    training = {"trainable": ["2.*", "4.*", "6.*"], "optimizer": "adamw", "lr_schedule": "linear"}
    print(d2pfed.fit(net, phones, privacy={"epsilon": 8.0}, validation=phones[0], training=training, lr=0.01))
