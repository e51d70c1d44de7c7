import itertools
from dataclasses import replace

import numpy as np
import pytest

from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.secagg import Client, Consistency, Delivery, Enrolment, Session, decode_invitation
from d2pfed.secagg.pairwise import messages
from d2pfed.secagg.pairwise.keys import JoinedClients
from d2pfed.secagg.pairwise.messages import encode_invitation
from d2pfed.secagg.pairwise.phases import Advertised, Confirmed, Finished, Masked, Shared
from d2pfed.secagg.wire import MessageKind, frame, subset_of
from support.decoding import decode_advertisement
from support.federation import (
    MODEL,
    PHASES,
    TASK,
    Federation,
    enrol,
    enrolment_secret,
    make_session,
    one_hot,
    run_round,
)

SHAPES = {
    "plain": {},
    "everyone": {"delivery": Delivery.EVERYONE, "quorum": 8},
    "signed": {"consistency": Consistency.SIGNED},
}


def shaped(name: str) -> Session:
    return make_session(8, **SHAPES[name])


def recorded(session):
    """A round that went well: what the first client was asked and answered, by phase."""
    federation = Federation(session)
    first = session.cohort[0]
    log = []
    kept = federation.clients[first].receive

    class Recorder:
        def receive(self, request):
            answer = kept(request)
            log.append((request, answer))
            return answer

    federation.clients[first] = Recorder()
    run_round(federation)
    return log


def fresh(session, entropy=b"federation"):
    client = session.cohort[0]
    federation = Federation(session, seed=entropy)
    return federation.clients[client]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_entropy_gives_the_same_answers(shape):
    assert recorded(shaped(shape)) == recorded(shaped(shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_client_can_be_saved_and_restored_before_every_request(shape):
    session = shaped(shape)
    client = session.cohort[0]
    federation = Federation(session)
    machine = federation.clients[client]
    for request, answer in recorded(session):
        saved = machine.save()
        with pytest.raises(PeerError):
            machine.receive(request)
        machine = federation.restore(client, saved)
        assert machine.receive(request) == answer


@pytest.mark.parametrize("shape", SHAPES)
def test_no_request_is_answered_twice_or_out_of_turn(shape):
    session = shaped(shape)
    log = recorded(session)
    for done, wrong in itertools.product(range(len(log) + 1), range(len(log))):
        if wrong == done:
            continue
        machine = fresh(session)
        for request, _ in log[:done]:
            machine.receive(request)
        with pytest.raises(PeerError):
            machine.receive(log[wrong][0])
        if done < len(log):
            with pytest.raises(PeerError, match="finished"):
                machine.receive(log[done][0])


def test_a_saved_mark_of_entropy_is_zero_or_one():
    session = make_session(8)
    client = session.cohort[0]
    saved = frame(MessageKind.SAVED_INVITED, session.digest, client, bytes(32) + b"\x02")
    with pytest.raises(PeerError, match="mark"):
        Client.restore(session, client, lambda task, model, seed: one_hot(session, client), saved)


def test_the_same_entropy_gives_other_secrets_in_every_session():
    seen = set()
    session = make_session(4)
    for change in ({}, {"attempt": 1}, {"round": 9}, {"run": "b"}, {"plan_digest": digest("b")}, {"bits": 9}):
        other = replace(session, **change)
        for rank, client in enumerate(other.cohort):
            machine = Client(other, client, lambda task, model, seed: one_hot(session, 7), Entropy.replay(b"one"))
            advertisement = decode_advertisement(other, rank, machine.receive(encode_invitation(other, rank)))
            seen |= {
                advertisement.seal_public,
                advertisement.mask_public,
                advertisement.commitment,
                machine.phase.seed,
            }
    assert len(seen) == 6 * 4 * 4


def test_a_finished_client_cannot_be_saved():
    machine = fresh(make_session(8))
    with pytest.raises(PeerError):
        machine.receive(b"")
    with pytest.raises(ConfigError, match="nothing to save"):
        machine.save()


@pytest.mark.parametrize("shape", SHAPES)
def test_saved_bytes_of_another_client_session_or_kind_are_refused(shape):
    session = shaped(shape)
    machine = fresh(session)
    machine.receive(recorded(session)[0][0])
    saved = machine.save()
    federation = Federation(session)
    first, second = session.cohort[:2]
    for owner, target, data in (
        (second, session, saved),
        (first, replace(session, attempt=5), saved),
        (first, session, saved[:-1]),
        (first, session, frame(MessageKind.KEY_ADVERTISEMENT, session.digest, first)),
    ):
        own = federation.enrolment(owner), federation.history(owner)
        with pytest.raises(PeerError):
            Client.restore(target, owner, federation.contribution(owner), data, *own)


def test_each_phase_has_forgotten_the_secrets_of_the_one_before():
    session = shaped("signed")
    machine = fresh(session)
    log = recorded(session)
    kinds, former = [], []
    for request, _ in log:
        machine.receive(request)
        kinds.append(type(machine.phase))
        if isinstance(machine.phase, Advertised):
            former += [machine.phase.seal_secret, machine.phase.mask_secret]
        if isinstance(machine.phase, Shared):
            former += [machine.phase.seed, *(peer.mask_shared for peer in machine.phase.peers.values())]
        if isinstance(machine.phase, Masked | Confirmed):
            held = Client.save(fresh_copy(machine))
            assert not any(secret in held for secret in former)
    assert kinds == [Advertised, Shared, Masked, Confirmed, Finished]


def fresh_copy(machine):
    copy = Client.__new__(Client)
    copy._local, copy.phase = machine._local, machine.phase
    return copy


@pytest.mark.parametrize("shape", SHAPES)
def test_no_representation_shows_a_secret(shape):
    session = shaped(shape)
    machine = fresh(session)
    for request, _ in recorded(session):
        machine.receive(request)
        shown = repr(machine.phase) + repr(machine._local)
        for name in ("seal_secret", "seed", "mask_shared", "seed_shares", "secret", "key="):
            assert f"{name}=b" not in shown
            assert f"{name}={{" not in shown


def until_advertisements(session):
    """A client that waits for advertisements, and what the server would send."""
    log = recorded(session)
    machine = fresh(session)
    machine.receive(log[0][0])
    joined, _, advertisements = messages.decode_advertisements(session, 0, log[1][0])
    return machine, joined, advertisements


def with_other_keys(session):
    """The advertisements that a client waits for, with another mask key of its own among them."""
    machine, joined, shown = until_advertisements(session)
    others = shown | {0: replace(shown[0], mask_public=bytes([9]) + bytes(31))}
    return machine, messages.encode_advertisements(joined, 0, others)


def test_a_client_insists_on_its_own_keys():
    machine, request = with_other_keys(make_session(8))
    with pytest.raises(PeerError, match="own advertisement"):
        machine.receive(request)


def test_without_the_own_key_check_a_client_uses_foreign_keys(monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.checks.require_own", lambda listed, own: None)
    machine, request = with_other_keys(make_session(8))
    assert machine.receive(request)


def test_a_client_refuses_its_own_key_under_another_name():
    session = make_session(8)
    machine, joined, shown = until_advertisements(session)
    others = shown | {3: replace(shown[3], mask_public=shown[0].mask_public)}
    with pytest.raises(PeerError, match="distinct"):
        machine.receive(messages.encode_advertisements(joined, 0, others))


def test_a_client_insists_on_being_among_the_joined():
    session = make_session(8)
    machine, _, shown = until_advertisements(session)
    without = JoinedClients(session, subset_of(8, range(1, 8)), bytes(32))
    request = messages.encode_advertisements(without, 0, shown)
    with pytest.raises(PeerError, match="itself"):
        machine.receive(request)


@pytest.mark.parametrize("change", [{"attempt": 1}, {"round": 4}, {"run": "another"}, {"quorum": 6}, {"bits": 9}])
def test_an_invitation_to_another_session_is_refused(change):
    session = make_session(8)
    with pytest.raises(PeerError, match="agreed session"):
        fresh(session).receive(encode_invitation(replace(session, **change), 0))


OTHER_NAMES = [{"attempt": 1}, {"round": 4}, {"run": "another"}, {"draw": 1}, {"block": 1}]


def misnamed(change):
    """An invitation with the digest of the agreed session, and other names than the digest is of."""
    session = shaped("signed")
    forged = replace(session, **change)
    object.__setattr__(forged, "digest", session.digest)
    return fresh(session), encode_invitation(forged, 0)


@pytest.mark.parametrize("change", OTHER_NAMES, ids=str)
def test_an_invitation_that_contradicts_its_digest_is_refused(change):
    machine, invitation = misnamed(change)
    with pytest.raises(PeerError, match="agreed session"):
        machine.receive(invitation)


@pytest.mark.parametrize("change", OTHER_NAMES, ids=str)
def test_unless_names_are_compared_a_contradictory_invitation_is_answered(change, monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.checks.require_agreed", lambda invited, agreed: None)
    machine, invitation = misnamed(change)
    assert machine.receive(invitation)


def test_an_invitation_is_read_before_there_is_a_session():
    session = make_session(8)
    invitation = decode_invitation(encode_invitation(session, 2), None)
    assert invitation.client == session.cohort[2]
    assert invitation.binding == session.digest
    assert (invitation.run, invitation.round, invitation.attempt) == (session.run, session.round, session.attempt)
    assert invitation.cohort == session.cohort


def test_an_invitation_to_a_stranger_is_refused():
    session = make_session(8)
    body = encode_invitation(session, 2)[72:]
    with pytest.raises(PeerError, match="cohort"):
        decode_invitation(frame(MessageKind.INVITATION, session.digest, 1, body), None)


@pytest.mark.parametrize(
    "vector",
    [np.zeros(7, np.uint32), np.zeros(8, np.int64), np.full(8, 256, np.uint32), np.zeros((8, 1), np.uint32)],
    ids=["short", "wide", "out of the ring", "of another shape"],
)
def test_a_contribution_that_does_not_fit_is_our_own_mistake_and_final(vector):
    session = make_session(8)
    log = recorded(session)
    machine = Client(
        session, session.cohort[0], lambda task, model, seed: vector, Entropy.replay(b"federation").child(7)
    )
    machine.receive(log[0][0])
    machine.receive(log[1][0])
    with pytest.raises(ConfigError, match="contribution"):
        machine.receive(log[2][0])
    with pytest.raises(PeerError, match="finished"):
        machine.receive(log[2][0])


def test_a_contribution_leaves_the_sent_model_unchanged():
    session = make_session(8)
    seen = []
    vector = one_hot(session, session.cohort[0])

    def contribute(task, model, group_seed):
        seen.append((task, model, group_seed))
        return vector

    machine = Client(session, session.cohort[0], contribute, Entropy.replay(b"federation").child(7))
    for request, _ in recorded(session)[:3]:
        machine.receive(request)
    assert seen == [(TASK, MODEL, None)]
    assert np.array_equal(vector, one_hot(session, session.cohort[0]))


def test_everyone_has_the_same_group_seed_and_no_other_attempt_has_it():
    session = shaped("everyone")
    seeds = []
    for attempt in (0, 1):
        federation = Federation(replace(session, attempt=attempt))
        run_round(federation)
        assert len(set(federation.group_seeds.values())) == 1
        assert None not in federation.group_seeds.values()
        seeds.append(federation.group_seeds[session.cohort[0]])
    assert seeds[0] != seeds[1]


def test_a_stranger_cannot_make_a_client():
    with pytest.raises(ConfigError, match="cohort"):
        Client(make_session(8), 1, lambda task, model, seed: np.zeros(8, np.uint32), Entropy.replay(b""))


def test_a_signed_session_needs_an_enrolment_of_this_very_client():
    session = shaped("signed")
    first, second = session.cohort[:2]
    roster = enrol(session.cohort)
    for enrolment in (None, Enrolment(enrolment_secret(second), roster)):
        with pytest.raises(ConfigError):
            Client(
                session, first, lambda task, model, seed: one_hot(session, first), Entropy.replay(b""), enrolment
            )


def test_all_phases_are_named():
    assert PHASES == ("advertise", "share", "mask", "confirm", "unmask")


@pytest.mark.parametrize("is_replayed", [True, False])
def test_saved_entropy_keeps_the_mark_of_a_replay(is_replayed):
    entropy = Entropy(bytes(range(32)), is_replayed=is_replayed)
    session = make_session(8)
    client, contribute = session.cohort[0], lambda task, model, seed: one_hot(session, 7)
    saved = Client(session, client, contribute, entropy).save()
    assert Client.restore(session, client, contribute, saved).phase.entropy == entropy
