"""What a client and the server have agreed on before one attempt, and what follows from its committee's adverts."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import Stream, derive, digest
from d2pfed.numerics.ring import Ring
from d2pfed.secagg.lattice import field as fields
from d2pfed.secagg.lattice.field import Elements
from d2pfed.secagg.lattice.parameters import MOST_BITS, MOST_COHORT, MOST_DIMENSION, Committee
from d2pfed.secagg.wire import BINDING_BYTES, ID_LIMIT, ClientId, Subset, pack_ids, pack_subset, pack_text

COUNTER_LIMIT = 1 << 32
NO_ROSTER = bytes(BINDING_BYTES)
SEED_ELEMENTS = 16  # of the key of a client's veil


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One attempt at one sum: its name, its cohort, its committee and its limits.

    `secret` is the length of a client's secret, `quorum` the fewest vectors that may be opened (noise), `colluders` how
    many clients of the cohort may help the server. Without a roster nobody signs: the server keeps to the protocol.
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
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._require_name()
        if {len(self.plan_digest), len(self.roster_digest)} != {BINDING_BYTES}:
            raise ConfigError(f"digests of plan and roster must have {BINDING_BYTES} bytes")
        if not self.is_signed and (self.draw or self.block):
            raise ConfigError(f"only a roster's cohorts are drawn, got draw {self.draw}, block {self.block}")
        for ids in (self.cohort, self.members):
            if any(left >= right for left, right in pairwise(ids)):
                raise ConfigError("a cohort and its committee must be strictly increasing")
        size = len(self.cohort)
        if not 2 <= size <= MOST_COHORT or self.cohort[0] < 0 or self.cohort[-1] >= ID_LIMIT:
            raise ConfigError(f"a cohort must have 2 to {MOST_COHORT} clients below 2^64, got {size}")
        if self.colluders < 0 or not self.colluders + 2 <= self.quorum <= size:
            raise ConfigError(f"quorum must be in [{self.colluders + 2}, {size}], got {self.quorum}")
        if not 1 <= self.dimension <= MOST_DIMENSION:
            raise ConfigError(f"dimension must be in [1, {MOST_DIMENSION}], got {self.dimension}")
        if not 1 <= self.bits <= MOST_BITS or self.secret < 1:
            raise ConfigError(
                f"bits must be in [1, {MOST_BITS}], got {self.bits}; secrets have {self.secret} numbers"
            )
        self._require_committee()
        object.__setattr__(self, "digest", self._digest())

    def _require_name(self) -> None:
        counters = (self.round, self.attempt, self.draw, self.block)
        if not self.run or not all(0 <= counter < COUNTER_LIMIT for counter in counters):
            raise ConfigError(
                f"a session needs a run and counters in [0, {COUNTER_LIMIT}), got {self.run}, {counters}"
            )
        pack_text(self.run)

    def _require_committee(self) -> None:
        committee = self.committee
        if len(self.members) != committee.size or not set(self.members) <= set(self.cohort):
            raise ConfigError(f"a committee must be {committee.size} clients of the cohort")
        if committee.colluders > committee.threshold or committee.packed < SEED_ELEMENTS:
            raise ConfigError(
                f"a committee's threshold must be its colluders or more, and {SEED_ELEMENTS} be packed"
            )
        if not committee.size + committee.colluders < 2 * committee.certificate <= 2 * committee.size:
            raise ConfigError("two certificates of a committee must share an honest member")
        if committee.least > committee.size:
            raise ConfigError(f"an attempt needs {committee.least} members of a committee, got {committee.size}")

    @property
    def ring(self) -> Ring:
        """Return the ring of the sum."""
        return Ring(self.bits)

    @property
    def is_signed(self) -> bool:
        """Say whether enrolled clients sign their keys and what they were told."""
        return self.roster_digest != NO_ROSTER

    @property
    def polynomials(self) -> int:
        """Return how many polynomials hold a client's secret; one for its seed and one to blind a trace follow."""
        return -(-self.secret // self.committee.packed)

    def rank(self, client: ClientId) -> int:
        """Return a client's place in the cohort."""
        return _place(self.cohort, client, "the cohort")

    def place(self, member: ClientId) -> int:
        """Return a member's place in the committee."""
        return _place(self.members, member, "the committee")

    def names(self, ranks: Iterable[int]) -> tuple[ClientId, ...]:
        """Return the clients at these ranks, in order."""
        return tuple(self.cohort[rank] for rank in sorted(ranks))

    @property
    def points(self) -> Elements:
        """Return the points at which the members hold shares, by place."""
        first = self.committee.openers + 1
        return np.arange(first, first + self.committee.size)

    def _digest(self) -> bytes:
        name = (self.plan_digest, self.run, self.round, self.attempt)
        drawn = (self.roster_digest, self.draw, self.block, pack_ids(self.cohort), pack_ids(self.members))
        committee = self.committee
        shares = (self.secret, committee.threshold, committee.packed, committee.certificate)
        limits = (self.dimension, self.bits, *shares, self.quorum, self.colluders, committee.colluders)
        return digest("d2pfed lattice session", *name, *drawn, *limits)


def _place(ids: tuple[ClientId, ...], client: ClientId, where: str) -> int:
    place = bisect_left(ids, client)
    if place == len(ids) or ids[place] != client:
        raise ConfigError(f"client {client} is not in {where}")
    return place


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
        trained = self.model_digest, digest("d2pfed task", self.task)
        keys = (self.keys[place] for place in sorted(self.keys))
        object.__setattr__(
            self,
            "context",
            digest("d2pfed lattice context", self.session.digest, pack_subset(self.present), *keys, *trained),
        )

    @property
    def present(self) -> Subset:
        """Return which members are there, by place."""
        flags = np.zeros(self.session.committee.size, np.bool_)
        flags[list(self.keys)] = True
        return flags


def model_digest(model: bytes) -> bytes:
    """Return what stands for a model in a request."""
    return digest("d2pfed model", model)


def advert_statement(session: Session, member: ClientId, key: bytes) -> bytes:
    """Return what a member signs before its key is used."""
    return digest("d2pfed lattice advert", session.digest, member, key)


def contribution_statement(
    session: Session, context: bytes, client: ClientId, key: bytes, position: bytes
) -> bytes:
    """Return what a client signs: that this key, and no other, is its key in this context."""
    return digest("d2pfed lattice contribution", session.digest, context, client, key, position)


def opening_statement(session: Session, context: bytes, nonce: bytes, keys: Mapping[int, bytes]) -> bytes:
    """Return what members sign: which survivors, by rank, and which key of each, are opened.

    With the keys left out, two answers of one client could be opened by two halves of the committee.
    """
    survivors = np.zeros(len(session.cohort), np.bool_)
    survivors[list(keys)] = True
    listed = (keys[rank] for rank in sorted(keys))
    return digest("d2pfed lattice opening", session.digest, context, nonce, pack_subset(survivors), *listed)


def commitment(context: bytes, client: ClientId, seed: bytes) -> bytes:
    """Return what a client shows of the seed of its veil."""
    return digest("d2pfed lattice commitment", context, client, seed)


def trace_coefficients(session: Session, statement: bytes) -> Elements:
    """Return the coefficients of a trace: the same for all members, fixed by what they opened."""
    return fields.elements(Stream(derive(statement, "d2pfed lattice trace")), session.polynomials)
