"""What the paper's two experiments were run with: its text, and for what that leaves open its authors' public code."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One experiment; real numbers are exact decimals, so that lattice units are exact too."""

    name: str
    dimension: int
    population: int
    cohort_size: int
    rounds: int
    clip: Fraction  # D; in the code, not in the text
    levels: int  # k; in the code, not in the text
    sigma: Fraction  # of the noise on the sum
    binomial_levels: int  # cpSGD's k
    binomial_trials: int  # cpSGD's coins on the sum: the code divides 2^24 by the logarithm of the cohort

    def step(self, levels: int) -> Fraction:
        """Return the lattice step of so many levels in [-D, D]."""
        return 2 * self.clip / (levels - 1)

    def sigma_steps(self, levels: int) -> Fraction:
        """Return the noise's width in steps of that lattice."""
        return self.sigma / self.step(levels)


DELTA = 1e-5
CLAIMED_SENSITIVITY = 4  # times D
INFIMNIST = Setting(
    name="INFIMNIST",
    dimension=51_370,
    population=100_000,
    cohort_size=100,
    rounds=100,
    clip=Fraction("0.25"),
    levels=21,
    sigma=Fraction("0.6"),
    binomial_levels=601,
    binomial_trials=3_642_525,
)
CIFAR10 = Setting(
    name="CIFAR10",
    dimension=996_298,
    population=2_000,
    cohort_size=10,
    rounds=300,
    clip=Fraction("0.01"),
    levels=2_001,
    sigma=Fraction("0.03"),
    binomial_levels=401,
    binomial_trials=7_285_851,
)
