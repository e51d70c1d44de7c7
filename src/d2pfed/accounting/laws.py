"""The laws of the noise in a sum: their variances, and the Renyi curves of those that have one."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import ClassVar, Self, get_args

import numpy as np

from d2pfed.accounting.rdp import FloatArray, gaussian_rdp, sum_gap, theta_tail, two_sided
from d2pfed.errors import ConfigError


def l1_radius(radius: Fraction, length: int) -> Fraction:
    """Bound the L1 norm of an integer vector by its L2 norm: |x| <= min(sqrt(length) |x|_2, |x|_2^2), rounded up."""
    root = Fraction(math.isqrt(length << 64) + 1, 1 << 32)
    return min(root * radius, radius**2)


class _Law(ABC):
    """What the laws of noise in a sum share; variances are in squared steps, radii bound a client's vector in steps."""

    __slots__ = ()
    contributors: int

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # every law is a dataclass
            value = getattr(self, item.name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{item.name} must be positive and finite, got {value}")

    @property
    @abstractmethod
    def one_variance(self) -> Fraction:
        """The variance of one contributor's noise."""

    @property
    def sum_variance(self) -> float:
        """The variance of the whole noise."""
        return float(self.one_variance * self.contributors)

    def without(self, known: int) -> Self | None:
        """Return what is left without `known` contributors, or None."""
        left = self.contributors - known
        return replace(self, contributors=left) if left > 0 else None  # type: ignore[type-var]  # as above


@dataclass(frozen=True, slots=True)
class DiscreteGaussianSum(_Law):
    """The sum of `contributors` independent discrete Gaussians on the integers, around any real center."""

    kind: ClassVar[str] = "discrete-gaussian"
    sigma: Fraction  # the width of each contributor's noise
    contributors: int  # a single one is the whole noise of `shared`
    radius: Fraction  # in L2
    dimension: int

    @property
    def one_variance(self) -> Fraction:
        """The variance of one contributor's noise."""
        return self.sigma**2

    def rdp(self, radii: int, orders: FloatArray) -> FloatArray:
        """Return an upper bound on the Renyi curve for real centers this many radii apart. Proof: theory.md#sums."""
        sigma, contributors = float(self.sigma), self.contributors
        ratio = radii * float(self.radius) / (sigma * math.sqrt(contributors))
        one = orders / (orders - 1) * two_sided(theta_tail(sigma * math.sqrt(contributors)))
        gap = (2 * orders - 1) / (orders - 1) * sum_gap(sigma, contributors)
        return gaussian_rdp(orders, ratio) + self.dimension * (one + gap)


@dataclass(frozen=True, slots=True)
class SkellamSum(_Law):
    """The sum of `contributors` Skellam variables, around an integer center."""

    kind: ClassVar[str] = "skellam"
    variance: Fraction  # of each contributor's noise
    contributors: int
    radius: Fraction  # in L2
    l1_radius: Fraction
    dimension: int

    @property
    def one_variance(self) -> Fraction:
        """The variance of one contributor's noise."""
        return self.variance

    def rdp(self, radii: int, orders: FloatArray) -> FloatArray:
        """Return the Renyi curve at a distance in radii, at integer orders (Agarwal, Kairouz and Liu 2021).

        Proof: theory.md#skellam. Checked: test_accounting_rdp.py against exact divergences.
        """
        shift = radii * float(self.radius)
        # An integer vector's L1 norm is at most its squared L2 norm, and at most sqrt(d) times its L2 norm.
        l1 = min(radii * float(self.l1_radius), shift * shift, shift * math.sqrt(self.dimension))
        variance, square = float(self.variance) * self.contributors, shift * shift
        extra = ((2 * orders - 1) * square + 6 * l1) / (4 * variance**2)
        return orders * square / (2 * variance) + np.minimum(extra, 3 * l1 / (2 * variance))


@dataclass(frozen=True, slots=True)
class ContinuousGaussian(_Law):
    """Gaussian noise that a trusted server adds to a sum of vectors within `radius`."""

    kind: ClassVar[str] = "gaussian"
    sigma: float
    radius: float

    @property
    def one_variance(self) -> Fraction:
        """The variance of the noise."""
        return Fraction(self.sigma) ** 2

    @property
    def sum_variance(self) -> float:
        """The variance of the whole noise."""
        return self.sigma**2

    def without(self, known: int) -> Self:  # noqa: ARG002 - no client knows a trusted server's noise
        """Return itself."""
        return self

    def rdp(self, radii: int, orders: FloatArray) -> FloatArray:
        """Return the Renyi curve for neighbors this many radii apart."""
        return gaussian_rdp(orders, radii * float(self.radius) / self.sigma)


@dataclass(frozen=True, slots=True)
class BinomialSum(_Law):
    """The sum of `contributors` centered binomials of `trials` fair coins each, around an integer center."""

    kind: ClassVar[str] = "binomial"
    trials: int
    contributors: int
    radius: Fraction  # in L2
    l1_radius: Fraction
    linf_radius: Fraction  # of the largest coordinate
    dimension: int

    @property
    def one_variance(self) -> Fraction:
        """The variance of one contributor's noise."""
        return Fraction(self.trials, 4)

    def rdp(self, _radii: int, _orders: FloatArray) -> FloatArray:
        """Refuse: it composes by its own rule (theory.md#binomial)."""
        raise ConfigError("binomial noise composes by its own rule and cannot be mixed with other noise")


Noise = DiscreteGaussianSum | SkellamSum | ContinuousGaussian | BinomialSum
LAWS: tuple[type[Noise], ...] = get_args(Noise)
