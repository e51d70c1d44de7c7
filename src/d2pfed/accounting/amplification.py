"""Amplification by sampling: what releases cost behind drawn cohorts, or behind secret coins of records.

Cohorts are hidden from an observer of the models only. Coins are known to nobody outside their silo, so the server and
other silos see amplified releases as well.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cache, partial

import numpy as np

from d2pfed.accounting import rdp
from d2pfed.accounting.allocation import HiddenBlocks
from d2pfed.accounting.composition import (
    AdditiveCost,
    Amplification,
    Method,
    NoiseCost,
    composed,
    costliest_choice,
    gaussian_cost,
    has_gaussian,
    method_for,
    total_epsilon,
)
from d2pfed.accounting.events import Adjacency, CohortSampling, RunReleases, Sampling
from d2pfed.accounting.laws import Noise
from d2pfed.accounting.losses import COARSE, FINE, loss_distributions
from d2pfed.accounting.profiles import (
    WIDEST,
    DominatingPair,
    PairKind,
    SampledGaussian,
    SampledRdp,
    gaussian_epsilon,
    rdp_width,
)
from d2pfed.accounting.rdp import FloatArray, check_delta
from d2pfed.errors import ConfigError

CAP_SHARE = 0.01  # of delta: what a plan lets the cap on participations cost
_BLOCK_POINTS = 4  # of the grid of all blocks of a run, for each one of a release's losses
_GUARD = 1 + 1e-9  # more than the relative error of a binomial tail in double precision


def is_amplified(sampling: CohortSampling) -> bool:
    """Return whether sampling amplifies: whether the cohort is drawn so that it hides who took part."""
    return sampling.method is Sampling.FIXED and sampling.cohort_size < sampling.population


def cap_excess(sampling: CohortSampling, attempts: int, max_participations: int) -> float:
    """Return kappa, what clients that send zeros from their cap on add to delta behind sampled cohorts.

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

    Guarantee: cohorts drawn afresh and independently for each release, as it states, or a partition whose blocks are
    used once. Proof: theory.md#fixed-size, theory.md#fixed-size-zero-out, theory.md#caps,
    theory.md#attempts. Checked: test_accounting_oracle.py.
    """
    kappa = math.fsum(cap_excess(run.sampling, run.count, run.max_participations) for run in runs)
    if kappa >= delta:
        return math.inf, "none"
    releases = sum(run.count for run in runs)
    method = method_for([noise for run in runs for noise, _ in run.noises], releases)
    is_hidden = [is_amplified(run.sampling) for run in runs]

    def total(noise_cost: NoiseCost, amplify: Amplification) -> AdditiveCost:
        return composed(
            (cost if rate == 1 else amplify(cost, rate), count * times)
            for (cost, rate, count, _), times in Counter(_exposures(runs, adjacency, noise_cost)).items()
        )

    if method is Method.GAUSSIAN and any(is_hidden):
        pairs = sampled_pairs(runs, adjacency, releases)
        epsilon = _loss_epsilon(pairs.items(), delta, {points, COARSE}, kappa)
        if math.isfinite(epsilon):
            return epsilon, "pld"
        method = Method.RDP
    found = total_epsilon(method, total, delta - kappa, releases), str(method)
    if method is Method.RDP and all(is_hidden) and (pairs := sampled_pairs(runs, adjacency, releases)):
        return min(found, (_loss_epsilon(pairs.items(), delta, {points}, kappa), "pld"))
    return found


def once_epsilon(runs: Sequence[RunReleases], known: float, delta: float) -> tuple[float, str]:
    """Return epsilon of one run under `once` towards who does not know the blocks; `known` to who does.

    A client in no charged block must remain, and none may be in two. Zero-out counts as replace-one. Several runs, and
    noise that no Gaussian stands for, are not amplified.

    Guarantee: a uniform order of all clients, of which each block is used once. Proof: theory.md#once.
    Checked: test_accounting_allocation.py.
    """
    if len(runs) != 1 or (run := runs[0]).sampling.method is not Sampling.ONCE or run.blocks > 1:
        return math.inf, "none"
    cohort, population = run.sampling.cohort_size, run.sampling.population
    costs = [gaussian_cost(noise, Adjacency.REPLACE_ONE.radii, run.count).values for noise, _ in run.noises]
    slack = math.fsum(each * count for (_, each), (_, count) in zip(costs, run.noises, strict=True))
    if run.count * cohort >= population or run.max_participations > 1 or not math.isfinite(slack):
        return math.inf, "none"
    ratio, left = math.sqrt(max(squared for squared, _ in costs)), delta * math.exp(-slack)
    hidden = HiddenBlocks(ratio, cohort / population, run.count)
    # A fine grid rounds more often: at a small delta the coarse one may be the tighter.
    found = min(hidden.epsilon(left, known, _BLOCK_POINTS * grid) for grid in (COARSE, FINE))
    return found + 2 * slack, "allocation"


def _loss_epsilon(
    pairs: Iterable[tuple[DominatingPair, int]], delta: float, grids: Iterable[int], kappa: float = 0.0
) -> float:
    """Return epsilon by privacy losses on the finest grid on which many releases are not too wide."""
    epsilon = math.inf
    for points in sorted(grids, reverse=True):
        epsilon = composed(loss_distributions(list(pairs), delta, points)).epsilon(delta, kappa)
        if math.isfinite(epsilon):
            break
    return epsilon


def sampled_pairs(runs: Sequence[RunReleases], adjacency: Adjacency, releases: int) -> Counter[DominatingPair]:
    """Return which pairs dominate the releases of runs, and how often; none if some noise has no profile.

    A Gaussian stands for a noise where it can, else its Renyi curve; `releases` is how many share the slack.
    """
    pairs: Counter[DominatingPair] = Counter()
    for cost, rate, count, noise in _exposures(runs, adjacency, partial(gaussian_cost, releases=releases)):
        squared, slack = cost.values
        if math.isfinite(slack):
            pairs[_cohort_pair(math.sqrt(squared), rate, adjacency, slack)] += count
        elif noise is not None and rdp_width(noise, Adjacency.REPLACE_ONE.radii) < WIDEST:
            pairs[SampledRdp(noise, Adjacency.REPLACE_ONE.radii, rate)] += count
        else:
            return Counter()
    return pairs


def _cohort_pair(ratio: float, rate: float, adjacency: Adjacency, slack: float = 0.0) -> SampledGaussian:
    """Return the pair of a release behind a cohort; `ratio` is that of two radii, unless the rate is 1."""
    if rate < 1 and adjacency is Adjacency.ZERO_OUT:
        return SampledGaussian(PairKind.FIXED_SIZE_ZERO_OUT, ratio / 2, rate, slack)
    return SampledGaussian(PairKind.FIXED_SIZE, ratio, rate, slack)


def _exposures(
    runs: Sequence[RunReleases], adjacency: Adjacency, noise_cost: NoiseCost
) -> Iterator[tuple[AdditiveCost, float, int, Noise | None]]:
    """Yield what runs expose: a cost, the chance that a client is in it (1: not amplified), how often, its noise."""
    cost_of = cache(noise_cost)
    for run in runs:
        if is_amplified(run.sampling):
            # A client that is not drawn is replaced by another one: two radii by Renyi curves, whatever the adjacency.
            rate = run.sampling.cohort_size / run.sampling.population
            for noise, count in run.noises:
                yield cost_of(noise, Adjacency.REPLACE_ONE.radii), rate, count, noise
        else:
            most = run.blocks if run.sampling.method is Sampling.ONCE else run.max_participations
            costs = [(cost_of(noise, adjacency.radii), count) for noise, count in run.noises]
            yield costliest_choice(costs, most), 1.0, 1, None


def record_pairs(runs: Sequence[RunReleases], adjacency: Adjacency, releases: int) -> Counter[SampledGaussian]:
    """Return which sampled Gaussians stand for the releases, and how often; each noise must have a Gaussian.

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
                pair = SampledGaussian(PairKind.POISSON_REPLACE_ONE, ratio, rate, slack, silos)
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
    if any(pair.rate < 1 for pair in pairs):
        return _loss_epsilon(pairs.items(), delta, {points, COARSE}), "pld"
    slack = math.fsum(pair.slack * count for pair, count in pairs.items())
    # Nothing is amplified, so all of them are one Gaussian.
    ratio = math.sqrt(math.fsum(pair.ratio**2 * count for pair, count in pairs.items()))
    return gaussian_epsilon(delta * math.exp(-slack), ratio) + 2 * slack, "gaussian"


class Accountant(StrEnum):
    """How epsilon is computed: as the paper does, or by tighter conversions and distributions."""

    WBK_MIRONOV = "wbk-mironov"  # Theorem 27 of Wang, Balle, Kasiviswanathan, Mironov's conversion: the paper's
    WBK = "wbk"  # the same with the tight conversion
    RDP = "rdp"  # Renyi curves with the tight conversion, whatever the sampling
    PLD = "pld"  # privacy-loss distributions; exact where nothing is sampled


def epsilon_of(
    noise_multiplier: float,
    sampling: CohortSampling,
    rounds: int,
    *,
    adjacency: Adjacency,
    delta: float,
    accountant: Accountant,
    points: int = FINE,
) -> float:
    """Return epsilon against an observer of the models after `rounds` Gaussian releases.

    Args:
        noise_multiplier: sigma over the sensitivity of the stated adjacency: two radii for replace-one, one for
            zero-out. Behind a fixed-size cohort Renyi curves count two radii whatever the adjacency.
        sampling: how the cohort of each round is sampled.
        rounds: the number of releases.
        adjacency: the neighboring relation.
        delta: the probability that the guarantee may fail, over all rounds together.
        accountant: how epsilon is computed.
        points: how finely privacy losses are resolved, for `PLD`.

    Guarantee: errs upwards. Proof: theory.md#fixed-size, theory.md#fixed-size-zero-out, theory.md#renyi-sampling.
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
            (squared,) = composed([(AdditiveCost((pair.ratio**2,)), count)]).values
            return gaussian_epsilon(delta, math.sqrt(squared))
        pair = _cohort_pair(pair.ratio, pair.rate, adjacency)
        return composed(loss_distributions([(pair, count)], delta, points)).epsilon(delta)

    orders = rdp.real_orders if accountant is Accountant.RDP and pair.rate == 1 else rdp.dense_orders

    def curve(orders: FloatArray) -> FloatArray:
        own = rdp.gaussian_rdp(orders, pair.ratio)
        if pair.rate < 1:
            top = int(orders[-1])
            plain = rdp.gaussian_rdp(np.arange(top + 1, dtype=np.float64), pair.ratio)
            own = rdp.without_replacement_rdp(plain, pair.rate, rdp.gaussian_moments(pair.ratio, top))[2:]
        return np.array(composed([(AdditiveCost(tuple(own.tolist())), count)]).values)

    convert = rdp.mironov_conversion if accountant is Accountant.WBK_MIRONOV else rdp.tight_conversion
    return rdp.least_epsilon(curve, orders, delta, convert)[0]
