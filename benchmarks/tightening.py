"""How far bounds on epsilon are from what came before them, and from lower bounds that others compute."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as peer
from scipy.special import ndtri

from d2pfed.accounting import Accountant, Adjacency, CohortSampling, DiscreteGaussianSum, SkellamSum
from d2pfed.accounting.allocation import HiddenBlocks
from d2pfed.accounting.amplification import epsilon_of
from d2pfed.accounting.composition import filtered_epsilon
from d2pfed.accounting.events import Release, Sampling, Unit
from d2pfed.accounting.filters import Filter, FilterDecision, PlanCost
from d2pfed.accounting.observers import RELEASED
from d2pfed.accounting.profiles import gaussian_epsilon

POPULATIONS, EPSILONS = (10**3, 10**5, 10**7), (0.5, 2.0, 8.0)
_POINTS = 1 << 15  # of all blocks of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class TightRow:
    """Epsilon by the rule of before, by that of now, and a lower bound on what is true.

    `before` is the epsilon of the cell, except where a rule takes the product of two plans for it.
    """

    bound: str
    population: int
    epsilon: float
    before: float
    after: float
    lower: float


def bench_tightening() -> Iterator[TightRow]:
    """Yield each bound at each population and epsilon."""
    for population in POPULATIONS:
        for epsilon in EPSILONS:
            for name, measure in _BOUNDS.items():
                before, after, lower = measure(population, epsilon, population**-1.1)
                yield TightRow(
                    bound=name, population=population, epsilon=epsilon, before=before, after=after, lower=lower
                )


def _cohorts(population: int) -> tuple[int, int]:
    """Return the size of a cohort and the number of rounds."""
    return min(1000, population // 20), 10 if population < 10_000 else 50


def _zero_out(population: int, epsilon: float, delta: float) -> tuple[float, float, float]:
    """Behind cohorts; below by the data set in which all others hold zero, on dp-accounting's optimistic grid."""
    size, rounds = _cohorts(population)
    sampling = CohortSampling(Sampling.FIXED, population, size)

    def of(adjacency: Adjacency, sigma: float) -> float:
        """Return epsilon where the noise is so many radii."""
        multiplier = sigma / adjacency.radii
        given = {"adjacency": adjacency, "delta": delta, "accountant": Accountant.PLD, "points": 1 << 11}
        return epsilon_of(multiplier, sampling, rounds, **given)  # type: ignore[arg-type]

    sigma = _solve(lambda sigma: of(Adjacency.REPLACE_ONE, sigma), epsilon)
    below = peer.from_gaussian_mechanism(
        sigma, sampling_prob=size / population, pessimistic_estimate=False, value_discretization_interval=1e-3
    ).self_compose(rounds)
    lower = float(below.get_epsilon_for_delta(delta))
    return of(Adjacency.REPLACE_ONE, sigma), of(Adjacency.ZERO_OUT, sigma), lower


def _once(population: int, epsilon: float, delta: float) -> tuple[float, float, float]:
    """Towards the models; below by the data set in which all others hold the opposite vector."""
    size, rounds = _cohorts(population)
    ratio = 1 / _solve(lambda sigma: gaussian_epsilon(delta, 1 / sigma), epsilon)
    weight = size / population
    after = HiddenBlocks(ratio, weight, rounds).epsilon(delta, epsilon, _POINTS)
    return epsilon, after, _one_sided(ratio, weight, rounds, delta)


def _one_sided(ratio: float, weight: float, rounds: int, delta: float) -> float:
    """Return epsilon of a block that moves or none, from below: likelihood ratios are rounded down to a grid."""
    z = ndtri((np.arange(1 << 16) + 0.5) / (1 << 16))
    ratios = np.exp(ratio * z - ratio * ratio / 2)
    step = float(ratios[-1]) * rounds / (1 << 20)
    law = np.bincount((ratios / step).astype(int)) / len(z)
    size = 1 << math.ceil(math.log2(len(law) * rounds))
    law = np.maximum(np.fft.irfft(np.fft.rfft(law, size) ** rounds, size), 0.0)
    total = 1 - weight * rounds + weight * step * np.arange(size)

    def enough(epsilon: float) -> bool:
        return float(law @ np.maximum(total - math.exp(epsilon), 0.0)) <= delta

    low, high = 0.0, 50.0
    while high - low > 1e-3 * high + 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low


def _noise(mu: float, length: int = 4096) -> DiscreteGaussianSum:
    """Return noise of which replace-one's shift is so many deviations."""
    return DiscreteGaussianSum(
        Fraction(4), 1000, Fraction(2 * mu * math.sqrt(1000)).limit_denominator(10**4), length
    )


def _client(_population: int, epsilon: float, delta: float) -> tuple[float, float, float]:
    """Five Gaussians and five Skellam sums; below by one Gaussian of the same squared ratios at all of delta."""
    mu = 1 / _solve(lambda sigma: gaussian_epsilon(delta, math.sqrt(10) / sigma), epsilon)
    gaussian = _noise(mu)
    skellam = SkellamSum(gaussian.sigma**2, 1000, gaussian.radius, gaussian.radius**2, gaussian.dimension)
    each = 0.05 * delta / (63 * 2)  # what a division of epsilon between two groups had
    parts = [
        filtered_epsilon(Counter({gaussian: 5}), 2, each / 0.75),
        filtered_epsilon(Counter({skellam: 5}), 2, each / 0.15),
    ]
    before = min(max(10 * parts[0] / tenths, 10 * parts[1] / (10 - tenths)) for tenths in range(1, 10))
    return before, filtered_epsilon(Counter({gaussian: 5, skellam: 5}), 2, delta), epsilon


def _budget(population: int, epsilon: float, delta: float) -> tuple[float, float, float]:
    """A budget of two kinds of plans; below by their product, which is no filter."""
    size, rounds = _cohorts(population)

    def plan(cohort: int, mu: float) -> PlanCost:
        release = Release(
            run="", round=0, attempt=0, unit=Unit.CLIENT, adjacency=Adjacency.REPLACE_ONE,
            sampling=CohortSampling(Sampling.FIXED, population, cohort), noise=_noise(mu), participants=(),
        )  # fmt: skip
        return PlanCost(release, rounds, rounds)

    def charged(sigma: float, budget: float = math.inf) -> FilterDecision:
        return Filter(budget, delta, RELEASED).charge([plan(size, 1 / sigma), plan(size // 2, 1.2 / sigma)])

    sigma = _solve(lambda sigma: charged(sigma).composed_epsilon, epsilon, 0.02)
    product = charged(sigma).composed_epsilon
    after = product
    while after < 4 * product and not charged(sigma, after).admitted:
        after *= 1.01
    added = sum(
        Filter(math.inf, delta / parts, RELEASED).charge([one]).composed_epsilon
        for one, parts in ((plan(size, 1 / sigma), 40), (plan(size // 2, 1.2 / sigma), 80))
    )
    has_units = 0.025 * delta - 1e-14 * (1 << 17) > 1e-12  # the floor of before
    return after if has_units else added, after, product


def _solve(falling: Callable[[float], float], wanted: float, precision: float = 1e-3) -> float:
    low, high = 1e-3, 1e4
    while high > (1 + precision) * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if falling(middle) <= wanted else (middle, high)
    return high


_BOUNDS = {
    "zero-out behind cohorts": _zero_out,
    "once, towards the models": _once,
    "client's account, mixed": _client,
    "budget of two kinds": _budget,
}
