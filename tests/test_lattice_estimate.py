"""How hard it is to find a secret of the table, by an estimator that reproduces published figures; and exact hints."""

from fractions import Fraction
from math import exp, floor, sqrt

import mpmath
import pytest
from mpmath import mpf

from d2pfed.secagg.lattice import parameters
from d2pfed.secagg.lattice.parameters import SECRET_DEVIATION, secret_length
from support.lattice_estimator import CLASSICAL, dual_bits, primal_bits, primal_block
from support.lattice_simulator import any_finds, least_block

PRIMAL, DUAL = 140, 136
ENTRIES = [(width, bits) for width in (2, 4, 8, 16) for bits in range(6, 21)]

PUBLISHED = {  # block and bits of the primal, bits of the dual attack: lattice-estimator, `estimate.rough`
    "Kyber-512": ((512, 3329, sqrt(1.5)), 406, 118.6, 115.5),
    "Kyber-768": ((768, 3329, 1.0), 624, 182.2, 173.7),
    "Frodo-640": ((640, 1 << 15, 2.8), 483, 141.0, None),
}


@pytest.mark.parametrize("scheme", PUBLISHED)
def test_the_estimator_reproduces_published_figures(scheme):
    instance, block, primal, dual = PUBLISHED[scheme]
    assert primal_block(*instance) == pytest.approx(block, rel=0.03)
    assert primal_bits(*instance) == pytest.approx(primal, rel=0.03)
    assert dual is None or dual_bits(*instance) == pytest.approx(dual, rel=0.03)


@pytest.mark.parametrize("scheme", PUBLISHED)
def test_a_simulated_reduction_reproduces_published_figures(scheme):
    """The second estimate, by another method; it is above all three, by 2.7 to 2.9 %."""
    instance, block, _, _ = PUBLISHED[scheme]
    assert least_block(*instance) == pytest.approx(block, rel=0.03)


def after_a_hint(width: int) -> float:
    """The deviation of the noise once the sum with another client's is known; the secret's is no smaller."""
    assert width <= SECRET_DEVIATION
    return width / sqrt(2)


def is_hard(width: int, bits: int) -> bool:
    instance = secret_length(bits, Fraction(width)), 1 << bits, after_a_hint(width)
    return primal_bits(*instance) >= PRIMAL and dual_bits(*instance) >= DUAL


@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_every_secret_of_the_table_is_hard_to_find(width):
    assert all(is_hard(width, bits) for each, bits in ENTRIES if each == width)


def test_a_shorter_table_is_not(monkeypatch):
    """The planted bug: 64 numbers fewer than the least margin allows, in each row where the rule binds."""
    shorter = {width: tuple(length - 64 for length in row) for width, row in parameters._SECRETS.items()}
    monkeypatch.setattr(parameters, "_SECRETS", shorter)
    easy = [entry for entry in ENTRIES if entry[1] >= 13 and not is_hard(*entry)]
    assert {width for width, _ in easy} == {2, 4, 8, 16}


def is_found(width: int, bits: int, length: int) -> bool:
    """Whether a simulated reduction of 140 bits finds a secret; 3 % more, since the simulation is so far above."""
    return any_finds(length, 1 << bits, after_a_hint(width), round(1.03 * PRIMAL / CLASSICAL))


@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_a_simulated_reduction_finds_no_secret_of_the_table(width):
    lengths = {bits: secret_length(bits, Fraction(width)) for bits in range(8, 21)}
    assert not any(is_found(width, bits, length) for bits, length in lengths.items())
    assert any(is_found(width, bits, length - 64) for bits, length in lengths.items())  # the planted bug


def test_noise_without_the_hint_would_be_overrated():
    """Taking the noise for as wide as it was drawn calls secrets hard that are 64 numbers too short."""
    length, modulus = 576, 1 << 13
    assert primal_bits(length, modulus, 2.0) > primal_bits(length, modulus, after_a_hint(2))
    assert primal_bits(length, modulus, after_a_hint(2)) < PRIMAL


def test_a_secret_narrower_than_the_noise_would_be_weaker():
    """Why a secret's deviation is 16: the table counts on one that is as wide as the noise."""
    assert primal_block(512, 1 << 13, 16 / sqrt(2)) * CLASSICAL > 200
    assert primal_block(512, 1 << 13, 2 / sqrt(2)) * CLASSICAL < PRIMAL


# --- exact hints ---

CENTRES = [Fraction(0), Fraction(3, 10), Fraction(-71, 100), Fraction(21, 4), Fraction(-355, 113)]


def exponent(value: int, centre: Fraction, square: Fraction) -> Fraction:
    """The exponent of a discrete Gaussian's weight at a value, for a deviation given by its square."""
    return -((value - centre) ** 2) / (2 * square)


def is_the_hints_law(width: Fraction, shrunk: Fraction) -> bool:
    """Given the sum of two, is one of them a discrete Gaussian around (T + x - x') / 2 with this square? Exactly."""
    for left in CENTRES:
        for right in CENTRES:
            for total in range(-2, 3):
                ratios = {
                    exponent(value, left, width**2)
                    + exponent(total - value, right, width**2)
                    - exponent(value, (total + left - right) / 2, shrunk)
                    for value in range(-12, 13)
                }
                if len(ratios) != 1:  # the weights of a law may differ by one factor for all values
                    return False
    return True


@pytest.mark.parametrize("width", [Fraction(4, 5), Fraction(2), Fraction(37, 10), Fraction(16)])
def test_a_hint_leaves_a_discrete_gaussian_of_half_the_variance(width):
    assert is_the_hints_law(width, width**2 / 2)
    assert not is_the_hints_law(width, width**2)  # the planted bug: a hint that takes nothing


def law(centre: float, width: float) -> dict[int, float]:
    weights = {
        value: exp(-((value - centre) ** 2) / 2 / width**2)
        for value in range(floor(centre) - 60, floor(centre) + 61)
    }
    total = sum(weights.values())
    return {value: weight / total for value, weight in weights.items()}


def moments(center: mpf) -> tuple[mpf, mpf]:
    """Return how far mean and variance of the narrowest error after a hint are from its center and from 2."""
    weights = {value: mpmath.exp(-((value - center) ** 2) / 4) for value in range(-60, 61)}
    total = mpmath.fsum(weights.values())
    mean = mpmath.fsum(value * weight for value, weight in weights.items()) / total
    return mean - center, mpmath.fsum(
        (value - mean) ** 2 * weight for value, weight in weights.items()
    ) / total - 2


def test_a_centers_fraction_moves_an_error_but_not_its_variance():
    """The law does depend on the fraction: by 0.14 in total variation between 0 and one half."""
    with mpmath.workdps(40):
        for eighths in range(8):
            bias, excess = moments(mpf(eighths) / 8)
            assert abs(bias) < mpf(2) ** -52
            assert abs(excess) < mpf(2) ** -48
        assert max(abs(moments(mpf(eighths) / 8)[1]) for eighths in range(8)) > mpf(2) ** -49
    left, right = law(0, sqrt(2)), law(0.5, sqrt(2))
    assert sum(abs(left[value] - right[value]) for value in range(-30, 31)) / 2 == pytest.approx(0.141, abs=1e-3)


def test_the_law_of_a_hint_by_enumeration():
    for width, left, right, total in ((2.0, 0.3, -0.71, 3), (1.4, 5.25, 1.5, -2), (3.7, 3.14, -7.1, 0)):
        first, second = law(left, width), law(right, width)
        joint = {value: first[value] * second[total - value] for value in first if total - value in second}
        scale, expected = sum(joint.values()), law((total + left - right) / 2, width / sqrt(2))
        assert all(abs(joint[value] / scale - expected.get(value, 0)) < 1e-12 for value in joint)
