"""Rounds with standing keys: by `aggregate`, with every attempt charged, and simulated in both fidelities."""

from contextlib import suppress
from fractions import Fraction

import numpy as np
import pytest
import torch

import d2pfed
import test_records as records
from d2pfed.errors import ConfigError, PeerError, TooFewClients, VoidStep
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import MechanismName, PrivacyTarget, calibrate, require_standing
from d2pfed.round import Attempt, accept_standing_invitation, aggregate, aggregation, can_stand
from d2pfed.round.standing import StandingRun
from d2pfed.secagg import Consistency
from d2pfed.secagg.standing import epoch as epochs
from d2pfed.secagg.standing import server as standing_server
from d2pfed.secagg.wire import MessageKind, kind_of
from d2pfed.simulation import Dropouts, Fidelity, StandingFederation
from d2pfed.simulation import Silos as SilosBackend
from support.federation import position_of
from support.simulations import Given
from support.standing import Silo, roster_for
from test_round import Diary

SILOS, D = 20, 30


@pytest.fixture(scope="module")
def plan():
    return make_plan()


def make_plan(**changes):
    fields = {
        "dimension": D,
        "population": SILOS,
        "cohort_size": SILOS,
        "rounds": 3,
        "epsilon": 20.0,
        "delta": 1e-3,
        "against": "server",
        "sampling": "none",
        "mechanism": MechanismName.CENTERED,
        "consistency": Consistency.SIGNED,
        "attempts_per_round": 6,
        "colluders": 0.1,
        "dropouts": 0.25,
    }
    return calibrate(PrivacyTarget(**(fields | changes)))


def update_of(client):
    return np.sin(np.arange(D) * (client + 1)).astype(np.float32) / 10


def federation(plan, fidelity=Fidelity.PROTOCOL, lost=(), seed=b"standing", dropouts=None):
    def updates(clients):
        return (None if client in lost else update_of(client) for client in clients)

    return StandingFederation(
        plan=plan,
        run="run",
        backend=Given(updates),
        dropouts=dropouts or Dropouts(),
        fidelity=fidelity,
        entropy=Entropy.replay(seed),
    )


def test_both_fidelities_give_the_same_mean_bit_for_bit(plan):
    means = {}
    for fidelity in Fidelity:
        silos = federation(plan, fidelity)
        means[fidelity] = [
            aggregate(plan, Attempt("run", number, 0), np.zeros(D, np.float32), silos, Diary()).mean
            for number in range(3)
        ]
    for left, right in zip(means[Fidelity.SUM], means[Fidelity.PROTOCOL], strict=True):
        assert np.array_equal(left, right)
    exact = np.mean([update_of(client) for client in range(SILOS)], axis=0)
    assert np.abs(means[Fidelity.SUM][0] - exact).max() < 6 * plan.sigma / SILOS + 0.05
    assert not np.array_equal(means[Fidelity.SUM][0], means[Fidelity.SUM][1])  # fresh noise and rotation


@pytest.mark.parametrize("fidelity", list(Fidelity))
def test_a_void_attempt_stays_charged_and_the_rest_go_on(plan, fidelity):
    diary, silos = Diary(), federation(plan, fidelity, lost=(3,))
    outcome = aggregate(plan, Attempt("run", 0, 0), np.zeros(D, np.float32), silos, diary)
    assert (outcome.attempt, outcome.survivors) == (1, SILOS - 1)
    assert [event[:2] for event in diary.events] == [("reserve", 0), ("reserve", 1), ("commit", 1)]
    assert diary.events[-1][2] == tuple(client for client in range(SILOS) if client != 3)


def test_the_pairwise_rule_would_give_back_a_void_steps_charge(plan, monkeypatch):
    """The planted twin: a void step taken for an attempt that nothing can complete any more."""
    monkeypatch.setattr(aggregation, "VoidStep", type("Never", (Exception,), {}))
    diary = Diary()
    aggregate(plan, Attempt("run", 0, 0), np.zeros(D, np.float32), federation(plan, lost=(3,)), diary)
    assert ("void", 0) in diary.events


@pytest.mark.parametrize("fidelity", list(Fidelity))
def test_with_fewer_than_a_quorum_left_a_round_fails(plan, fidelity):
    silos = federation(plan, fidelity, lost=range(SILOS - plan.quorum + 1))
    with pytest.raises(TooFewClients, match="must be there"):
        aggregate(plan, Attempt("run", 0, 0), np.zeros(D, np.float32), silos, Diary())


def test_random_dropouts_give_the_same_rounds_in_both_fidelities():
    plan = make_plan(spare=15)  # each silo may send a vector in every attempt of the three rounds
    dropouts, seen = Dropouts(masked=Fraction(1, 60)), {}
    for fidelity in Fidelity:
        silos = federation(plan, fidelity, dropouts=dropouts)
        outcomes = [
            aggregate(plan, Attempt("run", number, 0), np.zeros(D, np.float32), silos, Diary())
            for number in range(3)
        ]
        seen[fidelity] = [(o.attempt, o.survivors, o.mean.tobytes()) for o in outcomes]
    assert seen[Fidelity.SUM] == seen[Fidelity.PROTOCOL]
    assert any(attempt for attempt, *_ in seen[Fidelity.SUM])


def test_presence_is_asked_for_only_after_a_void_attempt(plan):
    silos, asked = federation(plan), []
    kept = silos._standing.presence
    silos._standing.presence = lambda *given: asked.append(1) or kept(*given)
    for number in range(2):
        aggregate(plan, Attempt("run", number, 0), np.zeros(D, np.float32), silos, Diary())
    assert not asked
    silos.backend = federation(plan, lost=(5,)).backend
    aggregate(plan, Attempt("run", 2, 0), np.zeros(D, np.float32), silos, Diary())
    assert asked


def test_a_silo_that_comes_back_without_keys_gets_a_new_epoch(plan):
    silos = federation(plan)
    aggregate(plan, Attempt("run", 0, 0), np.zeros(D, np.float32), silos, Diary())
    silos._silos[4].store.state = None
    silos._silos[4].epoch = None
    outcome = aggregate(plan, Attempt("run", 1, 0), np.zeros(D, np.float32), silos, Diary())
    assert silos._standing.epochs == 1
    assert (outcome.attempt, outcome.survivors) == (1, SILOS - 1)  # lost for the rest of its round
    outcome = aggregate(plan, Attempt("run", 2, 0), np.zeros(D, np.float32), silos, Diary())
    assert silos._standing.epochs == 2
    assert (outcome.attempt, outcome.survivors) == (0, SILOS)


class Heard:
    """Silos that keep a log, and a run of standing keys that hears them."""

    def __init__(self, plan, forgetful=()):
        self.plan, self.roster = plan, roster_for(range(SILOS))
        self.silos = {client: Silo(client, self.roster) for client in range(SILOS)}
        self.forgetful = forgetful  # they throw away where others say that they stood
        self.lost = ()

    def run(self, **changes) -> StandingRun:
        return StandingRun(
            plan=self.plan,
            run="run",
            roster=self.roster,
            silos=self.roster.clients,
            exchange=self.exchange,
            presence=lambda asked, _epoch: dict.fromkeys(asked, True),
            **changes,
        )

    def exchange(self, requests):
        for client, request in requests.items():
            if client not in self.lost:
                with suppress(PeerError):  # it refuses, and no answer comes
                    yield client, self.answer(self.silos[client], request)

    def answer(self, silo, request):
        match MessageKind(kind_of(request)):
            case MessageKind.STANDING_INVITATION:
                epoch = accept_standing_invitation(self.plan, request, self.roster)
                if silo.client in self.forgetful:
                    request = epochs.encode_invitation(epoch, epoch.rank(silo.client), self.roster.serial, None)
                return silo.invite(epoch, request)
            case MessageKind.STANDING_ADVERTS:
                return silo.agree(request)
            case _:
                return silo.answer(request)


def test_a_run_counts_all_attempts_and_those_that_were_void(plan):
    heard, counted = Heard(plan), []
    run = heard.run()
    for number, lost in enumerate([(), (3,), (3,)]):
        attempt, heard.lost = Attempt("run", number, 0), lost
        with suppress(VoidStep):
            run.collect(run.step(attempt, run.members(attempt)), b"model")
        counted.append((run.attempts, run.void))
    assert counted == [(1, 0), (2, 1), (3, 2)]


def test_a_silo_restored_since_it_joined_is_left_out(plan):
    """By the server's memory alone: no peer remembers it."""
    heard, told = Heard(plan), {}
    first = heard.run(remember=told.update)
    assert first.members(Attempt("run", 0, 0)) == tuple(range(SILOS))
    assert first.remembered == told == {client: position_of(client, 2, heard.roster) for client in range(SILOS)}
    for silo in heard.silos.values():
        silo.known.clear()
    heard.silos[3].count = 0  # its home was put back
    again = heard.run(remembered=told)
    assert again.members(Attempt("run", 1, 0)) == tuple(client for client in range(SILOS) if client != 3)


def without(client):
    return tuple(other for other in range(SILOS) if other != client)


@pytest.mark.parametrize("peers", [(8,), without(3)], ids=["one peer", "all peers"])
def test_a_silo_that_shows_older_rows_is_left_out_and_named(plan, monkeypatch, peers):
    """Its peers have met it later on and the server has not; it comes all the same, whatever it is told."""
    heard, named = Heard(plan, forgetful=(3,)), {}
    for peer in peers:
        heard.silos[peer].known[3] = position_of(3, 50, heard.roster)
    run = heard.run(refused=lambda client, error: named.update({client: str(error)}))
    assert run.members(Attempt("run", 0, 0)) == without(3)
    assert run.epochs == 2
    assert run.remembered[3].count == 50
    assert named[3].startswith("client 3 is left out: it shows row 3 of its log and was met at row 50")
    monkeypatch.setattr(standing_server, "require_later_position", lambda *_: None)
    if len(peers) > SILOS - plan.quorum:
        with pytest.raises(TooFewClients):
            heard.run().members(Attempt("run", 1, 0))
    else:
        assert heard.run().members(Attempt("run", 1, 0)) == without(8)


def test_silos_that_come_late_with_older_rows_do_not_stop_a_set_up(plan):
    """Two of them, each first heard of in a later set-up than the one before."""
    heard = Heard(plan, forgetful=(3, 4))
    late = {3: 1, 4: 2}
    for peer in range(5, SILOS):
        heard.silos[peer].known |= {client: position_of(client, 50, heard.roster) for client in late}
    run = heard.run()
    run.note_epochs = lambda number: setattr(heard, "lost", [each for each in late if late[each] > number])
    assert run.members(Attempt("run", 0, 0)) == tuple(client for client in range(SILOS) if client not in late)
    assert run.epochs == 3


def claiming(heard, claim):
    """Have silo 8 say in every set-up that it has met silo 3 where `claim` says, given the adverts."""
    answer = heard.answer

    def lie(silo, request):
        if silo.client == 8 and kind_of(request) == MessageKind.STANDING_ADVERTS:
            epoch = silo.epoch
            adverts = epochs.decode_adverts(epoch, epoch.rank(8), request)
            return epochs.encode_claims(epoch, epoch.rank(8), {epoch.rank(3): claim(adverts[epoch.rank(3)])})
        return answer(silo, request)

    heard.answer = lie
    return heard


def test_an_old_position_of_an_honest_silo_keeps_nobody_out_but_the_liar(plan, monkeypatch):
    heard, named = claiming(Heard(plan), lambda advert: position_of(3, 1, roster_for(range(SILOS)))), {}
    run = heard.run(refused=lambda client, error: named.update({client: str(error)}))
    assert run.members(Attempt("run", 0, 0)) == without(8)
    assert run.epochs == 1
    assert "a row that it does not go beyond, got 1" in named[8]
    monkeypatch.setattr(standing_server, "require_current_claim", lambda *_: None)
    again = heard.run()
    again.members(Attempt("run", 1, 0))
    assert again.epochs == 2  # held up


def test_the_position_that_a_silo_has_just_shown_is_no_proof_against_it(plan):
    heard = claiming(Heard(plan), lambda advert: advert.position)
    run = heard.run()
    assert run.members(Attempt("run", 0, 0)) == without(8)
    assert run.epochs == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism": "shared", "colluders": 0}, "takes the mechanism centered"),
        ({"population": 40, "against": "released", "sampling": "fixed"}, "takes sampling none"),
        ({"population": 40, "against": "released"}, "all silos of a roster in every round"),
        ({"attempts_per_round": 9}, "1 to 8 attempts"),
    ],
)
def test_plans_that_standing_keys_cannot_carry_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        require_standing(make_plan(**changes), SILOS)


def test_record_silos_send_equal_vectors_in_both_fidelities():
    record_plan = calibrate(records.target(dimension=records.network().dimension, records=126))
    params, means = records.network().initial(), []
    for fidelity in Fidelity:
        silos = StandingFederation(
            plan=record_plan,
            run="run",
            backend=SilosBackend(records.trainer()),
            dropouts=Dropouts(),
            fidelity=fidelity,
            entropy=Entropy.replay(b"records"),
        )
        means.append(aggregate(record_plan, Attempt("run", 0, 0), params, silos, Diary()).mean)
    assert np.array_equal(*means)


def test_fit_with_the_unit_record_has_standing_keys(monkeypatch, tmp_path):
    made = []
    kept = StandingFederation.__post_init__
    monkeypatch.setattr(StandingFederation, "__post_init__", lambda self: made.append(self.fidelity) or kept(self))
    torch.manual_seed(1)
    data = [(torch.randn(40, 3), torch.randint(0, 2, (40,))) for _ in range(4)]
    result = d2pfed.fit(
        torch.nn.Linear(3, 2),
        data,
        privacy=d2pfed.PrivacyTarget(unit="record", epsilon=8.0, against="server", records=160),
        rounds=2,
        directory=tmp_path / "run",
    )
    assert made == [Fidelity.SUM]
    assert result.guarantees


@pytest.mark.parametrize(("silos", "stands"), [(128, True), (129, False)])
def test_standing_keys_carry_128_silos_and_no_more(silos, stands):
    assert can_stand(make_plan(population=silos, cohort_size=silos)) is stands
