"""Private sums and means of one vector per client."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from d2pfed.api.statistics.records import Array, clipped, equal_vectors, interval, numbers, positive
from d2pfed.api.statistics.releasing import Terms, release
from d2pfed.api.statistics.result import Statistic, statistic
from d2pfed.errors import ConfigError
from d2pfed.ledger import Ledger

DROWNED = 3.0  # standard deviations of noise that a total weight must exceed to divide by


def private_sum(
    vectors: object,
    *,
    epsilon: float = 1.0,
    clip: float = 1.0,
    delta: float | None = None,
    privacy: Mapping[str, object] | None = None,
    ledger: Ledger | str | Path | None = None,
    fidelity: str = "auto",
    seed: int | None = None,
) -> Statistic[Array]:
    """Return the sum of one vector per client, each clipped to an L2 norm.

    Args:
        vectors: One number or one vector per client: a sequence, a mapping or an array.
        epsilon: Bound on what the observer learns about one client.
        clip: L2 bound on a client's vector; a longer one is scaled down to it.
        delta: Failure probability of the guarantee; None is the number of clients to the power of -1.1, or the
            ledger's.
        privacy: Changes to `against` (server), `adjacency` (zero-out, or that of the ledger's runs), `dropouts` and
            `colluders` (a tenth of the clients each).
        ledger: A ledger that other runs over these clients share, its path, or a run's directory; None charges a
            ledger of this release alone.
        fidelity: protocol, sum, or auto: every message of the protocol for up to 100 clients.
        seed: A number repeats the noise, and protects nobody from whoever knows it.

    Raises:
        ConfigError: if an argument cannot be used, before anything is charged.
        BudgetExceeded: if the ledger does not allow the release.
    """
    terms = Terms(epsilon=epsilon, delta=delta, privacy=privacy, ledger=ledger, fidelity=fidelity, seed=seed)
    given, is_plain = equal_vectors(vectors, "vectors")
    limit = positive("clip", clip)
    released = release("sum", [clipped(each, limit) for each in given], limit, terms)
    value, error = released.total, np.full(len(released.total), released.sigma)
    return statistic("private sum", *_as_given(value, error, is_plain), released)


def private_mean(
    vectors: object,
    *,
    epsilon: float = 1.0,
    clip: float | None = None,
    bounds: tuple[float, float] | None = None,
    weights: object = None,
    max_weight: float | None = None,
    delta: float | None = None,
    privacy: Mapping[str, object] | None = None,
    ledger: Ledger | str | Path | None = None,
    fidelity: str = "auto",
    seed: int | None = None,
) -> Statistic[Array]:
    """Return the mean of one vector per client, each client with the same weight or with a private one.

    Weights are private too: each is capped at `max_weight`, the sums of w x and of w are released in one vector, and
    their ratio is the mean. Nobody learns a client's weight.

    Args:
        vectors: One number or one vector per client: a sequence, a mapping or an array.
        epsilon: Bound on what the observer learns about one client.
        clip: L2 bound on a client's vector; a longer one is scaled down to it. 1 if there are no bounds either.
        bounds: Lower and upper bound of each number, in place of a clip; what is beyond counts as the bound, and a
            client whose data are hidden counts as the middle.
        weights: One number from 0 on per client, such as how many records it has; None weighs all alike.
        max_weight: The cap on a client's weight: public, chosen without looking at the weights.
        delta: Failure probability, as in `private_sum`.
        privacy: Changes to the target, as in `private_sum`.
        ledger: Where the release is charged, as in `private_sum`.
        fidelity: How much of the protocol runs, as in `private_sum`.
        seed: Repeats the noise, as in `private_sum`.

    Raises:
        ConfigError: if an argument cannot be used, before anything is charged.
        BudgetExceeded: if the ledger does not allow the release.
    """
    terms = Terms(epsilon=epsilon, delta=delta, privacy=privacy, ledger=ledger, fidelity=fidelity, seed=seed)
    given, is_plain = equal_vectors(vectors, "vectors")
    centre, limit, bounded = _bounded(given, clip, bounds)
    if weights is None:
        released = release("mean", bounded, limit, terms)
        value = centre + released.total / released.clients
        error = np.full(len(value), released.sigma / released.clients)
        return statistic("private mean", *_as_given(value, error, is_plain), released)
    shares = capped_shares(weights, max_weight, len(given))
    a, b = weight_parts(len(given[0]))
    joint = [np.append(a * u * x / limit, b * u) for u, x in zip(shares, bounded, strict=True)]
    released = release("weighted mean", joint, 1.0, terms)
    weight = max(released.total[-1], released.sigma) / b
    ratio = limit / a * released.total[:-1] / weight
    error = released.sigma * np.hypot(limit / a, ratio / b) / weight
    result = statistic("private weighted mean", *_as_given(centre + ratio, error, is_plain), released)
    return result.warned(drowned(released.total[-1], released.sigma, "weight"))


def weight_parts(dimension: int) -> tuple[float, float]:
    """Return the factors of a weighted vector at its clip and of its weight: together of norm 1, least noise in both.

    The squared error of a mean at the clip is in proportion to dimension / a^2 + 1 / b^2.
    """
    root = math.sqrt(dimension)
    return math.sqrt(root / (1 + root)), math.sqrt(1 / (1 + root))


def capped_shares(weights: object, max_weight: object, clients: int) -> Array:
    """Return each client's weight over the cap, at most 1."""
    if max_weight is None:
        raise ConfigError("weights need max_weight, a public cap on a client's weight, got None")
    given = numbers(weights, "weights")
    if given.shape != (clients,):
        raise ConfigError(f"weights must be one number for each of {clients} clients, got the shape {given.shape}")
    if (given < 0).any():
        raise ConfigError(f"weights must be at least 0, got {given.min():g}")
    return np.minimum(given / positive("max_weight", max_weight), 1.0)


def drowned(total: float, sigma: float, what: str) -> tuple[str, ...]:
    """Return a warning if a total that is divided by is not far above its noise."""
    if total >= DROWNED * sigma:
        return ()
    return (f"The total {what} is below {DROWNED:g} standard deviations of its noise: the ratio means little.",)


def _bounded(given: list[Array], clip: object, bounds: object) -> tuple[float, float, list[Array]]:
    """Return the centre, the bound on the norm around it, and each vector within that bound."""
    if bounds is None:
        limit = positive("clip", 1.0 if clip is None else clip)
        return 0.0, limit, [clipped(each, limit) for each in given]
    if clip is not None:
        raise ConfigError(f"a mean has a clip or bounds, got clip {clip} and bounds {bounds}")
    low, high = interval(bounds)
    centre = (low + high) / 2
    limit = (high - low) / 2 * math.sqrt(len(given[0]))
    return centre, limit, [np.clip(each, low, high) - centre for each in given]


def _as_given(value: Array, error: Array, is_plain: bool) -> tuple[Array, Array]:  # noqa: FBT001 - a fact
    """Return numbers of the shape of what each client gave."""
    return (value[0], error[0]) if is_plain else (value, error)
