"""How many neighbours a client needs, and how many shares open a secret, to withstand a stated risk."""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import comb

from d2pfed.errors import ConfigError
from d2pfed.secagg.graph import graphs
from d2pfed.secagg.graph.bounds import least_cut_off, log_apart, log_cut, may_open
from d2pfed.secagg.graph.graphs import COMPLETE_UP_TO, Consistency
from d2pfed.secagg.graph.tails import upper_tail

GRINDING_BITS = 62  # a server tries at most 2^60 seeds, and three bounds are added up
SIGNED_BITS = 40 + GRINDING_BITS
MOST_OUT_NEIGHBOURS = 512  # a client with more does nearly the work of a complete graph


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
    """How many neighbours a client has, and how many shares open one of its secrets.

    Attributes:
        degree: number of others that hold shares of a client's secrets.
        threshold: number of shares that open one.
        cut_off: how many honest survivors a server can at most keep out of the sum in which they are listed.
    """

    degree: int
    threshold: int
    cut_off: int = 0


@lru_cache
def choose(cohort: int, risk: Risk, consistency: Consistency) -> Neighbourhood:
    """Return the least neighbourhood that withstands the risk: complete for small cohorts, sparse beyond.

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
        _check_one_statement(cohort, cohort - risk.dropouts, risk.colluders)
        return complete(cohort, risk) if cohort <= graphs.SIGNED_COMPLETE_UP_TO else _out_neighbours(cohort, risk)
    sparse = _least_circle(cohort, risk) if cohort > COMPLETE_UP_TO else None
    return complete(cohort, risk) if sparse is None else sparse


def complete(cohort: int, risk: Risk) -> Neighbourhood:
    """Return the neighbourhood in which everyone holds a share of everyone's secrets."""
    threshold = max(cohort // 2 + 1, risk.colluders + 1)
    if threshold > cohort - risk.dropouts:
        raise ConfigError(
            f"{threshold} of {cohort} clients must be left to open a secret, got {risk.dropouts} dropouts"
        )
    return Neighbourhood(cohort - 1, threshold)


@lru_cache
def check_bounds(cohort: int, neighbourhood: Neighbourhood, quorum: int, colluders: int) -> None:
    """Refuse a neighbourhood that does not withstand a server that lies, drops clients and tries seeds.

    Guarantee: with at most `colluders`, fixed before the graph, all that a server can open is one sum, of at least
    `quorum - colluders - cut_off` honest clients: always in a complete graph, otherwise except with chance 2^-40
    over 2^60 graphs. Proof: docs/protocol.md#graph.
    Checked: test_graph.py::test_what_a_server_opens_is_no_more_frequent_than_its_bounds.
    """
    degree, threshold, cut_off = neighbourhood.degree, neighbourhood.threshold, neighbourhood.cut_off
    if not 0 <= colluders < quorum <= cohort:
        raise ConfigError(f"quorum must be in [{colluders + 1}, {cohort}], got {quorum}")
    if cohort > graphs.SIGNED_UP_TO:
        raise ConfigError(
            f"signed consistency takes cohorts of at most {graphs.SIGNED_UP_TO} clients, got {cohort}"
        )
    _check_one_statement(cohort, quorum, colluders)
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


def _check_one_statement(cohort: int, quorum: int, colluders: int) -> None:
    """Refuse a quorum of which two, disjoint but for colluders, could sign different survivors."""
    if 2 * quorum <= cohort + colluders:
        raise ConfigError(
            f"quorum must be at least {(cohort + colluders) // 2 + 1} for {cohort} clients and {colluders} colluders, "
            f"got {quorum}"
        )


def _check_sparse_size(cohort: int, degree: int) -> None:
    if not graphs.SIGNED_COMPLETE_UP_TO < cohort <= graphs.SIGNED_UP_TO:
        raise ConfigError(
            f"a sparse graph under signed consistency needs more than {graphs.SIGNED_COMPLETE_UP_TO} and at most "
            f"{graphs.SIGNED_UP_TO} clients, got {cohort}"
        )
    most = min(MOST_OUT_NEIGHBOURS, cohort // 4)
    if not 1 <= degree <= most:
        raise ConfigError(f"out-neighbours must number in [1, {most}], got {degree}")


def _least_circle(cohort: int, risk: Risk) -> Neighbourhood | None:
    """Return the circle of least degree that withstands the risk, if there is one; more neighbours withstand more."""
    low, high, found = 0, 2, None  # the degree is above `low`, and `high` is the next to try
    while high < cohort - 1 and (found := _fitting(cohort, high, risk)) is None:
        low, high = high, min(2 * high, max(high + 2, (cohort - 2) // 2 * 2))
    while found is not None and high > low + 2:
        middle = (low + high) // 4 * 2
        fitting = _fitting(cohort, middle, risk)
        low, high, found = (middle, high, found) if fitting is None else (low, middle, fitting)
    return found


def _fitting(cohort: int, degree: int, risk: Risk) -> Neighbourhood | None:
    """Return the neighbourhood of this degree that withstands the risk, if there is one."""
    sparse = _least_threshold(cohort, degree, risk)
    if sparse is None or unopened(cohort, sparse, risk.dropouts) > Fraction(1, 1 << risk.correctness_bits):
        return None
    return sparse


def _least_threshold(cohort: int, degree: int, risk: Risk) -> Neighbourhood | None:
    """Return the neighbourhood with the least safe threshold above half of the holders, if there is one."""
    for threshold in range((degree + 1) // 2 + 1, degree + 1):
        neighbourhood = Neighbourhood(degree, threshold)
        if exposed(cohort, neighbourhood, risk) <= Fraction(1, 1 << risk.security_bits):
            return neighbourhood
    return None


def _out_neighbours(cohort: int, risk: Risk) -> Neighbourhood:
    """Return the fewest out-neighbours that withstand the risk, with the largest threshold that dropouts leave."""
    _check_sparse_size(cohort, 1)
    bits = risk.security_bits + GRINDING_BITS
    # With fewer honest survivors than half of the cohort, those could be one of its parts.
    if cohort - risk.dropouts - risk.colluders > cohort // 2:
        for degree in range(2, min(MOST_OUT_NEIGHBOURS, cohort // 4) + 1):
            threshold = _largest_threshold(cohort, degree, risk)
            if 2 * threshold <= degree + 1 or may_open(cohort, degree, threshold, risk.colluders, bits):
                continue
            apart = log_apart(cohort, degree, risk.dropouts, risk.colluders)
            cut_off = least_cut_off(apart, bits)
            if cut_off is not None and log_cut(cohort, degree, threshold, risk.colluders, apart) <= -bits:
                return Neighbourhood(degree, threshold, cut_off)
    raise ConfigError(
        f"no sparse graph of {cohort} clients withstands {risk.dropouts} dropouts and {risk.colluders} colluders: "
        f"at most {graphs.SIGNED_COMPLETE_UP_TO} clients are a complete graph"
    )


def _largest_threshold(cohort: int, degree: int, risk: Risk) -> int:
    """Return the most shares that dropouts at random places leave everyone, but for 2^-correctness_bits."""
    allowed = comb(cohort - 1, degree) // (cohort << risk.correctness_bits)
    lost, ways = degree + 1, 0
    while ways <= allowed:  # the ways to lose any number of neighbours are all there are
        lost -= 1
        ways += comb(risk.dropouts, lost) * comb(cohort - 1 - risk.dropouts, degree - lost)
    return degree - lost
