"""A second estimate of the primal attack: reduction of the basis is simulated block by block (Chen, Nguyen).

Lengths come from the simulation, not from a root Hermite factor as in `lattice_estimator`; when a secret counts as
found is the same condition in both.
"""

from functools import lru_cache
from math import lgamma, log, pi

import numpy as np

_TAIL = 45  # vectors at the end, where the Gaussian heuristic does not hold; their shape changes no block below
_TOURS = 8  # with 60 no block below changes by more than one


@lru_cache(maxsize=1)
def heuristic() -> np.ndarray:
    """By dimension: the logarithm of the shortest vector of a lattice of volume 1."""
    return np.array([0.0] + [lgamma(size / 2 + 1) / size - log(pi) / 2 for size in range(1, 2500)])


def reduced(profile: np.ndarray, block: int) -> np.ndarray:
    """The logarithms of the lengths of a basis's Gram-Schmidt vectors after tours with blocks of this size."""
    size, shortest = len(profile), heuristic()
    for _ in range(_TOURS):
        ends, spent, changed = np.concatenate(([0.0], np.cumsum(profile))), 0.0, False
        found = np.empty(size)
        for place in range(size - _TAIL):
            length = min(block, size - place)
            best = (ends[place + length] - spent) / length + shortest[length]
            changed = changed or best < profile[place]
            found[place] = best if changed else profile[place]
            spent += found[place]
        found[-_TAIL:] = (ends[-1] - spent) / _TAIL
        profile = found
    return profile


def finds(length: int, modulus: int, deviation: float, samples: int, block: int) -> bool:
    """Whether reduction meets the secret: its projection is shorter than the vector that stands there."""
    profile = np.repeat((log(modulus), 0.0), (samples, length + 1))
    return log(deviation) + log(block) / 2 <= reduced(profile, block)[-block]


def least_block(length: int, modulus: int, deviation: float) -> int:
    """The least block that finds the secret, with the best of some numbers of samples."""
    low, high = 50, 2 * length
    while high - low > 1:
        middle = (low + high) // 2
        is_found = any_finds(length, modulus, deviation, middle)
        low, high = (low, middle) if is_found else (middle, high)
    return high


def any_finds(length: int, modulus: int, deviation: float, block: int) -> bool:
    parts = (0.7, 0.8, 0.9, 1.0, 1.1, 1.25)
    return any(finds(length, modulus, deviation, round(part * length), block) for part in parts)
