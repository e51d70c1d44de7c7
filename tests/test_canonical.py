from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2pfed.errors import ConfigError
from d2pfed.numerics import canonical
from d2pfed.numerics.ring import Ring


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Point:
    x: object
    y: object


TYPES: dict[str, type] = {"Colour": Colour, "Point": Point}
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.binary()
    | st.floats(allow_nan=False)
    | st.fractions()
    | st.just(Colour.RED)
)
values = st.recursive(leaves, lambda inner: st.tuples(inner, inner) | st.builds(Point, inner, inner), max_leaves=8)


@given(values)
def test_decoding_gives_back_the_value_and_its_only_text(value):
    text = canonical.encode(value)
    assert canonical.decode(text, TYPES) == value
    assert canonical.encode(canonical.decode(text, TYPES)) == text


@given(values, values)
def test_different_values_have_different_texts(left, right):
    same = canonical.encode(left) == canonical.encode(right)
    assert not same or left == right


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"":"Nobody"}',
        '{"":"Point","x":1}',
        '{"":"Point","x":1,"y":2,"z":3}',
        '{"":"Point", "x":1,"y":2}',
        '{"":"Colour","is":"blue"}',
        '{"":"Fraction","is":"2/4"}',
        '{"":"Fraction","is":"1/0"}',
        '{"":"Fraction","is":"1e999999999"}',
        '{"":"Fraction","is":"0.5"}',
        '{"":"Fraction","is":5}',
        '{"":"float","is":"0x1p99999"}',
        '{"":["Point"],"x":1,"y":2}',
        '{"":"float","is":"1.0"}',
        '{"x":1}',
        "[" * 100_000,
        "1e5",
    ],
)
def test_any_other_text_is_refused(text):
    with pytest.raises(ConfigError, match="canonical"):
        canonical.decode(text, TYPES)


def test_a_value_without_a_text_is_refused():
    with pytest.raises(ConfigError, match="set has no canonical text"):
        canonical.encode({1, 2})


def test_fractions_and_floats_keep_every_bit():
    assert canonical.decode(canonical.encode(Fraction(1, 3)), {}) == Fraction(1, 3)
    assert canonical.decode(canonical.encode(0.1 + 0.2), {}) == 0.1 + 0.2


@pytest.mark.parametrize(
    "text",
    [
        "9" * 81,
        "-" + "9" * 4000,
        "9" * 10**6,
        '{"":"Fraction","is":"' + "9" * 4000 + '"}',
        '{"":"Fraction","is":"1/' + "3" * 10**6 + '"}',
        '{"":"float","is":"0x1.' + "0" * 10**6 + 'p+0"}',
        "[" * 18 + "]" * 18,
        "[" * 900 + "]" * 900,
        '{"":"Point","x":' * 20 + "1" + ',"y":2}' * 20,
        "[" + "1," * (1 << 22) + "1]",
    ],
    ids=range(10),
)
def test_no_text_makes_decoding_work_hard(text):
    with pytest.raises(ConfigError, match="not the canonical text") as refusal:
        canonical.decode(text, TYPES)
    assert len(str(refusal.value)) < 400
    assert "\n" not in str(refusal.value)


def test_without_a_bound_on_digits_an_unprintable_number_is_read(monkeypatch):
    """The square of a number that Python still reads is one that it refuses to write: an error in the error."""
    text = "9" * 4000
    monkeypatch.setattr(canonical, "_whole", int)
    monkeypatch.setattr(canonical, "_TOO_LONG", 10**5000)
    read = canonical.decode(text, TYPES)
    with pytest.raises(ValueError, match="4300 digits"):
        f"{read * read}"


def test_what_is_not_read_is_not_written():
    for value in (10**80, -(10**80), Fraction(1, 10**80), (1, (10**81,))):
        with pytest.raises(ConfigError, match="more than 80 digits"):
            canonical.encode(value)
    assert canonical.decode(canonical.encode(10**80 - 1), TYPES) == 10**80 - 1


def test_the_types_of_a_class_are_looked_up_once():
    """A text may hold ten thousand values of one class."""
    canonical._hints.cache_clear()
    value = tuple(Ring(bits) for bits in range(2, 30))
    assert canonical.decode(canonical.encode(value), {"Ring": Ring}) == value
    assert canonical._hints.cache_info().misses == 1


def test_a_caller_may_ask_for_shorter_texts():
    assert canonical.decode("[1,2]", TYPES, most=5) == (1, 2)
    with pytest.raises(ConfigError, match="5 characters, at most 4 are read"):
        canonical.decode("[1,2]", TYPES, most=4)


def test_a_text_of_4_mib_is_read_and_a_longer_one_is_not():
    most = 4 * 1024 * 1024
    longest = '"' + "a" * (most - 2) + '"'
    assert canonical.decode(longest, TYPES) == longest[1:-1]
    with pytest.raises(ConfigError, match=f"{most + 1} characters, at most {most} are read"):
        canonical.decode('"' + longest[1:] + '"', TYPES)


@pytest.mark.parametrize(
    ("zeros", "why"), [(25, "written differently"), (26, "33 characters, at most 32 are read")]
)
def test_the_text_of_a_float_is_too_long_from_33_characters_on(zeros, why):
    digits = "0x1." + "0" * zeros + "p+0"
    with pytest.raises(ConfigError, match=why):
        canonical.decode(f'{{"":"float","is":"{digits}"}}', TYPES)
