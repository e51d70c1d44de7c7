"""Amplification by sampling: what releases cost behind drawn cohorts, or behind secret coins of records.

Cohorts are hidden from an observer of the models only. Coins are known to nobody outside their silo, so the server and
other silos see amplified releases as well.
"""

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
from d2pfed.accounting.gaussian import PairKind, SampledGaussian, gaussian_epsilon
from d2pfed.accounting.losses import Profile, tail_epsilon
from d2pfed.accounting.pld import COARSE, FINE, DominatingPair, loss_distributions
from d2pfed.accounting.rdp import (
    FloatArray,
    check_delta,
    dense_orders,
    gaussian_moments,
    gaussian_rdp,
    least_epsilon,
    mironov_conversion,
    real_orders,
    sparse_orders,
    tight_conversion,
    without_replacement_rdp,
)
from d2pfed.errors import ConfigError

_ORDERS = sparse_orders(1 << 20)
_NODES = 1 << 13
_TAIL = 1e-60  # beyond this the profile is taken to be constant
_WIDEST = 600.0  # epsilon whose exponential is still in the range of doubles


@dataclass(frozen=True, slots=True)
class SampledRdp:
    """The dominating pair of one release behind a fixed-size cohort, with noise of which a Renyi curve is known."""

    noise: Noise
    radii: int  # how many clip radii neighbors are apart: two behind a cohort
    rate: float  # the probability that a client is in the cohort
    slack: float = 0.0  # no Gaussian stands in the place of the noise
    backward: None = None  # the reversed order is the same

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
    """The cost of one release, with which chance a client is in it, and how many of them there are."""

    cost: AdditiveCost
    rate: float  # 1: nothing is amplified
    count: int


def is_amplified(sampling: CohortSampling) -> bool:
    """Return whether sampling amplifies: whether the cohort is drawn so that it hides who took part."""
    return sampling.method is Sampling.FIXED and sampling.cohort_size < sampling.population


def cap_excess(sampling: CohortSampling, attempts: int, max_participations: int) -> float:
    """Return kappa, what clients that send zeros from their cap on add to delta behind sampled cohorts.

    Each charged attempt of a run has a fresh cohort. Whether another client is at its cap
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
        return composed(
            (each.cost if each.rate == 1 else amplify(each.cost, each.rate), each.count * times)
            for each, times in Counter(_exposures(runs, adjacency, noise_cost)).items()
        )

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
            radii = Adjacency.REPLACE_ONE.radii
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

    `releases` is the number of releases that share the slack.
    """
    noise_cost = partial(gaussian_cost, releases=releases)
    pairs: Counter[SampledGaussian] = Counter()
    for exposure in _exposures(runs, adjacency, noise_cost):
        squared, slack = exposure.cost.values
        pairs[SampledGaussian(PairKind.FIXED_SIZE, math.sqrt(squared), exposure.rate, slack)] += exposure.count
    return pairs


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
            # A client that is not drawn is replaced by another one: zero-out gains nothing.
            rate = run.sampling.cohort_size / run.sampling.population
            for noise, count in run.noises:
                yield _Exposure(cost_of(noise, Adjacency.REPLACE_ONE.radii), rate, count)
            continue
        most = run.blocks if run.sampling.method is Sampling.ONCE else run.max_participations
        costs = [(cost_of(noise, adjacency.radii), count) for noise, count in run.noises]
        yield _Exposure(costliest_choice(costs, most), 1.0, 1)


def record_pairs(runs: Sequence[RunReleases], adjacency: Adjacency, releases: int) -> Counter[SampledGaussian]:
    """Return which sampled Gaussians stand for the releases, and how often; each noise must have a Gaussian.

    The noise of a release is the part that the observer does not know. `releases` is how many share the slack.

    Guarantee: dominates the pair of any two data sets that differ in one unit. Proof: theory.md#records.
    Checked: test_accounting_records.py by exhaustive adaptive games.
    """
    pairs: Counter[SampledGaussian] = Counter()
    for run in runs:
        if run.batches is None:
            raise ConfigError("a release of records must say how they were drawn")
        for noise, count in run.noises:
            squared, slack = gaussian_cost(noise, 1, releases).values
            ratio, rate, silos = math.sqrt(squared), float(run.batches.rate), run.batches.max_silos
            if run.batches.rate == 1:
                pair = SampledGaussian(PairKind.FIXED_SIZE, ratio * adjacency.radii * silos, 1.0, slack)
            elif adjacency is Adjacency.REPLACE_ONE:
                pair = SampledGaussian(PairKind.POISSON_REPLACE_ONE, ratio, rate, slack)
            else:
                pair = SampledGaussian(PairKind.POISSON_ZERO_OUT, ratio, rate, slack, silos)
            pairs[pair] += count
    return pairs


def record_runs_epsilon(
    runs: Sequence[RunReleases], adjacency: Adjacency, delta: float, points: int
) -> tuple[float, str]:
    """Return epsilon of one unit, and the name of the accountant; infinite where no Gaussian stands for a noise."""
    releases = sum(run.count for run in runs)
    if not all(has_gaussian(noise, releases) for run in runs for noise, _ in run.noises):
        return math.inf, "none"
    pairs = record_pairs(runs, adjacency, releases)
    if all(pair.rate == 1 for pair in pairs):  # nothing is amplified: one Gaussian
        slack = math.fsum(pair.slack * count for pair, count in pairs.items())
        ratio = math.sqrt(math.fsum(pair.ratio**2 * count for pair, count in pairs.items()))
        return gaussian_epsilon(delta * math.exp(-slack), ratio) + 2 * slack, "gaussian"
    epsilon = math.inf
    for grid in sorted({points, COARSE}, reverse=True):  # where many releases are too wide for a fine one
        epsilon = composed(loss_distributions(list(pairs.items()), delta, grid)).epsilon(delta)
        if math.isfinite(epsilon):
            break
    return epsilon, "pld"


class Accountant(StrEnum):
    """How epsilon is computed."""

    WBK_MIRONOV = (
        "wbk-mironov"  # Theorem 27 of Wang, Balle, Kasiviswanathan with Mironov's conversion: the paper's
    )
    WBK = "wbk"  # the same with the tight conversion
    RDP = "rdp"  # Renyi curves with the tight conversion, whatever the sampling
    PLD = "pld"  # privacy-loss distributions; exact where nothing is sampled


class Grid(StrEnum):
    """How finely privacy losses are resolved; both err upwards."""

    COARSE = "coarse"
    FINE = "fine"

    @property
    def points(self) -> int:
        """The number of positive grid points of one release."""
        return COARSE if self is Grid.COARSE else FINE


def epsilon_of(
    noise_multiplier: float,
    sampling: CohortSampling,
    rounds: int,
    *,
    adjacency: Adjacency,
    delta: float,
    accountant: Accountant,
    grid: Grid = Grid.FINE,
) -> float:
    """Return epsilon against an observer of the models after `rounds` Gaussian releases.

    Args:
        noise_multiplier: sigma over the sensitivity of the stated adjacency: two radii for replace-one, one for
            zero-out. Behind a fixed-size cohort the distance is two radii whatever the adjacency.
        sampling: how the cohort of each round is sampled.
        rounds: the number of releases.
        adjacency: the neighboring relation.
        delta: the probability that the guarantee may fail, over all rounds together.
        accountant: how epsilon is computed.
        grid: how finely privacy losses are resolved, for `PLD`.

    Guarantee: errs upwards. Proof: theory.md#fixed-size, theory.md#renyi-sampling.
    Checked: test_accounting_golden.py, test_accounting_peers.py.
    """
    check_delta(delta)
    if not (noise_multiplier > 0 and math.isfinite(noise_multiplier)):
        raise ConfigError(f"noise_multiplier must be positive and finite, got {noise_multiplier}")
    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {rounds}")
    pair = SampledGaussian(PairKind.FIXED_SIZE, 1 / noise_multiplier, 1.0)
    if is_amplified(sampling):
        one_radius = 1 / (noise_multiplier * adjacency.radii)
        rate = sampling.cohort_size / sampling.population
        pair = SampledGaussian(PairKind.FIXED_SIZE, 2 * one_radius, rate)
    count = 1 if sampling.method is Sampling.ONCE else rounds
    if accountant is Accountant.PLD:
        if pair.rate == 1:
            return gaussian_epsilon(delta, math.sqrt(_compose(np.array([pair.ratio**2]), count)[0]))
        return composed(loss_distributions([(pair, count)], delta, grid.points)).epsilon(delta)

    def curve(orders: FloatArray) -> FloatArray:
        if accountant is Accountant.RDP and pair.rate == 1:
            return _compose(gaussian_rdp(orders, pair.ratio), count)
        top = int(orders[-1])
        own = gaussian_rdp(np.arange(top + 1, dtype=np.float64), pair.ratio)
        if pair.rate < 1:
            own = without_replacement_rdp(own, pair.rate, gaussian_moments(pair.ratio, top))
        return _compose(own[2:], count)

    orders = real_orders if accountant is Accountant.RDP and pair.rate == 1 else dense_orders
    convert = mironov_conversion if accountant is Accountant.WBK_MIRONOV else tight_conversion
    return least_epsilon(curve, orders, delta, convert)[0]


def _compose(values: FloatArray, count: int) -> FloatArray:
    return np.array(composed([(AdditiveCost(tuple(values.tolist())), count)]).values)
