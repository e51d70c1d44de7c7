"""The tree of randomness: known answers, separate keys, exact uniform integers, no way around the system."""

import hashlib
import hmac
import json
import os
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import Entropy, LongStream, Stream, derive, digest, encode_path
from support.stats import check_fits

KNOWN = json.loads((Path(__file__).parent / "vectors" / "v2" / "randomness.json").read_text())
FALSE_ALARM = 1e-6

parts = st.one_of(st.text(max_size=6), st.integers(-300, 2**70), st.binary(max_size=6))
paths = st.lists(parts, max_size=4)


def expand(key, info, length=32):
    """HKDF-Expand for one block, from its definition."""
    return hmac.new(key, info + b"\x01", hashlib.sha256).digest()[:length]


def test_the_keystream_is_aes_256_in_counter_mode_from_zero():
    for known in KNOWN["aes_256_ctr"]:
        blocks = bytes.fromhex("".join(known["blocks"]))
        assert Stream(bytes.fromhex(known["key"])).bytes(len(blocks)) == blocks


def test_every_bit_of_a_key_counts():
    key = bytes(range(32))
    streams = {Stream(key).bytes(16)}
    for bit in range(256):
        flipped = (int.from_bytes(key, "little") ^ 1 << bit).to_bytes(32, "little")
        streams.add(Stream(flipped).bytes(16))
    assert len(streams) == 257


def test_keys_are_derived_by_hkdf_expand():
    known = KNOWN["hkdf_sha256_rfc5869_case_1"]
    assert expand(bytes.fromhex(known["prk"]), bytes.fromhex(known["info"])).hex() == known["okm"][:64]
    key = bytes(range(32))
    assert derive(key, "a", 1, b"b") == expand(key, encode_path("a", 1, b"b"))


def test_replayed_streams_have_known_answers():
    known = KNOWN["replay"]
    root = Entropy.replay(known["seed"].encode())
    assert root.stream().bytes(32).hex() == known["root"]
    assert root.child("client", 7, b"\x00").stream().bytes(32).hex() == known["child"]
    assert digest("a", 1, b"b").hex() == known["digest"]


@given(paths, paths)
def test_any_change_of_a_path_changes_the_key(left, right):
    assume([(type(part), part) for part in left] != [(type(part), part) for part in right])
    assert encode_path(*left) != encode_path(*right)
    assert derive(bytes(32), *left) != derive(bytes(32), *right)
    assert digest(*left) != digest(*right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("ab",), ("a", "b")),
        (("asb",), ("a", "b")),
        (("1",), (1,)),
        (("a",), (b"a",)),
        (("a", ""), ("a",)),
        (("", "a"), ("a", "")),
        ((1, 23), (12, 3)),
    ],
)
def test_paths_that_look_alike_have_different_keys(left, right):
    assert derive(bytes(32), *left) != derive(bytes(32), *right)


def test_the_check_of_paths_sees_a_join_without_lengths():
    def joined(*path):
        return b"".join(str(part).encode() for part in path)

    assert joined("ab") == joined("a", "b")
    assert joined(1) == joined("1")


@given(paths, paths)
def test_children_of_children_depend_on_the_whole_path_and_repeat(first, second):
    root = Entropy.replay(b"tree")
    assert root.child(*first).child(*second) == root.child(*first).child(*second)
    assert root.child(*first).child(*second).key != root.child(*first, *second).key


def test_a_part_that_is_neither_text_integer_nor_bytes_is_refused():
    for part in (True, 1.0, None, np.int64(3)):
        with pytest.raises(ConfigError, match="a path has texts, whole numbers and bytes"):
            derive(bytes(32), part)


def test_children_inherit_the_mark_of_replay_and_a_deployment_refuses_it():
    child = Entropy.replay(b"known").child("a").child("b")
    assert child.is_replayed
    with pytest.raises(ConfigError, match="replayed"):
        child.require_system()
    system = Entropy.system().child("a").child("b")
    assert not system.is_replayed
    assert system.require_system() is system


def test_system_entropy_is_fresh_each_time():
    assert Entropy.system().key != Entropy.system().key


def test_without_the_system_s_generator_there_is_no_entropy(monkeypatch):
    def broken(size):
        raise NotImplementedError("no source of randomness")

    monkeypatch.setattr(os, "urandom", broken)
    with pytest.raises(NotImplementedError, match="no source"):
        Entropy.system()


def test_keys_do_not_show_in_texts():
    assert Entropy.replay(b"known").key.hex() not in repr(Entropy.replay(b"known"))
    assert "key" not in repr(Entropy.system())


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_keys_of_other_lengths_are_refused(size):
    with pytest.raises(ConfigError, match=str(size)):
        derive(bytes(size), "a")
    with pytest.raises(ConfigError, match=str(size)):
        Entropy(bytes(size), is_replayed=True)


@given(st.lists(st.integers(0, 70), max_size=6))
def test_a_stream_gives_the_same_bytes_however_it_is_read(sizes):
    whole = Stream(bytes(32)).bytes(8 * sum(sizes))
    by_words, by_fill = Stream(bytes(32)), Stream(bytes(32))
    assert b"".join(by_words.words(size).tobytes() for size in sizes) == whole
    filled = []
    for size in sizes:
        out = np.empty(8 * size, np.uint8)
        by_fill.fill(out)
        filled.append(out.tobytes())
    assert b"".join(filled) == whole


def test_a_long_fill_crosses_its_chunks():
    out = np.empty((1 << 19) + 13, np.uint8)
    Stream(bytes(32)).fill(out)
    assert out.tobytes() == Stream(bytes(32)).bytes(out.size)


class _UsedUpError(Exception):
    """The chosen bytes are used up."""


class ChosenBytes(Stream):
    """A stream that begins with chosen bytes and then refuses."""

    def __init__(self, chosen):
        self._chosen = chosen

    def bytes(self, count):
        participations, self._chosen = self._chosen[:count], self._chosen[count:]
        if len(participations) < count:
            raise _UsedUpError
        return participations


def outcomes(draw, size):
    """Count what a function returns over all byte strings of a size; None stands for a rejection."""
    counts = {}
    for value in range(256**size):
        try:
            result = draw(ChosenBytes(value.to_bytes(size, "little")))
        except _UsedUpError:
            result = None
        counts[result] = counts.get(result, 0) + 1
    return counts


@pytest.mark.parametrize("bound", [2, 3, 5, 6, 100, 128, 129, 255, 256, 257, 1000])
def test_uniform_integers_are_exactly_uniform(bound):
    size = ((bound - 1).bit_length() + 7) // 8
    counts = outcomes(lambda stream: stream.below(bound), size)
    rejected = counts.pop(None, 0)
    assert sorted(counts) == list(range(bound))
    assert len(set(counts.values())) == 1
    assert rejected < 256**size / 2


def test_the_count_sees_a_remainder_that_favours_small_values():
    counts = outcomes(lambda stream: stream.bytes(1)[0] % 100, 1)
    assert len(set(counts.values())) > 1


def test_a_bound_of_one_needs_no_bits_and_a_lower_one_is_refused():
    assert ChosenBytes(b"").below(1) == 0
    for bound in (0, -1):
        with pytest.raises(ConfigError, match=str(bound)):
            Stream(bytes(32)).below(bound)


def test_subsets_are_uniform():
    stream = Entropy.replay(b"subsets").stream()
    names = {subset: index for index, subset in enumerate(combinations(range(6), 3))}
    draws = np.array([names[tuple(stream.subset(6, 3).tolist())] for _ in range(40_000)])
    check_fits(draws, lambda values: np.where((values >= 0) & (values < 20), 1 / 20, 0.0), FALSE_ALARM)
    biased = np.where(np.arange(draws.size) % 10 == 0, np.minimum(draws, 9), draws)
    with pytest.raises(AssertionError, match="chi-square"):
        check_fits(biased, lambda values: np.where((values >= 0) & (values < 20), 1 / 20, 0.0), FALSE_ALARM)


@given(st.integers(0, 60), st.data())
def test_a_subset_has_its_size_and_no_repeats(population, data):
    size = data.draw(st.integers(0, population))
    subset = Entropy.replay(b"sizes").child(population, size).stream().subset(population, size)
    assert subset.tolist() == sorted(set(subset.tolist()))
    assert subset.size == size
    assert all(0 <= member < population for member in subset)


@pytest.mark.parametrize(("population", "size"), [(5, 6), (5, -1), (0, 1)])
def test_subsets_that_do_not_exist_are_refused(population, size):
    with pytest.raises(ConfigError, match="subset"):
        Stream(bytes(32)).subset(population, size)


@pytest.mark.parametrize("size", [0, 16, 24, 31, 33])
def test_a_stream_takes_no_shorter_key(size):
    with pytest.raises(ConfigError, match=f"32 bytes, got {size}"):
        Stream(bytes(size))


def test_uniform_integers_have_a_bound_from_1_to_2_to_the_63_and_no_bias():
    stream = Stream(bytes(32))
    assert stream.below_each(1, 3).tolist() == [0, 0, 0]
    assert stream.below_each(1 << 63, 100).max() > 1 << 61
    for bound in (0, -1, (1 << 63) + 1):
        with pytest.raises(ConfigError, match=r"a bound in \[1, 2\^63\]"):
            stream.below_each(bound, 1)
    # 2^64 - 1 is the one word beyond the last whole multiple of 3.
    words = iter([np.array([2**64 - 1, 2**64 - 2], np.uint64), np.array([7], np.uint64)])
    scripted = SimpleNamespace(words=lambda _count: next(words))
    assert Stream.below_each(scripted, 3, 2).tolist() == [1, 2]


@pytest.mark.parametrize("sizes", [(32,), (33, 1, 700_000), (600_000, 15, 16, 17)])
def test_a_long_stream_is_the_same_stream(sizes):
    key = digest("long")
    long, short = LongStream(key), Stream(key)
    for size in sizes:
        found, expected = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        long.fill(found)
        short.fill(expected)
        assert np.array_equal(found, expected)
