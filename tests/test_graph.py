from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, chi2, hypergeom

from d2pfed.errors import ConfigError
from d2pfed.graph import Graph, Neighbourhood, Risk, choose, exposed, unopened, upper_tail
from d2pfed.randomness import digest

sizes = st.integers(2, 40).flatmap(
    lambda size: st.tuples(
        st.just(size), st.sampled_from([size - 1, *(degree for degree in range(2, size - 1, 2))])
    )
)


@given(sizes, st.binary(max_size=4))
def test_a_graph_is_regular_and_mutual(size_and_degree, seed):
    size, degree = size_and_degree
    graph = Graph(size, degree, digest(seed))
    lists = [graph.neighbours(rank).tolist() for rank in range(size)]
    for rank, neighbours in enumerate(lists):
        assert neighbours == sorted(set(neighbours) - {rank})
        assert len(neighbours) == degree
        assert all(rank in lists[other] for other in neighbours)
        assert graph.holders(rank).tolist() == sorted([*neighbours, rank])


@given(sizes, st.randoms(use_true_random=False))
def test_neighbours_in_a_subset_are_counted(size_and_degree, chance):
    size, degree = size_and_degree
    graph = Graph(size, degree, digest("counted"))
    present = np.array([chance.random() < 0.6 for _ in range(size)])
    counts = [np.count_nonzero(present[graph.neighbours(rank)]) for rank in range(size)]
    assert graph.count_neighbours(present).tolist() == counts


@given(sizes)
def test_a_graph_is_connected(size_and_degree):
    size, degree = size_and_degree
    graph = Graph(size, degree, digest("connected"))
    assert len(reached(graph, set(range(size)))) == size


def reached(graph, alive):
    start = min(alive)
    seen, frontier = {start}, [start]
    while frontier:
        new = set(graph.neighbours(frontier.pop()).tolist()) & alive - seen
        seen |= new
        frontier += new
    return seen


def test_every_pair_is_joined_equally_often():
    size, degree, trials = 12, 4, 4000
    counts = np.zeros(size)
    for trial in range(trials):
        counts[Graph(size, degree, digest("pairs", trial)).neighbours(0)] += 1
    expected = trials * degree / (size - 1)
    variance = expected * (1 - degree / (size - 1))
    statistic = ((counts[1:] - expected) ** 2 / variance).sum() * (size - 2) / (size - 1)
    assert statistic < chi2.isf(1e-6, size - 2)


def test_another_seed_gives_another_graph():
    graphs = {tuple(Graph(30, 4, digest("seed", seed)).neighbours(0).tolist()) for seed in range(20)}
    assert len(graphs) > 15


@pytest.mark.parametrize(("size", "degree"), [(1, 0), (10, 0), (10, 3), (10, 10), (10, -2), (10, 7)])
def test_a_degree_of_no_graph_is_refused(size, degree):
    with pytest.raises(ConfigError):
        Graph(size, degree, bytes(32))


@given(st.integers(1, 60), st.data())
def test_tails_are_exact(population, data):
    marked = data.draw(st.integers(0, population))
    drawn = data.draw(st.integers(0, population))
    least = data.draw(st.integers(-1, population + 1))
    exact = upper_tail(population, marked, drawn, least)
    assert float(exact) == pytest.approx(hypergeom(population, marked, drawn).sf(least - 1), abs=1e-12)


@pytest.mark.parametrize("size", [2, 10, 100])
def test_small_cohorts_are_complete_with_a_majority(size):
    assert choose(size, Risk(dropouts=0, colluders=0)) == Neighbourhood(size - 1, size // 2 + 1)


def test_colluders_raise_the_threshold_of_a_complete_graph():
    assert choose(10, Risk(dropouts=1, colluders=7)).threshold == 8


@pytest.mark.parametrize(("size", "dropouts", "colluders"), [(10, 5, 0), (10, 4, 6), (10, 2, 8), (3, 0, 2)])
def test_a_risk_that_no_graph_withstands_is_refused(size, dropouts, colluders):
    with pytest.raises(ConfigError):
        choose(size, Risk(dropouts=dropouts, colluders=colluders))


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
    chosen = choose(size, risk)
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
        graph = Graph(size, chosen.degree, digest("trial", trial))
        lists = [set(graph.neighbours(rank).tolist()) for rank in range(size)]
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
    chosen = choose(size, risk)
    found = failures(size, chosen, risk, trials)
    bounds = float(unopened(size, chosen, risk.dropouts)), float(exposed(size, chosen, risk))
    for count, bound in zip(found, bounds, strict=True):
        assert binom.sf(count - 1, trials, bound) > 1e-6, (count, bound)


def test_the_trials_find_a_neighbourhood_that_is_too_small():
    size, trials = 120, 100
    risk = Risk(dropouts=24, colluders=12, correctness_bits=3, security_bits=3)
    chosen = choose(size, risk)
    weak = Neighbourhood(chosen.degree, chosen.degree - 3)
    unopened_count, _ = failures(size, weak, risk, trials)
    _, exposed_count = failures(size, Neighbourhood(4, 2), risk, trials)
    assert binom.sf(unopened_count - 1, trials, 1 / 8) < 1e-6
    assert binom.sf(exposed_count - 1, trials, 1 / 8) < 1e-6
