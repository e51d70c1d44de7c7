"""Features of colour images that are fixed before any data is seen: random filters, pooled and decorrelated.

After Coates and Ng (2011), but the statistics that theirs learn from the data come from made-up images (dead leaves),
so the features cost no privacy and a linear model on them is all that is trained.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from d2pfed.errors import ConfigError
from d2pfed.learning import Examples, Model, Partition, PartitionKind, StoredClients, Task
from reproduction.leaves import dead_leaves

_MADE_UP = 2  # images for each feature, and some more: enough for a covariance that is evened out a little
_PATCH = 4  # pixels
_GRID = 2  # cells a side over which responses are averaged
_THRESHOLD = 0.25
_CONTRAST = 0.03  # added to a patch's variance: even patches stay small
_WHITENING = 1.0  # added to the variances of patches, which are about 1
_DECORRELATION = 0.2  # added to the variances of features, in units of their mean
_LENGTH = 40.0  # of every row, so that no image outweighs the others of its client, and a bias counts little


@dataclass(frozen=True, slots=True, eq=False)
class PatchFeatures:
    """Turns images into vectors of one length: by convolution, pooling, mirroring and decorrelation."""

    filters: torch.Tensor = field(repr=False)
    centre: torch.Tensor = field(repr=False)
    decorrelation: torch.Tensor = field(repr=False)

    @staticmethod
    def made_up(count: int, side: int, seed: int, kept: int | None = None) -> "PatchFeatures":
        """Draw `count` filters for images of a side and fit all statistics to made-up images.

        Of all directions only the `kept` in which made-up images differ most remain: the others would take their part
        of every row's length, and of an update's, for little.
        """
        if count < 1:
            raise ConfigError(f"filters must be at least 1, got {count}")
        if kept is not None and not 1 <= kept <= width_of(count):
            raise ConfigError(f"kept must be in [1, {width_of(count)}] for {count} filters, got {kept}")
        if side < _PATCH + _GRID - 1:
            raise ConfigError(f"images must have a side of at least {_PATCH + _GRID - 1} pixels, got {side}")
        images = dead_leaves(500 + _MADE_UP * width_of(count), side, seed)
        filters = _filters(images, count, torch.Generator().manual_seed(seed))
        pooled = _pooled(images, filters)
        variances, axes = torch.linalg.eigh(torch.cov(pooled.T))  # the least variance first
        decorrelation = axes * (variances + _DECORRELATION * variances.mean()).rsqrt()
        return PatchFeatures(filters, pooled.mean(dim=0), decorrelation[:, -(kept or len(axes)) :])

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Return one row of features an image."""
        rows = (_pooled(images, self.filters) - self.centre) @ self.decorrelation
        return nn.functional.normalize(rows) * _LENGTH


def width_of(count: int) -> int:
    """Return how many features `count` filters give."""
    return 2 * count * _GRID**2


def over_features(task: Task, features: PatchFeatures) -> Task:
    """Return the task with every image replaced by its features; those of the clients are computed once, here."""
    clients = [task.clients.examples(client) for client in range(task.clients.population)]
    ends = torch.tensor([len(own) for own in clients]).cumsum(0)
    images, labels = torch.cat([own.inputs for own in clients]), torch.cat([own.labels for own in clients])
    rows = torch.arange(len(labels)).tensor_split(ends[:-1])
    validation = features(task.validation.inputs)

    def test() -> Examples:
        examples = task.test()
        return Examples(features(examples.inputs), examples.labels)

    return Task(
        name=task.name,
        clients=StoredClients(Examples(features(images), labels), tuple(own.numpy() for own in rows)),
        validation=Examples(validation, task.validation.labels),
        test=test,
        classes=task.classes,
        input_shape=tuple(validation.shape[1:]),
        description=f"{task.description} As {validation.shape[1]:,} fixed features of random patches.",
    )


def deal(table: Examples, population: int) -> StoredClients:
    """Return clients with a fair share of a table each, always the same."""
    generator = np.random.default_rng(0)  # noqa: TID251 - which client holds what is no secret
    return StoredClients(table, Partition(PartitionKind.IID).split(table.labels.numpy(), population, generator))


def linear_model(width: int, classes: int) -> Model:
    """Return a linear classifier that begins at zero, where a private start is as good as any."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(width, classes))
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return Model(module)


def _filters(images: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return filters without a mean whose responses to patches of such images are about independent."""
    at = (images.shape[-1] - _PATCH) // 2
    patches = images[..., at : at + _PATCH, at : at + _PATCH].flatten(1)
    patches = patches - patches.mean(dim=1, keepdim=True)
    patches = patches / (patches.var(dim=1, keepdim=True) + _CONTRAST).sqrt()
    variances, axes = torch.linalg.eigh(patches.T @ patches / len(patches))
    directions = nn.functional.normalize(torch.randn(count, patches.shape[1], generator=generator))
    filters: torch.Tensor = directions @ axes @ torch.diag((variances + _WHITENING).rsqrt()) @ axes.T
    return (filters - filters.mean(dim=1, keepdim=True)).view(count, -1, _PATCH, _PATCH)


def _pooled(images: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    """Return the pooled responses to each image and its mirror image, averaged: left and right are alike.

    One image at a time and in buffers that are used again: memory that is fetched afresh takes longer than the sums.
    """
    taps, places = filters.flatten(1).T.contiguous(), images.shape[-1] - _PATCH + 1
    windows = torch.eye(places**2).view(-1, 1, places, places)
    pool = nn.functional.adaptive_avg_pool2d(windows, _GRID).flatten(1).T.contiguous()
    responses = torch.empty(places**2, taps.shape[1])
    small = torch.empty_like(responses)
    found = torch.zeros(len(images), 2, taps.shape[1], len(pool))
    for image, halves in zip(images, found, strict=True):
        for seen in (image, image.flip(-1)):
            torch.mm(_even(seen).T, taps, out=responses)
            responses.sub_(torch.clamp(responses, -_THRESHOLD, _THRESHOLD, out=small))
            signed, size = pool @ responses, pool @ responses.abs_()
            halves.add_(torch.stack([size + signed, size - signed]).mT)  # twice what is above 0, and below
    return found.flatten(1) / 4


def _even(image: torch.Tensor) -> torch.Tensor:
    """Return all patches of an image in columns, of one contrast; filters have no mean, so theirs may stay."""
    patches = nn.functional.unfold(image[None], _PATCH)[0]
    variance = patches.square().mean(0) - patches.mean(0).square()
    return patches * variance.clamp_(min=0).add_(_CONTRAST).rsqrt_()
