"""Exact privacy of small cases, from probability mass functions alone; imports nothing of the package."""

from itertools import combinations, product

import numpy as np


def discrete_gaussian(sigma, centre, reach):
    """The mass of a discrete Gaussian around any real centre, on the integers -reach..reach."""
    k = np.arange(-reach, reach + 1)
    exponent = -((k - centre) ** 2) / (2 * sigma**2)
    weights = np.exp(exponent - exponent.max())
    return weights / weights.sum()


def skellam(variance, reach):
    """The mass of a centred Skellam variable on -reach..reach, as a difference of two Poisson variables."""
    top = reach + int(variance / 2 + 40 * np.sqrt(variance / 2 + 1))
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, top + 1)))])
    poisson = np.exp(-variance / 2 + np.arange(top + 1) * np.log(variance / 2) - logs)
    law = np.convolve(poisson, poisson[::-1])[top - reach : top + reach + 1]
    assert abs(law.sum() - 1) < 1e-9
    return law


def wrap(pmf, modulus):
    """The same law modulo `modulus`; the middle of `pmf` is the integer 0."""
    reach = len(pmf) // 2
    folded = np.zeros(modulus)
    np.add.at(folded, np.arange(-reach, reach + 1) % modulus, pmf)
    return folded


def power(pmf, count):
    """The law of a sum of `count` independent draws, from sums of positive terms; its middle is the integer 0."""
    result, square = None, pmf
    while count:
        if count & 1:
            result = square if result is None else np.convolve(result, square)
        count >>= 1
        if count:
            square = np.convolve(square, square)
    return result


def noisy_sum(sigma, contributors, centre, modulus, other=0.0):
    """The law modulo `modulus` of one client around `centre` and the rest around `other`, all with their noise."""
    reach = int(12 * sigma + abs(centre) + abs(other) + 3)
    total = discrete_gaussian(sigma, centre, reach)
    if contributors > 1:
        total = np.convolve(total, power(discrete_gaussian(sigma, other, reach), contributors - 1))
    return wrap(total, modulus)


def delta(p, q, epsilon):
    """The smallest delta at epsilon, the worse direction."""
    ratio = np.exp(epsilon)
    return max(np.maximum(p - ratio * q, 0).sum(), np.maximum(q - ratio * p, 0).sum())


def epsilon(p, q, wanted):
    """The smallest epsilon at the given delta, by bisection; the lower end, so never above the truth."""
    assert abs(p.sum() - 1) < 1e-6
    assert abs(q.sum() - 1) < 1e-6
    if delta(p, q, 0.0) <= wanted:
        return 0.0
    low, high = 0.0, 1.0
    while delta(p, q, high) > wanted:
        low, high = high, 2 * high
        if high > 600:
            return np.inf
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if delta(p, q, middle) > wanted else (low, middle)
    return low


def renyi(p, q, order):
    """The Renyi divergence of p from q."""
    inside = (p > 0) & (q > 0)
    exponent = order * np.log(p[inside]) + (1 - order) * np.log(q[inside])
    largest = exponent.max()
    return (largest + np.log(np.exp(exponent - largest).sum())) / (order - 1)


def cohort_law(values, size, noise_of):
    """The law of the sum over a uniform subset of `size` clients; `noise_of` maps a centre to a law."""
    subsets = list(combinations(range(len(values)), size))
    return sum(noise_of(sum(values[i] for i in subset)) for subset in subsets) / len(subsets)


def coin_law(values, rate, noise_of):
    """The law of the sum over the clients whose own coin of probability `rate` came up."""
    total = 0.0
    for coins in product((0, 1), repeat=len(values)):
        chance = np.prod([rate if coin else 1 - rate for coin in coins])
        total = total + chance * noise_of(sum(np.multiply(coins, values)))
    return total


def neighbours(population, law_of, alternatives):
    """All ordered pairs of laws for data sets over {-1, 0, 1} that differ in the first client."""
    laws = {}
    for values in product((-1, 0, 1), repeat=population):
        key = tuple(sorted(values))
        if key not in laws:
            laws[key] = law_of(key)
    pairs = {}
    for values in product((-1, 0, 1), repeat=population):
        for first in alternatives:
            a, b = tuple(sorted(values)), tuple(sorted((first, *values[1:])))
            if a != b:
                pairs[a, b] = (laws[a], laws[b])
                pairs[b, a] = (laws[b], laws[a])
    return [np.array(side) for side in zip(*pairs.values(), strict=True)]


def adaptive_delta(pairs, rounds, ratio):
    """The largest delta of an adversary who picks new neighbours, in either direction, after each output.

    `ratio` is exp(epsilon). The value of the rounds to come is interpolated linearly between 600 ratios; it is
    convex, so this errs upwards, against any claim that is compared with it.
    """
    p, q = pairs

    def last(ratios):
        flat = np.ravel(ratios)
        best = np.zeros_like(flat)
        for one, other in zip(p, q, strict=True):
            np.maximum(best, np.maximum(one - flat[:, None] * other, 0).sum(axis=1), out=best)
        return best.reshape(np.shape(ratios))

    value = last
    for _ in range(1, rounds):
        value = _one_round_more(p, q, value)
    return float(value(np.array([ratio]))[0])


def _one_round_more(p, q, value):
    grid = np.exp(np.linspace(-9, 9, 600))
    table = value(grid)

    def ahead(ratios):
        inner = np.interp(ratios, grid, table)
        return np.where(
            ratios < grid[0], np.maximum(1 - ratios, table[0]), np.where(ratios > grid[-1], 0.0, inner)
        )

    def more(ratios):
        best = np.zeros(len(ratios))
        for one, other in zip(p, q, strict=True):
            seen = one > 0
            reached = ahead(ratios[:, None] * (other[seen] / one[seen])[None, :])
            np.maximum(best, reached @ one[seen], out=best)
        return best

    return more
