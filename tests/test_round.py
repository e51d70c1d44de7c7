from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
import pytest

from d2pfed.accounting import Adjacency, Sampling
from d2pfed.errors import BudgetExceeded, ConfigError, PeerError, TooFewClients
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import MechanismName, Plan, Policy, PrivacyTarget, calibrate
from d2pfed.round import Attempt, Participant, aggregate, gather, local_sum, rotation_seed, session_of
from d2pfed.secagg import Advertising
from d2pfed.simulation import Dropouts, Fidelity
from d2pfed.simulation.backend import simulated_participant
from support.simulations import NO_MODEL, Attempting, Simulation
from test_accept import accept

COHORT = tuple(range(10, 22))
D = 30
NOBODY = Dropouts()
FIRST = Attempt("run", 0, 0)


@dataclass
class Diary:
    """A book that writes down what happens around it, in order."""

    events: list = field(default_factory=list)
    limit: int = 99

    def require_plan(self, _run, _plan):
        pass

    def participations(self, run, clients):
        return dict.fromkeys(clients, 0)

    def reserve(self, release):
        if len([e for e in self.events if e[0] == "reserve"]) >= self.limit:
            raise BudgetExceeded("no more")
        self.events.append(("reserve", release.attempt))

    def commit(self, release):
        self.events.append(("commit", release.attempt, release.participants, release.noise))

    def void(self, run, number, attempt):
        self.events.append(("void", attempt))


def make_plan(kind: MechanismName = MechanismName.CENTERED, **changes) -> Plan:
    wish = {
        "dimension": D,
        "population": 100,
        "cohort_size": len(COHORT),
        "rounds": 2,
        "epsilon": 20.0,
        "delta": 1e-3,
    }
    return calibrate(PrivacyTarget(**(wish | {"mechanism": kind} | changes)))


def update_of(client: int) -> np.ndarray:
    return np.sin(np.arange(D) * client).astype(np.float32) / 10


def updates(clients):
    return map(update_of, clients)


def simulation(plan, dropouts=NOBODY, participations=None, seed=b"round"):
    return Simulation(
        plan=plan,
        updates=updates,
        dropouts=dropouts,
        entropy=Entropy.replay(seed),
        participations=participations or {},
    )


def same(_attempt):
    return COHORT


def run(plan, fidelity, book, first=FIRST, **changes):
    engine = simulation(plan, **changes)
    attempts = Attempting(plan, same, lambda session, _taken: engine.collect(session, fidelity))
    return aggregate(plan, first, NO_MODEL, attempts, book)


@pytest.mark.parametrize("kind", [kind for kind in MechanismName if kind is not MechanismName.BINOMIAL])
@pytest.mark.parametrize("lost", [0, Fraction(1, 12)])
def test_sum_and_protocol_agree_bit_for_bit(kind, lost):
    plan = make_plan(kind, dropouts=0 if kind is MechanismName.SHARED else 0.25, attempts_per_round=16)
    dropouts = Dropouts(lost, lost, lost, lost)
    diaries = Diary(), Diary()
    outcomes = [
        run(plan, fidelity, diary, dropouts=dropouts) for fidelity, diary in zip(Fidelity, diaries, strict=True)
    ]
    np.testing.assert_array_equal(outcomes[0].mean, outcomes[1].mean)
    assert diaries[0].events == diaries[1].events


def test_the_mean_is_near_the_clients_mean():
    plan = make_plan()
    mean = run(plan, Fidelity.SUM, Diary()).mean
    noise = plan.sigma / len(COHORT) * np.sqrt(D)
    assert np.linalg.norm(mean - sum(updates(COHORT)) / len(COHORT)) < 3 * noise


def test_charges_come_before_what_they_pay_for():
    plan, diary = make_plan(), Diary()
    engine = simulation(plan)

    def watched(session, _taken):
        collected = engine.collect(session, Fidelity.PROTOCOL)
        diary.events.append(("masked",))
        exchange = collected.exchange

        def unmasking(requests):
            diary.events.append(("unmask requested",))
            return exchange(requests)

        return replace(collected, exchange=unmasking)

    aggregate(plan, FIRST, NO_MODEL, Attempting(plan, same, watched), diary)
    assert [event[0] for event in diary.events] == ["reserve", "masked", "commit", "unmask requested"]


def test_no_vector_is_asked_for_when_the_budget_refuses():
    plan, asked = make_plan(), []
    attempts = Attempting(plan, same, lambda *found: asked.append(found))
    with pytest.raises(BudgetExceeded):
        aggregate(plan, FIRST, NO_MODEL, attempts, Diary(limit=0))
    assert not asked


def test_the_commitment_names_the_survivors_and_their_noise():
    plan, diary = make_plan(dropouts=0.4), Diary()
    outcome = run(plan, Fidelity.SUM, diary, dropouts=Dropouts(masked=Fraction(1, 6)))
    _, _, participants, noise = diary.events[-1]
    assert outcome.survivors == len(participants) == noise.contributors < len(COHORT)
    assert noise.contributors >= plan.quorum


def sum_of(plan, session, clients, root):
    """What these clients would send, added up in the ring."""
    total = np.zeros(session.dimension, np.uint32)
    for client in clients:
        own = simulated_participant(plan, client, root, {})
        plan.ring.add_into(total, own.encode(session, update_of(client), None))
    return total


@pytest.mark.parametrize("fidelity", Fidelity)
@pytest.mark.parametrize("kind", [MechanismName.CENTERED, MechanismName.DDGAUSS])
def test_the_opened_sum_is_of_exactly_the_clients_committed(fidelity, kind):
    plan, diary, opened = make_plan(kind, dropouts=0.4, attempts_per_round=1), Diary(), []
    lost = COHORT[1], COHORT[4]  # asked for a vector, and their worker died

    def trained(clients):
        return (None if client in lost else update_of(client) for client in clients)

    engine = replace(simulation(plan, Dropouts(masked=Fraction(1, 24))), updates=trained)

    def watched(session, _taken):
        opened.append(session)
        return engine.collect(session, fidelity)

    outcome = aggregate(plan, FIRST, NO_MODEL, Attempting(plan, same, watched), diary)
    (session,) = opened
    _, _, participants, noise = diary.events[-1]
    assert plan.quorum <= len(participants) == outcome.survivors <= len(COHORT) - len(lost)
    assert not set(participants) & set(lost)
    assert noise == plan.noise(len(participants))
    expected = sum_of(plan, session, participants, engine.entropy)
    mean = plan.codec.decode(plan.ring.center(expected), rotation_seed(session), plan.divisor)
    np.testing.assert_array_equal(outcome.mean, mean)
    fewer = sum_of(plan, session, participants[1:], engine.entropy)  # the twin: a sum with one of them missing
    assert not np.array_equal(fewer, expected)


@pytest.mark.parametrize("fidelity", Fidelity)
def test_workers_that_take_a_quorum_with_them_void_the_attempt(fidelity):
    plan, diary = make_plan(dropouts=0.25, attempts_per_round=1), Diary()
    assert plan.quorum == 9
    for lost, events in ((COHORT[:3], ["reserve", "commit"]), (COHORT[:4], ["reserve", "void"])):
        engine = replace(
            simulation(plan),
            updates=lambda clients, lost=lost: (None if each in lost else update_of(each) for each in clients),
        )
        attempts = Attempting(plan, same, lambda session, _taken, own=engine: own.collect(session, fidelity))
        diary = Diary()
        if "void" in events:
            with pytest.raises(TooFewClients):
                aggregate(plan, FIRST, NO_MODEL, attempts, diary)
        else:
            assert aggregate(plan, FIRST, NO_MODEL, attempts, diary).survivors == plan.quorum
        assert [event[0] for event in diary.events] == events


@pytest.mark.parametrize("fidelity", Fidelity)
def test_a_sum_of_given_vectors_is_of_exactly_the_clients_committed(fidelity):
    plan, diary, root = make_plan(sampling="none"), Diary(), Entropy.replay(b"given")
    vectors = {client: update_of(client) for client in COHORT}
    total = local_sum(plan, FIRST, vectors, diary, root, fidelity=fidelity)
    _, _, participants, noise = diary.events[-1]
    assert (participants, noise) == (COHORT, plan.noise(len(COHORT)))
    session = session_of(plan, FIRST, COHORT)
    centred = plan.ring.center(sum_of(plan, session, participants, root))
    mean = plan.codec.decode(centred, rotation_seed(session), plan.divisor)
    np.testing.assert_array_equal(total, mean * np.float32(plan.divisor))


def test_a_round_below_quorum_is_void_and_tried_again_until_attempts_end():
    plan, diary = make_plan(attempts_per_round=3), Diary()
    with pytest.raises(TooFewClients, match="failed in all of its 3 attempts"):
        run(plan, Fidelity.SUM, diary, dropouts=Dropouts(share=Fraction(1, 2)))
    assert diary.events == [(kind, attempt) for attempt in range(3) for kind in ("reserve", "void")]


@pytest.mark.parametrize("fidelity", Fidelity)
def test_an_attempt_that_fails_after_the_commitment_stays_charged(fidelity):
    plan, diary = make_plan(attempts_per_round=2), Diary()
    with pytest.raises(TooFewClients):
        run(plan, fidelity, diary, dropouts=Dropouts(unmask=Fraction(1)))
    assert [event[0] for event in diary.events] == ["reserve", "commit"] * 2


def test_a_shared_noise_goes_on_with_those_who_were_left():
    plan, diary = make_plan(MechanismName.SHARED, attempts_per_round=12), Diary()
    outcome = run(plan, Fidelity.SUM, diary, dropouts=Dropouts(masked=Fraction(1, 10)))
    assert outcome.survivors < len(COHORT)
    assert ("void", 0) in diary.events
    _, attempt, participants, noise = diary.events[-1]
    assert (attempt, len(participants), noise.contributors) == (outcome.attempt, outcome.survivors, 1)


def test_at_its_cap_a_client_sends_zero_and_its_noise():
    plan = make_plan(max_participations=1)
    full = run(plan, Fidelity.SUM, Diary()).mean
    capped = run(plan, Fidelity.SUM, Diary(), participations=dict.fromkeys(COHORT, 1)).mean
    # The same noise around another centre: what is left is the clients' mean, up to the rounding of each draw.
    step = plan.codec.granularity
    assert np.linalg.norm(full - capped - sum(updates(COHORT)) / len(COHORT)) < step * np.sqrt(plan.codec.length)
    assert np.linalg.norm(capped) > 0


def test_the_cap_of_zero_contributions_left_is_where_it_says():
    plan = make_plan(max_participations=2)
    session = session_of(plan, FIRST, COHORT)
    zero = np.zeros(D, np.float32)

    def vector(participations, update):
        participant = Participant(
            plan=plan, client=10, entropy=Entropy.replay(b"c"), participations=participations
        )
        return participant.encode(session, update, None)

    assert not np.array_equal(vector(1, update_of(10)), vector(1, zero))
    assert np.array_equal(vector(2, update_of(10)), vector(2, zero))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_an_update_that_is_not_finite_never_leaves_the_client(poison):
    plan = make_plan(dropouts=0.2)
    session = session_of(plan, FIRST, COHORT)
    bad = np.full(D, poison, np.float32)
    client = simulated_participant(plan, 10, Entropy.replay(b"round"), {}).join(session, lambda _task, _model: bad)
    with pytest.raises(ConfigError, match="finite"):
        client._local.contribute(b"", b"", None)


def test_a_client_joins_only_what_its_policy_allows():
    plan = make_plan()
    session = session_of(plan, FIRST, COHORT)
    invitation = Advertising(session).outbox[10]
    lenient = Policy(most_epsilon=100, most_delta=1e-2, least_noise_multiplier=0.01, least_colluders=0.0)
    assert accept(plan, lenient, invitation).digest == session.digest
    with pytest.raises(ConfigError, match="policy: delta must be at most"):
        accept(plan, Policy(), invitation)
    few = session_of(make_plan(MechanismName.SHARED), FIRST, COHORT[:3])
    with pytest.raises(PeerError, match="at least 10 clients, got 3"):
        accept(plan, lenient, Advertising(few).outbox[10])


def test_a_private_sum_needs_no_training():
    """A histogram: each client holds one value; the clip of one is exact for one-hot vectors."""
    plan = make_plan(dimension=4, epsilon=50.0, adjacency=Adjacency.ZERO_OUT, sampling=Sampling.NONE)
    vectors = {client: np.eye(4, dtype=np.float32)[client % 4] for client in COHORT}
    diary = Diary()
    total = local_sum(plan, Attempt("histogram", 0, 0), vectors, diary, Entropy.replay(b"sum"))
    assert np.abs(total - sum(vectors.values())).max() < 6 * plan.sigma
    assert [event[0] for event in diary.events] == ["reserve", "commit"]


def test_gather_counts_a_bad_answer_as_a_dropout():
    plan = make_plan(dropouts=0.25)
    session = session_of(plan, FIRST, COHORT)
    machines = {
        c: simulated_participant(plan, c, Entropy.replay(b"round"), {}).join(
            session, lambda _task, _model, c=c: update_of(c)
        )
        for c in COHORT
    }

    def exchange(requests):
        for client, request in requests.items():
            answer = machines[client].receive(request)
            yield client, answer[:-1] if client == 15 else answer

    masked = gather(session, b"model", exchange)
    assert masked.survivors == tuple(client for client in COHORT if client != 15)
