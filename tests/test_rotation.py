"""Distributions of the rotations: orthonormal, undone by their inverse, seeded, flat."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import scipy.fft
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st

from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.numerics.rotation import Fold, Hadamard, RandomPhase

SEED = digest("rotation seed")
KINDS = (Hadamard, RandomPhase)
NASTY = (1, 2, 3, 4, 5, 63, 64, 65, 127, 1000, 1024, 1025)


def some_vector(dimension, name="vector"):
    words = Entropy.replay(name.encode()).child(dimension).stream().words(dimension)
    return (words / 2.0**63 - 1).astype(np.float32)


def matrix(rotation, seed=SEED):
    """Return the rotation as a matrix with one column per coordinate."""
    return np.stack(
        [rotation.forward(unit, seed) for unit in np.eye(rotation.dimension, dtype=np.float32)], axis=1
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dimension", NASTY)
def test_a_rotation_is_orthonormal(kind, dimension):
    if dimension > 200:
        left, right = some_vector(dimension, "left"), some_vector(dimension, "right")
        turned = kind(dimension).forward(left, SEED) @ kind(dimension).forward(right, SEED)
        assert turned == pytest.approx(left @ right, abs=1e-4 * dimension**0.5)
    else:
        columns = matrix(kind(dimension))
        assert np.allclose(columns.T @ columns, np.eye(dimension), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@given(dimension=st.integers(1, 3000), scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e20]))
def test_the_inverse_undoes_a_rotation(kind, dimension, scale):
    rotation, vector = kind(dimension), some_vector(dimension) * np.float32(scale)
    turned = rotation.forward(vector, SEED)
    assert turned.shape == (rotation.padded,)
    assert turned.dtype == np.float32
    assert np.allclose(rotation.inverse(turned, SEED) / scale, vector / scale, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dimension", NASTY)
def test_the_inverse_keeps_the_precision_of_its_argument(kind, dimension):
    rotation, vector = kind(dimension), some_vector(dimension)
    turned = rotation.forward(vector, SEED)
    single, double = rotation.inverse(turned, SEED), rotation.inverse(turned.astype(np.float64), SEED)
    assert (single.dtype, double.dtype) == (np.float32, np.float64)
    assert np.allclose(single, double, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_are_left_as_they_were(kind):
    rotation, vector = kind(1000), some_vector(1000)
    turned = rotation.forward(vector, SEED)
    before = turned.copy()
    rotation.inverse(turned, SEED)
    assert np.array_equal(vector, some_vector(1000))
    assert np.array_equal(turned, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rotation_takes_the_memory_of_its_result_and_no_copy_of_it(kind):
    """A vector may have 2^30 coordinates: whatever is held twice is held twice in gigabytes."""
    rotation, vector = kind(2**16), some_vector(2**16)
    rotation.forward(vector, SEED)  # by now all is compiled and the seed is expanded
    tracemalloc.start()
    turned = rotation.forward(vector, SEED)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert turned.nbytes <= peak < 1.5 * turned.nbytes


@pytest.mark.parametrize("dimension", [8, 64, 512])
def test_hadamard_is_the_textbook_matrix_times_signs(dimension):
    columns = matrix(Hadamard(dimension))
    textbook = scipy.linalg.hadamard(dimension) / dimension**0.5
    assert np.allclose(np.abs(columns), np.abs(textbook), atol=1e-6)
    signs = columns[0] * dimension**0.5
    assert np.allclose(np.abs(signs), 1, atol=1e-5)
    assert 0 < np.sum(signs < 0) < dimension
    assert np.allclose(columns, textbook * signs, atol=1e-6)


def plain_hadamard(values):
    """Transform level by level, in double precision."""
    values = values.astype(np.float64)
    distance = 1
    while distance < values.size:
        pairs = values.reshape(-1, 2, distance)
        values = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        distance *= 2
    return values / values.size**0.5


@pytest.mark.parametrize("exponent", range(1, 19))
def test_hadamard_is_the_plain_transform_at_every_size(exponent):
    dimension = 2**exponent
    signs = Hadamard(dimension).inverse(plain_hadamard(np.ones(dimension)), SEED)
    assert np.allclose(np.abs(signs), 1)
    vector = some_vector(dimension)
    assert np.allclose(Hadamard(dimension).forward(vector, SEED), plain_hadamard(vector * signs), atol=2e-5)


def test_the_comparison_sees_a_level_left_out():
    vector = some_vector(2**14)
    signs = Hadamard(vector.size).inverse(plain_hadamard(np.ones(vector.size)), SEED)
    halves = np.concatenate([plain_hadamard(half) for half in np.split(vector * signs, 2)])
    assert not np.allclose(Hadamard(vector.size).forward(vector, SEED), halves, atol=0.1)


def test_known_answers():
    known = json.loads((Path(__file__).parent / "vectors" / "v2" / "rotation.json").read_text())
    seed = bytes.fromhex(known["seed"])
    ramp = np.arange(1, 13, dtype=np.float32)
    assert np.allclose(Hadamard(12).forward(ramp, seed), known["hadamard"], atol=1e-5)
    assert np.allclose(RandomPhase(12).forward(ramp, seed), known["random_phase"], atol=1e-5)


def test_random_phase_is_the_textbook_matrix_times_quarter_turns():
    rotation = RandomPhase(60)
    columns = matrix(rotation)
    pairs = columns[::2] + 1j * columns[1::2]
    textbook = scipy.linalg.dft(rotation.padded // 2, scale="sqrtn")
    turns = pairs[:, ::2] / textbook
    assert np.allclose(turns, turns[0], atol=1e-4)
    assert np.allclose(turns**4, 1, atol=1e-4)
    assert np.unique(np.round(turns[0], 3)).size == 4
    assert np.allclose(pairs[:, 1::2], 1j * pairs[:, ::2], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_is_another_rotation(kind):
    vector = some_vector(500)
    first = kind(500).forward(vector, SEED)
    assert np.array_equal(first, kind(500).forward(vector, SEED))
    assert not np.allclose(first, kind(500).forward(vector, digest("another")), atol=0.1)


def largest_coordinate(rotate, vector, seeds=20):
    """Return the largest coordinate in units of norm / sqrt(length), over some seeds."""
    turned = [rotate(vector, digest("flat", seed)) for seed in range(seeds)]
    return max(float(np.abs(values).max()) * values.size**0.5 for values in turned) / float(np.linalg.norm(vector))


def spikes(dimension):
    """Vectors that a plain transform would leave in one heap."""
    yield np.eye(1, dimension, dtype=np.float32)[0]
    yield np.ones(dimension, np.float32)
    yield np.tile(np.array([1, -1], np.float32), (dimension + 1) // 2)[:dimension]
    yield np.cos(np.arange(dimension) * 0.3).astype(np.float32)


def flatness_bound(padded, seeds, false_alarm):
    """Return t with P(any of the coordinates exceeds t) <= false_alarm, for a sub-Gaussian proxy of one."""
    return (2 * np.log(2 * padded * seeds / false_alarm)) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_rotated_vectors_are_flat(kind):
    rotation = kind(5137)
    for vector in spikes(5137):
        assert largest_coordinate(rotation.forward, vector) <= flatness_bound(rotation.padded, 20, 1e-6)


def test_the_check_rejects_a_transform_without_random_signs():
    def plain(vector, seed):
        return np.abs(np.fft.fft(vector, norm="ortho"))

    assert largest_coordinate(plain, np.ones(5137, np.float32)) > flatness_bound(5137, 20, 1e-6)


@given(st.integers(1, 1 << 30))
def test_random_phase_pads_to_what_scipy_calls_fast(dimension):
    assert RandomPhase(dimension).padded == 2 * scipy.fft.next_fast_len((dimension + 1) // 2)


def test_padding_is_to_a_power_of_two_or_by_a_few_per_cent():
    assert [Hadamard(d).padded for d in (1, 2, 3, 51_370, 65_536)] == [1, 2, 4, 65_536, 65_536]
    assert [RandomPhase(d).padded for d in (1, 2, 3)] == [2, 2, 4]
    for dimension in (51_370, 996_298, 2**24):
        assert dimension <= RandomPhase(dimension).padded <= 1.02 * dimension


FOLDS = [
    Fold(100, 16),
    Fold(101, 16, 1),
    Fold(1000, 64, 3),
    Fold(33, 32),
    Fold(65, 2),
    Fold(3000, 1024),
    Fold(96, 32),
]


@pytest.mark.parametrize("fold", FOLDS)
def test_a_fold_adds_up_chunks_and_keeps_what_it_is_told_to(fold):
    """Rotated back, each coordinate is in one sum with a sign; sums have equally many terms, but for one."""
    back = scipy.linalg.hadamard(fold.length) @ matrix(fold) / fold.length**0.5
    assert np.allclose(np.sort(np.abs(back), axis=0)[:-1], 0, atol=1e-5)
    assert np.allclose(np.abs(back).max(axis=0), 1, atol=1e-5)
    counts, sums = np.rint(np.abs(back).sum(axis=1)), fold.length - fold.kept
    assert set(counts[:sums]) <= {fold.terms, fold.terms - 1}
    assert np.allclose(np.abs(back[sums:, fold.dimension - fold.kept :]), np.eye(fold.kept), atol=1e-5)
    assert np.all(counts[sums:] == 1)


@pytest.mark.parametrize("fold", FOLDS)
def test_the_inverse_of_a_fold_is_its_transpose(fold):
    values = some_vector(fold.length)
    assert np.allclose(fold.inverse(values, SEED), matrix(fold).T @ values, atol=1e-5)
    assert fold.inverse(values.astype(np.float64), SEED).dtype == np.float64


@pytest.mark.parametrize("fold", FOLDS)
def test_a_lifted_vector_is_the_shortest_that_folds_to_the_values(fold):
    values = some_vector(fold.length).astype(np.float64)
    lifted = fold.lift(values, SEED)
    assert np.allclose(fold.forward(lifted, SEED), values, atol=1e-5)
    assert np.allclose(lifted, np.linalg.pinv(matrix(fold).astype(np.float64)) @ values, atol=1e-5)


def test_a_folded_vector_is_right_on_average_with_the_error_of_theory():
    fold, vector = Fold(1000, 64), some_vector(1000)
    found = np.stack([fold.inverse(fold.forward(vector, digest(n)), digest(n)) for n in range(600)])
    square = float(vector @ vector)
    assert np.mean(np.sum((found - vector) ** 2, axis=1)) == pytest.approx((1000 / 64 - 1) * square, rel=0.05)
    assert np.sum((found.mean(axis=0) - vector) ** 2) < 2 * (1000 / 64) * square / 600


def test_a_fold_keeps_lengths_up_to_one_over_the_root_of_its_own():
    """Also of vectors with as many equal coordinates as chunks, one in the same place of each."""
    fold = Fold(64 * 64, 64)
    for vector in (some_vector(fold.dimension), np.tile(np.eye(1, 64, dtype=np.float32)[0], 64)):
        squares = [np.sum(fold.forward(vector, digest(n)) ** 2) / np.sum(vector**2) for n in range(400)]
        assert np.mean(squares) == pytest.approx(1, abs=0.04)
        assert np.std(squares) < 1.2 * (2 / 64) ** 0.5


def test_a_fold_is_flat_and_another_with_another_seed():
    fold = Fold(5137, 256, 1)
    for vector in spikes(5137):
        assert largest_coordinate(fold.forward, vector) <= flatness_bound(fold.length, 20, 1e-6)
        assert not np.allclose(fold.forward(vector, SEED), fold.forward(vector, digest("another")), atol=0.01)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((100, 100), "power of two"),
        ((100, 128), "99"),
        ((100, 1), "power of two"),
        ((100, 16, 16), "15"),
        ((0, 2), "0"),
    ],
)
def test_folds_that_are_none_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        Fold(*sizes)


def test_a_fold_of_another_length_is_refused():
    with pytest.raises(ConfigError, match="100"):
        Fold(100, 16).forward(np.zeros(99, np.float32), SEED)
    with pytest.raises(ConfigError, match="16"):
        Fold(100, 16).inverse(np.zeros(17, np.float32), SEED)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_shapes_are_refused(kind):
    with pytest.raises(ConfigError, match="0"):
        kind(0)
    rotation = kind(100)
    for bad in (np.zeros(99, np.float32), np.zeros((100, 1), np.float32), np.zeros(1, np.float32)):
        with pytest.raises(ConfigError, match="100"):
            rotation.forward(bad, SEED)
    with pytest.raises(ConfigError, match=str(rotation.padded)):
        rotation.inverse(np.zeros(rotation.padded + 1, np.float32), SEED)
    with pytest.raises(ConfigError, match="32 bytes"):
        rotation.forward(np.zeros(100, np.float32), b"short")
