"""Multilayer perceptrons by Adam: one compiled call per client, twice as fast as many at once by torch."""

from dataclasses import dataclass

import numpy as np

from d2pfed.learning.dense import Floats, Ints, add_gradient, arrays_of, working_room
from d2pfed.learning.local_training import ADAM_DECAYS, ADAM_EPSILON
from d2pfed.learning.model import Params
from d2pfed.learning.task import Examples
from d2pfed.numerics.compiled import compiled


@dataclass(slots=True)
class Moments:
    """What Adam remembers; training changes it."""

    mean: Floats
    square: Floats
    taken: int = 0  # steps

    @staticmethod
    def fresh(dimension: int) -> "Moments":
        """Return the memory of an Adam that has taken no step."""
        mean, square = np.zeros((2, dimension), np.float32)
        return Moments(mean, square)


def train_dense_adam(  # noqa: PLR0917 - those of `train_dense`, and the memory
    params: Params, widths: Ints, examples: Examples, schedule: Ints, lr: float, moments: Moments
) -> Params:
    """Return the update of one client by Adam on the mean cross entropy of each batch of the schedule."""
    trained = params.copy()
    inputs, labels = arrays_of(examples, widths)
    steps = np.arange(moments.taken + 1, moments.taken + 1 + len(schedule), dtype=np.float64)
    first, second = (1 - decay**steps for decay in ADAM_DECAYS)
    rates, roots = (lr / first).astype(np.float32), (1 / np.sqrt(second)).astype(np.float32)
    memory = np.stack([np.zeros_like(params), moments.mean, moments.square])
    _train(trained, memory, widths, inputs, labels, schedule, rates, roots, *working_room(widths, schedule))
    moments.mean, moments.square, moments.taken = memory[1], memory[2], moments.taken + len(schedule)
    trained -= params
    return trained


_FIRST, _SECOND = (np.float32(1 - decay) for decay in ADAM_DECAYS)
_EPSILON = np.float32(ADAM_EPSILON)


@compiled
def _train(  # noqa: PLR0917 - a kernel takes arrays, not objects
    values: Floats,
    memory: Floats,
    widths: Ints,
    inputs: Floats,
    labels: Ints,
    schedule: Ints,
    rates: Floats,
    roots: Floats,
    blocks: Floats,
    rows: Ints,
) -> None:
    """Train in place; the memory holds room for the gradient, and both moments, which change too."""
    gradient, mean, square = memory[0], memory[1], memory[2]
    for step in range(len(schedule)):
        for i in range(len(gradient)):
            gradient[i] = np.float32(0)
        add_gradient(values, gradient, widths, inputs, labels, schedule[step], np.float32(1), blocks, rows)
        rate, root = rates[step], roots[step]
        for i in range(len(gradient)):
            slope = gradient[i]
            mean[i] += _FIRST * (slope - mean[i])
            square[i] += _SECOND * (slope * slope - square[i])
            values[i] -= rate * mean[i] / (np.sqrt(square[i]) * root + _EPSILON)
