"""Taking the masks off a sum: open one secret of each client, check it, expand its masks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from d2pfed.errors import TooFewClients
from d2pfed.randomness import Stream
from d2pfed.ring import Ring, RingVector
from d2pfed.secagg import keys
from d2pfed.secagg.crypto import Agreement
from d2pfed.secagg.messages import Advert, peers_within
from d2pfed.secagg.session import Session
from d2pfed.secagg.shamir import SECRET_BYTES, Opener
from d2pfed.wire import ClientId, Subset

Shares = dict[int, dict[int, int]]  # by owner's rank, then holder's

_MASKS_PER_JOB = 32  # enough to pay for handing a job to another process, few enough to share the work evenly


@dataclass(frozen=True, slots=True, eq=False)
class Aggregate:
    """The masked sum, and what is needed to unmask it."""

    session: Session
    adverts: Mapping[int, Advert]
    context: bytes
    sharers: Subset
    survivors: Subset
    total: RingVector = field(repr=False)

    @property
    def survivor_ids(self) -> tuple[ClientId, ...]:
        """Return whose vectors are in the sum."""
        return tuple(self.session.cohort[rank] for rank in np.flatnonzero(self.survivors))


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """The unmasked sum, and the holders whose shares were wrong and did no harm."""

    vector: RingVector
    blamed: tuple[ClientId, ...]


@dataclass(frozen=True, slots=True)
class MaskJob:
    """Some masks to be expanded together."""

    ring: Ring
    dimension: int
    added: tuple[bytes, ...] = field(repr=False)
    subtracted: tuple[bytes, ...] = field(repr=False)


class RunJobs(Protocol):
    """The builtin `map`, or one that runs elsewhere; jobs and results can be pickled."""

    def __call__(
        self, function: Callable[[MaskJob], RingVector], jobs: Iterable[MaskJob], /
    ) -> Iterable[RingVector]:
        """Return the function's value for every job."""
        ...


def unmask(aggregate: Aggregate, shares: Shares, run_jobs: RunJobs) -> Sum:
    """Return the survivors' sum, or find that too few right shares are left to open some secret."""
    session, total = aggregate.session, aggregate.total.copy()
    opener = _Opener(aggregate, shares)
    for part in run_jobs(expand, _jobs(session, _masks(aggregate, opener))):
        session.ring.add_into(total, part)
    return Sum(total, tuple(session.cohort[rank] for rank in sorted(opener.blamed)))


def expand(job: MaskJob) -> RingVector:
    """Return the sum of a job's masks."""
    part = np.zeros(job.dimension, np.uint32)
    for key in job.added:
        job.ring.add_into(part, job.ring.uniform(Stream(key), job.dimension))
    for key in job.subtracted:
        job.ring.subtract_into(part, job.ring.uniform(Stream(key), job.dimension))
    return part


class _Opener:
    """Opens secrets from shares and checks them; remembers Lagrange coefficients per set of points."""

    def __init__(self, aggregate: Aggregate, shares: Shares) -> None:
        self._aggregate = aggregate
        self._shares = shares
        self._coefficients: dict[tuple[int, ...], Opener] = {}
        self.blamed: set[int] = set()

    def seed(self, owner: int) -> bytes:
        """Return a client's self-mask seed, as it committed to it."""
        session, published = self._aggregate.session, self._aggregate.adverts[owner].commitment
        client = session.cohort[owner]
        return self._open(owner, lambda seed: keys.commitment(session, client, seed) == published)

    def mask_key(self, owner: int) -> Agreement:
        """Return a client's private mask key, as it advertised it."""
        published = self._aggregate.adverts[owner].mask_public
        return Agreement(self._open(owner, lambda secret: Agreement(secret).public == published))

    def _open(self, owner: int, is_right: Callable[[bytes], bool]) -> bytes:
        """Return the owner's secret; if one share is wrong and there are more than enough, find out whose."""
        held = self._shares[owner]
        if (secret := self._join(owner, held, is_right)) is not None:
            return secret
        for holder in held:
            others = {other: share for other, share in held.items() if other != holder}
            if (secret := self._join(owner, others, is_right)) is not None:
                self.blamed.add(holder)
                return secret
        client, threshold = self._aggregate.session.cohort[owner], self._aggregate.session.threshold
        raise TooFewClients(
            f"{threshold} right shares must open a secret of client {client}, got {len(held)} shares"
        )

    def _join(self, owner: int, held: Mapping[int, int], is_right: Callable[[bytes], bool]) -> bytes | None:
        session = self._aggregate.session
        holders = sorted(held)[: session.threshold]
        if len(holders) < session.threshold:
            return None
        places = np.searchsorted(session.graph.holders(owner), holders)
        points = tuple(int(place) + 1 for place in places)
        if points not in self._coefficients:
            self._coefficients[points] = Opener(points)
        joined = self._coefficients[points].join([held[holder] for holder in holders])
        if joined >> (8 * SECRET_BYTES):
            return None
        secret = joined.to_bytes(SECRET_BYTES, "little")
        return secret if is_right(secret) else None


def _masks(aggregate: Aggregate, opener: _Opener) -> Iterator[tuple[bool, bytes]]:
    """Yield every mask left in the sum as (is it to be added, key)."""
    session, context = aggregate.session, aggregate.context
    for owner in map(int, np.flatnonzero(aggregate.survivors)):
        yield False, keys.self_mask_key(opener.seed(owner), context, session.cohort[owner])
    for owner in map(int, np.flatnonzero(aggregate.sharers & ~aggregate.survivors)):
        agreement = opener.mask_key(owner)
        for peer in peers_within(session, owner, aggregate.survivors):
            shared = agreement.agree(aggregate.adverts[peer].mask_public)
            pair = session.cohort[owner], session.cohort[peer]
            key = keys.pair_mask_key(shared, context, pair, keys.NO_GROUP)
            yield peer > owner, key  # the higher of a pair had subtracted it


def _jobs(session: Session, masks: Iterable[tuple[bool, bytes]]) -> Iterator[MaskJob]:
    added: list[bytes] = []
    subtracted: list[bytes] = []
    for is_added, key in masks:
        (added if is_added else subtracted).append(key)
        if len(added) + len(subtracted) == _MASKS_PER_JOB:
            yield MaskJob(session.ring, session.dimension, tuple(added), tuple(subtracted))
            added, subtracted = [], []
    if added or subtracted:
        yield MaskJob(session.ring, session.dimension, tuple(added), tuple(subtracted))
