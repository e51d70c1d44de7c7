import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.linalg import hadamard

from d2pfed.errors import ConfigError
from d2pfed.noise.codec import (
    Centers,
    Codec,
    _add_rows,
    _square,
    conditional_round,
    rounded_radius,
    rounded_square,
    squared_norm,
    stochastic_round,
)
from d2pfed.numerics.randomness import Entropy, Stream, digest
from d2pfed.numerics.rotation import Fold, Hadamard, RandomPhase, seeded_bits

SEED = bytes(range(32))


def codec(dimension: int = 100, **changes) -> Codec:
    return Codec(**({"rotation": Hadamard(dimension), "clip": 1.0, "granularity": 0.05} | changes))


def _folded(dimension: int) -> Fold:
    return Fold(dimension, dimension // 4)


def exact_square(values) -> int:
    return sum(int(v) ** 2 for v in values)


# NaN-free floats of every kind: zeros of both signs, subnormals, the largest numbers of each width.
nasty = st.one_of(
    *(
        hnp.arrays(
            dtype,
            st.integers(1, 20),
            elements=st.floats(width=8 * dtype().nbytes, allow_nan=False, allow_infinity=False),
        )
        for dtype in (np.float16, np.float32, np.float64)
    )
)


@settings(max_examples=2_000)
@given(nasty)
def test_no_vector_exceeds_the_bound(update):
    distribution = codec(len(update))
    centres = distribution.prepare(update, SEED)
    assert exact_square(centres.values) <= distribution.grid_radius**2


@pytest.mark.parametrize("scale", [1e-45, 1e-30, 1e-3, 0.999999, 1.0, 1.0000001, 10.0, 1e30, 1e300])
@pytest.mark.parametrize("rotation", [Hadamard, RandomPhase, _folded])
def test_a_hundred_thousand_nasty_vectors_stay_within_the_bound(scale, rotation):
    """27 cells of 5,600 vectors: dense, one-hot, constant and alternating, at norms from nothing to the largest."""
    distribution = codec(16, rotation=rotation(16))
    stream = Entropy.replay(f"{scale}{rotation.__name__}".encode()).stream()
    dense = stream.below_each(2_000_001, 1_400 * 16).reshape(-1, 16) / 1e6 - 1
    shapes = [dense, np.eye(16)[np.arange(1_400) % 16], np.ones((1_400, 16)), dense.round()]
    for shape in shapes:
        norms = np.linalg.norm(shape, axis=1, keepdims=True)
        for update in shape / np.where(norms > 0, norms, 1) * scale:
            assert exact_square(distribution.prepare(update, SEED).values.tolist()) <= distribution.grid_radius**2


def test_a_fold_cannot_lengthen_a_vector_beyond_the_bound():
    """The twin that clips before the fold alone would send a vector that is longer by the root of the terms."""
    folding = codec(rotation=Fold(4096, 64))
    update = folding.rotation.inverse(np.eye(1, 64, dtype=np.float32)[0], SEED)  # the direction that folds add up
    update /= np.linalg.norm(update)
    clipped_before = folding.rotation.forward(update, SEED)
    assert np.linalg.norm(clipped_before) == pytest.approx(8, rel=1e-5)
    sent = folding.prepare(update, SEED).values
    assert 0.9 * folding.grid_radius < math.sqrt(exact_square(sent)) <= folding.grid_radius


def test_rows_that_a_fold_lengthens_stay_within_the_bound():
    """Each row is one sum's direction: 128 equal coordinates of just above half a unit, which rounding doubles."""
    coarse = codec(rotation=Fold(4096, 128), granularity=0.11, fraction_bits=0)
    rows = np.stack([coarse.rotation.inverse(row, SEED) for row in hadamard(128)[:9]])
    totals = np.zeros((len(rows), 128), np.int64)
    coarse.add_prepared(totals, np.arange(len(rows)), rows, SEED)
    assert all(exact_square(total) <= coarse.grid_radius**2 for total in totals)
    assert np.array_equal(totals, [coarse.prepare(row, SEED).values for row in rows])


def test_the_check_of_the_bound_rejects_a_vector_that_is_one_unit_too_long():
    inside = np.array([3, 4], np.int64)
    assert Centers(inside, 5, 0).steps == 5
    with pytest.raises(ConfigError, match="exceeds its bound of 5"):
        Centers(np.array([3, 5], np.int64), 5, 0)


@given(hnp.arrays(np.int64, st.integers(0, 50), elements=st.integers(-(2**24), 2**24)))
def test_the_squared_norm_is_exact(values):
    assert squared_norm(values, 2**24) == exact_square(values)


def test_the_squared_norm_is_exact_where_64_bits_would_overflow():
    values = np.full(1 << 16, 1 << 24, np.int64)
    assert squared_norm(values, 1 << 24) == 1 << 64
    assert squared_norm(np.array([1 << 62, 1], np.int64), 1000) == 1000**2 + 1


def test_the_squared_norm_is_exact_for_the_largest_entries():
    """Entries have 25 bits and a sign, so squares are up to 2^50; a larger entry is too long for every radius."""
    for count in (4095, 4096, 4097, 8192, 20_000):
        assert squared_norm(np.full(count, -(2**25), np.int64), 1) == count * 2**50
    assert squared_norm(np.array([-(2**25) - 1], np.int64), 1000) == 1000**2 + 1
    assert squared_norm(np.array([2**25], np.int64), 1000) == 1000**2 + 1


@settings(max_examples=200)
@given(
    hnp.arrays(np.float32, 37, elements=st.floats(-1, 1, width=32)),
    st.sampled_from([Hadamard, RandomPhase]),
    st.integers(0, 12),
)
def test_decoding_an_encoded_vector_gives_it_back_within_the_grid(update, rotation, bits):
    distribution = codec(37, rotation=rotation(37), clip=10.0, granularity=0.1, fraction_bits=bits)
    whole = distribution.prepare(update, SEED).values << (12 - bits)
    fine = codec(37, rotation=rotation(37), clip=10.0, granularity=0.1 / 4096, fraction_bits=0)
    back = fine.decode(whole, SEED, 1)
    half_a_grid_unit = 0.1 / 2**bits / 2
    assert np.linalg.norm(back - update) <= half_a_grid_unit * math.sqrt(distribution.length) + 1e-4


def test_a_long_vector_is_scaled_to_the_clip_and_keeps_its_direction():
    distribution = codec(1000)
    update = np.sin(np.arange(1000)).astype(np.float32) * 100
    back = codec(1000, granularity=0.05 / 256).decode(distribution.prepare(update, SEED).values, SEED, 1)
    assert 0.99 < np.linalg.norm(back) <= 1.0 + 1e-6
    assert np.dot(back, update) / np.linalg.norm(back) / np.linalg.norm(update) > 0.999


@pytest.mark.parametrize("dithered", [False, True])
def test_long_vectors_average_four_radii_below_the_norm_bound(dithered):
    """What rounding adds on average is taken off before, and four radii more, as much as it varies; nothing else."""
    radius, length, seeds = 125, 2**14, 32
    update = 1000 * np.sin(np.arange(length)).astype(np.float32)
    whole = codec(length, clip=float(radius), granularity=1.0, fraction_bits=0)
    below = 0
    for seed in range(seeds):
        dither = whole.dither(Stream(digest("dither", seed))) if dithered else None
        below += radius**2 - exact_square(whole.prepare(update, digest("seed", seed), dither).values.tolist())
    assert 3.5 < below / seeds / radius < 4.5


def test_the_box_bounds_each_rotated_coordinate():
    distribution = codec(64, granularity=0.01, box=0.05)
    values = distribution.prepare(np.eye(64, dtype=np.float32)[3], SEED).values
    assert np.abs(values).max() == math.floor(0.05 / 0.01 * 256)


def test_the_mean_divides_by_the_planned_cohort_whoever_came():
    distribution = codec(64)
    total = np.arange(64, dtype=np.int64)
    np.testing.assert_allclose(
        distribution.decode(total, SEED, 10) * 10, distribution.decode(total, SEED, 1), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("position", [0, 50, 99])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_nan_and_infinity_are_refused(position, poison, dtype):
    update = np.zeros(100, dtype)
    update[position] = poison
    with pytest.raises(ConfigError, match="finite"):
        codec().prepare(update, SEED)


@pytest.mark.parametrize(
    "update", [np.zeros(99), np.zeros((100, 1)), np.zeros(0), np.zeros(100, int), np.zeros(100, complex)]
)
def test_other_shapes_and_types_are_refused(update):
    with pytest.raises(ConfigError, match="an update must"):
        codec().prepare(update, SEED)


def test_a_sum_of_another_length_is_refused():
    with pytest.raises(ConfigError, match="a sum must have shape"):
        codec().decode(np.zeros(100, np.int64), SEED, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"clip": 0.0},
        {"clip": math.nan},
        {"granularity": -1.0},
        {"granularity": math.inf},
        {"granularity": 1e-9},
        {"granularity": 1e9},
        {"fraction_bits": 17},
        {"box": 0.01},
    ],
)
def test_a_codec_that_cannot_work_does_not_exist(changes):
    with pytest.raises(ConfigError):
        codec(**changes)


def test_a_radius_of_2_to_the_24_grid_units_is_the_largest():
    """Beyond it float32 does not hold every integer."""
    assert codec(clip=2.0**24, granularity=1.0, fraction_bits=0).grid_radius == 2**24
    assert Centers(np.array([2**24], np.int64), 2**24, 0).steps == 2**24
    assert float(np.float32(2**24 + 1)) != 2**24 + 1
    with pytest.raises(ConfigError, match=r"2\^24 grid units"):
        codec(clip=2.0**24 + 1, granularity=1.0, fraction_bits=0)
    with pytest.raises(ConfigError, match=r"\[1, 2\^24\], got 16777217"):
        Centers(np.zeros(1, np.int64), 2**24 + 1, 0)


def test_the_radius_never_exceeds_the_clip():
    for granularity in np.linspace(0.01, 0.09, 57):
        distribution = codec(granularity=float(granularity))
        assert distribution.radius * Fraction(distribution.granularity) <= Fraction(distribution.clip)


def test_stochastic_rounding_is_unbiased_and_moves_less_than_a_step():
    values = np.arange(-512, 513, dtype=np.int64).repeat(4_000)
    centres = Centers(values, 1 << 24, 8)
    rounded = stochastic_round(centres, Entropy.replay(b"rounding").stream())
    assert np.all(np.abs(rounded * 256 - values) < 256)
    fraction = (values % 256) / 256
    deviation = math.sqrt(float(np.sum(fraction * (1 - fraction))))
    assert abs(float(np.sum(rounded - values / 256))) < 5.5 * deviation
    down = values >> 8  # the wrong twin: always down
    assert abs(float(np.sum(down - values / 256))) > 5.5 * deviation


@given(st.integers(0, 2**32))
def test_conditional_rounding_keeps_its_bound(seed):
    beta = math.exp(-0.5)
    stream = Entropy.replay(b"%d" % seed).stream()
    values = stream.below_each(257, 400) - 128
    centres = Centers(values, math.isqrt(exact_square(values)) + 1, 8)
    rounded = conditional_round(centres, beta, stream)
    assert exact_square(rounded) <= rounded_square(centres.steps, 400, beta)
    assert exact_square(rounded) <= rounded_radius(centres.steps, 400, beta) ** 2


def test_a_single_rounding_exceeds_the_bound_no_more_often_than_beta():
    values = np.full(400, 128, np.int64)  # halves, where rounding is widest
    centres = Centers(values, 128 * 20, 8)
    stream = Entropy.replay(b"beta").stream()
    for beta in (0.6, 0.1):
        limit = rounded_square(centres.steps, 400, beta)
        misses = sum(exact_square(stochastic_round(centres, stream).tolist()) > limit for _ in range(1_000))
        assert misses <= 1_000 * beta + 4 * math.sqrt(1_000 * beta)


def test_rounding_that_never_fits_ends_towards_zero():
    """A stream that always rounds up lifts four hundred halves to a norm that the bound does not allow."""

    class Up:
        def fill(self, out):
            out[:] = np.iinfo(out.dtype).max

    centres = Centers(np.array([-128, 128] * 200), 128 * 20, 8)
    assert rounded_square(centres.steps, 400, 0.9) < 400
    centres = Centers(np.full(400, 128), 128 * 20, 8)
    assert not conditional_round(centres, 0.9, Up()).any()


@pytest.mark.parametrize("beta", [0.0, 1.0, -1.0])
def test_beta_must_be_a_probability(beta):
    with pytest.raises(ConfigError, match="beta"):
        rounded_square(Fraction(3), 4, beta)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 23, 40])
def test_the_norm_that_is_clipped_by_is_that_of_all_coordinates(length):
    """Each coordinate has a size of its own, so none may be left out, counted twice or taken for its neighbour."""
    vector = (1.5 ** np.arange(length)).astype(np.float32) * np.where(np.arange(length) % 3, 1, -1).astype(
        np.float32
    )
    assert _square(vector) == pytest.approx(math.fsum(float(x) ** 2 for x in vector), rel=1e-12)


@pytest.mark.parametrize("dithered", [False, True])
def test_rows_rounded_beyond_the_radius_are_shrunk(dithered, monkeypatch):
    """With no room left for rounding, about half of all rows come out too long at first."""
    codec = Codec(rotation=Hadamard(64), clip=1.0, granularity=6.4)
    monkeypatch.setattr(Codec, "_reach", lambda self, _dithered: float(self.grid_radius))
    rows = 3 * Stream(bytes(32)).words(200 * 64).astype(np.float32).reshape(200, 64) / 2.0**64 - 1.5
    totals = np.zeros((200, codec.length), np.int64)
    dithers = np.stack([codec.dither(Stream(digest(n))) for n in range(200)]) if dithered else None
    codec.add_prepared(totals, np.arange(200), rows, bytes(32), dithers)
    squares = (totals**2).sum(axis=1)
    assert squares.max() <= codec.grid_radius**2
    assert squares.min() > 0.5 * codec.grid_radius**2


@pytest.mark.parametrize("dithered", [False, True])
def test_the_kernel_adds_rows_as_they_are_prepared_alone(dithered):
    """The few rows that it leaves are done one by one, far more slowly."""
    codec = Codec(rotation=Hadamard(64), clip=1.0, granularity=0.1)
    rows = 3 * Stream(bytes(32)).words(200 * 64).astype(np.float32).reshape(200, 64) / 2.0**64 - 1.5
    dithers = np.stack([codec.dither(Stream(digest(n))) for n in range(200)])
    totals, left = np.zeros((200, codec.length), np.int64), np.ones(200, np.bool_)
    scales = (codec._grid_per_unit, codec._reach(dithered), codec.grid_radius, codec.grid_radius)
    signs, drawn = seeded_bits(SEED, codec.rotation.dimension), dithers if dithered else dithers[:0]
    _add_rows(rows, np.arange(200), signs, np.empty(0, np.int64), 0, scales, drawn, totals, left)
    assert left.sum() <= 2
    for row in np.flatnonzero(~left):
        alone = codec.prepare(rows[row], SEED, dithers[row] if dithered else None)
        assert np.array_equal(totals[row], alone.values)
