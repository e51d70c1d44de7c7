"""A continuous Gaussian that stands for a sum of discrete ones, and what the exchange costs."""

import math
from dataclasses import dataclass

from d2pfed.accounting.events import DiscreteGaussianSum
from d2pfed.accounting.rdp import sum_gap, theta_tail

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
    mean, worst, own = theta_tail(posterior), theta_tail(smoothing), theta_tail(width)
    if worst >= 1:
        return math.inf
    above = math.log1p(mean + worst * worst / (1 - worst)) + math.log1p(own)
    below = -math.log1p(-mean) - math.log1p(-own)
    return max(above, below)


def surrogate(noise: DiscreteGaussianSum, releases: int) -> Surrogate | None:
    """Return the widest Gaussian whose slack over so many releases is negligible; None if the noise is too narrow.

    Guarantee: with T releases and e0 = slack, delta(epsilon) <= exp(T e0) delta_Gauss(epsilon - 2 T e0).
    Proof: theory.md#surrogate. Checked: test_accounting_oracle.py.
    """
    sigma = float(noise.sigma)
    width = sigma * math.sqrt(noise.contributors) * (1 - 2**-50)
    gap = sum_gap(sigma, noise.contributors)
    share = TOTAL_SLACK / (releases * noise.dimension)
    # Smoothing finer than the other, unavoidable terms would cost width and gain nothing.
    target = max(share - gap, gap, 4 * theta_tail(width))
    low, high = 0.0, width * _WIDEST_SMOOTHING
    if smoothing_gap(width, high) > target:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        if smoothing_gap(width, middle) <= target:
            high = middle
        else:
            low = middle
    slack = noise.dimension * (gap + smoothing_gap(width, high))
    return Surrogate(math.sqrt(width * width - high * high), slack) if math.isfinite(slack) else None
