"""Record-level privacy over silos: what sums over secret batches cost, against any observer.

The coins are known to nobody outside their silo, so the server and other silos see amplified releases as well.
"""

import math
from collections import Counter
from collections.abc import Sequence

from d2pfed.accounting.amplification import PairKind, SampledGaussian
from d2pfed.accounting.composition import composed, gaussian_cost, has_gaussian
from d2pfed.accounting.events import Adjacency, BatchSampling, Noise, RunReleases
from d2pfed.accounting.gaussian import gaussian_epsilon
from d2pfed.accounting.pld import COARSE, loss_distributions
from d2pfed.errors import ConfigError


def record_pairs(runs: Sequence[RunReleases], adjacency: Adjacency, releases: int) -> Counter[SampledGaussian]:
    """Return which sampled Gaussians stand for the releases, and how often; each noise must have a Gaussian.

    The noise of each release is what the observer does not know of it. The slack of each is that of one among so many.

    Guarantee: dominates the pair of any two data sets that differ in one unit. Proof: theory.md#records.
    Checked: test_accounting_records.py by exhaustive adaptive games.
    """
    pairs: Counter[SampledGaussian] = Counter()
    for run in runs:
        if run.batches is None:
            raise ConfigError("a release of records must say how they were drawn")
        for noise, count in run.noises:
            pairs[_pair(noise, run.batches, adjacency, releases)] += count
    return pairs


def record_runs_epsilon(
    runs: Sequence[RunReleases], adjacency: Adjacency, delta: float, points: int
) -> tuple[float, str]:
    """Return epsilon of one unit, and the name of the accountant; infinite where no Gaussian stands for a noise."""
    releases = sum(run.count for run in runs)
    if not all(has_gaussian(noise, releases) for run in runs for noise, _ in run.noises):
        return math.inf, "none"
    pairs = record_pairs(runs, adjacency, releases)
    if all(pair.rate == 1 for pair in pairs):  # nothing is amplified: one Gaussian
        slack = math.fsum(pair.slack * count for pair, count in pairs.items())
        ratio = math.sqrt(math.fsum(pair.ratio**2 * count for pair, count in pairs.items()))
        return gaussian_epsilon(delta * math.exp(-slack), ratio) + 2 * slack, "gaussian"
    epsilon = math.inf
    for grid in sorted({points, COARSE}, reverse=True):  # where many releases are too wide for a fine one
        epsilon = composed(loss_distributions(list(pairs.items()), delta, grid)).epsilon(delta)
        if math.isfinite(epsilon):
            break
    return epsilon, "pld"


def _pair(noise: Noise, batches: BatchSampling, adjacency: Adjacency, releases: int) -> SampledGaussian:
    squared, slack = gaussian_cost(noise, 1, releases).values
    ratio, rate = math.sqrt(squared), float(batches.rate)
    if batches.rate == 1:
        shift = adjacency.radii * batches.max_silos
        return SampledGaussian(PairKind.FIXED_SIZE, ratio * shift, 1.0, slack)
    if adjacency is Adjacency.REPLACE_ONE:
        return SampledGaussian(PairKind.POISSON_REPLACE_ONE, ratio, rate, slack)
    return SampledGaussian(PairKind.POISSON_ZERO_OUT, ratio, rate, slack, batches.max_silos)
