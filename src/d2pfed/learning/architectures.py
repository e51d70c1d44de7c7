"""The models that come with the tasks, by name, and the fixed features that one of them has.

These features say how strong edges of each direction are in each part of a grey image (histograms of oriented
gradients: Dalal and Triggs, 2005). Nothing in them is learned, so they cost no privacy, no noise and no upload.
"""

import math
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from d2pfed.errors import ConfigError
from d2pfed.learning.model import Model
from d2pfed.learning.task import Floats, Task
from d2pfed.numerics.compiled import compiled

MODELS = ("logistic", "edges", "mlp", "cnn", "small-cnn", "char")
CELLS = 7  # on a side
DIRECTIONS = 8
_BLUR = 0.8  # pixels: the scale at which edges are looked for
_REACH = 4  # pixels on either side that Gaussian derivatives look at; beyond them is nothing at these scales
_MOST_COMPILED = 64  # pixels on a side; the products of larger images would start threads of OpenBLAS
_NORM = 3.0  # of an image's features; with it the learning rates of pixels serve features too


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
    if name not in MODELS:
        raise ConfigError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
    axes, shape, classes = 1 if name == "char" else 3, task.input_shape, task.classes
    if len(shape) != axes:
        raise ConfigError(f"model {name} needs inputs with {axes} axes, task {task.name} has {shape}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        front: list[nn.Module] = []
        match name:
            case "logistic":
                widths = [math.prod(shape), classes]
            case "edges":  # 19,354 parameters, whatever the image's size
                if shape[0] != 1 or shape[1] != shape[2]:
                    raise ConfigError(f"model edges needs square grey images, got inputs of shape {shape}")
                front, widths = [OrientedEdges(shape[1])], [DIRECTIONS * CELLS**2, 48, classes]
            case "mlp":  # the paper's, with 51,370 parameters on its inputs
                widths = [math.prod(shape), 60, 60, classes]
            case "char":  # a predictor of the next character from those before
                front, widths = [nn.Embedding(classes, 16)], [16 * shape[0], 256, classes]
            case _:  # `cnn` is the paper's, with 996,298 parameters on its inputs
                channels, kernel, hidden = ((64, 64), 5, [384]) if name == "cnn" else ((16, 32), 3, [])
                for before, after in zip((shape[0], channels[0]), channels, strict=True):
                    front += [nn.Conv2d(before, after, kernel, padding=kernel // 2), nn.ReLU(), nn.MaxPool2d(2)]
                widths = [channels[1] * (shape[1] // 4) * (shape[2] // 4), *hidden, classes]
        layers = [*front, nn.Flatten(), nn.Linear(widths[0], widths[1])]
        for before, after in pairwise(widths[1:]):
            layers += [nn.ReLU(), nn.Linear(before, after)]
        return Model(nn.Sequential(*layers))


class OrientedEdges(nn.Module):
    """Turns images (rows, 1, side, side) into features (rows, DIRECTIONS, CELLS, CELLS)."""

    smooth: torch.Tensor
    slope: torch.Tensor
    pool: torch.Tensor
    compass: torch.Tensor

    def __init__(self, side: int) -> None:
        super().__init__()
        pixels, width = torch.arange(float(side)), side / CELLS
        centers = (torch.arange(float(CELLS)) + 0.5) * width - 0.5
        angles = torch.arange(DIRECTIONS) * (2 * math.pi / DIRECTIONS)
        smooth = _bells(pixels, pixels, _BLUR)
        fixed = {
            "smooth": smooth,
            "slope": smooth * (pixels - pixels[:, None]) / _BLUR**2,
            "pool": _bells(centers, pixels, width / 2),
            "compass": torch.stack([angles.cos(), angles.sin()])[:, :, None, None],
        }
        for name, value in fixed.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return each image's features, centered and of one length; of a blank image zeros."""
        side = len(self.smooth)
        is_plain = (
            side <= _MOST_COMPILED
            and images.shape[1:] == (1, side, side)
            and images.dtype == self.smooth.dtype == torch.float32
            and images.device.type == "cpu"
        )
        transformed = torch._C._are_functorch_transforms_active()  # noqa: SLF001 - torch has no public name for it
        if is_plain and not (self.training or torch.is_grad_enabled() or transformed):  # 1.5 times as fast
            features = np.empty((len(images), DIRECTIONS, CELLS, CELLS), np.float32)
            _edge_features(images.contiguous().numpy().reshape(-1, side, side), *_tables(side), features)
            return torch.from_numpy(features)
        across = self.smooth @ images @ self.slope.T
        down = self.slope @ images @ self.smooth.T
        facing = (across * self.compass[0] + down * self.compass[1]).relu()
        strength = (self.pool @ facing @ self.pool.T).sqrt()  # the root evens out thin and bold strokes
        centered = strength - strength.mean((-3, -2, -1), keepdim=True)
        length = centered.square().sum((-3, -2, -1), keepdim=True).sqrt()
        return centered * (_NORM / length.clamp(min=1e-6))


def _bells(centers: torch.Tensor, pixels: torch.Tensor, width: float) -> torch.Tensor:
    """Return a row of Gaussian weights around each center."""
    heights = torch.exp(-((pixels - centers[:, None]) / width).square() / 2)
    heights[heights < 1e-6] = 0  # nothing to see in them, and sums of the tiniest floats take ten times as long
    return heights / (width * math.sqrt(2 * math.pi))


@cache
def _tables(side: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Return smooth and slope by distance, the directions, and the pool with rows of a multiple of 8 pixels."""
    distances = torch.arange(_REACH + 1.0)
    smooth = _bells(torch.zeros(1), distances, _BLUR)[0]
    edges = OrientedEdges(side)
    pool = np.zeros((CELLS, -(-side // 8) * 8), np.float32)
    pool[:, :side] = edges.pool.numpy()
    directions = np.ascontiguousarray(edges.compass.numpy().reshape(2, DIRECTIONS))
    return smooth.numpy(), (smooth * distances / _BLUR**2).numpy(), directions, pool


@compiled
def _differentiate(  # noqa: PLR0917 - a kernel takes arrays, not objects
    wide: Floats, smooth: Floats, slope: Floats, smoothed: Floats, sloped: Floats, across: Floats, down: Floats
) -> None:
    """Fill across and down from an image inside a margin of 4 zeros; the rows of the margin of both buffers are 0."""
    height, width = across.shape
    s0, s1, s2, s3, s4 = smooth[0], smooth[1], smooth[2], smooth[3], smooth[4]
    d1, d2, d3, d4 = slope[1], slope[2], slope[3], slope[4]
    for y in range(4, 4 + height):
        for x in range(width):
            l1, r1, l2, r2 = wide[y, x + 3], wide[y, x + 5], wide[y, x + 2], wide[y, x + 6]
            l3, r3, l4, r4 = wide[y, x + 1], wide[y, x + 7], wide[y, x], wide[y, x + 8]
            near, far = s0 * wide[y, x + 4] + s1 * (l1 + r1), s2 * (l2 + r2) + (s3 * (l3 + r3) + s4 * (l4 + r4))
            smoothed[y, x] = near + far
            sloped[y, x] = (d1 * (r1 - l1) + d2 * (r2 - l2)) + (d3 * (r3 - l3) + d4 * (r4 - l4))
    for y in range(4, 4 + height):
        for x in range(width):
            near = s0 * sloped[y, x] + s1 * (sloped[y - 1, x] + sloped[y + 1, x])
            middle = s2 * (sloped[y - 2, x] + sloped[y + 2, x])
            far = s3 * (sloped[y - 3, x] + sloped[y + 3, x]) + s4 * (sloped[y - 4, x] + sloped[y + 4, x])
            across[y - 4, x] = near + (middle + far)
            near = d1 * (smoothed[y + 1, x] - smoothed[y - 1, x]) + d2 * (smoothed[y + 2, x] - smoothed[y - 2, x])
            far = d3 * (smoothed[y + 3, x] - smoothed[y - 3, x]) + d4 * (smoothed[y + 4, x] - smoothed[y - 4, x])
            down[y - 4, x] = near + far


@compiled
def image_gradients(images: Floats, smooth: Floats, slope: Floats) -> Floats:
    """Return the derivatives (rows, 2, side, side), across and down, by weights at distances 0 to 4 of a Gaussian."""
    height, width = images.shape[1:]
    gradients = np.empty((len(images), 2, height, width), np.float32)
    wide = np.zeros((height + 8, width + 8), np.float32)
    smoothed, sloped = np.zeros((height + 8, width), np.float32), np.zeros((height + 8, width), np.float32)
    for n in range(len(images)):
        for y in range(height):  # to compile the checks of one assignment of slices takes seconds
            for x in range(width):
                wide[y + 4, x + 4] = images[n, y, x]
        _differentiate(wide, smooth, slope, smoothed, sloped, gradients[n, 0], gradients[n, 1])
    return gradients


@compiled
def _edge_features(  # noqa: PLR0917 - a kernel takes arrays, not objects
    images: Floats, smooth: Floats, slope: Floats, directions: Floats, pool: Floats, features: Floats
) -> None:
    side, (cells, width), turns = images.shape[1], pool.shape, directions.shape[1]
    wide = np.zeros((side + 8, width + 8), np.float32)
    smoothed, sloped = np.zeros((side + 8, width), np.float32), np.zeros((side + 8, width), np.float32)
    across, down = np.zeros((side, width), np.float32), np.zeros((side, width), np.float32)
    facing, rows = np.zeros((side, turns * width), np.float32), np.zeros((cells, turns * width), np.float32)
    columns, pooled = np.ascontiguousarray(pool[:, :side]), np.zeros((cells * turns, cells), np.float32)
    sums = np.zeros(cells, np.float32)
    for n in range(len(images)):
        for y in range(side):  # to compile the checks of one assignment of slices takes seconds
            for x in range(side):
                wide[y + 4, x + 4] = images[n, y, x]
        _differentiate(wide, smooth, slope, smoothed, sloped, across, down)
        for y in range(side):  # how strong edges of each direction are, directions side by side in a row of pixels
            for k in range(turns // 2):
                cosine, sine = directions[0, k], directions[1, k]
                ahead, behind = facing[y, k * width :][:width], facing[y, (turns // 2 + k) * width :][:width]
                for x in range(width):
                    strength = across[y, x] * cosine + down[y, x] * sine
                    ahead[x] = np.float32(0) if strength < 0 else strength  # not max: NaN must stay NaN
                    behind[x] = np.float32(0) if strength > 0 else -strength
        np.dot(columns, facing, rows)
        np.dot(rows.reshape(cells * turns, width), pool.T, pooled)
        found, strengths = features[n], pooled.reshape(cells, turns, cells)  # by row, direction, column
        sums[:] = 0
        for q in range(cells):
            for k in range(turns):
                for r in range(cells):
                    found[k, q, r] = np.sqrt(strengths[q, k, r])
                    sums[r] += found[k, q, r]
        mean, flat = sums.sum() / np.float32(found.size), found.reshape(-1)
        sums[:] = 0
        for start in range(0, len(flat), cells):
            for r in range(cells):
                flat[start + r] -= mean
                sums[r] += flat[start + r] * flat[start + r]
        factor = np.float32(_NORM) / max(np.sqrt(sums.sum()), np.float32(1e-6))
        for i in range(len(flat)):
            flat[i] *= factor
