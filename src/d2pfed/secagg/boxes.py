"""What one client seals for another: shares of its two secrets, its part of the group seed, a claim."""

from dataclasses import dataclass, field

from d2pfed.errors import PeerError
from d2pfed.secagg import crypto
from d2pfed.secagg.position import Position, unpack_position
from d2pfed.secagg.session import Delivery, Session
from d2pfed.secagg.shamir import SHARE_BYTES, pack_shares, unpack_share
from d2pfed.secagg.wire import Reader

CONTRIBUTION_BYTES = 32


@dataclass(frozen=True, slots=True)
class Content:
    """The plain content of a box; `claim` is the latest position of the receiver that the sender remembers."""

    seed_share: int = field(repr=False)
    key_share: int = field(repr=False)
    contribution: bytes = field(repr=False)
    claim: Position | None = None

    def pack(self) -> bytes:
        """Return the bytes to be sealed."""
        claim = b"" if self.claim is None else self.claim.pack()
        return pack_shares((self.seed_share, self.key_share)) + self.contribution + claim


def unseal(session: Session, key: bytes, box: bytes) -> Content | None:
    """Return what a box holds, or None if it does not open or holds no shares: its sender spoilt it, or the server.

    A bad box must not stop its receiver, or one bad client would stop them all.
    """
    try:
        plain = crypto.unseal(key, box)
        shares = unpack_share(plain[:SHARE_BYTES]), unpack_share(plain[SHARE_BYTES : 2 * SHARE_BYTES])
    except PeerError:
        return None
    rest = Reader(memoryview(plain)[2 * SHARE_BYTES :])
    contribution = rest.take(CONTRIBUTION_BYTES if session.delivery is Delivery.EVERYONE else 0)
    claim = rest.rest()
    return Content(*shares, contribution, unpack_position(claim) if claim else None)
