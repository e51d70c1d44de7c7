"""CIFAR-10 from its binary files: what a site holds, and the test images."""

import os
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

FILES = Path(os.environ.get("CIFAR10", Path.home() / "cifar-10-batches-bin"))


@cache
def load_cifar(site: str | None, sites: int = 5, most: int = 50_000) -> TensorDataset:
    """Return the images of site-1, site-2, ..., or the test images (None); each pixel in [-1, 1]."""
    names = ["test_batch.bin"] if site is None else [f"data_batch_{number}.bin" for number in range(1, 6)]
    rows = np.concatenate([np.fromfile(FILES / name, np.uint8).reshape(-1, 3073) for name in names])
    own = rows if site is None else rows[int(site.rpartition("-")[2]) - 1 :: sites]
    images = torch.from_numpy(own[:most, 1:].reshape(-1, 3, 32, 32).astype(np.float32) / 127.5 - 1)
    return TensorDataset(images, torch.from_numpy(own[:most, 0].astype(np.int64)))
