"""How many neighbors a client needs, and how many shares open a secret, to withstand a stated risk."""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import comb, inf, lgamma, log, log2

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.secagg.checks import check_rules
from d2pfed.secagg.pairwise import graph as graphs
from d2pfed.secagg.pairwise.graph import COMPLETE_UP_TO, Consistency
from d2pfed.secagg.pairwise.session import require_one_view

GRINDING_BITS = 62  # a server tries at most 2^60 seeds, and three bounds are added up
SIGNED_BITS = 40 + GRINDING_BITS
MOST_OUT_NEIGHBORS = 512  # a client with more does nearly the work of a complete graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """What a graph must withstand, and how improbable a failure must be (as powers of one half, per round)."""

    dropouts: int
    colluders: int
    correctness_bits: int = 20
    security_bits: int = 40

    def __post_init__(self) -> None:
        bits = self.correctness_bits, self.security_bits
        check_rules(
            (self.dropouts >= 0, f"dropouts must be at least 0, got {self.dropouts}"),
            (self.colluders >= 0, f"colluders must be at least 0, got {self.colluders}"),
            (1 <= min(bits) <= max(bits) <= 256, f"correctness and security bits must be in [1, 256], got {bits}"),
        )


@dataclass(frozen=True, slots=True)
class Neighborhood:
    """How many neighbors a client has, and how many shares open one of its secrets.

    Attributes:
        degree: number of others that hold shares of a client's secrets.
        threshold: number of shares that open one.
        cut_off: how many honest survivors a server can at most keep out of the sum in which they are listed.
    """

    degree: int
    threshold: int
    cut_off: int = 0


@lru_cache
def choose(cohort: int, risk: Risk, consistency: Consistency) -> Neighborhood:
    """Return the least neighborhood that withstands the risk: complete for small cohorts, sparse beyond.

    Guarantee under `assumed`: with the stated dropouts and colluders at random places, the chance that a secret
    cannot be opened is at most 2^-correctness_bits, and the chance that colluders alone open one, or that the honest
    survivors' graph falls apart, is at most 2^-security_bits. Under `signed` the dropouts are the server's choice,
    with `quorum = cohort - dropouts`: see `check_bounds`. Always more than half of the holders are needed.
    Proof: docs/protocol.md#graph. Checked: test_graph.py::test_failures_are_no_more_frequent_than_their_bound.
    """
    if risk.dropouts + risk.colluders > cohort - 2:
        raise ConfigError(
            f"dropouts and colluders must leave 2 of {cohort} clients, got {risk.dropouts} and {risk.colluders}"
        )
    if consistency is Consistency.SIGNED:
        require_one_view(cohort, cohort - risk.dropouts, risk.colluders)
        return complete(cohort, risk) if cohort <= graphs.SIGNED_COMPLETE_UP_TO else _out_neighbors(cohort, risk)
    sparse = _least_circle(cohort, risk) if cohort > COMPLETE_UP_TO else None
    return complete(cohort, risk) if sparse is None else sparse


def complete(cohort: int, risk: Risk) -> Neighborhood:
    """Return the neighborhood in which everyone holds a share of everyone's secrets."""
    threshold = max(cohort // 2 + 1, risk.colluders + 1)
    if threshold > cohort - risk.dropouts:
        raise ConfigError(
            f"{threshold} of {cohort} clients must be left to open a secret, got {risk.dropouts} dropouts"
        )
    return Neighborhood(cohort - 1, threshold)


@lru_cache
def check_bounds(cohort: int, neighborhood: Neighborhood, quorum: int, colluders: int) -> None:
    """Refuse a neighborhood that does not withstand a server that lies, drops clients and tries seeds.

    Guarantee: with at most `colluders`, fixed before the graph, all that a server can open is one sum, of at least
    `quorum - colluders - cut_off` honest clients: always in a complete graph, otherwise except with chance 2^-40
    over 2^60 graphs. Proof: docs/protocol.md#graph.
    Checked: test_graph.py::test_what_a_server_opens_is_no_more_frequent_than_its_bounds.
    """
    degree, threshold, cut_off = neighborhood.degree, neighborhood.threshold, neighborhood.cut_off
    if not 0 <= colluders < quorum <= cohort:
        raise ConfigError(f"quorum must be in [{colluders + 1}, {cohort}], got {quorum}")
    if cohort > graphs.SIGNED_UP_TO:
        raise ConfigError(
            f"signed consistency takes cohorts of at most {graphs.SIGNED_UP_TO} clients, got {cohort}"
        )
    require_one_view(cohort, quorum, colluders)
    if not degree + 1 < 2 * threshold <= 2 * (degree + 1):
        raise ConfigError(f"threshold must be in [{(degree + 1) // 2 + 1}, {degree + 1}], got {threshold}")
    if degree == cohort - 1:
        if not colluders < threshold <= quorum:
            raise ConfigError(f"threshold must be in [{colluders + 1}, {quorum}], got {threshold}")
        return
    _check_sparse_size(cohort, degree)
    if may_open(cohort, degree, threshold, colluders, SIGNED_BITS):
        raise ConfigError(
            f"{colluders} colluders may hold {threshold} of {degree} shares of one of {cohort} clients"
        )
    apart = log_apart(cohort, degree, cohort - quorum, colluders)
    least = least_cut_off(apart, SIGNED_BITS)
    if least is None or least > cut_off:
        raise ConfigError(
            f"a server may keep {'many' if least is None else least} honest survivors out, got {cut_off}"
        )
    if log_cut(cohort, degree, threshold, colluders, apart) > -SIGNED_BITS:
        raise ConfigError(
            f"a server may open a part of {cohort} clients, got degree {degree}, threshold {threshold}, quorum {quorum}"
            f" and {colluders} colluders"
        )


def unopened(cohort: int, neighborhood: Neighborhood, dropouts: int) -> Fraction:
    """Bound the chance that some client has fewer than `threshold` neighbors left."""
    spare = neighborhood.degree - neighborhood.threshold
    return min(Fraction(1), cohort * upper_tail(cohort - 1, dropouts, neighborhood.degree, spare + 1))


def exposed(cohort: int, neighborhood: Neighborhood, risk: Risk) -> Fraction:
    """Bound the chance that colluders hold `threshold` shares of a client, or cut the honest survivors in two."""
    opened = cohort * upper_tail(cohort - 1, risk.colluders, neighborhood.degree, neighborhood.threshold)
    reach = neighborhood.degree // 2
    lost = risk.dropouts + risk.colluders
    # A cut of the circle needs a run of `reach` lost places, and there are `cohort` places where a run may start.
    cut = cohort * Fraction(comb(lost, reach), comb(cohort, reach))
    return min(Fraction(1), opened + cut)


def _check_sparse_size(cohort: int, degree: int) -> None:
    if not graphs.SIGNED_COMPLETE_UP_TO < cohort <= graphs.SIGNED_UP_TO:
        raise ConfigError(
            f"a sparse graph under signed consistency needs more than {graphs.SIGNED_COMPLETE_UP_TO} and at most "
            f"{graphs.SIGNED_UP_TO} clients, got {cohort}"
        )
    most = min(MOST_OUT_NEIGHBORS, cohort // 4)
    if not 1 <= degree <= most:
        raise ConfigError(f"out-neighbors must number in [1, {most}], got {degree}")


def _least_circle(cohort: int, risk: Risk) -> Neighborhood | None:
    """Return the circle of least degree that withstands the risk, if there is one; more neighbors withstand more."""
    low, high, found = 0, 2, None  # the degree is above `low`, and `high` is the next to try
    while high < cohort - 1 and (found := _fitting(cohort, high, risk)) is None:
        low, high = high, min(2 * high, max(high + 2, (cohort - 2) // 2 * 2))
    while found is not None and high > low + 2:
        middle = (low + high) // 4 * 2
        fitting = _fitting(cohort, middle, risk)
        low, high, found = (middle, high, found) if fitting is None else (low, middle, fitting)
    return found


def _fitting(cohort: int, degree: int, risk: Risk) -> Neighborhood | None:
    """Return the neighborhood of this degree with the least safe threshold, if it withstands the risk."""
    for threshold in range((degree + 1) // 2 + 1, degree + 1):
        sparse = Neighborhood(degree, threshold)
        if exposed(cohort, sparse, risk) <= Fraction(1, 1 << risk.security_bits):
            is_open = unopened(cohort, sparse, risk.dropouts) <= Fraction(1, 1 << risk.correctness_bits)
            return sparse if is_open else None
    return None


def _out_neighbors(cohort: int, risk: Risk) -> Neighborhood:
    """Return the fewest out-neighbors that withstand the risk, with the largest threshold that dropouts leave."""
    _check_sparse_size(cohort, 1)
    bits = risk.security_bits + GRINDING_BITS
    # With fewer honest survivors than half of the cohort, those could be one of its parts.
    if cohort - risk.dropouts - risk.colluders > cohort // 2:
        for degree in range(2, min(MOST_OUT_NEIGHBORS, cohort // 4) + 1):
            threshold = _largest_threshold(cohort, degree, risk)
            if 2 * threshold <= degree + 1 or may_open(cohort, degree, threshold, risk.colluders, bits):
                continue
            apart = log_apart(cohort, degree, risk.dropouts, risk.colluders)
            cut_off = least_cut_off(apart, bits)
            if cut_off is not None and log_cut(cohort, degree, threshold, risk.colluders, apart) <= -bits:
                return Neighborhood(degree, threshold, cut_off)
    raise ConfigError(
        f"no sparse graph of {cohort} clients withstands {risk.dropouts} dropouts and {risk.colluders} colluders: "
        f"at most {graphs.SIGNED_COMPLETE_UP_TO} clients are a complete graph"
    )


def _largest_threshold(cohort: int, degree: int, risk: Risk) -> int:
    """Return the most shares that dropouts at random places leave everyone, but for 2^-correctness_bits."""
    allowed = comb(cohort - 1, degree) // (cohort << risk.correctness_bits)
    lost, ways = degree + 1, 0
    while ways <= allowed:  # the ways to lose any number of neighbors are all there are
        lost -= 1
        ways += comb(risk.dropouts, lost) * comb(cohort - 1 - risk.dropouts, degree - lost)
    return degree - lost


Logs = NDArray[np.float64]  # logarithms to base 2

_EXACT_UP_TO = 1_000  # clients of a cohort: for larger ones integers grow long

COHORT_BITS = 40  # a cohort with more colluders than counted on is this improbable, as a power of one half


def upper_tail(population: int, marked: int, drawn: int, least: int) -> Fraction:
    """Return the exact chance that at least `least` of `drawn` out of a population are marked (hypergeometric)."""
    marked = min(marked, population)
    first = max(least, 0, drawn - (population - marked))
    hits = sum(
        comb(marked, hit) * comb(population - marked, drawn - hit) for hit in range(first, min(drawn, marked) + 1)
    )
    return Fraction(hits, comb(population, drawn))


@lru_cache(maxsize=4)
def log_factorials(largest: int) -> Logs:
    """Return log2 of 0!, 1!, ... up to `largest`!; sums of a few of them are right to 2^-30 for 100,000."""
    return np.array([lgamma(number + 1) / log(2) for number in range(largest + 1)])


def log_choose(factorials: Logs, items: NDArray[np.int64], taken: NDArray[np.int64] | int) -> Logs:
    """Return log2 of binomial coefficients, minus infinity where nothing can be chosen."""
    left = items - taken
    possible = (left >= 0) & (items >= 0)
    logs = factorials[np.maximum(items, 0)] - factorials[taken] - factorials[np.maximum(left, 0)]
    return np.where(possible, logs, -np.inf)


def log_upper_tails(factorials: Logs, population: int, marked: NDArray[np.int64], drawn: int, least: int) -> Logs:
    """Return log2 of `upper_tail` for many numbers of marked ones."""
    marked = np.minimum(marked, population)[:, None]
    hits = np.arange(least, drawn + 1)
    terms = log_choose(factorials, marked, hits) + log_choose(factorials, population - marked, drawn - hits)
    hit: Logs = np.logaddexp2.reduce(terms, axis=-1)
    return np.minimum(hit - log_choose(factorials, np.array(population), drawn), 0.0)


@lru_cache
def colluders_in_cohort(population: int, colluding: int, cohort: int, draws: int) -> int:
    """Return the least number of colluders that no cohort exceeds, whichever of its draws a server uses.

    Guarantee: among `draws` cohorts, drawn uniformly from a population of which `colluding` collude, one with more
    is there with chance at most 2^-40 (exact, by integers, up to cohorts of 1,000). Without verified draws (0) the
    server picks the cohort, and all of it but one client may collude.
    Proof: docs/protocol.md#draws. Checked: test_graph.py::test_colluders_in_a_cohort_are_those_of_the_table.
    """
    if not 0 <= colluding <= population or not 1 <= cohort <= population or draws < 0:
        raise ConfigError(
            f"colluders in [0, {population}], a cohort in [1, {population}] and at least 0 draws are needed, "
            f"got {colluding}, {cohort} and {draws}"
        )
    if draws == 0:
        return min(colluding, cohort - 1)
    if cohort > _EXACT_UP_TO:
        return _colluders_by_logs(population, colluding, cohort, draws)
    honest, hit = population - colluding, min(cohort, colluding)
    allowed = comb(population, cohort) >> COHORT_BITS  # rounded down: the safe side
    # The ways to draw exactly `hit` colluders, from the most downwards, each from the one before.
    ways = comb(colluding, hit) * comb(honest, cohort - hit)
    above = 0
    while (above := above + ways * draws) <= allowed:
        ways = ways * hit * (honest - cohort + hit) // ((colluding - hit + 1) * (cohort - hit + 1))
        hit -= 1
    return hit


def _colluders_by_logs(population: int, colluding: int, cohort: int, draws: int) -> int:
    """Return the same where integers would be millions of bits long: the answer, or at worst one more."""
    honest = population - colluding
    everything = _log_ways(population, cohort)
    allowed = -COHORT_BITS - log2(draws) - 2.0**-7  # lgamma of 10^9 is right to 2^-17, and there are nine of them
    above, least = -inf, max(0, cohort - honest)
    for hit in range(min(cohort, colluding), least, -1):
        term = _log_ways(colluding, hit) + _log_ways(honest, cohort - hit) - everything
        largest = max(above, term)
        above = largest + log2(2.0 ** (above - largest) + 2.0 ** (term - largest))
        if above > allowed:
            return hit
    return least


def _log_ways(items: int, taken: int) -> float:
    return (lgamma(items + 1) - lgamma(taken + 1) - lgamma(items - taken + 1)) / log(2)


def may_open(n: int, k: int, t: int, c: int, bits: int) -> bool:
    """Say whether colluders hold t shares of somebody with a chance above 2^-bits (exactly)."""
    tail = upper_tail(n - 1, c, k, t)
    return n * tail.numerator << bits > tail.denominator


@lru_cache(maxsize=32)
def log_apart(n: int, k: int, d: int, c: int) -> Logs:
    """Bound, for s = 1 .. n/2, the chance that some s honest survivors have no edge to the s' others.

    Union over the s and over the d that drop out; each of the s avoids s' others and each of the s' avoids s.
    Where no others are left, nothing is bounded: infinity.
    """
    logs, s = log_factorials(n), np.arange(1, n // 2 + 1)
    rest = n - c - s - d
    others = np.maximum(rest, 1)
    everything = log_choose(logs, np.array(n - 1), k)
    avoid_others = log_choose(logs, n - 1 - others, k) - everything
    avoid_part = log_choose(logs, n - 1 - s, k) - everything
    sets = log_choose(logs, np.array(n), s) + log_choose(logs, n - s, d)
    return np.where(rest < 1, np.inf, sets + s * avoid_others + others * avoid_part)


def least_cut_off(apart: Logs, bits: int) -> int | None:
    """Return s0 - 1, for the least s0 such that s0 or more are cut off with chance at most 2^-bits.

    Parts are put together to one of s0 to n/2 clients, which needs 4 s0 <= n; None if there is no such s0.
    """
    loose = np.logaddexp2.accumulate(apart[::-1])[::-1]  # of s or more
    fitting = np.flatnonzero(loose <= -bits)
    if not fitting.size or 2 * (int(fitting[0]) + 1) > apart.size:
        return None
    return int(fitting[0])


def log_cut(n: int, k: int, t: int, c: int, apart: Logs) -> float:
    """Bound the chance that some part of at most half of the clients is cut off and can be opened.

    To be opened, each of its s members has t out-neighbors in the part or among the colluders.
    """
    logs, s = log_factorials(n), np.arange(1, n // 2 + 1)
    opened = log_choose(logs, np.array(n), s) + s * log_upper_tails(logs, n - 1, s - 1 + c, k, t)
    return float(np.logaddexp2.reduce(np.minimum(opened, apart)))
