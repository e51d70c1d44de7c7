"""Rounds of the lattice protocol in one process: the same sum at both fidelities, charged before anything opens."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

import d2pfed
from d2pfed.accounting import CohortSampling, Sampling
from d2pfed.errors import ConfigError, D2PFedError, PeerError, TooFewClients
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import PrivacyTarget, Protocol, calibrate
from d2pfed.round import Attempt, LatticeClient, Participant, aggregate, gather, local_sum, session_of
from d2pfed.round.aggregation import InProcess
from d2pfed.secagg import lattice, wire
from d2pfed.secagg.draws import draw_order
from d2pfed.secagg.lattice import messages
from d2pfed.secagg.lattice.session import SEED_ELEMENTS
from d2pfed.secagg.wire import MessageKind, kind_of
from d2pfed.simulation import Dropouts, Fidelity
from d2pfed.simulation.rehearsal import LOST, REHEARSING, rehearse
from support.lattice import quick
from support.rosters import draw_cohort
from support.simulations import NO_MODEL, Attempting, Simulation

COHORT = tuple(range(10, 40))  # all of them in the committee
D = 20
FIRST = Attempt("run", 0, 0)


class Diary:
    """A book that writes down what happens, in order."""

    def __init__(self):
        self.events = []

    def require_plan(self, _run, _plan):
        pass

    def participations(self, _run, clients):
        return dict.fromkeys(clients, 0)

    def reserve(self, release):
        self.events.append(("reserve", release.attempt))

    def commit(self, release):
        self.events.append(("commit", release.attempt, release.participants))

    def void(self, _run, _number, attempt):
        self.events.append(("void", attempt))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick(monkeypatch)


def make_plan(**changes):
    wish = {"dimension": D, "population": len(COHORT), "cohort_size": len(COHORT), "rounds": 2}
    wish |= {"epsilon": 20.0, "delta": 1e-3, "sampling": Sampling.NONE, "protocol": "lattice"}
    return calibrate(PrivacyTarget(**(wish | {"dropouts": 0.15, "colluders": 0.0} | changes)))


@pytest.fixture(scope="module")
def plan():
    found = make_plan()
    assert found.protocol is Protocol.LATTICE
    return found


def update_of(client):
    return np.sin(np.arange(D) * client).astype(np.float32) / 10


def simulation(plan, dropouts=None, lost=()):
    return Simulation(
        plan=plan,
        updates=lambda clients: (None if each in lost else update_of(each) for each in clients),
        dropouts=dropouts or Dropouts(),
        entropy=Entropy.replay(b"lattice round"),
    )


def run(plan, fidelity, book, **changes):
    engine = simulation(plan, **changes)
    attempts = Attempting(plan, lambda _: COHORT, lambda session, _taken: engine.collect(session, fidelity))
    return aggregate(plan, FIRST, NO_MODEL, attempts, book)


SOME = Fraction(1, 20)
LOSSES = [
    {},
    {"dropouts": Dropouts(advertise=SOME)},
    {"dropouts": Dropouts(masked=SOME), "lost": (12, 30)},
    {"dropouts": Dropouts(SOME, Fraction(0), SOME, SOME)},
]


@pytest.mark.parametrize("losses", LOSSES)
def test_sum_and_protocol_agree_bit_for_bit(plan, losses):
    diaries = Diary(), Diary()
    found = [run(plan, each, diary, **losses) for each, diary in zip(Fidelity, diaries, strict=True)]
    np.testing.assert_array_equal(found[0].mean, found[1].mean)
    assert diaries[0].events == diaries[1].events
    assert (found[0].survivors < len(COHORT)) == ("dropouts" in losses)


@pytest.mark.parametrize("fidelity", Fidelity)
@pytest.mark.parametrize(
    ("exchange", "ends"),
    [("advertise", "void"), ("share", "void"), ("masked", "void"), ("unmask", "commit")],
)
def test_an_attempt_is_charged_from_the_survivors_on(plan, fidelity, exchange, ends):
    """Too few members or vectors cost the server nothing; too few that open cost it the attempt."""
    diary = Diary()
    with pytest.raises(TooFewClients):
        run(plan, fidelity, diary, dropouts=Dropouts(**{exchange: Fraction(9, 10)}))
    assert [event[0] for event in diary.events] == ["reserve", ends] * plan.attempts_per_round


def test_charges_come_before_what_they_pay_for(plan):
    diary, engine = Diary(), simulation(plan)

    def watched(session, _taken):
        collected = engine.collect(session, Fidelity.PROTOCOL)
        diary.events.append(("masked",))
        exchange = collected.exchange

        def opening(requests):
            diary.events.append((MessageKind(kind_of(next(iter(requests.values())))).name,))
            return exchange(requests)

        return replace(collected, exchange=opening)

    aggregate(plan, FIRST, NO_MODEL, Attempting(plan, lambda _: COHORT, watched), diary)
    assert [event[0] for event in diary.events] == ["reserve", "masked", "commit", "LATTICE_SURVIVORS"]


def test_a_member_that_lies_is_left_out_and_the_sum_is_right(plan):
    session, vectors = session_of(plan, FIRST, COHORT), {client: update_of(client) for client in COHORT}
    machines = {}

    def join(client):
        own = Participant(plan=plan, client=client, entropy=Entropy.replay(b"x").child(client), participations=0)
        machines[client] = own.join(session, lambda _task, _model: vectors[client], model=b"model")
        return machines[client]

    asked = []

    def exchange(requests):
        asked.append(MessageKind(kind_of(next(iter(requests.values())))))
        for client, answer in InProcess(join, machines=machines).exchange(requests):
            if client == COHORT[3] and asked[-1] is MessageKind.LATTICE_SURVIVORS:
                yield client, lie(session, client, answer)
            else:
                yield client, answer

    found = gather(session, b"model", exchange).unmask()
    expected = np.zeros(session.dimension, np.uint32)
    for client in COHORT:
        own = Participant(plan=plan, client=client, entropy=Entropy.replay(b"x").child(client), participations=0)
        session.ring.add_into(expected, own.encode(session, vectors[client], None))
    np.testing.assert_array_equal(found.vector, expected)
    assert asked[:3] == [MessageKind.INVITATION, MessageKind.LATTICE_REQUEST, MessageKind.LATTICE_SURVIVORS]


def requests_of(session, plan, model, client):
    """Run an attempt; return a client's machine and what it was asked."""
    own = {
        each: Participant(plan=plan, client=each, entropy=Entropy.replay(b"x"), participations=0)
        for each in COHORT
    }
    machines = {each: own[each].join(session, lambda *_: update_of(1), model=model) for each in COHORT}
    requests = []

    def exchange(asked):
        requests.append(asked[client])
        return InProcess(machines.get, machines=machines).exchange(asked)

    gather(session, model, exchange)
    return machines[client], requests


def test_a_client_speaks_once_and_never_masks_two_vectors_alike(plan):
    session, client, keys = session_of(plan, FIRST, COHORT), COHORT[2], []
    victim, (invitation, request) = requests_of(session, plan, b"model", client)
    for again, reason in ((invitation, "the invitation"), (request, "its one message")):
        with pytest.raises(PeerError, match=f"client {client} has .* {reason}"):
            victim.receive(again)
    _, (_, other) = requests_of(session, plan, b"other", client)
    for victim.model, asked in ((b"model", request), (b"other", other)):
        victim.has_spoken = False  # the twin that forgets: its masks differ all the same
        answer = victim.receive(asked)
        keys.append(messages.decode_contribution(session, session.rank(client), len(COHORT), answer).signed.key)
    assert keys[0] != keys[1]


def lie(session, client, answer):
    said = messages.decode_opening(session, session.rank(client), len(session.cohort), answer)
    wrong = replace(said, sums=(said.sums + 1) % 65_521)
    return messages.encode_opening(session, session.rank(client), wrong)


def test_the_committee_is_the_first_of_the_draw():
    plan = make_plan(population=300, cohort_size=100, sampling=Sampling.FIXED, max_participations=2)
    assert plan.committee.size < 100
    cohort = tuple(range(100))
    order = tuple(reversed(cohort))
    assert session_of(plan, FIRST, cohort).members == cohort[: plan.committee.size]
    drawn = session_of(plan, FIRST, cohort, order=order)
    assert drawn.members == cohort[-plan.committee.size :]
    assert drawn.digest != session_of(plan, FIRST, cohort).digest


@pytest.mark.parametrize("method", Sampling)
def test_the_order_of_a_draw_is_a_permutation_of_its_cohort(method):
    clients, sampling = tuple(range(5, 65)), CohortSampling(method, 60, 20)
    order = draw_order(bytes(32), clients, sampling, 0)
    assert tuple(sorted(order)) == draw_cohort(bytes(32), clients, sampling, 0)
    assert (order == tuple(sorted(order))) == (method is Sampling.NONE)


def test_a_client_outside_of_the_committee_answers_no_member_request():
    plan = make_plan(population=300, cohort_size=100, sampling=Sampling.FIXED, max_participations=2)
    session = session_of(plan, FIRST, tuple(range(100)))
    stranger = LatticeClient(
        own=lattice.Participant(session, 99), contribute=lambda *_: None, entropy=Entropy.system()
    )
    for kind in (MessageKind.LATTICE_SURVIVORS, MessageKind.LATTICE_CERTIFICATE):
        with pytest.raises(PeerError, match="no part in the committee"):
            stranger.receive(wire.message(session, kind, 99))


def test_a_signed_plan_has_no_session_without_a_roster():
    with pytest.raises(ConfigError, match="consistency must be signed with a roster"):
        session_of(make_plan(consistency="signed"), FIRST, COHORT)


def test_a_sum_of_given_vectors_passes_the_protocol(plan):
    vectors = {client: update_of(client) for client in COHORT}
    found = [
        local_sum(plan, FIRST, vectors, Diary(), Entropy.replay(b"sum"), fidelity=fidelity)
        for fidelity in Fidelity
    ]
    np.testing.assert_array_equal(*found)


def test_a_statistic_may_be_asked_for_in_one_message_each():
    options = {"delta": 1e-3, "seed": 5, "privacy": {"protocol": "lattice", "colluders": 0.0}}
    values = [np.array([client % 3, 1.0]) for client in range(64)]
    found = [d2pfed.private_sum(values, fidelity=each, **options) for each in Fidelity]
    assert found[0].plan.protocol is Protocol.LATTICE
    np.testing.assert_array_equal(found[0].value, found[1].value)


def test_a_rehearsal_loses_some_clients_and_adds_up_the_rest():
    assert rehearse(50, 10, Entropy.replay(b"rehearsal"), 48) == REHEARSING - LOST


def test_a_rehearsal_notices_a_wrong_vector(monkeypatch):
    made = lattice.Participant.contribute

    def spoiled(self, body, model, contribute, entropy):
        def other(*given):
            vector, position = contribute(*given)
            return (np.roll(vector, 1) if self.client == REHEARSING - 1 else vector), position

        return made(self, body, model, other, entropy)

    monkeypatch.setattr(lattice.Participant, "contribute", spoiled)
    with pytest.raises(D2PFedError, match="wrong sum"):
        rehearse(50, 10, Entropy.replay(b"rehearsal"), 3 * SEED_ELEMENTS)
