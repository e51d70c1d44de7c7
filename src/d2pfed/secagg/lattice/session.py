"""What a client and the server have agreed on before one attempt, and what follows from its committee's adverts."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import lt

import numpy as np

from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import Stream, derive, digest
from d2pfed.numerics.ring import Ring
from d2pfed.secagg.checks import check_named, check_rules
from d2pfed.secagg.lattice import field as fields
from d2pfed.secagg.lattice.field import Elements
from d2pfed.secagg.lattice.parameters import MOST_BITS, MOST_COHORT, MOST_DIMENSION, Committee
from d2pfed.secagg.roster import NO_ROSTER, Position
from d2pfed.secagg.wire import COUNTER_LIMIT, ClientId, Subset, names_of, pack_ids, pack_subset, rank_of, subset_of

SEED_ELEMENTS = 16  # of the key of a client's veil


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One attempt at one sum: its name, its cohort, its committee and its limits.

    `secret` is the length of a client's secret, `quorum` the fewest vectors that may be opened (noise), `colluders` how
    many clients of the cohort may help the server. Without a roster nobody signs: the server keeps to the protocol.
    `is_by_slot`: clients hold the head of the roster only. `cohort` and `members` are then slots, and keys are shown by
    certificates.
    """

    plan_digest: bytes
    run: str
    round: int
    attempt: int
    roster_digest: bytes = NO_ROSTER
    draw: int = 0
    block: int = 0
    cohort: tuple[ClientId, ...]
    members: tuple[ClientId, ...]
    dimension: int
    bits: int
    secret: int
    committee: Committee
    quorum: int
    colluders: int
    is_by_slot: bool = False
    is_signed: bool = field(init=False, repr=False)  # enrolled clients sign their keys and what they were told
    ring: Ring = field(init=False, repr=False)
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_named(self.run, self.plan_digest, self.roster_digest, self.cohort, self.dimension)
        object.__setattr__(self, "is_signed", self.roster_digest != NO_ROSTER)
        size, least, bits = len(self.cohort), self.colluders + 2, self.bits
        counters, drawn = (self.round, self.attempt, self.draw, self.block), (self.draw, self.block)
        counted = min(counters) >= 0 and max(counters) < COUNTER_LIMIT
        committee, seats, members = self.committee, self.committee.size, self.members
        fits = len(members) == seats and set(members) <= set(self.cohort)
        check_rules(
            (counted, f"counters must be in [0, {COUNTER_LIMIT}), got {counters}"),
            (self.is_signed or not self.is_by_slot, "only a roster has slots"),
            (self.is_signed or not any(drawn), f"only a roster's cohorts are drawn, got {drawn}"),
            (size <= MOST_COHORT, f"a cohort must have at most {MOST_COHORT} clients, got {size}"),
            (self.colluders >= 0, f"colluders must be at least 0, got {self.colluders}"),
            (least <= self.quorum <= size, f"quorum must be in [{least}, {size}], got {self.quorum}"),
            (
                self.dimension <= MOST_DIMENSION,
                f"dimension must be at most {MOST_DIMENSION}, got {self.dimension}",
            ),
            (1 <= bits <= MOST_BITS, f"bits must be in [1, {MOST_BITS}], got {bits}"),
            (self.secret >= 1, f"a secret must have at least 1 number, got {self.secret}"),
            (all(map(lt, members, members[1:])), "a committee must be strictly increasing"),
            (fits, f"a committee must be {seats} clients of the cohort"),
            (committee.colluders <= committee.threshold, "a committee's threshold must be its colluders or more"),
            (
                committee.packed >= SEED_ELEMENTS,
                f"at least {SEED_ELEMENTS} numbers must be packed, got {committee.packed}",
            ),
            (
                seats + committee.colluders < 2 * committee.certificate <= 2 * seats,
                "two certificates of a committee must share an honest member",
            ),
            (committee.least <= seats, f"an attempt needs {committee.least} members of a committee, got {seats}"),
        )
        name = (self.plan_digest, self.run, self.round, self.attempt)
        whose = (self.roster_digest, *drawn, pack_ids(self.cohort), pack_ids(members))
        shares = (self.secret, committee.threshold, committee.packed, committee.certificate)
        limits = (self.dimension, self.bits, *shares, self.quorum, self.colluders, committee.colluders)
        object.__setattr__(self, "ring", Ring(self.bits))
        label = "d2pfed lattice session by slot" if self.is_by_slot else "d2pfed lattice session"
        object.__setattr__(self, "digest", digest(label, *name, *whose, *limits))

    @property
    def polynomials(self) -> int:
        """Return how many polynomials hold a client's secret; one for its seed and one to blind a trace follow."""
        return -(-self.secret // self.committee.packed)

    @property
    def points(self) -> Elements:
        """Return the points at which the members hold shares, by place."""
        first = self.committee.openers + 1
        return np.arange(first, first + self.committee.size)

    rank, names = rank_of, names_of

    def place(self, member: ClientId) -> int:
        """Return a member's place in the committee."""
        if member not in self.members:
            raise ConfigError(f"client {member} is not in the committee")
        return bisect_left(self.members, member)

    def seated(self, places: Iterable[int]) -> Subset:
        """Return the members at these places, as a subset of the cohort."""
        return subset_of(len(self.cohort), [self.rank(self.members[place]) for place in places])


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What all clients of an attempt are asked: for which members, by their keys, and to train what.

    Two clients that were shown anything else have another context, and are never in one sum.
    """

    session: Session
    keys: Mapping[int, bytes]  # X25519 keys of the members that are there, by place
    task: bytes
    model_digest: bytes
    context: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        session, trained = self.session, (self.model_digest, digest("d2pfed task", self.task))
        present = pack_subset(subset_of(session.committee.size, self.keys))
        keys = (self.keys[place] for place in sorted(self.keys))
        context = digest("d2pfed lattice context", session.digest, present, *keys, *trained)
        object.__setattr__(self, "context", context)


def model_digest(model: bytes) -> bytes:
    """Return what stands for a model in a request."""
    return digest("d2pfed model", model)


def advert_statement(session: Session, member: ClientId, key: bytes) -> bytes:
    """Return what a member signs before its key is used."""
    return digest("d2pfed lattice advert", session.digest, member, key)


def adverts_statement(session: Session, keys: Mapping[int, bytes]) -> bytes:
    """Return what a member signs that has checked the adverts of the members that are there: their keys, by place."""
    present = pack_subset(subset_of(session.committee.size, keys))
    return digest("d2pfed lattice adverts", session.digest, present, *(keys[place] for place in sorted(keys)))


def contribution_statement(
    session: Session, context: bytes, client: ClientId, key: bytes, position: Position | None
) -> bytes:
    """Return what a client signs: that this key, and no other, is its key in this context."""
    stands = b"" if position is None else position.pack()
    return digest("d2pfed lattice contribution", session.digest, context, client, key, stands)


def opening_statement(session: Session, context: bytes, nonce: bytes, keys: Mapping[int, bytes]) -> bytes:
    """Return what members sign: which survivors, by rank, and which key of each, are opened.

    With the keys left out, two answers of one client could be opened by two halves of the committee.
    """
    survivors = pack_subset(subset_of(len(session.cohort), keys))
    listed = (keys[rank] for rank in sorted(keys))
    return digest("d2pfed lattice opening", session.digest, context, nonce, survivors, *listed)


def commitment(context: bytes, client: ClientId, seed: bytes) -> bytes:
    """Return what a client shows of the seed of its veil."""
    return digest("d2pfed lattice commitment", context, client, seed)


def trace_coefficients(session: Session, statement: bytes) -> Elements:
    """Return the coefficients of a trace: the same for all members, fixed by what they opened."""
    return fields.elements(Stream(derive(statement, "d2pfed lattice trace")), session.polynomials)
