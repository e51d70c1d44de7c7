"""Who is whose neighbour in secure aggregation: everyone, or a regular graph with proven tails."""

from dataclasses import dataclass, field
from fractions import Fraction
from math import comb

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.randomness import Stream

COMPLETE_UP_TO = 100  # below this size a complete graph costs little, and nothing is left to chance

Ranks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Graph:
    """A regular graph over the ranks of a cohort: complete, or a Harary graph on a public random circle.

    In the sparse case the clients' places on the circle are a permutation drawn from the public seed, and each is
    joined to the `degree / 2` next ones on either side, so that its neighbours are a uniform subset of the others.
    """

    cohort: int
    degree: int
    seed: bytes
    _circle: Ranks = field(init=False, repr=False, compare=False)  # rank at each position
    _position: Ranks = field(init=False, repr=False, compare=False)  # position of each rank

    def __post_init__(self) -> None:
        check_degree(self.cohort, self.degree)
        words = Stream(self.seed).words(self.cohort)
        circle = np.argsort(words, kind="stable")  # so that even equal words would give one order
        position = np.empty_like(circle)
        position[circle] = np.arange(self.cohort)
        object.__setattr__(self, "_circle", circle)
        object.__setattr__(self, "_position", position)

    @property
    def is_complete(self) -> bool:
        """Say whether everyone is joined to everyone."""
        return self.degree == self.cohort - 1

    def neighbours(self, rank: int) -> Ranks:
        """Return the neighbours of a rank, increasing."""
        if self.is_complete:
            return np.delete(np.arange(self.cohort), rank)
        steps = np.arange(1, self.degree // 2 + 1)
        around = self._position[rank] + np.concatenate((-steps, steps))
        ranks: Ranks = self._circle[around % self.cohort]
        return np.sort(ranks)

    def holders(self, rank: int) -> Ranks:
        """Return who holds shares of a client's secrets, increasing: its neighbours and itself."""
        neighbours = self.neighbours(rank)
        return np.insert(neighbours, np.searchsorted(neighbours, rank), rank)

    def count_neighbours(self, present: NDArray[np.bool_]) -> Ranks:
        """Return how many neighbours of each rank are in a subset."""
        if self.is_complete:
            return np.count_nonzero(present) - present.astype(np.int64)
        reach, around = self.degree // 2, present[self._circle]
        sums = np.cumsum(np.concatenate(([0], around[-reach:], around, around[:reach])))
        windows: Ranks = sums[self.degree + 1 :] - sums[: self.cohort]  # itself included
        return windows[self._position] - present


def check_degree(cohort: int, degree: int) -> None:
    """Refuse a degree that no graph of this family has."""
    if cohort < 2:
        raise ConfigError(f"a cohort must have at least 2 clients, got {cohort}")
    if degree != cohort - 1 and not (2 <= degree < cohort - 1 and degree % 2 == 0):
        raise ConfigError(f"a degree must be even in [2, {cohort - 2}], or {cohort - 1} (complete), got {degree}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """What a graph must withstand, and how improbable a failure must be (as powers of one half, per round)."""

    dropouts: int
    colluders: int
    correctness_bits: int = 20
    security_bits: int = 40

    def __post_init__(self) -> None:
        for name, value in (("dropouts", self.dropouts), ("colluders", self.colluders)):
            if value < 0:
                raise ConfigError(f"{name} must be at least 0, got {value}")
        for name, value in (("correctness_bits", self.correctness_bits), ("security_bits", self.security_bits)):
            if not 1 <= value <= 256:
                raise ConfigError(f"{name} must be in [1, 256], got {value}")


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """How many neighbours a client has, and how many shares open one of its secrets."""

    degree: int
    threshold: int


def choose(cohort: int, risk: Risk) -> Neighbourhood:
    """Return the least neighbourhood that withstands the risk: complete up to 100 clients, sparse beyond.

    Guarantee: with the stated dropouts and colluders at random places, the chance that a secret cannot be opened
    is at most 2^-correctness_bits, and the chance that colluders alone open one, or that the honest survivors'
    graph falls apart, is at most 2^-security_bits. Always more than half of the holders are needed.
    Proof: docs/protocol.md#graph. Checked: test_graph.py::test_failures_are_no_more_frequent_than_their_bound.
    """
    if risk.dropouts + risk.colluders > cohort - 2:
        raise ConfigError(
            f"dropouts and colluders must leave 2 of {cohort} clients, got {risk.dropouts} and {risk.colluders}"
        )
    if cohort > COMPLETE_UP_TO:
        for degree in range(2, cohort - 1, 2):
            sparse = _least_threshold(cohort, degree, risk)
            if sparse is not None and unopened(cohort, sparse, risk.dropouts) <= Fraction(
                1, 1 << risk.correctness_bits
            ):
                return sparse
    return complete(cohort, risk)


def complete(cohort: int, risk: Risk) -> Neighbourhood:
    """Return the neighbourhood in which everyone holds a share of everyone's secrets."""
    threshold = max(cohort // 2 + 1, risk.colluders + 1)
    if threshold > cohort - risk.dropouts:
        raise ConfigError(
            f"{threshold} of {cohort} clients must be left to open a secret, got {risk.dropouts} dropouts"
        )
    return Neighbourhood(cohort - 1, threshold)


def unopened(cohort: int, neighbourhood: Neighbourhood, dropouts: int) -> Fraction:
    """Bound the chance that some client has fewer than `threshold` neighbours left."""
    spare = neighbourhood.degree - neighbourhood.threshold
    return min(Fraction(1), cohort * upper_tail(cohort - 1, dropouts, neighbourhood.degree, spare + 1))


def exposed(cohort: int, neighbourhood: Neighbourhood, risk: Risk) -> Fraction:
    """Bound the chance that colluders hold `threshold` shares of a client, or cut the honest survivors in two."""
    opened = cohort * upper_tail(cohort - 1, risk.colluders, neighbourhood.degree, neighbourhood.threshold)
    reach = neighbourhood.degree // 2
    lost = risk.dropouts + risk.colluders
    # A cut of the circle needs a run of `reach` lost places, and there are `cohort` places where a run may start.
    cut = cohort * Fraction(comb(lost, reach), comb(cohort, reach))
    return min(Fraction(1), opened + cut)


def upper_tail(population: int, marked: int, drawn: int, least: int) -> Fraction:
    """Return the exact chance that at least `least` of `drawn` out of a population are marked (hypergeometric)."""
    marked = min(marked, population)
    first = max(least, 0, drawn - (population - marked))
    hits = sum(
        comb(marked, hit) * comb(population - marked, drawn - hit) for hit in range(first, min(drawn, marked) + 1)
    )
    return Fraction(hits, comb(population, drawn))


def _least_threshold(cohort: int, degree: int, risk: Risk) -> Neighbourhood | None:
    """Return the neighbourhood with the least safe threshold above half of the holders, if there is one."""
    for threshold in range((degree + 1) // 2 + 1, degree + 1):
        neighbourhood = Neighbourhood(degree, threshold)
        if exposed(cohort, neighbourhood, risk) <= Fraction(1, 1 << risk.security_bits):
            return neighbourhood
    return None
