"""A network that loses, repeats, reorders, damages and misroutes; clients that restart, crash and refuse."""

import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from d2pfed.errors import PeerError, TooFewClients
from d2pfed.numerics.randomness import Entropy
from d2pfed.secagg import Advertising, Client, Consistency, Delivery, Sum
from d2pfed.secagg.pairwise import messages, phases
from d2pfed.secagg.pairwise.phases import Advertised, Shared
from d2pfed.secagg.pairwise.server import Masking, Sharing, Unmasking
from d2pfed.secagg.wire import MessageKind, kind_of, message, pack_subset
from support.federation import MODEL, TASK, Federation, expected_sum, make_session

SIZE = 6
EXAMPLES = int(os.environ.get("D2PFED_MACHINE_EXAMPLES", "200"))
SHAPES = [
    {"quorum": 4},
    {"quorum": 4, "consistency": Consistency.SIGNED},
    {"quorum": SIZE, "delivery": Delivery.EVERYONE},
]
OUTCOMES = Counter()
picks = st.integers(0, 10**6)


class Aggregation(RuleBasedStateMachine):
    """One attempt under attack by the network, with another attempt to draw foreign messages from."""

    @initialize(shape=st.sampled_from(SHAPES), unlucky=st.sets(st.integers(0, SIZE - 1), max_size=SIZE - 2))
    def begin(self, shape, unlucky):
        self.session = make_session(SIZE, **shape)
        self.unlucky = {self.session.cohort[rank] for rank in unlucky}  # to whom all harm is done
        self.federation = Federation(self.session)
        self.clients = self.federation.clients
        self.phase = Advertising(self.session, self.federation.roster)
        self.outcome = None
        self.requests = dict(self.phase.outbox)
        self.answers = []  # on their way to the server
        self.old_requests = []
        self.old_answers = []
        self.accepted = set()
        self.opened = Counter()
        self.secrets = set()
        self.sealed = Counter()
        self.foreign = self.messages_of_another_attempt()

    def messages_of_another_attempt(self):
        session = replace(self.session, attempt=9)
        federation = Federation(session)
        advertising = Advertising(session, federation.roster)
        requests = dict(advertising.outbox)
        for client, request in requests.items():
            advertising.receive(client, federation.clients[client].receive(request))
        return [*requests.items(), *advertising.close().outbox.items()]

    # --- what can happen ---

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def a_client_answers(self, pick):
        client = self.take_request(pick)
        self.deliver(client, self.requests.pop(client))

    @rule()
    def all_clients_answer(self):
        while self.requests:
            self.a_client_answers(0)

    @precondition(lambda self: self.answers)
    @rule(pick=picks)
    def the_server_hears_an_answer(self, pick):
        client, answer = self.answers.pop(pick % len(self.answers))
        self.old_answers.append((client, answer))
        try:
            self.phase.receive(client, answer)
        except PeerError:
            return
        self.accepted.add(client)

    @precondition(lambda self: self.requests)
    @rule(pick=picks)
    def a_request_is_lost(self, pick):
        if victims := [client for client in self.requests if client in self.unlucky]:
            self.requests.pop(victims[pick % len(victims)])

    @precondition(lambda self: self.answers)
    @rule(pick=picks)
    def an_answer_is_lost(self, pick):
        self.take_unlucky_answer(pick)

    @precondition(lambda self: self.answers)
    @rule(pick=picks)
    def an_answer_is_repeated(self, pick):
        self.answers.append(self.answers[pick % len(self.answers)])

    @precondition(lambda self: self.old_answers)
    @rule(pick=picks)
    def an_old_answer_comes_again(self, pick):
        client, answer = self.old_answers[pick % len(self.old_answers)]
        if client in self.unlucky or client in self.accepted:
            self.server_refuses(client, answer)

    @precondition(lambda self: self.answers)
    @rule(pick=picks, bit=picks)
    def an_answer_is_damaged(self, pick, bit):
        if participations := self.take_unlucky_answer(pick):
            self.server_refuses(participations[0], flip(participations[1], bit))

    @precondition(lambda self: self.answers)
    @rule(pick=picks, other=picks)
    def an_answer_arrives_under_another_name(self, pick, other):
        participations = self.take_unlucky_answer(pick)
        if participations and (names := sorted(self.unlucky - {participations[0]})):
            self.server_refuses(names[other % len(names)], participations[1])

    @precondition(lambda self: self.old_requests)
    @rule(pick=picks)
    def an_old_request_comes_again(self, pick):
        if old := [(client, request) for client, request in self.old_requests if client in self.unlucky]:
            self.client_refuses(*old[pick % len(old)])

    @precondition(lambda self: self.requests)
    @rule(pick=picks, bit=picks)
    def a_request_is_damaged(self, pick, bit):
        if victims := [client for client in self.requests if client in self.unlucky]:
            client = victims[pick % len(victims)]
            self.client_refuses(client, flip(self.requests.pop(client), bit))

    @rule(pick=picks)
    def a_request_of_another_attempt_arrives(self, pick):
        if foreign := [(client, request) for client, request in self.foreign if client in self.unlucky]:
            self.client_refuses(*foreign[pick % len(foreign)])

    @rule(pick=picks)
    def a_client_restarts_from_its_saved_state(self, pick):
        client = self.session.cohort[pick % SIZE]
        machine = self.clients[client]
        if isinstance(machine.phase, phases.Finished):
            return
        saved = machine.save()
        self.clients[client] = self.federation.restore(client, saved)
        assert isinstance(machine.phase, phases.Finished)

    @rule(pick=picks)
    def a_client_crashes_and_starts_anew(self, pick):
        client = self.session.cohort[pick % SIZE]
        if client in self.unlucky and not isinstance(self.clients[client].phase, phases.Invited):
            self.clients[client] = self.federation.make_client(client, Entropy.replay(b"anew %d" % pick))
            self.requests.pop(client, None)
            with pytest.raises(PeerError):  # whatever it is asked next belongs to its former life
                self.clients[client].receive(
                    message(
                        self.session,
                        MessageKind.UNMASK_REQUEST,
                        self.session.rank(client),
                        pack_subset(np.ones(SIZE, np.bool_)),
                    )
                )

    @rule(pick=picks)
    def a_client_refuses_to_go_on(self, pick):
        if self.unlucky:
            self.clients[sorted(self.unlucky)[pick % len(self.unlucky)]].phase = phases.Finished()

    @precondition(lambda self: self.outcome is None)
    @rule(patience=st.integers(0, 9))
    def the_server_closes_the_exchange(self, patience):
        if patience:
            self.all_clients_answer()
            self.answers += self.answers if patience % 2 else []
            while self.answers:
                self.the_server_hears_an_answer(0)
        try:
            closed = self.phase.close(TASK, MODEL) if isinstance(self.phase, Sharing) else self.phase.close()
        except TooFewClients:
            self.end("void")
            return
        if isinstance(closed, Sum):
            assert np.array_equal(closed.vector, expected_sum(self.session, self.phase.survivors))  # I3, I4
            assert len(self.phase.survivors) >= self.session.quorum  # I2
            self.end("sum")
            return
        if isinstance(self.phase, Masking):
            assert set(closed.survivors) == self.accepted
        self.phase, self.accepted = closed, set()
        self.old_answers += self.answers
        self.requests, self.answers = dict(closed.outbox), []

    def end(self, outcome):
        self.outcome = outcome
        OUTCOMES[outcome] += 1
        self.requests, self.answers = {}, []

    def teardown(self):  # whatever has happened, the attempt comes to an end
        for _ in range(5):
            if getattr(self, "outcome", "not begun") is None:
                self.the_server_closes_the_exchange(1)
        assert getattr(self, "outcome", "not begun") is not None

    # --- how it is carried out ---

    def take_request(self, pick):
        return list(self.requests)[pick % len(self.requests)]

    def take_unlucky_answer(self, pick):
        places = [place for place, (client, _) in enumerate(self.answers) if client in self.unlucky]
        return self.answers.pop(places[pick % len(places)]) if places else None

    def deliver(self, client, request):
        self.old_requests.append((client, request))
        try:
            answer = self.clients[client].receive(request)
        except PeerError:
            return
        self.note(client, request, answer)
        self.answers.append((client, answer))

    def note(self, client, request, answer):
        phase = self.clients[client].phase
        if isinstance(phase, Advertised):
            self.secrets |= {phase.seal_secret, phase.mask_secret, phase.seed, phase.entropy.key}
        if isinstance(phase, Shared):
            self.secrets |= {
                secret for peer in phase.peers.values() for secret in (peer.share_key, peer.mask_shared)
            }
            self.sealed.update(peer.share_key for peer in phase.peers.values())
        if kind_of(answer) == MessageKind.UNMASKING_SHARES:
            self.opened[client] += 1
        assert not any(secret in answer or secret in request for secret in self.secrets)  # I8

    def server_refuses(self, client, answer):
        with pytest.raises(PeerError):
            self.phase.receive(client, answer)

    def client_refuses(self, client, request):
        with pytest.raises(PeerError):
            self.clients[client].receive(request)
        assert isinstance(self.clients[client].phase, phases.Finished)

    # --- what must hold ---

    @invariant()
    def each_client_opens_shares_at_most_once(self):  # I1, and I9: nothing makes it answer again
        if hasattr(self, "opened"):
            assert max(self.opened.values(), default=0) <= 1

    @invariant()
    def no_ciphertext_key_is_used_twice(self):  # I5
        if hasattr(self, "sealed"):
            assert max(self.sealed.values(), default=0) <= 1

    @invariant()
    def nothing_is_opened_before_the_survivors_are_final(self):  # I6: there is a moment to commit the release
        if hasattr(self, "opened") and self.opened:
            assert isinstance(self.phase, Unmasking)


def flip(message, bit):
    damaged = bytearray(message)
    damaged[bit // 8 % len(damaged)] ^= 1 << bit % 8
    return bytes(damaged)


def machine_settings(**changes):
    quiet = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
    return settings(max_examples=EXAMPLES, stateful_step_count=50, **quiet, **changes)


def test_any_network_leads_to_the_exact_sum_or_a_void_attempt():
    OUTCOMES.clear()
    run_state_machine_as_test(Aggregation, settings=machine_settings())
    assert OUTCOMES["sum"] >= EXAMPLES // 10, OUTCOMES
    assert OUTCOMES["void"] >= EXAMPLES // 10, OUTCOMES


def answer_twice(self, request):
    answer, after = self.phase.answer(self._local, request)
    self.phase = self.phase if isinstance(after, phases.Finished) else after
    return answer


def count_repeated_vectors(self, client, data):
    session = self._known.joined.session
    group, vector = messages.decode_masked_vector(session, session.rank(client), self._context, data)
    session.ring.add_into(self._total, vector)
    self._groups.add(group)
    self._arrived.append(session.rank(client))


@pytest.mark.parametrize(
    ("place", "name", "bug"),
    [(Client, "receive", answer_twice), (Masking, "receive", count_repeated_vectors)],
    ids=["a client answers twice", "a server counts a vector twice"],
)
def test_the_machine_finds_a_planted_bug(place, name, bug, monkeypatch):
    monkeypatch.setattr(place, name, bug)
    seen = machine_settings(phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_state_machine_as_test(Aggregation, settings=seen)
