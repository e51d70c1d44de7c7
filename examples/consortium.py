"""Twenty silos of unequal size train one model of digits; the guarantee protects each record, not each silo.

python examples/consortium.py [ROUNDS]
"""

import sys

import numpy as np
import torch
from sklearn.datasets import load_digits

import d2pfed

SILOS = 20


def main() -> None:
    """Split the digits over silos, train over them, and print what came of it."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    digits = load_digits()
    inputs, labels = torch.from_numpy(digits.data.astype(np.float32) / 16), torch.from_numpy(digits.target)
    held_out = inputs[::5], labels[::5]
    inputs, labels = inputs[np.arange(len(labels)) % 5 > 0], labels[np.arange(len(labels)) % 5 > 0]
    order = np.argsort(labels.numpy(), kind="stable")  # each silo sees few of the digits
    shares = np.geomspace(1, 20, SILOS)
    ends = np.round(np.cumsum(shares / shares.sum())[:-1] * len(order)).astype(int)
    silos = [(inputs[part], labels[part]) for part in np.split(order, ends)]
    target = d2pfed.PrivacyTarget(
        unit="record",
        epsilon=3.0,
        against="server",
        records=len(order),  # public: about how many records there are in all
        batch_rate=0.2,
        colluders=0.3,  # of the silos
    )
    net = torch.nn.Linear(64, 10)
    result = d2pfed.fit(
        net, silos, privacy=target, rounds=rounds, lr=2.0, validation=held_out, run={"evaluate_every": rounds}
    )
    print(f"silos of {min(len(y) for _, y in silos)} to {max(len(y) for _, y in silos)} records")
    print(result)


if __name__ == "__main__":
    main()
