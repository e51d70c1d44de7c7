"""The mechanisms: how a client turns centers into noisy integers, and what distribution that gives the sum.

A mechanism is added by its type, whose `noise` is one of the laws of `accounting.events`, and one entry of
`MechanismName`, the table at the end.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

from d2pfed.accounting.laws import BinomialSum, DiscreteGaussianSum, Noise, SkellamSum, l1_radius
from d2pfed.errors import ConfigError, shown
from d2pfed.fields import Choice, check_between
from d2pfed.noise.codec import Centers, Codec, conditional_round, rounded_radius
from d2pfed.noise.cumulative import (
    BinomialDistribution,
    Distribution,
    GaussianDistribution,
    SkellamDistribution,
)
from d2pfed.noise.sampler import CenteredDiscreteGaussian, DiscreteGaussian, draw
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import IntVector

LEAST_WIDTH = 2  # steps: below it the sum of real-centered discrete Gaussians is too far from one of them
LEAST_SILO_WIDTH = 8  # steps: with few contributors the smoothing of a narrower one would cost more of the width
MOST_WIDTH = 1 << 20  # steps: wider noise fits no sampler's table; refused before anything is computed from it
_MOST_TERM = 1 << 128  # of a fraction's numerator and denominator


@dataclass(frozen=True, slots=True)
class Share:
    """A client's share of the group's noise: its rank among those who hold the group's secret, and the secret."""

    rank: int
    holders: int
    group: Entropy

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.holders:
            raise ConfigError(f"rank must be in [0, {self.holders}), got {self.rank}")

    def part(self, total: IntVector) -> IntVector:
        """Return this rank's integer share; those of all ranks add up to exactly the total (Hermite's identity).

        Checked: test_mechanism.py::test_shares_of_all_ranks_add_up_to_the_total.
        """
        share: IntVector = (total + self.rank) // self.holders
        return share


# Every mechanism has two methods: `encode` returns a client's lattice point, rounded and with its part of the noise;
# `noise` returns the law of the noise in a sum over `survivors` clients. All randomness is in `entropy` and `share`.


@dataclass(frozen=True, slots=True)
class Centered:
    """A draw around the real vector: rounding and noise in one, `sigma` steps wide. Guarantee: theory.md#sums."""

    sigma: Fraction

    def __post_init__(self) -> None:
        _require_width(self.sigma, LEAST_WIDTH, MOST_WIDTH)

    def encode(self, centers: Centers, share: Share | None, entropy: Entropy) -> IntVector:
        """Return one draw around the client's own vector."""
        return self.around(centers.values, centers.fraction_bits, entropy)

    def around(self, values: IntVector, fraction_bits: int, entropy: Entropy) -> IntVector:
        """Return one draw around any grid vector, such as a sum over a batch of records."""
        return CenteredDiscreteGaussian(self.sigma, fraction_bits).draw(values, entropy.child("noise").stream())

    def noise(self, codec: Codec, survivors: int) -> Noise:
        """Return the sum of the survivors' discrete Gaussians."""
        return DiscreteGaussianSum(self.sigma, survivors, codec.radius, codec.length)


@dataclass(frozen=True, slots=True)
class Rounded:
    """Conditional stochastic rounding, the first step of every mechanism that adds integer noise to integers."""

    beta: float = math.exp(-0.5)  # the choice of Kairouz, Liu and Steinke

    def __post_init__(self) -> None:
        check_between("beta", self.beta, 0, 1)

    def encode(self, centers: Centers, entropy: Entropy) -> IntVector:
        """Return the client's rounded vector."""
        return conditional_round(centers, self.beta, entropy.child("rounding").stream())

    def encode_with(self, noise: Distribution, centers: Centers, entropy: Entropy) -> IntVector:
        """Return the client's rounded vector plus noise from its own entropy."""
        return self.encode(centers, entropy) + draw(noise, len(centers.values), entropy.child("noise").stream())

    def radius(self, codec: Codec) -> Fraction:
        """Return the bound on its norm, in steps."""
        return rounded_radius(codec.radius, codec.length, self.beta)


@dataclass(frozen=True, slots=True)
class Shared:
    """One discrete Gaussian that all clients derive from a secret of the group, each adding an integer share of it.

    Every client knows the noise, and one missing share destroys the guarantee: everyone must deliver.
    """

    sigma: Fraction
    rounded: Rounded = Rounded()

    def __post_init__(self) -> None:
        _require_width(self.sigma, 0, MOST_WIDTH)

    def encode(self, centers: Centers, share: Share | None, entropy: Entropy) -> IntVector:
        """Return the rounded vector plus the client's share of the group's noise."""
        if share is None:
            raise ConfigError("the shared mechanism needs the group's secret, got none")
        nu = DiscreteGaussian(self.sigma).draw(len(centers.values), share.group.child("noise").stream())
        return self.rounded.encode(centers, entropy) + share.part(nu)

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

    def encode(self, centers: Centers, share: Share | None, entropy: Entropy) -> IntVector:
        """Return the rounded vector plus the client's own noise."""
        return self.rounded.encode_with(GaussianDistribution(Fraction(0), self.sigma**2), centers, entropy)

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

    def encode(self, centers: Centers, share: Share | None, entropy: Entropy) -> IntVector:
        """Return the rounded vector plus the client's own noise."""
        return self.rounded.encode_with(SkellamDistribution(self.variance), centers, entropy)

    def noise(self, codec: Codec, survivors: int) -> Noise:
        """Return the sum of the survivors' Skellam variables."""
        radius = self.rounded.radius(codec)
        return SkellamSum(self.variance, survivors, radius, l1_radius(radius, codec.length), codec.length)


@dataclass(frozen=True, slots=True)
class BinomialNoise:
    """Conditional rounding plus a centered binomial of each client (Agarwal et al. 2018, fair coins)."""

    trials: int
    rounded: Rounded = Rounded()

    def __post_init__(self) -> None:
        if not 2 <= self.trials <= 4 * MOST_WIDTH**2 or self.trials % 2:
            raise ConfigError(f"a client's trials must be even and in [2, 2^42], got {shown(self.trials)}")

    def encode(self, centers: Centers, share: Share | None, entropy: Entropy) -> IntVector:
        """Return the rounded vector plus the client's own noise, centered at zero."""
        tossed = self.rounded.encode_with(BinomialDistribution(self.trials), centers, entropy)
        return tossed - self.trials // 2

    def noise(self, codec: Codec, survivors: int) -> Noise:
        """Return the sum of the survivors' binomials."""
        radius = self.rounded.radius(codec)
        box = codec.radius if codec.box is None else Fraction(codec.box) / Fraction(codec.granularity)
        largest = min(radius, Fraction(math.ceil(min(codec.radius, box))))  # of a rounded coordinate
        l1 = l1_radius(radius, codec.length)
        return BinomialSum(self.trials, survivors, radius, l1, largest, codec.length)


Mechanism = Centered | Shared | DDGauss | SkellamNoise | BinomialNoise


def _require_width(value: Fraction, least: int, most: int) -> None:
    """Refuse noise that is too narrow or too wide, or a fraction that is too long to compute with."""
    if max(abs(value.numerator), value.denominator) > _MOST_TERM:
        raise ConfigError("a noise's width must be a fraction of at most 2^128 over 2^128, got a longer one")
    if not (value > 0 and least <= value <= most):
        raise ConfigError(
            f"a client's noise must be at least {least} steps wide and at most {most}, got {float(value):.6g}"
        )


class Protocol(Choice):
    """How the vectors of a deployed round are added up.

    Attributes:
        PAIRWISE: fresh masks between all pairs of a cohort, which are opened for those who drop out.
        LATTICE: the noise is also that of learning with errors; a drawn committee opens the sum of the secrets.
        STANDING: masks from keys that a fixed set of silos agrees on once; nothing is ever opened.
    """

    PAIRWISE = "pairwise"
    LATTICE = "lattice"
    STANDING = "standing"


_ANY = tuple(Protocol)
_MASKED = Protocol.PAIRWISE, Protocol.STANDING  # whatever the noise
Sized = Callable[[float, int], Mechanism]  # from the width of a sum's noise, and how many clients add it


def _up(value: float) -> Fraction:
    return Fraction(math.ceil(value * 1024), 1024)


class MechanismName(Choice):
    """The table of mechanisms: all that calibration, plans, policies and protocols know of one is in its entry.

    Attributes:
        CENTERED: a discrete Gaussian centered at the client's real vector: rounding and noise in one step.
        SHARED: the paper's: one discrete Gaussian from a secret of the cohort, of which each adds a share.
        DDGAUSS: rounding, then an independent discrete Gaussian of each client.
        SKELLAM: rounding, then an independent Skellam variable of each client.
        BINOMIAL: cpSGD's: rounding, then a centered binomial of each client.

    Examples:
        >>> [each.value for each in MechanismName]
        ['centered', 'shared', 'ddgauss', 'skellam', 'binomial']
    """

    kind: type[Mechanism]  # by whose name plans spell it
    law: type[Noise]  # of the noise in a sum
    sized: Sized | None  # None: it does not round, so its lattice follows from the width
    runs_in: tuple[Protocol, ...]  # in addition to simulations

    def __new__(
        cls,
        name: str,
        kind: type[Mechanism],
        law: type[Noise],
        sized: Sized | None,
        runs_in: tuple[Protocol, ...],
    ) -> Self:
        """Make the entry, whose value is its name."""
        entry = str.__new__(cls, name)
        entry._value_ = name
        entry.kind, entry.law, entry.sized, entry.runs_in = kind, law, sized, runs_in
        return entry

    CENTERED = "centered", Centered, DiscreteGaussianSum, None, _ANY
    SHARED = "shared", Shared, DiscreteGaussianSum, lambda w, _: Shared(_up(w)), (Protocol.PAIRWISE,)
    DDGAUSS = "ddgauss", DDGauss, DiscreteGaussianSum, lambda w, n: DDGauss(_up(w / math.sqrt(n))), _ANY
    SKELLAM = "skellam", SkellamNoise, SkellamSum, lambda w, n: SkellamNoise(_up(w**2 / n)), _MASKED
    BINOMIAL = "binomial", BinomialNoise, BinomialSum, lambda w, n: BinomialNoise(2 * math.ceil(2 * w**2 / n)), ()

    @staticmethod
    def of(mechanism: Mechanism) -> "MechanismName":
        """Return the entry of a mechanism; refuse one that is not in the table."""
        for entry in MechanismName:
            if type(mechanism) is entry.kind:
                return entry
        raise ConfigError(f"{type(mechanism).__name__} is not in the table of mechanisms")
