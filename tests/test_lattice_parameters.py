"""From a plan to a committee: the rule against scipy and against exact fractions, an example in full, and refusals."""

import re
from fractions import Fraction
from math import ceil, comb
from pathlib import Path

import pytest
from scipy.stats import hypergeom

from d2pfed.errors import ConfigError
from d2pfed.secagg.lattice.parameters import Committee, choose_committee, most_marked, secret_length

A_TENTH = Fraction("0.1")
EXAMPLE = {"population": 100_000, "colluding": 10_000, "draws": 16_384 * 100}  # a run of 100 blocks


def exact_tail(population: int, marked: int, drawn: int, above: int) -> Fraction:
    """The chance of more than `above` marked ones, by the definition."""
    ways = sum(comb(marked, hit) * comb(population - marked, drawn - hit) for hit in range(above + 1, drawn + 1))
    return Fraction(ways, comb(population, drawn))


@pytest.mark.parametrize("marked", [0, 1, 3, 10, 29, 30])
@pytest.mark.parametrize("chance", [Fraction(0), Fraction(1, 1000), Fraction(1, 3), Fraction(99, 100)])
def test_the_most_marked_is_the_least_that_is_improbable(marked, chance):
    for drawn in (1, 7, 29, 30):
        found = most_marked(30, marked, drawn, chance)
        assert exact_tail(30, marked, drawn, found) <= chance
        assert found == 0 or exact_tail(30, marked, drawn, found - 1) > chance


def test_a_chance_that_is_met_exactly_is_allowed():
    chance = exact_tail(30, 10, 7, 4)
    assert most_marked(30, 10, 7, chance) == 4
    assert most_marked(30, 10, 7, chance - Fraction(1, 10**12)) == 5


@pytest.mark.parametrize("size", [64, 96, 128, 192, 256, 384, 512])
def test_colluders_agree_with_another_hypergeometric_law(size):
    for share in (100, 1_000, 10_000, 20_000):
        found = most_marked(100_000, share, size, Fraction(1, 2 * EXAMPLE["draws"] << 40))
        chances = hypergeom(100_000, share, size).sf([found, found - 1]) * 2 * EXAMPLE["draws"] * 2.0**40
        assert chances[0] <= 1 < chances[1]


def test_the_example_of_the_documentation():
    """A tenth of 100,000 collude, a tenth of the cohort is missing, 16,384 draws for each of 100 blocks."""
    assert secret_length(10, Fraction(2)) == 512
    committee = choose_committee(1_000, A_TENTH, 512, **EXAMPLE)
    assert committee == Committee(size=192, threshold=64, packed=88, certificate=129, colluders=64)
    assert (committee.openers, committee.least) == (152, 154)
    assert 2 * committee.size * (ceil(512 / committee.packed) + 2) == 3_072


def test_smaller_committees_would_not_do():
    """Why 192: with the members that are surely there, less is packed than the rule asks for."""
    for size in (64, 96, 128):
        absent = most_marked(1_000, 100, size, Fraction(1, 1 << 20))
        colluders = most_marked(100_000, 10_000, size, Fraction(1, 2 * EXAMPLE["draws"] << 40))
        packed, certificate = size - absent - colluders - 2, (size + colluders) // 2 + 1
        assert packed < 48 or certificate > size - absent


def test_a_committee_counted_on_its_mean_is_often_not_there():
    """The planted rule: with a tenth missing on average, two attempts in five end before anything is sent."""
    assert 0.35 < hypergeom(1_000, 100, 128).sf(13) < 0.5
    absent = most_marked(1_000, 100, 128, Fraction(1, 1 << 20))
    assert hypergeom(1_000, 100, 128).sf(absent) <= 2**-20


@pytest.mark.parametrize("cohort", [24, 30, 64, 100, 500, 512, 513, 2_000, 20_000])
@pytest.mark.parametrize("share", [0, 100, 20])
@pytest.mark.parametrize("draws", [0, 1 << 14])
def test_every_committee_keeps_the_rules(cohort, share, draws):
    population = 4 * cohort if draws else cohort
    colluding = population // share if share else 0
    try:
        found = choose_committee(cohort, A_TENTH, 512, population=population, colluding=colluding, draws=draws)
    except ConfigError:
        assert share or cohort < 24
        return
    missing = ceil(A_TENTH * cohort)
    there = found.size - (
        missing if found.size == cohort else most_marked(cohort, missing, found.size, Fraction(1, 1 << 20))
    )
    assert found.size <= min(cohort, 512)
    assert found.threshold == max(found.colluders, ceil(found.size / 8))
    assert 2 * found.certificate > found.size + found.colluders
    assert found.packed >= (48 if found.size < cohort else 16)
    assert found.least <= there
    assert found.packed == min(512, there - found.threshold - 2)
    if not draws:
        assert found.colluders == min(colluding, found.size)
    elif colluding:
        assert 2 * draws * exact_tail(population, colluding, found.size, found.colluders) <= Fraction(1, 1 << 40)


def test_a_whole_cohort_is_the_last_choice():
    found = choose_committee(127, A_TENTH, 512, population=127, colluding=50, draws=0)
    assert found == Committee(size=127, threshold=50, packed=62, certificate=89, colluders=50)


def test_without_draws_all_colluders_may_be_members():
    assert choose_committee(100, A_TENTH, 512, population=100, colluding=10, draws=0).colluders == 10


@pytest.mark.parametrize(
    ("cohort", "dropouts", "colluding", "draws"),
    [
        (23, "0.1", 0, 0),
        (100, "0.6", 0, 0),
        (100, "0.1", 75, 0),
        (513, "0.1", 450, 0),
        (1_000, "0.5", 100, 1 << 14),
    ],
)
def test_no_committee_is_better_than_one_that_opens_nothing(cohort, dropouts, colluding, draws):
    with pytest.raises(ConfigError, match="no committee"):
        choose_committee(
            cohort,
            Fraction(dropouts),
            512,
            population=10_000 if draws else cohort,
            colluding=colluding,
            draws=draws,
        )


@pytest.mark.parametrize(("cohort", "population"), [(0, 10), (20_001, 100_000), (11, 10)])
def test_a_cohort_has_limits(cohort, population):
    with pytest.raises(ConfigError, match="cohorts of at most"):
        choose_committee(cohort, A_TENTH, 512, population=population, colluding=0, draws=1)


def test_the_table_of_secrets_is_that_of_the_protocols_page():
    page = (Path(__file__).parent.parent / "docs" / "protocol.md").read_text()
    rows = dict(re.findall(r"^\| w >= (\d+) \| ([\d, |]+) \|$", page, re.MULTILINE))
    assert list(rows) == ["2", "4", "8", "16"]
    for width, row in rows.items():
        lengths = [int(length.replace(",", "")) for length in row.split(" | ")]
        assert lengths == [secret_length(bits, Fraction(width)) for bits in range(8, 21)]
        assert all(length % 64 == 0 and length >= 384 for length in lengths)


def test_secrets_by_bits_and_width():
    assert [secret_length(bits, Fraction(2)) for bits in (1, 8, 9, 20)] == [448, 448, 448, 1024]
    assert [secret_length(12, Fraction(width)) for width in ("2", "3.99", "4", "8", "15.9", "16", "1000")] == [
        640, 640, 512, 448, 448, 384, 384,
    ]  # fmt: skip


@pytest.mark.parametrize("bits", [0, 21])
def test_rings_have_limits(bits):
    with pytest.raises(ConfigError, match="rings of 1 to 20 bits"):
        secret_length(bits, Fraction(4))


def test_noise_of_fewer_than_two_steps_is_refused():
    with pytest.raises(ConfigError, match="at least 2 steps in every coordinate"):
        secret_length(10, Fraction("1.99"))
