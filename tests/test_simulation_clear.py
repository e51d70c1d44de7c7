from types import SimpleNamespace

import numpy as np

from d2pfed.numerics.randomness import Entropy
from d2pfed.simulation import ClearFederation

ROOT = Entropy.replay(b"trusted")


def updates(count: int, size: int = 1000) -> list[np.ndarray]:
    words = ROOT.child("updates").stream().below_each(2_000_001, count * size).reshape(count, size)
    return list((words / 1e6 - 1).astype(np.float32))


def test_the_plain_mean_divides_by_the_cohort_and_not_by_who_came():
    given = updates(4)
    backend = SimpleNamespace(train=lambda *_: iter([*given, None, None, None, None]))
    cohorts = SimpleNamespace(draw=lambda *_: tuple(range(8)))
    outcome = ClearFederation(backend, cohorts, "run").mean(0, np.zeros(1000, np.float32))
    np.testing.assert_allclose(outcome.mean, np.sum(given, axis=0) / 8, rtol=1e-6, atol=1e-7)
