import pytest

from d2pfed.errors import PeerError
from d2pfed.numerics.randomness import digest
from d2pfed.secagg.crypto import Agreement, PairSecrets


def agreement(name):
    return Agreement(digest("pairs", name))


def test_both_ends_of_a_pair_get_what_they_would_compute_themselves():
    pairs, ends = PairSecrets(), [agreement(name) for name in ("a", "b", "c")]
    for own in ends:
        for other in ends:
            if other is not own:
                assert pairs.agree(own, other.public) == own.agree(other.public)
    assert not pairs._waiting


def test_a_secret_is_computed_once_per_pair(monkeypatch):
    computed, exchange = [], Agreement.agree
    monkeypatch.setattr(Agreement, "agree", lambda own, public: computed.append(own) or exchange(own, public))
    pairs, left, right = PairSecrets(), agreement("left"), agreement("right")
    assert pairs.agree(left, right.public) == pairs.agree(right, left.public)
    assert computed == [left]


def test_a_key_that_was_changed_on_the_way_finds_no_other_pair():
    pairs, left, right, other = PairSecrets(), agreement("left"), agreement("right"), agreement("other")
    pairs.agree(left, other.public)  # the left was shown another key than the right's
    assert pairs.agree(right, left.public) == right.agree(left.public)


def test_a_key_of_low_order_is_refused_and_left_out():
    pairs, own = PairSecrets(), agreement("own")
    for _ in range(2):
        with pytest.raises(PeerError):
            pairs.agree(own, bytes(32))
    assert not pairs._waiting
