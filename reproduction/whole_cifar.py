"""CIFAR-10 in whole, 32 x 32 pixels, as fixed features that are computed once and kept beside the runs."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from d2pfed.learning import Examples, Task
from d2pfed.learning import sources as files
from d2pfed.learning.sources import read_cifar
from d2pfed.learning.tasks import held_out_order
from reproduction.patches import PatchFeatures, deal

SIDE = 32
CLIENTS, CLASSES = 2_000, 10
_HELD_OUT = 5_000
_FEATURE_SEED = 1
_DIRECTIONS = 3  # that are kept for each filter, of eight
_BLOCK = 2_000  # images


def whole_cifar(folder: Path, data: Path | None, filters: int) -> Task:
    """Return 2,000 clients with a fair share of 45,000 images, 5,000 validation images and the 10,000 test images."""
    places, kept = files.locate("cifar10", data), _DIRECTIONS * filters

    def images(sources: tuple[files.Source, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        read = [read_cifar(files.read(source, places)) for source in sources]
        pixels, labels = (np.concatenate(parts) for parts in zip(*read, strict=True))
        return torch.from_numpy(pixels).float().div_(127.5).sub_(1), torch.from_numpy(labels)

    def examples(name: str, sources: tuple[files.Source, ...]) -> Examples:
        pixels, labels = images(sources)
        return Examples(_features(folder / f"cifar10-{name}-{filters}-{kept}", pixels, filters, kept), labels)

    table = examples("train", files.CIFAR_TRAIN)
    validation, train = np.split(held_out_order(len(table)), [_HELD_OUT])
    held_out, own = table.take(validation), table.take(train)
    return Task(
        name="cifar10",
        clients=deal(own, CLIENTS),
        validation=held_out,
        test=lambda: examples("test", (files.CIFAR_TEST,)),
        classes=CLASSES,
        input_shape=(kept,),
        description=(
            f"CIFAR-10, whole images as {kept:,} fixed features of {filters} random filters: 45,000 to train on, "
            "5,000 validation, 10,000 test."
        ),
    )


def _features(path: Path, images: torch.Tensor, filters: int, kept: int) -> torch.Tensor:
    """Return the images' features; every block is kept as soon as it is made, so that a stop loses one of them."""
    made = cache(partial(PatchFeatures.made_up, filters, SIDE, _FEATURE_SEED, kept))

    def block(at: int, own: torch.Tensor) -> torch.Tensor:
        return _kept(path.with_name(f"{path.name}-{at}.npy"), lambda: made()(own))

    return torch.cat([block(at, own) for at, own in enumerate(torch.split(images, _BLOCK))])


def _kept(path: Path, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return what the file holds, as half-precision numbers; make it if it is not there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partly = path.with_suffix(".partial.npy")
        np.save(partly, make().half().numpy())
        partly.replace(path)
    return torch.from_numpy(np.load(path)).float()
