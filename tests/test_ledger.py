import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from campaign_ledger import additive, release
from d2pfed.accounting import RELEASED, colluding
from d2pfed.accounting.release import Adjacency, Release, Sampling, Scheme
from d2pfed.errors import BudgetExceeded, ConfigError, LedgerError
from d2pfed.ledger import Budget, Head, Key, Kind, Ledger, Meter, read_budget, verify
from d2pfed.ledger.book import Book
from d2pfed.ledger.rows import first_row
from d2pfed.ledger.store import Store

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where no crash is played, a disk only costs time
BUDGET = Budget(1.0, 1e-5)


def gaussian(releases: Sequence[Release]) -> float:
    """Concentrated differential privacy of discrete Gaussians: it grows less than linearly."""
    rho = sum(2 * each.noise.radius**2 / (each.noise.contributors * each.noise.sigma**2) for each in releases)
    return float(rho) + 2 * math.sqrt(rho * math.log(1e5))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def new(path: Path, meter: Meter = additive, budget: Budget = BUDGET) -> Ledger:
    return Ledger.create(path, budget, meter)


def charge(ledger: Ledger, number: int, run: str = "run") -> None:
    attempt = ledger.next_attempt(run, number)
    ledger.reserve(run, release(number, attempt))
    ledger.commit(run, release(number, attempt))


def test_a_reservation_counts_in_full_until_the_commit_says_what_was_released(path):
    with new(path) as ledger:
        assert (ledger.spent(), ledger.releases()) == (0.0, ())
        ledger.reserve("run", release(0, contributors=2))
        assert (ledger.spent(), ledger.releases()) == (0.5, (release(0, contributors=2),))
        row = ledger.commit("run", release(0, contributors=8))
        assert (ledger.spent(), ledger.releases()) == (0.125, (release(0, contributors=8),))
        assert (row.kind, row.key, row.epsilon, row.release) == (
            Kind.COMMIT,
            Key("run", 0, 0),
            0.125,
            release(0, contributors=8),
        )


def test_a_void_attempt_costs_nothing(path):
    with new(path) as ledger:
        ledger.reserve("run", release(0))
        row = ledger.void("run", 0, 0)
        assert (row.epsilon, row.release, row.survivors, ledger.spent(), ledger.releases()) == (
            0,
            None,
            None,
            0,
            (),
        )


def test_the_budget_is_checked_on_epsilon_after_the_charge_and_can_be_used_up_exactly(path):
    with new(path) as ledger:
        for number in range(8):
            charge(ledger, number)
        assert ledger.spent() == BUDGET.epsilon
        head = ledger.head()
        with pytest.raises(BudgetExceeded, match=r"would be 1\.125, the budget is 1\.0"):
            ledger.reserve("run", release(8))
        assert (ledger.head(), ledger.spent()) == (head, 1.0)


def test_the_cost_is_that_of_all_releases_together_not_a_sum_of_single_ones(path):
    alone = gaussian([release(0, contributors=512)])
    with new(path, gaussian, Budget(3.0, 1e-5)) as ledger:
        count = 0
        while gaussian([*ledger.releases(), release(count, contributors=512)]) <= 3.0:
            ledger.reserve("run", release(count, contributors=512))
            count += 1
        with pytest.raises(BudgetExceeded):
            ledger.reserve("run", release(count, contributors=512))
        assert ledger.spent() == gaussian(ledger.releases()) <= 3.0
        assert count * alone > 3.0


def test_all_runs_over_a_population_draw_on_one_budget(path):
    with new(path) as ledger:
        for run in ("tuning", "final"):
            for number in range(4):
                charge(ledger, number, run)
        for run in ("tuning", "final", "another"):
            with pytest.raises(BudgetExceeded):
                ledger.reserve(run, release(9))


@pytest.mark.parametrize("answer", [math.nan, -1e-9, -math.inf])
def test_a_meter_that_answers_nonsense_refuses_the_release(path, answer):
    with new(path, lambda _: answer) as ledger:
        with pytest.raises(LedgerError, match="the meter must return"):
            ledger.reserve("run", release(0))
        assert ledger.releases() == ()


def test_an_infinite_epsilon_is_over_every_budget(path):
    with new(path, lambda _: math.inf) as ledger, pytest.raises(BudgetExceeded, match="would be inf"):
        ledger.reserve("run", release(0))


def test_a_commit_may_not_cost_more_than_was_reserved(path):
    with new(path) as ledger:
        ledger.reserve("run", release(0, contributors=8))
        with pytest.raises(BudgetExceeded, match=r"would be 0\.25, with what was reserved it is 0\.125"):
            ledger.commit("run", release(0, contributors=4))
        ledger.commit("run", release(0, contributors=8))


@pytest.mark.parametrize(
    "change",
    [
        {"adjacency": Adjacency.ZERO_OUT},
        {"sampling": Sampling(Scheme.POISSON, 1000, 16)},
        {"sampling": Sampling(Scheme.FIXED, 2000, 16)},
        {"participants": (1, 2, 4)},
    ],
)
def test_a_commit_may_not_differ_from_the_reservation_in_what_is_protected_how(path, change):
    reserved = replace(release(0), participants=(1, 2, 3))
    with new(path) as ledger:
        ledger.reserve("run", reserved)
        with pytest.raises(LedgerError):
            ledger.commit("run", replace(reserved, **change))
        row = ledger.commit("run", replace(reserved, participants=(1, 3)))
        assert row.survivors == 2


def test_a_reservation_for_nobody_in_particular_can_be_committed_for_anybody(path):
    with new(path) as ledger:
        ledger.reserve("run", release(0))
        assert ledger.commit("run", replace(release(0), participants=(3, 5))).survivors == 2


def test_the_same_call_again_returns_the_same_row_and_charges_nothing(path):
    with new(path) as ledger:
        first = ledger.reserve("run", release(0)), ledger.commit("run", release(0))
        ledger.reserve("run", release(1))
        third = ledger.void("run", 1, 0)
        head = ledger.head()
        assert (ledger.reserve("run", release(0)), ledger.commit("run", release(0))) == first
        assert ledger.void("run", 1, 0) == third
        assert (ledger.head(), ledger.spent()) == (head, 0.125)


def test_another_release_under_the_same_key_is_refused(path):
    with new(path) as ledger:
        ledger.reserve("run", release(0))
        with pytest.raises(LedgerError, match="with another release"):
            ledger.reserve("run", release(0, contributors=16))
        ledger.commit("run", release(0))
        with pytest.raises(LedgerError, match="with another release"):
            ledger.commit("run", release(0, contributors=16))


def test_steps_out_of_order_are_refused_and_change_nothing(path):
    with new(path) as ledger:
        head = ledger.head()
        with pytest.raises(LedgerError, match="commit cannot follow nothing"):
            ledger.commit("run", release(0))
        with pytest.raises(LedgerError, match="void cannot follow nothing"):
            ledger.void("run", 0, 0)
        assert ledger.head() == head
        charge(ledger, 0)
        with pytest.raises(LedgerError, match="void cannot follow commit"):
            ledger.void("run", 0, 0)
        ledger.reserve("run", release(1))
        ledger.void("run", 1, 0)
        with pytest.raises(LedgerError, match="commit cannot follow void"):
            ledger.commit("run", release(1))


def a_repeated_round_is_charged_for_each_release(opening, path: Path) -> None:
    """A server releases a round, restarts, and releases the round again with new noise, as if it had not."""
    released = 0
    for _ in range(2):
        with opening(path, additive) as ledger:
            try:
                ledger.reserve("run", release(0))
                ledger.commit("run", release(0))
                released += 1
            except LedgerError:
                charge(ledger, 0)
                released += 1
    assert verify(path, additive).spent == released / 8


def test_a_round_that_is_repeated_after_a_restart_is_charged_again(path):
    new(path).close()
    a_repeated_round_is_charged_for_each_release(Ledger.open, path)


def test_a_ledger_that_replays_across_restarts_is_caught_charging_nothing(path, monkeypatch):
    def replayed(self, kind, key, _body):
        return self._store.rows(self._book.seqs[key, kind])[0]

    new(path).close()
    monkeypatch.setattr(Ledger, "_replayed", replayed)
    with pytest.raises(AssertionError):
        a_repeated_round_is_charged_for_each_release(Ledger.open, path)


def test_a_ledger_that_charges_a_repeated_call_twice_is_caught(path, monkeypatch):
    def charged_again(self, _kind, key, _body):
        return self.reserve("run", release(key.round, self.next_attempt("run", key.round)))

    monkeypatch.setattr(Ledger, "_replayed", charged_again)
    with pytest.raises(AssertionError):
        test_the_same_call_again_returns_the_same_row_and_charges_nothing(path)


def test_what_a_crashed_server_reserved_stays_spent_and_belongs_to_nobody(path):
    with new(path) as ledger:
        ledger.reserve("run", release(0))
    with Ledger.open(path, additive) as ledger:
        assert (ledger.spent(), ledger.releases()) == (0.125, (release(0),))
        with pytest.raises(LedgerError, match="an earlier server began it, take attempt 1"):
            ledger.reserve("run", release(0))
        with pytest.raises(LedgerError, match="reserved in epoch 1, which epoch 2 cannot commit"):
            ledger.commit("run", release(0))
        with pytest.raises(LedgerError, match="cannot void"):
            ledger.void("run", 0, 0)
        charge(ledger, 0)
        assert ledger.spent() == 0.25


def test_a_ledger_that_forgets_unfinished_reservations_is_refused_at_the_next_opening(path, monkeypatch):
    with new(path) as ledger:
        ledger.reserve("run", release(0))

    def committed_only(self):
        return tuple(each.release for each in self.attempts.values() if each.kind is Kind.COMMIT)

    monkeypatch.setattr(Book, "releases", committed_only)
    with pytest.raises(LedgerError, match=r"the meter says 0\.0, recorded is 0\.125"):
        Ledger.open(path, additive)
    with pytest.raises(LedgerError, match="row 2: it records epsilon"):
        verify(path, additive)


def test_a_meter_that_finds_less_than_was_recorded_is_not_this_budgets_meter(path):
    with new(path) as ledger:
        charge(ledger, 0)
    with pytest.raises(LedgerError, match="not this budget's meter"):
        Ledger.open(path, lambda releases: additive(releases) / 2)
    with Ledger.open(path, lambda releases: additive(releases) * 2) as ledger:
        assert ledger.spent() == 0.25


def test_an_older_copy_of_the_ledger_is_refused_by_whoever_saw_a_later_row(path):
    old = path.with_name("old")
    with new(path) as ledger:
        charge(ledger, 0)
    shutil.copy(path, old)
    with Ledger.open(path, additive) as ledger:
        charge(ledger, 1)
        seen = ledger.head()
    shutil.copy(old, path)
    with Ledger.open(path, additive) as ledger:
        with pytest.raises(LedgerError, match="an older copy"):
            ledger.require_head(seen)
        charge(ledger, 1, "rewritten")
        charge(ledger, 2, "rewritten")
        with pytest.raises(LedgerError, match="another ledger, or a rewritten one"):
            ledger.require_head(seen)


def test_an_older_checkpoint_shows_by_the_rows_it_knows_nothing_of(path):
    with new(path) as ledger:
        charge(ledger, 0)
        seen = ledger.head()
        ledger.require_head(seen)
        assert ledger.rows_since(seen) == ()
    with Ledger.open(path, additive) as ledger:
        assert ledger.rows_since(seen) == ()
        rows = ledger.reserve("run", release(1)), ledger.commit("run", release(1))
        assert ledger.rows_since(Head.decode(seen.encode())) == rows


def test_a_closed_ledger_refuses_everything_that_writes(path):
    ledger = new(path)
    ledger.close()
    ledger.close()
    for call in (
        lambda: ledger.reserve("run", release(0)),
        lambda: ledger.void("run", 0, 0),
        lambda: ledger.rows_since(ledger.head()),
    ):
        with pytest.raises(LedgerError, match="closed"):
            call()


def test_a_ledger_is_never_overwritten(path):
    new(path).close()
    with pytest.raises(LedgerError, match="already exists"):
        new(path)
    new(path.with_name("other")).close()


def test_no_ledger_is_created_beside_the_log_of_one_that_is_gone(path):
    with new(path) as ledger:
        charge(ledger, 0)
        path.unlink()
        with pytest.raises(LedgerError, match="ledger-wal already exists"):
            Store.create(path, first_row(BUDGET))
        ledger.close()


def test_a_creation_that_was_cut_short_is_made_anew(path):
    for suffix in (".draft", ".draft-journal"):
        path.with_name(path.name + suffix).write_bytes(b"half")
    with new(path) as ledger:
        charge(ledger, 0)
    assert not list(path.parent.glob("*.draft*"))


def test_only_its_owner_can_read_who_took_part(path):
    with new(path) as ledger:
        charge(ledger, 0)
        assert {each.stat().st_mode & 0o077 for each in path.parent.iterdir()} == {0}


@pytest.mark.parametrize(
    "wrong", [(0.0, 1e-5), (math.inf, 1e-5), (math.nan, 0.1), (1.0, 1.0), (1.0, 0.1, RELEASED, 0)]
)
def test_a_budget_is_positive_and_finite_with_a_delta_below_one(wrong):
    with pytest.raises(ConfigError):
        Budget(*wrong)


def test_a_run_has_a_name():
    for name in ("", "a\nb", "\ud800"):
        with pytest.raises(ConfigError):
            Key(name, 0, 0)
    for number, attempt in ((-1, 0), (0, -1), (2**63, 0)):
        with pytest.raises(ConfigError):
            Key("run", number, attempt)


def test_the_budget_is_the_one_the_ledger_was_created_with(path):
    budget = Budget(0.1, 1 / 3, colluding(3), 7)
    new(path, budget=budget).close()
    assert read_budget(path) == budget
    with Ledger.open(path, additive) as ledger:
        assert ledger.budget == budget


@pytest.mark.parametrize("text", ["", "1", "01:" + "0" * 64, "1:" + "0" * 63, "1:" + "A" * 64, "-1:" + "0" * 64])
def test_only_the_one_text_of_a_head_is_read(text):
    with pytest.raises(LedgerError):
        Head.decode(text)


def test_a_head_is_a_row_number_and_a_whole_hash():
    with pytest.raises(ConfigError):
        Head(0, b"short")
    with pytest.raises(ConfigError):
        Head(-1, bytes(32))


class Schedules(RuleBasedStateMachine):
    """Any order of calls against a model that is a dictionary: same answers, same cost, never over the budget."""

    runs = st.sampled_from(["a", "b"])
    small = st.integers(0, 2)
    contributors = st.sampled_from([2, 4, 8, 16])

    @initialize(eighths=st.integers(1, 12))
    def begin(self, eighths):
        self.directory = tempfile.TemporaryDirectory(dir=MEMORY)
        self.path = Path(self.directory.name) / "ledger"
        self.budget = Fraction(eighths, 8)
        self.epoch = 1
        self.model: dict[Key, tuple[Kind, int, dict[Kind, int], Fraction]] = {}
        self.ledger = Ledger.create(self.path, Budget(float(self.budget), 0.0), additive)

    def cost(self, without: Key | None = None) -> Fraction:
        counted = (each for key, each in self.model.items() if key != without and each[0] is not Kind.VOID)
        return sum((each[3] for each in counted), Fraction(0))

    def expected(self, kind: Kind, key: Key, contributors: int) -> type[Exception] | None:
        state, epoch, said, cost = self.model.get(key, (None, self.epoch, {}, Fraction(0)))
        if epoch != self.epoch:
            return LedgerError
        if kind in said:
            return None if said[kind] == contributors else LedgerError
        if kind is not Kind.RESERVE and state is not Kind.RESERVE:
            return LedgerError
        if kind is Kind.VOID:
            return None
        after = self.cost(key) + Fraction(1, contributors)
        too_much = after > self.budget or (kind is Kind.COMMIT and after > self.cost(key) + cost)
        return BudgetExceeded if too_much else None

    def call(self, kind: Kind, key: Key, contributors: int) -> None:
        expected = self.expected(kind, key, contributors)
        real = release(key.round, key.attempt, contributors) if kind is not Kind.VOID else None
        call = {
            Kind.RESERVE: lambda: self.ledger.reserve(key.run, real),
            Kind.COMMIT: lambda: self.ledger.commit(key.run, real),
            Kind.VOID: lambda: self.ledger.void(key.run, key.round, key.attempt),
        }[kind]
        if expected is not None:
            with pytest.raises(expected):
                call()
            return
        row = call()
        assert (row.kind, row.key) == (kind, key)
        _, _, said, cost = self.model.get(key, (None, self.epoch, {}, Fraction(0)))
        if kind not in said:
            cost = cost if kind is Kind.VOID else Fraction(1, contributors)
            self.model[key] = (kind, self.epoch, said | {kind: contributors}, cost)

    @rule(run=runs, number=small, attempt=small, contributors=contributors)
    def reserve(self, run, number, attempt, contributors):
        self.call(Kind.RESERVE, Key(run, number, attempt), contributors)

    @rule(run=runs, number=small, attempt=small, contributors=contributors)
    def commit(self, run, number, attempt, contributors):
        self.call(Kind.COMMIT, Key(run, number, attempt), contributors)

    @rule(run=runs, number=small, attempt=small)
    def void(self, run, number, attempt):
        self.call(Kind.VOID, Key(run, number, attempt), 0)

    @rule()
    def restart(self):
        self.ledger.close()
        self.ledger = Ledger.open(self.path, additive)
        self.epoch += 1

    @rule()
    def taken_over(self):
        old = self.ledger
        self.ledger = Ledger.take_over(self.path, additive)
        self.epoch += 1
        with pytest.raises((LedgerError, BudgetExceeded), match=r"another server took over|would be"):
            old.reserve("old", release(0, contributors=2**30))
        old.close()

    @invariant()
    def costs_what_the_model_says(self):
        assert self.ledger.spent() == self.cost() <= self.budget
        assert additive(self.ledger.releases()) == self.ledger.spent()

    def teardown(self):
        if hasattr(self, "ledger"):
            assert verify(self.path, additive).spent == self.cost()
            self.ledger.close()
            self.directory.cleanup()


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, database=None)
