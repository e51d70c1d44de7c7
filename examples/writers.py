"""Digits of many writers, each with a hand of their own and favourite digits: clients that are not alike.

python examples/writers.py [DIR]    DIR: MNIST and QMNIST's labels; without it, 1,500 made-up writers
"""

import math
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import d2pfed
from d2pfed.learning import load_task

WRITERS, DIGITS = 1500, 12


class Writers:
    """Made-up writers: a slant and a pressure each, and three digits that they write more often than others."""

    def __init__(self) -> None:
        data = load_digits()
        self.images = torch.from_numpy(data.images).float()[:, None] / 16
        self.labels = torch.from_numpy(data.target)

    def __call__(self, writer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what one writer wrote; those with a negative number are held out."""
        generator = torch.Generator().manual_seed(writer)
        usual = torch.randperm(10, generator=generator)[:3]
        chances = torch.where(torch.isin(self.labels, usual), 8.0, 1.0)
        chances[(torch.arange(len(chances)) % 5 == 0) == (writer >= 0)] = (
            0  # held-out writers have digits of their own
        )
        rows = torch.multinomial(chances, DIGITS, generator=generator)
        slant, pressure = (torch.rand(2, generator=generator) - 0.5).tolist()
        shear = torch.tensor([[1.0, slant, 0.0], [0.0, 1.0, 0.0]]).expand(DIGITS, 2, 3)
        grid = functional.affine_grid(shear, [DIGITS, 1, 8, 8], align_corners=False)
        drawn = functional.grid_sample(self.images[rows], grid, align_corners=False)
        return drawn * math.exp(pressure), self.labels[rows]


def main() -> None:
    """Train over the writers, and show how the model serves those who were held out."""
    if len(sys.argv) > 1:
        task = load_task("mnist-writers", data_dir=Path(sys.argv[1]))
        held = [(task.validation.inputs[start::50], task.validation.labels[start::50]) for start in range(50)]
        clients, population, pixels = task.clients.examples, task.clients.population, 784
    else:
        clients, population, pixels = Writers(), WRITERS, 64
        held = [clients(-1 - writer) for writer in range(50)]
    everything = torch.cat([x for x, _ in held]), torch.cat([y for _, y in held])
    net = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 10))
    for privacy in (None, {"epsilon": 4.0, "colluders": 0.0}):
        result = d2pfed.fit(
            *(net, clients),
            population=population,
            privacy=privacy,
            **({"rounds": 10, "cohort_size": population // 10} if privacy is None else {}),
            validation=everything,
            lr=0.3,
            epochs=3,
            server={"momentum": 0.5},
        )
        each = sorted(float((result.module(x).argmax(1) == y).float().mean()) for x, y in held)
        kind = "in the clear" if privacy is None else "epsilon 4"
        print(
            f"{kind}: {result.metrics['accuracy']:.0%} right; the worst tenth of held-out writers, below {each[5]:.0%}"
        )
    print(result)


if __name__ == "__main__":
    main()
