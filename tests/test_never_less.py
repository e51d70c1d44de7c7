"""The ledger never says less than what happened: each way in which it once did, and the defect that brings it back."""

import math
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from _pytest.outcomes import Failed

from d2pfed.accounting import SERVER, Adjacency, Sampling, account, round_up
from d2pfed.cli import show
from d2pfed.errors import ConfigError, LedgerError, TooFewClients
from d2pfed.ledger import Ledger
from d2pfed.ledger.state import LedgerState
from d2pfed.numerics.randomness import Entropy
from d2pfed.plan import MechanismName, PrivacyTarget, calibrate
from d2pfed.round import Attempt, aggregate, aggregation, local_sum, local_sums, run_plan
from d2pfed.simulation import Dropouts, Fidelity
from d2pfed.training import Cohorts
from support.simulations import NO_MODEL, Attempting, Simulation

D = 6
CLIENTS = tuple(range(12))


@cache
def plan_of(
    sampling=Sampling.NONE,
    rounds_=3,
    max_participations=1,
    population=12,
    kind=MechanismName.CENTERED,
    cohort_size=12,
):
    return calibrate(
        PrivacyTarget(
            dimension=D,
            population=population,
            cohort_size=cohort_size,
            rounds=rounds_,
            epsilon=40.0,
            delta=1e-3,
            against=SERVER,
            sampling=sampling,
            max_participations=max_participations,
            adjacency=Adjacency.ZERO_OUT,
            mechanism=kind,
            spare=2,
        )
    )


@contextmanager
def book_of(tmp_path, plan, *runs):
    budget = replace(run_plan(plan).budget, epsilon=1000.0)
    with Ledger.create(tmp_path / "ledger", budget) as book:
        for run in runs:
            book.begin(run, run, run_plan(plan))
        yield book


def one_hot():
    return {client: np.eye(D, dtype=np.float32)[client % D] for client in CLIENTS}


def summed(plan, book, run, number, attempt=0):
    return local_sum(plan, Attempt(run, number, attempt), one_hot(), book, Entropy.replay(b"sum"))


def is_noise(plan, total):
    """Whether nobody's vector is in a sum: each coordinate of the full one is 2."""
    return float(np.abs(total).mean()) < 1 and np.abs(total).max() < 8 * plan.sigma + 1


# 1. The same attempt again


def the_same_attempt_again_is_refused(tmp_path):
    plan = plan_of()
    with book_of(tmp_path, plan, "run") as book:
        summed(plan, book, "run", 0)
        with pytest.raises(LedgerError, match="has a row: take attempt 1"):
            summed(plan, book, "run", 0)
        assert book.charged("run") == len(book.releases()) == 1


def test_the_same_attempt_again_is_refused(tmp_path):
    the_same_attempt_again_is_refused(tmp_path)


def test_a_ledger_that_answers_with_the_old_row_is_caught(tmp_path, monkeypatch):
    reserve = Ledger.reserve

    def replayed(self, release):
        keys = {(each.run, each.round, each.attempt) for each in self.releases()}
        return None if (release.run, release.round, release.attempt) in keys else reserve(self, release)

    monkeypatch.setattr(Ledger, "reserve", replayed)
    monkeypatch.setattr(Ledger, "commit", lambda *_: None)
    with pytest.raises(Failed, match="DID NOT RAISE"):
        the_same_attempt_again_is_refused(tmp_path)


def two_ledgers_never_share_noise(tmp_path):
    """The same attempt of a run of the same name, in two ledgers and with one root: nothing but noise is summed."""
    plan, root = plan_of(), Entropy.system()
    zeros = {client: np.zeros(D, np.float32) for client in CLIENTS}
    sums = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        with book_of(tmp_path / place, plan, "run") as book:
            sums.append(local_sum(plan, Attempt("run", 0, 0), zeros, book, root))
    assert (sums[0] != sums[1]).any()


def test_two_ledgers_never_share_noise(tmp_path):
    two_ledgers_never_share_noise(tmp_path)


def test_noise_that_depends_on_the_attempts_name_alone_is_caught(tmp_path, monkeypatch):
    root = Entropy.system()
    monkeypatch.setattr(Entropy, "system", staticmethod(lambda: root))
    with pytest.raises(AssertionError):
        two_ledgers_never_share_noise(tmp_path)


# 2 and 3. Participations: counted in each run, which is charged for all that its cap allows


def a_client_at_its_cap_is_in_no_further_sum(tmp_path):
    plan = plan_of(max_participations=1)
    with book_of(tmp_path, plan, "first", "second") as book:
        assert not is_noise(plan, summed(plan, book, "first", 0))
        assert is_noise(plan, summed(plan, book, "first", 1))
        assert not is_noise(plan, summed(plan, book, "second", 0))
        assert is_noise(plan, summed(plan, book, "second", 1))


def test_a_client_at_its_cap_is_in_no_further_sum_of_a_run(tmp_path):
    a_client_at_its_cap_is_in_no_further_sum(tmp_path)


def six_runs_cost_what_six_runs_cost(tmp_path):
    """Six runs of a plan of one release each: a client may be in all six sums, so all six count."""
    plan = plan_of(rounds_=1, max_participations=1)
    with book_of(tmp_path, plan, *"abcdef") as book:
        for run in "abcdef":
            summed(plan, book, run, 0)
        truth = account(
            [plan.release("", 0, 0, (), plan.quorum)] * 6, SERVER, delta=plan.delta, max_participations=6
        )
        assert book.spent() >= 0.999 * truth.epsilon > 2 * plan.epsilon


def test_six_runs_cost_what_six_runs_cost(tmp_path):
    six_runs_cost_what_six_runs_cost(tmp_path)


def test_a_ledger_that_charges_the_cap_once_for_all_runs_is_caught(tmp_path, monkeypatch):
    plans = LedgerState.plans
    monkeypatch.setattr(LedgerState, "plans", lambda self: plans(self)[:1])
    with pytest.raises(AssertionError):
        six_runs_cost_what_six_runs_cost(tmp_path)


def test_participations_that_are_not_counted_are_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(Ledger, "participations", lambda _self, _run, clients: dict.fromkeys(clients, 0))
    with pytest.raises(AssertionError):
        a_client_at_its_cap_is_in_no_further_sum(tmp_path)


def a_plan_with_a_larger_cap_is_refused(tmp_path):
    """The noise is the same, and so would be every row: but the run was charged for one participation."""
    plan = plan_of(max_participations=1)
    with book_of(tmp_path, plan, "run") as book:
        with pytest.raises(LedgerError, match="charged for another plan"):
            summed(replace(plan, max_participations=3), book, "run", 0)
        assert book.releases() == ()


def test_a_plan_with_a_larger_cap_is_refused(tmp_path):
    a_plan_with_a_larger_cap_is_refused(tmp_path)


def test_a_ledger_that_takes_any_plan_of_the_same_noise_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(Ledger, "require_plan", lambda *_: None)
    with pytest.raises(Failed, match="DID NOT RAISE"):
        a_plan_with_a_larger_cap_is_refused(tmp_path)


def test_more_clients_than_planned_are_refused(tmp_path):
    plan = plan_of()
    with book_of(tmp_path, plan, "run") as book:
        many = {client: np.zeros(D, np.float32) for client in range(13)}
        with pytest.raises(ConfigError, match="2 clients to the planned 12, got 13"):
            local_sum(plan, Attempt("run", 0, 0), many, book, Entropy.replay(b"sum"))
        assert book.releases() == ()


def given_clients_have_no_amplified_price(tmp_path):
    plan = plan_of(Sampling.FIXED, population=1000)
    with book_of(tmp_path, plan, "run") as book, pytest.raises(ConfigError, match="sampling none or once"):
        summed(plan, book, "run", 0)


def test_a_sum_over_clients_that_nobody_drew_has_no_amplified_price(tmp_path, monkeypatch):
    given_clients_have_no_amplified_price(tmp_path)
    monkeypatch.setattr(local_sums, "is_amplified", lambda _sampling: False)
    (tmp_path / "again").mkdir()
    with pytest.raises(Failed, match="DID NOT RAISE"):
        given_clients_have_no_amplified_price(tmp_path / "again")


# 4. Retries


class Fails:
    """A collected sum that too few help to open, the first so many times."""

    def __init__(self, plan, failures):
        self.plan, self.failures, self.seen = plan, failures, []
        self.cohorts = []

    def __call__(self, session, participations):
        self.seen.append(dict(participations))
        self.cohorts.append(session.cohort)
        collected = Simulation(
            plan=self.plan,
            updates=lambda clients: (np.zeros(D, np.float32) for _ in clients),
            dropouts=Dropouts(),
            entropy=Entropy.replay(b"retries"),
            participations=participations,
        ).collect(session, Fidelity.SUM)
        return _Shut(collected) if len(self.seen) <= self.failures else collected


class _Shut:
    def __init__(self, collected):
        self.survivors = collected.survivors

    def unmask(self):
        raise TooFewClients("nobody helps")


def a_retry_counts_the_attempt_before_it(tmp_path):
    plan = plan_of(max_participations=2)
    with book_of(tmp_path, plan, "run") as book:
        collect = Fails(plan, failures=2)
        aggregate(plan, Attempt("run", 0, 0), NO_MODEL, Attempting(plan, lambda _attempt: CLIENTS, collect), book)
        assert [participations[5] for participations in collect.seen] == [0, 1, 2]


def test_a_retry_counts_the_attempt_before_it(tmp_path):
    a_retry_counts_the_attempt_before_it(tmp_path)


def test_a_count_that_is_taken_once_a_round_is_caught(tmp_path, monkeypatch):
    participations, found = Ledger.participations, []

    def first(self, run, clients):
        found.append(participations(self, run, clients))
        return found[0]

    monkeypatch.setattr(Ledger, "participations", first)
    with pytest.raises(AssertionError):
        a_retry_counts_the_attempt_before_it(tmp_path)


def a_partition_goes_on_with_its_next_block(tmp_path, block):
    plan = plan_of(Sampling.ONCE, population=72)
    cohorts = Cohorts(plan.sampling, Entropy.replay(b"partition"))
    with book_of(tmp_path, plan, "run") as book:
        collect = Fails(plan, failures=2)
        attempts = Attempting(plan, lambda attempt: cohorts.draw(0, attempt, block(book)), collect)
        aggregate(plan, Attempt("run", 0, 0), NO_MODEL, attempts, book)
        clients = [client for cohort in collect.cohorts for client in cohort]
        assert len(clients) == len(set(clients)) == 36
        assert all(count == 0 for participations in collect.seen for count in participations.values())


def test_a_partition_goes_on_with_its_next_block(tmp_path):
    a_partition_goes_on_with_its_next_block(tmp_path, lambda book: book.charged("run"))


def test_the_same_block_again_is_refused_and_no_model_moves_by_noise_alone(tmp_path, monkeypatch):
    with pytest.raises(
        ConfigError, match=r"`once` uses each client once, and client [0-9]+ has contributed already"
    ):
        a_partition_goes_on_with_its_next_block(tmp_path, lambda _book: 0)
    monkeypatch.setattr(aggregation, "Sampling", SimpleNamespace(ONCE=None))  # the check knows no partition
    (tmp_path / "again").mkdir()
    with pytest.raises(LedgerError, match="`once` uses each client once"):  # the ledger has the same rule
        a_partition_goes_on_with_its_next_block(tmp_path / "again", lambda _book: 0)


def test_a_void_attempt_may_keep_its_block(tmp_path):
    plan = plan_of(Sampling.ONCE, population=72)
    cohorts = Cohorts(plan.sampling, Entropy.replay(b"partition"))
    asked = []

    def collect(session, participations):
        asked.append(session.cohort)
        if len(asked) == 1:
            raise TooFewClients("void")
        return Fails(plan, failures=0)(session, participations)

    with book_of(tmp_path, plan, "run") as book:
        attempts = Attempting(plan, lambda attempt: cohorts.draw(0, attempt, book.charged("run")), collect)
        aggregate(plan, Attempt("run", 0, 0), NO_MODEL, attempts, book)
    assert asked[0] == asked[1]


# 5. A release carries its run


def runs_that_interleave_cost_as_much_as_one_after_the_other(tmp_path):
    plan = plan_of(Sampling.ONCE, population=144)
    with book_of(tmp_path, plan, "a", "b") as book:
        for number in range(2):
            for run in ("a", "b"):
                book.reserve(plan.release(run, number, 0, (), plan.quorum))
        two = [
            replace(run_plan(plan).release, run=run, round=number)
            for run in "ab"
            for number in range(plan.max_attempts)
        ]
        # Each client is in one block of each run: twice one release, not once.
        least = account(two[:1], SERVER, delta=plan.delta, max_participations=1).epsilon
        assert book.spent() > 1.2 * least
        assert {release.run for release in book.releases()} == {"a", "b"}


def test_runs_that_interleave_cost_as_much_as_one_after_the_other(tmp_path):
    runs_that_interleave_cost_as_much_as_one_after_the_other(tmp_path)


def test_releases_under_another_runs_name_are_caught(tmp_path, monkeypatch):
    step = LedgerState.step
    monkeypatch.setattr(
        LedgerState,
        "step",
        lambda self, kind, key, release: step(self, kind, replace(key, run="a"), replace(release, run="a")),
    )
    with pytest.raises((AssertionError, LedgerError)):
        runs_that_interleave_cost_as_much_as_one_after_the_other(tmp_path)


# 10. Printed bounds


def printed_bounds_are_bounds():
    template = run_plan(plan_of())
    item = account([template.release], SERVER, delta=1e-3, max_participations=1)
    for value in np.geomspace(0.0101, 29.7, 300):
        table = show.epsilons((replace(item, epsilon=float(value), delta=float(value) * 1e-6),))
        for column, true in ((2, value), (3, value * 1e-6)):
            (cell,) = table.columns[column].cells
            assert float(cell) >= true
            assert float(cell) <= true * 1.01


def test_printed_bounds_are_rounded_up():
    printed_bounds_are_bounds()


def test_bounds_that_are_rounded_to_nearest_are_caught(monkeypatch):
    monkeypatch.setattr(show, "round_up", lambda value, digits: f"{value:.{digits}g}")
    with pytest.raises(AssertionError):
        printed_bounds_are_bounds()


def test_an_infinite_bound_is_said_in_words():
    assert round_up(math.inf, 4) == "infinite"
