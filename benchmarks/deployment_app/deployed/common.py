"""What the three ways have in common: 1,210 parameters, made-up data, and a clock that ticks after each round."""

import time
from collections.abc import Iterable
from pathlib import Path

import torch
from flwr.app import Message
from flwr.serverapp import Grid
from torch import nn

EXAMPLES = 64


def make_net() -> nn.Module:
    """Return a network of 1,210 parameters."""
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def make_data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the examples of one client."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(EXAMPLES, 64, generator=generator), torch.randint(10, (EXAMPLES,), generator=generator)


def train(net: nn.Module, seed: int) -> None:
    """Take a step in place."""
    inputs, labels = make_data(seed)
    nn.functional.cross_entropy(net(inputs), labels).backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.sub_(0.1 * parameter.grad)


def test(net: nn.Module, seed: int) -> float:
    """Return the accuracy."""
    inputs, labels = make_data(seed)
    with torch.no_grad():
        return float((net(inputs).argmax(1) == labels).float().mean())


def tick(file: str) -> None:
    """Note that a round has ended."""
    with Path(file).open("a") as times:
        times.write(f"{time.monotonic()}\n")


def timed(grid: Grid, file: str) -> Grid:
    """Have Flower's grid note what each of its exchanges takes: messages out, answers in."""
    send = grid.send_and_receive

    def measured(messages: Iterable[Message], **options: float | None) -> Iterable[Message]:
        sent, begun = list(messages), time.monotonic()
        answers = send(sent, **options)
        named = [str(record["stage"]) for record in sent[0].content.config_records.values() if "stage" in record]
        with Path(file).with_suffix(".stages").open("a") as stages:
            stages.write(f"{(named or [sent[0].metadata.message_type])[0]} {time.monotonic() - begun}\n")
        return answers

    grid.send_and_receive = measured
    return grid
