"""One bad client: the attempt goes on without it, and the server learns its name."""

from dataclasses import replace

import numpy as np
import pytest

from d2pfed.errors import PeerError, TooFewClients
from d2pfed.numerics.randomness import Stream, digest
from d2pfed.secagg import Advertising, Consistency, Delivery, collect, crypto
from d2pfed.secagg.pairwise import keys, messages
from d2pfed.secagg.pairwise.messages import EncryptedShares
from d2pfed.secagg.pairwise.phases import Advertised
from d2pfed.secagg.pairwise.server import Masking
from d2pfed.secagg.shamir import PRIME
from d2pfed.secagg.wire import MessageKind, message
from support.decoding import decode_advertisement
from support.evil import LOW_ORDER
from support.federation import (
    Federation,
    advertising_of,
    change_shares,
    enrolment_secret,
    expected_sum,
    keep_all,
    make_session,
    run_round,
    until_unmasking,
)
from support.twins import twin

SIGNED = Consistency.SIGNED
BOTH = pytest.mark.parametrize("consistency", [Consistency.ASSUMED, SIGNED], ids=lambda value: value.value)
BAD = 3


def twelve(consistency=Consistency.ASSUMED, **changes):
    """Twelve clients of whom two may cheat; seven shares open a secret, so two wrong ones are corrected."""
    shape = {"threshold": 7, "quorum": 9, "colluders": 2, "consistency": consistency}
    return make_session(12, **(shape | changes))


def with_low_order(session, rank, key):
    """A loss that puts a key of low order into one client's advertisement, signed by its owner."""

    def lose(phase, client, answer):
        if phase != "advertise" or client != session.cohort[rank] or not answer:
            return answer
        advertisement = replace(decode_advertisement(session, rank, answer), **{key: bytes.fromhex(LOW_ORDER[0])})
        if session.is_signed:
            signature = crypto.sign(enrolment_secret(client), advertisement.statement(session, client))
            advertisement = replace(advertisement, signature=signature)
        return message(session, MessageKind.KEY_ADVERTISEMENT, rank, advertisement.pack())

    return lose


@BOTH
@pytest.mark.parametrize("key", ["seal_public", "mask_public"])
def test_a_key_of_low_order_is_refused_on_receipt_and_its_sender_named(consistency, key):
    session = twelve(consistency)
    total, survivors = run_round(Federation(session), with_low_order(session, BAD, key))
    assert session.cohort[BAD] not in survivors
    assert np.array_equal(total.vector, expected_sum(session, survivors))
    assert total.blamed == (session.cohort[BAD],)


def test_unless_it_is_refused_on_receipt_one_such_key_voids_the_attempt(monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.crypto.require_order", lambda public: None)
    session = twelve()
    federation = Federation(session)
    advertising = advertising_of(federation)
    collect(advertising, federation.exchange("advertise", with_low_order(session, BAD, "mask_public")))
    sharing = advertising.close()
    for client, request in sharing.outbox.items():
        with pytest.raises(PeerError, match=r"low order|own advertisement"):
            federation.clients[client].receive(request)
    with pytest.raises(TooFewClients):
        sharing.close(b"", b"")


def test_who_is_blamed_is_named_when_the_attempt_is_void_too():
    session = twelve(quorum=12)
    with pytest.raises(TooFewClients) as lack:
        run_round(Federation(session), with_low_order(session, BAD, "seal_public"))
    assert lack.value.blamed == (session.cohort[BAD],)


def test_the_excluded_are_not_asked_and_count_as_dropped_out():
    session = twelve()
    out = session.cohort[:2]
    advertising = Advertising(session, excluded=out)
    assert set(advertising.outbox) == set(session.cohort) - set(out)
    with pytest.raises(PeerError, match="not asked"):
        advertising.receive(out[0], b"")


def garbage(session, sender, receivers):
    """A loss that replaces one client's ciphertexts to some others by noise."""

    def lose(phase, client, answer):
        if phase != "share" or client != session.cohort[sender] or not answer:
            return answer
        joined = lose.joined(answer)
        sent = messages.decode_encrypted_shares(joined, sender, answer)
        noise = Stream(digest("noise"))
        spoilt = {
            rank: noise.bytes(len(ciphertext)) if rank in receivers else ciphertext
            for rank, ciphertext in sent.ciphertexts.items()
        }
        return messages.encode_encrypted_shares(joined, sender, EncryptedShares(spoilt, sent.claims))

    lose.joined = lambda answer: lose.federation.clients[session.cohort[sender]].phase.joined
    return lose


def run_with_garbage(session, sender, receivers):
    lose = garbage(session, sender, receivers)
    lose.federation = Federation(session)
    return run_round(lose.federation, lose)


@BOTH
@pytest.mark.parametrize("count", [3, 5], ids=["to some", "to as many as may be spared"])
def test_ciphertexts_full_of_garbage_are_missed_and_their_sender_named(consistency, count):
    session = twelve(consistency)
    total, survivors = run_with_garbage(session, BAD, list(range(4, 4 + count)))
    assert survivors == session.cohort
    assert np.array_equal(total.vector, expected_sum(session, survivors))
    assert total.blamed == (session.cohort[BAD],)


@BOTH
def test_garbage_for_all_voids_one_attempt_and_excludes_its_sender(consistency):
    session = twelve(consistency)
    with pytest.raises(TooFewClients) as lack:
        run_with_garbage(session, BAD, list(range(12)))
    assert lack.value.blamed == (session.cohort[BAD],)
    again = replace(session, attempt=1)
    federation = Federation(again)
    advertising = Advertising(again, federation.roster, excluded=lack.value.blamed)
    collect(advertising, federation.exchange("advertise", keep_all))
    assert set(advertising.close().outbox) == set(again.cohort) - set(lack.value.blamed)


def test_a_few_ciphertexts_that_do_not_open_name_nobody():
    """The owner has spoilt them, or their receivers lie: nobody can tell, and the sum is right."""
    session = twelve()
    total, survivors = run_with_garbage(session, BAD, [5, 6])
    assert np.array_equal(total.vector, expected_sum(session, survivors))
    assert total.blamed == ()


def test_stopping_at_a_bad_ciphertext_lets_one_client_stop_all(monkeypatch):
    def stop(session, key, ciphertext):
        return keys.ShareContent(0, 0, crypto.unseal(key, ciphertext)[66:])

    monkeypatch.setattr("d2pfed.secagg.pairwise.phases.keys.decrypt_shares", stop)
    session = twelve()
    lose = garbage(session, BAD, list(range(12)))
    lose.federation = Federation(session)
    with pytest.raises(PeerError, match="does not open"):
        run_round(lose.federation, lose)


@pytest.mark.parametrize("share", [PRIME, 2**264 - 1])
def test_a_ciphertext_with_a_number_outside_of_the_field_counts_as_missing(share):
    session = make_session(4)
    key = digest("a key")
    assert keys.decrypt_shares(session, key, crypto.seal(key, share.to_bytes(33, "little") + bytes(33))) is None


def lie(session, liars, change):
    """Run all exchanges with some clients changing the shares that they send."""
    federation = Federation(session)
    unmasking = until_unmasking(federation)
    for client, request in unmasking.outbox.items():
        answer = federation.clients[client].receive(request)
        if session.rank(client) in liars:
            answer = change_shares(unmasking, session.rank(client), answer, change)
        unmasking.receive(client, answer)
    return unmasking


@BOTH
@pytest.mark.parametrize("liars", [(0, 1), (2, 9), (10, 11)], ids=str)
def test_two_wrong_shares_of_each_secret_are_corrected_and_blamed(consistency, liars):
    session = twelve(consistency)
    total = lie(session, liars, lambda owner, share: (share + 1) % PRIME).close()
    assert np.array_equal(total.vector, expected_sum(session, session.cohort))
    # Wrong shares that were not among the first `threshold` were never used, so nobody is blamed for them.
    assert total.blamed == tuple(session.cohort[rank] for rank in liars if min(liars) < session.threshold)


@pytest.mark.parametrize("liar", range(12))
def test_one_wrong_share_of_one_secret_is_corrected_and_names_nobody(liar):
    """Its owner may have given it out wrong: one share against one word."""
    session = twelve()
    total = lie(session, (liar,), lambda owner, share: (share + (owner == 2)) % PRIME).close()
    assert np.array_equal(total.vector, expected_sum(session, session.cohort))
    assert total.blamed == ()


def test_without_correction_two_wrong_shares_void_the_attempt(monkeypatch):
    monkeypatch.setattr(
        "d2pfed.secagg.pairwise.server._SecretRecovery._correct", lambda self, owner, is_right: None
    )
    with pytest.raises(TooFewClients, match="right shares"):
        lie(twelve(), (0, 1), lambda owner, share: (share + 1) % PRIME).close()


def test_more_wrong_shares_than_can_be_corrected_void_the_attempt():
    with pytest.raises(TooFewClients, match="right shares"):
        lie(twelve(), (0, 1, 2), lambda owner, share: (share + 1) % PRIME).close()


def of_another_seed(self, _shares, split):
    return split(replace(self, seed=digest("another")))


def of_no_seed(self, shares, _split):
    return {holder: (int.from_bytes(digest("any", holder), "little"), key) for holder, (_, key) in shares.items()}


def run_with_bad_owner(monkeypatch, session, change, lies=()):
    """One client seals shares that are not of the seed it committed to; `lies` are holders that change theirs."""
    kept, answered, asked = Advertised._split, Advertised.answer, []

    def answer(self, local, data):
        asked.append(local.rank)
        return answered(self, local, data)

    def split(self, joined):
        shares = kept(self, joined)
        return change(self, shares, lambda other: kept(other, joined)) if asked[-1] == BAD else shares

    monkeypatch.setattr(Advertised, "answer", answer)
    monkeypatch.setattr(Advertised, "_split", split)
    with pytest.raises(TooFewClients) as lack:
        lie(session, lies, lambda owner, share: (share + (owner == BAD)) % PRIME).close()
    return lack.value.blamed


def twenty(colluders, quorum=18):
    """Eleven of twenty shares open a secret: with five liars or more, not even all shares outvote them."""
    return make_session(20, threshold=11, quorum=quorum, colluders=colluders, consistency=SIGNED)


@pytest.mark.parametrize("change", [of_another_seed, of_no_seed])
def test_an_owner_whose_shares_fit_nothing_is_named(change, monkeypatch):
    session = twelve()
    assert run_with_bad_owner(monkeypatch, session, change) == (session.cohort[BAD],)


@pytest.mark.parametrize("lies", [(), (0, 7)], ids=["holders honest", "two lie as well"])
@pytest.mark.parametrize(("colluders", "quorum"), [(5, 18), (6, 20)])
def test_an_owner_whose_shares_agree_on_another_seed_is_named(colluders, quorum, lies, monkeypatch):
    """Eleven of those that agree are honest holders' and determine what the owner gave out."""
    session = twenty(colluders, quorum)
    assert run_with_bad_owner(monkeypatch, session, of_another_seed, lies) == (session.cohort[BAD],)


def test_unless_agreeing_shares_count_one_owner_voids_every_attempt(monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.pairwise.server._SecretRecovery._agreeing", lambda self, owner: 0)
    assert run_with_bad_owner(monkeypatch, twenty(5), of_another_seed) == ()


def test_an_owner_without_a_seed_looks_like_one_with_lying_holders(monkeypatch):
    """With fewer than threshold + 2 colluders shares, five holders may have lied about an honest owner as well."""
    assert run_with_bad_owner(monkeypatch, twenty(5), of_no_seed) == ()


def test_lying_holders_do_not_get_an_honest_owner_named():
    with pytest.raises(TooFewClients) as lack:
        lie(twenty(5), range(5, 10), lambda owner, share: (share + (owner == 2)) % PRIME).close()
    assert lack.value.blamed == ()


def test_where_a_dispute_voids_an_attempt_both_sides_are_named():
    """Two shares are missing, and with a third client gone too few are left: one of the three has cheated."""
    session = twelve(quorum=7)
    lose = garbage(session, BAD, [5, 6])
    lose.federation = Federation(session)
    gone = set(session.cohort[8:])

    def lose_more(phase, client, answer):
        return None if phase == "unmask" and client in gone else lose(phase, client, answer)

    with pytest.raises(TooFewClients) as lack:
        run_round(lose.federation, lose_more)
    assert lack.value.blamed == tuple(session.cohort[rank] for rank in (BAD, 5, 6))


# --- everyone's delivery: one group seed ---


def two_faced(monkeypatch, session, bad, some):
    """A client that gives some others another part of the group seed."""
    kept = keys.ShareContent.pack
    turn = {"sender": None}

    def pack(self):
        turn["count"] = turn.get("count", 0)
        content = self
        if turn["sender"] == bad:
            if turn["count"] in some:
                content = replace(self, contribution=digest("another part"))
            turn["count"] += 1
        return kept(content)

    monkeypatch.setattr(keys.ShareContent, "pack", pack)
    federation = Federation(session)

    def lose(phase, client, answer):
        if answer == b"":
            turn["sender"] = client if phase == "share" else None
        return answer

    return federation, lose


EVERYONE = {"delivery": Delivery.EVERYONE, "quorum": 8}


def test_different_group_contributions_for_different_clients_are_noticed(monkeypatch):
    session = make_session(8, **EVERYONE)
    federation, lose = two_faced(monkeypatch, session, session.cohort[BAD], {1, 2})
    with pytest.raises(TooFewClients, match="one group seed, got 2"):
        run_round(federation, lose)


def test_without_group_hashes_unequal_parts_spoil_the_sum_unnoticed(monkeypatch):
    monkeypatch.setattr(Masking, "close", twin(Masking.close, "if len(self._groups) > 1:", "if False:"))
    session = make_session(8, **EVERYONE)
    federation, lose = two_faced(monkeypatch, session, session.cohort[BAD], {1, 2})
    total, survivors = run_round(federation, lose)
    assert not np.array_equal(total.vector, expected_sum(session, survivors))


def test_where_everyone_must_deliver_a_bad_ciphertext_stops_its_receiver():
    session = make_session(8, **EVERYONE)
    lose = garbage(session, BAD, [5])
    lose.federation = Federation(session)
    with pytest.raises(PeerError, match="group seed"):
        run_round(lose.federation, lose)
