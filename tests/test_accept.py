"""Which invitations a client accepts: the cohort that its own roster and the committed draw lead to, and no other."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from d2pfed.accounting import Sampling
from d2pfed.errors import ConfigError, PeerError
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import MechanismName, Policy, PrivacyTarget, Protocol, calibrate
from d2pfed.round import Attempt, accept_invitation, enrolled_in, session_of, sketch_of
from d2pfed.secagg import Consistency, decode_invitation, upload_bytes
from d2pfed.secagg.draws import DrawTree, Opening, draw_key
from d2pfed.secagg.pairwise.messages import encode_invitation
from d2pfed.secagg.pairwise.session import require_one_view
from support.evil import Evil
from support.federation import enrol, make_session
from support.rosters import draw_cohort
from support.twins import twin
from test_malicious_server import two_quorums

POPULATION, COHORT, DEPTH = 60, 12, 6
FIRST_DRAW = 7
CLIENTS = tuple(range(100, 100 + POPULATION))
LENIENT = Policy(
    least_cohort=2,
    least_quorum=2,
    least_colluders=0.0,
    least_noise_multiplier=0.0,
    most_epsilon=1e6,
    most_delta=0.5,
)


def nothing(*inputs):
    """The check is not made."""


def accept(plan, policy, invitation, roster=None, first_draw=0):
    """What a client does: its policy first, then the invitation."""
    enrolled = enrolled_in(roster)
    policy.check(plan, enrolled)
    policy.require_served(Protocol.PAIRWISE, plan, enrolled)
    return accept_invitation(plan, invitation, policy.least_cohort, roster, first_draw)


@cache
def tree():
    return DrawTree(Entropy.replay(b"the server's draws"), DEPTH)


@cache
def drawn_roster():
    return replace(enrol(CLIENTS), depth=DEPTH, root=tree().root)


@cache
def make_plan(sampling=Sampling.FIXED, consistency=Consistency.SIGNED, cohort_size=COHORT):
    asked = {"dimension": 30, "population": POPULATION, "cohort_size": cohort_size, "rounds": 2, "epsilon": 20.0}
    return calibrate(
        PrivacyTarget(
            **asked, delta=1e-3, sampling=sampling, consistency=consistency, attempts_per_round=3, spare=1
        )
    )


def cohort_of(plan, draw, block=0):
    roster, seed = drawn_roster(), tree().open(draw).seed
    return draw_cohort(draw_key(roster.digest, draw, seed), roster.clients, plan.sampling, block)


def invite(plan, draw, *, number=0, attempt=0, block=0, client=None, opening=None, cohort=None):
    """The invitation of a server that may choose all of it; the session is what an honest one would have."""
    cohort = cohort or cohort_of(plan, draw, block)
    session = session_of(
        plan, Attempt("a run", number, attempt), cohort, roster=drawn_roster(), draw=draw, block=block
    )
    rank = 0 if client is None else session.rank(client)
    return session, encode_invitation(session, rank, opening or tree().open(draw))


def accept_drawn(plan, invitation):
    return accept(plan, LENIENT, invitation, drawn_roster(), FIRST_DRAW)


def test_a_cohort_is_joined_from_the_clients_least_size_on():
    plan = make_plan()
    session, invitation = invite(plan, FIRST_DRAW)
    assert accept_invitation(plan, invitation, COHORT, drawn_roster(), FIRST_DRAW) == session
    with pytest.raises(PeerError, match=f"at least {COHORT + 1} clients, got {COHORT}"):
        accept_invitation(plan, invitation, COHORT + 1, drawn_roster(), FIRST_DRAW)


# --- verified draws ---


def test_a_client_computes_the_cohort_of_the_draw_itself():
    plan = make_plan()
    session, invitation = invite(plan, FIRST_DRAW)
    assert decode_invitation(invitation, DEPTH).cohort is None
    assert accept_drawn(plan, invitation) == session


def test_every_attempt_takes_the_next_draw():
    plan = make_plan()
    cohorts = set()
    for number, attempt in ((0, 0), (0, 2), (1, 0), (1, 1)):
        draw = FIRST_DRAW + number * plan.attempts_per_round + attempt
        session, invitation = invite(plan, draw, number=number, attempt=attempt)
        assert accept_drawn(plan, invitation).cohort == session.cohort
        cohorts.add(session.cohort)
    assert len(cohorts) == 4


@pytest.mark.parametrize("draw", [FIRST_DRAW - 1, FIRST_DRAW + 1, 0, 2**DEPTH - 1])
def test_a_draw_out_of_turn_is_refused(draw):
    with pytest.raises(PeerError, match=f"is of draw {FIRST_DRAW}, got {draw}"):
        accept_drawn(make_plan(), invite(make_plan(), draw)[1])


def test_unless_draws_come_in_turn_the_server_picks_one_that_suits_it(monkeypatch):
    monkeypatch.setattr("d2pfed.round.session.require_draw_by_number", nothing)
    plan, colluders = make_plan(), set(CLIENTS[: POPULATION // 4])
    best = max(range(2**DEPTH), key=lambda draw: len(colluders & set(cohort_of(plan, draw))))
    session = accept_drawn(plan, invite(plan, best)[1])
    share = len(colluders & set(session.cohort)) / len(session.cohort)
    assert share > 1.5 * len(colluders) / POPULATION


OUT_OF_PLAN = [(0, 3), (2, 0), (0, 19), (6, 1)]  # of two rounds with three attempts each


@pytest.mark.parametrize(("number", "attempt"), OUT_OF_PLAN)
def test_an_attempt_that_the_plan_does_not_have_is_refused(number, attempt):
    draw = FIRST_DRAW + 3 * number + attempt
    with pytest.raises(
        PeerError, match=f"2 rounds with 3 attempts each has no round {number + 1}, attempt {attempt}"
    ):
        accept_drawn(make_plan(), invite(make_plan(), draw, number=number, attempt=attempt)[1])


def test_unless_attempts_are_counted_every_draw_has_its_turn(monkeypatch):
    monkeypatch.setattr("d2pfed.round.session.require_planned_number", nothing)
    plan, colluders = make_plan(), set(CLIENTS[: POPULATION // 4])
    best = max(range(FIRST_DRAW, 2**DEPTH), key=lambda draw: len(colluders & set(cohort_of(plan, draw))))
    session = accept_drawn(plan, invite(plan, best, attempt=best - FIRST_DRAW)[1])
    assert len(colluders & set(session.cohort)) / len(session.cohort) > 2 * len(colluders) / POPULATION


def chosen_cohort(plan):
    """A seed of the server's own, tried out until the cohort has the victim and colluders only."""
    wanted, roster = set(CLIENTS[:40]), drawn_roster()
    for trial in range(100_000):
        opening = Opening(trial.to_bytes(32, "little"), tree().open(FIRST_DRAW).path)
        key = draw_key(roster.digest, FIRST_DRAW, opening.seed)
        cohort = draw_cohort(key, roster.clients, plan.sampling, 0)
        if set(cohort) <= wanted:
            return invite(plan, FIRST_DRAW, opening=opening, cohort=cohort)
    raise AssertionError


def test_a_seed_that_was_not_committed_to_is_refused():
    with pytest.raises(PeerError, match="not the one that the server has committed to"):
        accept_drawn(make_plan(), chosen_cohort(make_plan())[1])


def test_unless_the_path_is_checked_the_server_names_the_cohort(monkeypatch):
    monkeypatch.setattr("d2pfed.round.session.require_path", nothing)
    session, invitation = chosen_cohort(make_plan())
    assert set(accept_drawn(make_plan(), invitation).cohort) == set(session.cohort) <= set(CLIENTS[:40])


def test_a_path_of_another_length_is_no_invitation():
    opening = tree().open(FIRST_DRAW)
    _, invitation = invite(make_plan(), FIRST_DRAW, opening=Opening(opening.seed, opening.path[:-1]))
    with pytest.raises(PeerError, match="more bytes"):
        accept_drawn(make_plan(), invitation)


def uninvited(plan):
    """An invitation to a client that the draw has not chosen."""
    session, _ = invite(plan, FIRST_DRAW)
    stranger = next(client for client in CLIENTS if client not in session.cohort)
    cohort = tuple(sorted([stranger, *session.cohort[1:]]))
    return stranger, invite(plan, FIRST_DRAW, client=stranger, cohort=cohort)[1]


def test_a_client_that_was_not_drawn_stays_away():
    stranger, invitation = uninvited(make_plan())
    with pytest.raises(PeerError, match=f"client {stranger} is not in the cohort of this draw"):
        accept_drawn(make_plan(), invitation)


def test_and_otherwise_its_session_would_be_another_one(monkeypatch):
    lax = twin(accept_invitation, "if invited.client not in order:", "if False:")
    monkeypatch.setitem(globals(), "accept_invitation", lax)
    with pytest.raises(PeerError, match="another plan, cohort or roster"):
        accept_drawn(make_plan(), uninvited(make_plan())[1])


def test_the_population_is_the_roster():
    """A run cannot draw from fewer: from the victim and colluders, say."""
    plan = make_plan()
    narrow = replace(plan, sampling=replace(plan.sampling, population=20), max_attempts=plan.max_attempts)
    roster = drawn_roster()
    opening = tree().open(FIRST_DRAW)
    cohort = draw_cohort(
        draw_key(roster.digest, FIRST_DRAW, opening.seed), roster.clients[:20], narrow.sampling, 0
    )
    session = session_of(narrow, Attempt("a run", 0, 0), cohort, roster=roster, draw=FIRST_DRAW)
    with pytest.raises(PeerError, match="population"):
        accept_drawn(narrow, encode_invitation(session, 0, opening))


def test_under_once_all_attempts_share_a_draw_and_take_a_block_each():
    plan = make_plan(Sampling.ONCE)
    seen = []
    for number, block in ((0, 0), (1, 3)):
        session, invitation = invite(plan, FIRST_DRAW, number=number, block=block)
        assert accept_drawn(plan, invitation) == session
        seen += session.cohort
    assert len(set(seen)) == 2 * COHORT
    with pytest.raises(PeerError, match=f"is of draw {FIRST_DRAW}"):
        accept_drawn(plan, invite(plan, FIRST_DRAW + 1, number=1)[1])


def test_a_block_belongs_to_once():
    plan = make_plan()
    _, invitation = invite(plan, FIRST_DRAW, block=1, cohort=cohort_of(plan, FIRST_DRAW))
    with pytest.raises(PeerError, match="block"):
        accept_drawn(plan, invitation)


# --- cohorts that the server lists ---


def listed(plan, cohort, **changes):
    session = session_of(plan, Attempt("a run", 0, 0), cohort, roster=enrol(CLIENTS), **changes)
    return session, encode_invitation(session, 0)


def accept_listed(plan, invitation):
    return accept(plan, LENIENT, invitation, enrol(CLIENTS))


def test_where_draws_are_not_verified_the_server_lists_the_cohort():
    plan = make_plan()
    session, invitation = listed(plan, CLIENTS[:COHORT])
    assert accept_listed(plan, invitation) == session
    with pytest.raises(PeerError, match="not drawn here"):
        accept_listed(plan, listed(plan, CLIENTS[:COHORT], draw=1)[1])


def fifteen_of_twelve(plan):
    """An invitation to fifteen clients where twelve are planned, with a quorum that is eight of them."""
    session = make_session(
        15,
        cohort=CLIENTS[:15],
        roster_digest=enrol(CLIENTS).digest,
        run="a run",
        round=0,
        plan_digest=plan.digest,
        dimension=plan.codec.length,
        bits=plan.ring.bits,
        threshold=8,
        quorum=8,
        colluders=1,
        consistency=Consistency.SIGNED,
    )
    return session, encode_invitation(session, 0)


@cache
def weak_plan():
    """Twelve clients, eight of whom are a quorum, one of whom may collude: 16 > 12 + 1."""
    return replace(make_plan(), quorum=8, colluders=1, threshold=7)


def test_a_cohort_larger_than_planned_is_refused(monkeypatch):
    plan = weak_plan()
    assert accept_listed(plan, listed(plan, CLIENTS[:COHORT])[1])
    with monkeypatch.context() as without:
        without.setattr("d2pfed.secagg.pairwise.session.require_one_view", nothing)
        _, invitation = fifteen_of_twelve(plan)
        with pytest.raises(PeerError, match="planned 12 clients, got 15"):
            accept_listed(plan, invitation)
        without.setattr("d2pfed.round.session.require_planned_size", nothing)
        without.setattr("d2pfed.secagg.pairwise.session.require_one_view", require_one_view)
        with pytest.raises(ConfigError, match="quorum of at least 9"):
            accept_listed(plan, invitation)


def test_in_a_cohort_larger_than_planned_one_colluder_recovers_the_update(monkeypatch):
    monkeypatch.setattr("d2pfed.secagg.pairwise.session.require_one_view", nothing)
    monkeypatch.setattr("d2pfed.round.session.require_planned_size", nothing)
    plan = weak_plan()
    session, invitation = fifteen_of_twelve(plan)
    assert accept_listed(plan, invitation) == session
    own = replace(session, roster_digest=enrol(session.cohort).digest)
    evil = Evil(own, (14,))
    assert np.array_equal(two_quorums(evil), evil.victims_update)


def test_a_signed_cohort_is_not_smaller_than_planned_either():
    """Where every vector counts, those who are left try again only if the server keeps to the protocol."""
    asked = {
        "dimension": 30,
        "population": POPULATION,
        "cohort_size": COHORT,
        "rounds": 2,
        "epsilon": 20.0,
        "delta": 1e-3,
    }
    signed = calibrate(PrivacyTarget(**asked, mechanism=MechanismName.SHARED, consistency=Consistency.SIGNED))
    with pytest.raises(PeerError, match="planned 12 clients, got 11"):
        session_of(signed, Attempt("a run", 0, 1), CLIENTS[: COHORT - 1], roster=enrol(CLIENTS))
    assumed = calibrate(PrivacyTarget(**asked, mechanism=MechanismName.SHARED))
    assert len(session_of(assumed, Attempt("a run", 0, 1), CLIENTS[: COHORT - 1]).cohort) == COHORT - 1


# --- what else must fit ---


def test_an_enrolled_client_takes_no_plan_that_assumes_an_honest_server():
    plan = make_plan(consistency=Consistency.ASSUMED)
    session = session_of(plan, Attempt("a run", 0, 0), CLIENTS[:COHORT])
    with pytest.raises(ConfigError, match="consistency"):
        accept(plan, LENIENT, encode_invitation(session, 0), enrol(CLIENTS))
    assert accept(plan, LENIENT, encode_invitation(session, 0)) == session


def test_an_invitation_to_another_session_than_the_clients_own_is_refused():
    plan = make_plan()
    session, _ = listed(plan, CLIENTS[:COHORT])
    with pytest.raises(PeerError, match="another plan, cohort or roster"):
        accept_listed(plan, encode_invitation(replace(session, bits=session.bits + 1), 0))


def test_a_sketch_has_the_sizes_of_a_real_session():
    plan = make_plan()
    real, _ = listed(plan, CLIENTS[:COHORT])
    assert upload_bytes(sketch_of(plan)) == upload_bytes(real)


def test_where_a_roster_has_no_draws_a_client_counts_on_none():
    """Draws that nobody verified would be counted on as if the server could not choose."""
    roster = enrol(CLIENTS)
    assert roster.depth is None
    assert enrolled_in(roster).draws == 0
    assert enrolled_in(replace(roster, depth=DEPTH, root=tree().root)).draws >= 1 << DEPTH
