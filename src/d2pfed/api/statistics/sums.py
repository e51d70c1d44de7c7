"""Private sums and means of one vector per client."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from d2pfed.api.statistics.releasing import Terms, release, release_records
from d2pfed.api.statistics.result import Statistic, statistic
from d2pfed.errors import ConfigError
from d2pfed.ledger import Ledger
from d2pfed.statistics.means import ball_of, capped_shares, drowned
from d2pfed.statistics.records import Array, RecordCode, clipped, equal_rows, equal_vectors, positive


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
        vectors: One number or one vector per client: a sequence, a mapping or an array. Where the unit is a record, the
            records of each client: numbers, or one vector per row.
        epsilon: Bound on what the observer learns about one client, or about one record.
        clip: L2 bound on a vector; a longer one is scaled down to it.
        delta: Failure probability of the guarantee; None is the number of clients to the power of -1.1, or the
            ledger's.
        privacy: Changes to `against` (server), `adjacency` (zero-out for a client, add-remove for a record, or that
            of the ledger's runs), `dropouts` and `colluders` (a tenth of the clients each). `unit="record"` protects
            single records; it needs `records`, a public bound on how many there are, and takes `max_silos`.
        ledger: A ledger that other runs over these clients share, its path, or a run's directory; None charges a
            ledger of this release alone.
        fidelity: protocol, sum, or auto: every message of the protocol for up to 100 clients.
        seed: A number repeats the noise, and protects nobody from whoever knows it; not with a ledger.

    Raises:
        ConfigError: if an argument cannot be used, before anything is charged.
        BudgetExceeded: if the ledger does not allow the release.
    """
    terms = Terms(epsilon=epsilon, delta=delta, privacy=privacy, ledger=ledger, fidelity=fidelity, seed=seed)
    limit = positive("clip", clip)
    if terms.of_records:
        given, is_plain = equal_rows(vectors, "vectors")
        code = RecordCode(lambda part: part, given[0].shape[1], limit)
        released = release_records("sum", given, code, None, terms)
    else:
        given, is_plain = equal_vectors(vectors, "vectors")
        released = release("sum", [clipped(each, limit) for each in given], len(given[0]), limit, terms)
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
        vectors: One number or one vector per client, or the records of each client, as in `private_sum`.
        epsilon: Bound on what the observer learns about one client, or about one record.
        clip: L2 bound on a client's vector; a longer one is scaled down to it. Give it or bounds.
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
    if weights is None and max_weight is not None:
        raise ConfigError(f"max_weight goes with weights, got max_weight {max_weight} and no weights")
    given, is_plain = (equal_rows if terms.of_records else equal_vectors)(vectors, "vectors")
    ball = ball_of(given[0].shape[-1], clip, bounds)
    if terms.of_records:
        if weights is not None:
            raise ConfigError("weights are for the unit client: a record counts as one where it is the unit")
        released = release_records("mean", given, ball.code, None, terms)
    elif weights is None:
        released = release("mean", [ball.around(each) for each in given], ball.dimension, ball.radius, terms)
        value = ball.centre + released.total / released.clients
        error = np.full(len(value), released.sigma / released.clients)
        return statistic("private mean", *_as_given(value, error, is_plain), released)
    else:
        shares = capped_shares(weights, max_weight, len(given))
        joint = [u * ball.code.total(x[None, :]) for u, x in zip(shares, given, strict=True)]
        released = release("weighted mean", joint, ball.dimension + 1, 1.0, terms)
    value, error = ball.mean(released.total, released.sigma)
    name = "private mean" if terms.of_records else "private weighted mean"
    result = statistic(name, *_as_given(value, error, is_plain), released)
    return result.warned(drowned(released.total[-1], released.sigma, "weight"))


def _as_given(value: Array, error: Array, is_plain: bool) -> tuple[Array, Array]:  # noqa: FBT001 - a fact
    """Return numbers of the shape of what each client gave."""
    return (value[0], error[0]) if is_plain else (value, error)
