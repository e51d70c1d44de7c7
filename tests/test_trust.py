"""How many of a cohort may collude, and how many shares then open a secret."""

from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2pfed.errors import ConfigError
from d2pfed.secagg.pairwise.session import least_threshold, require_shares
from d2pfed.secagg.trust import colluders_in_cohort


def upper_tail(population: int, marked: int, drawn: int, least: int) -> Fraction:
    """The chance that at least so many of the drawn are marked, by the definition."""
    first = max(least, 0)
    ways = sum(comb(marked, hit) * comb(population - marked, drawn - hit) for hit in range(first, drawn + 1))
    return Fraction(ways, comb(population, drawn))


@pytest.mark.parametrize(
    ("size", "colluders", "threshold"), [(2, 0, 2), (10, 0, 6), (10, 7, 8), (1_000, 192, 501)]
)
def test_shares_that_open_are_a_majority_and_more_than_collude(size, colluders, threshold):
    assert least_threshold(size, colluders) == threshold
    require_shares(size, threshold, threshold, colluders)
    with pytest.raises(ConfigError, match=f"got {threshold - 1}"):
        require_shares(size, threshold - 1, size, colluders)


@pytest.mark.parametrize(("threshold", "quorum", "colluders"), [(7, 6, 0), (11, 11, 0), (6, 10, -1)])
def test_shares_that_a_quorum_does_not_have_are_refused(threshold, quorum, colluders):
    with pytest.raises(ConfigError, match="threshold must be in"):
        require_shares(10, threshold, quorum, colluders)


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
