from dataclasses import replace

import pytest

from d2pfed.accounting import SERVER, Adjacency, Sampling, client_epsilon
from d2pfed.deploy import account as client_account
from d2pfed.deploy.account import ALL, NOTHING, RUNS, ClientAccount, ClientSpending, carried_over, charged
from d2pfed.deploy.config import ClientBudget, init_client, read_client_config
from d2pfed.errors import ConfigError, PeerError
from d2pfed.ledger.client_log import ClientLog, Entry
from d2pfed.plan import MechanismName, Plan, PrivacyTarget, calibrate
from d2pfed.secagg.trust import Consistency

DELTA = 1e-5


def plan_of(sampling: Sampling = Sampling.FIXED, rounds: int = 4, **changes: object) -> Plan:
    target = {
        "dimension": 16,
        "population": 60,
        "cohort_size": 12,
        "rounds": rounds,
        "sampling": sampling,
        "against": SERVER,
        "epsilon": 4.0,
        "delta": DELTA,
        "spare": 0,
        "consistency": Consistency.SIGNED,
    }
    if sampling is Sampling.FIXED:
        target["max_participations"] = 3
    return calibrate(PrivacyTarget(**(target | changes)))


FIXED, NONE, ONCE = plan_of(), plan_of(Sampling.NONE), plan_of(Sampling.ONCE)
BINOMIAL = plan_of(Sampling.NONE, rounds=1, mechanism=MechanismName.BINOMIAL, epsilon=8.0, clip=1.0, dimension=4)


@pytest.fixture
def config(tmp_path):
    init_client(tmp_path / "client", 3, bytes(range(32)), tmp_path / "anchor")
    return read_client_config(tmp_path / "client")


@pytest.fixture
def account(config):
    return ClientAccount(config.log, ClientBudget(100.0, DELTA))


def charge(account: ClientAccount, plan: Plan, run: str = "a run", number: int = 0) -> int:
    return account.charge(plan, run, number, 0, {"roster": "", "draw": number})


def test_every_vector_has_its_row_before_it_is_made(account):
    assert charge(account, FIXED) == 0
    (row,) = account.log.read().bodies(Entry.CHARGE)
    assert row["run"] == "a run"
    (release,) = ClientSpending.of(account.log.read()).releases
    assert (release.run, release.round, release.noise) == (
        "a run",
        0,
        charged(FIXED, "", 0, 0).noise,
    )


def test_the_cap_counts_the_vectors_of_a_run(account):
    assert [charge(account, FIXED, number=number) for number in range(3)] == [0, 1, 2]
    assert charge(account, FIXED, number=3) == FIXED.max_participations == 3
    assert len(ClientSpending.of(account.log.read()).releases) == 3  # zero and noise cost nothing
    assert charge(account, FIXED, "a fresh run") == 0


COLLUSION = plan_of(colluders=0.05, epsilon=2.0)


def spent_by_colluders(config) -> float:
    """What a server and as many colluders as the plan allows for have of a client that fills its budget."""
    account = ClientAccount(config.log, ClientBudget(6.0, DELTA))
    sent = 0
    while charge(account, COLLUSION, f"run {sent}") == 0:
        sent += 1
    left = COLLUSION.noise(COLLUSION.quorum).without(COLLUSION.colluders)
    return client_epsilon([replace(charged(COLLUSION, "", 0, 0), noise=left)] * sent, DELTA)


def test_a_budget_holds_against_the_server_and_the_plans_colluders(config):
    assert COLLUSION.colluders > 1
    assert 3 < spent_by_colluders(config) <= 6


def test_charging_everyones_noise_lets_colluders_exceed_the_budget(config, monkeypatch):
    def with_theirs(plan, run, number, attempt):
        return plan.release(run, number, attempt, (), plan.quorum)

    monkeypatch.setattr(client_account, "charged", with_theirs)
    assert spent_by_colluders(config) > 6


def test_without_noise_of_its_own_a_client_charges_the_noise_of_the_sum(config):
    plan = plan_of(Sampling.NONE, rounds=1, mechanism=MechanismName.SHARED, population=12)
    assert charged(plan, "a run", 0, 0) == plan.release("a run", 0, 0, (), plan.quorum)


def six_runs_stay_within_the_budget(config):
    account = ClientAccount(config.log, ClientBudget(FIXED.epsilon * 1.5, DELTA))
    for run in range(6):
        for number in range(FIXED.rounds):
            charge(account, FIXED, f"run {run}", number)
    releases = ClientSpending.of(config.log.read()).releases
    assert client_epsilon(releases, DELTA) <= account.budget.epsilon
    assert len({release.run for release in releases}) > 1


def test_six_runs_do_not_cost_more_than_the_budget(config):
    """Each run has its own cap, so what bounds them all is the one account of their client."""
    six_runs_stay_within_the_budget(config)


def test_a_separate_account_per_run_exceeds_the_budget(config, monkeypatch):
    monkeypatch.setattr(
        ClientAccount,
        "sent_before",
        lambda _self, _plan, release, history: ClientSpending.of(history).participations(release.run),
    )
    with pytest.raises(AssertionError):
        six_runs_stay_within_the_budget(config)


@pytest.mark.parametrize("plan", [NONE, ONCE], ids=["none", "once"])
def test_where_nothing_is_sampled_a_client_at_its_cap_refuses(account, plan):
    for number in range(plan.max_participations):
        assert charge(account, plan, number=number) == number
    with pytest.raises(PeerError, match="cap or budget is reached"):
        charge(account, plan, number=9)
    with pytest.raises(ConfigError, match=f"has sent {plan.max_participations} vectors in run a run"):
        account.require_below_cap(plan, "a run", account.log.read())
    if plan is ONCE:  # a restored server learns from its answer what the client has begun; it sends nothing more
        account.require_room(plan, "a run", account.log.read())
    else:
        with pytest.raises(ConfigError, match="its plan allows"):
            account.require_room(plan, "a run", account.log.read())


@pytest.mark.parametrize("plan", [FIXED, NONE], ids=["sampled", "not"])
def test_nothing_is_left_at_the_cap_and_once_the_budget_is_spent(config, account, plan):
    for number in range(plan.max_participations):
        assert account.sent_before(plan, charged(plan, "a run", number, 0), account.log.read()) == number
        charge(account, plan, number=number)
    assert account.sent_before(plan, charged(plan, "a run", 9, 0), account.log.read()) is None
    assert account.sent_before(plan, charged(plan, "another run", 0, 0), account.log.read()) == 0
    poor = ClientAccount(
        config.log, ClientBudget(1.001 * ClientSpending.of(config.log.read()).epsilon(DELTA), DELTA)
    )
    assert poor.sent_before(plan, charged(plan, "another run", 0, 0), config.log.read()) is None


def test_a_sampled_client_at_its_cap_takes_part_and_sends_zero(account):
    for number in range(FIXED.max_participations):
        charge(account, FIXED, number=number)
    account.require_below_cap(FIXED, "a run", account.log.read())
    account.require_room(FIXED, "a run", account.log.read())


def test_a_spent_budget_has_the_effect_of_a_reached_cap(config):
    one = client_epsilon([charged(FIXED, "", 0, 0)], DELTA)
    account = ClientAccount(config.log, ClientBudget(1.2 * one, DELTA))
    assert charge(account, FIXED) == 0
    assert charge(account, FIXED, number=1) == FIXED.max_participations
    with pytest.raises(PeerError, match="cap or budget is reached"):
        charge(account, plan_of(Sampling.NONE, epsilon=4.0), number=2)
    assert len(ClientSpending.of(config.log.read()).releases) == 1


def test_a_plan_that_exceeds_the_remaining_budget_is_refused(config):
    account = ClientAccount(config.log, ClientBudget(FIXED.epsilon / 2, DELTA))
    with pytest.raises(ConfigError, match=r"with the 3 more vectors that this plan allows, .* its budget is 2"):
        account.require_room(FIXED, "a run", config.log.read())


def test_the_adjacency_that_a_server_names_changes_nothing(config):
    """Two accounts, one for each adjacency, would let a server spend a budget of 10 twice: truly 28."""
    zero_out = plan_of(adjacency=Adjacency.ZERO_OUT)
    ours = client_epsilon([charged(zero_out, "", 0, 0)] * 3, DELTA)
    assert ours > 1.5 * zero_out.epsilon  # it is charged at its shift of two radii
    account = ClientAccount(config.log, ClientBudget(1.001 * ours, DELTA))
    for number in range(3):
        assert charge(account, zero_out, number=number) == number
    other = plan_of(max_participations=4, epsilon=6.0)
    assert charge(account, other, "the other adjacency") == other.max_participations


def test_one_binomial_round_does_not_lock_a_client_out_of_gaussian_plans(config):
    account = ClientAccount(config.log, ClientBudget(100.0, DELTA))
    assert charge(account, BINOMIAL, "cpSGD") == 0
    mixed = ClientSpending.of(config.log.read())
    assert mixed.epsilon(DELTA) < 100
    account.require_room(FIXED, "a run", config.log.read())
    assert charge(account, FIXED, "gaussian", 1) == 0
    assert ClientSpending.of(config.log.read()).epsilon(DELTA) < 100


def test_two_processes_do_not_both_take_the_last_of_a_budget(config):
    account = ClientAccount(config.log, ClientBudget(100.0, DELTA))
    read, raced = account.log.read, []

    class Raced:
        def __getattr__(self, name):
            return getattr(config.log, name)

        def read(self):
            history = read()
            if not raced:
                raced.append(charge(account, ONCE))
            return history

    with pytest.raises(PeerError, match="cap or budget is reached"):
        charge(ClientAccount(Raced(), account.budget), ONCE)
    assert raced == [0]


def lost(config):
    (config.directory / "log").unlink()
    return config.log


def test_an_adopted_log_counts_as_a_spent_budget_by_default(config, account):
    charge(account, FIXED)
    lost(config).adopt(carried_over(ALL, {}))
    assert ClientSpending.of(config.log.read()).epsilon(DELTA) == float("inf")
    assert charge(account, FIXED, number=1) == FIXED.max_participations
    with pytest.raises(ConfigError, match="epsilon inf"):
        account.require_room(FIXED, "a run", config.log.read())


@pytest.mark.parametrize(("choice", "runs"), [(NOTHING, {}), (RUNS, {"since the backup": FIXED})])
def test_no_later_declaration_brings_back_a_budget_that_is_spent(config, account, choice, runs):
    for carried in (carried_over(ALL, {}), carried_over(choice, runs)):
        (config.anchor / "head").unlink()
        config.log.adopt(carried)
    assert ClientSpending.of(config.log.read()).epsilon(DELTA) == float("inf")
    with pytest.raises(ConfigError, match="epsilon inf"):
        account.require_room(FIXED, "a run", config.log.read())


def test_a_run_that_is_carried_over_counts_wholly(config, account):
    lost(config).adopt(carried_over(RUNS, {"since the backup": FIXED}))
    spending = ClientSpending.of(config.log.read())
    assert spending.participations("since the backup") == FIXED.max_participations
    assert spending.epsilon(DELTA) == client_epsilon([charged(FIXED, "", 0, 0)] * 3, DELTA)


def test_a_declaration_that_nothing_was_lost_is_in_the_log(config, account):
    charge(account, FIXED)
    (config.anchor / "head").unlink()
    config.log.adopt({**carried_over(NOTHING, {}), "why": "moved to another machine"})
    assert len(ClientSpending.of(config.log.read()).releases) == 1
    (body,) = config.log.read().bodies(Entry.DECLARATION)
    assert (body["carried"], body["why"]) == (NOTHING, "moved to another machine")


def test_what_a_log_begins_with_counts_like_a_declaration(tmp_path):
    def opened(name, carried):
        (tmp_path / name).mkdir(mode=0o700)
        log = ClientLog(tmp_path / name, tmp_path / f"anchor of {name}", bytes(32), 3)
        return ClientSpending.of(log.create(carried))

    assert opened("all", carried_over(ALL, {})).is_all_spent
    moved = opened("runs", carried_over(RUNS, {"elsewhere": FIXED}))
    assert moved.participations("elsewhere") == FIXED.max_participations
    assert moved.epsilon(DELTA) == client_epsilon([charged(FIXED, "", 0, 0)] * 3, DELTA)


@pytest.mark.parametrize(("choice", "runs"), [("some", {}), (RUNS, {}), (ALL, {"a run": FIXED})])
def test_a_declaration_carries_over_all_nothing_or_named_runs(choice, runs):
    with pytest.raises(ConfigError, match="may be carried over"):
        carried_over(choice, runs)


SILOS = calibrate(
    PrivacyTarget(
        unit="record",
        records=2000,
        batch_rate=0.05,
        dimension=16,
        population=12,
        rounds=40,
        epsilon=4.0,
        delta=DELTA,
        against=SERVER,
        consistency=Consistency.SIGNED,
    )
)


def test_a_silo_counts_its_records_behind_its_own_coins(config):
    whole = client_epsilon([charged(SILOS, "", 0, 0)] * SILOS.max_participations, DELTA)
    assert SILOS.epsilon < whole < 2 * SILOS.epsilon  # replace-one; the plan states add-remove
    ClientAccount(config.log, ClientBudget(1.001 * whole, DELTA)).require_room(SILOS, "a run", config.log.read())
    with pytest.raises(ConfigError, match="this client would spend epsilon"):
        ClientAccount(config.log, ClientBudget(0.99 * whole, DELTA)).require_room(
            SILOS, "a run", config.log.read()
        )


def test_a_whole_client_vector_ends_a_silos_amplification(config):
    account = ClientAccount(config.log, ClientBudget(2 * SILOS.epsilon, DELTA))
    for number in range(20):
        charge(account, SILOS, number=number)
    with pytest.raises(ConfigError, match="this client would spend epsilon"):
        account.require_room(FIXED, "another run", config.log.read())


def test_one_cheap_vector_of_another_rate_spends_most_of_a_silos_budget(config):
    """Not prevented: a server that has a quorum's help for one cheap run takes the amplification away."""
    cheap = calibrate(
        PrivacyTarget(
            unit="record",
            records=2000,
            batch_rate=0.02,
            dimension=16,
            population=12,
            rounds=1,
            epsilon=0.05,
            delta=DELTA,
            against=SERVER,
            consistency=Consistency.SIGNED,
        )
    )
    account = ClientAccount(config.log, ClientBudget(18.0, DELTA))
    assert client_epsilon([charged(SILOS, "", 0, 0)] * SILOS.max_participations, DELTA) < 5
    assert client_epsilon([charged(cheap, "", 0, 0)], DELTA) < 0.1
    charge(account, SILOS)
    account.require_room(cheap, "another run", config.log.read())
    charge(account, cheap, "another run")
    with pytest.raises(PeerError, match="cap or budget is reached"):
        charge(account, SILOS, number=1)
