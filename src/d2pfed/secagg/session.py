"""What a client and the server have agreed on before one attempt at a sum."""

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import Enum

from d2pfed.errors import ConfigError
from d2pfed.graph import Consistency, Graph, make_graph
from d2pfed.randomness import digest
from d2pfed.ring import Ring
from d2pfed.wire import BINDING_BYTES, ID_LIMIT, ClientId, pack_ids, pack_text

COUNTER_LIMIT = 1 << 32


class Delivery(Enum):
    """Whose vectors must have arrived before anyone helps to unmask the sum."""

    QUORUM = "quorum"  # any `quorum` clients
    EVERYONE = "everyone"  # the whole cohort, which also agrees on a group seed that the server does not know
    DESIGNATED = "designated"  # any `quorum` clients, among them the designated


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One attempt at one sum: its name, its cohort and its limits.

    `threshold` is how many shares open a secret (security), `quorum` the fewest survivors that may be unmasked
    (noise).
    """

    run: str
    round: int
    attempt: int
    plan_digest: bytes
    cohort: tuple[ClientId, ...]
    dimension: int
    bits: int
    degree: int
    threshold: int
    quorum: int
    delivery: Delivery
    consistency: Consistency
    digest: bytes = field(init=False, repr=False)
    graph: Graph = field(init=False, repr=False, compare=False)
    designated: ClientId = field(init=False, repr=False, compare=False)  # of all noise under `Delivery.DESIGNATED`

    def __post_init__(self) -> None:
        self._check_name()
        self._check_limits()
        object.__setattr__(self, "digest", self._digest())
        seed = digest("d2pfed graph", self.digest)
        object.__setattr__(self, "graph", make_graph(len(self.cohort), self.degree, self.consistency, seed))
        drawn = int.from_bytes(
            digest("d2pfed designated", pack_ids(self.cohort)), "little"
        )  # from the cohort alone
        object.__setattr__(self, "designated", self.cohort[drawn % len(self.cohort)])

    @property
    def ring(self) -> Ring:
        """Return the ring of the sum."""
        return Ring(self.bits)

    @property
    def least_neighbours(self) -> int:
        """Return how many neighbours of a client must be left: enough to open its secrets.

        In a complete graph it is itself one of the holders that count. In a sparse one `threshold` neighbours are
        asked for, one more than may collude, so that the server cannot leave a client among colluders only.
        """
        return self.threshold - 1 if self.degree == len(self.cohort) - 1 else self.threshold

    def rank(self, client: ClientId) -> int:
        """Return the place of a client in the cohort, or refuse a stranger."""
        rank = bisect_left(self.cohort, client)
        if rank == len(self.cohort) or self.cohort[rank] != client:
            raise ConfigError(f"client {client} is not in the cohort")
        return rank

    def _check_name(self) -> None:
        if not self.run:
            raise ConfigError("a run must have a name, got an empty one")
        pack_text(self.run)
        for name, value in (("round", self.round), ("attempt", self.attempt)):
            if not 0 <= value < COUNTER_LIMIT:
                raise ConfigError(f"{name} must be in [0, {COUNTER_LIMIT}), got {value}")
        if len(self.plan_digest) != BINDING_BYTES:
            raise ConfigError(f"a plan's digest must have {BINDING_BYTES} bytes, got {len(self.plan_digest)}")

    def _check_limits(self) -> None:
        size = len(self.cohort)
        if any(left >= right for left, right in zip(self.cohort, self.cohort[1:], strict=False)):
            raise ConfigError("a cohort must be strictly increasing")
        if size < 2 or self.cohort[0] < 0 or self.cohort[-1] >= ID_LIMIT:
            raise ConfigError(f"a cohort must have at least 2 clients with identities in [0, 2^64), got {size}")
        if not 1 <= self.dimension < COUNTER_LIMIT:
            raise ConfigError(f"dimension must be in [1, {COUNTER_LIMIT}), got {self.dimension}")
        holders = self.degree + 1
        if not holders < 2 * self.threshold <= 2 * holders:
            raise ConfigError(f"threshold must be in [{holders // 2 + 1}, {holders}], got {self.threshold}")
        least = max(2, self.threshold if holders == size else 2)
        if not least <= self.quorum <= size:
            raise ConfigError(f"quorum must be in [{least}, {size}], got {self.quorum}")
        if self.delivery is Delivery.EVERYONE and (self.quorum != size or holders != size):
            raise ConfigError(
                f"everyone's delivery needs a quorum and holders of {size}, got {self.quorum}, {holders}"
            )
        if self.consistency is Consistency.SIGNED and 2 * self.quorum <= size:
            raise ConfigError(f"signed consistency needs a quorum of at least {size // 2 + 1}, got {self.quorum}")
        Ring(self.bits)

    def _digest(self) -> bytes:
        name = (self.plan_digest, self.run, self.round, self.attempt, pack_ids(self.cohort))
        limits = (self.dimension, self.bits, self.degree, self.threshold, self.quorum)
        return digest("d2pfed session", *name, *limits, self.delivery.value, self.consistency.value)
