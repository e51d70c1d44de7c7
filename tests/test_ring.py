"""Laws of the ring: representatives, sums, and the packed form."""

import json
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import Ring
from support.rings import subtract_into
from support.stats import check_fits

ALL_BITS = range(1, 33)
rings = st.builds(Ring, st.integers(1, 32))


def ring_vector(ring, count, name="vector"):
    return ring.uniform(Entropy.replay(name.encode()).child(ring.bits, count).stream(), count)


def bit_by_bit(ring, values):
    """Pack by the definition: bit j of value i is bit i * bits + j of the string."""
    whole = sum(int(value) << (index * ring.bits) for index, value in enumerate(values))
    return whole.to_bytes(ring.packed_bytes(len(values)), "little")


@pytest.mark.parametrize("bits", [-1, 0, 33])
def test_a_ring_has_between_1_and_32_bits(bits):
    with pytest.raises(ConfigError, match=str(bits)):
        Ring(bits)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_centre_undoes_wrap_at_the_boundaries(bits):
    ring = Ring(bits)
    half = ring.modulus // 2
    inside = np.array([-half, -half + 1, -1, 0, half - 1][:: 1 if bits > 1 else 3], np.int64)
    assert np.array_equal(ring.center(ring.wrap(inside)), inside)
    assert ring.center(ring.wrap(np.array([half], np.int64))).tolist() == [-half]


@given(rings, st.lists(st.integers(-(2**62), 2**62), max_size=50))
def test_wrap_and_centre_agree_with_the_integers(ring, values):
    wrapped = ring.wrap(np.array(values, np.int64))
    assert wrapped.tolist() == [value % ring.modulus for value in values]
    half = ring.modulus // 2
    assert ring.center(wrapped).tolist() == [(value + half) % ring.modulus - half for value in values]


@given(rings, st.integers(0, 300))
def test_sums_agree_with_the_integers_and_subtract_undoes_add(ring, count):
    left, right = ring_vector(ring, count, "left"), ring_vector(ring, count, "right")
    total = left.copy()
    ring.add_into(total, right)
    assert total.tolist() == [(int(a) + int(b)) % ring.modulus for a, b in zip(left, right, strict=True)]
    subtract_into(ring, total, right)
    assert np.array_equal(total, left)


def test_sums_do_not_stretch_a_short_vector():
    ring = Ring(8)
    with pytest.raises(ValueError, match="shapes"):
        ring.add_into(np.zeros(5, np.uint32), np.ones(1, np.uint32))


@pytest.mark.parametrize("bits", ALL_BITS)
def test_packing_follows_its_definition_and_unpack_undoes_it(bits):
    ring = Ring(bits)
    for count in (0, 1, 2, 7, 8, 9, 63, 64, 65, 257, 1000):
        values = ring_vector(ring, count)
        packed = ring.pack(values)
        assert packed == bit_by_bit(ring, values)
        assert np.array_equal(ring.unpack(packed, count), values)
        assert np.array_equal(ring.unpack(memoryview(packed), count), values)


def numpy_pack(ring, values):
    """Pack a long vector by numpy's own bit strings."""
    bits = np.unpackbits(values.view(np.uint8).reshape(-1, 4), axis=1, count=ring.bits, bitorder="little")
    return np.packbits(bits, bitorder="little").tobytes()


@pytest.mark.parametrize("bits", ALL_BITS)
def test_packing_of_long_vectors_is_numpys(bits):
    ring = Ring(bits)
    for count in (4095, 4096, 4097, 20_001):
        values = ring_vector(ring, count)
        assert ring.pack(values) == numpy_pack(ring, values)
        assert np.array_equal(ring.unpack(ring.pack(values), count), values)


def test_only_the_lowest_bits_of_values_are_packed():
    values = np.arange(2**32 - 100, 2**32, dtype=np.uint32)
    for bits in ALL_BITS:
        assert Ring(bits).pack(values) == Ring(bits).pack(Ring(bits).wrap(values.astype(np.int64)))


def test_a_slice_is_packed_as_its_copy_is():
    values = ring_vector(Ring(13), 999)
    for part in (values[1:], values[::3], values[::-1]):
        assert Ring(13).pack(part) == Ring(13).pack(part.copy())


@pytest.mark.parametrize("bits", ALL_BITS)
def test_nothing_of_a_vector_is_left_in_the_padding_of_the_next(bits):
    """A peer would refuse padding bits that are set, and they would tell what was packed before."""
    ring = Ring(bits)
    for count in range(1, 34):
        values = ring_vector(ring, count)
        ring.pack(np.full(5000, ring.modulus - 1, np.uint32))
        assert ring.pack(values) == bit_by_bit(ring, values)


@pytest.mark.parametrize("bits", [1, 13, 31])
def test_packing_and_unpacking_take_at_most_twice_the_memory_of_both_forms(bits):
    ring, count = Ring(bits), 100_001
    values = ring_vector(ring, count)
    packed = ring.pack(values)
    for work in (lambda: ring.pack(values), lambda: ring.unpack(packed, count)):
        work()  # by now it is compiled
        tracemalloc.start()
        work()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * (len(packed) + values.nbytes)


def test_known_answers():
    known = json.loads((Path(__file__).parent / "vectors" / "v2" / "ring.json").read_text())
    stream = Entropy.replay(known["seed"].encode()).stream()
    for case in known["uniform"]:
        ring = Ring(case["bits"])
        values = ring.uniform(stream, len(case["values"]))
        assert values.tolist() == case["values"]
        assert ring.pack(values).hex() == case["packed"]
        assert ring.center(values).tolist() == case["centred"]


@pytest.mark.parametrize("bits", ALL_BITS)
def test_packing_holds_the_extreme_values(bits):
    ring = Ring(bits)
    values = np.full(101, ring.modulus - 1, np.uint32)
    assert np.array_equal(ring.unpack(ring.pack(values), 101), values)


@pytest.mark.parametrize("count", [0, 1, 13])
def test_unpack_refuses_a_wrong_length(count):
    ring = Ring(11)
    packed = ring.pack(ring_vector(ring, count))
    for damaged in (packed + b"\0", packed[:-1]):
        if damaged != packed:
            with pytest.raises(PeerError, match="bytes"):
                ring.unpack(damaged, count)


def test_unpack_refuses_padding_bits():
    ring = Ring(11)
    packed = bytearray(ring.pack(ring_vector(ring, 13)))  # 143 bits: one padding bit
    packed[-1] |= 0x80
    with pytest.raises(PeerError, match="padding"):
        ring.unpack(bytes(packed), 13)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_a_packed_vector_is_added_as_it_is_unpacked(bits):
    ring = Ring(bits)
    for count in (0, 1, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 64, 257, 1000):
        first, values = ring_vector(ring, count, "first"), ring_vector(ring, count)
        total, expected, packed = first.copy(), first.copy(), ring.pack(values)
        ring.add_packed_into(total, memoryview(b"odd" + packed)[3:])
        ring.add_into(expected, values)
        assert np.array_equal(total & np.uint32(ring.modulus - 1), expected)
        damaged = [packed + b"\0", packed[:-1]] if count else [b"\0"]
        if count * bits % 8:
            damaged.append(packed[:-1] + bytes([packed[-1] | 0x80]))
        for each in damaged:
            before = total.copy()
            with pytest.raises(PeerError):
                ring.add_packed_into(total, each)
            assert np.array_equal(total, before)


@given(rings, st.integers(1, 100), st.data())
def test_two_different_byte_strings_never_unpack_to_one_vector(ring, count, data):
    packed = ring.pack(ring_vector(ring, count))
    flipped = data.draw(st.integers(0, 8 * len(packed) - 1))
    damaged = bytearray(packed)
    damaged[flipped // 8] ^= 1 << flipped % 8
    if flipped < count * ring.bits:
        assert not np.array_equal(ring.unpack(damaged, count), ring.unpack(packed, count))
    else:
        with pytest.raises(PeerError):
            ring.unpack(damaged, count)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_a_uniform_vector_is_the_low_bits_of_whole_words(bits):
    ring, width = Ring(bits), 1 if bits <= 8 else 2 if bits <= 16 else 4
    stream, twin = (Entropy.replay(b"mask").stream() for _ in range(2))
    vector = ring.uniform(stream, 1001)
    spent = twin.bytes(1001 * width)
    words = [int.from_bytes(spent[at : at + width], "little") for at in range(0, len(spent), width)]
    assert vector.tolist() == [word % ring.modulus for word in words]
    assert stream.bytes(8) == twin.bytes(8)


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("count", [0, 1, 1001, 2**15, 2**15 + 1])
def test_a_mask_added_in_place_is_the_uniform_vector(bits, count):
    ring = Ring(bits)
    start = ring_vector(ring, count, "start")
    mask = ring.uniform(Entropy.replay(b"mask").stream(), count)
    total, stream = start.copy(), Entropy.replay(b"mask").stream()
    ring.add_masks_into(total, (stream,), ())
    ring.add_into(expected := start.copy(), mask)
    assert np.array_equal(total, expected)
    twin = Entropy.replay(b"mask").stream()
    twin.bytes(count * ring.mask_word.itemsize)
    assert stream.bytes(8) == twin.bytes(8)
    ring.add_masks_into(total, (), (Entropy.replay(b"mask").stream(),))
    assert np.array_equal(total, start)
    ring.add_masks_into(total, (), (Entropy.replay(b"mask").stream(),))
    ring.add_into(total, mask)
    assert np.array_equal(total, start)


@pytest.mark.parametrize("bits", [7, 8, 13, 16, 21, 32])
@pytest.mark.parametrize("count", [5, 2**15 + 3])
def test_masks_added_together_are_those_added_one_by_one(bits, count):
    ring = Ring(bits)
    together = ring_vector(ring, count, "start")
    one_by_one = together.copy()
    roots = [Entropy.replay(bytes([number])) for number in range(5)]
    ring.add_masks_into(together, [root.stream() for root in roots[:3]], [root.stream() for root in roots[3:]])
    for number, root in enumerate(roots):
        mask = ring.uniform(root.stream(), count)
        (ring.add_into if number < 3 else partial(subtract_into, ring))(one_by_one, mask)
    assert together.max() < ring.modulus
    assert np.array_equal(together, one_by_one)


def test_a_mask_reaches_a_slice_and_nothing_beside_it():
    ring, total = Ring(13), np.zeros(300, np.uint32)
    ring.add_masks_into(total[100:200], (Entropy.replay(b"mask").stream(),), ())
    assert np.array_equal(total[100:200], ring.uniform(Entropy.replay(b"mask").stream(), 100))
    assert not total[:100].any()
    assert not total[200:].any()


def one_in(modulus):
    return lambda values: np.where((values >= 0) & (values < modulus), 1 / modulus, 0.0)


@pytest.mark.parametrize("bits", [1, 3, 5])
def test_a_uniform_vector_is_uniform(bits):
    ring = Ring(bits)
    check_fits(ring_vector(ring, 10**6).astype(np.int64), one_in(ring.modulus), 1e-6)


def test_the_check_rejects_masks_that_never_take_the_last_value():
    ring = Ring(5)
    draws = ring_vector(ring, 10**6)
    with pytest.raises(AssertionError):
        check_fits(draws[draws != ring.modulus - 1].astype(np.int64), one_in(ring.modulus), 1e-6)
