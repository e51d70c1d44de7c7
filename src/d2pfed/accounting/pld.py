"""Privacy-loss distributions of sampled Gaussians, on grids that err upwards."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from d2pfed.accounting.conversion import FloatArray, gaussian_delta, gaussian_epsilon
from d2pfed.accounting.cost import LossCost

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

COARSE, FINE = 1 << 11, 1 << 14  # positive grid points of one release's losses

_TAIL_SHARE = 1e-6  # of delta: what cutting tails may use up

# On finer grids than these, rounding inside the library adds spurious mass: 1e-17 points^2 / width a release.
_HIDDEN_POINTS, _HIDDEN_ROUNDING, _HIDDEN_STEP = 1 << 12, 1e13, 1e-8


class Law(StrEnum):
    """Which pair of laws dominates one release."""

    KNOWN_SIZE = "known-size"  # a fixed-size cohort; with rate 1 the plain Gaussian
    HIDDEN_ZERO_OUT = "hidden-zero-out"  # secret coins, the client's vector against zero
    HIDDEN_REPLACE = "hidden-replace"  # secret coins, the client's vector against another


@dataclass(frozen=True, slots=True)
class SampledGaussian:
    """One Gaussian release behind a sampled cohort.

    `ratio` is shift over sigma: of two radii for `KNOWN_SIZE` (unless `rate` is 1), of one radius for the others.
    """

    law: Law
    ratio: float
    rate: float
    slack: float = 0.0


def known_size_delta(epsilon: FloatArray, ratio: float, rate: float) -> FloatArray:
    """Return the profile delta(epsilon), epsilon >= 0, of a Gaussian behind a fixed-size cohort.

    Guarantee: dominates every pair of replace-one or zero-out neighbours when `ratio` is that of two radii.
    Proof: theory.md#fixed-size. Checked: test_accounting_oracle.py by exhaustive adaptive optimisation.
    """
    base = epsilon - math.log(rate) + np.log(-np.expm1(-epsilon) + rate * np.exp(-epsilon))
    return rate * gaussian_delta(base, ratio)


def reach(ratio: float, rate: float, tail: float) -> float:
    """Return an epsilon beyond which the known-size profile is at most `tail`."""
    if tail >= rate:
        return 0.0
    base = gaussian_epsilon(tail / rate, ratio)
    return base + math.log(rate + (1 - rate) * math.exp(-base))


def known_size(ratio: float, rate: float, step: float, tail: float) -> "PrivacyLossDistribution":
    """Return the loss distribution of the known-size profile, on the grid of multiples of `step`.

    Guarantee: its profile is nowhere below the true one: piecewise linear in exp(epsilon) through grid values,
    symmetric, and what rounding took away is given back as mass at infinity. Proof: theory.md#fixed-size.
    """
    # Slow to load, and a client that answers in a process of its own seldom needs them.
    from dp_accounting.pld.pld_pmf import DensePLDPmf  # noqa: PLC0415
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution  # noqa: PLC0415
    from scipy.signal import lfilter  # noqa: PLC0415

    top = max(1, math.ceil(reach(ratio, rate, tail) / step))
    grid = np.arange(top + 1, dtype=np.float64) * step
    delta = known_size_delta(grid, ratio, rate)
    fall = np.diff(delta)
    mass = np.empty(top)
    mass[:-1] = (fall[1:] - math.exp(step) * fall[:-1]) / math.expm1(step)
    mass[-1] = fall[-1] / math.expm1(-step)
    mass = np.maximum(mass, 0.0)
    kept = lfilter([1.0], [1.0, -math.exp(-step)], mass[::-1])[::-1] * math.exp(-step)
    rebuilt = delta[-1] + np.cumsum(mass[::-1])[::-1] - kept
    missing = max(0.0, float(np.max(delta[:-1] - rebuilt))) + rate * 2.0**-46
    infinite = float(delta[-1]) + missing
    below = (mass * np.exp(-grid[1:]))[::-1]
    centre = max(0.0, 1 - infinite - float(mass.sum()) - float(below.sum()))
    pmf = DensePLDPmf(step, -top, np.concatenate([below, [centre], mass]), infinite, pessimistic_estimate=True)
    return PrivacyLossDistribution(pmf)


def hidden_size(law: Law, ratio: float, rate: float, step: float, tail: float) -> "PrivacyLossDistribution":
    """Return both loss distributions of a Gaussian behind secret independent coins.

    Guarantee: holds when nothing shows the cohort's size: fixed divisor, noise that does not depend on it.
    Proof: theory.md#poisson. Checked: test_accounting_curves.py against quadrature.
    """
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism  # noqa: PLC0415
    from dp_accounting.privacy_accountant import NeighboringRelation  # noqa: PLC0415

    relations = {
        Law.HIDDEN_ZERO_OUT: NeighboringRelation.ADD_OR_REMOVE_ONE,
        Law.HIDDEN_REPLACE: NeighboringRelation.REPLACE_ONE,
    }
    return from_gaussian_mechanism(
        1 / ratio,
        sampling_prob=rate,
        value_discretization_interval=step,
        log_mass_truncation_bound=math.log(tail),
        neighboring_relation=relations[law],
    )


def loss_costs(
    parts: Sequence[tuple[SampledGaussian, int]], delta: float, points: int
) -> list[tuple[LossCost, int]]:
    """Return each part's loss distribution, all on one grid that suits the narrowest as far as it can."""
    tail = delta * _TAIL_SHARE / sum(count for _, count in parts)
    widths = [reach(part.ratio, part.rate, tail) for part, _ in parts]
    step = max(min(widths) / points, max(widths) / (16 * points), 1e-12)
    for (part, count), width in zip(parts, widths, strict=True):
        if part.law is not Law.KNOWN_SIZE:
            finest = min(_HIDDEN_POINTS, 64 + math.sqrt(_HIDDEN_ROUNDING * width / count))
            step = max(step, width / finest, _HIDDEN_STEP)
    return [(LossCost(_losses(part, step, tail), part.slack, 1, tail), count) for part, count in parts]


def _losses(part: SampledGaussian, step: float, tail: float) -> "PrivacyLossDistribution":
    if part.law is Law.KNOWN_SIZE:
        return known_size(part.ratio, part.rate, step, tail)
    return hidden_size(part.law, part.ratio, part.rate, step, tail)
