"""What the lattice protocol insists on, beyond the checks that all protocols share.

Tests show what each rule prevents: with that one rule patched away, the attack on it succeeds.
"""

from collections.abc import Mapping

from d2pfed.errors import ConfigError, PeerError
from d2pfed.secagg.checks import is_own, require_signed
from d2pfed.secagg.lattice import session as sessions
from d2pfed.secagg.lattice.messages import Advert, SignedKey, Signer, Survivors
from d2pfed.secagg.lattice.session import Request, Session
from d2pfed.secagg.roster import Keys, Position
from d2pfed.secagg.wire import ClientId


def require_members(session: Session, keys: Mapping[int, bytes]) -> None:
    """Refuse to contribute where too few members are there to open anything: the charge would be wasted."""
    least = max(session.committee.certificate, session.committee.openers)
    if len(keys) < least:
        raise PeerError(f"at least {least} members must be there, got {len(keys)}")


def require_adverts_signed(session: Session, keys: Keys, adverts: Mapping[int, Advert]) -> None:
    """Refuse to vouch for keys that their enrolled owners did not sign for this session."""
    signed = dict[int, tuple[bytes, bytes]]()
    for place, advert in adverts.items():
        member = session.members[place]
        statement = sessions.advert_statement(session, member, advert.key)
        signed[session.rank(member)] = statement, advert.signature
    require_signed(session, keys, signed)


def require_vouched(
    session: Session, keys: Keys, shown: Mapping[int, bytes], vouchers: Mapping[int, Signer]
) -> None:
    """Refuse members' keys that no honest member has checked: the committee could be the server's own.

    At most the threshold of members collude, so one of more vouchers is honest, and it has checked every advert.
    """
    least = session.committee.vouchers
    if len(vouchers) < least:
        raise PeerError(f"at least {least} members must vouch for the members' keys, got {len(vouchers)}")
    _require_members_signed(session, keys, sessions.adverts_statement(session, shown), vouchers)


def require_order(agreed: Mapping[int, bytes]) -> None:
    """Refuse members' keys of low order, whatever the library says: everyone would know the pads of their boxes."""
    if any(not any(shared) for shared in agreed.values()):
        raise PeerError("a public key must not have low order")


def require_model(request: Request, model: bytes) -> None:
    """Refuse a model that is not the one the request names: another one would be bound into the context."""
    if sessions.model_digest(model) != request.model_digest:
        raise PeerError("a model must be the one that the request names")


def require_contributions_signed(
    session: Session, keys: Keys, context: bytes, contributed: Mapping[int, SignedKey]
) -> None:
    """Refuse keys that their clients did not sign: with keys of its own the server would open one client alone."""
    signed = dict[int, tuple[bytes, bytes]]()
    for rank, each in contributed.items():
        bound = context, session.cohort[rank], each.key, each.position
        signed[rank] = sessions.contribution_statement(session, *bound), each.signature
    require_signed(session, keys, signed)


def require_after_charge(before: Position | None, position: Position | None) -> None:
    """Refuse to sign a position that its own charge has not moved on: a client put back to before it would pass.

    There is none before, and none after, where nobody is enrolled.
    """
    if before is None and position is None:
        return
    if before is None or position is None or position.count <= before.count:
        raise ConfigError("a contribution must be signed with the position after its charge")


def not_later(
    session: Session, keys: Keys, survivors: Survivors, known: Mapping[ClientId, Position]
) -> dict[int, Position]:
    """Return the remembered positions, by rank, of those who do not say that they have come further since.

    What its owner did not sign is ignored: a colluder could plant it, and stop every attempt by it.
    """
    found = dict[int, Position]()
    for rank, signed in survivors.signed.items():
        name = session.cohort[rank]
        met = known.get(keys.identity(name))
        if met is None or (signed.position is not None and signed.position.count > met.count):
            continue
        if is_own(keys, name, met):
            found[rank] = met
    return found


def require_one_statement(signed: bytes, statement: bytes) -> None:
    """Refuse a second set of survivors: sums with and without a client would be opened."""
    if signed not in (b"", statement):
        raise PeerError("a member signs one set of survivors")


def require_certificate(session: Session, keys: Keys, statement: bytes, signers: Mapping[int, Signer]) -> None:
    """Refuse to open what too few members have signed: two certificates share an honest member, and it signs once."""
    least = session.committee.certificate
    if not statement or len(signers) < least:
        raise PeerError(f"at least {least} members must have signed, got {len(signers)}")
    _require_members_signed(session, keys, statement, signers)


def require_opened(trace: bytes) -> None:
    """Refuse to trace before anything was opened: a trace says something of every survivor's pads."""
    if not trace:
        raise PeerError("a member traces what it has opened")


def _require_members_signed(session: Session, keys: Keys, statement: bytes, signers: Mapping[int, Signer]) -> None:
    ranked = {session.rank(session.members[place]): each.signature for place, each in signers.items()}
    require_signed(session, keys, {rank: (statement, signature) for rank, signature in ranked.items()})
