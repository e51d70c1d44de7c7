"""The error of a private sum beside that of a trusted server, from few clients to many."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.explicit import privacy_target
from d2pfed.plan import Plan, ideal_multiplier
from d2pfed.statistics.queries import private_sum

CLIENTS = (10, 30, 100, 1000, 10_000)
DIMENSIONS = (10, 1000)
GOAL = 1.05
_DRAWS = 3000  # coordinates whose errors are averaged, where clients are few


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsRow:
    """The error of a private sum whose clients are all at the clip in the same coordinate.

    `stated` is what its standard error says and `measured` the root mean square error, both over that of a trusted
    server's Gaussian times sqrt(n / (quorum - colluders)). `bias` is the error where all clients are, in standard
    errors, averaged over `sums`.
    """

    clients: int
    dimension: int
    sums: int
    stated: float
    measured: float
    bias: float
    seconds: float  # of one sum
    goal: float = GOAL

    @property
    def met(self) -> bool:
        """Whether the stated error is within the goal, and the measured one but for three standard deviations."""
        chance = 3 / math.sqrt(2 * self.sums * self.dimension)
        return self.stated <= self.goal and self.measured <= self.goal + chance


def bench_statistics(clients: Sequence[int] = CLIENTS) -> Iterator[StatisticsRow]:
    """Yield a row for each number of clients and of coordinates."""
    for count in clients:
        for dimension in DIMENSIONS:
            yield _row(count, dimension)


def _row(clients: int, dimension: int) -> StatisticsRow:
    sums = max(3, min(_DRAWS // dimension, 20_000 // clients))
    vector, errors, begun = np.eye(dimension)[0], [], time.perf_counter()
    for _ in range(sums):
        result = private_sum([vector] * clients, epsilon=1.0, fidelity="sum")
        errors.append(result.value - clients * vector)
    seconds, allowed = (time.perf_counter() - begun) / sums, trusted_error(result.plan)
    found = np.array(errors)
    return StatisticsRow(
        clients=clients,
        dimension=dimension,
        sums=sums,
        stated=float(result.standard_error[0]) / allowed,
        measured=math.sqrt(float(np.mean(found**2))) / allowed,
        bias=float(found[:, 0].mean() / result.standard_error[0]),
        seconds=seconds,
    )


def trusted_error(plan: Plan) -> float:
    """Return the standard deviation of a trusted server's noise for a clip of 1, times sqrt(n / honest)."""
    clients = plan.cohort_size
    usual = privacy_target(dimension=1, population=clients, cohort_size=clients, rounds=1, epsilon=plan.epsilon)
    target = replace(usual, spare=0, delta=plan.delta, sampling=plan.sampling.method, adjacency=plan.adjacency)
    # The multiplier is sigma over twice the clip, for the target's own adjacency.
    return 2 * ideal_multiplier(target) * math.sqrt(clients / (plan.quorum - plan.colluders))
