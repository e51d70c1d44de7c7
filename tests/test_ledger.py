import math
import shutil
import tempfile
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from _pytest.outcomes import Failed
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from campaign_ledger import additive, begun, plan_of, release
from d2pfed.accounting import RELEASED, SERVER, colluding
from d2pfed.accounting.events import Adjacency, CohortSampling, Sampling
from d2pfed.accounting.filters import FilterDecision
from d2pfed.errors import BudgetExceeded, ConfigError, LedgerError
from d2pfed.ledger import Budget, Head, Key, Ledger, RowKind, read_budget, read_rows, verify
from d2pfed.ledger.ledger import Meter
from d2pfed.ledger.rows import first_row
from d2pfed.ledger.state import LedgerState
from d2pfed.ledger.store import Store

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where no crash is played, a disk only costs time
BUDGET = Budget(1.0, 1e-5)
ADMITTED = FilterDecision(admitted=True, units=(), budget_units=0, composed_epsilon=0.5)


def costly(times: float):
    """Return a meter by which everything costs so many times what `additive` says."""

    def meter(budget, plans):
        composed = times * additive(budget, plans).composed_epsilon
        return FilterDecision(
            admitted=composed <= budget.epsilon, units=(), budget_units=0, composed_epsilon=composed
        )

    return meter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def new(path: Path, meter: Meter = additive, budget: Budget = BUDGET) -> Ledger:
    return Ledger.create(path, budget, meter)


def charge(ledger: Ledger, number: int, run: str = "run") -> None:
    attempt = ledger.next_attempt(run, number)
    ledger.reserve(release(number, attempt, run=run))
    ledger.commit(release(number, attempt, run=run))


# A run is charged when it begins


def test_a_run_is_charged_wholly_when_it_begins(path):
    with new(path) as ledger:
        assert (ledger.spent(), ledger.releases()) == (0.0, ())
        ledger.begin("run", "owner", plan_of(6))
        assert (ledger.spent(), ledger.charged("run")) == (0.75, 0)
        for number in range(3):
            charge(ledger, number)
        assert (ledger.spent(), ledger.charged("run")) == (0.75, 3)
    assert [row.epsilon for row in read_rows(path)] == [0, 0, *[0.75] * 7]


def test_a_run_that_does_not_fit_does_not_begin_and_writes_nothing(path):
    with new(path) as ledger:
        ledger.begin("run", "owner", plan_of(6))
        head = ledger.head()
        with pytest.raises(BudgetExceeded, match=r"run second: epsilon would be 1\.125, the budget is 1\.0"):
            ledger.begin("second", "another", plan_of(3))
        assert (ledger.head(), ledger.spent()) == (head, 0.75)
        ledger.begin("second", "another", plan_of(2))
        assert ledger.spent() == BUDGET.epsilon


def test_a_stop_gives_nothing_back(path):
    with new(path) as ledger:
        ledger.begin("run", "owner", plan_of(6))
        charge(ledger, 0)
    with Ledger.open(path, meter=additive) as ledger, pytest.raises(BudgetExceeded):
        ledger.begin("second", "another", plan_of(6))


def test_the_beginning_is_asked_about_all_runs_together_in_their_order(path):
    asked = []

    def meter(budget, plans):
        asked.append(tuple(plan.max_attempts for plan in plans))
        return additive(budget, plans)

    with new(path, meter) as ledger:
        for number, attempts in enumerate((4, 1, 2)):
            ledger.begin(f"run {number}", f"owner {number}", plan_of(attempts))
    assert asked == [(4,), (4, 1), (4, 1, 2)]


def test_an_attempt_is_never_measured(path):
    with begun(path, BUDGET) as ledger:
        ledger._meter = None
        charge(ledger, 0)
        ledger.reserve(release(1))
        ledger.void("run", 1, 0)


def test_a_run_goes_on_under_its_name_its_owner_and_its_plan(path):
    with begun(path, BUDGET, 6) as ledger:
        head = ledger.head()
        ledger.begin("run", "owner", plan_of(6))
        assert ledger.head() == head
        with pytest.raises(LedgerError, match="run run was begun by another directory"):
            ledger.begin("run", "copy", plan_of(6))
        with pytest.raises(LedgerError, match="run run was begun with another plan"):
            ledger.begin("run", "owner", plan_of(5))
        with pytest.raises(LedgerError, match="run renamed: its directory has begun run run here"):
            ledger.begin("renamed", "owner", plan_of(1))
        ledger.begin("run", "owner", plan_of(6), software="a newer one")
        assert (ledger.head(), ledger.runs()[0].software) == (head, "")  # that of the beginning stays
        with pytest.raises(LedgerError, match="run run was begun with noise from the system's entropy"):
            ledger.begin("run", "owner", plan_of(6), repeatable=True)
        ledger.begin("seeded", "another", plan_of(1), repeatable=True)
        with pytest.raises(LedgerError, match="run seeded was begun with noise from a seed"):
            ledger.begin("seeded", "another", plan_of(1))


def test_a_run_goes_on_with_the_plan_it_was_charged_for(path):
    with begun(path, BUDGET, 6) as ledger:
        ledger.require_plan("run", plan_of(6).plan)
        with pytest.raises(LedgerError, match="run run was charged for another plan"):
            ledger.require_plan("run", b"another")
        with pytest.raises(LedgerError, match="run other has not begun"):
            ledger.require_plan("other", plan_of(6).plan)
        ledger.require_own("run", None, 0)
    with pytest.raises(LedgerError, match="closed"):
        ledger.require_own("run", None, 0)


@pytest.mark.parametrize("change", [{"delta": 1e-6}, {"max_participations": 2}, {"observer": SERVER}])
def test_a_run_with_another_guarantee_than_the_budget_is_refused(path, change):
    with new(path) as ledger, pytest.raises(ConfigError, match="the ledger has the budget at delta 1e-05"):
        ledger.begin("run", "owner", replace(plan_of(1), **change))


def test_a_run_with_a_smaller_cap_joins_and_is_charged_at_its_own(path):
    with Ledger.create(path, replace(BUDGET, max_participations=8)) as ledger:
        ledger.begin("short", "owner", replace(plan_of(1), max_participations=1))
        (run,) = ledger.runs()
        assert run.plan.max_participations == 1
        with pytest.raises(ConfigError, match=r"with at most 8 participations, this plan needs .* at most 9"):
            ledger.begin("long", "other", replace(plan_of(1), max_participations=9))


def test_declared_runs_must_fit_together_before_the_first(path):
    with pytest.raises(BudgetExceeded, match="the declared runs"):
        new(path, budget=replace(BUDGET, declared=(plan_of(5), plan_of(4))))
    declared = replace(BUDGET, declared=(plan_of(5), plan_of(3)))
    new(path, budget=declared).close()
    assert read_budget(path) == declared


# Attempts are counted


def test_an_attempt_beyond_those_charged_is_refused(path):
    with begun(path, BUDGET, 2) as ledger:
        charge(ledger, 0)
        ledger.reserve(release(1))
        with pytest.raises(BudgetExceeded, match="all of the 2 attempts that the run may take are charged"):
            ledger.reserve(release(1, 1))
        ledger.void("run", 1, 0)
        ledger.reserve(release(1, 1))


def test_a_ledger_that_does_not_count_attempts_is_caught(path, monkeypatch):
    monkeypatch.setattr(LedgerState, "_check_attempt", lambda *_: None)
    with pytest.raises(Failed, match="DID NOT RAISE"):
        test_an_attempt_beyond_those_charged_is_refused(path)


def test_an_attempt_beyond_those_of_its_round_is_refused(path):
    with new(path) as ledger:
        ledger.begin("run", "owner", replace(plan_of(5), attempts_per_round=2))
        for attempt in range(2):
            ledger.reserve(release(0, attempt))
            ledger.void("run", 0, attempt)
        with pytest.raises(BudgetExceeded, match="a round may be tried 2 times"):
            ledger.reserve(release(0, 2))
        ledger.reserve(release(1))


def test_an_attempt_of_a_run_that_has_not_begun_is_refused(path):
    with new(path) as ledger, pytest.raises(LedgerError, match="run run has not begun"):
        ledger.reserve(release(0))


def test_an_attempt_that_tells_more_than_was_charged_is_refused(path):
    with begun(path, BUDGET) as ledger:
        with pytest.raises(BudgetExceeded, match="its noise is"):
            ledger.reserve(release(0, contributors=4))
        ledger.reserve(release(0, contributors=16))
        with pytest.raises(BudgetExceeded, match="its noise is"):
            ledger.commit(release(0, contributors=8))
        ledger.commit(release(0, contributors=16))


def test_a_key_that_has_a_row_is_refused(path):
    """The noise of a second attempt under the same key is fresh, and the row of the first would pay for both."""
    with begun(path, BUDGET) as ledger:
        ledger.reserve(release(0))
        with pytest.raises(LedgerError, match="run run, round 1, attempt 0 has a row: take attempt 1"):
            ledger.reserve(release(0))
        ledger.commit(release(0))
        with pytest.raises(LedgerError, match="has a row: take attempt 1"):
            ledger.reserve(release(0))
        with pytest.raises(LedgerError, match="commit cannot follow commit"):
            ledger.commit(release(0))
        ledger.reserve(release(1))
        ledger.void("run", 1, 0)
        with pytest.raises(LedgerError, match="has a row: take attempt 1"):
            ledger.reserve(release(1))


def test_a_void_attempt_does_not_count(path):
    with begun(path, BUDGET) as ledger:
        ledger.reserve(release(0))
        assert ledger.charged("run") == 1
        row = ledger.void("run", 0, 0)
        assert (row.release, ledger.charged("run"), ledger.releases()) == (None, 0, ())


def test_a_reservation_counts_until_the_commit_says_what_was_released(path):
    with begun(path, BUDGET) as ledger:
        ledger.reserve(release(0))
        assert ledger.releases() == (release(0),)
        row = ledger.commit(release(0, contributors=16))
        assert ledger.releases() == (release(0, contributors=16),)
        assert (row.kind, row.key, row.release) == (RowKind.COMMIT, Key("run", 0, 0), release(0, contributors=16))


def test_participations_are_counted_over_all_runs_and_attempts(path):
    def of(number, attempt, run, *clients):
        return replace(release(number, attempt, run=run), participants=clients)

    with new(path) as ledger:
        for run in ("a", "b"):
            ledger.begin(run, run, plan_of(4))
            ledger.reserve(of(0, 0, run, 1, 2, 3))
            ledger.commit(of(0, 0, run, 1, 3))  # 2 dropped out
            ledger.reserve(of(0, 1, run, 1, 4))  # never finished: its vectors may be outside
            ledger.reserve(of(1, 0, run, 1, 5))
            ledger.void(run, 1, 0)
        expected = {1: 2, 2: 0, 3: 1, 4: 1, 5: 0}
        assert ledger.participations("a", expected) == ledger.participations("b", expected) == expected
    with Ledger.open(path, meter=additive) as ledger:
        assert ledger.participations("a", expected) == expected


def once(number, attempt, *clients):
    return replace(
        release(number, attempt), sampling=CohortSampling(Sampling.ONCE, 1000, 16), participants=clients
    )


def under_once_a_client_has_one_charged_attempt(path):
    """The run was charged for one attempt of each client's, so a second one would cost what nobody has counted."""
    plan = replace(plan_of(4), release=replace(once(0, 0), run=""))
    with new(path) as ledger:
        ledger.begin("run", "owner", plan)
        ledger.reserve(once(0, 0, 1, 2, 3))
        ledger.void("run", 0, 0)
        ledger.reserve(once(0, 1, 1, 2, 3))  # after a void attempt the same block
        ledger.commit(once(0, 1, 1, 3))
        with pytest.raises(LedgerError, match="uses each client once, and client 3 has contributed"):
            ledger.reserve(once(1, 0, 3, 4))
        ledger.reserve(once(1, 0))
        with pytest.raises(LedgerError, match="uses each client once, and client 1 has contributed"):
            ledger.commit(once(1, 0, 1, 4))
        ledger.commit(once(1, 0, 4, 5))
    assert verify(path, additive).charged == {"run": 2}


def test_under_once_a_client_has_one_charged_attempt(path):
    under_once_a_client_has_one_charged_attempt(path)


def test_a_ledger_that_takes_a_block_twice_is_caught(path, monkeypatch):
    monkeypatch.setattr(LedgerState, "_check_block", lambda *_: None)
    with pytest.raises(Failed, match="DID NOT RAISE"):
        under_once_a_client_has_one_charged_attempt(path)


@pytest.mark.parametrize("answer", [math.nan, -1e-9, -math.inf])
def test_a_meter_that_answers_nonsense_refuses_the_run(path, answer):
    with new(path, lambda *_: replace(ADMITTED, composed_epsilon=answer)) as ledger:
        with pytest.raises(LedgerError, match="the meter must return"):
            ledger.begin("run", "owner", plan_of(1))
        assert ledger.charged("run") == 0


def test_what_the_filter_refuses_does_not_begin_and_its_reason_is_told(path):
    refused = replace(ADMITTED, admitted=False, reason="no units are left")
    with (
        new(path, lambda *_: refused) as ledger,
        pytest.raises(BudgetExceeded, match="run run: no units are left"),
    ):
        ledger.begin("run", "owner", plan_of(1))


@pytest.mark.parametrize(
    "change",
    [
        {"adjacency": Adjacency.ZERO_OUT},
        {"sampling": CohortSampling(Sampling.NONE, 1000, 16)},
        {"sampling": CohortSampling(Sampling.FIXED, 2000, 16)},
        {"participants": (1, 2, 4)},
    ],
)
def test_a_commit_protects_what_its_reservation_protects(path, change):
    reserved = replace(release(0), participants=(1, 2, 3))
    with begun(path, BUDGET) as ledger:
        ledger.reserve(reserved)
        with pytest.raises(LedgerError):
            ledger.commit(replace(reserved, **change))
        row = ledger.commit(replace(reserved, participants=(1, 3)))
        assert row.release.participants == (1, 3)


def test_a_reservation_that_names_nobody_can_be_committed_for_anybody(path):
    with begun(path, BUDGET) as ledger:
        ledger.reserve(release(0))
        assert ledger.commit(replace(release(0), participants=(3, 5))).release.participants == (3, 5)


def test_steps_out_of_order_are_refused_and_change_nothing(path):
    with begun(path, BUDGET) as ledger:
        head = ledger.head()
        with pytest.raises(LedgerError, match="commit cannot follow nothing"):
            ledger.commit(release(0))
        with pytest.raises(LedgerError, match="void cannot follow nothing"):
            ledger.void("run", 0, 0)
        assert ledger.head() == head
        charge(ledger, 0)
        with pytest.raises(LedgerError, match="void cannot follow commit"):
            ledger.void("run", 0, 0)
        ledger.reserve(release(1))
        ledger.void("run", 1, 0)
        with pytest.raises(LedgerError, match="commit cannot follow void"):
            ledger.commit(release(1))


def test_what_a_crashed_server_reserved_stays_charged(path):
    with begun(path, BUDGET) as ledger:
        ledger.reserve(release(0))
    with Ledger.open(path, meter=additive) as ledger:
        assert (ledger.charged("run"), ledger.releases()) == (1, (release(0),))
        with pytest.raises(LedgerError, match="has a row: take attempt 1"):
            ledger.reserve(release(0))
        with pytest.raises(LedgerError, match="reserved in epoch 1, which epoch 2 cannot commit"):
            ledger.commit(release(0))
        with pytest.raises(LedgerError, match="cannot void"):
            ledger.void("run", 0, 0)
        charge(ledger, 0)
        assert ledger.charged("run") == 2


def test_a_meter_that_finds_less_than_was_recorded_is_refused(path):
    begun(path, BUDGET, 2).close()
    with pytest.raises(LedgerError, match="not this budget's meter"):
        Ledger.open(path, meter=costly(0.5))
    with Ledger.open(path, meter=costly(2)) as ledger:
        assert ledger.spent() == 0.5


def test_an_older_copy_of_the_ledger_is_refused_by_whoever_saw_a_later_row(path):
    old = path.with_name("old")
    with begun(path, BUDGET) as ledger:
        charge(ledger, 0)
    shutil.copy(path, old)
    with Ledger.open(path, meter=additive) as ledger:
        charge(ledger, 1)
        seen = ledger.head()
    shutil.copy(old, path)
    with Ledger.open(path, meter=additive) as ledger:
        with pytest.raises(LedgerError, match="an older copy"):
            ledger.require_head(seen)
        charge(ledger, 2)
        charge(ledger, 3)
        with pytest.raises(LedgerError, match="another ledger, or a rewritten one"):
            ledger.require_head(seen)


def test_a_run_that_somebody_else_carried_on_is_refused_to_its_copy(path):
    with begun(path, BUDGET) as ledger:
        first = ledger.head()
        charge(ledger, 0)
        ledger.require_own("run", first, 0)  # the same opening: it crashed after this round, say
        with pytest.raises(LedgerError, match="run run: its directory does not know row 3"):
            ledger.require_own("run", None, 0)
        charge(ledger, 1)
        with pytest.raises(LedgerError, match="does not know row 5"):
            ledger.require_own("run", first, 0)  # a round that the checkpoint has not
    with Ledger.open(path, meter=additive) as ledger:
        ledger.require_own("run", first, 1)
        second = ledger.head()
        charge(ledger, 2)
        with pytest.raises(LedgerError, match="does not know row 8"):
            ledger.require_own("run", first, 2)  # written in an opening that this directory knows nothing of
        ledger.require_own("run", second, 2)
        ledger.require_own("other", None, 0)


def test_a_closed_ledger_refuses_everything_that_writes(path):
    ledger = begun(path, BUDGET)
    ledger.close()
    ledger.close()
    for call in (
        lambda: ledger.reserve(release(0)),
        lambda: ledger.void("run", 0, 0),
        lambda: ledger.require_own("run", None, 0),
        lambda: ledger.begin("run", "owner", plan_of(1)),
    ):
        with pytest.raises(LedgerError, match="closed"):
            call()


def test_a_ledger_is_never_overwritten(path):
    new(path).close()
    with pytest.raises(LedgerError, match="already exists"):
        new(path)
    new(path.with_name("other")).close()


@pytest.mark.parametrize("wrong", ["/", "a\0b"])
def test_a_path_that_names_no_file_is_refused(wrong):
    with pytest.raises(LedgerError, match="a ledger must be a file"):
        Ledger.create(wrong, Budget(1.0, 1e-5))


def test_no_ledger_is_created_beside_the_log_of_one_that_is_gone(path):
    with begun(path, BUDGET) as ledger:
        charge(ledger, 0)
        path.unlink()
        with pytest.raises(LedgerError, match="ledger-wal already exists"):
            Store.create(path, first_row(BUDGET))
        ledger.close()


def test_a_creation_that_was_cut_short_is_made_anew(path):
    for suffix in (".draft", ".draft-journal"):
        path.with_name(path.name + suffix).write_bytes(b"half")
    with begun(path, BUDGET) as ledger:
        charge(ledger, 0)
    assert not list(path.parent.glob("*.draft*"))


def test_only_its_owner_can_read_who_took_part(path):
    with begun(path, BUDGET) as ledger:
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
    with Ledger.open(path, meter=additive) as ledger:
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
    """Any order of calls against a model that is a dictionary: same answers and counts, never over the charge."""

    runs = st.sampled_from(["a", "b"])
    small = st.integers(0, 2)
    contributors = st.sampled_from([4, 8, 16])

    @initialize(eighths=st.integers(1, 12), attempts=st.integers(3, 5), per_round=st.integers(1, 3))
    def prepare(self, eighths, attempts, per_round):
        self.directory = tempfile.TemporaryDirectory(dir=MEMORY)
        self.path = Path(self.directory.name) / "ledger"
        self.budget = Fraction(eighths, 8)
        self.plan = replace(plan_of(attempts), rounds=3, attempts_per_round=per_round, delta=0.0)
        self.epoch = 1
        self.begun: set[str] = set()
        self.model: dict[Key, tuple[RowKind, int, int]] = {}  # the last step, its epoch, and contributors
        self.ledger = Ledger.create(self.path, Budget(float(self.budget), 0.0), additive)

    def charged(self, run: str) -> int:
        return sum(key.run == run and state[0] is not RowKind.VOID for key, state in self.model.items())

    def expected(self, kind: RowKind, key: Key, contributors: int) -> type[Exception] | None:
        state, epoch, reserved = self.model.get(key, (None, self.epoch, 0))
        if kind is RowKind.RESERVE:
            tried = sum((each.run, each.round) == (key.run, key.round) for each in self.model)
            if state is not None or key.run not in self.begun or key.attempt != tried:
                return LedgerError
            limit = key.attempt >= self.plan.attempts_per_round or self.charged(key.run) >= self.plan.max_attempts
            return BudgetExceeded if limit or contributors < 8 else None
        if state is not RowKind.RESERVE or epoch != self.epoch:
            return LedgerError
        return BudgetExceeded if kind is RowKind.COMMIT and contributors < reserved else None

    def call(self, kind: RowKind, key: Key, contributors: int) -> None:
        expected = self.expected(kind, key, contributors)
        real = release(key.round, key.attempt, contributors, key.run) if kind is not RowKind.VOID else None
        call = {
            RowKind.RESERVE: lambda: self.ledger.reserve(real),
            RowKind.COMMIT: lambda: self.ledger.commit(real),
            RowKind.VOID: lambda: self.ledger.void(key.run, key.round, key.attempt),
        }[kind]
        if expected is not None:
            with pytest.raises(expected):
                call()
            return
        row = call()
        assert (row.kind, row.key) == (kind, key)
        self.model[key] = (kind, self.epoch, contributors)

    @rule(run=runs)
    def begin(self, run):
        cost = Fraction(self.plan.max_attempts, 8)
        if run not in self.begun and cost * (len(self.begun) + 1) > self.budget:
            with pytest.raises(BudgetExceeded):
                self.ledger.begin(run, run, self.plan)
            return
        self.ledger.begin(run, run, self.plan)
        self.begun.add(run)

    @rule(run=runs, number=small, attempt=small, contributors=contributors)
    def reserve(self, run, number, attempt, contributors):
        self.call(RowKind.RESERVE, Key(run, number, attempt), contributors)

    @rule(run=runs, number=small, attempt=small, contributors=contributors)
    def commit(self, run, number, attempt, contributors):
        self.call(RowKind.COMMIT, Key(run, number, attempt), contributors)

    @rule(run=runs, number=small, attempt=small)
    def void(self, run, number, attempt):
        self.call(RowKind.VOID, Key(run, number, attempt), 0)

    @rule()
    def restart(self):
        self.ledger.close()
        self.ledger = Ledger.open(self.path, meter=additive)
        self.epoch += 1

    @rule()
    def taken_over(self):
        old = self.ledger
        self.ledger = Ledger.open(self.path, take_over=True, meter=additive)
        self.epoch += 1
        with pytest.raises((LedgerError, BudgetExceeded), match=r"another server took over|would be"):
            old.begin("old", "old", replace(self.plan, rounds=1, max_attempts=1))
        old.close()

    @invariant()
    def counts_what_the_model_says(self):
        assert self.ledger.spent() == Fraction(self.plan.max_attempts, 8) * len(self.begun) <= self.budget
        for run in ("a", "b"):
            assert self.ledger.charged(run) == self.charged(run) <= self.plan.max_attempts
        assert len(self.ledger.releases()) == self.charged("a") + self.charged("b")

    def teardown(self):
        if hasattr(self, "ledger"):
            assert verify(self.path, additive).charged == {run: self.charged(run) for run in self.begun}
            self.ledger.close()
            self.directory.cleanup()


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, database=None)
