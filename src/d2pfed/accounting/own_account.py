"""What a client counts for itself: all that it sent, in whatever runs, believing no number that a server wrote."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from d2pfed.accounting.composition import filtered_epsilon
from d2pfed.accounting.events import (
    Adjacency,
    BatchSampling,
    CohortSampling,
    ContinuousGaussian,
    Noise,
    Release,
    RunReleases,
    Sampling,
)
from d2pfed.accounting.pld import COARSE
from d2pfed.accounting.records import record_runs_epsilon

_OF_RECORDS = 0.9  # the share of delta for accounts that come to hold releases of records of one kind alone


def client_epsilon(releases: Sequence[Release], delta: float) -> float:
    """Return epsilon of one client that took part in all of these releases, for replace-one neighbours.

    The releases may be of any runs, plans and mechanisms, and each may have been chosen after seeing the ones
    before: a client that takes part only while this stays below its budget is protected by that budget. Noise
    that the server adds itself does not protect against the server: infinite.

    Where all of them are of records, with one noise and one rate, it is epsilon of a record, amplified by the coins,
    which the silo tosses itself and tells nobody. Cohorts are drawn by the server, so they amplify nothing; nor do
    coins in an account with anything else in it.

    Guarantee: a filter; errs upwards. Proof: theory.md#client. Checked: test_accounting_client.py.
    """
    noises = Counter(release.noise for release in releases)
    if any(isinstance(noise, ContinuousGaussian) for noise in noises):
        return math.inf
    drawn = {release.batches for release in releases}
    if drawn <= {None}:
        return filtered_epsilon(noises, Adjacency.REPLACE_ONE.radii, delta)
    plain = filtered_epsilon(noises, Adjacency.REPLACE_ONE.radii, (1 - _OF_RECORDS) * delta)
    if len(noises) > 1 or len(drawn) > 1:
        return plain
    ((noise, count),), (batches,) = noises.items(), drawn
    return plain if batches is None else min(plain, _of_records(noise, batches, count, _OF_RECORDS * delta))


@lru_cache(maxsize=64)  # it is asked for before, at and after each charge
def _of_records(noise: Noise, batches: BatchSampling, count: int, delta: float) -> float:
    """Return epsilon of one record of this silo; what a person has in other silos is for those to count."""
    everyone = CohortSampling(Sampling.NONE, 1, 1)
    run = RunReleases(everyone, ((noise, count),), count, batches=replace(batches, max_silos=1))
    return record_runs_epsilon([run], Adjacency.REPLACE_ONE, delta, COARSE)[0]
