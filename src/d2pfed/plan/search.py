"""The least noise that keeps a guarantee."""

import math
from collections.abc import Callable

from d2pfed.errors import ConfigError

PRECISION = 5e-4  # relative, of the noise: how far above the least the answer may be
SMALLEST_MULTIPLIER, LARGEST_MULTIPLIER = 1e-3, 1e6


def least_multiplier(epsilon_at: Callable[[float], float], epsilon: float, start: float, wanted: str) -> float:
    """Return a multiplier that keeps epsilon, while one smaller by the precision does not.

    `epsilon_at` falls. Where it is smooth, a line through the ends in logarithms leads close to the root, and two
    probes around that guess close the bracket; where it is not, halving does.
    """
    low = high = start
    below = above = epsilon_at(start)  # epsilon at either end: that of `low` is larger
    while below <= epsilon:
        low, high, above = low / 2, low, below
        if low < SMALLEST_MULTIPLIER:
            raise ConfigError(
                f"{wanted} asks for noise below {SMALLEST_MULTIPLIER:g} times the sensitivity: for none"
            )
        below = epsilon_at(low)
    while above > epsilon:
        low, high, below = high, high * 2, above
        if high > LARGEST_MULTIPLIER:
            raise ConfigError(f"{wanted} asks for noise above {LARGEST_MULTIPLIER:g} times the sensitivity")
        above = epsilon_at(high)
    probes = 0
    while high > low * (1 + PRECISION):
        middle = _probe(probes, (low, below), (high, above), epsilon)
        value = epsilon_at(middle)
        if value <= epsilon:
            high, above = middle, value
        else:
            low, below = middle, value
        probes += 1
    return high


def _probe(count: int, low: tuple[float, float], high: tuple[float, float], epsilon: float) -> float:
    """Return where to look next: just above the guess, just below it, and every third time in the middle."""
    (least, below), (most, above) = low, high
    if count % 3 == 2 or not (math.isfinite(below) and above > 0):
        return math.sqrt(least * most)
    share = math.log(below / epsilon) / math.log(below / above)
    aside = 1 + PRECISION / 3
    guess: float = least * (most / least) ** share * (aside if count % 3 == 0 else 1 / aside)
    inside = math.sqrt(1 + PRECISION)
    return min(max(guess, least * inside), most / inside)
