"""Clients' updates made up for demonstrations: unit vectors in random directions that agree as much as is wanted."""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from d2pfed.numerics.randomness import Entropy, Stream

Floats = NDArray[np.float64]


def directions(count: int, dimension: int, cosine: float, entropy: Entropy) -> Floats:
    """Return unit vectors as rows; any two have about this cosine, the closer the higher the dimension."""
    common = _direction(dimension, entropy.child("common").stream())
    rows = np.empty((count, dimension))
    for row in range(count):
        own = _direction(dimension, entropy.child("own", row).stream())
        mixed = math.sqrt(cosine) * common + math.sqrt(1 - cosine) * own
        rows[row] = mixed / _norm(mixed)
    return rows


def _direction(dimension: int, stream: Stream) -> Floats:
    uniform = (stream.words(dimension) >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54
    normal = np.asarray(ndtri(uniform), np.float64)
    return normal / _norm(normal)


def _norm(vector: Floats) -> float:
    return math.sqrt(float(np.sum(vector * vector)))  # numpy's norm starts threads that wait spinning
