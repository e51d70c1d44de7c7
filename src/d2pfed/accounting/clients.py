"""What a client's own account says: all that it ever sent, each vector perhaps chosen from what was seen before."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from d2pfed.accounting.composition import filtered_epsilon
from d2pfed.accounting.events import Adjacency, BatchSampling, ContinuousGaussian, Noise, Release, RunReleases
from d2pfed.accounting.pld import COARSE
from d2pfed.accounting.rdp import check_delta
from d2pfed.accounting.records import record_runs_epsilon

# Of delta, where an account holds a release of records: fixed before anything is seen.
_COUNTED = 0.8  # for accounts whose releases are all alike, counted behind their secret coins
_OTHERS = 0.2  # for all else, where nothing is amplified


def client_epsilon(releases: Sequence[Release], delta: float) -> float:
    """Return epsilon of one client that took part in all of these releases, for replace-one neighbours.

    The releases may be of any runs, plans and mechanisms, and each may have been chosen after seeing the ones
    before: a client that takes part only while this stays below its budget is protected by that budget. Noise
    that the server adds itself does not protect against the server: infinite.

    Releases of records are amplified by the silo's own coins as long as all are of one kind: then epsilon
    is that of one record (or person) under the adjacency that they state.

    Guarantee: a filter; errs upwards. Proof: theory.md#client. Checked: test_accounting_client.py.
    """
    check_delta(delta)
    noises = Counter(release.noise for release in releases)
    if any(isinstance(noise, ContinuousGaussian) for noise in noises):
        return float("inf")
    kinds = {_kind(release) for release in {id(each): each for each in releases}.values()}
    if all(batches is None for _, batches, _ in kinds):
        return filtered_epsilon(noises, Adjacency.REPLACE_ONE.radii, delta)
    if len(kinds) > 1:
        return filtered_epsilon(noises, Adjacency.REPLACE_ONE.radii, delta * _OTHERS)
    first = releases[0]
    run = RunReleases(first.sampling, ((first.noise, len(releases)),), 1, batches=first.batches)
    return _counted(run, first.adjacency, delta * _COUNTED)


def _kind(release: Release) -> tuple[Noise, BatchSampling | None, Adjacency]:
    """Return all that the cost of a release of records depends on."""
    return release.noise, release.batches, release.adjacency


@lru_cache(maxsize=64)  # a step asks several times
def _counted(run: RunReleases, adjacency: Adjacency, delta: float) -> float:
    return record_runs_epsilon([run], adjacency, delta, COARSE)[0]
