"""The mechanisms: how a client turns centres into noisy integers, and what distribution that gives the sum."""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Protocol, runtime_checkable

from d2pfed.accounting.events import BinomialSum, DiscreteGaussianSum, Noise, SkellamSum
from d2pfed.errors import ConfigError, shown
from d2pfed.noise.codec import Centres, Codec, conditional_round, rounded_radius
from d2pfed.noise.sampler import Binomial, CentredDiscreteGaussian, DiscreteGaussian, Skellam
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import IntVector

LEAST_WIDTH = 2  # steps: below it the sum of real-centred discrete Gaussians is too far from one of them
LEAST_SILO_WIDTH = 8  # steps: with few contributors the smoothing of a narrower one would cost more of the width
MOST_WIDTH = 1 << 20  # steps: wider noise fits no sampler's table; refused before anything is computed from it
_MOST_TERM = 1 << 128  # of a fraction's numerator and denominator

IntegerNoise = DiscreteGaussian | Skellam | Binomial


@dataclass(frozen=True, slots=True)
class Share:
    """A client's place in its cohort: its rank among those who hold the seed, and the group's secret, if any."""

    rank: int
    holders: int
    group: Entropy | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.holders:
            raise ConfigError(f"rank must be in [0, {self.holders}), got {self.rank}")

    def part(self, total: IntVector) -> IntVector:
        """Return this rank's integer share; those of all ranks add up to exactly the total (Hermite's identity).

        Checked: test_mechanism.py::test_shares_of_all_ranks_add_up_to_the_total.
        """
        share: IntVector = (total + self.rank) // self.holders
        return share


@runtime_checkable
class Mechanism(Protocol):
    """What every mechanism does; all randomness of a client is in its entropy and its share of the group's."""

    def encode(self, centres: Centres, share: Share, entropy: Entropy) -> IntVector:
        """Return the client's lattice point: rounded, with its part of the noise."""
        ...

    def noise(self, codec: Codec, survivors: int) -> Noise:
        """Return the distribution of the noise in a sum over `survivors` clients."""
        ...


@dataclass(frozen=True, slots=True)
class Centered:
    """Each client draws from a discrete Gaussian centred at its real vector: rounding and noise in one step.

    Guarantee: docs/theory.md, real-centred sums. `sigma` is a client's own width in steps.
    """

    sigma: Fraction

    def __post_init__(self) -> None:
        _require_width(self.sigma, LEAST_WIDTH, MOST_WIDTH)

    def encode(self, centres: Centres, share: Share, entropy: Entropy) -> IntVector:
        """Return one draw around the client's own vector."""
        return self.around(centres.values, centres.fraction_bits, entropy)

    def around(self, values: IntVector, fraction_bits: int, entropy: Entropy) -> IntVector:
        """Return one draw around any grid vector, such as a sum over a batch of records."""
        return _centred(self.sigma, fraction_bits).draw(values, entropy.child("noise").stream())

    def noise(self, codec: Codec, survivors: int) -> Noise:
        """Return the sum of the survivors' discrete Gaussians."""
        return DiscreteGaussianSum(self.sigma, survivors, codec.radius, codec.length)


@lru_cache(maxsize=4)  # its check takes exact fractions, and every silo asks for it
def _centred(sigma: Fraction, fraction_bits: int) -> CentredDiscreteGaussian:
    return CentredDiscreteGaussian(sigma, fraction_bits)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Conditional stochastic rounding, the first step of every mechanism that adds integer noise to integers."""

    beta: float = math.exp(-0.5)  # the choice of Kairouz, Liu and Steinke

    def __post_init__(self) -> None:
        if not 0 < self.beta < 1:
            raise ConfigError(f"beta must be in (0, 1), got {self.beta}")

    def encode(self, centres: Centres, entropy: Entropy) -> IntVector:
        """Return the client's rounded vector."""
        return conditional_round(centres, self.beta, entropy.child("rounding").stream())

    def encode_with(self, noise: IntegerNoise, centres: Centres, entropy: Entropy) -> IntVector:
        """Return the client's rounded vector plus noise from its own entropy."""
        return self.encode(centres, entropy) + noise.draw(len(centres.values), entropy.child("noise").stream())

    def radius(self, codec: Codec) -> Fraction:
        """Return the bound on its norm, in steps."""
        return rounded_radius(codec.radius, codec.length, self.beta)


@dataclass(frozen=True, slots=True)
class Shared:
    """One discrete Gaussian that all clients derive from a secret of the group, each adding an integer share of it.

    Every client knows the noise, and one missing share destroys the guarantee: an attempt counts only if everyone
    delivers.
    """

    sigma: Fraction
    rounded: Rounded = Rounded()

    def __post_init__(self) -> None:
        _require_width(self.sigma, 0, MOST_WIDTH)

    def encode(self, centres: Centres, share: Share, entropy: Entropy) -> IntVector:
        """Return the rounded vector plus the client's share of the group's noise."""
        if share.group is None:
            raise ConfigError("the shared mechanism needs the group's secret, got none")
        nu = DiscreteGaussian(self.sigma).draw(len(centres.values), share.group.child("noise").stream())
        return self.rounded.encode(centres, entropy) + share.part(nu)

    def noise(self, codec: Codec, survivors: int) -> Noise:
        """Return one discrete Gaussian, whatever the number of survivors."""
        return DiscreteGaussianSum(self.sigma, 1, self.rounded.radius(codec), codec.length)


@dataclass(frozen=True, slots=True)
class DDGauss:
    """Conditional rounding plus an independent discrete Gaussian of each client (Kairouz, Liu and Steinke 2021)."""

    sigma: Fraction
    rounded: Rounded = Rounded()

    def __post_init__(self) -> None:
        _require_width(self.sigma, 0, MOST_WIDTH)

    def encode(self, centres: Centres, share: Share, entropy: Entropy) -> IntVector:
        """Return the rounded vector plus the client's own noise."""
        return self.rounded.encode_with(DiscreteGaussian(self.sigma), centres, entropy)

    def noise(self, codec: Codec, survivors: int) -> Noise:
        """Return the sum of the survivors' discrete Gaussians."""
        return DiscreteGaussianSum(self.sigma, survivors, self.rounded.radius(codec), codec.length)


@dataclass(frozen=True, slots=True)
class SkellamNoise:
    """Conditional rounding plus an independent Skellam variable of each client (Agarwal, Kairouz and Liu 2021)."""

    variance: Fraction
    rounded: Rounded = Rounded()

    def __post_init__(self) -> None:
        _require_width(self.variance, 0, MOST_WIDTH**2)

    def encode(self, centres: Centres, share: Share, entropy: Entropy) -> IntVector:
        """Return the rounded vector plus the client's own noise."""
        return self.rounded.encode_with(Skellam(self.variance), centres, entropy)

    def noise(self, codec: Codec, survivors: int) -> Noise:
        """Return the sum of the survivors' Skellam variables."""
        radius = self.rounded.radius(codec)
        return SkellamSum(self.variance, survivors, radius, l1_radius(radius, codec.length), codec.length)


@dataclass(frozen=True, slots=True)
class BinomialNoise:
    """Conditional rounding plus a centred binomial of each client (Agarwal et al. 2018, fair coins)."""

    trials: int
    rounded: Rounded = Rounded()

    def __post_init__(self) -> None:
        if not 2 <= self.trials <= 4 * MOST_WIDTH**2 or self.trials % 2:
            raise ConfigError(f"a client's trials must be even and in [2, 2^42], got {shown(self.trials)}")

    def encode(self, centres: Centres, share: Share, entropy: Entropy) -> IntVector:
        """Return the rounded vector plus the client's own noise, centred at zero."""
        return self.rounded.encode_with(Binomial(self.trials), centres, entropy) - self.trials // 2

    def noise(self, codec: Codec, survivors: int) -> Noise:
        """Return the sum of the survivors' binomials."""
        radius = self.rounded.radius(codec)
        l1, largest = l1_radius(radius, codec.length), min(radius, Fraction(codec.largest_step))
        return BinomialSum(self.trials, survivors, radius, l1, largest, codec.length)


def _require_width(value: Fraction, least: int, most: int) -> None:
    """Refuse noise that is too narrow or too wide, or a fraction that is too long to compute with."""
    if max(abs(value.numerator), value.denominator) > _MOST_TERM:
        raise ConfigError("a noise's width must be a fraction of at most 2^128 over 2^128, got a longer one")
    if not (value > 0 and least <= value <= most):
        raise ConfigError(
            f"a client's noise must be at least {least} steps wide and at most {most}, got {float(value):.6g}"
        )


def l1_radius(radius: Fraction, length: int) -> Fraction:
    """Bound the L1 norm of an integer vector by its L2 norm: |x| <= min(sqrt(length) |x|_2, |x|_2^2), rounded up."""
    root = Fraction(math.isqrt(length << 64) + 1, 1 << 32)
    return min(root * radius, radius**2)
