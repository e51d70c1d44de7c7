"""A server that knows the graph, chooses who drops out, and counts quorums: refused, and what it gets otherwise."""

from dataclasses import replace

import numpy as np
import pytest

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import digest
from d2pfed.secagg import Session, checks, crypto
from d2pfed.secagg.pairwise import keys
from d2pfed.secagg.pairwise.graph import Circle, Consistency
from d2pfed.secagg.pairwise.keys import JoinedClients
from d2pfed.secagg.pairwise.phases import ClientSession
from support.evil import VICTIM, Evil
from support.federation import enrolment_secret, make_session

SIGNED = Consistency.SIGNED


def nothing(*inputs):
    """The check is not made."""


@pytest.fixture
def small_limit(monkeypatch):
    """Sparse graphs for cohorts that a test can play through."""
    monkeypatch.setattr("d2pfed.secagg.pairwise.graph.SIGNED_COMPLETE_UP_TO", 10)


def sparse(size=24, degree=4, threshold=3, quorum=19, colluders=3, **changes) -> Session:
    limits = {"degree": degree, "threshold": threshold, "quorum": quorum, "colluders": colluders}
    return make_session(size, **limits, consistency=SIGNED, dimension=12, bits=16, **changes)


def colluders_shares(evil, owner, ranks, place):
    """Shares of an owner that colluders have opened in the ciphertexts sent to them: of its seed (0) or key (1)."""
    session, found = evil.session, {}
    for rank in ranks:
        sender, receiver = session.cohort[owner], session.cohort[rank]
        shared = evil.agreement_of(rank, "seal").agree(evil.advertisements[owner].seal_public)
        plain = crypto.unseal(keys.share_key(session, shared, sender, receiver), evil.ciphertexts[owner][rank])
        found[rank] = int.from_bytes(plain[33 * place : 33 * (place + 1)], "little")
    return found


# --- a circle can be cut ---

ARC = 4


def cut_an_arc(evil: Evil) -> np.ndarray:
    """Open the sum of four neighbours on the circle alone: beside them a colluder, then two that "drop out"."""
    everyone = evil.subset(evil.everyone)
    evil.advertise(evil.everyone)
    evil.share(evil.everyone, everyone)
    circle = evil.joined[VICTIM].graph._circle
    arc = [int(rank) for rank in circle[10 : 10 + ARC]]
    evil.colluders = tuple(int(rank) for rank in circle[[9, 10 + ARC]])
    dropped = [int(rank) for rank in circle[[7, 8, 11 + ARC, 12 + ARC]]]
    evil.mask(evil.everyone, everyone)
    left = evil.subset(set(evil.everyone) - set(dropped))
    signatures = evil.confirm(np.flatnonzero(left), left)
    evil.open_signed(np.flatnonzero(left), everyone, left, signatures)
    evil.part = arc
    return evil.sum_of_part(arc, everyone)


def sum_of_arc(evil):
    total = np.zeros(evil.session.dimension, np.uint32)
    for rank in evil.part:
        evil.session.ring.add_into(total, evil.federation.vectors[evil.session.cohort[rank]])
    return total


def test_a_circle_is_refused_where_the_server_may_choose_who_drops_out():
    with pytest.raises(ConfigError, match="complete graph"):
        sparse(40, degree=6, threshold=4, quorum=36, colluders=2)


def test_on_a_circle_the_sum_of_four_neighbours_can_be_opened(small_limit, monkeypatch):
    monkeypatch.setattr(
        "d2pfed.secagg.pairwise.session.make_graph",
        lambda cohort, degree, consistency, seed: Circle(cohort, degree, seed),
    )
    evil = Evil(sparse(40, degree=6, threshold=4, quorum=36, colluders=2), ())
    assert np.array_equal(cut_an_arc(evil), sum_of_arc(evil))


# --- the graph depends on everyone's advertisement ---


def wanted(session, leaves, colluders):
    """Whether such a list of leaves leaves the victim with colluders only."""
    joined = JoinedClients.of(session, np.ones(len(session.cohort), np.bool_), leaves)
    return set(joined.graph.partners(VICTIM).tolist()) <= set(colluders)


def chosen_long_ago(evil: Evil) -> np.ndarray:
    """Try lists of leaves before anyone has advertised, until the victim's neighbours all collude."""
    session, everyone = evil.session, evil.subset(evil.everyone)
    evil.advertise(evil.colluders)
    fixed = evil.leaves(everyone, evil.advertisements)
    for trial in range(100_000):
        leaves = {rank: fixed.get(rank, digest("chosen", trial, rank)) for rank in evil.everyone}
        if wanted(session, leaves, evil.colluders):
            break
    evil.advertise([VICTIM])
    evil.share([VICTIM], everyone, leaves=leaves)
    return bare(evil, everyone)


def bare(evil, everyone):
    """All holders of the victim's secrets collude: take its masks off without asking anybody."""
    holders = evil.joined[VICTIM].receivers(VICTIM, everyone)
    for sender in evil.joined[VICTIM].senders(VICTIM, everyone):
        evil.ciphertexts[sender] = {VICTIM: evil.ciphertext_of(sender, VICTIM)}
    evil.mask([VICTIM], everyone)
    evil.seed_shares = colluders_shares(evil, VICTIM, holders, 0)
    return evil.strip(everyone, evil.shared_with_victim)


def crowd() -> Session:
    """More than half of the cohort colludes, so that a bad graph is found soon."""
    return sparse(14, degree=3, threshold=3, quorum=13, colluders=8)


COLLUDING = tuple(range(6, 14))


def test_a_list_without_ones_own_leaf_is_refused(small_limit):
    evil = Evil(crowd(), COLLUDING)
    with pytest.raises(PeerError, match="own advertisement"):
        chosen_long_ago(evil)


def test_without_its_own_leaf_a_client_may_get_a_chosen_graph(small_limit, monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.checks.require_own", nothing)
    monkeypatch.setattr("d2pfed.secagg.checks.require_leaves_fit", leaves_of_others_fit)
    evil = Evil(crowd(), COLLUDING)
    assert np.array_equal(chosen_long_ago(evil), evil.victims_update)


def leaves_of_others_fit(session, leaves, statements):
    """As it is, for all but the victim's own, which the check before it is about."""
    for rank, statement in statements.items():
        if rank != VICTIM and leaves[rank] != statement:
            raise PeerError("not the one in the list")


# --- an advertisement is the one in the list ---


def replaced_keys(evil: Evil) -> np.ndarray:
    """Show the victim keys of the server's own for its honest neighbours, and everyone the true leaves."""
    session, everyone = evil.session, evil.subset(evil.everyone)
    evil.advertise(evil.everyone)
    true = evil.leaves(everyone, evil.advertisements)
    joined = JoinedClients.of(session, everyone, true)
    own = {rank: crypto.Agreement(digest("the server's", rank)) for rank in joined.partners(VICTIM, everyone)}
    forged = {rank: replace(evil.advertisements[rank], mask_public=key.public) for rank, key in own.items()}
    evil.share(evil.everyone, everyone, forged, leaves=true)
    evil.mask(evil.everyone, everyone)
    signatures = evil.confirm(evil.everyone, everyone)
    evil.open_signed(evil.everyone, everyone, everyone, signatures)
    return evil.strip(everyone, lambda peer: own[peer].agree(evil.advertisements[VICTIM].mask_public))


def test_an_advertisement_that_is_not_the_one_in_the_list_is_refused(small_limit, monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.checks.require_signed", nothing)  # the other guard
    with pytest.raises(PeerError, match="not the one in the list"):
        replaced_keys(Evil(sparse(), ()))


def test_a_replaced_advertisement_is_also_refused_by_its_signature(small_limit, monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.checks.require_leaves_fit", nothing)
    with pytest.raises(PeerError, match="signature"):
        replaced_keys(Evil(sparse(), ()))


def test_without_leaf_and_signature_checks_the_server_knows_all_masks(small_limit, monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.checks.require_signed", nothing)
    monkeypatch.setattr("d2pfed.secagg.checks.require_leaves_fit", nothing)
    evil = Evil(sparse(), ())
    assert np.array_equal(replaced_keys(evil), evil.victims_update)


# --- those that hold a client's shares count, not those whose shares it holds ---


def few_holders(evil: Evil) -> np.ndarray:
    """Let all honest neighbours of the victim drop out: what is left collude, two as holders, the rest as owners."""
    everyone = evil.subset(evil.everyone)
    evil.advertise(evil.everyone)
    evil.share(evil.everyone, everyone)
    joined = evil.joined[VICTIM]
    holders, owners = joined.receivers(VICTIM, everyone), joined.senders(VICTIM, everyone)
    inward = [rank for rank in owners if rank not in holders]
    evil.colluders = (*holders[:2], inward[0])
    dropped = {*holders, *owners} - set(evil.colluders)
    left = evil.subset(set(evil.everyone) - dropped)
    evil.mask(evil.everyone, everyone)
    signatures = evil.confirm(np.flatnonzero(left), left)
    evil.open_signed(np.flatnonzero(left), everyone, left, signatures)
    return evil.strip(everyone, evil.shared_with_victim)


def test_too_few_holders_are_refused_however_many_others_there_are(small_limit):
    with pytest.raises(PeerError, match="holders of a client's shares"):
        few_holders(Evil(sparse(), ()))


def test_counted_over_all_neighbours_the_victim_is_left_among_colluders(small_limit, monkeypatch):
    def check_all_neighbours(self, joined, present):
        checks.require_holders(len(joined.partners(self.rank, present)), self.session.least_holders)

    monkeypatch.setattr(ClientSession, "check_remaining", check_all_neighbours)
    evil = Evil(sparse(), ())
    assert np.array_equal(few_holders(evil), evil.victims_update)


# --- one set of survivors for all ---


def a_view_for_each(evil: Evil) -> np.ndarray:
    """Tell the holders of each neighbour of the victim that this neighbour is gone; all others hear of all."""
    everyone = evil.subset(evil.everyone)
    evil.until_masked()
    joined = evil.joined[VICTIM]
    near = set(joined.partners(VICTIM, everyone))
    for rank in evil.everyone:
        gone = [owner for owner in joined.senders(rank, everyone) if owner in near]
        view = evil.subset(set(evil.everyone) - set(gone))
        if len(joined.receivers(rank, view)) >= evil.session.threshold:
            mine = evil.confirm([rank], view)
            evil.open_signed([rank], everyone, view, mine)
    for rank in near:
        evil.all_shares[rank].pop(rank, None)  # what a neighbour opens of itself is of its seed
    return evil.strip(everyone, evil.shared_with_victim)


def test_ones_own_signature_alone_opens_nothing(small_limit):
    evil = Evil(sparse(60, degree=7, threshold=5, quorum=50), ())
    with pytest.raises(PeerError, match="at least 50 clients must be left, got 1"):
        a_view_for_each(evil)
    assert evil.shares_sent == 0


def test_without_one_set_of_survivors_a_sparse_graph_bares_the_victim(small_limit, monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.checks.require_quorum", nothing)
    evil = Evil(sparse(60, degree=7, threshold=5, quorum=50), ())
    assert np.array_equal(a_view_for_each(evil), evil.victims_update)


# --- 2 quorum > cohort + colluders ---


def fifteen() -> Session:
    return make_session(15, threshold=8, quorum=8, colluders=1, consistency=SIGNED, dimension=12, bits=16)


def two_quorums(evil: Evil) -> np.ndarray:
    """Have the victim confirmed by one half and its loss by the other, with the one colluder in both."""
    evil.until_masked()
    everyone = evil.subset(evil.everyone)
    without = evil.subset(set(evil.everyone) - {VICTIM})
    colluder = evil.colluders[0]
    secret = enrolment_secret(evil.session.cohort[colluder])
    evil.use_colluders()
    for ranks, view in ((range(7), everyone), (range(7, 14), without)):
        signatures = evil.confirm(ranks, view)
        signatures[colluder] = crypto.sign(secret, keys.survivors_statement(evil.context(VICTIM, everyone), view))
        evil.open_signed(ranks, everyone, view, signatures)
    return evil.strip_by_key(everyone)


def test_a_quorum_that_leaves_room_for_two_views_is_refused():
    with pytest.raises(ConfigError, match="quorum of at least 9 of 15 clients with 1 colluders, got 8"):
        fifteen()


def test_a_quorum_for_two_views_lets_one_colluder_recover_the_update(monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.pairwise.session.require_one_view", nothing)
    evil = Evil(fifteen(), (14,))
    assert np.array_equal(two_quorums(evil), evil.victims_update)
