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


def neighbours(population, law_of, alternatives, *, in_order=False):
    """All pairs of laws for data sets over {-1, 0, 1} that differ in the first client, in both orders or in one."""
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
                if not in_order:
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


def histories(population, cohort, attempts, draw):
    """All sequences of cohorts with their chances; `draw(drawn)` lists the next cohort's chances given the earlier."""
    found = [((), 1.0)]
    for _ in range(attempts):
        found = [((*drawn, chosen), chance * share) for drawn, chance in found for chosen, share in draw(drawn)]
    return found


def fresh(population, cohort):
    """A new uniform cohort each time."""
    every = list(combinations(range(population), cohort))
    return lambda _drawn: [(chosen, 1 / len(every)) for chosen in every]


def same(population, cohort):
    """The cohort of the first attempt again and again."""
    first = fresh(population, cohort)
    return lambda drawn: first(drawn) if not drawn else [(drawn[0], 1.0)]


def undrawn(population, cohort):
    """A uniform cohort among those that were not drawn before."""

    def draw(drawn):
        left = [client for client in range(population) if all(client not in chosen for chosen in drawn)]
        every = list(combinations(left, cohort))
        return [(chosen, 1 / len(every)) for chosen in every]

    return draw


def transcript_law(data, sequences, noise_of, caps=None):
    """The joint law of all sums, one axis for each attempt.

    `data[t][i]` is what client i holds in attempt t: a number, or one for each number of attempts that it took part in
    before, where it keeps a state; `caps[i]` says how often it sends it before it sends zeros.
    """
    centres = {}
    for drawn, chance in sequences:
        participations, sums = {}, []
        for held, chosen in zip(data, drawn, strict=True):
            past = {client: participations.get(client, 0) for client in chosen}
            sums.append(
                sum(
                    held[client][past[client]] if isinstance(held[client], tuple) else held[client]
                    for client in chosen
                    if caps is None or past[client] < caps[client]
                )
            )
            for client in chosen:
                participations[client] = past[client] + 1
        centres[tuple(sums)] = centres.get(tuple(sums), 0.0) + chance
    total = 0.0
    for sums, chance in centres.items():
        law = np.full((), chance)
        for centre in sums:
            law = np.multiply.outer(law, noise_of(centre))
        total = total + law
    return total


def seen_cohort_delta(data, other, sequences, noise_of, ratio):
    """Delta where each attempt also shows whether client 0 was drawn, as one that fails with it would."""
    keys = {tuple(0 in chosen for chosen in drawn) for drawn, _ in sequences}
    total = 0.0
    for key in keys:
        some = [(drawn, chance) for drawn, chance in sequences if tuple(0 in chosen for chosen in drawn) == key]
        p, q = (transcript_law(each, some, noise_of) for each in (data, other))
        total += np.maximum(p - ratio * q, 0).sum()
    return float(total)


def best_stop(ratio, epsilons, rate=1.0):
    """The largest delta of someone who watches Gaussian releases and stops when the printed epsilon suits best.

    `epsilons[t]` is printed after t + 1 releases, each a shift of `ratio` deviations behind a secret coin of this rate.
    Dynamic programming over a grid of losses; the value is interpolated, which errs by less than the comparisons made
    with it.
    """
    rounds = len(epsilons)
    top = max(epsilons) + 8 * ratio * np.sqrt(rounds) + 1
    losses = np.linspace(-10 * ratio * np.sqrt(rounds) - 1, top, 6001)
    nodes, weights = np.polynomial.hermite_e.hermegauss(41)
    seen = np.concatenate([nodes + ratio, nodes])  # in deviations, if the coin came up and if not
    weights = np.concatenate([rate * weights, (1 - rate) * weights]) / weights.sum()
    steps = np.log1p(rate * np.expm1(ratio * seen - ratio * ratio / 2))

    def gain(epsilon):
        return np.maximum(-np.expm1(np.minimum(epsilon - losses, 0.0)), 0.0)

    value = gain(epsilons[-1])
    for epsilon in reversed(epsilons[:-1]):
        ahead = sum(
            weight * np.interp(losses + step, losses, value) for step, weight in zip(steps, weights, strict=True)
        )
        value = np.maximum(gain(epsilon), ahead)
    start = sum(weight * np.interp(step, losses, value) for step, weight in zip(steps, weights, strict=True))
    return float(start)
