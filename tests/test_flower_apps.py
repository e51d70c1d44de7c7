"""A client of several apps and runs: which it serves, whose account is charged, and what one screen tells of it."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Context, RecordDict

from d2pfed.cli import main
from d2pfed.deploy.account import ClientAccount, ClientSpending, charged
from d2pfed.deploy.client import PrivateClient
from d2pfed.deploy.config import APP_SETTING, ClientBudget, read_client_config
from d2pfed.deploy.health import client_status, server_status
from d2pfed.deploy.requests import RequestKind
from d2pfed.errors import ConfigError, TooFewClients
from d2pfed.flower.server import PrivateFedAvg
from d2pfed.ledger.client_log import Entry
from support.enrolled_clients import DIMENSION, directory_of, enrol, make_plan
from support.local_grid import make_grid, make_message, make_strategy, start

ONE, OTHER = "clinic/scans", "clinic/notes"
DELTA = 1e-5


def serve(directory, text):
    """Have every client serve the apps of these tables."""
    for client in range(5):
        with (directory_of(directory, client) / "client.toml").open("a") as file:
            file.write(f"\n{text}\n")


def grid_of(directory, app):
    grid = make_grid(directory)
    for _app, context in grid.apps.values():
        context.node_config[APP_SETTING] = app
    return grid


def train(directory, roster, app, run):
    strategy = replace(make_strategy(make_plan(rounds=1), directory, roster), directory=directory / run)
    start(strategy, grid_of(directory, app))


def spent(directory, app=""):
    return ClientSpending.of(read_client_config(directory_of(directory, 0)).log.read(), app)


def test_an_app_that_is_not_listed_is_refused(tmp_path):
    roster = enrol(tmp_path, 5)
    serve(tmp_path, f'[apps."{ONE}"]')
    train(tmp_path, roster, ONE, "listed")
    for name in (OTHER, ""):
        with pytest.raises(TooFewClients, match=f"serves only the apps {ONE}, got {name or 'no name'}"):
            train(tmp_path, roster, name, "not-listed")


def test_a_transport_that_names_no_app_gets_no_answer_where_apps_are_told_apart(tmp_path):
    enrol(tmp_path, 5)
    serve(tmp_path, f'[apps."{ONE}"]\nepsilon = 1.0')
    client = PrivateClient(
        read_client_config(directory_of(tmp_path, 0)), 100, {}, lambda *_: pytest.fail("trained")
    )
    with pytest.raises(ConfigError, match="does not say which one answers"):
        client.answer(RequestKind.ANNOUNCEMENT, b"")


def test_without_a_list_every_app_is_served_and_none_is_told_apart(tmp_path):
    roster = enrol(tmp_path, 5)
    train(tmp_path, roster, ONE, "one")
    assert read_client_config(directory_of(tmp_path, 0)).serving(ONE).app == ""
    assert all(
        "app" not in body for body in read_client_config(directory_of(tmp_path, 0)).log.read().bodies(Entry.CHARGE)
    )


def test_each_app_has_an_account_of_its_own_and_all_are_in_the_total(tmp_path):
    roster = enrol(tmp_path, 5)
    serve(tmp_path, f'[apps."{ONE}"]\nepsilon = 1e4\n[apps."{OTHER}"]')
    train(tmp_path, roster, ONE, "one")
    alone = spent(tmp_path)
    assert spent(tmp_path, ONE) == alone
    assert spent(tmp_path, OTHER).releases == ()
    train(tmp_path, roster, OTHER, "two")
    assert spent(tmp_path, ONE) == alone
    assert len(spent(tmp_path).releases) == 2
    assert spent(tmp_path).epsilon(DELTA) > alone.epsilon(DELTA)


def test_an_app_keeps_to_its_limit_and_all_apps_to_the_budget(tmp_path):
    roster = enrol(tmp_path, 5)
    serve(tmp_path, f'[apps."{ONE}"]\nepsilon = 2.0\n[apps."{OTHER}"]')
    with pytest.raises(TooFewClients, match=f"the app {ONE}'s budget is 2"):
        train(tmp_path, roster, ONE, "one")
    train(tmp_path, roster, OTHER, "two")
    total = spent(tmp_path).epsilon(DELTA)
    for client in range(5):
        file = directory_of(tmp_path, client) / "client.toml"
        text = file.read_text().replace("[budget]\nepsilon = 1000000.0", f"[budget]\nepsilon = {1.01 * total}")
        file.write_text(text.replace("epsilon = 2.0", ""))
    with pytest.raises(TooFewClients, match="its budget is"):  # which the other app has used up
        train(tmp_path, roster, ONE, "three")


def test_limits_of_apps_do_not_add_up_to_more_than_the_budget(tmp_path):
    roster = enrol(tmp_path, 5)
    serve(tmp_path, f'[apps."{ONE}"]\nepsilon = 1e4\n[apps."{OTHER}"]\nepsilon = 1e4')
    train(tmp_path, roster, ONE, "one")
    config = read_client_config(directory_of(tmp_path, 0)).serving(OTHER)
    budget = ClientBudget(1.01 * spent(tmp_path).epsilon(DELTA), DELTA)
    account = replace(ClientAccount.of(config), budget=budget)
    with pytest.raises(ConfigError, match="its budget is"):
        account.require_room(make_plan(rounds=1), "two", config.log.read())
    assert (
        account.sent_before(make_plan(rounds=1), charged(make_plan(rounds=1), "two", 0, 0), config.log.read())
        is None
    )


def test_an_apps_own_rules_take_the_place_of_the_clients(tmp_path):
    roster = enrol(tmp_path, 5, least_cohort=50)
    serve(tmp_path, f'[apps."{ONE}"]\npolicy = {{ least_cohort = 3 }}\n[apps."{OTHER}"]')
    train(tmp_path, roster, ONE, "one")
    with pytest.raises(TooFewClients, match="cohort must be at least 50"):
        train(tmp_path, roster, OTHER, "two")


def test_a_run_is_answered_by_the_app_that_it_was_announced_to(tmp_path):
    """The server must not choose whose account a vector is charged to."""
    roster, grid = enrol(tmp_path, 5), grid_of(tmp_path, ONE)
    serve(tmp_path, f'[apps."{ONE}"]\n[apps."{OTHER}"]')

    def reroute(client, message):
        if len(grid.sent) > 5:  # after the announcements
            grid.apps[100 + client][1].node_config[APP_SETTING] = OTHER
        return message

    grid.going = reroute
    with pytest.raises(TooFewClients):  # nobody answers, attempt after attempt
        start(make_strategy(make_plan(rounds=1), tmp_path, roster), grid)
    refusals = [message.error.reason for message in grid.received if message.has_error()]
    assert refusals
    assert all(f"was announced to an app other than {OTHER}" in text for text in refusals)
    assert spent(tmp_path).releases == ()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[apps."a"]\nepsilon = 0.0', "an app's epsilon must be positive, got 0.0"),
        ('[apps."a"]\nepsilon = true', "epsilon must be of type float"),
        ('[apps."a"]\nbudget = 3.0', "budget"),
        ('[apps."a"]\npolicy = { least_cohort = 2.5 }', "least_cohort must be of type int"),
        ("[apps]\na = 3", "a must be of type dict"),
    ],
)
def test_odd_tables_of_apps_are_refused(tmp_path, text, complaint):
    enrol(tmp_path, 5)
    serve(tmp_path, text)
    with pytest.raises(ConfigError, match=complaint):
        read_client_config(directory_of(tmp_path, 0))


def app_run(directory, **config):
    asked = {"d2pfed-directory": str(directory), "num-server-rounds": 1} | config
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=asked)
    strategy = PrivateFedAvg.for_target({"epsilon": 5000.0}, {"params": np.zeros(DIMENSION, np.float32)}, context)
    grid = make_grid(directory)
    for _app, node in grid.apps.values():
        node.run_config.update(asked)
    start(replace(strategy, message_factory=make_message), grid)
    return strategy.directory.name


def test_a_finished_run_is_followed_by_a_new_one(tmp_path):
    roster = enrol(tmp_path, 5)
    (tmp_path / "roster").write_bytes(roster.data)
    (tmp_path / "authority").write_text(roster.roster.authority.hex())
    assert app_run(tmp_path) == "run"
    one = spent(tmp_path).epsilon(DELTA)
    assert app_run(tmp_path) == "run-2"
    assert server_status(tmp_path).facts["run"] == "run-2"
    assert (tmp_path / "run" / "ledger.sqlite").exists()
    assert (tmp_path / "run-2" / "ledger.sqlite").exists()
    # The clients have one account over both, and the server remembers their positions over both.
    assert len({release.run for release in spent(tmp_path).releases}) == 2
    assert spent(tmp_path).epsilon(DELTA) > one
    assert {file.parent for file in tmp_path.glob("**/positions-*")} == {tmp_path}
    # One that has not come to its end goes on; one that is named goes on, begins or stays done under its name.
    (tmp_path / "run-2" / "summary.json").unlink()
    assert app_run(tmp_path) == "run-2"
    assert app_run(tmp_path, **{"d2pfed-run": "run"}) == "run"
    assert len(spent(tmp_path).releases) == 2
    assert app_run(tmp_path, **{"d2pfed-run": "winter"}) == "winter"
    assert app_run(tmp_path) == "run-3"
    assert server_status(tmp_path, "winter").facts["state"] == "complete"
    with pytest.raises(ConfigError, match="a run's name must be letters"):
        app_run(tmp_path, **{"d2pfed-run": "../elsewhere"})


def test_one_screen_shows_what_a_client_has_agreed_to_and_spent(tmp_path, capsys, monkeypatch):
    roster = enrol(tmp_path, 5)
    serve(tmp_path, f'[apps."{ONE}"]\nepsilon = 1e4\npolicy = {{ requests = ["training"] }}\n[apps."{OTHER}"]')
    train(tmp_path, roster, ONE, "one")
    monkeypatch.setattr("sys.argv", ["d2pfed", "client", "status", str(directory_of(tmp_path, 0))])
    main()
    lines = capsys.readouterr().out.splitlines()
    text = " ".join(" ".join(lines).split())
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 32
    rules = ("least cohort 3", "protocols pairwise/lattice/standing", f"{ONE} vectors 1", "limit 10000")
    figures = ("requests training", "last round 1", "last failed never", "last failure none", "roster serial 1")
    for fact in (*rules, *figures, "roster expires", "epsilon budget 1e6"):
        assert fact in text, fact
    found = client_status(read_client_config(directory_of(tmp_path, 0))).facts
    assert found["apps"][ONE]["spent"] == found["epsilon_spent"]
    assert found["apps"][OTHER]["spent"] == 0
