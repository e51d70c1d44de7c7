"""Train on 28 x 28 images in IDX files that some clients hold: python examples/idx.py IMAGES LABELS CLIENTS."""

import sys

import numpy as np
from torch import nn

import d2pfed


def main() -> None:
    """Hold out the first tenth of the images, deal the others to the clients, and train privately."""
    pixels, labels, count = *(np.fromfile(file, np.uint8) for file in sys.argv[1:3]), int(sys.argv[3])
    images, labels = pixels[16:].reshape(-1, 1, 28, 28) / np.float32(255), labels[8:]
    tenth = len(labels) // 10
    clients = [(images[tenth + i :: count], labels[tenth + i :: count]) for i in range(count)]
    net = nn.Sequential(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 10))
    target = {"epsilon": 8.0, "colluders": 0.0}
    training = {"momentum": 0.9, "lr_schedule": "cosine"}
    held_out = images[:tenth], labels[:tenth]
    print(d2pfed.fit(net, clients, privacy=target, validation=held_out, training=training, lr=0.05, epochs=3))


if __name__ == "__main__":
    main()
