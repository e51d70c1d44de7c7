"""Amplification by sampling: what releases behind sampled cohorts cost against an observer of the models only."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial

import numpy as np

from d2pfed.accounting.composition import (
    AdditiveCost,
    Amplification,
    Method,
    NoiseCost,
    binomial_total_epsilon,
    composed,
    costliest_choice,
    gaussian_cost,
    gaussian_total_epsilon,
    has_gaussian,
    method_for,
    rdp_cost,
    rdp_total_epsilon,
)
from d2pfed.accounting.events import Adjacency, CohortSampling, Noise, RunReleases, Sampling
from d2pfed.accounting.gaussian import NARROW, gaussian_delta, mills_drop, relative_guard, scaled_density
from d2pfed.accounting.losses import Profile, tail_epsilon
from d2pfed.accounting.mixtures import several_coins_add_delta, several_coins_delta
from d2pfed.accounting.pld import COARSE, DominatingPair, loss_distributions
from d2pfed.accounting.rdp import FloatArray, sparse_orders

_FAR = 30.0  # logarithm from which on a hyperbolic sine is half an exponential in double precision


class PairKind(StrEnum):
    """Which pair of distributions dominates one sampled release."""

    FIXED_SIZE = "fixed-size"  # a fixed-size cohort; with rate 1 the plain Gaussian
    POISSON_ZERO_OUT = "poisson-zero-out"  # secret coins of records: a record's vector against zero
    POISSON_REPLACE_ONE = "poisson-replace-one"  # secret coins of records: a record's vector against another


@dataclass(frozen=True, slots=True)
class SampledGaussian:
    """The dominating pair of one Gaussian release behind a sampled cohort.

    Attributes:
        kind: which pair of distributions it is.
        ratio: shift over sigma, where the shift is two radii for `FIXED_SIZE` (unless `rate` is 1) and one radius
            for the others.
        rate: the probability that a client is in the cohort.
        slack: what it costs to put a Gaussian in the place of the true noise.
        coins: how many independent coins one person has, for `POISSON_ZERO_OUT`.
    """

    kind: PairKind
    ratio: float
    rate: float
    slack: float = 0.0
    coins: int = 1

    @property
    def forward(self) -> Profile:
        """The profile of the pair's first distribution against its second, rounded up."""
        if self.coins > 1:
            return partial(several_coins_delta, ratio=self.ratio, rate=self.rate, coins=self.coins)
        profile = poisson_replace_delta if self.kind is PairKind.POISSON_REPLACE_ONE else fixed_size_delta
        guard = 1 + relative_guard(self.ratio)
        return lambda epsilon: guard * profile(epsilon, self.ratio, self.rate)

    @property
    def backward(self) -> Profile | None:
        """The profile of the pair's second distribution against its first, rounded up; None if it is the same."""
        if self.kind is not PairKind.POISSON_ZERO_OUT:
            return None
        if self.coins > 1:
            return partial(several_coins_add_delta, ratio=self.ratio, rate=self.rate, coins=self.coins)
        guard = 1 + relative_guard(self.ratio)
        return lambda epsilon: guard * poisson_add_delta(epsilon, self.ratio, self.rate)


def fixed_size_delta(epsilon: FloatArray, ratio: float, rate: float) -> FloatArray:
    """Return the profile of a Gaussian behind a fixed-size cohort; also of a record against zero behind a coin.

    Guarantee: dominates every pair of replace-one or zero-out neighbours when `ratio` is that of two radii.
    Proof: theory.md#fixed-size. Checked: test_accounting_oracle.py by exhaustive adaptive optimisation.
    """
    # Where epsilon is small so is the base, and must be so to relative accuracy.
    small = np.log1p(np.expm1(np.minimum(epsilon, 1.0)) / rate)
    large = epsilon - math.log(rate) + np.log1p((rate - 1) * np.exp(-np.maximum(epsilon, 1.0)))
    return rate * gaussian_delta(np.where(epsilon < 1, small, large), ratio)


def poisson_add_delta(epsilon: FloatArray, ratio: float, rate: float) -> FloatArray:
    """Return the profile of zero against a record's vector under Poisson sampling; 0 from -ln(1 - rate) on.

    Guarantee: the mirror image of `fixed_size_delta` at one radius. Proof: theory.md#poisson.
    """
    kept = np.exp(-epsilon)
    left = np.where(
        kept > 0.5, rate + np.expm1(-epsilon), kept - (1 - rate)
    )  # 1 - rate is exact where it is needed
    # It falls to zero within rounding of the last epsilon, so what is left of the rate is rounded up.
    left = np.maximum(left + 2.0**-50 * np.minimum(rate, kept), 0.0)
    inside = left > 0
    base = -np.log(np.where(inside, np.minimum(left / rate, 1.0), 1.0))
    return np.where(inside, np.exp(epsilon) * left * gaussian_delta(base, ratio), 0.0)


def poisson_replace_delta(epsilon: FloatArray, ratio: float, rate: float) -> FloatArray:
    """Return the profile of a record's vector against its opposite under Poisson sampling.

    Guarantee: dominates every pair of vectors of that norm. Proof: theory.md#poisson.
    Checked: test_accounting_rdp.py against quadrature.
    """
    from scipy.special import log_ndtr  # noqa: PLC0415 - slow to load

    # The loss is increasing in the output z; where it passes epsilon, exp(ratio z - epsilon / 2) = exp(w) with
    # sinh(w) = sinh(epsilon / 2) exp(ratio^2 / 2) (1 - rate) / rate.
    with np.errstate(divide="ignore"):
        others = np.log((1 - rate) / rate) + epsilon + np.log(-np.expm1(-epsilon))
        log_sinh = others - epsilon / 2 - math.log(2) + ratio * ratio / 2
    far = log_sinh > _FAR
    w = np.where(far, log_sinh + math.log(2), np.arcsinh(np.exp(np.where(far, 0.0, log_sinh))))
    z = (epsilon / 2 + w) / ratio
    if ratio <= NARROW:
        # At z the densities are equal, and tails are densities times Mills ratios.
        near = scaled_density(z, others) * mills_drop(z - ratio, ratio)
        far_side = scaled_density(z + ratio, epsilon) * mills_drop(z - ratio, 2 * ratio)
        return rate * (near + far_side)
    own = log_ndtr(ratio - z)
    other = others + log_ndtr(-z)
    opposite = epsilon + log_ndtr(-ratio - z)
    left = np.maximum(-np.expm1(np.logaddexp(other, opposite) - own), 0.0)
    return np.asarray(rate * np.exp(own) * left, dtype=np.float64)


_ORDERS = sparse_orders(1 << 20)
_NODES = 1 << 13
_TAIL = 1e-60  # beyond this the profile is taken to be constant
_WIDEST = 600.0  # epsilon whose exponential is still in the range of doubles


@dataclass(frozen=True, slots=True)
class SampledRdp:
    """The dominating pair of one release behind a fixed-size cohort, with noise of which a Renyi curve is known.

    Attributes:
        noise: the noise in the sum.
        radii: how many clip radii neighbours are apart: two behind a cohort.
        rate: the probability that a client is in the cohort.
        slack: zero, as no Gaussian stands in the place of the noise.
    """

    noise: Noise
    radii: int
    rate: float
    slack: float = 0.0

    @property
    def forward(self) -> Profile:
        """The profile of the pair's first distribution against its second.

        Guarantee: dominates every pair of replace-one neighbours. Proof: theory.md#renyi-profile.
        Checked: test_accounting_amplification.py.
        """
        ratios, values = _envelope(self.noise, self.radii)

        def profile(epsilon: FloatArray) -> FloatArray:
            base = 1 + np.expm1(np.minimum(epsilon, _WIDEST)) / self.rate
            return self.rate * np.interp(base, ratios, values)

        return profile

    @property
    def backward(self) -> None:
        """None: the reversed order is the same."""
        return


def has_rdp_profile(noise: Noise, radii: int) -> bool:
    """Return whether the noise's profile falls off in the range of doubles."""
    return _width(noise, radii) < _WIDEST


def rdp_delta(epsilon: FloatArray, noise: Noise, radii: int) -> FloatArray:
    """Return the least delta that the conversion of the noise's Renyi curve gives at any order, for epsilon >= 0."""
    curve = np.array(rdp_cost(noise, radii, _ORDERS).values)
    start = (_ORDERS - 1) * curve + _ORDERS * np.log1p(-1 / _ORDERS) - np.log(_ORDERS - 1)
    exponents = np.full(np.shape(epsilon), min(0.0, math.log(-math.expm1(-curve[0])) / 2))  # total variation
    for constant, order in zip(start.tolist(), _ORDERS.tolist(), strict=True):
        np.minimum(exponents, constant - (order - 1) * epsilon, out=exponents)
    return np.asarray(np.exp(exponents), dtype=np.float64)


def _width(noise: Noise, radii: int) -> float:
    if rdp_delta(np.array([_WIDEST]), noise, radii)[0] > _TAIL:
        return _WIDEST
    return tail_epsilon(lambda epsilon: rdp_delta(epsilon, noise, radii), _TAIL)


@lru_cache(maxsize=64)
def _envelope(noise: Noise, radii: int) -> tuple[FloatArray, FloatArray]:
    """Return the profile at ratios alpha >= 1: the greatest convex function below what is known on both sides of 1."""
    epsilon = np.linspace(0, _width(noise, radii), _NODES)
    above, ratio = rdp_delta(epsilon, noise, radii), np.exp(epsilon)
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


CAP_SHARE = 0.01  # of delta: what a plan lets the cap on participations cost
_GUARD = 1 + 1e-9  # more than the relative error of a binomial tail in double precision


@dataclass(frozen=True, slots=True)
class _Exposure:
    """The cost of one release, how its cohort was drawn, and how many of them there are."""

    cost: AdditiveCost
    sampling: CohortSampling | None  # None: nothing is amplified
    count: int


def is_amplified(sampling: CohortSampling) -> bool:
    """Return whether sampling amplifies: whether the cohort is drawn so that it hides who took part."""
    return sampling.method is Sampling.FIXED and sampling.cohort_size < sampling.population


def cap_excess(sampling: CohortSampling, attempts: int, max_participations: int) -> float:
    """Return kappa, what clients that send zeros from their cap on add to delta behind sampled cohorts.

    Each of so many charged attempts of a run has a fresh cohort. Whether another client is at its cap
    depends on who was drawn in its place.

    Guarantee: an upper bound. Proof: theory.md#caps.
    Checked: test_accounting_amplification_caps.py::test_who_is_at_the_cap_follows_from_what_the_proof_reveals.
    """
    if max_participations >= attempts or not is_amplified(sampling):
        return 0.0
    from scipy.special import bdtrc  # noqa: PLC0415 - slow to load

    reached = float(bdtrc(max_participations - 1, attempts - 1, sampling.cohort_size / (sampling.population - 1)))
    return min(1.0, _GUARD * attempts * (sampling.cohort_size / sampling.population) * reached)


def sampled_runs_epsilon(
    runs: Sequence[RunReleases], adjacency: Adjacency, delta: float, points: int
) -> tuple[float, str]:
    """Return epsilon against an observer of all released sums, and the name of the accountant used.

    Each client sends zeros once it has been in as many releases of a run as the run's cap says.

    Guarantee: cohorts drawn afresh and independently for each release, as it states, or a partition whose blocks
    are used once. Proof: theory.md#fixed-size, theory.md#caps, theory.md#attempts.
    Checked: test_accounting_oracle.py.
    """
    kappa = math.fsum(cap_excess(run.sampling, run.count, run.max_participations) for run in runs)
    if kappa >= delta:
        return math.inf, "none"
    noises = [noise for run in runs for noise, _ in run.noises]
    releases = sum(run.count for run in runs)
    method = method_for(noises, releases)

    def total(noise_cost: NoiseCost, amplify: Amplification) -> AdditiveCost:
        exposures = Counter(_exposures(runs, adjacency, noise_cost)).items()
        return composed((_amplify(each, amplify), each.count * times) for each, times in exposures)

    if method is Method.BINOMIAL:
        return binomial_total_epsilon(total, delta - kappa, releases), method
    if method is Method.GAUSSIAN and not any(is_amplified(run.sampling) for run in runs):
        return gaussian_total_epsilon(total, delta, releases), method
    if method is Method.GAUSSIAN:
        pairs = list(sampled_gaussians(runs, adjacency, releases).items())
        for grid in sorted({points, COARSE}, reverse=True):  # where many releases are too wide for a fine one
            epsilon = composed(loss_distributions(pairs, delta, grid)).epsilon(delta, kappa)
            if math.isfinite(epsilon):
                return epsilon, "pld"
    renyi = rdp_total_epsilon(total, delta - kappa), str(Method.RDP)
    profiled = _profiled_pairs(runs, releases)
    if profiled is None:
        return renyi
    return min(renyi, (composed(loss_distributions(profiled, delta, points)).epsilon(delta, kappa), "pld"))


def _profiled_pairs(runs: Sequence[RunReleases], releases: int) -> list[tuple[DominatingPair, int]] | None:
    """Return a profile for each release, from Renyi curves where there is no Gaussian; None if one has neither."""
    pairs: list[tuple[DominatingPair, int]] = []
    for run in runs:
        rate = run.sampling.cohort_size / run.sampling.population
        for noise, count in run.noises:
            radii = _radii(run.sampling, Adjacency.REPLACE_ONE)
            if not is_amplified(run.sampling):
                return None
            if has_gaussian(noise, releases):
                squared, slack = gaussian_cost(noise, radii, releases).values
                pairs.append((SampledGaussian(PairKind.FIXED_SIZE, math.sqrt(squared), rate, slack), count))
            elif has_rdp_profile(noise, radii):
                pairs.append((SampledRdp(noise, radii, rate), count))
            else:
                return None
    return pairs


def sampled_gaussians(
    runs: Sequence[RunReleases], adjacency: Adjacency, releases: int
) -> Counter[SampledGaussian]:
    """Return which Gaussians stand for the releases of runs whose noises all have one, and how often.

    The slack of each is that of one among so many releases.
    """
    noise_cost = partial(gaussian_cost, releases=releases)
    pairs: Counter[SampledGaussian] = Counter()
    for exposure in _exposures(runs, adjacency, noise_cost):
        squared, slack = exposure.cost.values
        drawn = exposure.sampling
        rate = 1.0 if drawn is None else drawn.cohort_size / drawn.population
        pairs[SampledGaussian(PairKind.FIXED_SIZE, math.sqrt(squared), rate, slack)] += exposure.count
    return pairs


def _amplify(exposure: _Exposure, amplify: Amplification) -> AdditiveCost:
    if exposure.sampling is None:
        return exposure.cost
    return amplify(exposure.cost, exposure.sampling.cohort_size / exposure.sampling.population)


def _exposures(runs: Sequence[RunReleases], adjacency: Adjacency, noise_cost: NoiseCost) -> Iterator[_Exposure]:
    """Yield what each run exposes.

    Each amplified release is behind its own cohort. Elsewhere a client is in no more releases of a run than its
    cap says, and a partition uses it in one.
    """
    costs_of: dict[tuple[Noise, int], AdditiveCost] = {}

    def cost_of(noise: Noise, radii: int) -> AdditiveCost:
        if (noise, radii) not in costs_of:
            costs_of[noise, radii] = noise_cost(noise, radii)
        return costs_of[noise, radii]

    for run in runs:
        if is_amplified(run.sampling):
            for noise, count in run.noises:
                yield _Exposure(cost_of(noise, _radii(run.sampling, adjacency)), run.sampling, count)
            continue
        most = run.blocks if run.sampling.method is Sampling.ONCE else run.max_participations
        costs = [(cost_of(noise, adjacency.radii), count) for noise, count in run.noises]
        yield _Exposure(costliest_choice(costs, most), None, 1)


def _radii(sampling: CohortSampling, adjacency: Adjacency) -> int:
    # Behind a fixed-size cohort a client that is not drawn is replaced by another one: zero-out gains nothing.
    return Adjacency.REPLACE_ONE.radii if sampling.method is Sampling.FIXED else adjacency.radii
