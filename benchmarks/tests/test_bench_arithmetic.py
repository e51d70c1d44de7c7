"""The bench runs, measures everything asked for, and judges by its own numbers."""

import numpy as np
import pytest

from benchmarks.arithmetic import SpeedRow, arithmetic
from benchmarks.timing import Work, measure


@pytest.fixture(scope="module")
def rows():
    with_encode = arithmetic(dimensions=(1000,), threads=(1, 2), encode=lambda dimension: np.zeros(dimension).copy)
    return with_encode + arithmetic(dimensions=(64,), threads=(1, 2))


def test_every_work_is_measured_at_every_dimension_and_on_both_numbers_of_threads(rows):
    seen = {(row.what, row.dimension, row.threads) for row in rows}
    names = {row.what for row in rows}
    assert {"discrete Gaussian, sigma 2", "Hadamard rotation", "pack 11 bits", "whole client encode"} <= names
    asked = {(name, dimension, threads) for name in names for dimension in (64, 1000) for threads in (1, 2)}
    assert seen == asked - {("whole client encode", 64, 1), ("whole client encode", 64, 2)}


def test_rates_and_first_calls_are_positive(rows):
    for row in rows:
        assert row.rate > 0
        assert row.first_call_seconds > 0
        assert row.peer


def a_row(**changes):
    base = {"what": "a", "dimension": 1, "threads": 1, "rate": 10.0, "first_call_seconds": 1.0, "peer": "b"}
    return SpeedRow(**{**base, "peer_rate": 5.0, "goal": 2.0, **changes})


def test_a_goal_is_met_from_its_ratio_on():
    assert a_row().ratio == 2.0
    assert a_row().met is True
    assert a_row(goal=2.1).met is False
    assert a_row(goal=None).met is None
    assert a_row(peer_rate=None).ratio is None
    assert a_row(peer_rate=None).met is None


def test_a_slow_peer_is_measured_at_its_largest_dimension():
    asked = []

    def prepare(dimension):
        asked.append(dimension)
        return lambda: None

    measure(Work("slow", prepare, largest=10), 1000, 2)
    assert asked == [10, 10]
