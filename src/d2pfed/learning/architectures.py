"""The models that come with the tasks, by name."""

from collections.abc import Callable
from math import prod

import torch
from torch import nn

from d2pfed.errors import ConfigError
from d2pfed.learning.edges import CELLS, DIRECTIONS, OrientedEdges
from d2pfed.learning.model import Model
from d2pfed.learning.task import Task

Shape = tuple[int, ...]


def logistic(shape: Shape, classes: int) -> nn.Module:
    """Build a linear classifier."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes))


def edges(shape: Shape, classes: int) -> nn.Module:
    """Build 48 units behind fixed edge features of grey images; 19,354 parameters, whatever the image's size."""
    if shape[0] != 1 or shape[1] != shape[2]:
        raise ConfigError(f"model edges needs square grey images, got inputs of shape {shape}")
    return nn.Sequential(
        *(OrientedEdges(shape[1]), nn.Flatten(), nn.Linear(DIRECTIONS * CELLS**2, 48)),
        *(nn.ReLU(), nn.Linear(48, classes)),
    )


def mlp(shape: Shape, classes: int) -> nn.Module:
    """Build the paper's two hidden layers of 60; 51,370 parameters on 28 x 28 digits."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(prod(shape), 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, classes)
    )


def cnn(shape: Shape, classes: int) -> nn.Module:
    """Build the paper's convolutions, 2 x 64 of 5 x 5, and 384 units; 996,298 parameters on 3 x 24 x 24 images."""
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(
            nn.Flatten(),
            nn.Linear(64 * (shape[1] // 4) * (shape[2] // 4), 384),
            nn.ReLU(),
            nn.Linear(384, classes),
        ),
    )


def small_cnn(shape: Shape, classes: int) -> nn.Module:
    """Build a light convolutional network: 16 and 32 channels of 3 x 3, one linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * (shape[1] // 4) * (shape[2] // 4), classes)),
    )


def char(shape: Shape, classes: int) -> nn.Module:
    """Build a predictor of the next character: embedded context, one hidden layer of 256."""
    return nn.Sequential(
        nn.Embedding(classes, 16), nn.Flatten(), nn.Linear(16 * shape[0], 256), nn.ReLU(), nn.Linear(256, classes)
    )


_BUILDERS: dict[str, tuple[int, Callable[[Shape, int], nn.Module]]] = {
    "logistic": (3, logistic),
    "edges": (3, edges),
    "mlp": (3, mlp),
    "cnn": (3, cnn),
    "small-cnn": (3, small_cnn),
    "char": (1, char),
}
MODELS = tuple(_BUILDERS)


def fitting(task: Task) -> str:
    """Return the name of the model that serves a task well."""
    if len(task.input_shape) == 1:
        return "char"
    if task.input_shape[0] != 1:
        return "small-cnn"
    # Of the smallest images the edges are the pixels.
    return "edges" if task.input_shape[1] > 2 * CELLS else "logistic"


def build_model(name: str, task: Task, seed: int) -> Model:
    """Build a model for a task, initialized by torch's defaults from the seed."""
    if name not in _BUILDERS:
        raise ConfigError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
    axes, builder = _BUILDERS[name]
    if len(task.input_shape) != axes:
        raise ConfigError(f"model {name} needs inputs with {axes} axes, task {task.name} has {task.input_shape}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Model(builder(task.input_shape, task.classes))
