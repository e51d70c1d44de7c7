import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2pfed.errors import ConfigError, PeerError
from d2pfed.secagg import wire

BINDING = bytes(range(32))
ids = st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=40).map(sorted)


@given(st.integers(0, 255), st.integers(0, 2**64 - 1), st.binary(max_size=200))
def test_a_frame_opens_to_what_was_put_in(kind, party, body):
    data = wire.frame(kind, BINDING, party, body[:7], body[7:])
    assert len(data) == wire.HEADER_BYTES + len(body)
    assert wire.unframe(data, kind, BINDING, party).rest() == body
    assert wire.kind_of(data) == kind


@given(st.data(), st.binary(max_size=60))
def test_any_flipped_bit_is_refused(data, body):
    message = bytearray(wire.frame(3, BINDING, 9, body))
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PeerError):
        wire.unframe(bytes(message), 3, BINDING, 9)


@pytest.mark.parametrize(("kind", "binding", "party"), [(4, BINDING, 9), (3, bytes(32), 9), (3, BINDING, 8)])
def test_a_frame_of_another_kind_session_or_client_is_refused(kind, binding, party):
    with pytest.raises(PeerError):
        wire.unframe(wire.frame(3, BINDING, 9, b"body"), kind, binding, party)


def test_a_frame_whose_party_is_unknown_says_it_and_still_has_its_kind():
    message = wire.frame(3, BINDING, 9, b"body")
    reader, party, binding = wire.unframe_unbound(message, 3)
    assert (reader.rest(), party, binding) == (b"body", 9, BINDING)
    with pytest.raises(PeerError, match="kind"):
        wire.unframe_unbound(message, 4)


@pytest.mark.parametrize("cut", [0, 1, wire.HEADER_BYTES - 1, wire.HEADER_BYTES, wire.HEADER_BYTES + 3])
def test_a_short_message_is_refused(cut):
    with pytest.raises(PeerError):
        wire.unframe(wire.frame(3, BINDING, 9, b"body")[:cut], 3, BINDING, 9)


def test_a_later_version_is_refused_and_named():
    message = bytearray(wire.frame(3, BINDING, 9))
    message[4] = wire.VERSION + 1
    with pytest.raises(PeerError, match="version"):
        wire.unframe(bytes(message), 3, BINDING, 9)


@given(ids)
def test_identities_come_back(cohort):
    reader = wire.Reader(memoryview(wire.pack_ids(cohort)))
    assert list(reader.ids()) == cohort
    reader.end()


@pytest.mark.parametrize("listed", [[2, 1], [1, 1], [0, 5, 5, 9]])
def test_identities_that_repeat_or_go_down_are_refused(listed):
    with pytest.raises(PeerError, match="increasing"):
        wire.Reader(memoryview(wire.pack_ids(listed))).ids()


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_subsets_come_back(flags):
    present = np.array(flags)
    packed = wire.pack_subset(present)
    assert len(packed) == (len(flags) + 7) // 8
    assert np.array_equal(wire.Reader(memoryview(packed)).subset(len(flags)), present)
    assert np.array_equal(wire.subset_of(len(flags), np.flatnonzero(present)), present)


def test_a_spare_bit_is_refused():
    with pytest.raises(PeerError, match="spare"):
        wire.Reader(memoryview(bytes([0b0001_0000]))).subset(4)


@given(st.text(max_size=60))
def test_texts_come_back(text):
    assert wire.Reader(memoryview(wire.pack_text(text))).text() == text


def test_a_text_that_is_too_long_or_not_utf8_is_refused():
    with pytest.raises(ConfigError):
        wire.pack_text("x" * 256)
    with pytest.raises(PeerError, match="UTF-8"):
        wire.Reader(memoryview(b"\x01\xff")).text()


def test_leftovers_are_refused():
    reader = wire.Reader(memoryview(b"ab"))
    reader.take(1)
    with pytest.raises(PeerError, match="1 more"):
        reader.end()


def test_a_binding_of_another_length_is_our_own_mistake():
    with pytest.raises(ConfigError):
        wire.frame(1, b"short", 0)


def test_an_announced_length_allocates_no_memory():
    huge = struct.pack("<4sBBHQQ32s", b"d2pf", wire.VERSION, 3, 0, 9, 2**62, BINDING) + bytes(16)
    count = wire.pack_integer(2**32 - 1, 4)
    tracemalloc.start()
    for _ in range(100):
        with pytest.raises(PeerError):
            wire.unframe(huge, 3, BINDING, 9)
        with pytest.raises(PeerError):
            wire.Reader(memoryview(count)).ids()
        with pytest.raises(PeerError):
            wire.Reader(memoryview(b"")).take(2**40)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_frame_says_its_kind_and_what_it_is_bound_to():
    data = wire.frame(3, bytes(range(32)), 7, b"body")
    assert (wire.kind_of(data), wire.binding_of(data)) == (3, bytes(range(32)))
