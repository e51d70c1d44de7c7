"""The mean of bare updates, for training in the clear: secure aggregation knows nothing of it."""

from collections.abc import Iterable

import numpy as np

from d2pfed.noise.codec import FloatVector


def plain_mean(updates: Iterable[FloatVector], cohort_size: int) -> FloatVector:
    """Return the sum of the updates over the cohort size, as FedAvg has it: private to nobody."""
    vectors = iter(updates)
    total = next(vectors).astype(np.float64)
    for update in vectors:
        total += update
    mean: FloatVector = (total / cohort_size).astype(np.float32)
    return mean
