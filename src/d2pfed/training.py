"""The training loop, a generator of rounds; who trains and who aggregates are arguments."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from d2pfed.accounting import CohortSampling, Sampling
from d2pfed.errors import ConfigError, LostRound
from d2pfed.fields import TRAINING, check_arguments, check_between, check_types, documented, setting
from d2pfed.noise.clipping import ClipStep
from d2pfed.noise.codec import FloatVector
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.round import Outcome

MOST_RATE = 1e6  # greater steps than any float32 model outlives
_SEED_BITS = 40  # of a round's seed that are its shuffle's; its number is above them


@dataclass(frozen=True, slots=True)
class Cohorts:
    """Draws the cohort of each attempt, and states by which scheme it does."""

    sampling: CohortSampling
    entropy: Entropy

    def draw(self, number: int, attempt: int, block: int) -> tuple[int, ...]:
        """Return the sorted clients of an attempt at a round.

        Guarantee: each attempt has its own independent draw; of a partition, its block, which no other charged attempt
        may have. Proof: theory.md#attempts. Checked: test_training.py::test_every_attempt_has_a_fresh_cohort.
        """
        population, cohort = self.sampling.population, self.sampling.cohort_size
        fresh = self.entropy.child("cohort", number, attempt)
        match self.sampling.method:
            case Sampling.FIXED:
                chosen = fresh.stream().subset(population, cohort)
            case Sampling.ONCE:
                if (block + 1) * cohort > population:
                    raise ConfigError(
                        f"sampling `once` has {population // cohort} blocks of {cohort} out of {population}, "
                        f"got block {block}"
                    )
                order = self.entropy.child("partition").stream().permutation(population)
                chosen = np.sort(order[block * cohort : (block + 1) * cohort])
            case Sampling.NONE:
                chosen = np.arange(population)[:cohort]
        return tuple(int(client) for client in chosen)


def shuffle_seed(run: str, number: int) -> int:
    """Return the seed of the clients' shuffles in a round: public, and another one in every round of every run.

    The round's number is in its upper bits, where training by a schedule finds it.
    """
    return number << _SEED_BITS | int.from_bytes(digest("shuffle", run, number)[: _SEED_BITS // 8], "little")


def round_of(seed: int) -> int:
    """Return the number of the round that a seed is of."""
    return seed >> _SEED_BITS


class SecondMoment(StrEnum):
    """How the second moment follows the squares of the means."""

    ADAM = "adam"  # their running average
    YOGI = "yogi"  # a step towards each square, by its size: it falls slowly after large ones


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptimizer:
    """How the server moves the model by a round's mean: FedAvg with momentum, Adam or Yogi, decay and averaging.

    Examples:
        >>> ServerOptimizer(lr=2.0, momentum=0.7).momentum
        0.7
    """

    lr: float = setting(1.0, "The server's learning rate.", TRAINING)
    momentum: float = setting(0.0, "The server's momentum.", TRAINING)
    second_moment: float = setting(0.0, "Decay of Adam's second moment at the server; 0: no Adam.", TRAINING)
    second_rule: SecondMoment = setting(
        SecondMoment.ADAM, "How the server's second moment follows the squares: adam or yogi.", TRAINING
    )
    lr_decay: float = setting(1.0, "Factor by which the server's learning rate shrinks in each round.", TRAINING)
    averaging: float = setting(0.0, "Decay of the running average of models; 0: the last model counts.", TRAINING)

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 < self.lr <= MOST_RATE:
            raise ConfigError(f"the server's lr must be positive and at most {MOST_RATE:g}, got {self.lr}")
        for name in ("momentum", "second_moment", "averaging"):
            check_between(f"the server's {name}", getattr(self, name), 0, 1, "[)")
        check_between("the server's lr_decay", self.lr_decay, 0, 1, "(]")

    def start(self, params: FloatVector, clip: float | None = None) -> "ServerState":
        """Return the state before the first round; `clip` is its clip, where it adapts."""
        zeros = np.zeros_like(params)
        return ServerState(0, params, zeros, zeros if self.second_moment else zeros[:0], params, clip)

    def apply(self, state: "ServerState", mean: FloatVector) -> "ServerState":
        """Return the state after one more round."""
        done = state.rounds + 1
        velocity = self.momentum * state.velocity + mean
        move, second = velocity, state.second
        if self.second_moment:
            squares, gain = mean**2, np.float32(1 - self.second_moment)
            if self.second_rule is SecondMoment.YOGI:
                second = np.asarray(second - gain * squares * np.sign(second - squares))
            else:
                second = np.float32(self.second_moment) * second + gain * squares
            first = velocity * ((1 - self.momentum) / (1 - self.momentum**done))
            move = first / (np.sqrt(second / (1 - self.second_moment**done)) + 1e-8)
        params = state.params + np.float32(self.lr * self.lr_decay**state.rounds) * move
        # The average's weights are corrected for its start, so early models do not linger in it.
        weight = (1 - self.averaging) / (1 - self.averaging**done) if self.averaging else 1.0
        average = state.average + np.float32(weight) * (params - state.average)
        return ServerState(done, params, velocity, second, average, state.clip)


def named_server(name: str) -> dict[str, object]:
    """Return the settings of FedAvgM, FedAdam or FedYogi, with the moments of their papers."""
    adaptive: dict[str, object] = {"lr": 0.01, "momentum": 0.9, "second_moment": 0.99}
    known: dict[str, dict[str, object]] = {
        "avgm": {"momentum": 0.9},
        "adam": adaptive,
        "yogi": adaptive | {"second_rule": SecondMoment.YOGI},
    }
    if name not in known:
        raise ConfigError(f"server must be one of {', '.join(known)}, or its settings, got {name!r}")
    return known[name]


@dataclass(frozen=True, slots=True)
class ServerState:
    """All that the server carries from round to round."""

    rounds: int
    params: FloatVector = field(repr=False)
    velocity: FloatVector = field(repr=False)
    second: FloatVector = field(repr=False)
    average: FloatVector = field(repr=False)  # the model that is released and evaluated
    clip: float | None = None  # of the next round, where the clip adapts


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRound:
    """What happened in one round, and the state that follows it."""

    round: int
    attempt: int | None  # the number of the attempt that succeeded; None if the round is lost
    survivors: int
    update_norm: float  # of the noisy mean
    clipping: ClipStep | None  # None where the clip is fixed
    state: ServerState = field(repr=False)
    lost: str = ""  # why its sum is not known, and the model as before; empty if it is
    failures: float | None = None  # noised; None where they are not counted


AggregateRound = Callable[[ServerState], Outcome]  # of the round that a state is before; raises LostRound


def train(
    state: ServerState, step: ServerOptimizer, rounds: int, aggregate: AggregateRound
) -> Iterator[TrainedRound]:
    """Yield each round until `rounds` are done; stop asking and nothing more happens.

    Args:
        state: the server's state to begin with: parameters and moments.
        step: how a round's mean moves the parameters.
        rounds: how many rounds there are in all, those of `state` included.
        aggregate: makes one round's mean from the state.

    Examples:
        >>> import numpy as np
        >>> from d2pfed.round import Outcome
        >>> step = ServerOptimizer(lr=0.5)
        >>> start = step.start(np.zeros(2, np.float32))
        >>> rounds = train(start, step, 3, lambda state: Outcome(1 - state.params, attempt=0, survivors=10))
        >>> [each.state.params.tolist() for each in rounds]
        [[0.5, 0.5], [0.75, 0.75], [0.875, 0.875]]
    """
    check_arguments(train, locals())
    while state.rounds < rounds:
        try:
            outcome = aggregate(state)
        except LostRound as lost:
            state = replace(state, rounds=state.rounds + 1)
            yield TrainedRound(
                round=state.rounds,
                attempt=None,
                survivors=0,
                update_norm=0.0,
                clipping=None,
                state=state,
                lost=f"{lost}",
            )
            continue
        if not isinstance(outcome, Outcome):
            raise ConfigError(f"aggregate must return an Outcome, got {type(outcome).__name__}")
        state = step.apply(state, outcome.mean)
        if outcome.clipping is not None:
            state = replace(state, clip=outcome.clipping.following)
        yield TrainedRound(
            round=state.rounds,
            attempt=outcome.attempt,
            survivors=outcome.survivors,
            update_norm=float(np.linalg.norm(outcome.mean.astype(np.float64))),
            clipping=outcome.clipping,
            state=state,
            failures=outcome.failures,
        )
