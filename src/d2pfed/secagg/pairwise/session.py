"""What a client and the server have agreed on before one attempt at a sum."""

from dataclasses import dataclass, field
from enum import Enum

from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import digest
from d2pfed.numerics.ring import Ring
from d2pfed.secagg.checks import check_named, check_rules
from d2pfed.secagg.pairwise import graph as graphs
from d2pfed.secagg.pairwise.graph import Consistency, Graph, make_graph
from d2pfed.secagg.roster import NO_ROSTER
from d2pfed.secagg.wire import COUNTER_LIMIT, ClientId, names_of, pack_ids, rank_of


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
    is_signed: bool = field(init=False, repr=False)  # enrolled clients sign their keys and what they were told
    is_complete: bool = field(init=False, repr=False)  # everyone holds shares of everyone's secrets
    lists_leaves: bool = field(
        init=False, repr=False
    )  # all must be signed, and not everyone gets all advertisements
    ring: Ring = field(init=False, repr=False)
    digest: bytes = field(init=False, repr=False)
    # None: it depends on the advertisements
    fixed_graph: Graph | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_named(self.run, self.plan_digest, self.roster_digest, self.cohort, self.dimension)
        signed, complete = self.consistency is Consistency.SIGNED, self.degree == len(self.cohort) - 1
        derived = {"is_signed": signed, "is_complete": complete, "lists_leaves": signed and not complete}
        for field_name, value in derived.items():
            object.__setattr__(self, field_name, value)
        self._check()
        name = (self.plan_digest, self.run, self.round, self.attempt)
        drawn = (self.roster_digest, self.draw, self.block, pack_ids(self.cohort))
        limits = (self.dimension, self.bits, self.degree, self.threshold, self.quorum, self.colluders)
        named = digest("d2pfed session", *name, *drawn, *limits, self.delivery.value, self.consistency.value)
        object.__setattr__(self, "ring", Ring(self.bits))
        object.__setattr__(self, "digest", named)
        # Against a server that lies, a sparse graph must not be known before the advertisements are.
        object.__setattr__(self, "fixed_graph", None)
        object.__setattr__(self, "fixed_graph", None if self.lists_leaves else self.graph())

    @property
    def least_holders(self) -> int:
        """Return how many other holders of a client's secrets must be left.

        In a complete graph the client is itself one of the holders that count. In a sparse one `threshold` others are
        asked for, one more than may collude, so that the server cannot leave a client among colluders only.
        """
        return self.threshold - 1 if self.is_complete else self.threshold

    def graph(self, *advertisements_digest: bytes) -> Graph:
        """Return who holds whose shares, given the digest of all advertisements, which matters if signed and sparse."""
        seed = digest("d2pfed graph", self.digest, *advertisements_digest)
        return self.fixed_graph or make_graph(len(self.cohort), self.degree, self.consistency, seed)

    rank, names = rank_of, names_of

    def _check(self) -> None:
        size, degree, threshold, quorum = len(self.cohort), self.degree, self.threshold, self.quorum
        signed, complete, holders = self.is_signed, self.is_complete, degree + 1
        counters, everyone = (self.round, self.attempt, self.draw, self.block), self.delivery is Delivery.EVERYONE
        least, most = (max(2, threshold), threshold - 1) if complete else (2, quorum - 1)
        large, small = graphs.SIGNED_UP_TO, graphs.SIGNED_COMPLETE_UP_TO
        check_rules(
            (min(counters) >= 0, f"round, attempt, draw and block must be at least 0, got {counters}"),
            (max(counters) < COUNTER_LIMIT, f"a counter must be below {COUNTER_LIMIT}, got {counters}"),
            (
                signed == (self.roster_digest != NO_ROSTER),
                "a roster belongs to signed consistency, and only there",
            ),
            (signed or not any(counters[2:]), f"only a roster's cohorts are drawn, got {counters[2:]}"),
            (not signed or size <= large, f"a signed cohort must have at most {large} clients, got {size}"),
            (not signed or complete or size > small, f"{size} signed clients need a complete graph, got {degree}"),
            (1 <= degree < size, f"a degree must be in [1, {size - 1}], got {degree}"),
            (holders < 2 * threshold, f"threshold must be at least {holders // 2 + 1}, got {threshold}"),
            (threshold <= degree + complete, f"threshold must be at most {degree + complete}, got {threshold}"),
            (least <= quorum <= size, f"quorum must be in [{least}, {size}], got {quorum}"),
            (0 <= self.colluders <= most, f"colluders must be in [0, {most}], got {self.colluders}"),
            (not everyone or quorum == size, f"everyone's delivery needs a quorum of {size}, got {quorum}"),
            (not everyone or complete, f"everyone's delivery needs {size} holders, got {holders}"),
        )
        if signed:
            require_one_view(size, quorum, self.colluders)


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
