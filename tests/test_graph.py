from fractions import Fraction
from itertools import combinations
from math import comb, log2

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, chi2, hypergeom

from d2pfed.errors import ConfigError, TooFewClients
from d2pfed.numerics.randomness import digest
from d2pfed.secagg.pairwise import graph as graphs
from d2pfed.secagg.pairwise import neighbors as neighborhood
from d2pfed.secagg.pairwise.graph import Circle, Complete, Consistency, OutNeighbors, make_graph
from d2pfed.secagg.pairwise.neighbors import (
    Neighborhood,
    Risk,
    _largest_threshold,
    check_bounds,
    choose,
    colluders_in_cohort,
    exposed,
    least_cut_off,
    log_apart,
    log_cut,
    log_factorials,
    log_upper_tails,
    may_open,
    unopened,
    upper_tail,
)

sizes = st.integers(2, 40).flatmap(
    lambda size: st.tuples(
        st.just(size), st.sampled_from([size - 1, *(degree for degree in range(2, size - 1, 2))])
    )
)


@given(sizes, st.binary(max_size=4))
def test_complete_and_circular_graphs_are_regular_and_mutual(size_and_degree, seed):
    size, degree = size_and_degree
    graph = make_graph(size, degree, Consistency.ASSUMED, digest(seed))
    lists = [graph.partners(rank).tolist() for rank in range(size)]
    for rank, neighbours in enumerate(lists):
        assert neighbours == sorted(set(neighbours) - {rank})
        assert len(neighbours) == degree
        assert all(rank in lists[other] for other in neighbours)
        assert graph.holders(rank).tolist() == graph.held_by(rank).tolist() == sorted([*neighbours, rank])
        assert graph.cohort == size


@given(sizes, st.randoms(use_true_random=False))
def test_the_others_that_hold_shares_are_counted(size_and_degree, chance):
    size, degree = size_and_degree
    present = np.array([chance.random() < 0.6 for _ in range(size)])
    made = [make_graph(size, degree, Consistency.ASSUMED, digest("counted"))]
    if degree < size - 1:
        made.append(OutNeighbors(size, min(degree, size // 2), digest("counted")))
    for graph in made:
        others = [set(graph.holders(rank).tolist()) - {rank} for rank in range(size)]
        assert graph.count_holders(present).tolist() == [sum(present[list(each)]) for each in others]


@given(sizes)
def test_a_graph_is_connected(size_and_degree):
    size, degree = size_and_degree
    graph = make_graph(size, degree, Consistency.ASSUMED, digest("connected"))
    assert len(reached(graph, set(range(size)))) == size


def reached(graph, alive):
    start = min(alive)
    seen, frontier = {start}, [start]
    while frontier:
        new = set(graph.partners(frontier.pop()).tolist()) & alive - seen
        seen |= new
        frontier += new
    return seen


def test_every_pair_is_joined_equally_often():
    size, degree, trials = 12, 4, 4000
    counts = np.zeros(size)
    for trial in range(trials):
        counts[make_graph(size, degree, Consistency.ASSUMED, digest("pairs", trial)).partners(0)] += 1
    expected = trials * degree / (size - 1)
    variance = expected * (1 - degree / (size - 1))
    statistic = ((counts[1:] - expected) ** 2 / variance).sum() * (size - 2) / (size - 1)
    assert statistic < chi2.isf(1e-6, size - 2)


def second_out_neighbors(size, degree, seed):
    """The definition once more: exact integers, one row of keystream after the other."""
    width = 2 * degree + 64
    keystream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor().update(bytes(8 * size * width))
    rows = []
    for rank in range(size):
        row = []
        for place in range(rank * width, (rank + 1) * width):
            other = int.from_bytes(keystream[8 * place : 8 * place + 8], "little") * (size - 1) >> 64
            other += other >= rank
            if other not in row and len(row) < degree:
                row.append(other)
        assert len(row) == degree
        rows.append(row)
    return rows


@pytest.mark.parametrize(("size", "degree"), [(3, 1), (12, 3), (14, 7), (300, 40), (1_001, 60)])
def test_a_second_implementation_draws_the_same_out_neighbors(size, degree):
    graph = OutNeighbors(size, degree, digest("second", size))
    rows = second_out_neighbors(size, degree, digest("second", size))
    for rank in range(size):
        inwards = {other for other in range(size) if rank in rows[other]}
        assert graph.holders(rank).tolist() == sorted([*rows[rank], rank])
        assert graph.held_by(rank).tolist() == sorted([*inwards, rank])
        assert graph.partners(rank).tolist() == sorted(inwards | set(rows[rank]))


def test_words_at_the_ends_of_their_range_name_the_first_and_the_last():
    """Halves of 32 bits must carry as whole words do."""
    size = 20_000
    words = [0, 2**64 - 1, 2**32 - 1, 2**32, (2**64 * 7 - 1) // (size - 1), -(-(2**64) * 7 // (size - 1))]
    rows = np.empty((1, len({word * (size - 1) >> 64 for word in words}) + 1), np.int32)
    graphs._first_distinct(np.array([words], np.uint64), 5, rows, np.full(size, -1, np.int32))
    expected = dict.fromkeys(other + (other >= 5) for other in (word * (size - 1) >> 64 for word in words))
    assert rows[0].tolist() == [*expected, 5]
    assert size - 1 in expected


def test_rows_of_out_neighbors_are_uniform_and_independent():
    """Each pair of rows of 5 clients with 2 out-neighbours: all 36 pairs of subsets equally often, for any ranks."""
    trials, subsets = 6_000, {}
    counts = {pair: np.zeros((6, 6)) for pair in ((0, 1), (0, 4), (2, 3))}
    for trial in range(trials):
        graph = OutNeighbors(5, 2, digest("rows", trial))
        for (left, right), table in counts.items():
            cells = []
            for rank in (left, right):
                row = tuple(graph.holders(rank).tolist())
                cells.append(subsets.setdefault(rank, {}).setdefault(row, len(subsets[rank])))
            table[tuple(cells)] += 1
    for table in counts.values():
        statistic = ((table - trials / 36) ** 2).sum() / (trials / 36)
        assert statistic < chi2.isf(1e-6, 35)


def test_the_check_of_rows_sees_an_out_neighbor_that_is_never_the_last():
    table = np.array([1.2, 1.2, 1.2, 0.8, 0.8, 0.8]) * 1_000
    assert ((table - 1_000) ** 2 / 1_000).sum() > chi2.isf(1e-6, 35)


def test_a_row_without_enough_distinct_names_voids_the_attempt():
    with pytest.raises(TooFewClients, match="fewer than 198 out-neighbors: the attempt is void"):
        OutNeighbors(200, 198, bytes(32))


@pytest.mark.parametrize(("size", "degree"), [(1, 0), (10, 0), (10, 9), (10, -1)])
def test_impossible_out_neighbors_are_refused(size, degree):
    with pytest.raises(ConfigError):
        OutNeighbors(size, degree, bytes(32))


def test_clients_of_one_session_share_one_graph():
    made = [make_graph(1_200, 30, Consistency.SIGNED, digest("session")) for _ in range(2)]
    assert made[0] is made[1]


@pytest.mark.parametrize("graph", [Circle(1_000, 40, digest("shown")), OutNeighbors(1_000, 40, digest("shown"))])
def test_a_graph_shows_what_it_was_made_of_and_not_its_edges(graph):
    made = f"cohort=1000, degree=40, seed={graph.seed!r}"
    assert repr(graph) == f"{type(graph).__name__}({made})"


def test_another_seed_gives_another_graph():
    graphs = {
        tuple(make_graph(30, 4, Consistency.ASSUMED, digest("seed", seed)).partners(0).tolist())
        for seed in range(20)
    }
    assert len(graphs) > 15


@pytest.mark.parametrize(("size", "degree"), [(1, 0), (10, 0), (10, 3), (10, 10), (10, -2), (10, 7)])
def test_a_degree_of_no_graph_is_refused(size, degree):
    with pytest.raises(ConfigError):
        make_graph(size, degree, Consistency.ASSUMED, bytes(32))


@given(st.integers(1, 60), st.data())
def test_tails_are_exact(population, data):
    marked = data.draw(st.integers(0, population))
    drawn = data.draw(st.integers(0, population))
    least = data.draw(st.integers(-1, population + 1))
    exact = upper_tail(population, marked, drawn, least)
    assert float(exact) == pytest.approx(hypergeom(population, marked, drawn).sf(least - 1), abs=1e-12)


@pytest.mark.parametrize("size", [2, 10, 100])
def test_small_cohorts_are_complete_with_a_majority(size):
    assert choose(size, Risk(dropouts=0, colluders=0), Consistency.ASSUMED) == Neighborhood(
        size - 1, size // 2 + 1
    )


def test_colluders_raise_the_threshold_of_a_complete_graph():
    assert choose(10, Risk(dropouts=1, colluders=7), Consistency.ASSUMED).threshold == 8


@pytest.mark.parametrize(("size", "dropouts", "colluders"), [(10, 5, 0), (10, 4, 6), (10, 2, 8), (3, 0, 2)])
def test_a_risk_that_no_graph_withstands_is_refused(size, dropouts, colluders):
    with pytest.raises(ConfigError):
        choose(size, Risk(dropouts=dropouts, colluders=colluders), Consistency.ASSUMED)


@pytest.mark.parametrize(
    "change", [{"dropouts": -1}, {"colluders": -1}, {"security_bits": 0}, {"correctness_bits": 257}]
)
def test_a_risk_without_sense_is_refused(change):
    with pytest.raises(ConfigError):
        Risk(**({"dropouts": 1, "colluders": 1} | change))


@pytest.mark.parametrize(
    ("size", "dropouts", "colluders"),
    [(101, 10, 10), (110, 30, 30), (120, 25, 30), (1000, 100, 100), (10_000, 1000, 1000)],
)
def test_the_chosen_degree_keeps_its_promise_and_is_the_least(size, dropouts, colluders):
    risk = Risk(dropouts=dropouts, colluders=colluders)
    chosen = choose(size, risk, Consistency.ASSUMED)
    assert chosen.degree < size - 1
    assert 2 * chosen.threshold > chosen.degree + 1
    assert unopened(size, chosen, dropouts) <= Fraction(1, 2**20)
    assert exposed(size, chosen, risk) <= Fraction(1, 2**40)
    for threshold in range(chosen.degree // 2, chosen.degree - 1):
        fewer = Neighborhood(chosen.degree - 2, threshold)
        fits = unopened(size, fewer, dropouts) <= Fraction(1, 2**20) and exposed(size, fewer, risk) <= Fraction(
            1, 2**40
        )
        assert not fits or 2 * threshold <= chosen.degree - 1


def failures(size, chosen, risk, trials):
    """How often some secret cannot be opened, and how often colluders open one or cut the graph."""
    unopened_count = exposed_count = 0
    for trial in range(trials):
        graph = make_graph(size, chosen.degree, Consistency.ASSUMED, digest("trial", trial))
        lists = [set(graph.partners(rank).tolist()) for rank in range(size)]
        dropped = set(range(risk.dropouts))  # the graph is random, so any fixed clients will do
        colluding = set(range(size - risk.colluders, size))
        unopened_count += any(len(neighbours - dropped) < chosen.threshold for neighbours in lists)
        honest = set(range(size)) - dropped - colluding
        is_opened = any(len(lists[rank] & colluding) >= chosen.threshold for rank in honest)
        exposed_count += is_opened or len(reached(graph, honest)) < len(honest)
    return unopened_count, exposed_count


def test_failures_are_no_more_frequent_than_their_bound():
    size, trials = 120, 400
    risk = Risk(dropouts=24, colluders=12, correctness_bits=3, security_bits=3)
    chosen = choose(size, risk, Consistency.ASSUMED)
    found = failures(size, chosen, risk, trials)
    bounds = float(unopened(size, chosen, risk.dropouts)), float(exposed(size, chosen, risk))
    for count, bound in zip(found, bounds, strict=True):
        assert binom.sf(count - 1, trials, bound) > 1e-6, (count, bound)


def test_the_trials_find_a_neighbourhood_that_is_too_small():
    size, trials = 120, 100
    risk = Risk(dropouts=24, colluders=12, correctness_bits=3, security_bits=3)
    chosen = choose(size, risk, Consistency.ASSUMED)
    weak = Neighborhood(chosen.degree, chosen.degree - 3)
    unopened_count, _ = failures(size, weak, risk, trials)
    _, exposed_count = failures(size, Neighborhood(4, 2), risk, trials)
    assert binom.sf(unopened_count - 1, trials, 1 / 8) < 1e-6
    assert binom.sf(exposed_count - 1, trials, 1 / 8) < 1e-6


ANY_SIZE = (("SIGNED_COMPLETE_UP_TO", 0), ("SIGNED_UP_TO", 10**6))


@pytest.fixture
def _any_size(monkeypatch):
    """Sparse graphs for cohorts of any size, as nobody gets them."""
    for name, value in ANY_SIZE:
        monkeypatch.setattr(graphs, name, value)
    choose.cache_clear()
    check_bounds.cache_clear()
    yield
    choose.cache_clear()
    check_bounds.cache_clear()


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize(
    ("size", "dropouts", "colluders", "degree", "threshold", "cut_off"),
    [
        (1_000, 100, 50, 54, 33, 2),
        (1_000, 100, 100, 73, 48, 2),
        (2_000, 200, 100, 60, 37, 4),
        (2_000, 200, 200, 79, 52, 3),
        (10_000, 1_000, 500, 66, 40, 18),
        (10_000, 1_000, 1_000, 86, 56, 16),
        (10_000, 2_000, 1_000, 122, 67, 22),
        (20_000, 2_000, 2_000, 89, 58, 31),
        (100_000, 10_000, 5_000, 70, 42, 176),
        (100_000, 10_000, 10_000, 93, 60, 150),
    ],
)
def test_out_neighbors_are_as_many_as_in_the_table(size, dropouts, colluders, degree, threshold, cut_off):
    chosen = choose(size, Risk(dropouts=dropouts, colluders=colluders), Consistency.SIGNED)
    assert chosen == Neighborhood(degree, threshold, cut_off)
    check_bounds(size, chosen, size - dropouts, colluders)


@pytest.mark.parametrize(
    ("population", "colluding", "cohort", "most"),
    [
        (10_000, 100, 100, 17),
        (10_000, 100, 1_000, 42),
        (10_000, 500, 100, 31),
        (10_000, 500, 1_000, 113),
        (10_000, 1_000, 100, 42),
        (10_000, 1_000, 1_000, 183),
        (100_000, 1_000, 100, 17),
        (100_000, 1_000, 1_000, 46),
        (100_000, 1_000, 10_000, 188),
        (100_000, 5_000, 100, 31),
        (100_000, 5_000, 1_000, 117),
        (100_000, 5_000, 10_000, 683),
        (100_000, 10_000, 100, 42),
        (100_000, 10_000, 1_000, 188),
        (100_000, 10_000, 10_000, 1_248),
    ],
)
def test_colluders_in_a_cohort_are_those_of_the_table(population, colluding, cohort, most):
    assert colluders_in_cohort(population, colluding, cohort, 2**16) == most


@pytest.mark.parametrize(("size", "degree"), [(101, 4), (1_000, 60), (1_000, 998)])
def test_a_server_that_may_cheat_never_gets_a_circle(size, degree):
    with pytest.raises(ConfigError, match="need a complete graph"):
        make_graph(size, degree, Consistency.SIGNED, bytes(32))
    assert isinstance(make_graph(1_001, 60, Consistency.SIGNED, bytes(32)), OutNeighbors)
    assert isinstance(make_graph(1_001, 1_000, Consistency.SIGNED, bytes(32)), Complete)
    assert isinstance(make_graph(size, 60, Consistency.ASSUMED, bytes(32)), Circle)


def test_signed_cohorts_above_20_000_are_refused():
    with pytest.raises(ConfigError, match="at most 20000 clients, got 20001"):
        make_graph(20_001, 90, Consistency.SIGNED, bytes(32))
    with pytest.raises(ConfigError, match="at most 20000 clients, got 20001"):
        choose(20_001, Risk(dropouts=10, colluders=10), Consistency.SIGNED)
    check_bounds(20_000, Neighborhood(19_999, 10_001), 18_000, 100)
    with pytest.raises(ConfigError, match="at most 20000 clients, got 20001"):  # a plan with a complete graph, too
        check_bounds(20_001, Neighborhood(20_000, 10_001), 18_000, 100)


def log_of(value):
    """log2 of an exact fraction, however small."""
    return log2(value.numerator) - log2(value.denominator)


def exactly_apart(n, k, d, c, s):
    """The union bound over parts of s clients, in exact fractions."""
    others = n - c - s - d
    avoid = [Fraction(comb(n - 1 - marked, k), comb(n - 1, k)) for marked in (others, s)]
    return comb(n, s) * comb(n - s, d) * avoid[0] ** s * avoid[1] ** others


@pytest.mark.parametrize(("n", "k", "d", "c"), [(12, 3, 2, 1), (300, 20, 30, 15), (1_200, 50, 120, 60)])
def test_logarithms_of_parts_agree_with_exact_fractions(n, k, d, c):
    apart = log_apart(n, k, d, c)
    assert apart.size == n // 2
    for s in {1, 2, 5, n // 4, n // 2} & set(range(1, n - c - d)):
        exact = exactly_apart(n, k, d, c, s)
        assert apart[s - 1] == (pytest.approx(log_of(exact), abs=1e-7) if exact else -np.inf)


@pytest.mark.parametrize(("n", "k", "t", "c"), [(12, 3, 2, 1), (60, 8, 6, 5), (300, 20, 15, 15)])
def test_the_bound_on_parts_that_open_agrees_with_exact_fractions(n, k, t, c):
    """Each of s members has t of its k out-neighbours among the s - 1 others and the colluders, of n - 1 in all."""
    parts = [comb(n, s) * upper_tail(n - 1, s - 1 + c, k, t) ** s for s in range(1, n // 2 + 1)]
    assert log_cut(n, k, t, c, np.full(n // 2, np.inf)) == pytest.approx(log_of(sum(parts)), abs=1e-7)
    rare = [part / 2 if s % 2 else part for s, part in enumerate(parts)]  # a part must be cut off as well
    apart = np.array([log_of(part) if part else -np.inf for part in rare])
    assert log_cut(n, k, t, c, apart) == pytest.approx(log_of(sum(rare)), abs=1e-7)


def test_where_nobody_is_left_outside_nothing_is_bounded():
    apart = log_apart(12, 3, 5, 2)  # 5 honest survivors: parts of 5 and 6 have no other side
    assert np.isinf(apart[4:]).all()
    assert np.isfinite(apart[:4]).all()
    assert least_cut_off(apart, 1) is None


@given(st.integers(2, 400), st.data())
def test_logarithms_of_tails_agree_with_exact_fractions(population, data):
    drawn = data.draw(st.integers(1, population))
    least = data.draw(st.integers(0, drawn))
    marked = data.draw(st.lists(st.integers(0, 2 * population), min_size=1, max_size=4))
    logs = log_upper_tails(log_factorials(population), population, np.array(marked), drawn, least)
    for count, found in zip(marked, logs.tolist(), strict=True):
        exact = upper_tail(population, count, drawn, least)
        assert found == (pytest.approx(log_of(exact), abs=1e-7) if exact else -np.inf)


@pytest.mark.parametrize(("n", "k", "c"), [(1_200, 60, 60), (20_000, 89, 2_000)])
def test_colluders_holding_enough_shares_are_counted_exactly(n, k, c):
    for t in range(k // 2, k):
        assert may_open(n, k, t, c, 102) == (n * upper_tail(n - 1, c, k, t) > Fraction(1, 2**102))


@pytest.mark.parametrize(("n", "k", "d"), [(1_200, 60, 120), (10_000, 86, 1_000), (2_000, 10, 900), (1_200, 5, 0)])
def test_the_largest_threshold_is_what_random_dropouts_leave(n, k, d):
    threshold = _largest_threshold(n, k, Risk(dropouts=d, colluders=0))
    assert n * upper_tail(n - 1, d, k, k - threshold + 1) <= Fraction(1, 2**20)
    assert threshold == k or n * upper_tail(n - 1, d, k, k - threshold) > Fraction(1, 2**20)


def parts_of(alive, near):
    """The connected parts of a set of ranks, as bits, given each rank's partners."""
    parts = []
    while alive:
        part = front = alive & -alive
        while front:
            reached = 0
            while front:
                lowest = front & -front
                reached |= near[lowest.bit_length() - 1]
                front ^= lowest
            front = reached & alive & ~part
            part |= front
        parts.append(part)
        alive &= ~part
    return parts


class Attacked:
    """A small graph of out-neighbours and all that a server gains by its choice of up to d dropouts.

    Attributes:
        opens_part: a part of at most half of the clients opens, or colluders open somebody.
        opens_rest: the larger part opens without a smaller one, so that fewer are in the sum than survived.
        cut_off: most clients, at most half, that have no edge to the others.
    """

    def __init__(self, graph, t, d, c):
        n = graph.cohort
        everyone = range(n)
        bits = [[1 << int(other) for other in graph.holders(rank) if other != rank] for rank in everyone]
        self.out = [sum(row) for row in bits]
        self.colluders, self.t = (1 << c) - 1, t
        self.opens_part = any(self.opens(1 << rank, self.colluders) for rank in range(c, n))
        self.opens_rest, self.cut_off = False, 0
        near = [sum(1 << int(other) for other in graph.partners(rank)) for rank in everyone]
        for count in range(d + 1):
            for dropped in combinations(range(c, n), count):
                alive = ((1 << n) - 1) & ~self.colluders & ~sum(1 << rank for rank in dropped)
                parts = parts_of(alive, near)
                if len(parts) > 1:
                    self.split(parts, n // 2)

    def opens(self, part, helping):
        """Say whether every member of a part has t out-neighbours that would help to open it."""
        while part:
            lowest = part & -part
            if (self.out[lowest.bit_length() - 1] & helping).bit_count() < self.t:
                return False
            part ^= lowest
        return True

    def split(self, parts, half):
        sizes = {0}
        for part in parts:
            sizes |= {size + part.bit_count() for size in sizes}
            if self.opens(part, part | self.colluders):
                self.opens_part |= part.bit_count() <= half
                self.opens_rest |= part.bit_count() > half
        self.cut_off = max(self.cut_off, *(size for size in sizes if size <= half))


SMALL = [(12, 3, 2, 2, 1), (12, 4, 3, 2, 2), (14, 3, 3, 3, 2), (12, 3, 2, 1, 2)]
TRIALS = 600


def attacks(n, k, t, d, c):
    return [Attacked(OutNeighbors(n, k, digest("attack", n, trial)), t, d, c) for trial in range(TRIALS)]


def is_no_more_frequent(count, bound):
    return bool(binom.sf(count - 1, TRIALS, min(1.0, bound)) > 1e-6)


@pytest.mark.parametrize(("n", "k", "t", "d", "c"), SMALL)
def test_what_a_server_opens_is_no_more_frequent_than_its_bounds(n, k, t, d, c):
    apart = log_apart(n, k, d, c)
    seen = attacks(n, k, t, d, c)
    bound = float(n * upper_tail(n - 1, c, k, t)) + 2 ** log_cut(n, k, t, c, apart)
    assert bound < 0.75
    assert is_no_more_frequent(sum(attack.opens_part for attack in seen), bound)
    for s in range(1, n // 2 + 1):
        loose = float(np.exp2(apart[s - 1 :]).sum())
        assert is_no_more_frequent(sum(attack.cut_off >= s for attack in seen), loose)
    # The noise of those who were cut off is missing from the sum: without `cut_off` the charge would be wrong.
    rest = [attack for attack in seen if attack.opens_rest]
    assert rest
    assert all(attack.cut_off >= 1 for attack in rest)


def test_the_attacks_are_seen_where_a_bound_forgets_the_dropouts():
    """The same bound for a server that cannot choose who drops out is broken by one that can."""
    n, k, t, d, c = 12, 3, 2, 2, 1
    blind = float(np.exp2(log_apart(n, k, 0, c)).sum())
    assert not is_no_more_frequent(sum(attack.cut_off >= 1 for attack in attacks(n, k, t, d, c)), blind)


def test_shares_counted_over_all_neighbors_fall_to_colluding_in_neighbors():
    """Colluders choose nothing of a client's out-neighbours, but all of them may name it as theirs."""
    n, k, t, c = 14, 3, 3, 5
    both = out = 0
    for trial in range(200):
        graph = OutNeighbors(n, k, digest("inwards", trial))
        out += sum(graph.holders(rank)[graph.holders(rank) < c].size >= t for rank in range(c, n))
        both += sum(graph.partners(rank)[graph.partners(rank) < c].size >= t for rank in range(c, n))
    assert both > 5 * out


def arcs(circle, colluders, threshold, dropouts):
    """Yield arcs of a circle that open by themselves once their honest surroundings have dropped out."""
    size, reach = circle.cohort, circle.degree // 2
    order = circle._circle.tolist()
    for start in range(size):
        around = [order[(start + step) % size] for step in range(-reach, 40 + reach)]
        for length in range(2, 40):
            inside = set(around[reach : reach + length]) - colluders
            outside = (set(around[:reach]) | set(around[reach + length : 2 * reach + length])) - colluders
            helping = inside | colluders
            if len(outside) <= dropouts and all(
                len(helping.intersection(circle.partners(rank).tolist())) >= threshold for rank in inside
            ):
                yield inside


def test_on_a_circle_a_server_that_picks_dropouts_opens_an_arc():
    """Why `signed` has no circle: its bound is for dropouts at random places."""
    size, risk = 500, Risk(dropouts=50, colluders=50)
    chosen = choose(size, risk, Consistency.ASSUMED)
    circle = Circle(size, chosen.degree, digest("arc"))
    opened = next(arcs(circle, set(range(50)), chosen.threshold, risk.dropouts))
    assert 2 <= len(opened) < 40


GOOD = choose(2_000, Risk(dropouts=200, colluders=100), Consistency.SIGNED)


@pytest.mark.parametrize(
    ("hood", "quorum", "colluders", "match"),
    [
        (Neighborhood(2, 2, 500), 1_800, 100, "colluders may hold 2 of 2"),  # a graph of degree 2
        (Neighborhood(GOOD.degree, GOOD.threshold - 1, GOOD.cut_off), 1_800, 110, "may hold 36 of 60"),
        (
            Neighborhood(GOOD.degree, GOOD.threshold, GOOD.cut_off - 1),
            1_800,
            100,
            "4 honest survivors out, got 3",
        ),
        (GOOD, 1_800, 150, "may hold"),  # the client counts on more colluders than the plan
        (GOOD, 1_500, 100, "honest survivors out"),  # or on more dropouts
        (GOOD, 1_040, 100, "quorum of at least 1051"),
        (GOOD, 2_001, 100, "quorum must be in"),
        (Neighborhood(60, 30, 4), 1_800, 100, r"threshold must be in \[31, 61\], got 30"),
        (Neighborhood(60, 62, 4), 1_800, 100, r"threshold must be in \[31, 61\], got 62"),
        (Neighborhood(600, 400, 4), 1_800, 100, r"out-neighbors must number in \[1, 500\], got 600"),
        (Neighborhood(1_999, 1_001), 1_700, 1_100, r"threshold must be in \[1101, 1700\], got 1001"),
        (Neighborhood(1_999, 1_801), 1_800, 100, r"threshold must be in \[101, 1800\], got 1801"),
    ],
)
def test_a_neighbourhood_that_a_server_breaks_is_refused(hood, quorum, colluders, match):
    check_bounds(2_000, GOOD, 1_800, 100)
    with pytest.raises(ConfigError, match=match):
        check_bounds(2_000, hood, quorum, colluders)


def test_fewer_colluders_or_dropouts_and_more_cut_off_pass_too():
    check_bounds(2_000, GOOD, 1_900, 100)
    check_bounds(2_000, GOOD, 1_800, 0)
    check_bounds(2_000, Neighborhood(GOOD.degree, GOOD.threshold, GOOD.cut_off + 1), 1_800, 100)


def test_colluders_that_open_a_client_are_seen_by_the_bound_on_parts_too(monkeypatch):
    """A part may be one client: two bounds, either of which refuses."""
    case = (1_100, Neighborhood(120, 61, 1), 1_000, 300)
    check_bounds.cache_clear()
    monkeypatch.setattr(neighborhood, "may_open", lambda *arguments: False)
    with pytest.raises(ConfigError, match="may open a part of 1100 clients"):
        check_bounds(*case)
    monkeypatch.setattr(neighborhood, "log_cut", lambda *arguments: -1_000.0)
    check_bounds(*case)
    check_bounds.cache_clear()


@pytest.mark.parametrize("bound", ["may_open", "least_cut_off"])
def test_each_bound_alone_refuses_something(bound, monkeypatch):
    """Colluders with enough shares of somebody; and survivors that are cut off and not counted."""
    opened = (1_100, Neighborhood(200, 101), 1_080, 300)
    cut = (2_000, Neighborhood(GOOD.degree, GOOD.threshold, 0), 1_800, 100)
    case, blind = (opened, False) if bound == "may_open" else (cut, 0)
    check_bounds.cache_clear()
    with pytest.raises(ConfigError):
        check_bounds(*case)
    monkeypatch.setattr(neighborhood, bound, lambda *arguments: blind)
    check_bounds(*case)
    check_bounds.cache_clear()


@pytest.mark.parametrize("size", [2, 10, 101, 1_000])
def test_signed_cohorts_up_to_1_000_are_complete(size):
    chosen = choose(size, Risk(dropouts=0, colluders=0), Consistency.SIGNED)
    assert chosen == Neighborhood(size - 1, size // 2 + 1, 0)
    check_bounds(size, chosen, size, 0)


@pytest.mark.parametrize(("size", "dropouts", "colluders"), [(10, 4, 2), (1_000, 450, 100), (2_000, 950, 100)])
def test_a_quorum_of_which_two_could_sign_different_survivors_is_refused(size, dropouts, colluders):
    with pytest.raises(ConfigError, match=f"quorum of at least {(size + colluders) // 2 + 1}"):
        choose(size, Risk(dropouts=dropouts, colluders=colluders), Consistency.SIGNED)


@pytest.mark.parametrize(("dropouts", "colluders"), [(700, 400), (850, 250), (790, 200)])
def test_a_risk_that_no_sparse_graph_withstands_is_refused(dropouts, colluders):
    with pytest.raises(ConfigError, match=f"withstands {dropouts} dropouts and {colluders} colluders"):
        choose(2_000, Risk(dropouts=dropouts, colluders=colluders), Consistency.SIGNED)


@given(st.integers(1, 60), st.data())
def test_the_colluders_of_a_cohort_are_the_least_that_fit(population, data):
    colluding = data.draw(st.integers(0, population))
    cohort = data.draw(st.integers(1, population))
    draws = data.draw(st.integers(1, 2**20))
    most = colluders_in_cohort(population, colluding, cohort, draws)
    assert draws * upper_tail(population, colluding, cohort, most + 1) <= Fraction(1, 2**40)
    assert most == max(0, cohort + colluding - population) or draws * upper_tail(
        population, colluding, cohort, most
    ) > Fraction(1, 2**40)


@pytest.mark.parametrize(
    ("population", "colluding", "most"), [(2_002, 60, 58), (5_000, 300, 120), (20_000, 100, 30)]
)
def test_in_cohorts_too_large_for_integers_no_colluder_is_missed(population, colluding, most):
    """The least draws with which `most` or more are in one with a chance above 2^-40, and a few draws less."""
    cohort = 1_001
    enough = int(1 / (2**40 * upper_tail(population, colluding, cohort, most))) + 1
    assert enough > 256
    assert colluders_in_cohort(population, colluding, cohort, enough) >= most
    assert colluders_in_cohort(population, colluding, cohort, enough - enough // 64) == most - 1


def test_without_draws_a_cohort_may_hold_all_colluders():
    assert colluders_in_cohort(1_000, 70, 1_000, 2**14) == 70
    assert colluders_in_cohort(1_000, 70, 100, 0) == 70
    assert colluders_in_cohort(1_000, 70, 50, 0) == 49


@pytest.mark.parametrize(
    ("population", "colluding", "cohort", "draws"),
    [(10, 11, 5, 1), (10, -1, 5, 1), (10, 1, 11, 1), (10, 1, 5, -1)],
)
def test_cohorts_without_sense_are_refused(population, colluding, cohort, draws):
    with pytest.raises(ConfigError):
        colluders_in_cohort(population, colluding, cohort, draws)
