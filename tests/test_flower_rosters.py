import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from d2pfed.deploy import rosters
from d2pfed.deploy.account import ALL
from d2pfed.deploy.config import init_client, read_client_config, read_secret
from d2pfed.deploy.rosters import SignedRoster, accept_roster, current_roster, read_own_issue
from d2pfed.errors import ConfigError, LedgerError, PeerError
from d2pfed.ledger.client_log import Entry
from d2pfed.numerics.randomness import digest
from d2pfed.secagg import encode_roster
from d2pfed.secagg.crypto import signing_public
from d2pfed.secagg.roster import sign_position
from support.enrolled_clients import anchor_in, directory_of, enrol, sign_roster

DAY = 86_400


@pytest.fixture
def place(tmp_path):
    """An authority with three clients, its first roster, and client 0."""
    first = enrol(tmp_path, 3, depth=None)
    config = read_client_config(directory_of(tmp_path, 0))
    accept_roster(config, first.data)
    return SimpleNamespace(directory=tmp_path, first=first, config=config)


def renewed(place, before=None, **changes) -> SignedRoster:
    return sign_roster(place.directory, {}, (before or place.first).roster, None, **changes)


def at(seconds: float):
    return lambda: seconds


def test_a_roster_is_kept_and_in_the_log_and_outside_of_it(place):
    history = place.config.log.read()
    (row,) = history.bodies(Entry.ROSTER)
    assert (row["serial"], row["digest"]) == (1, place.first.roster.digest.hex())
    assert (history.serial, history.roster) == (1, place.first.roster.digest.hex())
    assert current_roster(place.config)[0].roster == place.first.roster
    accept_roster(place.config, place.first.data)
    assert place.config.log.read() == history  # no row for what is known


def test_a_newer_roster_takes_the_place_of_the_one_before(place):
    second = renewed(place)
    accept_roster(place.config, second.data)
    assert read_own_issue(place.config).serial == 2


def test_an_older_roster_is_refused_even_when_it_is_put_back_by_hand(place):
    second = renewed(place, removed=frozenset({2}))
    accept_roster(place.config, second.data)
    with pytest.raises(PeerError, match="serial 2 or later"):
        accept_roster(place.config, place.first.data)
    (place.config.directory / "roster").write_bytes(place.first.data)
    with pytest.raises(PeerError, match="serial 2 or later"):
        current_roster(place.config)


def test_without_the_serial_check_a_revoked_client_is_back(place, monkeypatch):
    second = renewed(place, removed=frozenset({2}))
    accept_roster(place.config, second.data)
    monkeypatch.setattr(rosters, "require_serial", lambda *_: None)
    enrolment, _ = accept_roster(place.config, place.first.data)
    assert 2 in enrolment.roster.keys


def test_a_second_roster_of_one_serial_is_refused_and_reported(place, caplog):
    twin = sign_roster(place.directory, dict(place.first.roster.keys), None, None)
    with pytest.raises(PeerError, match="two rosters of serial 1"):
        accept_roster(place.config, twin.data)
    assert "the authority has signed two rosters of serial 1" in caplog.text


def test_without_that_check_two_clients_stand_under_two_rosters(place, monkeypatch):
    monkeypatch.setattr(rosters, "require_serial", lambda *_: None)
    twin = sign_roster(place.directory, dict(place.first.roster.keys), None, None)
    assert accept_roster(place.config, twin.data)[0].roster.digest != place.first.roster.digest


def test_an_expired_roster_is_refused(place):
    end = place.first.roster.expires
    accept_roster(place.config, place.first.data, at(end - 1))
    with pytest.raises(PeerError, match="has expired"):
        accept_roster(place.config, place.first.data, at(end))
    with pytest.raises(PeerError, match="has expired"):
        current_roster(place.config, at(end))


def test_a_clock_set_back_extends_a_roster_by_at_most_a_day(place):
    """The latest roster that was seen, and the latest row, say what time it is at least."""
    long_ago = sign_roster(place.directory, {}, place.first.roster, None, now=int(time.time()) - 40 * DAY)
    with pytest.raises(PeerError, match="has expired"):
        accept_roster(place.config, long_ago.data, at(time.time() - 35 * DAY))  # rows are of today
    slow = sign_roster(place.directory, {}, place.first.roster, None, now=int(time.time()) - 30 * DAY - 3600)
    accept_roster(place.config, slow.data, at(time.time() - 5 * DAY))  # over for an hour: within the day


def test_the_issue_of_a_roster_is_a_time_that_was_seen(place):
    future = renewed(place, now=int(time.time()) + 60 * DAY)
    accept_roster(place.config, future.data)
    next_one = renewed(place, future, days=1)
    with pytest.raises(PeerError, match="has expired"):
        accept_roster(place.config, next_one.data)  # its time is over long before the issue of the one before


def test_without_the_expiry_check_an_old_roster_is_good_for_ever(place, monkeypatch):
    monkeypatch.setattr(rosters, "require_unexpired", lambda *_: None)
    accept_roster(place.config, place.first.data, at(place.first.roster.expires + 1000 * DAY))


def lose_everything(place) -> bytes:
    """Client 0 loses its directory and anchor, and begins again under the same identity with a new key."""
    directory, anchor = directory_of(place.directory, 0), anchor_in(place.directory, 0)
    directory.rename(place.directory / "lost directory")
    anchor.rename(place.directory / "lost anchor")
    return init_client(directory, 0, place.first.roster.authority, anchor)


def with_floor(place, public: bytes | None) -> SignedRoster:
    """The next roster, whose authority was shown where client 0 stood."""
    head, secret = place.config.log.read().head, read_secret(place.config.directory / "key")
    shown = sign_position(secret, place.first.roster.authority, 0, head.seq, head.hash)
    added = {} if public is None else {0: public}
    return sign_roster(place.directory, added, place.first.roster, None, shown={0: shown})


def test_a_client_that_lost_its_log_refuses_until_it_is_adopted(place):
    head, secret = place.config.log.read().head, read_secret(place.config.directory / "key")
    shown = sign_position(secret, place.first.roster.authority, 0, head.seq, head.hash)
    public = lose_everything(place)
    second = sign_roster(place.directory, {0: public}, place.first.roster, None, shown={0: shown})
    config = read_client_config(directory_of(place.directory, 0))
    with pytest.raises(PeerError, match=f"the authority has seen position {head.seq} of this client"):
        accept_roster(config, second.data)
    with pytest.raises(LedgerError, match="rolled back or cloned"):
        accept_roster(config, second.data)
    adopted = config.log.adopt({"carried": ALL})
    assert adopted.head.seq == head.seq + 1
    accept_roster(config, second.data)


def test_a_floor_that_the_log_holds_is_no_trouble(place):
    second = with_floor(place, None)
    assert second.roster.floors[0][0] == 2
    accept_roster(place.config, second.data)
    assert place.config.log.read().serial == 2


def test_a_roster_that_the_authority_did_not_sign_is_refused(place):
    secret = digest("the server itself")
    forged = replace(place.first.roster, authority=signing_public(secret), serial=9)
    with pytest.raises(PeerError, match="signature"):
        accept_roster(place.config, encode_roster(forged, secret))


def test_a_roster_without_this_clients_key_is_refused(place):
    other = sign_roster(place.directory, {0: digest("another key")}, place.first.roster, None)
    with pytest.raises(ConfigError, match="client 0 is enrolled with another key"):
        accept_roster(place.config, other.data)
    gone = renewed(place, removed=frozenset({0}))
    with pytest.raises(PeerError, match="client 0 is not enrolled"):
        accept_roster(place.config, gone.data)
    assert place.config.log.read().serial == 1


def test_a_crash_after_the_row_is_repaired_by_the_next_roster(place):
    second = renewed(place)
    accept_roster(place.config, second.data)
    (place.config.directory / "roster").write_bytes(place.first.data)  # the row was written, the file was not
    accept_roster(place.config, second.data)
    assert current_roster(place.config)[0].roster.serial == 2


def test_a_directory_without_a_roster_says_where_one_comes_from(place):
    (place.config.directory / "roster").unlink()
    with pytest.raises(ConfigError, match="it comes with a run's announcement"):
        current_roster(place.config)
