from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from campaign_secagg import Cell, loss_of
from d2pfed.errors import ConfigError, PeerError, TooFewClients
from d2pfed.numerics.randomness import Stream, digest
from d2pfed.secagg import Advertising, Client, Consistency, Delivery, collect, upload_bytes
from d2pfed.secagg.pairwise import keys, messages
from d2pfed.secagg.pairwise.messages import encode_invitation
from d2pfed.secagg.shamir import PRIME
from d2pfed.secagg.wire import MessageKind, frame, message
from support.decoding import decode_advertisement
from support.federation import (
    MODEL,
    TASK,
    Federation,
    change_shares,
    enrolment_secret,
    expected_sum,
    make_session,
    run_round,
    until_unmasking,
)

SIGNED = Consistency.SIGNED


@settings(max_examples=25)
@given(st.integers(2, 9), st.integers(1, 32), st.integers(1, 40), st.data())
def test_the_sum_is_that_of_plain_integers(size, bits, dimension, data):
    session = make_session(size, bits=bits, dimension=dimension)
    vectors = {
        client: session.ring.uniform(Stream(digest(client, data.draw(st.integers(0, 9)))), dimension)
        for client in session.cohort
    }
    total, survivors = run_round(Federation(session, vectors=vectors))
    assert survivors == session.cohort
    assert np.array_equal(total.vector, expected_sum(session, survivors, vectors))


@pytest.mark.parametrize("largest", [0, 1, 127, 128, 255])
def test_the_edges_of_the_ring_wrap(largest):
    session = make_session(4)
    vectors = {client: np.full(4, largest, np.uint32) for client in session.cohort}
    total, _ = run_round(Federation(session, vectors=vectors))
    assert total.vector.tolist() == [4 * largest % 256] * 4


def test_everyone_silent_is_a_void_attempt():
    advertising = Advertising(make_session(4))
    with pytest.raises(TooFewClients, match="got 0"):
        advertising.close()


def test_a_stranger_a_repeated_and_an_unasked_answer_are_refused():
    session = make_session(8)
    federation = Federation(session)
    advertising = Advertising(session)
    outbox = advertising.outbox
    first, second = session.cohort[:2]
    answer = federation.clients[first].receive(outbox[first])
    with pytest.raises(PeerError, match="not asked"):
        advertising.receive(1, answer)
    advertising.receive(first, answer)
    with pytest.raises(PeerError, match="already"):
        advertising.receive(first, answer)
    for client in session.cohort[2:]:
        advertising.receive(client, federation.clients[client].receive(outbox[client]))
    sharing = advertising.close()
    assert second not in sharing.outbox
    with pytest.raises(PeerError, match="not asked"):
        sharing.receive(second, answer)


def test_a_bad_answer_is_a_clients_only_one():
    session = make_session(8)
    federation = Federation(session)
    advertising = Advertising(session)
    first = session.cohort[0]
    answer = federation.clients[first].receive(advertising.outbox[first])
    with pytest.raises(PeerError):
        advertising.receive(first, answer[:-1])
    with pytest.raises(PeerError):
        advertising.receive(first, answer)


def test_collect_says_who_answered_badly():
    session = make_session(8)
    federation = Federation(session)
    cell = Cell("advertise", "one", "half", Delivery.QUORUM)
    refused = collect(Advertising(session), federation.exchange("advertise", loss_of(cell, {session.cohort[3]})))
    assert list(refused) == [session.cohort[3]]


def test_a_key_that_somebody_has_already_is_refused():
    session = make_session(8)
    federation = Federation(session)
    advertising = Advertising(session)
    first, second = session.cohort[:2]
    answer = federation.clients[first].receive(advertising.outbox[first])
    advertising.receive(first, answer)
    copied = decode_advertisement(session, 0, answer).pack()
    with pytest.raises(PeerError, match="distinct"):
        advertising.receive(second, message(session, MessageKind.KEY_ADVERTISEMENT, 1, copied))


def test_the_server_refuses_unsigned_keys_and_confirmations():
    session = make_session(8, consistency=SIGNED)
    with pytest.raises(ConfigError, match="roster"):
        Advertising(session)
    federation = Federation(session)
    advertising = Advertising(session, federation.roster)
    first = session.cohort[0]
    advertisement = decode_advertisement(session, 0, federation.clients[first].receive(advertising.outbox[first]))
    unsigned = replace(advertisement, signature=bytes(64)).pack()
    with pytest.raises(PeerError, match="signature"):
        advertising.receive(first, message(session, MessageKind.KEY_ADVERTISEMENT, 0, unsigned))

    def forge(phase, client, answer):
        if phase == "confirm" and client == session.cohort[2] and answer:
            return message(session, MessageKind.SURVIVORS_SIGNATURE, 2, bytes(64))
        return answer

    total, survivors = run_round(Federation(session), forge)
    assert np.array_equal(total.vector, expected_sum(session, survivors))


def test_requests_are_built_when_they_are_looked_up():
    session = make_session(8)
    outbox = Advertising(session).outbox
    assert list(outbox) == list(session.cohort)
    assert len(outbox) == 8
    assert outbox[session.cohort[1]] is not outbox[session.cohort[1]]


def test_survivors_are_known_before_anyone_is_asked_to_unmask():
    session = make_session(8)
    cell = Cell("mask", "one", "after", Delivery.QUORUM)
    unmasking = until_unmasking(Federation(session), loss_of(cell, {session.cohort[3]}))
    assert set(unmasking.survivors) == set(session.cohort) - {session.cohort[3]}
    assert set(unmasking.outbox) == set(unmasking.survivors)


@pytest.mark.parametrize("dropped", [False, True], ids=["of a seed", "of a mask key"])
def test_any_flipped_bit_of_a_share_is_found_when_there_is_none_to_spare(dropped):
    session = make_session(4, threshold=3, quorum=3)
    cell = Cell("mask", "one", "after", Delivery.QUORUM)
    lost = {session.cohort[3]} if dropped else set()
    for bit in range(8, 257, 8):  # lower ones may only touch what X25519 ignores of a key
        federation = Federation(session)
        unmasking = until_unmasking(federation, loss_of(cell, lost))
        for client, request in list(unmasking.outbox.items())[:3]:
            answer = federation.clients[client].receive(request)
            if session.rank(client) == 1:
                answer = change_shares(unmasking, 1, answer, partial(flip_one, bit))
            try:
                unmasking.receive(client, answer)
            except PeerError:
                assert bit == 256  # the number has left the field
        with pytest.raises(TooFewClients, match=r"client 16|got 2 shares"):
            unmasking.close()


def flip_one(bit, owner, share):
    return share ^ ((owner == 3) << bit)


def test_shares_of_a_number_that_is_no_secret_open_nothing():
    session = make_session(4, threshold=3, quorum=3)
    federation = Federation(session)
    unmasking = until_unmasking(federation)
    for client, request in unmasking.outbox.items():
        answer = federation.clients[client].receive(request)
        unmasking.receive(
            client, change_shares(unmasking, session.rank(client), answer, lambda owner, share: PRIME - 1)
        )
    with pytest.raises(TooFewClients, match="right shares"):
        unmasking.close()


def test_too_few_confirmations_are_a_void_attempt():
    session = make_session(6, consistency=SIGNED, quorum=5)
    cell = Cell("confirm", "one", "before", Delivery.QUORUM)
    with pytest.raises(TooFewClients, match="confirm"):
        run_round(Federation(session), loss_of(cell, set(session.cohort[:2])))


def test_more_masks_than_are_expanded_together_come_off_the_sum():
    session = make_session(40, dimension=100, quorum=30)
    cell = Cell("mask", "one", "after", Delivery.QUORUM)
    federation = Federation(session, vectors={c: np.ones(100, np.uint32) for c in session.cohort})
    unmasking = until_unmasking(federation, loss_of(cell, set(session.cohort[:5])))
    collect(unmasking, federation.exchange("unmask", lambda phase, client, answer: answer))
    assert unmasking.close().vector.tolist() == [35] * 100


def test_a_vector_masked_for_another_model_is_refused_by_the_server():
    session = make_session(8)
    federation = Federation(session)

    def other_model(phase, client, answer):
        return answer

    advertising = Advertising(session)
    collect(advertising, federation.exchange("advertise", other_model))
    sharing = advertising.close()
    collect(sharing, federation.exchange("share", other_model))
    masking, elsewhere = sharing.close(TASK, MODEL), sharing.close(TASK, b"another model")
    first = session.cohort[0]
    with pytest.raises(PeerError, match="another model"):
        masking.receive(first, federation.clients[first].receive(elsewhere.outbox[first]))


@pytest.mark.parametrize("shape", [{}, {"consistency": SIGNED}, {"delivery": Delivery.EVERYONE, "quorum": 8}])
def test_upload_bytes_is_what_a_client_sends(shape):
    session = make_session(8, dimension=1000, **shape)
    sent = dict.fromkeys(session.cohort, 0)

    def count(phase, client, answer):
        sent[client] += len(answer or b"")
        return answer

    vectors = {client: np.ones(1000, np.uint32) for client in session.cohort}
    run_round(Federation(session, vectors=vectors), count)
    assert set(sent.values()) == {upload_bytes(session)}


def run_recording_keys(monkeypatch):
    """Ten attempts from one seed; every key with what it was used for."""
    used = {"share_key": [], "pair_mask_key": [], "self_mask_key": []}
    for name, calls in used.items():
        original = getattr(keys, name)

        def recording(*inputs, original=original, calls=calls):
            key = original(*inputs)
            calls.append((key, inputs))
            return key

        monkeypatch.setattr(keys, name, recording)
    session = make_session(6)
    for attempt in range(10):
        federation = Federation(replace(session, attempt=attempt), seed=b"always the same")
        cell = Cell("mask", "one", "after", Delivery.QUORUM)
        run_round(federation, loss_of(cell, {session.cohort[attempt % 6]}))
    purposes = {}
    for name, calls in used.items():
        for key, inputs in calls:
            names = (
                tuple(sorted(inputs[-2]))
                if name == "pair_mask_key"
                else inputs[-2:]
                if name == "share_key"
                else inputs[-1]
            )
            where = inputs[0].digest if name == "share_key" else inputs[1]
            purposes.setdefault(key, set()).add((name, where, names))
    return purposes


def test_no_key_is_used_for_two_things_in_many_attempts(monkeypatch):
    purposes = run_recording_keys(monkeypatch)
    assert len(purposes) == 10 * (6 * 5 + 15 + 6)
    assert all(len(uses) == 1 for uses in purposes.values())


def test_the_record_of_keys_sees_a_pair_that_is_missing_from_them(monkeypatch):
    monkeypatch.setattr(keys, "pair_mask_key", lambda shared, context, pair, group: digest("for all", context))
    assert any(len(uses) > 1 for uses in run_recording_keys(monkeypatch).values())


BAD_SESSIONS = {
    "no name": {"run": ""},
    "negative round": {"round": -1},
    "attempt too large": {"attempt": 2**32},
    "short digest": {"plan_digest": b"short"},
    "cohort out of order": {"cohort": (2, 1, 3, 4)},
    "cohort with a repeated client": {"cohort": (1, 1, 3, 4)},
    "negative identity": {"cohort": (-1, 1, 3, 4)},
    "identity too large": {"cohort": (1, 2, 3, 2**64)},
    "cohort of one": {"cohort": (1,)},
    "no dimension": {"dimension": 0},
    "no bits": {"bits": 0},
    "too many bits": {"bits": 33},
    "half of the holders": {"threshold": 2},
    "more than the holders": {"threshold": 5},
    "quorum below the threshold": {"quorum": 2},
    "quorum above the cohort": {"quorum": 5},
    "everyone but one": {"delivery": Delivery.EVERYONE, "quorum": 3},
    "a short roster's digest": {"consistency": SIGNED, "roster_digest": b"short"},
    "signed by nobody enrolled": {"consistency": SIGNED, "roster_digest": bytes(32)},
    "a roster that nobody asked for": {"roster_digest": digest("a roster")},
    "a draw without a roster": {"draw": 1},
    "a block without a roster": {"block": 1},
    "draw too large": {"consistency": SIGNED, "draw": 2**32},
    "negative colluders": {"colluders": -1},
    "colluders enough to open a secret": {"colluders": 3},
    "two quorums that only colluders share": {"consistency": SIGNED, "quorum": 3, "colluders": 2},
    "more than 1,000 signed": {
        "cohort": tuple(range(1_001)),
        "threshold": 501,
        "quorum": 1_001,
        "consistency": SIGNED,
    },
}


@pytest.mark.parametrize("change", BAD_SESSIONS.values(), ids=BAD_SESSIONS)
def test_an_invalid_session_is_refused(change):
    with pytest.raises(ConfigError):
        make_session(4, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"run": "b"},
        {"round": 9},
        {"attempt": 9},
        {"plan_digest": digest("b")},
        {"cohort": (1, 2, 3, 5)},
        {"dimension": 9},
        {"bits": 9},
        {"threshold": 4, "quorum": 4},
        {"quorum": 4},
        {"colluders": 1},
        {"delivery": Delivery.EVERYONE, "quorum": 4},
        {"consistency": SIGNED, "roster_digest": digest("a roster")},
    ],
    ids=str,
)
def test_any_change_of_a_session_changes_its_digest(change):
    session = make_session(4)
    assert replace(session, **change).digest != session.digest


@pytest.mark.parametrize("change", [{"roster_digest": digest("another")}, {"draw": 1}, {"block": 1}], ids=str)
def test_roster_draw_and_block_are_in_the_digest(change):
    session = make_session(4, consistency=SIGNED)
    assert replace(session, **change).digest != session.digest


def test_enrolment_secrets_are_not_shown():
    session = make_session(4, consistency=SIGNED)
    enrolment = Federation(session).enrolment(session.cohort[0])
    assert enrolment_secret(session.cohort[0]).hex() not in repr(enrolment)
    assert "secret" not in repr(enrolment)


def test_a_frame_of_a_client_machine_names_the_client():
    session = make_session(4)
    first, second = session.cohort[:2]
    machine = Federation(session).clients[first]
    assert isinstance(machine, Client)
    request = frame(messages.MessageKind.INVITATION, session.digest, second, encode_invitation(session, 0)[72:])
    with pytest.raises(PeerError):
        machine.receive(request)
