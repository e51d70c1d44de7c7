from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from d2pfed.errors import ConfigError, PeerError
from d2pfed.randomness import Stream, digest
from d2pfed.secagg.shamir import PRIME, Opener, pack_shares, split, unpack_share

TOY = 257
secrets = st.integers(0, 2**256 - 1)


def stream(*path):
    return Stream(digest("shamir", *path))


def test_the_modulus_is_prime():
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 60):  # Miller-Rabin
        value = pow(base, odd, PRIME)
        assert value in (1, PRIME - 1) or any((value := value * value % PRIME) == PRIME - 1 for _ in range(twos))


@given(secrets, st.data())
def test_any_threshold_shares_open_the_secret(secret, data):
    count = data.draw(st.integers(1, 12))
    threshold = data.draw(st.integers(1, count))
    points = range(1, count + 1)
    shares = split(secret, threshold, points, stream(secret))
    chosen = data.draw(st.permutations(points))[:threshold]
    assert Opener(chosen).join([shares[point - 1] for point in chosen]) == secret


@given(secrets)
def test_a_changed_share_changes_the_secret(secret):
    shares = split(secret, 3, range(1, 6), stream(secret))
    shares[1] = (shares[1] + 1) % PRIME
    assert Opener([1, 2, 3]).join(shares[:3]) != secret


def test_coefficients_agree_with_lagrange_over_the_rationals():
    points = [3, 1, 7, 20]
    shares = split(12345, 4, points, stream("rationals"))
    total = 0
    for point, share in zip(points, shares, strict=True):
        weight = Fraction(1)
        for other in points:
            if other != point:
                weight *= Fraction(other, other - point)
        total += share * weight.numerator * pow(weight.denominator, -1, PRIME)
    assert total % PRIME == 12345


def chi_square_of_one_share(draw):
    counts = np.bincount([draw(index) for index in range(60_000)], minlength=TOY)
    expected = counts.sum() / TOY
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("secret", [0, 1, 200])
def test_shares_below_the_threshold_say_nothing(secret):
    source = stream("uniform", secret)
    statistic = chi_square_of_one_share(lambda _: split(secret, 2, [1, 2], source, TOY)[0])
    assert statistic < chi2.isf(1e-6, TOY - 1)


def test_two_shares_of_three_are_jointly_uniform():
    source, prime = stream("joint"), 17
    pairs = [split(5, 3, [1, 2, 3], source, prime)[:2] for _ in range(60_000)]
    counts = np.bincount([left * prime + right for left, right in pairs], minlength=prime**2)
    expected = counts.sum() / prime**2
    assert ((counts - expected) ** 2 / expected).sum() < chi2.isf(1e-6, prime**2 - 1)


def test_a_coefficient_that_is_never_zero_is_seen():
    source = stream("never zero")
    statistic = chi_square_of_one_share(lambda _: (200 + 1 + source.below(TOY - 1)) % TOY)
    assert statistic > chi2.isf(1e-6, TOY - 1)


@pytest.mark.parametrize("points", [[0, 1, 2], [1, 1, 2], [1, 2, TOY], [-1, 1, 2]])
def test_points_that_give_a_secret_away_are_refused(points):
    with pytest.raises(ConfigError):
        split(1, 2, points, stream("points"), TOY)
    with pytest.raises(ConfigError):
        Opener(points, TOY)


@pytest.mark.parametrize("threshold", [0, 4])
def test_a_threshold_out_of_range_is_refused(threshold):
    with pytest.raises(ConfigError):
        split(1, threshold, [1, 2, 3], stream("threshold"))


def test_a_secret_outside_the_field_is_refused():
    with pytest.raises(ConfigError):
        split(TOY, 2, [1, 2], stream("secret"), TOY)


def test_another_number_of_shares_is_refused():
    with pytest.raises(ConfigError):
        Opener([1, 2]).join([1, 2, 3])


@given(st.integers(0, PRIME - 1))
def test_shares_come_back_from_bytes(share):
    assert unpack_share(pack_shares([share])) == share


@pytest.mark.parametrize("data", [PRIME.to_bytes(33, "little"), b"\xff" * 33, bytes(32), bytes(34)])
def test_bytes_that_are_no_share_are_refused(data):
    with pytest.raises(PeerError):
        unpack_share(data)
