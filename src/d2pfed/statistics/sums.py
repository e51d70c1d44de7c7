"""Private sums and means of one vector per client: clipped, or each number brought within bounds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from d2pfed.errors import ConfigError
from d2pfed.ledger import Ledger
from d2pfed.noise.clipping import Weighting
from d2pfed.statistics.records import (
    Array,
    RecordCode,
    client_weights,
    clipped,
    equal_rows,
    equal_vectors,
    interval,
    positive,
)
from d2pfed.statistics.release import Statistic, Terms, drowned, release, release_records


@dataclass(frozen=True, slots=True)
class Ball:
    """Where vectors are brought to: within a radius of a centre, and each of their numbers within bounds."""

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
    def centre(self) -> float:
        """The middle of the bounds."""
        return 0.0 if self.bounds is None else sum(self.bounds) / 2

    def around(self, vector: Array) -> Array:
        """Return a vector as seen from the centre, within the radius; one that is not finite is at the centre."""
        if self.bounds is None or not np.isfinite(vector).all():
            return clipped(vector, self.radius)
        return clipped(np.clip(vector, *self.bounds) - self.centre, self.radius)

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
        return self.centre + ratio, sigma * np.hypot(self.radius / a, ratio / b) / weight

    @property
    def code(self) -> RecordCode:
        """How a record becomes a vector: its own numbers, and a one to count it by."""
        return RecordCode(self.joint, self.dimension + 1, 1.0)


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
    shape = () if is_plain else released.value.shape
    return released.computed(released.value.reshape(shape)[()], released.standard_error.reshape(shape)[()])


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
    ball = Ball.of(given[0].shape[-1], clip, bounds)
    shape = () if is_plain else (ball.dimension,)
    if weights is None and not terms.of_records:
        released = release("mean", [ball.around(each) for each in given], ball.dimension, ball.radius, terms)
        value, error = ball.centre + released.value / released.clients, released.standard_error / released.clients
        return released.computed(value.reshape(shape)[()], error.reshape(shape)[()])
    if weights is None:
        released = release_records("mean", given, ball.code, None, terms)
    elif terms.of_records:
        raise ConfigError("weights are for the unit client: a record counts as one where it is the unit")
    elif max_weight is None:
        raise ConfigError("weights need max_weight, a public cap on a client's weight, got None")
    else:
        own = client_weights(weights, len(given))
        shares = np.clip(np.where(np.isfinite(own), own, 0.0) / positive("max_weight", max_weight), 0.0, 1.0)
        joint = [u * ball.code.total(x[None, :]) for u, x in zip(shares, given, strict=True)]
        released = release("weighted mean", joint, ball.dimension + 1, 1.0, terms)
    value, error = ball.mean(released.value, released.sigma)
    warnings = drowned(released.value[-1], released.sigma, "weight")
    return released.computed(value.reshape(shape)[()], error.reshape(shape)[()], warnings)
