"""Each step of a round by itself, with scripted attempts and a ledger that writes down what it hears."""

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

from d2pfed.accounting import BatchSampling
from d2pfed.errors import BudgetExceeded, ConfigError, PeerError, TooFewClients, VoidStep
from d2pfed.noise.clipping import Weighting, with_clip
from d2pfed.noise.codec import Codec
from d2pfed.noise.mechanisms import DDGauss, Shared
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import Plan, PrivacyTarget, calibrate, require_standing
from d2pfed.round import Attempt, Participant, aggregate, local_sum, run_plan, session_of
from d2pfed.round.aggregation import Outcome, gather, run_exchange
from d2pfed.round.local_sums import Fidelity, _LocalVectors
from d2pfed.round.participant import Batch, Batches, require_clip, require_fixed_clip, toss
from d2pfed.round.session import (
    accept_invitation,
    delivery_of,
    enrolled_in,
    epoch_of,
    require_draw_by_number,
    require_planned_number,
    rotation_seed,
    sketch_of,
)
from d2pfed.round.standing import StandingMemory, StandingRun, StandingSteps, can_stand
from d2pfed.secagg import Delivery, Sum
from d2pfed.secagg.roster import NO_ROSTER
from support.rosters import roster_of
from support.simulations import NO_MODEL

D = 6


@cache
def make(**changes: object) -> Plan:
    wish = {"dimension": D, "population": 100, "cohort_size": 10, "rounds": 3, "epsilon": 20.0, "delta": 1e-3}
    return calibrate(PrivacyTarget(**(wish | {"attempts_per_round": 4} | changes)))


@dataclass
class Book:
    """A ledger that writes down what it hears; `before` says how often clients took part."""

    before: dict = field(default_factory=dict)
    heard: list = field(default_factory=list)

    def require_plan(self, run, plan):
        self.heard.append(("plan", run, plan))

    def participations(self, run, clients):
        self.heard.append(("asked", run, tuple(clients)))
        return {client: self.before.get(client, 0) for client in clients}

    def reserve(self, release):
        self.heard.append(("reserve", release.round, release.attempt, release.participants, release.noise))

    def commit(self, release):
        self.heard.append(("commit", release.round, release.attempt, release.participants, release.noise))

    def void(self, run, number, attempt):
        self.heard.append(("void", run, number, attempt))

    @property
    def kinds(self) -> list[str]:
        return [each[0] for each in self.heard if each[0] not in ("plan", "asked")]

    def of(self, kind: str) -> list[tuple]:
        return [each[1:] for each in self.heard if each[0] == kind]


@dataclass
class Opened:
    survivors: tuple[int, ...]
    vector: np.ndarray
    error: Exception | None = None

    def unmask(self) -> Sum:
        if self.error is not None:
            raise self.error
        return Sum(self.vector, ())


@dataclass
class Scripted:
    """Attempts whose outcomes are given in turn: an error, or who survived and what the sum was."""

    plan: Plan
    outcomes: list
    cohorts: list | None = None
    asked: list = field(default_factory=list)

    def draw(self, attempt):
        if self.cohorts is not None:
            return self.cohorts[len(self.asked)]
        return tuple(range(self.plan.cohort_size))

    def bind(self, attempt, cohort):
        return session_of(self.plan, attempt, cohort)

    def collect(self, session, model, participations):
        self.asked.append((session.attempt, session.cohort, dict(participations)))
        outcome = self.outcomes[len(self.asked) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def sums(plan: Plan, total: int) -> np.ndarray:
    """A sum whose coordinates all differ, so that none is taken for another."""
    return total * (np.arange(1, plan.codec.length + 1, dtype=np.int64) ** 2 % 7 - 2)


def opened(plan: Plan, survivors: int = 10, total: int = 0, error: Exception | None = None) -> Opened:
    return Opened(tuple(range(survivors)), plan.ring.wrap(sums(plan, total)), error)


def run(plan: Plan, outcomes: list, first: int = 0, book: Book | None = None, **changes: object):
    book, attempts = book or Book(), Scripted(plan, outcomes, **changes)
    return aggregate(plan, Attempt("run", 1, first), NO_MODEL, attempts, book), book, attempts


# ---- the server's loop


def test_a_round_reserves_for_a_quorum_and_commits_for_survivors():
    plan = make(dropouts=0.2)
    outcome, book, attempts = run(plan, [opened(plan, 9)])
    assert book.heard[0] == ("plan", "run", plan.digest)
    assert book.kinds == ["reserve", "commit"]
    ((number, attempt, asked, least),) = book.of("reserve")
    assert (number, attempt, asked, least) == (1, 0, tuple(range(10)), plan.noise(plan.quorum))
    ((_, _, came, noise),) = book.of("commit")
    assert (came, noise) == (tuple(range(9)), plan.noise(9))
    assert (outcome.attempt, outcome.survivors, outcome.clipping) == (0, 9, None)
    assert attempts.asked[0][2] == dict.fromkeys(range(10), 0)


def test_the_mean_divides_the_decoded_sum_by_the_planned_cohort():
    plan = make(dropouts=0.2)
    outcome, _, attempts = run(plan, [opened(plan, 9, 5)])
    session = session_of(plan, Attempt("run", 1, 0), attempts.asked[0][1])
    whole = plan.codec.decode(sums(plan, 5), rotation_seed(session), 1)
    np.testing.assert_allclose(outcome.mean, whole / 10, rtol=1e-5, atol=1e-6)


def test_every_attempt_of_a_round_is_tried_and_no_other():
    plan = make(dropouts=0.2)
    lack = [TooFewClients("few", (1, 2)) for _ in range(9)]
    book = Book()
    with pytest.raises(TooFewClients, match="round 2 failed in all of its 4 attempts"):
        run(plan, lack, book=book)
    assert book.kinds == ["reserve", "void"] * 4
    assert [each[2] for each in book.of("void")] == [0, 1, 2, 3]
    later, book, _ = run(plan, [lack[0], opened(plan)], first=2)
    assert later.attempt == 3
    assert book.of("void") == [("run", 1, 2)]


def test_what_was_asked_to_open_stays_charged_and_the_next_attempt_follows():
    plan = make(dropouts=0.2)
    outcome, book, _ = run(plan, [opened(plan, error=TooFewClients("shares", ())), opened(plan)])
    assert outcome.attempt == 1
    assert book.kinds == ["reserve", "commit", "reserve", "commit"]
    assert len(book.of("asked")) == 2  # participations are counted anew


def records_plan() -> Plan:
    return make(
        unit="record", population=5, cohort_size=5, records=100, batch_rate=0.25, sampling="none", colluders=0.2
    )


def test_with_standing_keys_nothing_is_given_back():
    plan = records_plan()
    assert plan.protocol == "standing"
    _, book, _ = run(plan, [VoidStep("late", (1,)), TooFewClients("few", (1,)), opened(plan, 5)])
    assert book.kinds == ["reserve", "reserve", "reserve", "commit"]


def test_where_every_vector_counts_those_who_were_left_go_on():
    plan = make(mechanism="shared", sampling="none")
    everyone = tuple(range(10))
    _, _, attempts = run(plan, [TooFewClients("lost", (0, 3, 4)), opened(plan)])
    assert [asked[1] for asked in attempts.asked] == [everyone, (0, 3, 4)]
    # Not with one client alone, not if others were drawn, and not after a further success or failure.
    _, _, attempts = run(plan, [TooFewClients("lost", (3,)), opened(plan)])
    assert attempts.asked[1][1] == everyone
    _, _, attempts = run(plan, [TooFewClients("lost", (3, 4)), opened(plan)])
    assert attempts.asked[1][1] == (3, 4)
    others = tuple(range(20, 30))
    _, _, attempts = run(plan, [TooFewClients("lost", (0, 3)), opened(plan)], cohorts=[everyone, others])
    assert attempts.asked[1][1] == others
    lacks = [TooFewClients("lost", (0, 3, 4)), TooFewClients("lost", ()), opened(plan)]
    _, _, attempts = run(plan, lacks)
    assert [asked[1] for asked in attempts.asked] == [everyone, (0, 3, 4), everyone]
    central = make(dropouts=0.2)
    _, _, attempts = run(central, [TooFewClients("lost", (0, 3, 4)), opened(central)])
    assert attempts.asked[1][1] == everyone


def test_under_once_nobody_is_asked_twice():
    plan = make(sampling="once", population=400)
    with pytest.raises(ConfigError, match="uses each client once, and client 3 has contributed already"):
        run(plan, [opened(plan)], book=Book({3: 1}))
    _, _, attempts = run(make(sampling="none"), [opened(plan)], book=Book({3: 1}))
    assert attempts.asked[0][2][3] == 1


def test_a_run_is_charged_all_attempts_with_a_quorums_noise():
    plan = make(dropouts=0.2, max_participations=2)
    charge = run_plan(plan)
    assert (charge.plan, charge.rounds, charge.max_attempts) == (plan.digest, 3, plan.max_attempts)
    assert (charge.attempts_per_round, charge.max_participations) == (4, 2)
    assert (charge.epsilon, charge.delta, charge.observer) == (plan.epsilon, plan.delta, plan.against)
    assert charge.release == plan.release("", 0, 0, (), plan.quorum)
    assert run_plan(records_plan()).max_participations == 1


def weighted_plan() -> Plan:
    return replace(make(dimension=D + 1, dropouts=0.2, sampling="none"), weighting=Weighting.balanced(4.0, 1.0, D))


def test_a_weighted_mean_is_told_the_noise_of_its_survivors():
    plan = weighted_plan()
    outcome, _, _ = run(plan, [opened(plan, 9, 5)])
    session = session_of(plan, Attempt("run", 1, 0), tuple(range(10)))
    whole = plan.codec.decode(sums(plan, 5), rotation_seed(session), 10)
    noise = math.sqrt(plan.noise(9).sum_variance) * plan.codec.granularity / 10
    np.testing.assert_allclose(outcome.mean, plan.weighting.mean(whole, noise), rtol=1e-5, atol=1e-6)
    assert (len(outcome.mean), outcome.survivors) == (D, 9)
    # A total weight that the noise drowns is taken to be three times it: there the noise counts.
    outcome, _, _ = run(plan, [opened(plan, 9, 0)])
    np.testing.assert_allclose(outcome.mean, plan.weighting.mean(whole * 0, noise), rtol=1e-5, atol=1e-6)


def test_an_adaptive_clip_scales_the_mean_and_steps_from_its_bit():
    plan = make(clip="auto", dropouts=0.2)
    attempts = Scripted(plan, [opened(plan, 10, 3)])
    with pytest.raises(ConfigError, match="Scripted tells its clients no clip"):
        aggregate(plan, Attempt("run", 1, 0), NO_MODEL, attempts, Book(), clip=0.5)
    with pytest.raises(PeerError, match="came without its clip"):
        aggregate(plan, Attempt("run", 1, 0), NO_MODEL, attempts, Book())

    @dataclass
    class Clipped(Scripted):
        clip: float = 0.0

        def with_clip(self, clip):
            return Clipped(self.plan, self.outcomes, self.cohorts, self.asked, clip)

    outcome = aggregate(
        plan, Attempt("run", 1, 0), NO_MODEL, Clipped(plan, [opened(plan, 10, 3)]), Book(), clip=0.5
    )
    session = session_of(plan, Attempt("run", 1, 0), tuple(range(10)))
    whole = plan.codec.decode(sums(plan, 3), rotation_seed(session), 10)
    np.testing.assert_allclose(outcome.mean, whole[:-1] * np.float32(0.5), rtol=1e-5, atol=1e-6)
    assert outcome.clipping == plan.adaptive_clip.step(0.5, float(whole[-1]))


# ---- sessions


def test_whose_vectors_count_follows_from_the_mechanism():
    plan = make()
    sigma = Fraction(50)
    for mechanism, delivery in (
        (plan.mechanism, Delivery.QUORUM),
        (DDGauss(sigma), Delivery.QUORUM),
        (Shared(sigma), Delivery.EVERYONE),
    ):
        assert delivery_of(replace(plan, mechanism=mechanism)) is delivery


def test_a_session_has_the_plans_sizes_or_those_of_a_complete_graph():
    plan = make(dropouts=0.2, sampling="none")
    attempt, everyone = Attempt("run", 2, 1), tuple(range(10))
    session = session_of(plan, attempt, everyone)
    assert (session.run, session.round, session.attempt, session.cohort) == ("run", 2, 1, everyone)
    assert (session.plan_digest, session.roster_digest, session.draw, session.block) == (
        plan.digest,
        NO_ROSTER,
        0,
        0,
    )
    assert (session.quorum, session.threshold) == (plan.quorum, plan.threshold)
    assert (session.dimension, session.bits, session.colluders) == (
        plan.codec.length,
        plan.ring.bits,
        plan.colluders,
    )
    for size in (9, 11):
        with pytest.raises(PeerError, match=f"must have the planned 10 clients, got {size}"):
            session_of(plan, attempt, tuple(range(size)))
    fewer = session_of(replace(plan, mechanism=Shared(Fraction(50))), attempt, tuple(range(7)))
    assert (fewer.threshold, fewer.quorum) == (4, 7)
    guarded = replace(plan, mechanism=Shared(Fraction(50)), colluders=4)
    assert session_of(guarded, attempt, tuple(range(6))).threshold == 5
    sketch = sketch_of(plan)
    assert (sketch.cohort, sketch.roster_digest, sketch.round, sketch.attempt) == (everyone, NO_ROSTER, 0, 0)


def test_a_rotation_is_fresh_for_plan_run_round_and_attempt():
    plan = make()
    everyone = tuple(range(10))
    sessions = [
        session_of(each, Attempt(run, number, attempt), everyone)
        for each in (plan, replace(plan, rounds=2, max_attempts=plan.max_attempts))
        for run in ("a", "b")
        for number in (0, 1)
        for attempt in (0, 1)
    ]
    assert len({rotation_seed(each) for each in sessions}) == 16


# ---- the client's half


def contribution(plan: Plan, participations: int, update: np.ndarray, clip: float | None = None) -> np.ndarray:
    session = session_of(plan, Attempt("run", 0, 0), tuple(range(plan.cohort_size)))
    own = Participant(plan=plan, client=3, entropy=Entropy.replay(b"x"), participations=participations)
    return plan.ring.center(own.encode(session, update, None, clip))


def test_below_its_cap_a_client_sends_its_vector_and_from_it_on_zero():
    plan = make(max_participations=2, sampling="none")
    full, zero = np.full(D, 0.4, np.float32), np.zeros(D, np.float32)
    silent = contribution(plan, 0, zero)
    assert not np.array_equal(contribution(plan, 1, full), silent)
    np.testing.assert_array_equal(contribution(plan, 2, full), silent)
    np.testing.assert_array_equal(contribution(plan, 3, full), silent)


def test_two_clients_with_one_root_of_randomness_have_noise_of_their_own():
    plan = make()
    session = session_of(plan, Attempt("run", 0, 0), tuple(range(plan.cohort_size)))
    vectors = [
        Participant(plan=plan, client=client, entropy=Entropy.replay(b"x"), participations=0).encode(
            session, np.zeros(D, np.float32), None
        )
        for client in (3, 4)
    ]
    assert not np.array_equal(*vectors)


def test_an_update_has_the_plans_length_and_kind():
    plan = make(sampling="none")
    for length in (D - 1, D + 1):
        with pytest.raises(ConfigError):
            contribution(plan, 0, np.zeros(length, np.float32))
    with pytest.raises(ConfigError, match="takes a silo's records, got a single vector"):
        contribution(records_plan(), 0, np.zeros(D, np.float32))
    weighted = weighted_plan()
    assert contribution(weighted, 0, np.zeros(D + 1, np.float32)).shape == (weighted.codec.length,)
    with pytest.raises(ConfigError):
        contribution(weighted, 0, np.zeros(D, np.float32))


def test_a_clip_of_the_round_goes_with_an_adaptive_plan_and_with_no_other():
    fixed, adaptive = make(), make(clip="auto")
    require_clip(fixed, None)
    require_clip(adaptive, 0.5)
    require_fixed_clip(fixed, "this")
    with pytest.raises(ConfigError, match=r"the plan's clip is fixed, so a round has none of its own, got 0\.5"):
        require_clip(fixed, 0.5)
    with pytest.raises(PeerError, match="came without its clip"):
        require_clip(adaptive, None)
    for clip in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(PeerError):
            require_clip(adaptive, clip)
    with pytest.raises(ConfigError, match="this takes a fixed clip only"):
        require_fixed_clip(adaptive, "this")


def test_a_silo_at_its_cap_draws_from_nothing():
    plan = records_plan()
    session = session_of(plan, Attempt("run", 0, 0), tuple(range(5)))
    for participations, is_silent in ((plan.max_participations - 1, False), (plan.max_participations, True)):
        silos = [
            Participant(plan=plan, client=client, entropy=Entropy.replay(b"x"), participations=participations)
            for client in range(40)  # so that a single unit would be drawn by some of them
        ]
        assert (max(len(own.batch(session, 200).chosen) for own in silos) == 0) is is_silent


def test_coins_have_their_rate_at_both_ends_of_their_words():
    class Words:
        def fill(self, words):
            words[:] = [0, 2**30 - 1, 2**30, 2**30 + 1, 2**32 - 1]

    assert toss(BatchSampling(Fraction(1, 4)), 5, Words()).tolist() == [0, 1]
    assert toss(BatchSampling(Fraction(1)), 5, Words()).tolist() == [0, 1, 2, 3, 4]
    assert toss(BatchSampling(Fraction(1, 2**32)), 5, Words()).tolist() == [0]


def test_batches_of_several_silos_keep_their_own_sums():
    plan = records_plan()
    session = session_of(plan, Attempt("run", 0, 0), tuple(range(5)))
    seed = rotation_seed(session)
    drawn = [Batch.draw(plan, seed, 9, Entropy.replay(bytes([name]))) for name in b"ab"]
    rows = np.eye(3, D, dtype=np.float32) * 0.3
    together = Batches.of(drawn)
    together.add(np.array([0, 1, 1]), rows)
    for at, batch in enumerate(drawn):
        alone = Batches.of([batch])
        own = rows[:1] if at == 0 else rows[1:]
        alone.add(np.zeros(len(own), np.int64), own)
        np.testing.assert_array_equal(alone.each[0].total, together.each[at].total)
        assert together.each[at].total.any()
    with pytest.raises(ConfigError, match="of one attempt, got several seeds"):
        Batches.of([drawn[0], replace(drawn[1], seed=b"other")])
    with pytest.raises(ConfigError, match="is for the unit record, the plan has the unit client"):
        Batch.draw(make(), seed, 9, Entropy.replay(b"a"))


# ---- invitations


@dataclass(frozen=True)
class Invited:
    round: int = 0
    attempt: int = 0
    draw: int = 0
    block: int = 0
    cohort: tuple[int, ...] | None = (1, 2)
    opening: object = None


def test_attempts_and_draws_are_those_of_the_plan():
    plan = make(sampling="fixed")
    require_planned_number(plan, Invited(2, 3))
    for invited in (Invited(3, 0), Invited(0, 4), Invited(3, 4)):
        with pytest.raises(PeerError, match="a plan of 3 rounds with 4 attempts each has no round"):
            require_planned_number(plan, invited)
    require_draw_by_number(plan, Invited(2, 3, 5 + 2 * 4 + 3), 5)
    for draw in (5, 5 + 2 * 4 + 2, 5 + 2 * 4 + 4):
        with pytest.raises(PeerError, match="round 3, attempt 3 is of draw 16"):
            require_draw_by_number(plan, Invited(2, 3, draw), 5)
    once = make(sampling="once", population=400)
    require_draw_by_number(once, Invited(2, 3, 5), 5)
    with pytest.raises(PeerError, match="is of draw 5, got 16"):
        require_draw_by_number(once, Invited(2, 3, 16), 5)


def test_a_listed_cohort_has_no_draw():
    decoded = "d2pfed.round.session.read_invitation"
    for invited in (Invited(draw=1), Invited(block=1)):
        with patch(decoded, lambda *_, invited=invited: invited), pytest.raises(PeerError, match="not drawn here"):
            accept_invitation(make(), b"", 0)
    with patch(decoded, lambda *_: Invited(cohort=None)), pytest.raises(PeerError, match="got 0"):
        accept_invitation(make(), b"", 1)


def test_four_rosters_are_counted_on():
    @dataclass(frozen=True)
    class Roster:
        depth: int | None
        clients: tuple = (1, 2, 3)

    assert enrolled_in(None) is None
    for depth, draws in ((None, 0), (0, 4), (5, 4 * 32)):
        found = enrolled_in(Roster(depth))
        assert (found.population, found.draws) == (3, draws)


# ---- sums of given vectors, and standing keys


def test_a_drawn_cohort_needs_its_opening():
    with (
        patch("d2pfed.round.session.read_invitation", lambda *_: Invited()),
        pytest.raises(PeerError, match="needs the opening of its draw"),
    ):
        accept_invitation(make(sampling="fixed"), b"", 0, SimpleNamespace(depth=3))


def test_who_answers_badly_is_told_and_the_others_count():
    heard, received = [], []

    class Phase:
        def outbox(self):
            return {1: b"asked", 2: b"asked"}

        def receive(self, client, data):
            if data == b"bad":
                raise PeerError("bad")
            received.append(client)

    run_exchange(Phase(), lambda _outbox: [(1, b"bad"), (2, b"good")], lambda *told: heard.append(told))
    assert [(client, str(error)) for client, error in heard] == [(1, "bad")]
    assert received == [2]


def test_shared_noise_passes_the_protocol_at_every_fidelity():
    """A share needs the group's seed, which exists only between clients that have exchanged."""
    plan = make(sampling="none", population=10, mechanism="shared", epsilon=1e4, dropouts=0.0)
    vectors = {client: np.full(D, 0.05, np.float32) for client in range(10)}
    found = [
        local_sum(plan, Attempt("run", 0, 0), vectors, Book(), Entropy.replay(b"a"), fidelity=fidelity)
        for fidelity in (Fidelity.SUM, Fidelity.PROTOCOL)
    ]
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0], 0.5, atol=0.2)


def test_vectors_are_in_no_traceback():
    given = _LocalVectors(make(), {0: np.full(D, 0.123, np.float32)}, Entropy.system(), Fidelity.SUM)
    assert "0.123" not in repr(given)
    outcome = Outcome(np.full(D, 0.123), attempt=1, survivors=9)
    assert repr(outcome) == "Outcome(attempt=1, survivors=9, clipping=None, failures=None)"


def test_a_local_sum_is_over_two_clients_to_the_planned_and_of_no_draw():
    plan = make(sampling="none", population=10)
    vectors = {client: np.zeros(D, np.float32) for client in range(11)}
    for count in (0, 1, 11):
        with pytest.raises(ConfigError, match=f"a sum is over 2 clients to the planned 10, got {count}"):
            local_sum(plan, Attempt("run", 0, 0), dict(list(vectors.items())[:count]), Book(), Entropy.system())
    drawn = make(sampling="fixed", population=11)
    with pytest.raises(ConfigError, match="sampling none or once, or of everyone, got fixed, 10 of 11"):
        local_sum(drawn, Attempt("run", 0, 0), vectors, Book(), Entropy.system())


def test_what_standing_keys_cannot_carry_is_refused():
    plan = records_plan()
    require_standing(plan, plan.cohort_size)
    assert can_stand(plan)
    with pytest.raises(ConfigError, match="takes sampling none, the plan has fixed"):
        require_standing(make(sampling="fixed"), 100)
    part = make(sampling="none")
    for enrolled in (10, 100):
        with pytest.raises(
            ConfigError, match=f"all silos of a roster in every round, got 10 of 100 and .* {enrolled}"
        ):
            require_standing(part, enrolled)
    assert not can_stand(part)
    with pytest.raises(ConfigError, match="all silos of a roster in every round"):
        epoch_of(part, "run", roster_of({client: bytes([client]) * 32 for client in range(10)}), (0, 1, 2))
    with pytest.raises(ConfigError, match="takes the mechanism centered, ddgauss, skellam, the plan has shared"):
        require_standing(make(mechanism="shared", sampling="none", population=10), 10)


def test_a_silos_steps_are_charged_once_and_up_to_their_number():
    @dataclass(frozen=True)
    class Step:
        number: int

    steps = StandingSteps(2)
    steps.charge(Step(0))
    with pytest.raises(PeerError):
        steps.charge(Step(0))
    steps.charge(Step(5))
    with pytest.raises(PeerError, match="has sent 2 vectors in this run, its plan allows 2"):
        steps.charge(Step(6))
    assert steps.charged == {0, 5}
    memory = StandingMemory()
    assert memory.read() is None
    with pytest.raises(PeerError, match="has no standing keys"):
        memory.advance(lambda state: (state, 1))
    memory.state = "one"
    assert memory.advance(lambda state: (state + "two", 7)) == 7
    assert memory.read() == "onetwo"


def test_a_vector_with_a_bit_or_a_weight_is_dithered_and_no_other(monkeypatch):
    kept, seen = Codec.prepare, []
    monkeypatch.setattr(Codec, "prepare", lambda self, v, s, d: seen.append(d is not None) or kept(self, v, s, d))
    adaptive = make(clip="auto", population=10, sampling="none")
    for plan, length, clip in ((make(), D, None), (weighted_plan(), D + 1, None), (adaptive, D, 1.0)):
        contribution(plan, 0, np.full(length, 0.1, np.float32), clip)
    assert seen == [False, True, True]
    with pytest.raises(ConfigError, match="clip"):
        contribution(make(), 0, np.zeros(D, np.float32), 1.0)


def test_a_dither_has_a_stream_of_its_own(monkeypatch):
    taken, right = [], Entropy.stream
    monkeypatch.setattr(Entropy, "stream", lambda self: taken.append(self.key) or right(self))
    adaptive = make(clip="auto", mechanism="ddgauss", population=10, sampling="none")
    contribution(adaptive, 0, np.full(D, 0.1, np.float32), 1.0)
    assert len(taken) == len(set(taken)) == 3  # dither, rounding, noise


def test_a_client_trains_with_the_task_and_without_the_clip_before_it():
    adaptive = make(clip="auto", population=10, sampling="none", dropouts=0.2)
    session, told = session_of(adaptive, Attempt("run", 0, 0), tuple(range(10))), []

    def train(task, model):
        told.append((task, model))
        return np.full(D, 0.1, np.float32)

    machines = {
        client: Participant(
            plan=adaptive, client=client, entropy=Entropy.replay(bytes([client])), participations=0
        ).join(session, train)
        for client in session.cohort
    }
    task = with_clip(b"settings", 1.0)
    gather(
        session, b"model", lambda asked: ((each, machines[each].receive(asked[each])) for each in asked), task=task
    )
    assert told == [(b"settings", b"model")] * 10


def test_an_epoch_begins_at_the_step_of_its_attempt():
    """Steps of all rounds are counted in one line, attempts within a round one by one."""
    asked = []
    plan = records_plan()
    wanted = set(range(plan.cohort_size))
    run = SimpleNamespace(plan=plan, run="run", roster=None, epochs=0, _wanted=wanted, _current=None)
    with patch("d2pfed.round.standing.epoch_of", lambda *_, first, **__: asked.append(first) or 1 / 0):
        for number, attempt in ((0, 0), (2, 1)):
            with pytest.raises(ZeroDivisionError):
                StandingRun.members(run, Attempt("run", number, attempt))
    assert asked == [0, 2 * plan.attempts_per_round + 1]


def test_a_run_that_may_spend_more_than_it_guarantees_is_refused():
    charge = run_plan(make())
    charge.require_guarantee()
    with pytest.raises(BudgetExceeded, match="and it guarantees"):
        replace(charge, epsilon=charge.epsilon / 2).require_guarantee()
