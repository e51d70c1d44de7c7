import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import encode_path
from d2pfed.secagg import crypto
from support.evil import LOW_ORDER

KEY = bytes(range(32))


def test_agreement_gives_the_iterated_values_of_rfc_7748():
    scalar = point = bytes([9]) + bytes(31)
    values = []
    for _ in range(1000):
        scalar, point = crypto.Agreement(scalar).agree(point), scalar
        values.append(scalar.hex())
    assert values[0] == "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"
    assert values[-1] == "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"


def test_both_sides_agree():
    left, right = crypto.Agreement(KEY), crypto.Agreement(bytes(31) + b"\x07")
    assert left.agree(right.public) == right.agree(left.public)


@pytest.mark.parametrize("point", LOW_ORDER)
def test_points_of_low_order_are_refused(point):
    with pytest.raises(PeerError, match="low order"):
        crypto.Agreement(KEY).agree(bytes.fromhex(point))


@pytest.mark.parametrize("point", LOW_ORDER)
@pytest.mark.parametrize("highest", [0, 128])
def test_keys_of_low_order_are_those_that_agree_on_zero(point, highest):
    key = bytearray.fromhex(point)
    key[31] |= highest
    for check in (crypto.require_order, crypto.Agreement(KEY).agree):
        with pytest.raises(PeerError, match="low order"):
            check(bytes(key))


def test_all_other_keys_near_those_of_low_order_agree():
    numbers = {int.from_bytes(bytes.fromhex(point), "little") for point in LOW_ORDER}
    others = {near + step for near in numbers for step in (-2, -1, 1, 2) if near + step >= 0} - numbers
    for number in others:
        key = number.to_bytes(32, "little")
        crypto.require_order(key)
        crypto.Agreement(KEY).agree(key)


def test_hkdf_is_as_written_in_rfc_5869():
    extracted = hmac.digest(bytes(32), KEY, hashlib.sha256)
    expanded = hmac.digest(extracted, encode_path("purpose", 7) + b"\x01", hashlib.sha256)
    assert crypto.hkdf(KEY, "purpose", 7) == expanded


@given(st.lists(st.one_of(st.text(max_size=5), st.integers(0, 99), st.binary(max_size=5)), min_size=1, max_size=4))
def test_any_change_of_a_path_changes_the_key(path):
    key = crypto.hkdf(KEY, *path)
    assert crypto.hkdf(KEY, *path, 0) != key
    assert crypto.hkdf(KEY, *path[:-1], f"{path[-1]}x") != key
    assert crypto.hkdf(bytes(32), *path) != key


@given(st.binary(max_size=100), st.data())
def test_a_ciphertext_opens_unless_a_bit_of_it_changes(plain, data):
    ciphertext = bytearray(crypto.seal(KEY, plain))
    assert len(ciphertext) == len(plain) + crypto.TAG_BYTES
    assert crypto.unseal(KEY, bytes(ciphertext)) == plain
    bit = data.draw(st.integers(0, 8 * len(ciphertext) - 1))
    ciphertext[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PeerError):
        crypto.unseal(KEY, bytes(ciphertext))


def test_a_ciphertext_does_not_open_with_another_key():
    with pytest.raises(PeerError):
        crypto.unseal(bytes(32), crypto.seal(KEY, b"plain"))


def test_signatures_are_those_of_rfc_8032():
    secret = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    half = "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
    other_half = "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
    assert crypto.signing_public(secret).hex() == public
    assert crypto.sign(secret, b"").hex() == half + other_half


def test_a_signature_fits_its_key_and_its_statement_only():
    signature = crypto.sign(KEY, b"statement")
    crypto.require_signature(crypto.signing_public(KEY), signature, b"statement")
    for public, claimed, statement in (
        (crypto.signing_public(bytes(32)), signature, b"statement"),
        (crypto.signing_public(KEY), signature, b"another"),
        (crypto.signing_public(KEY), bytes(64), b"statement"),
        (crypto.signing_public(KEY), signature[:-1], b"statement"),
        (b"no key", signature, b"statement"),
    ):
        with pytest.raises(PeerError):
            crypto.require_signature(public, claimed, statement)
