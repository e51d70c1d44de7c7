"""The graphs of secure aggregation: who holds whose shares, and who shares masks with whom."""

from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError, TooFewClients
from d2pfed.numerics.compiled import compiled
from d2pfed.numerics.randomness import Stream

COMPLETE_UP_TO = 100  # below this size a complete graph costs little, and nothing is left to chance
SIGNED_COMPLETE_UP_TO = 1_000  # the same where the server may choose who drops out
SIGNED_UP_TO = 20_000  # each client checks a signature of every survivor

Ranks = NDArray[np.int64]

_ROWS = 256  # rows of words at a time: about half a megabyte


class Consistency(Enum):
    """How a client knows that all others were told of the same survivors."""

    ASSUMED = "assumed"  # the server is curious but keeps to the protocol
    SIGNED = "signed"  # enrolled clients sign their keys and what they were told


def _partners(graph: "Graph", rank: int) -> Ranks:
    """Return with whom a client shares masks: whoever holds its shares, or has it hold theirs."""
    around = np.union1d(graph.holders(rank), graph.held_by(rank))
    return np.setdiff1d(around, [rank], assume_unique=True)


@dataclass(frozen=True, slots=True)
class Complete:
    """Everyone is joined to everyone."""

    cohort: int

    def holders(self, rank: int) -> Ranks:  # noqa: ARG002 - the same for all
        """Return everyone."""
        return np.arange(self.cohort)

    held_by = holders

    partners = _partners

    def count_holders(self, present: NDArray[np.bool_]) -> Ranks:
        """Return for each rank how many others are in a subset."""
        return np.count_nonzero(present) - present.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Circle:
    """A Harary graph on a public random circle, for dropouts that do not look at the graph.

    The clients' places on the circle are a permutation drawn from the public seed, and each is joined to the
    `degree / 2` next ones on either side, so that its neighbors are a uniform subset of the others. A server that
    picks dropouts can cut an arc out of it: only for one that keeps to the protocol.
    """

    cohort: int
    degree: int
    seed: bytes
    _circle: Ranks = field(init=False, repr=False, compare=False)  # rank at each position
    _position: Ranks = field(init=False, repr=False, compare=False)  # position of each rank

    def __post_init__(self) -> None:
        if not 2 <= self.degree < self.cohort - 1 or self.degree % 2:
            raise ConfigError(f"a circle's degree must be even in [2, {self.cohort - 2}], got {self.degree}")
        words = Stream(self.seed).words(self.cohort)
        circle = np.argsort(words, kind="stable")  # so that even equal words would give one order
        position = np.empty_like(circle)
        position[circle] = np.arange(self.cohort)
        object.__setattr__(self, "_circle", circle)
        object.__setattr__(self, "_position", position)

    def holders(self, rank: int) -> Ranks:
        """Return a client's neighbors and itself."""
        reach = self.degree // 2
        around = self._position[rank] + np.arange(-reach, reach + 1)
        ranks: Ranks = self._circle[around % self.cohort]
        return np.sort(ranks)

    held_by = holders  # neighbors hold each other's shares

    partners = _partners

    def count_holders(self, present: NDArray[np.bool_]) -> Ranks:
        """Return for each rank how many neighbors are in a subset."""
        reach, around = self.degree // 2, present[self._circle]
        sums = np.cumsum(np.concatenate(([0], around[-reach:], around, around[:reach])))
        windows: Ranks = sums[self.degree + 1 :] - sums[: self.cohort]  # itself included
        return windows[self._position] - present


@dataclass(frozen=True, slots=True)
class OutNeighbors:
    """Every client has `degree` out-neighbors, drawn uniformly and independently from a public seed.

    They hold its shares; masks are shared with out- and in-neighbors. Nobody can choose them, so the union bounds
    of `check_bounds` hold for a server that picks dropouts with the graph in hand.
    """

    cohort: int
    degree: int
    seed: bytes
    _holders: NDArray[np.int32] = field(init=False, repr=False, compare=False)  # a row per rank, increasing
    _owners: NDArray[np.int32] = field(init=False, repr=False, compare=False)  # by holder, increasing
    _starts: Ranks = field(init=False, repr=False, compare=False)  # where each holder's owners begin

    def __post_init__(self) -> None:
        if not 1 <= self.degree < self.cohort - 1:
            raise ConfigError(f"out-neighbors must number in [1, {self.cohort - 2}], got {self.degree}")
        stream, width = Stream(self.seed), 2 * self.degree + 64
        holders = np.empty((self.cohort, self.degree + 1), np.int32)
        found = np.full(self.cohort, self.cohort, np.int32)  # no rank
        for first in range(0, self.cohort, _ROWS):
            rows = holders[first : first + _ROWS]
            words = stream.words(len(rows) * width).reshape(-1, width)
            if _first_distinct(words, first, rows, found) < len(rows):
                raise TooFewClients(f"a client has fewer than {self.degree} out-neighbors: the attempt is void")
        holders.sort(axis=1)
        order = np.argsort(holders, axis=None, kind="stable")  # by holder, then by owner
        counts = np.bincount(holders.ravel(), minlength=self.cohort)
        object.__setattr__(self, "_holders", holders)
        object.__setattr__(self, "_owners", (order // (self.degree + 1)).astype(np.int32))
        object.__setattr__(self, "_starts", np.concatenate(([0], np.cumsum(counts))))

    def holders(self, rank: int) -> Ranks:
        """Return a client's out-neighbors and itself."""
        ranks: Ranks = self._holders[rank].astype(np.int64)
        return ranks

    def held_by(self, rank: int) -> Ranks:
        """Return a client's in-neighbors and itself."""
        return self._owners[self._starts[rank] : self._starts[rank + 1]].astype(np.int64)

    partners = _partners

    def count_holders(self, present: NDArray[np.bool_]) -> Ranks:
        """Return for each rank how many out-neighbors are in a subset."""
        counts: Ranks = np.count_nonzero(present[self._holders], axis=1) - present.astype(np.int64)
        return counts


# Who holds whose shares, and who shares masks with whom, by the ranks of a cohort. `holders` and `held_by` include the
# client itself and are increasing; points of shares count from 1 among the holders.
Graph = Complete | Circle | OutNeighbors


@lru_cache(maxsize=4)  # the clients of a simulation ask for the same one
def make_graph(cohort: int, degree: int, consistency: Consistency, seed: bytes) -> Graph:
    """Return the graph of a cohort: complete if the degree says so, else the sparse one that withstands the server.

    Guarantee: under `signed` never a circle, and nothing sparse up to 1,000 clients.
    Checked: test_graph.py::test_a_server_that_may_cheat_never_gets_a_circle.
    """
    if cohort < 2:
        raise ConfigError(f"a cohort must have at least 2 clients, got {cohort}")
    if consistency is Consistency.SIGNED and cohort > SIGNED_UP_TO:
        raise ConfigError(f"signed consistency takes cohorts of at most {SIGNED_UP_TO} clients, got {cohort}")
    if degree == cohort - 1:
        return Complete(cohort)
    if consistency is Consistency.ASSUMED:
        return Circle(cohort, degree, seed)
    if cohort <= SIGNED_COMPLETE_UP_TO:
        raise ConfigError(
            f"under signed consistency {cohort} clients need a complete graph: degree {cohort - 1}, got {degree}"
        )
    return OutNeighbors(cohort, degree, seed)


@compiled
def _first_distinct(
    words: NDArray[np.uint64], first: int, rows: NDArray[np.int32], found: NDArray[np.int32]
) -> int:
    """Fill each row with the first distinct others that its words name, then itself; return how many are full."""
    others, half = np.uint64(found.size - 1), np.uint64(32)
    low = (np.uint64(1) << half) - np.uint64(1)
    wanted = rows.shape[1] - 1
    for row in range(rows.shape[0]):
        rank, count, place = first + row, 0, 0
        while count < wanted:
            if place == words.shape[1]:
                return row
            word = words[row, place]
            place += 1
            # floor(word * others / 2^64), in halves of 32 bits that do not overflow
            other = np.int32(((word >> half) * others + ((word & low) * others >> half)) >> half)
            if other >= rank:
                other += 1
            if found[other] != rank:
                found[other] = rank
                rows[row, count] = other
                count += 1
        rows[row, wanted] = rank
    return len(rows)
