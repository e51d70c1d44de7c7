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
    blamed: set[int] = set()
    jobs = _jobs(session, _masks(aggregate, _SecretOpener(aggregate, shares, blamed)))
    for part in run_jobs(expand, jobs):
        session.ring.add_into(total, part)
    return Sum(total, tuple(session.cohort[rank] for rank in sorted(blamed)))


def expand(job: MaskJob) -> RingVector:
    """Return the sum of a job's masks."""
    part = np.zeros(job.dimension, np.uint32)
    for key in job.added:
        job.ring.add_into(part, job.ring.uniform(Stream(key), job.dimension))
    for key in job.subtracted:
        job.ring.subtract_into(part, job.ring.uniform(Stream(key), job.dimension))
    return part


class _SecretOpener:
    """Opens secrets from shares and checks them; remembers Lagrange coefficients per set of points."""

    def __init__(self, aggregate: Aggregate, shares: Shares, blamed: set[int]) -> None:
        self._aggregate = aggregate
        self._shares = shares
        self._blamed = blamed
        self._openers: dict[tuple[int, ...], Opener] = {}

    def open(self, owner: int, is_right: Callable[[bytes], bool]) -> bytes:
        """Return the owner's secret; if one share is wrong and there are more than enough, find out whose."""
        held = self._shares[owner]
        secret = self._join(owner, held, is_right)
        if secret is not None:
            return secret
        for holder in held:
            others = {other: share for other, share in held.items() if other != holder}
            secret = self._join(owner, others, is_right)
            if secret is not None:
                self._blamed.add(holder)
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
        if points not in self._openers:
            self._openers[points] = Opener(points)
        joined = self._openers[points].join([held[holder] for holder in holders])
        if joined >> (8 * SECRET_BYTES):
            return None
        secret = joined.to_bytes(SECRET_BYTES, "little")
        return secret if is_right(secret) else None


def _masks(aggregate: Aggregate, opener: _SecretOpener) -> Iterator[tuple[bool, bytes]]:
    """Yield every mask left in the sum as (is it to be added, key)."""
    session, context = aggregate.session, aggregate.context
    for owner in map(int, np.flatnonzero(aggregate.survivors)):
        client, published = session.cohort[owner], aggregate.adverts[owner].commitment
        seed = opener.open(owner, lambda seed, c=client, p=published: keys.commitment(session, c, seed) == p)
        yield False, keys.self_mask_key(seed, context, client)
    for owner in map(int, np.flatnonzero(aggregate.sharers & ~aggregate.survivors)):
        client, public = session.cohort[owner], aggregate.adverts[owner].mask_public
        agreement = Agreement(opener.open(owner, lambda key, p=public: Agreement(key).public == p))
        for peer in peers_within(session, owner, aggregate.survivors):
            shared = agreement.agree(aggregate.adverts[peer].mask_public)
            key = keys.pair_mask_key(shared, context, (client, session.cohort[peer]), keys.NO_GROUP)
            yield (
                peer > owner,
                key,
            )  # the lower of a pair had added it, so it is subtracted, and the other way round


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
