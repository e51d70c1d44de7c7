"""The mean of a server that everyone trusts: clipped updates plus a continuous Gaussian, the reference line."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from d2pfed.accounting import ContinuousGaussian
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Stream


def gaussian_mean(
    updates: Iterable[FloatVector], cohort_size: int, noise: ContinuousGaussian, stream: Stream
) -> FloatVector:
    """Return the sum of the updates, each clipped to the noise's radius, plus the noise, over the cohort size.

    Guarantee: what `ContinuousGaussian` costs in accounting, up to the rounding of floating point; against the server
    itself there is none. Checked: test_reproduce_trusted.py.
    """
    clipped = (_clipped(update, noise.radius) for update in updates)
    total = next(clipped)
    for update in clipped:
        total += update
    mean: FloatVector = ((total + noise.sigma * normals(stream, len(total))) / cohort_size).astype(np.float32)
    return mean


def normals(stream: Stream, count: int) -> NDArray[np.float64]:
    """Return standard normal numbers, from pairs of 53-bit uniforms by Box and Muller."""
    pairs = -(-count // 2)
    uniforms = ((stream.words(2 * pairs) >> np.uint64(11)) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(uniforms[:pairs])), 2 * np.pi * uniforms[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _clipped(update: FloatVector, radius: float) -> NDArray[np.float64]:
    exact = update.astype(np.float64)
    return exact / max(1.0, float(np.linalg.norm(exact)) / radius)
