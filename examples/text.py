"""Next-character prediction over 3,000 phones, each of which is protected as a whole.

python examples/text.py [FILE]    FILE: any text; without one, made-up messages
"""

import sys
from pathlib import Path

import torch
from torch import nn

import d2pfed

PHONES, CONTEXT = 3000, 6
ALPHABET = " abcdefghijklmnopqrstuvwxyz"
WORDS = [
    "see you",
    "call me",
    "i am late",
    "on my way",
    "at home",
    "tomorrow",
    "tonight",
    "thank you",
    "good morning",
]


def messages(phone: int) -> str:
    """Return what one phone has typed."""
    generator = torch.Generator().manual_seed(phone)
    return " ".join(WORDS[word] for word in torch.randint(len(WORDS), (6,), generator=generator).tolist())


def windows(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each run of characters and the character that follows it, both as numbers."""
    codes = torch.tensor([max(ALPHABET.find(letter), 0) for letter in text.lower()])
    runs = codes.unfold(0, CONTEXT + 1, 1)
    return runs[:, :CONTEXT], runs[:, CONTEXT]


def main() -> None:
    """Deal the text to the phones, train, and say how often the next character is right."""
    if len(sys.argv) > 1:
        text = Path(sys.argv[1]).read_text()
        length = len(text) // (PHONES + 100)
        parts = [text[start * length : (start + 1) * length] for start in range(PHONES + 100)]
    else:
        parts = [messages(phone) for phone in range(PHONES + 100)]
    phones, (inputs, labels) = [windows(part) for part in parts[100:]], windows("".join(parts[:100]))
    net = nn.Sequential(
        nn.Embedding(len(ALPHABET), 8), nn.Flatten(), nn.Linear(8 * CONTEXT, 32), nn.Tanh(), nn.Linear(32, 27)
    )
    target = {"epsilon": 4.0, "colluders": 0.0}
    result = d2pfed.fit(
        net, phones, privacy=target, validation=(inputs, labels), lr=1.0, epochs=3, server={"momentum": 0.5}
    )
    usual = (labels == labels.mode().values).float().mean()
    print(result)
    print(
        f"The next character is right in {result.metrics['accuracy']:.0%}; a guess of the commonest, {usual:.0%}."
    )


if __name__ == "__main__":
    main()
