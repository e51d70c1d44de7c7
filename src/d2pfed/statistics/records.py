"""The clients' own data: checked, and turned into bounded vectors, one per client."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError
from d2pfed.fields import told
from d2pfed.noise.clipping import Weighting

Array = NDArray[np.float64]

MOST_BINS = 1 << 12  # of scores, and of a quantile's matrix
FEWEST = 2  # clients: one cannot hide among fewer
_TOGETHER = 1 << 20  # numbers of encoded records that are in memory at once


@dataclass(frozen=True, slots=True)
class RecordCode:
    """How one record becomes a vector."""

    encode: Callable[[Array], Array]  # finite records, one per row, each by itself alone and to the bit
    dimension: int  # of a vector
    bound: float  # on the L2 norm of a vector

    def total(self, records: Array) -> Array:
        """Return the sum of the vectors of some records."""
        total = np.zeros(self.dimension)
        for part in self.parts(records):
            total += part.sum(0)
        return total

    def parts(self, records: Array) -> Iterator[Array]:
        """Yield the vectors of some records, as rows, not too many at once.

        Guarantee: a record that is not finite has a row of zeros, and changes no other row.
        Checked: test_statistics.py::test_a_record_that_is_not_finite_adds_nothing_and_is_no_error.
        """
        step = max(1, _TOGETHER // self.dimension)
        for start in range(0, len(records), step):
            part = records[start : start + step]
            rows, known = np.zeros((len(part), self.dimension)), are_known(part)
            rows[known] = self.encode(part[known])
            yield rows

    def of_client(self, records: Array, most: float | None) -> Array:
        """Return a client's vector: the mean of its records' vectors, or their sum scaled down to `most` records."""
        if not len(records):
            return np.zeros(self.dimension)
        return self.total(records) * (min(len(records), 1.0 if most is None else most) / len(records))


@dataclass(frozen=True, slots=True)
class CodedRecords:
    """A client's records, as the unit of privacy; each adds a vector of its own."""

    code: RecordCode
    records: Array = field(repr=False)

    @property
    def count(self) -> int:
        """How many there are; it stays with the client."""
        return len(self.records)

    def gradients(self, chosen: NDArray[np.int64]) -> Iterator[NDArray[np.float32]]:
        """Yield the vectors of some records, as rows."""
        for part in self.code.parts(self.records[chosen]):
            with np.errstate(all="ignore"):  # what is not finite counts as zero later
                rows = part.astype(np.float32)
            yield rows


@dataclass(frozen=True, slots=True)
class Ball:
    """Where vectors are brought to: within a radius of a center, and each of their numbers within bounds."""

    dimension: int
    radius: float
    bounds: tuple[float, float] | None

    @staticmethod
    def of(dimension: int, clip: object, bounds: object) -> "Ball":
        """Return where vectors are brought to by a clip, or by bounds on each number."""
        if bounds is None and clip is None:
            raise ConfigError(
                "a mean needs bounds=(lowest, highest) on each number, or clip= on the norm, chosen without looking at "
                "the data; got neither"
            )
        if bounds is None:
            return Ball(dimension, positive("clip", clip), None)
        if clip is not None:
            raise ConfigError(f"a mean has a clip or bounds, got clip {clip} and bounds {bounds}")
        low, high = interval(bounds)
        return Ball(dimension, (high - low) / 2 * math.sqrt(dimension), (low, high))

    @property
    def center(self) -> float:
        """The middle of the bounds."""
        return 0.0 if self.bounds is None else sum(self.bounds) / 2

    def around(self, vector: Array) -> Array:
        """Return a vector as seen from the center, within the radius; one that is not finite is at the center."""
        if self.bounds is None or not np.isfinite(vector).all():
            return clipped(vector, self.radius)
        return clipped(np.clip(vector, *self.bounds) - self.center, self.radius)

    def joint(self, rows: Array) -> Array:
        """Return rows with their weight of 1 as a last number, both scaled so that the norm is at most 1."""
        both = Weighting.balanced(1.0, self.radius, self.dimension)
        joint = [np.append(both.rest / self.radius * self.around(row), both.share) for row in rows]
        return np.array(joint).reshape(len(rows), self.dimension + 1)

    def mean(self, total: Array, sigma: float) -> tuple[Array, Array]:
        """Return the weighted mean and its standard error, from a sum of weighted `joint` rows with this noise."""
        weighting = Weighting.balanced(1.0, self.radius, self.dimension)
        a, b = weighting.rest, weighting.share
        weight = max(total[-1], sigma) / b
        ratio = self.radius / a * total[:-1] / weight
        return self.center + ratio, sigma * np.hypot(self.radius / a, ratio / b) / weight


def are_known(records: Array) -> NDArray[np.bool_]:
    """Tell which records, one per row, are finite: the others count as zero."""
    rows = np.isfinite(records).reshape(len(records), math.prod(records.shape[1:]))
    return np.asarray(rows.all(axis=1))


def clients_of(data: object, what: str) -> list[object]:
    """Return what each client holds; refuse what is no collection of at least two clients."""
    if isinstance(data, Mapping):
        found = list(data.values())
    elif isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        found = list(data)
    else:
        try:
            found = list(np.asarray(data if hasattr(data, "__array__") else None))
        except (TypeError, RuntimeError):  # of no dimension, or a tensor that numpy has no like of
            raise ConfigError(
                f"{what} must be a sequence or mapping with an entry per client, got {type(data).__name__}"
            ) from None
    if len(found) < FEWEST:
        raise ConfigError(f"a private statistic is over at least {FEWEST} clients, got {len(found)}")
    return found


def numbers(value: object, where: str) -> Array:
    """Return an array of a client's numbers, NaN where one is missing; refuse what has another form."""
    try:
        found = np.asarray(value)
        if found.dtype == object:
            found = np.array([_known(entry) for entry in found.reshape(-1)], np.float64).reshape(found.shape)
    except (TypeError, ValueError, RuntimeError):
        found = np.asarray("")
    if found.dtype.kind not in "biuf" and found.size:
        raise ConfigError(f"{where} must be numbers in a rectangular array, got {type(value).__name__}")
    return found.astype(np.float64)


def _known(entry: Any) -> float:  # noqa: ANN401 - whatever an array holds
    """Return a number, NaN for one that is missing (None, or pandas' NA) or that no float holds."""
    if entry is None or type(entry).__name__ == "NAType":
        return math.nan
    try:
        return float(entry)
    except OverflowError:
        return math.nan


def settings(value: object, name: str) -> Array:
    """Return an array of public numbers, which must be finite."""
    found = numbers(value, name)
    if not np.isfinite(found).all():
        raise ConfigError(f"{name} must be finite, got NaN or infinity")
    return found


def client_vectors(data: object, *, of_records: bool) -> tuple[list[Array], bool]:
    """Return one vector per client, or its records as rows, all of one length, and whether they were plain numbers."""
    given = [numbers(each, f"vectors of client {at}") for at, each in enumerate(clients_of(data, "vectors"))]
    if of_records:
        shape = next((each.shape for each in given if each.size), (0,))
        for at, each in enumerate(given):
            if not each.ndim or (each.size and (each.ndim > 2 or each.shape[1:] != shape[1:])):
                raise ConfigError(
                    f"vectors of client {at} must be a record per row, all alike, got the shape {each.shape}"
                )
        return [each.reshape(len(each), math.prod(shape[1:])) for each in given], len(shape) == 1
    shape = next((each.shape for each in given if each.ndim), ())
    given = [
        np.full(shape, np.nan) if not each.ndim and np.isnan(each) else each for each in given
    ]  # None: absent
    if len(shape) > 1 or given[0].size == 0:
        raise ConfigError(f"vectors must be one number or one vector per client, got the shape {shape}")
    for at, each in enumerate(given):
        if each.shape != shape:
            raise ConfigError(f"vectors must have one length: client 0 has {shape}, client {at} has {each.shape}")
    return [np.atleast_1d(each) for each in given], not shape


def client_lists(data: object) -> list[Array]:
    """Return one list of numbers per client; a single number is a list of one, and a list may be empty."""
    found = []
    for at, each in enumerate(clients_of(data, "values")):
        found.append(np.atleast_1d(numbers(each, f"values of client {at}")))
        if found[-1].ndim != 1:
            raise ConfigError(f"values of client {at} must be a list of numbers, got the shape {found[-1].shape}")
    return found


def clipped(vector: Array, clip: float) -> Array:
    """Return a vector, scaled down to an L2 norm of at most `clip`; zero if it is not finite."""
    peak = float(np.abs(vector).max(initial=0.0))
    if not 0 < peak < math.inf:
        return np.zeros_like(vector)
    shape = vector / peak  # whose squares do not overflow
    norm = math.sqrt((shape * shape).sum())  # a library's sum may depend on where in memory the vector is
    return shape * (clip / norm) if peak > clip / norm else vector


def positive(name: str, value: object) -> float:
    """Return a positive finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    if not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{name} must be positive and finite, got {told(value)}")
    return float(value)


def client_weights(weights: object, clients: int) -> Array:
    """Return one number for each client."""
    given = numbers(weights, "weights")
    if given.shape != (clients,):
        raise ConfigError(f"weights must be one number for each of {clients} clients, got the shape {given.shape}")
    return given


def whole(name: str, value: object, most: int) -> int:
    """Return a whole number in [2, most]."""
    if isinstance(value, bool) or not isinstance(value, int) or not 2 <= value <= most:
        raise ConfigError(f"{name} must be a whole number in [2, {most}], got {value!r}")
    return value


def interval(bounds: object) -> tuple[float, float]:
    """Return the ends of an interval."""
    ends = settings(bounds, "bounds")
    if ends.shape != (2,) or not ends[0] < ends[1]:
        raise ConfigError(f"bounds must be two numbers, the lower one first, got {bounds!r}")
    low, high = float(ends[0]), float(ends[1])
    if not math.isfinite(high - low):
        raise ConfigError(f"bounds must be a finite distance apart, got {bounds!r}")
    return low, high


def bin_of(values: Array, edges: Array) -> NDArray[np.intp]:
    """Return the bin of each value, the last one closed on the right; -1 for a value outside of all."""
    found = np.searchsorted(edges, values, side="right") - 1
    found[values == edges[-1]] = len(edges) - 2
    found[(values < edges[0]) | (values > edges[-1])] = -1
    return found


def one_hot(cells: NDArray[np.integer], count: int) -> Array:
    """Return a row with a single one for each cell; a row of zeros for -1."""
    rows = np.zeros((len(cells), count))
    known = np.flatnonzero(cells >= 0)
    rows[known, cells[known]] = 1.0
    return rows
