"""What a client has agreed on for a session, and all that it insists on before it answers.

Tests show what each rule prevents: with that one rule patched away, the server recovers an update.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from d2pfed.errors import ConfigError, PeerError, RolledBack
from d2pfed.numerics.ring import Ring, RingVector
from d2pfed.secagg import crypto
from d2pfed.secagg.pairwise.keys import JoinedClients, KeyAdvertisement, leaf
from d2pfed.secagg.pairwise.messages import Invitation
from d2pfed.secagg.pairwise.session import Session
from d2pfed.secagg.position import History, Position, verify_position
from d2pfed.secagg.roster import Enrolment, Roster
from d2pfed.secagg.wire import ClientId, Subset

# From the bytes of task and model and, under Delivery.EVERYONE, the group seed, to the vector to be summed.
Contribute = Callable[[bytes, bytes, bytes | None], RingVector]


@dataclass(frozen=True, slots=True)
class ClientSession:
    """What a client has in every phase of a session: it does not change from one to the next."""

    session: Session
    rank: int
    contribute: Contribute
    enrolment: Enrolment | None
    history: History | None
    agree: crypto.Agree = crypto.agree

    def __post_init__(self) -> None:
        if self.session.is_signed:
            self.enrolled.require_self(self.client)
            if self.enrolled.roster.digest != self.session.roster_digest:
                raise ConfigError("a signed session belongs to the roster of its clients, got another one")
            if self.history is None:
                raise ConfigError("signed consistency needs a history, got none")

    @property
    def client(self) -> ClientId:
        """Return this client's identity."""
        return self.session.cohort[self.rank]

    @property
    def enrolled(self) -> Enrolment:
        """Return the enrolment that signed consistency needs."""
        if self.enrolment is None:
            raise ConfigError("signed consistency needs an enrolment, got none")
        return self.enrolment

    @property
    def depth(self) -> int | None:
        """Return the depth of the tree that cohorts are drawn from, if they are drawn verifiably."""
        return None if self.enrolment is None else self.enrolment.roster.depth

    def sign(self, statement: bytes) -> bytes:
        """Return this client's signature, empty where nothing is signed."""
        return crypto.sign(self.enrolled.secret, statement) if self.session.is_signed else b""

    def check_remaining(self, joined: JoinedClients, present: Subset) -> None:
        """Check what must hold for the clients that are left, whichever exchange it is."""
        require_self(self.rank, present)
        require_quorum(self.session, present)
        require_holders(joined, self.rank, present)


def require_invited(session: Session, client: ClientId, invited: Invitation) -> None:
    """Refuse a first request that is not the invitation to the session this client has agreed to.

    The digest covers the names; they are compared all the same, for a caller may have chosen the run by them.
    """
    named = (invited.run, invited.round, invited.attempt, invited.draw, invited.block)
    agreed = (session.run, session.round, session.attempt, session.draw, session.block)
    is_ours = (invited.client, invited.binding) == (client, session.digest)
    if not is_ours or named != agreed or invited.cohort not in (None, session.cohort):
        raise PeerError("an invitation must be to the agreed session")


def require_server_position(
    enrolment: Enrolment, history: History, client: ClientId, remembered: Position | None
) -> None:
    """Refuse everything if the server has met this client at a position that its log does not have."""
    if remembered is not None:
        _require_in_chain(enrolment, history, client, remembered, "the server")


def require_peer_position(enrolment: Enrolment, history: History, client: ClientId, claim: Position) -> None:
    """Refuse everything if a peer has met this client at a position that its log does not have."""
    _require_in_chain(enrolment, history, client, claim, "another client")


def is_own(enrolment: Enrolment, client: ClientId, claim: Position) -> bool:
    """Say whether a position bears its owner's signature; what does not is ignored, or anyone could lock it out."""
    try:
        verify_position(claim, enrolment.roster.key(client), enrolment.roster.authority, client)
    except PeerError:
        return False
    return True


def _require_in_chain(
    enrolment: Enrolment, history: History, client: ClientId, claim: Position, witness: str
) -> None:
    if is_own(enrolment, client, claim) and not history.contains(claim.count, claim.head):
        raise RolledBack(
            f"{witness} has met client {client} at row {claim.count}, which its log does not have: it was restored "
            f"from an older state, or has a twin",
            claim.count,
            claim.head,
        )


def require_self(rank: int, present: Subset) -> None:
    """Refuse a set that leaves this client out: it is here, so whoever says otherwise lies."""
    if not present[rank]:
        raise PeerError("the client itself is missing from a set that it was sent")


def require_within(present: Subset, earlier: Subset) -> None:
    """Refuse a set with members that the earlier set did not have: nobody joins late, so nobody pads a quorum."""
    if bool((present & ~earlier).any()):
        raise PeerError("a set has members that were not in the set before it")


def require_quorum(session: Session, present: Subset) -> None:
    """Refuse a set below the quorum: its sum would hide too little and carry too little noise."""
    count = int(present.sum())
    if count < session.quorum:
        raise PeerError(f"at least {session.quorum} clients must be left, got {count}")


def require_holders(joined: JoinedClients, rank: int, present: Subset) -> None:
    """Refuse a set that leaves a client too few holders: colluders among them would know all of its secrets.

    Those that hold its shares count, not those whose shares it holds: of the latter it may have any number.
    """
    count, least = joined.count_holders(rank, present), joined.session.least_holders
    if count < least:
        raise PeerError(f"at least {least} holders of a client's shares must be left, got {count}")


def require_own_leaf(listed: bytes, own: bytes) -> None:
    """Refuse a list in which this client's advertisement has no part, or another one of its name.

    Its graph could have been chosen long ago, and others may have been shown other keys.
    """
    if listed != own:
        raise PeerError("a client's own leaf must be in its place")


def require_leaves_fit(
    session: Session, leaves: Mapping[int, bytes], advertisements: Mapping[int, KeyAdvertisement]
) -> None:
    """Refuse advertisements other than those that the list of all of them stands for, the client's own included."""
    for rank, advertisement in advertisements.items():
        if leaves[rank] != leaf(session, session.cohort[rank], advertisement):
            raise PeerError(f"the advertisement of client {session.cohort[rank]} is not the one in the list")


def require_distinct_keys(advertisements: Mapping[int, KeyAdvertisement]) -> None:
    """Refuse one key under two names, be it another client's or this one's own."""
    publics = [
        key
        for advertisement in advertisements.values()
        for key in (advertisement.seal_public, advertisement.mask_public)
    ]
    if len(set(publics)) != len(publics):
        raise PeerError("all public keys of a session must be distinct")


def require_enrolled_advertisements(
    session: Session, roster: Roster, advertisements: Mapping[int, KeyAdvertisement]
) -> None:
    """Refuse keys that their enrolled owner did not sign for this session: they could be the server's own."""
    for rank, advertisement in advertisements.items():
        client = session.cohort[rank]
        crypto.require_signature(roster.key(client), advertisement.signature, leaf(session, client, advertisement))


def require_few_unopened(session: Session, colluders: int, unopened: int) -> None:
    """Refuse to go on if more ciphertexts do not open than bad clients can have sent: the server withholds claims.

    `colluders` is the client's own number: the session's is the server's, which would allow itself any. Where the
    server keeps to the protocol no claims are made, and any number of ciphertexts may be bad.
    """
    most = max(1, min(session.colluders, colluders))
    if session.is_signed and unopened > most:
        raise PeerError(f"at most {most} ciphertexts may fail to open, got {unopened}")


def require_enough_signatures(session: Session, signatures: Mapping[int, bytes]) -> None:
    """Refuse fewer signatures than the quorum: two of them overlap in an honest client, which signs once."""
    if len(signatures) < session.quorum:
        raise PeerError(f"at least {session.quorum} clients must confirm the survivors, got {len(signatures)}")


def require_confirmed(session: Session, roster: Roster, statement: bytes, signatures: Mapping[int, bytes]) -> None:
    """Refuse signatures under anything but what this client has signed itself: all were told the same."""
    for rank, signature in signatures.items():
        crypto.require_signature(roster.key(session.cohort[rank]), signature, statement)


def ring_copy(ring: Ring, dimension: int, vector: RingVector) -> RingVector:
    """Return a copy of a contribution, to be masked; refuse one that is no vector of the ring."""
    if vector.dtype != np.uint32 or vector.shape != (dimension,) or vector.max() >= ring.modulus:
        raise ConfigError(f"a contribution must be {dimension} numbers of the ring, got {vector.shape}")
    return vector.copy()
