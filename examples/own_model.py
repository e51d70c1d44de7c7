"""Train a small network on handwritten digits, 8 x 8, that 300 clients hold: `python examples/own_model.py`."""

from sklearn.datasets import load_digits
from torch import nn

import d2pfed


def main() -> None:
    """Train in the clear, then privately against the server, and show both in one report."""
    images, labels = load_digits(return_X_y=True)
    held_out, images, labels = (images[:300] / 16, labels[:300]), images[300:] / 16, labels[300:]
    clients = [(images[i::300], labels[i::300]) for i in range(300)]
    net = nn.Sequential(nn.Linear(64, 10))
    plain = d2pfed.fit(net, clients, privacy=None, rounds=8, cohort_size=30, validation=held_out, lr=1.0, epochs=3)
    target = {"epsilon": 8.0, "delta": 1e-4, "colluders": 0.0}
    result = d2pfed.fit(
        net, clients, privacy=target, rounds=8, validation=held_out, lr=1.0, epochs=3, run={"baseline": plain}
    )
    print(plain, result, sep="\n")


if __name__ == "__main__":
    main()
