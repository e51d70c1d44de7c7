"""Privacy costs of single releases, the one line that composes them, and from a composed cost to epsilon.

There are three methods: Gaussian, Renyi and binomial; which one applies depends on the noise alone.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial, reduce
from operator import add
from typing import TypeVar

import numpy as np

from d2pfed.accounting import rdp
from d2pfed.accounting.binomial import Sensitivity, amplified_epsilon, binomial_epsilon
from d2pfed.accounting.laws import BinomialSum, ContinuousGaussian, DiscreteGaussianSum, Noise
from d2pfed.accounting.losses import PrivacyLossDistribution
from d2pfed.accounting.profiles import gaussian_epsilon
from d2pfed.accounting.rdp import FloatArray, check_delta
from d2pfed.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AdditiveCost:
    """A cost whose coordinates add: Renyi divergences at fixed orders, or (squared ratio, slack) of Gaussians."""

    values: tuple[float, ...]

    def times(self, count: int) -> "AdditiveCost":
        """Return the cost of `count` equal releases."""
        return AdditiveCost(tuple(count * value for value in self.values))

    def __add__(self, other: "AdditiveCost") -> "AdditiveCost":
        return AdditiveCost(tuple(a + b for a, b in zip(self.values, other.values, strict=True)))


C = TypeVar("C", AdditiveCost, PrivacyLossDistribution)


def composed(costs: Iterable[tuple[C, int]]) -> C:
    """Return the cost of all releases together, each as often as stated: the only composition in the package.

    Guarantee: holds when each release was chosen after seeing the earlier ones. Proof: theory.md#composition.
    """
    return reduce(add, (cost.times(count) for cost, count in costs))


# What all releases together may add to epsilon: too small to see, large enough to smooth by less than one step.
TOTAL_SLACK = 1e-6
# Beyond this share of the width, smoothing destroys more than half the noise and Renyi curves do better.
_WIDEST_SMOOTHING = 0.75


@dataclass(frozen=True, slots=True)
class Surrogate:
    """A Gaussian of width `sigma` whose rounding is within max-divergence `slack` of the true sum, both ways."""

    sigma: float
    slack: float


def smoothing_gap(width: float, smoothing: float) -> float:
    """Return lambda: max-divergence per coordinate of a discrete Gaussian from a rounded continuous one.

    The continuous one has variance width^2 - smoothing^2 and is rounded by a discrete Gaussian of width
    `smoothing` around it. Infinite where the bound says nothing.

    Guarantee: holds in both directions for any real center. Proof: theory.md#smoothing.
    Checked: test_accounting_rdp.py by exact sums.
    """
    if not 0 < smoothing < width:
        return math.inf
    posterior = smoothing * math.sqrt(2 - (smoothing / width) ** 2)  # sqrt(s0^2 + r^2 s0^2 / s^2)
    mean, worst, own = rdp.theta_tail(posterior), rdp.theta_tail(smoothing), rdp.theta_tail(width)
    if worst >= 1:
        return math.inf
    above = math.log1p(mean + worst * worst / (1 - worst)) + math.log1p(own)
    below = -math.log1p(-mean) - math.log1p(-own)
    return max(above, below)


def surrogate(noise: DiscreteGaussianSum, releases: int) -> Surrogate | None:
    """Return the widest Gaussian whose slack over these releases is negligible; None if the noise is too narrow.

    Guarantee: with T releases and e0 = slack, delta(epsilon) <= exp(T e0) delta_Gauss(epsilon - 2 T e0).
    Proof: theory.md#surrogate. Checked: test_accounting_oracle.py.
    """
    sigma = float(noise.sigma)
    width = sigma * math.sqrt(noise.contributors) * (1 - 2**-50)
    gap = rdp.sum_gap(sigma, noise.contributors)
    share = TOTAL_SLACK / (releases * noise.dimension)
    # Smoothing finer than the other, unavoidable terms would cost width and gain nothing.
    target = max(share - gap, gap, 4 * rdp.theta_tail(width))
    low, high = 0.0, width * _WIDEST_SMOOTHING
    if smoothing_gap(width, high) > target:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if smoothing_gap(width, middle) <= target else (middle, high)
    slack = noise.dimension * (gap + smoothing_gap(width, high))
    return Surrogate(math.sqrt(width * width - high * high), slack) if math.isfinite(slack) else None


# From a noise, and how many clip radii the neighbours are apart, to the cost of one release.
NoiseCost = Callable[[Noise, int], AdditiveCost]


def has_gaussian(noise: Noise, releases: int) -> bool:
    """Return whether a continuous Gaussian can replace the noise over these releases."""
    return math.isfinite(gaussian_cost(noise, 1, releases).values[1])


def gaussian_cost(noise: Noise, radii: int, releases: int) -> AdditiveCost:
    """Return (squared ratio of shift to sigma, slack) of the noise's surrogate. Proof: theory.md#surrogate."""
    if isinstance(noise, ContinuousGaussian):
        return AdditiveCost(((radii * noise.radius / noise.sigma) ** 2, 0.0))
    smooth = surrogate(noise, releases) if isinstance(noise, DiscreteGaussianSum) else None
    if smooth is None:
        return AdditiveCost((math.inf, math.inf))
    return AdditiveCost(((radii * float(noise.radius) / smooth.sigma) ** 2, smooth.slack))


def binomial_cost(noise: Noise, radii: int, delta: float) -> AdditiveCost:
    """Return (epsilon, delta, epsilon^2, epsilon (e^epsilon - 1)) of binomial noise. Proof: theory.md#binomial."""
    if not isinstance(noise, BinomialSum):
        raise ConfigError("binomial noise composes by its own rule and cannot be mixed with other noise")
    norms = (noise.l1_radius, noise.radius, noise.linf_radius)
    sensitivity = Sensitivity(*(radii * float(norm) for norm in norms))
    epsilon = binomial_epsilon(noise.trials * noise.contributors, sensitivity, noise.dimension, delta)
    return approximate_dp_cost(epsilon, delta)


def approximate_dp_cost(epsilon: float, delta: float) -> AdditiveCost:
    """Return the coordinates in which (epsilon, delta) guarantees add."""
    growth = epsilon * math.expm1(epsilon) if epsilon < 700 else math.inf
    return AdditiveCost((epsilon, delta, epsilon * epsilon, growth))


def costliest_choice(costs: Sequence[tuple[AdditiveCost, int]], most: int) -> AdditiveCost:
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
    return composed((AdditiveCost(tuple(part)), 1) for part in parts.tolist())


# From the cost of a release to its cost behind a fixed-size cohort drawn at a rate.
Amplification = Callable[[AdditiveCost, float], AdditiveCost]

# Shares of delta that binomial releases may use up together; the rest pays for advanced composition.
_BINOMIAL_SHARES = (0.9, 0.5, 0.1, 0.01, 0.001)


class Method(StrEnum):
    """How costs are composed."""

    GAUSSIAN = "gaussian"
    RDP = "rdp"
    BINOMIAL = "binomial"


def method_for(noises: Sequence[Noise], releases: int) -> Method:
    """Return the tightest method that all of the noises allow; raise where there is none."""
    kinds = set(noises)
    binomial = {isinstance(noise, BinomialSum) for noise in kinds}
    if len(binomial) > 1:
        raise ConfigError("binomial noise composes by its own rule and cannot be mixed with other noise")
    if binomial == {True}:
        return Method.BINOMIAL
    return Method.GAUSSIAN if all(has_gaussian(noise, releases) for noise in kinds) else Method.RDP


def total_epsilon(
    method: Method,
    total: Callable[[NoiseCost, Amplification], AdditiveCost],
    delta: float,
    releases: int,
    grid: Callable[[int], FloatArray] = rdp.dense_orders,
) -> float:
    """Return epsilon of a composed cost: exact for unsampled Gaussians, else at the best order or by the best rule.

    Guarantee: (epsilon, delta)-privacy of the whole, the slack of surrogates included. Proof: theory.md#surrogate,
    theory.md#composition, theory.md#conversions, theory.md#binomial.
    """
    if method is Method.GAUSSIAN:
        squared, slack = total(partial(gaussian_cost, releases=releases), lambda cost, _rate: cost).values
        left = delta * math.exp(-slack)
        if left == 0 or not math.isfinite(squared):
            return math.inf
        return gaussian_epsilon(left, math.sqrt(squared)) + 2 * slack

    def amplified(cost: AdditiveCost, rate: float) -> AdditiveCost:
        if method is Method.BINOMIAL:
            epsilon, own = cost.values[:2]
            return approximate_dp_cost(amplified_epsilon(epsilon, rate), rate * own)
        padded = np.concatenate([[0.0, 0.0], cost.values])
        return AdditiveCost(tuple(rdp.without_replacement_rdp(padded, rate)[2:].tolist()))

    def curve(orders: FloatArray) -> FloatArray:
        return np.array(
            total(lambda noise, radii: AdditiveCost(tuple(noise.rdp(radii, orders).tolist())), amplified).values
        )

    if method is Method.RDP:
        return rdp.least_epsilon(curve, grid, delta, rdp.tight_conversion)[0]
    least = math.inf  # by advanced or plain composition, whichever is less
    for share in _BINOMIAL_SHARES:
        each = partial(binomial_cost, delta=delta * share / releases)
        plain, used, square, growth = total(each, amplified).values
        if used < delta:
            least = min(least, plain, math.sqrt(2 * square * math.log(1 / (delta - used))) + growth)
    return least


_ORDERS = rdp.sparse_orders(1 << 20)
_SMOOTHED = 1 << 12  # releases that share the slack
_SLACK = 1e-4  # what the surrogates of all Gaussian releases may use up together: 2 * _SLACK is added to epsilon
_MOST_BINOMIAL = 1 << 10  # binomial releases that one account can hold
_TENTHS = 10  # parts of epsilon that are divided among the groups
# Shares of delta by what an account comes to hold, fixed before anything is seen. They add up to 1.
_ALONE = {Method.GAUSSIAN: 0.75, Method.RDP: 0.15, Method.BINOMIAL: 0.05}
_MIXED = 0.05


def filtered_epsilon(noises: Counter[Noise], radii: int, delta: float) -> float:
    """Return epsilon of one client that is known to take part in releases with all of these noises.

    Guarantee: a filter: a client that stops before this passes a fixed epsilon is protected by that epsilon. Errs
    upwards. Proof: theory.md#client. Checked: test_accounting_client.py, test_accounting_filters.py.
    """
    check_delta(delta)
    groups: dict[Method, Counter[Noise]] = {}
    for noise, count in noises.items():
        group = Method.BINOMIAL
        if not isinstance(noise, BinomialSum):
            _, slack = gaussian_cost(noise, radii, _SMOOTHED).values
            group = Method.GAUSSIAN if slack <= _SLACK / _SMOOTHED else Method.RDP
        groups.setdefault(group, Counter())[noise] += count
    if Method.RDP in groups:  # Gaussians have a curve as well, and one for both is less than two epsilons
        groups[Method.RDP] += groups.pop(Method.GAUSSIAN, Counter())
    if len(groups) < 2:
        return max(
            (_epsilon(group, own, radii, delta * _ALONE[group]) for group, own in groups.items()), default=0.0
        )
    # Binomial noise and either of the others: the least epsilon that some division of it among the two covers. Which
    # one a path ends in is chosen after the fact, so delta is divided among all that there are.
    tenths = range(1, _TENTHS)
    each = delta * _MIXED / (2 * len(tenths) * len(groups))
    other, binomial = (
        _epsilon(group, groups[group], radii, each) for group in sorted(groups, key=Method.BINOMIAL.__eq__)
    )
    return min(max(other * _TENTHS / part, binomial * _TENTHS / (_TENTHS - part)) for part in tenths)


def _epsilon(group: Method, noises: Counter[Noise], radii: int, delta: float) -> float:
    """Return epsilon of the releases of one group."""
    if group is Method.GAUSSIAN:
        squared, slack = composed(
            (gaussian_cost(noise, radii, _SMOOTHED), count) for noise, count in noises.items()
        ).values
        if slack > _SLACK:
            return math.inf
        return gaussian_epsilon(delta * math.exp(-_SLACK), math.sqrt(squared)) + 2 * _SLACK
    if group is Method.RDP:
        # By the one number rho with D_alpha <= alpha rho: which order is best depends on it alone.
        rhos = {noise: float(np.max(noise.rdp(radii, _ORDERS) / _ORDERS)) for noise in noises}
        (total,) = composed((AdditiveCost((rhos[noise],)), count) for noise, count in noises.items()).values
        return float(rdp.tight_conversion(_ORDERS, total * _ORDERS, delta).min())
    half = delta / 2  # plain or advanced composition, whichever turns out to be less
    each = half / 2 / _MOST_BINOMIAL
    plain, used, square, growth = composed(
        (binomial_cost(noise, radii, each), count) for noise, count in noises.items()
    ).values
    return math.inf if used > half / 2 else min(plain, math.sqrt(2 * square * math.log(2 / half)) + growth)
