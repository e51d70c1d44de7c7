from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import Stream, digest
from d2pfed.secagg.shamir import (
    PRIME,
    Corrected,
    Interpolation,
    correct,
    pack_shares,
    split,
    unpack_share,
)

TOY = 257
secrets = st.integers(0, 2**256 - 1)


def stream(*path):
    return Stream(digest("shamir", *path))


def shares_of(secret, *given):
    """The shares of one secret."""
    return split([secret], *given)[0]


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
    shares = shares_of(secret, threshold, points, stream(secret))
    chosen = data.draw(st.permutations(points))[:threshold]
    assert Interpolation(chosen).join([shares[point - 1] for point in chosen]) == secret


@pytest.mark.parametrize(("count", "threshold"), [(1, 1), (5, 3), (40, 40), (160, 120)])
def test_secrets_split_together_have_the_shares_of_secrets_split_in_turn(count, threshold):
    own, points = [0, PRIME - 1, 2**255 + 9], range(1, count + 1)
    together, in_turn = stream("together", count), stream("together", count)
    assert split(own, threshold, points, together) == [
        [sum(c * point**power for power, c in enumerate(coefficients)) % PRIME for point in points]
        for coefficients in ([*[in_turn.below(PRIME) for _ in range(threshold - 1)], one][::-1] for one in own)
    ]


@given(secrets)
def test_a_changed_share_changes_the_secret(secret):
    shares = shares_of(secret, 3, range(1, 6), stream(secret))
    shares[1] = (shares[1] + 1) % PRIME
    assert Interpolation([1, 2, 3]).join(shares[:3]) != secret


def test_coefficients_agree_with_lagrange_over_the_rationals():
    points = [3, 1, 7, 20]
    shares = shares_of(12345, 4, points, stream("rationals"))
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
    statistic = chi_square_of_one_share(lambda _: shares_of(secret, 2, [1, 2], source, TOY)[0])
    assert statistic < chi2.isf(1e-6, TOY - 1)


def test_two_shares_of_three_are_jointly_uniform():
    source, prime = stream("joint"), 17
    pairs = [shares_of(5, 3, [1, 2, 3], source, prime)[:2] for _ in range(60_000)]
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
        shares_of(1, 2, points, stream("points"), TOY)
    with pytest.raises(ConfigError):
        Interpolation(points, TOY)


@pytest.mark.parametrize("threshold", [0, 4])
def test_a_threshold_out_of_range_is_refused(threshold):
    with pytest.raises(ConfigError):
        shares_of(1, threshold, [1, 2, 3], stream("threshold"))


def test_a_secret_outside_the_field_is_refused():
    with pytest.raises(ConfigError):
        shares_of(TOY, 2, [1, 2], stream("secret"), TOY)


def test_another_number_of_shares_is_refused():
    with pytest.raises(ConfigError):
        Interpolation([1, 2]).join([1, 2, 3])


@given(st.integers(0, PRIME - 1))
def test_shares_come_back_from_bytes(share):
    assert unpack_share(pack_shares([share])) == share


@pytest.mark.parametrize("data", [PRIME.to_bytes(33, "little"), b"\xff" * 33, bytes(32), bytes(34)])
def test_bytes_that_are_no_share_are_refused(data):
    with pytest.raises(PeerError):
        unpack_share(data)


@pytest.mark.parametrize(
    "points", [range(1, 301), range(1748, 2048), range(300, 0, -1), [*range(1, 200), *range(1900, 2048)]]
)
@pytest.mark.parametrize("secret", [0, PRIME - 1, 2**255])
def test_many_shares_are_the_values_of_one_polynomial(points, secret):
    """The compiled way takes over from 2^14 products on: its shares are those of plain integers."""
    threshold = 150
    shares = shares_of(secret, threshold, points, stream("limbs", secret))
    twin = stream("limbs", secret)
    falling = [twin.below(PRIME) for _ in range(threshold - 1)]
    for point, share in zip(points, shares, strict=True):
        powers = (coefficient * point ** (threshold - 1 - place) for place, coefficient in enumerate(falling))
        assert share == (sum(powers) + secret) % PRIME


def test_points_too_large_for_the_limbs_are_right_too():
    points = [2**11, *range(1, 200), PRIME - 1]
    shares = shares_of(77, 100, points, stream("large"))
    assert Interpolation(points[:100]).join(shares[:100]) == 77
    assert Interpolation(points[-100:]).join(shares[-100:]) == 77


def with_errors(shares, errors, prime=PRIME):
    """Shares with something added to some of them."""
    return [(share + errors.get(place, 0)) % prime for place, share in enumerate(shares)]


@st.composite
def patterns(draw, most=14):
    """A set of points, a threshold, and errors of any size at as many places as can be corrected."""
    points = draw(st.lists(st.integers(1, 2000), min_size=1, max_size=most, unique=True))
    threshold = draw(st.integers(1, len(points)))
    count = draw(st.integers(0, (len(points) - threshold) // 2))
    places = draw(st.permutations(range(len(points))))[:count]
    return points, threshold, {place: draw(st.integers(1, PRIME - 1)) for place in places}


@given(secrets, patterns())
def test_wrong_shares_are_corrected_and_named(secret, pattern):
    points, threshold, errors = pattern
    shares = with_errors(shares_of(secret, threshold, points, stream(secret)), errors)
    found = correct(points, threshold, shares, secret.__eq__)
    assert found == Corrected(secret, tuple(sorted(errors)))


@given(secrets, patterns())
def test_shares_are_corrected_without_a_check_of_the_secret(secret, pattern):
    """Within the bound there is one polynomial only, and it is found whoever asks."""
    points, threshold, errors = pattern
    shares = with_errors(shares_of(secret, threshold, points, stream(secret)), errors)
    assert correct(points, threshold, shares, lambda found: True).secret == secret


@given(secrets, st.integers(1, 12), st.data())
def test_one_error_more_than_the_bound_is_refused_or_right(secret, count, data):
    threshold = data.draw(st.integers(1, count))
    places = data.draw(st.permutations(range(count)))[: (count - threshold) // 2 + 1]
    errors = {place: data.draw(st.integers(1, PRIME - 1)) for place in places}
    points = range(1, count + 1)
    shares = with_errors(shares_of(secret, threshold, points, stream(secret)), errors)
    assert correct(points, threshold, shares, secret.__eq__) is None


def test_unchecked_liars_beyond_the_bound_are_believed():
    """Three of seven shift their shares to another polynomial of degree 2 that two honest shares lie on too."""
    points, threshold = range(1, 8), 3
    shares = shares_of(1000, threshold, points, stream("agree"))
    # 5 (x - 1) (x - 2) is zero at the first two points, so adding it at the rest makes another sharing.
    shift = {place: 5 * (place + 1 - 1) * (place + 1 - 2) for place in (2, 3, 4)}
    lies = with_errors(shares, shift)
    assert correct(points, threshold, lies, (1000).__eq__) is None
    believed = correct(points, threshold, lies, lambda found: True)
    assert believed == Corrected(1000 + 5 * 2, (5, 6))


def test_in_a_small_field_corrections_are_those_of_a_search():
    """All polynomials of degree 1 modulo 7 against all words of a sample: the nearest within the bound, or nobody."""
    prime, points = 7, [1, 2, 3, 4, 5, 6]
    codewords = {
        (secret, slope): tuple((secret + slope * point) % prime for point in points)
        for secret, slope in product(range(prime), repeat=2)
    }
    found_count = 0
    source = stream("search")
    for _ in range(3_000):
        word = tuple(source.below(prime) for _ in points)
        near = [
            (secret, tuple(place for place in range(6) if word[place] != code[place]))
            for (secret, _), code in codewords.items()
            if sum(left != right for left, right in zip(word, code, strict=True)) <= 2
        ]
        assert len(near) <= 1
        found = correct(points, 2, word, lambda secret: True, prime)
        assert (None if found is None else (found.secret, found.wrong)) == (near[0] if near else None)
        found_count += found is not None
    assert 100 < found_count < 2_900


def test_every_pair_of_errors_in_a_small_field_is_corrected():
    prime, points = 11, list(range(1, 8))
    shares = shares_of(4, 3, points, stream("pairs"), prime)
    for places in combinations(range(7), 2):
        for values in product(range(1, prime), repeat=2):
            wrong = with_errors(shares, dict(zip(places, values, strict=True)), prime)
            assert correct(points, 3, wrong, (4).__eq__, prime) == Corrected(4, places)


def test_a_thousand_shares_with_249_wrong_ones_are_corrected():
    points, threshold, secret = range(1, 1_001), 501, 2**255 - 19
    shares = shares_of(secret, threshold, points, stream("thousand"))
    source = stream("errors")
    errors = {int(place): source.below(PRIME - 1) + 1 for place in source.subset(1_000, 249)}
    found = correct(points, threshold, with_errors(shares, errors), secret.__eq__)
    assert found == Corrected(secret, tuple(sorted(errors)))


@pytest.mark.parametrize("count", [3, 5])
def test_corrections_take_a_share_for_each_point(count):
    with pytest.raises(ConfigError, match=f"4 shares must be given, got {count}"):
        correct([1, 2, 3, 4], 2, [0] * count, lambda secret: True)


@pytest.mark.parametrize(("points", "threshold"), [([0, 1, 2], 2), ([1, 1, 2], 2), ([1, 2], 3), ([1, 2], 0)])
def test_corrections_refuse_points_that_give_a_secret_away(points, threshold):
    with pytest.raises(ConfigError):
        correct(points, threshold, [0] * len(points), lambda secret: True)


def test_what_was_corrected_does_not_print_its_secret():
    assert "12345" not in repr(Corrected(12345, ()))


def test_shares_are_right_at_the_limit_of_the_quick_way():
    """A limb times 2^11 does not fit: that point is evaluated by plain integers."""
    for largest in (2047, 2048):
        points = [*range(1, 128), largest]
        hidden = [PRIME - 1 - number for number in range(16)]
        shares = split(hidden, len(points), points, Stream(digest("largest point", largest)))
        interpolation = Interpolation(points)
        assert [interpolation.join(each) for each in shares] == hidden
