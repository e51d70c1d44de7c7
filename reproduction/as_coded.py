"""The authors' simulation as it ran, which is not as the paper writes it down; it protects nobody.

Read in their public code (github.com/wanglun1996/discrete-dp, src/simulate.py, comm.py and data.py at commit f33d1e5):
one Adam is made before the first round and serves all clients of all rounds, so its moments go from client to client
and past clip and noise; clients are drawn with replacement; an update longer than D is scaled to norm 1; every client
adds a draw of its own; a value that enters the group is rounded down to a multiple of two steps; pixels are never
divided by 255, and the heterogeneous clients train on bare ones while the test digits are standardised.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.learning import LocalTraining, Model, Task, evaluate
from d2pfed.learning.dense import Moments, train_dense, widths_of
from d2pfed.learning.local_training import client_generator
from d2pfed.learning.model import Params
from d2pfed.learning.task import Examples
from d2pfed.noise.sampler import DiscreteGaussian
from d2pfed.numerics.randomness import Entropy, Stream, digest
from d2pfed.numerics.rotation import Hadamard
from reproduction.raw_pixels import on_raw_pixels, standardised
from reproduction.trusted import normals

_LONG = 1.0  # the norm that an update longer than D is scaled to
_GROUP_STEPS = 2  # the group's lattice in lattice steps


class CodeNoise(StrEnum):
    """What a client adds to its quantised update."""

    NONE = "none"
    GAUSS = "gauss"  # a discrete Gaussian of its own
    COINS = "coins"  # cpSGD's binomial


class Pixels(StrEnum):
    """What clients train on; the test digits are standardised always."""

    STANDARDISED = "standardised"  # up to 827
    BARE = "bare"  # up to 255


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRun:
    """One run of the authors' loop."""

    noise: CodeNoise
    deviation: float  # of the noise on the sum, in real units; 0 without noise
    clip: float  # D
    levels: int  # k
    pixels: Pixels

    @property
    def step(self) -> float:
        """The lattice step."""
        return 2 * self.clip / (self.levels - 1)


@dataclass(frozen=True, slots=True)
class Cohort:
    """Who takes part: so many draws of so many clients, in so many rounds."""

    population: int
    draws: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Course:
    """Accuracies, as fractions, on validation data after each round and on test data at the end."""

    validation: tuple[float, ...]
    test: float


class SharedAdam:
    """One Adam for all clients: its moments and its count of steps are carried from each to the next."""

    def __init__(self, model: Model, local: LocalTraining) -> None:
        widths = widths_of(model)
        if widths is None:
            raise ConfigError("the authors' loop is run for multilayer perceptrons only")
        self._widths, self._local = widths, local
        self.moments = Moments(*np.zeros((2, model.dimension), np.float32))

    def train(self, params: Params, examples: Examples, round_seed: int, client: int) -> Params:
        """Return how far one client's training moves the model, against the gradient: before less after."""
        schedule = self._local.schedule(len(examples), client_generator(round_seed, client))
        return -train_dense(params, self._widths, examples, schedule, self._local.lr, self.moments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What the loop trains, over which clients."""

    model: Model
    task: Task
    local: LocalTraining
    cohort: Cohort


def run_code(run: CodeRun, trained: Trained, seed: int, tell: Callable[[int], None]) -> Course:
    """Go through the authors' rounds from a seed."""
    model, task, cohort = trained.model, trained.task, trained.cohort
    entropy, tested = Entropy.replay(f"as the code ran {seed}".encode()), on_raw_pixels(model)
    params, adam = model.initial().copy(), SharedAdam(model, trained.local)
    validation = []
    for number in range(cohort.rounds):
        own = entropy.child("round", number)
        params = params - mean_update(run, adam, params, list(_drawn(task, cohort, run, own.stream())), own)
        validation.append(evaluate(tested, params, task.validation)["accuracy"])
        tell(number + 1)
    return Course(tuple(validation), evaluate(tested, params, task.test())["accuracy"])


def mean_update(
    run: CodeRun, adam: SharedAdam, params: Params, cohort: list[tuple[int, Examples]], entropy: Entropy
) -> Params:
    """Return the mean of a round as the loop forms it: of a client drawn twice, the last update counts twice."""
    rotation, seed = Hadamard(len(params)), digest("rotation", "one for all rounds")
    round_seed = int(entropy.child("order").stream().words(1)[0] >> np.uint64(2))
    kept: dict[int, NDArray[np.float64]] = {}
    for place, (client, examples) in enumerate(cohort):
        moved = scaled(adam.train(params, examples, round_seed, client), run.clip)
        rotated = rotation.forward(moved, seed).astype(np.float64)
        kept[client] = _sent(run, rotated, len(cohort), entropy.child("client", place))
    total = sum((kept[client] for client, _ in cohort), np.zeros(rotation.padded))
    return rotation.inverse(total / len(cohort), seed).astype(np.float32)


def scaled(vector: Params, clip: float) -> Params:
    """Return a vector as it is if it is within the clip, and else at norm 1."""
    norm = float(np.sqrt(np.sum(vector.astype(np.float64) ** 2)))
    return vector if norm <= clip else (vector * np.float32(_LONG / norm))


def _sent(run: CodeRun, rotated: NDArray[np.float64], draws: int, entropy: Entropy) -> NDArray[np.float64]:
    """Quantise at random between neighbouring levels, outer ones included; add noise; enter the group."""
    lattice = rotated / run.step
    whole = np.floor(lattice)
    whole += _uniforms(entropy.child("rounding").stream(), len(whole)) < lattice - whole
    if run.noise is CodeNoise.GAUSS:
        width = Fraction(run.deviation / run.step / draws**0.5).limit_denominator(1 << 20)
        whole += DiscreteGaussian(width).draw(len(whole), entropy.child("noise").stream())
        np.subtract(whole, whole % _GROUP_STEPS, out=whole)
    elif run.noise is CodeNoise.COINS:  # tens of thousands of coins a client: a rounded Gaussian by now
        width = run.deviation / run.step / draws**0.5
        whole += np.rint(width * normals(entropy.child("noise").stream(), len(whole)))
    sent: NDArray[np.float64] = whole * run.step
    return sent


def _drawn(task: Task, cohort: Cohort, run: CodeRun, stream: Stream) -> Iterator[tuple[int, Examples]]:
    for word in stream.words(cohort.draws):
        client = int(word % np.uint64(cohort.population))
        own = task.clients.examples(client)
        inputs = standardised(own.inputs) if run.pixels is Pixels.STANDARDISED else 255 * own.inputs
        yield client, Examples(inputs, own.labels)


def _uniforms(stream: Stream, count: int) -> NDArray[np.float64]:
    found: NDArray[np.float64] = (stream.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found
