from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, chi2, hypergeom

from d2pfed.errors import ConfigError
from d2pfed.graph import (
    Circle,
    Complete,
    Consistency,
    Neighbourhood,
    OutNeighbours,
    Risk,
    check_bounds,
    choose,
    colluders_in_cohort,
    exposed,
    graphs,
    make_graph,
    unopened,
    upper_tail,
)
from d2pfed.randomness import digest

sizes = st.integers(2, 40).flatmap(
    lambda size: st.tuples(
        st.just(size), st.sampled_from([size - 1, *(degree for degree in range(2, size - 1, 2))])
    )
)


@given(sizes, st.binary(max_size=4))
def test_a_graph_is_regular_and_mutual(size_and_degree, seed):
    size, degree = size_and_degree
    graph = make_graph(size, degree, Consistency.ASSUMED, digest(seed))
    lists = [graph.partners(rank).tolist() for rank in range(size)]
    for rank, neighbours in enumerate(lists):
        assert neighbours == sorted(set(neighbours) - {rank})
        assert len(neighbours) == degree
        assert all(rank in lists[other] for other in neighbours)
        assert graph.holders(rank).tolist() == sorted([*neighbours, rank])


@given(sizes, st.randoms(use_true_random=False))
def test_neighbours_in_a_subset_are_counted(size_and_degree, chance):
    size, degree = size_and_degree
    graph = make_graph(size, degree, Consistency.ASSUMED, digest("counted"))
    present = np.array([chance.random() < 0.6 for _ in range(size)])
    counts = [np.count_nonzero(present[graph.partners(rank)]) for rank in range(size)]
    assert graph.count_holders(present).tolist() == counts


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
    assert choose(size, Risk(dropouts=0, colluders=0), Consistency.ASSUMED) == Neighbourhood(
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
    ("size", "dropouts", "colluders"), [(101, 10, 10), (1000, 100, 100), (10_000, 1000, 1000)]
)
def test_the_chosen_degree_keeps_its_promise_and_is_the_least(size, dropouts, colluders):
    risk = Risk(dropouts=dropouts, colluders=colluders)
    chosen = choose(size, risk, Consistency.ASSUMED)
    assert chosen.degree < size - 1
    assert 2 * chosen.threshold > chosen.degree + 1
    assert unopened(size, chosen, dropouts) <= Fraction(1, 2**20)
    assert exposed(size, chosen, risk) <= Fraction(1, 2**40)
    for threshold in range(chosen.degree // 2, chosen.degree - 1):
        fewer = Neighbourhood(chosen.degree - 2, threshold)
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
    weak = Neighbourhood(chosen.degree, chosen.degree - 3)
    unopened_count, _ = failures(size, weak, risk, trials)
    _, exposed_count = failures(size, Neighbourhood(4, 2), risk, trials)
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
def test_out_neighbours_are_as_many_as_in_the_table(size, dropouts, colluders, degree, threshold, cut_off):
    chosen = choose(size, Risk(dropouts=dropouts, colluders=colluders), Consistency.SIGNED)
    assert chosen == Neighbourhood(degree, threshold, cut_off)
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
    assert isinstance(make_graph(1_001, 60, Consistency.SIGNED, bytes(32)), OutNeighbours)
    assert isinstance(make_graph(1_001, 1_000, Consistency.SIGNED, bytes(32)), Complete)
    assert isinstance(make_graph(size, 60, Consistency.ASSUMED, bytes(32)), Circle)


def test_signed_cohorts_above_20_000_are_refused():
    with pytest.raises(ConfigError, match="at most 20000 clients, got 20001"):
        make_graph(20_001, 90, Consistency.SIGNED, bytes(32))
    with pytest.raises(ConfigError, match="at most 20000 clients, got 20001"):
        choose(20_001, Risk(dropouts=10, colluders=10), Consistency.SIGNED)
