"""Rosters: their bytes, who has signed them, and when they are too old."""

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import Entropy, digest, first_head
from d2pfed.secagg import crypto, decode_roster, encode_roster, issue_roster
from d2pfed.secagg import roster as rosters
from d2pfed.secagg.roster import not_before, require_serial, require_unexpired
from d2pfed.secagg.wire import HEADER_BYTES, MessageKind, frame
from support.rosters import AUTHORITY, EXPIRES, ISSUED, roster_of, sign_anything

PUBLIC = crypto.signing_public(AUTHORITY)
KEYS = {client: digest("key", client) for client in (3, 5, 2**64 - 1)}
DAY = 86_400


def test_a_roster_has_the_bytes_of_its_definition():
    roster = roster_of(KEYS, depth=12, root=digest("root"), floors=dict.fromkeys(KEYS, (7, digest("head"))))
    body = struct.pack("<QQQ", 1, ISSUED, EXPIRES) + roster.nonce + b"\x0c" + digest("root")
    body += struct.pack("<IQQQ", 3, *sorted(KEYS)) + b"".join(KEYS[client] for client in sorted(KEYS))
    body += 3 * (struct.pack("<Q", 7) + digest("head"))
    assert roster.digest == digest("d2pfed roster", body)
    signature = crypto.sign(AUTHORITY, digest("d2pfed roster", body))
    assert encode_roster(roster, AUTHORITY)[HEADER_BYTES:] == body + signature


@given(st.integers(1, 2**64 - 1), st.sampled_from([None, 0, 12, 20]), st.integers(0, 2**64 - 1))
def test_a_roster_comes_back_from_its_bytes(serial, depth, count):
    root = bytes(32) if depth is None else digest("root")
    roster = roster_of(
        KEYS, serial=serial, depth=depth, root=root, floors=dict.fromkeys(KEYS, (count, digest("h")))
    )
    assert decode_roster(encode_roster(roster, AUTHORITY), PUBLIC) == roster


def test_without_draws_depth_and_root_are_255_and_zero():
    body = encode_roster(roster_of(KEYS), AUTHORITY)[HEADER_BYTES:]
    assert body[56:89] == b"\xff" + bytes(32)


def test_no_byte_of_a_roster_can_be_changed():
    body = encode_roster(roster_of(KEYS, depth=3, root=digest("root")), AUTHORITY)[HEADER_BYTES:]
    for place in range(len(body)):
        damaged = bytearray(body)
        damaged[place] ^= 1
        with pytest.raises(PeerError):
            decode_roster(frame(MessageKind.ROSTER, bytes(32), 0, bytes(damaged)), PUBLIC)


def test_a_roster_signed_by_somebody_else_is_refused(monkeypatch):
    forged = sign_anything(KEYS | {9: digest("sybil")}, digest("the server"))
    with pytest.raises(PeerError, match="signature"):
        decode_roster(forged, PUBLIC)
    monkeypatch.setattr(rosters, "require_authority", lambda *arguments: None)
    assert 9 in decode_roster(forged, PUBLIC).keys


def test_one_key_for_two_clients_is_refused_and_taken_without_the_check(monkeypatch):
    signed = sign_anything({1: digest("one"), 2: digest("one")}, AUTHORITY)
    with pytest.raises(PeerError, match="key of its own"):
        decode_roster(signed, PUBLIC)
    monkeypatch.setattr(rosters, "require_one_key_each", lambda keys: None)
    assert len(decode_roster(signed, PUBLIC).keys) == 2


def test_an_authority_signs_in_its_own_name_only():
    with pytest.raises(ConfigError, match="authority that it names"):
        encode_roster(roster_of(KEYS), digest("somebody else"))


def test_the_population_is_every_enrolled_client_by_identity():
    assert roster_of(dict(reversed(KEYS.items()))).clients == (3, 5, 2**64 - 1)


def test_an_unknown_client_is_not_enrolled():
    with pytest.raises(PeerError, match="not enrolled"):
        roster_of(KEYS).key(2)


def test_a_new_client_begins_at_the_head_of_an_empty_log():
    seen = {3: (17, digest("head"))}
    roster = issue_roster(KEYS, PUBLIC, serial=2, issued=ISSUED, entropy=Entropy.replay(b"n"), floors=seen)
    assert roster.floors == seen | {client: (0, first_head(PUBLIC, client)) for client in KEYS if client != 3}
    assert roster.expires - roster.issued == 30 * DAY


def test_every_roster_has_a_nonce_of_its_own():
    made = {issue_roster(KEYS, PUBLIC, serial=1, issued=ISSUED, entropy=Entropy.system()).nonce for _ in range(5)}
    assert len(made) == 5


@pytest.mark.parametrize(
    "change",
    [
        {"serial": 0},
        {"serial": 2**64},
        {"expires": ISSUED},
        {"expires": ISSUED + 90 * DAY + 1},
        {"issued": -1, "expires": DAY},
        {"depth": 21, "root": digest("root")},
        {"depth": -1, "root": digest("root")},
        {"root": digest("root")},
        {"nonce": bytes(31)},
        {"authority": bytes(33)},
        {"floors": {}},
        {"floors": dict.fromkeys(KEYS, (-1, bytes(32)))},
        {"floors": dict.fromkeys(KEYS, (0, bytes(16)))},
        {"keys": {3: bytes(32), 5: bytes(31), 2**64 - 1: bytes(30)}},
        {"keys": {-1: bytes(32)}, "floors": {-1: (0, bytes(32))}},
    ],
    ids=str,
)
def test_a_roster_that_breaks_a_rule_is_refused(change):
    with pytest.raises(ConfigError):
        replace(roster_of(KEYS), **change)


def test_a_signed_roster_that_breaks_a_rule_is_the_peers_fault(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(rosters, "MOST_LIFETIME_DAYS", 1000)
        endless = encode_roster(roster_of(KEYS, expires=ISSUED + 365 * DAY), AUTHORITY)
    with pytest.raises(PeerError, match="at most 90 days"):
        decode_roster(endless, PUBLIC)


def test_a_lifetime_of_90_days_is_the_longest():
    assert roster_of(KEYS, expires=ISSUED + 90 * DAY).expires == ISSUED + 90 * DAY


def test_a_roster_that_was_replaced_is_refused():
    old = roster_of(KEYS, serial=4)
    new = roster_of({client: key for client, key in KEYS.items() if client != 5}, serial=5)
    require_serial(old, 0, bytes(32))
    require_serial(old, 4, old.digest)
    require_serial(new, 4, old.digest)
    with pytest.raises(PeerError, match="serial 5 or later is needed, got 4"):
        require_serial(old, 5, new.digest)


def test_two_rosters_of_one_serial_are_the_authoritys_fault():
    one, other = roster_of(KEYS, serial=4), roster_of(KEYS, serial=4, nonce=digest("another"))
    with pytest.raises(PeerError, match="signed two rosters of serial 4"):
        require_serial(other, 4, one.digest)


def test_a_roster_is_refused_after_it_expires():
    roster = roster_of(KEYS)
    require_unexpired(roster, EXPIRES - 1)
    with pytest.raises(PeerError, match=f"valid until {EXPIRES}"):
        require_unexpired(roster, EXPIRES)


def test_a_clock_set_back_does_not_bring_a_roster_back():
    roster, seen = roster_of(KEYS), EXPIRES + 2 * DAY
    require_unexpired(roster, ISSUED)  # what the clock alone would say
    with pytest.raises(PeerError, match="expired"):
        require_unexpired(roster, not_before(ISSUED, seen))
    assert not_before(ISSUED, ISSUED + DAY) == ISSUED
