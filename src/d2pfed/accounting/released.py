"""What someone who sees the released models alone can learn: costs behind a sampled cohort."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from d2pfed.accounting.charge import Charge, gaussian_charge, worst
from d2pfed.accounting.cost import Additive, composed
from d2pfed.accounting.methods import (
    Amplify,
    Method,
    binomial_total_epsilon,
    gaussian_total_epsilon,
    method_for,
    renyi_total_epsilon,
)
from d2pfed.accounting.pld import Law, SampledGaussian, loss_costs
from d2pfed.accounting.release import Adjacency, Noise, Release, Sampling, Scheme
from d2pfed.errors import ConfigError

CAP_SHARE = 0.01  # of delta: what a plan lets the cap on participations cost
_CAP_SHARES = (CAP_SHARE, 0.5)
_LARGEST_EXPONENT = 700.0  # of a float


@dataclass(frozen=True, slots=True)
class _Exposure:
    """The joint cost of a round's attempts, how its cohort was drawn, and how often it is charged."""

    joint: Additive
    sampling: Sampling | None  # None: nothing is amplified
    count: int


def is_amplified(sampling: Sampling) -> bool:
    """Return whether the cohort hides who took part."""
    return sampling.scheme in {Scheme.FIXED, Scheme.POISSON} and sampling.cohort < sampling.population


def cap_excess(sampling: Sampling, rounds: int, cap: int) -> float:
    """Return a bound on the probability that any client is drawn more than `cap` times in so many rounds.

    Amplification assumes that what a client sends does not depend on which rounds it was in. A client at its cap
    sends zeros, so the amplified number holds up to (1 + e^epsilon) times this probability, added to delta.
    Proof: theory.md#caps.
    """
    if cap >= rounds:
        return 0.0
    from scipy.special import bdtrc  # noqa: PLC0415 - slow to load

    rate = sampling.cohort / sampling.population
    return min(1.0, sampling.population * float(bdtrc(cap, rounds, rate)))


def capped_epsilon(releases: Sequence[Release], delta: float, cap: int, points: int) -> tuple[float, str]:
    """Return epsilon against an observer of all released sums, where each client stops contributing at its cap.

    Guarantee: as `released_epsilon`, with (1 + e^epsilon) times the chance that a cap binds taken out of delta;
    infinite where delta does not cover that. Proof: theory.md#caps.
    Checked: test_observers.py::test_a_cap_that_may_bind_is_charged_to_delta.
    """
    sampled = {release.sampling for release in releases if is_amplified(release.sampling)}
    excess = max((cap_excess(sampling, len(releases), cap) for sampling in sampled), default=0.0)
    if excess == 0:
        return released_epsilon(releases, delta, points)
    for share in _CAP_SHARES:
        epsilon, accountant = released_epsilon(releases, delta * (1 - share), points)
        if (1 + math.exp(min(epsilon, _LARGEST_EXPONENT))) * excess <= delta * share:
            return epsilon, accountant
    return math.inf, "none"


def released_epsilon(releases: Sequence[Release], delta: float, points: int) -> tuple[float, str]:
    """Return epsilon against an observer of all released sums, and the name of the accountant used.

    Guarantee: cohorts drawn afresh and independently in each round, as each release states.
    Proof: theory.md#fixed-size, theory.md#poisson. Checked: test_accounting_oracle.py.
    """
    sampled = any(is_amplified(release.sampling) for release in releases)
    method = method_for([release.noise for release in releases], len(releases))

    def total(charge: Charge, amplify: Amplify) -> Additive:
        parts = Counter(_exposures(releases, charge)).items()
        return composed((_amplify(part, amplify), part.count * times) for part, times in parts)

    if method is Method.BINOMIAL:
        return binomial_total_epsilon(total, delta, len(releases)), method
    if method is Method.GAUSSIAN and not sampled:
        return gaussian_total_epsilon(total, delta, len(releases)), method
    if method is Method.GAUSSIAN:
        epsilon = _loss_epsilon(releases, delta, points)
        if math.isfinite(epsilon):
            return epsilon, "pld"
    return renyi_total_epsilon(total, delta), Method.RENYI


def _loss_epsilon(releases: Sequence[Release], delta: float, points: int) -> float:
    charge = partial(gaussian_charge, releases=len(releases))
    parts: Counter[SampledGaussian] = Counter()
    for part in _exposures(releases, charge):
        parts[_sampled(part, releases[0].adjacency)] += part.count
    return composed(loss_costs(list(parts.items()), delta, points)).epsilon(delta)


def _sampled(part: _Exposure, adjacency: Adjacency) -> SampledGaussian:
    squared, slack = part.joint.values
    if part.sampling is None:
        return SampledGaussian(Law.KNOWN_SIZE, math.sqrt(squared), 1.0, slack)
    rate = part.sampling.cohort / part.sampling.population
    if part.sampling.scheme is Scheme.FIXED:
        return SampledGaussian(Law.KNOWN_SIZE, math.sqrt(squared), rate, slack)
    law = Law.HIDDEN_ZERO_OUT if adjacency is Adjacency.ZERO_OUT else Law.HIDDEN_REPLACE
    return SampledGaussian(law, math.sqrt(squared) / adjacency.radii, rate, slack)


def _amplify(part: _Exposure, amplify: Amplify) -> Additive:
    # Secret coins have no Renyi bound here that holds for both adjacencies, so they are charged unamplified.
    if part.sampling is None or part.sampling.scheme is Scheme.POISSON:
        return part.joint
    return amplify(part.joint, part.sampling.cohort / part.sampling.population)


def _exposures(releases: Sequence[Release], charge: Charge) -> Iterator[_Exposure]:
    """Yield what each round exposes.

    Attempts of one round may share a cohort or not. Their joint release behind one cohort, charged once per
    attempt, covers both: one copy dominates the joint release, each copy an attempt behind its own cohort.
    A partition uses each client in one of its rounds, so the worst round counts once.
    """
    prices: dict[tuple[Noise, int], Additive] = {}

    def price(release: Release) -> Additive:
        key = (release.noise, _radii(release))
        if key not in prices:
            prices[key] = charge(*key)
        return prices[key]

    for run in _runs(releases):
        partition: list[Additive] = []
        for attempts in run:
            joint = composed((price(release), 1) for release in attempts)
            sampling = attempts[0].sampling
            if sampling.scheme is Scheme.ONCE:
                partition.append(joint)
            elif is_amplified(sampling):
                yield _Exposure(joint, sampling, len(attempts))
            else:
                yield _Exposure(joint, None, 1)
        if partition:
            yield _Exposure(worst(partition), None, 1)


def _radii(release: Release) -> int:
    # Behind a fixed-size cohort a client that is not drawn is replaced by another one: zero-out gains nothing.
    if release.sampling.scheme is Scheme.FIXED and is_amplified(release.sampling):
        return Adjacency.REPLACE_ONE.radii
    return release.adjacency.radii


def _runs(releases: Sequence[Release]) -> Iterator[list[list[Release]]]:
    """Yield each run as its rounds, each round as its attempts.

    Releases come in the order they happened, so a run ends where (round, attempt) does not increase.
    """
    run: list[list[Release]] = []
    for release in releases:
        last = run[-1][-1] if run else None
        if last is not None and (release.round, release.attempt) <= (last.round, last.attempt):
            yield run
            run, last = [], None
        if last is None or last.round != release.round:
            run.append([release])
        elif last.sampling != release.sampling:
            raise ConfigError(f"attempts of round {release.round} must share one sampling")
        else:
            run[-1].append(release)
    yield run
