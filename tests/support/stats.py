"""The only statistical assertions: each takes its false-alarm rate, and each has wrong twins that it rejects."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, norm

Pmf = Callable[[NDArray[np.int64]], NDArray[np.float64]]

MAX_CELLS = 100
MIN_EXPECTED = 20


def check_fits(draws: NDArray[np.int64], pmf: Pmf, false_alarm: float) -> None:
    """Chi-square of integer draws against a distribution, neighbouring values pooled to at most a hundred cells."""
    low, high = int(draws.min()) - 50, int(draws.max()) + 50
    values = np.arange(low, high + 1)
    expected = draws.size * pmf(values)
    observed = np.bincount(draws - low, minlength=values.size)
    enough = max(MIN_EXPECTED, draws.size / MAX_CELLS)
    cells = (
        _pool(expected, enough) if np.sum(expected > MIN_EXPECTED) > MAX_CELLS else _pool(expected, MIN_EXPECTED)
    )
    want = np.bincount(cells, weights=expected)
    want[-1] += draws.size - expected.sum()
    got = np.bincount(cells, weights=observed)
    statistic = float(np.sum((got - want) ** 2 / want))
    critical = float(chi2.isf(false_alarm, want.size - 1))
    assert statistic <= critical, f"chi-square {statistic:.1f} over {want.size} cells exceeds {critical:.1f}"


def check_mean(samples: NDArray[np.float64], expected: float, false_alarm: float) -> None:
    """The mean of many independent samples against its expectation, two-sided, by the central limit theorem."""
    error = float(np.mean(samples)) - expected
    critical = float(norm.isf(false_alarm / 2)) * float(np.std(samples)) / samples.size**0.5
    assert abs(error) <= critical, f"the mean is off by {error:.4g}, more than {critical:.4g}, from {expected:.6g}"


def check_every_coordinate_varies(vectors: NDArray[np.int64]) -> None:
    """Every coordinate takes two values or more; 64 rows of noise with sigma >= 1 never fail by chance."""
    constant = np.flatnonzero(np.all(vectors == vectors[0], axis=0))
    assert constant.size == 0, f"coordinates without noise: {constant[:10].tolist()}"


def _pool(expected: NDArray[np.float64], enough: float) -> NDArray[np.int64]:
    """Number cells of consecutive values that expect enough draws; a poor last cell joins its neighbour."""
    cells = np.empty(expected.size, np.int64)
    cell, mass = 0, 0.0
    for index, value in enumerate(expected):
        cells[index] = cell
        mass += value
        if mass >= enough:
            cell, mass = cell + 1, 0.0
    return np.minimum(cells, max(cell - 1, 0))
