"""What one client has given away against the server in all its runs, whoever chose them from what was seen."""

import math
from collections import Counter
from collections.abc import Sequence

from d2pfed.accounting.grouped import filtered_epsilon
from d2pfed.accounting.release import Adjacency, ContinuousGaussian, Release


def client_epsilon(releases: Sequence[Release], delta: float) -> float:
    """Return epsilon of one client that took part in all of these releases, for replace-one neighbours.

    The releases may be of any runs, plans and mechanisms, and each may have been chosen after seeing the ones
    before: a client that takes part only while this stays below its budget has that budget as its promise. Noise
    that the server adds itself protects from nobody who sees what the server sees: infinite.

    Guarantee: a filter; errs upwards. Proof: theory.md#client. Checked: test_accounting_client.py.
    """
    noises = Counter(release.noise for release in releases)
    if any(isinstance(noise, ContinuousGaussian) for noise in noises):
        return math.inf
    return filtered_epsilon(noises, Adjacency.REPLACE_ONE.radii, delta)
