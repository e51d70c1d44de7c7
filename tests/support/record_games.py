"""Exact games of silos that hold records, from probability mass functions alone; imports nothing of the package.

A data set is a tuple of silos, each a tuple of records with values -1, 0 or 1 in radii.
"""

from itertools import product

import numpy as np

from support import oracle


def batch_law(data, rate, noise_of):
    """The law of the sum over all silos' batches: each record by its own coin, one noise for all silos."""
    return oracle.coin_law([value for silo in data for value in silo], rate, noise_of)


def neighbours(law_of, adjacency, records=2, others=((1, 1), (0, 0), (-1, -1), (1, -1))):
    """All ordered pairs of laws for two silos of which the first has one record that is added, zeroed or replaced."""
    one, two = [], []
    for rest, silo in product((1, 0, -1), others):
        for value in (1, -1):
            own = (value, *[rest] * (records - 1))
            if adjacency == "replace-one":
                changed = [(-value, *own[1:]), (0, *own[1:])]
            else:
                changed = [own[1:]] if adjacency == "add-remove" else [(0, *own[1:])]
            for other in changed:
                p, q = law_of((own, silo)), law_of((other, silo))
                one += [p]
                two += [q]
    return np.array(one), np.array(two)


def worst(pairs, attempts, ratio):
    """The larger delta of both orders: a world keeps its place throughout, as in one data set against another."""
    p, q = pairs
    return max(oracle.adaptive_delta((p, q), attempts, ratio), oracle.adaptive_delta((q, p), attempts, ratio))


def joint(data, attempts, rate, noise_of, coins):
    """The joint law of all sums where record 0 of silo 0 has coins as given: `fresh` in each attempt, or the `same`."""
    first, others = data[0][0], (data[0][1:], *data[1:])
    without, with_it = batch_law(others, rate, noise_of), batch_law(others, rate, lambda c: noise_of(c + first))
    if coins == "fresh":
        each = (1 - rate) * without + rate * with_it
        return _power(each, attempts)
    return (1 - rate) * _power(without, attempts) + rate * _power(with_it, attempts)


def _power(law, count):
    total = np.ones(())
    for _ in range(count):
        total = np.multiply.outer(total, law)
    return total
