"""Private weights: each client adds its capped weight to its vector, and the mean is a ratio of two noisy sums.

A client with update x and weight w sends, for u = min(w, cap) / cap and a^2 + b^2 = 1,

    (a u x / max(|x|, clip), b u),

whose norm is at most 1 whatever x and w are. The sums of both parts are as private as any vector within that radius,
and their ratio is the weighted mean of the clipped updates. No weight is sent in clear.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.noise.codec import FloatVector, moderate

DROWNED = 3.0  # standard deviations of its noise: a total weight below that is taken to be that


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """How a client's weight enters its vector; all of it public and fixed before the run.

    Attributes:
        cap: the largest weight; a larger one counts as this.
        clip: L2 bound on an update.
        share: b, the part of the radius that a weight at the cap takes.
    """

    cap: float
    clip: float
    share: float

    def __post_init__(self) -> None:
        for name in ("cap", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"a weighting's {name} must be positive and finite, got {value}")
        if not 0 < self.share < 1:
            raise ConfigError(f"a weighting's share must be in (0, 1), got {self.share}")

    @staticmethod
    def balanced(cap: float, clip: float, dimension: int) -> "Weighting":
        """Return the weighting with the least error of a mean at the clip: it goes with dimension / a^2 + 1 / b^2."""
        return Weighting(cap=cap, clip=clip, share=1 / math.sqrt(1 + math.sqrt(dimension)))

    @property
    def rest(self) -> float:
        """The part of the radius that an update at the clip takes: a."""
        return math.sqrt(1 - self.share**2)

    def vector(self, weighted: NDArray[np.floating]) -> FloatVector:
        """Return what a client sends for an update with its weight as last number.

        A zero update (a client at its cap of participations, without data, or whose training diverged) is silent: it
        has no weight either. Checked: test_weighting.py::test_no_vector_exceeds_the_radius.
        """
        sent = np.zeros(len(weighted), np.float32)
        weight = float(weighted[-1])
        if not weight >= 0:
            raise ConfigError("a weight must be at least 0")
        update, scale = moderate(weighted[:-1])
        norm = math.sqrt(float(np.dot(update, update))) * scale
        if norm > 0:
            part = min(weight / self.cap, 1.0)
            np.multiply(update, np.float32(self.rest * part * scale / max(norm, self.clip)), out=sent[:-1])
            sent[-1] = self.share * part
        return sent

    def mean(self, released: FloatVector, noise: float) -> FloatVector:
        """Return the weighted mean of the clipped updates, from the means of both parts.

        `noise` is the standard deviation of a coordinate of `released`: a total weight that is not well above it
        would make the ratio arbitrarily large, so it counts as a few times the noise.
        """
        weight = max(float(released[-1]), DROWNED * noise) / self.share
        return released[:-1] * np.float32(self.clip / (self.rest * weight))
