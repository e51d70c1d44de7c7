"""Training in the clear: the same cohorts and local training, and a mean that is private to nobody."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from d2pfed.noise.codec import FloatVector
from d2pfed.round import Outcome
from d2pfed.simulation.backend import Backend, finite
from d2pfed.training import Cohorts, shuffle_seed


@dataclass(frozen=True, slots=True)
class ClearFederation:
    """Clients whose updates the server sees."""

    backend: Backend
    cohorts: Cohorts
    run: str  # its name, from which shuffles follow

    def mean(self, number: int, model: FloatVector) -> Outcome:
        """Return the mean update of a round's cohort."""
        cohort = self.cohorts.draw(number, 0, number)
        updates = self.updates(number, model, cohort)
        return Outcome(plain_mean(updates, len(cohort)), 0, len(cohort))

    def updates(self, number: int, model: FloatVector, cohort: tuple[int, ...]) -> Iterable[FloatVector]:
        """Return the updates of a round's cohort, without those that were lost."""
        trained = self.backend.train(model, cohort, shuffle_seed(self.run, number))
        return (finite(update) for update in trained if isinstance(update, np.ndarray))


def plain_mean(updates: Iterable[FloatVector], cohort_size: int) -> FloatVector:
    """Return the sum of the updates over the cohort size, as FedAvg has it."""
    vectors = iter(updates)
    total = next(vectors).astype(np.float64)
    for update in vectors:
        total += update
    mean: FloatVector = (total / cohort_size).astype(np.float32)
    return mean
