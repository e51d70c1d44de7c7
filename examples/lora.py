"""LoRA on a small transformer: a public backbone learns a new task from 3,000 phones by its adapters alone.

python examples/lora.py
"""

import torch
from torch import nn

import d2pfed

PHONES, WORDS, TOPICS, LENGTH, WIDTH = 3000, 40, 8, 9, 32


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
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOPICS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return a score of each class."""
        hidden = self.embedding(words)
        query, key, value = self.attention(hidden).chunk(3, -1)
        hidden = hidden + nn.functional.scaled_dot_product_attention(query, key, value)
        return self.head(self.norm((hidden + self.block(hidden)).mean(1)))


def sentences(seed: int, rows: int) -> torch.Tensor:
    """Return sentences of random words, as numbers."""
    return torch.randint(WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def pretrained() -> Transformer:
    """Return the backbone: trained on public sentences to tell which topic most words are about."""
    net, words = Transformer(), sentences(1_000_000, 4000)
    topics = nn.functional.one_hot(words * TOPICS // WORDS).sum(1).argmax(1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(80):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(words), topics).backward()
        optimizer.step()
    return net


def phone(number: int, rows: int = 15) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what one phone holds: sentences, and whether its owner likes them. They like half of the topics."""
    words = sentences(number, rows)
    return words, ((words * TOPICS // WORDS % 2).float().mean(1) > 0.5).long()


def main() -> None:
    """Train all parameters over the phones, then the adapters alone, at the same epsilon."""
    torch.manual_seed(0)
    net = pretrained()
    net.attention, net.block[0], net.head = LoRA(net.attention), LoRA(net.block[0]), nn.Linear(WIDTH, 2)
    for trainable in ("*", ["*.lora_*", "head.*"]):
        result = d2pfed.fit(
            *(net, phone),
            population=PHONES,
            privacy={"epsilon": 4.0, "colluders": 0.0, "clip": 0.5},
            validation=phone(2_000_000, 2000),
            training={"trainable": trainable},
            rounds=30,
            lr=0.2,
            epochs=3,
            server={"averaging": 0.8},
        )
        sent = f"{result.summary.dimension:,} parameters, {result.summary.upload_bytes:,} bytes"
        print(f"{sent}: {result.metrics['accuracy']:.0%} right")
    print(result)


if __name__ == "__main__":
    main()
