"""Positions in a session: a client that was rolled back, or has a twin, is told so by its peers and by the server."""

from dataclasses import replace

import numpy as np
import pytest

from d2pfed.errors import ConfigError, PeerError, RolledBack
from d2pfed.numerics.randomness import digest
from d2pfed.secagg import Client, Consistency, checks, collect
from d2pfed.secagg.pairwise import messages
from d2pfed.secagg.pairwise.keys import JoinedClients, KeyAdvertisement
from d2pfed.secagg.pairwise.messages import EncryptedShares
from d2pfed.secagg.roster import Position
from support.federation import (
    Federation,
    advertising_of,
    expected_sum,
    keep_all,
    make_session,
    one_hot,
    position_of,
    run_round,
)

SESSION = make_session(8, consistency=Consistency.SIGNED, quorum=6, colluders=1)
VICTIM, *OTHERS = SESSION.cohort
ROSTER = Federation(SESSION).roster


def nothing(*inputs):
    """The check is not made."""


def rolled_back(rows=2, seen=5, witnesses=OTHERS[:2]):
    """The victim's log has two rows, and some peers have met it at its fifth."""
    known = {witness: {VICTIM: position_of(VICTIM, seen, ROSTER)} for witness in witnesses}
    return Federation(SESSION, counts={VICTIM: rows}, known=known)


def vector_of_victim(federation, change=lambda rank, shares: shares):
    """What the victim sends when it is asked for its masked vector; `change` is applied to the ciphertexts."""
    advertising = advertising_of(federation)
    collect(advertising, federation.exchange("advertise", keep_all))
    sharing = advertising.close()
    collect(sharing, federation.exchange("share", keep_all))
    for rank in list(sharing._sent):
        sharing._sent[rank] = change(rank, sharing._sent[rank])
    return federation.clients[VICTIM].receive(sharing.close(b"", b"").outbox[VICTIM])


# --- peers ---


def test_a_client_that_a_peer_has_met_later_in_its_log_sends_nothing():
    federation = rolled_back()
    with pytest.raises(RolledBack, match="another client has met client 7 at row 5"):
        vector_of_victim(federation)
    with pytest.raises(PeerError, match="finished"):
        federation.clients[VICTIM].receive(b"")


def test_without_position_checks_a_restored_home_sends_a_second_vector(monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.checks.require_in_chain", nothing)
    assert vector_of_victim(rolled_back())


def test_a_claim_that_the_log_contains_is_accepted():
    federation = rolled_back(rows=5)
    total, survivors = run_round(federation)
    assert np.array_equal(total.vector, expected_sum(SESSION, survivors))


def test_another_head_at_the_same_count_is_a_twin():
    claim = position_of(VICTIM, 1, ROSTER, log="the twin's log")
    with pytest.raises(RolledBack):
        vector_of_victim(Federation(SESSION, known={OTHERS[0]: {VICTIM: claim}}))


FORGED = [
    Position(9, digest("a head"), bytes(64)),
    replace(position_of(VICTIM, 5, ROSTER), count=6),
    position_of(OTHERS[0], 5, ROSTER),
]


@pytest.mark.parametrize("claim", FORGED, ids=["unsigned", "of another count", "of another client"])
def test_a_claim_that_the_client_did_not_sign_is_ignored(claim):
    assert vector_of_victim(Federation(SESSION, known={OTHERS[0]: {VICTIM: claim}}))


@pytest.mark.parametrize("claim", FORGED, ids=["unsigned", "of another count", "of another client"])
def test_without_the_signature_check_a_colluder_locks_a_client_out(claim, monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.checks.verify_position", nothing)
    with pytest.raises(RolledBack):
        vector_of_victim(Federation(SESSION, known={OTHERS[0]: {VICTIM: claim}}))


def spoil_claims(rank, shares):
    """A server that spoils the ciphertexts that carry a claim to the victim, and nothing else."""
    claims = shares.claims.copy()
    if not claims[0]:
        return shares
    claims[0] = False
    return EncryptedShares({**shares.ciphertexts, 0: bytes(messages.ciphertext_bytes(SESSION))}, claims)


def test_a_server_cannot_spoil_more_claims_than_bad_clients_could():
    with pytest.raises(PeerError, match="at most 1 ciphertexts may fail to open, got 2"):
        vector_of_victim(rolled_back(), spoil_claims)


def test_a_server_that_spoils_many_ciphertexts_hides_all_claims(monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.checks.require_few_unopened", nothing)
    assert vector_of_victim(rolled_back(), spoil_claims)


WIDE = make_session(8, consistency=Consistency.SIGNED, quorum=8, threshold=7, colluders=6)


def hidden_by_number():
    """A server that writes six colluders into the session, and spoils the claims of six of seven peers."""
    known = {witness: {VICTIM: position_of(VICTIM, 5, ROSTER)} for witness in OTHERS[:6]}
    return Federation(WIDE, counts={VICTIM: 2}, known=known, colluders=1)


def test_the_clients_own_number_of_colluders_counts_not_the_sessions():
    with pytest.raises(PeerError, match="at most 1 ciphertexts may fail to open, got 6"):
        vector_of_victim(hidden_by_number(), spoil_claims)


def test_with_the_sessions_number_a_server_hides_all_claims(monkeypatch):
    kept = checks.require_few_unopened
    monkeypatch.setattr(
        checks,
        "require_few_unopened",
        lambda claimed, _own, unopened: kept(claimed, claimed, unopened),
    )
    assert vector_of_victim(hidden_by_number(), spoil_claims)


def test_a_session_with_too_few_colluders_is_refused():
    with pytest.raises(PeerError, match="at most 1 ciphertexts may fail to open, got 2"):
        vector_of_victim(replace(rolled_back(), colluders=5), spoil_claims)


def test_a_server_can_hide_as_many_claims_as_it_may_spoil_ciphertexts():
    """What is not noticed: as many honest witnesses as there may be bad clients."""
    assert vector_of_victim(rolled_back(witnesses=OTHERS[:1]), spoil_claims)


def test_a_claim_cannot_be_cut_off_its_ciphertext():
    def cut(rank, shares):
        ciphertexts = {
            to: ciphertext[:-104] if shares.claims[to] else ciphertext
            for to, ciphertext in shares.ciphertexts.items()
        }
        return EncryptedShares(ciphertexts, np.zeros(8, np.bool_))

    with pytest.raises(PeerError, match="fail to open"):
        vector_of_victim(rolled_back(), cut)


def test_a_claim_without_a_ciphertext_is_refused():
    session = SESSION
    joined = JoinedClients(session, np.ones(8, np.bool_), bytes(32))
    claims = np.zeros(8, np.bool_)
    claims[0] = True
    ciphertexts = {rank: bytes(messages.ciphertext_bytes(session)) for rank in range(1, 8)}
    with pytest.raises(PeerError, match="a claim must be in a ciphertext"):
        messages.decode_encrypted_shares(
            joined, 0, messages.encode_encrypted_shares(joined, 0, EncryptedShares(ciphertexts, claims))
        )


# --- the server ---


def invite(remembered, rows=2):
    federation = Federation(SESSION, counts={VICTIM: rows})
    outbox = advertising_of(federation, {VICTIM: remembered}).outbox
    return federation.clients[VICTIM].receive(outbox[VICTIM])


def test_a_client_that_the_server_met_later_does_not_advertise():
    with pytest.raises(RolledBack, match="the server has met client 7 at row 5"):
        invite(position_of(VICTIM, 5, ROSTER))


def test_unless_the_servers_position_is_checked_a_restored_client_joins(monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.checks.require_in_chain", nothing)
    assert invite(position_of(VICTIM, 5, ROSTER))


def test_a_position_of_the_server_that_the_log_contains_is_accepted():
    assert invite(position_of(VICTIM, 2, ROSTER))


def test_the_server_learns_where_everyone_stands():
    federation = Federation(SESSION, counts={VICTIM: 4})
    advertising = advertising_of(federation)
    collect(advertising, federation.exchange("advertise", keep_all))
    assert advertising.positions[VICTIM] == position_of(VICTIM, 4, ROSTER)
    assert set(advertising.positions) == set(SESSION.cohort)


# --- what peers remember ---


def after_sharing(federation, change=lambda advertisements: advertisements):
    """The first of the others, after it was shown the advertisements."""
    advertising = advertising_of(federation)
    collect(advertising, federation.exchange("advertise", keep_all))
    sharing = advertising.close()
    known = sharing._known
    advertisements = change(dict(known.advertisements))
    client = OTHERS[0]
    request = messages.encode_advertisements(known.joined, SESSION.rank(client), advertisements)
    federation.clients[client].receive(request)
    return federation.clients[client]


def test_a_client_meets_all_others_where_they_stand():
    met = after_sharing(Federation(SESSION, counts={VICTIM: 4})).met
    assert set(met) == set(SESSION.cohort) - {OTHERS[0]}
    assert met[VICTIM] == position_of(VICTIM, 4, ROSTER)


def test_a_restored_client_has_nobody_to_remember_any_more():
    federation = Federation(SESSION)
    assert federation.restore(OTHERS[0], after_sharing(federation).save()).met == {}


def with_old_position(advertisements):
    """A server that pairs an old position with a new advertisement."""
    return advertisements | {0: replace(advertisements[0], position=position_of(VICTIM, 1, ROSTER))}


def test_a_position_belongs_to_its_advertisement():
    with pytest.raises(PeerError, match="signature"):
        after_sharing(Federation(SESSION, counts={VICTIM: 4}), with_old_position)


def test_an_unsigned_position_lets_the_server_plant_an_old_one(monkeypatch):
    def statement(self, session, client):
        return digest("d2pfed advert", session.digest, client, self.seal_public, self.mask_public)

    monkeypatch.setattr(KeyAdvertisement, "statement", statement)
    client = after_sharing(Federation(SESSION, counts={VICTIM: 4}), with_old_position)
    assert client.met[VICTIM] == position_of(VICTIM, 1, ROSTER)


def test_a_signed_session_needs_a_history():
    federation = Federation(SESSION)
    with pytest.raises(ConfigError, match="history"):
        Client(
            SESSION,
            VICTIM,
            lambda task, model, group: one_hot(SESSION, VICTIM),
            None,
            federation.enrolment(VICTIM),
        )


def test_a_position_is_kept_with_the_secrets_of_its_session():
    """The log may grow while the session waits: what was advertised stays what it was."""
    federation = Federation(SESSION)
    advertising = advertising_of(federation)
    outbox = advertising.outbox
    for client in SESSION.cohort:
        advertising.receive(client, federation.clients[client].receive(outbox[client]))
    saved = federation.clients[VICTIM].save()
    grown = Federation(SESSION, counts={VICTIM: 9})
    assert grown.restore(VICTIM, saved).receive(advertising.close().outbox[VICTIM])
