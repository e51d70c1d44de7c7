import numpy as np
import pytest
from scipy.stats import kstest

from d2pfed.accounting import ContinuousGaussian
from d2pfed.numerics.randomness import Entropy
from reproduction.trusted import gaussian_mean, normals

ROOT = Entropy.replay(b"trusted")
FALSE_ALARM = 1e-6


def updates(count: int, size: int = 1000) -> list[np.ndarray]:
    words = ROOT.child("updates").stream().below_each(2_000_001, count * size).reshape(count, size)
    return list((words / 1e6 - 1).astype(np.float32))


def rejected(draws: np.ndarray) -> bool:
    return kstest(draws, "norm").pvalue < FALSE_ALARM


def test_normal_numbers_are_normal_and_slightly_wrong_ones_are_rejected():
    draws = normals(ROOT.child("draws").stream(), 200_001)
    assert draws.shape == (200_001,)
    assert not rejected(draws)
    assert rejected(draws * 1.03)
    assert rejected(draws + 0.02)
    half = len(draws) // 2
    assert abs(np.corrcoef(draws[:half], draws[half + 1 : 2 * half + 1])[0, 1]) < 5 / np.sqrt(half)


def test_the_gaussian_mean_is_the_clipped_mean_and_its_noise():
    given, noise = updates(5, 20_000), ContinuousGaussian(1.0, 2.0)
    mean = gaussian_mean(given, 5, noise, ROOT.child("noise").stream())
    clipped = np.sum([update * (2 / np.linalg.norm(update)) for update in given], axis=0)
    rest = mean * 5.0 - clipped
    assert not rejected(rest)
    assert rejected(mean * 5.0 - np.sum(given, axis=0))  # without the clip it would not be


@pytest.mark.parametrize("length", [0.5, 1.0])
def test_updates_within_the_radius_are_not_changed(length):
    given = [np.full(4, length / 2, np.float32)]
    mean = gaussian_mean(given, 1, ContinuousGaussian(1e-9, 1.0), ROOT.child("small").stream())
    np.testing.assert_allclose(mean, given[0], atol=1e-6)
