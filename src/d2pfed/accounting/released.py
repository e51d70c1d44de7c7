"""What someone who sees the released models alone can learn: costs behind a sampled cohort."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from d2pfed.accounting.batches import RunBatch
from d2pfed.accounting.charge import Charge, costliest, gaussian_charge, has_gaussian
from d2pfed.accounting.cost import Additive, composed
from d2pfed.accounting.enveloped import SampledCurve, has_envelope
from d2pfed.accounting.methods import (
    Amplify,
    Method,
    binomial_total_epsilon,
    gaussian_total_epsilon,
    method_for,
    renyi_total_epsilon,
)
from d2pfed.accounting.pld import COARSE, Part, loss_costs
from d2pfed.accounting.profiles import Law, SampledGaussian
from d2pfed.accounting.release import Adjacency, CohortSampling, Noise, Sampling

CAP_SHARE = 0.01  # of delta: what a plan lets the cap on participations cost
_GUARD = 1 + 1e-9  # more than the relative error of a binomial tail in double precision


@dataclass(frozen=True, slots=True)
class _Exposure:
    """The cost of one release, how its cohort was drawn, and how many of them there are."""

    cost: Additive
    sampling: CohortSampling | None  # None: nothing is amplified
    count: int


def is_amplified(sampling: CohortSampling) -> bool:
    """Return whether the cohort hides who took part."""
    return sampling.method in {Sampling.FIXED, Sampling.POISSON} and sampling.cohort_size < sampling.population


def cap_excess(sampling: CohortSampling, attempts: int, max_participations: int) -> float:
    """Return kappa, what clients that send zeros from their cap on add to delta behind sampled cohorts.

    Each of so many charged attempts of a run has a fresh cohort. With cohorts of fixed size whether another client
    is at its cap depends on who was drawn in its place; behind secret coins nothing does, and kappa is 0.

    Guarantee: an upper bound. Proof: theory.md#caps.
    Checked: test_accounting_caps.py::test_statuses_are_known_given_what_is_revealed.
    """
    if max_participations >= attempts or sampling.method is not Sampling.FIXED or not is_amplified(sampling):
        return 0.0
    from scipy.special import bdtrc  # noqa: PLC0415 - slow to load

    reached = float(bdtrc(max_participations - 1, attempts - 1, sampling.cohort_size / (sampling.population - 1)))
    return min(1.0, _GUARD * attempts * (sampling.cohort_size / sampling.population) * reached)


def capped_epsilon(runs: Sequence[RunBatch], adjacency: Adjacency, delta: float, points: int) -> tuple[float, str]:
    """Return epsilon against an observer of all released sums, and the name of the accountant used.

    Each client sends zeros once it has been in as many releases of a run as the run's cap says.

    Guarantee: cohorts drawn afresh and independently for each release, as it states, or a partition whose blocks
    are used once. Proof: theory.md#fixed-size, theory.md#poisson, theory.md#caps, theory.md#attempts.
    Checked: test_accounting_oracle.py.
    """
    kappa = math.fsum(cap_excess(run.sampling, run.count, run.max_participations) for run in runs)
    if kappa >= delta:
        return math.inf, "none"
    noises = [noise for run in runs for noise, _ in run.noises]
    releases = sum(run.count for run in runs)
    method = method_for(noises, releases)

    def total(charge: Charge, amplify: Amplify) -> Additive:
        parts = Counter(_exposures(runs, adjacency, charge)).items()
        return composed((_amplify(part, amplify), part.count * times) for part, times in parts)

    if method is Method.BINOMIAL:
        return binomial_total_epsilon(total, delta - kappa, releases), method
    if method is Method.GAUSSIAN and not any(is_amplified(run.sampling) for run in runs):
        return gaussian_total_epsilon(total, delta, releases), method
    if method is Method.GAUSSIAN:
        parts = list(sampled_parts(runs, adjacency, releases).items())
        for grid in sorted({points, COARSE}, reverse=True):  # where many releases are too wide for a fine one
            epsilon = composed(loss_costs(parts, delta, grid)).epsilon(delta, kappa)
            if math.isfinite(epsilon):
                return epsilon, "pld"
    renyi = renyi_total_epsilon(total, delta - kappa), str(Method.RENYI)
    enveloped = _enveloped_parts(runs, releases)
    if enveloped is None:
        return renyi
    return min(renyi, (composed(loss_costs(enveloped, delta, points)).epsilon(delta, kappa), "pld"))


def _enveloped_parts(runs: Sequence[RunBatch], releases: int) -> list[tuple[Part, int]] | None:
    """Return a profile for each release, from Renyi curves where there is no Gaussian; None if one has neither."""
    parts: list[tuple[Part, int]] = []
    for run in runs:
        rate = run.sampling.cohort_size / run.sampling.population
        for noise, count in run.noises:
            radii = _radii(run.sampling, Adjacency.REPLACE_ONE)
            if run.sampling.method is not Sampling.FIXED or not is_amplified(run.sampling):
                return None
            if has_gaussian(noise, releases):
                squared, slack = gaussian_charge(noise, radii, releases).values
                parts.append((SampledGaussian(Law.KNOWN_SIZE, math.sqrt(squared), rate, slack), count))
            elif has_envelope(noise, radii):
                parts.append((SampledCurve(noise, radii, rate), count))
            else:
                return None
    return parts


def sampled_parts(runs: Sequence[RunBatch], adjacency: Adjacency, releases: int) -> Counter[SampledGaussian]:
    """Return which Gaussians stand for the releases of runs whose noises all have one, and how often.

    The slack of each is that of one among so many releases.
    """
    charge = partial(gaussian_charge, releases=releases)
    parts: Counter[SampledGaussian] = Counter()
    for part in _exposures(runs, adjacency, charge):
        parts[_sampled(part, adjacency)] += part.count
    return parts


def _sampled(part: _Exposure, adjacency: Adjacency) -> SampledGaussian:
    squared, slack = part.cost.values
    if part.sampling is None:
        return SampledGaussian(Law.KNOWN_SIZE, math.sqrt(squared), 1.0, slack)
    rate = part.sampling.cohort_size / part.sampling.population
    if part.sampling.method is Sampling.FIXED:
        return SampledGaussian(Law.KNOWN_SIZE, math.sqrt(squared), rate, slack)
    law = Law.HIDDEN_ZERO_OUT if adjacency is Adjacency.ZERO_OUT else Law.HIDDEN_REPLACE
    return SampledGaussian(law, math.sqrt(squared) / adjacency.radii, rate, slack)


def _amplify(part: _Exposure, amplify: Amplify) -> Additive:
    # Secret coins have no Renyi bound here that holds for both adjacencies, so they are charged unamplified.
    if part.sampling is None or part.sampling.method is Sampling.POISSON:
        return part.cost
    return amplify(part.cost, part.sampling.cohort_size / part.sampling.population)


def _exposures(runs: Sequence[RunBatch], adjacency: Adjacency, charge: Charge) -> Iterator[_Exposure]:
    """Yield what each run exposes.

    Each amplified release is behind its own cohort. Elsewhere a client is in no more releases of a run than its
    cap says, and a partition uses it in one.
    """
    prices: dict[tuple[Noise, int], Additive] = {}

    def price(noise: Noise, radii: int) -> Additive:
        if (noise, radii) not in prices:
            prices[noise, radii] = charge(noise, radii)
        return prices[noise, radii]

    for run in runs:
        if is_amplified(run.sampling):
            for noise, count in run.noises:
                yield _Exposure(price(noise, _radii(run.sampling, adjacency)), run.sampling, count)
            continue
        most = run.blocks if run.sampling.method is Sampling.ONCE else run.max_participations
        costs = [(price(noise, adjacency.radii), count) for noise, count in run.noises]
        yield _Exposure(costliest(costs, most), None, 1)


def _radii(sampling: CohortSampling, adjacency: Adjacency) -> int:
    # Behind a fixed-size cohort a client that is not drawn is replaced by another one: zero-out gains nothing.
    return Adjacency.REPLACE_ONE.radii if sampling.method is Sampling.FIXED else adjacency.radii
