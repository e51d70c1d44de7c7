"""What noise a sum must have by what was charged for it, measured; and epsilons by code that is not ours.

A measured sum of squares is compared with the law that was charged: it is wrong below the quantile of a chance that is
shared by all tests of a campaign. A pool over all sums finds a small lack that no single one shows.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import dp_accounting
import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy.stats import chi2, norm

from d2pfed.accounting import BatchSampling, DiscreteGaussianSum, Noise, SkellamSum
from d2pfed.noise.mechanisms import Centered, DDGauss, Mechanism, Shared, SkellamNoise
from d2pfed.numerics.ring import IntVector
from d2pfed.plan import Plan

FALSE_ALARMS = 1e-6  # of a whole campaign
_POOLED = 0.1  # of them
_WIDE = (
    4.0,
    100.0,
)  # variances from which on sums of squares of discrete Gaussians and Skellams are as those of Gaussians
MOST = 500.0  # an epsilon above this guarantees nothing, and is compared with nobody's


@lru_cache
def discrete_variance(sigma: float) -> float:
    """The variance of a discrete Gaussian, which for narrow ones is less than its parameter squared."""
    if sigma > 3:
        return sigma**2
    values = np.arange(-60, 61)
    weights = np.exp(-(values**2) / (2 * sigma**2))
    return float((values**2 * weights).sum() / weights.sum())


def charged_variance(noise: Noise) -> float:
    """The variance of a coordinate of the noise that a row in a client's log counts on."""
    match noise:
        case DiscreteGaussianSum():
            return discrete_variance(float(noise.sigma)) * noise.contributors
        case SkellamSum():
            return float(noise.variance) * noise.contributors
    raise ValueError(f"no client adds noise like {noise}")


def added_variance(mechanism: Mechanism, honest: int) -> float:
    """The variance of what so many honest members add to a sum, as the plan has it; all of a cohort under `shared`."""
    match mechanism:
        case Centered() | DDGauss():
            return discrete_variance(float(mechanism.sigma)) * honest
        case SkellamNoise():
            return float(mechanism.variance) * honest
        case Shared():
            return discrete_variance(float(mechanism.sigma))
    return 0.0  # nothing that a deployed client adds


@dataclass
class Measure:
    """All measured sums of a campaign that may make so many tests."""

    tests: int
    squares: float = 0.0
    spread: float = 0.0
    coordinates: int = 0

    @property
    def chance(self) -> float:
        return (1 - _POOLED) * FALSE_ALARMS / self.tests

    def lacks(self, total: IntVector, charged: float, plan: Plan) -> bool:
        """Whether a sum has too little noise beside what was charged; a sum that also holds data has no less."""
        if not is_measurable(plan, charged):
            return False
        return bool(float(np.dot(total, total)) / charged < chi2.ppf(self.chance, len(total)))

    def exceeds(self, own: IntVector, radius: float, variance: float) -> bool:
        """Whether a client's vector is longer than a vector within the radius and its own noise can be."""
        longest = radius + math.sqrt(variance * float(chi2.isf(self.chance, len(own))))
        return bool(math.sqrt(float(np.dot(own, own))) > longest)

    def pool(self, total: IntVector, variance: float) -> None:
        """Add a sum of zeros and noise to the pool."""
        self.squares += float(np.dot(total, total)) / variance - len(total)
        self.spread += 2.0 * len(total)  # of Gaussians; Skellams that are wide enough have 1 % more
        self.coordinates += len(total)

    def pooled_lack(self) -> float:
        """By which share the pooled variance is below what it should be."""
        return -self.squares / max(1, self.coordinates)

    def pool_lacks(self) -> bool:
        deviation = 1.01 * math.sqrt(self.spread)
        return -self.squares > float(norm.isf(_POOLED * FALSE_ALARMS)) * deviation


def is_measurable(plan: Plan, variance: float) -> bool:
    """Whether a sum's squares tell its noise: it is wide beside a step, and the ring is wide beside it."""
    least = _WIDE[isinstance(plan.mechanism, SkellamNoise)]
    return least <= variance <= (plan.ring.modulus / 8) ** 2


def least_epsilon(plan: Plan, honest: int, vectors: int, delta: float) -> float:
    """A lower bound on what so many vectors cost in sums with so many honest contributors; dp-accounting's."""
    grid = 1 << plan.codec.fraction_bits
    steps = math.floor(plan.codec.clip / plan.codec.granularity * grid) / grid  # all that the grid lets through
    ratio = math.sqrt(added_variance(plan.mechanism, honest)) / steps
    if vectors == 0 or ratio > 1e4:
        return 0.0
    if ratio < 0.01:
        return MOST
    if plan.batches is not None and plan.batches.rate < 1e-6:
        return 0.0
    if plan.batches is not None:
        return _of_records(round(ratio, 3) + 1e-3, plan.batches, vectors, delta)
    return float(dp_accounting.get_epsilon_gaussian(ratio / 2 / math.sqrt(vectors), delta))


@lru_cache(maxsize=4096)
def _of_records(ratio: float, batches: BatchSampling, vectors: int, delta: float) -> float:
    """For one record that is replaced, behind its silo's coins."""
    loss = pld.from_gaussian_mechanism(
        ratio,
        sampling_prob=float(batches.rate),
        value_discretization_interval=1e-2,
        pessimistic_estimate=False,
        use_connect_dots=False,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
    )
    return float(loss.self_compose(vectors).get_epsilon_for_delta(delta))
