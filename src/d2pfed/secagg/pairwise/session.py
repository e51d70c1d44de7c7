"""What a client and the server have agreed on before one attempt at a sum."""

from dataclasses import dataclass, field
from enum import Enum

from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import digest
from d2pfed.numerics.ring import Ring
from d2pfed.secagg.checks import check_named, check_rules
from d2pfed.secagg.roster import NO_ROSTER
from d2pfed.secagg.trust import Consistency
from d2pfed.secagg.wire import COUNTER_LIMIT, ClientId, names_of, pack_ids, rank_of

MOST_COHORT = 1_000  # each client holds a share of everyone's secrets


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
    threshold: int
    quorum: int
    colluders: int
    delivery: Delivery
    consistency: Consistency
    is_signed: bool = field(init=False, repr=False)  # enrolled clients sign their keys and what they were told
    ring: Ring = field(init=False, repr=False)
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_named(self.run, self.plan_digest, self.roster_digest, self.cohort, self.dimension)
        object.__setattr__(self, "is_signed", self.consistency is Consistency.SIGNED)
        size, quorum, signed = len(self.cohort), self.quorum, self.is_signed
        counters, everyone = (self.round, self.attempt, self.draw, self.block), self.delivery is Delivery.EVERYONE
        check_rules(
            (min(counters) >= 0, f"round, attempt, draw and block must be at least 0, got {counters}"),
            (max(counters) < COUNTER_LIMIT, f"a counter must be below {COUNTER_LIMIT}, got {counters}"),
            (
                signed == (self.roster_digest != NO_ROSTER),
                "a roster belongs to signed consistency, and only there",
            ),
            (signed or not any(counters[2:]), f"only a roster's cohorts are drawn, got {counters[2:]}"),
            (
                not signed or size <= MOST_COHORT,
                f"a signed cohort must have at most {MOST_COHORT} clients, got {size}",
            ),
            (not everyone or quorum == size, f"everyone's delivery needs a quorum of {size}, got {quorum}"),
        )
        require_shares(size, self.threshold, quorum, self.colluders)
        if signed:
            require_one_view(size, quorum, self.colluders)
        name = (self.plan_digest, self.run, self.round, self.attempt)
        drawn = (self.roster_digest, self.draw, self.block, pack_ids(self.cohort))
        limits = (self.dimension, self.bits, self.threshold, self.quorum, self.colluders)
        named = digest("d2pfed session", *name, *drawn, *limits, self.delivery.value, self.consistency.value)
        object.__setattr__(self, "ring", Ring(self.bits))
        object.__setattr__(self, "digest", named)

    rank, names = rank_of, names_of


def least_threshold(cohort: int, colluders: int) -> int:
    """Return how many shares must open a secret: more than half of all, and more than collude."""
    return max(cohort // 2 + 1, colluders + 1)


def require_shares(cohort: int, threshold: int, quorum: int, colluders: int) -> None:
    """Refuse a threshold that colluders reach alone, that opens two views, or that a quorum does not reach.

    Guarantee: a secret is opened by more than half of the cohort, so never for both of two disjoint halves, and by an
    honest client among them. Proof: docs/protocol.md#graph. Checked: test_malicious_server.py (wrong twins).
    """
    if colluders < 0 or not least_threshold(cohort, colluders) <= threshold <= quorum <= cohort:
        raise ConfigError(
            f"threshold must be in [{least_threshold(cohort, colluders)}, quorum {quorum}] for {cohort} clients with "
            f"{colluders} colluders, got {threshold}"
        )


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
