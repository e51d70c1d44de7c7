"""A client that holds no roster: which head it goes by, and what an authority publishes for it."""

from types import SimpleNamespace

import pytest

from d2pfed.deploy import rosters
from d2pfed.deploy.config import read_client_config, read_secret
from d2pfed.deploy.heads import publish_head, read_head
from d2pfed.deploy.rosters import accept_head, accept_roster, current_head
from d2pfed.errors import ConfigError, PeerError
from d2pfed.ledger.client_log import Entry
from d2pfed.numerics.randomness import digest
from d2pfed.secagg.roster import sign_position
from support.enrolled_clients import directory_of, enrol, sign_roster


def published(place, signed):
    """Head and slips of a roster, as the authority leaves them with the server."""
    file = place / f"roster-{signed.roster.digest.hex()[:8]}"
    publish_head(file, signed.roster, read_secret(place / "authority.key"))
    return read_head(file, signed.roster)


@pytest.fixture
def place(tmp_path):
    first = enrol(tmp_path, 3, depth=None)
    config = read_client_config(directory_of(tmp_path, 1))
    return SimpleNamespace(directory=tmp_path, first=first, head=published(tmp_path, first), config=config)


def renewed(place, **changes):
    signed = sign_roster(place.directory, {}, place.first.roster, None, **changes)
    return signed, published(place.directory, signed)


def accept(place, head, *clock):
    return accept_head(place.config, head.head, head.slip(1), *clock)


def test_a_head_is_kept_and_in_the_log(place):
    enrolment, history = accept(place, place.head)
    (row,) = history.bodies(Entry.ROSTER)
    assert (row["serial"], row["digest"]) == (1, place.first.roster.digest.hex())
    assert enrolment.roster.name(1) == 1
    assert current_head(place.config)[0] == enrolment
    assert not (place.config.directory / "roster").exists()
    accept_roster(place.config, place.first.data)  # the same serial, the same digest
    assert place.config.log.read() == history


def test_a_slot_that_moves_is_that_of_the_newest_head(place):
    accept(place, place.head)
    _, second = renewed(place, removed=frozenset({0}))
    assert accept(place, second)[0].roster.name(1) == 0
    with pytest.raises(PeerError, match="serial 2 or later"):
        accept(place, place.head)
    with pytest.raises(PeerError, match="another session"):
        accept_head(place.config, second.head, place.head.slip(1))


def test_without_the_serial_check_an_old_head_is_back(place, monkeypatch):
    _, second = renewed(place, removed=frozenset({0}))
    accept(place, second)
    monkeypatch.setattr(rosters, "require_serial", lambda *_: None)
    assert accept(place, place.head)[0].roster.head.population == 3


def test_two_heads_of_one_serial_are_refused(place):
    accept(place, place.head)
    twin = sign_roster(place.directory, dict(place.first.roster.keys), None, None)
    with pytest.raises(PeerError, match="two rosters of serial 1"):
        accept(place, published(place.directory, twin))


def test_an_expired_head_is_refused(place):
    end = place.first.roster.expires
    accept(place, place.head, lambda: end - 1)
    with pytest.raises(PeerError, match="has expired"):
        accept(place, place.head, lambda: end)
    with pytest.raises(PeerError, match="has expired"):
        current_head(place.config, lambda: end)


def test_a_floor_that_the_log_lacks_is_refused(place):
    secret = read_secret(place.config.directory / "key")
    shown = sign_position(secret, place.first.roster.authority, 1, 40, digest("a log that was lost"))
    _, second = renewed(place, shown={1: shown})
    with pytest.raises(PeerError, match="seen position 40 of this client"):
        accept(place, second)


def test_a_slip_for_another_key_is_refused(place):
    signed = sign_roster(place.directory, {1: digest("another key")}, place.first.roster, None)
    with pytest.raises(ConfigError, match="client 1 is enrolled with another key"):
        accept(place, published(place.directory, signed))


def test_what_is_published_belongs_to_its_roster(place):
    signed, _ = renewed(place)
    file = place.directory / f"roster-{place.first.roster.digest.hex()[:8]}"
    with pytest.raises(ConfigError, match="is not the head of roster"):
        read_head(file, signed.roster)
    with pytest.raises(PeerError, match="client 9 is not enrolled"):
        place.head.slip(9)
    with pytest.raises(FileExistsError):
        publish_head(file, place.first.roster, read_secret(place.directory / "authority.key"))


def test_a_directory_without_a_head_says_where_one_comes_from(place):
    with pytest.raises(ConfigError, match="it comes with a run's announcement"):
        current_head(place.config)


def test_a_server_without_certificates_has_no_head_to_announce(place):
    assert read_head(place.directory / "nothing", place.first.roster) is None


def test_without_a_roster_the_last_key_of_a_peer_counts(place):
    """A peer that has a new key begins again at a lower row: the old key's position must not hide the new one's."""
    peers = rosters.Positions(place.directory / "peers", None)
    old, new = bytes(31) + b"\x01", bytes(31) + b"\x02"
    shown = [sign_position(digest("secret"), bytes(32), 2, count, digest("head")) for count in (9, 3, 2)]
    peers.keep({2: shown[0]}, {2: old})
    peers.keep({2: shown[1]}, {2: new})
    peers.keep({2: shown[2]}, {2: new})
    assert peers.latest() == {2: shown[1]}
