"""Positions of a client's log: their bytes, their signature, and the chain that they point into."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import digest, first_head, next_head
from d2pfed.secagg import crypto
from d2pfed.secagg.roster import (
    NO_POSITION,
    POSITION_BYTES,
    Position,
    sign_position,
    unpack_position,
    verify_position,
)

SECRET, AUTHORITY = digest("a client's secret"), crypto.signing_public(digest("the authority's secret"))
PUBLIC = crypto.signing_public(SECRET)


def path(*parts):
    """The encoding of a path by its definition, apart from the package's own."""
    joined = b""
    for part in parts:
        body = part if isinstance(part, bytes) else str(part).encode()
        joined += {bytes: b"b", int: b"i", str: b"s"}[type(part)] + len(body).to_bytes(8, "big") + body
    return joined


def test_the_heads_are_those_of_their_definition():
    head = hashlib.sha256(path("d2pfed log", AUTHORITY, 7)).digest()
    assert first_head(AUTHORITY, 7) == head
    assert (
        next_head(head, 1, "begun", b"body")
        == hashlib.sha256(path("d2pfed log", head, 1, "begun", b"body")).digest()
    )


def test_a_head_depends_on_every_row_before_it():
    rows = [(1, "opening", b""), (2, "begun", b"x"), (3, "charge", b"y")]

    def end(rows, client=7):
        head = first_head(AUTHORITY, client)
        for row in rows:
            head = next_head(head, *row)
        return head

    others = [rows[:2], rows[1:], [rows[1], rows[0], rows[2]], [(1, "opening", b"z"), *rows[1:]]]
    heads = {end(rows), end(rows, 8), *(end(other) for other in others)}
    assert len(heads) == 6


def test_a_position_has_the_bytes_of_its_definition():
    position = sign_position(SECRET, AUTHORITY, 7, 258, bytes(range(32)))
    data = position.pack()
    assert len(data) == POSITION_BYTES == 104
    assert data[:40] == bytes([2, 1, 0, 0, 0, 0, 0, 0]) + bytes(range(32))
    stated = hashlib.sha256(path("d2pfed position", AUTHORITY, 7, 258, bytes(range(32)))).digest()
    assert data[40:] == crypto.sign(SECRET, stated)


@given(st.integers(0, 2**64 - 1), st.binary(min_size=32, max_size=32))
def test_a_position_comes_back_from_its_bytes(count, head):
    position = Position(count, head, bytes(range(64)))
    assert unpack_position(position.pack()) == position


def test_a_signed_position_is_accepted_as_its_clients_alone():
    position = sign_position(SECRET, AUTHORITY, 7, 3, digest("head"))
    verify_position(position, PUBLIC, AUTHORITY, 7)
    other = crypto.signing_public(digest("another secret"))
    for public, authority, client in ((other, AUTHORITY, 7), (PUBLIC, other, 7), (PUBLIC, AUTHORITY, 8)):
        with pytest.raises(PeerError, match="signature"):
            verify_position(position, public, authority, client)


def test_no_byte_of_a_position_can_be_changed():
    data = sign_position(SECRET, AUTHORITY, 7, 3, digest("head")).pack()
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(PeerError, match="signature"):
            verify_position(unpack_position(bytes(damaged)), PUBLIC, AUTHORITY, 7)


def test_zero_bytes_are_no_clients_position():
    with pytest.raises(PeerError, match="signature"):
        verify_position(unpack_position(NO_POSITION), PUBLIC, AUTHORITY, 7)


@pytest.mark.parametrize("size", [0, 103, 105])
def test_another_number_of_bytes_is_no_position(size):
    with pytest.raises(PeerError, match=f"must have 104 bytes, got {size}"):
        unpack_position(bytes(size))
