"""A part of the campaign of odd calls and odd command lines; every public name and every command is in it."""

import inspect
from dataclasses import dataclass

import pytest

import campaign_odd
import d2pfed
from d2pfed.errors import ConfigError
from d2pfed.fields import Choice, check_arguments, check_fields
from d2pfed.numerics.randomness import Stream, digest
from support.odd_calls import CALLS, Call
from support.odd_lines import LINES, command_of, options

pytest.importorskip("torch")


def test_odd_calls_are_answered_or_refused_in_a_line():
    assert campaign_odd.calls(60, "ci")[1] == []


def test_odd_command_lines_end_in_a_line_and_a_stated_status():
    assert campaign_odd.commands(40, "ci")[1] == []


def test_every_public_name_is_called_and_every_command_is_run():
    constants = {name for name in d2pfed.__all__ if isinstance(getattr(d2pfed, name), d2pfed.Observer)}
    assert {call.name.partition(".")[0] for call in CALLS} == set(d2pfed.__all__) - constants
    assert {command_of(line) for line in LINES} == set(options())


def test_an_error_that_is_not_ours_is_a_finding():
    def divide(number: int) -> float:
        return 1 / number

    call = Call("divide", divide, lambda: {"number": 1})
    fates = [campaign_odd.fate_of_call(call, Stream(digest("odd", seed))) for seed in range(40)]
    assert {"foreign", "answered", "of another signature"} <= {fate for fate, _ in fates}
    assert all(bool(fault) == (fate == "foreign") for fate, fault in fates)


@pytest.mark.parametrize(
    ("status", "err", "fault"),
    [
        (2, "d2pfed: epsilon must be positive, got 0", ""),
        (2, "usage\nd2pfed: a\nd2pfed: b", "not one line"),
        (1, "Traceback (most recent call last)", "status 1"),
        (0, "Traceback (most recent call last)", "a traceback"),
    ],
)
def test_a_traceback_or_another_status_is_a_finding(status, err, fault):
    assert campaign_odd.fault_of_line(["plan"], status, "", err).partition(":")[0] == fault


class Color(Choice):
    RED = "red"


@dataclass(frozen=True)
class Painted:
    sides: tuple[int, ...]
    color: Color | None
    share: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sides": [1]}, "sides must be of the type tuple[int, ...], got list"),
        ({"sides": (1, "2")}, "sides must be of the type tuple[int, ...], got tuple"),
        ({"sides": (True,)}, "sides must be of the type tuple[int, ...], got tuple"),
        ({"color": "red"}, "color must be of the type Color | None, got 'red'"),
        ({"share": "a\nb"}, "share must be of the type float, got 'a\\nb'"),
        ({"share": True}, "share must be of the type float, got True"),
        ({"share": 10**400}, "share must be of the type float, got a number of 1329 bits"),
    ],
)
def test_a_field_of_another_type_is_refused_in_a_line(changes, text):
    Painted((1, 2), Color.RED, 1)
    with pytest.raises(ConfigError) as found:
        Painted(**{"sides": (1,), "color": None} | changes)
    assert str(found.value) == text


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="Color must be one of red, got 'blue'"):
        Color("blue")


def test_arguments_are_held_to_the_types_that_are_declared():
    def painted(count: int, *, of: Painted | None = None) -> int:
        check_arguments(painted, locals())
        return count

    assert inspect.signature(painted).parameters.keys() == {"count", "of"}
    assert painted(3) == 3
    with pytest.raises(ConfigError, match=r"of must be of the type .*Painted \| None, got dict"):
        painted(3, of={})
