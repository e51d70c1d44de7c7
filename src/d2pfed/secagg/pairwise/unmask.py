"""Taking the masks off a sum: open one secret of each client, check it, expand its masks."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from d2pfed.errors import TooFewClients
from d2pfed.numerics.randomness import Stream
from d2pfed.numerics.ring import RingVector
from d2pfed.secagg.crypto import Agreement
from d2pfed.secagg.pairwise import keys
from d2pfed.secagg.pairwise.keys import JoinedClients, KeyAdvertisement
from d2pfed.secagg.shamir import SECRET_BYTES, Corrected, Corrector, Interpolation
from d2pfed.secagg.wire import ClientId, Subset, ranks_of

Shares = dict[int, dict[int, int | None]]  # by owner's rank, then holder's; None: the holder says it never got one
IsRight = Callable[[bytes], bool]

_MASKS_TOGETHER = 32  # streams that are open at once


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Aggregate:
    """The masked sum, and what is needed to unmask it; `blamed` are the ranks of those found to cheat so far."""

    joined: JoinedClients
    advertisements: Mapping[int, KeyAdvertisement]
    context: bytes
    sharers: Subset
    survivors: Subset
    total: RingVector = field(repr=False)
    blamed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """The unmasked sum, and the clients that must have cheated and did no harm."""

    vector: RingVector
    blamed: tuple[ClientId, ...]


def unmask(aggregate: Aggregate, shares: Shares) -> Sum:
    """Return the survivors' sum, or find that too few right shares are left to open some secret."""
    session, total = aggregate.joined.session, aggregate.total.copy()
    recovery = _SecretRecovery(aggregate, shares)
    masks = iter(_masks(aggregate, recovery))
    while some := list(islice(masks, _MASKS_TOGETHER)):
        added, subtracted = (
            [Stream(key) for is_added, key in some if is_added is wanted] for wanted in (True, False)
        )
        session.ring.add_masks_into(total, added, subtracted)
    return Sum(total, session.names(aggregate.blamed | recovery.certain()))


class _SecretRecovery:
    """Opens secrets from shares and checks them; remembers Lagrange coefficients, and whose shares were wrong.

    Two clients are in dispute if one of them has cheated: an owner whose share did not reach its holder, or was wrong
    there. A server that passes the ciphertexts on cannot tell which. But an honest client is in dispute with cheats
    only, so whoever is in dispute with more others than there may be cheats is one itself.
    """

    def __init__(self, aggregate: Aggregate, shares: Shares) -> None:
        self._aggregate, self._session = aggregate, aggregate.joined.session
        self._most_liars = max(1, self._session.colluders)
        self._given = {
            owner: {holder: share for holder, share in held.items() if share is not None}
            for owner, held in shares.items()
        }
        self._disputes: defaultdict[int, set[int]] = defaultdict(set)
        for owner, held in shares.items():
            self._dispute(owner, held.keys() - self._given[owner].keys())
        self._coefficients: dict[tuple[int, ...], Interpolation] = {}
        self._suspects: set[int] = set()
        self._right: dict[int, IsRight] = {}  # of the secrets that were opened, by owner

    def seed(self, owner: int) -> bytes:
        """Return a client's self-mask seed, as it committed to it."""
        client, committed = self._session.cohort[owner], self._aggregate.advertisements[owner].commitment
        return self._open(owner, lambda seed: keys.commitment(self._session, client, seed) == committed)

    def mask_key(self, owner: int) -> Agreement:
        """Return a client's private mask key, as it advertised it."""
        public = self._aggregate.advertisements[owner].mask_public
        return Agreement(self._open(owner, lambda secret: Agreement(secret).public == public))

    def _open(self, owner: int, is_right: IsRight) -> bytes:
        """Return the owner's secret from just enough shares, suspects last, or else correct what is wrong."""
        holders = sorted(self._given[owner], key=lambda holder: (holder in self._suspects, holder))
        few = sorted(holders[: self._session.threshold])
        secret = self._join(owner, few, is_right) or self._correct(owner, is_right)
        if secret is None:
            raise self._void(owner)
        self._right[owner] = is_right
        return secret

    def certain(self) -> frozenset[int]:
        """Hold the shares of all who sent a wrong one against all opened secrets; return who is certain to cheat."""
        for owner, is_right in self._right.items():
            held = self._given[owner]
            others = [holder for holder in sorted(held) if holder not in self._suspects]
            few = others[: self._session.threshold - 1]
            if len(few) == self._session.threshold - 1:
                suspects = self._suspects & held.keys()
                wrong = [holder for holder in suspects if not self._join(owner, [*few, holder], is_right)]
                self._dispute(owner, wrong)
        return frozenset(client for client, others in self._disputes.items() if len(others) > self._most_liars)

    def _dispute(self, owner: int, holders: Iterable[int]) -> None:
        """Note whose share of an owner was missing or wrong."""
        for holder in holders:
            self._disputes[owner].add(holder)
            self._disputes[holder].add(owner)

    def _join(self, owner: int, holders: list[int], is_right: IsRight) -> bytes | None:
        """Return the secret behind just enough shares, if it is the right one."""
        if len(holders) < self._session.threshold:
            return None
        points = tuple(holder + 1 for holder in holders)
        if points not in self._coefficients:
            self._coefficients[points] = Interpolation(points)
        held = self._given[owner]
        return _secret(self._coefficients[points].join([held[holder] for holder in holders]), is_right)

    def _correct(self, owner: int, is_right: IsRight) -> bytes | None:
        """Return the secret that most shares agree on, if it is the right one, and suspect who sent the others."""
        corrected = self._decode(owner, lambda secret: _secret(secret, is_right) is not None)
        if corrected is None:
            return None
        holders = sorted(self._given[owner])
        wrong = [holders[place] for place in corrected.wrong]
        self._dispute(owner, wrong)
        self._suspects.update(wrong)
        return corrected.secret.to_bytes(SECRET_BYTES, "little")

    def _decode(self, owner: int, is_right: Callable[[int], bool]) -> Corrected | None:
        held, threshold = self._given[owner], self._session.threshold
        holders = sorted(held)
        if len(holders) < threshold:
            return None
        corrector = Corrector([holder + 1 for holder in holders], threshold)
        return corrector.correct([held[holder] for holder in holders], is_right)

    def _agreeing(self, owner: int) -> int:
        """Return how many shares are of one secret, right or wrong, if so many are that they can be told."""
        corrected = self._decode(owner, lambda _secret: True)
        return 0 if corrected is None else len(self._given[owner]) - len(corrected.wrong)

    def _void(self, owner: int) -> TooFewClients:
        """Say that a secret cannot be opened, and who may be to blame for it.

        An owner is certain to be the cheat if so many shares came that they outvote all liars among the holders, and
        if so many agree on a wrong secret that, without the liars, enough are left to open it: they are the owner's.
        """
        session, count, liars = self._session, len(self._given[owner]), self._most_liars
        certain, threshold = self.certain(), session.threshold
        blamed, others = self._aggregate.blamed | certain, self._disputes[owner] - certain
        if count >= threshold + 2 * liars or self._agreeing(owner) >= threshold + liars:
            blamed |= {owner}
        elif others and owner not in certain:  # no certain cheat explains it: one of them must be one
            blamed |= {owner, *others}
        return TooFewClients(
            f"{threshold} right shares must open a secret of client {session.cohort[owner]}, got {count} shares",
            blamed=session.names(blamed),
        )


def _secret(joined: int, is_right: IsRight) -> bytes | None:
    if joined >> (8 * SECRET_BYTES):
        return None
    secret = joined.to_bytes(SECRET_BYTES, "little")
    return secret if is_right(secret) else None


def _masks(aggregate: Aggregate, recovery: _SecretRecovery) -> Iterator[tuple[bool, bytes]]:
    """Yield every mask left in the sum as (is it to be added, key)."""
    session, context = aggregate.joined.session, aggregate.context
    for owner in ranks_of(aggregate.survivors):
        yield False, keys.self_mask_key(recovery.seed(owner), context, session.cohort[owner])
    for owner in ranks_of(aggregate.sharers & ~aggregate.survivors):
        agreement = recovery.mask_key(owner)
        for peer in keys.others(owner, aggregate.survivors):
            shared = agreement.agree(aggregate.advertisements[peer].mask_public)
            pair = session.cohort[owner], session.cohort[peer]
            key = keys.pair_mask_key(shared, context, pair, keys.NO_GROUP)
            yield peer > owner, key  # the higher of a pair had subtracted it
