"""The client half where the unit is a record: a silo's secret batch, each record clipped by itself, and one draw.

What a record adds to the sum depends on that record, the model and the attempt alone. Neither the batch nor its size
leaves the silo: the sum is divided by a constant of the plan, and an empty batch sends noise like any other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from d2pfed.accounting import RATE_STEPS, BatchSampling
from d2pfed.errors import ConfigError
from d2pfed.noise.mechanisms import Centered
from d2pfed.numerics.randomness import Entropy, Stream
from d2pfed.numerics.ring import IntVector, RingVector
from d2pfed.plan import Plan


@runtime_checkable
class Units(Protocol):
    """What a silo holds, as an attempt sees it: units, each a record or all records of one patient."""

    @property
    def count(self) -> int:
        """How many units there are; it stays in the silo."""
        ...

    def gradients(self, chosen: IntVector) -> Iterator[NDArray[np.float32]]:
        """Yield rows with the vectors of the chosen units, one for each, in their order.

        A vector depends on its unit and the model alone, to the bit; that of a unit that fails is not finite, or zero.
        What a user has made is not relied on for that: `deploy.client` asks for its units one at a time.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The units that a silo's coins have drawn in one attempt, and the exact sum of their clipped vectors."""

    plan: Plan
    seed: bytes  # of the attempt's rotation, which is public
    entropy: Entropy = field(repr=False)  # of this attempt alone
    chosen: IntVector = field(repr=False)
    total: IntVector = field(repr=False)

    @staticmethod
    def draw(plan: Plan, seed: bytes, count: int, entropy: Entropy) -> "Batch":
        """Toss a coin for each of `count` units."""
        if plan.batches is None:
            raise ConfigError(f"a batch of records is for the unit record, the plan has the unit {plan.unit}")
        chosen = toss(plan.batches, count, entropy.child("coins").stream())
        return Batch(plan, seed, entropy, chosen, np.zeros(plan.codec.length, np.int64))

    def add(self, vectors: NDArray[np.float32]) -> None:
        """Add the vectors of some of the chosen units, each clipped, rotated and rounded by itself.

        Guarantee: what each adds is within the radius, in exact integers; one that is not finite adds nothing.
        Checked: test_records.py::test_removing_a_record_changes_the_centre_by_exactly_its_integers.
        """
        Batches.of([self]).add(np.zeros(len(vectors), np.int64), vectors)

    def encode(self) -> RingVector:
        """Return the ring vector that is masked and sent: one draw of the silo's noise around the sum."""
        mechanism, codec = self.plan.mechanism, self.plan.codec
        if not isinstance(mechanism, Centered):
            raise ConfigError(f"the unit record takes the mechanism centered, got {type(mechanism).__name__}")
        return self.plan.ring.wrap(mechanism.around(self.total, codec.fraction_bits, self.entropy))


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """The batches of silos in one process, whose vectors are added together: in one attempt of one plan."""

    each: tuple[Batch, ...]
    totals: NDArray[np.int64] = field(repr=False)  # of each batch, in the batch as well
    dithers: NDArray[np.uint16] = field(repr=False)  # each from its own silo's entropy

    @staticmethod
    def of(batches: Sequence[Batch]) -> "Batches":
        """Return these batches, with their totals side by side."""
        codec = batches[0].plan.codec
        if len({batch.seed for batch in batches}) > 1:
            raise ConfigError("batches that are added together must be of one attempt, got several seeds")
        totals = batches[0].total[None] if len(batches) == 1 else np.stack([batch.total for batch in batches])
        own = tuple(replace(batch, total=total) for batch, total in zip(batches, totals, strict=True))
        drawn = np.stack([codec.dither(batch.entropy.child("dither").stream()) for batch in batches])
        return Batches(own, totals, drawn)

    def add(self, owners: IntVector, vectors: NDArray[np.float32]) -> None:
        """Add vectors, each to the batch with its owner's number, as `Batch.add` does."""
        first = self.each[0]
        first.plan.codec.add_prepared(self.totals, owners, vectors, first.seed, self.dithers)


def toss(batches: BatchSampling, count: int, stream: Stream) -> IntVector:
    """Return the units whose coin came up: exactly the rate, independently of each other."""
    words = np.empty(count, np.uint32)
    stream.fill(words)
    below = int(batches.rate * RATE_STEPS)
    return np.flatnonzero(words.astype(np.uint64) < np.uint64(below)).astype(np.int64)
