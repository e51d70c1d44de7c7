"""What a server can do to a graph of out-neighbours when it picks dropouts with the graph in hand (union bounds).

Letters are those of docs/protocol.md#graph: n clients with k out-neighbours each, of which t open a secret; c of
them collude, fixed before the graph, and d drop out, chosen afterwards. Logarithms are to base 2.
"""

from functools import lru_cache

import numpy as np

from d2pfed.secagg.graph.tails import Logs, log_choose, log_factorials, log_sum, log_upper_tails, upper_tail


def may_open(n: int, k: int, t: int, c: int, bits: int) -> bool:
    """Say whether colluders hold t shares of somebody with a chance above 2^-bits (exactly)."""
    tail = upper_tail(n - 1, c, k, t)
    return n * tail.numerator << bits > tail.denominator


@lru_cache(maxsize=32)
def log_apart(n: int, k: int, d: int, c: int) -> Logs:
    """Bound, for s = 1 .. n/2, the chance that some s honest survivors have no edge to the s' others.

    Union over the s and over the d that drop out; each of the s avoids s' others and each of the s' avoids s.
    Where no others are left, nothing is bounded: infinity.
    """
    logs, s = log_factorials(n), np.arange(1, n // 2 + 1)
    rest = n - c - s - d
    others = np.maximum(rest, 1)
    everything = log_choose(logs, np.array(n - 1), k)
    avoid_others = log_choose(logs, n - 1 - others, k) - everything
    avoid_part = log_choose(logs, n - 1 - s, k) - everything
    sets = log_choose(logs, np.array(n), s) + log_choose(logs, n - s, d)
    return np.where(rest < 1, np.inf, sets + s * avoid_others + others * avoid_part)


def least_cut_off(apart: Logs, bits: int) -> int | None:
    """Return s0 - 1, for the least s0 such that s0 or more are cut off with chance at most 2^-bits.

    Parts are put together to one of s0 to n/2 clients, which needs 4 s0 <= n; None if there is no such s0.
    """
    loose = np.logaddexp2.accumulate(apart[::-1])[::-1]  # of s or more
    fitting = np.flatnonzero(loose <= -bits)
    if not fitting.size or 2 * (int(fitting[0]) + 1) > apart.size:
        return None
    return int(fitting[0])


def log_cut(n: int, k: int, t: int, c: int, apart: Logs) -> float:
    """Bound the chance that some part of at most half of the clients is cut off and can be opened.

    To be opened, each of its s members has t out-neighbours in the part or among the colluders.
    """
    logs, s = log_factorials(n), np.arange(1, n // 2 + 1)
    opened = log_choose(logs, np.array(n), s) + s * log_upper_tails(logs, n - 1, s - 1 + c, k, t)
    return float(log_sum(np.minimum(opened, apart)))
