"""Lower bounds on epsilon from an attacker's counted errors: the assumption-free one, the Gaussian one, and of one run.

Each holds with the stated confidence if the number of trials, the thresholds and the number of guesses were fixed
before anything was seen.
"""

import math
from collections.abc import Callable

import numpy as np
from dp_accounting import get_epsilon_gaussian
from scipy.special import betaincinv, ndtr, ndtri
from scipy.stats import binom

from d2pfed.errors import ConfigError

_PRECISION = 1e-6  # of a bisection
_MOST_EPSILON, _MOST_MU = 100.0, 12.0  # beyond them no count of guesses tells anything


def upper_rate(errors: int, trials: int, alpha: float) -> float:
    """Return the Clopper-Pearson bound: the true rate is above it with probability at most `alpha`."""
    if not 0 <= errors <= trials or trials < 1:
        raise ConfigError(f"errors must be in [0, {trials}], got {errors}")
    return 1.0 if errors == trials else float(betaincinv(errors + 1, trials - errors, 1 - alpha))


def counted_epsilon(errors: tuple[int, int], trials: int, delta: float, alpha: float) -> float:
    """Return the epsilon that the errors of one test between two worlds refute, whatever the mechanism.

    By its definition an (epsilon, delta)-private mechanism allows no test with
    1 - delta - (rate of one error) > e^epsilon (rate of the other); both rates are bounded from above.
    """
    first, second = (upper_rate(count, trials, alpha / 2) for count in errors)
    found = 0.0
    for one, other in ((first, second), (second, first)):
        if 1 - delta - one > other:
            found = max(found, math.log((1 - delta - one) / other))
    return found


def gaussian_epsilon(errors: tuple[int, int], trials: int, delta: float, alpha: float) -> float:
    """Return the epsilon that the errors refute if the trade-off curve is a Gaussian one (Nasr et al. 2023).

    A test between N(0, 1) and N(mu, 1) has errors a and b with mu >= z(1 - a) - z(b), and the least mu that agrees with
    both upper bounds is turned into epsilon at delta.
    """
    first, second = (upper_rate(count, trials, alpha / 2) for count in errors)
    if first + second >= 1:
        return 0.0
    mu = float(-ndtri(first) - ndtri(second))
    return float(get_epsilon_gaussian(1 / mu, delta)) if mu > 0 else 0.0


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Bound the chance of this many correct guesses in one run that is (epsilon, delta)-private for each canary.

    Theorem 5.2 of Steinke, Nasr and Jagielski 2023: each of `canaries` was in or out by a fair coin, and the attacker
    guesses the coins of as many as it likes. Without delta a guess is right with probability at most
    e^epsilon / (1 + e^epsilon), given the others.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ConfigError(f"correct <= guesses <= canaries must hold, got {correct}, {guesses}, {canaries}")
    right = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, right))
    if not delta or not correct:
        return min(1.0, tail)
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, right))
    alpha = float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, tail + 2 * canaries * delta * alpha)


def refutes_gaussian(canaries: int, guesses: int, correct: int, mu: float, alpha: float) -> bool:
    """Say whether this many correct guesses in one run refute the trade-off curve of two unit Gaussians `mu` apart.

    The algorithm of Mahloujifar, Melis and Chaudhuri 2024 ("Auditing f-differential privacy in one run") for guesses
    between two values: from the shares of right and wrong guesses that runs with at least `correct` right ones have if
    their chance is `alpha`, those of runs with fewer and fewer are bounded; together they must not exceed all guesses.
    """
    right, wrong = alpha * correct / canaries, alpha * (guesses - correct) / canaries
    for fewer in range(correct - 1, -1, -1):
        more = max(wrong, float(ndtr(ndtri(right) - mu)))
        if more == wrong:
            break
        right, wrong = min(1.0, right + fewer / (guesses - fewer) * (more - wrong)), more
    return right + wrong > guesses / canaries


def one_run_gaussian_epsilon(canaries: int, guesses: int, correct: int, delta: float, alpha: float) -> float:
    """Return the largest epsilon that one run's guesses refute if the trade-off curve is a Gaussian one."""
    mu = _largest(lambda mu: refutes_gaussian(canaries, guesses, correct, mu, alpha), _MOST_MU)
    return float(get_epsilon_gaussian(1 / mu, delta)) if mu > 0 else 0.0


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, alpha: float) -> float:
    """Return the largest epsilon that one run's guesses refute at the level `alpha`; 0 if they refute none."""
    return _largest(lambda at: one_run_p_value(canaries, guesses, correct, at, delta) <= alpha, _MOST_EPSILON)


def _largest(refutes: Callable[[float], bool], most: float) -> float:
    """Return the largest number that is refuted, from below; 0 if none is."""
    low, high = 0.0, most
    if not refutes(low):
        return low
    if refutes(high):
        return high
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if refutes(middle) else (low, middle)
    return low
