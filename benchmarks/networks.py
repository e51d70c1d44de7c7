"""The networks of `scripts/bench models`: small ones of the kinds that people train."""

from collections.abc import Callable

import torch
from torch import nn

CLASSES, SIDE = 10, 28
WORDS, LENGTH = 64, 20
_WIDTH, _HEADS = 32, 4


def mlp() -> nn.Module:
    """Return a perceptron of images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 64), nn.Tanh(), nn.Linear(64, CLASSES))


def cnn() -> nn.Module:
    """Return two convolutions and two linear layers."""
    first = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(400, 64), nn.ReLU(), nn.Linear(64, CLASSES))


class Residual(nn.Module):
    """Two convolutions with group norm, past which the inputs go as well."""

    def __init__(self, entering: int, leaving: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(entering, leaving, 3, stride=2, padding=1)
        self.second = nn.Conv2d(leaving, leaving, 3, padding=1)
        self.past = nn.Conv2d(entering, leaving, 1, stride=2)
        self.norms = nn.ModuleList([nn.GroupNorm(4, leaving), nn.GroupNorm(4, leaving)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return images of half the side."""
        inner = self.norms[0](self.first(inputs)).relu()
        found: torch.Tensor = (self.norms[1](self.second(inner)) + self.past(inputs)).relu()
        return found


def resnet() -> nn.Module:
    """Return a stem and two residual blocks."""
    stem = nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.GroupNorm(4, 8), nn.ReLU()
    blocks = Residual(8, 16), Residual(16, 32)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


class Lstm(nn.Module):
    """A recurrent network of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, _WIDTH), nn.Linear(64, CLASSES)
        self.inner = nn.LSTM(_WIDTH, 64, batch_first=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the classes' logits."""
        found: torch.Tensor = self.head(self.inner(self.words(words))[0][:, -1])
        return found


class Block(nn.Module):
    """Attention and a perceptron, each behind a layer norm; with an adapter, all else is frozen."""

    def __init__(self, adapter: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)])
        self.mixed, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.inner = nn.Sequential(nn.Linear(_WIDTH, 64), nn.GELU(), nn.Linear(64, _WIDTH))
        if adapter:
            self.requires_grad_(False)
        self.adapter = (
            nn.Sequential(nn.Linear(_WIDTH, adapter), nn.GELU(), nn.Linear(adapter, _WIDTH)) if adapter else None
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return texts of the same shape."""
        count, length, width = inputs.shape
        parts = self.mixed(self.norms[0](inputs)).view(count, length, 3, _HEADS, width // _HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value)
        middle = inputs + self.out(seen.transpose(1, 2).reshape(count, length, width))
        found: torch.Tensor = middle + self.inner(self.norms[1](middle))
        return found if self.adapter is None else found + self.adapter(found)


class Transformer(nn.Module):
    """Some blocks over texts."""

    def __init__(self, blocks: int = 2, adapter: int = 0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, _WIDTH), nn.Parameter(torch.randn(LENGTH, _WIDTH) / 10)
        if adapter:
            self.requires_grad_(False)
        self.blocks = nn.Sequential(*(Block(adapter) for _ in range(blocks)))
        self.head = nn.Linear(_WIDTH, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the classes' logits."""
        found: torch.Tensor = self.head(self.blocks(self.words(words) + self.places).mean(1))
        return found


def images(count: int) -> torch.Tensor:
    """Return images of noise."""
    return torch.rand(count, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(count))


def texts(count: int) -> torch.Tensor:
    """Return random words."""
    return torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(count))


Network = tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]  # and how its inputs are drawn

NETWORKS: dict[str, Network] = {
    "mlp": (mlp, images),
    "cnn": (cnn, images),
    "resnet": (resnet, images),
    "lstm": (Lstm, texts),
    "transformer": (Transformer, texts),
    "adapters": (lambda: Transformer(adapter=8), texts),
}
