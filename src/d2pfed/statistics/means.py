"""Weighted means: from a vector and its weight to one bounded vector, and from a sum of those to the mean."""

import math
from dataclasses import dataclass

import numpy as np

from d2pfed.errors import ConfigError
from d2pfed.noise.clipping import DROWNED, Weighting
from d2pfed.statistics.records import Array, RecordCode, client_weights, clipped, interval, positive


@dataclass(frozen=True, slots=True)
class Ball:
    """Where vectors are brought to: within a radius of a centre, and each of their numbers within bounds."""

    dimension: int
    radius: float
    bounds: tuple[float, float] | None

    @property
    def centre(self) -> float:
        """The middle of the bounds."""
        return 0.0 if self.bounds is None else sum(self.bounds) / 2

    def around(self, vector: Array) -> Array:
        """Return a vector as seen from the centre, within the radius; one that is not finite is at the centre."""
        if self.bounds is None or not np.isfinite(vector).all():
            return clipped(vector, self.radius)
        return clipped(np.clip(vector, *self.bounds) - self.centre, self.radius)

    def joint(self, rows: Array) -> Array:
        """Return rows with their weight of 1 as a last number, both scaled so that the norm is at most 1."""
        both = Weighting.balanced(1.0, self.radius, self.dimension)
        joint = [np.append(both.rest / self.radius * self.around(row), both.share) for row in rows]
        return np.array(joint).reshape(len(rows), self.dimension + 1)

    def mean(self, total: Array, sigma: float) -> tuple[Array, Array]:
        """Return the weighted mean and its standard error, from a sum of weighted `joint` rows with this noise."""
        weighting = Weighting.balanced(1.0, self.radius, self.dimension)
        a, b = weighting.rest, weighting.share
        weight = max(total[-1], sigma) / b
        ratio = self.radius / a * total[:-1] / weight
        return self.centre + ratio, sigma * np.hypot(self.radius / a, ratio / b) / weight

    @property
    def code(self) -> RecordCode:
        """How a record becomes a vector: its own numbers, and a one to count it by."""
        return RecordCode(self.joint, self.dimension + 1, 1.0)


def capped_shares(weights: object, max_weight: object, clients: int) -> Array:
    """Return each client's weight over the cap, in [0, 1]; 0 where it is not finite."""
    if max_weight is None:
        raise ConfigError("weights need max_weight, a public cap on a client's weight, got None")
    given = client_weights(weights, clients)
    return np.clip(np.where(np.isfinite(given), given, 0.0) / positive("max_weight", max_weight), 0.0, 1.0)


def drowned(total: float, sigma: float, what: str) -> tuple[str, ...]:
    """Return a warning if a total that is divided by is not far above its noise."""
    if total >= DROWNED * sigma:
        return ()
    return (f"The total {what} is below {DROWNED:g} standard deviations of its noise: the ratio means little.",)


def ball_of(dimension: int, clip: object, bounds: object) -> Ball:
    """Return where vectors are brought to by a clip, or by bounds on each number."""
    if bounds is None and clip is None:
        raise ConfigError(
            "a mean needs bounds=(lowest, highest) on each number, or clip= on the norm, chosen without looking at "
            "the data; got neither"
        )
    if bounds is None:
        return Ball(dimension, positive("clip", clip), None)
    if clip is not None:
        raise ConfigError(f"a mean has a clip or bounds, got clip {clip} and bounds {bounds}")
    low, high = interval(bounds)
    return Ball(dimension, (high - low) / 2 * math.sqrt(dimension), (low, high))
