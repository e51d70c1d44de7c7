"""What a client of the lattice protocol insists on before it answers.

Tests show what each rule prevents: with that one rule patched away, the attack on it succeeds.
"""

from collections.abc import Mapping

from d2pfed.errors import ConfigError, PeerError
from d2pfed.secagg import crypto
from d2pfed.secagg.lattice import session as sessions
from d2pfed.secagg.lattice.messages import Advert, Survivors
from d2pfed.secagg.lattice.session import Request, Session
from d2pfed.secagg.pairwise.messages import Invitation
from d2pfed.secagg.position import Position
from d2pfed.secagg.roster import Roster
from d2pfed.secagg.wire import ClientId


def require_session(session: Session, client: ClientId, invited: Invitation) -> None:
    """Refuse an invitation to anything but the session that this client has built from its own plan and roster."""
    named = (invited.run, invited.round, invited.attempt, invited.draw, invited.block)
    agreed = (session.run, session.round, session.attempt, session.draw, session.block)
    is_ours = (invited.client, invited.binding) == (client, session.digest)
    if not is_ours or named != agreed or invited.cohort not in (None, session.cohort):
        raise PeerError("an invitation must be to the agreed session")


def require_members(session: Session, adverts: Mapping[int, Advert]) -> None:
    """Refuse to contribute where too few members are there to open anything: the charge would be wasted."""
    least = max(session.committee.certificate, session.committee.openers)
    if len(adverts) < least:
        raise PeerError(f"at least {least} members must be there, got {len(adverts)}")


def require_adverts_signed(session: Session, roster: Roster, adverts: Mapping[int, Advert]) -> None:
    """Refuse keys that their enrolled owners did not sign for this session: the committee could be the server's own."""
    for place, advert in adverts.items():
        member = session.members[place]
        statement = sessions.advert_statement(session, member, advert.key)
        crypto.require_signature(roster.key(member), advert.signature, statement)


def require_model(request: Request, model: bytes) -> None:
    """Refuse a model that is not the one the request names: another one would be bound into the context."""
    if sessions.model_digest(model) != request.model_digest:
        raise PeerError("a model must be the one that the request names")


def require_quorum(session: Session, survivors: Survivors) -> None:
    """Refuse to open a sum of fewer clients than the quorum: it would hide too little and carry too little noise."""
    if len(survivors.signed) < session.quorum:
        raise PeerError(f"at least {session.quorum} clients must be left, got {len(survivors.signed)}")


def require_contributions_signed(session: Session, roster: Roster, survivors: Survivors) -> None:
    """Refuse keys that their clients did not sign: with keys of its own the server would open one client alone."""
    for rank, signed in survivors.signed.items():
        client = session.cohort[rank]
        position = b"" if signed.position is None else signed.position.pack()
        statement = sessions.contribution_statement(session, survivors.context, client, signed.key, position)
        crypto.require_signature(roster.key(client), signed.signature, statement)


def require_after_charge(before: Position | None, position: Position | None) -> None:
    """Refuse to sign a position that its own charge has not moved on: a client put back to before it would pass.

    There is none before, and none after, where nobody is enrolled.
    """
    if before is None and position is None:
        return
    if before is None or position is None or position.count <= before.count:
        raise ConfigError("a contribution must be signed with the position after its charge")


def not_later(survivors: Survivors, known: Mapping[int, Position]) -> dict[int, Position]:
    """Return the remembered positions of those who do not say that they have come further since."""
    return {
        rank: known[rank]
        for rank, signed in survivors.signed.items()
        if rank in known and (signed.position is None or signed.position.count <= known[rank].count)
    }


def require_claims(survivors: Survivors, claims: Mapping[int, Position]) -> None:
    """Refuse claims but of survivors, met no earlier than they say they are: old ones are no reason not to sign."""
    for rank, claim in claims.items():
        shown = survivors.signed[rank].position if rank in survivors.signed else None
        if shown is None or claim.count < shown.count:
            raise PeerError("a claim must be of a survivor, and not of before where it says it is")


def require_one_statement(signed: bytes, statement: bytes) -> None:
    """Refuse a second set of survivors: sums with and without a client would be opened."""
    if signed not in (b"", statement):
        raise PeerError("a member signs one set of survivors")


def require_certificate(
    session: Session, roster: Roster, statement: bytes, signatures: Mapping[int, bytes]
) -> None:
    """Refuse to open what too few members have signed: two certificates share an honest member, and it signs once."""
    least = session.committee.certificate
    if not statement or len(signatures) < least:
        raise PeerError(f"at least {least} members must have signed, got {len(signatures)}")
    for place, signature in signatures.items():
        crypto.require_signature(roster.key(session.members[place]), signature, statement)


def require_opened(trace: bytes) -> None:
    """Refuse to trace before anything was opened: a trace says something of every survivor's pads."""
    if not trace:
        raise PeerError("a member traces what it has opened")
