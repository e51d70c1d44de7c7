"""Handwritten digits without end: each client's are made on demand by the index rules of InfiMNIST.

The rules are those of Loosli, Canu and Bottou (2007). Their file of deformation fields is not used: the fields
here come from a fixed seed, so digits look alike but are not the same, pixel for pixel.
"""

from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter, gaussian_filter1d

from d2pfed.errors import ConfigError
from d2pfed.learning.architectures import image_gradients
from d2pfed.learning.task import Examples, Floats, Partition, check_client
from d2pfed.numerics.compiled import compiled
from d2pfed.numerics.ring import IntVector

SIDE = 28
FIELDS = 1522
_SHIFTS = ((-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1), (0, 0))
_REACH = 4  # pixels: beyond it the Gaussian of 0.9 pixels is nothing
_MOST_CACHED_PIXELS = 1 << 25  # of base digits whose gradients, 8 bytes a pixel, are kept: 256 MiB
_FIRST = 10_000  # indices below are the test digits, the next ones the base digits as they are


def recipe(index: IntVector, count: int) -> IntVector:
    """Apply the index rules to deformed digits (index >= 10,000 + count) over `count` base digits.

    A row says how a digit is made: from which base digit, by which two fields, with which sign, and by which of nine
    shifts. The sign follows the parity of index // count; the original takes that of k1 + k2, which is always odd.
    """
    if len(index) and index.min() < _FIRST + count:
        raise ConfigError(f"index of a deformed digit must be at least {_FIRST + count}, got {index.min()}")
    first = (index % 2**32) * 131_071 % 2**32 % (FIELDS - 1)
    second = (first + 1 + 2 * index) % FIELDS
    sign = np.where(index // count % 2 == 0, 1, -1)
    return np.stack([(index - _FIRST) % count, first, second, sign, first % 9], axis=1)


@cache
def fields() -> Floats:
    """Return the 1,522 smooth deformation fields: uniform noise, blurred by 4 pixels, unit deviation each."""
    noise = np.random.default_rng(2007).uniform(-1, 1, (FIELDS, SIDE, SIDE))
    smooth = gaussian_filter(noise, 4.0, axes=(1, 2))
    smooth /= smooth.std(axis=(1, 2), keepdims=True)
    return np.asarray(smooth, np.float32)


def digit_gradients(digits: NDArray[np.uint8]) -> Floats:
    """Return the x and y derivatives (len, 2, 28, 28) of digits, each Gaussian of 0.9 pixels."""
    impulse = np.eye(1, 2 * _REACH + 1, _REACH)[0]
    filtered = (gaussian_filter1d(impulse, 0.9, order=order)[::-1][_REACH:] for order in (0, 1))
    return image_gradients(digits.astype(np.float32), *(weights.astype(np.float32) for weights in filtered))


def scale(pixels: torch.Tensor) -> torch.Tensor:
    """Scale pixels from [0, 255] to [0, 1], as new floats.

    No mean is taken off: empty paper stays zero, so the noise on its weights does no harm. With the usual
    normalization private training loses about one percent of accuracy.
    """
    return pixels.float().mul(1 / 255)


def digit_examples(pixels: NDArray[np.uint8], labels: IntVector) -> Examples:
    """Join digits and labels to examples with inputs of 1 x 28 x 28 in [0, 1]."""
    return Examples(scale(torch.from_numpy(pixels)[:, None]), torch.from_numpy(labels))


@dataclass(frozen=True, eq=False, kw_only=True)
class VirtualClients:
    """Any number of clients with `size` digits each, no digit held twice and none stored.

    Client k's digit j is deformed by a repetition of the base set of its own: its index is 10,000 + base + count *
    (1 + k * size + j), so a base digit that is drawn twice still makes two digits. The gradients of a base set that is
    not too large are computed once per process.
    """

    base: NDArray[np.uint8] = field(repr=False)
    labels: IntVector = field(repr=False)
    population: int
    size: int
    partition: Partition  # by class
    seed: int
    _share: IntVector = field(init=False, repr=False)
    _by_class: IntVector = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.population < 1 or self.size < 1:
            raise ConfigError(f"population and size must be at least 1, got {self.population} and {self.size}")
        if not 0 < len(self.labels) == len(self.base):
            raise ConfigError(f"base digits need one label each, got {len(self.base)} and {len(self.labels)}")
        object.__setattr__(self, "_share", np.bincount(self.labels))
        object.__setattr__(self, "_by_class", np.argsort(self.labels, kind="stable"))

    def examples(self, client: int) -> Examples:
        """Make the digits of one client."""
        check_client(client, self.population)
        counts = self.partition.counts(client, self.population, self._share, self.size, self.seed)
        first, among = (np.repeat(each, counts) for each in (self._share.cumsum() - self._share, self._share))
        generator = np.random.default_rng([self.seed, client, 1])
        rows: IntVector = self._by_class[first + generator.integers(0, among)]
        repetition = 1 + client * self.size + np.arange(self.size)
        index = _FIRST + rows + repetition * len(self.labels)
        made = recipe(index, len(self.labels))
        if self.base.size <= _MOST_CACHED_PIXELS:
            base, gradients = self.base, self._gradients
        else:
            base, made[:, 0] = self.base[rows], np.arange(self.size)
            gradients = digit_gradients(base)
        pixels = torch.from_numpy(deform(base, gradients, made, fields(), np.float32(1 / 255)))
        return Examples(pixels[:, None], torch.from_numpy(self.labels[rows]))

    @cached_property
    def _gradients(self) -> Floats:
        return digit_gradients(self.base)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_gradients"}


@compiled
def deform(
    base: NDArray[np.uint8],
    gradients: Floats,
    made: IntVector,
    field: Floats,
    scale: np.float32,
) -> Floats:
    """Make digits with pixels in [0, 255 * scale], shape (len, 28, 28), from base digits and their gradients."""
    digits = np.zeros((len(made), SIDE, SIDE), np.float32)
    white, black = np.float32(0), np.float32(255)
    for n, (row, first, second, sign, shift) in enumerate(made):
        move_down, move_right = _SHIFTS[shift]
        left, right = max(0, -move_right), min(SIDE, SIDE - move_right)
        sign_first, sign_second = np.float32(sign), np.float32(-sign)
        for y in range(max(0, -move_down), min(SIDE, SIDE - move_down)):
            across, down = gradients[row, 0, y, left:right], gradients[row, 1, y, left:right]
            one, two, digit = field[first, y, left:right], field[second, y, left:right], base[row, y, left:right]
            target = digits[n, y + move_down, left + move_right : right + move_right]
            for x in range(right - left):
                pixel = np.float32(digit[x]) + (sign_first * one[x] * across[x] + sign_second * two[x] * down[x])
                target[x] = min(max(pixel, white), black) * scale
    return digits
