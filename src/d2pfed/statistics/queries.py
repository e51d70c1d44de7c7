"""Private sums, means, histograms, contingency tables and quantiles of the clients' own values."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Unpack

import numpy as np

from d2pfed.errors import ConfigError
from d2pfed.ledger import Ledger
from d2pfed.statistics import records
from d2pfed.statistics.release import Asked, Statistic, Terms, drowned, release, release_records

MOST_CELLS = 1 << 20  # of a table, and bins of a histogram


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
) -> Statistic[records.Array]:
    """Return the sum of one vector per client, each clipped to an L2 norm.

    Args:
        vectors: One number or one vector per client: a sequence, a mapping or an array. Where the unit is a record, the
            records of each client: numbers, or one vector per row.
        epsilon: Bound on what the observer learns about one client, or about one record.
        clip: L2 bound on a vector; a longer one is scaled down to it.
        delta: Failure probability of the guarantee; None is the number of clients to the power of -1.1, or the
            ledger's.
        privacy: Changes to `against` (server), `adjacency` (replace-one for a client, add-remove for a record, or that
            of the ledger's runs), `dropouts` and `colluders` (a tenth of the clients each). `unit="record"` protects
            single records; it needs `records`, a public bound on how many there are, and takes `max_silos`.
        ledger: A ledger that other runs over these clients share, its path, or a run's directory; None charges a
            ledger of this release alone.
        fidelity: protocol, sum, or auto: every message of the protocol for up to 100 clients.
        seed: A number repeats the noise; anyone who knows it can remove the noise. Not with a ledger.

    Raises:
        ConfigError: if an argument cannot be used, before anything is charged.
        BudgetExceeded: if the ledger does not allow the release.

    Examples:
        >>> total = private_sum([[1.0, 0.0], [0.0, 1.0]] * 100, clip=1.0, epsilon=1.0)
        >>> total.value.shape, total.clients
        ((2,), 200)
    """
    terms = Terms(epsilon=epsilon, delta=delta, privacy=privacy, ledger=ledger, fidelity=fidelity, seed=seed)
    limit = records.positive("clip", clip)
    given, is_plain = records.client_vectors(vectors, of_records=terms.of_records)
    if terms.of_records:
        code = records.RecordCode(lambda part: part, given[0].shape[1], limit)
        released = release_records("sum", given, code, None, terms)
    else:
        released = release("sum", [records.clipped(each, limit) for each in given], len(given[0]), limit, terms)
    shape = () if is_plain else released.value.shape
    return released.computed(released.value.reshape(shape)[()], released.standard_error.reshape(shape)[()])


def private_mean(
    vectors: object,
    *,
    clip: float | None = None,
    bounds: tuple[float, float] | None = None,
    weights: object = None,
    max_weight: float | None = None,
    **terms: Unpack[Asked],
) -> Statistic[records.Array]:
    """Return the mean of one vector per client, each client with the same weight or with a private one.

    Weights are private too: each is capped at `max_weight`, the sums of w x and of w are released in one vector, and
    their ratio is the mean. Nobody learns a client's weight.

    Args:
        vectors: One number or one vector per client, or the records of each client, as in `private_sum`.
        clip: L2 bound on a client's vector; a longer one is scaled down to it. Give it or bounds.
        bounds: Lower and upper bound of each number, in place of a clip; what is beyond counts as the bound, and a
            client whose data are hidden counts as the middle.
        weights: One number from 0 on per client, such as how many records it has; None weighs all alike.
        max_weight: The cap on a client's weight: public, chosen without looking at the weights.
        terms: epsilon, delta, privacy, ledger, fidelity and seed, as in `private_sum`.

    Examples:
        >>> mean = private_mean([20.0 + i % 50 for i in range(2000)], bounds=(0, 100), epsilon=1.0)
        >>> bool(abs(mean.value - 44.5) < 6 * mean.standard_error)
        True
    """
    asked = Terms.of(terms)
    if weights is None and max_weight is not None:
        raise ConfigError(f"max_weight goes with weights, got max_weight {max_weight} and no weights")
    given, is_plain = records.client_vectors(vectors, of_records=asked.of_records)
    ball = records.Ball.of(given[0].shape[-1], clip, bounds)
    code = records.RecordCode(ball.joint, ball.dimension + 1, 1.0)  # a vector's numbers, and a one to count it by
    warnings: tuple[str, ...] = ()
    if weights is None and not asked.of_records:
        released = release("mean", [ball.around(each) for each in given], ball.dimension, ball.radius, asked)
        value, error = ball.center + released.value / released.clients, released.standard_error / released.clients
    else:
        if weights is None:
            released = release_records("mean", given, code, None, asked)
        elif asked.of_records:
            raise ConfigError("weights are for the unit client: a record counts as one where it is the unit")
        elif max_weight is None:
            raise ConfigError("weights need max_weight, a public cap on a client's weight, got None")
        else:
            own = records.client_weights(weights, len(given))
            shares = np.clip(
                np.where(np.isfinite(own), own, 0.0) / records.positive("max_weight", max_weight), 0.0, 1.0
            )
            joint = [u * code.total(x[None, :]) for u, x in zip(shares, given, strict=True)]
            released = release("weighted mean", joint, ball.dimension + 1, 1.0, asked)
        value, error = ball.mean(released.value, released.sigma)
        warnings = drowned(released.value[-1], released.sigma, "weight")
    shape = () if is_plain else (ball.dimension,)
    return released.computed(value.reshape(shape)[()], error.reshape(shape)[()], warnings)


def private_histogram(
    values: object,
    bins: Sequence[float],
    *,
    max_values: float | None = None,
    **terms: Unpack[Asked],
) -> Statistic[records.Array]:
    """Return how many clients are in each bin, by shares of their values, or how many values, in one release.

    Without `max_values` a client that has four values adds a quarter for each, and the bins add up to the number of
    clients; with it, each value adds 1. The counts are right on average, so one may be below zero.

    Args:
        values: The values of each client: a list of numbers, or one number.
        bins: The edges of the bins, rising; each bin is closed on the left, the last one on both sides. Values
            outside of them are counted nowhere.
        max_values: None counts clients: the histogram of each is divided by its number of values. A number counts
            values: a client that has more is scaled down to this number, which is also the bound on its contribution.
        terms: epsilon, delta, privacy, ledger, fidelity and seed, as in `private_sum`.

    Examples:
        >>> ages = private_histogram([[i % 90] for i in range(2000)], [0, 30, 60, 90], epsilon=1.0)
        >>> len(ages.value)
        3
    """
    asked = Terms.of(terms)
    edges = records.settings(bins, "bins")
    if edges.ndim != 1 or len(edges) < 2:
        raise ConfigError(f"bins must be at least two edges, got {bins!r}")
    if (np.diff(edges) <= 0).any():
        at = int(np.argmax(np.diff(edges) <= 0))
        raise ConfigError(f"bins must rise strictly, got {edges[at]:g} before {edges[at + 1]:g}")
    count = len(edges) - 1
    if count > MOST_CELLS:
        raise ConfigError(f"a histogram must have at most {MOST_CELLS} bins, got {count}")
    code = records.RecordCode(lambda part: records.one_hot(records.bin_of(part, edges), count), count, 1.0)
    return release_records("histogram", records.client_lists(values), code, max_values, asked)


def private_table(
    rows: object,
    categories: Sequence[Sequence[object]] | Mapping[str, Sequence[object]],
    *,
    max_values: float | None = None,
    **terms: Unpack[Asked],
) -> Statistic[records.Array]:
    """Return a contingency table: how many rows have each combination of categories, one release over all cells.

    Args:
        rows: The rows of each client: a list of tuples, one entry per variable.
        categories: The categories of each variable, in order, or by its name. A row with another category is counted
            nowhere.
        max_values: None counts clients, a number counts rows, as in `private_histogram`.
        terms: epsilon, delta, privacy, ledger, fidelity and seed, as in `private_sum`.

    Examples:
        >>> rows = [[("yes", "red" if i % 3 else "blue")] for i in range(2000)]
        >>> private_table(rows, [["yes", "no"], ["red", "blue"]], epsilon=1.0).value.shape
        (2, 2)
    """
    asked = Terms.of(terms)
    lists: object = list(categories.values()) if isinstance(categories, Mapping) else categories
    if not isinstance(lists, Sequence) or isinstance(lists, (str, bytes)) or not lists:
        raise ConfigError(f"categories must be a list for each variable, got {categories!r}")
    variables: list[dict[object, int]] = []
    for each in lists:
        if not isinstance(each, Sequence) or isinstance(each, (str, bytes)) or not each:
            raise ConfigError(f"the categories of a variable must be a list, got {each!r}")
        try:
            variables.append({category: at for at, category in enumerate(each)})
        except TypeError:
            raise ConfigError(f"the categories of a variable must be plain values, got {list(each)!r}") from None
        if len(variables[-1]) != len(each):
            raise ConfigError(f"the categories of a variable must differ, got {list(each)!r}")
    shape = tuple(len(each) for each in variables)
    cells = int(np.prod(shape, dtype=object))
    if cells > MOST_CELLS:
        raise ConfigError(f"a table must have at most {MOST_CELLS} cells, got {cells}")
    own = []
    for client, held in enumerate(records.clients_of(rows, "rows")):
        if isinstance(held, (str, bytes)) or not isinstance(held, (Sequence, np.ndarray)):
            raise ConfigError(f"rows of client {client} must be a list, got {type(held).__name__}")
        found = []
        for row in held:
            entries = list(row) if isinstance(row, (tuple, list, np.ndarray)) else [row]
            try:
                places = [known.get(entry, -1) for known, entry in zip(variables, entries, strict=True)]
            except (TypeError, ValueError):  # an entry that cannot be looked up, or too few or too many of them
                places = [-1]
            found.append(-1 if min(places) < 0 else int(np.ravel_multi_index(places, shape)))
        own.append(np.array(found, dtype=np.float64))
    code = records.RecordCode(lambda part: records.one_hot(part.astype(np.int64), cells), cells, 1.0)
    released = release_records("table", own, code, max_values, asked)
    return released.computed(released.value.reshape(shape), released.standard_error.reshape(shape))


def private_quantile(
    values: object,
    levels: float | Sequence[float],
    *,
    bounds: tuple[float, float],
    bins: int = 64,
    max_values: float | None = None,
    **terms: Unpack[Asked],
) -> Statistic[records.Array]:
    """Return quantiles of the clients' values, from one release of the cumulative counts over equal bins.

    A client's histogram is multiplied by the square root of the matrix that adds counts up, and the noisy sum once
    more: each cumulative count then has noise of about 1 + ln(bins) / pi standard deviations, where sums over a noisy
    histogram have up to sqrt(bins).

    Args:
        values: The values of each client: a list of numbers, or one number.
        levels: One level or several, each in [0, 1]: 0.5 is the median. All come from the same release.
        bounds: Lower and upper bound of the values; what is beyond counts as the bound.
        bins: How many bins; within one, values are taken to be spread evenly.
        max_values: None gives each client the same weight, a number each value, as in `private_histogram`.
        terms: epsilon, delta, privacy, ledger, fidelity and seed, as in `private_sum`.

    Examples:
        >>> median = private_quantile([[i % 100] for i in range(2000)], 0.5, bounds=(0, 100), epsilon=1.0)
        >>> bool(40 < median.value < 60)
        True
    """
    asked = Terms.of(terms)
    chosen = records.settings(levels, "levels")
    if chosen.ndim > 1 or not chosen.size or (chosen < 0).any() or (chosen > 1).any():
        raise ConfigError(f"levels must be numbers in [0, 1], got {levels!r}")
    low, high = records.interval(bounds)
    count = records.whole("bins", bins, records.MOST_BINS)
    edges, root = np.linspace(low, high, count + 1), cumulative_root(count)
    code = records.RecordCode(
        lambda part: root.T[records.bin_of(np.clip(part, low, high), edges)],
        count,
        float(np.linalg.norm(root[:, 0])),
    )
    released = release_records("quantile", records.client_lists(values), code, max_values, asked)
    counts = root @ released.value
    total = max(counts[-1], released.sigma)
    # Counts rise, and noise does not: between the least and the largest rising curve that it allows.
    rising = (np.maximum.accumulate(counts) + np.minimum.accumulate(counts[::-1])[::-1]) / 2
    curve = np.concatenate([[0.0], np.clip(rising, 0, total)])
    found = []
    for level in np.atleast_1d(chosen):
        at = min(int(np.searchsorted(curve[1:], level * total)), count - 1)
        noise = released.sigma * float(np.linalg.norm(root[at] - level * root[-1]))
        lower, value, upper = np.interp(
            [level * total - noise, level * total, level * total + noise], curve, edges
        )
        found.append((float(value), float(upper - lower) / 2))
    quantiles, errors = (np.array(each).reshape(chosen.shape) for each in zip(*found, strict=True))
    warnings = drowned(float(root[-1] @ released.value), released.sigma * float(np.linalg.norm(root[-1])), "count")
    return released.computed(quantiles, errors, warnings)


def cumulative_root(count: int) -> records.Array:
    """Return the lower triangular matrix whose square adds up: its entries are those of (1 - x)^(-1/2)."""
    steps = np.arange(1, count)
    entries = np.concatenate([[1.0], np.cumprod((2 * steps - 1) / (2 * steps))])
    behind = np.subtract.outer(np.arange(count), np.arange(count))
    return np.where(behind >= 0, entries[np.abs(behind)], 0.0)
