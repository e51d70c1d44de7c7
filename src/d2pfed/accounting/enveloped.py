"""A profile made of a Renyi curve: what its conversion says at every epsilon, and what convexity adds."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from d2pfed.accounting.charge import renyi_charge
from d2pfed.accounting.conversion import FloatArray
from d2pfed.accounting.losses import reach
from d2pfed.accounting.orders import sparse
from d2pfed.accounting.profiles import Profile
from d2pfed.accounting.release import Noise

_ORDERS = sparse(1 << 20)
_NODES = 1 << 13
_TAIL = 1e-60  # beyond this the profile is taken to be constant
_WIDEST = 600.0  # epsilon whose exponential is still in the range of doubles


@dataclass(frozen=True, slots=True)
class SampledCurve:
    """One release behind a fixed-size cohort, with noise of which a Renyi curve is known.

    `radii` says how many clip radii neighbours are apart: two behind a cohort.
    """

    noise: Noise
    radii: int
    rate: float
    slack: float = 0.0

    @property
    def forward(self) -> Profile:
        """The profile of the first world against the second.

        Guarantee: dominates every pair of replace-one neighbours. Proof: theory.md#renyi-profile.
        Checked: test_accounting_enveloped.py.
        """
        ratios, values = _envelope(self.noise, self.radii)

        def profile(epsilon: FloatArray) -> FloatArray:
            base = 1 + np.expm1(np.minimum(epsilon, _WIDEST)) / self.rate
            return self.rate * np.interp(base, ratios, values)

        return profile

    @property
    def backward(self) -> None:
        """Nothing: the reversed order is the same."""
        return


def has_envelope(noise: Noise, radii: int) -> bool:
    """Return whether the noise's profile falls off in the range of doubles."""
    return _width(noise, radii) < _WIDEST


def renyi_delta(epsilon: FloatArray, noise: Noise, radii: int) -> FloatArray:
    """Return the least delta that the conversion of the noise's Renyi curve gives at any order, for epsilon >= 0."""
    curve = np.array(renyi_charge(noise, radii, _ORDERS).values)
    start = (_ORDERS - 1) * curve + _ORDERS * np.log1p(-1 / _ORDERS) - np.log(_ORDERS - 1)
    exponents = np.full(np.shape(epsilon), min(0.0, math.log(-math.expm1(-curve[0])) / 2))  # total variation
    for constant, order in zip(start.tolist(), _ORDERS.tolist(), strict=True):
        np.minimum(exponents, constant - (order - 1) * epsilon, out=exponents)
    return np.asarray(np.exp(exponents), dtype=np.float64)


def _width(noise: Noise, radii: int) -> float:
    if renyi_delta(np.array([_WIDEST]), noise, radii)[0] > _TAIL:
        return _WIDEST
    return reach(lambda epsilon: renyi_delta(epsilon, noise, radii), _TAIL)


@lru_cache(maxsize=64)
def _envelope(noise: Noise, radii: int) -> tuple[FloatArray, FloatArray]:
    """Return the profile at ratios alpha >= 1: the greatest convex function below what is known on both sides of 1."""
    epsilon = np.linspace(0, _width(noise, radii), _NODES)
    above, ratio = renyi_delta(epsilon, noise, radii), np.exp(epsilon)
    below = 1 - 1 / ratio + above / ratio  # the reversed order at 1 / alpha
    ratios = np.concatenate([1 / ratio[:0:-1], ratio])
    values = np.concatenate([below[:0:-1], above])
    kept = _hull(ratios.tolist(), values.tolist())
    return ratio, np.interp(ratio, ratios[kept], values[kept])


def _hull(xs: list[float], ys: list[float]) -> list[int]:
    """Return the points of the lower convex hull of points in increasing order."""
    kept: list[int] = []
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (ys[b] - ys[a]) * (x - xs[a]) < (y - ys[a]) * (xs[b] - xs[a]):
                break
            kept.pop()
        kept.append(i)
    return kept
