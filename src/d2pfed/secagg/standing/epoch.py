"""Standing keys: what silos agree on once an epoch, and how every key of a step follows from it.

A fixed set of enrolled silos agrees on pairwise keys once. Each step (one attempt at one round) is then one exchange:
the request brings the model and the set of members, the answer is the vector under the pairwise masks of that set and
step. No key is ever opened: if a member is missing, nothing of the step can be opened, and the next one has fresh
masks. Keys move on with every step by a one-way function, so a key seized later opens no earlier answer.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import derive, digest
from d2pfed.numerics.ring import Ring
from d2pfed.secagg import crypto
from d2pfed.secagg.pairwise.session import COUNTER_LIMIT, NO_ROSTER
from d2pfed.secagg.position import Position
from d2pfed.secagg.wire import BINDING_BYTES, ID_LIMIT, ClientId, Subset, pack_ids, pack_subset, pack_text

FEWEST_SILOS = 3
MOST_SILOS = 128
LEAST_QUORUM = 3
MOST_ATTEMPTS = 8
MOST_STEPS = 1 << 20
MOST_SKIPPED = 4096  # steps that a client moves its keys on at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """A stretch of a run with the same standing keys.

    Attributes:
        epoch: number of the epoch in its run.
        first: first step of the epoch; a step is round * attempts + attempt.
        cohort: the silos that are invited, strictly increasing.
        quorum: fewest members of a step: the noise is enough for these.
        colluders: how many of the silos may help the server.
        rounds: of the run.
        attempts: how often a round may be tried.
        digest: E, what all messages of the epoch are bound to.
    """

    plan_digest: bytes
    run: str
    epoch: int
    first: int
    roster_digest: bytes
    cohort: tuple[ClientId, ...]
    dimension: int
    bits: int
    quorum: int
    colluders: int
    rounds: int
    attempts: int
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_name()
        self._check_cohort()
        self._check_numbers()
        object.__setattr__(self, "digest", self._digest())

    @property
    def ring(self) -> Ring:
        """Return the ring of the sums."""
        return Ring(self.bits)

    @property
    def steps(self) -> int:
        """Return how many steps the run has."""
        return self.rounds * self.attempts

    def step(self, number: int, attempt: int) -> int:
        """Return the step of an attempt at a round."""
        return number * self.attempts + attempt

    def rank(self, client: ClientId) -> int:
        """Return the place of a client among the silos, or refuse a stranger."""
        rank = bisect_left(self.cohort, client)
        if rank == len(self.cohort) or self.cohort[rank] != client:
            raise ConfigError(f"client {client} is not one of the silos")
        return rank

    def names(self, present: Subset) -> tuple[ClientId, ...]:
        """Return the clients of a subset, increasing."""
        return tuple(self.cohort[rank] for rank in np.flatnonzero(present))

    def _check_name(self) -> None:
        if not self.run:
            raise ConfigError("a run must have a name, got an empty one")
        pack_text(self.run)
        for name in ("plan_digest", "roster_digest"):
            if len(getattr(self, name)) != BINDING_BYTES:
                raise ConfigError(f"{name} must have {BINDING_BYTES} bytes, got {len(getattr(self, name))}")
        if self.roster_digest == NO_ROSTER:
            raise ConfigError("standing keys are for enrolled silos, got no roster")

    def _check_cohort(self) -> None:
        size = len(self.cohort)
        if not FEWEST_SILOS <= size <= MOST_SILOS:
            raise ConfigError(f"standing keys are for {FEWEST_SILOS} to {MOST_SILOS} silos, got {size}")
        if any(left >= right for left, right in zip(self.cohort, self.cohort[1:], strict=False)):
            raise ConfigError("silos must be strictly increasing")
        if self.cohort[0] < 0 or self.cohort[-1] >= ID_LIMIT:
            raise ConfigError("a silo's identity must be in [0, 2^64)")

    def _check_numbers(self) -> None:
        require_standing_quorum(len(self.cohort), self.quorum, self.colluders)
        require_standing_steps(self.rounds, self.attempts)
        if not 0 <= self.first < self.steps:
            raise ConfigError(f"an epoch's first step must be in [0, {self.steps}), got {self.first}")
        if not 0 <= self.epoch < COUNTER_LIMIT:
            raise ConfigError(f"epoch must be in [0, {COUNTER_LIMIT}), got {self.epoch}")
        if not 1 <= self.dimension < COUNTER_LIMIT:
            raise ConfigError(f"dimension must be in [1, {COUNTER_LIMIT}), got {self.dimension}")
        Ring(self.bits)

    def _digest(self) -> bytes:
        name = (self.plan_digest, self.run, self.epoch, self.first, self.roster_digest, pack_ids(self.cohort))
        limits = (self.dimension, self.bits, self.quorum, self.colluders, self.rounds, self.attempts)
        return digest("d2pfed standing epoch", *name, *limits)


def require_standing_quorum(silos: int, quorum: int, colluders: int) -> None:
    """Refuse a quorum that leaves no second honest member to hide behind.

    Two quorums need not overlap, as they must in the main protocol: no share is ever opened here.
    """
    least = max(LEAST_QUORUM, colluders + 2)
    if colluders < 0 or not least <= quorum <= silos:
        raise ConfigError(
            f"standing keys need a quorum in [{least}, {silos}] with {colluders} colluders, got {quorum}"
        )


def require_standing_steps(rounds: int, attempts: int) -> None:
    """Refuse a run with too many steps for its keys."""
    if not 1 <= attempts <= MOST_ATTEMPTS:
        raise ConfigError(f"standing keys allow 1 to {MOST_ATTEMPTS} attempts per round, got {attempts}")
    if not 1 <= rounds <= MOST_STEPS // attempts:
        raise ConfigError(
            f"standing keys allow at most {MOST_STEPS} steps, got {rounds} rounds of {attempts} attempts"
        )


@dataclass(frozen=True, slots=True)
class StandingAdvert:
    """A silo's public key for one epoch and where its log stands, signed."""

    public: bytes
    position: Position
    signature: bytes = b""

    def pack(self) -> bytes:
        """Return the advert's bytes."""
        return self.public + self.position.pack() + self.signature

    def statement(self, epoch: Epoch, client: ClientId) -> bytes:
        """Return what the silo signs."""
        return digest("d2pfed standing advert", epoch.digest, client, self.public, self.position.pack())


@dataclass(frozen=True, slots=True, eq=False)
class StandingKeys:
    """Who joined an epoch, and the digest K of all of their adverts."""

    epoch: Epoch
    joined: Subset
    digest: bytes

    @staticmethod
    def of(epoch: Epoch, adverts: Mapping[int, StandingAdvert]) -> "StandingKeys":
        """Return the keys that follow from the adverts of all that joined, by rank."""
        joined = np.zeros(len(epoch.cohort), np.bool_)
        joined[list(adverts)] = True
        packed = [adverts[rank].pack() for rank in sorted(adverts)]
        return StandingKeys(
            epoch, joined, digest("d2pfed standing keys", epoch.digest, pack_subset(joined), *packed)
        )


@dataclass(frozen=True, slots=True, eq=False)
class StandingStep:
    """One attempt at one round, with its members: what a client's vector is encoded for."""

    epoch: Epoch
    round: int
    attempt: int
    members: Subset
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        numbers = self.round, self.attempt, pack_subset(self.members)
        object.__setattr__(self, "digest", digest("d2pfed standing step", self.epoch.digest, *numbers))

    @property
    def number(self) -> int:
        """Return t, the number of the step in its run."""
        return self.epoch.step(self.round, self.attempt)

    @property
    def plan_digest(self) -> bytes:
        """Return the plan's digest."""
        return self.epoch.plan_digest

    @property
    def run(self) -> str:
        """Return the run's name."""
        return self.epoch.run

    @property
    def ring(self) -> Ring:
        """Return the ring of the sum."""
        return self.epoch.ring

    @property
    def dimension(self) -> int:
        """Return the length of the vectors."""
        return self.epoch.dimension

    @property
    def cohort(self) -> tuple[ClientId, ...]:
        """Return the members."""
        return self.epoch.names(self.members)

    def rank(self, client: ClientId) -> int:
        """Return the place of a client among the members."""
        return self.cohort.index(client)


def pair_key(shared: bytes, keys_digest: bytes, pair: tuple[ClientId, ClientId]) -> bytes:
    """Return the key of a pair at the first step of an epoch."""
    return crypto.hkdf(shared, "d2pfed standing pair", keys_digest, min(pair), max(pair))


def next_pair_key(key: bytes) -> bytes:
    """Return a pair's key at the next step; the way back is closed.

    Guarantee: the key of a step says nothing about keys and masks of earlier steps.
    Checked: test_standing_malicious.py (a state that is seized later).
    """
    return derive(key, "d2pfed standing next")


def context(keys_digest: bytes, step: StandingStep, model: bytes, task: bytes) -> bytes:
    """Return C, the hash of all that members must have seen alike before they mask.

    Guarantee: masks of two clients cancel only if both saw these adverts, this round and attempt, these members, this
    model and this task. Checked: test_standing_malicious.py (each of them different for the victim).
    """
    trained = digest("d2pfed model", model), digest("d2pfed task", task)
    numbers = step.round, step.attempt, pack_subset(step.members)
    return digest("d2pfed standing context", keys_digest, *numbers, *trained)


def mask_key(key: bytes, step_context: bytes, pair: tuple[ClientId, ClientId]) -> bytes:
    """Return the key of the mask that the lower client of a pair adds and the higher one subtracts."""
    return derive(key, "d2pfed standing mask", step_context, min(pair), max(pair))
