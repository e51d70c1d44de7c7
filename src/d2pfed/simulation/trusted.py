"""Means that a trusted server takes of bare updates: reference lines, which secure aggregation knows nothing of."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from d2pfed.accounting import ContinuousGaussian
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Stream


def plain_mean(updates: Iterable[FloatVector], cohort: int) -> FloatVector:
    """Return the sum of the updates over the cohort's size, as FedAvg has it: private to nobody."""
    mean: FloatVector = (_total(updates) / cohort).astype(np.float32)
    return mean


def gaussian_mean(
    updates: Iterable[FloatVector], cohort: int, noise: ContinuousGaussian, stream: Stream
) -> FloatVector:
    """Return the same with updates clipped to the noise's radius, and the noise on their sum.

    Guarantee: what `ContinuousGaussian` costs in accounting, up to the rounding of floating point; against the server
    itself there is none. Checked: test_simulation_trusted.py.
    """
    total = _total(_clipped(update, noise.radius) for update in updates)
    mean: FloatVector = ((total + noise.sigma * normals(stream, len(total))) / cohort).astype(np.float32)
    return mean


def normals(stream: Stream, count: int) -> NDArray[np.float64]:
    """Return standard normal numbers, from pairs of 53-bit uniforms by Box and Muller."""
    pairs = -(-count // 2)
    uniforms = ((stream.words(2 * pairs) >> np.uint64(11)) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(uniforms[:pairs])), 2 * np.pi * uniforms[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _total(updates: Iterable[NDArray[np.floating]]) -> NDArray[np.float64]:
    vectors = iter(updates)
    total = next(vectors).astype(np.float64)
    for update in vectors:
        total += update
    return total


def _clipped(update: FloatVector, radius: float) -> NDArray[np.float64]:
    exact = update.astype(np.float64)
    return exact / max(1.0, float(np.linalg.norm(exact)) / radius)
