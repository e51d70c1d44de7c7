"""What a client insists on before it answers, in a session or an epoch.

Tests show what each rule prevents: with that one rule patched away, the server recovers an update.
"""

from collections.abc import Iterable, Mapping
from operator import lt
from typing import TypeVar

import numpy as np

from d2pfed.errors import ConfigError, PeerError, RolledBack
from d2pfed.numerics.ring import Ring, RingVector
from d2pfed.secagg import crypto
from d2pfed.secagg.heads import SlotEnrolment
from d2pfed.secagg.roster import NO_ROSTER, Enrolment, History, Keys, Position, verify_position
from d2pfed.secagg.wire import BINDING_BYTES, COUNTER_LIMIT, ID_LIMIT, Bound, ClientId, Subset, pack_text

Held = TypeVar("Held", bound=Enrolment | SlotEnrolment)


def check_rules(*rules: tuple[bool, str]) -> None:
    """Refuse the first rule that is broken, given as (whether it holds, what it says)."""
    for holds, rule in rules:
        if not holds:
            raise ConfigError(rule)


def check_named(
    run: str, plan_digest: bytes, roster_digest: bytes, cohort: tuple[ClientId, ...], dimension: int
) -> None:
    """Refuse names, digests, clients and a dimension that no session and no epoch can have."""
    pack_text(run)
    sizes, increasing = (len(plan_digest), len(roster_digest)), all(map(lt, cohort, cohort[1:]))
    check_rules(
        (bool(run), "a run must have a name, got an empty one"),
        (sizes == (BINDING_BYTES, BINDING_BYTES), f"a digest must have {BINDING_BYTES} bytes, got {sizes}"),
        (increasing, "a cohort must be strictly increasing"),
        (len(cohort) >= 2, f"a cohort must have at least 2 clients, got {len(cohort)}"),
        (all(0 <= client < ID_LIMIT for client in cohort), "identities must be in [0, 2^64)"),
        (1 <= dimension < COUNTER_LIMIT, f"dimension must be in [1, {COUNTER_LIMIT}), got {dimension}"),
    )


def enrolled(
    roster_digest: bytes, client: ClientId, enrolment: Held | None, history: History | None
) -> tuple[Held, History] | None:
    """Return what a client needs in a signed session, of this roster; None where nobody signs."""
    if roster_digest == NO_ROSTER:
        return None
    if enrolment is None or history is None:
        raise ConfigError("a signed session needs an enrolment and a history, got none")
    enrolment.require_self(client)
    if enrolment.roster.digest != roster_digest:
        raise ConfigError("a signed session belongs to the roster of its clients, got another one")
    return enrolment, history


def require_agreed(invited: tuple[object, ...], agreed: tuple[object, ...]) -> None:
    """Refuse an invitation to another session or epoch than the one that follows from this client's own plan.

    The digest covers the names; they are compared nevertheless, for a caller may have chosen the run by them.
    """
    if invited != agreed:
        raise PeerError("an invitation must be to the agreed session: that of this client's own plan and roster")


def require_in_chain(
    enrolment: Enrolment | SlotEnrolment, history: History, client: ClientId, claim: Position | None, witness: str
) -> None:
    """Refuse everything if somebody has met this client at a position that its log does not have.

    A position without its owner's signature is ignored, or anyone could lock the client out.
    """
    roster = enrolment.roster
    if claim is None or not is_own(roster, roster.name(client), claim):
        return
    if not history.contains(claim.count, claim.head):
        raise RolledBack(
            f"{witness} has met client {client} at row {claim.count}, which its log does not have: it was restored "
            f"from an older state, or has a twin",
            claim.count,
            claim.head,
        )


def is_own(keys: Keys, name: ClientId, position: Position) -> bool:
    """Say whether a client has signed a position as its own."""
    try:
        verify_position(position, keys.key(name), keys.authority, keys.identity(name))
    except PeerError:
        return False
    return True


def require_later_position(client: ClientId, position: Position, remembered: Position | None) -> None:
    """Refuse a client that shows no later position than before: no peer that has met it goes on beside it."""
    if remembered is not None and position.count <= remembered.count:
        raise PeerError(
            f"client {client} is left out: it shows row {position.count} of its log and was met at row "
            f"{remembered.count}, so it was restored from an older state, or has a twin"
        )


def require_current_claim(client: ClientId, claim: Position, shown: Position | None) -> None:
    """Refuse a claim that a client was met at an earlier row than it shows, or that did not come: it proves nothing."""
    if shown is None or claim.count < shown.count:
        raise PeerError(
            f"a claim about client {client} must be of a row that it does not go beyond, got {claim.count}"
        )


def require_self(rank: int, present: Subset) -> None:
    """Refuse a set that leaves this client out: it is here, so a server that says otherwise lies."""
    if not present[rank]:
        raise PeerError("the client itself is missing from a set that it was sent")


def require_within(present: Subset, earlier: Subset) -> None:
    """Refuse a set with members that the earlier set did not have: nobody joins late, so nobody pads a quorum."""
    if bool((present & ~earlier).any()):
        raise PeerError("a set has members that were not in the set before it")


def require_quorum(quorum: int, count: int) -> None:
    """Refuse a set below the quorum: its sum would hide too little and carry too little noise.

    Of signatures too: two quorums overlap in an honest client, which signs once.
    """
    if count < quorum:
        raise PeerError(f"at least {quorum} clients must be left, got {count}")


def require_own(listed: bytes | None, own: bytes) -> None:
    """Refuse a list in which this client's advertisement has no part, or another one of its name.

    Others may have been shown other keys of its name.
    """
    if listed != own:
        raise PeerError("a client's own advertisement must come back unchanged, in its place")


def require_distinct_keys(publics: Iterable[bytes]) -> None:
    """Refuse one key under two names, be it another client's or this one's own."""
    listed = list(publics)
    if len(set(listed)) != len(listed):
        raise PeerError("all public keys of a session must be distinct")


def require_signed(session: Bound, keys: Keys, signed: Mapping[int, tuple[bytes, bytes]]) -> None:
    """Refuse a statement without the signature of its enrolled owner; both by rank.

    Keys that nobody enrolled has signed for this session could be the server's own. Survivors that others did not sign
    are not those that others were told.
    """
    for rank, (statement, signature) in signed.items():
        crypto.require_signature(keys.key(session.cohort[rank]), signature, statement)


def require_few_unopened(claimed: int, colluders: int, unopened: int) -> None:
    """Refuse to go on if more ciphertexts do not open than bad clients can have sent: the server withholds claims.

    `colluders` is the client's own number; `claimed` is the session's, and the server would allow itself any.
    """
    most = max(1, min(claimed, colluders))
    if unopened > most:
        raise PeerError(f"at most {most} ciphertexts may fail to open, got {unopened}")


def require_context(found: bytes, context: bytes) -> None:
    """Refuse a vector that was masked in another context: it would spoil the sum."""
    if found != context:
        raise PeerError("a vector was masked for another model, task, step or set of clients")


def ring_copy(ring: Ring, dimension: int, vector: RingVector) -> RingVector:
    """Return a copy of a contribution, to be masked; refuse one that is no vector of the ring."""
    if vector.dtype != np.uint32 or vector.shape != (dimension,) or vector.max() >= ring.modulus:
        raise ConfigError(f"a contribution must be {dimension} numbers of the ring, got {vector.shape}")
    return vector.copy()
