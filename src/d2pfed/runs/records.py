"""What a run leaves behind, wherever its sums came from: settings, a record per round, a summary."""

import math
from dataclasses import dataclass
from enum import StrEnum

from d2pfed.accounting import Guarantee
from d2pfed.errors import ConfigError
from d2pfed.fields import check_between, check_positive
from d2pfed.plan import PrivacyTarget
from d2pfed.training import ServerOptimizer

SILOS = "silos.json"  # in a run's directory, if it is one of silos elsewhere


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """A named array of the model, as it lies in the flat vector of parameters."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Everything that decides a run; the same settings resume it, others are refused."""

    title: str  # what is trained, in a few words
    data: str  # what the data are
    target: PrivacyTarget | None  # None if a plan was given instead, or nothing is private
    rounds: int
    optimizer: ServerOptimizer  # how the server moves the model
    arrays: tuple[ArrayShape, ...]  # of the model, in the order of the flat vector
    seed: int | None = None  # None: the system's entropy; a number repeats the run and protects nobody
    stop_is_blind: bool = False  # whether the run, if it stops early, does so for nothing that it has shown
    is_deployed: bool = False  # clients elsewhere remember the run: its name must be its own among all servers
    details: object = None  # what else decides it, as frozen values: the task, local training, the population


class End(StrEnum):
    """How a run ended."""

    COMPLETE = "complete"
    STOPPED = "stopped"  # by a rule that was declared beforehand: it is at its end
    INTERRUPTED = "interrupted"  # the same command resumes it
    EXHAUSTED = "exhausted"  # its budget, or the attempts that it may take, are used up: it cannot go on


@dataclass(frozen=True, slots=True)
class ExchangeRecord:
    """What one exchange of a round came to, where messages travel."""

    name: str
    asked: int
    answered: int
    seconds: float
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One round as measured; what would tell how large a secret batch was is None."""

    round: int  # counted from 1
    metrics: dict[str, float]  # on the validation data; not finite if the model diverged
    charged: int  # attempts up to here that may have been opened
    survivors: int | None
    attempt: int | None  # the one that succeeded, counted from 0; None if there is none
    update_norm: float  # of the noisy mean
    clip: float | None  # the bound on an update's norm; None in the clear
    fraction_clipped: float | None  # private estimate of the fraction of updates beyond it; None for a fixed clip
    upload_bytes: int  # per client
    seconds: float | None
    exchanges: tuple[ExchangeRecord, ...] = ()
    lost: str = ""  # why the sum is not known, and the model as before; empty if it is
    failures: float | None = None  # private estimate of how many clients' training failed; None if not counted

    def __post_init__(self) -> None:
        if self.round < 1:
            raise ConfigError(f"a round's number must be at least 1, got {self.round}")
        check_metrics(f"round {self.round}", self.metrics)
        if not 0 <= self.update_norm < math.inf:
            raise ConfigError(f"the update norm must be finite and at least 0, got {self.update_norm}")
        if self.clip is not None:
            check_positive("the clip", self.clip)
        if self.fraction_clipped is not None:
            check_between("fraction_clipped", self.fraction_clipped, 0, 1, "[]")
        for name in ("charged", "survivors", "attempt", "upload_bytes", "seconds"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} must be at least 0, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a run came to."""

    directory: str
    rounds: int  # complete ones
    end: End
    stopped: str  # why before the planned end; empty if it came to its end
    metrics: dict[str, float]  # of the last model, on the validation data
    test_metrics: dict[str, float] | None  # None unless the run is at its end
    guarantees: tuple[Guarantee, ...]  # of the whole plan: they hold however the run ended; none in the clear
    so_far: tuple[Guarantee, ...]  # of what was charged so far; none unless the stop was blind to all outputs
    charged: int  # attempts that may have been opened
    max_attempts: int
    upload_bytes: int  # per client per round
    dimension: int
    bits: int | None  # per coordinate; None for floats in the clear
    repeatable: bool  # from a seed, which undoes the noise
    tuning: str  # what all runs on a shared ledger cost together; empty if the ledger is the run's own

    def __post_init__(self) -> None:
        check_metrics("the summary", self.metrics)
        check_metrics("the test", self.test_metrics or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloRecord:
    """What the server of a run knows of one silo: its part in the ledger, and its own signed word. None of its data."""

    silo: int
    rounds: int  # whose sums its vector is in
    charged: int  # attempts that it was asked for a vector in, void ones included: it has charged each to itself
    last_round: int  # the last such sum, counted from 1; 0: none
    position: int | None  # rows of its log, as it has signed them last; None: it has shown none
    is_here: bool  # whether it has accepted the run, signed, and its node is connected
    refusal: str  # the last reason of its node for not answering, in its own words; empty if there was none

    def __post_init__(self) -> None:
        if not 0 <= self.rounds <= self.charged or self.last_round < 0:
            raise ConfigError(
                f"silo {self.silo} cannot be in {self.rounds} sums, the last of round {self.last_round}, of "
                f"{self.charged} attempts"
            )


@dataclass(frozen=True, slots=True)
class SiloTable:
    """All silos of a run."""

    silos: tuple[SiloRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingAudit:
    """Lower bounds on epsilon from canaries, clients or records, in a run with the same settings."""

    observer: str  # who guessed
    claimed: float  # the plan's epsilon against that observer
    delta: float
    unit: str  # what a canary is: a client, or a record of a silo
    lower: float  # the epsilon that the guesses refute, whatever the mechanism
    gaussian: float  # the epsilon that they refute if the trade-off curve is a Gaussian one
    confidence: float  # that both bounds hold together
    canaries: int  # units with a secret coin
    present: int  # canaries that may have been in a sum
    guesses: int  # coins guessed, for the larger bound
    correct: int
    shows: str  # what this can and cannot show

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.guesses <= self.present <= self.canaries:
            raise ConfigError(
                f"correct, guesses, present and canaries must be in this order, got {self.correct}, {self.guesses}, "
                f"{self.present}, {self.canaries}"
            )

    @property
    def is_refuted(self) -> bool:
        """Whether a lower bound is above the claim: of records, whose sampling is no Gaussian, the first one alone."""
        return max(self.lower, self.gaussian if self.unit == "client" else 0.0) > self.claimed


def check_metrics(whose: str, metrics: dict[str, float]) -> None:
    """Refuse an accuracy that is no share."""
    check_between(f"the accuracy of {whose}", metrics.get("accuracy", 0.0), 0, 1, "[]")
