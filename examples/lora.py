"""LoRA on a small transformer: a public backbone learns a new task from 3,000 phones by its adapters alone.

python examples/lora.py
"""

import torch
from torch import nn

import d2pfed

PHONES, WORDS, LENGTH, WIDTH = 3000, 40, 8, 32


class LoRA(nn.Module):
    """A linear layer that stays as it is, plus a trained product of two thin matrices."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(base.in_features, rank) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(rank, base.out_features))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Add what the adapter says."""
        return self.base(inputs) + inputs @ self.lora_a @ self.lora_b


class Transformer(nn.Module):
    """One block of attention over embedded words, and a classifier of the sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return a score of each class."""
        hidden = self.embedding(words)
        query, key, value = self.attention(hidden).chunk(3, -1)
        hidden = hidden + nn.functional.scaled_dot_product_attention(query, key, value)
        return self.head((hidden + self.block(hidden)).mean(1))


def sentences(seed: int, rows: int, praise: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sentences and whether most of their words are among those of praise, which begin at the given word."""
    words = torch.randint(WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    return words, (((words - praise) % WORDS < WORDS // 2).float().mean(1) > 0.5).long()


def phone(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what one phone holds: a task that is not the public one."""
    return sentences(number, 15, praise=8)


def main() -> None:
    """Train the backbone on public sentences, then its adapters over phones."""
    torch.manual_seed(0)
    net = Transformer()
    public, optimizer = sentences(1_000_000, 4000, praise=0), torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(public[0]), public[1]).backward()
        optimizer.step()
    net.attention = LoRA(net.attention)
    net.block[0] = LoRA(net.block[0])
    held_out = sentences(2_000_000, 2000, praise=8)
    before = float((net(held_out[0]).argmax(1) == held_out[1]).float().mean())
    for trainable in ("*", ["*.lora_*", "head.*"]):
        result = d2pfed.fit(
            net,
            phone,
            population=PHONES,
            privacy={"epsilon": 4.0, "colluders": 0.0},
            validation=held_out,
            trainable=trainable,
            lr=0.3,
            epochs=3,
            server_momentum=0.5,
        )
        sent = f"{result.summary.dimension:,} parameters, {result.summary.upload_bytes:,} bytes"
        print(f"{sent}: {before:.0%} right before, {result.metrics['accuracy']:.0%} after")
    print(result)


if __name__ == "__main__":
    main()
