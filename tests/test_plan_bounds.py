"""No number in a plan's text makes its reader work: what is huge is refused in one line before anything is computed."""

import re
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2pfed.accounting import SERVER, CohortSampling, Sampling
from d2pfed.errors import ConfigError, shown
from d2pfed.noise.codec import Codec
from d2pfed.noise.mechanisms import BinomialNoise, Centered, DDGauss, Rounded, Shared, SkellamNoise
from d2pfed.numerics import canonical
from d2pfed.numerics.ring import Ring
from d2pfed.numerics.rotation import Hadamard, RandomPhase
from d2pfed.plan import MechanismName, Plan, Policy, PrivacyTarget, calibrate, decode_plan
from d2pfed.plan.plan import MOST_CHARACTERS

HUGE = 10**300
ENDLESS = 10**5000  # Python itself refuses to print it
SMALL = PrivacyTarget(dimension=100, population=2000, cohort_size=20, rounds=10, epsilon=2.0)

planned = cache(calibrate)


@pytest.mark.parametrize("huge", [10**12, HUGE, ENDLESS], ids=["12", "300", "5000"])
@pytest.mark.parametrize(
    "make",
    [
        Hadamard,
        RandomPhase,
        Ring,
        lambda huge: Codec(rotation=Hadamard(4), clip=1.0, granularity=0.1, fraction_bits=huge),
        lambda huge: Centered(Fraction(huge)),
        lambda huge: Shared(Fraction(huge)),
        lambda huge: DDGauss(Fraction(huge)),
        lambda huge: SkellamNoise(Fraction(huge**2)),
        lambda huge: BinomialNoise(2 * huge**2),
        lambda huge: DDGauss(2 + Fraction(1, huge**11)),
        *(
            lambda huge, name=name: replace(planned(SMALL), **{name: huge})
            for name in (
                "rounds",
                "attempts_per_round",
                "max_attempts",
                "max_participations",
                "quorum",
                "colluders",
            )
        ),
        lambda huge: replace(planned(SMALL), threshold=huge),
        lambda huge: replace(planned(SMALL), sampling=CohortSampling(Sampling.FIXED, huge, huge)),
        lambda huge: replace(planned(SMALL), sampling=CohortSampling(Sampling.FIXED, huge, 20)),
        *(
            lambda huge, name=name: replace(SMALL, **{name: huge})
            for name in (
                "dimension",
                "population",
                "cohort_size",
                "rounds",
                "attempts_per_round",
                "spare",
                "draws",
                "bits",
            )
        ),
    ],
)
def test_a_huge_number_is_refused_where_a_value_is_made(make, huge):
    with pytest.raises(ConfigError) as refusal:
        make(huge)
    assert len(str(refusal.value)) < 200
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("box", [float("inf"), float("nan"), 1e-9])
def test_a_box_is_finite_and_not_below_a_step(box):
    with pytest.raises(ConfigError, match="box must be finite"):
        Codec(rotation=Hadamard(4), clip=1.0, granularity=0.1, box=box)


@pytest.mark.parametrize("beta", [0.0, 1.0, float("nan"), -1.0])
def test_the_chance_of_rounding_again_is_within_0_and_1(beta):
    with pytest.raises(ConfigError, match="beta must be in"):
        Rounded(beta)


def with_number(text, name, digits):
    """Return a plan's text with another number in one of its fields."""
    changed = re.sub(rf'"{name}":\d+', f'"{name}":{digits}', text)
    assert changed != text
    return changed


HOSTILE = {
    "cohort_size": "1" + "0" * 12,
    "dimension": "1" + "0" * 300,
    "population": "9" * 5000,
    "rounds": "9" * 4000,
    "bits": "4294967296",
    "fraction_bits": "1000",
    "max_attempts": "9" * 79,
    "quorum": "-" + "9" * 4200,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_plan_with_a_huge_number_is_refused_in_one_line(name):
    text = with_number(canonical.encode(planned(SMALL)), name, HOSTILE[name])
    with pytest.raises(ConfigError) as refusal:
        decode_plan(text)
    assert len(str(refusal.value)) < 400
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "sigma", ["4294967296", "1/0", "9" * 4000, "1/" + "9" * 4000, f"{'9' * 60}/{'7' * 70}", "1e9999999", "-2"]
)
def test_a_noise_of_any_width_is_refused_or_within_a_samplers_table(sigma):
    text = canonical.encode(planned(SMALL)).replace(
        '"sigma":{"":"Fraction","is":"2"}', f'"sigma":{{"":"Fraction","is":"{sigma}"}}'
    )
    with pytest.raises(ConfigError) as refusal:
        decode_plan(text)
    assert len(str(refusal.value)) < 400


def test_noise_beyond_the_samplers_table_is_refused_by_a_clients_policy():
    plan = replace(planned(SMALL), delta=1e-5, mechanism=Centered(Fraction(300)))  # times 4,096 rows
    with pytest.raises(ConfigError, match="width of a client's noise must be at most 16, the plan has 300"):
        Policy(least_colluders=0.0).check(plan)


def test_a_plan_has_a_short_text():
    for kind in MechanismName:
        text = canonical.encode(planned(replace(SMALL, mechanism=kind)))
        assert len(text) < MOST_CHARACTERS / 2
        assert decode_plan(text) == planned(replace(SMALL, mechanism=kind))
    with pytest.raises(ConfigError, match="8193 characters, at most 8192 are read"):
        decode_plan(" " * 8193)


TEXT = canonical.encode(planned(replace(SMALL, mechanism=MechanismName.DDGAUSS)))
pieces = st.sampled_from(
    ["9" * 90, "9" * 4000, "[" * 40, '{"":', "1e400", "-", '"', "NaN", "\ud800", "0", '{"":"Fraction","is":"1/3"}']
)


def outcome(text):
    """Return the plan, or the words of the refusal."""
    try:
        return decode_plan(text)
    except ConfigError as refusal:
        return str(refusal)


@given(st.integers(0, len(TEXT)), st.integers(0, 40), pieces)
def test_a_damaged_text_is_refused_or_is_a_plan(place, lost, piece):
    damaged = TEXT[:place] + piece + TEXT[place + lost :]
    read = outcome(damaged)
    if isinstance(read, Plan):
        assert canonical.encode(read) == damaged
    else:
        assert len(read) < 1000
        assert "\n" not in read


def test_every_possible_attempt_is_planned_for_against_the_server():
    """Where everyone is asked in every round the cap is the number of attempts, spare ones included."""
    everyone = replace(SMALL, population=20, sampling=Sampling.NONE, against=SERVER)
    plan = calibrate(replace(everyone, rounds=100_000, epsilon=1e4, delta=1e-3))
    assert (plan.max_participations, plan.max_attempts) == (110_000, 110_000)


def test_long_numbers_are_shown_by_their_size():
    assert shown(-12) == "-12"
    assert shown(10**19) == "1" + "0" * 19
    assert shown(ENDLESS) == "a number of 16610 bits"
