"""A printed bound is never below the bound."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2pfed.accounting import round_up


@given(st.floats(min_value=0, allow_infinity=False), st.integers(1, 12))
def test_printed_epsilon_rounds_up_by_less_than_a_digit(value, digits):
    printed = round_up(value, digits)
    assert value <= float(printed)
    assert Fraction(printed) <= Fraction(value) * (1 + Fraction(10) ** (1 - digits))


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.83530001, 4, "0.8354"),
        (0.8353, 3, "0.836"),
        (1e-5, 3, "1e-5"),
        (1.0, 4, "1"),
        (22.8, 2, "23"),
        (3.16e-6, 2, "3.2e-6"),
        (0.0, 4, "0"),
        (123456.7, 4, "123500"),
        (math.inf, 4, "infinite"),
        (math.nan, 4, "not a number"),
    ],
)
def test_a_bound_is_printed_upwards(value, digits, text):
    assert round_up(value, digits) == text
