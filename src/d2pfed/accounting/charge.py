"""What one release costs by itself, in each of the three ways of counting: Gaussian, Renyi, binomial."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from d2pfed.accounting import curves
from d2pfed.accounting.binomial import Sensitivity, binomial_epsilon
from d2pfed.accounting.conversion import FloatArray
from d2pfed.accounting.cost import Additive, composed
from d2pfed.accounting.release import BinomialSum, ContinuousGaussian, DiscreteGaussianSum, Noise, SkellamSum
from d2pfed.accounting.surrogate import surrogate
from d2pfed.errors import ConfigError

# From a noise, and how many clip radii the neighbours are apart, to its cost.
Charge = Callable[[Noise, int], Additive]


def has_gaussian(noise: Noise, releases: int) -> bool:
    """Return whether a continuous Gaussian can stand for the noise over so many releases."""
    if isinstance(noise, DiscreteGaussianSum):
        return surrogate(noise, releases) is not None
    return isinstance(noise, ContinuousGaussian)


def gaussian_charge(noise: Noise, radii: int, releases: int) -> Additive:
    """Return (squared ratio of shift to sigma, slack) of the Gaussian that stands for the noise.

    Guarantee: dominates the true release in the sense of theory.md#surrogate.
    """
    if isinstance(noise, ContinuousGaussian):
        return Additive(((radii * noise.radius / noise.sigma) ** 2, 0.0))
    smooth = surrogate(noise, releases) if isinstance(noise, DiscreteGaussianSum) else None
    if smooth is None:
        return Additive((math.inf, math.inf))
    return Additive(((radii * float(noise.radius) / smooth.sigma) ** 2, smooth.slack))


def renyi_charge(noise: Noise, radii: int, orders: FloatArray) -> Additive:
    """Return the noise's Renyi divergences at integer orders.

    Guarantee: upper bounds for neighbours `radii` clip radii apart. Proof: theory.md#sums, theory.md#skellam.
    """
    return Additive(tuple(_curve(noise, radii, orders).tolist()))


def _curve(noise: Noise, radii: int, orders: FloatArray) -> FloatArray:
    shift = radii * float(noise.radius)
    if isinstance(noise, ContinuousGaussian):
        return curves.gaussian(orders, shift / noise.sigma)
    if isinstance(noise, DiscreteGaussianSum):
        sigma, d = float(noise.sigma), noise.dimension
        return curves.real_centred_sum(
            orders, sigma=sigma, contributors=noise.contributors, shift=shift, dimension=d
        )
    if isinstance(noise, SkellamSum):
        # An integer vector's L1 norm is at most its squared L2 norm, and at most sqrt(d) times its L2 norm.
        l1 = min(radii * float(noise.l1_radius), shift * shift, shift * math.sqrt(noise.dimension))
        total = float(noise.variance) * noise.contributors
        return curves.skellam(orders, variance=total, shift=shift, l1_shift=l1)
    raise ConfigError("binomial noise composes by its own rule and cannot be mixed with other noise")


def binomial_charge(noise: Noise, radii: int, delta: float) -> Additive:
    """Return (epsilon, delta, epsilon^2, epsilon (e^epsilon - 1)) of binomial noise at a chosen delta.

    Guarantee: the sums of such charges enter advanced composition. Proof: theory.md#binomial.
    """
    if not isinstance(noise, BinomialSum):
        raise ConfigError("binomial noise composes by its own rule and cannot be mixed with other noise")
    sensitivity = Sensitivity(
        l1=radii * float(noise.l1_radius), l2=radii * float(noise.radius), linf=radii * float(noise.linf_radius)
    )
    epsilon = binomial_epsilon(noise.trials * noise.contributors, sensitivity, noise.dimension, delta)
    return approximate(epsilon, delta)


def approximate(epsilon: float, delta: float) -> Additive:
    """Return the coordinates in which (epsilon, delta) guarantees add."""
    growth = epsilon * math.expm1(epsilon) if epsilon < 700 else math.inf
    return Additive((epsilon, delta, epsilon * epsilon, growth))


def costliest(costs: Sequence[tuple[Additive, int]], most: int) -> Additive:
    """Return a total that no choice of `most` of the costs, each as often as stated, exceeds in any coordinate."""
    if sum(count for _, count in costs) <= most:
        return composed(costs)
    values = np.array([cost.values for cost, _ in costs])
    counts = np.array([count for _, count in costs])
    order = np.argsort(-values, axis=0, kind="stable")  # in each coordinate by itself
    before = np.cumsum(counts[order], axis=0) - counts[order]
    taken = np.clip(most - before, 0, counts[order])
    with np.errstate(invalid="ignore"):
        parts = np.where(taken > 0, np.take_along_axis(values, order, axis=0) * taken, 0.0)
    return composed((Additive(tuple(part)), 1) for part in parts.tolist())


def worst(costs: Sequence[Additive]) -> Additive:
    """Return a cost that none of the given ones exceeds in any coordinate."""
    return costliest([(cost, 1) for cost in costs], 1)
