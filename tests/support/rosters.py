"""Rosters for tests, and rosters as a liar would write them."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.secagg import Roster, crypto, issue_roster
from d2pfed.secagg.draws import draw_order
from d2pfed.secagg.roster import LIFETIME_DAYS, NO_ROOT, _body
from d2pfed.secagg.wire import MessageKind, frame

AUTHORITY = digest("authority")  # the private key that tests sign rosters with
ISSUED = 1_800_000_000
EXPIRES = ISSUED + LIFETIME_DAYS * 86_400


def roster_of(
    keys: Mapping[int, bytes], secret: bytes = AUTHORITY, issued: int = ISSUED, **changes: object
) -> Roster:
    """The first roster of an authority, with fields of one's own."""
    authority = crypto.signing_public(secret)
    roster = issue_roster(keys, authority, serial=1, issued=issued, entropy=Entropy.replay(b"nonce"))
    return replace(roster, **changes)


def sign_anything(keys: Mapping[int, bytes], secret: bytes) -> bytes:
    """A roster that no honest authority would write: its keys may repeat."""
    fields = {
        "serial": 1,
        "issued": ISSUED,
        "expires": EXPIRES,
        "nonce": bytes(32),
        "depth": None,
        "root": NO_ROOT,
    }
    floors = dict.fromkeys(keys, (0, bytes(32)))
    body = _body(SimpleNamespace(keys=keys, clients=tuple(sorted(keys)), floors=floors, **fields))
    return frame(MessageKind.ROSTER, bytes(32), 0, body, crypto.sign(secret, digest("d2pfed roster", body)))


def draw_cohort(*drawn) -> tuple[int, ...]:
    """The cohort of a draw, increasing, as sessions have it."""
    return tuple(sorted(draw_order(*drawn)))
