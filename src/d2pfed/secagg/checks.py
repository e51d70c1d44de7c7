"""All that a client insists on before it answers; tests show what each rule prevents."""

from collections.abc import Mapping

from d2pfed.errors import PeerError
from d2pfed.secagg import crypto, keys
from d2pfed.secagg.messages import Advert
from d2pfed.secagg.roster import Roster
from d2pfed.secagg.session import Delivery, Session
from d2pfed.wire import Subset


def require_request(received: bytes, expected: bytes) -> None:
    """Refuse a first request that is not, to the byte, the invitation to the session this client has agreed to."""
    if received != expected:
        raise PeerError("an invitation must be to the agreed session")


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


def require_neighbours(session: Session, rank: int, present: Subset) -> None:
    """Refuse a set that leaves a client too few neighbours: colluders among them would know all of its masks."""
    count = int(present[session.graph.partners(rank)].sum())
    if count < session.least_neighbours:
        raise PeerError(f"at least {session.least_neighbours} neighbours must be left, got {count}")


def require_designated(session: Session, present: Subset) -> None:
    """Refuse a set without the client that bears the noise: its sum would carry none."""
    if session.delivery is Delivery.DESIGNATED and not present[session.rank(session.designated)]:
        raise PeerError(f"the designated, client {session.designated}, must be left")


def require_own_advert(echoed: Advert, own: Advert) -> None:
    """Refuse to go on if others may have been shown other keys for this client."""
    if echoed != own:
        raise PeerError("a client's own keys must come back as it sent them")


def require_distinct_keys(adverts: Mapping[int, Advert]) -> None:
    """Refuse one key under two names, be it another client's or this one's own."""
    publics = [key for advert in adverts.values() for key in (advert.seal_public, advert.mask_public)]
    if len(set(publics)) != len(publics):
        raise PeerError("all public keys of a session must be distinct")


def require_enrolled_adverts(session: Session, roster: Roster, adverts: Mapping[int, Advert]) -> None:
    """Refuse keys that their enrolled owner did not sign for this session: they could be the server's own."""
    for rank, advert in adverts.items():
        client = session.cohort[rank]
        statement = keys.advert_statement(session, client, advert)
        crypto.require_signature(roster.key(client), advert.signature, statement)


def require_enough_signatures(session: Session, signatures: Mapping[int, bytes]) -> None:
    """Refuse fewer signatures than the quorum: that is over half of the cohort, so no two sets are confirmed."""
    if len(signatures) < session.quorum:
        raise PeerError(f"at least {session.quorum} clients must confirm the survivors, got {len(signatures)}")


def require_confirmed(session: Session, roster: Roster, statement: bytes, signatures: Mapping[int, bytes]) -> None:
    """Refuse signatures under anything but what this client has signed itself: all were told the same."""
    for rank, signature in signatures.items():
        crypto.require_signature(roster.key(session.cohort[rank]), signature, statement)
