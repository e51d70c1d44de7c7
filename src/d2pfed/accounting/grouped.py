"""The account of one client that is known to take part, whoever chose each release from what was seen before."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import product

from d2pfed.accounting.charge import binomial_charge, gaussian_charge, renyi_charge
from d2pfed.accounting.conversion import check_delta, gaussian_epsilon, tight
from d2pfed.accounting.cost import Additive, composed
from d2pfed.accounting.orders import sparse
from d2pfed.accounting.release import BinomialSum, Noise

_ORDERS = sparse(1 << 20)
_SMOOTHED = 1 << 12  # a release's own slack is that of one among so many
_SLACK = 1e-4  # what the surrogates of all Gaussian releases may use up together: 2 * _SLACK is added to epsilon
_MOST_BINOMIAL = 1 << 10  # binomial releases that one account can hold
_TENTHS = 10  # parts of epsilon that are divided among the groups


class _Group(StrEnum):
    """Releases that compose among themselves."""

    GAUSSIAN = "gaussian"
    RENYI = "rdp"
    BINOMIAL = "binomial"


# Shares of delta by the groups that an account comes to hold, fixed before anything is seen. They add up to 1.
_ALONE = {_Group.GAUSSIAN: 0.8, _Group.RENYI: 0.1, _Group.BINOMIAL: 0.05}
_MIXED = 0.05


def filtered_epsilon(noises: Counter[Noise], radii: int, delta: float) -> float:
    """Return epsilon of one client that is known to take part in releases with all of these noises.

    Each release may have been chosen after seeing the ones before; nothing is amplified.

    Guarantee: a filter: whoever stops before this passes a fixed epsilon has that epsilon as its promise. Errs
    upwards. Proof: theory.md#client. Checked: test_accounting_client.py, test_accounting_filters.py.
    """
    check_delta(delta)
    groups: dict[_Group, Counter[Noise]] = {}
    for noise, count in noises.items():
        groups.setdefault(_group(noise, radii), Counter())[noise] += count
    if not groups:
        return 0.0
    if len(groups) == 1:
        ((group, own),) = groups.items()
        return _epsilon(group, own, radii, delta * _ALONE[group])
    return _mixed(groups, radii, delta * _MIXED)


def _mixed(groups: Mapping[_Group, Counter[Noise]], radii: int, delta: float) -> float:
    """Return the least epsilon that some division of it among the groups covers.

    Which division a path ends in is chosen after the fact, so delta is divided among all that there are.
    """
    every = sum(1 for count in (2, 3) for _ in _divisions(count) for _ in range(3 if count == 2 else 1))
    each = delta / (every * len(groups))
    wanted = [_epsilon(group, noises, radii, each) for group, noises in groups.items()]
    return min(
        max(epsilon * _TENTHS / part for epsilon, part in zip(wanted, parts, strict=True))
        for parts in _divisions(len(groups))
    )


def _divisions(groups: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to divide the tenths of epsilon among so many groups."""
    return (parts for parts in product(range(1, _TENTHS), repeat=groups) if sum(parts) == _TENTHS)


def _group(noise: Noise, radii: int) -> _Group:
    if isinstance(noise, BinomialSum):
        return _Group.BINOMIAL
    _, slack = gaussian_charge(noise, radii, _SMOOTHED).values
    return _Group.GAUSSIAN if slack <= _SLACK / _SMOOTHED else _Group.RENYI


def _epsilon(group: _Group, noises: Counter[Noise], radii: int, delta: float) -> float:
    if group is _Group.GAUSSIAN:
        return _gaussian(noises, radii, delta)
    return _renyi(noises, radii, delta) if group is _Group.RENYI else _binomial(noises, radii, delta)


def _gaussian(noises: Counter[Noise], radii: int, delta: float) -> float:
    squared, slack = composed(
        (gaussian_charge(noise, radii, _SMOOTHED), count) for noise, count in noises.items()
    ).values
    if slack > _SLACK:
        return math.inf
    return gaussian_epsilon(delta * math.exp(-_SLACK), math.sqrt(squared)) + 2 * _SLACK


def _renyi(noises: Counter[Noise], radii: int, delta: float) -> float:
    """Return epsilon by the one number rho with D_alpha <= alpha rho: which order is best depends on it alone."""

    def rho(noise: Noise) -> Additive:
        curve = renyi_charge(noise, radii, _ORDERS).values
        return Additive((max(value / order for value, order in zip(curve, _ORDERS.tolist(), strict=True)),))

    (total,) = composed((rho(noise), count) for noise, count in noises.items()).values
    return float(tight(_ORDERS, total * _ORDERS, delta).min())


def _binomial(noises: Counter[Noise], radii: int, delta: float) -> float:
    half = delta / 2  # plain or advanced composition, whichever turns out to be less
    each = half / 2 / _MOST_BINOMIAL
    plain, used, square, growth = composed(
        (binomial_charge(noise, radii, each), count) for noise, count in noises.items()
    ).values
    if used > half / 2:
        return math.inf
    return min(plain, math.sqrt(2 * square * math.log(2 / half)) + growth)
