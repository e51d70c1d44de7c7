"""What a report tells: values only, whoever measured them."""

import math
from dataclasses import dataclass

from d2pfed.accounting import Guarantee, Sampling
from d2pfed.accounting.amplification import is_amplified
from d2pfed.errors import ConfigError
from d2pfed.plan import Plan, PlanSummary
from d2pfed.plan.widths import variance


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPoint:
    """One round as measured; what tells the cohort's size may be left out."""

    round: int  # counted from 1
    accuracy: float  # on the validation data
    loss: float  # not finite if the model diverged
    charged: int  # attempts up to here that may have been opened
    survivors: int | None
    attempt: int | None  # of the attempt that succeeded, counted from 0
    update_norm: float  # of the noisy mean
    upload_bytes: int  # of one client in this round
    seconds: float | None

    def __post_init__(self) -> None:
        if self.round < 1:
            raise ConfigError(f"a round's number must be at least 1, got {self.round}")
        _check_accuracy(f"the accuracy of round {self.round}", self.accuracy)
        if not 0 <= self.update_norm < math.inf:
            raise ConfigError(f"the update norm must be finite and at least 0, got {self.update_norm}")
        for name in ("charged", "survivors", "attempt", "upload_bytes", "seconds"):
            if (value := getattr(self, name)) is not None:
                _check_not_negative(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """All that the report of one run says."""

    title: str
    run: str  # the run's name
    data: str  # what the data are
    settings: tuple[tuple[str, str], ...]  # names and values
    plan: Plan
    explanation: PlanSummary
    so_far: tuple[
        Guarantee, ...
    ]  # what was charged so far; none unless the run stopped early, blind to its outputs
    done: int  # rounds that are complete
    charged: int  # attempts that may have been opened
    rounds: tuple[RoundPoint, ...]  # as far as they were measured: a crash may have taken a line
    test_accuracy: float | None  # None unless all rounds are done
    stopped: str  # why before the planned end; empty if it came to its end
    exhausted: bool  # its budget, or the attempts that it may take, are used up
    repeatable: bool  # from a seed, which undoes the noise
    ledger: str | None  # its file in the run's directory, if it is there

    def __post_init__(self) -> None:
        numbers = [point.round for point in self.rounds]
        if numbers != sorted(set(numbers)):
            raise ConfigError(f"a story's rounds must be in order, got {numbers[:10]}")
        if not max(numbers, default=0) <= self.done <= self.plan.rounds:
            raise ConfigError(
                f"the plan has {self.plan.rounds} rounds, the story {self.done} and metrics up to "
                f"{max(numbers, default=0)}"
            )
        if self.test_accuracy is not None:
            _check_accuracy("the test accuracy", self.test_accuracy)

    @property
    def can_go_on(self) -> bool:
        """Whether the same command would carry the run on."""
        return self.test_accuracy is None and not self.exhausted

    @property
    def secret_sizes(self) -> bool:
        """Whether the promise rests on nobody learning how many clients a cohort had."""
        return self.plan.sampling.method is Sampling.POISSON

    @property
    def amplified(self) -> bool:
        """Whether the promise to `released` rests on nobody else knowing who took part."""
        return is_amplified(self.plan.sampling)

    @property
    def noise_norm(self) -> float:
        """The expected norm of the noise in the mean over a full cohort."""
        return self.explanation.noise_to_clip * self.plan.codec.clip

    def noise_in(self, point: RoundPoint) -> float:
        """Return the expected norm of the noise in a round's mean: less if clients with their noise are missing."""
        if self.secret_sizes or not point.survivors:
            return self.noise_norm
        present, full = (variance(self.plan.noise(count)) for count in (point.survivors, self.plan.cohort_size))
        return self.noise_norm * math.sqrt(present / full)

    def signal_in(self, point: RoundPoint) -> float:
        """Estimate the norm of a round's mean without its noise, which is nearly orthogonal; 0 if noise is all."""
        return math.sqrt(max(0.0, point.update_norm**2 - self.noise_in(point) ** 2))


def _check_accuracy(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} must be in [0, 1], got {value}")


def _check_not_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise ConfigError(f"{name} must be at least 0, got {value}")
