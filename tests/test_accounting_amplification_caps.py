"""Caps behind fixed-size cohorts: the claim of the proof over all draws, and what its planted twins say."""

from fractions import Fraction
from itertools import combinations, product

import pytest
from scipy.stats import binom

from d2pfed.accounting import CohortSampling, Sampling, cap_excess

# Population (client 0 is the one that differs), cohort, attempts, cap.
CASES = ((4, 1, 4, 2), (4, 2, 3, 2), (5, 2, 3, 2), (3, 1, 4, 2), (4, 1, 3, 1), (4, 2, 4, 3))


def draws(population, cohort, attempts):
    """Yield all ways to draw the others of each attempt: the set without the slot, and who fills it if 0 does not."""
    others = range(1, population)
    one = [(frozenset(s), j) for s in combinations(others, cohort - 1) for j in others if j not in s]
    return product(one, repeat=attempts)


def bound_attempts(drawn, cap):
    """The attempts whose coin must be revealed."""
    filled = [s | {j} for s, j in drawn]
    return {
        u for u, (_, j) in enumerate(drawn) if sum(j in other for v, other in enumerate(filled) if v != u) >= cap
    }


def statuses(drawn, coins, cap):
    """Who of the others of each attempt, slot included, has reached the cap before it."""
    participations, found = {}, []
    for (s, j), coin in zip(drawn, coins, strict=True):
        found.append({k: participations.get(k, 0) >= cap for k in s | {j}})
        for k in s if coin else s | {j}:
            participations[k] = participations.get(k, 0) + 1
    return found


def claim_holds(case, revealed):
    population, cohort, attempts, cap = case
    for drawn in draws(population, cohort, attempts):
        known, seen = revealed(drawn, cap), {}
        for coins in product((0, 1), repeat=attempts):
            told = tuple(coins[u] for u in sorted(known))
            if seen.setdefault(told, statuses(drawn, coins, cap)) != statuses(drawn, coins, cap):
                return False
    return True


@pytest.mark.parametrize("case", CASES)
def test_who_is_at_the_cap_follows_from_what_the_proof_reveals(case):
    assert claim_holds(case, bound_attempts)


@pytest.mark.parametrize("case", CASES)
def test_what_the_proof_reveals_costs_exactly_kappa(case):
    population, cohort, attempts, cap = case
    sizes = [len(bound_attempts(drawn, cap)) for drawn in draws(population, cohort, attempts)]
    rate = Fraction(cohort, population)
    truth = rate * Fraction(sum(sizes), len(sizes))
    claimed = cap_excess(CohortSampling(Sampling.FIXED, population, cohort), attempts, cap)
    assert float(truth) <= claimed <= float(truth) * (1 + 1e-6) + 1e-12


def test_the_cases_reject_a_set_with_more_than_cap():
    assert not all(claim_holds(case, lambda drawn, cap: bound_attempts(drawn, cap + 1)) for case in CASES)


def test_the_cases_reject_a_kappa_with_the_wrong_rate_or_the_wrong_tail():
    def below(kappa):
        return [
            kappa(*case) < cap_excess(CohortSampling(Sampling.FIXED, *case[:2]), *case[2:]) * (1 - 1e-6)
            for case in CASES
        ]

    assert any(below(lambda n, c, t, cap: t * c / n * binom.sf(cap - 1, t - 1, c / n)))
    assert any(below(lambda n, c, t, cap: t * c / n * binom.sf(cap, t - 1, c / (n - 1))))
