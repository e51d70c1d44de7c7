"""Does the time of a draw tell how large the noise is? The samplers in use, and a rejection sampler that does tell."""

import json
import sys
import time
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from scipy.stats import spearmanr

from benchmarks.reference_sampler import discrete_gaussian
from d2pfed.noise.cumulative import SkellamDistribution
from d2pfed.noise.sampler import CenteredDiscreteGaussian, DiscreteGaussian, draw
from d2pfed.numerics.randomness import Entropy, Stream

LENGTH = 1000  # of the vectors that are drawn
LARGEST = 0.03  # correlation that may be left
CENTRES = np.zeros(LENGTH, np.int64)
SAMPLERS: dict[str, Callable[[Stream], np.ndarray]] = {
    "centered": lambda stream: CenteredDiscreteGaussian(Fraction(20), 8).draw(CENTRES, stream),
    "discrete gaussian": lambda stream: DiscreteGaussian(Fraction(20)).draw(LENGTH, stream),
    "skellam": lambda stream: draw(SkellamDistribution(Fraction(400)), LENGTH, stream),
}


def rejection(stream: Stream) -> np.ndarray:
    """The positive control: one draw by proposals, of which more are needed for some values than for others."""
    return np.array([discrete_gaussian(Fraction(0), Fraction(400), stream)])


def correlation(draw: Callable[[Stream], np.ndarray], count: int, entropy: Entropy) -> float:
    """Return Spearman's correlation of the magnitude of so many vectors and the time that each took."""
    stream = entropy.stream()
    sizes, seconds = np.empty(count), np.empty(count)
    for number in range(-100, count):  # the first ones warm up
        start = time.perf_counter_ns()
        drawn = draw(stream)
        end = time.perf_counter_ns()
        if number >= 0:
            sizes[number], seconds[number] = np.abs(drawn).sum(), end - start
    return float(spearmanr(sizes, seconds).statistic)


def sampler(count: int, seed: str) -> dict[str, object]:
    """Measure all samplers and the control."""
    root = Entropy.replay(seed.encode())
    found = {name: correlation(draw, count, root.child(name)) for name, draw in SAMPLERS.items()}
    control = correlation(rejection, count, root.child("control"))
    failed = sum(not abs(value) < LARGEST for value in found.values()) + (not control >= LARGEST)
    rows = ", ".join(f"{name} {value:+.4f}" for name, value in found.items())
    return {
        "campaign": "time of a draw against its noise",
        "command": f"scripts/campaign timing-sampler {count} --seed {seed}",
        "result": f"Spearman's correlation over {count:,} vectors of {LENGTH:,} draws: {rows}; of a rejection sampler, "
        f"one draw at a time, {control:+.4f}",
        "failed": failed,
    }


def main(name: str, size: int, seed: str) -> int:
    """Run the campaign and print what was found."""
    found = {"sampler": sampler}[name](size, seed)
    print(json.dumps(found))
    return int(found["failed"] != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[4]))
