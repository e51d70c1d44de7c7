"""What a client and the server have agreed on before one attempt at a sum."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import digest
from d2pfed.numerics.ring import Ring
from d2pfed.secagg.pairwise import graph as graphs
from d2pfed.secagg.pairwise.graph import Consistency, Graph, make_graph
from d2pfed.secagg.wire import BINDING_BYTES, ID_LIMIT, ClientId, pack_ids, pack_text

COUNTER_LIMIT = 1 << 32
NO_ROSTER = bytes(BINDING_BYTES)  # what stands for a roster's digest where nobody is enrolled


class Delivery(Enum):
    """Whose vectors must have arrived before anyone helps to unmask the sum."""

    QUORUM = "quorum"  # any `quorum` clients
    EVERYONE = "everyone"  # the whole cohort, which also agrees on a group seed that the server does not know


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One attempt at one sum: its name, its cohort and its limits.

    `threshold` is how many shares open a secret (security), `quorum` the fewest survivors that may be unmasked
    (noise), `colluders` how many clients of the cohort may help the server. `draw` and `block` say which draw of the
    roster's tree gave the cohort; they are 0 where cohorts are not drawn verifiably.
    """

    plan_digest: bytes
    run: str
    round: int
    attempt: int
    roster_digest: bytes = NO_ROSTER
    draw: int = 0
    block: int = 0
    cohort: tuple[ClientId, ...]
    dimension: int
    bits: int
    degree: int
    threshold: int
    quorum: int
    colluders: int
    delivery: Delivery
    consistency: Consistency
    digest: bytes = field(init=False, repr=False)
    fixed_graph: Graph | None = field(
        init=False, repr=False, compare=False
    )  # None: it depends on the advertisements

    def __post_init__(self) -> None:
        self._check_name()
        self._check_cohort()
        self._check_limits()
        object.__setattr__(self, "digest", self._digest())
        # Against a server that lies, a sparse graph must not be known before the advertisements are.
        fixed = None if self.is_signed and not self.is_complete else self._graph(self.digest)
        object.__setattr__(self, "fixed_graph", fixed)

    @property
    def ring(self) -> Ring:
        """Return the ring of the sum."""
        return Ring(self.bits)

    @property
    def is_signed(self) -> bool:
        """Say whether enrolled clients sign their keys and what they were told."""
        return self.consistency is Consistency.SIGNED

    @property
    def is_complete(self) -> bool:
        """Say whether everyone holds shares of everyone's secrets."""
        return self.degree == len(self.cohort) - 1

    @property
    def least_holders(self) -> int:
        """Return how many other holders of a client's secrets must be left.

        In a complete graph the client is itself one of the holders that count. In a sparse one `threshold` others are
        asked for, one more than may collude, so that the server cannot leave a client among colluders only.
        """
        return self.threshold - 1 if self.is_complete else self.threshold

    @property
    def most_liars(self) -> int:
        """Return how many clients may send what does not fit before others draw a conclusion: one at the least."""
        return max(1, self.colluders)

    def graph(self, advertisements_digest: bytes) -> Graph:
        """Return who holds whose shares, given the digest of all advertisements, which matters if signed and sparse."""
        return self.fixed_graph or self._graph(self.digest, advertisements_digest)

    def rank(self, client: ClientId) -> int:
        """Return the place of a client in the cohort, or refuse a stranger."""
        rank = bisect_left(self.cohort, client)
        if rank == len(self.cohort) or self.cohort[rank] != client:
            raise ConfigError(f"client {client} is not in the cohort")
        return rank

    def names(self, ranks: Iterable[int]) -> tuple[ClientId, ...]:
        """Return the clients of these ranks, increasing."""
        return tuple(self.cohort[rank] for rank in sorted(ranks))

    def _check_name(self) -> None:
        if not self.run:
            raise ConfigError("a run must have a name, got an empty one")
        pack_text(self.run)
        for name in ("round", "attempt", "draw", "block"):
            if not 0 <= getattr(self, name) < COUNTER_LIMIT:
                raise ConfigError(f"{name} must be in [0, {COUNTER_LIMIT}), got {getattr(self, name)}")
        for name in ("plan_digest", "roster_digest"):
            if len(getattr(self, name)) != BINDING_BYTES:
                raise ConfigError(f"{name} must have {BINDING_BYTES} bytes, got {len(getattr(self, name))}")
        if self.is_signed == (self.roster_digest == NO_ROSTER):
            raise ConfigError(f"a roster belongs to signed consistency, got {self.consistency.value}")
        if not self.is_signed and (self.draw or self.block):
            raise ConfigError(f"only a roster's cohorts are drawn, got draw {self.draw}, block {self.block}")

    def _check_cohort(self) -> None:
        size = len(self.cohort)
        if any(left >= right for left, right in zip(self.cohort, self.cohort[1:], strict=False)):
            raise ConfigError("a cohort must be strictly increasing")
        if size < 2 or self.cohort[0] < 0 or self.cohort[-1] >= ID_LIMIT:
            raise ConfigError(f"a cohort must have at least 2 clients with identities in [0, 2^64), got {size}")
        if self.is_signed and size > graphs.SIGNED_UP_TO:
            raise ConfigError(f"a signed cohort must have at most {graphs.SIGNED_UP_TO} clients, got {size}")
        if self.is_signed and size <= graphs.SIGNED_COMPLETE_UP_TO and not self.is_complete:
            raise ConfigError(
                f"{size} signed clients need a complete graph of degree {size - 1}, got {self.degree}"
            )
        if not 1 <= self.degree < size:
            raise ConfigError(f"a degree must be in [1, {size - 1}], got {self.degree}")

    def _check_limits(self) -> None:
        size, holders = len(self.cohort), self.degree + 1
        if not 1 <= self.dimension < COUNTER_LIMIT:
            raise ConfigError(f"dimension must be in [1, {COUNTER_LIMIT}), got {self.dimension}")
        if not holders < 2 * self.threshold <= 2 * holders:
            raise ConfigError(f"threshold must be in [{holders // 2 + 1}, {holders}], got {self.threshold}")
        if not self.is_complete and self.threshold > self.degree:
            raise ConfigError(f"a sparse graph's threshold must be at most {self.degree}, got {self.threshold}")
        least = max(2, self.threshold if self.is_complete else 2)
        if not least <= self.quorum <= size:
            raise ConfigError(f"quorum must be in [{least}, {size}], got {self.quorum}")
        most = (self.threshold if self.is_complete else self.quorum) - 1
        if not 0 <= self.colluders <= most:
            raise ConfigError(f"colluders must be in [0, {most}], got {self.colluders}")
        if self.delivery is Delivery.EVERYONE and (self.quorum != size or not self.is_complete):
            raise ConfigError(
                f"everyone's delivery needs a quorum and holders of {size}, got {self.quorum}, {holders}"
            )
        if self.is_signed:
            require_one_view(size, self.quorum, self.colluders)
        Ring(self.bits)

    def _graph(self, *parts: bytes) -> Graph:
        return make_graph(len(self.cohort), self.degree, self.consistency, digest("d2pfed graph", *parts))

    def _digest(self) -> bytes:
        name = (self.plan_digest, self.run, self.round, self.attempt)
        drawn = (self.roster_digest, self.draw, self.block, pack_ids(self.cohort))
        limits = (self.dimension, self.bits, self.degree, self.threshold, self.quorum, self.colluders)
        return digest("d2pfed session", *name, *drawn, *limits, self.delivery.value, self.consistency.value)


def require_one_view(size: int, quorum: int, colluders: int) -> None:
    """Refuse a quorum that could sign two sets of survivors: one client's two secrets would be opened.

    Guarantee: two quorums overlap in more clients than collude, so in an honest one, and it signs once.
    Checked: test_malicious_server.py (two views, with one colluder of fifteen).
    """
    if 2 * quorum <= size + colluders:
        raise ConfigError(
            f"signed consistency needs a quorum of at least {(size + colluders) // 2 + 1} of {size} clients with "
            f"{colluders} colluders, got {quorum}"
        )
