"""Private histograms, contingency tables and quantiles of the clients' own values."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from d2pfed.errors import ConfigError
from d2pfed.ledger import Ledger
from d2pfed.statistics.records import (
    Array,
    RecordCode,
    bin_of,
    clients_of,
    columns,
    interval,
    one_hot,
    settings,
    whole,
)
from d2pfed.statistics.release import Statistic, Terms, drowned, release_records

MOST_CELLS = 1 << 20  # of a table, and bins of a histogram
MOST_BINS = 1 << 12  # of a quantile's matrix


def private_histogram(
    values: object,
    bins: Sequence[float],
    *,
    epsilon: float = 1.0,
    max_values: float | None = None,
    delta: float | None = None,
    privacy: Mapping[str, object] | None = None,
    ledger: Ledger | str | Path | None = None,
    fidelity: str = "auto",
    seed: int | None = None,
) -> Statistic[Array]:
    """Return how many values are in each bin, one release over all bins.

    The counts are right on average, so one may be below zero.

    Args:
        values: The values of each client: a list of numbers, or one number.
        bins: The edges of the bins, rising; each bin is closed on the left, the last one on both sides. Values
            outside of them are counted nowhere.
        epsilon: Bound on what the observer learns about one client, or about one record.
        max_values: None counts clients: the histogram of each is divided by its number of values. A number counts
            values: a client that has more is scaled down to so many, which is also the bound on its contribution.
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
    edges = settings(bins, "bins")
    if edges.ndim != 1 or len(edges) < 2:
        raise ConfigError(f"bins must be at least two edges, got {bins!r}")
    if (np.diff(edges) <= 0).any():
        at = int(np.argmax(np.diff(edges) <= 0))
        raise ConfigError(f"bins must rise strictly, got {edges[at]:g} before {edges[at + 1]:g}")
    count = len(edges) - 1
    if count > MOST_CELLS:
        raise ConfigError(f"a histogram must have at most {MOST_CELLS} bins, got {count}")
    code = RecordCode(lambda part: one_hot(bin_of(part, edges), count), count, 1.0)
    return release_records("histogram", columns(values, "values"), code, max_values, terms)


def private_table(
    rows: object,
    categories: Sequence[Sequence[object]] | Mapping[str, Sequence[object]],
    *,
    epsilon: float = 1.0,
    max_values: float | None = None,
    delta: float | None = None,
    privacy: Mapping[str, object] | None = None,
    ledger: Ledger | str | Path | None = None,
    fidelity: str = "auto",
    seed: int | None = None,
) -> Statistic[Array]:
    """Return a contingency table: how many rows have each combination of categories, one release over all cells.

    Args:
        rows: The rows of each client: a list of tuples, one entry per variable.
        categories: The categories of each variable, in order, or by its name. A row with another category is counted
            nowhere.
        epsilon: Bound on what the observer learns about one client, or about one record.
        max_values: None counts clients, a number counts rows, as in `private_histogram`.
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
    variables = _variables(categories)
    shape = tuple(len(each) for each in variables)
    cells = int(np.prod(shape, dtype=object))
    if cells > MOST_CELLS:
        raise ConfigError(f"a table must have at most {MOST_CELLS} cells, got {cells}")
    own = [_cells(each, variables, shape, at) for at, each in enumerate(clients_of(rows, "rows"))]
    code = RecordCode(lambda part: one_hot(part.astype(np.int64), cells), cells, 1.0)
    released = release_records("table", own, code, max_values, terms)
    return released.computed(released.value.reshape(shape), released.standard_error.reshape(shape))


def private_quantile(
    values: object,
    levels: float | Sequence[float],
    *,
    bounds: tuple[float, float],
    epsilon: float = 1.0,
    bins: int = 64,
    max_values: float | None = None,
    delta: float | None = None,
    privacy: Mapping[str, object] | None = None,
    ledger: Ledger | str | Path | None = None,
    fidelity: str = "auto",
    seed: int | None = None,
) -> Statistic[Array]:
    """Return quantiles of the clients' values, from one release of the cumulative counts over equal bins.

    A client's histogram is multiplied by the square root of the matrix that adds counts up, and the noisy sum once
    more: each cumulative count then has noise of about 1 + ln(bins) / pi standard deviations, where sums over a noisy
    histogram have up to sqrt(bins).

    Args:
        values: The values of each client: a list of numbers, or one number.
        levels: One level or several, each in [0, 1]: 0.5 is the median. All come from the same release.
        bounds: Lower and upper bound of the values; what is beyond counts as the bound.
        epsilon: Bound on what the observer learns about one client, or about one record.
        bins: How many bins; within one, values are taken to be spread evenly.
        max_values: None gives each client the same weight, a number each value, as in `private_histogram`.
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
    asked = settings(levels, "levels")
    if asked.ndim > 1 or not asked.size or (asked < 0).any() or (asked > 1).any():
        raise ConfigError(f"levels must be numbers in [0, 1], got {levels!r}")
    low, high = interval(bounds)
    count = whole("bins", bins, MOST_BINS)
    edges, root = np.linspace(low, high, count + 1), cumulative_root(count)
    code = RecordCode(
        lambda part: root.T[bin_of(np.clip(part, low, high), edges)], count, float(np.linalg.norm(root[:, 0]))
    )
    released = release_records("quantile", columns(values, "values"), code, max_values, terms)
    counts = root @ released.value
    total = max(counts[-1], released.sigma)
    # Counts rise, and noise does not: between the least and the largest rising curve that it allows.
    rising = (np.maximum.accumulate(counts) + np.minimum.accumulate(counts[::-1])[::-1]) / 2
    curve = np.concatenate([[0.0], np.clip(rising, 0, total)])
    found = []
    for level in np.atleast_1d(asked):
        at = min(int(np.searchsorted(curve[1:], level * total)), count - 1)
        noise = released.sigma * float(np.linalg.norm(root[at] - level * root[-1]))
        lower, value, upper = np.interp(
            [level * total - noise, level * total, level * total + noise], curve, edges
        )
        found.append((float(value), float(upper - lower) / 2))
    quantiles, errors = (np.array(each).reshape(asked.shape) for each in zip(*found, strict=True))
    warnings = drowned(float(root[-1] @ released.value), released.sigma * float(np.linalg.norm(root[-1])), "count")
    return released.computed(quantiles, errors, warnings)


def cumulative_root(count: int) -> Array:
    """Return the lower triangular matrix whose square adds up: its entries are those of (1 - x)^(-1/2)."""
    steps = np.arange(1, count)
    entries = np.concatenate([[1.0], np.cumprod((2 * steps - 1) / (2 * steps))])
    behind = np.subtract.outer(np.arange(count), np.arange(count))
    return np.where(behind >= 0, entries[np.abs(behind)], 0.0)


def _variables(categories: object) -> list[dict[object, int]]:
    lists = list(categories.values()) if isinstance(categories, Mapping) else categories
    if not isinstance(lists, Sequence) or isinstance(lists, (str, bytes)) or not lists:
        raise ConfigError(f"categories must be a list for each variable, got {categories!r}")
    found = []
    for each in lists:
        if not isinstance(each, Sequence) or isinstance(each, (str, bytes)) or not each:
            raise ConfigError(f"the categories of a variable must be a list, got {each!r}")
        try:
            differ = len(set(each)) == len(each)
        except TypeError:
            raise ConfigError(f"the categories of a variable must be plain values, got {list(each)!r}") from None
        if not differ:
            raise ConfigError(f"the categories of a variable must differ, got {list(each)!r}")
        found.append({category: at for at, category in enumerate(each)})
    return found


def _cells(rows: object, variables: list[dict[object, int]], shape: tuple[int, ...], client: int) -> Array:
    """Return the cell of each row of a client; -1 for a row with an unknown category, or without one per variable."""
    if isinstance(rows, (str, bytes)) or not isinstance(rows, (Sequence, np.ndarray)):
        raise ConfigError(f"rows of client {client} must be a list, got {type(rows).__name__}")
    found = []
    for row in rows:
        entries = list(row) if isinstance(row, (tuple, list, np.ndarray)) else [row]
        try:
            places = [known.get(entry, -1) for known, entry in zip(variables, entries, strict=True)]
        except (TypeError, ValueError):  # an entry that cannot be looked up, or too few or too many of them
            places = [-1]
        found.append(-1 if min(places) < 0 else int(np.ravel_multi_index(places, shape)))
    return np.array(found, dtype=np.float64)
